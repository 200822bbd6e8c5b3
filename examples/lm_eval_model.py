"""The model `hf-txl` for EleutherAI's lm-evaluation-harness: contexts of any length, read with memory.

    python examples/lm_eval_model.py run --model hf-txl --model_args pretrained=FOLDER,mem_len=1600 --tasks wikitext

The arguments of lm-eval are passed on. Its own model type `hf` cuts texts into windows and reads each without memory;
here a text is one stream, as in `hf_txl.scoring.evaluate_stream`, and contexts are not truncated.
"""

from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from hf_txl.scoring import ContextScorer, inference, score_sequences
from hf_txl.tokenization_transfo_xl import encode_lines

# of the memory; everything else is an argument of `HFLM`
SETTINGS = ("mem_len", "clamp_len", "same_length")


@register_model("hf-txl")
class TransfoXLLM(HFLM):
    """Log-likelihoods with memory, and whether a continuation is the greedy one.

    Args:
        pretrained (`str` or [`TransfoXLForCausalLM`]): Folder or Hub id, or a model.
        segment_length (`int`, defaults to 512): Most tokens that are read in one call.
        mem_len, clamp_len, same_length: Settings of the memory, by default the model's.
        kwargs: Arguments of `HFLM`, such as `tokenizer`, `device` and `dtype`.
    """

    def __init__(self, pretrained: Any, segment_length: int = 512, **kwargs: Any):
        self.segment_length = int(segment_length)
        self.settings = {name: kwargs.pop(name) for name in SETTINGS if name in kwargs}
        super().__init__(pretrained, **kwargs)

    def encode_document(self, text: str) -> list[int]:
        """Token ids; with our tokenizers, lines are encoded as in training, such as with `<eos>` after each."""
        if "line_end" not in self.tokenizer.init_kwargs and "mode" not in self.tokenizer.init_kwargs:
            return self.tok_encode(text)
        lines = encode_lines(self.tokenizer, text.splitlines(keepends=True))
        return [token for line in lines for token in line]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in tqdm(requests, disable=disable_tqdm or self.rank != 0, desc="reading"):
            (text,) = request.args
            score = score_sequences(
                self.model,
                [self.encode_document(text)],
                bos_token_id=self.prefix_token_id,
                segment_length=self.segment_length,
                **self.settings,
            ).item()
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
            found.append(score)
        return found

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, _) in enumerate(requests):
            by_context.setdefault(tuple(context), []).append(index)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for context, indices in tqdm(by_context.items(), disable=disable_tqdm or self.rank != 0, desc="reading"):
            scorer = ContextScorer(self.model, context, segment_length=self.segment_length, **self.settings)
            for index in indices:
                key, _, continuation = requests[index]
                answers[index] = self._continue(scorer, continuation)
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answers[index])
        return answers

    def _continue(self, scorer: ContextScorer, continuation: list[int]) -> tuple[float, bool]:
        """Log-probability of a continuation, and whether each of its tokens is the most probable one."""
        row = torch.cat([scorer.last, torch.tensor(continuation, dtype=torch.long)]).to(self.device)
        memory = scorer.memory.select([0])
        total, is_greedy = 0.0, True
        pieces = zip(row[:-1].split(self.segment_length), row[1:].split(self.segment_length), strict=True)
        with inference(self.model):
            for inputs, targets in pieces:
                scores = self.model(inputs[None], cache=memory).logits[0].float().log_softmax(-1)
                total += scores.gather(1, targets[:, None]).double().sum().item()
                is_greedy = is_greedy and bool((scores.argmax(-1) == targets).all())
        return total, is_greedy


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
