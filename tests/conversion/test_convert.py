"""`hf-txl convert` on every recorded checkpoint: what it writes loads, and gives the recorded numbers."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner, Result

from hf_txl import TransfoXLForCausalLM, TransfoXLForSequenceClassification
from hf_txl.cli import app
from hf_txl.conversion import checkpoint
from hf_txl.conversion.convert import convert
from hf_txl.conversion.verify import verify_recorded
from tests.helpers import FIXTURES, assert_close
from tests.parity.recorded_cases import LOG_PROBABILITIES, case_names, evaluation_lengths, lengths, pytorch_case

LENGTHS = ("mem_len", "clamp_len", "same_length")
# with memory, absolute positions are numbered anew here, and `ext_len` tokens are stored once
FIRST_SEGMENT_ONLY = (
    "abs-learned-longer-than-table",
    "abs-learned-mem",
    "abs-sin-mem",
    "abs-sin-mem-pre-lnorm-clamp",
    "xl-ext-len",
    "xl-ext-len-short-mem",
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def converted(source: Path, output: Path, *options: object) -> TransfoXLForCausalLM:
    """Convert by the command and load as a user would."""
    result = run(source, output, *options)
    assert result.exit_code == 0, result.output
    model, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def settings(values: dict[str, Any]) -> list[str]:
    return [option for name, value in values.items() for option in ("--set", f"{name}={json.dumps(value)}")]


def assert_recorded(name: str, model: TransfoXLForCausalLM, recorded: dict[str, torch.Tensor], **lengths: Any) -> None:
    for run_name, differences in verify_recorded(model, recorded, **lengths).items():
        assert differences, f"{name} {run_name}: nothing was compared"
        assert max(differences.values()) < LOG_PROBABILITIES, f"{name} {run_name}: {differences}"


# ---- the original PyTorch code -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", case_names("pytorch_original"))
def test_pickled_models_give_the_recorded_scores(name: str, tmp_path: Path) -> None:
    case = pytorch_case(name)
    model = converted(case.folder / "model.pt", tmp_path / "model")
    recorded = case.expected
    if name in FIRST_SEGMENT_ONLY:
        recorded = {key: tensor for key, tensor in recorded.items() if key.startswith("seg0.")}
    assert_recorded(name, model, recorded, **evaluation_lengths(case))
    # later segments follow from these, as tests/parity shows
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, case.state[key]), key
    for field in ("attention_kind", "memory_init", "same_length_includes_oldest", "untie_r", "layer_norm_epsilon"):
        assert getattr(model.config, field) == case.fields[field]
    for field in ("pre_lnorm", "mem_len", "clamp_len", "same_length", "cutoffs", "div_val", "tie_word_embeddings"):
        assert getattr(model.config, field) == case.fields[field], field
    assert model.config.ext_len == case.case["constructor"]["ext_len"]


STATE_DICTS = sorted(path for path in (FIXTURES / "pytorch_original").glob("*/state_dict*.pt"))


@pytest.mark.parametrize("path", STATE_DICTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_state_dicts_ask_for_what_they_do_not_tell_and_give_the_recorded_scores(path: Path, tmp_path: Path) -> None:
    """C94"""
    case = pytorch_case(path.parent.name)
    asked = run(path, tmp_path / "model")
    assert asked.exit_code == 2
    needed = [*LENGTHS, "pre_lnorm"]
    if case.fields["cutoffs"] and case.fields["div_val"] == 1:
        # one table and one bias for all buckets
        needed.append("cutoffs")
    assert "These settings must be given" in asked.output
    for name in needed:
        assert f"`{name}` (" in asked.output
    assert not (tmp_path / "model").exists()
    model = converted(path, tmp_path / "model", *settings({name: case.fields[name] for name in needed}))
    assert_recorded(path.parent.name, model, case.expected)


def test_the_log_of_a_training_folder_tells_the_rest(tmp_path: Path) -> None:
    """`train.py` writes its arguments at the top of log.txt."""
    case = pytorch_case("xl-wt103-large")
    shutil.copy(case.folder / "state_dict_module_prefix.pt", tmp_path / "model.pt")
    arguments = {**case.case["constructor"], "adaptive": True, "data": "../data/wikitext-103/", "dataset": "wt103"}
    del arguments["cutoffs"], arguments["tie_projs"]
    lines = ["=" * 100, *(f"    - {name} : {value}" for name, value in arguments.items()), "=" * 100, "| epoch 1"]
    (tmp_path / "log.txt").write_text("\n".join(lines), encoding="utf-8")
    model = converted(tmp_path, tmp_path / "converted")
    assert_recorded("log.txt", model, case.expected)
    assert model.config.cutoffs == case.fields["cutoffs"]


@pytest.mark.parametrize("cluster", [0, 1, 2, 3])
def test_words_of_every_cluster_have_their_own_cluster_row(cluster: int, tmp_path: Path) -> None:
    """C36: with three clusters, rows in the wrong order agree for the middle one only."""
    case = pytorch_case("xl-wt103-large")
    model = converted(case.folder / "model.pt", tmp_path / "model")
    memory = model.init_memory(case.segment(0)["input_ids"].shape[0])
    bounds = [0, *case.fields["cutoffs"], case.fields["vocab_size"]]
    compared = 0
    with torch.no_grad():
        for index in range(case.num_segments()):
            segment = case.segment(index)
            losses = model(segment["input_ids"], cache=memory, shift_labels=segment["target"]).losses
            inside = (bounds[cluster] <= segment["target"]) & (segment["target"] < bounds[cluster + 1])
            compared += int(inside.sum())
            if inside.any():
                assert_close(f"losses in cluster {cluster}", losses[inside], segment["nll"][inside], LOG_PROBABILITIES)
    assert compared > 0


# ---- NVIDIA, TensorFlow, transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", case_names("nvidia"))
def test_checkpoints_of_nvidia_give_the_recorded_scores_and_ids(name: str, tmp_path: Path) -> None:
    folder = FIXTURES / "nvidia" / name
    file = next(folder.glob("checkpoint_*.pt"))
    model = converted(file, tmp_path / "model")
    assert_recorded(name, model, load_file(folder / "expected.safetensors"))
    assert (model.config.memory_init, model.config.same_length_includes_oldest) == ("empty", True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("name", case_names("tf_original"))
def test_checkpoints_of_tensorflow_give_the_recorded_scores(name: str, tmp_path: Path) -> None:
    """One checkpoint, evaluated under several lengths."""
    folder = FIXTURES / "tf_original" / name
    runs = json.loads((folder / "case.json").read_text(encoding="utf-8"))["runs"]
    model = converted(folder, tmp_path / "model", *settings(lengths(runs["train_like"])))
    recorded = load_file(folder / "expected.safetensors")
    for run_name, run_settings in runs.items():
        part = {key: tensor for key, tensor in recorded.items() if key.startswith(f"{run_name}.")}
        assert_recorded(name, model, part, **lengths(run_settings))
    assert (model.config.memory_init, model.config.same_length_includes_oldest) == ("zeros", True)
    assert model.config.layer_norm_epsilon == 1e-12


@pytest.mark.parametrize("name", case_names("txl_tf_reference", "div*"))
def test_checkpoints_beside_their_hyper_parameters_need_few_options(name: str, tmp_path: Path) -> None:
    """keras-transformer-xl writes a config.json with names of its own."""
    folder = FIXTURES / "txl_tf_reference" / name
    model = converted(folder / "model.ckpt", tmp_path / "model", "--set", "clamp_len=-1", "--set", "same_length=false")
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert model.config.mem_len == written["mem_len"]
    assert model.config.cutoffs == written.get("cutoffs", [])[1:-1]


@pytest.mark.parametrize("name", [name for name in case_names("hf_legacy", "legacy-*") if "seqcls" not in name])
def test_folders_of_transformers_4_give_the_recorded_scores(name: str, tmp_path: Path) -> None:
    folder = FIXTURES / "hf_legacy" / name
    if not (folder / "pytorch_model.bin").exists():
        pytest.skip("a tokenizer, not a model")
    model = converted(folder, tmp_path / "model")
    assert_recorded(name, model, load_file(folder / "expected.safetensors"))
    written = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert (written["memory_init"], written["same_length_includes_oldest"]) == ("zeros", False)
    assert written["architectures"] == ["TransfoXLForCausalLM"]


def test_a_fine_tuned_classifier_keeps_its_head(tmp_path: Path) -> None:
    folder = FIXTURES / "hf_legacy" / "legacy-seqcls"
    assert run(folder, tmp_path / "model").exit_code == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    direct = TransfoXLForSequenceClassification.from_pretrained(folder).eval()
    recorded = load_file(folder / "expected.safetensors")
    with torch.no_grad():
        ours, theirs = (each(recorded["single.input_ids"]).logits for each in (model, direct))
    assert torch.equal(ours, theirs)
    assert_close("logits", ours, recorded["single.logits"], 1e-5)


def test_shards_are_one_model(tmp_path: Path) -> None:
    folder = FIXTURES / "hf_legacy" / "legacy-wt103"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    whole = converted(folder, tmp_path / "whole")
    from_shards = converted(tmp_path / "shards", tmp_path / "converted")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, from_shards.state_dict()[name]), name
    card = (tmp_path / "converted" / "README.md").read_text(encoding="utf-8")
    for shard in (tmp_path / "shards").glob("*.safetensors"):
        assert f"| {shard.name} | `{hashlib.sha256(shard.read_bytes()).hexdigest()}` |" in card


# ---- precision, checks, card -------------------------------------------------------------------------------------


def test_half_precision_stays_half_precision_unless_told(tmp_path: Path) -> None:
    case = pytorch_case("xl-enwik8")
    halves = {name: tensor.half() for name, tensor in torch.load(case.folder / "state_dict.pt").items()}
    torch.save(halves, tmp_path / "half.pt")
    options = settings({name: case.fields[name] for name in (*LENGTHS, "pre_lnorm")})
    assert converted(tmp_path / "half.pt", tmp_path / "half", *options).dtype == torch.float16
    wide = converted(tmp_path / "half.pt", tmp_path / "wide", *options, "--dtype", "float32")
    assert wide.dtype == torch.float32
    for name, weight in wide.state_dict().items():
        assert torch.equal(weight, case.state[name].half().float()), name


def test_verification_prints_the_largest_difference_and_the_card_repeats_it(tmp_path: Path) -> None:
    case = pytorch_case("xl-div1-proj-tied")
    result = run(
        case.folder / "model.pt", tmp_path / "out", "--verify", "--recorded", case.folder / "expected.safetensors"
    )
    assert result.exit_code == 0, result.output
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    lines = [line.removeprefix("Checked:    ") for line in result.output.splitlines() if line.startswith("Checked:")]
    assert len(lines) == 2
    for line in lines:
        assert "largest difference" in line
        assert line in card
    digest = hashlib.sha256((case.folder / "model.pt").read_bytes()).hexdigest()
    assert digest in card
    assert "${" not in card


def test_wrong_settings_fail_the_comparison_and_leave_nothing(tmp_path: Path) -> None:
    case = pytorch_case("xl-clamp")
    output = tmp_path / "out"
    result = run(
        case.folder / "model.pt", output, "--recorded", case.folder / "expected.safetensors", "--set", "clamp_len=3"
    )
    assert result.exit_code == 2
    assert "must agree" in result.output
    assert list(tmp_path.iterdir()) == []


# ---- what the command refuses ------------------------------------------------------------------------------------

GOOD = FIXTURES / "pytorch_original" / "xl-enwik8" / "model.pt"
GOOD_CHECKPOINT = checkpoint.open_checkpoint(GOOD)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "mem_length=4"], "`mem_length` is not"),
        (["--set", "mem_len"], "written as name=value"),
        (["--set", "mem_len=-4"], "`mem_len` must be 0"),
        (["--set", "mem_len=8.0"], "'mem_len' expected int"),
        (["--set", 'clamp_len="8"'], "'clamp_len' expected int"),
        (["--set", "cutoffs=20,40"], "'cutoffs'"),
        (["--set", "same_length=maybe"], "'same_length' expected bool"),
        (["--set", "attn_type=7"], "`attn_type` must be one of"),
        (["--set", "n_head=2"], "of another shape"),
        (["--format", "nvidia"], "`format` must be 'pytorch'"),
        (["--format", "tensorflow"], "not a valid TensorFlow checkpoint"),
        (["--format", "keras"], "`format` must be one of"),
        (["--dtype", "int8"], "`dtype` must be"),
        (["--vocabulary", str(FIXTURES / "vocabularies" / "txl-cache-pt" / "cache.pt")], "as many symbols"),
    ],
)
def test_wrong_options_are_named_and_nothing_is_written(options: list[str], message: str, tmp_path: Path) -> None:
    result = run(GOOD, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.output
    assert [line.startswith("Error: ") for line in result.output.splitlines()].count(True) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["nothing-here.pt", "no/such-folder-of-mine/at-all", "empty"])
def test_a_source_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = run(tmp_path / name, tmp_path / "out")
    assert result.exit_code == 2
    assert "`source` must be" in result.output


def test_a_vocabulary_beside_that_is_another_models_can_be_left_out(tmp_path: Path) -> None:
    shutil.copy(GOOD, tmp_path / "model.pt")
    shutil.copy(FIXTURES / "vocabularies" / "txl-cache-pt" / "cache.pt", tmp_path)
    refused = run(tmp_path / "model.pt", tmp_path / "out")
    assert refused.exit_code == 2
    assert "--no-vocabulary" in refused.output
    assert run(tmp_path / "model.pt", tmp_path / "out", "--no-vocabulary").exit_code == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_folder_with_several_checkpoints_asks_which(tmp_path: Path) -> None:
    shutil.copy(GOOD, tmp_path / "model.pt")
    for file in (FIXTURES / "tf_original" / "tf-lm1b").glob("model.ckpt.*"):
        shutil.copy(file, tmp_path)
    result = run(tmp_path, tmp_path / "out")
    assert result.exit_code == 2
    assert "holds several: model.pt, model.ckpt" in result.output


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["checkpoint_best.pt", "checkpoint_last.pt"], "checkpoint_best.pt"),
        (["model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        (["model.safetensors.index.json", "model.safetensors-00001"], "model.safetensors.index.json"),
    ],
)
def test_of_what_one_code_writes_side_by_side_one_is_taken(
    names: list[str], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(checkpoint, "_open_pytorch", lambda path, format: opened.append(path) or GOOD_CHECKPOINT)
    for name in names:
        (tmp_path / name).touch()
    checkpoint.open_checkpoint(tmp_path)
    assert opened == [tmp_path / chosen]


def test_an_existing_output_is_replaced_only_by_force(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("precious", encoding="utf-8")
    result = run(GOOD, output)
    assert result.exit_code == 2
    assert "must be new or empty" in result.output
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    assert run(GOOD, output, "--force").exit_code == 0
    assert not (output / "thesis.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_source_is_neither_changed_nor_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(FIXTURES / "hf_legacy" / "legacy-div1", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run(folder, tmp_path / "out").exit_code == 0
    for output in (folder, tmp_path):
        result = run(folder, output, "--force")
        assert result.exit_code == 2
        assert "must not hold the source" in result.output
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("where", ["source", "--vocabulary", "--recorded", "--config"])
@pytest.mark.parametrize("from_home", [True, False])
def test_force_never_deletes_what_the_command_reads(
    where: str, from_home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its path is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    output = tmp_path / "out"
    output.mkdir()
    precious = output / "file"
    files = {"source": GOOD, "--recorded": GOOD.with_name("expected.safetensors")}
    if where == "--config":
        precious.write_text('{"mem_len": 8}', encoding="utf-8")
    else:
        shutil.copy(files.get(where, FIXTURES / "vocabularies" / "txl-cache-pt" / "cache.pt"), precious)
    content = precious.read_bytes()
    written = "~/out/file" if from_home and where == "source" else str(precious)
    arguments = [written] if where == "source" else [str(GOOD), where, written]
    result = run(*arguments, output, "--force")
    assert result.exit_code == 2
    assert "must not hold the source" in result.output
    assert precious.read_bytes() == content


def test_a_failure_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_txl.conversion import convert as module

    output = tmp_path / "out"
    output.mkdir()
    (output / "earlier.txt").write_text("kept", encoding="utf-8")

    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, "save_torch_state_dict", fail)
    with pytest.raises(OSError, match="no space left"):
        convert(GOOD, output, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (output / "earlier.txt").read_text(encoding="utf-8") == "kept"
