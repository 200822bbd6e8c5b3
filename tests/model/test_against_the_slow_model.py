"""Everything a forward returns, number by number, against the slow reference: hidden states, attentions, scores.

`test_outputs.py` and `test_classification.py` say what they are; here is what they must be. Report ids are issues'.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_txl import TransfoXLForSequenceClassification, TransfoXLMemory, TransfoXLModel
from hf_txl.reference.transformer_xl import SlowMemory
from hf_txl.scoring import classify_documents, embed_documents
from tests.helpers import assert_close
from tests.model.tiny_models import (
    STARTS,
    STORAGES,
    WINDOWS,
    random_ids,
    slow_log_probabilities,
    slow_twin,
    t0_model,
    tiny_model,
)

# hidden states are of order 1 to 10, with pre_lnorm up to some 10
HIDDEN_STATES = {"atol": 1e-5, "rtol": 1e-5}
ATTENTIONS = 1e-5
LOG_PROBABILITIES = 2e-5
SCORES = 1e-5


def state_of(model: Any, name: str) -> Any:
    if name in STORAGES:
        return TransfoXLMemory(model.config, stores=name)
    return DynamicCache(config=model.config) if name == "DynamicCache" else None


# ---- hidden states and attentions ------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"pre_lnorm": True}, {"untie_r": False}, {"clamp_len": 2}], ids=str)
@torch.no_grad()
def test_every_hidden_state_equals_the_slow_reference(changes: dict[str, Any]) -> None:
    """C121: of a first segment and of one with memory."""
    model = t0_model(TransfoXLModel, **changes)
    ids = random_ids(2, 5, vocab_size=99)
    twin = slow_twin(model)
    memory, slow_memory = TransfoXLMemory(model.config), twin.new_memory(2)
    for segment in range(2):
        output = model(ids, cache=memory, output_hidden_states=True)
        rows = twin.read(ids, slow_memory)
        for layer, states in enumerate(output.hidden_states):
            expected = torch.stack([row.hidden_states[layer] for row in rows])
            assert_close(f"segment {segment} layer {layer}", states, expected, **HIDDEN_STATES)


@pytest.mark.parametrize("state", ["none", "DynamicCache", *STORAGES])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
@torch.no_grad()
def test_every_attention_weight_equals_the_slow_reference(window: str, start: str, state: str) -> None:
    """C122: keys of the memory come first; what no query sees has weight 0 or no column."""
    model = tiny_model(TransfoXLModel, memory_init=start, **WINDOWS[window])
    twin = slow_twin(model)
    cache, slow_memory = state_of(model, state), twin.new_memory(2)
    for index, ids in enumerate(list(random_ids(2, 7).split([4, 3], dim=1))[: 1 if state == "none" else 2]):
        output = model(ids, past_key_values=cache, output_attentions=True)
        rows = twin.read(ids, slow_memory, window_rule=state == "DynamicCache")
        assert len(output.attentions) == 2
        for layer, attentions in enumerate(output.attentions):
            expected = torch.stack([row.attentions[layer] for row in rows])
            num_keys = min(attentions.shape[-1], expected.shape[-1])
            # (B, H, Q, K) without its oldest columns
            actual, left_out = attentions[..., -num_keys:], expected[..., :-num_keys]
            assert not left_out.any() and not attentions[..., :-num_keys].any()
            assert_close(f"segment {index} layer {layer}", actual, expected[..., -num_keys:], ATTENTIONS)


# ---- embeddings in place of ids --------------------------------------------------------------------------------


@torch.no_grad()
def test_embeddings_are_projected_and_scaled_once() -> None:
    """C123: row of the token's cluster, projected, times the square root of the width."""
    model = tiny_model()
    embedding, bounds = model.embeddings, [0, 11, 23, 41]
    rows = []
    for token in range(41):
        cluster = sum(token >= bound for bound in bounds[1:-1])
        vector = embedding.emb_layers[cluster].weight[token - bounds[cluster]].double()
        rows.append(embedding.emb_projs[str(cluster)].double() @ vector * math.sqrt(16))
    ids, expected = torch.arange(41)[None], torch.stack(rows)[None]
    assert_close("embeddings", embedding(ids), expected, **HIDDEN_STATES)
    output = model(inputs_embeds=expected.float(), output_hidden_states=True)
    assert torch.equal(output.hidden_states[0], expected.float())


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_features_without_ids_are_read_one_step_at_a_time(storage: str) -> None:
    """C123: as an agent does; and the memory keeps no view of what belongs to the caller."""
    model = tiny_model(memory_init="zeros")
    features = 3 * torch.randn(2, 9, 16)
    twin = slow_twin(model)
    memory, slow_memory = TransfoXLMemory(model.config, stores=storage), twin.new_memory(2)
    for step in range(9):
        observed = features[:, step : step + 1].clone()
        expected = twin.scores(twin.read(inputs_embeds=observed, memory=slow_memory), 1)
        actual = model(inputs_embeds=observed, cache=memory).logits
        # the caller may use its buffer again
        observed.fill_(torch.nan)
        assert_close(f"step {step}", actual, expected, LOG_PROBABILITIES)


# ---- forms -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_tuple_holds_the_given_memory_after_the_logits() -> None:
    """C20: the loss first, one number; then logits, cache, states, attentions, losses."""
    model, ids = tiny_model(), random_ids(2, 5)
    memory = TransfoXLMemory(model.config)
    loss, logits, cache, hidden_states, attentions, losses = model(
        ids, cache=memory, labels=ids, output_hidden_states=True, output_attentions=True, return_dict=False
    )
    assert loss.shape == () and logits.shape == (2, 5, 41) and losses.shape == (2, 5)
    assert cache is memory
    assert len(hidden_states) == 3 and len(attentions) == 2


def test_the_configuration_may_ask_for_states_attentions_and_tuples() -> None:
    model, ids = tiny_model(), random_ids(2, 5)
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 3
    assert model(ids, output_hidden_states=False).hidden_states is None
    model.config.return_dict = False
    assert isinstance(model(ids), tuple)


@pytest.mark.parametrize("keep", [1, 3, 5, 0, "positions"])
@torch.no_grad()
def test_logits_are_those_of_the_positions_asked_for(keep: int | str) -> None:
    model, ids = tiny_model(), random_ids(2, 5)
    (expected,) = slow_log_probabilities(model, [ids])
    positions = torch.tensor([0, 3])
    output = model(ids, labels=ids, logits_to_keep=positions if keep == "positions" else keep)
    expected = expected[:, positions] if keep == "positions" else expected[:, -keep:]
    assert_close("logits", output.logits, expected, LOG_PROBABILITIES)
    # losses are those of all positions all the same
    assert torch.equal(output.losses, model(ids, labels=ids, return_logits=False).losses)


# ---- classification --------------------------------------------------------------------------------------------


def classifier(**changes: Any) -> Any:
    return tiny_model(TransfoXLForSequenceClassification, **{"num_labels": 3, **changes})


@torch.no_grad()
def slow_scores(model: Any, tokens: torch.Tensor, memory: SlowMemory | None = None) -> torch.Tensor:
    """Scores of one row at the last of these tokens, (num_labels,)."""
    memory = SlowMemory(model.config) if memory is None else memory
    (row,) = slow_twin(model).read(tokens[None], [memory])
    return model.score.weight.double() @ row.hidden_states[-1][-1]


# ids 0 are both pad and end token, and rows have an end token in the middle
ROWS = [[5, 0, 7], [3, 9, 0, 11, 30, 0, 2, 40], [8], [21, 0]]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_scores_of_padded_rows_equal_the_slow_reference(side: str, start: str) -> None:
    """C60"""
    model = classifier(memory_init=start, pad_token_id=0, eos_token_id=0)
    ids, mask = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 8, dtype=torch.long)
    for index, row in enumerate(ROWS):
        part = slice(8 - len(row), 8) if side == "left" else slice(0, len(row))
        ids[index, part], mask[index, part] = torch.tensor(row), 1
    embeddings = model.get_input_embeddings()(ids)
    for given in ({"input_ids": ids}, {"inputs_embeds": embeddings}):
        logits = model(attention_mask=mask, **given).logits
        for index, row in enumerate(ROWS):
            assert_close(f"row {index}", logits[index], slow_scores(model, torch.tensor(row)), SCORES)


@torch.no_grad()
def test_a_row_of_pads_alone_has_finite_scores_and_leaves_the_others() -> None:
    model = classifier(pad_token_id=0)
    ids = torch.tensor([[0, 0, 0], [4, 5, 6]])
    for given in ({}, {"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}):
        logits = model(ids, **given).logits
        assert logits.isfinite().all()
        assert_close("the other row", logits[1], slow_scores(model, ids[1]), SCORES)


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_scores_after_several_segments_equal_the_slow_reference(storage: str) -> None:
    model = classifier(memory_init="zeros")
    memory, slow = TransfoXLMemory(model.config, stores=storage), [SlowMemory(model.config) for _ in range(2)]
    for index, ids in enumerate(random_ids(2, 12).split(4, dim=1)):
        logits = model(ids, cache=memory).logits
        for row in range(2):
            expected = slow_scores(model, ids[row], slow[row])
            assert_close(f"segment {index} row {row}", logits[row], expected, SCORES)


def test_several_numbers_are_a_regression_where_the_configuration_says_so() -> None:
    model = classifier(problem_type="regression")
    labels = torch.randn(4, 3)
    output = model(random_ids(4, 5), labels=labels)
    assert_close("loss", output.loss, (output.logits.double() - labels).square().mean(), SCORES)


def test_the_problem_is_read_from_the_labels_where_the_configuration_is_silent() -> None:
    """Integers are classes, numbers per class are several labels, and a single output is a regression."""
    ids = random_ids(4, 5)
    several = torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    output = classifier()(ids, labels=several)
    probabilities = output.logits.double().sigmoid()
    expected = -(several * probabilities.log() + (1 - several) * (1 - probabilities).log()).mean()
    assert_close("several labels", output.loss, expected, SCORES)
    classes = torch.tensor([2, 0, 1, 2])
    output = classifier()(ids, labels=classes)
    expected = -output.logits.double().log_softmax(-1)[range(4), classes].mean()
    assert_close("classes", output.loss, expected, SCORES)


DOCUMENTS = [random_ids(length, seed=length).tolist() for length in (3, 17, 1, 9)]


@pytest.mark.parametrize("segment_length", [4, 50])
@pytest.mark.parametrize("window", [name for name in WINDOWS if name != "all"])
def test_long_documents_are_scored_as_in_a_single_pass(window: str, segment_length: int) -> None:
    """C62: in segments, together with documents of other lengths."""
    model = classifier(memory_init="zeros", **WINDOWS[window])
    logits = classify_documents(model, DOCUMENTS, segment_length=segment_length, batch_size=3)
    vectors = embed_documents(model, DOCUMENTS, segment_length=segment_length, batch_size=2)
    for index, document in enumerate(DOCUMENTS):
        expected = slow_scores(model, torch.tensor(document))
        assert_close(f"document {index}", logits[index], expected, SCORES)
        assert_close(f"vector of document {index}", model.score(vectors[index]), expected, SCORES)


def test_without_a_window_a_document_is_cut_where_asked() -> None:
    """C62: then the cut matters: the last segment is full, the first one holds the rest."""
    model = classifier()
    logits = classify_documents(model, DOCUMENTS, segment_length=4, batch_size=4)
    for index, document in enumerate(DOCUMENTS):
        memory = SlowMemory(model.config)
        rest = len(document) % 4
        for segment in (*torch.tensor(document[:rest]).split(4), *torch.tensor(document[rest:]).split(4)):
            if len(segment) == 0:
                continue
            expected = slow_scores(model, segment, memory)
        assert_close(f"document {index}", logits[index], expected, SCORES)
