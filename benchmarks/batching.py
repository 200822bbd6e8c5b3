"""What batching and a shared context are worth on the CPU.

1. Tokens per second of `generate` with a small model, one prompt against eight at once (ragged, padded on the left).
2. Scoring twenty continuations of one context: the context read once into a memory, against each joined text on its
   own.

Run with `python benchmarks/batching.py`; takes about a minute and writes `batching.json`.
"""

import torch
from harness import measure, write_results

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
from hf_txl.scoring import score_continuations, score_sequences


def generation(model: TransfoXLForCausalLM, new_tokens: int = 64) -> dict[str, float]:
    """Tokens per second at batch 1 and 8, and their ratio."""
    prompts = torch.randint(1, model.config.vocab_size, (8, 32))
    mask = (torch.arange(32) >= torch.arange(0, 24, 3)[:, None]).long()
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    seconds = measure(
        {
            "batch 1": lambda: model.generate(prompts[:1], **settings),
            "batch 8": lambda: model.generate(prompts, attention_mask=mask, **settings),
        }
    )
    one, eight = new_tokens / seconds["batch 1"], 8 * new_tokens / seconds["batch 8"]
    return {"tokens_per_second_batch_1": one, "tokens_per_second_batch_8": eight, "ratio": eight / one}


def rescoring(model: TransfoXLForCausalLM) -> dict[str, float]:
    """Seconds with the context read once and once per hypothesis, their ratio, and the largest difference of sums."""
    context = torch.randint(1, model.config.vocab_size, (50,)).tolist()
    hypotheses = [torch.randint(1, model.config.vocab_size, (2 + index % 9,)).tolist() for index in range(20)]

    def joined() -> list[float]:
        # the sum over the joined text less the sum over the context alone
        texts = [score_sequences(model, [context + hypothesis])[0] for hypothesis in hypotheses]
        alone = score_sequences(model, [context])[0]
        return [float(text - alone) for text in texts]

    shared = [float(score) for score in score_continuations(model, context, hypotheses)]
    seconds = measure({"shared": lambda: score_continuations(model, context, hypotheses), "joined": joined})
    return {
        "seconds_shared_context": seconds["shared"],
        "seconds_joined_texts": seconds["joined"],
        "ratio": seconds["joined"] / seconds["shared"],
        "largest_difference": max(abs(a - b) for a, b in zip(shared, joined(), strict=True)),
    }


def main() -> None:
    torch.manual_seed(0)
    config = TransfoXLConfig(
        vocab_size=2000, d_model=256, n_head=4, d_inner=1024, n_layer=6, mem_len=128, clamp_len=-1, cutoffs=[]
    )
    model = TransfoXLForCausalLM(config).eval()
    write_results(__file__, {"generation": generation(model), "rescoring": rescoring(model)})


if __name__ == "__main__":
    main()
