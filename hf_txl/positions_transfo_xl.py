"""Relative positions: sinusoids, the position table with its relative keys, and the alignment of scores with keys.

Follows section 3.3 and Appendix B of [Dai et al., 2019](https://arxiv.org/abs/1901.02860). Distances are integers, and
sinusoids are computed in float32 whatever the dtype of the model.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .layout_transfo_xl import AttentionLayout, distance_mask, is_traced

# B batch   H heads   Q queries (one segment)   K keys: start slots, then stored ones, then the segment's
# N = K + Q entries of a position table: distances K - 1 … 0, then Q entries for future keys


def sinusoid_embeddings(distances: torch.Tensor, d_model: int) -> torch.Tensor:
    """Sinusoids of distances, all sines first, then all cosines (section 3.3), always computed in float32.

    Args:
        distances (`torch.Tensor` of shape `(length,)`): Distances in tokens.
        d_model (`int`): Even width.

    Returns:
        `torch.Tensor` of shape `(length, d_model)`, float32.
    """
    steps = torch.arange(0, d_model, 2, dtype=torch.float32, device=distances.device)
    frequencies = 1 / (10000 ** (steps / d_model))
    # (length, 1) x (1, d_model / 2)
    angles = distances.to(torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class PositionTable:
    """Distances of one call, their sinusoids, and the relative keys of each layer.

    Entries run from the largest distance to zero, followed by `num_future` entries for future keys, which are masked.
    Relative keys (projected entries) do not depend on the input. In inference they are projected on first use and
    cached on the memory or cache, like keys and values, and not on a module, whose weights may change. Branches of a
    memory, in threads too, may share a table: entries are added and never changed.

    Args:
        distances (`torch.Tensor` of shape `(num_distances + num_future,)`): `num_distances - 1 … 0`, then zeros.
        num_future (`int`): Number of entries for future keys.
        clamp_len (`int`): Distances are clamped to this value; 0 or below: not clamped.
        dtype (`torch.dtype`): Dtype of the model.
        embeddings (`torch.Tensor` of shape `(num_distances + num_future, d_model)`, *optional*):
            Sinusoids, for the kinds that use them.
        keeps (`bool`): Whether relative keys are cached.
        smaller (`PositionTable`, *optional*):
            Table with at most as many distances and future keys, whose relative keys are reused.
    """

    # Exporters turn the `__dict__` of every object on a cache into inputs and outputs of the program. The table can be
    # recomputed and must not be among them: its `__dict__` exists and stays empty.
    __slots__ = (
        "__dict__",
        "clamp_len",
        "distances",
        "dtype",
        "embeddings",
        "keeps",
        "num_distances",
        "num_future",
        "projected",
        "smaller",
    )

    def __init__(
        self,
        distances: torch.Tensor,
        num_future: int,
        clamp_len: int,
        dtype: torch.dtype,
        embeddings: torch.Tensor | None,
        keeps: bool,
        smaller: "PositionTable | None" = None,
    ):
        self.distances = distances
        # not `len`, which would fix the length in an exported program
        self.num_distances = distances.shape[0] - num_future
        self.num_future = num_future
        self.clamp_len = clamp_len
        self.dtype = dtype
        self.embeddings = embeddings
        self.keeps = keeps
        self.smaller = smaller
        if smaller is not None:
            # do not keep a chain of tables alive
            smaller.smaller = None
        self.projected: dict[int, torch.Tensor] = {}

    def fits(self, clamp_len: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the table has these settings; `False` if an exporter has emptied it."""
        if not hasattr(self, "distances"):
            return False
        return clamp_len == self.clamp_len and self.dtype == dtype and self.distances.device == device

    def sinusoids(self) -> torch.Tensor:
        """`(num_distances + num_future, d_model)`, for a kind whose `uses_sinusoids` is set."""
        assert self.embeddings is not None
        return self.embeddings

    def relative_keys(
        self, layer_idx: int, layout: AttentionLayout, project: Callable[["PositionTable"], torch.Tensor]
    ) -> torch.Tensor:
        """Relative keys of a layer for distances `K - 1 … 0` and `Q` future keys, `(N, …)`."""
        keys = self.projected.get(layer_idx)
        if keys is None:
            smaller = self.smaller
            keys = project(self) if smaller is None else self._extend(smaller, layer_idx, project)
            if self.keeps:
                # distances contiguous in memory, for the product with a query
                keys = keys.movedim(0, -1).contiguous().movedim(-1, 0)
                self.projected[layer_idx] = keys
            if smaller is not None and len(self.projected) >= len(smaller.projected):
                # all layers have reused the smaller table
                self.smaller = None
        return self.of_call(keys, layout)

    def _extend(
        self, smaller: "PositionTable", layer_idx: int, project: Callable[["PositionTable"], torch.Tensor]
    ) -> torch.Tensor:
        """Relative keys of the smaller table, extended by larger distances and further future keys."""
        keys = smaller.projected.get(layer_idx)
        if keys is None:
            return project(self)
        # future keys have the same entry as distance 0
        pieces = [keys, keys[-1:].expand(self.num_future - smaller.num_future, *keys.shape[1:])]
        if farther := self.num_distances - smaller.num_distances:
            embeddings = None if self.embeddings is None else self.embeddings[:farther]
            beyond = PositionTable(self.distances[:farther], 0, self.clamp_len, self.dtype, embeddings, keeps=False)
            pieces.insert(0, project(beyond))
        return torch.cat([piece.movedim(0, -1) for piece in pieces], dim=-1).movedim(-1, 0)

    def for_one_layer(self) -> "PositionTable":
        """A table that caches relative keys for one call of a layer, which reads it several times."""
        if self.keeps:
            return self
        table = copy.copy(self)
        table.projected, table.keeps = {}, True
        return table

    def of_call(self, entries: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        """The entries of a call: distances `K - 1 … 0` and `Q` future keys."""
        return entries[self.num_distances - layout.key_length : self.num_distances + layout.query_length]


def grow_table(
    previous: PositionTable | None,
    layout: AttentionLayout,
    longest: int,
    make: Callable[[int, int, PositionTable | None], PositionTable],
) -> PositionTable:
    """The cached table of a stream if it is large enough, else a larger one that reuses its relative keys.

    Tables at least double, up to `longest`: short texts need few distances, long ones few extensions.

    Args:
        previous (`PositionTable`, *optional*): The cached table.
        layout (`AttentionLayout`): Layout of queries and keys.
        longest (`int`): Number of distances that later calls with as many queries need at most.
        make (`Callable`): Creates a table from its numbers of distances and future keys, and a smaller table.
    """
    compiles = torch.compiler.is_compiling()
    # compiled programs use one size
    needed = longest if compiles else layout.key_length
    num_future = layout.query_length
    if previous is not None and previous.num_distances >= needed and previous.num_future >= num_future:
        return previous
    if compiles:
        return make(longest, num_future, None)
    num_distances = min(longest, 2 * needed)
    if previous is None:
        return make(num_distances, num_future, None)
    reaches = previous.num_distances >= needed
    return make(previous.num_distances if reaches else num_distances, max(num_future, previous.num_future), previous)


def align_relative_scores(scores: torch.Tensor, key_length: int) -> torch.Tensor:
    """Re-index position scores from one column per distance to one column per key, without a copy.

    Column `c` belongs to distance `K - 1 - c`; the last Q columns belong to keys in the future. Query `i` needs key
    `j` at distance `i + K - Q - j`, which is column `j + Q - 1 - i`: each query starts one column further left than
    the one before, which a stride shorter by one expresses ("rel-shift", Appendix B of
    [Dai et al., 2019](https://arxiv.org/abs/1901.02860)).

    Args:
        scores (`torch.Tensor` of shape `(…, query_length, key_length + query_length)`):
            Query-position scores, largest distance first. The last two dimensions are contiguous.
        key_length (`int`): Keys K.

    Returns:
        `torch.Tensor` of shape `(…, query_length, key_length)`, a view.
    """
    query_length, width = scores.shape[-2:]
    if query_length == 1:
        return scores[..., :key_length]
    # (…, Q, K + Q) -> (…, Q * (K + Q)) -> (…, Q, K + Q - 1) -> (…, Q, K)
    shifted = scores.flatten(-2)[..., query_length - 1 : query_length - 1 + query_length * (width - 1)]
    return shifted.unflatten(-1, (query_length, width - 1))[..., :key_length]


def scores_by_distance(query: torch.Tensor, relative_keys: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """Scores of queries for every distance, `-inf` beyond the window and, for several queries, for future keys.

    The alignment drops the future key of a single query.

    Args:
        query (`torch.Tensor` of shape `(H, any number, D)`): Scaled queries of any batch rows.
        relative_keys (`torch.Tensor` of shape `(H, D, key_length + query_length)`): Largest distance first.
        layout (`AttentionLayout`): Layout of queries and keys, without `distances`.

    Returns:
        `torch.Tensor` of shape `(H, any number, key_length + query_length)`.
    """
    if torch.is_grad_enabled() or is_traced(query):
        return torch.baddbmm(distance_mask(layout, query), query, relative_keys)
    # masked distances are at the two ends: filling them is cheaper than adding a mask
    scores = torch.bmm(query, relative_keys)
    num_beyond = 0 if layout.window is None else max(0, layout.key_length - layout.window)
    if num_beyond:
        scores[..., :num_beyond].fill_(float("-inf"))
    if layout.query_length > 1:
        scores[..., layout.key_length :].fill_(float("-inf"))
    return scores


def gather_relative_scores(scores: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """Re-index position scores from distances to keys, for rows with pads or free slots between tokens.

    Args:
        scores (`torch.Tensor` of shape `(batch_size, num_heads, query_length, key_length)`):
            Query-position scores, column `c` for distance `K - 1 - c`.
        layout (`AttentionLayout`): With `distances` and `visible`.

    Returns:
        `torch.Tensor` of the same shape, one column per key, `-inf` where a key is not visible.
    """
    assert layout.distances is not None and layout.visible is not None
    columns = (layout.key_length - 1 - layout.distances).clamp(0, layout.key_length - 1)
    aligned = scores.gather(-1, columns[:, None].expand_as(scores))
    return aligned.masked_fill(~layout.visible[:, None], float("-inf"))


def spread_relative_probabilities(probabilities: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """Re-index attention probabilities from one column per key to one per distance, the inverse of the alignment.

    Args:
        probabilities (`torch.Tensor` of shape `(batch_size, num_heads, query_length, key_length)`): By key.
        layout (`AttentionLayout`): Layout of queries and keys.

    Returns:
        `torch.Tensor` of shape `(batch_size, num_heads, query_length, key_length + query_length)`, column `c` for
        distance `K - 1 - c`; the last Q columns are zero.
    """
    query_length, key_length = probabilities.shape[-2:]
    if layout.distances is not None:
        columns = (key_length - 1 - layout.distances).clamp(0, key_length - 1)
        spread = probabilities.new_zeros(*probabilities.shape[:-1], key_length + query_length)
        return spread.scatter_add(-1, columns[:, None].expand_as(probabilities), probabilities)
    # (…, Q, K) -> (…, Q, K + Q - 1) -> (…, Q * (K + Q)) -> (…, Q, K + Q)
    padded = F.pad(probabilities, (0, query_length - 1)).flatten(-2)
    return F.pad(padded, (query_length - 1, 1)).unflatten(-1, (query_length, key_length + query_length))


__all__ = [
    "PositionTable",
    "align_relative_scores",
    "gather_relative_scores",
    "grow_table",
    "scores_by_distance",
    "sinusoid_embeddings",
    "spread_relative_probabilities",
]
