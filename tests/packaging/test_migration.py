"""R12: every name of transformers 2 to 4 works, or its error names the new way: `docs/migration.md` is the list."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_txl
from hf_txl import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLModel,
    TransfoXLTokenizer,
)
from hf_txl import legacy_names_transfo_xl as legacy
from tests.helpers import FIXTURES
from tests.model.tiny_models import T0
from tests.t0 import make_model, random_ids

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
# every public name of five releases, read off their sources
NAMES = json.loads((FIXTURES / "legacy_names" / "names.json").read_text(encoding="utf-8"))
IDS = random_ids(2, 5)

# heading of a section -> the tables of the names that are gone, and of all that there were
SECTIONS: dict[str, tuple[dict[str, str], str]] = {
    "Imports from the package": (legacy.IMPORTS, "imports"),
    "Attributes and methods of models": (legacy.MODEL, "model"),
    "Arguments of a call": (legacy.FORWARD, "forward"),
    "Arguments of `generate`": (legacy.GENERATE, ""),
    "Arguments of `from_pretrained`": (legacy.LOADING, ""),
    "Arguments of `resize_token_embeddings`": (legacy.RESIZING, "resize_token_embeddings"),
    "Fields of outputs": (legacy.OUTPUT, "output"),
    "Arguments of a configuration": (legacy.CONFIGURATION_ARGUMENTS, "configuration_arguments"),
    "Attributes of a configuration": (legacy.CONFIGURATION, "configuration"),
    "Arguments of a tokenizer": (legacy.TOKENIZER_ARGUMENTS, "tokenizer_arguments"),
    "Attributes and methods of a tokenizer": (legacy.TOKENIZER, "tokenizer"),
}


def rows(heading: str) -> dict[str, str]:
    """Old name -> what the page says of it, in the table of a section."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            old, here = line.strip("| ").split(" | ")
            for name in re.findall(r"`([^`]+)`", old):
                assert name not in found, f"{name} stands there twice"
                found[name] = here
    return found


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_shows_what_the_errors_say_and_misses_no_name(heading: str) -> None:
    gone, there_were = SECTIONS[heading]
    found = rows(heading)
    assert {name: here for name, here in found.items() if not here.startswith("as before")} == gone
    assert set(NAMES.get(there_were, [])) <= set(found)


def tokenizer() -> TransfoXLTokenizer:
    return TransfoXLTokenizer.from_vocabulary(["<eos>", "<unk>", "one", "two"], "pretokenized")


VALUES: dict[str, Any] = {
    **T0,
    "adaptive": True,
    "attn_type": 0,
    "clamp_len": -1,
    "eos_token_id": 1,
    "ext_len": 0,
    "init": "uniform",
    "init_range": 0.02,
    "init_std": 0.02,
    "layer_norm_epsilon": 1e-5,
    "pre_lnorm": True,
    "proj_init_std": 0.01,
    "proj_share_all_but_first": False,
    "sample_softmax": -1,
    "tgt_len": 7,
    "tie_weight": False,
    "untie_r": False,
    # arguments of a call
    "input_ids": IDS,
    "inputs_embeds": torch.zeros(2, 5, T0["d_model"]),
    "labels": IDS,
    "output_attentions": True,
    "output_hidden_states": True,
    "return_dict": True,
    "new_num_tokens": 101,
}


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[str], list[Callable[[], Any]]]]:
    """For each section, the ways to use a name of it: one must work if the page says so, else all must raise."""
    model = make_model(untie_r=True)
    shared = make_model(TransfoXLModel, untie_r=False)
    classifier = make_model(TransfoXLForSequenceClassification, num_labels=3)
    models = [model, model.transformer, shared, classifier]
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    outputs = [
        model(IDS, labels=IDS, output_attentions=True, output_hidden_states=True),
        model.transformer(IDS),
        classifier(IDS),
    ]
    config, made = TransfoXLConfig(**T0), tokenizer()

    def call(name: str) -> list[Callable[[], Any]]:
        inputs = {} if name in ("input_ids", "inputs_embeds") else {"input_ids": IDS}
        calls = [model, classifier] if name != "labels" else [model]
        return [lambda each=each: each(**inputs, **{name: VALUES.get(name)}) for each in calls]

    return {
        # as a script does it, since an import shows no other error
        "Imports from the package": lambda name: [lambda: exec(f"from hf_txl import {name}", {})],
        "Attributes and methods of models": lambda name: [lambda each=each: getattr(each, name) for each in models],
        "Arguments of a call": call,
        "Arguments of `generate`": lambda name: [
            lambda: model.generate(IDS, max_new_tokens=1, do_sample=False, pad_token_id=0, **{name: None})
        ],
        "Arguments of `from_pretrained`": lambda name: [
            lambda: TransfoXLForCausalLM.from_pretrained(folder, **{name: True})
        ],
        "Arguments of `resize_token_embeddings`": lambda name: [
            lambda: copy.deepcopy(model).resize_token_embeddings(**{name: VALUES.get(name, 0)})
        ],
        "Fields of outputs": lambda name: [
            use
            for output in outputs
            for use in (lambda output=output: getattr(output, name), lambda output=output: output[name])
        ],
        "Arguments of a configuration": lambda name: [lambda: TransfoXLConfig(**{**T0, name: VALUES.get(name, 99)})],
        "Attributes of a configuration": lambda name: [lambda: getattr(config, name)],
        "Arguments of a tokenizer": lambda name: [lambda: TransfoXLTokenizer(**{name: None})],
        "Attributes and methods of a tokenizer": lambda name: [lambda: getattr(made, name)],
    }


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_old_name_works_or_its_error_names_the_new_way(heading: str, attempts: Any) -> None:
    found = rows(heading)
    assert found
    for name, here in found.items():
        errors = []
        for use in attempts[heading](name):
            try:
                use()
            except (TypeError, AttributeError, KeyError, ImportError, ValueError) as error:
                errors.append(error)
            else:
                errors.append(None)
        if here.startswith("as before"):
            assert None in errors, f"{name}: {errors}"
        else:
            assert all(error is not None and f"`{name}`" in str(error) and here in str(error) for error in errors), (
                f"{name}: {errors}"
            )


# ---- what the page says in words ----------------------------------------------------------------------------------


def test_states_by_place_raise_and_name_the_memory() -> None:
    """R12: `model(x, mems)`."""
    model = make_model()
    mems = model.init_memory(2).to_mems() or [torch.zeros(6, 2, 32)] * 3
    for each in (model, model.transformer, make_model(TransfoXLForSequenceClassification)):
        for given in (mems, tuple(mems)):
            with pytest.raises(TypeError, match=r"`attention_mask` must be a tensor.*TransfoXLMemory\.from_mems"):
                each(IDS, given)


def test_targets_by_place_are_not_taken_for_a_mask() -> None:
    """pytorch_pretrained_bert: `model(x, target)`."""
    model = make_model()
    with pytest.raises(ValueError, match=r"`attention_mask` must be 1 .* `labels=`"):
        model(IDS, IDS)
    for mask in (torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5), torch.ones(2, 5, dtype=torch.bool)):
        assert torch.equal(model(IDS, mask).logits, model(IDS, torch.ones(2, 5, dtype=torch.int32)).logits)


def test_a_tokenizer_from_a_file_by_place_names_the_converter() -> None:
    for given in (("vocab.pkl",), ()):
        with pytest.raises(TypeError, match=r"from_vocabulary.*hf-txl convert"):
            TransfoXLTokenizer(*given)


def test_old_names_are_not_there() -> None:
    """Code that asks `hasattr` before it uses a name goes the other way, and a default stays a default."""
    model = make_model()
    output, made = model(IDS), tokenizer()
    for owner, names in ((model, legacy.MODEL), (output, legacy.OUTPUT), (made, legacy.TOKENIZER)):
        assert not any(hasattr(owner, name) for name in names)
    assert getattr(model.config, "max_position_embeddings", None) is None
    assert "mems" not in output and output.get("mems") is None
    with pytest.raises(AttributeError, match="'no_such_thing'") as caught:
        model.no_such_thing  # noqa: B018
    assert "transformers 2" not in str(caught.value)
    with pytest.raises(ImportError, match="cannot import name 'NoSuchThing'"):
        from hf_txl import NoSuchThing  # noqa: F401


def test_everything_is_copied_and_pickled_as_before() -> None:
    model = make_model()
    with torch.no_grad():
        output = model(IDS, labels=IDS, use_cache=False)
    for again in (copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert type(again) is type(output) and torch.equal(again.loss, output.loss) and again.keys() == output.keys()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(IDS).logits, output.logits)
    for again in (copy.deepcopy(tokenizer()), pickle.loads(pickle.dumps(tokenizer()))):
        assert again("two one").input_ids == [3, 2]
    assert copy.deepcopy(model.config).to_dict() == pickle.loads(pickle.dumps(model.config)).to_dict()


def test_losses_are_one_column_longer_and_zero_there() -> None:
    model = make_model()
    output = model(IDS, labels=IDS)
    assert output.losses.shape == (2, 5) and not output.losses[:, -1].any()
    torch.testing.assert_close(output.losses[:, :-1].mean(), output.loss)


def test_sizes_that_are_left_out_are_those_of_the_page() -> None:
    """The constructor of transformers 4.57.6 has these, whatever else is given."""
    text = PAGE.read_text(encoding="utf-8")
    before = {"d_embed": 1024, "d_head": 64, "d_inner": 4096, "div_val": 4, "eos_token_id": 0}
    config = TransfoXLConfig(vocab_size=99, d_model=48, n_head=4)
    now = {"d_embed": 48, "d_head": 12, "d_inner": 192, "div_val": 1, "eos_token_id": None}
    for name, value in before.items():
        assert f"| `{name}` | {value} |" in text
        assert getattr(config, name) == now[name]
    full = TransfoXLConfig()
    line = next(line for line in text.splitlines() if line.startswith("| `vocab_size`, `d_model`"))
    names, values = (cell.split(", ") for cell in line.strip("| ").split(" | ")[:2])
    assert [getattr(full, name.strip("`")) for name in names] == [json.loads(value) for value in values]
    assert full.cutoffs == [20000, 40000, 200000] and hf_txl.TransfoXLConfig(vocab_size=200000).cutoffs == []


def test_tracing_is_refused_and_export_is_named() -> None:
    """R15: a trace is right for the lengths of its example alone, and off by 0.01 to 4 for others."""
    for model in (make_model(), make_model(TransfoXLForSequenceClassification)):
        model.config.use_cache = False
        with (
            torch.no_grad(),
            pytest.raises(NotImplementedError, match=r"torch\.export\.export\(model, \(input_ids,\)\)"),
        ):
            torch.jit.trace(model, (IDS,), strict=False)
    assert "torch.export.export(model, (ids,))" in PAGE.read_text(encoding="utf-8")
