"""`hf-txl rescore`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .running import errors_as_messages, loading

if TYPE_CHECKING:
    from ..scoring import Utterance


class Context(StrEnum):
    """What precedes an utterance."""

    fresh = "fresh"
    running = "running"


class Length(StrEnum):
    """Unit of the length bonus."""

    words = "words"
    characters = "characters"


def rescore(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model with its tokenizer.")],
    file: Annotated[
        Path,
        typer.Argument(
            help="n-best lists: ESPnet's .json, or NeMo's .tsv (text, score).", exists=True, dir_okay=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="New file in the same format, best first.")],
    beam_size: Annotated[int | None, typer.Option(min=1, help="Rows of each utterance of a .tsv.")] = None,
    references: Annotated[
        Path | None,
        typer.Option(help="A reference in each line, or NeMo's manifest.", exists=True, dir_okay=False),
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Weight of the language model.", show_default="tuned")] = None,
    beta: Annotated[float, typer.Option(help="Bonus for each word or character.", show_default="0, or tuned")] = 0.0,
    tune: Annotated[
        Path | None,
        typer.Option(help="Lists of a development set, to choose alpha and beta.", exists=True, dir_okay=False),
    ] = None,
    tune_references: Annotated[
        Path | None, typer.Option(help="References of the development set.", exists=True, dir_okay=False)
    ] = None,
    length: Annotated[Length, typer.Option(help="Unit of beta; NeMo counts characters.")] = Length.words,
    context: Annotated[
        Context, typer.Option(help="fresh: each utterance alone; running: after the chosen ones before it.")
    ] = Context.fresh,
    batch_size: Annotated[int, typer.Option(min=1, help="Hypotheses scored together.")] = 32,
    segment_length: Annotated[int, typer.Option(min=1, help="Tokens of a segment.")] = 512,
    mem_len: Annotated[int | None, typer.Option(min=0, help="Memory length.", show_default="the model's")] = None,
    clamp_len: Annotated[
        int | None, typer.Option(help="Largest distance, below 1: none.", show_default="the model's")
    ] = None,
    same_length: Annotated[
        bool | None, typer.Option(help="The same number of keys for every query.", show_default="the model's")
    ] = None,
) -> None:
    """Rank the hypotheses of a speech recogniser again: score + alpha * language model + beta * length.

    Word error rates are shown if references are given. Either --alpha or --tune is required.
    """
    from transformers import AutoTokenizer

    from ..modeling_transfo_xl import TransfoXLForCausalLM
    from ..scoring import FusionWeights, nbest, read_nbest, tune_weights
    from ..scoring import rescore as rescore_lists
    from ..staging import write_file

    with errors_as_messages():
        if (alpha is None) == (tune is None):
            raise ValueError("One of `--alpha` and `--tune` must be given.")
        if output.exists():
            raise FileExistsError(f"`output` must be a new file, but {output} exists.")
        if (output.suffix == ".json") != (file.suffix == ".json"):
            raise ValueError(f"`output` must have the format of {file}, but is {output}.")
        utterances = read_nbest(file, beam_size=beam_size, references=references)
        development = tune and read_nbest(tune, beam_size=beam_size, references=tune_references)
        with loading(model):
            tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = TransfoXLForCausalLM.from_pretrained(model)
        options: dict[str, Any] = {"context": context.value, "batch_size": batch_size}
        options["segment_length"] = segment_length
        settings = {"mem_len": mem_len, "clamp_len": clamp_len, "same_length": same_length}
        options |= {name: value for name, value in settings.items() if value is not None}
        if development:
            weights = tune_weights(loaded, tokenizer, development, length=length.value, **options)
        else:
            weights = FusionWeights(alpha or 0.0, beta, length.value)
        rescored = rescore_lists(loaded, tokenizer, utterances, weights, **options)
        rates = _rates(rescored)
        write_file(output, nbest.nbest_content(rescored, output.suffix))
    typer.echo(f"{output}: {len(rescored):,} utterances, alpha {weights.alpha:g}, beta {weights.beta:g}")
    if rates:
        typer.echo(rates)


def _rates(utterances: "list[Utterance]") -> str | None:
    """A line of word error rates, or None without references."""
    from ..scoring import error_rates

    if any(utterance.reference is None for utterance in utterances):
        return None
    rates = error_rates(utterances)
    return (
        f"word error rate: {rates.first_pass:.2%} before, {rates.rescored:.2%} rescored, {rates.oracle:.2%} oracle "
        f"({rates.num_words:,} words)"
    )
