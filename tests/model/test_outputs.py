"""What comes back: hidden states, attentions, tuples, and embeddings as input."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import GPT2Config, GPT2Model

from hf_txl import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLMemory, TransfoXLModel
from tests.helpers import assert_close
from tests.t0 import FLOAT32, LARGE_WEIGHTS, make_model, random_ids

BACKENDS = ["eager", "sdpa"]


@torch.no_grad()
def test_hidden_states_begin_with_the_embeddings_and_end_with_the_output() -> None:
    """C121: n_layer + 1 tensors."""
    model = make_model(TransfoXLModel)
    ids = random_ids(2, 5)
    output = model(ids, output_hidden_states=True)
    assert [tuple(states.shape) for states in output.hidden_states] == [(2, 5, 32)] * 4
    assert torch.equal(output.hidden_states[0], model.get_input_embeddings()(ids))
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)


@pytest.mark.parametrize("stores", ["hidden_states", "keys_values"])
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_attentions_are_distributions_over_memory_and_the_past_of_the_segment(backend: str, stores: str) -> None:
    """C122: n_layer tensors (batch, heads, queries, memory + queries); a fused backend falls back for this call."""
    model = make_model(**LARGE_WEIGHTS)
    model.set_attn_implementation(backend)
    memory = TransfoXLMemory(model.config, stores=stores)
    model(random_ids(2, 4), cache=memory)
    plain = model(random_ids(2, 5, seed=2), cache=memory.select([0, 1])).logits
    output = model(random_ids(2, 5, seed=2), cache=memory, output_attentions=True)
    assert [tuple(weights.shape) for weights in output.attentions] == [(2, 4, 5, 9)] * 3
    assert_close("logits", output.logits, plain, **FLOAT32)
    for weights in output.attentions:
        assert_close("sums", weights.sum(-1), torch.ones(2, 4, 5), **FLOAT32)
        future = torch.ones(5, 9, dtype=torch.bool).triu(diagonal=5)
        assert (weights[..., future] == 0).all()
        assert (weights[..., ~future] > 0).all()


@torch.no_grad()
def test_embeddings_as_input_equal_their_ids() -> None:
    """C123: scaled exactly once, one step at a time with memory too."""
    model = make_model(**LARGE_WEIGHTS)
    ids = random_ids(2, 7)
    embeddings = model.get_input_embeddings()(ids)
    assert_close("one segment", model(inputs_embeds=embeddings).logits, model(ids).logits, **FLOAT32)
    one, other = TransfoXLMemory(model.config), TransfoXLMemory(model.config)
    for time in range(7):
        actual = model(inputs_embeds=embeddings[:, time : time + 1], cache=one).logits
        assert_close(f"step {time}", actual, model(ids[:, time : time + 1], cache=other).logits, **FLOAT32)


def test_any_features_can_be_read_without_ids() -> None:
    """C123: the gradient reaches them, and the caller's tensor stays as it is."""
    model = make_model(TransfoXLModel)
    features = torch.randn(2, 5, 32, requires_grad=True)
    before = features.detach().clone()
    model(inputs_embeds=features, cache=model.init_memory(2)).last_hidden_state.square().sum().backward()
    assert torch.equal(features.detach(), before)
    assert features.grad is not None and features.grad.abs().min() > 0


@pytest.mark.parametrize("given", [{}, {"input_ids": torch.ones(1, 2).long(), "inputs_embeds": torch.ones(1, 2, 32)}])
def test_exactly_one_kind_of_input_is_taken(given: dict[str, Any]) -> None:
    """C123: both or neither is an error."""
    with pytest.raises(ValueError, match="Exactly one of `input_ids` and `inputs_embeds`"):
        make_model()(**given)


def test_input_is_a_tensor() -> None:
    with pytest.raises(TypeError, match="`input_ids` must be a tensor, but is a list"):
        make_model()([[1, 2, 3]])


@torch.no_grad()
def test_tuples_hold_what_the_output_holds_in_its_order() -> None:
    model = make_model()
    ids = random_ids(2, 5)
    kwargs = {"labels": ids, "output_hidden_states": True, "output_attentions": True, "use_cache": False}
    output, values = model(ids, **kwargs), model(ids, return_dict=False, **kwargs)
    assert len(values) == len(output) == 5
    assert torch.equal(values[0], output.loss) and torch.equal(values[1], output.logits)
    assert all(torch.equal(a, b) for a, b in zip(values[2], output.hidden_states, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values[3], output.attentions, strict=True))
    assert torch.equal(values[4], output.losses)


@torch.no_grad()
def test_a_call_without_a_cache_returns_one_that_goes_on_under_the_window_rule() -> None:
    """In eval mode; none in train mode, where nothing may be kept that costs memory."""
    model = make_model(same_length=True, **LARGE_WEIGHTS)
    ids = random_ids(2, 9)
    first = model(ids[:, :4], use_cache=True)
    second = model(ids[:, 4:], past_key_values=first.to_tuple()[1]).logits
    assert_close("continued", second, model(ids).logits[:, 4:], **FLOAT32)
    model.train()
    assert len(model(ids, use_cache=True).to_tuple()) == 1


# --- hidden states by index


# what GPT-2 of transformers 5.24 gives: `None` in the place of the others; 0 alone is a flag
SELECTED = [
    ([0, 2], [0, 2]),
    ((0, -1), [0, 3]),
    ({3}, [3]),
    ([True], [1]),
    (range(1, 3), [1, 2]),
    (1, [1]),
    (-1, [3]),
    (True, [0, 1, 2, 3]),
]


@pytest.mark.parametrize("model_class", [TransfoXLModel, TransfoXLForCausalLM, TransfoXLForSequenceClassification])
@torch.no_grad()
def test_hidden_states_are_returned_by_index(model_class: Any) -> None:
    """R22: all of them came, whatever was asked for."""
    model = make_model(model_class)
    ids = random_ids(2, 5)
    whole = model(ids, output_hidden_states=True).hidden_states
    for given, taken in SELECTED:
        states = model(ids, output_hidden_states=given).hidden_states
        assert [index for index, value in enumerate(states) if value is not None] == taken, given
        assert len(states) == 4
        assert all(torch.equal(states[index], whole[index]) for index in taken)
    for nothing in (False, 0, [], None):
        assert model(ids, output_hidden_states=nothing).hidden_states is None
    for wrong in ([4], [-5], 4, "all", 1.0, [None]):
        with pytest.raises(ValueError, match="`output_hidden_states` must be True, False or indices from -4 to 3"):
            model(ids, output_hidden_states=wrong)
    for wrong in ([0], "all", 2):
        with pytest.raises(ValueError, match="`output_attentions` must be True or False"):
            model(ids, output_attentions=wrong)


@torch.no_grad()
def test_indices_mean_what_they_mean_to_gpt2() -> None:
    """Before 5.23 the library read them otherwise."""
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("the library's own answer is another one here")
    gpt2 = GPT2Model(GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=99, bos_token_id=0, eos_token_id=0)).eval()
    model = make_model(TransfoXLModel)
    ids = random_ids(2, 5)
    for given, _ in SELECTED:
        ours, theirs = (
            [states is not None for states in each(ids, output_hidden_states=given).hidden_states]
            for each in (model, gpt2)
        )
        assert ours == theirs, given


# --- logits in training


def test_logits_in_training_are_there_on_request() -> None:
    """R16: with labels in train mode they are None, as no loss needs them; `return_logits=True` gives both."""
    model = make_model().train()
    ids = random_ids(2, 7)
    assert model(ids, labels=ids).logits is None
    output = model(ids, labels=ids, return_logits=True)
    expected = torch.nn.functional.nll_loss(output.logits[:, :-1].log_softmax(-1).flatten(0, 1), ids[:, 1:].flatten())
    assert_close("loss", output.loss, expected, **FLOAT32)
