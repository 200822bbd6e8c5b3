"""A self-check of the installed transformers, for releases that were not tested.

Past releases have renamed the argument of the cache, built masks differently, overwritten loaded weights and left
buffers uninitialised, all without an error. Under a release of `TESTED` nothing runs. Under any other, a tiny model
generates when this code is imported (about 20 ms), and its weights are loaded before those of the user's first model;
a difference from plain loops raises an error.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.utils import logging

from .outputs_transfo_xl import CACHE_NAME
from .remote_code_transfo_xl import CODE_VERSION

# the lowest and the highest minor release of transformers that was tested
TESTED = (Version("5.18"), Version("5.24"))
SIZES: dict[str, Any] = {
    **{"vocab_size": 7, "cutoffs": [4], "div_val": 2, "d_model": 4, "n_head": 1, "d_head": 4, "d_inner": 4},
    **{"n_layer": 1, "mem_len": 8, "same_length": True, "init_std": 1.0, "proj_init_std": 1.0, "pad_token_id": 0},
}
GREEDY: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LOGITS: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}

Model = Any


def is_tested(version: str) -> bool:
    """Whether a release of transformers is one of the tested minor releases, or between them."""
    release = Version(version).release
    return TESTED[0].release <= release[:2] <= TESTED[1].release


@contextlib.contextmanager
def small_model(model_class: type[Model]) -> Iterator[Model]:
    """A model in float32 on the CPU; random numbers, default dtype and progress bars stay as they were."""
    dtype, shows_progress = torch.get_default_dtype(), logging.is_progress_bar_enabled()
    torch.set_default_dtype(torch.float32)
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.manual_seed(0)
            yield model_class(model_class.config_class(**SIZES)).eval()
    finally:
        torch.set_default_dtype(dtype)
        if shows_progress:
            logging.enable_progress_bar()


def check_cache_is_returned(model: Model) -> None:
    """A call returns a filled cache."""
    cache = getattr(model(torch.tensor([[1, 2, 3]]), use_cache=True), CACHE_NAME, None)
    expect(cache is not None and cache.get_seq_length() == 3, "a model's output does not hold its cache")


def check_memory_is_delivered(model: Model) -> None:
    """Generation advances a memory and continues from it."""
    ids, memory, expected = torch.tensor([[1, 5, 3]]), model.init_memory(1), model.init_memory(1)
    output = model.generate(ids, cache=memory, **GREEDY, **LOGITS)
    logits = [model(step, cache=expected).logits[:, -1] for step in (ids, output.sequences[:, 3:4])]
    expect(memory.stored_length == 4, "`generate` does not deliver the memory to the model")
    expect(are_close(output.logits, logits), "`generate` with a memory gives other numbers than a loop of calls")


def check_mask_is_delivered(model: Model) -> None:
    """In a batch with pads, generation gives the numbers of the text alone."""
    ids, mask = torch.tensor([[0, 0, 1, 5, 3]]), torch.tensor([[0, 0, 1, 1, 1]])
    padded = model.generate(ids, attention_mask=mask, **GREEDY, **LOGITS).logits
    alone = model.generate(ids[:, 2:], attention_mask=mask[:, 2:], **GREEDY, **LOGITS).logits
    expect(are_close(padded, alone), "`generate` does not deliver `attention_mask` to the model")


def check_weights_are_loaded(model: Model) -> None:
    """Loaded weights are those given, and so are the numbers."""
    # copies, since the loaded model may take over what it is given
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=weights).eval()
    same = all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())
    expect(same, "`from_pretrained` changes the weights that it loads")
    ids = torch.tensor([[1, 5, 3]])
    equal = are_close([model(ids).logits], [loaded(ids).logits])
    expect(equal, "a loaded model gives other numbers than the saved one")


AT_IMPORT = (check_cache_is_returned, check_memory_is_delivered, check_mask_is_delivered)
BEFORE_LOADING = (check_weights_are_loaded,)
# checks that need not run again
passed: set[Callable[[Model], None]] = set()


def check_library(model_class: type[Model], checks: tuple[Callable[[Model], None], ...]) -> None:
    """Run checks once, if the installed transformers was not tested.

    Raises:
        ImportError: names what the library does differently, its version and the tested ones.
    """
    if is_tested(transformers.__version__) or passed.issuperset(checks):
        return
    # the checks load models themselves
    passed.update(checks)
    try:
        with small_model(model_class) as model:
            for check in checks:
                check(model)
    except Exception as error:
        passed.difference_update(checks)
        raise ImportError(
            f"transformers must be a release that hf_txl {CODE_VERSION} works with ({TESTED[0]} to {TESTED[1]} are "
            f"tested), but is {transformers.__version__}: {error}"
        ) from error


def are_close(actual: Any, expected: Any) -> bool:
    """Whether tensors are pairwise equal to 1e-4."""
    return all(torch.allclose(a, b, rtol=0, atol=1e-4) for a, b in zip(actual, expected, strict=True))


def expect(is_right: bool, otherwise: str) -> None:
    """Raise an error that says what is wrong."""
    if not is_right:
        raise RuntimeError(f"{otherwise}.")


__all__ = ["AT_IMPORT", "BEFORE_LOADING", "TESTED", "check_library", "is_tested"]
