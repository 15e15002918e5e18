"""Names and layouts of jingu's parameters in GGUF files: the tables `names` of gguf.toml, in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from jingu.model.decoder import parameter_shapes
from jingu.model.families.name_map import (
    IDENTITY,
    TRANSFORMS,
    NameRule,
    TensorMapping,
    Transform,
    expand_rules,
    rules_of_names,
)
from jingu.model.spec import ModelSpec
from jingu.tables import read_table

ARCHITECTURES = read_table(__file__, "gguf.toml")
METADATA = ARCHITECTURES.pop("metadata")
_SHARED = ARCHITECTURES.pop("shared")
# Norms that are stored as they are, where the others are stored as w and jingu has w - 1.
_PLAIN_NORMS = "ssm_norm.weight"


def _permuted(heads: Callable[[ModelSpec], int]) -> Transform:
    """Return the transform of rows of queries or keys: llama.cpp rotates neighboring dims instead of halves."""
    return Transform(
        lambda tensor, spec: tensor.unflatten(0, (heads(spec), -1, 2)).transpose(1, 2).flatten(0, 2),
        lambda tensor, spec: tensor.unflatten(0, (heads(spec), 2, -1)).transpose(1, 2).flatten(0, 2),
    )


def _add_one(tensor: Tensor, spec: ModelSpec) -> Tensor:
    return tensor.float() + 1


_OFFSET = Transform(lambda tensor, spec: tensor.float() - 1, _add_one)
_TRANSFORMS = {
    **TRANSFORMS,
    "same": IDENTITY,
    "permuted_queries": _permuted(lambda spec: spec.attention.num_heads),
    "permuted_keys": _permuted(lambda spec: spec.attention.num_kv_heads),
    # Decay rates are stored as -exp(log rate).
    "rates": Transform(
        lambda tensor, spec: (-tensor.double()).log().float().flatten(),
        lambda tensor, spec: -tensor.float().exp(),
    ),
    "columns": Transform(lambda tensor, spec: tensor.flatten(), lambda tensor, spec: tensor.unsqueeze(1)),
}


def architecture_entries(architecture: str, table: str) -> dict[str, Any]:
    """Return the entries of an architecture in a table: those of the groups that it is like, and its own."""
    entry = ARCHITECTURES[architecture]
    groups = [*(_SHARED[group] for group in entry.get("like", ())), entry]
    return {name: value for group in groups for name, value in group.get(table, {}).items()}


def gguf_mappings(spec: ModelSpec, architecture: str) -> list[TensorMapping]:
    """Return the tensors of a model in a file of an architecture of GGUF, with the parameters that each holds.

    Raises:
        LookupError: the architecture has no tensor for a parameter.
    """
    return expand_rules(_rules(architecture), spec, parameter_shapes(spec))


@lru_cache(maxsize=64)
def _rules(architecture: str) -> tuple[NameRule, ...]:
    transforms = {**_SHARED["transforms"], **architecture_entries(architecture, "transforms")}
    names = {**_SHARED["names"], **architecture_entries(architecture, "names")}
    rules: list[NameRule] = []
    for name, jingu_name in names.items():
        if jingu_name is not False:
            rules += rules_of_names({name: jingu_name}, _TRANSFORMS[transforms.get(name, "same")])
    if ARCHITECTURES[architecture].get("norm_offset"):
        rules = [replace(rule, transform=_OFFSET) if _has_offset(rule.hf_name) else rule for rule in rules]
    return tuple(rules)


def _has_offset(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith(_PLAIN_NORMS)
