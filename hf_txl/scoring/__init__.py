"""Scores of texts with memory: perplexity, surprisal, sentences, n-best lists, long documents.

All functions read segment by segment with a [`TransfoXLMemory`], in eval mode and without gradients, and sum in
float64. Every function takes the settings of the memory (`mem_len`, `clamp_len`, `same_length`, `memory_init`), by
default those of the model's configuration.

With `same_length=True`, or as long as everything fits into a memory that starts empty, results do not depend on
segment boundaries, unless positions are absolute. Otherwise a token attends to the whole memory and to its own segment
up to itself, so results depend on `segment_length`.
"""

from .context import losses_by_context, relative_effective_context_length
from .documents import classify_documents, embed_documents
from .files import PRESETS, Evaluation, TextSize, evaluate_files
from .nbest import Hypothesis, Utterance, read_nbest
from .reading import inference
from .rescoring import ContextScorer, ErrorRates, FusionWeights, error_rates, rescore, tune_weights
from .score_files import score_file
from .sequences import score_continuations, score_sequences, token_losses
from .steps import StepScorer, StepState
from .streams import StreamScore, evaluate_stream
from .surprisal import TextScore, TokenScore, WordScore, score_texts

__all__ = [
    "PRESETS",
    "ContextScorer",
    "ErrorRates",
    "Evaluation",
    "FusionWeights",
    "Hypothesis",
    "StepScorer",
    "StepState",
    "StreamScore",
    "TextScore",
    "TextSize",
    "TokenScore",
    "Utterance",
    "WordScore",
    "classify_documents",
    "embed_documents",
    "error_rates",
    "evaluate_files",
    "evaluate_stream",
    "inference",
    "losses_by_context",
    "read_nbest",
    "relative_effective_context_length",
    "rescore",
    "score_continuations",
    "score_file",
    "score_sequences",
    "score_texts",
    "token_losses",
    "tune_weights",
]
