"""A weight may be anywhere until its module is called: on the disk, in other memory, or in another process's part."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from hf_txl import TransfoXLForCausalLM
from tests.ecosystem.modules import (
    CONFIGURATIONS,
    MODES,
    SOME_MODELS,
    TRAINING,
    assert_all_close,
    read,
    read_all,
    small_model,
)

accelerate = pytest.importorskip("accelerate")

walk = pytest.mark.parametrize("model_class, name", SOME_MODELS)


@walk
def test_every_module_on_the_disk(model_class: Any, name: str, tmp_path: Path) -> None:
    model = small_model(model_class, name)
    expected = {mode: read(model, mode) for mode in MODES}
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    names = {key: owners[id(parameter)] for key, parameter in model.named_parameters(remove_duplicate=False)}
    for number, (module_name, module) in enumerate(model.named_modules()):
        if not module.state_dict() or module_name == "":
            continue
        device_map = complete_map(model, {module_name: "disk"})
        folder = str(tmp_path / str(number))
        offloaded = accelerate.dispatch_model(copy.deepcopy(model), device_map, offload_dir=folder)
        own = [
            name for name in offloaded.get_submodule(module_name).state_dict() if names[f"{module_name}.{name}"] == 1
        ]
        # what two modules share stays where the other one is
        assert all(offloaded.get_parameter(f"{module_name}.{name}").is_meta for name in own)
        for mode in (MODES[1], TRAINING):
            assert_all_close(read(offloaded, mode), expected[mode], f"`{module_name}` on the disk, {mode}:")


def complete_map(model: nn.Module, device_map: dict[str, str]) -> dict[str, str]:
    """The rest on the CPU: modules, and parameters that belong to none of them."""
    complete = dict(device_map)

    def add(prefix: str, module: nn.Module) -> None:
        if prefix in device_map:
            return
        if not any(name.startswith(prefix) for name in device_map):
            complete[prefix] = "cpu"
            return
        for name, _ in module.named_parameters(recurse=False):
            complete[f"{prefix}{'.' if prefix else ''}{name}"] = "cpu"
        for name, child in module.named_children():
            add(f"{prefix}{'.' if prefix else ''}{name}", child)

    add("", model)
    return complete


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_loading_with_a_device_map(name: str, tmp_path: Path) -> None:
    """Layers and softmax on the disk from `from_pretrained`: one pass, memories, losses, generation."""
    model = small_model(TransfoXLForCausalLM, name)
    model.save_pretrained(tmp_path / "model")
    last_layer = f"transformer.layers.{model.config.n_layer - 1}"
    device_map = complete_map(model, {last_layer: "disk", "crit": "disk", "transformer.word_emb": "disk"})
    offloaded = TransfoXLForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "offloaded")
    )
    assert any(parameter.is_meta for parameter in offloaded.get_submodule(last_layer).parameters())
    assert_all_close(read_all(offloaded), read_all(model))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_cpu_offload(name: str) -> None:
    model = small_model(TransfoXLForCausalLM, name)
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    # a projection that two clusters share is offloaded once
    assert sum(not parameter.is_meta for parameter in offloaded.parameters()) <= 1
    assert_all_close(read_all(offloaded), read_all(model))


def test_resizing_what_is_offloaded_is_refused() -> None:
    model = small_model(TransfoXLForCausalLM, "plain")
    expected = read(model, MODES[0])
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="is a Parameter on the meta device; resize before"):
        model.resize_token_embeddings(45)
    assert_all_close(read(model, MODES[0]), expected)


def test_disk_offload(tmp_path: Path) -> None:
    model = small_model(TransfoXLForCausalLM, "clusters")
    offloaded = accelerate.disk_offload(copy.deepcopy(model), str(tmp_path), execution_device=torch.device("cpu"))
    assert_all_close(read_all(offloaded), read_all(model))


def test_cpu_offload_with_hook() -> None:
    model = small_model(TransfoXLForCausalLM, "one table")
    offloaded, hook = accelerate.cpu_offload_with_hook(copy.deepcopy(model), execution_device="cpu")
    assert_all_close(read_all(offloaded), read_all(model))
    hook.offload()
    assert_all_close(read_all(offloaded), read_all(model))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("part", ["layers", "layers and softmax", "every linear layer"])
@pytest.mark.parametrize("name", ["clusters", "one table", "pre_lnorm"])
def test_fully_shard(name: str, part: str, one_process: None) -> None:
    """FSDP2: outside the forward of the module that they are sharded with, weights are tensors of another class."""
    from torch.distributed.fsdp import fully_shard

    model = small_model(TransfoXLForCausalLM, name)
    sharded = copy.deepcopy(model)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    linear = [module for key, module in sharded.named_modules() if isinstance(module, nn.Linear) and "crit" not in key]
    units: list[Any] = {
        "layers": [*sharded.transformer.layers],
        # tables that both share are sharded once
        "layers and softmax": [*sharded.transformer.layers, [sharded.transformer.word_emb, sharded.crit]],
        "every linear layer": linear,
    }[part]
    for unit in [*units, sharded]:
        fully_shard(unit, mesh=mesh)
    for mode in MODES:
        assert_all_close(read(sharded, mode), read(model, mode), str(mode))
    for each in (sharded, model):
        each.zero_grad()
        sum(value.sum() for value in read(each, TRAINING).values()).backward()
    for (key, parameter), expected in zip(sharded.named_parameters(), model.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), key
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, atol=1e-4, rtol=1e-4)
