"""Files of n-best lists: the hypotheses of a speech recogniser with their scores, best first.

Two formats are read and written:

- **NeMo**: a TSV file without a header, `hypothesis <tab> score`, with the same number of rows for every utterance
  (`beam_size`), as `eval_beamsearch_ngram.py` writes and `eval_neural_rescorer.py` reads; references in its manifest,
  a JSON object with a `text` in each line.
- **ESPnet**: the JSON file of `add_results_to_json` (`espnet/asr/asr_utils.py`): `utts` by id, each with a list
  `output` whose entries have `rec_text`, `score` and, if it is known, the reference as `text`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..tokenization_transfo_xl import decoding_utf8

# ends `rec_text` in ESPnet
END = "<eos>"


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis of an utterance.

    Args:
        text (`str`): Words, separated by white space.
        score (`float`): Score of the recogniser, a log-probability.
        lm_score (`float`, *optional*): Log-probability by the language model, in nats.
        total (`float`, *optional*): The combined score, by which hypotheses are ranked.
        fields (`dict`): Further fields of the file, which are written as they were read.
    """

    text: str
    score: float
    lm_score: float | None = None
    total: float | None = None
    fields: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Utterance:
    """The n-best list of an utterance.

    Args:
        id (`str`): Its name in the file, or its number from 1.
        hypotheses (`list[Hypothesis]`): At least one.
        reference (`str`, *optional*): What was said.
        fields (`dict`): Further fields of the file.
    """

    id: str
    hypotheses: list[Hypothesis]
    reference: str | None = None
    fields: dict[str, Any] = field(default_factory=dict, compare=False)


def read_nbest(
    path: str | Path, *, beam_size: int | None = None, references: str | Path | None = None
) -> list[Utterance]:
    """Read a file of n-best lists: ESPnet's if its name ends in `.json`, else NeMo's.

    Args:
        path (path): The file, in UTF-8.
        beam_size (`int`, *optional*): Rows of each utterance of a TSV file; required there.
        references (path, *optional*):
            What was said: a text for each utterance in a line, or NeMo's manifest. ESPnet's own file has them.

    Raises:
        ValueError: if a file is not as described; the message has the line or the utterance.
    """
    path = Path(path)
    with decoding_utf8(path):
        content = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json":
        utterances = _from_espnet(path, content)
    else:
        utterances = _from_nemo(path, content, beam_size)
    if not utterances:
        raise ValueError(f"`path` must hold hypotheses, but {path} has none.")
    return utterances if references is None else _with_references(utterances, Path(references))


def _number(value: Any, place: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"{place}: the score must be a finite number, but is {value!r}.")
    return score


def _from_nemo(path: Path, content: str, beam_size: int | None) -> list[Utterance]:
    if beam_size is None or beam_size < 1:
        raise ValueError(f"`beam_size` must be the number of rows of each utterance of {path}, but is {beam_size}.")
    hypotheses = []
    for number, line in enumerate(content.removesuffix("\n").split("\n") if content else [], 1):
        text, tab, score = line.rstrip("\r").rpartition("\t")
        if not tab:
            raise ValueError(f"{path}, line {number}: must be `hypothesis <tab> score`, but is {line!r}.")
        hypotheses.append(Hypothesis(text, _number(score, f"{path}, line {number}")))
    if len(hypotheses) % beam_size:
        raise ValueError(f"{path} must have {beam_size} rows for each utterance, but has {len(hypotheses)} rows.")
    starts = range(0, len(hypotheses), beam_size)
    return [Utterance(str(index), hypotheses[start : start + beam_size]) for index, start in enumerate(starts, 1)]


def _from_espnet(path: Path, content: str) -> list[Utterance]:
    try:
        utterances = json.loads(content)["utts"]
        items = list(utterances.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be a JSON object with `utts` by id: {error}.") from error
    return [_espnet_utterance(f"{path}, utterance {name!r}", name, entry) for name, entry in items]


def _espnet_utterance(place: str, name: str, entry: Any) -> Utterance:
    outputs = entry.get("output") if isinstance(entry, dict) else None
    if not isinstance(outputs, list) or not outputs:
        raise ValueError(f"{place}: `output` must be a list of hypotheses.")
    hypotheses = []
    for output in outputs:
        if not isinstance(output, dict) or not isinstance(output.get("rec_text"), str):
            raise ValueError(f"{place}: every `output` must have a `rec_text`.")
        text = output["rec_text"].removesuffix(END).strip()
        hypotheses.append(Hypothesis(text, _number(output.get("score"), place), fields=output))
    rest = {key: value for key, value in entry.items() if key != "output"}
    return Utterance(name, hypotheses, outputs[0].get("text"), rest)


def _with_references(utterances: list[Utterance], path: Path) -> list[Utterance]:
    with decoding_utf8(path):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    if path.suffix in (".json", ".jsonl"):
        try:
            lines = [json.loads(line)["text"] for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} must have a JSON object with `text` in each line: {error}.") from error
    if len(lines) != len(utterances):
        raise ValueError(
            f"`references` must have a line for each of {len(utterances)} utterances, but {path} has {len(lines)}."
        )
    return [replace(utterance, reference=line) for utterance, line in zip(utterances, lines, strict=True)]


def nbest_content(utterances: Sequence[Utterance], suffix: str) -> str:
    """The content of a file of rescored lists, in the format that `suffix` names as for [`read_nbest`].

    A score is the combined one, if there is one. In ESPnet's form the others are added as `asr_score` and `lm_score`.
    """
    if suffix != ".json":
        return "".join(
            f"{hypothesis.text}\t{_shown(hypothesis)!r}\n"
            for utterance in utterances
            for hypothesis in utterance.hypotheses
        )
    content = {
        utterance.id: {
            **utterance.fields,
            "output": [_espnet_output(rank, each) for rank, each in enumerate(utterance.hypotheses, 1)],
        }
        for utterance in utterances
    }
    return json.dumps({"utts": content}, indent=4, ensure_ascii=False) + "\n"


def _shown(hypothesis: Hypothesis) -> float:
    return hypothesis.score if hypothesis.total is None else hypothesis.total


def _espnet_output(rank: int, hypothesis: Hypothesis) -> dict[str, Any]:
    name = str(hypothesis.fields.get("name", "")).partition("[")[0]
    output = {"rec_text": hypothesis.text, **hypothesis.fields, "name": f"{name}[{rank}]", "score": _shown(hypothesis)}
    if hypothesis.total is not None:
        output |= {"asr_score": hypothesis.score, "lm_score": hypothesis.lm_score}
    return output


__all__ = ["Hypothesis", "Utterance", "read_nbest"]
