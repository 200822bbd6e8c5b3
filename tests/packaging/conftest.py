"""A stand-in for the model that pages and notebooks load, as long as the package has none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import set_seed

import hf_txl
from hf_txl.demo import demo_text
from hf_txl.tokenization_transfo_xl import build_vocabulary


def save_stand_in(folder: Path) -> None:
    """A word-level model with random weights, and its tokenizer."""
    set_seed(0)
    symbols = build_vocabulary([demo_text()], "moses", max_size=4000)
    tokenizer = hf_txl.TransfoXLTokenizer.from_vocabulary(symbols, "moses")
    config = hf_txl.TransfoXLConfig(
        vocab_size=len(tokenizer), cutoffs=[1000], div_val=2, d_model=64, n_head=4, n_layer=2, mem_len=64, clamp_len=-1
    )
    hf_txl.TransfoXLForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(autouse=True, scope="session")
def example_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if hasattr(hf_txl, "example_model"):
        yield
        return
    folder = tmp_path_factory.mktemp("example_model")
    save_stand_in(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_txl, "example_model", lambda: folder, raising=False)
        # for the kernels in which the site runs its notebooks
        startup = tmp_path_factory.mktemp("ipython") / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "example_model.py").write_text(f"import hf_txl\n\nhf_txl.example_model = lambda: {str(folder)!r}\n")
        patch.setenv("IPYTHONDIR", str(startup.parents[1]))
        yield
