"""minicons with a memory that runs through a document.

    scorer = RunningScorer(model, tokenizer=tokenizer, mem_len=1600)
    scorer.token_score(sentences, surprisal=True, base_two=True)

Sentences are read in order, in one call or several; each is scored given all before it, as far as the memory reaches.
`reset()` begins another document. `minicons.scorer.IncrementalLMScorer` itself scores each sentence alone.
"""

import math
from typing import Any

import torch
from minicons.scorer import IncrementalLMScorer

from hf_txl import TransfoXLForCausalLM
from hf_txl.scoring import inference, token_losses


class RunningScorer(IncrementalLMScorer):
    """Scores of minicons, such as `token_score` and `sequence_score`, in running context.

    The first token of a document has no score; every other token has one.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        device (`str`, defaults to `"cpu"`): Where it runs.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        segment_length (`int`, defaults to 512): Most tokens that are read in one call.
        settings: Arguments of [`TransfoXLMemory`], such as `mem_len`.
    """

    def __init__(
        self,
        model: TransfoXLForCausalLM,
        device: str = "cpu",
        *,
        tokenizer: Any,
        segment_length: int = 512,
        **settings: Any,
    ):
        super().__init__(model, device, tokenizer=tokenizer)
        self.segment_length, self.settings = segment_length, settings
        self.reset()

    def reset(self) -> None:
        """Begin another document."""
        self.memory = self.model.init_memory(1, **self.settings)
        self.last = torch.empty(0, dtype=torch.long)

    def token_score(
        self,
        batch: str | list[str],
        surprisal: bool = False,
        prob: bool = False,
        base_two: bool = False,
        **kwargs: Any,
    ) -> list[list[tuple[str, float]]]:
        """`(token, score)` for each token of each sentence; 0 for the first token of a document."""
        prepared = self.prepare_text(batch, **kwargs)
        found = []
        for ids, mask, scores in zip(
            prepared[0]["input_ids"],
            prepared[0]["attention_mask"],
            self.compute_stats(prepared, prob=prob, base_two=base_two),
            strict=True,
        ):
            tokens = self.tokenizer.convert_ids_to_tokens(ids[mask.bool()])
            unscored = [0.0] * (len(tokens) - len(scores))
            signed = [-score for score in scores] if surprisal else scores
            found.append(list(zip(tokens, unscored + signed, strict=True)))
        return found

    def compute_stats(
        self,
        batch: Any,
        rank: bool = False,
        prob: bool = False,
        base_two: bool = False,
        return_tensors: bool = False,
        bow_correction: bool = False,
    ) -> list[Any]:
        """Scores of the tokens of each sentence, in order; the memory advances."""
        encoded, offsets = batch
        if rank or bow_correction or any(offsets):
            raise ValueError("`rank`, `bow_correction` and conditional scores are not available in running context.")
        scores = []
        with inference(self.model):
            for ids, mask in zip(encoded["input_ids"].cpu(), encoded["attention_mask"].cpu(), strict=True):
                row = torch.cat([self.last, ids[mask.bool()]])
                found = token_losses(self.model, [row], self.segment_length, self.settings, self.memory)
                self.last = row[-1:]
                scores.append(-torch.cat(found) if found else torch.empty(0))
        if prob:
            scores = [each.exp() for each in scores]
        elif base_two:
            scores = [each / math.log(2) for each in scores]
        return scores if return_tensors else [each.tolist() for each in scores]
