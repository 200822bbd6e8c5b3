"""Settings of the documentation site, built by `make docs` from these pages and the docstrings of the package."""

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import hf_txl

sys.path.insert(0, str(Path(__file__).parent))  # for `markdown_docstrings`

project = "hf_txl"
author = copyright = "The hf_txl contributors"
version = release = hf_txl.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "markdown_docstrings",
]

# its table is in results/README.md
exclude_patterns = ["results/speed*.md"]

# pages: the anchors of headings are those of the forge, which shows the same files
myst_heading_anchors = 3

# notebooks are stored without outputs and run here, each in an empty folder
nb_execution_mode = "auto"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars

# API reference: what a class inherits is documented by the library that defines it
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_use_param = False  # one entry for arguments that share a description
napoleon_use_rtype = False

# the types in signatures are those of other libraries and internal ones too; references in docstrings are `py:obj`
nitpick_ignore_regex = [("py:class|py:exc", ".*")]

html_theme = "furo"
html_title = "hf_txl"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def shorten(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Hide the signatures of configurations: a hundred fields, most of them the library's. The docstring has ours."""
    return ("(**fields)", returns) if what == "class" and signature and signature.count("=") > 40 else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", shorten)
