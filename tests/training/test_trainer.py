"""`TransfoXLTrainer` against loops written out, evaluation that leaves no trace, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments, get_scheduler

from hf_txl import TransfoXLForCausalLM, TransfoXLMemory
from hf_txl.data import DocumentStreams, TokenStreams
from hf_txl.demo import demo_text
from hf_txl.training import (
    TransfoXLTrainer,
    TransfoXLTrainingArguments,
    last_checkpoint,
    read_memory,
    write_memory,
)
from tests.helpers import assert_close
from tests.model.tiny_models import random_ids, tiny_config, tiny_model
from tests.sizes import full

datasets = pytest.importorskip("datasets")
pytest.importorskip("accelerate")

TEXT = random_ids(1, 307)[0]
DOCUMENTS = [row.tolist() for row in TEXT.split([9, 2, 1, 40, 5, 16, 13, 4, 4, 27, 60, 33, 21, 72])]
# of Adam; gradients that are zero but for rounding would otherwise become whole steps
EPSILON = 1e-4
# the same float32 operations, gathered in another order where a batch is cut
SAME = {"atol": 1e-6, "rtol": 1e-5}


def arguments(folder: Path, **changes: Any) -> TransfoXLTrainingArguments:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 2,
        "segment_length": 7,
        "learning_rate": 3e-3,
        "adam_epsilon": EPSILON,
        "max_steps": 20,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TransfoXLTrainingArguments(**{**settings, **changes})


def trained(
    folder: Path, dataset: Any = TEXT, model: Any = None, resume: Any = None, eval_dataset: Any = None, **changes: Any
) -> TransfoXLTrainer:
    trainer = TransfoXLTrainer(
        tiny_model() if model is None else model,
        arguments(folder, **changes),
        train_dataset=dataset,
        eval_dataset=eval_dataset,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same_weights(actual: Any, expected: Any, **tolerance: float) -> None:
    theirs = expected.state_dict()
    for name, tensor in actual.state_dict().items():
        if tolerance:
            assert_close(name, tensor, theirs[name], **tolerance)
        else:
            assert torch.equal(tensor, theirs[name]), name


# ---- against a loop written out


def stream_segments(tokens: torch.Tensor, batch_size: int, length: int) -> Iterator[tuple[Any, Any, bool]]:
    """Inputs, targets and whether the rows begin, over and over."""
    size = len(tokens) // batch_size
    rows = torch.stack([tokens[row * size : (row + 1) * size] for row in range(batch_size)])
    while True:
        for start in range(0, size - 1, length):
            stop = min(start + length, size - 1)
            yield rows[:, start:stop], rows[:, start + 1 : stop + 1], start == 0


def document_segments(documents: list[list[int]], length: int) -> Iterator[tuple[Any, Any, bool]]:
    """The same of one row that reads documents apart, over and over."""
    while True:
        for document in documents:
            for start in range(0, len(document) - 1, length):
                stop = min(start + length, len(document) - 1)
                ids = torch.tensor([document[start : stop + 1]])
                yield ids[:, :-1], ids[:, 1:], start == 0


def hand_loop(model: Any, segments: Iterator[Any], steps: int, bf16: bool = False) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=EPSILON, weight_decay=0.0)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=steps)
    memory = None
    model.train()
    for _ in range(steps):
        inputs, targets, begins = next(segments)
        if begins:
            memory = TransfoXLMemory(model.config)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            losses = model(inputs, shift_labels=targets, cache=memory).losses
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def test_a_trained_text_equals_a_loop_over_its_segments(tmp_path: Path) -> None:
    """More steps than the text has segments: the memory starts afresh with each pass, and the last one is short."""
    trainer = trained(tmp_path, max_steps=33)
    expected = hand_loop(tiny_model(), stream_segments(TEXT, 3, 7), 33)
    assert_same_weights(trainer.model, expected, **SAME)


def test_bfloat16_trains_what_a_loop_under_autocast_trains(tmp_path: Path) -> None:
    """Bit by bit, with the AdamW of the loop: the trainer's default is the fused one, which rounds otherwise.

    One unit in the last place of a float32 weight is enough: after some steps it moves a weight to the next bfloat16,
    2^-8 of it away, and the two runs then go apart to 2e-3, as do any two whose weights differ by 1e-7 at the start.
    No tolerance lies between that and another program; the first steps have equal gradients in either case.
    """
    trainer = trained(tmp_path, max_steps=33, bf16=True, optim="adamw_torch")
    expected = hand_loop(tiny_model(), stream_segments(TEXT, 3, 7), 33, bf16=True)
    assert_same_weights(trainer.model, expected)
    weights = dict(trainer.model.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    # it was not float32 that trained
    single = hand_loop(tiny_model(), stream_segments(TEXT, 3, 7), 33)
    assert any((weights[name] - weight).abs().max() > 1e-4 for name, weight in single.named_parameters())


@pytest.mark.slow
def test_a_compiled_model_trains_what_a_loop_trains(tmp_path: Path) -> None:
    """Through the end of a pass, whose last segment is short and after which the memory is empty again."""
    trainer = trained(tmp_path, max_steps=18, torch_compile=True)
    assert isinstance(trainer.model_wrapped, torch._dynamo.eval_frame.OptimizedModule)
    expected = hand_loop(tiny_model(), stream_segments(TEXT, 3, 7), 18)
    assert_same_weights(trainer.model, expected, atol=1e-5)


def test_accumulated_parts_follow_each_other_in_time(tmp_path: Path) -> None:
    # 15 segments per pass, the last of them short, in steps of 4 parts: the library ends a pass with a step of 3
    trainer = trained(tmp_path, max_steps=4, gradient_accumulation_steps=4)

    segments = stream_segments(TEXT, 3, 7)
    expected = tiny_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=3e-3, eps=EPSILON, weight_decay=0.0)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=4)
    expected.train()
    memory = TransfoXLMemory(expected.config)
    for size in (4, 4, 4, 3):
        batch = [next(segments) for _ in range(size)]
        count = sum(targets.numel() for _, targets, _ in batch)
        for inputs, targets, _ in batch:
            (expected(inputs, shift_labels=targets, cache=memory).losses.sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.25)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert_same_weights(trainer.model, expected, **SAME)


@pytest.mark.parametrize("form", ["list", full("Dataset"), full("IterableDataset")])
def test_documents_are_trained_apart(form: str, tmp_path: Path) -> None:
    """C112: nothing is remembered across the start of a document."""
    dataset: Any = DOCUMENTS
    if form != "list":
        dataset = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
        dataset = dataset.to_iterable_dataset() if form == "IterableDataset" else dataset
    trainer = trained(tmp_path, dataset, layout="documents", per_device_train_batch_size=1, max_steps=50)
    expected = hand_loop(tiny_model(), document_segments(DOCUMENTS, 7), 50)
    assert_same_weights(trainer.model, expected, **SAME)


def test_each_row_of_documents_is_reset_on_its_own(tmp_path: Path) -> None:
    """Rows that begin and end at different times equal each row trained alone, all gradients added."""
    first, second = DOCUMENTS[3], DOCUMENTS[10][:19]
    third = DOCUMENTS[9]
    texts = [first, second, third]
    trainer = trained(
        tmp_path, texts, layout="documents", per_device_train_batch_size=2, max_steps=7, max_grad_norm=1e9
    )
    expected = tiny_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=3e-3, eps=EPSILON, weight_decay=0.0)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=7)
    expected.train()
    # 40 tokens are read in 6 segments of 7; the other row reads 19 tokens in 3, then 27 in 4
    rows = [
        [(first, start) for start in range(0, 39, 7)] + [None],
        [(second, start) for start in range(0, 18, 7)] + [(third, start) for start in range(0, 26, 7)],
    ]
    memories: list[Any] = [None, None]
    for step in range(7):
        reads = [(row, *rows[row][step]) for row in range(2) if rows[row][step] is not None]
        pieces = [(row, torch.tensor([text[start : start + 8]]), start) for row, text, start in reads]
        count = sum(piece.shape[1] - 1 for _, piece, _ in pieces)
        for row, piece, start in pieces:
            if start == 0:
                memories[row] = TransfoXLMemory(expected.config)
            output = expected(piece[:, :-1], shift_labels=piece[:, 1:], cache=memories[row])
            (output.losses.sum() / count).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    # rows alone are other products: Adam makes of 5e-8 in a gradient near zero up to 3e-3 * 5e-8 / EPSILON a step
    assert_same_weights(trainer.model, expected, atol=1e-5, rtol=1e-5)


def test_a_data_set_of_lines_is_one_text(tmp_path: Path) -> None:
    lines = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    assert_same_weights(trained(tmp_path, lines).model, trained(tmp_path).model)


def test_streams_of_the_right_size_are_taken_as_they_are(tmp_path: Path) -> None:
    streams = TokenStreams(TEXT, 3, 7)
    assert_same_weights(trained(tmp_path, streams).model, trained(tmp_path).model)
    # the caller's own is not changed
    assert "reset_memory" not in streams[0]
    documents = DocumentStreams(DOCUMENTS, 3, 7)
    apart = trained(tmp_path, DOCUMENTS, layout="documents").model
    assert_same_weights(trained(tmp_path, documents).model, apart)


def test_the_lengths_of_the_training_are_the_arguments(tmp_path: Path) -> None:
    trainer = trained(tmp_path, mem_len=2, clamp_len=4, same_length=True, max_steps=5)
    expected = hand_loop(tiny_model(mem_len=2, clamp_len=4, same_length=True), stream_segments(TEXT, 3, 7), 5)
    assert_same_weights(trainer.model, expected, **SAME)


# ---- evaluation and logs


def test_evaluation_scores_every_prediction_with_its_own_lengths(tmp_path: Path) -> None:
    settings = {"eval_segment_length": 5, "eval_mem_len": 11, "eval_clamp_len": 6, "eval_same_length": True}
    trainer = TransfoXLTrainer(tiny_model(), arguments(tmp_path, **settings), eval_dataset=TEXT[:101])
    metrics = trainer.evaluate()
    model = tiny_model()
    memory = TransfoXLMemory(model.config, mem_len=11, clamp_len=6, same_length=True)
    rows = TEXT[:100].view(2, 50)
    losses = []
    with torch.no_grad():
        for start in range(0, 49, 5):
            stop = min(start + 5, 49)
            losses.append(model(rows[:, start:stop], shift_labels=rows[:, start + 1 : stop + 1], cache=memory).losses)
    loss = torch.cat(losses, dim=1).double().mean().item()
    assert metrics["eval_loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert metrics["eval_bits_per_token"] == pytest.approx(loss / math.log(2), rel=1e-6)
    assert metrics["eval_predictions"] == 98


def test_evaluated_documents_know_nothing_of_each_other(tmp_path: Path) -> None:
    trainer = TransfoXLTrainer(tiny_model(), arguments(tmp_path, layout="documents"), eval_dataset=DOCUMENTS)
    model = tiny_model()
    losses = []
    with torch.no_grad():
        for document in DOCUMENTS:
            memory = TransfoXLMemory(model.config)
            for start in range(0, len(document) - 1, 7):
                piece = torch.tensor([document[start : start + 8]])
                losses.append(model(piece[:, :-1], shift_labels=piece[:, 1:], cache=memory).losses.flatten())
    expected = torch.cat(losses).double()
    metrics = trainer.evaluate()
    assert metrics["eval_predictions"] == len(expected)
    assert metrics["eval_loss"] == pytest.approx(expected.mean().item(), abs=1e-6)


def test_an_evaluation_has_the_precision_of_the_training_before_it_too(tmp_path: Path) -> None:
    args = arguments(tmp_path, bf16=True, learning_rate=0.0, max_steps=1)
    trainer = TransfoXLTrainer(tiny_model(), args, train_dataset=TEXT, eval_dataset=TEXT)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == before
    single = TransfoXLTrainer(tiny_model(), arguments(tmp_path), eval_dataset=TEXT).evaluate()["eval_loss"]
    assert before != single and before == pytest.approx(single, rel=1e-2)


def test_several_texts_are_evaluated_by_name(tmp_path: Path) -> None:
    texts = {"near": TEXT[:60], "far": TEXT[60:]}
    trainer = TransfoXLTrainer(tiny_model(), arguments(tmp_path), eval_dataset=texts)
    metrics = trainer.evaluate()
    for name, text in texts.items():
        alone = TransfoXLTrainer(tiny_model(), arguments(tmp_path), eval_dataset=text).evaluate()
        assert metrics[f"eval_{name}_loss"] == alone["eval_loss"]


@pytest.mark.parametrize("layout", ["stream", "documents"])
def test_evaluation_in_the_middle_changes_nothing(layout: str, tmp_path: Path) -> None:
    """C105: bit-equal, with dropout, whose random numbers an evaluation must not use."""
    dataset = TEXT if layout == "stream" else DOCUMENTS
    changes = {"layout": layout, "max_steps": 9}
    plain = trained(tmp_path, dataset, tiny_model(dropout=0.2, dropatt=0.1), **changes)
    evaluated = trained(
        tmp_path,
        dataset,
        tiny_model(dropout=0.2, dropatt=0.1),
        eval_dataset=dataset[:60],
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        **changes,
    )
    assert sum("eval_loss" in entry for entry in evaluated.state.log_history) == 6
    assert_same_weights(evaluated.model, plain.model)
    assert plain.memory is not None and evaluated.memory is not None
    for ours, theirs in zip(evaluated.memory.layers, plain.memory.layers, strict=True):
        assert torch.equal(ours.tensors["hidden_states"], theirs.tensors["hidden_states"])


def test_logs_hold_perplexity_and_bits(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=2)
    entry = trainer.state.log_history[0]
    assert entry["perplexity"] == pytest.approx(math.exp(entry["loss"]))
    assert entry["bits_per_token"] == pytest.approx(entry["loss"] / math.log(2))


# ---- the recipe


def test_a_loss_that_is_no_number_is_logged_as_such(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=3, learning_rate=1e30, max_grad_norm=1e30)
    assert not math.isfinite([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])


def test_the_defaults_are_the_papers(tmp_path: Path) -> None:
    args = TransfoXLTrainingArguments(str(tmp_path), use_cpu=True)
    assert (args.learning_rate, args.max_grad_norm, args.weight_decay) == (2.5e-4, 0.25, 0.0)
    assert (args.lr_scheduler_type, args.segment_length, args.optim) == ("cosine", 150, "adamw_torch_fused")
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.999, 1e-8)


def test_biases_and_normalisations_do_not_decay(tmp_path: Path) -> None:
    """C113, with shared and with own attention biases."""
    for untie_r in (False, True):
        model = tiny_model(untie_r=untie_r)
        decayed = set(TransfoXLTrainer(model, arguments(tmp_path)).get_decay_parameter_names(model))
        for name, parameter in model.named_parameters():
            assert (name in decayed) == (parameter.dim() > 1 and not name.endswith(("r_w_bias", "r_r_bias"))), name


def test_a_small_model_learns_by_the_recipe(tmp_path: Path) -> None:
    """C113: from log(65) = 4.17 nats to below the 3.3 of a unigram model within 120 steps."""
    text = demo_text()[:60_000]
    symbols = {symbol: index for index, symbol in enumerate(sorted(set(text)))}
    ids = torch.tensor([symbols[symbol] for symbol in text])
    counts = torch.bincount(ids).double()
    unigram = -(counts / counts.sum() * (counts / counts.sum()).log()).sum().item()
    torch.manual_seed(0)
    config = tiny_config(
        vocab_size=len(symbols), cutoffs=[], div_val=1, d_model=48, n_head=2, d_head=24, d_inner=96, mem_len=24
    )
    trainer = trained(
        tmp_path,
        ids[:50_000],
        TransfoXLForCausalLM(config),
        eval_dataset=ids[50_000:],
        per_device_train_batch_size=16,
        segment_length=24,
        learning_rate=5e-3,
        warmup_steps=10,
        max_steps=120,
    )
    assert trainer.evaluate()["eval_loss"] < unigram < 3.4


# ---- resumption


RESUMED: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (TEXT, {}),
    "accumulation": (TEXT, {"gradient_accumulation_steps": 2, "max_steps": 14}),
    "random lengths": (TEXT, {"varlen": True, "max_steps": 40, "save_steps": 7}),
    "worker processes": (TEXT, {"dataloader_num_workers": 2, "max_steps": 12}),
    "documents": (DOCUMENTS, {"layout": "documents"}),
    "sentences": (DOCUMENTS, {"layout": "sentences", "max_steps": 24}),
    "an iterable data set": (
        datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).to_iterable_dataset(),
        {"gradient_accumulation_steps": 2, "max_steps": 14},
    ),
}


@pytest.mark.parametrize("kind", [kind if kind in ("text", "documents") else full(kind) for kind in RESUMED])
def test_a_resumed_run_ends_with_the_same_weights(kind: str, tmp_path: Path) -> None:
    """C111: bit-equal from every checkpoint, within and at the border of passes over the text; dropout is on."""
    dataset, changes = RESUMED[kind]
    settings = {"save_strategy": "steps", "save_steps": 5, "max_steps": 22, **changes}
    whole = trained(tmp_path / "whole", dataset, tiny_model(dropout=0.2), **settings)
    checkpoints = sorted((tmp_path / "whole").glob("checkpoint-*"))
    assert len(checkpoints) > 2
    for checkpoint in checkpoints:
        resumed = trained(tmp_path / "again", dataset, tiny_model(seed=1, dropout=0.2), str(checkpoint), **settings)
        assert resumed.state.global_step == settings["max_steps"]
        assert_same_weights(resumed.model, whole.model)
        if checkpoint.name == f"checkpoint-{settings['max_steps']}":
            # it was finished, and nothing more is read
            continue
        for ours, theirs in zip(resumed.memory.layers, whole.memory.layers, strict=True):
            assert torch.equal(ours.tensors["hidden_states"], theirs.tensors["hidden_states"])


@pytest.mark.full
def test_a_checkpoint_at_the_end_of_a_pass_starts_the_next_one_afresh(tmp_path: Path) -> None:
    # 15 segments per pass
    settings = {"save_strategy": "steps", "save_steps": 15, "max_steps": 25}
    whole = trained(tmp_path / "whole", **settings)
    resumed = trained(tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-15"), **settings)
    assert_same_weights(resumed.model, whole.model)


def test_the_last_whole_checkpoint_is_found(tmp_path: Path) -> None:
    """A run that is killed while it saves leaves folders without the trainer's state, or with part of it."""
    assert last_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        trained(tmp_path, resume=True)
    for step, content in ((9, "{}"), (10, '{"global_step": 10}'), (11, '{"global_st'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if content is not None:
            (folder / "trainer_state.json").write_text(content)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-best" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("rows", [None, [1]])
def test_a_memory_file_holds_all_of_a_memory(rows: list[int] | None, tmp_path: Path) -> None:
    model = tiny_model().train()
    memory = TransfoXLMemory(model.config)
    write_memory(tmp_path / "fresh.safetensors", memory)
    model(random_ids(3, 7), cache=memory)
    if rows:
        memory.reset(rows)
    write_memory(tmp_path / "used.safetensors", memory, position={"step": 3})
    for name, expected in (("fresh", TransfoXLMemory(model.config)), ("used", memory)):
        restored = TransfoXLMemory(model.config)
        restored.load_state_dict(read_memory(tmp_path / f"{name}.safetensors"))
        segment = random_ids(3, 4, seed=5)
        assert torch.equal(model(segment, cache=restored).logits, model(segment, cache=expected).logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh.safetensors", "used.safetensors"]


# ---- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "rows"}, "`layout` must be one of .* but is 'rows'"),
        ({"layout": "documents", "varlen": True}, "`varlen` must be False with `layout='documents'`"),
        ({"remove_unused_columns": True}, "`remove_unused_columns` must be False"),
        ({"segment_length": 0}, "`segment_length` must be an int of at least 1, but is 0"),
        ({"eval_segment_length": 0}, "`eval_segment_length` must be an int of at least 1, but is 0"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size` must be .* at least 1, but is 0"),
        ({"per_device_eval_batch_size": 0}, "`per_device_eval_batch_size` must be .* at least 1, but is 0"),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be .* at least 1, but is 0"),
        ({"mem_len": -1}, "`mem_len` must be an int of 0 or more, but is -1"),
        ({"eval_mem_len": -1}, "`eval_mem_len` must be an int of 0 or more, but is -1"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` must be 0, but is 0.1"),
    ],
)
def test_impossible_arguments_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **changes)


@pytest.mark.parametrize(
    ("dataset", "changes", "message"),
    [
        (None, {}, "`train_dataset` must be a text to train on, but is None"),
        (TEXT[:5], {}, r"at least 2 tokens for each of `batch_size` \(3\) rows, 6 in all, but has 5"),
        (TokenStreams(TEXT, 4, 7), {}, r"`train_dataset` must have as many .* 3.* but has a batch size of 4"),
        (DocumentStreams(DOCUMENTS, 2, 7), {}, "`train_dataset` must have as many .* but has a batch size of 2"),
        (TEXT, {"train_sampling_strategy": "group_by_length"}, "`train_sampling_strategy` must keep the order"),
        (TEXT, {"accelerator_config": {"split_batches": True}}, "`split_batches` must be False"),
        (RESUMED["an iterable data set"][0], {"varlen": True}, "`varlen` must be False for an `IterableDataset`"),
        ([[1], [2]], {"layout": "documents"}, "`documents` must hold a text with a target"),
        (
            torch.tensor([1, 2, 99] * 9),
            {},
            "`train_dataset` must hold ids .* has 99 at position 2.* another tokenizer",
        ),
        (torch.tensor([1, -100] * 9), {}, "`train_dataset` must hold ids between 0 and 40 .* has -100 at position 1"),
        (TokenStreams([1, 99] * 9, 3, 7), {}, "`train_dataset` must hold ids .* has 99 at position 1"),
        ([[1, 2], [3, 99]], {"layout": "documents"}, r"`train_dataset\[1\]` must hold ids .* has 99 at position 1"),
        ([1, 2, 3], {"layout": "documents"}, r"`train_dataset\[0\]` must have one dimension"),
        ("a text", {}, "`train_dataset` must be a list, a tensor or an array of token ids.* but is a str"),
        ([[1, 2], [3]], {}, "`train_dataset` must be a list, a tensor .* but is a list that cannot be read as one"),
        (datasets.Dataset.from_dict({"ids": [[1, 2]]}), {}, "`train_dataset` must have a column 'input_ids'"),
        (datasets.Dataset.from_dict({"input_ids": [[1, None]]}), {}, "`train_dataset` must have an integer .* nulls"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_trained_is_refused(
    dataset: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """C13 among them: an order of its own for the segments."""
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, dataset, model, **changes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_librarys_default_order_is_replaced(tmp_path: Path) -> None:
    """C13: the library would shuffle a data set of this kind."""
    args = arguments(tmp_path)
    assert args.train_sampling_strategy == "random"
    trainer = TransfoXLTrainer(tiny_model(), args, train_dataset=torch.arange(40).repeat(8))
    batches = list(trainer.get_train_dataloader())
    for before, after in zip(batches, batches[1:], strict=False):
        assert torch.equal(after["input_ids"][:, 0], before["shift_labels"][:, -1])


def test_arguments_of_the_library_alone_are_refused(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    with pytest.raises(ValueError, match="`args` must be a `TransfoXLTrainingArguments`, but is a TrainingArguments"):
        TransfoXLTrainer(tiny_model(), TrainingArguments(str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match="`compute_metrics` must be None"):
        TransfoXLTrainer(tiny_model(), arguments(tmp_path), compute_metrics=lambda prediction: {})


def test_several_gpus_in_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    monkeypatch.setattr(type(args), "n_gpu", 2)
    with pytest.raises(ValueError, match="this one sees 2 GPUs.*`torchrun` or `accelerate launch`"):
        TransfoXLTrainer(tiny_model(), args, train_dataset=TEXT)


def test_documents_are_not_evaluated_by_processes_that_share_the_weights_out(tmp_path: Path) -> None:
    class Sharing(TransfoXLTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            # only accelerators are shared out by the library
            self.is_fsdp_enabled = True

    args = arguments(tmp_path, layout="documents", eval_strategy="steps", eval_steps=5)
    with pytest.raises(ValueError, match="`eval_strategy` must be 'no' with `layout='documents'`.* is 'steps'"):
        Sharing(tiny_model(), args, train_dataset=DOCUMENTS, eval_dataset=DOCUMENTS)


def test_processes_that_do_not_see_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun` on a CPU without `use_cpu`: every process would train alone and write the same files."""
    args = arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started, but each sees only itself.*`use_cpu=True`"):
        TransfoXLTrainer(tiny_model(), args, train_dataset=TEXT)


@pytest.mark.parametrize(
    ("dataset", "changes", "message"),
    [
        ({}, {}, "`eval_dataset` must be a text to evaluate, but is {}"),
        ([], {}, "`eval_dataset` must hold at least 2 tokens for each of 2 rows .* has 0"),
        (TEXT[:3], {}, "`eval_dataset` must hold at least 2 tokens for each of 2 rows .* has 3"),
        ({"one": TEXT, "two": TEXT[:3]}, {}, "`eval_dataset` must hold at least 2 tokens"),
        (torch.tensor([1, 99, 2, 3]), {}, "`eval_dataset` must hold ids between 0 and 40 .* has 99 at position 1"),
        (torch.rand(9), {}, "`eval_dataset` must hold integers"),
        (TokenStreams(TEXT, 2, 7), {}, "`eval_dataset` must be token ids or a data set .* but is a TokenStreams"),
        (RESUMED["an iterable data set"][0], {}, "`eval_dataset` must be .* of known length.* is a IterableDataset"),
        (datasets.Dataset.from_dict({"ids": [[1, 2]]}), {}, "`eval_dataset` must have a column 'input_ids'"),
        ([[1], [2]], {"layout": "documents"}, "`eval_dataset` must hold a text with a target"),
        ([[1, 2], [99, 2]], {"layout": "documents"}, r"`eval_dataset\[1\]` must hold ids"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_evaluated_is_refused_before_the_first_step(
    dataset: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    text = DOCUMENTS if changes else TEXT
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=3, **changes)
    trainer = TransfoXLTrainer(tiny_model(), args, train_dataset=text, eval_dataset=dataset)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("kind", ["a name", "without a head", "another model"])
def test_what_cannot_be_trained_with_a_memory_is_refused(kind: str, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = {
        "a name": "my_model",
        "without a head": tiny_model().transformer,
        "another model": GPT2LMHeadModel(GPT2Config(vocab_size=7, n_embd=8, n_layer=1, n_head=1)),
    }[kind]
    with pytest.raises(ValueError, match=f"`model` must be a `TransfoXLForCausalLM`, but is a {type(model).__name__}"):
        TransfoXLTrainer(model, arguments(tmp_path), train_dataset=TEXT)


def test_there_are_no_predictions(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="`predict` would keep .* use `evaluate`"):
        TransfoXLTrainer(tiny_model(), arguments(tmp_path)).predict(TEXT)


def test_texts_that_cannot_be_evaluated_are_refused(tmp_path: Path) -> None:
    trainer = TransfoXLTrainer(tiny_model(), arguments(tmp_path))
    with pytest.raises(ValueError, match="`eval_dataset` must be a text to evaluate, but is None"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="`eval_dataset` must hold at least 2 tokens for each of 2 rows .* has 3"):
        trainer.evaluate(TEXT[:3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment_length": 8}, r"these differ \(there, here\): {'segment_length': \(7, 8\)"),
        ({"per_device_train_batch_size": 2}, r"{'per_device_train_batch_size': \(3, 2\)"),
        ({"gradient_accumulation_steps": 2}, r"{'gradient_accumulation_steps': \(1, 2\)}"),
        ({"mem_len": 4}, "a memory with the settings .*mem_len"),
        ({"dataset": TEXT[:300]}, r"'text': \({'length': 307, .*}, {'length': 300, .*}\)"),
        ({"dataset": TEXT.flip(0)}, r"these differ \(there, here\): {'text': \({'length': 307, .*{'length': 307, .*"),
        ({"dataset": TokenStreams(TEXT, 3, 7, loss="half")}, r"{'loss': \('full', 'half'\)"),
        ({"dataset": TokenStreams(TEXT, 3, 7, varlen=True)}, r"'varlen': \(False, True\)"),
        ({"dataset": DOCUMENTS, "layout": "documents"}, r"'streams': \('TokenStreams', 'DocumentStreams'\)"),
        ({"varlen": True}, r"'varlen': \(False, True\)"),
        ({"ignore_data_skip": True}, "`ignore_data_skip` must be False"),
    ],
    ids=lambda value: None,
)
def test_a_run_with_other_streams_is_not_resumed(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    trained(tmp_path, **settings)
    model = tiny_model(seed=2)
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, **{"model": model, "resume": True, **settings, "max_steps": 5, **changes})
    assert_same_weights(model, tiny_model(seed=2))


def test_other_documents_are_not_gone_on_with(tmp_path: Path) -> None:
    settings = {"layout": "documents", "save_strategy": "steps", "save_steps": 3}
    trained(tmp_path, DOCUMENTS, max_steps=3, **settings)
    for others in (DOCUMENTS[:-1], [row[::-1] for row in DOCUMENTS]):
        with pytest.raises(ValueError, match=r"these differ \(there, here\): {'text'"):
            trained(tmp_path, others, max_steps=5, resume=True, **settings)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "memory-0-of-1.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_refused(name: str, tmp_path: Path) -> None:
    """The library would go on with a new optimizer."""
    trained(tmp_path, save_strategy="steps", save_steps=3, max_steps=3)
    (tmp_path / "checkpoint-3" / name).unlink()
    with pytest.raises(ValueError, match=f"`resume_from_checkpoint` must hold .*{name}"):
        trained(tmp_path, max_steps=5, resume=True)


def test_a_damaged_memory_is_refused_by_name(tmp_path: Path) -> None:
    trained(tmp_path, save_strategy="steps", save_steps=3, max_steps=3)
    path = tmp_path / "checkpoint-3" / "memory-0-of-1.safetensors"
    for content in (path.read_bytes()[:-9], (tmp_path / "checkpoint-3" / "model.safetensors").read_bytes(), b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"must hold the memory of a training, but {path} is damaged or holds"):
            trained(tmp_path, max_steps=5, resume=True)


def test_a_folder_that_is_none_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`resume_from_checkpoint` must be a checkpoint, but .*none is not a folder"):
        trained(tmp_path, resume=str(tmp_path / "none"))


def test_a_run_of_another_number_of_processes_is_not_resumed(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    trained(tmp_path, **settings)
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / "memory-0-of-1.safetensors").rename(checkpoint / "memory-0-of-2.safetensors")
    with pytest.raises(ValueError, match=r"must hold memory-0-of-1.safetensors.*\['memory-0-of-2.safetensors'\]"):
        trained(tmp_path, resume=str(checkpoint), **settings)
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 3


# ---- what a training leaves behind


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("made_by", ["model", "model_init"])
def test_a_training_leaves_the_configuration_as_it_was(made_by: str, use_cache: bool, tmp_path: Path) -> None:
    """R08: the library's Trainer writes `use_cache=False` there, and a model made of it reads a text per token."""
    config = tiny_config(use_cache=use_cache)
    before = config.to_dict()

    def make() -> Any:
        return TransfoXLForCausalLM(config)

    model = {"model": make()} if made_by == "model" else {"model_init": make}
    trainer = TransfoXLTrainer(args=arguments(tmp_path, max_steps=1), train_dataset=TEXT, **model)
    trainer.train()
    assert trainer.model.config.to_dict() == before
    trainer.save_model(str(tmp_path / "saved"))
    for other in (TransfoXLForCausalLM(config), TransfoXLForCausalLM.from_pretrained(tmp_path / "saved")):
        assert other.config.use_cache is use_cache
        assert (other.generation_config.use_cache is False) is (not use_cache)


def library_trainer(folder: Path, trainer_class: Any = Trainer, **changes: Any) -> Any:
    """The library's own on blocks, as the page has it at its end."""
    blocks = [{"input_ids": ids, "labels": ids} for ids in TEXT[:300].view(20, 15)]
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **changes,
    )
    return trainer_class(tiny_model(), args, train_dataset=blocks, eval_dataset=blocks[:3])


def test_the_librarys_trainer_leaves_the_configuration_as_it_was_if_told_so(tmp_path: Path) -> None:
    """R08: as the page says."""
    trainer = library_trainer(tmp_path, use_cache=True)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    assert trainer.model.config.to_dict() == tiny_config().to_dict()
    again = library_trainer(tmp_path)
    again.train()
    # the switch changes no number
    assert loss == pytest.approx(again.evaluate()["eval_loss"], abs=1e-6)
    assert again.model.config.use_cache is False
    # the model that was trained generates as before: its settings were made before
    assert again.model.generation_config.use_cache is not False


def test_a_loss_of_ones_own_gets_logits_in_training(tmp_path: Path) -> None:
    """R16: `return_logits=True`, without which they are None in train mode with labels."""

    class WithOwnLoss(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs, return_logits=True)
            logits, targets = outputs.logits[:, :-1], inputs["labels"][:, 1:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            assert_close("loss", loss, outputs.loss, atol=1e-5)
            return (loss, outputs) if return_outputs else loss

    losses = {}
    for trainer_class in (Trainer, WithOwnLoss):
        trainer = library_trainer(tmp_path, trainer_class)
        trainer.train()
        losses[trainer_class] = trainer.evaluate()["eval_loss"]
    assert losses[WithOwnLoss] == pytest.approx(losses[Trainer], abs=1e-4)
