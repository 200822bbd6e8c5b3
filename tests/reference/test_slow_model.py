"""The slow reference against the recorded outputs of the original implementations.

These tests need nothing of the package, so that the reference can be trusted when it is compared with the package.
"""

from __future__ import annotations

import pytest
import torch

from hf_txl.reference.transformer_xl import (
    IGNORED,
    SlowMemory,
    SlowTransfoXL,
    last_hidden,
    stacked_memory,
)
from tests.helpers import assert_close
from tests.parity.original_keys import pytorch_state, tied_names
from tests.parity.recorded_cases import (
    ATTENTIONS,
    GRADIENTS,
    HIDDEN_STATES,
    LOG_PROBABILITIES,
    LOSSES,
    Recorded,
    case_names,
    evaluation_lengths,
    legacy_case,
    lengths,
    nvidia_case,
    pytorch_case,
    tensorflow_case,
)

LEGACY_LANGUAGE_MODELS = ["legacy-div1", "legacy-no-cutoff", "legacy-wt103"]


def slow_model(recorded: Recorded, requires_grad: bool = False) -> SlowTransfoXL:
    # tied tensors once, so that their gradients add up
    tied = tied_names(recorded.fields)
    weights = {name: tensor.double() for name, tensor in recorded.state.items() if name not in tied}
    if requires_grad:
        weights = {name: tensor.requires_grad_(True) for name, tensor in weights.items()}
    return SlowTransfoXL(recorded.namespace, weights)


def compare_segments(recorded: Recorded, model: SlowTransfoXL, memory: list[SlowMemory], run: str = "") -> None:
    """Read all segments of a run; compare losses, hidden states and memories, and the last log-probabilities."""
    outputs_so_far: list[torch.Tensor] = []
    for index in range(recorded.num_segments(run)):
        segment = recorded.segment(index, run)
        name = f"{recorded.name} {run} segment {index}"
        rows = model.read(segment["input_ids"], memory)
        assert_close(f"{name} losses", model.losses(rows, segment["target"]), segment["nll"], LOSSES)
        hidden = last_hidden(rows)
        assert_close(f"{name} hidden states", hidden, segment["hidden"], **HIDDEN_STATES)
        outputs_so_far.append(hidden.transpose(0, 1))
        for layer in range(recorded.fields["n_layer"]):
            if f"mems.{layer}" in segment:
                assert_close(
                    f"{name} memory {layer}", stacked_memory(memory, layer), segment[f"mems.{layer}"], **HIDDEN_STATES
                )
        if (top := segment.get(f"mems.{recorded.fields['n_layer']}")) is not None:
            # the original also keeps the last outputs, which nothing reads
            latest = torch.cat(outputs_so_far)[-len(top) :]
            assert_close(f"{name} memory of the output", latest, top, **HIDDEN_STATES)
    key = f"{run}.last.logprobs" if run else "last.logprobs"
    scores = model.scores(rows, segment["input_ids"].shape[1])
    assert_close(f"{recorded.name} {run} log-probabilities", scores, recorded.expected[key], LOG_PROBABILITIES)


@pytest.mark.parametrize("name", [name for name in case_names("pytorch_original", "xl-*") if "ext-len" not in name])
@torch.no_grad()
def test_reference_reproduces_the_original_pytorch_code(name: str) -> None:
    recorded = pytorch_case(name)
    model = slow_model(recorded)
    memory = model.new_memory(recorded.case["batch"], **evaluation_lengths(recorded))
    compare_segments(recorded, model, memory)


@pytest.mark.parametrize("name", case_names("pytorch_original", "xl-ext-len*"))
@torch.no_grad()
def test_reference_reproduces_segments_that_repeat_tokens_given_their_memory(name: str) -> None:
    recorded = pytorch_case(name)
    model = slow_model(recorded)
    width = recorded.case["constructor"]["tgt_len"]
    for index in range(recorded.num_segments()):
        segment = recorded.segment(index)
        memory = model.new_memory(recorded.case["batch"])
        if index > 0 and recorded.case["constructor"]["mem_len"] > 0:
            before = recorded.segment(index - 1)
            for row in range(recorded.case["batch"]):
                layers = [before[f"mems.{layer}"][:, row] for layer in range(recorded.fields["n_layer"])]
                memory[row] = SlowMemory.from_tensors(recorded.namespace, layers)
        rows = model.read(segment["input_ids"], memory)
        assert_close(f"{name} segment {index} hidden states", last_hidden(rows), segment["hidden"], **HIDDEN_STATES)
        targets = torch.full_like(segment["input_ids"], IGNORED)
        targets[:, -width:] = segment["target"]
        assert_close(f"{name} segment {index} losses", model.losses(rows, targets)[:, -width:], segment["nll"], LOSSES)


@pytest.mark.parametrize("name", ["xl-enwik8", "xl-pre-lnorm", "xl-wt103-large"])
def test_reference_reproduces_the_original_gradients(name: str) -> None:
    recorded = pytorch_case(name)
    model = slow_model(recorded, requires_grad=True)
    memory = model.new_memory(recorded.case["batch"])
    with torch.no_grad():
        for index in range(2):
            model.read(recorded.segment(index)["input_ids"], memory)
    segment = recorded.segment(2)
    loss = model.losses(model.read(segment["input_ids"], memory), segment["target"]).mean()
    loss.backward()
    assert_close("loss", loss, recorded.expected["grad.loss"], LOSSES)
    gradients = pytorch_state(
        {
            key.removeprefix("grad."): tensor
            for key, tensor in recorded.expected.items()
            if key.startswith("grad.") and key != "grad.loss"
        }
    )
    assert gradients.keys() == model.weights.keys()
    for key, gradient in gradients.items():
        assert_close(f"gradient of {key}", model.weights[key].grad, gradient, **GRADIENTS)


@pytest.mark.parametrize("name", case_names("nvidia"))
@torch.no_grad()
def test_reference_reproduces_nvidia(name: str) -> None:
    recorded = nvidia_case(name)
    model = slow_model(recorded)
    compare_segments(recorded, model, model.new_memory(recorded.case["batch"]))


@pytest.mark.parametrize("run", ["train_like", "eval_like"])
@pytest.mark.parametrize("name", case_names("tf_original"))
@torch.no_grad()
def test_reference_reproduces_the_original_tensorflow_code(name: str, run: str) -> None:
    recorded = tensorflow_case(name)
    model = slow_model(recorded)
    memory = model.new_memory(recorded.case["batch"], **lengths(recorded.case["runs"][run]))
    compare_segments(recorded, model, memory, run)


@pytest.mark.parametrize("start", ["zero", "empty"])
@pytest.mark.parametrize("name", LEGACY_LANGUAGE_MODELS)
@torch.no_grad()
def test_reference_reproduces_transformers_4_log_probabilities(name: str, start: str) -> None:
    recorded = legacy_case(name)
    model = slow_model(recorded)
    memory = model.new_memory(recorded.case["batch"], memory_init={"zero": "zeros", "empty": "empty"}[start])
    for index in range(recorded.num_segments(start)):
        input_ids = recorded.expected[f"zero.seg{index}.input_ids"]
        segment = recorded.segment(index, start)
        rows = model.read(input_ids, memory)
        scores = model.scores(rows, input_ids.shape[1])
        assert_close(f"{name} {start} {index}", scores, segment["prediction_scores"], LOG_PROBABILITIES)
        for layer in range(recorded.fields["n_layer"]):
            assert_close(
                f"{name} {start} {index} memory {layer}",
                stacked_memory(memory, layer),
                segment[f"mems.{layer}"],
                **HIDDEN_STATES,
            )


@pytest.mark.parametrize("name", LEGACY_LANGUAGE_MODELS)
@torch.no_grad()
def test_reference_reproduces_transformers_4_hidden_states_attentions_and_losses(name: str) -> None:
    recorded = legacy_case(name)
    model = slow_model(recorded)
    memory = model.new_memory(recorded.case["batch"])
    model.read(recorded.expected["zero.seg0.input_ids"], memory)
    input_ids = recorded.expected["zero.seg1.input_ids"]
    rows = model.read(input_ids, memory)
    for index in range(recorded.fields["n_layer"] + 1):
        hidden = torch.stack([row.hidden_states[index] for row in rows])
        expected = recorded.expected[f"call.hidden_states.{index}"]
        assert_close(f"{name} hidden states {index}", hidden, expected, **HIDDEN_STATES)
    for index in range(recorded.fields["n_layer"]):
        attentions = torch.stack([row.attentions[index] for row in rows])
        expected = recorded.expected[f"call.attentions.{index}"]
        assert_close(f"{name} attentions {index}", attentions, expected, ATTENTIONS)
    losses = model.losses(rows, next_tokens(input_ids))[:, :-1]
    assert_close(f"{name} losses", losses, recorded.expected["loss.losses_in_order"], LOSSES)
    labels = recorded.expected["loss_masked.labels"]
    losses = model.losses(rows, next_tokens(labels))
    counted = (next_tokens(labels) != IGNORED).sum()
    assert_close(
        f"{name} loss with ignored labels", losses.sum() / counted, recorded.expected["loss_masked.loss"], LOSSES
    )


@torch.no_grad()
def test_reference_reproduces_transformers_4_from_given_embeddings() -> None:
    recorded = legacy_case("legacy-wt103")
    model = slow_model(recorded)
    inputs = recorded.expected["inputs_embeds.inputs"]
    scores = model.scores(model.read(inputs_embeds=inputs), inputs.shape[1])
    assert_close("scores", scores, recorded.expected["inputs_embeds.prediction_scores"], LOG_PROBABILITIES)


@pytest.mark.parametrize("name", LEGACY_LANGUAGE_MODELS)
@pytest.mark.parametrize("window_rule", [False, True])
@torch.no_grad()
def test_reference_reproduces_transformers_4_greedy_generation(name: str, window_rule: bool) -> None:
    # token by token, the segment rule and the window rule are one; so only the prompt may differ
    recorded = legacy_case(name)
    if window_rule and not recorded.fields["same_length"]:
        pytest.skip("the prompt sees its whole memory without `same_length`")
    model = slow_model(recorded)
    prompt = recorded.expected["generate.prompt"]
    expected = recorded.expected["generate.greedy"]
    memory = model.new_memory(1)
    ids = prompt
    for time in range(prompt.shape[1], expected.shape[1]):
        row = model.read(ids, memory, window_rule=window_rule)[0]
        token = int(model.log_probabilities(row.hidden_states[-1][-1]).argmax())
        assert token == int(expected[0, time]), f"{name}: token {time}"
        ids = torch.tensor([[token]])


@torch.no_grad()
def test_reference_reproduces_transformers_4_classification() -> None:
    # row 4 has a pad in the middle, where the legacy class reads the position before it: see test_transformers4.py
    recorded = legacy_case("legacy-seqcls")
    model = slow_model(recorded)
    memory = model.new_memory(recorded.case["batch"])
    for ids, expected in (("input_ids", "logits"), ("second.input_ids", "second.logits")):
        input_ids = recorded.expected[ids]
        hidden = last_hidden(model.read(input_ids, memory))
        for row, row_ids in enumerate(input_ids.tolist()):
            pad = recorded.case["constructor"]["pad_token_id"]
            position = row_ids.index(pad) - 1 if pad in row_ids else -1
            logits = recorded.state["score.weight"].double() @ hidden[row, position]
            assert_close(f"{expected} of row {row}", logits, recorded.expected[expected][row], LOG_PROBABILITIES)
        if ids == "input_ids":
            for layer in range(recorded.fields["n_layer"]):
                expected_memory = recorded.expected[f"mems.{layer}"]
                assert_close(f"memory {layer}", stacked_memory(memory, layer), expected_memory, **HIDDEN_STATES)


@torch.no_grad()
def test_rows_with_pads_equal_the_rows_alone() -> None:
    recorded = pytorch_case("xl-short-mem")
    model = slow_model(recorded)
    first, second = recorded.segment(0)["input_ids"], recorded.segment(1)["input_ids"]
    ragged = torch.stack([first[0], torch.cat([torch.zeros(3, dtype=torch.long), first[1, :-3]])])
    mask = torch.ones_like(ragged)
    mask[1, :3] = 0
    memory = model.new_memory(2)
    together = model.read(ragged, memory, attention_mask=mask)
    alone_memory = model.new_memory(1)
    alone = model.read(first[1:2, :-3], alone_memory)
    assert together[1].positions == list(range(3, first.shape[1]))
    assert torch.equal(together[1].hidden_states[-1], alone[0].hidden_states[-1])
    next_together = model.read(second[:2], memory)
    assert torch.equal(next_together[1].hidden_states[-1], model.read(second[1:2], alone_memory)[0].hidden_states[-1])


def next_tokens(ids: torch.Tensor) -> torch.Tensor:
    """Targets for `ids` as inputs: the ids one place to the left, and nothing at the end."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
