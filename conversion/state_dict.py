"""Applies the rules of `key_rules.py` in both directions and accounts for every tensor of both sides.

The rules are first expanded for one configuration, name by name, so that all missing, unexpected and misshaped tensors
are known before any data is read.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hf_txl import TransfoXLConfig

from .key_rules import Condition, Format

State = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


# --- layouts: how a tensor is stored in the source and in the target


class Layout:
    """Tensors that are the same on both sides."""

    def to_target(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        return tensors

    def to_source(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        return tensors


class Transposed(Layout):
    def to_target(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        # copied now, so that the source can be freed
        return [tensor.t().contiguous() for tensor in tensors]

    to_source = to_target


class RowsReversed(Layout):
    def to_target(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        return [tensor.flip(0) for tensor in tensors]

    to_source = to_target


class LayersStacked(Layout):
    """One source tensor (n_layer, …) holds the target tensors of all layers."""

    def to_target(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        return list(tensors[0].unbind(0))

    def to_source(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        return [torch.stack(tensors)]


class LayersStackedHeadsApart(LayersStacked):
    """One source tensor (n_layer, rows, n_head, d_head) holds tables (rows, d_model)."""

    def to_target(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        return super().to_target([tensors[0].flatten(2)], config)

    def to_source(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        return [super().to_source(tensors, config)[0].unflatten(2, (config.n_head, -1))]


class BucketsJoined(Layout):
    """The target is the concatenation of the source tensors of all buckets."""

    def to_target(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        return [torch.cat(tensors)]

    def to_source(self, tensors: list[torch.Tensor], config: TransfoXLConfig) -> list[torch.Tensor]:
        ends = config.bucket_ends
        return list(tensors[0].split([end - start for start, end in zip([0, *ends], ends, strict=False)]))


LAYOUTS: dict[str, Layout] = {
    "same": Layout(),
    "transposed": Transposed(),
    "rows reversed": RowsReversed(),
    "layers stacked": LayersStacked(),
    "layers stacked, heads apart": LayersStackedHeadsApart(),
    "buckets joined": BucketsJoined(),
}


# --- rules expanded for one configuration


class Entry(NamedTuple):
    """The names of one weight, or of several that are a single tensor on the other side."""

    sources: list[str]
    targets: list[str]
    layout: Layout


def _numbers(config: TransfoXLConfig, placeholder: str) -> range:
    """The values of a placeholder."""
    tables = range(config.num_clusters + 1) if config.div_val > 1 else range(1)
    return {
        "layer": range(config.n_layer),
        "table": tables,
        "projection": tables,
        "bucket": range(config.num_clusters + 1),
    }[placeholder]


def _instances(config: TransfoXLConfig, names: list[str], when: Condition) -> Iterator[list[list[str]]]:
    """Expand placeholders: those that all names share give one instance per value, others a list within one."""
    fields = [set(re.findall(r"\{(\w+)\}", name)) for name in names]
    shared = sorted(set.intersection(*fields))
    for values in itertools.product(*(_numbers(config, placeholder) for placeholder in shared)):
        known = dict(zip(shared, values, strict=True))
        number = next((value for placeholder, value in known.items() if placeholder != "layer"), 0)
        if not when(config, number):
            continue
        yield [
            [
                name.format(**known, **dict(zip(own, rest, strict=True)))
                for own in [sorted(placeholders - set(shared))]
                for rest in itertools.product(*(_numbers(config, placeholder) for placeholder in own))
            ]
            for name, placeholders in zip(names, fields, strict=True)
        ]


def entries(rules: Format, config: TransfoXLConfig) -> list[Entry]:
    """Every weight of a model of this configuration under both of its names."""
    return [
        Entry(sources, targets, LAYOUTS[rule.layout])
        for rule in rules.rules
        for sources, targets in _instances(config, [rule.source, rule.target], rule.when)
    ]


def _entries_of(rules: Format, config: TransfoXLConfig, weights: Iterable[str]) -> list[Entry]:
    """Entries of a model with these weights: a classifier has no softmax, and a language model no score."""
    there = set(weights)
    return [entry for entry in entries(rules, config) if there.issuperset(entry.targets)]


def is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory or have equal values; NaN equals NaN."""
    if tensor.shape != other.shape:
        return False
    if tensor.data_ptr() == other.data_ptr() or torch.equal(tensor, other):
        return True
    return not (is_finite(tensor) or is_finite(other)) and torch.allclose(tensor, other, 0.0, 0.0, equal_nan=True)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity. Copies tensors of 8-bit types only."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.dtype.itemsize == 1:
        # 8-bit floating-point types cannot be compared
        tensor = tensor.float()
    # if any element is NaN, both are
    return all(math.isfinite(bound.item()) for bound in torch.aminmax(tensor))


# --- accounting


@dataclass
class Account:
    """Accounts for every tensor of a source and every weight of a model; filled by `Fitting`."""

    used: list[str] = field(default_factory=list)
    """Tensors that were converted to weights."""
    repeated: dict[str, str] = field(default_factory=dict)
    """Further names of tied weights: name -> the name that it repeats."""
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the tensors left out for it."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    """Further names whose values differ from the tensor that they should repeat."""
    unfilled: list[str] = field(default_factory=list)
    """Weights of the model that no rule of the format provides."""
    nonfinite: list[str] = field(default_factory=list)
    """Converted tensors that hold NaN or infinity."""

    def raise_if_nonfinite(self) -> None:
        """Raise one `ValueError` that names every tensor with NaN or infinity."""
        if self.nonfinite:
            raise ValueError(
                "The tensors must be finite, but these hold NaN or infinity: "
                f"{', '.join(f'`{name}`' for name in self.nonfinite)}. A model with them predicts NaN; "
                "to convert it as it is, pass `allow_nonfinite=True` (`--allow-nonfinite`)."
            )

    def raise_if_incomplete(self) -> None:
        """Raise one `ValueError` that names every tensor that does not fit."""
        problems = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.misshaped,
            "different although tied by the configuration": self.different,
            "weights that this format does not have": self.unfilled,
        }
        found = [f"  {what}: {', '.join(names)}" for what, names in problems.items() if names]
        if found:
            raise ValueError(
                "The tensors must be exactly those of a model of this configuration, but these are not:\n"
                + "\n".join(found)
            )

    def __str__(self) -> str:
        parts = [f"{len(self.used)} tensors became weights"]
        if self.repeated:
            parts.append(f"{len(self.repeated)} are further names of tied weights")
        parts += [f"{len(names)} left out ({reason})" for reason, names in self.ignored.items()]
        if self.nonfinite:
            parts.append(f"NaN or infinity, kept on request, in {', '.join(f'`{name}`' for name in self.nonfinite)}")
        return ", ".join(parts)


class Fitting:
    """A source matched with a model: the role of each of its tensors, before any of them is read.

    Args:
        rules (`Format`): The names of the source's format.
        config (`TransfoXLConfig`): Configuration of the model.
        found (`dict[str, tuple[int, ...]]`): Name and shape of every tensor of the source.
        wanted (`dict[str, tuple[int, ...]]`): Name and shape of every weight of the model, tied ones once.
    """

    def __init__(self, rules: Format, config: TransfoXLConfig, found: Shapes, wanted: Shapes) -> None:
        self.config = config
        self.entries = _entries_of(rules, config, wanted)
        self.expected: Shapes = {}
        for entry in self.entries:
            weights = [torch.empty(wanted[target], device="meta") for target in entry.targets]
            tensors = entry.layout.to_source(weights, config)
            self.expected |= {name: tuple(tensor.shape) for name, tensor in zip(entry.sources, tensors, strict=True)}
        # first name -> the name in the source, since a tied weight may be stored under a further name only
        self.names = {name: name for name in self.expected if name in found}
        self.account = Account(
            unfilled=sorted(set(wanted) - {target for entry in self.entries for target in entry.targets})
        )
        aliases = dict(_aliases(rules, config))
        for name, shape in found.items():
            if name in self.expected:
                pass
            elif (first := aliases.get(name)) in self.expected:
                if first not in self.names:
                    self.names[first] = name
                else:
                    self.account.repeated[name] = first
            elif reason := next((why for pattern, why in rules.ignored if re.fullmatch(pattern, name)), None):
                self.account.ignored.setdefault(reason, []).append(name)
            else:
                self.account.unexpected.append(f"`{name}` {shape}")
        self.account.used = list(self.names.values())
        for name, shape in self.expected.items():
            if name not in self.names:
                self.account.missing.append(f"`{name}` {shape}")
            elif (actual := found[self.names[name]]) != shape:
                self.account.misshaped.append(f"`{self.names[name]}` {actual} where {shape} is needed")

    def read(self, sources: Mapping[str, torch.Tensor], allow_nonfinite: bool = False) -> State:
        """The weights of the model; each tensor of the source is read once, and repeated ones are compared.

        Args:
            sources (`Mapping[str, torch.Tensor]`): The tensors of the source.
            allow_nonfinite (`bool`, defaults to `False`):
                Whether they may hold NaN or infinity. `account.nonfinite` names those that do.

        Raises:
            ValueError: if something is missing, unexpected, misshaped, not finite or not tied as the configuration
                says. One message names everything of one kind.
        """
        self.account.raise_if_incomplete()
        for name, first in self.account.repeated.items():
            if not is_same(sources[name], sources[self.names[first]]):
                self.account.different.append(f"`{name}` and `{self.names[first]}`")
        self.account.raise_if_incomplete()
        state: State = {}
        for entry in self.entries:
            names = [self.names[name] for name in entry.sources]
            tensors = [sources[name] for name in names]
            self.account.nonfinite += [
                name for name, tensor in zip(names, tensors, strict=True) if not is_finite(tensor)
            ]
            if self.account.nonfinite and not allow_nonfinite:
                # the rest is read for the names in the message only
                state.clear()
                continue
            state |= dict(zip(entry.targets, entry.layout.to_target(tensors, self.config), strict=True))
        if not allow_nonfinite:
            self.account.raise_if_nonfinite()
        return state


def to_source(rules: Format, config: TransfoXLConfig, weights: Mapping[str, torch.Tensor]) -> State:
    """The tensors of a source with these weights, tied ones once: the inverse of `Fitting.read`."""
    state: State = {}
    for entry in _entries_of(rules, config, weights):
        tensors = entry.layout.to_source([weights[target] for target in entry.targets], config)
        state |= dict(zip(entry.sources, tensors, strict=True))
    return state


def _aliases(rules: Format, config: TransfoXLConfig) -> Iterator[tuple[str, str]]:
    """Each further name with the first name of the same tensor."""
    for alias in rules.aliases:
        for number in _numbers(config, re.findall(r"\{(\w+)\}", alias.source)[0]):
            if alias.when(config, number):
                table = number if config.div_val > 1 else 0
                numbers = {"layer": number, "bucket": number, "table": table, "projection": table}
                yield alias.source.format(**numbers), alias.of.format(**numbers)
