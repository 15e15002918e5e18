"""Name maps: how a family's checkpoint names and arranges the decoder's parameters, used in both directions.

A map pairs modules of theirs with modules of ours. `*` stands for the number of the block; where theirs has a second
one, it is that of an expert: they keep a matrix for each, and ours, of one dim more, holds them all. `{a,b}` stands
for several modules. They are paired one by one; or, where theirs is one, it holds ours, stacked along dim 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jingu.model.spec import ModelSpec

Rearrange = Callable[[Tensor, ModelSpec], Tensor]


@dataclass(frozen=True)
class Transform:
    """A rearrangement and its inverse. Both must also work on the meta device, where they give the shapes."""

    to_ours: Rearrange
    to_theirs: Rearrange


SAME = Transform(lambda tensor, spec: tensor, lambda tensor, spec: tensor)
TRANSPOSED = Transform(lambda tensor, spec: tensor.t(), lambda tensor, spec: tensor.t())


@dataclass(frozen=True)
class Rule:
    """One tensor of theirs, and those of ours that it holds, stacked, after the transform."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform = SAME
    when: Callable[[ModelSpec], bool] = lambda spec: True
    """Of which specs; others keep ours under another name, by another rule."""


@dataclass(frozen=True)
class Entry:
    """A rule at one block of a model.

    Attributes:
        theirs: the name of their tensor.
        ours: names of ours, and the shape of each; of experts, that of one.
        expert: which slice of ours theirs is; None: all of it.
    """

    theirs: str
    ours: Mapping[str, torch.Size]
    transform: Transform
    spec: ModelSpec
    expert: int | None

    @property
    def shape(self) -> torch.Size:
        """The shape of their tensor."""
        return self._joined([torch.empty(shape, device="meta") for shape in self.ours.values()]).shape

    def to_ours(self, theirs: Tensor) -> dict[str, Tensor]:
        """Our tensors out of theirs, as views where that is possible; of an expert, its slice."""
        whole = self.transform.to_ours(theirs, self.spec)
        pieces = [whole] if len(self.ours) == 1 else whole.split([shape[0] for shape in self.ours.values()])
        return dict(zip(self.ours, pieces, strict=True))

    def to_theirs(self, ours: Sequence[Tensor]) -> Tensor:
        """Their tensor out of ours, which are whole."""
        return self._joined(ours if self.expert is None else [whole[self.expert] for whole in ours])

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        return self.transform.to_theirs(pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)), self.spec)


def rules(
    names: Mapping[str, str], transform: Transform = SAME, when: Callable[[ModelSpec], bool] = lambda spec: True
) -> tuple[Rule, ...]:
    """The rules of a map from their modules to ours, for weights and biases."""
    found: list[Rule] = []
    for theirs, ours in names.items():
        one, several = _spelled(theirs), _spelled(ours)
        pairs = [(one[0], several)] if len(one) == 1 else [(a, [b]) for a, b in zip(one, several, strict=True)]
        for kind in ("weight", "bias"):
            found += [Rule(f"{a}.{kind}", tuple(f"{b}.{kind}" for b in each), transform, when) for a, each in pairs]
    return tuple(found)


def _spelled(names: str) -> list[str]:
    """`a.{b,c}` → `a.b` and `a.c`."""
    before, *choice = re.split(r"[{}]", names)
    return [f"{before}{each}{choice[1]}" for each in choice[0].split(",")] if choice else [before]


def entries(rules: Sequence[Rule], spec: ModelSpec, ours: Mapping[str, torch.Size]) -> list[Entry]:
    """The rules that apply to a spec, spelled out for every block, in the order of the model.

    A rule applies when the model has its parameters (`ours`: name → shape), and they hold experts where the rule has
    some; a tied head, say, is not there.

    Raises:
        LookupError: a parameter that no rule names, or a rule of which only a part applies (a fault of the family).
    """
    found: list[Entry] = []
    layers = range(max(spec.layers, spec.encoder_layers or 0))
    for rule in (rule for rule in rules if rule.when(spec)):
        for layer in map(str, layers if "*" in rule.theirs else (0,)):
            theirs, names = rule.theirs.replace("*", layer, 1), tuple(name.replace("*", layer) for name in rule.ours)
            if any(name not in ours for name in names) or ("*" in theirs) != (len(ours[names[0]]) == 3):
                continue
            experts = range(ours[names[0]][0]) if "*" in theirs else (None,)
            shapes = {name: ours[name][1:] if "*" in theirs else ours[name] for name in names}
            found += [Entry(theirs.replace("*", str(n)), shapes, rule.transform, spec, n) for n in experts]
    mapped = [name for entry in found if not entry.expert for name in entry.ours]
    if sorted(mapped) != sorted(ours):
        raise LookupError(f"family {spec.family}: names mapped wrongly: {set(mapped) ^ set(ours)}")
    order = {name: number for number, name in enumerate(ours)}
    return sorted(found, key=lambda entry: order[next(iter(entry.ours))])


def read_ours(name: str, holders: Sequence[Entry], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The tensor `name` of ours out of all of theirs that hold it (`holders`), of which one is in memory at a time;
    and those that came with it."""
    first = holders[0].to_ours(read(holders[0].theirs))
    if holders[0].expert is None:
        return first
    whole = first[name].new_empty(len(holders), *first[name].shape)
    whole[0] = first[name]
    for entry in holders[1:]:
        whole[entry.expert] = entry.to_ours(read(entry.theirs))[name]
    return {name: whole}
