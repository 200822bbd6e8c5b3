"""The models that `training.py` sets side by side, each in a process of its own: one that answers tasks.

- `ours`: `hf_txl` with a `TransfoXLMemory`;
- `legacy`: `TransfoXLLMHeadModel` of transformers 4.57.6, its one broken call repaired;
- `original`: `MemTransformerLM` of the paper's PyTorch code, whose masks are made boolean, as PyTorch now wants them.

All train the same shape on random tokens with the same optimizer and carry their memory from step to step.
Run as `python training_contestants.py NAME [FOLDER]`; see `harness.Contestant`.
"""

import contextlib
import sys
import time
from typing import Any

import torch
from contestants import repair_type_as
from harness import peak_memory, serve

WT103: dict[str, Any] = {"vocab_size": 267735, "cutoffs": [20000, 40000, 200000], "div_val": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "wt103-base": {
        **WT103,
        **{"n_layer": 16, "d_model": 410, "d_embed": 410, "n_head": 10, "d_head": 41, "d_inner": 2100},
        **{"mem_len": 150, "clamp_len": -1, "same_length": False, "dropout": 0.1, "dropatt": 0.0, "untie_r": False},
    },
    "enwik8-base": {
        **{"vocab_size": 204, "cutoffs": [], "div_val": 1},
        **{"n_layer": 12, "d_model": 512, "d_embed": 512, "n_head": 8, "d_head": 64, "d_inner": 2048},
        **{"mem_len": 512, "clamp_len": -1, "same_length": False, "dropout": 0.1, "dropatt": 0.0, "untie_r": False},
    },
}


class Model:
    """What every contestant can do."""

    def __init__(self, threads: int):
        torch.set_num_threads(threads)

    def tasks(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("load", "step", "memory_of_step", "memory_of_loss")}

    # --- what differs

    def build(self, shape: dict[str, Any]) -> torch.nn.Module:
        raise NotImplementedError

    def start(self, batch_size: int) -> Any:
        """The memory before the first segment."""
        raise NotImplementedError

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of a segment; the memory advances."""
        raise NotImplementedError

    def softmax_loss(self, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss from the last layer's output on."""
        raise NotImplementedError

    # --- what is measured

    def load(self, shape: str, batch_size: int, bf16: bool = False, compiled: bool = False) -> int:
        """Build a model; the number of its parameters."""
        torch.manual_seed(0)
        self.model: Any = None
        self.shape, self.batch_size, self.bf16 = SHAPES[shape], batch_size, bf16
        self.model = self.build(self.shape).train()
        self.call = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2.5e-4, fused=True)
        self.state = self.start(batch_size)
        return sum(parameter.numel() for parameter in self.model.parameters())

    def segment(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens as a text has them: most are frequent, some are in each cluster."""
        length = self.shape["mem_len"]
        uniform = torch.rand(self.batch_size, length + 1)
        ids = (self.shape["vocab_size"] ** uniform - 1).long()
        return ids[:, :-1], ids[:, 1:]

    def precision(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def forward_and_backward(self) -> None:
        ids, targets = self.segment()
        with self.precision():
            loss = self.loss(ids, targets)
        loss.backward()

    def step(self) -> dict[str, float]:
        """Seconds of forward and backward, and of the whole step with clipping and Adam."""
        started = time.perf_counter()
        self.forward_and_backward()
        passed = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"passes": passed - started, "step": time.perf_counter() - started}

    def memory_of_step(self) -> int:
        """Bytes that forward and backward need above weights, gradients and a full memory."""
        for _ in range(3):
            self.forward_and_backward()
        return self.peak_above(self.forward_and_backward)

    def memory_of_loss(self, num_tokens: int) -> int:
        """Bytes that the loss of so many tokens and its gradient need above weights and gradients."""
        hidden_states = torch.randn(1, num_tokens, self.shape["d_model"], requires_grad=True)
        targets = (self.shape["vocab_size"] ** torch.rand(1, num_tokens) - 1).long()

        def run() -> None:
            self.softmax_loss(hidden_states, targets).backward()

        run()
        return self.peak_above(run)

    def peak_above(self, run: Any) -> int:
        """What a run needs beyond what was there before and the gradients that it makes."""
        self.model.zero_grad(set_to_none=True)
        peak_memory(restart=True)
        before = peak_memory()
        run()
        gradients = sum(parameter.grad.nbytes for parameter in self.model.parameters() if parameter.grad is not None)
        return peak_memory() - before - gradients


class Ours(Model):
    def build(self, shape: dict[str, Any]) -> torch.nn.Module:
        from hf_txl import TransfoXLConfig, TransfoXLForCausalLM

        return TransfoXLForCausalLM(TransfoXLConfig(**shape))

    def start(self, batch_size: int) -> Any:
        return self.model.init_memory(batch_size)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.call(ids, cache=self.state, shift_labels=targets).loss

    def softmax_loss(self, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.crit(hidden_states, targets).mean()


class Legacy(Model):
    def build(self, shape: dict[str, Any]) -> torch.nn.Module:
        from transformers.models.deprecated.transfo_xl import TransfoXLConfig, TransfoXLLMHeadModel

        repair_type_as()
        return TransfoXLLMHeadModel(TransfoXLConfig(**shape))

    def start(self, batch_size: int) -> Any:
        return self.model.transformer.init_mems(batch_size)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # it takes the tokens themselves and leaves the last one out
        output = self.call(ids, mems=self.state, labels=ids)
        self.state = output.mems
        return output.loss

    def softmax_loss(self, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.crit(hidden_states, targets).mean()


class Original(Model):
    def __init__(self, threads: int):
        super().__init__(threads)
        sys.path[:0] = [f"{sys.argv[3]}/pytorch", f"{sys.argv[3]}/pytorch/utils"]
        torch.Tensor.byte = torch.Tensor.bool  # type: ignore[method-assign]
        # read by its softmax, which has a path of its own for versions up to 9
        torch.version.cuda = torch.version.cuda or "12.0"

    def build(self, shape: dict[str, Any]) -> torch.nn.Module:
        from mem_transformer import MemTransformerLM

        names = {"n_layer", "n_head", "d_model", "d_head", "d_inner", "dropout", "dropatt", "d_embed", "div_val"}
        settings = {name: shape[name] for name in names}
        model = MemTransformerLM(
            shape["vocab_size"],
            **settings,
            tie_weight=True,
            cutoffs=list(shape["cutoffs"]),
            tie_projs=[False] + [True] * len(shape["cutoffs"]),
            tgt_len=shape["mem_len"],
            ext_len=0,
            mem_len=shape["mem_len"],
        )
        # the script initialises what the class leaves as it was allocated
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.02) if parameter.dim() > 1 else None
        return model

    def start(self, batch_size: int) -> Any:
        return ()

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss, *self.state = self.call(ids.t().contiguous(), targets.t().contiguous(), *self.state)
        return loss.mean()

    def softmax_loss(self, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.crit(hidden_states.flatten(0, 1), targets.flatten()).mean()


CONTESTANTS: dict[str, type[Model]] = {"ours": Ours, "legacy": Legacy, "original": Original}


if __name__ == "__main__":
    serve(CONTESTANTS[sys.argv[1]](int(sys.argv[2])).tasks())
