"""peft: a merged model computes what the adapted one did, and prompts stand before the text as if they were read."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import DynamicCache

from hf_txl import TransfoXLForCausalLM
from tests.helpers import assert_close
from tests.t0 import LARGE_WEIGHTS, make_model, random_ids

PLAIN = {"cutoffs": [], "div_val": 1}
CLUSTERS: dict[str, Any] = {}
ONE_TABLE = {"div_val": 1}
every_vocabulary = pytest.mark.parametrize(
    "fields",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(ONE_TABLE, id="one table, clusters"),
        pytest.param(CLUSTERS, id="clusters"),
    ],
)
# logits of order 10 after two programs with other products
MERGED = {"atol": 1e-4, "rtol": 1e-5}
TASK = {"task_type": "CAUSAL_LM"}
# each of the first tokens twice and more, and every bucket
IDS = torch.tensor([[1, 2, 7, 55, 3, 1, 90, 2, 30], [7, 7, 1, 60, 2, 85, 9, 4, 1]])

ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(target_modules="all-linear", **TASK),
    "dora": lambda: peft.LoraConfig(target_modules="all-linear", use_dora=True, **TASK),
    "lora of head and embedding": lambda: peft.LoraConfig(target_modules=r".*(emb|out)_layers\.\d", **TASK),
    "lora of the head": lambda: peft.LoraConfig(target_modules=r".*out_layers\.0", **TASK),
    "lora of the embedding": lambda: peft.LoraConfig(target_modules=r".*emb_layers\.0", **TASK),
    "loha": lambda: peft.LoHaConfig(target_modules="all-linear", **TASK),
    "ia3": lambda: peft.IA3Config(
        target_modules=["qkv_net", "o_net", "CoreNet.0"], feedforward_modules=["CoreNet.0"], **TASK
    ),
    "modules_to_save head": lambda: peft.LoraConfig(target_modules=["o_net"], modules_to_save=["crit"], **TASK),
    "modules_to_save embedding": lambda: peft.LoraConfig(
        target_modules=["o_net"], modules_to_save=["word_emb"], **TASK
    ),
    "trainable tokens": lambda: peft.LoraConfig(
        target_modules=["o_net"], trainable_token_indices={"emb_layers.0": [1, 2, 7]}, **TASK
    ),
}


def adapted(config: Any, **fields: Any) -> Any:
    with warnings.catch_warnings():
        # of peft, on tied tables: they are untied here
        warnings.simplefilter("ignore")
        return peft.get_peft_model(make_model(**{**LARGE_WEIGHTS, **fields}), config).eval()


def train(model: Any) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(4):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@every_vocabulary
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.filterwarnings("ignore")
def test_merged_models_compute_what_adapted_ones_did(adapter: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """R03: logits and loss, after the merge and after saving; the loss is that of the logits."""
    model = adapted(ADAPTERS[adapter](), **fields)
    before = model(input_ids=IDS).logits
    train(model)
    output = model(input_ids=IDS, labels=IDS)
    assert (output.logits - before).abs().max() > 0.1
    scores = output.logits[:, :-1].log_softmax(-1)
    assert_close("loss", output.loss, -scores.gather(-1, IDS[:, 1:, None]).mean(), **MERGED)

    merged = model.merge_and_unload()
    assert type(merged) is TransfoXLForCausalLM
    assert_close("merged", merged(IDS).logits, output.logits, **MERGED)
    assert_close("merged loss", merged(IDS, labels=IDS).loss, output.loss, **MERGED)
    merged.tie_weights()
    assert_close("tied again", merged(IDS).logits, output.logits, **MERGED)
    merged.save_pretrained(tmp_path)
    loaded = TransfoXLForCausalLM.from_pretrained(tmp_path)
    assert_close("loaded", loaded(IDS).logits, output.logits, **MERGED)


def test_all_linear_leaves_one_head_out() -> None:
    """R03: as for other models; its table stays that of the embedding."""
    config = peft.LoraConfig(target_modules="all-linear", **TASK)
    merged = adapted(config, **PLAIN).merge_and_unload()
    assert not any("crit" in name for name in config.target_modules)
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight


def test_clusters_can_be_left_out_by_a_pattern() -> None:
    """R03: peft leaves out one module by itself, and here the head has several."""
    config = peft.LoraConfig(target_modules="all-linear", exclude_modules=r"crit\..*", **TASK)
    model = adapted(config)
    assert not any("crit" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    base = model.unload()
    for layer, table in zip(base.crit.out_layers, base.embeddings.emb_layers, strict=True):
        assert layer.weight is table.weight


def test_trainable_tokens_of_one_table_are_those_of_the_head_too() -> None:
    """Only their rows change, on both sides, and clusters ask for the name of a table."""
    model = adapted(peft.LoraConfig(target_modules=["o_net"], trainable_token_indices=[1, 2, 7], **TASK), **PLAIN)
    old = make_model(**{**LARGE_WEIGHTS, **PLAIN}).get_input_embeddings().weight
    train(model)
    merged = model.merge_and_unload()
    for module in (merged.get_input_embeddings(), merged.get_output_embeddings()):
        changed = (module.weight != old).any(-1).nonzero().flatten().tolist()
        assert changed == [1, 2, 7]
    assert_close("tables", merged.get_input_embeddings().weight, merged.get_output_embeddings().weight, 0)
    with pytest.raises(AttributeError, match="no single `weight`.*trainable_token_indices={'emb_layers.0'"):
        adapted(peft.LoraConfig(target_modules=["o_net"], trainable_token_indices=[1], **TASK))


PROMPTS: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **TASK),
}


@torch.no_grad()
def assert_greedy(new: torch.Tensor, model: Any, embeddings: torch.Tensor) -> None:
    """Each new token has the best score, or one that rounding cannot tell from it, when everything is read again."""
    for token in new.split(1, dim=1):
        scores = model(inputs_embeds=embeddings).logits[:, -1]
        assert_close("best scores", scores.gather(-1, token)[:, 0], scores.max(-1).values, 1e-5)
        embeddings = torch.cat([embeddings, model.get_input_embeddings()(token)], dim=1)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(ONE_TABLE, id="one table, clusters"),
        pytest.param({"cutoffs": [], "div_val": 1, "d_embed": 16}, id="projected"),
        # another matrix has as many rows as there are words
        pytest.param({"d_inner": 99}, id="clusters"),
    ],
)
@pytest.mark.parametrize("method", PROMPTS)
def test_prompts_stand_before_the_vectors_of_the_text(method: str, fields: dict[str, Any]) -> None:
    """R04: in one call, in training and in generation."""
    # so long a memory that generation, by the window rule, forgets nothing
    model = adapted(PROMPTS[method](), **{**fields, "mem_len": 30, "eos_token_id": None})
    base = model.get_base_model()
    embeddings = torch.cat([model.get_prompt(2), base.get_input_embeddings()(IDS)], dim=1)
    expected = base(inputs_embeds=embeddings).logits
    output = model(input_ids=IDS, labels=IDS)
    assert_close("logits", output.logits, expected, 1e-5)
    # the first token of the text follows the prompt
    scores = expected[:, 2:-1].log_softmax(-1)
    assert_close("loss", output.loss, -scores.gather(-1, IDS[..., None]).mean(), **MERGED)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.prompt_encoder.parameters())
    new = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)
    assert new.shape[1] == IDS.shape[1] + 4
    assert_greedy(new[:, IDS.shape[1] :], base, embeddings)


@every_vocabulary
def test_prefixes_act_as_tokens_that_were_read_before(fields: dict[str, Any]) -> None:
    """R04: with the keys and values of real tokens, as if these stood before the text."""
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, **TASK)
    model = adapted(config, **{**fields, "mem_len": 30, "eos_token_id": None})
    base = model.get_base_model()
    prefix = random_ids(1, 3, seed=5)
    cache = DynamicCache(config=base.config)
    with torch.no_grad():
        base(prefix, past_key_values=cache)
        # one tensor of (heads, tokens, width) for the keys and one for the values of each layer
        states = torch.stack([states[0] for layer in cache.layers for states in (layer.keys, layer.values)])
        model.prompt_encoder["default"].embedding.weight.copy_(states.permute(2, 0, 1, 3).reshape(3, -1))
    text = torch.cat([prefix.expand(2, -1), IDS], dim=1)
    expected = base(text).logits[:, 3:]
    output = model(input_ids=IDS, labels=IDS)
    assert_close("logits", output.logits, expected, **MERGED)
    output.loss.backward()
    assert model.prompt_encoder["default"].embedding.weight.grad.any()
    new = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False)
    assert new.shape[1] == IDS.shape[1] + 4
    assert_greedy(new[:, IDS.shape[1] :], base, base.get_input_embeddings()(text))


def test_prompts_begin_with_rows_of_one_table_alone() -> None:
    """R04: scaled as the text is; with clusters there is no such table, and the message says what to do."""
    config = {"num_virtual_tokens": 3, "prompt_tuning_init": "SAMPLE_VOCAB", **TASK}
    model = adapted(peft.PromptTuningConfig(**config), **PLAIN)
    vectors = model.get_base_model().get_input_embeddings()(torch.arange(99))
    distances = (model.get_prompt(1)[0][:, None] - vectors).abs().amax(-1).amin(-1)
    assert_close("prompt", distances, torch.zeros(3), 1e-6)
    with pytest.raises(AttributeError, match="no single `weight`.*prompt_tuning_init='RANDOM'"):
        adapted(peft.PromptTuningConfig(**config))


@pytest.mark.parametrize("batch_size", [2, 8, 9, 18])
def test_adapters_of_positions_cannot_differ_by_row(batch_size: int) -> None:
    """peft would apply the adapter of row `i` to distance `i`: without a word where there are as many of both."""
    config = peft.LoraConfig(target_modules=["qkv_net", "r_net"], init_lora_weights=False, **TASK)
    model = adapted(config)
    model.add_adapter("other", config)
    ids = random_ids(batch_size, 9)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="`adapter_names` should be the same as the number of inputs"),
    ):
        model(ids, adapter_names=(["default", "other"] * batch_size)[:batch_size], use_cache=False)
