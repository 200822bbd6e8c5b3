"""A Transformer-XL as the language model of icefall's beam searches with shallow fusion.

    LM = TransfoXLScorer(TransfoXLForCausalLM.from_pretrained(folder), lm_scale=0.3)
    hypotheses = modified_beam_search_lm_shallow_fusion(model, encoder_out, lengths, sp, LM)

It takes the place of `icefall.lm_wrapper.LmScorer` with the type `"transformer"`: the search passes the whole prefix
of each hypothesis in every step. States are kept by prefix, so that only the newest token is read.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from hf_txl import TransfoXLForCausalLM
from hf_txl.scoring import StepScorer, StepState


class TransfoXLScorer:
    """`lm_type`, `lm_scale` and `score_token` of icefall's `LmScorer`.

    Args:
        model ([`TransfoXLForCausalLM`]): The model; its token ids are those of the recogniser.
        lm_scale (`float`, defaults to 0.3): Weight of its scores in the search.
        context_ids (`list[int]`): What precedes every utterance.
        num_states (`int`, defaults to 1024): Prefixes whose states are kept, the most recently used.
        settings: Arguments of [`TransfoXLMemory`], such as `mem_len`.
    """

    lm_type = "transformer"

    def __init__(
        self,
        model: TransfoXLForCausalLM,
        lm_scale: float = 0.3,
        context_ids: Sequence[int] = (),
        num_states: int = 1024,
        **settings: Any,
    ):
        self.scorer, self.lm_scale, self.num_states = StepScorer(model, **settings), lm_scale, num_states
        self.states: OrderedDict[tuple[int, ...], StepState] = OrderedDict()
        self.start = self.scorer.init_state(context_ids)

    def score_token(self, x: torch.Tensor, x_lens: torch.Tensor, state: None = None) -> tuple[torch.Tensor, None]:
        """Log-probabilities of the next token of each prefix.

        Args:
            x (`torch.Tensor` of shape `(num_hypotheses, time)`): Prefixes from the first token on, right-padded.
            x_lens (`torch.Tensor` of shape `(num_hypotheses,)`): Their lengths.
            state: None, since states are kept by prefix.

        Returns:
            `torch.Tensor` of shape `(num_hypotheses, vocab_size)` in nats, and None.
        """
        prefixes = [tuple(row[:length]) for row, length in zip(x.tolist(), x_lens.tolist(), strict=True)]
        before = [self._state(prefix[:-1]) for prefix in prefixes]
        scores, found = self.scorer.score([prefix[-1:] for prefix in prefixes], self.scorer.merge(before))
        for index, prefix in enumerate(prefixes):
            self._keep(prefix, self.scorer.select(found, [index]))
        return scores, None

    def _state(self, prefix: tuple[int, ...]) -> StepState:
        if not prefix:
            return self.start
        if prefix not in self.states:
            self._keep(prefix, self.scorer.score([prefix], self.start)[1])
        self.states.move_to_end(prefix)
        return self.states[prefix]

    def _keep(self, prefix: tuple[int, ...], state: StepState) -> None:
        self.states[prefix] = state
        if len(self.states) > self.num_states:
            self.states.popitem(last=False)
