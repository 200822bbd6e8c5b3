"""Adaptive embedding and softmax against the full softmax rebuilt from its clusters, token by token."""

import copy
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_txl import TransfoXLForCausalLM, adaptive_softmax_transfo_xl
from hf_txl.adaptive_softmax_transfo_xl import AdaptiveEmbedding, AdaptiveLogSoftmax
from tests.helpers import assert_close
from tests.t0 import GRADIENTS, LARGE_WEIGHTS, make_config, make_model, random_ids

# losses and log-probabilities of order 1 to 10, at worst rounded to float32
NATS = 1e-5
# a product of two or three float64 matrices
EXACT = 1e-10

BUCKETS = [
    pytest.param({"cutoffs": cutoffs, "div_val": div_val, "d_embed": d_embed}, id=f"{cutoffs}-{div_val}-{d_embed}")
    for cutoffs in ([], [10, 50, 80])
    for div_val in (1, 2)
    for d_embed in (16, 32)
]
# and the other ways to share: nothing tied, projections of equal width left out
SHARING = [
    pytest.param({"tie_word_embeddings": False, "tie_projs": [False] * 4}, id="untied"),
    pytest.param({"proj_same_dim": False}, id="no projection of equal width"),
    pytest.param({"div_val": 1, "d_embed": 16, "tie_projs": [True] * 4}, id="div_val 1, tied projections"),
]


def model_of(**fields: Any) -> TransfoXLForCausalLM:
    """Float64, with biases that are not zero."""
    model = make_model(n_layer=1, **LARGE_WEIGHTS, **fields).double()
    with torch.no_grad():
        for name, parameter in model.crit.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    return model


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def bounds(config: Any) -> list[int]:
    return [0, *config.cutoffs, config.vocab_size]


def table_of(module: Any, config: Any, bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output weight and bias of one bucket."""
    if config.div_val == 1:
        words = slice(bounds(config)[bucket], bounds(config)[bucket + 1])
        return module.out_layers[0].weight[words], module.out_layers[0].bias[words]
    return module.out_layers[bucket].weight, module.out_layers[bucket].bias


def log_probabilities(crit: AdaptiveLogSoftmax, config: Any, hidden: torch.Tensor) -> torch.Tensor:
    """log p of every word, by the formula: p(shortlist word) or p(cluster) p(word | cluster), in float64."""

    def narrow(bucket: int) -> torch.Tensor:
        width = config.d_embed // config.div_val**bucket
        projected = config.d_embed != 32 if config.div_val == 1 else config.proj_same_dim or width != 32
        return hidden @ crit.out_projs[str(bucket)] if projected else hidden

    weight, bias = table_of(crit, config, 0)
    head = narrow(0) @ weight.T + bias
    if not config.cutoffs:
        return head.log_softmax(-1)
    head = torch.cat([head, narrow(0) @ crit.cluster_weight.T + crit.cluster_bias], dim=-1).log_softmax(-1)
    shortlist = config.cutoffs[0]
    parts = [head[..., :shortlist]]
    for cluster in range(1, len(config.cutoffs) + 1):
        weight, bias = table_of(crit, config, cluster)
        inside = (narrow(cluster) @ weight.T + bias).log_softmax(-1)
        parts.append(head[..., shortlist + cluster - 1, None] + inside)
    return torch.cat(parts, dim=-1)


# --- embedding


@pytest.mark.parametrize("fields", [*BUCKETS, *SHARING])
def test_embedding_is_the_row_of_the_bucket_projected_and_scaled(fields: dict[str, Any]) -> None:
    """C26, C37: every id of the vocabulary, one at a time, and the gradient of every table."""
    model = model_of(**fields)
    embedding, config = model.transformer.word_emb, model.config
    ids = torch.arange(99).flip(0).view(3, 33)
    ours = embedding(ids)
    expected = []
    for token in ids.flatten().tolist():
        bucket = sum(token >= cutoff for cutoff in config.cutoffs)
        if config.div_val == 1:
            vector, name = embedding.emb_layers[0].weight[token], "0"
        else:
            vector, name = embedding.emb_layers[bucket].weight[token - bounds(config)[bucket]], str(bucket)
        if name in embedding.emb_projs:
            vector = embedding.emb_projs[name] @ vector
        expected.append(vector * math.sqrt(32))
    expected = torch.stack(expected).view(3, 33, 32)
    assert_close("embeddings", ours, expected, EXACT)
    target = states(3, 33)
    parameters = list(embedding.parameters())
    for index, (mine, theirs) in enumerate(
        zip(
            torch.autograd.grad((ours * target).sum(), parameters),
            torch.autograd.grad((expected * target).sum(), parameters),
            strict=True,
        )
    ):
        assert_close(f"gradient of parameter {index}", mine, theirs, EXACT)


def test_a_token_does_not_reach_the_tables_of_other_buckets() -> None:
    model = model_of()
    embedding = model.transformer.word_emb
    embedding(torch.tensor([[3, 9, 55]])).sum().backward()
    touched = [table.weight.grad is not None and bool(table.weight.grad.any()) for table in embedding.emb_layers]
    assert touched == [True, False, True, False]


# --- probabilities and losses


@pytest.mark.parametrize("fields", [*BUCKETS, *SHARING])
def test_probabilities_sum_to_one_and_follow_the_formula(fields: dict[str, Any]) -> None:
    """C26, C37: one implementation for every form of vocabulary."""
    model = model_of(**fields)
    hidden = states(2, 7)
    ours = model.crit.log_prob(hidden)
    assert ours.shape == (2, 7, 99)
    assert_close("sum of probabilities", ours.double().exp().sum(-1), torch.ones(2, 7), 1e-5)
    assert_close("log-probabilities", ours, log_probabilities(model.crit, model.config, hidden), NATS)
    assert_close("softmax of logits", model.crit.logits(hidden).log_softmax(-1), ours, NATS)


@pytest.mark.parametrize("fields", [*BUCKETS, *SHARING])
def test_losses_agree_with_the_probabilities_token_by_token(fields: dict[str, Any]) -> None:
    """C37: every token of the vocabulary as a target."""
    model = model_of(**fields)
    hidden, targets = states(3, 33), torch.randperm(99).view(3, 33)
    losses = model.crit(hidden, targets)
    assert losses.shape == targets.shape
    expected = -log_probabilities(model.crit, model.config, hidden).gather(-1, targets[..., None])[..., 0]
    assert_close("losses", losses, expected, NATS)


@pytest.mark.parametrize("fields", [*BUCKETS, *SHARING])
def test_gradients_of_losses_follow_the_formula(fields: dict[str, Any]) -> None:
    """With some targets ignored; a different weight for every token, so that none takes another's place."""
    model = model_of(**fields)
    hidden = states(3, 33).requires_grad_(True)
    targets = torch.randperm(99).view(3, 33)
    targets[1, 5:20] = -100
    weights = torch.rand(3, 33, dtype=torch.float64) * (targets != -100)
    leaves = [hidden, *dict.fromkeys(model.crit.parameters())]
    expected = -log_probabilities(model.crit, model.config, hidden).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    ours = torch.autograd.grad((model.crit(hidden, targets) * weights).sum(), leaves)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves)
    names = ["hidden states", *dict(model.crit.named_parameters())]
    for name, mine, formula in zip(names, ours, theirs, strict=True):
        assert_close(f"gradient of {name}", mine, formula, **GRADIENTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("cutoffs", [[], [10, 50, 80]])
def test_losses_and_log_probabilities_are_float32_in_half_precision_too(
    cutoffs: list[int], dtype: torch.dtype
) -> None:
    """C31: normalised to one as exactly as in float32."""
    crit = make_model(cutoffs=cutoffs, div_val=1, n_layer=1).crit.to(dtype)
    hidden, targets = torch.randn(2, 5, 32).to(dtype), random_ids(2, 5)
    assert crit(hidden, targets).dtype == torch.float32
    log_probabilities = crit.log_prob(hidden)
    assert log_probabilities.dtype == torch.float32
    assert_close("sum of probabilities", log_probabilities.double().exp().sum(-1), torch.ones(2, 5), 1e-5)


def test_losses_keep_token_order() -> None:
    """By position, not by cluster: targets that jump between the clusters, scored one position at a time."""
    model = model_of()
    hidden, targets = states(2, 6), torch.tensor([[90, 3, 60, 20, 81, 0], [49, 98, 10, 79, 9, 50]])
    losses = model.crit(hidden, targets)
    for row in range(2):
        for time in range(6):
            alone = model.crit(hidden[row : row + 1, time : time + 1], targets[row : row + 1, time : time + 1])
            assert_close("loss", losses[row, time], alone[0, 0], NATS)


@pytest.mark.parametrize("fields", BUCKETS)
def test_ignored_targets_cost_nothing_and_send_no_gradient(fields: dict[str, Any]) -> None:
    """C25 for every form of vocabulary; the other losses are as without them."""
    model = model_of(**fields)
    hidden = states(2, 7).requires_grad_(True)
    targets = random_ids(2, 7)
    all_losses = model.crit(hidden, targets)
    targets[0, ::2] = -100
    losses = model.crit(hidden, targets)
    kept = targets != -100
    assert (losses[~kept] == 0).all()
    assert_close("losses", losses[kept], all_losses[kept], NATS)
    (gradient,) = torch.autograd.grad(losses.sum(), hidden)
    assert (gradient[~kept] == 0).all()
    assert (gradient[kept] != 0).any(-1).all()


@pytest.mark.parametrize("d_embed", [16, 32])
def test_a_plain_softmax_with_ignored_labels_is_cross_entropy(d_embed: int) -> None:
    """C25"""
    model = model_of(cutoffs=[], div_val=1, d_embed=d_embed)
    hidden, targets = states(3, 7), random_ids(3, 7)
    targets[1] = -100
    targets[2, 3] = -100
    losses = model.crit(hidden, targets)
    logits = model.crit.logits(hidden).double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert_close("mean", losses.sum() / (targets != -100).sum(), expected, NATS)


@pytest.mark.parametrize("fields", BUCKETS)
@pytest.mark.parametrize("targets", [torch.full((2, 3), -100), torch.full((2, 3), 4), torch.full((2, 3), 98)])
def test_empty_buckets_are_no_special_case(fields: dict[str, Any], targets: torch.Tensor) -> None:
    """All targets ignored, in the shortlist, or in one cluster; every parameter takes part in the backward pass."""
    model = model_of(**fields)
    hidden = states(2, 3).requires_grad_(True)
    losses = model.crit(hidden, targets)
    expected = -log_probabilities(model.crit, model.config, hidden).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert_close("losses", losses, expected * (targets != -100), NATS)
    losses.sum().backward()
    for name, parameter in model.crit.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_a_single_position_and_a_single_cluster() -> None:
    model = model_of(cutoffs=[40], div_val=2)
    hidden = states(1, 1)
    for token in (0, 39, 40, 98):
        loss = model.crit(hidden, torch.tensor([[token]]))
        expected = -log_probabilities(model.crit, model.config, hidden)[..., token]
        assert_close("loss", loss, expected, NATS)


# --- blocks and memory


@pytest.mark.parametrize("limit", [1, 60, 500])
@pytest.mark.parametrize("fields", BUCKETS)
def test_scoring_in_blocks_changes_no_loss_and_no_gradient(
    fields: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one token, of a few, and of many; ignored targets included."""
    model = model_of(**fields)
    hidden = states(3, 13).requires_grad_(True)
    targets = random_ids(3, 13)
    targets[0, :4] = -100
    weights = torch.rand(3, 13, dtype=torch.float64)
    leaves = [hidden, *dict.fromkeys(model.crit.parameters())]

    def losses_and_gradients() -> list[torch.Tensor]:
        losses = model.crit(hidden, targets)
        return [losses, *torch.autograd.grad((losses * weights).sum(), leaves)]

    whole = losses_and_gradients()
    monkeypatch.setattr(adaptive_softmax_transfo_xl, "MAX_LOGITS", limit)
    in_blocks = losses_and_gradients()
    with torch.no_grad():
        in_blocks_without_gradients = model.crit(hidden, targets)
    names = ["losses", "hidden states", *dict(model.crit.named_parameters())]
    for name, ours, expected in zip(names, in_blocks, whole, strict=True):
        assert_close(name, ours, expected, **GRADIENTS)
    assert_close("losses without gradients", in_blocks_without_gradients, whole[0], NATS)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("cutoffs", [[], [100, 500], [1900]])
def test_scoring_never_builds_a_tensor_of_tokens_times_vocabulary(
    cutoffs: list[int], with_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole training or scoring step, logits not asked for; blocks as with a real vocabulary."""
    model = make_model(vocab_size=2000, cutoffs=cutoffs, div_val=2 if cutoffs else 1, n_layer=1).train(with_gradients)
    ids = random_ids(16, 10, vocab_size=2000)
    limit = 20_000
    monkeypatch.setattr(adaptive_softmax_transfo_xl, "MAX_LOGITS", limit)
    with torch.set_grad_enabled(with_gradients), LargestTensor() as record:
        output = model(ids, labels=ids, return_logits=False)
        if with_gradients:
            output.loss.backward()
    assert output.logits is None
    # the table of the vocabulary itself, or a block of logits
    assert record.largest <= max(2000 * 32, limit + 2000)
    assert record.largest < 160 * 2000 / 2
    # and the record would have seen one
    with torch.no_grad(), LargestTensor() as record:
        model(ids)
    assert record.largest >= 160 * 2000


@pytest.mark.parametrize("with_gradients", [False, True])
def test_clusters_are_scored_for_their_own_tokens_only(with_gradients: bool) -> None:
    """Without blocks too: 180 tokens of the shortlist and 20 of a cluster of 1900 words."""
    model = make_model(vocab_size=2000, cutoffs=[100], n_layer=1)
    hidden = torch.randn(2, 100, 32)
    targets = torch.full((2, 100), 7)
    targets[0, :20] = 1500
    with torch.set_grad_enabled(with_gradients), LargestTensor() as record:
        model.crit(hidden, targets)
    assert record.largest <= 20 * 1900


# --- cluster order


def test_cluster_order_of_the_original_is_this_one_reversed() -> None:
    """C36: the original PyTorch code reads cluster i in the i-th row from the end of the head, here the i-th.

    Its formula, written out, on weights of its own, against a model that holds the same weights with the rows of
    `cluster_weight` and `cluster_bias` reversed. Without the reversal only the middle one of three clusters agrees.
    """
    model = model_of()
    crit, config = model.crit, model.config
    theirs = copy.deepcopy(crit)
    hidden = states(99)

    def original_losses(target: int) -> torch.Tensor:
        """`log p = head[-i] + tail_i` with the head `[shortlist, cluster rows]`."""
        weight = torch.cat([theirs.out_layers[0].weight, theirs.cluster_weight])
        bias = torch.cat([theirs.out_layers[0].bias, theirs.cluster_bias])
        head = (hidden[target] @ theirs.out_projs["0"] @ weight.T + bias).log_softmax(-1)
        if target < config.cutoffs[0]:
            return -head[target]
        i = sum(target >= cutoff for cutoff in config.cutoffs)
        tail = hidden[target] @ theirs.out_projs[str(i)] @ theirs.out_layers[i].weight.T + theirs.out_layers[i].bias
        return -(head[-i] + tail.log_softmax(-1)[target - config.cutoffs[i - 1]])

    expected = torch.stack([original_losses(target) for target in range(99)])
    unchanged = crit(hidden[None], torch.arange(99)[None])[0]
    with torch.no_grad():
        crit.cluster_weight.copy_(theirs.cluster_weight.flip(0))
        crit.cluster_bias.copy_(theirs.cluster_bias.flip(0))
    reversed_rows = crit(hidden[None], torch.arange(99)[None])[0]
    assert_close("losses", reversed_rows, expected, NATS)
    agrees = (unchanged - expected).abs() < 1e-3
    buckets = torch.tensor([sum(token >= cutoff for cutoff in config.cutoffs) for token in range(99)])
    assert [bool(agrees[buckets == bucket].all()) for bucket in range(4)] == [True, False, True, False]


# --- sharing


def shared_projections(model: TransfoXLForCausalLM) -> list[bool]:
    crit, embedding = model.crit, model.transformer.word_emb
    return [crit.out_projs[str(bucket)] is embedding.emb_projs[str(bucket)] for bucket in range(4)]


def shared_tables(model: TransfoXLForCausalLM) -> list[bool]:
    tables = zip(model.crit.out_layers, model.transformer.word_emb.emb_layers, strict=True)
    return [output.weight is table.weight for output, table in tables]


def reload(model: TransfoXLForCausalLM, folder: Any) -> TransfoXLForCausalLM:
    model.save_pretrained(folder)
    return TransfoXLForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("path", ["built", "loaded", "moved", "copied"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_tables_and_projections_are_shared_as_configured(tie: bool, share: bool, path: str, tmp_path: Any) -> None:
    """C42: table i with embedding i; by default the projections [no, yes, yes, yes]; identity is kept."""
    model = make_model(tie_word_embeddings=tie, proj_share_all_but_first=share)
    if path == "loaded":
        model = reload(model, tmp_path)
    elif path == "moved":
        model = model.to(torch.float64).to("cpu").to(torch.float32)
    elif path == "copied":
        model = copy.deepcopy(model)
    assert shared_tables(model) == [tie] * 4
    assert shared_projections(model) == [False, share, share, share]


@pytest.mark.parametrize("tie", [True, False])
def test_one_table_for_all_clusters_of_equal_width_is_shared(tie: bool, tmp_path: Any) -> None:
    """C42 with `div_val=1`: one table, and projections that may be tied to the embedding's only one."""
    model = make_model(div_val=1, d_embed=16, tie_projs=[True, False, True, False], tie_word_embeddings=tie)
    for candidate in (model, reload(model, tmp_path)):
        assert shared_tables(candidate) == [tie]
        source = candidate.transformer.word_emb.emb_projs["0"]
        assert [candidate.crit.out_projs[str(bucket)] is source for bucket in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("tie", [True, False])
def test_loading_restores_untied_weights_too(tie: bool, tmp_path: Any) -> None:
    """C42, C96: every parameter comes back bit by bit, those that are not tied with their own values."""
    model = make_model(tie_word_embeddings=tie, proj_share_all_but_first=tie)
    loaded = dict(reload(model, tmp_path).named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(loaded[name], parameter), name


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, 5.7, id="T0"),
        pytest.param({"tie_word_embeddings": False}, 5.7, id="T0 untied"),
        pytest.param({"proj_share_all_but_first": False}, 5.7, id="T0 with projections untied"),
        pytest.param({"cutoffs": [], "div_val": 1}, math.log(99), id="plain softmax"),
        pytest.param({"cutoffs": [], "div_val": 1, "tie_word_embeddings": False}, math.log(99), id="plain, untied"),
    ],
)
@torch.no_grad()
def test_a_new_model_knows_nothing(fields: dict[str, Any], expected: float) -> None:
    """C42: start loss on uniform random ids: 13 head outputs equally likely, or 99 words."""
    model = make_model(**fields)
    ids = random_ids(8, 40)
    assert abs(model(ids, labels=ids).loss.item() - expected) < 0.5


def test_start_loss_of_t0_is_that_of_equally_likely_outputs() -> None:
    """Where the 5.7 of C42 comes from: ln 13 for the head, and ln of the cluster's size inside it."""
    sizes = [10, 40, 30, 19]
    expected = sum(
        size / 99 * (math.log(13) + (math.log(size) if cluster else 0)) for cluster, size in enumerate(sizes)
    )
    assert abs(expected - 5.7) < 0.05


# --- parameter lists


@pytest.mark.parametrize(
    "fields",
    [{"div_val": 1}, {"div_val": 1, "cutoffs": []}, {"div_val": 2}, {"proj_same_dim": False}, {"d_embed": 16}],
)
def test_parameter_containers_hold_parameters_only(fields: dict[str, Any]) -> None:
    """C46: no None entries, and every parameter is found by its name."""
    model = make_model(**fields)
    for module in (model.crit.out_projs, model.transformer.word_emb.emb_projs):
        assert all(isinstance(parameter, torch.nn.Parameter) for parameter in module.values())
    embedding, crit = AdaptiveEmbedding(make_config(**fields)), AdaptiveLogSoftmax(make_config(**fields))
    assert all(parameter is not None for module in (embedding, crit) for parameter in module.parameters())


@pytest.mark.parametrize("fields", [{}, {"div_val": 1}, {"div_val": 1, "d_embed": 16}, {"cutoffs": [], "div_val": 1}])
def test_forward_does_not_ask_for_its_own_parameters(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """C46: in a replica of DataParallel `parameters()` is empty; dtype and device must come from the input."""
    model = make_model(**fields)
    ids = random_ids(2, 5)
    expected = model(ids, labels=ids)
    for module in model.modules():
        monkeypatch.setattr(module, "parameters", lambda recurse=True: iter(()))
    with torch.no_grad():
        output = model(ids, labels=ids)
    assert_close("loss", output.loss, expected.loss, NATS)
    assert_close("logits", output.logits, expected.logits, NATS)


@pytest.mark.parametrize("num_candidates", [1, 4, 10, 11])
@pytest.mark.parametrize("fields", [{"div_val": 2}, {"div_val": 1}, {"cutoffs": [], "div_val": 1}])
def test_the_likeliest_candidates_are_those_of_all_tokens(fields: dict[str, Any], num_candidates: int) -> None:
    """Where clusters are left out, the first `num_candidates` tokens and their probabilities are the same."""
    crit = model_of(**fields).crit
    for seed in range(8):
        hidden_states = 3 * torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        expected, actual = crit.log_prob(hidden_states), crit.log_prob(hidden_states, num_candidates)
        computed = actual.isfinite()
        assert torch.equal(actual[computed], expected[computed])
        if crit.num_clusters and num_candidates == 11:
            # more than the shortlist holds
            assert computed.all()
        for ours, theirs in zip(actual.topk(num_candidates), expected.topk(num_candidates), strict=True):
            assert torch.equal(ours, theirs)


def test_a_cluster_is_left_out_only_where_no_row_needs_it() -> None:
    crit = model_of().crit
    with torch.no_grad():
        crit.cluster_weight.zero_()
        # the first cluster has nearly all the probability, the others nearly none
        crit.cluster_bias.copy_(torch.tensor([30.0, -30.0, -30.0]))
    computed = crit.log_prob(states(2), num_candidates=1).isfinite()
    assert computed[:, :50].all()
    assert not computed[:, 50:].any()


def test_states_that_are_not_numbers_leave_nothing_out() -> None:
    crit = model_of().crit
    hidden_states = states(1).fill_(math.nan)
    assert crit.log_prob(hidden_states, num_candidates=1).isnan().all()
