"""Adding and removing words: every table, bias, cutoff and size that knows the vocabulary goes along."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_txl import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLModel
from tests.helpers import assert_close
from tests.t0 import FLOAT32, LARGE_WEIGHTS, make_model, random_ids

VOCABULARIES = [
    pytest.param({}, id="T0"),
    pytest.param({"tie_word_embeddings": False, "proj_share_all_but_first": False}, id="untied"),
    pytest.param({"cutoffs": [], "div_val": 1}, id="plain"),
    pytest.param({"cutoffs": [], "div_val": 1, "d_embed": 16, "tie_word_embeddings": False}, id="plain, untied"),
    pytest.param({"div_val": 1, "d_embed": 16}, id="clusters of equal width"),
]
every_vocabulary = pytest.mark.parametrize("fields", VOCABULARIES)
every_class = pytest.mark.parametrize(
    "model_class", [TransfoXLForCausalLM, TransfoXLModel, TransfoXLForSequenceClassification]
)


def make(model_class: Any = TransfoXLForCausalLM, **fields: Any) -> Any:
    model = make_model(model_class, **{**LARGE_WEIGHTS, **fields})
    if model_class is TransfoXLForCausalLM:
        with torch.no_grad():
            for layer in model.crit.out_layers:
                layer.bias.normal_()
    return model


@torch.no_grad()
def vectors(model: Any, size: int) -> torch.Tensor:
    """What each of the first `size` words looks like to the first layer."""
    return model.get_input_embeddings()(torch.arange(size)[None])[0]


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.log_softmax(-1)


def assert_sizes_agree(model: Any, size: int) -> None:
    """C34: embedding, output table, bias, cutoffs and configuration."""
    config, embedding = model.config, model.embeddings
    starts = [0, *config.cutoffs] if config.div_val > 1 else [0]
    sizes = [end - start for start, end in zip(starts, [*starts[1:], size], strict=True)]
    assert config.vocab_size == size
    assert [table.weight.shape[0] for table in embedding.emb_layers] == sizes
    assert [table.num_embeddings for table in embedding.emb_layers] == sizes
    if hasattr(model, "crit"):
        layers = model.crit.out_layers
        assert [layer.weight.shape[0] for layer in layers] == sizes
        assert [layer.bias.shape[0] for layer in layers] == sizes
        assert [layer.out_features for layer in layers] == sizes
        tied = [layer.weight is table.weight for layer, table in zip(layers, embedding.emb_layers, strict=True)]
        assert tied == [config.tie_word_embeddings] * len(sizes)
    # every word can be read, and none beyond
    output = model.base_model(torch.arange(size)[None])
    assert output.last_hidden_state.shape == (1, size, 32)
    if hasattr(model, "crit"):
        assert model.crit.log_prob(output.last_hidden_state).shape == (1, size, size)
    with pytest.raises(ValueError, match=f"`input_ids` must be between 0 and {size - 1} "):
        model(torch.full((1, 1), size))


@every_vocabulary
@pytest.mark.parametrize("size", [100, 103, 200])
def test_added_tokens_fit_everywhere_and_leave_old_ones_alone(fields: dict[str, Any], size: int) -> None:
    """C34"""
    model = make(**fields)
    ids = random_ids(2, 7)
    old_vectors, old = vectors(model, 99), log_probabilities(model, ids)
    embedding = model.resize_token_embeddings(size)
    assert embedding is model.get_input_embeddings()
    assert model.config.cutoffs == make(**fields).config.cutoffs
    assert_sizes_agree(model, size)
    assert torch.equal(vectors(model, 99), old_vectors)

    new = log_probabilities(model, ids)
    assert new.shape == (2, 7, size)
    assert_close("sum of probabilities", new.exp().sum(-1), torch.ones(2, 7), 1e-5)
    # words of other buckets are as likely as before, and those of the last one in the same proportion to each other
    start = model.config.cutoffs[-1] if model.config.cutoffs else 0
    assert_close("other buckets", new[..., :start], old[..., :start], **FLOAT32)
    shares = [scores[..., start:99].log_softmax(-1) for scores in (new, old)]
    assert_close("last bucket", shares[0], shares[1], **FLOAT32)


@every_vocabulary
def test_added_tokens_are_scored_and_learn(fields: dict[str, Any]) -> None:
    """C34: as inputs and as targets; losses agree with the logits."""
    model = make(**fields)
    model.resize_token_embeddings(103)
    ids = torch.tensor([[99, 102, 100, 60, 101, 99, 3]])
    output = model(ids, labels=ids)
    scores = output.logits.log_softmax(-1)
    expected = -scores[0, range(6), ids[0, 1:]]
    assert_close("losses", output.losses[0, :6], expected, **FLOAT32)
    output.loss.backward()
    embedding, layer = model.embeddings.emb_layers[-1], model.crit.out_layers[-1]
    for name, gradient in (("input", embedding.weight.grad), ("output", layer.weight.grad), ("bias", layer.bias.grad)):
        assert (gradient[-4:] != 0).flatten(1).any(1).all() if gradient.dim() > 1 else (gradient[-4:] != 0).all(), name


@every_vocabulary
def test_resized_models_survive_saving_and_loading(fields: dict[str, Any], tmp_path: Path) -> None:
    """C34: with the sizes in `config.json`, ties included."""
    model = make(**fields)
    model.resize_token_embeddings(103)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["vocab_size"] == 103
    loaded, report = TransfoXLForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert_sizes_agree(loaded, 103)
    ids = random_ids(2, 7, vocab_size=103)
    assert_close("losses of the loaded model", loaded(ids, labels=ids).losses, model(ids, labels=ids).losses, 1e-5)


@every_class
def test_every_model_class_can_be_resized(model_class: Any, tmp_path: Path) -> None:
    """C34: a classifier gets its pad token this way."""
    model = make(model_class)
    old = vectors(model, 99)
    model.resize_token_embeddings(103)
    assert_sizes_agree(model, 103)
    assert torch.equal(vectors(model, 99), old)
    model.save_pretrained(tmp_path)
    assert_sizes_agree(model_class.from_pretrained(tmp_path), 103)


@every_vocabulary
def test_removed_tokens_are_the_last_ones(fields: dict[str, Any]) -> None:
    model = make(**fields)
    ids = random_ids(2, 7, vocab_size=85)
    old_vectors, old = vectors(model, 85), log_probabilities(model, ids)
    model.resize_token_embeddings(85)
    assert_sizes_agree(model, 85)
    assert torch.equal(vectors(model, 85), old_vectors)
    new = log_probabilities(model, ids)
    assert_close("sum of probabilities", new.exp().sum(-1), torch.ones(2, 7), 1e-5)
    start = model.config.cutoffs[-1] if model.config.cutoffs else 0
    assert_close("other buckets", new[..., :start], old[..., :start], **FLOAT32)


def test_growing_and_shrinking_again_changes_nothing() -> None:
    model = make()
    ids = random_ids(2, 7)
    expected = log_probabilities(model, ids)
    model.resize_token_embeddings(140)
    model.resize_token_embeddings(99)
    assert_close("log-probabilities", log_probabilities(model, ids), expected, 1e-5)


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({}, 99),
        ({"new_num_tokens": 99}, 99),
        ({"pad_to_multiple_of": 8}, 104),
        ({"new_num_tokens": 101, "pad_to_multiple_of": 8}, 104),
        ({"new_num_tokens": 104, "pad_to_multiple_of": 8}, 104),
        ({"new_num_tokens": 82, "pad_to_multiple_of": 5}, 85),
    ],
)
def test_sizes_can_be_rounded_up(arguments: dict[str, int], size: int) -> None:
    model = make()
    model.resize_token_embeddings(**arguments)
    assert_sizes_agree(model, size)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"new_num_tokens": 99, "pad_to_multiple_of": 1.3}, "pad_to_multiple_of"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"pad_to_multiple_of": -8}, "pad_to_multiple_of"),
        ({"new_num_tokens": 99.5}, "new_num_tokens"),
        ({"new_num_tokens": "99", "pad_to_multiple_of": 8}, "new_num_tokens"),
    ],
)
def test_a_size_that_is_no_whole_number_is_refused_by_its_name(arguments: dict[str, Any], name: str) -> None:
    """R22"""
    model = make()
    with pytest.raises(ValueError, match=f"`{name}` must be .*but is '?{arguments[name]}"):
        model.resize_token_embeddings(**arguments)
    assert_sizes_agree(model, 99)


@pytest.mark.parametrize("size", [80, 79, 10, 1, 0, -3])
@every_class
def test_a_size_that_would_empty_a_bucket_is_refused(model_class: Any, size: int) -> None:
    """The last cutoff is 80; nothing is changed."""
    model = make(model_class)
    with pytest.raises(ValueError, match=rf"`new_num_tokens` must be above the last cutoff \(80\), but is {size}"):
        model.resize_token_embeddings(size)
    assert_sizes_agree(model, 99)


@pytest.mark.parametrize("size", [0, -3])
def test_a_vocabulary_keeps_at_least_one_word(size: int) -> None:
    model = make(cutoffs=[], div_val=1)
    with pytest.raises(ValueError, match=f"`new_num_tokens` must be .* but is {size}"):
        model.resize_token_embeddings(size)
    assert_sizes_agree(model, 99)


@every_vocabulary
def test_new_tokens_start_at_the_mean_of_their_bucket(fields: dict[str, Any]) -> None:
    """Embedding, output weight and bias."""
    model = make(**fields)
    config = model.config
    # where the words of the last bucket begin in the last table
    first = 0 if config.div_val > 1 or not config.cutoffs else config.cutoffs[-1]
    model.resize_token_embeddings(103)
    layer = model.crit.out_layers[-1]
    for weight in (model.embeddings.emb_layers[-1].weight, layer.weight, layer.bias):
        expected = weight[first:-4].mean(dim=0)
        for new in weight[-4:]:
            assert_close("new word", new, expected, 1e-6)


def test_new_tokens_can_start_at_random() -> None:
    model = make(init_std=0.3)
    model.resize_token_embeddings(199, mean_resizing=False)
    new = model.embeddings.emb_layers[-1].weight[-100:].detach()
    assert 0.2 < new.std() < 0.4
    assert new.unique(dim=0).shape == new.shape
    assert (model.crit.out_layers[-1].bias[-100:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_and_frozen_weights_stay(dtype: torch.dtype) -> None:
    model = make().to(dtype).requires_grad_(False)
    model.resize_token_embeddings(103)
    model.resize_token_embeddings(90)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype and not parameter.requires_grad, name


@torch.no_grad()
def test_a_memory_goes_on_after_resizing() -> None:
    """It holds no words."""
    model = make()
    memory = model.init_memory(2)
    model(random_ids(2, 5), cache=memory)
    ids = random_ids(2, 4, seed=2)
    expected = model(ids, cache=memory.select([0, 1])).logits.log_softmax(-1)[..., :80]
    model.resize_token_embeddings(103)
    assert_close("logits", model(ids, cache=memory).logits.log_softmax(-1)[..., :80], expected, **FLOAT32)
