"""Speed of decoding and evaluation with a memory, beside the last release that had the model and beside GPT-2.

Each model runs in a process of its own and does one thing at a time when asked (`contestants.py`), so that all are
measured in turn and what disturbs one disturbs all. Read the ratios: they are medians of the ratios of each round.

- attention alone: ours against PyTorch's fused attention with the same boolean mask and no positions;
- decoding: tokens per second behind a full memory, batch 1 and 8, and the bandwidth bound: the bytes that one step
  must read, over the read bandwidth that was measured just before and after;
- evaluation: tokens per second, a segment of 128 behind a full memory; ours without a memory, a window of 512 for each
  token;
- rescoring: tokens per second, 8 hypotheses of 16 tokens each that go on from one text;
- first token: a prompt of 128 and one new token;
- long texts: a step behind 100 to 20,000 tokens, and 20,000 tokens written one by one.

Run with `python benchmarks/run.py --legacy-python .venv-legacy/bin/python` after `benchmarks/peers.sh`: 10 to 15
minutes on two cores; it writes `speed.json`, `.md` and `.png` to `docs/results` and the table into the README and the
page of results. `--from-json` writes all but the JSON file again, without measuring. `--device cuda` compares eager,
sdpa and flex on a GPU and writes `speed-cuda.json`. `--quick` is a trial of two minutes with the small model.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from contestants import HYPOTHESES, HYPOTHESIS_LENGTH, SEGMENT, SHAPES, SLIDING_WINDOW
from harness import Contestant, measure, write_results
from tqdm.auto import tqdm

from hf_txl import TransfoXLConfig
from hf_txl.attention_execution_transfo_xl import AttentionInputs, attend
from hf_txl.attention_transfo_xl import TransfoXLAttention
from hf_txl.layout_transfo_xl import AttentionLayout
from hf_txl.positions_transfo_xl import PositionTable, sinusoid_embeddings

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "results"
# pages that hold the table, and the lines between which it stands
PAGES = [HERE.parent / "README.md", RESULTS / "README.md"]
BEGIN, END = "<!-- the table below is written by benchmarks/run.py -->\n", "<!-- end of the table -->\n"
# (B batch, H heads, L segment, M memory, D head size) and the ratio that must not be exceeded
ATTENTION_SHAPES = [((1, 16, 128, 1600, 64), 1.8), ((1, 16, 1, 1600, 64), 2.0), ((4, 8, 512, 512, 64), 2.2)]
POSITIONS = [100, 400, 1600, 5000, 10000, 20000]


class Peers:
    """The contestants of a run, by name."""

    def __init__(self, legacy_python: Path | None, device: str, threads: int):
        script = str(HERE / "contestants.py")
        pythons = {"ours": sys.executable, "gpt2": sys.executable}
        if legacy_python is not None:
            pythons["legacy"] = str(legacy_python)
        commands = {name: [python, script, name, device, str(threads)] for name, python in pythons.items()}
        if device == "cuda":
            commands = {
                f"ours, {attention}": [sys.executable, script, "ours", device, str(threads), attention]
                for attention in ("eager", "sdpa", "flex_attention")
            } | {"gpt2": commands["gpt2"]}
        self.members = {name: Contestant(command, OMP_NUM_THREADS=str(threads)) for name, command in commands.items()}

    def ask_all(self, task: str, **arguments: Any) -> dict[str, Any]:
        return {name: member.ask(task, **arguments) for name, member in self.members.items()}

    def rounds(self, task: str, number: int, arguments: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
        """The answers of all to a task, in turn, after one round that does not count."""
        answers: dict[str, list[float]] = {name: [] for name in self.members}
        for count in tqdm(range(number + 1), desc=task, leave=False):
            for name, member in self.members.items():
                answer = member.ask(task, **arguments.get(name, {}))
                if count:
                    answers[name].append(answer)
        return answers

    def close(self) -> None:
        for member in self.members.values():
            member.close()


def compare(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Medians as tokens per second, and how many times as fast as each other contestant the first one is."""
    first = next(iter(seconds))
    return {
        "tokens_per_second": {name: tokens / statistics.median(values) for name, values in seconds.items()},
        "times_as_fast_as": {
            name: statistics.median(other / ours for ours, other in zip(seconds[first], values, strict=True))
            for name, values in seconds.items()
            if name != first
        },
    }


def measure_shape(peers: Peers, shape: str, batches: list[int], rounds: int, steps: int) -> dict[str, Any]:
    """Decoding, evaluation, first token and memory of one model."""
    first = next(iter(peers.members))
    facts = peers.ask_all("load", shape=shape)
    report: dict[str, Any] = {"parameters": {name: fact["parameters"] for name, fact in facts.items()}}
    # a step of the legacy class takes seconds
    few = {"legacy": {"num_tokens": max(1, steps // 16)}}
    arguments = {name: few.get(name, {"num_tokens": steps}) for name in peers.members}
    for batch_size in batches:
        peers.ask_all("fill", batch_size=batch_size)
        bandwidth = [peers.members[first].ask("read_bandwidth")]
        peers.ask_all("peak", restart=True)
        seconds = peers.rounds("decode", rounds if batch_size == 1 else max(2, rounds // 2), arguments)
        peak_bytes = peers.ask_all("peak")
        bandwidth.append(peers.members[first].ask("read_bandwidth"))
        decoding = compare(seconds, batch_size)
        facts_ours = facts[first]
        bytes_read = (
            facts_ours["weight_bytes"] + facts_ours["position_bytes"] + batch_size * facts_ours["memory_bytes"]
        )
        bound = statistics.mean(bandwidth) / bytes_read * batch_size
        decoding |= {
            "bytes_per_step": bytes_read,
            "bytes_of_clusters_left_out": facts_ours["cluster_bytes"],
            "bytes_per_second": statistics.mean(bandwidth),
            "tokens_per_second_by_bandwidth": bound,
            "share_of_bandwidth_bound": decoding["tokens_per_second"][first] / bound,
            "peak_bytes": peak_bytes,
        }
        all_scores = [peers.members[first].ask("decode_all_scores", num_tokens=steps) for _ in range(3)]
        decoding["tokens_per_second_reading_all_clusters"] = batch_size / statistics.median(all_scores)
        report[f"decoding, batch {batch_size}"] = decoding
        if batch_size == 1:
            report["evaluation"] = evaluation = compare(peers.rounds("evaluate", max(2, rounds // 2), {}), SEGMENT)
            report[f"rescoring {HYPOTHESES} x {HYPOTHESIS_LENGTH}"] = compare(
                peers.rounds("rescore", 2, {}), HYPOTHESES * HYPOTHESIS_LENGTH
            )
            sliding = 1 / statistics.median(peers.members[first].ask("slide") for _ in range(3))
            report["sliding_window"] = {
                "window": SLIDING_WINDOW,
                "tokens_per_second": sliding,
                "evaluation_over_sliding_window": evaluation["tokens_per_second"][first] / sliding,
            }
    report["batch_scaling"] = {
        name: report[f"decoding, batch {batches[-1]}"]["tokens_per_second"][name] / speed
        for name, speed in report[f"decoding, batch {batches[0]}"]["tokens_per_second"].items()
    }
    report["first_token_seconds"] = {
        name: statistics.median(values) for name, values in peers.rounds("first_token", 2, {}).items()
    }
    return report


def measure_long(peers: Peers, positions: list[int], num_tokens: int) -> dict[str, Any]:
    """Steps at several distances into a text, of all; and a whole text token by token, of ours."""
    peers.ask_all("load", shape="small")
    peers.ask_all("fill", batch_size=1)
    peers.ask_all("first_token")
    steps: dict[str, list[float]] = {name: [] for name in peers.members}
    for name, member in peers.members.items():
        member.ask("first_token")
        read = 129
        for position in tqdm(positions, desc=f"long text, {name}", leave=False):
            member.ask("go_on", num_tokens=max(0, position - read))
            read = max(read, position)
            steps[name].append(statistics.median(member.ask("decode", num_tokens=16) for _ in range(3)))
    first = next(iter(peers.members))
    text = peers.members[first].ask("decode_long", num_tokens=num_tokens)
    whole = text["thousands"]
    return {
        "positions": positions,
        "seconds_per_token": steps,
        "token_by_token": whole,
        "last_thousand_over_third_thousand": text["last_over_third"],
        "peak_growth_bytes": whole[-1]["peak_bytes"] - whole[min(2, len(whole) - 1)]["peak_bytes"],
    }


@torch.no_grad()
def measure_attention(device: str, rounds: int) -> list[dict[str, Any]]:
    """Attention alone: content and position scores, softmax and values of one layer, without its projections."""
    report = []
    for shape, limit in ATTENTION_SHAPES:
        batch_size, num_heads, query_length, memory_length, head_size = shape
        key_length = memory_length + query_length
        config = TransfoXLConfig(
            vocab_size=1,
            d_model=num_heads * head_size,
            n_head=num_heads,
            n_layer=1,
            mem_len=memory_length,
            clamp_len=-1,
        )
        config._attn_implementation = "sdpa"
        layer = TransfoXLAttention(config, 0).eval().to(device)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        layout = AttentionLayout(query_length, key_length)
        distances = torch.arange(key_length - 1, -query_length - 1, -1, device=device).clamp(min=0)
        sinusoids = sinusoid_embeddings(distances, config.d_model)
        table = PositionTable(distances, query_length, -1, torch.float32, sinusoids, keeps=True)
        query = torch.randn(batch_size, num_heads, query_length, head_size, device=device)
        key, value = torch.randn(2, batch_size, num_heads, key_length, head_size, device=device)
        mask = torch.arange(key_length) <= torch.arange(query_length)[:, None] + memory_length
        mask = mask[None, None].to(device)
        calls = 20 if query_length == 1 else 1

        inputs = AttentionInputs(layer, query, key, value, layout, table, implementation="sdpa")

        def ours(inputs: AttentionInputs = inputs, calls: int = calls) -> None:
            for _ in range(calls):
                attend(inputs)
            if device == "cuda":
                torch.cuda.synchronize()

        def plain(states: Any = (query, key, value, mask), calls: int = calls) -> None:
            for _ in range(calls):
                F.scaled_dot_product_attention(*states)
            if device == "cuda":
                torch.cuda.synchronize()

        seconds = measure({"ours": ours, "without positions": plain}, rounds)
        report.append(
            {
                "shape": dict(zip("BHLMD", shape, strict=True)),
                "milliseconds": {name: 1e3 * value / calls for name, value in seconds.items()},
                "ratio": seconds["ours"] / seconds["without positions"],
                "limit": limit,
            }
        )
    return report


def table(report: dict[str, Any]) -> str:
    """The results as Markdown, for the README."""
    machine, versions = report["machine"], report["versions"]
    names = list(next(iter(report["models"].values()))["evaluation"]["tokens_per_second"])
    rows = [["tokens per second", *names, *(f"ours / {name}" for name in names[1:]), "share of bandwidth bound"]]
    for shape, model in report["models"].items():
        for what, case in model.items():
            if "times_as_fast_as" not in case:
                continue
            rows.append([f"{shape}, {what}"])
            rows[-1] += [f"{case['tokens_per_second'][name]:.3g}" for name in names]
            rows[-1] += [f"{case['times_as_fast_as'][name]:.3g}x" for name in names[1:]]
            rows[-1].append(f"{case['share_of_bandwidth_bound']:.0%}" if "share_of_bandwidth_bound" in case else "")
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    load = report["load_average"]
    return "\n".join(
        [
            f"float32, random weights, {report['settings']['threads']} thread(s) of {machine['processor']} with "
            f"{machine['cores']} cores,",
            f"load average {load['start'][0]:.1f} to {load['end'][0]:.1f}; torch {versions['torch']}, transformers "
            f"{versions['transformers']}; legacy: transformers 4.57.6; {report['date']}.",
            "",
            *lines,
            "",
        ]
    )


def with_table(page: str, text: str) -> str:
    """A page with another table between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + text + END + after


def write_pages(text: str) -> None:
    """Put a table into the pages that show it, each complete or not at all."""
    for path in PAGES:
        beside = path.with_suffix(".md.tmp")
        beside.write_text(with_table(path.read_text(encoding="utf-8"), text), encoding="utf-8")
        beside.replace(path)


def draw(report: dict[str, Any], path: Path) -> None:
    """Decoding speed by model and batch, and the time of a step as the text grows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (bars, lines) = plt.subplots(1, 2, figsize=(13, 4.6))
    cases = [
        (f"{shape}\nbatch {name.split()[-1]}", case)
        for shape, model in report["models"].items()
        for name, case in model.items()
        if name.startswith("decoding")
    ]
    names = list(cases[0][1]["tokens_per_second"])
    for index, name in enumerate(names):
        speeds = [case["tokens_per_second"][name] for _, case in cases]
        places = [place + 0.8 * (index + 0.5) / len(names) - 0.4 for place in range(len(cases))]
        bars.bar(places, speeds, 0.8 / len(names), label=name)
    for place, (_, case) in enumerate(cases):
        bound = case["tokens_per_second_by_bandwidth"]
        bars.plot([place - 0.45, place + 0.45], [bound, bound], color="black", lw=1, ls="--")
    bars.set_yscale("log")
    bars.set_xticks(range(len(cases)), [label for label, _ in cases])
    bars.set_title("greedy decoding, tokens/s (dashed: bandwidth bound of ours)", loc="left", fontsize=11)
    bars.legend(frameon=False)
    long_texts = report["long_texts"]
    for name, seconds in long_texts["seconds_per_token"].items():
        lines.plot(long_texts["positions"], [1e3 * value for value in seconds], marker="o", label=name)
    lines.set_xscale("log")
    lines.set_yscale("log")
    lines.set_title("one step behind a growing text, small model, ms", loc="left", fontsize=11)
    lines.set_xlabel("tokens before it")
    lines.legend(frameon=False)
    for axis in (bars, lines):
        axis.grid(True, axis="y", color="#dddddd", lw=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"float32, {report['settings']['threads']} thread(s), {report['machine']['processor']}", x=0.01, ha="left"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--legacy-python", type=Path, help="interpreter of the environment that peers.sh built")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", default=["wt103-base", "wt103-large"], choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="rows decoded at once")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--from-json", action="store_true", help="write tables and plot again, without measuring")
    parser.add_argument("--quick", action="store_true", help="a trial with the small model")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON file and the plot")
    arguments = parser.parse_args()
    name = "speed" if arguments.device == "cpu" else f"speed-{arguments.device}"
    path = arguments.output / f"{name}.json"
    if not arguments.from_json:
        run(arguments, path)
    report = json.loads(path.read_text(encoding="utf-8"))
    draw(report, path.with_suffix(".png"))
    path.with_suffix(".md").write_text(table(report), encoding="utf-8")
    if path == RESULTS / "speed.json":
        write_pages(table(report))


def run(arguments: argparse.Namespace, path: Path) -> None:
    """Measure, and write the JSON file."""
    started, load = time.perf_counter(), os.getloadavg()
    torch.set_num_threads(arguments.threads)
    shapes, rounds, steps = arguments.shapes, arguments.rounds, 16
    positions, num_tokens = POSITIONS, 20000
    if arguments.quick:
        shapes, rounds, positions, num_tokens = ["small"], 2, POSITIONS[:3], 3000

    report: dict[str, Any] = {
        "settings": {
            "device": arguments.device,
            "threads": arguments.threads,
            "dtype": "float32",
            "weights": "random",
            "rounds": rounds,
            "steps_per_round": steps,
            "shapes": {shape: SHAPES[shape] for shape in shapes},
            "legacy": "transformers 4.57.6" if arguments.legacy_python else None,
        },
        "attention_alone": measure_attention(arguments.device, rounds=7 if arguments.quick else 15),
        "models": {},
    }
    path.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        """What is finished is written at once, so that a run that is stopped leaves it."""
        load_average = {"start": load, "end": os.getloadavg(), "note": "above `cores` others waited, too"}
        seconds = round(time.perf_counter() - started, 1)
        write_results(str(path), {**report, "load_average": load_average, "seconds_of_the_whole_run": seconds})

    peers = Peers(arguments.legacy_python, arguments.device, arguments.threads)
    try:
        for shape in tqdm(shapes, desc="models"):
            report["models"][shape] = measure_shape(peers, shape, arguments.batches, rounds, steps)
            save()
        report["long_texts"] = measure_long(peers, positions, num_tokens)
    finally:
        peers.close()
    save()


if __name__ == "__main__":
    main()
