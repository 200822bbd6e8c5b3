"""Train a Transformer-XL on text files, or continue training one, with the library's `Trainer`.

    hf-txl build-tokenizer train.txt --output tokenizer --max-size 50000
    python examples/train.py --train_file train.txt --validation_file valid.txt --tokenizer tokenizer \\
        --recipe examples/recipes/wt103_base.json --set n_layer=6 cutoffs=[5000,20000] --output_dir runs/small

    torchrun --nproc_per_node 8 examples/train.py …     # one process per device; on the CPU with --use_cpu
    python examples/train.py … --resume                 # resumes from the last complete checkpoint
    python examples/train.py … --model my_model         # continues training a model, with its tokenizer

A recipe is a JSON file with published settings: the architecture, the training, and the number of streams of all
processes together. Options override it: `--set name=value …` for the model, options of the same name for the training
(`--help` lists them), and `--batch_size` for the streams.

The output folder holds the model with its tokenizer and its card, `results.json` (learning curve, evaluations,
settings, machine) and, if matplotlib is installed, a plot in `curves.png`.
"""

import difflib
import json
import math
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, HfArgumentParser

import hf_txl
from hf_txl.corpus import tokenize_corpus
from hf_txl.tokenization_transfo_xl import build_vocabulary
from hf_txl.training import TransfoXLTrainer, TransfoXLTrainingArguments, last_checkpoint

MODES = {
    "moses": ("<eos>", "<unk>"),
    "pretokenized": ("<eos>", "<unk>"),
    "characters": ("<unk>",),
    "bytes": ("<unk>",),
}


# training arguments that `results.json` records
RECORDED = (
    *("segment_length", "mem_len", "max_steps", "warmup_steps", "learning_rate", "max_grad_norm", "seed"),
    *("world_size", "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "torch_compile"),
)


@dataclass
class DataArguments:
    """Model and data of a training."""

    train_file: list[str] = field(metadata={"help": "Text files, UTF-8, read one after the other."})
    validation_file: str | None = field(default=None, metadata={"help": "A text file to evaluate on."})
    recipe: str | None = field(default=None, metadata={"help": "JSON file with published settings."})
    model: str | None = field(default=None, metadata={"help": "Folder or Hub name of a model to continue training."})
    set: list[str] = field(default_factory=list, metadata={"help": "Settings of a new model, name=value."})
    tokenizer: str | None = field(
        default=None,
        metadata={"help": f"A tokenizer's folder, or the mode of a new one for the text: {', '.join(MODES)}."},
    )
    max_size: int | None = field(default=None, metadata={"help": "Largest vocabulary of a new tokenizer."})
    batch_size: int | None = field(default=None, metadata={"help": "Streams of all processes together."})
    streaming: bool = field(default=False, metadata={"help": "Tokenise while reading; no corpus is written."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes for tokenising."})
    mem_lens: list[int] = field(
        default_factory=list, metadata={"help": "Memory lengths to evaluate with after the training."}
    )
    resume: bool = field(default=False, metadata={"help": "Resume from the last complete checkpoint."})


def read_arguments() -> tuple[DataArguments, TransfoXLTrainingArguments, dict[str, Any]]:
    """Arguments, where options override the recipe and the recipe the defaults, and settings of the model."""
    parser = HfArgumentParser([DataArguments, TransfoXLTrainingArguments], description=__doc__.splitlines()[0])
    recipe_parser = HfArgumentParser([], add_help=False)
    recipe_parser.add_argument("--recipe")
    name = recipe_parser.parse_known_args()[0].recipe
    if name and not Path(name).is_file():
        raise SystemExit(f"--recipe must be a JSON file, but {name!r} is none.")
    recipe = json.loads(Path(name).read_text(encoding="utf-8")) if name else {}
    known = {"tokenizer", "batch_size"}
    parser.set_defaults(**recipe.get("training", {}), **{key: recipe[key] for key in known & recipe.keys()})
    data, args = parser.parse_args_into_dataclasses()
    if data.batch_size is not None:
        if data.batch_size < 1 or data.batch_size % args.world_size:
            raise SystemExit(
                f"--batch_size must be a positive multiple of the number of processes ({args.world_size}), but is "
                f"{data.batch_size}."
            )
        args.per_device_train_batch_size = data.batch_size // args.world_size
    if sum(word == "--set" or word.startswith("--set=") for word in sys.argv) > 1:
        raise SystemExit("--set must be given once, with all settings behind it.")
    settings = dict(recipe.get("model", {}))
    for pair in data.set:
        key, found, value = pair.partition("=")
        if not found:
            raise SystemExit(f"--set must be name=value, but is {pair!r}.")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    refuse(data, args, settings)
    return data, args, settings


def refuse(data: DataArguments, args: TransfoXLTrainingArguments, settings: dict[str, Any]) -> None:
    """Refuse impossible arguments before anything is read or written."""
    known = hf_txl.TransfoXLConfig().to_dict()
    if unknown := sorted(settings.keys() - known.keys()):
        near = [match for name in unknown for match in difflib.get_close_matches(name, known, n=1)]
        raise SystemExit(f"--set must name settings of `TransfoXLConfig`, but names {unknown}; near: {near}.")
    if data.model is not None and data.set:
        raise SystemExit(
            "--set must not be given with --model, which keeps its configuration; --mem_len, --clamp_len and "
            "--same_length are those of the training."
        )
    try:
        # the vocabulary size is not known yet
        hf_txl.TransfoXLConfig(**{"vocab_size": 10**9, **settings})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise SystemExit(
            f"--set must be settings of a model, values as in JSON (true, 8, [20,40]): {error}"
        ) from error
    for option, paths in (("train_file", data.train_file), ("validation_file", [data.validation_file])):
        if missing := [path for path in paths if path is not None and not Path(path).is_file()]:
            raise SystemExit(f"--{option} must name text files, but these are none: {missing}.")
    if any(mem_len < 0 for mem_len in data.mem_lens):
        raise SystemExit(f"--mem_lens must be lengths of 0 or more, but are {data.mem_lens}.")
    found = last_checkpoint(args.output_dir)
    if data.resume and found is None:
        raise SystemExit(f"--resume needs a checkpoint, but {args.output_dir} holds no complete one.")
    if not data.resume and found is not None:
        raise SystemExit(f"--output_dir holds an earlier run ({found}); use --resume, or name another folder.")


def find_tokenizer(data: DataArguments, args: TransfoXLTrainingArguments) -> Any:
    """The tokenizer of a folder or of the model, or a new one for the training text."""
    # a model needs its own tokenizer, whatever mode a recipe has for a new one
    if data.model is not None or data.tokenizer not in MODES:
        source = data.model if data.tokenizer in (None, *MODES) else data.tokenizer
        if source is None:
            raise SystemExit(f"--tokenizer must be a folder or one of {', '.join(MODES)}, but is not given.")
        try:
            return AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise SystemExit(
                f"--tokenizer must be a folder with a tokenizer, its name on the Hub, or one of {', '.join(MODES)}, "
                f"but {source!r} could not be loaded: {error}"
            ) from error
    folder = Path(args.output_dir) / "tokenizer"
    with args.main_process_first(desc="counting symbols"):
        # a tokenizer from a run without a checkpoint may be that of another text
        if args.local_process_index == 0 and not data.resume:
            paths = [Path(path) for path in data.train_file]
            symbols = build_vocabulary(paths, data.tokenizer, max_size=data.max_size, special=MODES[data.tokenizer])
            hf_txl.TransfoXLTokenizer.from_vocabulary(symbols, data.tokenizer).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def write_results(trainer: TransfoXLTrainer) -> None:
    """Write `results.json` and a plot of the learning curve."""
    folder, history = Path(trainer.args.output_dir), trainer.state.log_history
    results = {
        "history": history,
        "by_memory": trainer.by_memory,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "model": trainer.model.config.to_diff_dict(),
        "training": {name: getattr(trainer.args, name) for name in RECORDED},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_txl": hf_txl.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {trainer.args.device}",
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    plot_results(results, folder / "curves.png")


def plot_results(results: dict[str, Any], path: Path) -> None:
    """Plot the learning curve and, if it was measured, the loss by memory length."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    rows = results["by_memory"]
    figure, axes = plt.subplots(
        1, 2 if rows else 1, figsize=(11 if rows else 7, 4), layout="constrained", squeeze=False
    )
    curve, by_memory = axes[0, 0], axes[0, -1]
    for key, name in (("loss", "training"), ("eval_loss", "validation")):
        points = [(entry["step"], entry[key] / math.log(2)) for entry in results["history"] if key in entry]
        if points:
            curve.plot(*zip(*points, strict=True), label=name, linewidth=0.8 if key == "loss" else 2)
    curve.set(xlabel="step", ylabel="bits per token")
    curve.legend()
    if rows:
        lengths = [str(row["mem_len"]) for row in rows]
        by_memory.plot(lengths, [row["bits_per_token"] for row in rows], marker="o")
        trained = results["training"].get("mem_len") or hf_txl.TransfoXLConfig(**results["model"]).mem_len
        by_memory.set(xlabel="memory in evaluation", ylabel="bits per token, validation")
        by_memory.set_title(f"trained with {trained}", loc="left", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Tokenise, train, evaluate, save."""
    data, args, settings = read_arguments()
    tokenizer = find_tokenizer(data, args)

    def tokens(path: list[str] | str, streaming: bool = False) -> Any:
        with args.main_process_first(desc="tokenizing"):
            return tokenize_corpus(path, tokenizer, num_proc=data.num_proc, streaming=streaming)

    train = tokens(data.train_file, data.streaming)
    validation = None if data.validation_file is None else tokens(data.validation_file)
    if data.model is not None:
        model = hf_txl.TransfoXLForCausalLM.from_pretrained(data.model)
    else:
        # same weights in every process
        transformers.set_seed(args.seed)
        eos = tokenizer.convert_tokens_to_ids("<eos>") if "<eos>" in tokenizer.get_vocab() else None
        config = hf_txl.TransfoXLConfig(**{"vocab_size": len(tokenizer), "eos_token_id": eos, **settings})
        model = hf_txl.TransfoXLForCausalLM(config)
    trainer = TransfoXLTrainer(model, args, train_dataset=train, eval_dataset=validation, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=data.resume)
    trainer.save_model()
    if validation is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    if trainer.is_world_process_zero():
        if validation is not None:
            for row in trainer.evaluate_memory_lengths(data.mem_lens):
                print(
                    "memory {mem_len:5d}: perplexity {perplexity:.3f}, {bits_per_token:.4f} bits per token".format(
                        **row
                    )
                )
        write_results(trainer)
        trainer.create_model_card(dataset=[Path(file).name for file in data.train_file])
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
