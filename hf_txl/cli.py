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
        Path, typer.Option(help="Folder to save the model in; one that an earlier demo wrote is replaced.")
    ] = Path("demo_model"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="minutes on two cores")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of weights and sample.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model for seconds instead of minutes.")] = False,
) -> None:
    """Train a small character model on the text in the package, show what its memory is worth, save it and sample."""
    # torch takes seconds to import, which `--help` need not wait for
    from transformers.utils import logging

    from .demo import run_demo

    # ours say more than those for reading and writing a few files
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
        str | None, typer.Option(help="pytorch, nvidia, tensorflow or transformers.", show_default="found out")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON file of settings that the source does not tell.", exists=True)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="One such setting; may be repeated.")
    ] = None,
    vocabulary: Annotated[
        Path | None, typer.Option(help="The vocabulary's file.", show_default="in or beside the source", exists=True)
    ] = None,
    no_vocabulary: Annotated[
        bool, typer.Option("--no-vocabulary", help="Write no tokenizer, whatever lies beside the source.")
    ] = False,
    tokenizer_mode: Annotated[
        str | None, typer.Option(help="How the tokenizer treats text.", show_default="as the vocabulary's code")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float64, float32, float16 or bfloat16.", show_default="the source's")
    ] = None,
    license: Annotated[str, typer.Option(help="For the card: an identifier of the Hub.")] = "other",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the result with a slow reading of the source's weights.")
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

    Of a vocabulary alone (cache.pt, vocab.pkl, vocab.bin, vocab.txt, vocab.json) the tokenizer is written.
    """
    from transformers.utils import logging

    from .conversion.checkpoint import VocabularyError
    from .conversion.convert import convert, parse_dtype, parse_settings
    from .conversion.convert_vocabulary import convert_vocabulary

    logging.disable_progress_bar()
    with _errors_as_messages():
        if no_vocabulary and vocabulary is not None:
            raise ValueError("Only one of `--vocabulary` and `--no-vocabulary` can be given, but both are.")
        settings, protected = parse_settings(config, set_ or []), [] if config is None else [config]
        result: Any
        try:
            result = convert(
                source,
                output,
                format=format,
                settings=settings,
                vocabulary=False if no_vocabulary else vocabulary,
                tokenizer_mode=tokenizer_mode,
                dtype=parse_dtype(dtype),
                license=license,
                verify=verify,
                recorded=recorded,
                allow_nonfinite=allow_nonfinite,
                force=force,
                protected=protected,
            )
        except VocabularyError as error:
            if not Path(source).is_file():
                raise
            given = {
                "--format": format,
                "--vocabulary": vocabulary,
                "--no-vocabulary": no_vocabulary,
                "--dtype": dtype,
                "--license": license != "other",
                "--verify": verify,
                "--recorded": recorded,
                "--allow-nonfinite": allow_nonfinite,
            }
            if of_models := [name for name, value in given.items() if value]:
                raise ValueError(f"{error} {', '.join(of_models)} must be left out then.") from error
            result = convert_vocabulary(
                source, output, settings=settings, tokenizer_mode=tokenizer_mode, force=force, protected=protected
            )
        typer.echo(result)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model with its tokenizer.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "",
    context_file: Annotated[
        Path | None, typer.Option(help="A text of any length to read first.", exists=True, dir_okay=False)
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 100,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many of the likeliest tokens; 0: all.")] = 40,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this probability together.")
    ] = 1.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text after which to stop; may be repeated.")] = None,
    no_unknown: Annotated[bool, typer.Option("--no-unknown", help="Never write the token of unknown words.")] = False,
    mem_len: Annotated[
        int | None, typer.Option(min=0, help="Positions to remember.", show_default="the model's")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
) -> None:
    """Write on from a prompt, after reading a context of any length once. Text is streamed to the terminal."""
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
        # shown with the first piece, when nothing can be wrong any more
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
        str, typer.Option(help="How text is cut: moses (raw text), pretokenized (white space), characters or bytes.")
    ] = "moses",
    min_freq: Annotated[int, typer.Option(min=0, help="Leave out symbols that occur less often.")] = 0,
    max_size: Annotated[int | None, typer.Option(min=1, help="Most symbols besides the special ones.")] = None,
    special: Annotated[
        list[str] | None, typer.Option(help="A special token; may be repeated.", show_default="<eos>, <unk>")
    ] = None,
    lower_case: Annotated[bool, typer.Option("--lower-case", help="Lower-case text first.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUTPUT if it exists.")] = False,
) -> None:
    """Count the symbols of texts and write a tokenizer that AutoTokenizer loads."""
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
        typer.echo("None of them is for unknown symbols: text with one is an error.")


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    """What a user can mend becomes one message and exit status 2; a request to end lets go of what was begun."""
    with _ending_in_order():
        try:
            yield
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from error


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """A damaged file makes whatever error its reader makes; say whose it is."""
    try:
        yield
    except (ValueError, OSError, ImportError, RuntimeError):
        raise
    except Exception as error:
        raise ValueError(f"{name} could not be loaded: {type(error).__name__}: {error}") from error


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM as an exception, so that unfinished folders go away. Only the main thread may set that."""
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
