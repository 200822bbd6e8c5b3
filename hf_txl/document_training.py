"""Training of classifiers of documents of any length, which are read segment by segment with a memory."""

from typing import Any

from transformers import Trainer

from .classification_transfo_xl import TransfoXLForSequenceClassification
from .data import DocumentCollator
from .training import TransfoXLTrainingArguments


class TransfoXLDocumentTrainer(Trainer):
    """The library's `Trainer` for a [`TransfoXLForSequenceClassification`] that reads documents with a memory.

    Each document begins with a fresh memory and is read in segments of `args.segment_length`; the loss is that of the
    whole document. Gradients pass through the last `args.gradient_segments` segments. Evaluation and `predict` use the
    lengths of the evaluation (`args.eval_segment_length`, `args.eval_mem_len`, …); `compute_metrics` works as usual.

    Args:
        model, args, train_dataset, eval_dataset and the others: As for `Trainer`, with `args` a
            [`TransfoXLTrainingArguments`] with `layout="documents"`. Rows of a data set have `input_ids` (`list[int]`)
            and `label`.

    Raises:
        ValueError: if an argument does not fit; the message names it.
    """

    args: TransfoXLTrainingArguments
    model: Any

    def __init__(self, model: Any = None, args: Any = None, **settings: Any):
        if not isinstance(args, TransfoXLTrainingArguments):
            raise ValueError(f"`args` must be a `TransfoXLTrainingArguments`, but is a {type(args).__name__}.")
        if args.layout != "documents":
            raise ValueError(f"`args.layout` must be 'documents', but is {args.layout!r}.")
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if base is not None and not isinstance(getattr(base, "_orig_mod", base), TransfoXLForSequenceClassification):
            raise ValueError(
                f"`model` must be a `TransfoXLForSequenceClassification`, but is a {type(base).__name__}."
            )
        use_cache = None if model is None else model.config.use_cache
        super().__init__(model=model, args=args, **{"data_collator": DocumentCollator(), **settings})
        # the library overwrites it by its own argument
        if use_cache is not None:
            self.model.config.use_cache = use_cache

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on its device, with a fresh memory and the lengths of training or evaluation."""
        inputs = super()._prepare_inputs(inputs)
        args = self.args
        lengths = args.memory_settings() if self.model.training else args.eval_settings()
        segment_length = lengths.pop("segment_length", args.segment_length)
        memory = self.accelerator.unwrap_model(self.model).init_memory(len(inputs["input_ids"]), **lengths)
        return {
            **inputs,
            "cache": memory,
            "segment_length": segment_length,
            "gradient_segments": args.gradient_segments,
        }


__all__ = ["TransfoXLDocumentTrainer"]
