"""`hf-txl publish` against a Hub on this machine that speaks the protocol of `huggingface_hub`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_txl
from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer
from hf_txl.cli import app
from hf_txl.publishing import publish
from hf_txl.remote_code_transfo_xl import code_files
from tests.packaging.hub_server import READER, TOKEN, HubServer, Repository
from tests.packaging.test_remote_code import SIZES, STRANGER, WORDS, assert_same_numbers

ROOT = Path(hf_txl.__file__).parents[1]
CARD = "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n# A model\n"
COMMAND = [sys.executable, "-c", "from hf_txl.cli import app; app()", "publish"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose weights need several parts of an upload."""
    torch.manual_seed(0)
    config = TransfoXLConfig(**{**SIZES, "d_inner": 500}, init_std=0.3)
    TransfoXLForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="100KB")
    TransfoXLTokenizer.from_vocabulary(WORDS, "pretokenized").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text(CARD, encoding="utf-8")
    return tmp_path / "model"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        yield server


def start(hub: HubServer, folder: Path, *arguments: str, token: str | None = TOKEN) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    return subprocess.Popen(
        [*COMMAND, str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**environment, **hub.environment(folder.parent, token)},
    )


def run(hub: HubServer, folder: Path, *arguments: str, token: str | None = TOKEN) -> tuple[int, str]:
    process = start(hub, folder, *arguments, token=token)
    printed, _ = process.communicate()
    return process.returncode, " ".join(printed.split())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def uploads(hub: HubServer) -> list[str]:
    return [request for request in hub.requests if request.startswith("PUT /lfs/")]


@pytest.fixture
def online(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The Hub, for calls in this process."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return hub


# --- publishing and loading

LOAD = """
import sys
import hf_txl
from transformers import AutoModelForCausalLM, AutoTokenizer
name, revision = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(name, revision=revision)
assert type(model) is hf_txl.TransfoXLForCausalLM
tokens = len(AutoTokenizer.from_pretrained(name, revision=revision))
print("tokens", tokens, float(sum(weight.double().sum() for weight in model.parameters())))
"""


def load(hub: HubServer, folder: Path, revision: str, token: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    return subprocess.run(
        [sys.executable, "-c", LOAD, "me/words", revision],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, **hub.environment(folder, token)},
    )


@pytest.mark.full
def test_a_private_repository_is_published_and_loads_with_a_token_only(hub: HubServer, folder: Path) -> None:
    status, printed = run(hub, folder, "words")
    assert status == 0, printed
    repository = hub.repositories["me/words"]
    revision = repository.branches["main"]
    assert repository.is_private
    assert f"Published as me/words (private), revision {revision}" in printed
    assert contents(hub.root / "me" / "words") == contents(folder)
    assert any(name.count("/") == 3 for name in uploads(hub)), "no file was sent in parts"

    weights = TransfoXLForCausalLM.from_pretrained(folder).parameters()
    expected = f"tokens {len(WORDS)} {float(sum(weight.double().sum() for weight in weights))}"
    for index, (reference, token) in enumerate([("main", TOKEN), (revision, READER)]):
        assert expected in load(hub, folder.parent / str(index), reference, token).stdout
    for index, (reference, token) in enumerate([("main", None), (revision, "hf_wrong")]):
        refused = load(hub, folder.parent / f"refused {index}", reference, token)
        assert refused.returncode != 0 and "me/words" in refused.stderr

    # a stranger with the token needs no package
    stranger = subprocess.run(
        [sys.executable, str(STRANGER), "me/words", str(folder.parent / "again")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **hub.environment(folder.parent / "stranger", READER)},
    )
    assert stranger.returncode == 0, stranger.stderr
    report = next(line for line in stranger.stdout.splitlines() if line.startswith("report "))
    assert_same_numbers(json.loads(report.partition(" ")[2]), folder)


@pytest.mark.full
def test_publishing_again_changes_what_has_changed(hub: HubServer, folder: Path) -> None:
    assert run(hub, folder, "me/words", "--public")[0] == 0
    assert not hub.repositories["me/words"].is_private
    first, sent = hub.repositories["me/words"].branches["main"], len(uploads(hub))
    (folder / "README.md").write_text(CARD + "\nMore.\n", encoding="utf-8")
    status, printed = run(hub, folder, "me/words", "--public", "--message", "Card")
    assert status == 0, printed
    assert len(uploads(hub)) == sent and hub.commits[-1] == "Card"
    assert (hub.root / "me" / "words" / "README.md").read_text().endswith("More.\n")
    assert hub.repositories["me/words"].branches["main"] != first

    # private is the default, and a public repository is not
    status, printed = run(hub, folder, "me/words")
    assert status == 2 and "`private` must be False for me/words, which exists and is public" in printed
    # another branch
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    assert run(hub, folder, "me/words", "--public", "--branch", "next")[0] == 0
    repository = hub.repositories["me/words"]
    assert repository.trees[repository.branches["next"]].keys() == contents(folder).keys()
    assert repository.branches["next"] != repository.branches["main"]


def test_files_are_listed_before_they_are_sent(online: HubServer, folder: Path) -> None:
    shown: list[tuple[str, int]] = []
    result = publish(folder, "words", token=TOKEN, write=lambda text: shown.append((text, len(online.requests))))
    [(text, num_requests)] = shown
    assert num_requests == 0 and text == result.listing()
    assert all(f"{path.stat().st_size:,}  {path.name}\n" in text for path in folder.iterdir())
    assert f"{sum(path.stat().st_size for path in folder.iterdir()):,}  bytes in" in text
    assert online.commits == ["Upload model"]
    again = publish(folder, "words", token=TOKEN)
    assert (again.revision, online.commits) == (result.revision, ["Upload model"]), "nothing has changed"


def remove_weights(folder: Path) -> None:
    for file in folder.glob("model*.safetensors*"):
        file.unlink()


def test_weights_of_an_earlier_upload_are_replaced(online: HubServer, folder: Path) -> None:
    """The library loads `model.safetensors` rather than several files, and would load the earlier weights."""
    model = TransfoXLForCausalLM.from_pretrained(folder)
    remove_weights(folder)
    model.save_pretrained(folder)
    assert "model.safetensors" in publish(folder, "words", token=TOKEN).files
    with torch.no_grad():
        model.crit.out_layers[0].bias.fill_(3)
    remove_weights(folder)
    model.save_pretrained(folder, max_shard_size="100KB")
    result = publish(folder, "words", token=TOKEN)
    assert result.removed == ["model.safetensors"] and "Removed: model.safetensors" in str(result)
    published = online.root / "me" / "words"
    assert contents(published) == contents(folder)
    assert torch.equal(TransfoXLForCausalLM.from_pretrained(published).crit.out_layers[0].bias, torch.full((10,), 3.0))


# --- interruptions


MOMENTS = ["POST /api/repos/create", "POST /api/models/me/words/preupload/main", "PUT /lfs/", "complete", "/commit/"]


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_upload_that_was_killed_continues(hub: HubServer, folder: Path, moment: str) -> None:
    """Killed at five moments; large files that had arrived are not sent again."""
    process: Any = None

    def kill(request: str) -> bool:
        if moment not in request:
            return True
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return False

    hub.watch = kill
    process = start(hub, folder, "words")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not hub.commits, "others see half an upload"
    arrived = set(hub.blobs)
    hub.watch = lambda request: True
    before = len(hub.requests)
    status, printed = run(hub, folder, "words")
    assert status == 0, printed
    assert contents(hub.root / "me" / "words") == contents(folder)
    resent = {request.split("/")[2] for request in hub.requests[before:] if request.startswith("PUT /lfs/")}
    assert not resent & arrived


def test_a_broken_connection_is_tried_again(online: HubServer, folder: Path) -> None:
    broken: list[str] = []

    def once(request: str) -> bool:
        if request.startswith("PUT /lfs/") and not broken:
            broken.append(request)
            return False
        return True

    online.watch = once
    publish(folder, "words", token=TOKEN)
    assert uploads(online).count(broken[0]) == 2
    assert contents(online.root / "me" / "words") == contents(folder)


@pytest.mark.parametrize("moment", ["/commit/", "/whoami-v2", "nobody listens"])
def test_a_connection_that_stays_broken_is_told(
    online: HubServer, folder: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.watch = lambda request: moment not in request
    if moment == "nobody listens":
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        OSError, match=r"words could not be uploaded: .*\. Publishing again continues the upload"
    ) as told:
        publish(folder, "words", token=TOKEN)
    assert "onnect" in str(told.value), "no reason"
    assert not online.commits
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", online.endpoint)
    online.watch = lambda request: True
    sent = len(uploads(online))
    publish(folder, "words", token=TOKEN)
    assert contents(online.root / "me" / "words") == contents(folder)
    if moment == "/commit/":
        assert len(uploads(online)) == sent > 0, "large files were sent again"


@pytest.mark.slow
def test_storage_that_stays_broken_is_told(online: HubServer, folder: Path) -> None:
    """The library tries half a minute long; the error names the file and the reason."""
    online.watch = lambda request: not request.startswith("PUT /lfs/")
    with pytest.raises(OSError, match=r"uploading 'model-.*onnection reset.*Publishing again continues the upload"):
        publish(folder, "words", token=TOKEN)
    assert not online.commits


# --- refusals


INVALID = "`token` must be a valid access token of the Hub, but is missing or invalid"


def test_without_a_token_nothing_is_created(hub: HubServer, folder: Path) -> None:
    status, printed = run(hub, folder, "words", token=None)
    assert status == 2 and INVALID in printed
    assert not hub.repositories


@pytest.mark.parametrize(
    ("token", "message"), [("hf_wrong", INVALID), (READER, "`token` must have permission to write to words")]
)
def test_without_permission_nothing_is_created(online: HubServer, folder: Path, token: str, message: str) -> None:
    with pytest.raises(PermissionError) as error:
        publish(folder, "words", token=token)
    assert message in str(error.value)
    assert not online.repositories


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("they/words", "`token` must have permission to write to they/words"),
        ("me/hidden", "`repo_id` must be new or visible to the token, but me/hidden exists and is not"),
    ],
)
def test_repositories_of_others_are_refused(online: HubServer, folder: Path, name: str, message: str) -> None:
    online.repositories["me/hidden"] = Repository(True, {"a" * 40: {}}, {"main": "a" * 40})
    online.hidden.add("me/hidden")
    with pytest.raises(PermissionError) as error:
        publish(folder, name, token=TOKEN)
    assert message in str(error.value) and "Publishing again" not in str(error.value)
    assert not online.commits


def test_a_card_that_the_hub_refuses_is_told_before_anything_is_created(online: HubServer, folder: Path) -> None:
    (folder / "README.md").write_text(CARD.replace("apache-2.0", "my own"), encoding="utf-8")
    with pytest.raises(ValueError, match='README.md must have metadata that the Hub accepts, .*\n.*"license" must be'):
        publish(folder, "words", token=TOKEN)
    assert not online.repositories


@pytest.mark.parametrize("name", ["a/b/c", "two words", "-words", "words.git"])
def test_names_that_are_none_are_refused_without_a_connection(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"`repo_id` must be `owner/name` or `name`, but is '{name}'"):
        publish(folder, name, dry_run=True)


def test_hidden_files_stay(folder: Path) -> None:
    """Passwords above all."""
    secrets = [".env", ".envrc", ".git/config", "notes/.env", ".eval_results/.env", "notes/__pycache__/x.pyc"]
    for name in [*secrets, ".eval_results/words.yaml", "notes/read.txt"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x", encoding="utf-8")
    files = publish(folder, "words", dry_run=True).files
    assert not files.keys() & set(secrets)
    assert {".eval_results/words.yaml", "notes/read.txt"} <= files.keys()


def test_a_dry_run_lists_the_files_without_a_connection(folder: Path) -> None:
    (folder / "checkpoint-3").mkdir()
    for name in ("checkpoint-3/optimizer.pt", "training_args.bin", ".hidden", "model.tmp"):
        (folder / name).write_bytes(b"here")
    result = publish(folder, "me/words", dry_run=True)
    expected = contents(folder).keys() - {"training_args.bin", ".hidden", "model.tmp"}
    assert result.files == {name: (folder / name).stat().st_size for name in sorted(expected)}
    assert result.revision is None and not result.notes
    printed = CliRunner().invoke(app, ["publish", str(folder), "me/words", "--dry-run"]).output
    assert all(name in printed for name in expected)
    assert "Nothing was uploaded; me/words would be private." in printed


def add_pickle(folder: Path) -> None:
    (folder / "pytorch_model.BIN").write_bytes(b"x")


def drop_weights(folder: Path) -> None:
    """A shard without its largest tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    from safetensors.torch import load_file, save_file

    file = folder / index["weight_map"]["transformer.layers.0.pos_ff.CoreNet.0.weight"]
    tensors = load_file(file)
    del tensors["transformer.layers.0.pos_ff.CoreNet.0.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    del index["weight_map"]["transformer.layers.0.pos_ff.CoreNet.0.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def two_models(folder: Path) -> None:
    """What the library leaves after saving in several files and then in one."""
    TransfoXLForCausalLM.from_pretrained(folder).save_pretrained(folder)


def another_tokenizer(folder: Path) -> None:
    TransfoXLTokenizer.from_vocabulary(WORDS[:-1], "pretokenized").save_pretrained(folder)


def another_end(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))


def another_padding(folder: Path) -> None:
    tokenizer = TransfoXLTokenizer.from_vocabulary(WORDS, "pretokenized")
    tokenizer.pad_token = "<unk>"
    tokenizer.save_pretrained(folder)


def not_a_number(folder: Path) -> None:
    model = TransfoXLForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.crit.out_layers[0].bias[2] = torch.nan
    model.save_pretrained(folder)


def broken_card(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: [\n---\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (add_pickle, "pytorch_model.BIN: files that may execute code"),
        (drop_weights, "weights: missing keys ['transformer.layers.0.pos_ff.CoreNet.0.weight']"),
        (two_models, "model.safetensors and model.safetensors.index.json: only one may be there"),
        (another_tokenizer, f"tokenizer: it must have `vocab_size` ({len(WORDS)}) tokens, but has {len(WORDS) - 1}"),
        (another_end, "tokenizer: `eos_token_id` must be that of the model (5), but is 0"),
        (another_padding, "tokenizer: `pad_token_id` must be that of the model (0), but is 1"),
        (not_a_number, "weights: crit.out_layers.0.bias have NaN or infinity"),
        (broken_card, "README.md: its metadata are not valid"),
    ],
)
def test_a_folder_that_is_not_fit_is_refused(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match="must be fit to be published, but") as error:
        publish(folder, "me/words", dry_run=True)
    assert message in str(error.value)


def test_what_could_be_better_is_told(folder: Path) -> None:
    (folder / "README.md").unlink()
    for file in code_files():
        (folder / file.name).unlink()
    notes = publish(folder, "me/words", dry_run=True).notes
    assert "There is no model card (README.md)." in notes and any("save_code=False" in note for note in notes)
    (folder / "README.md").write_text("# A model\n", encoding="utf-8")
    notes = publish(folder, "me/words", dry_run=True).notes
    assert {"README.md names no license.", "README.md names no library_name."} <= set(notes)


def test_code_that_is_not_used_or_not_current_is_told(folder: Path) -> None:
    (folder / "layout_transfo_xl.py").write_text("# changed\n", encoding="utf-8")
    [note] = publish(folder, "me/words", dry_run=True).notes
    assert note.startswith("layout_transfo_xl.py: not the code of the installed hf_txl")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    [note] = publish(folder, "me/words", dry_run=True).notes
    assert note.startswith("`auto_map` in config.json missing, so the folder loads only where hf_txl is installed")
