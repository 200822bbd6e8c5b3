"""Publishing a model folder on the Hub: checked first, private by default, resumable.

Large files are addressed by their content, so a file that has arrived is not sent again, and one commit at the end
makes all files visible. An interrupted upload changes nothing that others see; publishing again continues it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id
from transformers import AutoTokenizer

from . import auto_classes
from .model_info import describe_folder
from .remote_code_transfo_xl import CODE_VERSION, code_files

# files that may execute code when they are loaded
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
# left on this machine: what training needs to resume, and what a failed run left
IGNORED = ["checkpoint-*", "training_args.bin", "*.tmp", "*__pycache__/*"]
# the only hidden folder with something to publish; others hold settings and passwords, such as `.env`
EVALUATIONS = ".eval_results"
# saving in several files after one, or the reverse, leaves both; the library loads the first
BOTH_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# weights as `save_pretrained` names them
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Publication:
    """What [`publish`] uploads, or has uploaded.

    Args:
        repo_id (`str`): Name of the repository, with its owner.
        files (`dict`): Size in bytes of each file, by its path in the repository.
        notes (`list[str]`): Possible improvements to the folder.
        is_private (`bool`): Whether the repository is private.
        removed (`list[str]`): Weights of an earlier upload that are not in the folder, and that were removed.
        revision (`str`, *optional*): Commit that holds the files; `None` for a dry run.
        url (`str`, *optional*): Address of that commit.
    """

    repo_id: str
    files: dict[str, int]
    notes: list[str]
    is_private: bool
    removed: list[str] = field(default_factory=list)
    revision: str | None = None
    url: str | None = None

    def listing(self) -> str:
        """The files with their sizes, and the notes."""
        lines = [f"{size:>15,}  {name}" for name, size in self.files.items()]
        lines.append(f"{sum(self.files.values()):>15,}  bytes in {len(self.files)} files")
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def outcome(self) -> str:
        """Where the files are now."""
        visibility = "private" if self.is_private else "public"
        if self.revision is None:
            return f"Nothing was uploaded; {self.repo_id} would be {visibility}."
        lines = [f"Removed: {', '.join(self.removed)}"] if self.removed else []
        return "\n".join(
            [*lines, f"Published as {self.repo_id} ({visibility}), revision {self.revision}", f"{self.url}"]
        )

    def __str__(self) -> str:
        return f"{self.listing()}\n{self.outcome()}"


def publish(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    branch: str = "main",
    message: str = "Upload model",
    token: str | None = None,
    dry_run: bool = False,
    write: Callable[[str], Any] | None = None,
) -> Publication:
    """Check a model folder and upload it to the Hub, in one commit.

    Args:
        folder (`str` or `Path`): Folder as `save_pretrained`, a trainer or `hf-txl convert` writes it.
        repo_id (`str`): `owner/name`, or a name in the namespace of the token. Created if it does not exist.
        private (`bool`, defaults to `True`): Whether only its owner sees the repository.
        branch (`str`, defaults to `"main"`): Branch to commit to; created if it does not exist.
        message (`str`): Message of the commit.
        token (`str`, *optional*): Access token with write permission. Default: that of `hf auth login` or `HF_TOKEN`.
        dry_run (`bool`, defaults to `False`): Check the folder and list the files, without any connection.
        write (`Callable[[str], Any]`, *optional*): Called with the list of files before anything is uploaded.

    Returns:
        [`Publication`]

    Raises:
        ValueError: if the folder is not fit to be published (the message lists all reasons), `repo_id` is not the name
            of a repository, or the repository exists with another visibility than `private` asks for.
        PermissionError: if there is no token, or it has no permission to write.
        OSError: if the upload was interrupted; publishing again continues it.
    """
    folder = Path(folder)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"`repo_id` must be `owner/name` or `name`, but is {repo_id!r}: {error}") from error
    publication = Publication(repo_id, files_to_upload(folder), check_folder(folder), private)
    if write is not None:
        write(publication.listing())
    if dry_run:
        return publication
    with _hub_errors_explained(repo_id):
        return _upload(HfApi(token=token, library_name="hf_txl"), folder, publication, branch, message)


def _upload(api: HfApi, folder: Path, publication: Publication, branch: str, message: str) -> Publication:
    owner = api.whoami()["name"]
    name = publication.repo_id if "/" in publication.repo_id else f"{owner}/{publication.repo_id}"
    _check_card_on_hub(folder)
    is_private = _create(api, name, publication.is_private, branch)
    files = publication.files
    # the library would load weights in one file rather than newer ones in several
    removed = [
        path for path in api.list_repo_files(name, revision=branch) if WEIGHTS.fullmatch(path) and path not in files
    ]
    additions = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=folder / path) for path in files]
    deletions = [CommitOperationDelete(path_in_repo=path) for path in removed]
    commit = api.create_commit(name, [*additions, *deletions], commit_message=message, revision=branch)
    return replace(
        publication,
        repo_id=name,
        is_private=is_private,
        removed=removed,
        revision=commit.oid,
        url=commit.commit_url,
    )


def _check_card_on_hub(folder: Path) -> None:
    """Check the card's metadata by the rules of the Hub, such as its list of licenses, before anything is created."""
    card = folder / "README.md"
    if not card.is_file():
        return
    try:
        ModelCard.load(card).validate()
    except ValueError as error:
        raise ValueError(f"README.md must have metadata that the Hub accepts, but does not:\n{error}") from error


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
            "settings, choose another name, or publish it publicly (`--public`)."
        )
    if is_private and not private:
        raise ValueError(
            f"`private` must be True for {name}, which exists and is private, but is False (`--public`). Make it "
            "public in its settings first, or publish it privately."
        )
    if branch not in {ref.name for ref in api.list_repo_refs(name).branches}:
        api.create_branch(name, branch=branch)
    return is_private


# --- errors of the Hub and of the connection


@contextmanager
def _hub_errors_explained(repo_id: str) -> Iterator[None]:
    """Turns errors into built-in ones; connections and storage raise their own classes."""
    try:
        yield
    except Exception as error:
        # a refusal that already says what to do; errors of the connection may be of a class derived from this one
        if type(error) is ValueError:
            raise
        raise _explained(error, repo_id) from error


def _explained(error: Exception, repo_id: str) -> OSError:
    """The error with what to do about it."""
    chain = list(_with_causes(error))
    responses = [each.response for each in chain if getattr(each, "response", None) is not None]
    status = responses[0].status_code if responses else None
    if status == 401 or isinstance(error, LocalTokenNotFoundError):
        return PermissionError(
            "`token` must be a valid access token of the Hub, but is missing or invalid. `hf auth login` stores one; "
            "`HF_TOKEN` holds one for this process."
        )
    if status == 403:
        return PermissionError(f"`token` must have permission to write to {repo_id}, but does not: {error}")
    if status == 409:
        return PermissionError(
            f"`repo_id` must be new or visible to the token, but {repo_id} exists and is not visible. "
            "Choose another name, or use a token of its owner."
        )
    reasons = dict.fromkeys(str(each).strip() or type(each).__name__ for each in chain)
    return OSError(f"{repo_id} could not be uploaded: {': '.join(reasons)}. Publishing again continues the upload.")


def _with_causes(error: BaseException) -> Iterator[Any]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


# --- the folder


def files_to_upload(folder: Path) -> dict[str, int]:
    """Size of each file that is uploaded, by its path.

    Raises:
        NotADirectoryError: if there is no such folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"`folder` must be a folder, but {folder} is not one.")
    paths = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = [path.as_posix() for path in paths if not _is_hidden(path)]
    names = filter_repo_objects(visible, ignore_patterns=IGNORED)
    return {name: (folder / name).stat().st_size for name in names}


def _is_hidden(path: Path) -> bool:
    """Whether a file, or a folder that it is in, is hidden."""
    parts = path.parts[1:] if path.parts[0] == EVALUATIONS else path.parts
    return any(part.startswith(".") for part in parts)


def check_folder(folder: Path) -> list[str]:
    """Check that a folder holds a model that others can use.

    Returns:
        Possible improvements, as sentences.

    Raises:
        ValueError: lists everything that is wrong.
    """
    # raises for a damaged configuration or damaged weights
    facts = describe_folder(folder)
    problems, notes = [], []
    if pickles := [name for name in files_to_upload(folder) if name.lower().endswith(PICKLES)]:
        problems.append(f"{', '.join(pickles)}: files that may execute code when loaded; weights must be safetensors")
    if all((folder / name).is_file() for name in BOTH_WEIGHTS):
        problems.append(f"{' and '.join(BOTH_WEIGHTS)}: only one may be there; remove the older one and its files")
    model, complaints = _load(folder)
    problems += complaints
    if model is not None:
        problems += _check_tokenizer(folder, facts, model)
        if hasattr(model, "generate") and not problems:
            problems += _check_generation(model)
    card_problems, card_notes = _check_card(folder)
    problems += card_problems
    notes += card_notes
    notes += _check_code(folder, facts)
    if problems:
        raise ValueError(f"{folder} must be fit to be published, but:\n" + "\n".join(f"- {each}" for each in problems))
    return notes


def _check_code(folder: Path, facts: dict[str, Any]) -> list[str]:
    """Notes about the files of code and the `auto_map` that names their classes."""
    files = code_files()
    missing = [file.name for file in files if not (folder / file.name).is_file()]
    lacking = [f"{len(missing)} code files"] * bool(missing) + ["`auto_map` in config.json"] * (
        facts["code"] == "none"
    )
    if lacking:
        return [
            f"{' and '.join(lacking)} missing, so the folder loads only where hf_txl is installed; `save_pretrained` "
            "writes both, unless the configuration has `save_code=False`."
        ]
    if changed := [file.name for file in files if (folder / file.name).read_bytes() != file.read_bytes()]:
        return [
            f"{', '.join(changed)}: not the code of the installed hf_txl {CODE_VERSION}; saving the model again "
            "writes that."
        ]
    return []


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
    problems = []
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        expected, token = getattr(model.config, name), getattr(tokenizer, name)
        if None not in (expected, token) and token not in (expected if isinstance(expected, list) else [expected]):
            problems.append(f"tokenizer: `{name}` must be that of the model ({expected}), but is {token}")
    return problems


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
    notes = [f"README.md names no {name}." for name in ("license", "library_name") if not metadata.get(name)]
    if "before you publish it" in " ".join((folder / "README.md").read_text(encoding="utf-8").split()):
        notes.append("README.md still asks for the intended use and the data: please describe them.")
    return [], notes


__all__ = ["Publication", "check_folder", "files_to_upload", "publish"]
