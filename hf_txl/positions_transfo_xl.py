"""Where queries and keys lie: layouts, distances, sinusoids, the position table, and moving scores between the two.

Follows section 3.3 and Appendix B of [Dai et al., 2019](https://arxiv.org/abs/1901.02860). Positions and masks are
integers until a table is read, and the sinusoid is float32 whatever the model is. It is apart from attention since
every attention kind, and what a call continues from, reads it.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# B batch   H heads   Q queries (one segment)   K keys: start slots, then stored ones, then the segment's
# N = K + Q rows of a position table: distances K - 1 … 0, then Q rows for keys in the future


@dataclass(frozen=True)
class AttentionLayout:
    """Where the queries and keys of one call lie, the same for every layer.

    Without `distances`, key `j` is at distance `i + (K - Q) - j` from query `i`, in every row.

    Args:
        query_length (`int`): Queries Q: the tokens of this call.
        key_length (`int`): Keys K, start slots included.
        start_slots (`int`):
            Zero states attended to before the first stored position and stored nowhere (`memory_init="zeros"`).
        zero_start (`bool`): Whether there can be any: `memory_init` is `"zeros"`.
        window (`int`, *optional*): Keys a query may see, itself included; `None`: everything before it.
        key_mask (`torch.Tensor` of shape `(batch_size, key_length)`, *optional*): Keys that exist in a row.
        start_mask (`torch.Tensor` of shape `(batch_size, key_length)`, *optional*): Keys to be read as a zero state.
        distances (`torch.Tensor` of shape `(batch_size or 1, query_length, key_length)`, *optional*):
            Distances where pads or free slots lie between the tokens.
        visible (`torch.Tensor` of the same shape, *optional*): Given with `distances`: keys that a query sees.
        age (`torch.Tensor` of shape `(batch_size or 1, key_length)`, *optional*):
            Given with `distances`: distance of each key from its row's last token.
    """

    query_length: int
    key_length: int
    start_slots: int = 0
    zero_start: bool = False
    window: int | None = None
    key_mask: torch.Tensor | None = None
    start_mask: torch.Tensor | None = None
    distances: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    age: torch.Tensor | None = None

    @classmethod
    def from_mask(
        cls,
        mask: torch.Tensor,
        query_start: int,
        query_length: int,
        start_slots: int,
        window: int | None,
        zero_start: bool,
        oldest: torch.Tensor | None = None,
    ) -> "AttentionLayout":
        """Number the real tokens of each row one after another: pads and free slots take no distance.

        Args:
            mask (`torch.Tensor` of shape `(batch_size or 1, number of keys without start slots)`): Real tokens.
            query_start (`int`): Index of the first query among those keys.
            query_length (`int`): Queries.
            start_slots (`int`): Zero states in front of them.
            window (`int`, *optional*): As above.
            zero_start (`bool`): Whether slots before the first token of a row stand for zero states.
            oldest (`torch.Tensor` of shape `(batch_size, 1)`, *optional*):
                Position, counted from the first stored token, before which there are no more zero states.
        """
        num_keys = start_slots + mask.shape[1]
        index = torch.arange(num_keys, device=mask.device)
        real = F.pad(mask, (start_slots, 0), value=False)
        count = real.cumsum(-1)
        before_first = count == 0
        # (B, K): 0 is the first real token; the slots before it count backwards from -1
        position = torch.where(before_first, index - before_first.sum(-1, keepdim=True), count - 1)
        start_mask = None
        exists = real
        if zero_start:
            start_mask = before_first if oldest is None else before_first & (position >= oldest)
            exists = real | start_mask
        queries = slice(start_slots + query_start, start_slots + query_start + query_length)
        # (B, Q, 1) - (B, 1, K) -> (B, Q, K)
        distances = position[:, queries, None] - position[:, None, :]
        visible = exists[:, None, :] & (distances >= 0)
        if window is not None:
            visible = visible & (distances < window)
        # a pad sees itself, so that no row of the softmax is empty
        visible = visible | (index == index[queries, None])
        age = position[:, -1:] - position
        return cls(query_length, num_keys, start_slots, zero_start, window, None, start_mask, distances, visible, age)

    def part(self, row: int, start: int, end: int) -> tuple["AttentionLayout", slice]:
        """Layout of some queries of one row, and the keys that it covers: those that one of these queries may see.

        Only without `distances`.

        Args:
            row (`int`): Row of the batch.
            start, end (`int`): The queries.
        """
        assert self.distances is None
        past_length = self.key_length - self.query_length
        first = 0 if self.window is None else max(0, past_length + start - self.window + 1)
        keys = slice(first, past_length + end)
        key_mask = None if self.key_mask is None else self.key_mask[row : row + 1, keys]
        return AttentionLayout(end - start, keys.stop - first, window=self.window, key_mask=key_mask), keys


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


class RelativeKeys:
    """Position table of one call and, where keys and values are kept, what each layer makes of it.

    Rows run from the largest distance to zero and are followed by `num_future` rows for keys that lie in the future of
    a query, which the mask removes. What a layer makes of a row depends on no input, so while a stream is read without
    gradients it is computed once, when the stream first needs it; the object then lives on the cache, whose keys are
    frozen in the same way, and never on a module, whose weights may change. Branches of a cache may read it at once,
    in threads too: rows are added and never changed.

    Args:
        distances (`torch.Tensor` of shape `(num_distances + num_future,)`): `num_distances - 1 … 0`, then zeros.
        num_future (`int`): Rows for future keys.
        clamp_len (`int`): Distance above which the rows are the same; not used if 0 or below.
        dtype (`torch.dtype`): Type of the model.
        embeddings (`torch.Tensor` of shape `(num_distances + num_future, d_model)`, *optional*):
            Sinusoids, for the kinds that read them.
        keeps (`bool`): Whether the layers' rows are kept.
        smaller (`RelativeKeys`, *optional*): Table of no more rows of either sort, whose rows are taken over.
    """

    # An exporter turns the attributes in `__dict__` of all that it finds on a cache into inputs and outputs of the
    # program. The table is no state: it is made anew where it is missing, so `__dict__` is there and stays empty.
    __slots__ = (
        "__dict__",
        "clamp_len",
        "distances",
        "dtype",
        "embeddings",
        "keeps",
        "num_distances",
        "num_future",
        "rows",
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
        smaller: "RelativeKeys | None" = None,
    ):
        self.distances = distances
        # a length that an exported program may vary: `len` would fix it
        self.num_distances = distances.shape[0] - num_future
        self.num_future = num_future
        self.clamp_len = clamp_len
        self.dtype = dtype
        self.embeddings = embeddings
        self.keeps = keeps
        self.smaller = smaller
        if smaller is not None:
            # it has served, and must not keep a chain of others alive
            smaller.smaller = None
        self.rows: dict[int, torch.Tensor] = {}

    def fits(self, clamp_len: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the rows serve a call, as far as they reach; never those of a table that an exporter emptied."""
        if not hasattr(self, "distances"):
            return False
        return clamp_len == self.clamp_len and self.dtype == dtype and self.distances.device == device

    def sinusoids(self) -> torch.Tensor:
        """`(num_distances + num_future, d_model)`, for a kind whose `uses_sinusoids` is set."""
        assert self.embeddings is not None
        return self.embeddings

    def rows_for(
        self, layer_idx: int, layout: AttentionLayout, make_rows: Callable[["RelativeKeys"], torch.Tensor]
    ) -> torch.Tensor:
        """What a layer makes of the rows for distances `K - 1 … 0` and `Q` future keys, `(N, …)`."""
        rows = self.rows.get(layer_idx)
        if rows is None:
            smaller = self.smaller
            rows = make_rows(self) if smaller is None else self._extend(smaller, layer_idx, make_rows)
            if self.keeps:
                # distances side by side in memory: a query then meets all of them at the speed of reading
                rows = rows.movedim(0, -1).contiguous().movedim(-1, 0)
                self.rows[layer_idx] = rows
            if smaller is not None and len(self.rows) >= len(smaller.rows):
                # every layer has taken its rows over
                self.smaller = None
        return self.of_call(rows, layout)

    def _extend(
        self, smaller: "RelativeKeys", layer_idx: int, make_rows: Callable[["RelativeKeys"], torch.Tensor]
    ) -> torch.Tensor:
        """The rows of a smaller table between those of the distances that it does not reach and more future keys."""
        rows = smaller.rows.get(layer_idx)
        if rows is None:
            return make_rows(self)
        # a future key has the row of distance 0, and so has the last row
        pieces = [rows, rows[-1:].expand(self.num_future - smaller.num_future, *rows.shape[1:])]
        if farther := self.num_distances - smaller.num_distances:
            embeddings = None if self.embeddings is None else self.embeddings[:farther]
            beyond = RelativeKeys(self.distances[:farther], 0, self.clamp_len, self.dtype, embeddings, keeps=False)
            pieces.insert(0, make_rows(beyond))
        return torch.cat([piece.movedim(0, -1) for piece in pieces], dim=-1).movedim(-1, 0)

    def for_one_layer(self) -> "RelativeKeys":
        """The same table, to keep what a layer makes of it while that layer reads it several times."""
        if self.keeps:
            return self
        table = copy.copy(self)
        table.rows, table.keeps = {}, True
        return table

    def of_call(self, rows: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        """Of rows for the whole table, those for distances `K - 1 … 0` and `Q` future keys."""
        return rows[self.num_distances - layout.key_length : self.num_distances + layout.query_length]


def align_relative_scores(scores: torch.Tensor, key_length: int) -> torch.Tensor:
    """Re-index position scores from one column per distance to one column per key, without a copy.

    Column `c` belongs to distance `K - 1 - c`; the last Q columns belong to keys in the future. Query `i` needs key
    `j` at distance `i + K - Q - j`, which is column `j + Q - 1 - i`: each row starts one column further left than the
    row above. In memory that is a row stride one shorter than the row ("rel-shift", Appendix B of
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
    rows = scores.flatten(-2)[..., query_length - 1 : query_length - 1 + query_length * (width - 1)]
    return rows.unflatten(-1, (query_length, width - 1))[..., :key_length]


def scores_by_distance(query: torch.Tensor, rows: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """Scores of queries for every distance, `-inf` beyond the window and for future keys.

    Args:
        query (`torch.Tensor` of shape `(H, any number, D)`): Queries of any rows of the batch, scaled.
        rows (`torch.Tensor` of shape `(H, D, key_length + query_length)`): Position table, largest distance first.
        layout (`AttentionLayout`): Where queries and keys lie, without `distances`.

    Returns:
        `torch.Tensor` of shape `(H, any number, key_length + query_length)`.
    """
    if torch.is_grad_enabled() or _is_traced(query):
        return torch.baddbmm(distance_mask(layout, query), query, rows)
    # what is hidden lies at the two ends: cheaper to fill than a mask of the scores' size
    scores = torch.bmm(query, rows)
    num_beyond = 0 if layout.window is None else max(0, layout.key_length - layout.window)
    for hidden in (scores[..., :num_beyond], scores[..., layout.key_length :]):
        if hidden.shape[-1]:
            hidden.fill_(float("-inf"))
    return scores


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether a program is made of what is done, or the tensor belongs to a mode such as one without data."""
    return type(tensor) is not torch.Tensor or torch.compiler.is_compiling()


def distance_mask(layout: AttentionLayout, like: torch.Tensor) -> torch.Tensor:
    """0 for the distances a query may look at, `-inf` beyond the window and for future keys, `(1, 1, K + Q)`.

    Causal mask and window depend on the distance alone, so they are laid over the scores before these are aligned.
    """
    lengths = (layout.key_length, layout.query_length, layout.window)
    # what belongs to a mode that ends must not be kept
    if _is_traced(like):
        return make_distance_mask(*lengths, like.dtype, like.device)
    return kept_distance_mask(*lengths, like.dtype, like.device, torch.is_inference_mode_enabled())


def make_distance_mask(
    key_length: int, query_length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    distance = torch.arange(key_length - 1, -query_length - 1, -1, device=device)
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    mask = torch.zeros(key_length + query_length, dtype=dtype, device=device)
    return mask.masked_fill(hidden, float("-inf"))[None, None, :]


@functools.lru_cache(maxsize=64)
def kept_distance_mask(
    key_length: int,
    query_length: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    is_inference: bool,
) -> torch.Tensor:
    """All layers of a call ask for the same one, and all tokens behind a full memory; nothing ever writes into it.

    Autograd takes no tensor that was made in inference mode, so each mode has its own.
    """
    return make_distance_mask(key_length, query_length, window, dtype, device)


def gather_relative_scores(scores: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """Re-index position scores by the distances of a layout, for rows with pads or free slots between tokens.

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
    """Re-index attention probabilities from one column per key to one column per distance: alignment backwards.

    Args:
        probabilities (`torch.Tensor` of shape `(batch_size, num_heads, query_length, key_length)`): By key.
        layout (`AttentionLayout`): Where queries and keys lie.

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
    rows = F.pad(probabilities, (0, query_length - 1)).flatten(-2)
    return F.pad(rows, (query_length - 1, 1)).unflatten(-1, (query_length, key_length + query_length))


__all__ = [
    "AttentionLayout",
    "RelativeKeys",
    "align_relative_scores",
    "distance_mask",
    "gather_relative_scores",
    "scores_by_distance",
    "sinusoid_embeddings",
    "spread_relative_probabilities",
]
