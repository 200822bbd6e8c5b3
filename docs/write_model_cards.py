"""Write the cards of the published originals, in `model_cards/`, and of the models trained for this project.

    python docs/write_model_cards.py

Measured numbers come from `docs/results/*.json`, the others from the paper (Dai et al. 2019, tables 1 to 4) and the
evaluation scripts of its code. A test checks that the committed cards are what this script writes.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, eval_result_entries_to_yaml

from hf_txl.cards import TAGS, card, results_by_memory, usage

PURPOSE = """\
A small model, trained to compare memory lengths. Its weights are not published; the command repeats the training."""
# section on loading of the example model, whose folder a function returns
EXAMPLE_USAGE = """
```python
import hf_txl
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = hf_txl.example_model()
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```

It is meant for examples and first trials. It was trained on four novels only: its text has the word order of English,
but no meaning. With its `generation_config`, `generate` never writes `<unk>`.
"""
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAPER = "https://arxiv.org/abs/1901.02860"
SCRIPTS = "https://github.com/kimiyoung/transformer-xl/blob/master/tf/sota"


@dataclass
class Original:
    """A checkpoint that the authors published, in TensorFlow's format."""

    name: str
    text: str
    dataset_type: str
    checkpoint: str
    metric: str
    value: float
    # settings of the authors' evaluation
    mem_len: int
    clamp_len: int
    segment_length: int
    size: str
    unit: str
    datasets: list[str] = field(default_factory=list)


ORIGINALS = [
    Original(
        *("wt103", "WikiText-103", "wikitext", "tf_wt103/model/model.ckpt-0", "perplexity", 18.3, 1600, 1000, 128),
        "18 layers, d_model 1024, 16 heads of 64, 257M parameters",
        "words",
        ["Salesforce/wikitext"],
    ),
    Original(
        *("enwik8", "enwik8", "enwik8", "tf_enwik8/model/model.ckpt-0", "bits per character", 0.99, 3800, 1000, 128),
        "24 layers, d_model 1024, 8 heads of 128, 277M parameters",
        "bytes, without line breaks",
        ["LTCB/enwik8"],
    ),
    Original(
        *("text8", "text8", "text8", "tf_text8/model/model.ckpt-0", "bits per character", 1.08, 3800, 1000, 128),
        "24 layers, d_model 1024, 8 heads of 128, 277M parameters",
        "27 characters",
    ),
    Original(
        *("lm1b", "One Billion Word", "lm1b", "tf_lm1b/model/model.ckpt-1191000", "perplexity", 21.8, 128, -1, 32),
        "24 layers, d_model 1280, 16 heads of 80, 0.8B parameters",
        "words;\nsentences are shuffled, and each has `<S>` before and after it",
    ),
]


@dataclass
class Trained:
    """A model trained for this project; its measurements are in `docs/results/training-{name}.json`."""

    name: str
    path: str
    title: str
    unit: str
    # what the table shows, and its key in the JSON
    metric: str
    key: str
    # of `EvalResult`
    evaluated: dict[str, str]
    data: str
    command: str
    about: str
    purpose: str = PURPOSE
    usage: str = ""
    datasets: list[str] = field(default_factory=list)


MODELS = [
    Trained(
        name="char",
        path="model_cards/training-char.md",
        title="Characters of enwik8",
        unit="characters",
        metric="bits per character",
        key="bits_per_token",
        evaluated={"dataset_name": "enwik8, first 90 MB", "dataset_type": "enwik8", "dataset_split": "validation"},
        data="Trained on the first 90 MB of enwik8 (GFDL and CC BY-SA), without line breaks: 204 symbols.",
        command="python examples/train.py --recipe examples/recipes/enwik8_base.json --set n_layer=6 d_model=256 …",
        about="Validation text: 200,000 bytes after the training text, in bits per character.",
        datasets=["LTCB/enwik8"],
    ),
    Trained(
        name="word",
        path="model_cards/training-word.md",
        title="Words of the King James Version",
        unit="words",
        metric="perplexity",
        key="perplexity",
        evaluated={"dataset_name": "King James Version", "dataset_type": "kjv", "dataset_split": "validation"},
        data="Trained on the King James Version (public domain), 8,867 words.",
        command="python examples/train.py --tokenizer pretokenized --set n_layer=6 d_model=256 cutoffs=[1000,4000] …",
        about="Validation text: the end of the book, in words.",
    ),
    Trained(
        name="example",
        path="hf_txl/example/README.md",
        title="The example model of hf_txl",
        unit="words",
        metric="perplexity",
        key="perplexity",
        evaluated={
            "dataset_name": "Middlemarch, the last 20,000 words",
            "dataset_type": "gutenberg",
            "dataset_split": "validation",
        },
        data="Trained on War and Peace (translation of L. and A. Maude), Middlemarch, Moby-Dick and Great\n"
        "Expectations: Project Gutenberg's electronic texts 2600, 145, 2701 and 1400, in the public domain. Their\n"
        "1.5 million tokens are words and punctuation marks as Moses splits them; rare words are `<unk>`.",
        command="python examples/example_model.py --books war_and_peace.txt middlemarch.txt moby_dick.txt \\\n"
        "    great_expectations.txt --output_dir runs/example",
        about="Validation text: the last 20,000 words of Middlemarch, which the training text leaves out.",
        purpose="A small word-level model of English, which the package contains.",
        usage=EXAMPLE_USAGE,
    ),
]

ORIGINAL = """\
# Transformer-XL, {text}

The large model of the paper ([Dai et al., 2019]({paper})) for {text}:
{size}. Its tokens are {unit}.

The authors published it as a TensorFlow checkpoint. Their code is under Apache-2.0; the checkpoint has no licence of
its own. It is not part of this repository; the command below converts your copy of it.

## Convert

```sh
# the checkpoint and its vocabulary, in the folders of the authors' tf/sota/download.sh
hf-txl convert {checkpoint} {name} --vocabulary tf_{name}/data/cache.pkl --verify \\
    --set mem_len={mem_len} --set clamp_len={clamp_len} --set same_length=true
```

This needs TensorFlow: `pip install "hf-txl[tensorflow]"`. The checkpoint does not state the three settings; these are
the values of the authors' evaluation. Nothing in the checkpoint or the vocabulary is executed. `--verify` compares the
outputs with those of a slow float64 reference that uses the source's weights.

## Dialect

The dialect is that of the original TensorFlow code: {mem_len:,} zero states before the first token
(`memory_init="zeros"`), `mem_len + 1` keys per query with `same_length` (`same_length_includes_oldest=True`), and a
`layer_norm_epsilon` of 1e-12. The converter sets these three fields.

## Use

{usage}

## Evaluation

The paper reports {value} {metric} on the test set. The authors' script,
[{name}.sh]({scripts}/{name}.sh), reads the text
as 16 streams in parallel, in segments of {segment_length} tokens with a memory of {mem_len:,}{clamped}.
The code below reads it as one stream:

```python
from hf_txl.scoring import evaluate_stream

score = evaluate_stream(model, token_ids, segment_length={segment_length}, {lengths}, same_length=True)
{printed}
```

This project has **not reproduced the figure**: it has neither the checkpoint nor the test set. It has checked that
converted models equal the recorded outputs of the original code to 1e-5, on small checkpoints of the same layout.
"""

TRAINED = """\
# {title}

{purpose}

{size}, {parameters:,} parameters.
{data}
{usage}
## Training

```sh
{command}
```

{steps:,} steps of {batch} segments of {segment_length} {unit}, on one CPU thread; learning rate {learning_rate} with
a cosine schedule.

## Evaluation

{about}

| memory | {metric} |
|---|---|
{rows}

It was trained with a memory of {mem_len}. The numbers come from `docs/results/{file}`.
"""


def size_of(config: dict[str, Any]) -> str:
    return f"{config['n_layer']} layers, d_model {config['d_model']}, {config['n_head']} heads of {config['d_head']}"


def original_card(facts: Original) -> tuple[str, str]:
    """The card of an original, and its entry for `.eval_results`."""
    metric_type = "perplexity" if facts.metric == "perplexity" else "bits_per_character"
    source = {"source_url": PAPER, "source_name": "Dai et al. 2019"}
    result = EvalResult(
        task_type="text-generation",
        dataset_type=facts.dataset_type,
        dataset_name=facts.text,
        metric_type=metric_type,
        metric_value=facts.value,
        metric_name=f"{facts.metric}, as reported in the paper",
        dataset_split="test",
        **source,
    )
    metadata = ModelCardData(
        language="en",
        license="other",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        datasets=facts.datasets or None,
        model_name=f"transfo-xl-{facts.name}",
        eval_results=[result],
    )
    printed = "print(score.perplexity)" if metric_type == "perplexity" else "print(score.bits_per_token)"
    clamped = f", distances clamped at {facts.clamp_len:,}" if facts.clamp_len > 0 else ""
    text = ORIGINAL.format(
        **vars(facts),
        lengths=f"mem_len={facts.mem_len}, clamp_len={facts.clamp_len}",
        paper=PAPER,
        scripts=SCRIPTS,
        usage=usage(facts.name),
        printed=printed,
        clamped=clamped,
    )
    notes = f"{facts.metric} on the test set; memory {facts.mem_len}, segments of {facts.segment_length}"
    dataset = facts.datasets[0] if facts.datasets else facts.dataset_type
    entry = EvalResultEntry(dataset_id=dataset, task_id=metric_type, value=facts.value, notes=notes, **source)
    return str(card(metadata, text)), yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False)


def trained_card(model: Trained) -> str:
    """The card of a model trained for this project, from the JSON that its training wrote."""
    file = f"training-{model.name}.json"
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    config, training, rows = results["model"], results["training"], results["by_memory"]
    metadata = ModelCardData(
        language="en",
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        datasets=model.datasets or None,
        model_name=f"hf-txl-{model.name}",
        eval_results=results_by_memory(f"validation text, in {model.unit}", model.evaluated, rows),
    )
    text = TRAINED.format(
        **vars(model),
        size=size_of(config),
        parameters=results["parameters"],
        steps=training["max_steps"],
        batch=training["per_device_train_batch_size"] * training["gradient_accumulation_steps"],
        segment_length=training["segment_length"],
        learning_rate=training["learning_rate"],
        rows="\n".join(f"| {row['mem_len']:,} | {row[model.key]:.4f} |" for row in rows),
        mem_len=config["mem_len"],
        file=file,
    )
    return str(card(metadata, text))


def all_cards() -> dict[str, str]:
    """Content of each file, by its path in the repository."""
    files = {}
    for facts in ORIGINALS:
        text, entry = original_card(facts)
        files |= {f"model_cards/{facts.name}.md": text, f"model_cards/eval_results/{facts.name}.yaml": entry}
    return files | {model.path: trained_card(model) for model in MODELS}


def main() -> None:
    for name, content in all_cards().items():
        path = ROOT / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
