"""Vectors and classes of documents of any length."""

from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from ..classification_transfo_xl import TransfoXLForSequenceClassification, pieces_of, read_pieces
from ..configuration_transfo_xl import POOLINGS
from ..data import check_sizes, pad_rows
from ..modeling_transfo_xl import TransfoXLPreTrainedModel
from .reading import batches_by_length, inference, token_lists


def embed_documents(
    model: TransfoXLPreTrainedModel,
    documents: Sequence[torch.Tensor | Sequence[int]],
    *,
    segment_length: int = 512,
    batch_size: int = 8,
    pooling: str = "last",
    progress: bool = False,
    **settings: Any,
) -> torch.Tensor:
    """One vector for each document of any length: the hidden state of its last token, or the mean or maximum of all.

    Documents are read in segments with a memory, batched by length; batching does not change the result. They are cut
    from the end, as [`TransfoXLForSequenceClassification`] does in training: the last segment is full. With
    `same_length=True` and relative positions the result is that of one pass over the whole document.

    Args:
        model ([`TransfoXLModel`] or a model with a head): The model.
        documents (`list[list[int]]`): Token ids of each document, at least one.
        segment_length (`int`, defaults to 512): Tokens of a document that are read in one call.
        batch_size (`int`, defaults to 8): Documents read together.
        pooling (`str`, defaults to `"last"`): `"last"`, `"mean"` or `"max"`.
        progress (`bool`, defaults to `False`): Whether to show a progress bar.
        settings: Arguments of [`TransfoXLMemory`] (`mem_len`, `clamp_len`, `same_length`, `memory_init`).

    Returns:
        `torch.Tensor` of shape `(num_documents, d_model)` on the model's device.

    Example:

    ```python
    >>> def embed(batch):
    ...     return {"embedding": embed_documents(model, batch["input_ids"]).cpu().numpy()}

    >>> dataset = dataset.map(embed, batched=True, batch_size=64)
    ```
    """
    check_sizes(segment_length=segment_length, batch_size=batch_size)
    if pooling not in POOLINGS:
        raise ValueError(f"`pooling` must be one of {list(POOLINGS)}, but is {pooling!r}.")
    texts = token_lists("documents", documents, model.config.vocab_size)
    for index, text in enumerate(texts):
        if len(text) == 0:
            raise ValueError(f"`documents[{index}]` must hold at least one token, but is empty.")
    vectors: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    bar = tqdm(total=len(texts), unit="doc", desc="reading", disable=not progress)
    with inference(model), bar:
        for indices in batches_by_length(texts, batch_size):
            ids, mask = pad_rows([texts[index] for index in indices])
            pieces = pieces_of(ids.to(model.device), mask.to(model.device), segment_length)
            memory = model.init_memory(len(indices), **settings)
            base: Any = model.base_model
            for index, vector in zip(indices, read_pieces(base, pieces, memory, pooling), strict=True):
                vectors[index] = vector
            bar.update(len(indices))
    if not vectors:
        return torch.empty(0, model.config.d_model, device=model.device)
    return torch.stack(vectors)


def classify_documents(
    model: TransfoXLForSequenceClassification,
    documents: Sequence[torch.Tensor | Sequence[int]],
    **settings: Any,
) -> torch.Tensor:
    """Class scores for each document of any length, pooled as `model.config.classifier_pooling` says.

    Args:
        model ([`TransfoXLForSequenceClassification`]): The model.
        documents, settings: As for [`embed_documents`], without `pooling`.

    Returns:
        `torch.Tensor` of shape `(num_documents, num_labels)`: logits, on the model's device.
    """
    vectors = embed_documents(model, documents, pooling=model.config.classifier_pooling, **settings)
    with torch.no_grad():
        logits: torch.Tensor = model.score(vectors)
    return logits


__all__ = ["classify_documents", "embed_documents"]
