"""A Transformer-XL in the beam search of ESPnet: its `BatchScorerInterface`, one token at a time with memory.

    scorers["lm"] = TransfoXLScorer(TransfoXLForCausalLM.from_pretrained(folder))

The model's token ids must be those of the recogniser's token list, with the same `<sos/eos>`. `context_ids` may hold
the ids of the utterances before, so that the memory runs from one to the next.
"""

from collections.abc import Sequence
from typing import Any

import torch

from hf_txl import TransfoXLForCausalLM
from hf_txl.scoring import StepScorer, StepState

try:
    from espnet.nets.scorer_interface import BatchScorerInterface
except ImportError:  # the class is used without ESPnet too, by decoders with the same interface
    BatchScorerInterface = object


class TransfoXLScorer(BatchScorerInterface):
    """Scores the next token of each hypothesis; a hypothesis has its own state.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        context_ids (`list[int]`): What precedes every utterance; may be assigned between utterances.
        settings: Arguments of [`TransfoXLMemory`], such as `mem_len`.
    """

    def __init__(self, model: TransfoXLForCausalLM, context_ids: Sequence[int] = (), **settings: Any):
        self.scorer = StepScorer(model, **settings)
        self.context_ids = context_ids

    def init_state(self, x: torch.Tensor) -> StepState:
        return self.scorer.init_state(self.context_ids)

    def batch_init_state(self, x: torch.Tensor) -> StepState:
        return self.init_state(x)

    def select_state(self, state: Any, i: int, new_id: int | None = None) -> Any:
        # a list of states, as `batch_score` returns
        return None if state is None else state[i]

    def score(self, y: torch.Tensor, state: StepState, x: torch.Tensor) -> tuple[torch.Tensor, StepState]:
        scores, state = self.scorer.score(y[None, -1:], state)
        return scores[0], state

    def batch_score(
        self, ys: torch.Tensor, states: list[StepState], xs: torch.Tensor
    ) -> tuple[torch.Tensor, list[StepState]]:
        scores, state = self.scorer.score(ys[:, -1:], self.scorer.merge(states))
        return scores, [self.scorer.select(state, [index]) for index in range(len(ys))]

    def final_score(self, state: StepState) -> float:
        # the search itself appends and scores `<sos/eos>`
        return 0.0
