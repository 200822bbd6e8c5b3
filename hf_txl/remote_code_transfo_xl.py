"""Code beside the weights: what a saved folder holds so that it loads where this package is not installed.

`from_pretrained(folder, trust_remote_code=True)` of the Auto classes imports the classes that `auto_map` in
`config.json` names from Python files in the folder. Every flat file of this package (`*_transfo_xl.py`) that a model
needs is written there as it is.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging

logger = logging.get_logger(__name__)

# version of these files, written to `config.json`; equal to `hf_txl.__version__`
CODE_VERSION = "0.1.0.dev0"
VERSION_KEY = "hf_txl_version"
MODELS, CLASSIFIERS = "modeling_transfo_xl", "classification_transfo_xl"
AUTO_MAP = {
    "AutoConfig": "configuration_transfo_xl.TransfoXLConfig",
    "AutoModel": f"{MODELS}.TransfoXLModel",
    "AutoModelForCausalLM": f"{MODELS}.TransfoXLForCausalLM",
    "AutoModelForSequenceClassification": f"{CLASSIFIERS}.TransfoXLForSequenceClassification",
    "AutoModelForTokenClassification": f"{CLASSIFIERS}.TransfoXLForTokenClassification",
}


def code_files() -> list[Path]:
    """The files that a model needs: that of the classifiers, and those that it imports, directly or not."""
    # The library copies a file together with the files that such import lines name. This line makes it copy the models
    # along with a configuration that is loaded alone, so that both use one configuration class.
    from .classification_transfo_xl import __file__ as models

    return sorted({Path(models), *map(Path, get_relative_import_files(models))})


def write_code(folder: str | os.PathLike[str]) -> None:
    """Write the files to a folder, each complete or not at all, even if several processes save to it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".code-") as staging:
        for file in code_files():
            shutil.copyfile(file, Path(staging, file.name))
        for file in Path(staging).iterdir():
            file.replace(folder / file.name)


def merged_auto_map(folder: str | os.PathLike[str], others: dict[str, Any] | None) -> dict[str, Any]:
    """`AUTO_MAP`, with the classes of a user whose file the library has written to the folder too.

    Args:
        folder (`str` or `os.PathLike`): The folder that is written.
        others (`dict`, *optional*): `auto_map` of the configuration. Entries for other folders and repositories, as
            after loading, are left out.
    """
    ours = {file.stem for file in code_files()}
    kept = {}
    for auto_class, reference in (others or {}).items():
        module = str(reference).partition(".")[0]
        if module not in ours and (Path(folder) / f"{module}.py").exists():
            kept[auto_class] = reference
    return AUTO_MAP | kept


def warn_if_newer(version: Any) -> None:
    """Warn if a folder was written by a later version of this code, which may have fixed or changed something."""
    try:
        is_newer = version is not None and Version(str(version)) > Version(CODE_VERSION)
    except InvalidVersion:
        is_newer = True
    if is_newer:
        logger.warning_once(
            f"The model was saved by hf_txl {version}, but is loaded by {CODE_VERSION} (upgrade by `pip "
            "install --upgrade hf-txl`)."
        )


__all__ = ["AUTO_MAP", "CODE_VERSION", "VERSION_KEY", "code_files", "merged_auto_map", "warn_if_newer", "write_code"]
