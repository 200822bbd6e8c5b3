#!/bin/sh
# Builds the environment of the last release that held Transformer-XL, beside which `run.py` measures ours: a few
# minutes, about 1 GB. PYTHON chooses the interpreter (3.11 to 3.13).
#
#   benchmarks/peers.sh [FOLDER]        default: .venv-legacy in the repository
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-"$here/.venv-legacy"}
"${PYTHON:-python3}" -m venv "$folder"
# the same torch as ours, so that the peers differ in nothing else
"$folder/bin/python" -m pip install --quiet "$(grep '^torch==' "$here/constraints.txt")"
"$folder/bin/python" -m pip install --quiet 'transformers==4.57.6' 'sacremoses'
"$folder/bin/python" -c 'import torch, transformers; print("transformers", transformers.__version__, "torch", torch.__version__)'
