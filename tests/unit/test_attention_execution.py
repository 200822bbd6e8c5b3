"""Which way attention is run, as a table, and that every way computes the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_txl import TransfoXLConfig
from hf_txl.attention_execution_transfo_xl import (
    AT_ONCE,
    IN_QUERY_BLOCKS,
    QUERY_BLOCK,
    RECOMPUTED,
    SHARED_PREFIX_QUERIES,
    WITH_PREFIX,
    ZERO_PREFIX_QUERIES,
    AttentionInputs,
    choose_way,
)
from hf_txl.attention_transfo_xl import ATTENTION_CLASSES
from hf_txl.layout_transfo_xl import AttentionLayout
from hf_txl.positions_transfo_xl import PositionTable, sinusoid_embeddings
from hf_txl.shared_prefix_transfo_xl import KeyValuePrefix, Prefix, ZeroPrefix
from tests.helpers import assert_close

HEADS, WIDTH, HEAD_SIZE = 2, 12, 5


def make_inputs(
    queries: int = 4,
    batch_size: int = 1,
    own_keys: int = 6,
    zeros: int = 0,
    shared: int = 0,
    kind: str = "transformer_xl",
    training: bool = False,
    device: str = "cpu",
    padded: bool = False,
    **options: Any,
) -> AttentionInputs:
    """Inputs of a layer with random weights: `own_keys` end with the segment, a prefix stands in front of them."""
    config = TransfoXLConfig(
        vocab_size=9, d_model=WIDTH, n_head=HEADS, d_head=HEAD_SIZE, n_layer=1, mem_len=20, attention_kind=kind
    )
    layer = ATTENTION_CLASSES[kind](config, 0).train(training).to(device)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(device))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    keys = own_keys + zeros + shared
    distances = torch.arange(keys - 1, -queries - 1, -1).clamp(min=0)
    embeddings = sinusoid_embeddings(distances, WIDTH).to(device) if layer.uses_sinusoids else None
    table = PositionTable(distances.to(device), queries, -1, torch.float32, embeddings, keeps=False)
    layout = AttentionLayout(queries, keys, start_slots=zeros, zero_start=bool(zeros))
    if padded:
        mask = torch.ones(batch_size, keys, dtype=torch.bool, device=device)
        layout = AttentionLayout.from_mask(mask, keys - queries, queries, 0, None, False)
    own = (batch_size, HEADS, own_keys, HEAD_SIZE)
    prefix = None
    if zeros or shared:
        prefix = Prefix(
            ZeroPrefix(random(1, HEADS, 1, HEAD_SIZE), random(1, HEADS, 1, HEAD_SIZE), zeros) if zeros else None,
            KeyValuePrefix(random(1, HEADS, shared, HEAD_SIZE), random(1, HEADS, shared, HEAD_SIZE), batch_size)
            if shared
            else None,
        )
    query = random(batch_size, HEADS, queries, HEAD_SIZE)
    return AttentionInputs(layer, query, random(*own), random(*own), layout, table, prefix=prefix, **options)


ROWS = [
    # one row of the batch
    ("a single token", {"queries": 1}, AT_ONCE),
    ("a segment of one row that fits one block", {}, AT_ONCE),
    ("a longer segment", {"queries": QUERY_BLOCK + 1, "own_keys": QUERY_BLOCK + 3}, IN_QUERY_BLOCKS),
    # several rows
    ("several rows", {"batch_size": 3}, IN_QUERY_BLOCKS),
    ("several rows, a single token each", {"batch_size": 3, "queries": 1}, AT_ONCE),
    ("pads between tokens", {"batch_size": 3, "padded": True}, AT_ONCE),
    ("probabilities are wanted", {"batch_size": 3, "wants_probabilities": True}, AT_ONCE),
    ("a term added to the values", {"batch_size": 3, "kind": "shaw"}, AT_ONCE),
    ("a kind without biases", {"batch_size": 3, "kind": "huang"}, IN_QUERY_BLOCKS),
    ("another device than a CPU", {"batch_size": 3, "device": "meta"}, AT_ONCE),
    # a prefix
    ("a shared prefix", {"batch_size": 3, "queries": 2, "shared": 7}, WITH_PREFIX),
    ("a shared prefix, with probabilities", {"queries": 2, "shared": 7, "wants_probabilities": True}, WITH_PREFIX),
    ("a shared prefix on a GPU", {"queries": 2, "shared": 7, "device": "meta"}, WITH_PREFIX),
    (
        "a shared prefix, more queries",
        {"batch_size": 3, "shared": 7, "queries": SHARED_PREFIX_QUERIES + 1, "own_keys": 20},
        IN_QUERY_BLOCKS,
    ),
    ("zero states", {"queries": ZERO_PREFIX_QUERIES, "own_keys": 40, "zeros": 5}, WITH_PREFIX),
    ("zero states, more queries", {"queries": ZERO_PREFIX_QUERIES + 1, "own_keys": 40, "zeros": 5}, AT_ONCE),
    ("zero states and a shared prefix", {"queries": 2, "zeros": 3, "shared": 4}, WITH_PREFIX),
    ("a prefix in training", {"queries": 2, "zeros": 3, "training": True}, RECOMPUTED),
    # training
    ("training", {"training": True}, RECOMPUTED),
    ("training on another device", {"training": True, "device": "meta"}, AT_ONCE),
    ("training with pads", {"training": True, "padded": True}, AT_ONCE),
    ("training, probabilities are wanted", {"training": True, "wants_probabilities": True}, AT_ONCE),
    ("training of a kind without biases", {"training": True, "kind": "huang"}, AT_ONCE),
    # backends of others
    ("a backend of the library", {"batch_size": 3, "implementation": "flex_attention"}, AT_ONCE),
    ("a backend of the library behind a prefix", {"shared": 7, "implementation": "flex_attention"}, AT_ONCE),
    ("a backend of the library in training", {"training": True, "implementation": "flex_attention"}, AT_ONCE),
]


@pytest.mark.parametrize(("options", "way"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_way_is_chosen_by_what_is_asked_for(options: dict[str, Any], way: Any) -> None:
    with torch.no_grad():
        inputs = make_inputs(**options)
    assert choose_way(inputs) is way
    # a gradient that is recorded makes it training, in eval mode too; a program is always one call
    if not options.get("training"):
        trained = make_inputs(**{**options, "training": True})
        inputs.query.requires_grad_()
        assert choose_way(inputs) is choose_way(trained)


def test_a_compiled_program_computes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for _, options, _ in ROWS:
        assert choose_way(make_inputs(**options)) is AT_ONCE


PREFIXES: list[dict[str, int]] = [{"zeros": 3}, {"shared": 7}, {"zeros": 3, "shared": 4}]
WAYS = [
    *((WITH_PREFIX, prefix) for prefix in PREFIXES),
    *((way, prefix) for way in (IN_QUERY_BLOCKS, RECOMPUTED) for prefix in [{}, *PREFIXES]),
]


@pytest.mark.parametrize(("way", "prefix"), WAYS, ids=[f"{type(way).__name__} {prefix}" for way, prefix in WAYS])
@torch.no_grad()
def test_every_way_computes_the_same(way: Any, prefix: dict[str, int]) -> None:
    inputs = make_inputs(batch_size=3, queries=5, own_keys=9, **prefix)
    expected, _ = AT_ONCE.run(inputs)
    for implementation in ("eager", "sdpa"):
        actual, _ = way.run(replace(inputs, implementation=implementation))
        assert_close(implementation, actual, expected, 1e-5)
