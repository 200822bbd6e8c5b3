"""Converts a vocabulary without a model into a tokenizer that `AutoTokenizer` loads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_txl import TransfoXLTokenizer
from hf_txl.staging import check_writable, new_or_forced, written_beside

from .vocabulary import describe, read_vocabulary


@dataclass
class VocabularyConversion:
    """Result of `convert_vocabulary`.

    Args:
        output (`Path`): The folder.
        source (`str`): File name of the vocabulary.
        tokenizer (`TransfoXLTokenizer`): The tokenizer that was written.
        sentence (`str`): Description of the tokenizer.
        left_out (`tuple[str, ...]`): Tokens that transformers had added, beyond `vocab_size`.
    """

    output: Path
    source: str
    tokenizer: TransfoXLTokenizer
    sentence: str
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"Found:      a vocabulary without a model ({self.source})", f"Tokenizer:  {self.sentence}"]
        if self.left_out:
            lines.append(
                f"Left out:   {', '.join(self.left_out)}, added by transformers to the vocabulary. If the model "
                f"has rows for them, give `--set vocab_size={len(self.tokenizer) + len(self.left_out)}`."
            )
        return "\n".join([*lines, f"The tokenizer alone is written to {self.output}"])


def convert_vocabulary(
    source: str | Path,
    output: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    tokenizer_mode: str | None = None,
    force: bool = False,
    protected: Iterable[str | Path] = (),
) -> VocabularyConversion:
    """Write the tokenizer of a vocabulary. Nothing in the source is executed or changed.

    Args:
        source (`str` or `Path`): A file, as for `read_vocabulary`.
        output (`str` or `Path`): The folder to write; it appears only when all is done.
        settings (`Mapping[str, Any]`, *optional*):
            `vocab_size` of the model that the tokenizer is for; added tokens are included if it counts them.
        tokenizer_mode (`str`, *optional*): How the tokenizer splits text, if not as the code of the vocabulary did.
        force (`bool`, defaults to `False`): Whether to replace an existing `output`.
        protected (`Iterable[str | Path]`): Further files that `force` must not delete with an existing `output`.

    Raises:
        FileExistsError, PermissionError: if `output` exists without `force` or cannot be written.
        FileNotFoundError: if there is no such file.
        ValueError: if it holds no vocabulary, or not one of `vocab_size` symbols.
    """
    source, output = Path(source).expanduser(), Path(output).expanduser()
    settings = dict(settings or {})
    vocab_size = settings.pop("vocab_size", None)
    if settings:
        raise ValueError(
            f"`settings` must be those of a tokenizer (`vocab_size`) for a vocabulary without a model, but name "
            f"{', '.join(f'`{name}`' for name in settings)}."
        )
    check = new_or_forced(force, [source, *protected])
    check_writable(output, check)
    vocabulary = read_vocabulary(source)
    if vocab_size is not None:
        vocabulary = vocabulary.of_size(vocab_size)
        if len(vocabulary) != vocab_size:
            raise ValueError(f"`vocab_size` must be the number of symbols ({len(vocabulary)}), but is {vocab_size!r}.")
    tokenizer = vocabulary.tokenizer(tokenizer_mode)
    with written_beside(output, check) as staging:
        tokenizer.save_pretrained(staging)
    sentence = describe(vocabulary, tokenizer, tokenizer_mode)
    return VocabularyConversion(output, source.name, tokenizer, sentence, vocabulary.added_tokens)
