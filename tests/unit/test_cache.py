"""The memory as an object: what it is made from, taken apart, branched, saved and restored to, in both storages.

A memory is right if each of its streams goes on as if it had been read alone, so most tests go on with it and compare.
"""

import copy
import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from hf_txl import TransfoXLForCausalLM, TransfoXLMemory
from tests.helpers import assert_close
from tests.t0 import LARGE_WEIGHTS, make_config, make_model, random_ids

# the same float64 arithmetic, batched or alone
ROUNDING = 1e-9

STORAGES = ["hidden_states", "keys_values"]
STARTS = ["empty", "zeros"]
# real tokens of each of three streams, in a first segment of nine; `mem_len` is 6
FIRST_LENGTHS = {"equal": [9, 9, 9], "ragged": [9, 4, 1], "short": [3, 3, 3], "with an unread one": [2, 0, 5]}
# what the rows of a memory read together before they part for two tokens: its keys and values are stored once
SHARED_LENGTHS = {"parted": 4, "parted early": 1}


@dataclass
class Streams:
    """Three streams, what they have read, and the memory of it."""

    model: TransfoXLForCausalLM
    memory: TransfoXLMemory
    # real tokens of each row
    read: list[torch.Tensor]


@functools.cache
def shared_model(memory_init: str) -> TransfoXLForCausalLM:
    """No test changes it."""
    return make_model(n_layer=2, memory_init=memory_init, **LARGE_WEIGHTS).double()


@torch.no_grad()
def make_streams(stores: str, lengths: str = "ragged", memory_init: str = "empty", seed: int = 1) -> Streams:
    model = shared_model(memory_init)
    if lengths in SHARED_LENGTHS:
        common, own = random_ids(1, SHARED_LENGTHS[lengths], seed=seed), random_ids(3, 2, seed=seed + 1)
        memory = model.init_memory(1, stores=stores)
        model(common, cache=memory)
        memory = memory.select([0, 0, 0])
        model(own, cache=memory)
        return Streams(model, memory, [torch.cat([common[0], row]) for row in own])
    memory = model.init_memory(3, stores=stores)
    real = FIRST_LENGTHS[lengths]
    width = max(real)
    ids = random_ids(3, width, seed=seed)
    mask = torch.arange(width)[None, :] >= width - torch.tensor(real)[:, None]
    model(ids, cache=memory, attention_mask=mask if len(set(real)) > 1 else None)
    return Streams(model, memory, [ids[row, width - length :] for row, length in enumerate(real)])


@torch.no_grad()
def assert_goes_on(streams: Streams, memory: TransfoXLMemory, histories: list[torch.Tensor], seed: int = 7) -> None:
    """Every row of `memory` continues its history, over two segments."""
    ids = random_ids(len(histories), 5, seed=seed)
    assert memory.batch_size == len(histories)
    first = streams.model(ids[:, :4], cache=memory).logits
    second = streams.model(ids[:, 4:], cache=memory).logits
    for row, history in enumerate(histories):
        alone = streams.model.init_memory(1)
        if len(history):
            streams.model(history[None], cache=alone)
        for name, logits, part in (
            ("first", first, ids[row : row + 1, :4]),
            ("second", second, ids[row : row + 1, 4:]),
        ):
            assert_close(f"row {row}, {name}", logits[row], streams.model(part, cache=alone).logits[0], ROUNDING)


every_kind = pytest.mark.parametrize(
    ("stores", "lengths", "memory_init"),
    [
        ("hidden_states", "equal", "empty"),
        ("hidden_states", "ragged", "zeros"),
        ("hidden_states", "with an unread one", "empty"),
        ("keys_values", "ragged", "empty"),
        ("keys_values", "short", "zeros"),
        ("keys_values", "with an unread one", "zeros"),
        ("keys_values", "parted", "empty"),
        ("keys_values", "parted early", "empty"),
    ],
)
both_storages = pytest.mark.parametrize("stores", STORAGES)


# --- settings


def test_settings_are_those_of_the_configuration_unless_given() -> None:
    config = make_config(mem_len=6, clamp_len=9, same_length=True, memory_init="zeros")
    memory = TransfoXLMemory(config)
    assert (memory.mem_len, memory.clamp_len, memory.same_length, memory.memory_init) == (6, 9, True, "zeros")
    given = TransfoXLMemory(config, mem_len=0, clamp_len=-1, same_length=False, memory_init="empty")
    assert (given.mem_len, given.clamp_len, given.same_length, given.memory_init) == (0, -1, False, "empty")
    assert (config.mem_len, config.clamp_len, config.same_length, config.memory_init) == (6, 9, True, "zeros")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mem_len": -1}, "`mem_len` must be .*, but is -1"),
        ({"mem_len": 2.5}, "`mem_len` must be .*, but is 2.5"),
        ({"memory_init": "ones"}, r"`memory_init` must be one of \['empty', 'zeros'\], but is 'ones'"),
        ({"stores": "keys"}, "`stores` must be one of .*, but is 'keys'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransfoXLMemory(make_config(), **settings)
    with pytest.raises(ValueError, match=message):
        make_model().init_memory(2, **settings)


def test_a_new_memory_holds_nothing_in_one_layer_object_per_layer() -> None:
    memory = TransfoXLMemory(make_config())
    assert len(memory.layers) == 3
    assert memory.batch_size is None
    assert memory.stored_length == 0
    assert make_model().init_memory(5).batch_size == 5


@both_storages
def test_length_is_always_zero_for_the_library(stores: str) -> None:
    """Ids given with a memory are new ids, never a repetition of what it has read."""
    memory = make_streams(stores).memory
    assert memory.get_seq_length() == 0
    assert memory.stored_length == 6


@both_storages
def test_repr_tells_what_is_held(stores: str) -> None:
    text = repr(make_streams(stores).memory)
    assert "stored_length=6" in text and "batch_size=3" in text and stores in text and "mem_len=6" in text


def test_what_a_memory_cannot_do_is_refused() -> None:
    memory = make_streams("keys_values").memory
    with pytest.raises(ValueError, match="cannot be cropped"):
        memory.crop(3)
    with pytest.raises(ValueError, match="(?i)assisted decoding"):
        memory.activate_past_recording()
    with pytest.raises(TypeError, match="cache=memory"):
        memory.layers[0].update(torch.zeros(1), torch.zeros(1))


# --- streams: select, reorder, repeat, concatenate, reset, branch


@every_kind
def test_rows_of_different_length_go_on_as_if_alone(stores: str, lengths: str, memory_init: str) -> None:
    streams = make_streams(stores, lengths, memory_init)
    assert streams.memory.storage == stores
    assert_goes_on(streams, streams.memory, streams.read)


@every_kind
def test_selected_rows_go_on_and_leave_the_memory_as_it_was(stores: str, lengths: str, memory_init: str) -> None:
    """C12"""
    streams = make_streams(stores, lengths, memory_init)
    selected = streams.memory.select([2, 0, 0, 1])
    assert_goes_on(streams, selected, [streams.read[row] for row in (2, 0, 0, 1)])
    assert_goes_on(streams, streams.memory, streams.read)


@pytest.mark.parametrize(
    "rows", [[0, 2], torch.tensor([0, 2]), torch.tensor([True, False, True]), [True, False, True], (0, 2)]
)
def test_rows_are_named_by_index_or_by_booleans(rows: Any) -> None:
    streams = make_streams("hidden_states")
    selected = streams.memory.select(rows)
    assert_goes_on(streams, selected, [streams.read[0], streams.read[2]])
    streams.memory.reset(rows)
    assert_goes_on(streams, streams.memory, [streams.read[0][:0], streams.read[1], streams.read[2][:0]])


@both_storages
@pytest.mark.parametrize("operation", ["select", "reset", "reorder_cache"])
def test_rows_that_do_not_exist_are_refused(operation: str, stores: str) -> None:
    memory = make_streams(stores).memory
    before = memory.state_dict()
    for rows in ([3], [-1], [0, 7]):
        with pytest.raises(ValueError, match=r"`rows` must be between 0 and 2, but is"):
            getattr(memory, operation)(rows)
    with pytest.raises(ValueError, match=r"`rows` must have one boolean per stream \(3\), but has shape \[2\]"):
        getattr(memory, operation)(torch.tensor([True, False]))
    for rows in ([0.9, 1.9], [[0, 1]], torch.tensor([0j])):
        with pytest.raises(
            ValueError, match="`rows` must be a list of indices or one boolean per stream, but has dtype"
        ):
            getattr(memory, operation)(rows)
    assert_same_state(memory.state_dict(), before)


@both_storages
@pytest.mark.parametrize("flags", [[0, 0, 1], [1, 1, 1], [0, 0, 0], [2, 1, 2], torch.tensor([0, 1, 1])])
def test_integers_that_repeat_are_no_rows_to_reset(flags: Any, stores: str) -> None:
    """R07: `dones.long()` would reset streams 0 and 1, whichever have ended; `select` may take a stream twice."""
    streams = make_streams(stores)
    before = streams.memory.state_dict()
    with pytest.raises(ValueError, match=r"`rows` must be distinct indices, or a boolean.*`rows.bool\(\)`"):
        streams.memory.reset(flags)
    assert_same_state(streams.memory.state_dict(), before)
    index = torch.as_tensor(flags)
    assert_goes_on(streams, streams.memory.select(flags), [streams.read[row] for row in index])
    # what the message says
    streams.memory.reset(index.bool())
    streams_read = [read[:0] if flag else read for read, flag in zip(streams.read, index.bool(), strict=True)]
    assert_goes_on(streams, streams.memory, streams_read)


def test_bytes_are_no_rows() -> None:
    """They were the type of flags before booleans."""
    memory = make_streams("hidden_states").memory
    for operation in (memory.select, memory.reset, memory.reorder_cache, memory.batch_select_indices):
        with pytest.raises(ValueError, match=r"`rows` must be a list of indices or one boolean .*torch.uint8"):
            operation(torch.tensor([0, 2], dtype=torch.uint8))


def test_integers_are_indices_where_they_could_be_flags() -> None:
    """As documented: no rule could tell them apart in a batch of one or two."""
    streams = make_streams("hidden_states")
    pair = streams.memory.select([1, 2])
    pair.reset(torch.tensor([0, 1]))
    assert pair.rows.lengths is not None and pair.rows.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("fields", [{}, {"mem_len": 0}])
def test_rows_that_do_not_exist_are_refused_before_anything_is_stored(fields: dict[str, int]) -> None:
    memory = make_model(**fields).init_memory(2)
    for operation in (memory.select, memory.reset):
        with pytest.raises(ValueError, match=r"`rows` must be between 0 and 1, but is \[7\]"):
            operation([7])


@every_kind
def test_reordering_repeating_and_choosing_change_the_memory_itself(
    stores: str, lengths: str, memory_init: str
) -> None:
    """What beam search and several returned sequences ask of a cache."""
    streams = make_streams(stores, lengths, memory_init)
    memory, read = streams.memory, streams.read
    memory.reorder_cache(torch.tensor([1, 2, 1]))
    memory.batch_repeat_interleave(2)
    assert memory.batch_size == 6
    memory.batch_select_indices(torch.tensor([5, 0, 2]))
    assert_goes_on(streams, memory, [read[1], read[1], read[2]])


def test_a_memory_that_has_read_nothing_can_be_rearranged() -> None:
    memory = make_model().init_memory(3)
    assert memory.select([0, 2]).batch_size == 2
    memory.reorder_cache(torch.tensor([2, 2]))
    assert memory.batch_size == 2
    unknown = TransfoXLMemory(make_config())
    assert unknown.select([0]).batch_size is None
    unknown.batch_repeat_interleave(4)
    unknown.reset([0])
    assert unknown.batch_size is None


@pytest.mark.parametrize("memory_init", STARTS)
@both_storages
def test_concatenated_memories_go_on_row_by_row(stores: str, memory_init: str) -> None:
    """C12: memories of other lengths, ragged ones, and one that has read nothing."""
    first = make_streams(stores, "short", memory_init)
    second = make_streams(stores, "ragged", memory_init, seed=2)
    nothing = first.model.init_memory(2, stores=stores)
    # where zeros stand before a text, how it is cut makes a difference
    third = make_streams(stores, "parted" if memory_init == "empty" else "equal", memory_init, seed=3)
    joined = TransfoXLMemory.concatenate([first.memory, nothing, second.memory, third.memory])
    unread = torch.empty(0, dtype=torch.long)
    assert_goes_on(first, joined, [*first.read, unread, unread, *second.read, *third.read])
    for streams in (first, second, third):
        assert_goes_on(first, streams.memory, streams.read)


def test_memories_that_do_not_fit_together_are_refused() -> None:
    hidden, keys = make_streams("hidden_states"), make_streams("keys_values")
    other = hidden.model.init_memory(3, mem_len=4, stores="hidden_states")
    with pytest.raises(ValueError, match="`memories` must have the same settings and storage, but are .*keys_values"):
        TransfoXLMemory.concatenate([hidden.memory, keys.memory])
    with pytest.raises(ValueError, match="`memories` must have the same settings and storage, but are .*mem_len=4"):
        TransfoXLMemory.concatenate([hidden.memory, other])
    with pytest.raises(ValueError, match="`memories` must hold at least one memory, but is empty"):
        TransfoXLMemory.concatenate([])
    with pytest.raises(ValueError, match="`memories` must each have a `batch_size`"):
        TransfoXLMemory.concatenate([hidden.memory, TransfoXLMemory(hidden.model.config, stores="hidden_states")])


@every_kind
def test_reset_rows_start_afresh_and_the_others_go_on(stores: str, lengths: str, memory_init: str) -> None:
    """C12"""
    streams = make_streams(stores, lengths, memory_init)
    streams.memory.reset([1])
    assert_goes_on(streams, streams.memory, [streams.read[0], streams.read[1][:0], streams.read[2]])


@both_storages
def test_a_complete_reset_forgets_the_batch_size_too(stores: str) -> None:
    streams = make_streams(stores)
    streams.memory.reset()
    assert streams.memory.batch_size is None
    ids = random_ids(5, 3)
    with torch.no_grad():
        expected = streams.model(ids, cache=streams.model.init_memory(5)).logits
        assert_close("logits", streams.model(ids, cache=streams.memory).logits, expected, ROUNDING)


@pytest.mark.parametrize("branch", [copy.copy, copy.deepcopy, lambda memory: memory.select([0, 1, 2])])
@every_kind
def test_a_branch_shares_nothing_that_is_later_written(
    stores: str, lengths: str, memory_init: str, branch: Callable[[TransfoXLMemory], TransfoXLMemory]
) -> None:
    """Both go on from the same past, whichever reads, is reset or rearranged first."""
    streams = make_streams(stores, lengths, memory_init)
    one, other, third = (branch(streams.memory) for _ in range(3))
    assert_goes_on(streams, one, streams.read, seed=11)
    other.reset([0])
    other.reorder_cache(torch.tensor([2, 2]))
    third.reset()
    assert_goes_on(streams, streams.memory, streams.read, seed=12)


# --- state


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name


@every_kind
def test_saved_state_goes_on_exactly(stores: str, lengths: str, memory_init: str) -> None:
    """Through a file that is read without unpickling objects; C111 needs it, for hidden states to the last bit."""
    streams = make_streams(stores, lengths, memory_init)
    file = io.BytesIO()
    torch.save(streams.memory.state_dict(), file)
    file.seek(0)
    restored = streams.model.init_memory(3, stores=stores)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert_same_state(restored.state_dict(), streams.memory.state_dict())
    ids = random_ids(3, 4)
    with torch.no_grad():
        expected = streams.model(ids, cache=copy.copy(streams.memory)).logits
        actual = streams.model(ids, cache=copy.copy(restored)).logits
    # beside keys lie projected distances and what rows share, which are made again, in other pieces
    assert_close("logits", actual, expected, ROUNDING if stores == "keys_values" else 0.0)
    assert_goes_on(streams, restored, streams.read)


@both_storages
@pytest.mark.parametrize("damage", ["a layer is missing", "a tensor is missing", "a tensor is of the other storage"])
def test_state_without_all_of_each_layer_is_refused(damage: str, stores: str) -> None:
    memory = make_streams(stores).memory
    before, state = memory.state_dict(), memory.state_dict()
    names = [name for name in state if name.startswith("layers.1.")]
    for name in names if damage == "a layer is missing" else names[:1]:
        tensor = state.pop(name)
    if damage == "a tensor is of the other storage":
        state["layers.1.keys" if stores == "hidden_states" else "layers.1.hidden_states"] = tensor
    elif stores == "hidden_states" or damage == "a layer is missing":
        assert "layers.1" not in str(list(state))
    with pytest.raises(ValueError, match=r"`state` must hold the same tensors for each layer"):
        memory.load_state_dict(state)
    with pytest.raises(ValueError, match=r"`state` must have the progress .* but has .*'mem_len'"):
        memory.load_state_dict({**before, "progress": {**before["progress"], "mem_len": 99}})
    assert_same_state(memory.state_dict(), before)


def test_state_replaces_whatever_the_memory_held() -> None:
    streams, other = make_streams("hidden_states", "short"), make_streams("hidden_states", "ragged", seed=5)
    other.memory.load_state_dict(streams.memory.state_dict())
    assert_goes_on(streams, other.memory, streams.read)
    fresh = streams.model.init_memory(2, stores="hidden_states")
    streams.memory.load_state_dict(fresh.state_dict())
    assert streams.memory.stored_length == 0
    assert streams.memory.batch_size == 2


@pytest.mark.parametrize(
    "settings", [{"mem_len": 4}, {"clamp_len": 3}, {"same_length": True}, {"memory_init": "zeros"}, {"stores": "auto"}]
)
def test_state_of_other_settings_is_refused_by_name(settings: dict[str, Any]) -> None:
    streams = make_streams("hidden_states")
    other = streams.model.init_memory(3, **{"stores": "hidden_states", **settings})
    before = other.state_dict()
    with pytest.raises(ValueError, match=next(iter(settings))):
        other.load_state_dict(streams.memory.state_dict())
    assert_same_state(other.state_dict(), before)


# --- pytree


@every_kind
def test_a_memory_is_a_pytree_that_goes_on(stores: str, lengths: str, memory_init: str) -> None:
    """Flattened with keys, mapped, and put together again; torch.export needs it."""
    streams = make_streams(stores, lengths, memory_init)
    leaves, spec = pytree.tree_flatten(streams.memory)
    assert leaves and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    with_keys, _ = pytree.tree_flatten_with_path(streams.memory)
    names = [pytree.keystr(path) for path, _ in with_keys]
    assert len(set(names)) == len(names)
    assert all(any(part in name for part in ("hidden_states", "keys", "values", "lengths")) for name in names)
    rebuilt = pytree.tree_unflatten(leaves, spec)
    assert type(rebuilt) is TransfoXLMemory
    assert_same_state(rebuilt.state_dict(), streams.memory.state_dict())
    assert_goes_on(streams, rebuilt, streams.read, seed=3)
    mapped = pytree.tree_map(torch.clone, streams.memory)
    assert_goes_on(streams, mapped, streams.read, seed=4)
    assert_goes_on(streams, streams.memory, streams.read, seed=5)


def test_a_memory_that_has_read_nothing_is_a_pytree_without_leaves() -> None:
    memory = make_model().init_memory(2, mem_len=4)
    leaves, spec = pytree.tree_flatten(memory)
    assert leaves == []
    rebuilt = pytree.tree_unflatten(leaves, spec)
    assert (rebuilt.mem_len, rebuilt.batch_size, len(rebuilt.layers)) == (4, 2, 3)


# --- legacy lists


def legacy_mems(time: int, batch_size: int = 2, n_layer: int = 3) -> list[torch.Tensor]:
    return [torch.randn(time, batch_size, 32) for _ in range(n_layer)]


@pytest.mark.parametrize("time", [1, 5, 6])
def test_legacy_list_in_and_out(time: int) -> None:
    """C15: n_layer tensors (mem_time, batch, d_model)."""
    mems = legacy_mems(time)
    memory = TransfoXLMemory.from_mems(make_config(), mems)
    assert (memory.batch_size, memory.stored_length) == (2, time)
    for ours, given in zip(memory.to_mems(), mems, strict=True):
        assert torch.equal(ours, given)
    for layer, given in zip(memory.layers, mems, strict=True):
        assert torch.equal(layer.hidden_states, given.transpose(0, 1))


def test_a_longer_legacy_list_is_cut_to_the_newest() -> None:
    mems = legacy_mems(9)
    for mem_len in (6, 4):
        memory = TransfoXLMemory.from_mems(make_config(), mems, mem_len=mem_len)
        for ours, given in zip(memory.to_mems(), mems, strict=True):
            assert torch.equal(ours, given[-mem_len:])


def test_the_originals_additional_last_entry_is_left_out() -> None:
    mems = legacy_mems(5, n_layer=4)
    ours = TransfoXLMemory.from_mems(make_config(), mems).to_mems()
    assert len(ours) == 3
    assert all(torch.equal(mem, given) for mem, given in zip(ours, mems[:3], strict=True))


@pytest.mark.parametrize("settings", [{"mem_len": 0}, {}])
def test_legacy_list_without_memory(settings: dict[str, int]) -> None:
    memory = TransfoXLMemory.from_mems(make_config(), legacy_mems(0 if not settings else 3), **settings)
    assert (memory.stored_length, memory.batch_size) == (0, 2)


def test_settings_of_a_legacy_list_can_be_given() -> None:
    memory = TransfoXLMemory.from_mems(make_config(), legacy_mems(5), clamp_len=4, same_length=True)
    assert (memory.clamp_len, memory.same_length, memory.mem_len) == (4, True, 6)


def test_a_legacy_list_is_neither_changed_nor_shared_nor_differentiated() -> None:
    mems = [mem.requires_grad_(True) for mem in legacy_mems(5)]
    before = [mem.detach().clone() for mem in mems]
    memory = TransfoXLMemory.from_mems(make_config(), mems)
    make_model()(random_ids(2, 4), cache=memory).logits.sum().backward()
    assert all(torch.equal(mem, old) and mem.grad is None for mem, old in zip(mems, before, strict=True))
    memory = TransfoXLMemory.from_mems(make_config(), mems)
    with torch.no_grad():
        for mem in mems:
            mem.zero_()
    assert all(torch.equal(ours, old) for ours, old in zip(memory.to_mems(), before, strict=True))


@pytest.mark.parametrize(
    ("mems", "message"),
    [
        (legacy_mems(5, n_layer=1), r"`mems` must have `n_layer` \(3\) entries, but has 1"),
        (legacy_mems(5, n_layer=2), r"`mems` must have `n_layer` \(3\) entries, but has 2"),
        (legacy_mems(5, n_layer=5), r"`mems` must have `n_layer` \(3\) entries, but has 5"),
        ([torch.zeros(5, 2, 16)] * 3, r"`mems` must all have shape \(mem_time, batch_size, 32\), but have .*16"),
        ([torch.zeros(5, 32)] * 3, r"`mems` must all have shape \(mem_time, batch_size, 32\), but have"),
        (
            [torch.zeros(5, 2, 32)] * 2 + [torch.zeros(4, 2, 32)],
            r"`mems` must all have shape .* but have .*\[4, 2, 32\]",
        ),
    ],
)
def test_a_legacy_list_of_another_model_is_refused(mems: list[torch.Tensor], message: str) -> None:
    """C14: wrong rank, wrong width, wrong number."""
    with pytest.raises(ValueError, match=message):
        TransfoXLMemory.from_mems(make_config(), mems)


def test_keys_and_values_are_no_legacy_list() -> None:
    with pytest.raises(ValueError, match="`to_mems` needs hidden states, .* keys and values"):
        make_streams("keys_values").memory.to_mems()


def test_rows_of_different_length_are_no_legacy_list_without_zeros() -> None:
    with pytest.raises(ValueError, match=r"`to_mems` needs streams of equal length, .* \[6, 4, 1\]"):
        make_streams("hidden_states", "ragged").memory.to_mems()


@pytest.mark.parametrize("lengths", list(FIRST_LENGTHS))
def test_zero_start_fills_a_legacy_list_with_zeros_and_goes_on(lengths: str) -> None:
    """C05, C15: `mem_time` is `mem_len`, and reading the list again changes nothing."""
    streams = make_streams("hidden_states", lengths, "zeros")
    mems = streams.memory.to_mems()
    assert [list(mem.shape) for mem in mems] == [[6, 3, 32]] * 2
    for row, length in enumerate(FIRST_LENGTHS[lengths]):
        assert all((mem[: max(0, 6 - length), row] == 0).all() for mem in mems)
    again = TransfoXLMemory.from_mems(streams.model.config, mems)
    assert_goes_on(streams, again, streams.read)


@pytest.mark.parametrize("memory_init", STARTS)
@torch.no_grad()
def test_a_memory_that_has_read_nothing_is_an_empty_legacy_list(memory_init: str) -> None:
    """C14: and an empty list is a memory at the start of a stream."""
    model = shared_model(memory_init)
    assert model.init_memory(2).to_mems() == []
    memory = TransfoXLMemory.from_mems(model.config, [])
    assert (memory.stored_length, memory.batch_size) == (0, None)
    ids = random_ids(2, 5)
    expected = model(ids, use_cache=False).logits
    assert_close("logits", model(ids, cache=memory).logits, expected, ROUNDING)


# --- device


@both_storages
def test_a_memory_moves_as_a_whole(stores: str) -> None:
    """To the meta device, which every machine has."""
    streams = make_streams(stores)
    there = copy.copy(streams.memory)
    assert there.to("meta") is there
    leaves, _ = pytree.tree_flatten(there)
    assert leaves and all(leaf.device.type == "meta" for leaf in leaves)
    assert_goes_on(streams, streams.memory, streams.read)
    assert_goes_on(streams, make_streams(stores).memory.to("cpu"), streams.read)
