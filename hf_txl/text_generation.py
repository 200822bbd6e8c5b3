"""Text that goes on from a prompt and from a context of any length, which is read once, segment by segment.

What `hf-txl generate` does. The context's memory is all that is kept of it, so that neither its length nor that of the
text makes a token cost more.
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

from .cache_transfo_xl import TransfoXLMemory
from .data import check_sizes
from .modeling_transfo_xl import TransfoXLForCausalLM
from .tokenization_transfo_xl import encode_file


@dataclass(frozen=True)
class GeneratedText:
    """What [`generate_text`] wrote.

    Args:
        prompt (`str`): What it goes on from, besides the context.
        text (`str`): The new text, without the prompt; end-of-line tokens are line breaks.
        token_ids (`list[int]`): The new tokens.
        context_tokens (`int`): How many tokens of context were read before the prompt.
        seconds (`float`): Time to read the prompt and to write, without the context.
        settings (`dict[str, Any]`): How tokens were chosen.
    """

    prompt: str
    text: str
    token_ids: list[int]
    context_tokens: int
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second, 0 where no time was measured."""
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
    """Let a memory read a text; nothing is scored.

    Args:
        model (`TransfoXLForCausalLM`): In eval mode.
        token_ids (`torch.Tensor` of shape `(num_tokens,)`): The text.
        memory (`TransfoXLMemory`): Advances by all of them.
        segment_length (`int`, defaults to 128): Tokens read at once.
        progress (`bool`, defaults to `True`): Whether to show a bar.
    """
    with tqdm(total=len(token_ids), desc="reading the context", unit="token", disable=not progress) as bar:
        for segment in token_ids.split(segment_length):
            model.transformer(segment[None].to(model.device), cache=memory)
            bar.update(len(segment))


def generate_text(
    model: TransfoXLForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str = "",
    *,
    context_file: str | Path | None = None,
    max_new_tokens: int = 100,
    top_k: int | None = 40,
    top_p: float | None = None,
    temperature: float = 0.95,
    seed: int = 0,
    stop_strings: list[str] | None = None,
    suppress_unknown: bool = False,
    segment_length: int = 128,
    write: Callable[[str], object] | None = None,
    progress: bool = True,
) -> GeneratedText:
    """Write on from a prompt, after a context.

    Args:
        model (`TransfoXLForCausalLM`): The model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        prompt (`str`): What the text begins with; may be empty where there is a context.
        context_file (`str` or `Path`, *optional*): A text that is read before the prompt, line by line as in training.
        max_new_tokens (`int`, defaults to 100): Tokens to write. An end-of-line token does not end the text.
        top_k, top_p, temperature:
            How to sample; a `temperature` or a `top_p` of 0 takes the likeliest token. The defaults are those with
            which the published WikiText-103 model is usually sampled.
        seed (`int`, defaults to 0): Of the sampling.
        stop_strings (`list[str]`, *optional*): Texts after which to stop, line breaks as they are shown.
        suppress_unknown (`bool`, defaults to `False`): Never choose the token of unknown words.
        segment_length (`int`, defaults to 128): Tokens of the context that are read at once.
        write (`Callable[[str], object]`, *optional*): Gets the text piece by piece as it comes.
        progress (`bool`, defaults to `True`): Whether to show a bar while the context is read.

    Returns:
        [`GeneratedText`]

    Raises:
        ValueError: if there is neither prompt nor context, or a setting is out of its range.
    """
    check_sizes(max_new_tokens=max_new_tokens, segment_length=segment_length)
    # scores over a smaller number would be infinite
    if not (temperature == 0 or 1e-30 <= temperature < math.inf):
        raise ValueError(f"`temperature` must be 0 (the likeliest token) or at least 1e-30, but is {temperature}.")
    if top_k is not None and top_k < 0:
        raise ValueError(f"`top_k` must be 0 (all tokens) or more, but is {top_k}.")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"`top_p` must be between 0 and 1, but is {top_p}.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"`seed` must be between 0 and 2**32 - 1, but is {seed}.")
    if stop_strings is not None and not all(stop_strings):
        raise ValueError(f"`stop_strings` must be texts that are not empty, but are {stop_strings!r}.")
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"`tokenizer` must have at most as many tokens as the model ({model.config.vocab_size}), but has "
            f"{len(tokenizer)}."
        )
    prompt_ids = torch.tensor(tokenizer(prompt, add_special_tokens=False)["input_ids"], dtype=torch.long)
    context_ids = torch.tensor([], dtype=torch.long)
    if context_file is not None:
        context_ids = torch.from_numpy(encode_file(tokenizer, context_file))
    if not len(prompt_ids):
        # a first token must be predicted from something
        context_ids, prompt_ids = context_ids[:-1], context_ids[-1:]
    if not len(prompt_ids):
        raise ValueError("`prompt` or `context_file` must hold some text, but both are empty.")

    model.eval()
    memory = TransfoXLMemory(model.config)
    if len(context_ids):
        read_context(model, context_ids, memory, segment_length=segment_length, progress=progress)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        top_p = 1.0 if top_p is None else top_p
        sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p}
    settings = {**sampling, "max_new_tokens": max_new_tokens, "seed": seed}
    choices: dict[str, Any] = dict(sampling)
    if suppress_unknown and tokenizer.unk_token_id is not None:
        others = model.generation_config.suppress_tokens or []
        choices["suppress_tokens"] = sorted({*others, tokenizer.unk_token_id})
    if stop_strings := stop_strings or model.generation_config.stop_strings:
        stop_strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
        # a line break that is shown may be an end token
        as_tokens = [text.replace("\n", tokenizer.eos_token) for text in stop_strings if tokenizer.eos_token]
        choices["stop_strings"] = sorted({*stop_strings, *as_tokens})
    set_seed(seed)
    started = time.perf_counter()
    output = model.generate(
        prompt_ids[None].to(model.device),
        # without it the library takes each token 0 for a pad, which ends a line in word-level vocabularies
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long, device=model.device),
        cache=memory,
        max_new_tokens=max_new_tokens,
        # the end token of word-level models ends a line, and a text has many
        eos_token_id=None,
        pad_token_id=0,
        tokenizer=tokenizer,
        # whatever the model's configuration says, here one text is written from a memory, piece by piece
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=False,
        prefill_chunk_size=None,
        prompt_lookup_num_tokens=None,
        cache_implementation=None,
        streamer=None if write is None else PieceStreamer(tokenizer, write),
        **choices,
    )
    seconds = time.perf_counter() - started
    new_ids = output[0, len(prompt_ids) :].tolist()
    # decoded with the prompt, since a token's spaces depend on its neighbours
    before, whole = (str(tokenizer.decode(ids)) for ids in (prompt_ids, output[0]))
    text = whole[len(before) :] if whole.startswith(before) else str(tokenizer.decode(new_ids))
    text = break_lines(text, tokenizer)
    return GeneratedText(prompt, text, new_ids, len(context_ids), seconds, settings)


def break_lines(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text with line breaks where its end tokens are, which word-level vocabularies have in their place."""
    return text.replace(tokenizer.eos_token, "\n") if tokenizer.eos_token else text


class PieceStreamer(TextStreamer):
    """Hands over each piece of new text as soon as no later token can change it.

    The prompt is not handed over, but decoded with what follows, and so are the last tokens of what was.
    """

    # tokens that are decoded together, and how many of them go on after that
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


__all__ = ["GeneratedText", "generate_text", "read_context"]
