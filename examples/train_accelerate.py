"""Train a Transformer-XL in a plain Accelerate loop that shows each step, on any number of processes.

    python examples/train_accelerate.py --output runs/plain                                  # the text in the package
    torchrun --nproc_per_node 2 examples/train_accelerate.py my_text.txt --output runs/two

A token is a character; the last tenth of the text is held out. The same command resumes from the last checkpoint,
whose `model` is a model folder. `examples/train.py` does the same and more with the library's `Trainer`.
"""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm.auto import tqdm

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer
from hf_txl.data import TokenStreams
from hf_txl.demo import demo_text
from hf_txl.scoring import evaluate_stream
from hf_txl.tokenization_transfo_xl import build_vocabulary
from hf_txl.training import read_memory, write_memory


def save(accelerator: Accelerator, folder: Path, step: int, memory: Any, settings: Any, *model: Any) -> None:
    """Write `checkpoint-<step>`, then remove the earlier one, so that a killed run leaves a complete one."""
    unfinished = folder / "unfinished"
    if accelerator.is_main_process:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(unfinished))  # weights and optimizer once, random state of each process
    write_memory(unfinished / f"memory-{accelerator.process_index}.safetensors", memory)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for part in model:
            part.save_pretrained(unfinished / "model")
        (unfinished / "settings.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        earlier = list(folder.glob("checkpoint-*"))
        unfinished.rename(folder / f"checkpoint-{step}")
        for checkpoint in earlier:
            shutil.rmtree(checkpoint)


def find_checkpoint(folder: Path, settings: dict[str, Any]) -> Path | None:
    """The last checkpoint of a folder, if any; refuses a checkpoint with other settings."""
    found = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]), default=None)
    before = settings if found is None else json.loads((found / "settings.json").read_text(encoding="utf-8"))
    if changed := {name: (before.get(name), now) for name, now in settings.items() if before.get(name) != now}:
        raise typer.BadParameter(f"--output has a run with other settings (there, here): {changed}. Choose another.")
    return found


def rate(step: int, steps: int, warmup_steps: int) -> float:
    """Factor of the learning rate by step: linear warm-up, then a cosine to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


def main(
    text_file: Annotated[Path | None, typer.Argument(exists=True, dir_okay=False, help="UTF-8 text.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = Path("accelerate_run"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 2000,
    batch_size: Annotated[int, typer.Option(min=1, help="Streams of all processes together.")] = 16,
    accumulation: Annotated[int, typer.Option(min=1, help="Segments of a stream in one step.")] = 1,
    segment_length: Annotated[int, typer.Option(min=1, help="Tokens of a segment, and length of the memory.")] = 64,
    n_layer: Annotated[int, typer.Option(min=1, help="Layers.")] = 4,
    d_model: Annotated[int, typer.Option(min=4, help="Width, a multiple of the 4 heads.")] = 128,
    dropout: Annotated[float, typer.Option(min=0, max=1, help="Dropout in training.")] = 0.1,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Warm-up steps of the learning rate.")] = 100,
    mixed_precision: Annotated[str, typer.Option(help="no, bf16 or fp16.")] = "no",
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints, each with an evaluation.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of weights and dropout.")] = 0,
) -> None:
    """Train a character model on streams with memory."""
    settings = {name: value for name, value in locals().items() if name not in ("text_file", "output", "save_every")}
    on_cpu = not torch.accelerator.is_available()  # without a GPU, the processes need gloo
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=mixed_precision, gradient_accumulation_steps=accumulation)
    rank, world_size, bar = accelerator.process_index, accelerator.num_processes, accelerator.is_main_process
    num_rows = batch_size // world_size
    if batch_size % world_size:
        raise typer.BadParameter(f"--batch-size must be a multiple of {world_size} processes, but is {batch_size}.")
    try:
        text = demo_text() if text_file is None else text_file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"TEXT_FILE must be UTF-8, but {text_file} is not: {error}.") from error
    settings |= {"processes": world_size, "text": hashlib.sha256(text.encode()).hexdigest()}
    checkpoint = find_checkpoint(output, settings)
    symbols = build_vocabulary([text], "characters", special=("<unk>",))
    tokenizer = TransfoXLTokenizer.from_vocabulary(symbols, "characters")
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    train_ids, held_out_ids = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    if len(held_out_ids) < 2 * batch_size:
        raise typer.BadParameter(f"The text must have {20 * batch_size} characters or more, but has {len(text)}.")

    # The text is cut into one stream for each row of all processes; row r reads stream r segment by segment. In this
    # order the memory of row r holds the tokens right before its next segment. With shuffled segments it would hold
    # tokens from another place of the text.
    streams = TokenStreams(train_ids, batch_size, segment_length, mark_starts=True)
    set_seed(seed)
    width = {"d_model": d_model, "d_inner": 4 * d_model, "n_head": 4, "n_layer": n_layer, "dropout": dropout}
    lengths = {"mem_len": segment_length, "clamp_len": -1, "same_length": False}
    bare_model = TransfoXLForCausalLM(TransfoXLConfig(vocab_size=len(tokenizer), **width, **lengths))
    model, optimizer = accelerator.prepare(bare_model, torch.optim.Adam(bare_model.parameters()))
    # One memory per process, for its own rows: gradients are averaged over processes, memories are not exchanged.
    memory = bare_model.init_memory(num_rows)
    set_seed(seed + rank)  # processes have the same weights and different dropout
    first_step = 0 if checkpoint is None else int(checkpoint.name.split("-")[1])
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        memory.load_state_dict(read_memory(checkpoint / f"memory-{rank}.safetensors"))
        memory.to(accelerator.device)

    def read_segment(number: int) -> dict[str, torch.Tensor]:
        first = number % streams.num_segments * batch_size + rank * num_rows  # at the end of the text, start again
        rows = [streams[index] for index in range(first, first + num_rows)]
        return {name: torch.stack([row[name] for row in rows]).to(accelerator.device) for name in rows[0]}

    for step in tqdm(range(first_step, steps), disable=not bar, unit="step"):
        # the offset in the text follows from the step, so a resumed run continues at its saved offset
        parts = [read_segment(step * accumulation + part) for part in range(accumulation)]
        # the last segment of a text is shorter: all tokens of a step have the same weight, not all segments
        num_tokens = sum(part["input_ids"].numel() for part in parts)
        train_loss = torch.zeros((), device=accelerator.device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate(step, steps, warmup_steps)
        model.train()
        for part in parts:
            with accelerator.accumulate(model):
                # the streams start again: the memory holds their end, which does not precede their start
                if part.pop("reset_memory").any():
                    memory.reset()
                loss = model(**part, cache=memory, num_items_in_batch=num_tokens).loss
                accelerator.backward(loss * accumulation)  # `backward` divides by it, as if segments were equal
                train_loss += loss.detach()
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()
                optimizer.zero_grad()
        if (step + 1) % save_every == 0 or step + 1 == steps:
            # each process scores its part of the held-out rows, with a temporary memory
            own = held_out_ids[: len(held_out_ids) // batch_size * batch_size].chunk(world_size)[rank]
            score = evaluate_stream(bare_model, own, segment_length=segment_length, batch_size=num_rows, progress=bar)
            losses = accelerator.reduce(torch.tensor([train_loss, score.loss], device=accelerator.device), "mean")
            accelerator.print(f"step {step + 1}: training {losses[0]:.4f}, held out {losses[1]:.4f} nats per token")
            save(accelerator, output, step + 1, memory, settings, bare_model, tokenizer)
    accelerator.end_training()


if __name__ == "__main__":
    typer.run(main)
