"""The `hf-txl` command."""

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """Transformer-XL for transformers."""


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option(help="Folder to save the model in; one written by an earlier demo is replaced.")
    ] = Path("demo_model"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="minutes on two cores")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed of weights and sample.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Train a tiny model, in seconds instead of minutes.")] = False,
) -> None:
    """Train a small character model on a text in the package, report what its memory gains, save it and sample."""
    # imported here, since torch takes seconds to import and `--help` does not need it
    from transformers.utils import logging

    from .demo import run_demo

    # hides bars for reading and writing a few files; ours remain
    logging.disable_progress_bar()
    with _errors_as_messages():
        result = run_demo(output, steps=steps, seed=seed, quick=quick)
    typer.echo("\n" + result.report())
    if not result.memory_helps:
        typer.echo("Error: memory did not help on the held-out text; train longer (--steps).", err=True)
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="A file, a TensorFlow prefix, a folder as training left it, or a Hub id.")
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
    force: Annotated[bool, typer.Option("--force", help="Replace OUTPUT if it exists.")] = False,
) -> None:
    """Convert a checkpoint of the original codes, of NVIDIA or of transformers 2 to 4. Nothing in it is executed.

    A vocabulary without a model (cache.pt, vocab.pkl, vocab.bin, vocab.txt, vocab.json) becomes a tokenizer.
    """
    from transformers.utils import logging

    from .conversion.checkpoint import VocabularyError
    from .conversion.convert import convert, parse_dtype, parse_settings
    from .conversion.convert_vocabulary import convert_vocabulary

    logging.disable_progress_bar()
    with _errors_as_messages():
        if no_vocabulary and vocabulary is not None:
            raise ValueError("Only one of `--vocabulary` and `--no-vocabulary` can be given, but both are.")
        common: dict[str, Any] = {
            "settings": parse_settings(config, set_ or []),
            "tokenizer_mode": tokenizer_mode,
            "force": force,
            "protected": [] if config is None else [config],
        }
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
            result = convert(source, output, **common, **for_models)
        except VocabularyError as error:
            if not Path(source).is_file():
                raise
            if unused := _given_options(for_models):
                raise ValueError(f"{error} {', '.join(unused)} must be left out then.") from error
            result = convert_vocabulary(source, output, **common)
        typer.echo(result)


def _given_options(options: dict[str, Any]) -> list[str]:
    """Names, as on the command line, of the options of a model that differ from their default."""
    given = [name for name, value in options.items() if value not in (None, False, "other")]
    names = [f"--{name.replace('_', '-')}" for name in given]
    return [*names, "--no-vocabulary"] if options["vocabulary"] is False else names


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model with its tokenizer.")],
    prompt: Annotated[str, typer.Option(help="Prompt.")] = "",
    context_file: Annotated[
        Path | None,
        typer.Option(help="Text of any length, read before the prompt.", exists=True, dir_okay=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 100,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many of the likeliest tokens; 0: all.")] = 40,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens that add up to this probability."),
    ] = 1.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Random seed of the sampling.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text after which to stop; may be repeated.")] = None,
    no_unknown: Annotated[bool, typer.Option("--no-unknown", help="Never generate the unknown token.")] = False,
    mem_len: Annotated[
        int | None, typer.Option(min=0, help="Memory length in tokens.", show_default="the model's")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
) -> None:
    """Generate text from a prompt, after a context of any length that is read once. Text is streamed as it comes."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from .modeling_transfo_xl import TransfoXLForCausalLM
    from .text_generation import generate_text

    logging.disable_progress_bar()
    with _errors_as_messages():
        lengths = {} if mem_len is None else {"mem_len": mem_len}
        with _loading(model):
            tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = TransfoXLForCausalLM.from_pretrained(model, **lengths)
        # shown with the first piece, after all checks
        unseen = [prompt]

        def write(piece: str) -> None:
            typer.echo("".join([*unseen, piece]), nl=False)
            unseen.clear()

        result = generate_text(
            loaded,
            tokenizer,
            prompt,
            context_file=context_file,
            max_new_tokens=max_new_tokens,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            seed=seed,
            stop_strings=stop,
            suppress_unknown=no_unknown,
            write=None if json_ else write,
        )
    if json_:
        typer.echo(json.dumps({**asdict(result), "tokens_per_second": result.tokens_per_second}, ensure_ascii=False))
    else:
        typer.echo()


@app.command("build-tokenizer")
def build_tokenizer(
    texts: Annotated[list[Path], typer.Argument(help="Text files, UTF-8.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    mode: Annotated[
        str, typer.Option(help="How text is split: moses (raw text), pretokenized (white space), characters or bytes.")
    ] = "moses",
    min_freq: Annotated[int, typer.Option(min=0, help="Leave out symbols that occur less often than this.")] = 0,
    max_size: Annotated[int | None, typer.Option(min=1, help="Most symbols, without the special ones.")] = None,
    special: Annotated[
        list[str] | None, typer.Option(help="A special token; may be repeated.", show_default="<eos>, <unk>")
    ] = None,
    lower_case: Annotated[bool, typer.Option("--lower-case", help="Lower-case text first.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUTPUT if it exists.")] = False,
) -> None:
    """Build a vocabulary from texts and write a tokenizer that AutoTokenizer loads."""
    from .staging import check_writable, new_or_forced, written_beside
    from .tokenization_transfo_xl import AUTO, UNKNOWN_TOKENS, TransfoXLTokenizer, build_vocabulary

    with _errors_as_messages():
        check = new_or_forced(force, texts)
        check_writable(output, check)
        symbols = build_vocabulary(
            texts,
            mode,
            min_freq=min_freq,
            max_size=max_size,
            special=special or ("<eos>", "<unk>"),
            lower_case=lower_case,
        )
        unknown = AUTO if set(symbols) & set(UNKNOWN_TOKENS) else None
        tokenizer = TransfoXLTokenizer.from_vocabulary(
            symbols, mode, unk_token=unknown, extra_special_tokens=special or (), lower_case=lower_case
        )
        with written_beside(output, check) as staging:
            tokenizer.save_pretrained(staging)
    typer.echo(f"{len(tokenizer)} symbols written to {output}")
    if tokenizer.unk_token is None:
        typer.echo("There is no token for unknown symbols: text with one raises an error.")


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """Reports expected errors with exit code 2, and cleans up on SIGTERM."""
    with _ending_in_order():
        try:
            yield
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from error


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turns errors of any kind, which damaged files raise, into one that names the model."""
    try:
        yield
    except (ValueError, OSError, ImportError, RuntimeError):
        raise
    except Exception as error:
        raise ValueError(f"{name} could not be loaded: {type(error).__name__}: {error}") from error


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Raises on SIGTERM, so that unfinished folders are removed. Only the main thread can install a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


if __name__ == "__main__":
    app()
