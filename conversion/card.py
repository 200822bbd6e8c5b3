"""Fills in `model_cards/TEMPLATE.md` for a converted model."""

import hashlib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template

from hf_txl.cards import usage


def sha256(file: Path) -> str:
    """The SHA-256 hash of a file, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@dataclass
class Card:
    """Contents of the card of a converted model; every field fills a placeholder of the template."""

    name: str
    found: str
    files: list[Path]
    command: str
    version: str
    date: str
    account: str
    parameters: int
    dtype: str
    settings: list[tuple[str, object, str]]
    tokenizer: str
    auto_class: str
    pipeline_tag: str
    license: str = "other"
    holds_code: bool = True
    checked: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The card in Markdown."""
        template = resources.files("hf_txl.model_cards").joinpath("TEMPLATE.md").read_text(encoding="utf-8")
        blanks = {
            **vars(self),
            "usage": usage(self.name, self.auto_class, self.holds_code),
            "files": "\n".join(f"| {file.name} | `{sha256(file)}` |" for file in self.files),
            "parameters": f"{self.parameters:,}",
            "settings": "\n".join(f"| `{name}` | `{value}` | {origin} |" for name, value, origin in self.settings),
            "checked": "\n".join(f"- {line}" for line in self.checked or ["Nothing beyond names and shapes."]),
        }
        return Template(template).substitute(blanks)
