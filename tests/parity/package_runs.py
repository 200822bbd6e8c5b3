"""The package run on a recorded case: one way to build its model and one way to compare what it reads."""

from __future__ import annotations

from typing import Any

import torch

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLMemory
from tests.helpers import assert_close
from tests.parity.original_keys import tied_names
from tests.parity.recorded_cases import HIDDEN_STATES, LOG_PROBABILITIES, LOSSES, Recorded

# what a memory may keep where no gradient is needed
STORAGES = ["hidden_states", "keys_values"]


def build_model(recorded: Recorded) -> TransfoXLForCausalLM:
    """A model of the case's settings with the case's weights; every name of one must be a name of the other."""
    model = TransfoXLForCausalLM(TransfoXLConfig(**recorded.fields))
    model.load_state_dict(recorded.state, strict=True)
    return model.eval()


def log_probabilities(output: Any) -> torch.Tensor:
    """Without clusters `logits` are not normalised."""
    return torch.log_softmax(output.logits, dim=-1)


def assert_tied_as_original(model: torch.nn.Module, recorded: Recorded) -> None:
    """Exactly the tensors that the original shares are shared."""
    first_names: dict[int, str] = {}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first_names:
            shared[name] = first_names[id(parameter)]
        first_names.setdefault(id(parameter), name)
    assert shared == tied_names(recorded.fields)


def compare_segments(model: Any, recorded: Recorded, memory: TransfoXLMemory, run: str = "") -> None:
    """Read all segments of a run: losses, hidden states, memories, and every log-probability of the last segment."""
    top_states: list[torch.Tensor] = []
    n_layer = model.config.n_layer
    for index in range(recorded.num_segments(run)):
        segment = recorded.segment(index, run)
        name = f"{recorded.name} {run} segment {index}"
        output = model(
            input_ids=segment["input_ids"],
            cache=memory,
            shift_labels=segment["target"],
            output_hidden_states=True,
        )
        assert_close(f"{name} losses", output.losses, segment["nll"], LOSSES)
        assert_close(f"{name} loss", output.loss, segment["nll"].mean(), LOSSES)
        if "loss_as_returned" in segment:
            # the original returns the same numbers cluster by cluster
            ours, theirs = output.losses.flatten().sort()[0], segment["loss_as_returned"].flatten().sort()[0]
            assert_close(f"{name} sorted losses", ours, theirs, LOSSES)
        assert_close(f"{name} hidden states", output.hidden_states[-1], segment["hidden"], **HIDDEN_STATES)
        top_states.append(output.hidden_states[-1].transpose(0, 1))
        compare_memory(name, memory, segment, n_layer)
        if (top := segment.get(f"mems.{n_layer}")) is not None:
            # the original also keeps the last outputs, which nothing reads
            latest = torch.cat(top_states)[-len(top) :]
            assert_close(f"{name} memory of the output", latest, top, **HIDDEN_STATES)
    expected = recorded.expected[f"{run}.last.logprobs" if run else "last.logprobs"]
    assert_close(f"{recorded.name} {run} log-probabilities", log_probabilities(output), expected, LOG_PROBABILITIES)


def compare_memory(name: str, memory: TransfoXLMemory, recorded: dict[str, torch.Tensor], n_layer: int) -> None:
    """Compare what each layer remembers with the recorded entries, where hidden states are stored."""
    if memory.storage != "hidden_states":
        return
    mems = memory.to_mems()
    for layer in range(n_layer):
        if f"mems.{layer}" in recorded:
            assert_close(f"{name} memory {layer}", mems[layer], recorded[f"mems.{layer}"], **HIDDEN_STATES)
