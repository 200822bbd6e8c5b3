"""TRL's trainers, which multiply hidden states by the output embeddings themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig

from hf_txl import TransfoXLTokenizer
from tests.helpers import assert_close
from tests.t0 import LARGE_WEIGHTS, make_model, random_ids

trl = pytest.importorskip("trl")

PLAIN = {"cutoffs": [], "div_val": 1}
SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "report_to": [],
    "use_cpu": True,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def tokenizer() -> TransfoXLTokenizer:
    words = [f"w{number}" for number in range(96)]
    return TransfoXLTokenizer.from_vocabulary(["<unk>", "<eos>", "<pad>", *words], "pretokenized", pad_token="<pad>")


def fine_tuning(folder: Path, model: Any, ids: torch.Tensor, peft_config: Any = None, **settings: Any) -> Any:
    return trl.SFTTrainer(
        model,
        trl.SFTConfig(str(folder), **{**SETTINGS, **settings}),
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


@pytest.mark.parametrize("adapted", [False, True])
def test_supervised_fine_tuning_with_one_head(adapted: bool, tmp_path: Path) -> None:
    """R11: the first loss is that of the next token, and a step lowers it."""
    model, ids = make_model(**{**LARGE_WEIGHTS, **PLAIN}), random_ids(4, 9)
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM") if adapted else None
    trainer = fine_tuning(tmp_path, model, ids, config, learning_rate=1e-2, lr_scheduler_type="constant")
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert_close("first loss", torch.tensor(losses[0]), expected, atol=1e-4)
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    "settings", [{"packing": True, "max_length": 16}, {"padding_free": True, "max_length": None}], ids=repr
)
def test_packed_texts_are_fine_tuned_one_by_one(settings: dict[str, Any], tmp_path: Path) -> None:
    """R11, R02: several texts in one row, told apart by positions that start again."""
    model, ids = make_model(**{**LARGE_WEIGHTS, **PLAIN}), random_ids(4, 7)
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    trainer = fine_tuning(tmp_path, model, ids, **settings)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert_close("first loss", torch.tensor(losses[0]), expected, atol=1e-4)


def test_policy_optimisation_with_one_head(tmp_path: Path) -> None:
    """R11: on the policy that wrote the texts the loss is minus the mean advantage of their tokens."""
    model = make_model(**{**LARGE_WEIGHTS, **PLAIN, "mem_len": 40, "eos_token_id": 1, "pad_token_id": 2})
    with torch.no_grad():
        # some texts end early, so that lengths differ
        model.crit.out_layers[0].bias[1] = 6.0
    written: list[tuple[list[list[int]], list[float]]] = []

    def reward(completions: Any, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        written.append((completion_ids, [float(index % 3 + len(ids)) for index, ids in enumerate(completion_ids)]))
        return written[-1][1]

    torch.manual_seed(0)
    trainer = trl.GRPOTrainer(
        model,
        reward,
        trl.GRPOConfig(str(tmp_path), **SETTINGS, num_generations=4, max_completion_length=8, beta=0.0, seed=3),
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6 w7 w8"]}),
        processing_class=tokenizer(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == len(written) == 2
    for loss, (texts, rewards) in zip(losses, written, strict=True):
        lengths, values = torch.tensor([float(len(text)) for text in texts]), torch.tensor(rewards)
        advantages = (values - values.mean()) / (values.std() + 1e-4)
        assert_close("loss", torch.tensor(loss), -(advantages * lengths).sum() / lengths.sum(), atol=1e-4)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_head_with_clusters_is_refused_by_name(method: str, tmp_path: Path) -> None:
    """R11"""
    model = make_model(eos_token_id=1, pad_token_id=2)
    if method == "sft":
        trainer = fine_tuning(tmp_path, model, random_ids(4, 7))
    else:
        trainer = trl.GRPOTrainer(
            model,
            lambda completions, **kwargs: [float(index) for index in range(len(completions))],
            trl.GRPOConfig(str(tmp_path), **SETTINGS, num_generations=4, max_completion_length=3),
            train_dataset=Dataset.from_dict({"prompt": ["w1 w2 w3"]}),
            processing_class=tokenizer(),
        )
    with pytest.raises(AttributeError, match="not a single matrix.*TRL.*Use `TransfoXLTrainer` or the library's"):
        trainer.train()
