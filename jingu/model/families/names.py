"""Name maps: how a family's checkpoint names and arranges the decoder's parameters, used in both directions.

A rule pairs one tensor of theirs with one or several of ours. Theirs, rearranged, is ours stacked along dim 0.
`{layer}` stands for the number of the block. Where theirs says `{expert}`, they keep a tensor for each expert, and
ours, of one dim more, holds them all.
"""

from __future__ import annotations

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
    """One tensor of theirs, and those of ours that it holds."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform = SAME
    when: Callable[[ModelSpec], bool] = lambda spec: True
    """Of which specs; others keep ours under another name, by another rule."""


@dataclass(frozen=True)
class Entry:
    """A rule at one block: real names."""

    theirs: str
    ours: tuple[str, ...]
    transform: Transform
    expert: int | None = None
    """Which slice of ours theirs is; None: all of it."""


def rule(theirs: str, *ours: str, transform: Transform = SAME) -> Rule:
    """`theirs` holds `ours`, stacked, after `transform`."""
    return Rule(theirs, ours, transform)


def entries(rules: Sequence[Rule], spec: ModelSpec, ours: Mapping[str, torch.Size]) -> list[Entry]:
    """The rules that apply to a spec, spelled out for every block, in the order of the model.

    A rule applies when the model has its parameters (`ours`: name → shape); a tied head, say, does not.

    Raises:
        LookupError: a parameter that no rule names, or a rule of which only a part applies (a fault of the family).
    """
    found: list[Entry] = []
    layers = range(max(spec.layers, spec.encoder_layers or 0))
    for pattern in (pattern for pattern in rules if pattern.when(spec)):
        for layer in layers if "{layer}" in pattern.theirs else (0,):
            names = tuple(name.replace("{layer}", str(layer)) for name in pattern.ours)
            if all(name in ours for name in names):
                theirs = pattern.theirs.replace("{layer}", str(layer))
                experts = range(ours[names[0]][0]) if "{expert}" in theirs else (None,)
                found += [
                    Entry(theirs.replace("{expert}", str(expert)), names, pattern.transform, expert)
                    for expert in experts
                ]
    mapped = [name for entry in found if not entry.expert for name in entry.ours]
    if sorted(mapped) != sorted(ours):
        raise LookupError(f"family {spec.family}: names mapped wrongly: {set(mapped) ^ set(ours)}")
    order = {name: number for number, name in enumerate(ours)}
    return sorted(found, key=lambda entry: order[entry.ours[0]])


def to_ours(entry: Entry, theirs: Tensor, spec: ModelSpec, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Our tensors out of theirs, as views where that is possible; of an expert, its slice."""
    whole = entry.transform.to_ours(theirs, spec)
    if entry.expert is not None:
        return {entry.ours[0]: whole}
    pieces = whole.split([shapes[name][0] for name in entry.ours])
    return dict(zip(entry.ours, pieces, strict=True))


def read_ours(
    name: str,
    holders: Sequence[Entry],
    read: Callable[[str], Tensor],
    spec: ModelSpec,
    shapes: Mapping[str, torch.Size],
) -> dict[str, Tensor]:
    """The tensor `name` of ours out of all of theirs that hold it (`holders`), of which one is in memory at a time;
    and those that came with it."""
    first = to_ours(holders[0], read(holders[0].theirs), spec, shapes)
    if holders[0].expert is None:
        return first
    whole = first[name].new_empty(shapes[name])
    whole[0] = first[name]
    for entry in holders[1:]:
        whole[entry.expert] = to_ours(entry, read(entry.theirs), spec, shapes)[name]
    return {name: whole}


def to_theirs(entry: Entry, ours: Sequence[Tensor], spec: ModelSpec) -> Tensor:
    """Their tensor out of ours, in the order of the entry."""
    if entry.expert is not None:
        return entry.transform.to_theirs(ours[0][entry.expert], spec)
    return entry.transform.to_theirs(ours[0] if len(ours) == 1 else torch.cat(list(ours)), spec)


def their_shape(entry: Entry, spec: ModelSpec, shapes: Mapping[str, torch.Size]) -> torch.Size:
    """The shape of their tensor; `shapes` are ours."""
    return to_theirs(entry, [torch.empty(shapes[name], device="meta") for name in entry.ours], spec).shape
