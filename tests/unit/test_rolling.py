"""Storage with room behind what is stored: appended to in place, but never at the cost of another holder."""

import copy
import weakref
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_txl import TransfoXLConfig
from hf_txl.key_value_buffer_transfo_xl import KeyValueBuffer, claim_slots
from hf_txl.library_caches_transfo_xl import BufferedWindows, window_buffers

# B batch   H heads   S stored positions   D head size
B, H, D = 2, 3, 4


def positions(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(B, H, length, D, generator=torch.Generator().manual_seed(seed))


def append_rolling(
    stored: torch.Tensor, new: torch.Tensor, storage: KeyValueBuffer | None
) -> tuple[torch.Tensor, KeyValueBuffer]:
    """Stored positions and new ones behind them, and where they lie."""
    claimed = claim_slots((stored,), new.shape[-2], storage)
    assert claimed is not None
    storage, first, end = claimed
    storage.views(end - new.shape[-2], end)[0].copy_(new)
    return storage.views(first, end)[0], storage


def test_positions_are_those_of_a_concatenation_and_are_seldom_copied() -> None:
    stream = positions(300)
    stored, storage = stream[:, :, :40].clone(), None
    seen = set()
    for end in range(41, 301):
        full, storage = append_rolling(stored, stream[:, :, end - 1 : end], storage)
        assert torch.equal(full, stream[:, :, end - 41 : end])
        seen.add(id(storage))
        stored = full[:, :, 1:]
    # 260 tokens with room for 16 each time
    assert len(seen) <= 260 // 16 + 1


def test_of_two_branches_the_second_gets_a_storage_of_its_own() -> None:
    stored, shared = append_rolling(positions(20), positions(1, seed=1), None)
    first, same = append_rolling(stored, positions(1, seed=2), shared)
    second, other = append_rolling(stored, positions(1, seed=3), shared)
    assert same is shared and other is not shared
    assert torch.equal(first, torch.cat([stored, positions(1, seed=2)], dim=2))
    assert torch.equal(second, torch.cat([stored, positions(1, seed=3)], dim=2))
    # what was handed out before stays as it was
    assert torch.equal(stored, torch.cat([positions(20), positions(1, seed=1)], dim=2))


def test_a_branch_that_was_cut_does_not_overwrite_what_follows() -> None:
    stored, storage = append_rolling(positions(20), positions(2, seed=1), None)
    before = stored.clone()
    again, other = append_rolling(stored[:, :, :-1], positions(1, seed=2), storage)
    assert other is not storage
    assert torch.equal(stored, before)
    assert torch.equal(again[:, :, -1:], positions(1, seed=2))


def test_positions_that_lie_elsewhere_are_copied_first() -> None:
    _, storage = append_rolling(positions(20), positions(1), None)
    reordered = positions(21).index_select(0, torch.tensor([1, 0]))
    full, other = append_rolling(reordered, positions(1, seed=2), storage)
    assert other is not storage
    assert torch.equal(full, torch.cat([reordered, positions(1, seed=2)], dim=2))


def test_long_segments_are_given_no_room() -> None:
    assert claim_slots((positions(20),), 30, None) is None


def test_tensors_that_differ_do_not_share_a_storage() -> None:
    assert claim_slots((positions(20), positions(20)), 1, None) is not None
    for other in (positions(19), positions(20).double(), positions(20).to("meta")):
        assert claim_slots((positions(20), other), 1, None) is None


def test_inference_mode_and_what_follows_it_do_not_write_into_each_other() -> None:
    with torch.inference_mode():
        stored, storage = append_rolling(positions(20), positions(1, seed=1), None)
    full, other = append_rolling(stored, positions(1, seed=2), storage)
    assert other is not storage
    with torch.inference_mode():
        longer, third = append_rolling(full, positions(1, seed=3), other)
    assert third is not other
    assert torch.equal(longer[:, :, 20:], torch.cat([positions(1, seed=number) for number in (1, 2, 3)], dim=2))


def test_a_deep_copy_goes_on_by_itself() -> None:
    stored, storage = append_rolling(positions(20), positions(1, seed=1), None)
    copied_stored, copied = copy.deepcopy((stored, storage))
    full, same = append_rolling(copied_stored, positions(1, seed=2), copied)
    assert same is copied
    other_full, other = append_rolling(stored, positions(1, seed=3), storage)
    assert other is storage
    assert torch.equal(full[:, :, -1:], positions(1, seed=2))
    assert torch.equal(other_full[:, :, -1:], positions(1, seed=3))


def window_cache(window: int) -> DynamicCache:
    config = TransfoXLConfig(vocab_size=9, d_model=H * D, n_head=H, n_layer=1, mem_len=window - 1, cutoffs=[])
    return DynamicCache(config=config)


@pytest.mark.parametrize("lengths", [[7, *[1] * 50], [1] * 60, [3, 30, 1, 1, 2, 1, 9, 1, 1]])
def test_rolling_windows_equal_the_layer_of_the_library_and_leave_its_attributes_alone(lengths: list[int]) -> None:
    caches = [window_cache(12), window_cache(12)]
    updates = [caches[0].update, BufferedWindows(caches[1]).update]
    for step, length in enumerate(lengths):
        new = positions(length, seed=step), positions(length, seed=-step)
        expected, actual = (update(*new, 0) for update in updates)
        for ours, theirs in zip(actual, expected, strict=True):
            assert torch.equal(ours, theirs)
        theirs, ours = (vars(cache.layers[0]) for cache in caches)
        assert type(caches[1].layers[0]) is DynamicSlidingWindowLayer and ours.keys() == theirs.keys()
        for name in ("keys", "values", "cumulative_length"):
            assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])), name
        if step == 6:
            for cache in caches:
                cache.reorder_cache(torch.tensor([1, 0]))
    assert caches[1].layers[0] in window_buffers


def test_a_layer_that_keeps_more_than_its_window_is_left_to_the_library() -> None:
    caches = [window_cache(4), window_cache(4)]
    updates = [caches[0].update, BufferedWindows(caches[1]).update]
    for cache in caches:
        cache.layers[0].activate_past_recording()
    for step in range(7):
        for update in updates:
            update(positions(1, seed=step), positions(1, seed=-step), 0)
    assert caches[1].layers[0] not in window_buffers
    for cache in caches:
        cache.layers[0].crop(-3)
    assert torch.equal(caches[1].layers[0].keys, caches[0].layers[0].keys)
    assert torch.equal(caches[1].layers[0].values, caches[0].layers[0].values)


def test_a_storage_goes_with_its_layer() -> None:
    cache = window_cache(12)
    windows = BufferedWindows(cache)
    for step in range(3):
        windows.update(positions(1, seed=step), positions(1, seed=step), 0)
    layer = weakref.ref(cache.layers[0])
    del cache, windows
    assert layer() is None


def test_keys_that_need_a_gradient_keep_it() -> None:
    windows = BufferedWindows(window_cache(12))
    new: list[Any] = [positions(1, seed=step).requires_grad_() for step in range(3)]
    for state in new:
        keys, _ = windows.update(state, state, 0)
    keys.sum().backward()
    assert all(torch.equal(state.grad, torch.ones_like(state)) for state in new)


def test_a_storage_refuses_what_has_no_room() -> None:
    storage = KeyValueBuffer([positions(4)], 6)
    stored = storage.views(0, 4)[0]
    assert storage.claim(stored, 3) is None
    assert storage.claim(stored, 2) is not None
    assert storage.claim(stored, 1) is None
