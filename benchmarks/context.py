"""What a memory is worth: perplexity by its length, how far models make use of it, and its speed (paper, Table 9).

    python benchmarks/context.py --models transformer_xl=FOLDER shaw=FOLDER … --texts novel=FILE plays=FILE

- **Perplexity by memory length** of each model on each text, one stream, `same_length`.
- **Relative effective context length** (section 4.3 and appendix C) of the models as a group, on the first text.
- **Speed**: seconds per token of the base WikiText-103 shape with random weights, read with a memory in segments of
  128, beside a window that is read anew for each token, for attention lengths of 100 to 3,200. In turn, medians.

It writes `docs/results/context.json` and, if matplotlib is installed, `context.png`; 20 minutes on one core.
"""

import argparse
import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import torch
from contestants import SHAPES
from harness import measure
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_txl
from hf_txl.scoring import evaluate_stream, losses_by_context, relative_effective_context_length
from hf_txl.tokenization_transfo_xl import encode_file

RESULTS = Path(__file__).parents[1] / "docs" / "results"
MEM_LENS = (0, 8, 16, 32, 64, 128, 256)
CONTEXTS = tuple(range(8, 129, 8))
FRACTIONS = (0.1, 0.5, 1.0)
ATTENTION_LENGTHS = (100, 200, 400, 800, 1600, 3200)
# of the paper's Table 9: how many times as fast as its own baseline, which reads a window anew for each token
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
SEGMENT = 128


def pairs(values: list[str]) -> dict[str, Path]:
    return {name: Path(path) for name, _, path in (value.partition("=") for value in values)}


def by_memory(models: dict[str, Any], ids: dict[str, torch.Tensor]) -> dict[str, dict[str, list[float]]]:
    """Perplexity of each model on each text by memory length."""
    return {
        text: {
            name: [
                evaluate_stream(model, tokens, segment_length=64, mem_len=mem_len, same_length=True).perplexity
                for mem_len in MEM_LENS
            ]
            for name, model in models.items()
        }
        for text, tokens in ids.items()
    }


def effective_lengths(models: dict[str, Any], tokens: torch.Tensor) -> dict[str, Any]:
    """Relative effective context lengths of the group, and mean losses by context."""
    losses = {name: losses_by_context(model, tokens, CONTEXTS, stride=64) for name, model in models.items()}
    lengths = {str(part): relative_effective_context_length(losses, part) for part in FRACTIONS}
    means = {name: [row.mean().item() for row in rows.values()] for name, rows in losses.items()}
    return {"contexts": CONTEXTS, "lengths": lengths, "losses": means, "tokens": len(next(iter(losses.values()))[8])}


@torch.no_grad()
def speed(rounds: int) -> list[dict[str, float]]:
    """Seconds per token with a memory and without, by attention length."""
    torch.manual_seed(0)
    model = hf_txl.TransfoXLForCausalLM(hf_txl.TransfoXLConfig(**SHAPES["wt103-base"])).eval()
    rows = []
    for length in ATTENTION_LENGTHS:
        memory = model.init_memory(1, mem_len=length)
        ids = torch.randint(0, 20_000, (1, length + SEGMENT))
        model.base_model(ids[:, :length], cache=memory)
        segment, labels, window = ids[:, -SEGMENT:], ids[:, -SEGMENT:], ids[:, :length]

        def with_memory(memory: Any = memory, segment: Any = segment, labels: Any = labels) -> None:
            model(segment, cache=memory, shift_labels=labels, return_logits=False)

        def anew(window: Any = window) -> None:
            states = model.base_model(window, use_cache=False).last_hidden_state
            model.crit(states[:, -1:], window[:, -1:])

        seconds = measure({"memory": with_memory, "window": anew}, rounds)
        row = {"length": length, "memory": seconds["memory"] / SEGMENT, "window": seconds["window"]}
        rows.append({**row, "ratio": row["window"] / row["memory"]})
        print(f"attention length {length}: {rows[-1]['ratio']:.0f} times as fast with a memory")
    return rows


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    memory, context, ratio = figure.subplots(1, 3)
    for style, (text, models) in zip(("-", "--", ":"), results["by_memory"].items(), strict=False):
        for index, (name, values) in enumerate(models.items()):
            memory.plot(MEM_LENS, values, f"C{index}{style}", marker=".", label=f"{name}, {text}")
    memory.set(xlabel="memory length", ylabel="perplexity", xscale="symlog", yscale="log")
    memory.legend(fontsize=7)
    for name, values in results["effective"]["losses"].items():
        context.plot(results["effective"]["contexts"], values, marker=".", label=name)
    context.set(xlabel="context, tokens", ylabel="loss, nats per token")
    context.legend(fontsize=8)
    rows = results["speed"]
    ratio.plot([row["length"] for row in rows], [row["ratio"] for row in rows], marker="o", label="here, base model")
    ratio.plot(list(PAPER), list(PAPER.values()), marker="s", linestyle=":", label="paper, Table 9")
    ratio.set(xlabel="attention length", ylabel="times as fast as a window", xscale="log", yscale="log")
    ratio.legend(fontsize=8)
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", required=True, help="NAME=FOLDER, with one tokenizer")
    parser.add_argument("--texts", nargs="+", required=True, help="NAME=FILE")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = pairs(options.models)
    models = {name: AutoModelForCausalLM.from_pretrained(folder).eval() for name, folder in folders.items()}
    tokenizer = AutoTokenizer.from_pretrained(next(iter(folders.values())))
    ids = {name: torch.from_numpy(encode_file(tokenizer, path)) for name, path in pairs(options.texts).items()}
    results = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "mem_lens": MEM_LENS,
        "tokens": {name: len(tokens) for name, tokens in ids.items()},
        "by_memory": by_memory(models, ids),
        "effective": effective_lengths(models, next(iter(ids.values()))),
        "paper": PAPER,
        "speed": speed(options.rounds),
    }
    assert all(math.isfinite(row["ratio"]) for row in results["speed"])
    (RESULTS / "context.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(results, RESULTS / "context.png")


if __name__ == "__main__":
    main()
