"""Adapt a pretrained Transformer-XL to a text with LoRA: low-rank matrices in attention, all other weights frozen.

    python examples/finetune_lora.py my_model my_text.txt --output my_adapter
    torchrun --nproc_per_node 2 examples/finetune_lora.py …

`TransfoXLTrainer` trains the adapter with memory. The output folder holds only the adapter, which
`peft.PeftModel.from_pretrained(model, folder)` loads, and `losses.json`: the held-out loss before and after the
training, with the saved adapter, and with the adapter merged into the model (which then needs no peft). Needs peft.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_txl
from hf_txl.corpus import tokenize_corpus
from hf_txl.scoring import evaluate_stream
from hf_txl.staging import check_writable, new_or_forced, written_beside
from hf_txl.token_ids import as_tokens, read_tokens
from hf_txl.training import TransfoXLTrainer, TransfoXLTrainingArguments

# queries, keys and values in one matrix; the output; the relative keys, which only some attention kinds have
TARGETS = ["qkv_net", "o_net", "r_net"]
# in nats: above rounding differences, far below the difference of a lost or wrongly merged adapter
TOLERANCE = 1e-4


def load(model: str) -> Any:
    """Load a Transformer-XL language model; refuse other models."""
    try:
        model_type = AutoConfig.from_pretrained(model).model_type
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"MODEL must be a model's folder or Hub name, but is {model}: {error}") from error
    if model_type != hf_txl.TransfoXLConfig.model_type:
        raise typer.BadParameter(
            f"MODEL must be a {hf_txl.TransfoXLConfig.model_type}, but {model} is a {model_type}."
        )
    return AutoModelForCausalLM.from_pretrained(model)


def read_texts(text_file: Path, validation_file: Path | None, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Training ids and held-out ids: those of the validation file, or the last tenth of the text."""

    def read(path: Path) -> torch.Tensor:
        return read_tokens(as_tokens(tokenize_corpus(path, tokenizer)))

    ids = read(text_file)
    if validation_file is not None:
        return ids, read(validation_file)
    return ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]


def main(
    model: Annotated[str, typer.Argument(help="Folder or Hub name of a pretrained model with its tokenizer.")],
    text_file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="UTF-8 text to train on.")],
    output: Annotated[Path, typer.Option(help="New folder for the adapter.")] = Path("adapter"),
    force: Annotated[bool, typer.Option("--force", help="Replace the contents of that folder.")] = False,
    validation_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Held-out text.", show_default="the last tenth")
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the matrices.")] = 8,
    alpha: Annotated[float, typer.Option(help="Scale of the adapter, divided by the rank.")] = 16,
    dropout: Annotated[float, typer.Option(min=0, max=1, help="Dropout of the adapter's input.")] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 500,
    batch_size: Annotated[int, typer.Option(min=1, help="Streams per process.")] = 8,
    segment_length: Annotated[int, typer.Option(min=1, help="Tokens of a segment.")] = 128,
    mem_len: Annotated[
        int | None, typer.Option(min=0, help="Length of the memory.", show_default="the model's")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of the matrices and of dropout.")] = 0,
) -> None:
    """Train an adapter, save it, load it, merge it, and print the held-out loss after each."""
    try:
        from peft import LoraConfig, PeftModel, get_peft_model
    except ImportError as error:
        raise typer.BadParameter("This example needs peft; `pip install peft`.") from error
    replaceable = new_or_forced(force, [text_file, model])
    try:
        check_writable(output, replaceable)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--output") from error
    transformers.set_seed(seed)
    base = load(model)
    train_ids, held_out_ids = read_texts(text_file, validation_file, AutoTokenizer.from_pretrained(model))
    for name, ids in (("training", train_ids), ("held-out", held_out_ids)):
        if len(ids) < 2 * batch_size:
            raise typer.BadParameter(
                f"The {name} text must have at least 2 tokens for each of {batch_size} streams, but has {len(ids)}."
            )

    adapted = get_peft_model(
        base,
        LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=TARGETS),
    )
    args = TransfoXLTrainingArguments(
        # the trainer saves nothing there
        output_dir=tempfile.gettempdir(),
        save_strategy="no",
        report_to="none",
        segment_length=segment_length,
        mem_len=mem_len,
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        learning_rate=learning_rate,
        warmup_steps=steps // 20,
        logging_steps=max(1, steps // 20),
        seed=seed,
        # without a GPU, the processes need gloo
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = TransfoXLTrainer(adapted, args, train_dataset=train_ids)

    def loss_of(scored: Any) -> float:
        lengths = {"segment_length": segment_length, "mem_len": mem_len}
        progress = trainer.is_world_process_zero()
        return evaluate_stream(scored, held_out_ids, batch_size=batch_size, progress=progress, **lengths).loss

    losses = {"before": loss_of(adapted)}
    trainer.train()
    losses["after"] = loss_of(adapted)
    if not trainer.is_world_process_zero():
        return
    with written_beside(output, replaceable) as folder:
        adapted.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(load(model), folder).to(adapted.device)
        losses["loaded"] = loss_of(loaded)
        losses["merged"] = loss_of(loaded.merge_and_unload())
        (folder / "losses.json").write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
        wrong = [name for name in ("loaded", "merged") if abs(losses[name] - losses["after"]) > TOLERANCE]
        if wrong:
            raise RuntimeError(
                f"The saved adapter must give the loss of the trained one, but {wrong} differ: {losses}."
            )
    trainable, total = adapted.get_nb_trainable_parameters()
    typer.echo(f"{trainable:,} of {total:,} parameters trained")
    for name, loss in losses.items():
        typer.echo(f"{name:>7}: {loss:.4f} nats per token")


if __name__ == "__main__":
    typer.run(main)
