"""The published WikiText-103 model at its full size, 285 million random numbers: built, saved, loaded, and read with.

Everything happens in a process of its own, whose memory is the thing measured. The bound of 2.5 GB above the weights
is far below what a (queries x keys x width) tensor, or a second copy of the weights, would need.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = Path(__file__).parents[1] / "fixtures" / "txl_configs" / "transfo-xl-wt103-config.json"
GIGABYTE = 1e9

pytestmark = pytest.mark.slow

SCRIPT = """
import json, resource, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLMemory

config_file, folder, step = sys.argv[1:]


class BuiltTensors(TorchDispatchMode):
    numel = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # views of the weights are no tensors that were built
            if isinstance(leaf, torch.Tensor) and leaf._base is None and leaf.data_ptr() not in weights:
                where = leaf.untyped_storage().data_ptr()
                BuiltTensors.numel[where] = max(leaf.numel(), BuiltTensors.numel.get(where, 0))
        return result


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


torch.manual_seed(0)
if step == "build":
    with open(config_file, encoding="utf-8") as file:
        config = TransfoXLConfig.from_dict(json.load(file))
    model = TransfoXLForCausalLM(config)
    model.save_pretrained(folder)
    print(json.dumps({"parameters": sum(parameter.numel() for parameter in model.parameters())}))
else:
    model = TransfoXLForCausalLM.from_pretrained(folder).eval()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.sum()  # brings memory-mapped weights in
    config = model.config
    heads = (1, config.n_head, config.mem_len, config.d_head)
    memory = TransfoXLMemory(config, stores="keys_values", batch_size=1)
    for layer in memory.layers:
        layer.replace({"keys": torch.randn(heads), "values": torch.randn(heads)})
    memory.rows.shortest = config.mem_len
    ids = torch.randint(0, config.vocab_size, (1, 129))
    with torch.no_grad(), BuiltTensors():
        if step == "score":
            output = model(ids[:, :128], cache=memory, shift_labels=ids[:, 1:], return_logits=False)
        else:
            output = model(ids[:, :128], cache=memory)
    # what the memory keeps for all layers is one tensor too
    kept = {tensor.untyped_storage().data_ptr() for layer in memory.layers for tensor in layer.tensors.values()}
    largest = max(numel for where, numel in BuiltTensors.numel.items() if where not in kept)
    finite = output.losses.isfinite().all() if step == "score" else output.logits.isfinite().all()
    print(json.dumps({
        "finite": bool(finite), "stored": memory.stored_length, "largest": largest,
        "above_weights": peak() - weight_bytes, "vocabulary": config.vocab_size,
    }))
"""


def run(step: str, folder: Path) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(CONFIG), str(folder), step], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, saved: built once for all tests here."""
    path = tmp_path_factory.mktemp("wt103")
    assert run("build", path)["parameters"] == PARAMETERS
    return path


def parameters() -> int:
    """Counted by hand from the published sizes; tied weights once."""
    d_model, d_inner, heads, layers = 1024, 4096, 16 * 64, 18
    bounds, widths = [0, 20000, 40000, 200000, 267735], [1024, 256, 64, 16]
    sizes = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    tables = sum(size * width for size, width in zip(sizes, widths, strict=True))
    projections = sum(d_model * width for width in widths) + d_model * widths[0]  # the softmax head has its own
    softmax = bounds[-1] + 3 * 1024 + 3  # biases, cluster rows and their biases
    attention = 3 * d_model * heads + 2 * d_model * heads + 2 * heads + 2 * d_model  # q k v, o and r, u and v, norm
    feed_forward = 2 * d_model * d_inner + d_inner + d_model + 2 * d_model
    return tables + projections + softmax + layers * (attention + feed_forward)


PARAMETERS = parameters()


def test_the_published_model_is_built_and_saved_once_over(folder: Path) -> None:
    """Tied weights are written once."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 4 * PARAMETERS <= size < 4 * PARAMETERS + 100_000


def test_scoring_on_a_full_memory_needs_little_and_builds_no_tokens_by_vocabulary(folder: Path) -> None:
    measured = run("score", folder)
    assert measured["finite"] and measured["stored"] == 1600
    assert measured["above_weights"] < 2.5 * GIGABYTE
    assert measured["largest"] < 128 * measured["vocabulary"]


def test_logits_on_a_full_memory_need_little(folder: Path) -> None:
    measured = run("logits", folder)
    assert measured["finite"] and measured["stored"] == 1600
    assert measured["above_weights"] < 2.5 * GIGABYTE
    # they are such a tensor
    assert measured["largest"] >= 128 * measured["vocabulary"]
