"""A causal language model to the library and to programs that look up what a model is for."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.models.auto import modeling_auto

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLTokenizer
from tests.helpers import assert_close
from tests.t0 import FLOAT32, LARGE_WEIGHTS, make_config, make_model, random_ids

PLAIN = {"cutoffs": [], "div_val": 1}
SMOOTHING = 0.1


class Derived(TransfoXLForCausalLM):
    """A class of a user."""


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": 1,
        "per_device_train_batch_size": 3,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


def rows_with_ignored() -> tuple[torch.Tensor, torch.Tensor]:
    ids = random_ids(3, 7)
    labels = ids.clone()
    labels[0, :3] = -100
    labels[2, 5:] = -100
    return ids, labels


@torch.no_grad()
def smoothed_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(1 - e) times the loss of the next token and e times the mean over the vocabulary, over targets that count."""
    scores = model(ids).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    total, count = 0.0, 0
    for row in range(targets.shape[0]):
        for position in range(targets.shape[1]):
            target = int(targets[row, position])
            if target != -100:
                here = -scores[row, position]
                total += (1 - SMOOTHING) * here[target] + SMOOTHING * here.mean()
                count += 1
    return total / count


@pytest.mark.parametrize("kind", ["plain", "clusters", "derived", "peft"])
def test_label_smoothing_of_the_trainer_smooths_the_loss_of_the_next_token(kind: str, tmp_path: Path) -> None:
    """R01"""
    fields = {} if kind == "clusters" else PLAIN
    model = make_model(Derived if kind == "derived" else TransfoXLForCausalLM, **{**LARGE_WEIGHTS, **fields})
    ids, labels = rows_with_ignored()
    expected = smoothed_loss(model, ids, labels)
    if kind == "peft":
        model = get_peft_model(model, LoraConfig(target_modules=["o_net"], task_type="CAUSAL_LM"))
    data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})
    trainer = Trainer(
        model,
        arguments(tmp_path, label_smoothing_factor=SMOOTHING),
        train_dataset=data,
        eval_dataset=data,
    )
    assert_close("evaluated", torch.tensor(trainer.evaluate()["eval_loss"]), expected, **FLOAT32)
    trainer.train()
    trained = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert_close("trained", torch.tensor(trained), expected, atol=1e-4)


def test_subclasses_count_targets_and_take_losses_as_their_parents(tmp_path: Path) -> None:
    """R01: the library goes by the name of the class; the first of 7 tokens of a row is no target."""
    model = make_model(Derived, **{**LARGE_WEIGHTS, **PLAIN})
    ids = random_ids(3, 7)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    trainer = Trainer(model, arguments(tmp_path), train_dataset=data)
    trainer.train()
    trained = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert_close("trained", torch.tensor(trained), expected, atol=1e-4)

    class Classifier(TransfoXLForSequenceClassification):
        pass

    classifier = make_model(Classifier, **LARGE_WEIGHTS, num_labels=3)
    labels = torch.tensor([0, 2, 1])
    output = classifier(ids, labels=labels)
    assert_close("classes", output.loss, F.cross_entropy(output.logits, labels), **FLOAT32)


@pytest.mark.parametrize(
    ("names", "class_name"),
    [
        ("MODEL_MAPPING_NAMES", "TransfoXLModel"),
        ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "TransfoXLForCausalLM"),
        ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "TransfoXLForSequenceClassification"),
    ],
)
def test_lists_of_the_library_name_the_classes(names: str, class_name: str) -> None:
    """R01: lm-eval looks up the model type, the library's `Trainer`, model cards and server the class."""
    assert getattr(modeling_auto, names)["transfo-xl"] == class_name


def test_the_auto_classes_still_work() -> None:
    """R01: for the entries of some lists the library would import a module that it does not have."""
    config = make_config()
    assert type(AutoConfig.for_model("transfo-xl", vocab_size=99, cutoffs=[])) is TransfoXLConfig
    assert "transfo-xl" in CONFIG_MAPPING
    for auto, name in (
        (AutoModel, "TransfoXLModel"),
        (AutoModelForCausalLM, "TransfoXLForCausalLM"),
        (AutoModelForSequenceClassification, "TransfoXLForSequenceClassification"),
    ):
        assert type(auto.from_config(config)).__name__ == name
    # whoever lists all models takes the types that stand here too, and imports their modules
    assert "transfo-xl" not in modeling_auto.CONFIG_MAPPING_NAMES


def test_text_generation_pipelines_know_the_class(caplog: pytest.LogCaptureFixture) -> None:
    """R01: the library logs an error for classes that are not in its list."""
    words = [f"w{number}" for number in range(97)]
    tokenizer = TransfoXLTokenizer.from_vocabulary(["<unk>", "<eos>", *words], "pretokenized")
    generator = pipeline("text-generation", model=make_model(**PLAIN), tokenizer=tokenizer)
    texts = generator("w3 w4 w5", max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert texts[0]["generated_text"].startswith("w3 w4 w5")
    assert "is not supported" not in caplog.text
