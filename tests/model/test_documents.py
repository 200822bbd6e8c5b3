"""Classifiers of documents of any length, read in segments with a memory, and of tokens, against loops."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForTokenClassification, Trainer, TrainingArguments

import hf_txl
from hf_txl import TransfoXLConfig, TransfoXLForSequenceClassification, TransfoXLForTokenClassification
from hf_txl.classification_transfo_xl import pieces_of
from hf_txl.data import DocumentCollator
from hf_txl.document_training import TransfoXLDocumentTrainer
from hf_txl.reference.transformer_xl import SlowTransfoXL
from hf_txl.scoring import classify_documents
from hf_txl.training import TransfoXLTrainingArguments
from tests.helpers import assert_close
from tests.model.tiny_models import random_ids, tiny_config, tiny_model

LENGTHS = [17, 5, 1, 11, 6]
DOCUMENTS = [random_ids(1, length, seed=length)[0] for length in LENGTHS]
SEGMENT = 5
# float64 models; the sinusoids are float32
NUMBERS = 1e-5


def classifier(model_class: type = TransfoXLForSequenceClassification, **fields: Any) -> Any:
    large = {"num_labels": 3, "init_std": 0.3, "proj_init_std": 0.3}
    return tiny_model(model_class, **{**large, **fields}).double().eval()


def padded(documents: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, documents))
    ids, mask = torch.zeros(2, len(documents), width, dtype=torch.long)
    for row, document in enumerate(documents):
        place = slice(0, len(document)) if side == "right" else slice(width - len(document), width)
        ids[row, place], mask[row, place] = document, 1
    return ids, mask


def cut(document: torch.Tensor, last: int = SEGMENT) -> list[torch.Tensor]:
    """Segments, the last of `last` tokens; the first one holds the rest."""
    head, tail = document[:-last] if len(document) > last else document[:0], document[-last:]
    rest = len(head) % SEGMENT
    return [piece for piece in (head[:rest], *head[rest:].split(SEGMENT), tail) if len(piece)]


def pooled(states: torch.Tensor, kind: str) -> torch.Tensor:
    return {"last": states[-1], "mean": states.mean(0), "max": states.amax(0)}[kind]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["last", "mean", "max"])
@pytest.mark.parametrize("same_length", [True, False])
@torch.no_grad()
def test_documents_of_different_lengths_equal_loops(same_length: bool, pooling: str, side: str) -> None:
    """C62: each document read alone by a slow model, segment by segment with a memory, cut from the end."""
    model = classifier(same_length=same_length, mem_len=4, classifier_pooling=pooling)
    slow = SlowTransfoXL(model.config, model.state_dict())
    vectors = []
    for document in DOCUMENTS:
        memory = slow.new_memory(1)
        states = [slow.read(piece[None], memory)[0].hidden_states[-1] for piece in cut(document)]
        vectors.append(pooled(torch.cat(states), pooling))
    expected = torch.stack(vectors) @ model.score.weight.T
    ids, mask = padded(DOCUMENTS, side)
    logits = model(ids, attention_mask=mask, segment_length=SEGMENT).logits
    assert_close("logits", logits, expected, NUMBERS)
    assert_close(
        "scoring", classify_documents(model, DOCUMENTS, segment_length=SEGMENT, batch_size=2), expected, NUMBERS
    )


@pytest.mark.parametrize("pooling", ["last", "mean", "max"])
@torch.no_grad()
def test_one_segment_is_pooled_over_its_tokens(pooling: str) -> None:
    model = classifier(classifier_pooling=pooling)
    ids, mask = padded(DOCUMENTS, "right")
    states = model.transformer(ids, attention_mask=mask).last_hidden_state
    expected = torch.stack(
        [pooled(row[: len(document)], pooling) for row, document in zip(states, DOCUMENTS, strict=True)]
    )
    assert_close("logits", model(ids, attention_mask=mask).logits, expected @ model.score.weight.T, NUMBERS)


@pytest.mark.parametrize("gradient_segments", [1, 2])
def test_gradients_are_those_of_the_last_segments(gradient_segments: int) -> None:
    """A loop by hand: what comes before is read without gradient; then one call, whose loss is differentiated."""
    model = classifier(mem_len=12, same_length=True)
    document, label = DOCUMENTS[0], torch.tensor([2])
    length = SEGMENT * gradient_segments
    memory = model.init_memory(1, stores="hidden_states")
    with torch.no_grad():
        for piece in cut(document, length)[:-1]:
            model.transformer(piece[None], cache=memory)
    states = model.transformer(document[None, -length:], cache=memory).last_hidden_state
    F.cross_entropy(states[:, -1] @ model.score.weight.T, label).backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    settings = {"segment_length": SEGMENT, "gradient_segments": gradient_segments}
    model(document[None], labels=label, **settings).loss.backward()
    for name, weight in model.named_parameters():
        assert_close(name, weight.grad, expected[name], 1e-10)

    features = torch.randn(1, len(document), model.config.d_model, dtype=torch.float64, requires_grad=True)
    model(inputs_embeds=features, labels=label, **settings).loss.backward()
    assert features.grad is not None
    has_gradient = features.grad[0].abs().sum(-1) > 0
    assert has_gradient.tolist() == [False] * (len(document) - length) + [True] * length


@torch.no_grad()
def test_segments_with_gradient_do_not_change_logits_under_a_window() -> None:
    model = classifier(mem_len=4, same_length=True)
    ids, mask = padded(DOCUMENTS, "left")
    expected = model(ids, attention_mask=mask, segment_length=SEGMENT).logits
    for number in (2, 3, 9):
        logits = model(ids, attention_mask=mask, segment_length=SEGMENT, gradient_segments=number).logits
        assert_close("logits", logits, expected, NUMBERS)


@torch.no_grad()
def test_a_memory_that_is_given_precedes_the_text() -> None:
    model = classifier(mem_len=6, same_length=True)
    before, document = random_ids(1, 7, seed=3), DOCUMENTS[0][None]
    memory = model.init_memory(1)
    model.transformer(before, cache=memory)
    whole = model(torch.cat([before, document], 1), segment_length=SEGMENT).logits
    assert_close("logits", model(document, segment_length=SEGMENT, cache=memory).logits, whole, NUMBERS)


def test_pads_are_found_by_their_token() -> None:
    model = classifier(pad_token_id=0)
    rows = [document.clamp(min=1) for document in DOCUMENTS]
    ids, mask = padded(rows, "right")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, segment_length=SEGMENT).logits
        assert torch.equal(model(ids, segment_length=SEGMENT).logits, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"segment_length": 0}, "`segment_length` must be an int of 1 or more, but is 0"),
        ({"segment_length": 5, "gradient_segments": 0}, "`gradient_segments` must be an int of 1 or more, but is 0"),
        ({"segment_length": 5, "output_attentions": True}, "`output_attentions` must be None with `segment_length`"),
        ({"segment_length": 5, "use_cache": True}, "`use_cache` must be None with `segment_length`"),
        ({"gradient_segments": 2}, "`gradient_segments` must be 1 without `segment_length`"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classifier()(random_ids(1, 8), **settings)


def test_the_configuration_knows_its_poolings() -> None:
    with pytest.raises(ValueError, match="`classifier_pooling` must be one of"):
        TransfoXLConfig(classifier_pooling="first")


def test_columns_of_pads_are_left_out() -> None:
    ids = torch.tensor([[0, 0, 1, 2, 3, 0], [0, 4, 0, 5, 0, 0]])
    pieces = list(pieces_of(ids, ids != 0, 2))
    assert [piece.inputs.tolist() for piece in pieces] == [[[1], [0]], [[2, 3], [4, 5]]]
    assert [piece.mask.all().item() for piece in pieces] == [False, True]
    assert [piece.is_last for piece in pieces] == [False, True]


# --- tokens


@torch.no_grad()
def test_token_classes_go_on_with_a_memory() -> None:
    model = classifier(TransfoXLForTokenClassification, same_length=True, mem_len=4)
    slow = SlowTransfoXL(model.config, model.state_dict())
    ids, memory = random_ids(2, 13), model.init_memory(2)
    pieces = [model(ids[:, piece], cache=memory).logits for piece in (slice(0, 5), slice(5, 6), slice(6, 13))]
    for row in range(2):
        states = slow.read(ids[row][None], slow.new_memory(1))[0].hidden_states[-1]
        expected = states @ model.score.weight.T + model.score.bias
        assert_close("logits", torch.cat(pieces, dim=1)[row], expected, NUMBERS)


def test_the_loss_of_tokens_leaves_out_what_has_no_label() -> None:
    model = classifier(TransfoXLForTokenClassification)
    ids, labels = random_ids(2, 6), torch.tensor([[0, 1, -100, 2, 2, 1], [-100] * 5 + [0]])
    output = model(ids, labels=labels)
    probabilities = output.logits.log_softmax(-1)
    scored = [(row, column) for row in range(2) for column in range(6) if labels[row, column] != -100]
    expected = -sum(probabilities[row, column, labels[row, column]] for row, column in scored) / len(scored)
    assert_close("loss", output.loss, expected, 1e-6)
    with pytest.raises(ValueError, match=r"`labels` must have shape \(batch_size, sequence_length\) = \[2, 6\]"):
        model(ids, labels=labels[:, 1:])
    with pytest.raises(ValueError, match=r"`labels` must be between 0 and 2 \(`num_labels` is 3\)"):
        model(ids, labels=labels + 1)


def test_a_classifier_of_tokens_is_saved_and_loaded(tmp_path: Any) -> None:
    model = tiny_model(TransfoXLForTokenClassification, num_labels=4)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert type(loaded) is hf_txl.TransfoXLForTokenClassification
    ids = random_ids(1, 7)
    with torch.no_grad():
        assert_close("logits", loaded(ids).logits, model.eval()(ids).logits, 1e-5)


# --- training

ROWS = [{"input_ids": document.tolist(), "label": int(document[0]) % 3, "name": "x"} for document in DOCUMENTS]
COMMON = {"max_steps": 3, "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
COMMON |= {
    "save_strategy": "no",
    "per_device_train_batch_size": 5,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
}


def trained_by_hand(**lengths: Any) -> dict[str, torch.Tensor]:
    """Three steps of AdamW on all documents, each read alone."""
    torch.manual_seed(0)
    model = TransfoXLForSequenceClassification(tiny_config(num_labels=3, dropout=0.0, dropatt=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, eps=1e-3)
    for _ in range(3):
        losses = []
        for row in ROWS:
            memory = model.init_memory(1, **lengths)
            label = torch.tensor([row["label"]])
            output = model(torch.tensor([row["input_ids"]]), labels=label, segment_length=SEGMENT, cache=memory)
            losses.append(output.loss)
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def fresh_model() -> TransfoXLForSequenceClassification:
    torch.manual_seed(0)
    return TransfoXLForSequenceClassification(tiny_config(num_labels=3, dropout=0.0, dropatt=0.0))


def test_the_librarys_trainer_reads_in_segments(tmp_path: Any) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), adam_epsilon=1e-3, remove_unused_columns=False, **COMMON)
    model = fresh_model()
    Trainer(model, args, train_dataset=ROWS, data_collator=DocumentCollator(segment_length=SEGMENT)).train()
    for name, expected in trained_by_hand().items():
        assert_close(name, model.state_dict()[name], expected, 1e-5)


def test_the_trainer_of_documents(tmp_path: Any) -> None:
    lengths = {"mem_len": 3, "same_length": True}
    args = TransfoXLTrainingArguments(
        output_dir=str(tmp_path), adam_epsilon=1e-3, layout="documents", segment_length=SEGMENT, **lengths, **COMMON
    )
    model = fresh_model()
    trainer = TransfoXLDocumentTrainer(
        model, args, train_dataset=ROWS, eval_dataset=ROWS, compute_metrics=lambda found: {"n": len(found.predictions)}
    )
    trainer.train()
    for name, expected in trained_by_hand(**lengths).items():
        assert_close(name, model.state_dict()[name], expected, 1e-5)
    metrics = trainer.evaluate()
    with torch.no_grad():
        logits = classify_documents(model, DOCUMENTS, segment_length=SEGMENT, **lengths)
    labels = torch.tensor([row["label"] for row in ROWS])
    assert metrics["eval_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-5)
    assert metrics["eval_n"] == len(ROWS) and model.config.use_cache
    assert_close("predictions", torch.tensor(trainer.predict(ROWS).predictions), logits, 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "stream"}, "`args.layout` must be 'documents', but is 'stream'"),
        ({"gradient_segments": 0}, "`gradient_segments` must be"),
    ],
)
def test_arguments_that_do_not_fit_documents_are_refused(tmp_path: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings = {"output_dir": str(tmp_path), "layout": "documents", "use_cpu": True, **changes}
        TransfoXLDocumentTrainer(fresh_model(), TransfoXLTrainingArguments(**settings))
