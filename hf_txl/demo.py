"""The demo: train a small character model, measure how much its memory lowers the loss, save, reload and sample it.

It has the steps of a real training run, in minutes on two cores: a vocabulary counted from the text, streams that
continue from batch to batch in a [`TransfoXLTrainer`], warm-up and cosine decay, gradients clipped at 0.25, and
evaluation of held-out text with memories of several lengths. The text is in `demo_text`, whose `SOURCE.txt` gives its
origin.
"""

import json
import lzma
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PrinterCallback

from .configuration_transfo_xl import TransfoXLConfig
from .data import check_seed
from .modeling_transfo_xl import TransfoXLForCausalLM
from .scoring import StreamScore, evaluate_stream
from .staging import check_writable, written_beside
from .text_generation import generate_text
from .tokenization_transfo_xl import TransfoXLTokenizer, build_vocabulary
from .training import TransfoXLTrainer, TransfoXLTrainingArguments

# marks a folder written by a demo, and holds its results
RESULTS_FILE = "demo.json"


@dataclass(frozen=True)
class DemoSettings:
    """Size of the model and settings of its training. The defaults take a few minutes on two cores.

    Args:
        steps (`int`): Optimizer steps.
        batch_size (`int`): Streams read in parallel.
        segment_length (`int`): Characters per stream and step, and positions of memory: L = M.
        n_layer, d_model, n_head, d_inner (`int`): Size of the model.
        learning_rate (`float`): Highest learning rate.
        warmup (`float`): Fraction of the steps that warm up.
        weight_decay (`float`): Only of matrices; biases, normalisations and the two attention biases have none.
        clip (`float`): Largest norm of the gradient.
        held_out (`int`, *optional*): Held-out characters to evaluate, all if `None`.
        sample_length (`int`): Characters to sample.
    """

    steps: int = 1800
    batch_size: int = 16
    segment_length: int = 64
    n_layer: int = 4
    d_model: int = 128
    n_head: int = 4
    d_inner: int = 512
    learning_rate: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 0.25
    held_out: int | None = None
    sample_length: int = 400


# takes seconds instead of minutes: enough to see that all parts work
QUICK = DemoSettings(steps=150, n_layer=3, d_model=64, n_head=2, d_inner=256, held_out=20_000, sample_length=200)


@dataclass(frozen=True)
class DemoResult:
    """Result of a demo.

    Args:
        folder (`Path`): Folder of the model and tokenizer.
        segment_length (`int`): L, also the memory length in training.
        scores (`dict[int, StreamScore]`): Held-out text, by memory length: 0, L and 4L.
        num_parameters (`int`): Parameters of the model, shared ones once.
        trained_tokens (`int`): Characters read in training.
        training_seconds (`float`): Duration of the training.
        prompt (`str`): The first held-out characters, twice as many as the memory holds in training.
        sample (`str`): What the model generated after it.
    """

    folder: Path
    segment_length: int
    scores: dict[int, StreamScore]
    num_parameters: int
    trained_tokens: int
    training_seconds: float
    prompt: str
    sample: str

    @property
    def memory_helps(self) -> bool:
        """Whether the held-out loss is lower with a memory of the trained length than without."""
        return self.scores[self.segment_length].loss < self.scores[0].loss

    def report(self) -> str:
        """Table, sample and folder, as text."""
        none, trained, longer = (self.scores[length] for length in sorted(self.scores))
        lines = ["memory  loss (nats)  bits per character"]
        for length, score in sorted(self.scores.items()):
            lines.append(f"{length:6d}  {score.loss:11.4f}  {score.bits_per_token:18.4f}")
        gain, change = none.loss - trained.loss, longer.loss - trained.loss
        lines += [
            "",
            f"Memory of the trained length ({self.segment_length}) "
            + (f"helps: {gain:.4f} nats less." if self.memory_helps else f"DID NOT HELP: {-gain:.4f} nats more."),
            f"Four times that: {abs(change):.4f} nats {'more' if change > 0 else 'less'} again.",
            "",
            f"parameters         {self.num_parameters:,}",
            f"tokens per second  {self.trained_tokens / self.training_seconds:,.0f} in training "
            f"({self.trained_tokens:,} in {self.training_seconds:.0f} s)",
            f"held-out text      {trained.predictions:,} characters scored",
            f"folder             {self.folder} (loaded again: same weights, same loss)",
            "",
            f"sample, after the first {len(self.prompt)} held-out characters:",
            *(f"  > {line}" for line in self.prompt.splitlines()),
            *(f"  | {line}" for line in self.sample.splitlines()),
        ]
        return "\n".join(lines)


def demo_text() -> str:
    """The text that ships with the package."""
    archive = resources.files("hf_txl") / "demo_text" / "tinyshakespeare.txt.xz"
    # decoded here, since reading as text would convert line ends
    return lzma.decompress(archive.read_bytes()).decode("ascii")


def _character_tokenizer(text: str) -> TransfoXLTokenizer:
    symbols = build_vocabulary([text], "characters", special=("<unk>",))
    return TransfoXLTokenizer.from_vocabulary(symbols, "characters")


def _new_model(settings: DemoSettings, vocab_size: int) -> TransfoXLForCausalLM:
    return TransfoXLForCausalLM(
        TransfoXLConfig(
            vocab_size=vocab_size,
            n_layer=settings.n_layer,
            d_model=settings.d_model,
            n_head=settings.n_head,
            d_inner=settings.d_inner,
            mem_len=settings.segment_length,
            clamp_len=-1,
            same_length=False,
            # a training this short does not overfit
            dropout=0.0,
        )
    )


def _training_arguments(
    output_dir: str, settings: DemoSettings, seed: int, progress: bool
) -> TransfoXLTrainingArguments:
    return TransfoXLTrainingArguments(
        output_dir=output_dir,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        segment_length=settings.segment_length,
        # whole segments only, so that every step counts the same number of characters
        dataloader_drop_last=True,
        learning_rate=settings.learning_rate,
        warmup_steps=max(1, round(settings.warmup * settings.steps)),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        seed=seed,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=not progress,
        logging_strategy="steps" if progress else "no",
        logging_steps=max(1, settings.steps // 10),
    )


def _train(
    model: TransfoXLForCausalLM, token_ids: torch.Tensor, settings: DemoSettings, seed: int, progress: bool
) -> float:
    """Train `model` on a text in streams with memory; returns the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        args = _training_arguments(folder, settings, seed, progress)
        trainer = TransfoXLTrainer(model, args, train_dataset=token_ids)
        # without a progress bar the library prints every log as a dictionary
        trainer.remove_callback(PrinterCallback)
        return float(trainer.train().metrics["train_runtime"])


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch, which training and sampling seed."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _sample(
    model: TransfoXLForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, length: int, seed: int
) -> str:
    with _random_numbers_kept():
        settings: dict[str, Any] = {"temperature": 0.8, "top_k": 0, "seed": seed}
        return generate_text(model, tokenizer, prompt, max_new_tokens=length, progress=False, **settings).text


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything but an empty folder or one that holds only the files of an earlier demo."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"`output_dir` must be a folder, but {folder} is a file.")
    found = {path.name for path in folder.iterdir()}
    written: set[str] = set()
    if RESULTS_FILE in found:
        try:
            written = set(json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))["files"])
        except (ValueError, KeyError, TypeError):
            # a file of that name from another program
            written = set()
    foreign = sorted(found - written)
    if foreign:
        shown = ", ".join(foreign[:5]) + (", …" if len(foreign) > 5 else "")
        raise FileExistsError(
            f"`output_dir` must be a new or empty folder, or one that an earlier demo wrote, but {folder} holds files "
            f"that no demo wrote: {shown}. Nothing was changed; choose another folder."
        )


def run_demo(
    output_dir: str | Path,
    *,
    steps: int | None = None,
    seed: int = 0,
    quick: bool = False,
    settings: DemoSettings | None = None,
    text: str | None = None,
    progress: bool = True,
) -> DemoResult:
    """Train, evaluate, save, load and sample.

    The folder is created, or replaces that of an earlier demo, at the end. The random states of the caller are
    restored.

    Args:
        output_dir (`str` or `Path`): Where to save; a new or empty folder, or one that a demo wrote.
        steps (`int`, *optional*): Optimizer steps instead of the settings'.
        seed (`int`, defaults to 0): Random seed of weights and sample.
        quick (`bool`, defaults to `False`): A tiny model for seconds instead of minutes.
        settings ([`DemoSettings`], *optional*): Settings instead of those of `quick`.
        text (`str`, *optional*): Another text; the first 90 % are trained on.
        progress (`bool`, defaults to `True`): Whether to show progress bars.

    Returns:
        [`DemoResult`]

    Raises:
        ImportError: if `accelerate`, which the library's `Trainer` needs, is not installed.
        ValueError: if `steps` or `seed` is out of its range.
        FileExistsError, PermissionError: if `output_dir` holds other files than a demo's, or cannot be written.
        RuntimeError: if the reloaded model differs from the trained one.
    """
    if settings is None:
        settings = QUICK if quick else DemoSettings()
    if steps is not None:
        settings = replace(settings, steps=steps)
    if settings.steps < 1:
        raise ValueError(f"`steps` must be at least 1, but is {settings.steps}.")
    check_seed(seed)
    folder = Path(output_dir).resolve()
    # before the training; nothing is written yet
    check_writable(folder, _check_replaceable)

    text = demo_text() if text is None else text
    tokenizer = _character_tokenizer(text)
    token_ids = tokenizer(text, return_tensors="pt").input_ids[0]
    split = int(0.9 * len(token_ids))
    train_ids, held_out_ids = token_ids[:split], token_ids[split:][: settings.held_out]
    length = settings.segment_length
    with _random_numbers_kept():
        torch.manual_seed(seed)
        model = _new_model(settings, len(tokenizer))
        seconds = _train(model, train_ids, settings, seed, progress)

    def score(scored: TransfoXLForCausalLM, mem_len: int) -> StreamScore:
        # several streams for speed, but few, because each starts with an empty memory
        return evaluate_stream(
            scored, held_out_ids, segment_length=length, batch_size=8, mem_len=mem_len, progress=progress
        )

    scores = {mem_len: score(model, mem_len) for mem_len in (0, length, 4 * length)}
    with written_beside(folder, _check_replaceable) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        loaded: Any = AutoModelForCausalLM.from_pretrained(staging)
        loaded_tokenizer = AutoTokenizer.from_pretrained(staging)
        _check_loaded(model, loaded, scores[length].loss, score(loaded, length).loss)
        prompt = text[split : split + 2 * length]
        sample = _sample(loaded, loaded_tokenizer, prompt, settings.sample_length, seed)
        result = DemoResult(
            folder=Path(output_dir),
            segment_length=length,
            scores=scores,
            num_parameters=model.num_parameters(),
            trained_tokens=settings.steps * settings.batch_size * length,
            training_seconds=seconds,
            prompt=prompt,
            sample=sample,
        )
        _write_results(staging, result, settings, seed)
    return result


def _check_loaded(
    model: TransfoXLForCausalLM, loaded: TransfoXLForCausalLM, saved_loss: float, loaded_loss: float
) -> None:
    weights, loaded_weights = model.state_dict(), loaded.state_dict()
    different = [name for name, tensor in weights.items() if not torch.equal(tensor, loaded_weights[name])]
    # kernels may sum equal weights at other addresses in another order
    if different or abs(saved_loss - loaded_loss) > 1e-6:
        raise RuntimeError(
            f"The saved model must be the trained one, but its loss is {loaded_loss} instead of {saved_loss}, and "
            f"these weights differ: {different}."
        )


def _write_results(folder: Path, result: DemoResult, settings: DemoSettings, seed: int) -> None:
    results = {
        "files": sorted([RESULTS_FILE, *(path.name for path in folder.iterdir())]),
        "settings": asdict(settings),
        "seed": seed,
        "loss_by_memory_length": {str(length): score.loss for length, score in result.scores.items()},
        "num_parameters": result.num_parameters,
        "training_seconds": result.training_seconds,
        "prompt": result.prompt,
        "sample": result.sample,
    }
    (folder / RESULTS_FILE).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


__all__ = ["QUICK", "DemoResult", "DemoSettings", "demo_text", "run_demo"]
