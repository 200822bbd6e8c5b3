"""`hf-txl generate`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .running import errors_as_messages, loading


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
        typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens whose probabilities add up to this."),
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
    """Generate text from a prompt, after a context of any length that is read once. The text is streamed."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from ..modeling_transfo_xl import TransfoXLForCausalLM
    from ..text_generation import generate_text

    logging.disable_progress_bar()
    with errors_as_messages():
        lengths = {} if mem_len is None else {"mem_len": mem_len}
        with loading(model):
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
