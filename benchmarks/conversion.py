"""Converts checkpoints of the size of the published WikiText-103 model from each format, and measures time and memory.

The weights are random, 285 million of them (1.14 GB in float32), written as each original code would have: a pickled
module, a TensorFlow bundle, a folder of transformers 4. Memory is what all processes of the conversion hold together
at most (proportional set size, mapped pages of files included), as a multiple of the checkpoint.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import psutil
import torch
from harness import write_results
from torch import nn
from tqdm.auto import tqdm

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
from hf_txl.conversion.convert import wanted_shapes
from hf_txl.conversion.key_rules import FORMATS
from hf_txl.conversion.state_dict import State, to_source

LENGTHS = {"mem_len": 1600, "clamp_len": 1000, "same_length": True}
# what the formats differ in; everything else is the published large model
DIALECTS = {"pytorch": {"untie_r": False}, "tensorflow": {}, "transformers": {}}


def random_weights(config: TransfoXLConfig) -> State:
    generator = torch.Generator().manual_seed(0)
    shapes = wanted_shapes(TransfoXLForCausalLM, config)
    return {
        name: torch.empty(shape).normal_(0, 0.02, generator=generator)
        for name, shape in tqdm(shapes.items(), desc="weights", leave=False)
    }


def write_pytorch(folder: Path, config: TransfoXLConfig, tensors: State) -> Path:
    """A whole module, as `train.py` saves it: its class lives in a module `mem_transformer`."""
    code = types.ModuleType("mem_transformer")
    sys.modules[code.__name__] = code

    def module_class(name: str) -> type[nn.Module]:
        created = type(name, (nn.Module,), {"__module__": code.__name__, "__qualname__": name})
        setattr(code, name, created)
        return created

    model, part = module_class("MemTransformerLM")(), module_class("DecoderLayer")
    tied = {f"crit.out_layers.{i}.weight": f"word_emb.emb_layers.{i}.weight" for i in range(config.num_clusters + 1)}
    tied |= {f"crit.out_projs.{i}": f"word_emb.emb_projs.{i}" for i in range(1, config.num_clusters + 1)}
    parameters = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
    for name in [*tensors, *tied]:
        owner = model
        *path, last = name.split(".")
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, part())
            owner = owner._modules[step]
        owner.register_parameter(last, parameters[tied.get(name, name)])
    for name, value in {**config.to_dict(), **LENGTHS, "n_token": config.vocab_size, "attn_type": 0}.items():
        if name in ("n_token", "n_layer", "n_head", "d_model", "d_embed", "d_head", "attn_type", *LENGTHS):
            setattr(model, name, value)
    model.word_emb.cutoffs = [*config.cutoffs, config.vocab_size]
    model.word_emb.div_val = config.div_val
    model.layers._modules["0"].dec_attn.pre_lnorm = False
    torch.save(model, folder / "model.pt")
    return folder / "model.pt"


def write_tensorflow(folder: Path, config: TransfoXLConfig, tensors: State) -> Path:
    """In a process of its own, which gives its memory back."""
    torch.save(tensors, folder / "tensors.pt")
    program = (
        "import sys, torch, tensorflow as tf\n"
        "tensors = torch.load(sys.argv[1], mmap=True)\n"
        "values = [tf.constant(tensor.contiguous().numpy()) for tensor in tensors.values()]\n"
        "tf.raw_ops.SaveV2(prefix=sys.argv[2], tensor_names=list(tensors), shape_and_slices=[''] * len(values), "
        "tensors=values)\n"
    )
    prefix = folder / "model.ckpt"
    subprocess.run([sys.executable, "-c", program, folder / "tensors.pt", prefix], check=True, capture_output=True)
    (folder / "tensors.pt").unlink()
    return prefix


def write_transformers(folder: Path, config: TransfoXLConfig, tensors: State) -> Path:
    config.save_pretrained(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


WRITERS = {"pytorch": write_pytorch, "tensorflow": write_tensorflow, "transformers": write_transformers}


def convert(source: Path, output: Path) -> dict[str, float]:
    """Run the command; seconds, and the most memory that it and the processes it starts hold at once."""
    options = [f"--set={name}={json.dumps(value)}" for name, value in LENGTHS.items()]
    command = [sys.executable, "-m", "hf_txl.cli", "convert", str(source), str(output), *options]
    started, peak = time.perf_counter(), 0
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            held = 0
            try:
                for each in [root, *root.children(recursive=True)]:
                    held += each.memory_full_info().pss
            except psutil.Error:
                continue
            peak = max(peak, held)
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {process.returncode}.")
    return {"seconds": time.perf_counter() - started, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=WRITERS, default=list(WRITERS))
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints; default: a temporary folder")
    arguments = parser.parse_args()
    results = {}
    for format in tqdm(arguments.formats, desc="formats"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
            folder = Path(temporary)
            config = TransfoXLConfig(**DIALECTS[format])
            source = WRITERS[format](folder, config, to_source(FORMATS[format], config, random_weights(config)))
            size = sum(path.stat().st_size for path in folder.iterdir())
            measured = convert(source, folder / "converted")
            results[format] = {
                **{name: round(value, 1) for name, value in measured.items()},
                "checkpoint_bytes": size,
                "peak_over_checkpoint": round(measured["peak_bytes"] / size, 2),
            }
    write_results(__file__, {"unit": "seconds and bytes of one conversion", "formats": results})


if __name__ == "__main__":
    main()
