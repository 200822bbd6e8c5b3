"""Input and output embeddings as programs of others read, hook and replace them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer

from hf_txl import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLModel
from tests.ecosystem.test_causal_model import arguments
from tests.helpers import assert_close
from tests.t0 import FLOAT32, LARGE_WEIGHTS, make_model, random_ids

PLAIN = {"cutoffs": [], "div_val": 1}
CLUSTERS: dict[str, Any] = {}
ONE_TABLE = {"div_val": 1}
PROJECTED = {"cutoffs": [], "div_val": 1, "d_embed": 16}
every_vocabulary = pytest.mark.parametrize(
    "fields",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(ONE_TABLE, id="one table, clusters"),
        pytest.param(PROJECTED, id="one table, projected"),
        pytest.param(CLUSTERS, id="clusters"),
    ],
)
every_class = pytest.mark.parametrize(
    "model_class", [TransfoXLModel, TransfoXLForCausalLM, TransfoXLForSequenceClassification]
)


@every_class
@every_vocabulary
def test_inputs_embeds_are_what_the_input_embeddings_return(model_class: Any, fields: dict[str, Any]) -> None:
    """R04: scaled, whatever the tables; and a hook on that module acts."""
    model = make_model(model_class, **{**LARGE_WEIGHTS, **fields})
    ids = random_ids(2, 5)
    embedding = model.get_input_embeddings()
    expected = model(ids)[0]
    assert_close("from ids", model(inputs_embeds=embedding(ids))[0], expected, **FLOAT32)
    handle = embedding.register_forward_hook(lambda module, inputs, output: 0 * output)
    assert (model(ids)[0] - expected).abs().max() > 0.1
    handle.remove()


def test_a_checkpoint_of_one_table_keeps_the_published_name() -> None:
    """R04"""
    model = make_model(**PLAIN)
    assert model.get_input_embeddings() is model.get_submodule("transformer.word_emb.emb_layers.0")
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    ids = random_ids(1, 3)
    expected = model.state_dict()["transformer.word_emb.emb_layers.0.weight"][ids] * 32**0.5
    assert_close("scaled rows", model.get_input_embeddings()(ids), expected, **FLOAT32)


@pytest.mark.parametrize("fields", [PLAIN, ONE_TABLE, PROJECTED])
def test_the_weight_of_one_table_can_be_read(fields: dict[str, Any]) -> None:
    """R22"""
    model = make_model(**fields)
    embedding = model.get_input_embeddings()
    assert embedding.weight is model.get_parameter("transformer.word_emb.emb_layers.0.weight")
    assert embedding.num_embeddings == 99


def test_several_tables_have_no_weight_and_say_so() -> None:
    """R22"""
    embedding = make_model().get_input_embeddings()
    assert embedding.num_embeddings == 99
    with pytest.raises(AttributeError, match="no single `weight`.*has 4 tables.*get_input_embeddings.*input_ids"):
        _ = embedding.weight
    assert getattr(embedding, "weight", None) is None


def test_output_embeddings_are_the_one_matrix_where_there_is_one() -> None:
    """R11: the logits are its output."""
    model = make_model(**{**LARGE_WEIGHTS, **PLAIN})
    ids, head = random_ids(2, 5), model.get_output_embeddings()
    assert type(head) is nn.Linear and head.weight is model.get_input_embeddings().weight
    hidden = model.base_model(ids).last_hidden_state
    assert_close("logits", hidden @ head.weight.T + head.bias, model(ids).logits, **FLOAT32)
    replacement = nn.Linear(32, 99)
    model.set_output_embeddings(replacement)
    assert model.get_output_embeddings() is replacement
    assert_close("replaced", replacement(hidden), model(ids).logits, **FLOAT32)


@pytest.mark.parametrize("fields", [CLUSTERS, ONE_TABLE, PROJECTED])
def test_a_head_of_several_parts_has_no_weight_and_says_so(fields: dict[str, Any]) -> None:
    """R11"""
    model = make_model(**fields)
    assert model.get_output_embeddings() is model.crit
    with pytest.raises(AttributeError, match="not a single matrix.*`Trainer`.*`cutoffs=\\[\\]`"):
        _ = model.get_output_embeddings().weight
    with pytest.raises(TypeError, match="`value` must be an `AdaptiveLogSoftmax`.*is a Linear"):
        model.set_output_embeddings(nn.Linear(32, 99))


@every_class
def test_a_table_that_is_put_in_is_scaled_before_and_after_saving(model_class: Any, tmp_path: Path) -> None:
    """R04: a checkpoint holds the table alone, so a plain embedding must not be read without the scale."""
    model = make_model(model_class, **{**LARGE_WEIGHTS, **PLAIN, "tie_word_embeddings": False})
    ids = random_ids(2, 5)
    table = nn.Embedding(99, 32)
    model.set_input_embeddings(table)
    assert model.get_input_embeddings() is table
    assert_close("scaled", table(ids), table.weight[ids] * 32**0.5, **FLOAT32)
    output = model(ids)[0]
    model.save_pretrained(tmp_path)
    assert_close("loaded", model_class.from_pretrained(tmp_path)(ids)[0], output, **FLOAT32)


@pytest.mark.parametrize("fields", [PLAIN, CLUSTERS])
def test_noise_on_embeddings_acts_in_training_and_is_taken_away(fields: dict[str, Any], tmp_path: Path) -> None:
    """NEFTune: uniform noise of at most alpha / sqrt(length * d_model) on what the first layer reads."""
    model = make_model(**{**LARGE_WEIGHTS, **fields})
    ids = random_ids(3, 7)
    with torch.no_grad():
        clean = model.get_input_embeddings()(ids)
    seen: list[torch.Tensor] = []
    model.transformer.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    trainer = Trainer(
        model,
        arguments(tmp_path, neftune_noise_alpha=5.0, learning_rate=0.0),
        train_dataset=Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()}),
    )
    trainer.train()
    # the largest distance of each row from the text that it is, whatever the order of the rows
    noise = (seen[0][:, None] - clean[None]).abs().flatten(2).amax(-1).amin(-1).max()
    bound = 5.0 / (7 * 32) ** 0.5
    assert 0.9 * bound < noise <= bound * 1.0001
    seen.clear()
    model.train()
    model(ids)
    assert_close("afterwards", seen[0], clean, **FLOAT32)


@pytest.mark.parametrize("model_class", [TransfoXLModel, TransfoXLForSequenceClassification])
def test_models_that_read_vectors_alone_need_no_table(model_class: Any) -> None:
    """R20: a vocabulary of one word costs one row, and nothing reads it."""
    model = make_model(model_class, **{**LARGE_WEIGHTS, **PLAIN, "vocab_size": 1})
    assert sum(parameter.numel() for parameter in model.embeddings.parameters()) == 32
    vectors = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    assert model(inputs_embeds=vectors)[0].isfinite().all()
