"""The same training in this package and in transformers 4.30 to 4.35, the releases whose model class still trains.

Both start from the same weights and read the same segments of a real text in the same order, with the same optimizer,
schedule and memory (zero vectors at first, as that class has it; the last token of a segment is not scored). Without
dropout their losses can be compared step by step: they drift apart by rounding alone.

Run with `python benchmarks/training_parity.py --legacy-python PYTHON`, an interpreter that has transformers 4.35.2 and
torch; a few minutes on two cores. It writes `training-parity.json` and `.png` to `docs/results`.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import Contestant, serve, write_results
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "results"
BATCH, LENGTH, RATE, CLIP = 8, 48, 1e-3, 0.25
SHAPE: dict[str, Any] = {
    **{"cutoffs": [20, 40], "div_val": 2, "d_model": 128, "d_embed": 128, "n_head": 4, "d_head": 32, "d_inner": 512},
    **{"n_layer": 4, "mem_len": LENGTH, "clamp_len": -1, "same_length": False, "dropout": 0.0, "dropatt": 0.0},
}


class Trainee:
    """One class of models, trained step by step when asked."""

    def __init__(self, name: str):
        self.name = name
        torch.set_num_threads(1)

    def load(self, weights: str, vocab_size: int, steps: int) -> list[str]:
        """Build the model with these weights; the names of parameters that were not among them."""
        shape = {"vocab_size": vocab_size, **SHAPE}
        if self.name == "ours":
            from hf_txl import TransfoXLConfig, TransfoXLForCausalLM

            self.model: Any = TransfoXLForCausalLM(TransfoXLConfig(**shape, memory_init="zeros"))
            self.memory: Any = self.model.init_memory(BATCH)
        else:
            from transformers import TransfoXLConfig, TransfoXLLMHeadModel

            self.model = TransfoXLLMHeadModel(TransfoXLConfig(**shape, adaptive=True))
            self.memory = self.model.transformer.init_mems(BATCH)
        missing = self.model.load_state_dict(load_file(weights), strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
        self.model.train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)))
        )
        parameters = dict(self.model.named_parameters())
        return [name for name in missing.missing_keys if name in parameters]

    def step(self, ids: list[list[int]]) -> float:
        segment = torch.tensor(ids)
        if self.name == "ours":
            loss = self.model(segment, labels=segment, cache=self.memory).loss
        else:
            output = self.model(segment, mems=self.memory, labels=segment)
            self.memory, loss = output.mems, output.loss
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def plot(ours: list[float], legacy: list[float], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    axes[0].plot(legacy, label="transformers 4.35.2", linewidth=3, alpha=0.4)
    axes[0].plot(ours, label="hf_txl", linewidth=0.8)
    axes[0].set(xlabel="step", ylabel="loss, nats per character")
    axes[0].legend()
    axes[1].semilogy([abs(a - b) / b for a, b in zip(ours, legacy, strict=True)])
    axes[1].set(xlabel="step", ylabel="relative difference of the losses")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--legacy-python", type=Path, required=True, help="interpreter that has transformers 4.35.2")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
    from hf_txl.data import TokenStreams
    from hf_txl.demo import character_tokenizer, demo_text

    tokenizer = character_tokenizer(demo_text())
    ids = tokenizer(demo_text(), return_tensors="pt").input_ids[0]
    torch.manual_seed(0)
    model = TransfoXLForCausalLM(TransfoXLConfig(vocab_size=len(tokenizer), **SHAPE))
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.safetensors")
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, weights)
        pythons = {"ours": sys.executable, "legacy": str(options.legacy_python)}
        trainees = {
            name: Contestant([python, __file__, name], OMP_NUM_THREADS="1") for name, python in pythons.items()
        }
        missing = {
            name: trainee.ask("load", weights=weights, vocab_size=len(tokenizer), steps=options.steps)
            for name, trainee in trainees.items()
        }
    assert not any(missing.values()), f"weights that were not set: {missing}"
    losses: dict[str, list[float]] = {name: [] for name in trainees}
    segments = TokenStreams(ids, BATCH, LENGTH, drop_last=True).segments()
    for _ in tqdm(range(options.steps), desc="training"):
        segment = next(segments)["input_ids"].tolist()
        for name, trainee in trainees.items():
            losses[name].append(trainee.ask("step", ids=segment))
    for trainee in trainees.values():
        trainee.close()
    last = {name: statistics.mean(values[-100:]) for name, values in losses.items()}
    differences = [abs(a - b) / b for a, b in zip(losses["ours"], losses["legacy"], strict=True)]
    results = {
        "steps": options.steps,
        "shape": SHAPE,
        "mean_of_last_100": last,
        "relative_difference_of_means": abs(last["ours"] - last["legacy"]) / last["legacy"],
        "largest_relative_difference": max(differences),
        "largest_relative_difference_of_first_100": max(differences[:100]),
        "losses": {name: [round(value, 6) for value in values] for name, values in losses.items()},
    }
    write_results(str(RESULTS / "training-parity"), results)
    plot(losses["ours"], losses["legacy"], RESULTS / "training-parity.png")
    print(json.dumps({name: value for name, value in results.items() if name not in ("losses", "shape")}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:] in (["ours"], ["legacy"]):
        trainee = Trainee(sys.argv[1])
        serve({"load": trainee.load, "step": trainee.step})
    else:
        main()
