"""What a configuration derives, refuses, and keeps of the files of earlier implementations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hf_txl import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLMemory,
    TransfoXLModel,
)
from tests.helpers import FIXTURES, assert_close
from tests.model.tiny_models import T0
from tests.t0 import make_config

# d_model, number of clusters and so on of the published WikiText-103 model
PUBLISHED_FILE = FIXTURES / "txl_configs" / "transfo-xl-wt103-config.json"


def refusal(**fields: Any) -> str:
    with pytest.raises(ValueError) as caught:
        make_config(**fields)
    return str(caught.value)


# --- derived values


def test_defaults_describe_the_published_wikitext_model() -> None:
    published = json.loads(PUBLISHED_FILE.read_text(encoding="utf-8"))
    config = TransfoXLConfig()
    for name in (
        "vocab_size cutoffs d_model d_embed n_head d_head d_inner div_val pre_lnorm n_layer mem_len clamp_len "
        "same_length attn_type untie_r tie_projs dropout dropatt layer_norm_epsilon init init_range init_std "
        "proj_init_std sample_softmax ext_len"
    ).split():
        assert getattr(config, name) == published[name], name


def test_sizes_that_are_not_given_follow_from_those_that_are() -> None:
    config = TransfoXLConfig(vocab_size=50, d_model=24, n_head=5)
    assert (config.d_embed, config.d_head, config.d_inner) == (24, 4, 96)
    assert (config.cutoffs, config.div_val, config.tie_projs) == ([], 1, [False])


def test_given_sizes_are_kept() -> None:
    config = TransfoXLConfig(vocab_size=50, d_model=24, n_head=5, d_embed=12, d_head=3, d_inner=7, div_val=1)
    assert (config.d_embed, config.d_head, config.d_inner) == (12, 3, 7)


@pytest.mark.parametrize(
    ("vocab_size", "cutoffs"),
    [(1000, []), (200_000, []), (200_001, [20000, 40000, 200000]), (267_735, [20000, 40000, 200000])],
)
def test_a_small_vocabulary_has_no_clusters_by_default(vocab_size: int, cutoffs: list[int]) -> None:
    """C33: the published cutoffs would give the last clusters a negative size."""
    config = TransfoXLConfig(vocab_size=vocab_size)
    assert config.cutoffs == cutoffs
    assert config.div_val == (4 if cutoffs else 1)
    assert config.bucket_ends == [*cutoffs, vocab_size]
    assert config.num_clusters == len(cutoffs)


def test_div_val_defaults_to_four_with_clusters() -> None:
    assert TransfoXLConfig(vocab_size=99, cutoffs=[10, 50], d_model=32, n_head=4).div_val == 4


@pytest.mark.parametrize("cutoffs", [(10, 50, 80), [10, 50, 80], [0, 10, 50, 80, 99], (0, 10, 50, 80, 99)])
def test_every_form_of_cutoffs_means_the_same(cutoffs: Any) -> None:
    """A tuple, and the TensorFlow form with both ends."""
    config = make_config(cutoffs=cutoffs)
    assert config.cutoffs == [10, 50, 80]
    assert isinstance(config.cutoffs, list)


def test_cutoffs_of_only_both_ends_are_a_plain_softmax() -> None:
    assert make_config(cutoffs=[0, 99], div_val=1).cutoffs == []


def test_the_list_of_the_caller_is_not_shared() -> None:
    cutoffs, tie_projs = [10, 50, 80], [False, True, True, True]
    config = make_config(cutoffs=cutoffs, tie_projs=tie_projs)
    cutoffs.append(90)
    tie_projs[0] = True
    assert config.cutoffs == [10, 50, 80]
    assert config.tie_projs == [False, True, True, True]


@pytest.mark.parametrize(
    ("fields", "widths", "has_projection"),
    [
        ({}, [32, 16, 8, 4], [True] * 4),
        ({"proj_same_dim": False}, [32, 16, 8, 4], [False, True, True, True]),
        ({"d_embed": 16}, [16, 8, 4, 2], [True] * 4),
        ({"d_embed": 37}, [37, 18, 9, 4], [True] * 4),
        ({"d_embed": 16, "proj_same_dim": False}, [16, 8, 4, 2], [True] * 4),
        ({"div_val": 1}, [32] * 4, [False] * 4),
        ({"div_val": 1, "d_embed": 16}, [16] * 4, [True] * 4),
        ({"div_val": 1, "cutoffs": []}, [32], [False]),
    ],
)
def test_widths_and_projections_of_buckets(
    fields: dict[str, Any], widths: list[int], has_projection: list[bool]
) -> None:
    """`d_embed // div_val**i`; a bucket is projected if its width is not `d_model`, or always with `div_val` > 1."""
    config = make_config(**fields)
    buckets = range(config.num_clusters + 1)
    assert [config.bucket_width(bucket) for bucket in buckets] == widths
    assert [config.has_projection(bucket) for bucket in buckets] == has_projection


@pytest.mark.parametrize(
    ("fields", "ties"),
    [
        ({}, [False, True, True, True]),
        ({"proj_share_all_but_first": False}, [False] * 4),
        ({"tie_projs": [True, False]}, [True, False, False, False]),
        ({"tie_projs": [True] * 4, "proj_same_dim": False}, [False, True, True, True]),
        ({"tie_projs": [True] * 4, "div_val": 1}, [False] * 4),
    ],
)
def test_projections_are_tied_by_default_for_all_buckets_but_the_first(
    fields: dict[str, Any], ties: list[bool]
) -> None:
    """C42; a bucket that `tie_projs` does not name, or that has no projection, is not tied."""
    config = make_config(**fields)
    assert [config.ties_projection(bucket) for bucket in range(4)] == ties


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"same_length": True}, 6),
        ({"same_length": True, "same_length_includes_oldest": True}, 7),
        ({"same_length": False}, 7),
        ({"mem_len": 0}, 1),
        ({"mem_len": 0, "same_length": True}, 0),
    ],
)
def test_window_for_the_caches_of_the_library(fields: dict[str, Any], window: int) -> None:
    """C02: a position and what the memory holds; one less under the original `same_length`."""
    config = make_config(**fields)
    assert config.sliding_window == window
    assert config.layer_types == ["sliding_attention"] * 3


@pytest.mark.parametrize(("same_length", "window"), [(False, 31), (True, 30)])
def test_a_window_is_obeyed_or_refused_by_name(same_length: bool, window: int, tmp_path: Path) -> None:
    """R22: the window follows from `mem_len`; saying it again is fine, saying another one is no silent mistake."""
    fields = {"mem_len": 30, "same_length": same_length}
    assert make_config(**fields, sliding_window=window).sliding_window == window
    with pytest.raises(
        ValueError, match=rf"`sliding_window` must be {window}, which follows from `mem_len=30` .* is 4"
    ):
        make_config(**fields, sliding_window=4)
    config = make_config(**fields)
    config.save_pretrained(tmp_path)
    for loaded in (
        AutoConfig.from_pretrained(tmp_path, sliding_window=4),
        TransfoXLConfig.from_dict(config.to_dict()),
    ):
        loaded.sliding_window = 4
        assert (loaded.sliding_window, loaded.mem_len) == (4, 4 - int(not same_length))
        assert "sliding_window" not in loaded.to_dict() and "layer_types" not in loaded.to_dict()
    assert AutoConfig.from_pretrained(tmp_path, sliding_window=4).sliding_window == 4
    with pytest.raises(ValueError, match=r"`sliding_window` must be \d+, which follows from `mem_len=9`"):
        AutoConfig.from_pretrained(tmp_path, sliding_window=4, mem_len=9)
    for wrong in (-1, 2.5, None, True):
        with pytest.raises(ValueError, match=f"`sliding_window` must be an int of at least ., but is {wrong}"):
            config.sliding_window = wrong  # type: ignore[assignment]
    assert config.mem_len == 30


def test_layer_types_are_obeyed_or_refused_by_name(tmp_path: Path) -> None:
    """R22"""
    windows = ["sliding_attention"] * 3
    config = make_config(layer_types=windows)
    config.layer_types = tuple(windows)  # type: ignore[assignment]
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, layer_types=windows).layer_types == windows
    for wrong in (windows[:2], ["full_attention"] * 3):
        for call in (
            lambda wrong=wrong: make_config(layer_types=wrong),
            lambda wrong=wrong: setattr(config, "layer_types", wrong),
            lambda wrong=wrong: AutoConfig.from_pretrained(tmp_path, layer_types=wrong),
        ):
            with pytest.raises(ValueError, match=r"`layer_types` must be \['sliding_attention'"):
                call()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 10),
        ("cutoffs", [50, 20]),
        ("cutoffs", None),
        ("d_head", None),
        ("n_head", 0),
        ("mem_len", -3),
        ("div_val", 99),
        ("attention_kind", "rotary"),
        ("memory_init", "ones"),
        ("dropout", 1.5),
        ("init_std", -0.1),
        ("d_model", 33),
    ],
)
def test_an_impossible_value_set_later_is_refused_where_a_model_or_memory_is_made(name: str, value: Any) -> None:
    """R22: each field can be set on its own, so a combination is checked when it is used."""
    config = make_config(vocab_size=99, cutoffs=[20, 50], div_val=2)
    setattr(config, name, value)
    # the message on `cutoffs` names the vocabulary that they do not fit in
    word = {"vocab_size": "cutoffs", "div_val": "d_embed"}.get(name, name)
    for make in (TransfoXLModel, TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLMemory):
        with pytest.raises(ValueError, match=f"^`{word}` must .*"):
            make(config)


# --- refused combinations

REFUSED = [
    *[({name: 0}, f"`{name}` must be at least 1, but is 0") for name in ("d_model", "d_embed", "n_head")],
    ({"vocab_size": -1}, "`vocab_size` must be at least 0, but is -1"),
    ({"vocab_size": 0}, r"`cutoffs` must be \[\] with `vocab_size=0`, but is \["),
    ({"gating": "gru"}, "`pre_lnorm` must be True with `gating='gru'`, but is False"),
    *[({name: 0}, f"`{name}` must be at least 1, but is 0") for name in ("d_head", "d_inner", "n_layer")],
    ({"d_inner": -3}, "`d_inner` must be at least 1, but is -3"),
    ({"div_val": 0}, "`div_val` must be at least 1, but is 0"),
    ({"div_val": -2}, "`div_val` must be at least 1, but is -2"),
    ({"n_head": 64, "d_head": None}, "`d_head` must be at least 1, but is 0"),
    ({"d_model": 33}, "`d_model` must be even, but is 33"),
    ({"mem_len": -1}, "`mem_len` must be 0 .*, but is -1"),
    ({"ext_len": -2}, "`ext_len` must be 0 or more, but is -2"),
    ({"cutoffs": [10, 5]}, r"`cutoffs` must be strictly increasing.*\(99\), but is \[10, 5\].*`cutoffs=\[\]`"),
    ({"cutoffs": [10, 10]}, r"`cutoffs` must be strictly increasing.*\(99\), but is \[10, 10\]"),
    ({"cutoffs": [10, 99]}, r"`cutoffs` must be .*below `vocab_size` \(99\), but is \[10, 99\].*`cutoffs=\[\]`"),
    ({"cutoffs": [10, 120]}, r"`cutoffs` must be .*below `vocab_size` \(99\), but is \[10, 120\]"),
    ({"cutoffs": [0]}, r"`cutoffs` must be .*above 0 .*\(99\), but is \[0\].*`cutoffs=\[\]`"),
    ({"cutoffs": [-5, 10]}, r"`cutoffs` must be .*above 0 .*\(99\), but is \[-5, 10\]"),
    ({"d_embed": 7}, r"`d_embed` must be at least `div_val` .*\(2\*\*3 = 8\).*, but is 7"),
    ({"d_embed": 8, "div_val": 4}, r"`d_embed` must be at least `div_val` .*\(4\*\*3 = 64\).*, but is 8"),
    ({"dropout": 1.0}, "`dropout` must be at least 0 and below 1, but is 1.0"),
    ({"dropout": -0.1}, "`dropout` must be at least 0 and below 1, but is -0.1"),
    ({"dropatt": 1.5}, "`dropatt` must be at least 0 and below 1, but is 1.5"),
    ({"layer_norm_epsilon": 0.0}, "`layer_norm_epsilon` must be above 0, but is 0.0"),
    ({"memory_init": "ones"}, r"`memory_init` must be one of \['empty', 'zeros'\], but is 'ones'"),
    ({"attention_kind": "rotary"}, "`attention_kind` must be one of .*, but is 'rotary'"),
    ({"attn_type": 7}, r"`attn_type` must be one of \[0, 1, 2, 3\], but is 7"),
    ({"init": "orthogonal"}, r"`init` must be one of \['normal', 'uniform'\], but is 'orthogonal'"),
    ({"sample_softmax": 64}, "`sample_softmax` must be 0 or below, but is 64: .* not supported"),
]


MISSPELT = {
    "mem_length": "`same_length` or `mem_len`",
    "n_heads": "`n_head`",
    "layer_norm_eps": "`layer_norm_epsilon`",
    "cutoff": "`cutoffs`",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_settings_are_refused_with_the_right_name(name: str) -> None:
    """The library would store them, without effect."""
    with pytest.raises(ValueError, match=f"`{name}` must be a setting.*did you mean .*{MISSPELT[name]}"):
        TransfoXLConfig(**{name: 2})


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_what_no_model_can_have_is_refused_with_the_numbers(fields: dict[str, Any], message: str) -> None:
    """C33 (cutoffs) and C41 (sampled softmax) among others: the argument, what it must be and what it is."""
    text = refusal(**fields)
    assert re.search(message, text), text


@pytest.mark.parametrize("vocab_size", [5, 10, 49])
def test_published_style_cutoffs_beyond_a_small_vocabulary_are_refused(vocab_size: int) -> None:
    """C33: both numbers and the way out."""
    text = refusal(vocab_size=vocab_size)
    assert f"({vocab_size})" in text and "[10, 50, 80]" in text and "`cutoffs=[]`" in text


def test_a_file_is_refused_like_arguments() -> None:
    with pytest.raises(ValueError, match=r"`cutoffs` must be .*\(99\), but is \[10, 99\]"):
        TransfoXLConfig.from_dict({**T0, "cutoffs": [10, 99]})


@pytest.mark.parametrize("name", ["n_layer", "mem_len", "d_model", "cutoffs"])
def test_a_value_of_another_type_is_refused_by_name(name: str) -> None:
    with pytest.raises(Exception, match=f"'{name}'"):
        make_config(**{name: 2.5})


# --- names of other files


def test_attributes_answer_to_the_names_of_the_library() -> None:
    """C102: readable, settable, and accepted by the constructor."""
    config = make_config()
    aliases = {
        "n_token": "vocab_size",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "d_inner",
        "head_dim": "d_head",
    }
    for alias, name in aliases.items():
        assert getattr(config, alias) == getattr(config, name) == T0[name], alias
    for value, (alias, name) in enumerate(aliases.items(), start=40):
        setattr(config, alias, value)
        assert getattr(config, name) == value, alias
        assert config.to_dict()[name] == value, alias
        assert alias not in config.to_dict()


def test_the_constructor_takes_the_names_of_the_library() -> None:
    """C102: what depends on an aliased field is derived from it."""
    config = TransfoXLConfig(n_token=77, hidden_size=24, num_hidden_layers=2, num_attention_heads=3)
    assert (config.vocab_size, config.d_model, config.n_layer, config.n_head) == (77, 24, 2, 3)
    assert (config.cutoffs, config.d_embed, config.d_head, config.d_inner) == ([], 24, 8, 96)


def test_heads_need_not_add_up_to_the_model_width() -> None:
    """C102"""
    config = make_config(n_head=3, d_head=5)
    assert config.n_head * config.d_head != config.d_model


@pytest.mark.parametrize("zeros", [{"tgt_len": 0, "ext_len": 0}, {"ext_len": 0}, {}])
def test_legacy_lengths_load(zeros: dict[str, int], recwarn: pytest.WarningsRecorder) -> None:
    """C09: zero values are ignored quietly."""
    config = TransfoXLConfig.from_dict({**T0, "mem_len": 17, **zeros})
    assert (config.mem_len, config.ext_len) == (17, 0)
    assert not recwarn


def test_nonzero_ext_len_is_kept_for_the_evaluation() -> None:
    """C09: `evaluate_stream` honours it (`test_scoring.py`)."""
    config = TransfoXLConfig.from_dict({**T0, "tgt_len": 8, "ext_len": 4})
    assert (config.ext_len, config.tgt_len) == (4, 8)


def test_sampled_softmax_switched_off_loads() -> None:
    """C41: as in every old file."""
    assert TransfoXLConfig.from_dict({**T0, "sample_softmax": -1}).sample_softmax == -1


def test_a_file_without_memory_init_starts_with_zeros() -> None:
    """C05: transformers 2 to 4 wrote it; the constructor and a file of ours say what they mean."""
    assert make_config().memory_init == "empty"
    assert TransfoXLConfig.from_dict(dict(T0)).memory_init == "zeros"
    assert TransfoXLConfig.from_dict(make_config().to_dict()).memory_init == "empty"
    assert TransfoXLConfig.from_dict(make_config().to_diff_dict()).memory_init == "empty"
    assert TransfoXLConfig.from_dict(dict(T0), memory_init="empty").memory_init == "empty"


def test_tie_weight_of_old_files_is_read() -> None:
    assert TransfoXLConfig.from_dict({**T0, "tie_weight": False}).tie_word_embeddings is False
    assert TransfoXLConfig.from_dict({**T0, "tie_weight": True}).tie_word_embeddings is True


@pytest.mark.parametrize(
    ("share_proj", "ties"),
    [
        (False, [False] * 4),
        (True, [False, True, True, True]),
        ([True, False, True, False], [True, False, True, False]),
    ],
)
def test_share_proj_of_tensorflow_readers_is_read(share_proj: Any, ties: list[bool]) -> None:
    config = TransfoXLConfig.from_dict({**T0, "share_proj": share_proj})
    assert config.tie_projs == ties


def test_attention_type_of_the_original_is_read_and_shown() -> None:
    config = TransfoXLConfig.from_dict({**T0, "attn_type": 0})
    assert config.attention_kind == "transformer_xl"
    assert config.attn_type == 0


def test_an_attention_type_that_no_code_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`attn_type` must be one of \[0, 1, 2, 3\], but is 4"):
        TransfoXLConfig.from_dict({**T0, "attn_type": 4})


# --- files


def test_save_and_load_changes_nothing(tmp_path: Path) -> None:
    config = make_config(
        same_length_includes_oldest=True,
        memory_init="zeros",
        tie_projs=[True, False, True, False],
        untie_r=False,
        proj_same_dim=False,
        layer_norm_epsilon=1e-12,
        tie_word_embeddings=False,
        pre_lnorm=True,
        ext_len=3,
    )
    config.save_pretrained(tmp_path)
    loaded = TransfoXLConfig.from_pretrained(tmp_path)
    # as the file tells the library
    del loaded.auto_map
    assert loaded.to_dict() == config.to_dict()


def test_both_dialect_fields_are_written_even_at_their_defaults(tmp_path: Path) -> None:
    """C02, C05: a reader with other defaults must not guess."""
    make_config().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert saved["memory_init"] == "empty"
    assert saved["same_length_includes_oldest"] is False


def test_unknown_keys_of_old_files_survive_a_round_trip(tmp_path: Path) -> None:
    unknown = {
        "adaptive": True,
        "tgt_len": 128,
        "tie_weight": True,
        "task_specific_params": {"text-generation": {"do_sample": True}},
        "train_bsz": 16,
        "a_key_of_somebody": [1, {"two": None}],
    }
    (tmp_path / "config.json").write_text(json.dumps({**T0, **unknown}), encoding="utf-8")
    again = tmp_path / "again"
    TransfoXLConfig.from_pretrained(tmp_path).save_pretrained(again)
    saved = json.loads((again / "config.json").read_text(encoding="utf-8"))
    assert {name: saved[name] for name in unknown} == unknown
    assert TransfoXLConfig.from_pretrained(again).a_key_of_somebody == unknown["a_key_of_somebody"]


@pytest.mark.parametrize("name", ["mem_len", "clamp_len"])
def test_overrides_win_over_the_file(name: str, tmp_path: Path) -> None:
    make_config().save_pretrained(tmp_path)
    assert getattr(TransfoXLConfig.from_pretrained(tmp_path, **{name: 3}), name) == 3


def test_overrides_are_applied_before_anything_is_derived_or_checked() -> None:
    """Without cutoffs, `div_val` and `tie_projs` follow; a broken value in the file does no harm."""
    config = TransfoXLConfig.from_dict({**T0, "cutoffs": [10, 99]}, cutoffs=[20], n_token=90)
    assert (config.cutoffs, config.vocab_size, config.tie_projs) == ([20], 90, [False, True])
    with pytest.raises(ValueError, match=r"`cutoffs` must be .*`vocab_size` \(60\), but is \[10, 50, 80\]"):
        TransfoXLConfig.from_dict(dict(T0), n_token=60)


@pytest.mark.parametrize(
    ("in_file", "given"), [("n_token", "vocab_size"), ("vocab_size", "n_token"), ("n_token", "n_token")]
)
def test_overrides_win_under_either_name(in_file: str, given: str) -> None:
    """C102: a file may hold a field under its alias."""
    file = {**{name: value for name, value in T0.items() if name != "vocab_size"}, in_file: 99}
    config = TransfoXLConfig.from_dict(file, **{given: 120})
    assert config.vocab_size == config.n_token == 120


def test_unused_override_arguments_are_handed_back() -> None:
    config, unused = TransfoXLConfig.from_dict(dict(T0), return_unused_kwargs=True, mem_len=4, something=1)
    assert config.mem_len == 4
    assert unused == {"something": 1}


def test_the_dictionary_of_the_caller_is_not_changed() -> None:
    given = {**T0, "attn_type": 0, "share_proj": False}
    before = json.dumps(given)
    TransfoXLConfig.from_dict(given, n_token=98, mem_len=2)
    assert json.dumps(given) == before


# ---- R13: what public projects wrote --------------------------------------------------------------------------------


def test_all_wrong_fields_are_told_at_once_with_the_way_out(tmp_path: Path) -> None:
    """R13: and what the message proposes loads."""
    fields = {**T0, "div_val": -1, "sample_softmax": 1, "attn_type": 9, "mem_len": -6}
    text = refusal(**fields)
    for name in ("div_val", "sample_softmax", "attn_type", "mem_len"):
        assert text.count(f"- `{name}` must be") == 1
    assert text.startswith("The configuration breaks 4 rules:")
    del fields["attn_type"]
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ValueError, match="breaks 3 rules") as caught:
        TransfoXLConfig.from_pretrained(tmp_path)
    proposed = re.search(r"`from_pretrained\(folder, (.*)\)`", str(caught.value))
    assert proposed is not None and proposed[1] == "div_val=1, mem_len=0, sample_softmax=-1"
    replaced = {name: int(value) for name, value in (pair.split("=") for pair in proposed[1].split(", "))}
    assert TransfoXLConfig.from_pretrained(tmp_path, **replaced).mem_len == 0


@pytest.mark.parametrize("div_val", [-1, 0, 3])
def test_without_clusters_div_val_only_says_whether_embeddings_are_projected(div_val: int) -> None:
    """R13: any other value than 1 gave transformers 4 the names of one projected table: `-1` of a piano composer."""
    config = TransfoXLConfig(**{**T0, "cutoffs": [], "div_val": div_val})
    model = TransfoXLForCausalLM(config)
    expected = {"transformer.word_emb.emb_projs.0": (32, 32), "transformer.word_emb.emb_layers.0.weight": (99, 32)}
    found = {name: tuple(weight.shape) for name, weight in model.state_dict().items() if "word_emb" in name}
    assert found == expected
    ids = torch.tensor([[5, 98]])
    table, projection = (model.state_dict()[name] for name in reversed(expected))
    assert_close("embeddings", model.get_input_embeddings()(ids), table[ids] @ projection.T * 32**0.5, 1e-5)
    saved = json.loads(config.to_json_string(use_diff=False))["div_val"]
    assert saved == (3 if div_val == 3 else 2)
    assert TransfoXLConfig.from_dict(config.to_dict()).div_val == saved
