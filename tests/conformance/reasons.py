"""Why the release's suite is adapted to our classes, and why what fails in it fails: the one table of both.

`run.py` matches each failure with a row. A failure without a row and a row without a failure are errors.
"""

from typing import NamedTuple


class Reason(NamedTuple):
    """Why a test of the release fails on our classes.

    `configurations` and `test` are patterns of `fnmatch`; `message` is part of the error. `part` names what the source
    distribution lacks and the row needs: without it, the row may match nothing.
    """

    configurations: str
    test: str
    message: str
    reason: str
    part: str = ""


class Adaption(NamedTuple):
    """What `models.py` changes in the release's suite, by the name of the method or attribute that it replaces."""

    name: str
    change: str
    reason: str


ZERO_KEYS = (
    'With `memory_init="zeros"` a text is preceded by `mem_len` zero states that are attended to; the suite expects '
    "attention over the tokens alone."
)
REASONS: list[Reason] = [
    Reason(
        "clusters",
        "test_model_get_set_embeddings",
        "is not an instance of",
        "The suite expects one `nn.Embedding` as input embedding; an adaptive embedding has a table per bucket.",
    ),
    Reason(
        "clusters",
        "test_resize_tokens_embeddings",
        "no single `weight`",
        "The suite reads the input embedding's one table, `weight`; an adaptive embedding has one per bucket.",
    ),
    Reason(
        "clusters",
        "test_resize_embeddings_untied",
        "has no `weight`",
        "The suite reads the one matrix of the output embeddings; an adaptive softmax has several.",
    ),
    Reason(
        "*",
        "test_resize_tokens_embeddings",
        "Asking to pad the embedding matrix",
        "The suite expects the wording of the library's error; ours names the argument and what it must be.",
    ),
    Reason(
        "clusters",
        "test_load_with_mismatched_shapes",
        "must be strictly increasing",
        "The suite loads with `vocab_size=10`, which is below the cutoffs of the file and refused.",
    ),
    Reason(
        "*",
        "test_bc_cache_name_forward",
        "False is not true",
        "The suite expects a warning that `past_key_values` is deprecated; here it is a second name of `cache`, the "
        "only one that releases before 5.24 know.",
    ),
    Reason("zeros", "test_attention_outputs", "Lists differ", ZERO_KEYS),
    Reason("zeros", "test_*generate_dict_output*", "Lists differ", ZERO_KEYS, "generation"),
    Reason("zeros", "test_assisted_decoding_matches_greedy_search*", "Lists differ", ZERO_KEYS, "generation"),
    Reason(
        "zeros",
        "test_*",
        "A static cache needs `memory_init='empty'`",
        "A static cache has no place for zero states before the first token and is refused by name.",
        "generation",
    ),
]

ADAPTIONS: list[Adaption] = [
    Adaption(
        "_prepare_for_class",
        "labels for the two classes that have a loss",
        "The suite knows which classes take labels by lists of the names of its own classes.",
    ),
    Adaption(
        "setUp",
        "the base model is left out of `test_training*`",
        "The suite leaves out base models, which have no loss, by a list of the names of its own.",
    ),
    Adaption(
        "run_pipeline_test",
        "tiny models are read from a folder of this run, one for each configuration",
        "The suite would load them from the Hub, where it has its own models only.",
    ),
]
