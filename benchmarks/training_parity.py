"""A finished training of `examples/train.py`, done again by transformers 4.30 to 4.35, whose model class still trains.

That class starts from the same weights (those of the run's seed), reads the same segments in the same order, with the
same targets, optimizer, schedule, clipping and memory (zero vectors at first, as it has it); what differs is the code
of the model and of the loop. Without dropout the losses can be compared step by step. Both sets of trained weights are
then evaluated by the same code.

Run with `python benchmarks/training_parity.py RUN --train_file … --validation_file … --legacy-python PYTHON`: RUN is
the output folder of a run in one process with `--set memory_init=zeros`, PYTHON an interpreter that has transformers
4.35.2, torch and safetensors. It takes about twice as long as the run, and writes `training-parity.json` and `.png`
to `docs/results`.
"""

import argparse
import json
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
# what the class of transformers 4.35 knows of a configuration
SHAPE = (
    *("vocab_size", "cutoffs", "div_val", "d_model", "d_embed", "n_head", "d_head", "d_inner", "n_layer"),
    *("mem_len", "clamp_len", "same_length", "untie_r", "dropout", "dropatt"),
)


class LegacyTraining:
    """The class of transformers 4.35, trained step by step when asked."""

    def load(self, weights: str, shape: dict[str, Any], training: dict[str, Any], batch_size: int) -> list[str]:
        """Build the model with these weights; the names of parameters that were not among them."""
        from transformers import TransfoXLConfig, TransfoXLLMHeadModel, get_cosine_schedule_with_warmup

        self.model: Any = TransfoXLLMHeadModel(TransfoXLConfig(**shape, adaptive=True))
        missing = self.model.load_state_dict(load_file(weights), strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
        self.model.train()
        self.batch_size, self.clip = batch_size, training["max_grad_norm"]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=training["learning_rate"], weight_decay=0.0, fused=False
        )
        self.schedule = get_cosine_schedule_with_warmup(
            self.optimizer, training["warmup_steps"], training["max_steps"]
        )
        parameters = dict(self.model.named_parameters())
        return [name for name in missing.missing_keys if name in parameters]

    def step(self, ids: list[list[int]], targets: list[list[int]], restart: bool) -> float:
        """Train on a segment, from an empty memory if it is the first of an epoch; its loss."""
        if restart:
            self.memory = self.model.transformer.init_mems(self.batch_size)
        output = self.model.transformer(torch.tensor(ids), mems=self.memory)
        self.memory, hidden = output.mems, output.last_hidden_state
        # its loss leaves out the last state and the first target: they get company that is not looked at
        labels = torch.tensor([[row[0], *row] for row in targets])
        losses = self.model.crit(torch.cat([hidden, hidden[:, -1:]], dim=1), labels)
        # ignored targets have no cluster and a loss of 0
        loss = losses.sum() / (labels[:, 1:] >= 0).sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def save(self, path: str) -> None:
        save_file({name: tensor.clone() for name, tensor in self.model.state_dict().items()}, path)


def plot(ours: list[float], legacy: list[float], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    axes[0].plot(legacy, label="transformers 4.35.2", linewidth=3, alpha=0.4)
    axes[0].plot(ours, label="hf_txl", linewidth=0.8)
    axes[0].set(xlabel="step", ylabel="loss, nats per token")
    axes[0].legend()
    axes[1].semilogy([abs(a - b) / b for a, b in zip(ours, legacy, strict=True)], linewidth=0.8)
    axes[1].set(xlabel="step", ylabel="relative difference of the losses")
    figure.savefig(path, dpi=120)


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """Settings of a run's training, and the loss of each of its steps."""
    run = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    losses = [entry["loss"] for entry in run["history"] if "loss" in entry]
    if len(losses) != run["training"]["max_steps"]:
        raise SystemExit(
            f"RUN must have logged every step (`--logging_steps 1`), but {folder} has {len(losses)} losses of "
            f"{run['training']['max_steps']} steps."
        )
    if run["model"].get("memory_init") != "zeros" or run["training"]["world_size"] != 1:
        raise SystemExit(f"RUN must be of one process with `memory_init=zeros`, but {folder} is not.")
    return run, run["training"], losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="output folder of examples/train.py")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--legacy-python", type=Path, required=True, help="interpreter that has transformers 4.35.2")
    options = parser.parse_args()
    from transformers import AutoTokenizer, set_seed

    from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
    from hf_txl.corpus import tokenize_corpus
    from hf_txl.data import TokenStreams
    from hf_txl.scoring import evaluate_stream
    from hf_txl.token_ids import as_tokens

    run, training, ours = read_run(options.run)
    batch_size, length = training["per_device_train_batch_size"], training["segment_length"]
    tokenizer = AutoTokenizer.from_pretrained(options.run)
    text, validation = (
        as_tokens(tokenize_corpus(path, tokenizer))[:] for path in (options.train_file, options.validation_file)
    )
    config = TransfoXLConfig.from_pretrained(options.run)
    # the weights that the run began with
    set_seed(training["seed"])
    model = TransfoXLForCausalLM(TransfoXLConfig(**{"vocab_size": len(tokenizer), **run["model"]}))
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.safetensors")
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, weights)
        legacy_training = Contestant([str(options.legacy_python), __file__, "legacy"])
        shape = {name: getattr(config, name) for name in SHAPE}
        missing = legacy_training.ask("load", weights=weights, shape=shape, training=training, batch_size=batch_size)
        assert not missing, f"weights that were not set: {missing}"
        legacy: list[float] = []
        progress = tqdm(total=len(ours), desc="transformers 4.35")
        while len(legacy) < len(ours):
            streams = TokenStreams(text, batch_size, length)
            for number, segment in enumerate(streams.segments()):
                ids, targets = (segment[name].tolist() for name in ("input_ids", "shift_labels"))
                legacy.append(legacy_training.ask("step", ids=ids, targets=targets, restart=number == 0))
                progress.update()
                if len(legacy) == len(ours):
                    break
        legacy_training.ask("save", path=weights)
        legacy_training.close()
        trained = {"ours": TransfoXLForCausalLM.from_pretrained(options.run), "legacy": model}
        model.load_state_dict(load_file(weights), strict=False)
    perplexity = {
        name: evaluate_stream(trainee, validation, segment_length=length, batch_size=4).perplexity
        for name, trainee in trained.items()
    }
    last = {name: statistics.mean(losses[-100:]) for name, losses in (("ours", ours), ("legacy", legacy))}
    differences = [abs(a - b) / b for a, b in zip(ours, legacy, strict=True)]
    results = {
        "steps": len(ours),
        "shape": shape,
        "training": training,
        "mean_of_last_100": last,
        "relative_difference_of_means": abs(last["ours"] - last["legacy"]) / last["legacy"],
        "validation_perplexity": perplexity,
        "largest_relative_difference": max(differences),
        "largest_relative_difference_of_first_100": max(differences[:100]),
        "losses": {"ours": [round(loss, 5) for loss in ours], "legacy": [round(loss, 5) for loss in legacy]},
    }
    plot(ours, legacy, RESULTS / "training-parity.png")
    write_results(str(RESULTS / "training-parity"), results)


if __name__ == "__main__":
    if sys.argv[1:] == ["legacy"]:
        trainee = LegacyTraining()
        serve({"load": trainee.load, "step": trainee.step, "save": trainee.save})
    else:
        main()
