"""Scripts of `examples/` as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """A new module from `examples/NAME.py`."""
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
