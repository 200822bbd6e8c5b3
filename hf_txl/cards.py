"""Model cards: metadata that the Hub reads, and the card of a model that `TransfoXLTrainer` has trained."""

import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .remote_code_transfo_xl import AUTO_MAP, CODE_VERSION
from .scoring import evaluate_stream
from .token_ids import as_tokens

TAGS = ["transfo-xl", "transformer-xl"]
# training arguments that a card shows, if they are set
SHOWN = (
    *("layout", "segment_length", "mem_len", "learning_rate", "lr_scheduler_type", "warmup_steps"),
    *("max_grad_norm", "weight_decay", "optim", "seed", "bf16", "fp16"),
)
PLOT = "curves.png"
PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
USAGE = """\
```python
import hf_txl  # registers the model type `transfo-xl`
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
memory = model.init_memory(batch_size=1)  # carries context from call to call: model(input_ids, cache=memory)
```
{otherwise}"""
WITH_CODE = """
This needs the package: `pip install hf-txl`. Without it, leave the first line out and pass `trust_remote_code=True` to
both calls: the folder holds the code of the model. Without either, transformers refuses to load it."""
WITHOUT_CODE = """
This needs the package: `pip install hf-txl`. Without it, transformers refuses to load the folder."""


def usage(name: str, auto_class: str = "AutoModelForCausalLM", holds_code: bool = True) -> str:
    """The section of a card on loading, with this package and without it."""
    otherwise = WITH_CODE if holds_code else WITHOUT_CODE
    return USAGE.format(name=name, auto_class=auto_class, otherwise=otherwise)


def results_by_memory(name: str, dataset: dict[str, Any], rows: list[dict[str, Any]]) -> list[EvalResult]:
    """Metadata of perplexities by memory length, as `model-index` holds them.

    Args:
        name (`str`): What was evaluated, such as "validation text".
        dataset (`dict`): Arguments `dataset_name` and `dataset_type` of `EvalResult`.
        rows (`list[dict]`): `mem_len` and `perplexity` of each evaluation.
    """
    return [
        EvalResult(
            task_type="text-generation",
            metric_type="perplexity",
            metric_name=f"perplexity of the {name}, memory of {row['mem_len']} tokens",
            metric_value=round(row["perplexity"], 3),
            **dataset,
        )
        for row in rows
    ]


def card(metadata: ModelCardData, text: str) -> ModelCard:
    """A card whose metadata are unchanged when it is read again.

    Raises:
        ValueError: if they do not.
    """
    made = ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}")
    if made.data.to_dict() != metadata.to_dict():
        raise ValueError(f"The metadata of a card must be valid, but are {metadata.to_dict()}.")
    return made


class TrainedModelCard:
    """Mixin of `TransfoXLTrainer`: evaluation at several memory lengths, and the card of the trained model."""

    args: Any
    model: Any
    state: Any
    accelerator: Any
    eval_dataset: Any
    streams: Any
    # of `evaluate_memory_lengths`
    by_memory: list[dict[str, Any]] = []

    def evaluate_memory_lengths(self, mem_lens: list[int], dataset: Any = None) -> list[dict[str, Any]]:
        """Loss of a text by memory length, in segments of the training's length; the card shows it.

        Args:
            mem_lens (`list[int]`): Memory lengths.
            dataset (*optional*): The text. Default: `eval_dataset`.

        Returns:
            `list[dict]`: `mem_len`, `loss` (nats per token), `perplexity`, `bits_per_token`, `predictions` of each.
        """
        tokens = as_tokens(self.eval_dataset if dataset is None else dataset, "dataset")[:]
        rows = []
        for mem_len in mem_lens:
            score = evaluate_stream(
                self.accelerator.unwrap_model(self.model),
                tokens,
                segment_length=self.args.segment_length,
                batch_size=self.args.per_device_eval_batch_size,
                mem_len=mem_len,
            )
            rows.append({"mem_len": mem_len, "loss": score.loss, "perplexity": score.perplexity})
            rows[-1] |= {"bits_per_token": score.bits_per_token, "predictions": score.predictions}
        self.by_memory = rows
        return rows

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write `README.md` to the output folder: data, settings, losses by step and by memory length.

        A plot `curves.png` in that folder is shown. Arguments as for `Trainer.create_model_card`, to which
        `push_to_hub` passes its arguments; `dataset` names the text, `dataset_tags` are ids of data sets on the Hub.
        """
        if not self.is_world_process_zero():  # type: ignore[attr-defined]
            return
        folder = Path(self.args.output_dir)
        auto_class = _auto_class(self.model)
        name = model_name or Path(self.args.hub_model_id or folder.name).name
        source = finetuned_from or _loaded_from(self.model)
        text_facts = {"dataset_name": ", ".join(_as_list(dataset)) or "unnamed", "dataset_type": "text"}
        rows = self.by_memory or self._last_evaluation()
        metadata = ModelCardData(
            language=language,
            license=license or "other",
            library_name="peft" if (folder / "adapter_config.json").is_file() else "transformers",
            pipeline_tag=_as_list(tasks)[0] if tasks else PIPELINES[auto_class],
            tags=sorted({*TAGS, "generated_from_trainer", *_as_list(tags)}),
            datasets=_as_list(dataset_tags) or None,
            base_model=source,
            model_name=name,
            eval_results=results_by_memory("validation text", text_facts, rows) or None,
        )
        template = resources.files("hf_txl.model_cards").joinpath("TRAINED.md").read_text(encoding="utf-8")
        text = Template(template).substitute(
            name=name,
            origin=f"fine-tuned from `{source}`" if source else "trained",
            version=CODE_VERSION,
            usage=usage(self.args.hub_model_id or name, auto_class, self.model.config.save_code),
            data=self._describe_data(dataset),
            settings="\n".join(f"| `{key}` | {value} |" for key, value in self._settings().items()),
            evaluation="\n\n".join(self._evaluations(folder)),
        )
        card(metadata, text).save(folder / "README.md")

    def _settings(self) -> dict[str, Any]:
        config, args = self.model.config, self.args
        shown = {name: getattr(args, name) for name in SHOWN if getattr(args, name, None) not in (None, False, 0)}
        shown["lr_scheduler_type"] = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        shown["optim"] = getattr(args.optim, "value", args.optim)
        size = f"{config.n_layer} layers, d_model {config.d_model}, {config.n_head} heads of {config.d_head}"
        return {
            "model": f"{size}, {sum(weight.numel() for weight in self.model.parameters()):,} parameters",
            "vocabulary": f"{config.vocab_size:,} tokens, cutoffs {config.cutoffs}, div_val {config.div_val}",
            **shown,
            "mem_len": shown.get("mem_len", config.mem_len),
            "streams": args.train_batch_size * args.world_size,
            "segments per step": args.train_batch_size * args.world_size * args.gradient_accumulation_steps,
            "steps": self.state.global_step,
        }

    def _describe_data(self, dataset: str | list[str] | None) -> str:
        named = ", ".join(_as_list(dataset)) or "a text without a recorded name"
        tokens = getattr(self.streams, "tokens", None)
        return f"Trained on {named}" + ("." if tokens is None else f": {len(tokens):,} tokens.")

    def _last_evaluation(self) -> list[dict[str, Any]]:
        """The last evaluation during training, as a row of `by_memory`."""
        last = next((entry for entry in reversed(self.state.log_history) if "eval_perplexity" in entry), None)
        length = self.args.eval_settings().get("mem_len")
        length = self.model.config.mem_len if length is None else length
        return [] if last is None else [{"mem_len": length, "perplexity": last["eval_perplexity"]}]

    def _evaluations(self, folder: Path) -> list[str]:
        """Paragraphs, tables and the plot of what was measured."""
        parts = []
        if by_step := {entry["step"]: entry for entry in self.state.log_history if "eval_perplexity" in entry}:
            row = "| {step:,} | {eval_loss:.4f} | {eval_perplexity:.2f} |"
            parts.append(_table("| step | loss, nats per token | perplexity |", row, list(by_step.values())))
        if self.by_memory:
            parts.append(f"By memory length, in segments of {self.args.segment_length} tokens:")
            row = "| {mem_len:,} | {perplexity:.2f} | {bits_per_token:.4f} |"
            parts.append(_table("| memory | perplexity | bits per token |", row, self.by_memory))
        if (folder / PLOT).is_file():
            parts.append(f"![Loss by step and by memory length]({PLOT})")
        return parts or ["It was not evaluated."]


def _auto_class(model: Any) -> str:
    """The Auto class that loads a model; that of language models for adapters and classes of other packages."""
    name = type(model).__name__
    names = {target.rpartition(".")[2]: auto_class for auto_class, target in AUTO_MAP.items()}
    return names.get(name, "AutoModelForCausalLM")


def _loaded_from(model: Any) -> str | None:
    """Name of the model on the Hub that training started from; `None` for a local folder."""
    name = getattr(model.config, "_name_or_path", "") or ""
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None


def _table(head: str, row: str, rows: list[dict[str, Any]]) -> str:
    """A table in Markdown of three columns."""
    return "\n".join([head, "|---|---|---|", *(row.format(**values) for values in rows)])


def _as_list(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


__all__ = ["TrainedModelCard", "card", "results_by_memory", "usage"]
