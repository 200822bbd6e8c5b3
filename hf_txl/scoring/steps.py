"""The language model in a beam-search decoder: one token at a time, with a memory for each hypothesis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..memory_transfo_xl import TransfoXLMemory
from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..token_ids import checked_tokens
from .reading import inference


@dataclass(frozen=True, eq=False)
class StepState:
    """Memories and log-probabilities after the tokens of one or more hypotheses. It is never changed.

    Args:
        memory ([`TransfoXLMemory`]): Of all tokens read, a row for each hypothesis.
        log_probabilities (`torch.Tensor` of shape `(num_hypotheses, vocab_size)`, *optional*):
            Of the next token, in nats, float32; None before the first token.
    """

    memory: TransfoXLMemory
    log_probabilities: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.memory.batch_size


class StepScorer:
    """Scores the next token of hypotheses, for shallow fusion in beam search.

    A state belongs to one or more hypotheses. `score` returns a new state and leaves the given one as it was, so a
    hypothesis can be continued by several tokens.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        eos_token_id (`int`, *optional*): The token that ends a hypothesis, for `final`.
        settings: Arguments of [`TransfoXLMemory`] (`mem_len`, `clamp_len`, `same_length`, `memory_init`).

    Example:

    ```python
    >>> scorer = StepScorer(model, eos_token_id=0)
    >>> log_probabilities, state = scorer.score([[0]], scorer.init_state())
    >>> state = scorer.select(state, [0, 0])  # two hypotheses
    >>> log_probabilities, state = scorer.score([[5], [7]], state)
    ```
    """

    def __init__(self, model: TransfoXLForCausalLM, *, eos_token_id: int | None = None, **settings: Any):
        self.model, self.eos_token_id, self.settings = model, eos_token_id, settings
        if eos_token_id is not None:
            checked_tokens("eos_token_id", [eos_token_id], model.config.vocab_size)

    def init_state(self, context_ids: Sequence[int] = (), *, segment_length: int = 512) -> StepState:
        """The state of one hypothesis after a context, such as the utterances before; empty by default.

        Args:
            context_ids (`list[int]`): Token ids.
            segment_length (`int`, defaults to 512): Tokens of the context that are read in one call.
        """
        state = StepState(self.model.init_memory(1, **self.settings))
        for piece in checked_tokens("context_ids", context_ids, self.model.config.vocab_size).split(segment_length):
            if len(piece):
                _, state = self.score(piece[None], state)
        return state

    def score(self, tokens: Any, state: StepState) -> tuple[torch.Tensor, StepState]:
        """Read the newest tokens of each hypothesis.

        Args:
            tokens (`torch.Tensor` or `list[list[int]]` of shape `(num_hypotheses, num_tokens)`): Usually one each.
            state (`StepState`): Of the hypotheses before these tokens.

        Returns:
            Log-probabilities of the next token, in nats, float32 `(num_hypotheses, vocab_size)`, and the new state.
        """
        tokens = torch.as_tensor(tokens, dtype=torch.long)
        if tokens.dim() != 2 or len(tokens) != len(state) or tokens.shape[1] == 0:
            raise ValueError(
                f"`tokens` must have the shape ({len(state)}, number of tokens), as `state` has {len(state)} "
                f"hypotheses, but has {tuple(tokens.shape)}."
            )
        checked_tokens("tokens", tokens.flatten(), self.model.config.vocab_size)
        memory = state.memory.select(range(len(state)))
        with inference(self.model):
            output = self.model(tokens.to(self.model.device), cache=memory, logits_to_keep=1)
            log_probabilities = output.logits[:, -1].float().log_softmax(-1)
        return log_probabilities, StepState(memory, log_probabilities)

    def select(self, state: StepState, hypotheses: Sequence[int] | torch.Tensor) -> StepState:
        """The state of these hypotheses, by index; one may be selected more than once."""
        index = torch.as_tensor(hypotheses, dtype=torch.long)
        scores = state.log_probabilities
        return StepState(state.memory.select(index), None if scores is None else scores[index.to(scores.device)])

    def merge(self, states: Sequence[StepState]) -> StepState:
        """One state of the hypotheses of several states, in order; `final` needs that all have read a token."""
        if not states:
            raise ValueError("`states` must hold at least one state, but is empty.")
        if len(states) == 1:
            return states[0]
        scores = [state.log_probabilities for state in states if state.log_probabilities is not None]
        memory = TransfoXLMemory.concatenate([state.memory for state in states])
        return StepState(memory, torch.cat(scores) if len(scores) == len(states) else None)

    def final(self, state: StepState) -> torch.Tensor:
        """Log-probabilities, in nats, float32 `(num_hypotheses,)`, that the hypotheses end here."""
        if self.eos_token_id is None:
            raise ValueError("`eos_token_id` must be the token that ends a hypothesis, but is None.")
        if state.log_probabilities is None:
            raise ValueError("`state` must have read a token, but has read none.")
        return state.log_probabilities[:, self.eos_token_id]


__all__ = ["StepScorer", "StepState"]
