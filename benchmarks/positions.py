"""What each position encoding costs, and what projecting the position table once per distance saves.

One attention layer (batch 1, 8 heads of 64, float32, segment L and memory M = L), for every attention kind and for the
naive way that projects R_{i-j} once per pair of query and key. Three parts of the work are measured:

- `forward`: no gradients, SDPA where the kind and the case allow it, as the layer itself decides;
- `forward and backward`: gradients of all parameters and of the segment, as in training;
- `projection`: W_{k,R} applied to the position table alone: M + L rows, or L * (M + L) of them.

Every case first runs once in a process of its own, which gives its peak memory; then all that are quick enough run in
turn, several rounds, which gives their time. What would need more than the limits, going by the length before, is
skipped and says so. Everything runs on one thread. `cpu_seconds` is the processor time of a call, which others on the
machine hardly change; `wall_seconds` is what the clock showed.

Run with `python benchmarks/positions.py`: 5 to 8 minutes on a machine that does nothing else; it writes
`positions.json` and `positions.png` to `docs/results`. `--lengths 32 64 128 --output FOLDER` is a trial of a minute.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import measure, peak_memory, write_results
from tqdm.auto import tqdm

from hf_txl import TransfoXLConfig
from hf_txl.attention_transfo_xl import ATTENTION_CLASSES, TransfoXLAttention, causal_bias
from hf_txl.layout_transfo_xl import AttentionLayout
from hf_txl.positions_transfo_xl import PositionTable, sinusoid_embeddings

# Q queries (the segment)   K keys (memory and segment)   H heads   D head size
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
LENGTHS = [128, 256, 512, 1024, 2048]
D_MODEL, NUM_HEADS = 512, 8
MEMORY_LIMIT = 10e9  # bytes
TIME_LIMIT = 60.0  # processor seconds of one call
# processor seconds of one call, from which on its single run in a fresh process is its time: the kinds, the naive way
REPEAT_LIMIT, REPEAT_LIMIT_NAIVE = 15.0, 4.0
ROUND_BUDGET = 8.0  # processor seconds of all rounds at one length and part; at least two rounds
MODES = ["forward", "forward and backward", "projection"]
NAIVE = "naive pairs"


class PairAttention(TransfoXLAttention):
    """Transformer-XL's attention the naive way: the key of a distance is projected again for each pair that has it."""

    def project_pairs(self, layout: AttentionLayout, table: PositionTable) -> torch.Tensor:
        """R_{i-j} W_{k,R} for every query and key, `(Q, K, H, D)`."""
        first_column = torch.arange(layout.query_length - 1, -1, -1)
        columns = first_column[:, None] + torch.arange(layout.key_length)[None, :]
        # (Q, K, d_model) -> (Q, K, H, D)
        return self.r_net(table.sinusoids()[columns]).unflatten(-1, (self.num_heads, self.head_size))

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, table: PositionTable, bias: torch.Tensor | None
    ) -> torch.Tensor:
        keys = self.project_pairs(layout, table)
        scores = torch.einsum("bhqd,qkhd->bhqk", self.position_query(query, bias) * self.scaling, keys)
        return scores + causal_bias(layout, query)


CONTESTANTS: dict[str, type] = {**ATTENTION_CLASSES, NAIVE: PairAttention}


class Case:
    """One layer with inputs, ready to run; everything is allocated but what the measured work allocates."""

    def __init__(self, name: str, length: int, seed: int = 0):
        torch.manual_seed(seed)
        kind = name if name in ATTENTION_CLASSES else "transformer_xl"
        # tables reach as far as the keys do; Shaw et al. clip at 16 as in their paper
        config = TransfoXLConfig(
            vocab_size=1,
            d_model=D_MODEL,
            n_head=NUM_HEADS,
            n_layer=1,
            mem_len=length,
            clamp_len=-1,
            same_length=False,
            dropout=0.0,
            attention_kind=kind,
            max_klen=2 * length,
        )
        config._attn_implementation = "sdpa"
        self.layer = CONTESTANTS[name](config, layer_idx=0)
        for parameter in self.layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self.layout = AttentionLayout(query_length=length, key_length=2 * length)
        distances = torch.arange(2 * length - 1, -length - 1, -1).clamp(min=0)
        embeddings = sinusoid_embeddings(distances, D_MODEL) if self.layer.uses_sinusoids else None
        self.table = PositionTable(distances, length, -1, torch.float32, embeddings, keeps=False)
        self.segment = torch.randn(1, length, D_MODEL, requires_grad=True)
        self.memory = torch.randn(1, length, D_MODEL)
        self.output_gradient = torch.randn(1, length, D_MODEL)

    def work(self, mode: str) -> Callable[[], Any]:
        """The function to measure."""
        return {"forward": self.forward, "forward and backward": self.train, "projection": self.project}[mode]

    def attend(self) -> torch.Tensor:
        return self.layer(self.segment, self.layout, self.table, self.memory)[0]

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        return self.attend()

    def train(self) -> None:
        self.attend().backward(self.output_gradient)
        self.layer.zero_grad(set_to_none=True)
        self.segment.grad = None

    @torch.no_grad()
    def project(self) -> torch.Tensor:
        if isinstance(self.layer, PairAttention):
            return self.layer.project_pairs(self.layout, self.table)
        # the rows for future keys belong to the mask, not to the projection
        return self.layer.r_net(self.table.sinusoids()[: self.layout.key_length])


def run_alone(name: str, mode: str, length: int) -> dict[str, float]:
    """Peak memory (bytes above those before the call) and time of one call, for a process that does nothing else."""
    torch.set_num_threads(1)
    # a tiny case of the same work brings in the code that it needs
    Case(name, 16).work(mode)()
    work = Case(name, length).work(mode)
    gc.collect()
    before = peak_memory(restart=True)
    started, started_cpu = time.perf_counter(), time.process_time()
    work()
    cpu_seconds, wall_seconds = time.process_time() - started_cpu, time.perf_counter() - started
    return {"cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds, "peak_bytes": peak_memory() - before}


def contestants_of(mode: str) -> list[str]:
    return ["transformer_xl", NAIVE] if mode == "projection" else list(CONTESTANTS)


def expected(before: dict[str, Any] | None, length: int) -> dict[str, float]:
    """What a case takes if it grows with the square of the length: an upper bound of the usual kinds."""
    if before is None:
        return {"peak_bytes": 0.0, "cpu_seconds": 0.0}
    factor = (length / before["length"]) ** 2
    return {name: before[name] * factor for name in ("peak_bytes", "cpu_seconds")}


def measure_alone(lengths: list[int]) -> list[dict[str, Any]]:
    """Every case once, each in a fresh process, shortest first."""
    context = get_context("forkserver")
    # imported once, in a process that only forks; there every tensor gets pages of its own and returns them, so that
    # what the tiny case left behind does not hide what the measured one takes (glibc)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    context.set_forkserver_preload(["torch", "harness", "hf_txl.attention_transfo_xl"])
    cases: list[dict[str, Any]] = []
    todo = [(length, mode, name) for length in lengths for mode in MODES for name in contestants_of(mode)]
    last: dict[tuple[str, str], dict[str, Any]] = {}
    with ProcessPoolExecutor(max_workers=1, mp_context=context, max_tasks_per_child=1) as pool:
        for length, mode, name in tqdm(todo, desc="peak memory"):
            case: dict[str, Any] = {"kind": name, "mode": mode, "length": length}
            need = expected(last.get((name, mode)), length)
            if need["peak_bytes"] > MEMORY_LIMIT or need["cpu_seconds"] > TIME_LIMIT:
                case["skipped"] = (
                    f"about {need['peak_bytes'] / 1e9:.0f} GB and {need['cpu_seconds']:.0f} s by the length before; "
                    f"the limits are {MEMORY_LIMIT / 1e9:.0f} GB and {TIME_LIMIT:.0f} s"
                )
            else:
                case |= pool.submit(run_alone, name, mode, length).result()
                case["rounds"] = 0
                last[name, mode] = case
            cases.append(case)
    return cases


class ProcessorTime:
    """A function that keeps the processor time of each of its calls."""

    def __init__(self, work: Callable[[], Any]):
        self.work = work
        self.seconds: list[float] = []

    def __call__(self) -> None:
        started = time.process_time()
        self.work()
        self.seconds.append(time.process_time() - started)

    def median(self) -> float:
        """Without the first call, which warms up."""
        return statistics.median(self.seconds[1:])


def measure_in_turn(cases: list[dict[str, Any]]) -> None:
    """Replace the times of the single runs by medians over interleaved rounds, where these do not take too long.

    The naive way takes a hundred times as long, so it has rounds of its own, in turn with Transformer-XL's kind.
    """
    groups = sorted({(case["length"], case["mode"]) for case in cases})
    for length, mode in tqdm(groups, desc="time"):
        ran = {
            case["kind"]: case
            for case in cases
            if (case["length"], case["mode"]) == (length, mode) and "skipped" not in case
        }
        kinds = [name for name in ran if name != NAIVE and ran[name]["cpu_seconds"] < REPEAT_LIMIT]
        rounds = int(ROUND_BUDGET / sum(ran[name]["cpu_seconds"] for name in kinds)) - 1 if kinds else 0
        measure_group(kinds, kinds, ran, min(max(rounds, 2), 15))
        if NAIVE in ran and ran[NAIVE]["cpu_seconds"] < REPEAT_LIMIT_NAIVE:
            measure_group(["transformer_xl", NAIVE], [NAIVE], ran, rounds=3)


def measure_group(names: list[str], kept: list[str], cases: dict[str, dict[str, Any]], rounds: int) -> None:
    """Run contestants in turn and write the times of those to be kept into their cases."""
    timed = {name: ProcessorTime(Case(name, cases[name]["length"]).work(cases[name]["mode"])) for name in names}
    wall_seconds = measure(timed, rounds)
    for name in kept:
        cases[name] |= {
            "cpu_seconds": timed[name].median(),
            "wall_seconds": wall_seconds[name],
            "rounds": rounds,
        }


def growth(cases: list[dict[str, Any]], name: str, mode: str, quantity: str) -> dict[str, float]:
    """Exponent p of `quantity ~ L**p`: least squares in logarithms over all lengths, and between the last two."""
    points = [
        (case["length"], case[quantity])
        for case in cases
        if (case["kind"], case["mode"]) == (name, mode) and case.get(quantity, 0) > 0
    ]
    if len(points) < 2:
        return {}
    logarithms = np.log(np.array(points, dtype=float))
    return {
        "all_lengths": round(float(np.polyfit(*logarithms.T, 1)[0]), 3),
        "last_two_lengths": round(float(np.polyfit(*logarithms[-2:].T, 1)[0]), 3),
    }


def check_naive() -> None:
    """Both ways give the same numbers."""
    efficient, naive = Case("transformer_xl", 24), Case(NAIVE, 24)
    torch.testing.assert_close(efficient.forward(), naive.forward(), rtol=0, atol=1e-5)


def draw(report: dict[str, Any], path: Path) -> None:
    """The plot of the report: four panels, both axes logarithmic."""
    # not at the top: the processes that measure memory read this file too
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    styles = {
        "transformer_xl": ("#0b5fa5", "o", "-"),
        "learned_relative": ("#d1741c", "s", "-"),
        "shaw": ("#2f8f4e", "^", "-"),
        "huang": ("#8a4fb0", "v", "-"),
        "absolute_sinusoid": ("#6b6b6b", "D", "--"),
        "absolute_learned": ("#a9a9a9", "P", "--"),
        NAIVE: ("#c42b2b", "X", ":"),
    }
    panels = [
        ("projection", "cpu_seconds", "W$_{k,R}$ on the position table alone: processor seconds", 1.0),
        ("forward", "cpu_seconds", "forward: processor seconds", 1.0),
        ("forward and backward", "cpu_seconds", "forward and backward: processor seconds", 1.0),
        ("projection", "peak_bytes", "W$_{k,R}$ on the position table alone: peak MB", 1e6),
        ("forward", "peak_bytes", "forward: peak MB", 1e6),
        ("forward and backward", "peak_bytes", "forward and backward: peak MB", 1e6),
    ]
    lengths = report["settings"]["lengths"]
    figure, axes = plt.subplots(2, 3, figsize=(15, 9))
    for axis, (mode, quantity, title, unit) in zip(axes.flat, panels, strict=True):
        for name in contestants_of(mode):
            points = [
                (case["length"], case[quantity] / unit)
                for case in report["cases"]
                if (case["kind"], case["mode"]) == (name, mode) and case.get(quantity, 0) > 0
            ]
            if not points:
                continue
            color, marker, line = styles[name]
            label = name
            if name == NAIVE:
                label = f"one projection per pair (naive), up to {MEMORY_LIMIT / 1e9:.0f} GB"
            if mode == "projection":
                rows = "L (M + L) rows, one per pair" if name == NAIVE else "M + L rows, one per distance"
                exponent = report["growth"][mode][quantity][name].get("all_lengths", float("nan"))
                label = f"{rows}: ~ L$^{{{exponent:.2f}}}$"
            axis.plot(*zip(*points, strict=True), color=color, marker=marker, ls=line, lw=1.8, ms=6, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.set_title(title, loc="left", fontsize=11)
        axis.grid(True, which="major", color="#dddddd", lw=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        if mode == "projection":
            # room for the legend above the lines
            axis.set_ylim(top=axis.get_ylim()[1] * 20)
            axis.legend(fontsize=10, facecolor="white", edgecolor="none", framealpha=1, loc="upper left")
    for axis in axes[1]:
        axis.set_xlabel("segment length L = memory length M")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, fontsize=10)
    machine = report["machine"]["processor"]
    figure.suptitle(
        f"One attention layer, batch 1, {NUM_HEADS} heads x {D_MODEL // NUM_HEADS}, float32, one thread ({machine})",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 0.98))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="segment lengths L (= M)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for positions.json and positions.png")
    arguments = parser.parse_args()
    lengths = sorted(arguments.lengths)
    started, load = time.perf_counter(), {"start": os.getloadavg()}

    cases = measure_alone(lengths)
    load["after_memory"] = os.getloadavg()
    torch.set_num_threads(1)
    check_naive()
    measure_in_turn(cases)
    load["end"] = os.getloadavg()

    report = {
        "settings": {
            "batch_size": 1,
            "n_head": NUM_HEADS,
            "d_head": D_MODEL // NUM_HEADS,
            "d_model": D_MODEL,
            "dtype": "float32",
            "attn_implementation": "sdpa where the layer allows it",
            "max_relative_distance": {"shaw": 16, "huang": "M"},
            "max_klen": "M + L",
            "seed": 0,
            "lengths": lengths,
            "memory_limit_bytes": MEMORY_LIMIT,
            "time_limit_seconds": TIME_LIMIT,
        },
        "load_average": {
            **load,
            "note": "1, 5 and 15 minutes; more than `cores` means that others waited for the processor as well",
        },
        "seconds_of_the_whole_run": round(time.perf_counter() - started, 1),
        # exponents p of L**p, over all lengths measured
        "growth": {
            mode: {
                quantity: {name: growth(cases, name, mode, quantity) for name in contestants_of(mode)}
                for quantity in ("cpu_seconds", "peak_bytes")
            }
            for mode in MODES
        },
        "rounds_0_means": "a single run in a process of its own, since a call takes long",
        "cases": cases,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = write_results(str(arguments.output / "positions"), report)
    draw(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
