"""Training with memory in the library's `Trainer`: data in streams, and a memory carried from step to step.

A memory is correct only if each row of a batch continues the same row of the batch before, on every process, in every
step, and after resuming. [`TransfoXLTrainer`] lays out the text accordingly, keeps one memory per process, evaluates
as the paper does and saves the offset of every stream with each checkpoint. Optimisation, logging, precision,
distributed training and uploads are those of the library.
"""

import copy
import json
import os
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SchedulerType

from .cards import TrainedModelCard
from .data import DocumentStreams, TokenStreams, check_sizes
from .memory_files import read_memory, write_memory
from .memory_transfo_xl import TransfoXLMemory
from .modeling_transfo_xl import TransfoXLForCausalLM
from .scoring import StreamScore, evaluate_stream, score_sequences
from .token_ids import COLUMN, as_tokens, check_token_ids, read_tokens

LAYOUTS = ("stream", "documents", "sentences")
TRAINER_STATE = "trainer_state.json"
# tokens at either end of a text whose checksum a resumed run compares
CHECKSUM_TOKENS = 2**16


@dataclass
class TransfoXLTrainingArguments(TrainingArguments):
    """Arguments of [`TransfoXLTrainer`]: those of the library, with the paper's recipe as defaults, and the streams.

    The recipe is that of the original's `run_wt103_base.sh`: Adam with learning rate 2.5e-4, cosine decay, gradients
    clipped at 0.25, no weight decay (where it is set, biases, normalisations and the two attention biases are
    excluded). The original also has `lr_scheduler_type="inverse_sqrt"`; large models warm up (`warmup_steps`).

    `per_device_train_batch_size` is the number of streams per process. The steps of `gradient_accumulation_steps`
    read consecutive segments of the same streams, so accumulation does not change the number of streams.

    Args:
        segment_length (`int`, defaults to 150): Tokens of a stream in one forward call, L.
        mem_len, clamp_len, same_length (*optional*): As for [`TransfoXLMemory`]; default: the model's configuration.
        gradient_segments (`int`, defaults to 1):
            For [`~hf_txl.document_training.TransfoXLDocumentTrainer`]: segments at the end of a document through which
            gradients pass.
        layout (`str`, defaults to `"stream"`):
            How the rows of a data set become streams: `"stream"`: as one long text, which is cut into as many pieces
            as there are streams ([`TokenStreams`]; an `IterableDataset` cannot be cut, so each stream takes its next
            row instead); `"documents"`: each row is a stream of its own with a fresh memory ([`DocumentStreams`]);
            `"sentences"`: rows in random order, concatenated, as in the One Billion Word corpus.
        varlen (`bool`, defaults to `False`): Segments of random length ([`TokenStreams`]).
        eval_segment_length, eval_mem_len, eval_clamp_len, eval_same_length (*optional*):
            The same for evaluation; the paper evaluates with a longer memory and `same_length=True`. Default: as in
            training.
    """

    learning_rate: float = field(default=2.5e-4, metadata={"help": "Highest learning rate."})
    lr_scheduler_type: SchedulerType | str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    max_grad_norm: float = field(default=0.25, metadata={"help": "Largest norm of the gradient."})
    # every parameter gets a gradient in every step, whatever tokens a batch holds
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Whether DDP finds them."})
    # it would drop `shift_labels`
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must be False."})
    # do not hide NaN losses
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Leave NaN losses out of logs."})
    segment_length: int = field(default=150, metadata={"help": "Tokens of a stream in one forward call."})
    mem_len: int | None = field(default=None, metadata={"help": "Positions of memory in training."})
    clamp_len: int | None = field(default=None, metadata={"help": "Largest distance in training; below 1: none."})
    same_length: bool | None = field(default=None, metadata={"help": "Equal numbers of keys in training."})
    gradient_segments: int = field(default=1, metadata={"help": "Segments of a classified document with gradients."})
    layout: str = field(default="stream", metadata={"help": f"One of {', '.join(LAYOUTS)}."})
    varlen: bool = field(default=False, metadata={"help": "Segments of random length."})
    eval_segment_length: int | None = field(default=None, metadata={"help": "Tokens per call in evaluation."})
    eval_mem_len: int | None = field(default=None, metadata={"help": "Positions of memory in evaluation."})
    eval_clamp_len: int | None = field(default=None, metadata={"help": "Largest distance in evaluation."})
    eval_same_length: bool | None = field(default=None, metadata={"help": "Equal numbers of keys in evaluation."})

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"`layout` must be one of {list(LAYOUTS)}, but is {self.layout!r}.")
        if self.varlen and self.layout != "stream":
            raise ValueError(
                f"`varlen` must be False with `layout={self.layout!r}`, whose rows have lengths of their own."
            )
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be False, or `shift_labels` would be dropped.")
        check_sizes(
            segment_length=self.segment_length,
            gradient_segments=self.gradient_segments,
            per_device_train_batch_size=self.per_device_train_batch_size,
            per_device_eval_batch_size=self.per_device_eval_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
        )
        if self.eval_segment_length is not None:
            check_sizes(eval_segment_length=self.eval_segment_length)
        for name in ("mem_len", "eval_mem_len"):
            length = getattr(self, name)
            if length is not None and (not isinstance(length, int) or length < 0):
                raise ValueError(f"`{name}` must be an int of 0 or more, but is {length!r}.")
        if self.label_smoothing_factor:
            raise ValueError(
                "`label_smoothing_factor` must be 0, but is "
                f"{self.label_smoothing_factor}: the adaptive softmax has no label smoothing."
            )
        super().__post_init__()
        # pinned memory speeds up copies to an accelerator only
        if self.device.type == "cpu":
            self.dataloader_pin_memory = False

    def memory_settings(self) -> dict[str, Any]:
        """Arguments of the training memory; `None` means the model's."""
        return {name: getattr(self, name) for name in ("mem_len", "clamp_len", "same_length")}

    def eval_settings(self) -> dict[str, Any]:
        """Segment length and memory arguments of the evaluation; `None` means the model's."""
        settings = {"segment_length": self.segment_length, **self.memory_settings()}
        for name in settings:
            if (value := getattr(self, f"eval_{name}")) is not None:
                settings[name] = value
        return settings


class _InOrder(Dataset[Any]):
    """[`TokenStreams`] by index, so that a resumed run skips to its offset; [`TransfoXLTrainer`] reads it in order."""

    def __init__(self, streams: TokenStreams):
        self.streams = streams

    def __len__(self) -> int:
        return len(self.streams)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.streams[index]

    def set_epoch(self, epoch: int) -> None:
        self.streams.set_epoch(epoch)


class TransfoXLTrainer(TrainedModelCard, Trainer):
    """The library's `Trainer` for a [`TransfoXLForCausalLM`] that reads streams with memory.

    The memory of each process is `trainer.memory`. It is reset where a stream begins, saved with every checkpoint
    (`memory-<process>-of-<processes>.safetensors`) and restored from it; evaluation uses a memory of its own. On the
    CPU, a run that was interrupted and resumed on the same number of processes ends with bitwise the same weights as
    an uninterrupted one.

    Logs get `perplexity` and `bits_per_token` beside `loss`; evaluation gives `eval_loss` (mean over all predictions),
    `eval_perplexity`, `eval_bits_per_token` and `eval_predictions`. `create_model_card` and `push_to_hub` write a card
    with data, settings and losses, by memory length too after `evaluate_memory_lengths`.

    Args:
        model, args, train_dataset, eval_dataset and the others: As for `Trainer`, with `args` a
            [`TransfoXLTrainingArguments`]. A data set is a text: token ids, or a `datasets.Dataset` or
            `datasets.IterableDataset` with a column `input_ids` of lists ([`~hf_txl.corpus.tokenize_corpus`] makes
            one). For training it may also be a [`TokenStreams`] or [`DocumentStreams`] whose batch size is that of all
            processes together. `eval_dataset` may be a dictionary of texts.

    Raises:
        ValueError: before the first step, if an argument does not work with a memory; the message names it.
    """

    args: TransfoXLTrainingArguments
    model: Any

    def __init__(self, model: Any = None, args: Any = None, **settings: Any):
        if not isinstance(args, TransfoXLTrainingArguments):
            raise ValueError(f"`args` must be a `TransfoXLTrainingArguments`, but is a {type(args).__name__}.")
        _check_unused(args, settings)
        if model is not None or settings.get("model_init") is None:
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            if not isinstance(getattr(base, "_orig_mod", base), TransfoXLForCausalLM):
                raise ValueError(
                    f"`model` must be a `TransfoXLForCausalLM`, but is a {type(model).__name__}; classifiers have "
                    "`hf_txl.document_training.TransfoXLDocumentTrainer`, and the library's `Trainer` works as well."
                )
        self._use_cache = None if model is None else model.config.use_cache
        # rows are of equal length; the library's choice for a tokenizer would pad them
        super().__init__(model=model, args=args, **{"data_collator": default_data_collator, **settings})
        # the library overwrites it by its own argument; a model saved with `use_cache=False` would read the whole
        # text again for each generated token, and the training memory does not depend on it
        self.model.config.use_cache = self._use_cache
        self.streams: TokenStreams | DocumentStreams | None = None
        self.memory: TransfoXLMemory | None = None
        _check_processes(args, is_sharded=self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def call_model_init(self, trial: Any = None) -> Any:
        """Make a model by `model_init`; see `Trainer.call_model_init`."""
        model: Any = super().call_model_init(trial)
        self._use_cache = model.config.use_cache
        return model

    # --- streams

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Segments of all streams of this process, in order, with a fresh memory."""
        self.streams = streams = self._train_streams()
        self.memory = self.model.init_memory(self._train_batch_size, **self.args.memory_settings())
        dataset = _InOrder(streams) if isinstance(streams, TokenStreams) else streams
        return self._get_dataloader(
            dataset, "Training", self._train_batch_size, sampler_fn=_in_sequence, is_training=True
        )

    def _train_streams(self) -> TokenStreams | DocumentStreams:
        args = self.args
        accelerator_config: Any = args.accelerator_config
        if accelerator_config.split_batches:
            raise ValueError(
                "`split_batches` must be False: `per_device_train_batch_size` counts streams per process."
            )
        if args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
            raise ValueError(
                "`train_sampling_strategy` must keep the order of segments ('sequential'), but is "
                f"{args.train_sampling_strategy!r}."
            )
        if self.train_dataset is None:
            raise ValueError("`train_dataset` must be a text to train on, but is None.")
        num_rows = self._train_batch_size * args.world_size
        dataset: Any = self.train_dataset
        if not isinstance(dataset, TokenStreams | DocumentStreams):
            return _lay_out(dataset, args, num_rows)
        if dataset.batch_size != num_rows:
            raise ValueError(
                f"`train_dataset` must have as many streams as all processes read ({self._train_batch_size} "
                f"`per_device_train_batch_size` x {args.world_size} processes = {num_rows}), but has a batch size of "
                f"{dataset.batch_size}."
            )
        dataset = copy.copy(dataset)
        if isinstance(dataset, TokenStreams):
            dataset.mark_starts = True
        else:
            dataset.repeat = True
        return dataset

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **settings: Any
    ) -> torch.Tensor:
        """One forward and backward pass of a segment; the memory advances by it."""
        assert self.memory is not None
        starts = inputs["reset_memory"]
        if starts.all():
            self.memory.reset()
        elif starts.any():
            self.memory.reset(starts)
        segment = {name: value for name, value in inputs.items() if name != "reset_memory"}
        return super().training_step(model, {**segment, "cache": self.memory}, *args, **settings)

    # --- evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Score texts with the evaluation's own lengths and memory; every process reads its part of the streams.

        A text is cut into `per_device_eval_batch_size` streams per process. Each stream starts with a fresh memory, so
        the loss of the uncut text needs one stream and one process. With `layout="documents"` each row of the data set
        is a stream of its own.

        Args:
            eval_dataset: A text, or a dictionary of texts; by default the trainer's `eval_dataset`.
            ignore_keys: Not used, since no logits are gathered.
            metric_key_prefix (`str`, defaults to `"eval"`): What the names of the metrics begin with.

        Returns:
            `dict[str, float]`: `eval_loss`, `eval_perplexity`, `eval_bits_per_token`, `eval_predictions`,
            `eval_runtime` and `eval_tokens_per_second`.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        self._check_evaluation(dataset)
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, text in dataset.items():
                metrics.update(self.evaluate(text, ignore_keys, f"{metric_key_prefix}_{name}"))
            return metrics
        started = time.time()
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16
            self.model.to(dtype=dtype, device=self.args.device)
        model = self.accelerator.unwrap_model(self.model)
        score = self._score_documents if self.args.layout == "documents" else self._score_stream
        # the model is wrapped for mixed precision when a training begins, not before
        with self.accelerator.autocast():
            sums = torch.tensor(score(model, dataset), dtype=torch.float64, device=self.args.device)
        total, predictions = self.accelerator.reduce(sums, "sum").tolist()
        loss = total / predictions
        seconds = time.time() - started
        results = {"loss": loss, **_derived(loss), "predictions": int(predictions), "runtime": round(seconds, 4)}
        results["tokens_per_second"] = round(predictions / seconds, 3)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in results.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _check_evaluation(self, dataset: Any) -> None:
        """Refuse what cannot be evaluated; `train` calls it before the first step."""
        args = self.args
        if dataset is None or (isinstance(dataset, dict) and not dataset):
            raise ValueError(f"`eval_dataset` must be a text to evaluate, but is {dataset!r}.")
        if isinstance(dataset, dict):
            for text in dataset.values():
                self._check_evaluation(text)
            return
        if isinstance(dataset, TokenStreams | DocumentStreams) or _is_endless(dataset):
            raise ValueError(
                "`eval_dataset` must be token ids or a data set of known length, which each evaluation "
                f"lays out, but is a {type(dataset).__name__}."
            )
        _check_text("eval_dataset", dataset, args.layout, self.model.config.vocab_size)
        if args.layout == "documents":
            if not any(len(text) > 1 for text in _texts(dataset)):
                raise ValueError("`eval_dataset` must hold a text with a target, of at least 2 tokens, but has none.")
            return
        num_rows = args.per_device_eval_batch_size * args.world_size
        if (length := len(as_tokens(dataset))) < 2 * num_rows:
            raise ValueError(
                f"`eval_dataset` must hold at least 2 tokens for each of {num_rows} rows "
                f"({args.per_device_eval_batch_size} `per_device_eval_batch_size` x {args.world_size} processes), but "
                f"has {length}."
            )

    def predict(self, *args: Any, **settings: Any) -> Any:
        """Not supported: the logits of a stream are not kept.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "`predict` would keep (tokens x vocabulary) logits; use `evaluate`, or `hf_txl.scoring` for single tokens."
        )

    def _score_stream(self, model: Any, dataset: Any) -> tuple[float, int]:
        """Sum of losses and number of predictions of this process's rows."""
        args = self.args
        tokens = as_tokens(dataset)
        row_length = len(tokens) // (args.per_device_eval_batch_size * args.world_size)
        share = row_length * args.per_device_eval_batch_size
        result = evaluate_stream(
            model,
            read_tokens(tokens, args.process_index * share, (args.process_index + 1) * share),
            batch_size=args.per_device_eval_batch_size,
            progress=self.is_world_process_zero() and not args.disable_tqdm,
            **args.eval_settings(),
        )
        return result.loss * result.predictions, result.predictions

    def _score_documents(self, model: Any, dataset: Any) -> tuple[float, int]:
        args = self.args
        texts = _texts(dataset)[args.process_index :: args.world_size]
        scores = score_sequences(model, texts, batch_size=args.per_device_eval_batch_size, **args.eval_settings())
        return -scores.sum().item(), sum(max(0, len(text) - 1) for text in texts)

    def log(self, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        """Log, with the perplexity and bits per token of a training loss."""
        if "loss" in logs:
            logs = {**logs, **_derived(logs["loss"])}
        super().log(logs, *args, **settings)

    # --- resuming

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train; see `Trainer.train`. `resume_from_checkpoint=True` resumes from the last complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"`resume_from_checkpoint`: {self.args.output_dir} holds no complete checkpoint.")
        if resume_from_checkpoint:
            if self.args.ignore_data_skip:
                raise ValueError("`ignore_data_skip` must be False: the restored memory belongs to the saved offset.")
            self._check_resumable(Path(resume_from_checkpoint))
        if self.train_dataset is not None:
            _check_text("train_dataset", self.train_dataset, self.args.layout, self.model.config.vocab_size)
        if self.eval_dataset is not None:
            self._check_evaluation(self.eval_dataset)
        return super().train(resume_from_checkpoint or None, trial, ignore_keys_for_eval)

    def _run_epoch(self, *args: Any, **settings: Any) -> None:
        # the library makes one step too many when a finished run is resumed
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **settings)

    def _memory_file(self, folder: Path) -> Path:
        return folder / f"memory-{self.args.process_index}-of-{self.args.world_size}.safetensors"

    def _position(self, streams: TokenStreams | DocumentStreams) -> dict[str, Any]:
        """The facts that a resumed run must share with this one, so that its streams are the same."""
        args = self.args
        return {
            "per_device_train_batch_size": self._train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "dataloader_drop_last": args.dataloader_drop_last,
            "layout": args.layout,
            **streams.settings(),
            "text": _text_facts(streams),
        }

    def _check_resumable(self, folder: Path) -> None:
        """Refuse a checkpoint from which this run would not continue as it was interrupted."""
        path = self._memory_file(folder)
        _check_memory_file(path)
        # sharded states have files of their own
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            random = "rng_state.pth" if self.args.world_size == 1 else f"rng_state_{self.args.process_index}.pth"
            missing = [name for name in (OPTIMIZER_NAME, SCHEDULER_NAME, random) if not (folder / name).is_file()]
            if missing:
                raise ValueError(
                    f"`resume_from_checkpoint` must hold {missing}, but {folder} does not; without them the run would "
                    "continue differently. To start a new training from its weights, load them by `from_pretrained`."
                )
        saved, memory = _read_position(path)
        here = self._position(self._train_streams())
        differences = {name: (saved.get(name), value) for name, value in here.items() if saved.get(name) != value}
        if differences:
            raise ValueError(
                f"`resume_from_checkpoint` must be of a run with the same streams, but these differ (there, here): "
                f"{differences}."
            )
        # refuses other lengths
        self.model.init_memory(self._train_batch_size, **self.args.memory_settings()).load_state_dict(memory)

    def _save_rng_state(self, output_dir: str) -> None:
        # called by every process, before the first one writes the state that completes a checkpoint
        super()._save_rng_state(output_dir)
        assert self.memory is not None and self.streams is not None
        write_memory(self._memory_file(Path(output_dir)), self.memory, position=self._position(self.streams))
        self.accelerator.wait_for_everyone()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # called after the data has been skipped; at the start of an epoch the first segment resets the memory again
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            assert self.memory is not None
            self.memory.load_state_dict(read_memory(self._memory_file(Path(checkpoint))))
            self.memory.to(self.args.device)


def _check_processes(args: TransfoXLTrainingArguments, is_sharded: bool) -> None:
    """Refuse processes and devices among which a memory for each process cannot work."""
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1 and args.world_size == 1:
        raise ValueError(
            f"{started} processes were started, but each sees only itself and would train alone. Without an "
            "accelerator set `use_cpu=True`."
        )
    if is_sharded and args.layout == "documents" and args.eval_strategy != "no":
        raise ValueError(
            "`eval_strategy` must be 'no' with `layout='documents'` where weights are sharded (FSDP, DeepSpeed), but "
            f"is {IntervalStrategy(args.eval_strategy).value!r}: processes with unequal numbers of calls deadlock."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"A process must use one device, but this one sees {args.n_gpu} GPUs (`DataParallel`), which cannot share "
            "its memory. Start one process per GPU with `torchrun` or `accelerate launch`, or set "
            "`CUDA_VISIBLE_DEVICES`."
        )


def _check_unused(args: TransfoXLTrainingArguments, settings: dict[str, Any]) -> None:
    """Refuse what training of a language model would ignore."""
    if args.gradient_segments != 1:
        raise ValueError(f"`gradient_segments` must be 1 for a language model, but is {args.gradient_segments}.")
    if settings.get("compute_metrics") is not None:
        raise ValueError("`compute_metrics` must be None: evaluation computes losses and keeps no logits.")


def _lay_out(dataset: Any, args: TransfoXLTrainingArguments, num_rows: int) -> TokenStreams | DocumentStreams:
    """A training text as streams, as `args.layout` says."""
    # a data set without a length cannot be cut into rows
    if args.layout == "stream" and not _is_endless(dataset):
        return TokenStreams(
            dataset,
            num_rows,
            args.segment_length,
            drop_last=args.dataloader_drop_last,
            varlen=args.varlen,
            seed=args.seed,
            mark_starts=True,
        )
    if args.varlen:
        raise ValueError("`varlen` must be False for an `IterableDataset`, whose rows are of unknown length.")
    return DocumentStreams(
        dataset,
        num_rows,
        args.segment_length,
        separate=args.layout == "documents",
        shuffle=args.layout == "sentences" and not _is_endless(dataset),
        seed=args.seed,
        repeat=True,
    )


def _check_memory_file(path: Path) -> None:
    """Refuse a folder without the memory of this process."""
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"`resume_from_checkpoint` must be a checkpoint, but {folder} is not a folder.")
    if not path.is_file():
        others = sorted(other.name for other in folder.glob("memory-*.safetensors"))
        reason = "a run resumes on as many processes as it had" if others else "no run can resume from it"
        raise ValueError(
            f"`resume_from_checkpoint` must hold {path.name}, the memory of this process, but {folder} holds "
            f"{others or 'no memory'}: {reason}."
        )


def _read_position(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The position in the text and the memory's state in a memory file of a checkpoint."""
    try:
        state = read_memory(path)
        return state["position"], state
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"`resume_from_checkpoint` must hold the memory of a training, but {path} is damaged or holds "
            f"something else: {type(error).__name__}: {error}."
        ) from error


def _in_sequence(items: Any) -> SequentialSampler:
    return SequentialSampler(items)


def _is_endless(dataset: Any) -> bool:
    return not hasattr(dataset, "__len__")


def _texts(dataset: Any) -> list[Any]:
    """Rows of a data set, or a list, as lists of ids."""
    return [row[COLUMN] if isinstance(row, dict) else row for row in dataset]


def _text_facts(streams: TokenStreams | DocumentStreams) -> dict[str, int]:
    """What distinguishes a text from another one without reading all of it: its length and a checksum of its ends.

    Empty for a streamed data set, which has no length.
    """
    if isinstance(streams, TokenStreams):
        length = len(streams.tokens)
        ends = [
            read_tokens(streams.tokens, 0, CHECKSUM_TOKENS),
            read_tokens(streams.tokens, max(0, length - CHECKSUM_TOKENS)),
        ]
    elif _is_endless(streams.documents):
        return {}
    else:
        length = len(streams.documents)
        rows = _texts([streams.documents[0], streams.documents[length - 1]] if length else [])
        ends = [read_tokens(as_tokens(row)) for row in rows]
    checksum = 0
    for ids in ends:
        checksum = zlib.crc32(ids.numpy().tobytes(), checksum)
    return {"length": length, "checksum": checksum}


def _check_text(name: str, dataset: Any, layout: str, vocab_size: int) -> None:
    """Refuse ids that the model does not have; the rows of a streamed data set are checked when they are read."""
    if isinstance(dataset, TokenStreams):
        check_token_ids(name, dataset.tokens, vocab_size)
        return
    if isinstance(dataset, DocumentStreams):
        dataset, layout = dataset.documents, "documents"
    columns = getattr(dataset, "column_names", None)
    if columns is not None and COLUMN not in columns:
        raise ValueError(f"`{name}` must have a column {COLUMN!r}, but has {columns}.")
    if _is_endless(dataset):
        return
    if columns is not None or layout == "stream":
        check_token_ids(name, as_tokens(dataset, name), vocab_size)
        return
    for index, row in enumerate(_texts(dataset)):
        check_token_ids(f"{name}[{index}]", as_tokens(row, f"{name}[{index}]"), vocab_size)


def _derived(loss: float) -> dict[str, float]:
    score = StreamScore(loss, predictions=0, seconds=0.0)
    return {"perplexity": score.perplexity, "bits_per_token": score.bits_per_token}


def last_checkpoint(folder: str | os.PathLike[str] | None) -> str | None:
    """The newest complete checkpoint of an output folder, `None` if there is none.

    A run that is killed while it saves leaves a checkpoint in which the last file, the state of the trainer, is
    missing or truncated; such checkpoints are skipped.
    """
    steps = {}
    for path in Path(folder or ".").glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        try:
            json.loads((path / TRAINER_STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if number.isdigit():
            steps[int(number)] = str(path)
    return steps[max(steps)] if steps else None


__all__ = [
    "TransfoXLTrainer",
    "TransfoXLTrainingArguments",
    "last_checkpoint",
    "read_memory",
    "write_memory",
]
