"""Train a classifier of documents of 2,000 words whose class is named in the first 50, with and without memory.

    python examples/classify_long_documents.py --output_dir runs/documents

Each document is 2,000 consecutive words of the demo text (Shakespeare), with a phrase among its first 50 words that
names one of four cities: its class. Two classifiers are the same model with the same training and read documents in
segments of 250 words: one with a memory of 2,000 positions and gradients in the last segment only, the other the last
segment alone. Documents of training grow from 50 to 2,000 words, since a new model attends to all words alike, and one
phrase among 2,000 words would teach it nothing. About 10 minutes on one core.

The output folder gets `results.json` and, if matplotlib is installed, `accuracy.png`.
"""

import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import HfArgumentParser, TrainerCallback, set_seed

import hf_txl
from hf_txl.demo import demo_text
from hf_txl.document_training import TransfoXLDocumentTrainer
from hf_txl.tokenization_transfo_xl import build_vocabulary
from hf_txl.training import TransfoXLTrainingArguments

CITIES = ("Rome", "Verona", "London", "Venice")
PHRASE = "the scene lies in {} :"


@dataclass
class Arguments:
    """What is trained, and for how long."""

    output_dir: str = field(metadata={"help": "Folder of the results."})
    steps: int = field(default=400, metadata={"help": "Optimizer steps of 16 documents."})
    document_length: int = field(default=2000, metadata={"help": "Words of a document."})
    segment_length: int = field(default=250, metadata={"help": "Words of a segment."})
    growing: float = field(default=0.7, metadata={"help": "Part of the training in which documents grow."})
    label_words: int = field(default=50, metadata={"help": "The class is named among so many words at the start."})
    test_documents: int = field(default=200, metadata={"help": "Documents whose accuracy is measured."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Highest learning rate."})
    seed: int = field(default=0, metadata={"help": "Of documents and weights."})


class Documents(torch.utils.data.Dataset[dict[str, Any]]):
    """Documents drawn from a text: document `index` is the same in every run.

    Args:
        words (`list[str]`): The text.
        tokenizer: Gives ids to words.
        number (`int`): Documents.
        args (`Arguments`): Their lengths.
        seed (`int`): Another seed, other documents.
        grows (`bool`): Whether the first documents are shorter.
    """

    def __init__(self, words: list[str], tokenizer: Any, number: int, args: Arguments, seed: int, grows: bool = False):
        self.ids = np.array(tokenizer.convert_tokens_to_ids(words))
        self.phrases = [tokenizer.convert_tokens_to_ids(PHRASE.format(city).split()) for city in CITIES]
        self.number, self.args, self.seed, self.grows = number, args, seed, grows

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        random, args = np.random.default_rng((self.seed, index)), self.args
        label = int(random.integers(len(CITIES)))
        phrase = self.phrases[label]
        length = args.document_length
        if self.grows:
            part = min(1.0, index / (args.growing * self.number))
            length = round(args.label_words * (length / args.label_words) ** part)
        start = random.integers(len(self.ids) - length)
        before = random.integers(args.label_words - len(phrase) + 1)
        text = self.ids[start : start + length - len(phrase)].tolist()
        return {"input_ids": [*text[:before], *phrase, *text[before:]], "label": label}


class LastSegment(Documents):
    """The last segment of each document, without the rest."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        document = super().__getitem__(index)
        return {**document, "input_ids": document["input_ids"][-self.args.segment_length :]}


class Evaluations(TrainerCallback):
    """Collects step and accuracy of each evaluation."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **others: Any) -> None:
        self.rows.append({"step": state.global_step, "accuracy": metrics["eval_accuracy"]})


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def train(kind: type[Documents], name: str, args: Arguments) -> dict[str, Any]:
    """Train on documents of one kind; accuracies on unseen documents of another part of the text."""
    words = demo_text().split()
    cities = [word for city in CITIES for word in PHRASE.format(city).split()]
    symbols = build_vocabulary([" ".join(words), " ".join(cities)], "pretokenized", max_size=3000, special=["<unk>"])
    symbols += [word for word in dict.fromkeys(cities) if word not in symbols]
    tokenizer = hf_txl.TransfoXLTokenizer.from_vocabulary(symbols, "pretokenized")
    held_out = len(words) // 10
    data = kind(words[:-held_out], tokenizer, 16 * args.steps, args, args.seed, grows=True)
    test = kind(words[-held_out:], tokenizer, args.test_documents, args, args.seed + 1)
    set_seed(args.seed)
    config = hf_txl.TransfoXLConfig(
        vocab_size=len(tokenizer), cutoffs=[], div_val=1, d_model=64, n_head=4, d_inner=128, n_layer=2, dropout=0.0,
        mem_len=args.document_length, clamp_len=-1, same_length=False, num_labels=len(CITIES),
    )  # fmt: skip
    settings = TransfoXLTrainingArguments(
        output_dir=f"{args.output_dir}/{name}",
        layout="documents",
        train_sampling_strategy="sequential",
        segment_length=args.segment_length,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=50,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        max_grad_norm=1.0,
        warmup_steps=args.steps // 10,
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 10),
        logging_steps=max(1, args.steps // 20),
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    collected = Evaluations()
    trainer = TransfoXLDocumentTrainer(
        hf_txl.TransfoXLForSequenceClassification(config),
        settings,
        train_dataset=data,
        eval_dataset=test,
        compute_metrics=accuracy,
        callbacks=[collected],
    )
    seconds = trainer.train().metrics["train_runtime"]
    return {"accuracy": collected.rows[-1]["accuracy"], "evaluations": collected.rows, "seconds": seconds}


def plot(results: dict[str, Any], path: Path) -> None:
    """Accuracy by step, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, label in (("memory", "with memory"), ("last_segment", "last segment alone")):
        rows = results[name]["evaluations"]
        axes.plot([row["step"] for row in rows], [row["accuracy"] for row in rows], marker="o", label=label)
    axes.axhline(1 / len(CITIES), color="grey", linestyle=":", label="chance")
    axes.set(xlabel="step", ylabel="accuracy on unseen documents", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "settings": vars(args) | {"output_dir": None},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    for name, kind in (("memory", Documents), ("last_segment", LastSegment)):
        results[name] = train(kind, name, args)
        print(f"{name}: accuracy {results[name]['accuracy']:.3f} after {results[name]['seconds']:.0f} s")
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    plot(results, folder / "accuracy.png")


if __name__ == "__main__":
    main()
