"""The models that `run.py` sets side by side, each in a process of its own: one that answers tasks.

- `ours`: `hf_txl` with a `TransfoXLMemory`, through `generate`;
- `legacy`: `TransfoXLLMHeadModel` of transformers 4.57.6, its one broken call repaired; it has no `generate`, so it is
  run step by step, greedily;
- `gpt2`: GPT-2 of the same layers with its cache, through `generate`. Its vocabulary is chosen so that the whole has
  about as many parameters.

Weights are random. Every model attends to as many earlier tokens as the memory holds, all of them real.
Run as `python contestants.py NAME`; see `harness.Contestant`.
"""

import copy
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import peak_memory, serve

# B batch   L segment   M memory
WT103_VOCABULARY: dict[str, Any] = {"vocab_size": 267735, "cutoffs": [20000, 40000, 200000]}
SHAPES: dict[str, dict[str, Any]] = {
    "wt103-base": {
        **WT103_VOCABULARY,
        **{"n_layer": 16, "d_model": 410, "d_embed": 410, "n_head": 10, "d_head": 41, "d_inner": 2100, "div_val": 1},
        **{"mem_len": 640, "clamp_len": 400, "same_length": True, "untie_r": True},
    },
    "wt103-large": {
        **WT103_VOCABULARY,
        **{"n_layer": 18, "d_model": 1024, "d_embed": 1024, "n_head": 16, "d_head": 64, "d_inner": 4096, "div_val": 4},
        **{"mem_len": 1600, "clamp_len": 1000, "same_length": True, "untie_r": True},
    },
    # for long texts: what matters there is the memory, not the size of the model
    "small": {
        **{"vocab_size": 1000, "cutoffs": [500], "div_val": 1},
        **{"n_layer": 3, "d_model": 128, "d_embed": 128, "n_head": 4, "d_head": 32, "d_inner": 256},
        **{"mem_len": 1600, "clamp_len": 1000, "same_length": True, "untie_r": True},
    },
}
GPT2_VOCABULARY = {"wt103-base": 267735, "wt103-large": 50257, "small": 1000}
SEGMENT = 128  # tokens read at once
HYPOTHESES, HYPOTHESIS_LENGTH = 8, 16  # continuations of one text that are scored together
SLIDING_WINDOW = 512  # tokens that a model without memory reads again for each target


class Model:
    """What every contestant can do; a state is what a model remembers of one batch of texts."""

    def __init__(self, device: str = "cpu", threads: int = 1, attention: str | None = None):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.device, self.attention = device, attention
        self.state: Any = None

    def tasks(self) -> dict[str, Callable[..., Any]]:
        return {
            name: getattr(self, name)
            for name in (
                "load",
                "fill",
                "decode",
                "evaluate",
                "rescore",
                "first_token",
                "read_bandwidth",
                "peak",
                "go_on",
                "facts",
            )
        }

    # --- what differs

    def build(self, shape: dict[str, Any], name: str) -> torch.nn.Module:
        raise NotImplementedError

    def fresh_state(self, batch_size: int) -> Any:
        raise NotImplementedError

    def read(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        """Advance the state by a segment; with targets, score it."""
        raise NotImplementedError

    def continue_greedily(self, ids: torch.Tensor, num_tokens: int) -> None:
        raise NotImplementedError

    def score_hypotheses(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        """Score rows that all go on from the one row of the state, and leave the state as it was."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        return {"parameters": sum(parameter.numel() for parameter in self.model.parameters())}

    # --- what is measured

    def load(self, shape: str) -> dict[str, Any]:
        self.state = self.model = None
        self.shape = SHAPES[shape]
        self.model: Any = self.build(self.shape, shape).eval().to(self.device)
        return self.facts()

    def random_ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 500, shape, device=self.device)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds_of(self, work: Callable[[], Any]) -> float:
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    @torch.no_grad()
    def fill(self, batch_size: int) -> None:
        """Read as much as the memory holds."""
        self.state = self.fresh_state(batch_size)
        for _ in range(-(-self.shape["mem_len"] // SEGMENT)):
            self.read(self.random_ids(batch_size, SEGMENT))
        self.batch_size = batch_size

    @torch.no_grad()
    def decode(self, num_tokens: int) -> float:
        """Seconds per step of greedy decoding behind what has been read."""
        ids = self.random_ids(self.batch_size, 1)
        return self.seconds_of(lambda: self.continue_greedily(ids, num_tokens)) / num_tokens

    @torch.no_grad()
    def evaluate(self) -> float:
        """Seconds to score a segment behind a full memory."""
        ids, targets = self.random_ids(self.batch_size, SEGMENT), self.random_ids(self.batch_size, SEGMENT)
        return self.seconds_of(lambda: self.read(ids, targets))

    @torch.no_grad()
    def rescore(self) -> float:
        """Seconds to score hypotheses that go on from the text read so far, which stays as it is."""
        shape = HYPOTHESES, HYPOTHESIS_LENGTH
        ids, targets = self.random_ids(*shape), self.random_ids(*shape)
        return self.seconds_of(lambda: self.score_hypotheses(ids, targets))

    @torch.no_grad()
    def first_token(self) -> float:
        """Seconds from a prompt of one segment to its first new token, from a fresh state."""
        self.state = self.fresh_state(1)
        prompt = self.random_ids(1, SEGMENT)
        return self.seconds_of(lambda: self.continue_greedily(prompt, 1))

    @torch.no_grad()
    def go_on(self, num_tokens: int) -> None:
        """Read on in segments."""
        for start in range(0, num_tokens, SEGMENT):
            self.read(self.random_ids(self.batch_size, min(SEGMENT, num_tokens - start)))

    def read_bandwidth(self) -> float:
        """Bytes per second that a sum over 256 MiB reads: the best of five."""
        tensor = torch.ones(2**26, device=self.device)
        return tensor.numel() * 4 / min(self.seconds_of(tensor.sum) for _ in range(5))

    def peak(self, restart: bool = False) -> int:
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated()
            if restart:
                torch.cuda.reset_peak_memory_stats()
            return peak
        return peak_memory(restart)


class Ours(Model):
    def build(self, shape: dict[str, Any], name: str) -> torch.nn.Module:
        from hf_txl import TransfoXLConfig, TransfoXLForCausalLM

        config = TransfoXLConfig(**shape)
        if self.attention:
            config._attn_implementation = self.attention
        return TransfoXLForCausalLM(config)

    def tasks(self) -> dict[str, Callable[..., Any]]:
        own = {"decode_all_scores": self.decode_all_scores, "decode_long": self.decode_long, "slide": self.slide}
        return {**super().tasks(), **own}

    def fresh_state(self, batch_size: int) -> Any:
        return self.model.init_memory(batch_size, stores="keys_values")

    def read(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        scored = {} if targets is None else {"shift_labels": targets}
        return self.model(ids, cache=self.state, return_logits=False, **scored)

    def continue_greedily(self, ids: torch.Tensor, num_tokens: int, **options: Any) -> Any:
        plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return self.model.generate(ids, cache=self.state, max_new_tokens=num_tokens, **plain, **options)

    def score_hypotheses(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.model(ids, cache=self.state.select([0] * len(ids)), shift_labels=targets, return_logits=False)

    @torch.no_grad()
    def slide(self) -> float:
        """Seconds to score one token without a memory: the window before it is read anew."""
        ids, targets = self.random_ids(1, SLIDING_WINDOW), self.random_ids(1, SLIDING_WINDOW)
        targets[:, :-1] = -100
        return self.seconds_of(lambda: self.model(ids, shift_labels=targets, use_cache=False, return_logits=False))

    @torch.no_grad()
    def decode_all_scores(self, num_tokens: int) -> float:
        """As `decode`, where every cluster of the vocabulary is read for every token."""
        ids = self.random_ids(self.batch_size, 1)
        options = {"return_dict_in_generate": True, "output_scores": True}
        return self.seconds_of(lambda: self.continue_greedily(ids, num_tokens, **options)) / num_tokens

    @torch.no_grad()
    def decode_long(self, num_tokens: int, block: int = 1000) -> dict[str, Any]:
        """One text of many tokens, token by token: per thousand, the median step, the memory and its peak bytes.

        The third and the last thousand lie minutes apart, in which a machine may change its pace. So the thousand
        behind the last is written by turns with the third one of another text.
        """
        self.state, self.batch_size = self.fresh_state(1), 1
        report = []
        ids = self.random_ids(1, 1)
        for _ in range(num_tokens // block):
            steps = StepTimes()
            ids = self.continue_greedily(ids, block, streamer=steps)[:, -1:]
            report.append(
                {
                    "seconds_per_token": statistics.median(steps.seconds()),
                    "memory_length": self.state.stored_length,
                    "peak_bytes": self.peak(),
                }
            )
        texts, ratios = {"last": self.state}, []
        self.state = self.fresh_state(1)
        self.go_on(2 * block)
        texts["early"] = self.state
        for turn in range(10):
            seconds = {}
            # each goes first as often as the other
            for name in ("early", "last") if turn % 2 else ("last", "early"):
                self.state, steps = texts[name], StepTimes()
                self.continue_greedily(ids, block // 10, streamer=steps)
                seconds[name] = statistics.median(steps.seconds())
            ratios.append(seconds["last"] / seconds["early"])
        return {"thousands": report, "last_over_third": statistics.median(ratios)}

    def facts(self) -> dict[str, Any]:
        config, crit = self.model.config, self.model.crit
        item = 4
        width = config.n_head * config.d_head
        layers = sum(
            parameter.numel()
            for name, parameter in self.model.transformer.layers.named_parameters()
            if "r_net" not in name
        )
        shortlist = (crit.shortlist_size + crit.num_clusters) * config.d_embed
        shortlist += crit.out_projs["0"].numel() if "0" in crit.out_projs else 0
        clusters = (
            0
            if config.div_val == 1
            else sum(crit.out_layers[index].weight.numel() for index in (1, 2, 3)[: crit.num_clusters])
        )
        if config.div_val == 1:
            clusters = (config.vocab_size - crit.shortlist_size) * config.d_embed
        return {
            **super().facts(),
            # read once per step, whatever the batch
            "weight_bytes": item * (layers + shortlist),
            "position_bytes": item * config.n_layer * config.mem_len * width,
            "cluster_bytes": item * clusters,
            # read once per step and row
            "memory_bytes": item * 2 * config.n_layer * config.mem_len * width,
        }


class StepTimes:
    """A streamer that notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def repair_type_as() -> None:
    """Let `Tensor.type_as` take `dtype=`, which the legacy class passes and this method has never taken."""
    original = torch.Tensor.type_as

    @functools.wraps(original)
    def type_as(tensor: torch.Tensor, other: Any = None, *, dtype: Any = None) -> torch.Tensor:
        return original(tensor, other) if dtype is None else tensor.to(dtype)

    torch.Tensor.type_as = type_as  # type: ignore[method-assign, assignment]


class Legacy(Model):
    def build(self, shape: dict[str, Any], name: str) -> torch.nn.Module:
        from transformers.models.deprecated.transfo_xl import TransfoXLConfig, TransfoXLLMHeadModel

        repair_type_as()
        return TransfoXLLMHeadModel(TransfoXLConfig(**shape))

    def fresh_state(self, batch_size: int) -> Any:
        # zero vectors, which it attends to
        return self.model.transformer.init_mems(batch_size)

    def fill(self, batch_size: int) -> None:
        # what it holds makes no difference to its speed, and reading takes minutes
        self.state = [torch.randn_like(states) for states in self.fresh_state(batch_size)]
        self.batch_size = batch_size

    def read(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        output = self.model(ids, mems=self.state, labels=targets) if targets is not None else self.body(ids)
        self.state = output.mems
        return output

    def body(self, ids: torch.Tensor) -> Any:
        return self.model.transformer(ids, mems=self.state)

    def continue_greedily(self, ids: torch.Tensor, num_tokens: int) -> None:
        for _ in range(num_tokens):
            # the scores of the last token only, as its own former `generate` asked for
            output = self.body(ids)
            self.state = output.mems
            hidden = output.last_hidden_state[:, -1:]
            ids = self.model.crit(hidden.flatten(0, 1)).argmax(-1, keepdim=True)

    def score_hypotheses(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        mems = [states.expand(-1, len(ids), -1) for states in self.state]
        return self.model(ids, mems=mems, labels=targets)


class Gpt2(Model):
    def build(self, shape: dict[str, Any], name: str) -> torch.nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=GPT2_VOCABULARY[name],
            n_layer=shape["n_layer"],
            n_embd=shape["d_model"],
            n_head=shape["n_head"],
            n_inner=shape["d_inner"],
            n_positions=32000 if name == "small" else 2048,
            bos_token_id=0,
            eos_token_id=0,
        )
        if self.attention:
            config._attn_implementation = self.attention
        return GPT2LMHeadModel(config)

    def fresh_state(self, batch_size: int) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def cache(self) -> dict[str, Any]:
        return {"cache" if "cache" in CACHE_NAMES else "past_key_values": self.state}

    def read(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        if targets is None:
            return self.model.transformer(ids, **self.cache())
        logits = self.model(ids, **self.cache()).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        # back to where it was, so that the next segment has as much behind it
        self.state.crop(-ids.shape[1])
        return loss

    def continue_greedily(self, ids: torch.Tensor, num_tokens: int) -> None:
        # it takes the whole text, of which it skips what its cache has read
        past = self.state.get_seq_length()
        text = torch.cat([ids.new_ones(ids.shape[0], past), ids], dim=1)
        plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        cache = self.cache()
        self.model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=num_tokens, **plain, **cache)
        if past:
            self.state.crop(past - self.state.get_seq_length())

    def score_hypotheses(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        before = self.state
        self.state = copy.deepcopy(before)
        self.state.batch_repeat_interleave(len(ids))
        logits = self.model(ids, **self.cache()).logits
        self.state = before
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def cache_names() -> set[str]:
    """Fields of the library's outputs: the cache was renamed."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return set(CausalLMOutputWithPast.__dataclass_fields__)


CACHE_NAMES = cache_names()
CONTESTANTS: dict[str, type[Model]] = {"ours": Ours, "legacy": Legacy, "gpt2": Gpt2}


def main() -> None:
    name, device, threads, attention = [*sys.argv[1:], ""][:4]
    serve(CONTESTANTS[name](device, int(threads), attention or None).tasks())


if __name__ == "__main__":
    main()
