"""Compares a converted model with recorded outputs of its source, or with the slow reference on the same weights.

The written model is loaded again through transformers, so names, ties, settings and files are tested together.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_txl import TransfoXLForCausalLM, TransfoXLMemory, TransfoXLPreTrainedModel
from hf_txl.arguments_transfo_xl import check_ids
from hf_txl.reference.kinds import slow_model_of

# Two correct float32 programs differ by up to 1e-5 on the recorded cases and somewhat more in larger models. Mistakes
# change outputs by 4e-3 (the epsilon of the layer norms) or by 0.1 and more (all others that were tried).
TOLERANCE = 1e-4

Differences = dict[str, float]
"""Name of the output -> its largest absolute difference."""


def verify_recorded(
    model: TransfoXLForCausalLM, recorded: Mapping[str, torch.Tensor], **lengths: Any
) -> dict[str, Differences]:
    """Read recorded segments, with the memory carried from one to the next, and compare the outputs.

    Args:
        model (`TransfoXLForCausalLM`): The model, float32.
        recorded (`Mapping[str, torch.Tensor]`):
            For segment k = 0, 1, …: `seg{k}.input_ids` (batch, time), and outputs to compare:
            `seg{k}.target` with `seg{k}.nll` (batch, scored), nats of the last tokens of a segment in token order;
            `seg{k}.prediction_scores` (batch, time, vocabulary); `last.logprobs` (batch, scored, vocabulary), of the
            last segment. If there are several runs, each of these names is prefixed by that of its run and a dot.
        lengths:
            Arguments of [`TransfoXLMemory`] that differ from the model's configuration (`mem_len`, `clamp_len`, …).

    Returns:
        `dict[str, dict[str, float]]`: for each run, the largest difference of each kind of output.
    """
    runs = sorted({match[1] for name in recorded if (match := re.fullmatch(r"(.*\.)?seg0\.input_ids", name))}, key=str)
    if not runs:
        raise ValueError("`recorded` must hold `seg0.input_ids`, but holds only " + ", ".join(sorted(recorded)[:10]))
    compared = {(run or "").rstrip("."): _verify_run(model, recorded, run or "", lengths) for run in runs}
    if empty := [run for run, differences in compared.items() if not differences]:
        raise ValueError(f"`recorded` must hold outputs to compare, but has inputs only (runs: {empty}).")
    return compared


@torch.no_grad()
def _verify_run(
    model: TransfoXLForCausalLM, recorded: Mapping[str, torch.Tensor], run: str, lengths: dict[str, Any]
) -> Differences:
    memory = TransfoXLMemory(model.config, **lengths)
    differences: Differences = {}

    def compare(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        differences[name] = max(differences.get(name, 0.0), _largest_difference(ours, theirs))

    vocab_size = model.config.vocab_size
    _check_numbers(recorded, run)
    number = 0
    while (name := f"{run}seg{number}.input_ids") in recorded:
        segment = f"{run}seg{number}"
        input_ids = _ids(recorded, name, vocab_size)
        batch_size, length = input_ids.shape
        target = _ids(recorded, f"{segment}.target", vocab_size) if f"{segment}.target" in recorded else None
        scored = length if target is None else target.shape[1]
        if target is not None:
            _check_shape(recorded, f"{segment}.target", (batch_size, min(scored, length)))
            _check_shape(recorded, f"{segment}.nll", (batch_size, scored))
        elif f"{segment}.nll" in recorded:
            raise ValueError(f"`recorded` must hold `{segment}.target` with `{segment}.nll`, but does not.")
        labels = None if target is None else torch.nn.functional.pad(target, (length - scored, 0), value=-100)
        output = model(input_ids, cache=memory, shift_labels=labels)
        scores = torch.log_softmax(output.logits.float(), dim=-1)
        if target is not None:
            compare("losses", output.losses[:, -scored:], recorded[f"{segment}.nll"])
        if (expected := recorded.get(f"{segment}.prediction_scores")) is not None:
            _check_shape(recorded, f"{segment}.prediction_scores", (batch_size, length, vocab_size))
            compare("log-probabilities", scores, expected)
        number += 1
    if (expected := recorded.get(f"{run}last.logprobs")) is not None:
        width = expected.shape[1] if expected.dim() == 3 else scored
        _check_shape(recorded, f"{run}last.logprobs", (batch_size, min(width, length), vocab_size))
        compare("log-probabilities", scores[:, -width:], expected)
    return differences


def _check_numbers(recorded: Mapping[str, torch.Tensor], run: str) -> None:
    """Refuse gaps between segments, since every one must be read."""
    found = {int(match[1]) for name in recorded if (match := re.match(rf"{re.escape(run)}seg(\d+)\.", name))}
    for number in range(len(found)):
        if f"{run}seg{number}.input_ids" not in recorded:
            raise ValueError(f"`recorded` must hold `{run}seg{number}.input_ids`, but has other segments only.")


def _ids(recorded: Mapping[str, torch.Tensor], name: str, vocab_size: int) -> torch.Tensor:
    ids = recorded[name]
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or 0 in ids.shape:
        raise ValueError(
            f"`{name}` of `recorded` must be whole numbers of shape (batch, time), but is {tuple(ids.shape)} of "
            f"{ids.dtype}."
        )
    check_ids(f"recorded[{name!r}]", ids, vocab_size)
    return ids.long()


def _check_shape(recorded: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> None:
    if name not in recorded:
        raise ValueError(f"`recorded` must hold `{name}`, but does not.")
    if tuple(recorded[name].shape) != shape:
        raise ValueError(f"`{name}` of `recorded` must have the shape {shape}, but has {tuple(recorded[name].shape)}.")


@torch.no_grad()
def verify_with_source(
    model: TransfoXLPreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    *,
    batch_size: int = 2,
    segments: tuple[int, ...] = (5, 3, 6),
    max_mem_len: int = 7,
    seed: int = 0,
    progress: bool = True,
) -> Differences:
    """Compare a model with a float64 double loop over the source's weights, on random ids of every bucket.

    Args:
        model (`TransfoXLPreTrainedModel`): A causal language model or a bare one, float32.
        weights (`Mapping[str, torch.Tensor]`): The weights of the source, under published names.
        batch_size, segments: Rows, and the length of each segment; the memory is carried from one to the next.
        max_mem_len (`int`, defaults to 7): Upper bound of the memory length, which is otherwise the configuration's.
        seed (`int`, defaults to 0): Seed of the ids.
        progress (`bool`, defaults to `True`): Whether to show a progress bar.

    Returns:
        `dict[str, float]`: the largest difference of hidden states (relative to the largest of them) and, where the
        model has a softmax, of log-probabilities.
    """
    config = model.config
    reference = slow_model_of(config, weights)
    lengths: dict[str, Any] = {"mem_len": min(config.mem_len, max_mem_len)}
    memory, slow_memory = TransfoXLMemory(config, **lengths), reference.new_memory(batch_size, **lengths)
    generator = torch.Generator().manual_seed(seed)
    differences = {"hidden states": 0.0}
    # None shows it on terminals only
    hidden = None if progress else True
    for length in tqdm(segments, desc="comparing with the reference", unit="segment", disable=hidden):
        input_ids = _ids_of_all_buckets(config.bucket_ends, (batch_size, length), generator)
        rows = reference.read(input_ids, slow_memory)
        output = model(input_ids, cache=memory, output_hidden_states=True)
        expected = torch.stack([row.hidden_states[-1] for row in rows])
        scale = expected.abs().max().clamp(min=1)
        difference = _largest_difference(output.hidden_states[-1] / scale, expected / scale)
        differences["hidden states"] = max(differences["hidden states"], difference)
        if isinstance(model, TransfoXLForCausalLM):
            scores = torch.log_softmax(output.logits.double(), dim=-1)
            difference = _largest_difference(scores, reference.scores(rows, length))
            differences["log-probabilities"] = max(differences.get("log-probabilities", 0.0), difference)
    return differences


def _largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest absolute difference, infinite if either holds NaN or infinity, which must not pass for agreement."""
    ours, theirs = ours.double(), theirs.double()
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        return math.inf
    return (ours - theirs).abs().max().item()


def _ids_of_all_buckets(ends: list[int], shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Random ids that cycle through the buckets, so that each occurs."""
    starts = torch.tensor([0, *ends[:-1]])
    buckets = (torch.arange(shape[0] * shape[1]) % len(ends)).view(shape)
    first, end = starts[buckets], torch.tensor(ends)[buckets]
    return first + (torch.rand(shape, generator=generator, dtype=torch.float64) * (end - first)).long()
