"""Text generation from a prompt and a context of any length, which is read once, segment by segment.

This is what `hf-txl generate` runs. Only the memory of the context is kept, so the cost of a token depends neither on
the length of the context nor on that of the text.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, TextStreamer, set_seed

from .data import check_seed, check_sizes
from .memory_transfo_xl import TransfoXLMemory
from .modeling_transfo_xl import TransfoXLForCausalLM
from .options import read_options
from .tokenization_transfo_xl import encode_file


@dataclass(frozen=True)
class GeneratedText:
    """Result of [`generate_text`].

    Args:
        prompt (`str`): The prompt.
        text (`str`): The new text, without the prompt; end-of-line tokens are line breaks.
        token_ids (`list[int]`): The new tokens.
        context_tokens (`int`): Number of context tokens read before the prompt.
        seconds (`float`): Duration of prefill and generation, without reading the context.
        settings (`dict[str, Any]`): Settings of the sampling.
    """

    prompt: str
    text: str
    token_ids: list[int]
    context_tokens: int
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, 0 if no time was measured."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


@torch.no_grad()
def read_context(
    model: TransfoXLForCausalLM,
    token_ids: torch.Tensor,
    memory: TransfoXLMemory,
    *,
    segment_length: int = 128,
    progress: bool = True,
) -> None:
    """Advance a memory over a text, without scoring it.

    Args:
        model (`TransfoXLForCausalLM`): In eval mode.
        token_ids (`torch.Tensor` of shape `(num_tokens,)`): The text.
        memory (`TransfoXLMemory`): Memory, which advances by all tokens.
        segment_length (`int`, defaults to 128): Tokens read in one call.
        progress (`bool`, defaults to `True`): Whether to show a progress bar.
    """
    with tqdm(total=len(token_ids), desc="reading the context", unit="token", disable=not progress) as bar:
        for segment in token_ids.split(segment_length):
            model.transformer(segment[None].to(model.device), cache=memory)
            bar.update(len(segment))


@dataclass(frozen=True)
class GenerationOptions:
    """Options of [`generate_text`].

    Args:
        top_k (`int`, defaults to 40): Sample from this many of the likeliest tokens; 0 or None: from all.
        top_p (`float`, *optional*): Sample from the likeliest tokens whose probabilities add up to this.
        temperature (`float`, defaults to 0.95):
            Divisor of the logits; a `temperature` or a `top_p` of 0 takes the likeliest token (greedy decoding). The
            defaults are those with which the published WikiText-103 model is usually sampled.
        seed (`int`, defaults to 0): Seed of the sampling.
        stop_strings (`list[str]`, *optional*): Texts after which to stop, line breaks as they are shown.
        suppress_unknown (`bool`, defaults to `False`): Never generate the token of unknown words.
        segment_length (`int`, defaults to 128): Tokens of the context that are read in one call.

    Raises:
        ValueError: if a value is out of range.
    """

    top_k: int | None = 40
    top_p: float | None = None
    temperature: float = 0.95
    seed: int = 0
    stop_strings: list[str] | None = None
    suppress_unknown: bool = False
    segment_length: int = 128

    def __post_init__(self) -> None:
        check_sizes(segment_length=self.segment_length)
        # logits divided by a smaller number would be infinite
        if not (self.temperature == 0 or 1e-30 <= self.temperature < math.inf):
            raise ValueError(
                f"`temperature` must be 0 (the likeliest token) or at least 1e-30, but is {self.temperature}."
            )
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"`top_k` must be 0 (all tokens) or more, but is {self.top_k}.")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"`top_p` must be between 0 and 1, but is {self.top_p}.")
        check_seed(self.seed)
        if self.stop_strings is not None and not all(self.stop_strings):
            raise ValueError(f"`stop_strings` must be non-empty texts, but is {self.stop_strings!r}.")

    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate` that choose a token from its probabilities."""
        if self.temperature == 0:
            return {"do_sample": False}
        top_p = 1.0 if self.top_p is None else self.top_p
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k or 0, "top_p": top_p}

    def restrictions(self, model: TransfoXLForCausalLM, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Arguments of `generate` for suppressed tokens and stop strings."""
        restrictions: dict[str, Any] = {}
        if self.suppress_unknown and tokenizer.unk_token_id is not None:
            others = model.generation_config.suppress_tokens or []
            restrictions["suppress_tokens"] = sorted({*others, tokenizer.unk_token_id})
        if stop_strings := self.stop_strings or model.generation_config.stop_strings:
            stop_strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
            # a line break that is shown may be an end token
            as_tokens = [text.replace("\n", tokenizer.eos_token) for text in stop_strings if tokenizer.eos_token]
            restrictions["stop_strings"] = sorted({*stop_strings, *as_tokens})
        return restrictions


def generate_text(
    model: TransfoXLForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str = "",
    *,
    context_file: str | Path | None = None,
    max_new_tokens: int = 100,
    write: Callable[[str], object] | None = None,
    progress: bool = True,
    **options: Any,
) -> GeneratedText:
    """Continue a prompt, after a context.

    Args:
        model (`TransfoXLForCausalLM`): The model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        prompt (`str`): What the text begins with; may be empty where there is a context.
        context_file (`str` or `Path`, *optional*): A text that is read before the prompt, line by line as in training.
        max_new_tokens (`int`, defaults to 100): Tokens to generate. An end-of-line token does not end the text.
        write (`Callable[[str], object]`, *optional*): Called with each piece of the text as it is generated.
        progress (`bool`, defaults to `True`): Whether to show a progress bar while the context is read.
        options: Fields of [`GenerationOptions`]: `top_k`, `top_p`, `temperature`, `seed`, `stop_strings`,
            `suppress_unknown`, `segment_length`.

    Returns:
        [`GeneratedText`]

    Raises:
        ValueError: if there is neither prompt nor context, or an argument is out of range.
        TypeError: if an option is unknown.
    """
    chosen = read_options(GenerationOptions, options, "generate_text")
    check_sizes(max_new_tokens=max_new_tokens)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"`tokenizer` must have at most as many tokens as the model ({model.config.vocab_size}), but has "
            f"{len(tokenizer)}."
        )
    context_ids, prompt_ids = _context_and_prompt(tokenizer, prompt, context_file)
    model.eval()
    memory = TransfoXLMemory(model.config)
    if len(context_ids):
        read_context(model, context_ids, memory, segment_length=chosen.segment_length, progress=progress)
    sampling = chosen.sampling()
    set_seed(chosen.seed)
    started = time.perf_counter()
    output = model.generate(
        prompt_ids[None].to(model.device),
        # without it the library treats every token 0 as padding; in word-level vocabularies that token ends a line
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long, device=model.device),
        cache=memory,
        max_new_tokens=max_new_tokens,
        # the end token of word-level models ends a line, and a text has many
        eos_token_id=None,
        pad_token_id=0,
        tokenizer=tokenizer,
        # independent of the model's configuration: one text, from a memory, streamed piece by piece
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=False,
        prefill_chunk_size=None,
        prompt_lookup_num_tokens=None,
        cache_implementation=None,
        streamer=None if write is None else PieceStreamer(tokenizer, write),
        **sampling,
        **chosen.restrictions(model, tokenizer),
    )
    seconds = time.perf_counter() - started
    new_ids = output[0, len(prompt_ids) :].tolist()
    # decoded with the prompt, since a token's spaces depend on its neighbours
    before, whole = (str(tokenizer.decode(ids)) for ids in (prompt_ids, output[0]))
    text = whole[len(before) :] if whole.startswith(before) else str(tokenizer.decode(new_ids))
    settings = {**sampling, "max_new_tokens": max_new_tokens, "seed": chosen.seed}
    return GeneratedText(prompt, break_lines(text, tokenizer), new_ids, len(context_ids), seconds, settings)


def _context_and_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, context_file: str | Path | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of both. Without a prompt the last context token takes its place: the first new token must follow one."""
    prompt_ids = torch.tensor(tokenizer(prompt, add_special_tokens=False)["input_ids"], dtype=torch.long)
    context_ids = torch.tensor([], dtype=torch.long)
    if context_file is not None:
        context_ids = torch.from_numpy(encode_file(tokenizer, context_file))
    if not len(prompt_ids):
        context_ids, prompt_ids = context_ids[:-1], context_ids[-1:]
    if not len(prompt_ids):
        raise ValueError("`prompt` or `context_file` must hold some text, but both are empty.")
    return context_ids, prompt_ids


def break_lines(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text with its end tokens replaced by the line breaks that they stand for in word-level vocabularies."""
    return text.replace(tokenizer.eos_token, "\n") if tokenizer.eos_token else text


class PieceStreamer(TextStreamer):
    """Streams each piece of new text as soon as no later token can change it.

    Neither the prompt nor text that was streamed is streamed again; both are decoded with what follows, as context.
    """

    # tokens that are decoded together, and how many of them are kept as context after that
    LONGEST, OVERLAP = 256, 32

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]):
        super().__init__(tokenizer)
        self.write = write

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            self._keep(value.flatten().tolist(), unwritten=0)
            return
        super().put(value)
        if len(self.token_cache) > self.LONGEST:
            self._keep(self.token_cache, len(self.tokenizer.decode(self.token_cache)) - self.print_len)

    def _keep(self, token_ids: list[int], unwritten: int) -> None:
        self.token_cache = token_ids[-self.OVERLAP :]
        self.print_len = len(self.tokenizer.decode(self.token_cache)) - unwritten

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(break_lines(text, self.tokenizer))


__all__ = ["GeneratedText", "GenerationOptions", "generate_text", "read_context"]
