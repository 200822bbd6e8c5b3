"""The demo: train a small character model, show what its memory is worth, save it, load it again and let it write.

Everything a real training run does, in minutes on two cores: rows that go on from batch to batch, a memory as long as
the segment, warm-up and cosine decay, clipping at 0.25, evaluation of held-out text with memories of several lengths.
The text is in `demo_text`, whose `SOURCE.txt` says where it comes from.
"""

import json
import lzma
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .configuration_transfo_xl import TransfoXLConfig
from .data import TokenStreams
from .modeling_transfo_xl import TransfoXLForCausalLM
from .scoring import StreamScore, evaluate_stream
from .staging import check_writable, written_beside

# marks a folder that a demo wrote, and holds its numbers
RESULTS_FILE = "demo.json"
UNKNOWN = "<unk>"


@dataclass(frozen=True)
class DemoSettings:
    """What is trained, and how. The defaults are what two cores can do in a few minutes.

    Args:
        steps (`int`): Optimizer steps.
        batch_size (`int`): Rows read in parallel.
        segment_length (`int`): Characters per row and step, and positions of memory: L = M.
        n_layer, d_model, n_head, d_inner (`int`): Size of the model.
        learning_rate (`float`): Highest learning rate.
        warmup (`float`): Part of the steps in which it rises.
        weight_decay (`float`): For matrices; biases, normalisations and the two attention biases have none.
        clip (`float`): Largest norm of the gradient.
        held_out (`int`, *optional*): Held-out characters to evaluate, all if `None`.
        sample_length (`int`): Characters to write.
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


# seconds instead of minutes: enough to see that all parts work
QUICK = DemoSettings(steps=150, n_layer=3, d_model=64, n_head=2, d_inner=256, held_out=20_000, sample_length=200)


@dataclass(frozen=True)
class DemoResult:
    """What a demo measured.

    Args:
        folder (`Path`): Where the model and tokenizer lie.
        segment_length (`int`): L, also the memory length in training.
        scores (`dict[int, StreamScore]`): Held-out text, by memory length: 0, L and 4L.
        num_parameters (`int`): Parameters of the model, shared ones once.
        trained_tokens (`int`): Characters read in training.
        training_seconds (`float`): Duration of the training.
        prompt (`str`): The first held-out characters, twice as many as the memory holds in training.
        sample (`str`): What the model wrote after it.
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
    # decoded here, since reading as text would change line ends
    return lzma.decompress(archive.read_bytes()).decode("ascii")


def character_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """One token per character of a text, sorted by falling frequency; decoding gives back exactly what was encoded.

    It saves as a plain `tokenizer.json`, which `AutoTokenizer` loads without code of ours. A character that is not in
    the text becomes `<unk>`, the last id.
    """
    frequencies = Counter(text)
    # ties by code point, so that the order depends on nothing else
    characters = sorted(frequencies, key=lambda character: (-frequencies[character], character))
    vocabulary = {character: index for index, character in enumerate([*characters, UNKNOWN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    # a dot would not match the end of a line
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNKNOWN, clean_up_tokenization_spaces=False)


def warm_up_and_cosine(steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Learning rate by step, as a part of the highest: it rises along a line and falls along a cosine."""

    def rate(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))

    return rate


def train(
    model: TransfoXLForCausalLM, token_ids: torch.Tensor, settings: DemoSettings, progress: bool = True
) -> float:
    """Train on a text in streams with memory.

    Args:
        model ([`TransfoXLForCausalLM`]): Is changed.
        token_ids (`torch.Tensor` of shape `(num_tokens,)`): The text; it is read again from its start if it ends.
        settings ([`DemoSettings`]): How.
        progress (`bool`, defaults to `True`): Whether to show a progress bar.

    Returns:
        `float`: Seconds.
    """
    streams = TokenStreams(token_ids, settings.batch_size, settings.segment_length, drop_last=True)
    decayed: list[torch.nn.Parameter] = []
    free: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # biases and normalisations are vectors, u and v are (heads, width)
        (free if parameter.dim() < 2 or name.endswith(("r_w_bias", "r_r_bias")) else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
    warmup_steps = max(1, round(settings.warmup * settings.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine(settings.steps, warmup_steps))
    memory = model.init_memory(settings.batch_size)
    segments = streams.segments()
    average = None
    started = time.perf_counter()
    model.train()
    bar = tqdm(range(settings.steps), desc="training", unit="step", disable=not progress)
    for _ in bar:
        segment = next(segments, None)
        if segment is None:
            # the rows begin again, so what they remember is no longer what precedes them
            memory.reset()
            segments = streams.segments()
            segment = next(segments)
        inputs = {name: tensor.to(model.device) for name, tensor in segment.items()}
        loss = model(**inputs, cache=memory).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        bar.set_postfix(loss=f"{average:.3f}", refresh=False)
    model.eval()
    return time.perf_counter() - started


def write_sample(
    model: TransfoXLForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, length: int, seed: int
) -> str:
    """`length` sampled tokens that follow a prompt; the memory is as long as in training."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(
            ids, cache=model.init_memory(1), do_sample=True, temperature=0.8, top_k=0, max_new_tokens=length
        )
    return str(tokenizer.decode(output[0, ids.shape[1] :]))


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything but an empty folder or what an earlier demo left, unchanged in its files."""
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
            # some other program's file of that name
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

    The folder appears, or replaces that of an earlier demo, only when all is done. Random numbers of the caller are
    left as they are.

    Args:
        output_dir (`str` or `Path`): Where to save; a new or empty folder, or one that a demo wrote.
        steps (`int`, *optional*): Optimizer steps instead of the settings'.
        seed (`int`, defaults to 0): For weights and sample.
        quick (`bool`, defaults to `False`): A tiny model for seconds instead of minutes.
        settings ([`DemoSettings`], *optional*): All of the settings.
        text (`str`, *optional*): Another text; the first 90% are for training.
        progress (`bool`, defaults to `True`): Whether to show progress bars.

    Returns:
        [`DemoResult`]

    Raises:
        FileExistsError, PermissionError: if `output_dir` holds what no demo wrote, or cannot be made.
        RuntimeError: if the saved model does not give the numbers of the trained one.
    """
    if settings is None:
        settings = QUICK if quick else DemoSettings()
    if steps is not None:
        settings = replace(settings, steps=steps)
    if settings.steps < 1:
        raise ValueError(f"`steps` must be at least 1, but is {settings.steps}.")
    folder = Path(output_dir).resolve()
    # now rather than after the training; nothing is written until then
    check_writable(folder, _check_replaceable)

    text = demo_text() if text is None else text
    tokenizer = character_tokenizer(text)
    token_ids = tokenizer(text, return_tensors="pt").input_ids[0]
    split = int(0.9 * len(token_ids))
    train_ids, held_out_ids = token_ids[:split], token_ids[split:][: settings.held_out]
    length = settings.segment_length
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = TransfoXLForCausalLM(
            TransfoXLConfig(
                vocab_size=len(tokenizer),
                n_layer=settings.n_layer,
                d_model=settings.d_model,
                n_head=settings.n_head,
                d_inner=settings.d_inner,
                mem_len=length,
                clamp_len=-1,
                same_length=False,
                # so short a training does not overfit
                dropout=0.0,
            )
        )
        seconds = train(model, train_ids, settings, progress)

    def score(scored: TransfoXLForCausalLM, mem_len: int) -> StreamScore:
        # some rows, for speed; few, for each starts with nothing remembered
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
        result = DemoResult(
            folder=Path(output_dir),
            segment_length=length,
            scores=scores,
            num_parameters=model.num_parameters(),
            trained_tokens=settings.steps * settings.batch_size * length,
            training_seconds=seconds,
            prompt=prompt,
            sample=write_sample(loaded, loaded_tokenizer, prompt, settings.sample_length, seed),
        )
        _write_results(staging, result, settings, seed)
    return result


def _check_loaded(
    model: TransfoXLForCausalLM, loaded: TransfoXLForCausalLM, saved_loss: float, loaded_loss: float
) -> None:
    weights, loaded_weights = model.state_dict(), loaded.state_dict()
    different = [name for name, tensor in weights.items() if not torch.equal(tensor, loaded_weights[name])]
    # equal weights at other addresses may be summed in another order by the same kernels
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


__all__ = [
    "QUICK",
    "DemoResult",
    "DemoSettings",
    "character_tokenizer",
    "demo_text",
    "run_demo",
    "train",
    "write_sample",
]
