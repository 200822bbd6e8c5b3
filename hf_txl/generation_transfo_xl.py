"""Generation with a memory: checks of the arguments of `generate`, and the inputs of each decoding step.

The loop is the library's own. Before transformers 5.24 the argument `cache` is called `past_key_values`.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GenerationMixin,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.utils import logging

from .arguments_transfo_xl import merge_caches
from .configuration_transfo_xl import TransfoXLConfig
from .legacy_names_transfo_xl import GENERATE, refuse_arguments
from .memory_transfo_xl import TransfoXLMemory
from .outputs_transfo_xl import CACHE_NAME

logger = logging.get_logger(__name__)


class TransfoXLGenerationMixin(GenerationMixin):
    """`generate` for language models with a segment memory."""

    config: TransfoXLConfig

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Generate tokens; see the library's `generate`.

        `cache=` (or `past_key_values=`) takes a [`TransfoXLMemory`] that holds the stream so far. The prompt then has
        new tokens only, and the memory advances by all tokens but the last generated one; it is used whatever
        `use_cache` is. Beams and several returned sequences share the cached prefix and do not advance this memory;
        the memory that they advance is returned with `return_dict_in_generate`. Without a memory, a cache of the
        library is used, with the window rule; `use_cache=False` reads the whole text again, as one segment, for each
        token.
        """
        refuse_arguments(kwargs, GENERATE)
        cache = merge_caches(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        if cache is not None:
            kwargs[CACHE_NAME] = cache

        def setting(name: str) -> Any:
            """Value of a setting: of this call, else of its generation configuration, else of the model's."""
            if name in kwargs:
                return kwargs[name]
            given = (getattr(config, name, None) for config in (generation_config, self.generation_config))
            return next((value for value in given if value is not None), None)

        if stop_strings := setting("stop_strings"):
            stop = StopTexts(kwargs.get("tokenizer"), stop_strings)
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), stop])
            generation_config = self._without_stop_strings(generation_config, kwargs)
        self._check_arguments(inputs, kwargs, cache, setting)
        if isinstance(cache, TransfoXLMemory):
            check_with_memory(kwargs, setting)
            stores_history = cache.mem_len > 0
            if stores_history:
                # with `use_cache=False` each step would read the whole text again, although the memory holds it
                kwargs["use_cache"] = True
        else:
            stores_history = self.config.sliding_window > 1 and not self.config.is_absolute
            if stores_history and cache is None and kwargs.get("use_cache") is None and setting("use_cache") is False:
                logger.warning_once(
                    "`generate` reads the whole text again for each token, as one segment, since a configuration has "
                    "`use_cache=False` (the library's `Trainer` sets it in `model.config`, from which generation "
                    "configurations take it). Pass `use_cache=True` or set `model.generation_config.use_cache = True`."
                )
        if not stores_history:
            if kwargs.get("inputs_embeds") is not None:
                raise ValueError(
                    "`inputs_embeds` must be None where nothing is stored (`mem_len` is 0, or an absolute attention "
                    "kind without a `TransfoXLMemory`), but is given: every step reads the whole text again, and "
                    "generated tokens have ids only. Pass `input_ids`."
                )
            # every step reads the whole segment again
            kwargs["use_cache"] = False
        return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)

    def _without_stop_strings(self, generation_config: Any, arguments: dict[str, Any]) -> Any:
        """Remove `stop_strings` from the arguments of `generate` and return its generation configuration without them.

        The library's own criterion fails with tokenizers whose vocabulary lacks a word that it looks up.
        """
        arguments.pop("stop_strings", None)
        if generation_config is not None:
            generation_config = copy.copy(generation_config)
            generation_config.stop_strings = None
        if self.generation_config.stop_strings:
            arguments["stop_strings"] = None
        return generation_config

    def _check_arguments(
        self, inputs: Any, arguments: dict[str, Any], cache: Any, setting: Callable[[str], Any]
    ) -> None:
        """Refuse arguments of `generate` that the model cannot obey, whatever the cache."""
        if setting("cache_implementation") == "quantized":
            raise ValueError(
                "`cache_implementation` must not be 'quantized': the library quantises caches of full attention only, "
                "and this model attends to a sliding window."
            )
        check_prompt(inputs, arguments, cache)
        if self.config.is_absolute and arguments.get("position_ids") is not None:
            raise ValueError(
                f"`position_ids` must be None for `attention_kind={self.config.attention_kind!r}`, but is given: "
                "positions are counted from the newest token in every step."
            )

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The library's greedy decoding and sampling, with two keywords for each step.

        `num_candidates`: clusters that cannot contain a candidate are not computed. `stopped`: rows that have ended,
        whose padding a memory does not store.
        """
        num_candidates = count_candidates(logits_processor, generation_config)
        if num_candidates is not None and self.config.num_clusters:
            kwargs["num_candidates"] = num_candidates
        # the library pads rows that have ended only if there is an end token
        pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        if pads and isinstance(kwargs.get(CACHE_NAME), TransfoXLMemory) and len(input_ids) > 1:
            stopping_criteria = kwargs["stopped"] = RecordedCriteria(stopping_criteria)
        library: Any = super()
        return library._sample(input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: paged attention does not accept position scores."""
        raise NotImplementedError(
            "`generate_batch` is not supported: paged attention has no relative positions. Use `generate` on a padded "
            "batch."
        )

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The library's inputs; with a memory, the mask covers the new tokens only."""
        # an argument for stop strings and token healing, which the library passes on to the model
        kwargs.pop("tokenizer", None)
        stopped = kwargs.pop("stopped", None)
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        cache = inputs.get(CACHE_NAME)
        if self.config.is_absolute and not (isinstance(cache, TransfoXLMemory) and cache.mem_len):
            # each step reads the text again, as far as there are positions
            for name in ("input_ids", "inputs_embeds", "attention_mask"):
                if inputs.get(name) is not None:
                    inputs[name] = inputs[name][:, -self.config.max_klen :]
        if isinstance(cache, TransfoXLMemory):
            ids = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            inputs["attention_mask"] = mask_of_new_tokens(ids, inputs.get("attention_mask"), stopped)
        if CACHE_NAME in inputs:
            # peft prepends its prompts unless it finds a filled cache under this name
            inputs["past_key_values"] = inputs.pop(CACHE_NAME)
        return inputs

    @staticmethod
    def create_masks_for_generate(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """The two-dimensional mask itself: the model derives its own masks from it for every cache."""
        return attention_mask

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:  # type: ignore[override]
        """Let the beams or returned sequences of each row share its memory as a prefix."""
        memory, ids = kwargs.get(CACHE_NAME), kwargs.get("input_ids")
        if expand_size > 1 and isinstance(memory, TransfoXLMemory):
            if ids is not None and memory.batch_size not in (None, len(ids)):
                raise ValueError(
                    f"`cache` must have the batch size of the prompt ({len(ids)}), but holds {memory.batch_size} "
                    "streams; `generate` repeats each for its beams or sequences."
                )
            kwargs[CACHE_NAME] = memory = copy.copy(memory)
            memory.batch_repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)  # type: ignore[misc]


def check_with_memory(arguments: dict[str, Any], setting: Callable[[str], Any]) -> None:
    """Refuse what `generate` cannot do with a [`TransfoXLMemory`]."""
    if setting("prefill_chunk_size") is not None:
        raise ValueError(
            f"`prefill_chunk_size` must be None with a `TransfoXLMemory`, but is {setting('prefill_chunk_size')!r}; "
            "call the model on each segment of the prompt instead."
        )
    if arguments.get("assistant_model") is not None or setting("prompt_lookup_num_tokens") is not None:
        raise ValueError("Assisted decoding removes tokens from the cache, which a `TransfoXLMemory` cannot do.")
    if isinstance(mask := arguments.get("attention_mask"), torch.Tensor):
        check_prompt_mask(mask)


def check_prompt(inputs: Any, arguments: dict[str, Any], cache: Any) -> None:
    """Refuse prompts without a new token, for which the library would fail or read cached tokens again.

    Args:
        inputs, arguments, cache: First argument, keyword arguments and cache of `generate`.
    """
    prompts = {"inputs": inputs, **{name: arguments.get(name) for name in ("input_ids", "inputs_embeds")}}
    prompts = {
        name: prompt for name, prompt in prompts.items() if isinstance(prompt, torch.Tensor) and prompt.dim() > 1
    }
    if not prompts:
        return
    # embeddings take precedence over ids
    name, prompt = max(prompts.items(), key=lambda item: item[1].dim())
    if prompt.shape[1] == 0:
        instead = "begin with `bos_token_id` or another first token"
        if cache is not None:
            instead = (
                "a cache stores no prediction: leave the last context token out of earlier calls, and pass it here"
            )
        raise ValueError(
            f"`{name}` must hold at least one token per row, from which the first new one is predicted, but has "
            f"shape {list(prompt.shape)}; {instead}."
        )
    cached_length = 0 if cache is None or not hasattr(cache, "get_seq_length") else int(cache.get_seq_length())
    mask = arguments.get("attention_mask")
    # the library treats embeddings as the whole text, whatever the mask
    only_new = name != "inputs_embeds" and isinstance(mask, torch.Tensor) and mask.shape[1] != prompt.shape[1]
    if prompt.shape[1] <= cached_length and not only_new:
        raise ValueError(
            f"`{name}` must hold the whole text, more than the {cached_length} tokens that `cache` has read, but holds"
            f" {prompt.shape[1]}; if it holds new tokens only, pass an `attention_mask` of the whole text."
        )


def mask_of_new_tokens(
    ids: torch.Tensor, attention_mask: torch.Tensor | None, stopped: "RecordedCriteria | None"
) -> torch.Tensor | None:
    """Mask of the tokens of one step, `(B, Q)`; the memory has the mask of its own positions.

    A single token is a generated token or a prompt. It is real even if it equals `pad_token_id`, except in a row that
    has ended: tokens after the end are neither read nor stored.
    """
    if ids.shape[1] > 1:
        if attention_mask is None:
            return None
        check_prompt_mask(attention_mask[:, -ids.shape[1] :])
        return attention_mask[:, -ids.shape[1] :]
    if stopped is None or stopped.rows is None or not stopped.rows.any():
        return None
    return (~stopped.rows)[:, None].long()


def check_prompt_mask(mask: torch.Tensor) -> None:
    """Refuse rows that end with a pad: the first new token is predicted from the last position."""
    if not (mask[:, -1] != 0).all():
        raise ValueError(
            "`attention_mask` must end with a real token in each row, from which the first new one is predicted, but "
            f"ends with {mask[:, -1].int().tolist()}. Pad on the left. If no mask is given, the library masks each "
            "`pad_token_id` of a prompt."
        )


def count_candidates(logits_processor: Any, generation_config: Any) -> int | None:
    """How many of the likeliest tokens a step of greedy decoding or sampling depends on; `None`: possibly all.

    Greedy decoding depends on one and top-k sampling on k, unless an earlier processor may reorder tokens.
    """
    if generation_config.return_dict_in_generate and (
        generation_config.output_scores or generation_config.output_logits
    ):
        return None
    for processor in logits_processor:
        if type(processor) is TopKLogitsWarper and processor.filter_value == -float("inf"):
            # later processors receive `-inf` for all other tokens
            return processor.top_k
        if type(processor) is not TemperatureLogitsWarper:
            return None
    return None if generation_config.do_sample else 1


class RecordedCriteria(StoppingCriteriaList):
    """Stopping criteria that record the rows that have ended, `(batch_size,)` booleans."""

    rows: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ended: Any = super().__call__(input_ids, scores, **kwargs)
        self.rows = ended if self.rows is None else self.rows | ended
        return ended


class StopTexts(StoppingCriteria):
    """Ends a row when its newest token completes one of the stop strings.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Decodes the tokens.
        stop_strings (`str` or `list[str]`): One or several texts.
    """

    def __init__(self, tokenizer: Any, stop_strings: str | list[str]):
        self.texts = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given together with `stop_strings`, but is None.")
        if not all(isinstance(text, str) and text for text in self.texts):
            raise ValueError(f"`stop_strings` must be non-empty texts, but is {stop_strings!r}.")
        self.tokenizer = tokenizer
        # few tokens decode to nothing; 8 more cover these, spaces, and context before the text
        self.num_tokens = max(map(len, self.texts)) + 8

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = [self._completes(row) for row in input_ids[:, -self.num_tokens :].tolist()]
        return torch.tensor(done, device=input_ids.device)

    def _completes(self, token_ids: list[int]) -> bool:
        before, after = self.tokenizer.decode(token_ids[:-1]), self.tokenizer.decode(token_ids)
        return any(after.count(text) > before.count(text) for text in self.texts)


__all__ = ["StopTexts", "TransfoXLGenerationMixin", "count_candidates"]
