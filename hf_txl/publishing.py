"""Publishing a model folder on the Hub: checked first, private by default, resumable.

The upload is the library's: large files are stored by content, so that one that has arrived is not sent again, and
the commit that makes all files visible comes last. An interrupted upload changes nothing that others see; publishing
again continues it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects
from transformers import AutoTokenizer

from . import auto_classes
from .model_info import describe_folder
from .remote_code_transfo_xl import code_files

# files that may execute code when they are loaded
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
# left on this machine: what training needs to resume, what a failed run left, hidden files but `.eval_results`
IGNORED = ["checkpoint-*", "training_args.bin", "*.tmp", ".[!e]*", "*/.*", "__pycache__/*"]


@dataclass(frozen=True)
class Publication:
    """What [`publish`] uploads, or has uploaded.

    Args:
        repo_id (`str`): Name of the repository, with its owner.
        files (`dict`): Size in bytes of each file, by its path in the repository.
        notes (`list[str]`): What could be better about the folder.
        is_private (`bool`): Whether the repository is private.
        revision (`str`, *optional*): Commit that holds the files; `None` for a dry run.
        url (`str`, *optional*): Address of that commit.
    """

    repo_id: str
    files: dict[str, int]
    notes: list[str]
    is_private: bool
    revision: str | None = None
    url: str | None = None

    def __str__(self) -> str:
        total = sum(self.files.values())
        lines = [f"{size:>15,}  {name}" for name, size in self.files.items()]
        lines.append(f"{total:>15,}  bytes in {len(self.files)} files")
        lines += [f"Note: {note}" for note in self.notes]
        visibility = "private" if self.is_private else "public"
        if self.revision is None:
            return "\n".join([*lines, f"Nothing was uploaded; {self.repo_id} would be {visibility}."])
        return "\n".join(
            [*lines, f"Published as {self.repo_id} ({visibility}), revision {self.revision}", f"{self.url}"]
        )


def publish(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    branch: str = "main",
    message: str = "Upload model",
    token: str | None = None,
    dry_run: bool = False,
) -> Publication:
    """Check a model folder and upload it to the Hub.

    Args:
        folder (`str` or `Path`): Folder as `save_pretrained`, a trainer or `hf-txl convert` writes it.
        repo_id (`str`): `owner/name`, or a name in the namespace of the token. Created if it does not exist.
        private (`bool`, defaults to `True`): Whether only its owner sees the repository.
        branch (`str`, defaults to `"main"`): Branch to commit to; another one is created.
        message (`str`): Message of the commit.
        token (`str`, *optional*): Access token with write permission. Default: that of `hf auth login` or `HF_TOKEN`.
        dry_run (`bool`, defaults to `False`): Check the folder and list the files, without any connection.

    Returns:
        [`Publication`]

    Raises:
        ValueError: if the folder is not fit to be published (the message lists all reasons), or the repository exists
            and is public although `private` is `True`.
        PermissionError: if there is no token, or it has no write permission.
        OSError: if the Hub cannot be reached; publishing again continues the upload.
    """
    folder = Path(folder)
    files = files_to_upload(folder)
    notes = check_folder(folder)
    if dry_run:
        return Publication(repo_id, files, notes, private)
    api = HfApi(token=token, library_name="hf_txl")
    try:
        owner = api.whoami()["name"]
        name = repo_id if "/" in repo_id else f"{owner}/{repo_id}"
        is_private = _create(api, name, private, branch)
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, revision=branch, commit_message=message, ignore_patterns=IGNORED
        )
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        raise _explained(error, repo_id) from error
    return Publication(name, files, notes, is_private, commit.oid, commit.commit_url)


def _create(api: HfApi, name: str, private: bool, branch: str) -> bool:
    """Create the repository and the branch if they do not exist; returns whether the repository is private."""
    try:
        is_private = bool(api.model_info(name).private)
    except RepositoryNotFoundError:
        api.create_repo(name, private=private)
        is_private = private
    if private and not is_private:
        raise ValueError(
            f"`private` must be False for {name}, which exists and is public, but is True. Make it private in its "
            "settings, choose another name, or publish openly (`--public`)."
        )
    if branch not in {ref.name for ref in api.list_repo_refs(name).branches}:
        api.create_branch(name, branch=branch)
    return is_private


def _explained(error: Exception, repo_id: str) -> Exception:
    """An error of the Hub, with what to do about it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return PermissionError(
            "`token` must be a valid access token of the Hub, but is missing or invalid. `hf auth login` stores one; "
            "`HF_TOKEN` holds one for this process."
        )
    if status == 403:
        return PermissionError(f"`token` must have permission to write to {repo_id}, but has not: {error}")
    return OSError(f"{repo_id} could not be uploaded: {error}. Publishing again continues the upload.")


# --- the folder


def files_to_upload(folder: Path) -> dict[str, int]:
    """Size of each file that is uploaded, by its path.

    Raises:
        NotADirectoryError: if there is no such folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"`folder` must be a folder, but {folder} is not one.")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = filter_repo_objects((path.relative_to(folder).as_posix() for path in paths), ignore_patterns=IGNORED)
    return {name: (folder / name).stat().st_size for name in names}


def check_folder(folder: Path) -> list[str]:
    """Check that a folder holds a model that others can use.

    Returns:
        What could be better, as sentences.

    Raises:
        ValueError: lists everything that is wrong.
    """
    # raises for a damaged configuration or damaged weights
    facts = describe_folder(folder)
    problems, notes = [], []
    if pickles := [name for name in files_to_upload(folder) if name.endswith(PICKLES)]:
        problems.append(f"{', '.join(pickles)}: files that may execute code when loaded; weights must be safetensors")
    model, complaints = _load(folder)
    problems += complaints
    if model is not None:
        problems += _check_tokenizer(folder, facts, model)
        if hasattr(model, "generate") and not problems:
            problems += _check_generation(model)
    card_problems, card_notes = _check_card(folder)
    problems += card_problems
    notes += card_notes
    if missing := [file.name for file in code_files() if not (folder / file.name).is_file()]:
        notes.append(
            f"{len(missing)} files of code are not in the folder, so it loads only where hf_txl is installed; "
            "`save_pretrained` writes them, unless the configuration has `save_code=False`."
        )
    if problems:
        raise ValueError(f"{folder} must be fit to be published, but:\n" + "\n".join(f"- {each}" for each in problems))
    return notes


def _load(folder: Path) -> tuple[Any, list[str]]:
    """The model, in eval mode, and what is wrong with its weights."""
    config = auto_classes.TransfoXLConfig.from_pretrained(folder)
    name = (config.architectures or ["TransfoXLForCausalLM"])[0]
    if name not in auto_classes.__all__ or not hasattr(getattr(auto_classes, name), "from_pretrained"):
        return None, [f"config.json: `architectures` must name a class of hf_txl, but is {config.architectures}"]
    try:
        model, report = getattr(auto_classes, name).from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # files may be damaged in any way
        return None, [f"the model does not load: {error}"]
    problems = [f"weights: {kind.replace('_', ' ')} {sorted(map(str, keys))}" for kind, keys in report.items() if keys]
    if broken := [name for name, weight in model.named_parameters() if not weight.isfinite().all()]:
        problems.append(f"weights: {', '.join(broken)} have NaN or infinity")
    return model.eval(), problems


def _check_tokenizer(folder: Path, facts: dict[str, Any], model: Any) -> list[str]:
    if facts["tokenizer"] == "none":
        return []
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        return [f"the tokenizer does not load: {error}"]
    size, vocab_size = len(tokenizer), model.config.vocab_size
    if size != vocab_size:
        return [f"tokenizer: it must have `vocab_size` ({vocab_size}) tokens, but has {size}"]
    ends = model.config.eos_token_id, tokenizer.eos_token_id
    if None not in ends and ends[1] not in (ends[0] if isinstance(ends[0], list) else [ends[0]]):
        return [f"tokenizer: its end token must be `eos_token_id` of the model ({ends[0]}), but is {ends[1]}"]
    return []


@torch.no_grad()
def _check_generation(model: Any) -> list[str]:
    try:
        model.generate(
            torch.zeros(1, 2, dtype=torch.long), cache=model.init_memory(1), max_new_tokens=3, do_sample=False
        )
    except Exception as error:
        return [f"the model does not generate: {error}"]
    return []


def _check_card(folder: Path) -> tuple[list[str], list[str]]:
    """Problems and notes about README.md, the model card."""
    if not (folder / "README.md").is_file():
        return [], ["There is no model card (README.md)."]
    try:
        metadata = ModelCard.load(folder / "README.md").data
    except Exception as error:
        return [f"README.md: its metadata are not valid: {error}"], []
    return [], [f"README.md names no {name}." for name in ("license", "library_name") if not metadata.get(name)]


__all__ = ["Publication", "check_folder", "files_to_upload", "publish"]
