"""Folders that transformers 4 wrote, loaded through the Auto classes, against the outputs of transformers 4.35.2."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLMemory
from tests.helpers import FIXTURES, assert_close
from tests.parity.package_runs import STORAGES, assert_tied_as_original, compare_memory, log_probabilities
from tests.parity.recorded_cases import (
    ATTENTIONS,
    HIDDEN_STATES,
    LOG_PROBABILITIES,
    LOSSES,
    Recorded,
    case_names,
    legacy_case,
)

LANGUAGE_MODELS = ["legacy-div1", "legacy-no-cutoff", "legacy-wt103"]
CLASSIFIER = "legacy-seqcls"

# Recorded, but not compared.
NOT_OFFERED = {
    "head_mask.mask": "transformers 5 has no `head_mask`",
    "head_mask.prediction_scores": "transformers 5 has no `head_mask`",
}
# Row of `legacy-seqcls` whose pad lies between words. The legacy class takes the position before the FIRST pad for the
# last one; here it is the rightmost real token, so that padding on either side changes nothing.
ROW_WITH_A_PAD_IN_THE_MIDDLE = 4

GENERATIONS = {
    "greedy": {"num_beams": 1},
    "beam4": {"num_beams": 4},
    "greedy_norepeat": {"num_beams": 1, "no_repeat_ngram_size": 2},
    "beam4_norepeat": {"num_beams": 4, "no_repeat_ngram_size": 2},
}
STARTS = {"zero": "zeros", "empty": "empty"}


def load(recorded: Recorded) -> Any:
    return AutoModelForCausalLM.from_pretrained(recorded.folder)


def memory_after_the_first_segment(model: Any, recorded: Recorded, storage: str = "auto") -> TransfoXLMemory:
    memory = TransfoXLMemory(model.config, stores=storage)
    model(recorded.expected["zero.seg0.input_ids"], cache=memory)
    return memory


def test_every_case_and_tensor_is_compared_or_listed_with_a_reason() -> None:
    assert case_names("hf_legacy") == sorted([*LANGUAGE_MODELS, CLASSIFIER])
    compared = ("zero.seg", "empty.seg", "loss", "loss_masked", "call.", "generate.", "inputs_embeds.")
    for name in LANGUAGE_MODELS:
        left = {key for key in legacy_case(name).expected if not key.startswith(compared)}
        assert left <= set(NOT_OFFERED)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, CLASSIFIER])
def test_folder_loads_completely(name: str) -> None:
    recorded = legacy_case(name)
    auto = AutoModelForSequenceClassification if name == CLASSIFIER else AutoModelForCausalLM
    model, report = auto.from_pretrained(recorded.folder, output_loading_info=True)
    expected_class = TransfoXLForSequenceClassification if name == CLASSIFIER else TransfoXLForCausalLM
    assert type(model) is expected_class
    assert not model.training
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], f"{kind}: {report[kind]}"
    named = dict(model.named_parameters(remove_duplicate=False))
    assert named.keys() == recorded.state.keys()
    for key, tensor in recorded.state.items():
        assert torch.equal(named[key], tensor), key


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_weights_are_shared_as_the_configuration_says(name: str) -> None:
    recorded = legacy_case(name)
    assert_tied_as_original(load(recorded), recorded)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, CLASSIFIER])
def test_configuration_keeps_the_meaning_of_the_file(name: str) -> None:
    recorded = legacy_case(name)
    config = AutoConfig.from_pretrained(recorded.folder)
    assert type(config) is TransfoXLConfig
    for field, value in recorded.fields.items():
        # the recorded case runs without dropout
        if field not in ("dropout", "dropatt"):
            assert getattr(config, field) == value, field


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@torch.no_grad()
def test_base_model_loads_from_a_language_model_folder(name: str) -> None:
    recorded = legacy_case(name)
    model, report = AutoModel.from_pretrained(recorded.folder, output_loading_info=True)
    assert not report["missing_keys"]
    memory = TransfoXLMemory(model.config)
    model(recorded.expected["zero.seg0.input_ids"], cache=memory)
    hidden = model(recorded.expected["zero.seg1.input_ids"], cache=memory).last_hidden_state
    expected = recorded.expected[f"call.hidden_states.{model.config.n_layer}"]
    assert_close(f"{name} hidden states", hidden, expected, **HIDDEN_STATES)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("start", list(STARTS))
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@torch.no_grad()
def test_segments_with_memory_equal_transformers_4(name: str, start: str, storage: str) -> None:
    recorded = legacy_case(name)
    model = load(recorded)
    memory = TransfoXLMemory(model.config, memory_init=STARTS[start], stores=storage)
    assert recorded.num_segments(start) >= 2
    for index in range(recorded.num_segments(start)):
        segment = recorded.segment(index, start)
        output = model(recorded.expected[f"zero.seg{index}.input_ids"], cache=memory)
        case = f"{name} {start} segment {index}"
        scores = log_probabilities(output)
        assert_close(f"{case} log-probabilities", scores, segment["prediction_scores"], LOG_PROBABILITIES)
        compare_memory(case, memory, segment, model.config.n_layer)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@torch.no_grad()
def test_a_segment_continues_from_recorded_mems(name: str, storage: str) -> None:
    recorded = legacy_case(name)
    model = load(recorded)
    before, segment = recorded.segment(0, "zero"), recorded.segment(1, "zero")
    mems = [before[f"mems.{layer}"] for layer in range(model.config.n_layer)]
    memory = TransfoXLMemory.from_mems(model.config, mems, stores=storage)
    scores = log_probabilities(model(segment["input_ids"], cache=memory))
    assert_close(f"{name} log-probabilities", scores, segment["prediction_scores"], LOG_PROBABILITIES)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@torch.no_grad()
def test_without_a_cache_a_call_is_the_first_segment(name: str) -> None:
    recorded = legacy_case(name)
    segment = recorded.segment(0, "zero")
    scores = log_probabilities(load(recorded)(segment["input_ids"]))
    assert_close(f"{name} log-probabilities", scores, segment["prediction_scores"], LOG_PROBABILITIES)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@torch.no_grad()
def test_hidden_states_and_attentions_equal_transformers_4(name: str, storage: str) -> None:
    recorded = legacy_case(name)
    model = load(recorded)
    memory = memory_after_the_first_segment(model, recorded, storage)
    output = model(
        recorded.expected["zero.seg1.input_ids"],
        cache=memory,
        output_hidden_states=True,
        output_attentions=True,
    )
    assert len(output.hidden_states) == model.config.n_layer + 1
    assert len(output.attentions) == model.config.n_layer
    for index, hidden in enumerate(output.hidden_states):
        expected = recorded.expected[f"call.hidden_states.{index}"]
        assert_close(f"{name} hidden states {index}", hidden, expected, **HIDDEN_STATES)
    for index, attentions in enumerate(output.attentions):
        expected = recorded.expected[f"call.attentions.{index}"]
        assert_close(f"{name} attentions {index}", attentions, expected, ATTENTIONS)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@torch.no_grad()
def test_losses_equal_transformers_4_in_token_order(name: str) -> None:
    recorded = legacy_case(name)
    model = load(recorded)
    memory = memory_after_the_first_segment(model, recorded)
    input_ids = recorded.expected["zero.seg1.input_ids"]
    output = model(input_ids, cache=memory, labels=input_ids)
    losses = output.losses[:, :-1]
    assert_close(f"{name} losses", losses, recorded.expected["loss.losses_in_order"], LOSSES)
    assert torch.equal(output.losses[:, -1], torch.zeros(len(input_ids)))
    assert_close(f"{name} loss", output.loss, recorded.expected["loss.loss"], LOSSES)
    # the legacy model returns the same numbers cluster by cluster
    as_returned = recorded.expected["loss.losses_as_returned"]
    assert_close(f"{name} sorted losses", losses.flatten().sort()[0], as_returned.flatten().sort()[0], LOSSES)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@torch.no_grad()
def test_losses_with_ignored_labels_equal_transformers_4_in_token_order(name: str) -> None:
    recorded = legacy_case(name)
    model = load(recorded)
    memory = memory_after_the_first_segment(model, recorded)
    labels = recorded.expected["loss_masked.labels"]
    output = model(recorded.expected["zero.seg1.input_ids"], cache=memory, labels=labels)
    targets = labels[:, 1:]
    counted = targets != -100
    scores = recorded.expected["zero.seg1.prediction_scores"][:, :-1]
    in_order = -scores.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * counted
    losses = output.losses[:, :-1]
    assert_close(f"{name} losses", losses, in_order, LOSSES)
    assert torch.equal(losses == 0, ~counted)
    assert_close(f"{name} loss", output.loss, recorded.expected["loss_masked.loss"], LOSSES)
    as_returned = recorded.expected["loss_masked.losses_as_returned"]
    assert_close(f"{name} sorted losses", losses.flatten().sort()[0], as_returned.flatten().sort()[0], LOSSES)


@torch.no_grad()
def test_given_embeddings_are_used_as_they_are() -> None:
    recorded = legacy_case("legacy-wt103")
    output = load(recorded)(inputs_embeds=recorded.expected["inputs_embeds.inputs"])
    expected = recorded.expected["inputs_embeds.prediction_scores"]
    assert_close("log-probabilities", log_probabilities(output), expected, LOG_PROBABILITIES)


@pytest.mark.parametrize("state", ["memory", "library cache"])
@pytest.mark.parametrize("generation", list(GENERATIONS))
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_generation_equals_transformers_4(name: str, generation: str, state: str) -> None:
    recorded = legacy_case(name)
    model = load(recorded)
    if state == "library cache" and not model.config.same_length:
        pytest.skip("the library's caches know a sliding window only, which `same_length=False` is not for the prompt")
    cache = {"cache": TransfoXLMemory(model.config)} if state == "memory" else {}
    prompt = recorded.expected["generate.prompt"]
    ids = model.generate(prompt, do_sample=False, max_new_tokens=40, **GENERATIONS[generation], **cache)
    assert ids.tolist() == recorded.expected[f"generate.{generation}"].tolist()


@pytest.fixture(scope="module")
def classifier() -> Any:
    return AutoModelForSequenceClassification.from_pretrained(legacy_case(CLASSIFIER).folder)


AGREEING_ROWS = [row for row in range(6) if row != ROW_WITH_A_PAD_IN_THE_MIDDLE]


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_classification_equals_transformers_4(classifier: Any, storage: str) -> None:
    expected = legacy_case(CLASSIFIER).expected
    memory = TransfoXLMemory(classifier.config, stores=storage)
    first = classifier(expected["input_ids"], cache=memory)
    rows = AGREEING_ROWS
    assert_close("logits", first.logits[rows], expected["logits"][rows], LOG_PROBABILITIES)
    compare_memory("first call", memory, expected, classifier.config.n_layer)
    second = classifier(expected["second.input_ids"], cache=memory)
    assert_close("logits of the second call", second.logits, expected["second.logits"], LOG_PROBABILITIES)
    single = classifier(expected["single.input_ids"])
    assert_close("logits of one row", single.logits, expected["single.logits"], LOG_PROBABILITIES)


@torch.no_grad()
def test_a_pad_in_the_middle_does_not_end_a_row(classifier: Any) -> None:
    expected = legacy_case(CLASSIFIER).expected
    row = ROW_WITH_A_PAD_IN_THE_MIDDLE
    output = classifier(expected["input_ids"], output_hidden_states=True)
    difference = (output.logits[row] - expected["logits"][row]).abs().max()
    assert difference > 0.1
    # what the legacy class returns is the score of the position before that pad
    pad = expected["input_ids"][row].tolist().index(classifier.config.pad_token_id)
    before_pad = classifier.score(output.hidden_states[-1][row, pad - 1])
    assert_close("logits before the pad", before_pad, expected["logits"][row], LOG_PROBABILITIES)
    at_the_end = classifier.score(output.hidden_states[-1][row, -1])
    assert_close("logits of the last token", output.logits[row], at_the_end, LOG_PROBABILITIES)


@torch.no_grad()
def test_classification_loss_equals_transformers_4(classifier: Any) -> None:
    expected = legacy_case(CLASSIFIER).expected
    # the recorded loss is the mean over all rows, so the row that differs is taken out of both
    per_row = torch.nn.functional.cross_entropy(expected["logits"], expected["labels"], reduction="none")
    assert_close("recorded loss", per_row.mean(), expected["loss"], LOSSES)
    rows = AGREEING_ROWS
    output = classifier(expected["input_ids"][rows], labels=expected["labels"][rows])
    assert_close("loss", output.loss, per_row[rows].mean(), LOSSES)


PUBLISHED = {
    "transfo-xl-wt103-config.json": {
        "vocab_size": 267735,
        "cutoffs": [20000, 40000, 200000],
        "tie_projs": [False, True, True, True],
        "n_layer": 18,
        "mem_len": 1600,
        "clamp_len": 1000,
        "same_length": True,
        "div_val": 4,
        "memory_init": "zeros",
        "untie_r": True,
        "ext_len": 0,
    },
    "wt103_large.json": {
        "vocab_size": 267735,
        "cutoffs": [20000, 40000, 200000],
        "tie_projs": [False, True, True, True],
        "n_layer": 18,
        "mem_len": 384,
        "div_val": 4,
        "untie_r": True,
    },
    "lm1b_large.json": {
        "vocab_size": 793472,
        "cutoffs": [60000, 100000, 640000],
        "tie_projs": [False, False, False, False],
        "n_layer": 24,
        "div_val": 4,
        "proj_same_dim": False,
    },
    "enwiki8_large.json": {"vocab_size": 204, "cutoffs": [], "div_val": 1, "n_layer": 24, "d_head": 128},
    "text8_large.json": {"vocab_size": 27, "cutoffs": [], "div_val": 1, "n_layer": 24, "d_inner": 3072},
}


@pytest.mark.parametrize("file", list(PUBLISHED))
def test_published_configurations_load_and_lose_nothing(file: str, tmp_path: Any) -> None:
    folder = FIXTURES / "txl_configs"
    assert {path.name for path in folder.glob("*.json")} == set(PUBLISHED)
    published = json.loads((folder / file).read_text(encoding="utf-8"))
    config = TransfoXLConfig.from_dict(published)
    for field, value in PUBLISHED[file].items():
        assert getattr(config, field) == value, field
    # keys that mean nothing to the model (`task_specific_params`, `train_bsz`, …) survive
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for key, value in published.items():
        # read into `attention_kind` and `tie_projs`, the `cutoffs` without their ends; the class is not yet known
        if key not in ("attn_type", "cutoffs", "share_proj", "architectures"):
            assert saved[key] == value, key
    loaded = AutoConfig.from_pretrained(tmp_path).to_diff_dict()
    assert loaded.pop("auto_map") == saved["auto_map"]
    assert loaded == config.to_diff_dict()
