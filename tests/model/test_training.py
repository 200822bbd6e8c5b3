"""Training: gradients with memory, the library's Trainer, checkpointing, autocast. Report ids are public issues'."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_txl import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLMemory
from hf_txl.reference.transformer_xl import SlowTransfoXL, leaves_of
from tests.helpers import assert_close, cut
from tests.model.tiny_models import STARTS, WINDOWS, random_ids, t0_model, tiny_config, tiny_model

# float32 sums over all positions against float64
GRADIENTS = {"atol": 2e-5, "rtol": 1e-4}
# the same float32 operations in the same order, apart from where they are done again
REPEATED = {"atol": 1e-6, "rtol": 1e-5}
LOSSES = 1e-5


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    without = [name for name, gradient in gradients.items() if gradient is None]
    assert not without, f"no gradient: {without}"
    return gradients


def assert_same_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: Any
) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(f"gradient of {name}", actual[name], gradient, **tolerance)


# ---- gradients -------------------------------------------------------------------------------------------------


def slow_gradients(
    model: Any, ids: torch.Tensor, lengths: list[int]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of consecutive segments, and the gradients of their sum, by the slow reference."""
    leaves = leaves_of(model)
    twin = SlowTransfoXL(model.config, leaves)
    memory = twin.new_memory(len(ids))
    losses = []
    for segment in cut(ids.shape[1] - 1, lengths):
        rows = twin.read(ids[:, segment], memory)
        losses.append(twin.losses(rows, ids[:, 1:][:, segment]))
    sum(segment.sum() for segment in losses).backward()
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach() for name, leaf in leaves.items()
    }
    return [segment.detach() for segment in losses], gradients


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_through_a_memory_equal_the_slow_reference(window: str, start: str) -> None:
    """They reach keys and values of remembered positions, and nothing before them."""
    model = tiny_model(memory_init=start, **WINDOWS[window]).train()
    ids, lengths = random_ids(2, 9), [3, 1, 4]
    expected_losses, expected = slow_gradients(model, ids, lengths)
    memory = TransfoXLMemory(model.config)
    for segment, expected_segment in zip(cut(8, lengths), expected_losses, strict=True):
        output = model(ids[:, segment], cache=memory, shift_labels=ids[:, 1:][:, segment])
        assert_close("losses", output.losses, expected_segment, LOSSES)
        output.losses.sum().backward()
    assert memory.storage == "hidden_states"
    assert_same_gradients(gradients_of(model), expected, **GRADIENTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_lnorm": True},
        {"untie_r": False},
        {"cutoffs": [], "div_val": 1},
        {"d_embed": 12, "div_val": 1},
        {"d_embed": 18, "div_val": 4},
    ],
    ids=["pre_lnorm", "shared biases", "no clusters", "equally wide clusters", "widths that do not divide"],
)
def test_gradients_of_other_layers_and_softmaxes_equal_the_slow_reference(changes: dict[str, Any]) -> None:
    model = tiny_model(memory_init="zeros", clamp_len=3, **changes).train()
    ids, lengths = random_ids(2, 6), [3, 2]
    _, expected = slow_gradients(model, ids, lengths)
    memory = TransfoXLMemory(model.config)
    for segment in cut(5, lengths):
        model(ids[:, segment], cache=memory, shift_labels=ids[:, 1:][:, segment]).losses.sum().backward()
    assert_same_gradients(gradients_of(model), expected, **GRADIENTS)


def test_gradients_of_given_embeddings_equal_the_slow_reference() -> None:
    model = tiny_model().train()
    embeddings = torch.randn(2, 4, 16, requires_grad=True)
    targets = random_ids(2, 4)
    leaf = embeddings.detach().double().requires_grad_(True)
    twin = SlowTransfoXL(model.config, leaves_of(model))
    twin.losses(twin.read(inputs_embeds=leaf), targets).sum().backward()
    model(inputs_embeds=embeddings, shift_labels=targets).losses.sum().backward()
    assert_close("gradient of the embeddings", embeddings.grad, leaf.grad, **GRADIENTS)


@pytest.mark.parametrize("classes", [[0, 1], [0]], ids=["empty cluster", "only the shortlist"])
def test_every_parameter_gets_a_gradient_in_every_step(classes: list[int]) -> None:
    """So that distributed training need not look for unused parameters."""
    model = tiny_model(proj_share_all_but_first=False, tie_word_embeddings=False).train()
    starts = [0, 11, 23, 41]
    ids = torch.cat([torch.arange(starts[i], starts[i] + 4) for i in classes])[None]
    memory = TransfoXLMemory(model.config)
    for _ in range(2):
        model.zero_grad()
        model(ids, cache=memory, labels=ids).loss.backward()
        gradients = gradients_of(model)
    # what took no part is at rest, not absent
    assert not gradients["crit.out_layers.2.weight"].any()
    assert not gradients["transformer.word_emb.emb_layers.2.weight"].any()
    assert gradients["crit.out_layers.0.weight"].any()


def test_a_step_without_any_target_has_a_zero_loss_and_zero_gradients() -> None:
    model = tiny_model().train()
    ids = random_ids(1, 4)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert loss.item() == 0
    loss.backward()
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed training")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_training_runs_without_a_search_for_unused_parameters(process_group: None) -> None:
    model = tiny_model().train()
    alone = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
    ids = torch.arange(6)[None]
    memories = TransfoXLMemory(model.config), TransfoXLMemory(model.config)
    for _ in range(3):
        wrapped(ids, cache=memories[0], labels=ids).loss.backward()
        alone(ids, cache=memories[1], labels=ids).loss.backward()
    assert_same_gradients(gradients_of(model), gradients_of(alone), **REPEATED)


# ---- checkpointing ---------------------------------------------------------------------------------------------


def enable_checkpointing(model: Any, use_reentrant: bool) -> None:
    # renamed in transformers 5.24
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def train_two_segments(model: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Losses, gradients and the memory afterwards; dropout from a fixed seed."""
    model.train()
    torch.manual_seed(3)
    memory = TransfoXLMemory(model.config)
    ids = random_ids(2, 13, vocab_size=model.config.vocab_size)
    losses = []
    for segment in cut(12, [7, 5]):
        output = model(ids[:, segment], cache=memory, shift_labels=ids[:, 1:][:, segment])
        losses.append(output.losses.detach())
        output.loss.backward()
    return losses, gradients_of(model), memory.to_mems()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"dropout": 0.2, "dropatt": 0.1}, {"memory_init": "zeros", "untie_r": False, "pre_lnorm": True}],
    ids=["plain", "dropout", "other layers"],
)
def test_checkpointing_changes_neither_gradients_nor_memory(changes: dict[str, Any], use_reentrant: bool) -> None:
    """C108"""
    expected_losses, expected, expected_memory = train_two_segments(t0_model(**changes))
    model = t0_model(**changes)
    enable_checkpointing(model, use_reentrant)
    assert any(module.gradient_checkpointing for module in model.transformer.layers)
    losses, gradients, memory = train_two_segments(model)
    for segment in range(2):
        assert_close(f"losses of segment {segment}", losses[segment], expected_losses[segment], **REPEATED)
    assert_same_gradients(gradients, expected, **REPEATED)
    assert [list(states.shape) for states in memory] == [[6, 2, 32]] * 3
    for layer, states in enumerate(memory):
        assert_close(f"memory of layer {layer}", states, expected_memory[layer], **REPEATED)


def test_checkpointing_runs_each_layer_again() -> None:
    """The test above would pass if nothing were checkpointed."""
    model = t0_model().train()
    enable_checkpointing(model, use_reentrant=False)
    runs = []
    model.transformer.layers[0].dec_attn.register_forward_hook(lambda *_: runs.append(1))
    ids = random_ids(1, 5)
    model(ids, cache=TransfoXLMemory(model.config), labels=ids).loss.backward()
    assert len(runs) == 2


def test_a_library_cache_under_checkpointing_is_refused() -> None:
    """It would be written twice."""
    from transformers import DynamicCache

    model = tiny_model().train()
    enable_checkpointing(model, use_reentrant=False)
    with pytest.raises(ValueError, match="TransfoXLMemory"):
        model(random_ids(1, 3), cache=DynamicCache(config=model.config))


# ---- Trainer ---------------------------------------------------------------------------------------------------


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return TrainingArguments(folder, **{**quiet, **options})


TWENTY_STEPS = {
    "max_steps": 20,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
}


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def blocks_of_a_repeated_text() -> list[dict[str, list[int]]]:
    text = random_ids(11, vocab_size=99).tolist() * 40
    blocks = [text[start : start + 16] for start in range(0, 256, 16)]
    return [{"input_ids": block, "labels": block} for block in blocks]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_plain_trainer_halves_the_loss_of_a_repeated_text(checkpointing: bool, tmp_path: Path) -> None:
    """C106: no subclass, the default collator, blocks of equal length."""
    options = {
        "max_steps": 20,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    if checkpointing:
        # renamed in transformers 5.24
        new_name = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
        options["activation_checkpointing" if new_name else "gradient_checkpointing"] = True
    trainer = Trainer(model=t0_model(), args=arguments(tmp_path, **options), train_dataset=blocks_of_a_repeated_text())
    trainer.train()
    losses = losses_of(trainer)
    assert len(losses) == 20
    # what a model that knows nothing loses, see test_save_load
    assert abs(losses[0] - 5.7) < 0.7
    assert losses[-1] < losses[0] / 2


def test_gradient_accumulation_equals_one_large_batch(tmp_path: Path) -> None:
    """Also where rows have different numbers of targets: the loss is divided by all targets of the step."""
    ids = random_ids(4, 9, vocab_size=99)
    labels = ids.clone()
    labels[0, :6] = -100
    labels[3, 2:] = -100
    dataset = [
        {"input_ids": row.tolist(), "labels": targets.tolist()} for row, targets in zip(ids, labels, strict=True)
    ]
    results = []
    for batch_size, steps in ((4, 1), (1, 4)):
        model = t0_model()
        options = {
            "max_steps": 1,
            "per_device_train_batch_size": batch_size,
            "gradient_accumulation_steps": steps,
            "optim": "sgd",
            "learning_rate": 1.0,
            "max_grad_norm": 0.0,
            "lr_scheduler_type": "constant",
        }
        Trainer(model=model, args=arguments(tmp_path, **options), train_dataset=dataset).train()
        results.append(model)
    reference = t0_model().train()
    loss = reference(ids, labels=labels).loss
    loss.backward()
    for name, parameter in reference.named_parameters():
        expected = parameter - parameter.grad
        for result in results:
            assert_close(name, dict(result.named_parameters())[name], expected, atol=1e-6, rtol=1e-5)


def test_a_classifier_trains_in_the_plain_trainer(tmp_path: Path) -> None:
    model = t0_model(TransfoXLForSequenceClassification, num_labels=2)
    ids = random_ids(8, 6, vocab_size=99)
    dataset = [{"input_ids": row.tolist(), "label": int(row[-1] % 2)} for row in ids]
    options = {
        "max_steps": 20,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    trainer = Trainer(model=model, args=arguments(tmp_path, **options), train_dataset=dataset)
    trainer.train()
    losses = losses_of(trainer)
    assert losses[-1] < losses[0] / 2


@pytest.mark.full
def test_training_on_a_stream_with_memory_learns_what_lies_before_the_segment() -> None:
    """Each token is that of 3 positions before, read 2 at a time: only a memory knows it."""
    steps, generator = 160, torch.Generator().manual_seed(2)
    # three tokens of four, at random, said four times; then three others
    spoken = torch.randint(0, 4, (64, steps // 6 + 1, 1, 3), generator=generator)
    stream = spoken.expand(-1, -1, 4, -1).flatten(1)

    def final_loss(mem_len: int) -> float:
        torch.manual_seed(0)
        sizes = {"d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "n_layer": 1, "init_std": 0.1}
        config = tiny_config(vocab_size=4, cutoffs=[], div_val=1, mem_len=mem_len, **sizes)
        model = TransfoXLForCausalLM(config).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        memory = TransfoXLMemory(model.config)
        losses = []
        for segment in cut(2 * steps, 2):
            output = model(stream[:, segment], cache=memory, shift_labels=stream[:, 1:][:, segment])
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
            losses.append(output.loss.item())
        return sum(losses[-30:]) / 30

    # nothing better than ln 4 = 1.39 can be known without a memory
    assert final_loss(mem_len=0) > 1.3
    # with one, three quarters of the tokens can
    assert final_loss(mem_len=4) < 0.9


# ---- autocast --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("changes", [{}, {"cutoffs": [], "div_val": 1}, {"pre_lnorm": True}, {"untie_r": False}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_memory_trains_close_to_float32(dtype: torch.dtype, changes: dict[str, Any], start: str) -> None:
    """C38: mixed precision stopped at the embedding of clusters."""
    model = t0_model(memory_init=start, **changes).train()
    ids = random_ids(2, 25, vocab_size=99)

    def train(with_autocast: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model.zero_grad()
        memory = TransfoXLMemory(model.config)
        losses = []
        for segment in cut(24, 8):
            with torch.autocast("cpu", dtype=dtype, enabled=with_autocast):
                output = model(ids[:, segment], cache=memory, shift_labels=ids[:, 1:][:, segment])
            assert output.loss.dtype == torch.float32
            output.loss.backward()
            losses.append(output.loss.item())
        return losses, {name: gradient.clone() for name, gradient in gradients_of(model).items()}

    losses, gradients = train(with_autocast=True)
    expected_losses, expected = train(with_autocast=False)
    for loss, expected_loss in zip(losses, expected_losses, strict=True):
        assert abs(loss / expected_loss - 1) < 0.02
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name
    # the direction of the step, over all parameters together
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    flat_expected = torch.cat([gradient.flatten() for gradient in expected.values()])
    assert torch.cosine_similarity(flat, flat_expected, dim=0) > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_512_targets_is_finite_and_close_in_half_precision(dtype: torch.dtype) -> None:
    """C31: log-softmax and mean in float32."""
    model = t0_model()
    ids = random_ids(4, 129, vocab_size=99)
    with torch.no_grad():
        expected = model(ids[:, :-1], shift_labels=ids[:, 1:]).loss
        output = copy.deepcopy(model).to(dtype)(ids[:, :-1], shift_labels=ids[:, 1:])
    assert output.loss.dtype == output.losses.dtype == torch.float32
    assert output.losses.isfinite().all()
    assert abs(output.loss / expected - 1) < 0.02


def test_large_logits_do_not_overflow_the_loss_in_half_precision() -> None:
    """C31"""
    model = tiny_model().to(torch.float16)
    with torch.no_grad():
        model.crit.out_layers[0].bias[0] = 30_000.0
    ids = torch.ones(1, 40, dtype=torch.long)
    output = model(ids, shift_labels=ids)
    assert output.losses.isfinite().all()
    assert (output.losses > 29_000).all()


def test_the_trainer_in_bfloat16_learns_too(tmp_path: Path) -> None:
    """C38"""
    options = {"max_steps": 20, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "bf16": True}
    trainer = Trainer(model=t0_model(), args=arguments(tmp_path, **options), train_dataset=blocks_of_a_repeated_text())
    trainer.train()
    losses = losses_of(trainer)
    assert losses[-1] < losses[0] / 2
