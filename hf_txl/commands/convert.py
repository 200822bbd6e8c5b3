"""`hf-txl convert`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .running import errors_as_messages


def convert(
    source: Annotated[
        str, typer.Argument(help="A file, a TensorFlow prefix, a folder as the training script left it, or a Hub id.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    format: Annotated[
        str | None, typer.Option(help="pytorch, nvidia, tensorflow or transformers.", show_default="detected")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file of settings that the source does not state.", exists=True)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="One such setting; may be repeated.")
    ] = None,
    vocabulary: Annotated[
        Path | None, typer.Option(help="The vocabulary's file.", show_default="in or beside the source", exists=True)
    ] = None,
    no_vocabulary: Annotated[
        bool, typer.Option("--no-vocabulary", help="Write no tokenizer, even if the source has a vocabulary.")
    ] = False,
    tokenizer_mode: Annotated[
        str | None, typer.Option(help="How the tokenizer splits text.", show_default="that of the vocabulary's code")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float64, float32, float16 or bfloat16.", show_default="the source's")
    ] = None,
    license: Annotated[str, typer.Option(help="License on the model card, an identifier of the Hub.")] = "other",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the result with a slow reference on the source's weights.")
    ] = False,
    recorded: Annotated[
        Path | None,
        typer.Option(help="Compare the result with outputs recorded in this safetensors file.", exists=True),
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Convert tensors with NaN or infinity as they are.")
    ] = False,
    no_remote_code: Annotated[
        bool, typer.Option("--no-remote-code", help="Leave the code of the model out of OUTPUT.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUTPUT if it exists.")] = False,
) -> None:
    """Convert a checkpoint of the original codes, of NVIDIA or of transformers 2 to 4. Nothing in it is executed.

    A vocabulary without a model (cache.pt, vocab.pkl, vocab.bin, vocab.txt, vocab.json) becomes a tokenizer.
    """
    from transformers.utils import logging

    from ..conversion.checkpoint import VocabularyError
    from ..conversion.convert import convert, parse_dtype, parse_settings
    from ..conversion.convert_vocabulary import convert_vocabulary

    logging.disable_progress_bar()
    with errors_as_messages():
        if no_vocabulary and vocabulary is not None:
            raise ValueError("Only one of `--vocabulary` and `--no-vocabulary` can be given, but both are.")
        settings = parse_settings(config, set_ or [])
        common: dict[str, Any] = {
            "tokenizer_mode": tokenizer_mode,
            "force": force,
            "protected": [] if config is None else [config],
        }
        # a tokenizer alone comes without code anyway
        for_this_model = settings | {"save_code": False} if no_remote_code else settings
        for_models: dict[str, Any] = {
            "format": format,
            "vocabulary": False if no_vocabulary else vocabulary,
            "dtype": parse_dtype(dtype),
            "license": license,
            "verify": verify,
            "recorded": recorded,
            "allow_nonfinite": allow_nonfinite,
        }
        result: Any
        try:
            result = convert(source, output, settings=for_this_model, **common, **for_models)
        except VocabularyError as error:
            if not Path(source).is_file():
                raise
            if unused := _given_options(for_models):
                raise ValueError(f"{error} {', '.join(unused)} must be left out then.") from error
            result = convert_vocabulary(source, output, settings=settings, **common)
        typer.echo(result)


def _given_options(options: dict[str, Any]) -> list[str]:
    """Names, as on the command line, of the options of a model that differ from their default."""
    given = [name for name, value in options.items() if value not in (None, False, "other")]
    names = [f"--{name.replace('_', '-')}" for name in given]
    return [*names, "--no-vocabulary"] if options["vocabulary"] is False else names
