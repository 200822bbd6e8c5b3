"""The paper's ablation at toy size: every position encoding, with and without recurrence, with full and half loss.

Section 4.2 of [Dai et al., 2019](https://arxiv.org/abs/1901.02860) trains a model with one component exchanged at a
time and evaluates each variant at its best attention length. Here all 24 combinations of six encodings, recurrence and
loss are trained on the text in the package, one token per character, with the same seed, batches and steps and with
the same number of parameters within 5 %. Each is then evaluated at 1, 2, 4 and 8 times its training attention length.
At this size only the order can be compared with the paper, not the values.

    python examples/ablation.py            # at most half an hour on two cores; writes to docs/results
    python examples/ablation.py --quick    # a minute, to check that everything runs; the numbers mean nothing

Finished cells are saved in `cells/`: an interrupted run resumes after the last finished cell, and a cell is trained
again only if its settings have changed. Needs matplotlib.

Training: with recurrence, segments of L characters and a memory of L, so that a character attends to at most 2L;
without recurrence, independent segments of L. Half loss excludes the first half of each segment from the loss.

Evaluation: at attention length A, the scored characters are those in the recent half of a call, which both losses
train. With recurrence, calls read L / 2 characters with a memory of A - L / 2; without, calls of A characters overlap
by half, and the last A / 2 are scored. All cells and lengths score the same characters: those of each row after the
first `8 * 2L`, where every memory is full.
"""

import functools
import hashlib
import json
import math
import multiprocessing
import os
import platform
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from tqdm.auto import tqdm

import hf_txl
from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
from hf_txl.data import TokenStreams
from hf_txl.demo import demo_text
from hf_txl.scoring import evaluate_stream
from hf_txl.tokenization_transfo_xl import build_vocabulary

KINDS = ("transformer_xl", "learned_relative", "shaw", "huang", "absolute_sinusoid", "absolute_learned")
# increase it when the meaning of a cell changes, so that saved cells of an earlier version are not used
CELL_FORMAT = 1

# WikiText-103, 128M parameters: best perplexity and the attention length that gave it (Table 6). "Shaw et al." of the
# paper is `learned_relative`, which is what the original code computes under that name (its `attn_type` 1).
PAPER = {
    ("transformer_xl", True, "full"): (26.77, 500),
    ("learned_relative", True, "full"): (27.94, 256),
    ("transformer_xl", True, "half"): (28.33, 460),
    ("transformer_xl", False, "full"): (29.02, 260),
    ("learned_relative", False, "full"): (29.75, 120),
    ("transformer_xl", False, "half"): (30.10, 120),
    ("learned_relative", False, "half"): (30.50, 120),
    ("absolute_sinusoid", False, "half"): (30.97, 120),
    ("absolute_learned", False, "half"): (31.16, 120),
}


@dataclass(frozen=True)
class Settings:
    """Settings that all cells share.

    Args:
        steps (`int`): Optimizer steps.
        batch_size (`int`): Rows read in parallel.
        segment_length (`int`): L, characters per row and step, and memory where there is recurrence; even.
        n_layer, d_model, n_head (`int`): Size of the model.
        d_inner (`int`): Width of the feed-forward layer of `transformer_xl`; those of the others match its parameter
            count.
        shaw_distance (`int`): Largest distance of `shaw`; 16 in Shaw et al. Other tables have the training length.
        learning_rate (`float`): Highest learning rate of Adam; linear warm-up in the first 5 % of the steps, then a
            cosine.
        clip (`float`): Gradients are clipped to this norm.
        seed (`int`): Seed of the weights; the text is read in order.
        multiples (`tuple[int, ...]`): Attention lengths of the evaluation, as multiples of the training's.
        evaluation_rows (`int`): Rows read in parallel in an evaluation.
        evaluation_length (`int`): Characters of each row that are scored.
    """

    steps: int = 800
    batch_size: int = 16
    segment_length: int = 32
    n_layer: int = 3
    d_model: int = 96
    n_head: int = 3
    d_inner: int = 192
    shaw_distance: int = 16
    learning_rate: float = 3e-3
    clip: float = 0.25
    seed: int = 0
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    evaluation_rows: int = 16
    evaluation_length: int = 1024

    @property
    def warm_up(self) -> int:
        """Characters at the start of each row that are read but not scored: the longest attention of any cell."""
        return max(self.multiples) * 2 * self.segment_length


QUICK = Settings(
    steps=40,
    batch_size=8,
    segment_length=16,
    n_layer=2,
    d_model=32,
    n_head=2,
    d_inner=64,
    evaluation_rows=4,
    evaluation_length=32,
)


@dataclass(frozen=True)
class Cell:
    """One combination of settings; `recurrence` means a memory as long as the segment."""

    kind: str
    recurrence: bool
    loss: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{'recurrence' if self.recurrence else 'no_recurrence'}-{self.loss}"

    def attention_length(self, settings: Settings) -> int:
        """Largest number of characters that a query attends to in training, itself included."""
        return settings.segment_length * (2 if self.recurrence else 1)


CELLS = [Cell(kind, recurrence, loss) for loss in ("full", "half") for recurrence in (True, False) for kind in KINDS]


# --- one cell


@functools.cache
def read_text() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Training ids, held-out ids and the size of the vocabulary."""
    text = demo_text()
    # one token per character: a dictionary is faster than a tokenizer; `<unk>` is the last id
    symbols = [*build_vocabulary([text], "characters", special=()), "<unk>"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    token_ids = torch.tensor([vocabulary[character] for character in text])
    split = int(0.9 * len(token_ids))
    return token_ids[:split], token_ids[split:], len(vocabulary)


@functools.cache
def text_digest() -> str:
    return hashlib.sha256(demo_text().encode()).hexdigest()


def make_model(cell: Cell, settings: Settings, vocab_size: int, d_inner: int) -> TransfoXLForCausalLM:
    length = cell.attention_length(settings)
    torch.manual_seed(settings.seed)
    return TransfoXLForCausalLM(
        TransfoXLConfig(
            vocab_size=vocab_size,
            cutoffs=[],
            n_layer=settings.n_layer,
            d_model=settings.d_model,
            n_head=settings.n_head,
            d_inner=d_inner,
            attention_kind=cell.kind,
            mem_len=settings.segment_length if cell.recurrence else 0,
            same_length=False,
            clamp_len=-1,
            # every distance of the training has its own entry, except for Shaw et al.
            max_klen=length,
            max_relative_distance=settings.shaw_distance if cell.kind == "shaw" else length - 1,
            # embeddings of about the size of the sinusoids, whatever the width; 0.02 is for models of width 1024
            init_std=settings.d_model**-0.5,
            # a training this short does not overfit
            dropout=0.0,
        )
    )


def make_matched_model(cell: Cell, settings: Settings, vocab_size: int) -> TransfoXLForCausalLM:
    """A model with as many parameters as `transformer_xl`, within 5 %: `d_inner` compensates for position tables."""
    target = make_model(replace(cell, kind="transformer_xl"), settings, vocab_size, settings.d_inner).num_parameters()
    surplus = target - make_model(cell, settings, vocab_size, settings.d_inner).num_parameters()
    # an inner unit has a row, a bias and a column in every layer
    d_inner = settings.d_inner + round(surplus / (settings.n_layer * (2 * settings.d_model + 1)))
    model = make_model(cell, settings, vocab_size, d_inner)
    assert abs(model.num_parameters() / target - 1) <= 0.05, (cell.name, model.num_parameters(), target)
    return model


def warm_up_and_cosine(steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Factor of the learning rate by step: a linear warm-up that starts above 0, then a cosine to 0."""

    def rate(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))

    return rate


def train(
    model: TransfoXLForCausalLM,
    token_ids: torch.Tensor,
    cell: Cell,
    settings: Settings,
    report: Callable[[int], None],
) -> float:
    """Train on streams; returns the mean loss of the last tenth of the steps, in nats per scored character."""
    streams = TokenStreams(token_ids, settings.batch_size, settings.segment_length, drop_last=True, loss=cell.loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    rate = warm_up_and_cosine(settings.steps, warmup_steps=max(1, settings.steps // 20))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def passes() -> Iterator[tuple[dict[str, torch.Tensor], Any]]:
        while True:
            # the streams start again, so the memory no longer holds the characters before them
            memory = model.init_memory(settings.batch_size) if cell.recurrence else None
            for segment in streams.segments():
                yield segment, memory

    losses = []
    model.train()
    for _, (segment, memory) in zip(range(settings.steps), passes(), strict=False):
        loss = model(segment["input_ids"], shift_labels=segment["shift_labels"], cache=memory).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        report(1)
    return statistics.fmean(losses[-max(1, settings.steps // 10) :])


def evaluate(
    model: TransfoXLForCausalLM, token_ids: torch.Tensor, cell: Cell, settings: Settings, attention_length: int
) -> float:
    """Mean loss in nats of the scored held-out characters at an attention length."""
    needed = settings.evaluation_rows * (settings.warm_up + settings.evaluation_length + 1)
    if len(token_ids) < needed:
        raise ValueError(f"The evaluation needs {needed} held-out characters, but there are {len(token_ids)}.")
    if cell.recurrence:
        step = settings.segment_length // 2
        mem_len, ext_len = attention_length - step, 0
    else:
        # the unscored half of a call is read again
        step = attention_length // 2
        mem_len, ext_len = 0, step
    score = evaluate_stream(
        model,
        token_ids[:needed],
        segment_length=step,
        mem_len=mem_len,
        ext_len=ext_len,
        batch_size=settings.evaluation_rows,
        return_losses=True,
        progress=False,
    )
    assert score.losses is not None
    return score.losses[:, settings.warm_up :].double().mean().item()


def identity(cell: Cell, settings: Settings) -> dict[str, Any]:
    """Everything that the numbers of a cell depend on, after a round trip through JSON."""
    values = {"format": CELL_FORMAT, "text_sha256": text_digest(), **asdict(cell), **asdict(settings)}
    return dict(json.loads(json.dumps(values)))


def run_cell(cell: Cell, settings: Settings, report: Callable[[int], None]) -> dict[str, Any]:
    """Train and evaluate one cell."""
    train_ids, held_out_ids, vocab_size = read_text()
    started, started_cpu = time.perf_counter(), time.process_time()
    model = make_matched_model(cell, settings, vocab_size)
    training_loss = train(model, train_ids, cell, settings, report)
    trained = time.perf_counter()
    length = cell.attention_length(settings)
    evaluation = []
    for multiple in settings.multiples:
        loss = evaluate(model, held_out_ids, cell, settings, multiple * length)
        evaluation.append(
            {
                "multiple": multiple,
                "attention_length": multiple * length,
                "loss": loss,
                "bits_per_character": loss / math.log(2),
            }
        )
    best = min(evaluation, key=lambda entry: entry["loss"])
    return {
        "identity": identity(cell, settings),
        **asdict(cell),
        "parameters": model.num_parameters(),
        "d_inner": model.config.d_inner,
        "training_attention_length": length,
        "training_loss": training_loss,
        "evaluation": evaluation,
        "best_attention_length": best["attention_length"],
        "best_bits_per_character": best["bits_per_character"],
        "training_seconds": trained - started,
        "evaluation_seconds": time.perf_counter() - trained,
        "processor_seconds": time.process_time() - started_cpu,
        "finished": date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }


def machine() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    processor = next(names, platform.processor() or platform.machine())
    return {"processor": processor, "cores": os.cpu_count(), "threads_per_cell": torch.get_num_threads()}


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_txl": hf_txl.__version__,
    }


# --- all cells


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a temporary file and move it into place, so that the file is always complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")


def read_cell(path: Path, expected_identity: dict[str, Any]) -> dict[str, Any] | None:
    """A saved cell, if it exists and has this identity; otherwise `None`."""
    try:
        cell = json.loads(path.read_text(encoding="utf-8"))
        return cell if cell["identity"] == expected_identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


_reports: Any = None


def _start_process(reports: Any) -> None:
    global _reports
    _reports = reports
    # one core per cell: a model this small gains nothing from more
    torch.set_num_threads(1)


def _run_in_process(cell: Cell, settings: Settings, path: Path) -> dict[str, Any]:
    result = run_cell(cell, settings, _reports.put)
    write_json(path, result)
    return result


def run_ablation(folder: Path, settings: Settings, processes: int) -> list[dict[str, Any]]:
    """All cells, in order; cells finished by an earlier run with the same settings are not trained again."""
    paths = {cell: folder / "cells" / f"{cell.name}.json" for cell in CELLS}
    results = {cell: read_cell(paths[cell], identity(cell, settings)) for cell in CELLS}
    missing = [cell for cell in CELLS if results[cell] is None]
    typer.echo(f"{len(CELLS) - len(missing)} cells kept, {len(missing)} to train")
    if missing:
        # a forked process would inherit torch's threads
        context = multiprocessing.get_context("spawn")
        reports = context.Queue()
        executor = ProcessPoolExecutor(processes, context, _start_process, (reports,))
        bar = tqdm(total=len(missing) * settings.steps, unit="step", smoothing=0.05)
        try:
            running: dict[Future, Cell] = {
                executor.submit(_run_in_process, cell, settings, paths[cell]): cell for cell in missing
            }
            while running:
                done, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                bar.update(_drain(reports))
                for future in done:
                    cell = running.pop(future)
                    result = results[cell] = future.result()
                    bits = ", ".join(f"{entry['bits_per_character']:.3f}" for entry in result["evaluation"])
                    bar.write(f"{cell.name}: {bits} bits per character ({result['processor_seconds']:.0f} s)")
        finally:
            executor.shutdown(cancel_futures=True)
            bar.close()
    return [result for result in results.values() if result is not None]


def _drain(reports: Any) -> int:
    steps = 0
    while True:
        try:
            steps += reports.get_nowait()
        except queue.Empty:
            return steps


# --- results


def paper_value(result: dict[str, Any]) -> tuple[float, int] | None:
    return PAPER.get((result["kind"], result["recurrence"], result["loss"]))


def same_order(results: list[dict[str, Any]]) -> tuple[int, int]:
    """Number of pairs of the paper's cells that are in the same order here, and number of pairs."""
    cells = [
        (value[0], result["best_bits_per_character"])
        for result in results
        if (value := paper_value(result)) is not None
    ]
    pairs = [(one, other) for index, one in enumerate(cells) for other in cells[index + 1 :]]
    return sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in pairs), len(pairs)


def make_table(results: list[dict[str, Any]], settings: Settings) -> str:
    """The table in Markdown, best cell first."""
    ordered = sorted(results, key=lambda result: result["best_bits_per_character"])
    # ranks among the paper's cells
    values = [value for result in ordered if (value := paper_value(result)) is not None]
    ranks = {value: (rank, sorted(values).index(value) + 1) for rank, value in enumerate(values, 1)}
    multiples = " | ".join(f"{multiple}x" for multiple in settings.multiples)
    lines = [
        f"| encoding | recurrence | loss | parameters | {multiples} | best | at | order here | paper: order "
        "| paper: perplexity (at) |",
        "|---|---|---|" + "---:|" * (6 + len(settings.multiples)) + "---|",
    ]
    for result in ordered:
        bits = " | ".join(f"{entry['bits_per_character']:.3f}" for entry in result["evaluation"])
        value = paper_value(result)
        paper = (
            "– | – | –" if value is None else f"{ranks[value][0]} | {ranks[value][1]} | {value[0]:.2f} ({value[1]})"
        )
        lines.append(
            f"| {result['kind']} | {'yes' if result['recurrence'] else 'no'} | {result['loss']} "
            f"| {result['parameters']:,} | {bits} | {result['best_bits_per_character']:.3f} "
            f"| {result['best_attention_length']} | {paper} |"
        )
    agreeing, pairs = same_order(results)
    scored = settings.evaluation_rows * settings.evaluation_length
    length = settings.segment_length
    lines += [
        "",
        f"Bits per character of {scored:,} held-out characters at multiples of the training attention length",
        f"({2 * length} with recurrence, {length} without), and the best of them with its attention length.",
        f"Seed {settings.seed}, {settings.steps} steps of {settings.batch_size} x {length} characters.",
        "The paper's values are word perplexities on WikiText-103 with 128M parameters, so only the order of its nine",
        f"cells can be compared: {agreeing} of their {pairs} pairs are in the paper's order here.",
        "",
        'The paper\'s "Shaw et al." is compared with `learned_relative`, which the original code computes under that',
        "name. The paper has no cell for `shaw` (the method of Shaw et al. itself), for `huang`, and for absolute",
        "encodings with recurrence. The last are an extension of this package: the memory stores states without",
        "positions, and each call adds the current ones. (The original code adds positions to stored states",
        "repeatedly.)",
    ]
    if settings.steps < Settings().steps:
        lines += [
            "",
            "Fewer steps than in the full settings: a check that everything runs, not a comparison.",
        ]
    return "\n".join(lines) + "\n"


LABELS = {
    "transformer_xl": "Transformer-XL",
    "learned_relative": "learned relative",
    "shaw": "Shaw et al.",
    "huang": "Huang et al.",
    "absolute_sinusoid": "absolute sinusoid",
    "absolute_learned": "absolute learned",
}


def draw(path: Path, results: list[dict[str, Any]], settings: Settings) -> None:
    """Plot the results: one panel per loss and recurrence, one line per encoding."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for row, loss in enumerate(("full", "half")):
        for column, recurrence in enumerate((True, False)):
            panel = panels[row][column]
            for kind, marker in zip(KINDS, "osD^vX", strict=True):
                for result in results:
                    if (result["kind"], result["recurrence"], result["loss"]) == (kind, recurrence, loss):
                        bits = [entry["bits_per_character"] for entry in result["evaluation"]]
                        panel.plot(settings.multiples, bits, marker=marker, label=LABELS[kind])
            length = settings.segment_length * (2 if recurrence else 1)
            name = "recurrence" if recurrence else "no recurrence"
            panel.set_title(f"{name}, {loss} loss (trained with attention length {length})", fontsize=10)
            panel.set_xscale("log", base=2)
            panel.set_xticks(settings.multiples, [f"{multiple}x" for multiple in settings.multiples])
            panel.grid(alpha=0.3)
            if column == 0:
                panel.set_ylabel("bits per character")
            if row == 1:
                panel.set_xlabel("attention length in evaluation / in training")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(KINDS))
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_whole(path, image.getvalue())


def write_results(folder: Path, results: list[dict[str, Any]], settings: Settings, processes: int) -> str:
    """Write `results.json`, `ablation.md` and `ablation.png`; returns the table."""
    agreeing, pairs = same_order(results)
    cells = [{name: value for name, value in result.items() if name != "identity"} for result in results]
    table = f"# Position encodings, recurrence and loss\n\n{make_table(results, settings)}"
    write_json(
        folder / "results.json",
        {
            "date": max(result["finished"] for result in results),
            "machine": {**results[0]["machine"], "processes": processes},
            "versions": results[0]["versions"],
            "seeds": [settings.seed],
            "settings": asdict(settings),
            "text_sha256": text_digest(),
            "scored_characters": settings.evaluation_rows * settings.evaluation_length,
            "pairs_in_the_order_of_the_paper": [agreeing, pairs],
            "cells": cells,
        },
    )
    write_whole(folder / "ablation.md", table)
    draw(folder / "ablation.png", results, settings)
    return table


def main(
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for results and finished cells.", show_default="docs/results or ablation_quick"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny models and a few steps, to check that everything runs.")
    ] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps of each cell.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Cells trained at the same time, one core each.")] = 2,
) -> None:
    """Train and evaluate every position encoding with and without recurrence, with full and half loss."""
    import matplotlib  # noqa: F401  fail now if it is missing, not after half an hour

    settings = replace(QUICK if quick else Settings(), seed=seed)
    if steps is not None:
        settings = replace(settings, steps=steps)
    if output is None:
        # do not overwrite real results with those of a quick run
        output = Path("ablation_quick") if quick else Path(__file__).resolve().parents[1] / "docs" / "results"
    results = run_ablation(output, settings, processes)
    typer.echo("\n" + write_results(output, results, settings, processes))
    typer.echo(f"written: {output / 'results.json'}, ablation.md, ablation.png")


if __name__ == "__main__":
    typer.run(main)
