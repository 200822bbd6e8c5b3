"""What is written to disk and what comes back: every value, every tie, nothing else. Report ids are public issues'."""

from __future__ import annotations

import copy
import io
import json
import logging as python_logging
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

from hf_txl import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLLMHeadModel,
    TransfoXLMemory,
    TransfoXLModel,
)
from hf_txl.remote_code_transfo_xl import AUTO_MAP
from tests.helpers import assert_close
from tests.model.tiny_models import TINY, random_ids, slow_log_probabilities, t0_model, tiny_config, tiny_model

LOG_PROBABILITIES = 1e-5

# the shapes that checkpoints come in: published WikiText-103, One Billion Word and enwik8, and two rarer ones
KINDS: dict[str, dict[str, Any]] = {
    "wt103": {"vocab_size": 53, "cutoffs": [11, 23, 40], "div_val": 2},
    "lm1b": {"vocab_size": 53, "cutoffs": [11, 23], "div_val": 2, "proj_same_dim": False, "tie_projs": [False] * 3},
    "enwik8": {"vocab_size": 29, "cutoffs": [], "div_val": 1, "untie_r": False},
    "equally wide clusters": {"d_embed": 12, "div_val": 1, "tie_projs": [False, True, False]},
    "nothing tied": {"tie_word_embeddings": False, "proj_share_all_but_first": False},
    "only projections tied": {"tie_word_embeddings": False},
}
CLASSES = {
    "model": TransfoXLModel,
    "language model": TransfoXLForCausalLM,
    "classifier": TransfoXLForSequenceClassification,
}


@contextmanager
def nothing_is_said(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No warning, neither Python's nor a logged one, within this context."""
    caplog.clear()
    logging.enable_propagation()
    try:
        with warnings.catch_warnings(record=True) as warned, caplog.at_level(python_logging.WARNING):
            warnings.simplefilter("always")
            yield
    finally:
        logging.disable_propagation()
    said = [record.getMessage() for record in caplog.records if record.levelno >= python_logging.WARNING]
    assert not said, said
    ours = [str(warning.message) for warning in warned if "tie" in str(warning.message).lower()]
    assert not ours, ours


def load(model_class: Any, folder: Path, **options: Any) -> Any:
    """Load and insist that the library found nothing to say."""
    model, report = model_class.from_pretrained(folder, output_loading_info=True, **options)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], f"{problem}: {report[problem]}"
    return model


def saved_keys(folder: Path) -> dict[str, list[int]]:
    """Names and shapes in the file."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def assert_same_parameters(actual: nn.Module, expected: nn.Module) -> None:
    theirs = dict(expected.named_parameters(remove_duplicate=False))
    ours = dict(actual.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter), name


def shared_names(model: nn.Module) -> set[frozenset[str]]:
    """Groups of names that stand for one parameter."""
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


# ---- names -----------------------------------------------------------------------------------------------------


def published_shapes(fields: dict[str, Any]) -> dict[str, list[int]]:
    """Names and shapes of the published checkpoints (transformers 2 to 4), spelt out from the settings.

    Shared position biases stand once, under the base model's name, of the two under which they were published.
    """
    vocab_size, d_model, cutoffs = fields["vocab_size"], fields["d_model"], fields["cutoffs"]
    d_embed, div_val = fields.get("d_embed", d_model), fields["div_val"]
    n_head, d_head, d_inner = fields["n_head"], fields["d_head"], fields["d_inner"]
    ends = [*cutoffs, vocab_size]
    sizes = [end - start for start, end in zip([0, *cutoffs], ends, strict=True)]
    shapes: dict[str, list[int]] = {}
    tables = [(vocab_size, d_embed)] if div_val == 1 else [(n, d_embed // div_val**i) for i, n in enumerate(sizes)]
    for index, (rows, width) in enumerate(tables):
        shapes[f"transformer.word_emb.emb_layers.{index}.weight"] = [rows, width]
        shapes[f"crit.out_layers.{index}.weight"] = [rows, width]
        shapes[f"crit.out_layers.{index}.bias"] = [rows]
        if width != d_model or (div_val > 1 and fields.get("proj_same_dim", True)):
            shapes[f"transformer.word_emb.emb_projs.{index}"] = [d_model, width]
    for cluster in range(len(sizes)):
        width = d_embed // div_val**cluster
        if width != d_model or (div_val > 1 and fields.get("proj_same_dim", True)):
            shapes[f"crit.out_projs.{cluster}"] = [d_model, width]
    if cutoffs:
        shapes["crit.cluster_weight"] = [len(cutoffs), d_embed]
        shapes["crit.cluster_bias"] = [len(cutoffs)]
    for layer in range(fields["n_layer"]):
        prefix = f"transformer.layers.{layer}"
        shapes[f"{prefix}.dec_attn.qkv_net.weight"] = [3 * n_head * d_head, d_model]
        shapes[f"{prefix}.dec_attn.o_net.weight"] = [d_model, n_head * d_head]
        shapes[f"{prefix}.dec_attn.r_net.weight"] = [n_head * d_head, d_model]
        shapes[f"{prefix}.pos_ff.CoreNet.0.weight"] = [d_inner, d_model]
        shapes[f"{prefix}.pos_ff.CoreNet.0.bias"] = [d_inner]
        shapes[f"{prefix}.pos_ff.CoreNet.3.weight"] = [d_model, d_inner]
        shapes[f"{prefix}.pos_ff.CoreNet.3.bias"] = [d_model]
        for sublayer in ("dec_attn", "pos_ff"):
            shapes[f"{prefix}.{sublayer}.layer_norm.weight"] = [d_model]
            shapes[f"{prefix}.{sublayer}.layer_norm.bias"] = [d_model]
    for name in ("r_w_bias", "r_r_bias"):
        if fields.get("untie_r", True):
            for layer in range(fields["n_layer"]):
                shapes[f"transformer.layers.{layer}.dec_attn.{name}"] = [n_head, d_head]
        else:
            shapes[f"transformer.{name}"] = [n_head, d_head]
    return shapes


def tied_names(fields: dict[str, Any]) -> set[frozenset[str]]:
    """Pairs that are one tensor, spelt out from the settings."""
    div_val, buckets = fields["div_val"], range(len(fields["cutoffs"]) + 1)
    shapes = published_shapes(fields)
    ties = set()
    if fields.get("tie_word_embeddings", True):
        for table in buckets if div_val > 1 else [0]:
            ties.add(frozenset({f"crit.out_layers.{table}.weight", f"transformer.word_emb.emb_layers.{table}.weight"}))
    share = fields.get("proj_share_all_but_first", True)
    tie_projs = fields.get("tie_projs", [False] + [share] * len(fields["cutoffs"]))
    sources: dict[str, set[str]] = {}
    for bucket in buckets:
        if tie_projs[bucket] and f"crit.out_projs.{bucket}" in shapes:
            source = f"transformer.word_emb.emb_projs.{bucket if div_val > 1 else 0}"
            sources.setdefault(source, {source}).add(f"crit.out_projs.{bucket}")
    return ties | {frozenset(names) for names in sources.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_published_names_and_shapes(kind: str, tmp_path: Path) -> None:
    fields = {**TINY, **KINDS[kind]}
    model = tiny_model(**KINDS[kind])
    expected = published_shapes(fields)
    assert {name: list(tensor.shape) for name, tensor in model.state_dict().items()} == expected
    # on disk a tied tensor stands once, under the embedding's name
    model.save_pretrained(tmp_path)
    dropped = {name for group in tied_names(fields) for name in group if name.startswith("crit.")}
    assert saved_keys(tmp_path) == {name: shape for name, shape in expected.items() if name not in dropped}


def test_base_model_and_classifier_have_the_published_names() -> None:
    inner = {
        name.removeprefix("transformer.")
        for name in published_shapes({**TINY, **KINDS["wt103"]})
        if name.startswith("transformer.")
    }
    assert set(tiny_model(TransfoXLModel, **KINDS["wt103"]).state_dict()) == inner
    classifier = tiny_model(TransfoXLForSequenceClassification, num_labels=3, **KINDS["wt103"])
    assert set(classifier.state_dict()) == {f"transformer.{name}" for name in inner} | {"score.weight"}
    assert list(classifier.score.weight.shape) == [3, 16]


# ---- values ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill_with_constants(model: nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        # exact in every dtype, and nothing that an initialisation gives
        parameter.fill_(3 + index / 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_parameter_comes_back_bit_equal(name: str, kind: str, tmp_path: Path) -> None:
    """C96: no initialisation runs over loaded values."""
    model = CLASSES[name](tiny_config(**KINDS[kind]))
    fill_with_constants(model)
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)
    loaded = load(CLASSES[name], tmp_path)
    assert_same_parameters(loaded, model)
    assert shared_names(loaded) == shared_names(model)
    assert not loaded.training


def test_only_the_missing_tensor_is_initialised(tmp_path: Path) -> None:
    """C96: in the same module as tensors that are in the file."""
    model = tiny_model(d_head=64)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = "transformer.layers.1.dec_attn.r_w_bias"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = TransfoXLForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {missing}
    new = dict(loaded.named_parameters())[missing]
    assert 0.01 < new.std() < 0.03
    for name, parameter in model.named_parameters():
        if name != missing:
            assert torch.equal(dict(loaded.named_parameters())[name], parameter), name


LARGE_ENOUGH = {"vocab_size": 900, "cutoffs": [300, 600], "d_model": 64, "n_head": 8, "d_head": 32, "d_inner": 96}


@pytest.mark.parametrize("init", ["normal", "uniform"])
def test_initial_values_have_the_configured_statistics(init: str) -> None:
    """C96: mean and spread of every parameter, those of parameter dictionaries included."""
    scales = {"init_std": 0.05, "proj_init_std": 0.03, "init_range": 0.07}
    model = TransfoXLForCausalLM(tiny_config(init=init, untie_r=False, **LARGE_ENOUGH, **scales))
    uniform_std = 2 * 0.07 / math.sqrt(12)
    for name, parameter in model.named_parameters():
        values, number = parameter.detach().double(), parameter.numel()
        mean, std = 0.0, 0.05 if init == "normal" else uniform_std
        if "_projs." in name:
            std = 0.03
        elif name.endswith("layer_norm.weight"):
            mean, std = 1.0, 0.05
        elif name.endswith("bias") and "_r_bias" not in name and "_w_bias" not in name:
            assert (values == 0).all(), name
            continue
        # five standard errors
        assert abs(values.mean() - mean) < 5 * std / math.sqrt(number), name
        assert abs(values.std() - std) < 5 * std / math.sqrt(2 * number), name
        if init == "uniform" and std == uniform_std:
            assert values.abs().max() <= 0.07, name


def test_initialising_again_gives_new_values_of_the_same_kind() -> None:
    model = TransfoXLForSequenceClassification(tiny_config(num_labels=3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    # what the library has initialised it does not initialise twice
    for module in model.modules():
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = False
    model.init_weights()
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.abs().max() < 2, name


@pytest.mark.parametrize("cutoffs", [[10, 50, 80], []])
def test_the_first_loss_is_that_of_knowing_nothing(cutoffs: list[int]) -> None:
    """C42: tied the wrong way round, it was forty times as large."""
    model = t0_model(cutoffs=cutoffs, div_val=2 if cutoffs else 1)
    ids = random_ids(8, 100, vocab_size=99)
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    # uniform over 10 words and 3 clusters, then uniform within a cluster
    sizes = [40, 30, 19] if cutoffs else []
    expected = math.log(13) + sum(n / 99 * math.log(n) for n in sizes) if cutoffs else math.log(99)
    assert abs(loss - expected) < 0.5


# ---- ties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("shape", [{}, {"div_val": 1, "d_embed": 12}])
def test_ties_are_those_of_the_configuration_and_survive(
    shape: dict[str, Any], tie: bool, share: bool, tmp_path: Path
) -> None:
    """C42: identity, not equality, after building, loading, casting, copying."""
    changes = {**shape, "tie_word_embeddings": tie, "proj_share_all_but_first": share}
    expected = tied_names({**TINY, **changes})
    model = tiny_model(**changes)
    assert shared_names(model) == expected
    model.save_pretrained(tmp_path)
    loaded = load(TransfoXLForCausalLM, tmp_path)
    assert shared_names(loaded) == expected
    assert shared_names(loaded.to(torch.float64)) == expected
    assert shared_names(copy.deepcopy(loaded)) == expected
    loaded.tie_weights()
    assert shared_names(loaded) == expected
    assert shared_names(load(AutoModelForCausalLM, tmp_path, dtype=torch.bfloat16)) == expected


def test_ties_are_given_as_a_mapping() -> None:
    """C99: a list of names crashes in transformers 5."""
    model = tiny_model()
    ties = model._tied_weights_keys
    assert isinstance(ties, dict) and isinstance(model.all_tied_weights_keys, dict)
    assert {frozenset(pair) for pair in model.all_tied_weights_keys.items()} == tied_names(TINY)


@pytest.mark.parametrize("kind", KINDS)
def test_saving_tied_tensors_is_quiet_and_stores_them_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C43"""
    model = tiny_model(**KINDS[kind])
    with nothing_is_said(caplog):
        model.save_pretrained(tmp_path)
        loaded = load(TransfoXLForCausalLM, tmp_path)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert stored == numbers
    # and no second copy under another name of a file
    files = [path for path in tmp_path.iterdir() if path.suffix in (".safetensors", ".bin", ".pt")]
    assert [path.name for path in files] == ["model.safetensors"]
    assert files[0].stat().st_size < 4 * numbers + 16_384
    ids = random_ids(2, 7, vocab_size=29)
    with torch.no_grad():
        assert_close("logits of the loaded model", loaded(ids).logits, model(ids).logits, 1e-5)


def test_the_trainer_saves_tied_tensors_at_step_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """C43"""
    model = t0_model()
    block = {"input_ids": list(range(12)), "labels": list(range(12))}
    arguments = TrainingArguments(
        tmp_path, max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no"
    )
    Trainer(model=model, args=arguments, train_dataset=[block] * 8).train()
    with nothing_is_said(caplog):
        loaded = load(AutoModelForCausalLM, tmp_path / "checkpoint-1")
    assert_same_parameters(loaded, model)
    assert shared_names(loaded) == shared_names(t0_model())
    ids = random_ids(1, 9, vocab_size=99)
    with torch.no_grad():
        assert_close("logits of the loaded model", loaded(ids).logits, model.eval()(ids).logits, 1e-5)


# ---- from one class to another ---------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_class", [TransfoXLModel, AutoModel])
@pytest.mark.parametrize("kind", KINDS)
def test_the_base_model_loads_from_a_language_model(kind: str, auto_class: Any, tmp_path: Path) -> None:
    """C93: nothing is left random."""
    language_model = tiny_model(**KINDS[kind])
    language_model.save_pretrained(tmp_path)
    model, report = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is TransfoXLModel
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert_same_parameters(model, language_model.transformer)
    ids = random_ids(2, 7, vocab_size=29)
    with torch.no_grad():
        hidden_states = language_model(ids, output_hidden_states=True).hidden_states
        assert_close("hidden states", model(ids).last_hidden_state, hidden_states[-1], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_model_from_a_base_model_has_exactly_the_head_new(kind: str, tmp_path: Path) -> None:
    """C93, the other way round: what is tied to the embedding is not missing."""
    model = tiny_model(TransfoXLModel, **KINDS[kind])
    model.save_pretrained(tmp_path)
    language_model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    fields = {**TINY, **KINDS[kind]}
    tied = set().union(*tied_names(fields)) if tied_names(fields) else set()
    head = {name for name in published_shapes(fields) if name.startswith("crit.")}
    assert set(report["missing_keys"]) == head - tied
    assert not report["unexpected_keys"]
    assert_same_parameters(language_model.transformer, model)
    assert shared_names(language_model) == tied_names(fields)


def test_a_classifier_from_a_language_model_has_exactly_the_score_new(tmp_path: Path) -> None:
    language_model = tiny_model()
    language_model.save_pretrained(tmp_path)
    classifier, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, output_loading_info=True
    )
    assert type(classifier) is TransfoXLForSequenceClassification
    assert set(report["missing_keys"]) == {"score.weight"}
    assert classifier.score.weight.shape == (3, 16)
    assert_same_parameters(classifier.transformer, language_model.transformer)


# ---- nothing is derived that could be lost ---------------------------------------------------------------------


def on_the_meta_device(model: Any, folder: Path) -> Any:
    """Built without memory, then given memory that holds anything, then the weights."""
    with torch.device("meta"):
        built = TransfoXLForCausalLM(copy.deepcopy(model.config))
    built = built.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*built.parameters(), *built.buffers()):
            tensor.fill_(torch.nan)
    built.load_state_dict(model.state_dict())
    built.tie_weights()
    return built.eval()


def pickled(model: Any, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved_whole(model: Any, folder: Path) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def from_disk(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return load(AutoModelForCausalLM, folder)


def with_little_memory(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return load(AutoModelForCausalLM, folder, low_cpu_mem_usage=True)


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "from_pretrained": from_disk,
    "low_cpu_mem_usage": with_little_memory,
    "meta device": on_the_meta_device,
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "pickle": pickled,
    "torch.save": saved_whole,
    "there and back in float64": lambda model, folder: copy.deepcopy(model).double().float(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_made_in_another_way_computes_the_same(way: str, tmp_path: Path) -> None:
    """C97: against the slow reference, far enough for positions to matter."""
    model = tiny_model(mem_len=30)
    ids = random_ids(1, 40)
    (expected,) = slow_log_probabilities(model, [ids])
    # a first use must leave nothing behind that a copy could carry away
    with torch.no_grad():
        before = model(ids).logits
    other = WAYS[way](model, tmp_path)
    with torch.no_grad():
        actual = other(ids).logits
    assert_close("log-probabilities", actual, expected, LOG_PROBABILITIES)
    assert torch.equal(actual, before)
    assert shared_names(other) == shared_names(model)


def position_table(model: Any, num_positions: int) -> torch.Tensor:
    """Sinusoids that reach the layers for the distances `num_positions - 1 … 0`."""
    tables = []

    def record(module: nn.Module, args: Any) -> None:
        tables.append(args[2].embeddings)

    handle = model.transformer.layers[0].register_forward_pre_hook(record)
    with torch.no_grad():
        model(torch.zeros(1, num_positions, dtype=torch.long), use_cache=False)
    handle.remove()
    return tables[0][:num_positions]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("by", ["to", "from_pretrained"])
def test_the_sinusoid_is_computed_in_float32_whatever_the_dtype(by: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """C97: in bfloat16 the distances above 256 would run together."""
    model = tiny_model(mem_len=0)
    if by == "to":
        model = model.to(dtype)
    else:
        model.save_pretrained(tmp_path)
        model = load(AutoModelForCausalLM, tmp_path, dtype=dtype)
    length, width = 700, model.config.d_model
    distance = torch.arange(length - 1, -1, -1, dtype=torch.float64)[:, None]
    angle = distance / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    expected = torch.cat([angle.sin(), angle.cos()], dim=-1)
    table = position_table(model, length)
    assert table.dtype == dtype
    # float32 holds an angle of 700 to 3e-5; then one rounding to the dtype of the model
    tolerance = 1e-4 + (torch.finfo(dtype).eps / 2 if dtype in (torch.bfloat16, torch.float16) else 0)
    assert_close("sinusoid", table, expected, tolerance)


def test_nothing_in_a_model_is_a_buffer() -> None:
    """C97: a buffer that no file holds comes back as raw memory."""
    for model_class in CLASSES.values():
        assert not list(tiny_model(model_class).buffers())


def test_stored_frequencies_of_old_checkpoints_are_ignored_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C97: old files hold `inv_freq`, here with values that would be wrong."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.pos_emb.inv_freq"] = torch.full((8,), 7.0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with nothing_is_said(caplog):
        loaded = load(TransfoXLForCausalLM, tmp_path)
    ids = random_ids(1, 9)
    with torch.no_grad():
        assert_close("logits of the loaded model", loaded(ids).logits, model(ids).logits, 1e-5)


# ---- user code -------------------------------------------------------------------------------------------------


class GatedLanguageModel(TransfoXLForCausalLM):
    """What a user may write: one more module, and its own forward."""

    def __init__(self, config: TransfoXLConfig) -> None:
        super().__init__(config)
        self.gate = nn.Linear(config.d_model, config.d_model)
        self.post_init()

    def forward(self, input_ids: Any = None, cache: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        cache = past_key_values if cache is None else cache
        output = super().forward(input_ids, cache=cache, output_hidden_states=True, **kwargs)
        output.loss = self.gate(output.hidden_states[-1]).mean()
        return output


def test_a_subclass_in_user_code_saves_and_loads(tmp_path: Path) -> None:
    """C99"""
    model = GatedLanguageModel(tiny_config())
    fill_with_constants(model)
    model.save_pretrained(tmp_path)
    loaded = load(GatedLanguageModel, tmp_path)
    assert_same_parameters(loaded, model)
    assert shared_names(loaded) == tied_names(TINY)
    assert loaded(random_ids(1, 3)).loss.shape == ()


def test_a_subclass_in_user_code_loads_our_checkpoint_and_initialises_its_own_module(tmp_path: Path) -> None:
    """C99"""
    model = tiny_model(d_model=32)
    model.save_pretrained(tmp_path)
    loaded, report = GatedLanguageModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"gate.weight", "gate.bias"}
    assert 0.01 < loaded.gate.weight.std() < 0.03 and not loaded.gate.bias.any()
    ids = random_ids(1, 5)
    with torch.no_grad():
        assert_close("logits of the loaded model", loaded(ids).logits, model(ids).logits, 1e-5)
    memory = TransfoXLMemory(loaded.config)
    generated = loaded.generate(ids, cache=memory, do_sample=False, max_new_tokens=3)
    assert generated.tolist() == model.generate(ids, cache=TransfoXLMemory(model.config), max_new_tokens=3).tolist()


def test_the_old_class_name_is_the_same_class(tmp_path: Path) -> None:
    assert TransfoXLLMHeadModel is TransfoXLForCausalLM
    tiny_model().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["TransfoXLForCausalLM"]


# ---- Auto classes ----------------------------------------------------------------------------------------------


def test_auto_classes_give_ours(tmp_path: Path) -> None:
    """C100"""
    tiny_model().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is TransfoXLConfig
    assert type(load(AutoModelForCausalLM, tmp_path)) is TransfoXLForCausalLM
    assert type(AutoModel.from_pretrained(tmp_path)) is TransfoXLModel
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path)) is TransfoXLForSequenceClassification
    config = AutoConfig.for_model("transfo-xl", **TINY)
    assert type(AutoModelForCausalLM.from_config(config)) is TransfoXLForCausalLM


def test_saving_twice_to_two_places_gives_the_same_files(tmp_path: Path) -> None:
    """C100: nothing stale, an `auto_map` of the folder alone, no sign of where it was loaded from."""
    tiny_model(memory_init="zeros").save_pretrained(tmp_path / "first")
    model = load(AutoModelForCausalLM, tmp_path / "first")
    model.save_pretrained(tmp_path / "second")
    model.save_pretrained(tmp_path / "third")
    names = {path.name for path in (tmp_path / "first").iterdir()}
    assert {"config.json", "model.safetensors"} <= names
    for folder in ("second", "third"):
        assert {path.name for path in (tmp_path / folder).iterdir()} == names
        for name in names:
            assert (tmp_path / folder / name).read_bytes() == (tmp_path / "first" / name).read_bytes(), name
    config = json.loads((tmp_path / "third" / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    assert str(tmp_path) not in json.dumps(config)
    assert config["model_type"] == "transfo-xl" and config["memory_init"] == "zeros"


WITHOUT_IMPORT = """
import sys
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    assert "hf_txl" not in sys.modules
    print("refused:", error)
"""


@pytest.mark.parametrize(
    ("saves_code", "message"), [(True, "`trust_remote_code=True`"), (False, "model type `transfo-xl`")]
)
def test_without_the_import_the_error_is_that_of_the_library(tmp_path: Path, saves_code: bool, message: str) -> None:
    """C100: in a process of its own, since here the package is registered."""
    tiny_model(save_code=saves_code).save_pretrained(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_IMPORT, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert "refused:" in run.stdout and message in run.stdout


def test_settings_given_while_loading_override_the_file(tmp_path: Path) -> None:
    tiny_model(same_length=False).save_pretrained(tmp_path)
    model = load(AutoModelForCausalLM, tmp_path, mem_len=9, same_length=True)
    assert (model.config.mem_len, model.config.same_length, model.config.sliding_window) == (9, True, 9)
    assert AutoConfig.from_pretrained(tmp_path).mem_len == 5


# ---- old folders -----------------------------------------------------------------------------------------------


def write_as_transformers_4_did(model: Any, folder: Path, zip_format: bool = True) -> None:
    """`config.json` with the old keys, and `pytorch_model.bin` with every name, tied and shared ones twice."""
    config = model.config
    names = (
        "vocab_size cutoffs d_model d_embed n_head d_head d_inner div_val pre_lnorm n_layer mem_len clamp_len "
        "same_length untie_r tie_projs proj_share_all_but_first layer_norm_epsilon"
    ).split()
    old = {name: getattr(config, name) for name in names} | {
        "architectures": ["TransfoXLLMHeadModel"],
        "attn_type": 0,
        "model_type": "transfo-xl",
        "sample_softmax": -1,
        "tie_weight": True,
        "ext_len": 0,
        "tgt_len": 128,
        "dropout": 0.0,
        "dropatt": 0.0,
        "eos_token_id": 0,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 250}},
    }
    (folder / "config.json").write_text(json.dumps(old), encoding="utf-8")
    state = dict(model.state_dict())
    state["transformer.pos_emb.inv_freq"] = 1 / 10000 ** (torch.arange(0, 16, 2.0) / 16)
    if not config.untie_r:
        for layer in range(config.n_layer):
            for name in ("r_w_bias", "r_r_bias"):
                state[f"transformer.layers.{layer}.dec_attn.{name}"] = state[f"transformer.{name}"]
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zip_format)


@pytest.mark.parametrize("zip_format", [True, False])
@pytest.mark.parametrize("untie_r", [True, False])
def test_an_old_folder_loads_and_is_saved_anew(
    untie_r: bool, zip_format: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(untie_r=untie_r, memory_init="zeros")
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    write_as_transformers_4_did(model, old, zip_format)
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    loaded = load(AutoModelForCausalLM, old)
    assert_same_parameters(loaded, model)
    # a file without the key was written where zeros came before the first token
    assert loaded.config.memory_init == "zeros"
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    loaded.save_pretrained(new)
    assert not list(new.glob("*.bin"))
    again = load(AutoModelForCausalLM, new)
    ids = random_ids(2, 7)
    (expected,) = slow_log_probabilities(model, [ids])
    for one in (loaded, again):
        with torch.no_grad():
            assert_close("log-probabilities", one(ids).logits, expected, LOG_PROBABILITIES)
    assert again.config.tgt_len == 128


# ---- files that want to be run ---------------------------------------------------------------------------------


class Trap:
    """Unpickled by a careless loader, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@pytest.mark.parametrize("options", [{}, {"weights_only": False}], ids=["default", "asked to run code"])
@pytest.mark.parametrize("writer", ["torch.save", "torch.save, old format", "pickle"])
def test_weights_that_would_run_code_are_refused(writer: str, options: dict[str, Any], tmp_path: Path) -> None:
    """C90: on no path, not even where the library would."""
    sprung = tmp_path / "sprung"
    folder = tmp_path / "folder"
    folder.mkdir()
    tiny_config().save_pretrained(folder)
    content = {**tiny_model().state_dict(), "transformer.extra": Trap(sprung)}
    if writer == "pickle":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"extra": Trap(sprung)}))
    else:
        torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization="old" not in writer)
    for model_class in (AutoModelForCausalLM, AutoModel, AutoModelForSequenceClassification):
        with pytest.raises(Exception) as error:  # noqa: PT011  the library's class differs between releases
            model_class.from_pretrained(folder, **options)
        assert not isinstance(error.value, AssertionError)
        assert not sprung.exists()
    # the trap is a trap
    with (folder / "pytorch_model.bin").open("rb") as file:
        if writer == "pickle":
            pickle.load(file)
        else:
            torch.load(file, weights_only=False)
    assert sprung.exists()


def test_pickles_that_lie_beside_a_model_are_never_opened(tmp_path: Path) -> None:
    """C90: such as the vocabularies of old folders."""
    sprung, folder = tmp_path / "sprung", tmp_path / "folder"
    model = tiny_model()
    model.save_pretrained(folder)
    for name in ("vocab.pkl", "vocab.bin", "corpus.bin", "cache.pt", "pytorch_model.bin", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    loaded = load(AutoModelForCausalLM, folder)
    assert_same_parameters(loaded, model)
    assert type(AutoConfig.from_pretrained(folder)) is TransfoXLConfig
    assert not sprung.exists()


# ---- options of the library ------------------------------------------------------------------------------------


def test_a_model_in_several_files_comes_back(tmp_path: Path) -> None:
    model = tiny_model(**KINDS["wt103"])
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    stored = sum(tensor.numel() for file in files for tensor in load_file(file).values())
    assert stored == sum(parameter.numel() for parameter in model.parameters())
    loaded = load(AutoModelForCausalLM, tmp_path)
    assert_same_parameters(loaded, model)
    assert shared_names(loaded) == shared_names(model)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_a_device_map_changes_nothing_on_one_device(device_map: Any, tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = load(AutoModelForCausalLM, tmp_path, device_map=device_map)
    assert_same_parameters(loaded, model)
    ids = random_ids(2, 6)
    memory = TransfoXLMemory(loaded.config)
    with torch.no_grad():
        assert_close("logits of the loaded model", loaded(ids).logits, model(ids).logits, 1e-5)
        loaded(ids, cache=memory)
        expected = slow_log_probabilities(model, [ids, ids])[1]
        assert_close("second segment", loaded(ids, cache=memory).logits, expected, LOG_PROBABILITIES)


def test_layers_that_are_left_on_disk_compute_the_same(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    device_map = {
        "transformer.word_emb": "cpu",
        "transformer.layers.0": "cpu",
        "transformer.layers.1": "disk",
        "transformer.drop": "cpu",
        "crit": "cpu",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "offload")
    assert loaded.transformer.layers[1].pos_ff.layer_norm.weight.is_meta
    ids = random_ids(2, 6)
    expected = slow_log_probabilities(model, [ids, ids])
    memory = TransfoXLMemory(loaded.config)
    with torch.no_grad():
        for index in range(2):
            actual = loaded(ids, cache=memory).logits
            assert_close(f"segment {index}", actual, expected[index], LOG_PROBABILITIES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "float64", "auto"])
def test_the_dtype_asked_for_is_the_dtype_of_every_parameter(dtype: Any, tmp_path: Path) -> None:
    model = tiny_model().to(torch.bfloat16 if dtype == "auto" else torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load(AutoModelForCausalLM, tmp_path, dtype=dtype)
    expected = {"auto": torch.bfloat16, "float64": torch.float64}.get(dtype, dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {expected}
    assert loaded.dtype == expected
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], parameter.to(expected)), name


def test_a_saved_generation_configuration_comes_back(tmp_path: Path) -> None:
    model = tiny_model(eos_token_id=0)
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path)
    loaded = load(AutoModelForCausalLM, tmp_path)
    assert loaded.generation_config.max_new_tokens == 3
    assert loaded.generation_config.eos_token_id == 0
