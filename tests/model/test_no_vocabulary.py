"""R20: models that read vectors only have no table, and every parameter of theirs gets a gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModel

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLModel
from tests.helpers import assert_close
from tests.model.tiny_models import tiny_config, tiny_model

NONE = {"vocab_size": 0, "cutoffs": []}
STEPS = 10


def vectors(batch_size: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch_size, length, tiny_config().d_model, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("model_class", [TransfoXLModel, TransfoXLForSequenceClassification])
def test_a_model_without_vocabulary_is_the_model_with_one_on_vectors(model_class: Any) -> None:
    with_table = tiny_model(model_class, cutoffs=[], div_val=1)
    without = model_class(tiny_config(div_val=1, **NONE)).eval()
    weights = {name: weight for name, weight in with_table.state_dict().items() if "word_emb" not in name}
    assert without.load_state_dict(weights) and len(weights) < len(with_table.state_dict())
    with torch.no_grad():
        for features in (vectors(2, 5), vectors(1, 3)):
            expected = with_table(inputs_embeds=features)[0]
            assert torch.equal(without(inputs_embeds=features)[0], expected)


def test_every_parameter_gets_a_gradient() -> None:
    model = tiny_model(TransfoXLModel, **NONE).train()
    model(inputs_embeds=vectors(2, 6)).last_hidden_state.square().sum().backward()
    assert not [name for name, weight in model.named_parameters() if weight.grad is None]


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model = tiny_model(TransfoXLModel, **NONE)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    features, memory = vectors(2, 5), loaded.init_memory(2)
    with torch.no_grad():
        pieces = [loaded(inputs_embeds=features[:, part], cache=memory)[0] for part in (slice(0, 2), slice(2, 5))]
        expected = model(inputs_embeds=features, cache=model.init_memory(2))[0]
    if model.config.same_length:
        assert_close("states", torch.cat(pieces, dim=1), expected, 1e-5)
    assert loaded.get_input_embeddings() is None


def test_what_needs_a_vocabulary_is_refused() -> None:
    model = tiny_model(TransfoXLModel, **NONE)
    with pytest.raises(ValueError, match="`input_ids` must be None with `vocab_size=0`, but is given"):
        model(torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="`resize_token_embeddings` needs a vocabulary"):
        model.resize_token_embeddings(4)
    with pytest.raises(ValueError, match="`vocab_size` must be at least 1 for a language model, but is 0"):
        TransfoXLForCausalLM(tiny_config(**NONE))
    with pytest.raises(ValueError, match=r"`cutoffs` must be \[\] with `vocab_size=0`"):
        TransfoXLConfig(vocab_size=0, cutoffs=[5])
    with pytest.raises(ValueError, match="`vocab_size` must be at least 0, but is -1"):
        TransfoXLConfig(vocab_size=-1, cutoffs=[])


def train(rank: int, num_processes: int, folder: str) -> None:
    """Ten steps on the rows of this process; DDP finds no unused parameters by itself."""
    torch.set_num_threads(1)
    model: Any = tiny_model(TransfoXLModel, dropout=0.0, dropatt=0.0, **NONE).train()
    if num_processes > 1:
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_processes)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    memory = getattr(model, "module", model).init_memory(4 // num_processes)
    for step in range(STEPS):
        features = vectors(4, 5, seed=step)[rank::num_processes]
        model(inputs_embeds=features, cache=memory).last_hidden_state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save(getattr(model, "module", model).state_dict(), f"{folder}/{num_processes}.pt")
    if num_processes > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.full
def test_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    train(0, 1, str(tmp_path))
    multiprocessing.spawn(train, args=(2, str(tmp_path)), nprocs=2)
    alone, together = (torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in (1, 2))
    for name, weight in alone.items():
        assert_close(name, together[name], weight, 1e-5)
