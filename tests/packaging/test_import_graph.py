"""Who may import whom, and what a file that is copied into model repositories must not contain.

The rules are read off the sources, so they hold for imports inside functions too and nothing has to be importable. A
checker is a function from a module's name and text to a list of complaints; the last tests feed each checker lines
that it must complain about.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "hf_txl"
CONVERSION = "conversion"  # a source folder beside the package, installed as hf_txl.conversion
REFERENCE = "reference"  # a folder inside the package
SCORING = "scoring"  # likewise

# an import that is there for the library, which copies code by such lines; it runs when a folder is saved
UPWARDS = {("remote_code_transfo_xl", "classification_transfo_xl")}

# the package's modules by layer, each with the modules of ours that it may import
FLAT = {
    "legacy_names_transfo_xl": set(),
    "remote_code_transfo_xl": set(),
    "configuration_transfo_xl": {"legacy_names_transfo_xl", "remote_code_transfo_xl"},
    "tokenization_transfo_xl": {"legacy_names_transfo_xl"},
    "outputs_transfo_xl": {"legacy_names_transfo_xl"},
    "arguments_transfo_xl": {"legacy_names_transfo_xl"},
    "weights_transfo_xl": set(),
    "autograd_transfo_xl": set(),
    "gating_transfo_xl": {"configuration_transfo_xl"},
    "key_value_buffer_transfo_xl": set(),
    "shared_prefix_transfo_xl": {"key_value_buffer_transfo_xl"},
    "layout_transfo_xl": set(),
    "positions_transfo_xl": {"layout_transfo_xl"},
    "attention_execution_transfo_xl": {
        "autograd_transfo_xl",
        "layout_transfo_xl",
        "positions_transfo_xl",
        "shared_prefix_transfo_xl",
    },
    "attention_transfo_xl": {
        "attention_execution_transfo_xl",
        "configuration_transfo_xl",
        "gating_transfo_xl",
        "layout_transfo_xl",
        "positions_transfo_xl",
        "shared_prefix_transfo_xl",
        "weights_transfo_xl",
    },
    # it is built from the same configuration as the model, not from a dozen of its numbers
    "adaptive_softmax_transfo_xl": {"autograd_transfo_xl", "configuration_transfo_xl", "weights_transfo_xl"},
    "packed_texts_transfo_xl": {"layout_transfo_xl"},
    "segment_transfo_xl": {
        "arguments_transfo_xl",
        "configuration_transfo_xl",
        "layout_transfo_xl",
        "packed_texts_transfo_xl",
        "positions_transfo_xl",
        "shared_prefix_transfo_xl",
    },
    "memory_rows_transfo_xl": {"key_value_buffer_transfo_xl", "shared_prefix_transfo_xl"},
    "memory_formats_transfo_xl": {
        "configuration_transfo_xl",
        "key_value_buffer_transfo_xl",
        "memory_rows_transfo_xl",
    },
    "memory_transfo_xl": {"configuration_transfo_xl", "memory_formats_transfo_xl", "memory_rows_transfo_xl"},
    "memory_update_transfo_xl": {
        "configuration_transfo_xl",
        "key_value_buffer_transfo_xl",
        "layout_transfo_xl",
        "memory_transfo_xl",
        "packed_texts_transfo_xl",
        "segment_transfo_xl",
        "shared_prefix_transfo_xl",
    },
    "library_caches_transfo_xl": {
        "arguments_transfo_xl",
        "configuration_transfo_xl",
        "key_value_buffer_transfo_xl",
        "layout_transfo_xl",
        "segment_transfo_xl",
    },
    "library_check_transfo_xl": {"outputs_transfo_xl", "remote_code_transfo_xl"},
    "generation_transfo_xl": {
        "arguments_transfo_xl",
        "configuration_transfo_xl",
        "legacy_names_transfo_xl",
        "memory_transfo_xl",
        "outputs_transfo_xl",
    },
    "modeling_transfo_xl": {
        "autograd_transfo_xl",
        "adaptive_softmax_transfo_xl",
        "arguments_transfo_xl",
        "attention_transfo_xl",
        "configuration_transfo_xl",
        "gating_transfo_xl",
        "generation_transfo_xl",
        "legacy_names_transfo_xl",
        "library_caches_transfo_xl",
        "library_check_transfo_xl",
        "memory_update_transfo_xl",
        "memory_transfo_xl",
        "outputs_transfo_xl",
        "packed_texts_transfo_xl",
        "segment_transfo_xl",
        "weights_transfo_xl",
    },
    "classification_transfo_xl": {
        "arguments_transfo_xl",
        "configuration_transfo_xl",
        "memory_transfo_xl",
        "modeling_transfo_xl",
        "outputs_transfo_xl",
    },
}
LIBRARY = {
    **FLAT,
    # compared with the package, so it shares nothing with it
    REFERENCE: {REFERENCE},
    "staging": set(),
    "shards": set(),
    "processes": set(),
    "memory_files": {"memory_transfo_xl"},
    "options": set(),
    "token_ids": set(),
    "auto_classes": {
        "classification_transfo_xl",
        "configuration_transfo_xl",
        "memory_transfo_xl",
        "modeling_transfo_xl",
        "tokenization_transfo_xl",
    },
    "model_info": {"configuration_transfo_xl", "remote_code_transfo_xl"},
    "publishing": {"auto_classes", "model_info", "remote_code_transfo_xl"},
    "corpus": {"token_ids", "tokenization_transfo_xl"},
    "data": {"token_ids"},
    SCORING: {
        SCORING,
        "classification_transfo_xl",
        "configuration_transfo_xl",
        "data",
        "memory_files",
        "memory_transfo_xl",
        "modeling_transfo_xl",
        "processes",
        "shards",
        "token_ids",
        "tokenization_transfo_xl",
    },
    "text_generation": {"data", "memory_transfo_xl", "modeling_transfo_xl", "options", "tokenization_transfo_xl"},
    "cards": {"remote_code_transfo_xl", "scoring", "token_ids"},
    "training": {"cards", "data", "memory_files", "memory_transfo_xl", "modeling_transfo_xl", "scoring", "token_ids"},
    "document_training": {"classification_transfo_xl", "data", "training"},
    "demo": {
        "configuration_transfo_xl",
        "data",
        "modeling_transfo_xl",
        "scoring",
        "staging",
        "text_generation",
        "tokenization_transfo_xl",
        "training",
    },
}
COMMANDS = "commands"  # a folder inside the package
EVERYTHING = {*LIBRARY, COMMANDS, "cli", "__init__"}
MAY_IMPORT = {
    **LIBRARY,
    # light without `auto_classes`: what the command imports before it runs
    "__init__": {"auto_classes", "legacy_names_transfo_xl"},
    COMMANDS: {*LIBRARY, COMMANDS, CONVERSION},
    "cli": {COMMANDS, "__init__"},
    CONVERSION: {*EVERYTHING, CONVERSION},
}

# what every model repository can count on; anything else must be optional there
FLAT_THIRD_PARTY = {"torch", "transformers", "huggingface_hub", "tokenizers", "numpy", "packaging"}
# folders of this repository that are not part of what is installed
OUTSIDE = {"tests", "examples", "benchmarks", "docs", "model_cards"}

PACKAGE_FILES = sorted((ROOT / PACKAGE).glob("*.py"))
COMMAND_FILES = sorted((ROOT / PACKAGE / COMMANDS).glob("**/*.py"))
SCORING_FILES = sorted((ROOT / PACKAGE / SCORING).glob("**/*.py"))
REFERENCE_FILES = sorted((ROOT / PACKAGE / REFERENCE).glob("**/*.py"))
FLAT_FILES = sorted((ROOT / PACKAGE).glob("*_transfo_xl.py"))
CONVERSION_FILES = sorted((ROOT / CONVERSION).glob("**/*.py"))


class Import(NamedTuple):
    line: int
    level: int  # leading dots
    module: str  # what follows the dots; empty for `from . import name`
    name: str  # the imported name; empty for `import module`


def imports(source: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, 0, alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(node.lineno, node.level, node.module or "", alias.name)


def imported_module(item: Import, importer: str) -> str | None:
    """The module of ours that an import reaches: its name in `MAY_IMPORT`, or None for somebody else's package."""
    parts = item.module.split(".") if item.module else []
    in_folder = importer in (COMMANDS, CONVERSION, REFERENCE, SCORING)
    if item.level == 0:
        if parts[0] == CONVERSION:
            return CONVERSION
        if parts[0] != PACKAGE:
            return parts[0] if parts[0] in OUTSIDE else None
        parts = parts[1:]
    elif in_folder and item.level == 1:
        return importer
    elif item.level > 1 + in_folder:
        return "." * item.level
    # `from hf_txl import scoring` names a module, `from hf_txl import TransfoXLConfig` something in __init__
    if not parts:
        return item.name if item.name in EVERYTHING | {CONVERSION} else "__init__"
    return parts[0]


def layer_complaints(importer: str, source: str) -> list[str]:
    allowed = MAY_IMPORT[importer]
    complaints = []
    for item in imports(source):
        target = imported_module(item, importer)
        if target is not None and target not in allowed and (importer, target) not in UPWARDS:
            complaints.append(f"line {item.line}: {importer} must not import {target}")
        if importer == CONVERSION and item.level > 1:
            complaints.append(f"line {item.line}: conversion names the package as {PACKAGE}, not by dots")
        if importer == CONVERSION and item.level == 0 and target == CONVERSION:
            complaints.append(f"line {item.line}: conversion imports its own files relatively")
    return complaints


def registration_complaints(source: str) -> list[str]:
    complaints = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value).rpartition(".")[2]
        # a method that is overridden may call the library's
        is_override = owner == "super()"
        names_class = node.func.attr == "register_for_auto_class" and not is_override
        if names_class or (node.func.attr == "register" and owner.startswith("Auto")):
            complaints.append(f"line {node.lineno}: registers with an Auto class: {ast.unparse(node.func)}")
    return complaints


def is_optional_import(node: ast.AST) -> bool:
    """Whether `node` is `try: import … except ImportError: …`, after which the name is None or the module."""
    if not isinstance(node, ast.Try):
        return False
    types = [handler.type for handler in node.handlers if handler.type is not None]
    caught = {name.id for caught_type in types for name in ast.walk(caught_type) if isinstance(name, ast.Name)}
    return bool(caught & {"ImportError", "ModuleNotFoundError"})


def flat_complaints(source: str) -> list[str]:
    """What would break a flat file once the library copies it, alone and by its bare name, into a model folder."""
    tree = ast.parse(source)
    lines = source.splitlines()
    complaints = registration_complaints(source)

    optional_lines = {
        line
        for node in tree.body
        if is_optional_import(node)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for item in imports(source):
        where = f"line {item.line}: "
        if item.level == 1 and not item.module:
            complaints.append(f"{where}`from . import` is not seen by the loader")
        elif item.level > 1 or (item.level == 1 and "." in item.module):
            complaints.append(f"{where}only siblings can be imported, as `from .name import X`")
        elif item.level == 1 and item.module not in FLAT:
            complaints.append(f"{where}{item.module} is not one of the flat files")
        elif item.level == 0:
            top = item.module.split(".")[0]
            if top == PACKAGE:
                complaints.append(f"{where}a model repository has no package {PACKAGE}")
            elif top not in FLAT_THIRD_PARTY | sys.stdlib_module_names and item.line not in optional_lines:
                complaints.append(f"{where}{top} must be optional: `try … except ImportError` at the top of the file")
            if item.module.startswith(("importlib.resources", "pkgutil")) or item.name == "resources":
                complaints.append(f"{where}no data file travels with the module")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if any(line.rstrip().endswith("\\") for line in lines[node.lineno - 1 : node.end_lineno]):
                complaints.append(f"line {node.lineno}: no backslash inside an import")
        elif isinstance(node, ast.Name) and node.id == "__file__":
            complaints.append(f"line {node.lineno}: no data file travels with the module")
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in {"isinstance", "issubclass"}
            and re.search(r"\bTransfoXLConfig\b", ast.unparse(node.args[-1]))
        ):
            complaints.append(f"line {node.lineno}: the configuration class is loaded twice, so this check is false")

    written = {item.module for item in imports(source) if item.level == 1 and item.module}
    # the loader's own expression, which also sees lines inside strings and comments
    seen = set(re.findall(r"^\s*from\s+\.(\S+)\s+import", source, flags=re.MULTILINE))
    seen |= set(re.findall(r"^\s*import\s+\.(\S+)\s*$", source, flags=re.MULTILINE))
    complaints += [f"text that the loader takes for an import of {name!r}" for name in sorted(seen - written)]
    return complaints


def stem(path: Path) -> str:
    return path.stem


def test_the_foundation_files_are_found() -> None:
    """Guards the tests below against an empty list of files."""
    assert {"configuration_transfo_xl", "modeling_transfo_xl"} <= {path.stem for path in FLAT_FILES}


def test_every_module_has_a_place_in_the_layers() -> None:
    homeless = {path.stem for path in PACKAGE_FILES} - EVERYTHING
    homeless |= {path.parent.name for path in (ROOT / PACKAGE).glob("*/*.py")} - EVERYTHING
    assert not homeless, f"say in MAY_IMPORT what these may import: {sorted(homeless)}"


def test_every_row_of_the_table_is_a_file_and_every_folder_is_there() -> None:
    assert EVERYTHING - {path.stem for path in PACKAGE_FILES} == {COMMANDS, REFERENCE, SCORING}
    assert {name for allowed in MAY_IMPORT.values() for name in allowed} <= EVERYTHING | {CONVERSION}
    folders = {*OUTSIDE, CONVERSION, *(f"{PACKAGE}/{name}" for name in (COMMANDS, REFERENCE, SCORING))}
    assert [name for name in sorted(folders) if not (ROOT / name).is_dir()] == []


def test_every_flat_file_is_listed_as_flat() -> None:
    assert {path.stem for path in FLAT_FILES} <= set(FLAT)


def test_layers_have_no_cycle() -> None:
    below: dict[str, set[str]] = {}
    for name in LIBRARY:
        # files of a folder import each other
        reached, frontier = set(), LIBRARY[name] - {name}
        while frontier:
            reached |= frontier
            frontier = set().union(*(LIBRARY[other] - {other} for other in frontier)) - reached
        below[name] = reached
    assert not [name for name, reached in below.items() if name in reached]


@pytest.mark.parametrize("path", [path for path in PACKAGE_FILES if path.stem in EVERYTHING], ids=stem)
def test_modules_import_only_from_the_layers_below(path: Path) -> None:
    assert layer_complaints(path.stem, path.read_text(encoding="utf-8")) == []


def test_conversion_imports_the_package_and_itself_only() -> None:
    complaints = {
        str(path.relative_to(ROOT)): found
        for path in CONVERSION_FILES
        if (found := layer_complaints(CONVERSION, path.read_text(encoding="utf-8")))
    }
    assert complaints == {}


def test_the_slow_references_import_nothing_of_the_package() -> None:
    assert REFERENCE_FILES
    complaints = {path.name: layer_complaints(REFERENCE, path.read_text(encoding="utf-8")) for path in REFERENCE_FILES}
    assert [(name, found) for name, found in complaints.items() if found] == []


def test_scores_import_the_layers_below_and_themselves_only() -> None:
    assert SCORING_FILES
    complaints = {path.name: layer_complaints(SCORING, path.read_text(encoding="utf-8")) for path in SCORING_FILES}
    assert [(name, found) for name, found in complaints.items() if found] == []


def test_commands_import_the_package_and_themselves_only() -> None:
    assert COMMAND_FILES
    complaints = {path.name: layer_complaints(COMMANDS, path.read_text(encoding="utf-8")) for path in COMMAND_FILES}
    assert [(name, found) for name, found in complaints.items() if found] == []


@pytest.mark.parametrize("path", FLAT_FILES, ids=stem)
def test_flat_files_can_be_copied_into_a_model_folder(path: Path) -> None:
    assert flat_complaints(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", FLAT_FILES, ids=stem)
def test_the_library_sees_the_same_siblings_as_python(path: Path) -> None:
    written = {item.module for item in imports(path.read_text(encoding="utf-8")) if item.level}
    assert set(get_relative_imports(path)) == written
    assert all(Path(file).is_file() for file in get_relative_import_files(path))


@pytest.mark.parametrize("path", FLAT_FILES, ids=stem)
def test_the_library_requires_no_unusual_package_of_a_flat_file(path: Path) -> None:
    assert set(get_imports(path)) <= FLAT_THIRD_PARTY | sys.stdlib_module_names


def test_only_the_package_itself_registers_with_auto_classes() -> None:
    others = [path for path in PACKAGE_FILES + CONVERSION_FILES if path != ROOT / PACKAGE / "auto_classes.py"]
    complaints = {
        path.name: found for path in others if (found := registration_complaints(path.read_text(encoding="utf-8")))
    }
    assert complaints == {}


def test_tokenizer_file_does_not_import_torch() -> None:
    path = ROOT / PACKAGE / "tokenization_transfo_xl.py"
    source = path.read_text(encoding="utf-8") if path.exists() else ""
    assert not [item for item in imports(source) if item.module.split(".")[0] == "torch"]


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("configuration_transfo_xl", "from .memory_transfo_xl import TransfoXLMemory"),
        ("adaptive_softmax_transfo_xl", "from hf_txl.memory_transfo_xl import TransfoXLMemory"),
        ("attention_transfo_xl", "def f():\n    from .modeling_transfo_xl import TransfoXLModel"),
        ("modeling_transfo_xl", "from . import scoring"),
        ("modeling_transfo_xl", "from hf_txl import TransfoXLConfig"),
        ("data", "import hf_txl.training"),
        ("scoring", "from ..conversion import verify"),
        ("scoring", "from hf_txl import conversion"),
        ("training", "from conversion.verify import compare"),
        ("training", "from tests.helpers import assert_close"),
        ("cli", "from ..examples import train"),
        ("__init__", "from . import conversion"),
        ("__init__", "from .conversion.verify import compare"),
        (CONVERSION, "from conversion.verify import compare"),
        (CONVERSION, "import hf_txl.conversion.verify"),
        (CONVERSION, "from ..configuration_transfo_xl import TransfoXLConfig"),
        (REFERENCE, "from ..configuration_transfo_xl import TransfoXLConfig"),
        (REFERENCE, "from hf_txl.layout_transfo_xl import window"),
        ("scoring", "from ..reference.kinds import slow_model_of"),
    ],
)
def test_an_import_across_layers_is_reported(importer: str, line: str) -> None:
    assert layer_complaints(importer, line)


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("modeling_transfo_xl", "from .memory_transfo_xl import (\n    TransfoXLMemory,\n)"),
        ("training", "from .data import read"),
        ("cli", "from . import __version__\nfrom .commands.demo import demo"),
        ("commands", "from ..scoring import perplexity\nfrom ..conversion import verify"),
        ("__init__", "from . import auto_classes\nfrom .legacy_names_transfo_xl import describe"),
        (REFERENCE, "from .transformer_xl import SlowMemory"),
        (CONVERSION, "from hf_txl.reference.kinds import slow_model_of"),
        (CONVERSION, "from .key_rules import RULES\nfrom hf_txl import TransfoXLConfig\nimport torch"),
    ],
)
def test_an_import_from_below_is_accepted(importer: str, line: str) -> None:
    assert layer_complaints(importer, line) == []


@pytest.mark.parametrize(
    "text",
    [
        "from . import memory_transfo_xl",
        "from .layers.attention import Attention",
        "from ..hf_txl import memory_transfo_xl",
        "from .scoring import perplexity",
        "import hf_txl",
        "from hf_txl.memory_transfo_xl import TransfoXLMemory",
        "from .memory_transfo_xl \\\n    import TransfoXLMemory",
        "import torch, \\\n    math",
        '"""Usage:\n\n    from .somewhere import something\n"""',
        "import safetensors",
        "def f():\n    import sacremoses",
        "def f():\n    try:\n        import sacremoses\n    except ImportError:\n        pass",
        "from importlib.resources import files",
        "from importlib import resources",
        "table = open(__file__)",
        "AutoConfig.register('transfo-xl', TransfoXLConfig)",
        "transformers.AutoModel.register(TransfoXLConfig, TransfoXLModel)",
        "TransfoXLModel.register_for_auto_class('AutoModel')",
        "isinstance(config, TransfoXLConfig)",
        "isinstance(config, (dict, TransfoXLConfig))",
    ],
)
def test_a_line_that_breaks_a_copied_file_is_reported(text: str) -> None:
    assert flat_complaints(text)


@pytest.mark.parametrize(
    "text",
    [
        "import math\nimport torch\nfrom transformers.cache_utils import Cache",
        "from .configuration_transfo_xl import (\n    TransfoXLConfig,\n)",
        "try:\n    import sacremoses\nexcept ImportError:\n    sacremoses = None",
        "torch.utils._pytree.register_pytree_node(A, f, g)",
        "isinstance(memory, TransfoXLMemory)",
    ],
)
def test_a_line_that_survives_copying_is_accepted(text: str) -> None:
    assert flat_complaints(text) == []
