"""Keywords that the library sends: each is obeyed or refused by name, and none is swallowed.

The right answer is the same call without the keyword, what the keyword says, or a text read as alone.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache, Trainer, TrainingArguments
from transformers.utils.generic import TransformersKwargs

from hf_txl import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLMemory, TransfoXLModel
from hf_txl.arguments_transfo_xl import KEYWORDS
from tests.helpers import assert_close
from tests.t0 import FLOAT32, LARGE_WEIGHTS, make_model, random_ids

MODEL_CLASSES = [TransfoXLModel, TransfoXLForCausalLM, TransfoXLForSequenceClassification]
every_class = pytest.mark.parametrize("model_class", MODEL_CLASSES)
PLAIN: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 3}

COUNTING = torch.arange(7)[None]
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
ENDS = torch.tensor([0, 4, 7], dtype=torch.int32)
# keyword -> values that change nothing, and values that are refused; what is obeyed has a test of its own below
ROWS: dict[str, tuple[list[Any], list[Any]]] = {
    "output_hidden_states": ([False], ["all", 1.5, [4], [-5], [0, None]]),
    "output_attentions": ([False], [[0], "all"]),
    "num_items_in_batch": ([], []),
    "skip_logits": ([False], []),
    "position_ids": (
        [COUNTING, COUNTING.expand(2, -1), COUNTING.int()],
        [PACKED + 1, COUNTING + 1, 2 * COUNTING, COUNTING.flip(1), COUNTING - 1, COUNTING[0]],
    ),
    "is_causal": ([True], [False]),
    "output_router_logits": ([False], [True]),
    "cu_seq_lens_q": ([], [ENDS, ENDS + 7]),
    "cu_seq_lens_k": ([], [ENDS, ENDS + 7]),
    "max_length_q": ([4], []),
    "max_length_k": ([4], []),
    "seq_idx": ([], [COUNTING[:, :4]]),
    "reset_before": ([torch.zeros(1, 7, dtype=torch.bool)], [COUNTING[:, :4] > 2, COUNTING]),
}
# names of `Trainer` and of our own models, which `generate` refuses itself as arguments of no model
NOT_FOR_GENERATE = {"skip_logits", "reset_before"}


def same_output(actual: Any, expected: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(actual[name], value), name


def test_every_keyword_of_the_installed_release_has_a_row() -> None:
    """R02: the kind. What a release adds is refused as unknown until it has one."""
    missing = {*TransformersKwargs.__annotations__} - {*KEYWORDS}
    assert not missing, f"no row in KEYWORDS for {sorted(missing)}"
    assert {*ROWS} == {*KEYWORDS}


@every_class
@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_a_keyword_changes_nothing_or_is_refused(name: str, model_class: Any) -> None:
    model = make_model(model_class, **LARGE_WEIGHTS)
    ids = random_ids(2, 7)
    expected = model(ids)
    neutral, refused = ROWS[name]
    for value in [None, *neutral]:
        same_output(model(ids, **{name: value}), expected)
    for value in refused:
        with pytest.raises(ValueError, match=f"`{name}` must"):
            model(ids, **{name: value})


@pytest.mark.parametrize("name", [name for name in ROWS if name not in NOT_FOR_GENERATE])
@torch.no_grad()
def test_generate_changes_nothing_for_a_keyword_or_refuses_it(name: str) -> None:
    model = make_model(**LARGE_WEIGHTS)
    ids = random_ids(2, 7)
    expected = model.generate(ids, **PLAIN)
    neutral, refused = ROWS[name]
    for value in neutral:
        # a batch of positions is needed where the library repeats rows
        assert torch.equal(model.generate(ids, **{name: value}, **PLAIN), expected)
    for value in refused:
        with pytest.raises(ValueError, match=name):
            model.generate(ids, **{name: value}, **PLAIN)


@torch.no_grad()
def test_generate_refuses_what_only_a_trainer_says() -> None:
    for name in NOT_FOR_GENERATE:
        with pytest.raises(ValueError, match=name):
            make_model().generate(random_ids(1, 4), **{name: True}, **PLAIN)


# --- what is obeyed


@every_class
@torch.no_grad()
def test_outputs_that_are_asked_for_are_returned(model_class: Any) -> None:
    output = make_model(model_class)(random_ids(2, 7), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 4 and len(output.attentions) == 3
    model = make_model()
    output = model.generate(
        random_ids(2, 4), output_hidden_states=[0, 2], output_attentions=True, return_dict_in_generate=True, **PLAIN
    )
    assert [states is not None for states in output.hidden_states[0]] == [True, False, True, False]
    assert len(output.attentions[0]) == 3


@torch.no_grad()
def test_the_number_of_items_divides_the_losses() -> None:
    ids = random_ids(2, 7)
    output = make_model()(ids, labels=ids, num_items_in_batch=torch.tensor(5))
    assert_close("loss", output.loss, output.losses.sum() / 5, **FLOAT32)
    classifier = make_model(TransfoXLForSequenceClassification, num_labels=3)
    labels = torch.tensor([2, 0])
    output = classifier(ids, labels=labels, num_items_in_batch=5)
    expected = torch.nn.functional.cross_entropy(output.logits, labels, reduction="sum") / 5
    assert_close("loss", output.loss, expected, **FLOAT32)
    # nothing to divide
    same_output(make_model(TransfoXLModel)(ids, num_items_in_batch=5), make_model(TransfoXLModel)(ids))
    assert torch.equal(make_model().generate(ids, num_items_in_batch=5, **PLAIN), make_model().generate(ids, **PLAIN))


@torch.no_grad()
def test_logits_are_skipped_where_a_trainer_says_so() -> None:
    ids = random_ids(2, 7)
    assert make_model()(ids, labels=ids, skip_logits=True).logits is None
    for model_class in (TransfoXLModel, TransfoXLForSequenceClassification):
        same_output(make_model(model_class)(ids, skip_logits=True), make_model(model_class)(ids))


# --- positions


def counted(mask: torch.Tensor, at_pads: int) -> torch.Tensor:
    """As the library's `generate` counts real tokens."""
    return (mask.cumsum(1) - 1).masked_fill(mask == 0, at_pads)


MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])


@every_class
@pytest.mark.parametrize("at_pads", [0, 1])
@torch.no_grad()
def test_positions_of_real_tokens_may_skip_pads(at_pads: int, model_class: Any) -> None:
    model = make_model(model_class, **LARGE_WEIGHTS)
    ids = random_ids(3, 8)
    expected = model(ids, attention_mask=MASK)
    same_output(model(ids, attention_mask=MASK, position_ids=counted(MASK, at_pads)), expected)
    with pytest.raises(ValueError, match="`position_ids` must .* in row 0"):
        model(ids, attention_mask=MASK, position_ids=torch.arange(8)[None])


@torch.no_grad()
def test_positions_go_on_behind_a_library_cache() -> None:
    """From the number of real tokens that it has read, whether it holds them or not."""
    model = make_model(**LARGE_WEIGHTS)
    ids = random_ids(3, 16)
    mask = (torch.arange(16) >= torch.tensor([[3], [9], [0]])).long()
    positions = counted(mask, 0)
    expected = model(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config)).logits
    cache = DynamicCache(config=model.config)
    for part in (slice(0, 8), slice(8, 9), slice(9, 16)):
        for wrong in (positions[:, part] + 1, positions[:, part].flip(1) + 1):
            with pytest.raises(ValueError, match="`position_ids`"):
                model(ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache, position_ids=wrong)
        logits = model(
            ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache, position_ids=positions[:, part]
        ).logits
        real = mask[:, part].bool()
        assert_close("logits", logits[real], expected[:, part][real], atol=1e-4)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"`position_ids` .*real tokens that `cache` has read .*16"):
        model(ids[:, :2], past_key_values=cache, position_ids=torch.arange(2)[None])
    model(ids[:, :2], past_key_values=cache, position_ids=torch.arange(16, 18)[None])


@torch.no_grad()
def test_positions_behind_a_memory_go_on_or_are_those_of_each_segment() -> None:
    """A memory does not count what it has read; a row that begins anew among others that go on is a mistake."""
    model = make_model(**LARGE_WEIGHTS)
    ids = random_ids(2, 5)
    begin, goes_on = torch.arange(5)[None], torch.arange(20, 25)[None]
    mixed = torch.cat([begin, goes_on])
    memory = model.init_memory(2)
    model(ids, cache=memory, position_ids=begin)
    for positions in (begin, goes_on):
        branch, plain = memory.select([0, 1]), memory.select([0, 1])
        same_output(model(ids, cache=branch, position_ids=positions), model(ids, cache=plain))
    for wrong in (mixed, goes_on.flip(1)):
        with pytest.raises(ValueError, match=r"`position_ids` .*`memory.reset\(rows\)`"):
            model(ids, cache=memory.select([0, 1]), position_ids=wrong)
    # what the message says
    memory.reset([0])
    model(ids, cache=memory, position_ids=mixed)


@pytest.mark.parametrize("how", ["cache", "no cache", "memory", "beams"])
@torch.no_grad()
def test_generate_takes_positions_as_it_counts_them(how: str) -> None:
    model = make_model(**LARGE_WEIGHTS, pad_token_id=0)
    ids, mask = random_ids(2, 8), MASK[[0, 2]]
    settings: dict[str, Any] = {**PLAIN, "max_new_tokens": 9, "attention_mask": mask}
    settings |= {"beams": {"num_beams": 3}, "no cache": {"use_cache": False}}.get(how, {})
    outputs = []
    for positions in ({}, {"position_ids": counted(mask, 1)}):
        memory: dict[str, Any] = {"past_key_values": model.init_memory(2)} if how == "memory" else {}
        outputs.append(model.generate(ids, **settings, **positions, **memory))
    assert torch.equal(*outputs)


def test_generate_makes_no_positions() -> None:
    """They would be checked at every step: the library makes them where `forward` names them."""
    for model_class in MODEL_CLASSES:
        assert "position_ids" not in inspect.signature(model_class.forward).parameters


@torch.no_grad()
def test_absolute_kinds_generate_without_positions() -> None:
    model = make_model(attention_kind="absolute_sinusoid")
    with pytest.raises(ValueError, match="`position_ids` must be None"):
        model.generate(random_ids(1, 4), position_ids=torch.arange(4)[None], **PLAIN)


@torch.no_grad()
def test_a_program_takes_no_positions() -> None:
    """It cannot read whether they are right."""
    model = make_model()
    # the programs of other tests count towards the limit of how many there may be
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="`position_ids` must be None where the model is compiled"):
        run(random_ids(1, 7), position_ids=COUNTING)
    with pytest.raises(Exception, match="`position_ids` must be None where the model is compiled"):
        torch.export.export(model, (random_ids(1, 7),), {"position_ids": COUNTING})


# --- packed texts


TEXTS = [[1, 2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize("marks", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}])
@torch.no_grad()
def test_packed_texts_equal_the_texts_alone(marks: dict[str, bool]) -> None:
    """R02."""
    model = make_model()
    batch = DataCollatorWithFlattening(return_tensors="pt", **marks)([{"input_ids": text} for text in TEXTS])
    marked = {*batch} - {"input_ids", "labels"}
    assert marked >= {"position_ids"}
    alone = [model(torch.tensor([text])).logits[0] for text in TEXTS]
    loss = torch.cat(
        [model(torch.tensor([text]), labels=torch.tensor([text])).losses[0, :-1] for text in TEXTS]
    ).mean()
    for name in marked - {"max_length_q", "max_length_k"}:
        for labels in (batch["labels"], batch["input_ids"]):
            output = model(batch["input_ids"], labels=labels, **{name: batch[name]})
            assert_close("logits", output.logits[0], torch.cat(alone), atol=1e-5)
            assert_close("loss", output.loss, loss, atol=1e-5)
    assert_close("loss", model(**batch).loss, loss, atol=1e-5)


@torch.no_grad()
def test_one_text_alone_is_not_packed() -> None:
    model = make_model()
    batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": TEXTS[0]}])
    same_output(model(**batch), model(batch["input_ids"], labels=batch["labels"]))


def test_a_trainer_that_packs_trains_the_texts_one_by_one(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"input_ids": text} for text in TEXTS]
    model = make_model()
    with torch.no_grad():
        losses = [model(torch.tensor([text]), labels=torch.tensor([text])).losses[0, :-1] for text in TEXTS]
    trainer = Trainer(model, args, train_dataset=rows, data_collator=DataCollatorWithFlattening())
    trainer.train()
    assert_close("loss", torch.tensor(trainer.state.log_history[0]["loss"]), torch.cat(losses).mean(), atol=1e-4)


@pytest.mark.parametrize("mask", [[[1, 1, 1, 1, 2, 2, 2]], [[0.0, 0.0, 0.0, -1e9, -1e9, 0.0, 0.0]], [[-1] * 7]])
@pytest.mark.parametrize("state", ["none", "library", "memory"])
@torch.no_grad()
def test_masks_that_number_texts_or_are_added_to_scores_are_refused(state: str, mask: list[Any]) -> None:
    model = make_model()
    caches = {"none": None, "library": DynamicCache(config=model.config), "memory": TransfoXLMemory(model.config)}
    with pytest.raises(ValueError, match="`attention_mask` must be 1 for real tokens and 0 for pads"):
        model(random_ids(1, 7), attention_mask=torch.tensor(mask), past_key_values=caches[state])
