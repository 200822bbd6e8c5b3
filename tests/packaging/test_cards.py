"""The committed cards, and the example model."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, parse_eval_result_entries
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_txl
from hf_txl.scoring import evaluate_stream

ROOT = Path(__file__).resolve().parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_model_cards", ROOT / "docs" / "write_model_cards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CARDS = load_script().all_cards()


@pytest.mark.parametrize("name", sorted(CARDS))
def test_committed_cards_are_what_the_script_writes(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == CARDS[name].rstrip() + "\n"


@pytest.mark.parametrize("name", sorted(name for name in CARDS if name.endswith(".md")))
def test_metadata_of_a_card_are_read_by_the_hub(name: str) -> None:
    data = ModelCard.load(ROOT / name).data
    assert data.library_name == "transformers" and data.language == "en" and data.license
    assert "transfo-xl" in data.tags
    assert data.eval_results and all(isinstance(result, EvalResult) for result in data.eval_results)


@pytest.mark.parametrize("name", sorted(name for name in CARDS if name.endswith(".yaml")))
def test_entries_of_eval_results_are_read_by_the_hub(name: str) -> None:
    (entry,) = parse_eval_result_entries(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")))
    assert entry.source_url == "https://arxiv.org/abs/1901.02860" and entry.value > 0


# paper, tables 1 to 4; lengths of the test set: TEST_TGT_LEN, TEST_MEM_LEN and TEST_CLAMP_LEN in tf/sota/*.sh
PAPER = {
    "wt103": (18.3, 128, 1600, 1000),
    "enwik8": (0.99, 128, 3800, 1000),
    "text8": (1.08, 128, 3800, 1000),
    "lm1b": (21.8, 32, 128, -1),
}


@pytest.mark.parametrize("name", sorted(PAPER))
def test_a_card_says_how_the_number_of_the_paper_was_measured(name: str) -> None:
    """C104: segment, memory and clamped lengths, dialect, and what was measured here beside what was not."""
    value, segment_length, mem_len, clamp_len = PAPER[name]
    text = (ROOT / "model_cards" / f"{name}.md").read_text(encoding="utf-8")
    call = f"segment_length={segment_length}, mem_len={mem_len}, clamp_len={clamp_len}, same_length=True"
    assert call in text and f"The paper reports {value} " in text
    assert 'memory_init="zeros"' in text and "not reproduced" in text


def test_the_example_model_writes_words_and_is_small() -> None:
    folder = hf_txl.example_model()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10_000_000
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size
    ids = tokenizer("The old man looked at her, and", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=12)[0, ids.shape[1] :])
    assert "<unk>" not in text and len(text.split()) > 5


def test_the_example_model_predicts_english() -> None:
    """Far better than the frequencies of words in this very text, which know nothing about order."""
    folder = hf_txl.example_model()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = (
        "The next morning she went out into the garden, and sat down under the old tree where he had first spoken to "
        "her. She did not know what she should say to him when he came; but she was not afraid, for she knew that he "
        "loved her, and that nothing in the world could now come between them."
    )
    ids = torch.tensor(tokenizer(text).input_ids)
    frequencies = torch.bincount(ids).float()[ids] / len(ids)
    assert evaluate_stream(model, ids, segment_length=64).loss < -frequencies.log().mean() + 0.5


def test_the_example_is_what_its_recorded_training_made() -> None:
    results = json.loads((ROOT / "docs" / "results" / "training-example.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(hf_txl.example_model())
    assert sum(weight.numel() for weight in model.parameters()) == results["parameters"]
    recorded, loaded = results["model"], model.config.to_dict()
    own = ("transformers_version", "hf_txl_version", "dtype", "auto_map", "architectures")
    assert {name: loaded[name] for name in recorded if name not in own} == {
        name: value for name, value in recorded.items() if name not in own
    }
