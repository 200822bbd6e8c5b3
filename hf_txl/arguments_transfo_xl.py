"""Checks of a model's arguments: keywords, ids, masks and flags.

Each keyword that the library passes to every model and that `forward` does not name has an entry in `KEYWORDS`: it is
obeyed, or only values without effect are accepted. Other keywords are errors, since ignoring one could silently give
wrong numbers.
"""

import difflib
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from .legacy_names_transfo_xl import FORWARD, MEMORY, refuse_arguments


class Keyword(NamedTuple):
    """How a model treats a keyword of the library; `None` always means that it is not given.

    Args:
        reason (`str`): Effect of the keyword; or why other values are errors, as the end of the message.
        accepts (`tuple`, *optional*): The only accepted values, which have no effect. Default: all, which are obeyed.
    """

    reason: str
    accepts: tuple[Any, ...] | None = None


# the `TransformersKwargs` of transformers 5.18 to 5.24, and what `Trainer` adds
KEYWORDS = {
    "output_hidden_states": Keyword("all hidden states are returned, or those whose indices are given"),
    "output_attentions": Keyword("attention probabilities are returned"),
    "num_items_in_batch": Keyword("divides the sum of the losses; the base model has no loss to divide"),
    "skip_logits": Keyword("logits over the vocabulary are left out; the other models have none"),
    "position_ids": Keyword("texts of a packed row, or compared with the order of the tokens"),
    "is_causal": Keyword("attention of a Transformer-XL is causal", (True,)),
    "output_router_logits": Keyword("the model has no experts and no router", (False,)),
    "cu_seq_lens_q": Keyword("texts of a packed row, see `text_starts`"),
    "cu_seq_lens_k": Keyword("the same texts"),
    "max_length_q": Keyword("length of the longest text, which the attention here does not need"),
    "max_length_k": Keyword("the same length"),
    "seq_idx": Keyword("numbers of the texts of a packed row"),
    "reset_before": Keyword("tokens that begin a text"),
}


def check_keyword(name: str, value: Any) -> None:
    """Raise a `ValueError` for a value of one of `KEYWORDS` that would be ignored."""
    keyword = KEYWORDS[name]
    if value is None or keyword.accepts is None or any(value is accepted for accepted in keyword.accepts):
        return
    given = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    must_be = " or ".join(map(repr, keyword.accepts or (None,)))
    raise ValueError(f"`{name}` must be {must_be}, but is {given}: {keyword.reason}.")


def check_keywords(
    owner: str, forward: Callable[..., Any], arguments: dict[str, Any], also_known: tuple[str, ...] = ()
) -> None:
    """Refuse keyword arguments that would be ignored, such as a misspelt `labels`.

    Args:
        owner (`str`): Name of the model class, for the message.
        forward (`Callable`): Its `forward`, whose parameters are suggested for misspelt ones.
        arguments (`dict`): Keyword arguments that `forward` does not name.
        also_known (`tuple` of `str`): Further keywords that the model uses.
    """
    refuse_arguments(arguments, FORWARD)
    for name, value in arguments.items():
        if name in KEYWORDS:
            check_keyword(name, value)
        elif name not in also_known:
            known = [*inspect.signature(forward).parameters, *KEYWORDS, *also_known]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else "; its docstring lists its arguments."
            raise TypeError(f"`{owner}` takes no argument `{name}`{hint}")


def merge_caches(cache: Any, past_key_values: Any) -> Any:
    """The cache, given by either of its two names."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("`cache` and `past_key_values` are two names of one argument, but are given and differ.")
    return past_key_values if cache is None else cache


def check_ids(name: str, ids: torch.Tensor, size: int, ignored: int | None = None, bound: str = "vocab_size") -> None:
    """Refuse ids outside `0 … size - 1`, except `ignored`; a compiled program raises a `RuntimeError` when it runs."""
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise TypeError(f"`{name}` must hold integers, but has dtype {ids.dtype}.")
    if ids.is_meta:
        return
    wrong = (ids < 0) | (ids >= size)
    if ignored is not None:
        wrong = wrong & (ids != ignored)
    also = f" or {ignored}" if ignored is not None else ""
    refuse_any(
        wrong,
        f"`{name}` must be between 0 and {size - 1} (`{bound}` is {size}){also}",
        lambda: f", but has values from {ids.min().item()} to {ids.max().item()}",
    )


def refuse_any(wrong: torch.Tensor, must_be: str, found: Callable[[], str] = str) -> None:
    """Raise an error if any element is `True`; a compiled program raises a `RuntimeError` when it runs.

    Args:
        wrong (`torch.Tensor` of `bool`): Elements that break the rule.
        must_be (`str`): The rule.
        found (`Callable`, *optional*): Returns the rest of the message, which may need the values.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), f"{must_be}.")
    elif wrong.any():
        raise ValueError(f"{must_be}{found()}.")


def check_mask(mask: Any) -> None:
    """Refuse a list of memory states, the second positional argument of older releases."""
    if isinstance(mask, list | tuple):
        raise TypeError(
            f"`attention_mask` must be a tensor, but is a {type(mask).__name__}. In transformers 2 to 4 the second "
            f"argument was `mems`. Here: {MEMORY}. See docs/migration.md."
        )


def selected_indices(output_hidden_states: Any, number: int) -> Collection[int]:
    """Indices of the hidden states to return, of `number`, by the rules of GPT-2 in transformers 5.24.

    Raises:
        ValueError: for indices out of range and other types.
    """
    if output_hidden_states is None or isinstance(output_hidden_states, bool):
        return range(number) if output_hidden_states else ()
    indices = output_hidden_states
    if isinstance(indices, int):
        # the number 0 means `False`, as in GPT-2
        indices = [indices] if indices else []
    if not isinstance(indices, list | tuple | set | range) or not all(
        isinstance(index, int) and -number <= index < number for index in indices
    ):
        raise ValueError(
            f"`output_hidden_states` must be True, False or indices from {-number} to {number - 1} (`n_layer` + 1 "
            f"hidden states), but is {output_hidden_states!r}."
        )
    return {index % number for index in indices}


__all__ = [
    "KEYWORDS",
    "Keyword",
    "check_ids",
    "check_keyword",
    "check_keywords",
    "check_mask",
    "merge_caches",
    "refuse_any",
    "selected_indices",
]
