"""Keywords that the library sends to every model and that `forward` does not name, with what each does here.

A keyword that nobody reads gives a wrong number without a word, so each has a row: it is obeyed, or only the values
that change nothing are taken. What has no row is refused as unknown.
"""

from typing import Any, NamedTuple

import torch


class Keyword(NamedTuple):
    """What a model does with a keyword of the library; `None` is always taken and means that it is not given.

    Args:
        reason (`str`): What the value does; or why other values are refused, as the end of an error message.
        accepts (`tuple`, *optional*): The only values taken, which change nothing. Default: all, and they are obeyed.
    """

    reason: str
    accepts: tuple[Any, ...] | None = None


PACKED = (
    "a row is read as one text, and where the texts of a packed row begin is not. Give each text a row of its own, "
    "padded on either side (`DataCollatorForLanguageModeling`, or `packing=False`)"
)

# the `TransformersKwargs` of transformers 5.18 to 5.24, and what `Trainer` adds
KEYWORDS = {
    "output_hidden_states": Keyword("all hidden states are returned, or those whose indices are given"),
    "output_attentions": Keyword("attention probabilities are returned"),
    "num_items_in_batch": Keyword("divides the sum of the losses; the base model has no loss to divide"),
    "skip_logits": Keyword("logits over the vocabulary are left out; the other models have none"),
    "position_ids": Keyword("compared with the order of the tokens, see `Past.check_position_ids`"),
    "is_causal": Keyword("a Transformer-XL reads in one direction", (True,)),
    "output_router_logits": Keyword("there are no experts, and so no router", (False,)),
    "cu_seq_lens_q": Keyword(PACKED, ()),
    "cu_seq_lens_k": Keyword(PACKED, ()),
    "max_length_q": Keyword(PACKED, ()),
    "max_length_k": Keyword(PACKED, ()),
    "seq_idx": Keyword(PACKED, ()),
}


def check_keyword(name: str, value: Any) -> None:
    """Refuse a value of one of `KEYWORDS` that would be ignored.

    Raises:
        ValueError: naming the keyword, what it must be, what it is and why.
    """
    keyword = KEYWORDS[name]
    if value is None or keyword.accepts is None or any(value is accepted for accepted in keyword.accepts):
        return
    given = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    must_be = " or ".join(map(repr, keyword.accepts or (None,)))
    raise ValueError(f"`{name}` must be {must_be}, but is {given}: {keyword.reason}.")


__all__ = ["KEYWORDS", "Keyword", "check_keyword"]
