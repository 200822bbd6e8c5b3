"""The card that `TransfoXLTrainer` writes about the model that it trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from hf_txl import TransfoXLForCausalLM
from hf_txl.scoring import evaluate_stream
from hf_txl.training import TransfoXLTrainer
from tests.model.tiny_models import random_ids, tiny_model
from tests.training.test_trainer import TEXT, arguments

pytest.importorskip("datasets")
TRAINED = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
HELD_OUT = random_ids(1, 61)[0]


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    made = TransfoXLTrainer(
        tiny_model(), arguments(tmp_path / "run", **TRAINED), train_dataset=TEXT, eval_dataset=HELD_OUT
    )
    made.train()
    return made


def test_a_card_tells_data_settings_and_perplexity_by_memory_length(trainer: Any) -> None:
    folder = Path(trainer.args.output_dir)
    trainer.evaluate_memory_lengths([0, 3, 8])
    (folder / "curves.png").write_bytes(b"")
    trainer.create_model_card(dataset="novels.txt", language="en", license="mit")
    card = ModelCard.load(folder / "README.md")
    assert (card.data.language, card.data.license, card.data.library_name) == ("en", "mit", "transformers")
    measured = {result.metric_name: result.metric_value for result in card.data.eval_results}
    for mem_len in (0, 3, 8):
        score = evaluate_stream(trainer.model, HELD_OUT, segment_length=7, batch_size=2, mem_len=mem_len)
        name = f"perplexity of the validation text, memory of {mem_len} tokens"
        assert measured[name] == pytest.approx(score.perplexity, abs=1e-3)
        assert f"| {mem_len} | {score.perplexity:.2f} | {score.bits_per_token:.4f} |" in card.text
    assert "novels.txt: 307 tokens" in card.text
    assert "| `steps` | 2 |" in card.text and "| `streams` | 3 |" in card.text and "(curves.png)" in card.text
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert f"| 2 | {last['eval_loss']:.4f} | {last['eval_perplexity']:.2f} |" in card.text


def test_a_card_shows_the_evaluation_during_training_where_no_other_was_made(trainer: Any) -> None:
    trainer.create_model_card()
    card = ModelCard.load(Path(trainer.args.output_dir) / "README.md")
    (result,) = card.data.eval_results
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    assert result.metric_value == pytest.approx(last["eval_perplexity"], abs=1e-3)
    assert result.metric_name.endswith(f"memory of {trainer.model.config.mem_len} tokens")


def test_a_card_says_that_nothing_was_evaluated(tmp_path: Path) -> None:
    trainer = TransfoXLTrainer(tiny_model(), arguments(tmp_path / "run", max_steps=1), train_dataset=TEXT)
    trainer.train()
    trainer.create_model_card()
    card = ModelCard.load(tmp_path / "run" / "README.md")
    assert "It was not evaluated." in card.text and not card.data.eval_results


def test_the_card_loads_the_model_as_it_says(trainer: Any) -> None:
    """The code in the card runs, but for the tokenizer, which this run does not have."""
    trainer.save_model()
    trainer.create_model_card()
    folder = trainer.args.output_dir
    code = ModelCard.load(Path(folder) / "README.md").text.partition("```python\n")[2].partition("```")[0]
    lines = [line for line in code.splitlines() if "AutoTokenizer.from" not in line]
    values: dict[str, Any] = {}
    exec("\n".join(lines).replace('"run"', repr(folder)), values)
    assert isinstance(values["model"], TransfoXLForCausalLM)
    trained = trainer.model.state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in values["model"].state_dict().items())
