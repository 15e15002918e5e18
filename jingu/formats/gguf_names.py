"""Names and layouts of jingu's parameters in GGUF files: the tables `names` of gguf.toml, in both directions.

Latent attention has one matrix for keys and values in jingu. Files have one for each, or one for both if they are older
(`split_latents`, `join_latents`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from jingu.formats.gguf_parts import PARTS, Part
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
from jingu.model.feed_forward_specs import GatedFeedForward
from jingu.model.mixer_specs import GatedDelta, StateSpace
from jingu.model.spec import ModelSpec
from jingu.tables import read_table

ARCHITECTURES = read_table(__file__, "gguf.toml")
METADATA = ARCHITECTURES.pop("metadata")
_SHARED = ARCHITECTURES.pop("shared")
_MixerSpec = TypeVar("_MixerSpec", GatedDelta, StateSpace)
# Norms that are stored as they are, where the others are stored as w and jingu has w - 1.
_PLAIN_NORMS = "ssm_norm.weight"


def _pair_order(heads: Callable[[ModelSpec], int]) -> Transform:
    """Return the transform of rows of queries or keys: llama.cpp rotates neighboring dims instead of halves."""
    return Transform(
        lambda tensor, spec: tensor.unflatten(0, (heads(spec), -1, 2)).transpose(1, 2).flatten(0, 2),
        lambda tensor, spec: tensor.unflatten(0, (heads(spec), 2, -1)).transpose(1, 2).flatten(0, 2),
    )


def _mixer(spec: ModelSpec, kind: type[_MixerSpec]) -> _MixerSpec:
    """Return the mixer of a kind that some layers of a model have."""
    return next(layer.mixer for layer in spec.kinds if isinstance(layer.mixer, kind))


def _log_rates(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Return the logarithms of rates of decay, which are stored as negative rates."""
    return (-tensor.double()).log().float().flatten()


def _rates(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """The inverse of `_log_rates`."""
    return -tensor.float().exp()


def _head_order(size: Callable[[GatedDelta], int], dim: int = 0, *, is_behind_keys: bool = False) -> Transform:
    """Return the transform of value heads: their order is by key head, and in files by their number within a key head.

    Args:
        size: elements of a head along `dim`.
        is_behind_keys: whether the rows of queries and keys come first.
    """

    def arrange(tensor: Tensor, spec: ModelSpec, *, is_back: bool) -> Tensor:
        mixer = _mixer(spec, GatedDelta)
        shape = (mixer.num_key_heads, mixer.num_heads // mixer.num_key_heads)
        skipped = 2 * mixer.num_key_heads * mixer.key_head_dim if is_behind_keys else 0
        keys, values = tensor.split([skipped, tensor.shape[dim] - skipped], dim)
        values = values.unflatten(dim, (*(shape[::-1] if is_back else shape), size(mixer)))
        values = values.transpose(dim, dim + 1).flatten(dim, dim + 2)
        return torch.cat([keys, values], dim) if is_behind_keys else values

    return Transform(partial(arrange, is_back=True), partial(arrange, is_back=False))


def _both(inner: Transform, outer: Transform) -> Transform:
    """Return the transform of files that applies `inner` to jingu's parameter, and then `outer`."""
    return Transform(
        lambda tensor, spec: inner.to_jingu(outer.to_jingu(tensor, spec), spec),
        lambda tensor, spec: outer.to_hf(inner.to_hf(tensor, spec), spec),
    )


def _add_one(tensor: Tensor, spec: ModelSpec) -> Tensor:
    return tensor.float() + 1


def _by_scale(scale: Callable[[ModelSpec, int], Tensor | float]) -> Transform:
    """Return the transform of weights that files have multiplied by the scalars of their spec.

    Args:
        scale: returns the factor, or one for each row, given the spec and the number of dims: 1 for biases.
    """

    def factor(tensor: Tensor, spec: ModelSpec) -> Tensor:
        return torch.as_tensor(scale(spec, tensor.dim()), device=tensor.device)

    return Transform(
        lambda tensor, spec: tensor / factor(tensor, spec), lambda tensor, spec: tensor * factor(tensor, spec)
    )


def _input_scale(spec: ModelSpec, dims: int) -> float:
    return spec.attention.input_scale if dims > 1 else 1.0


def _feed_forward(spec: ModelSpec) -> GatedFeedForward:
    assert isinstance(spec.feed_forward, GatedFeedForward)
    return spec.feed_forward


def _part_scales(spec: ModelSpec, dims: int) -> Tensor:
    """Return what the rows of gate, x, b, c and step are multiplied by."""
    mixer = _mixer(spec, StateSpace)
    inner, shared = mixer.num_heads * mixer.head_dim, mixer.num_groups * mixer.state_size
    sizes = torch.tensor([inner, inner, shared, shared, mixer.num_heads])
    rows = torch.tensor(mixer.part_scales).repeat_interleave(sizes)
    return rows[:, None] * mixer.input_scale if dims > 1 else rows


_OFFSET = Transform(lambda tensor, spec: tensor.float() - 1, _add_one)
_TRANSFORMS = {
    **TRANSFORMS,
    "same": IDENTITY,
    "permuted_queries": _pair_order(lambda spec: spec.attention.num_heads),
    "permuted_keys": _pair_order(lambda spec: spec.attention.num_kv_heads),
    "rates": Transform(_log_rates, _rates),
    "rate_column": Transform(_log_rates, lambda tensor, spec: _rates(tensor, spec).unsqueeze(1)),
    "column": Transform(lambda tensor, spec: tensor.flatten(), lambda tensor, spec: tensor.unsqueeze(1)),
    "groups": Transform(
        lambda tensor, spec: tensor.flatten(),
        lambda tensor, spec: tensor.unflatten(0, (_mixer(spec, StateSpace).num_groups, -1)),
    ),
    "tiled_rows": _head_order(lambda mixer: mixer.value_head_dim),
    "tiled_numbers": _head_order(lambda mixer: 1),
    "tiled_columns": _head_order(lambda mixer: mixer.value_head_dim, dim=1),
    "tiled_values": _head_order(lambda mixer: mixer.value_head_dim, is_behind_keys=True),
    "tiled_rates": _both(Transform(_log_rates, _rates), _head_order(lambda mixer: 1)),
    "embedding_scale": _by_scale(lambda spec, dims: float(spec.embedding_scale)),
    "logit_scale": _by_scale(lambda spec, dims: spec.logit_scale),
    "input_scale": _by_scale(_input_scale),
    "key_scale": _by_scale(lambda spec, dims: spec.attention.key_scale * _input_scale(spec, dims)),
    "output_scale": _by_scale(lambda spec, dims: spec.attention.output_scale),
    "gate_scale": _by_scale(lambda spec, dims: _feed_forward(spec).gate_scale),
    "down_scale": _by_scale(lambda spec, dims: _feed_forward(spec).output_scale),
    "part_scales": _by_scale(_part_scales),
    "mixer_output_scale": _by_scale(lambda spec, dims: _mixer(spec, StateSpace).output_scale),
}


def moves_columns(transform: Transform) -> bool:
    """Return whether a transform of matrices moves their columns; otherwise it moves rows, or nothing."""
    return transform is _TRANSFORMS["tiled_columns"]


def _groups(architecture: str) -> list[Mapping[str, Any]]:
    """Return the tables of the groups that an architecture is like, and its own."""
    entry = ARCHITECTURES[architecture]
    return [*(_SHARED[group] for group in entry.get("like", ())), entry]


def architecture_entries(architecture: str, table: str) -> dict[str, Any]:
    """Return the entries of an architecture in a table: those of the groups that it is like, and its own."""
    return {name: value for group in _groups(architecture) for name, value in group.get(table, {}).items()}


def written_classes(table: Mapping[str, Any]) -> set[str]:
    """Return the architectures of transformers that are written under a name of GGUF, given its entry in gguf.toml."""
    if table.get("is_read_only"):
        return set()
    variants = [variant["hugging_face"] for variant in table.get("variants", ())]
    return {table["hugging_face"], *table.get("aliases", ()), *variants}


def full_key(architecture: str, key: str) -> str:
    """Return the whole name of a key of metadata. Most begin with the architecture."""
    return key if key.startswith("xielu.") else f"{architecture}.{key}"


def parts_of(architecture: str) -> list[Part]:
    """Return the parts of an architecture: those of the groups that it is like, and its own."""
    return [PARTS[name] for group in _groups(architecture) for name in group.get("parts", ())]


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
    for name, jingu_names in names.items():
        for jingu_name in [jingu_names] if isinstance(jingu_names, str) else jingu_names or []:
            rules += rules_of_names({name: jingu_name}, _TRANSFORMS[transforms.get(name, "same")])
    for key, is_met in (("names_if", True), ("names_unless", False)):
        for condition, names_of_some in architecture_entries(architecture, key).items():
            rules += rules_of_names(names_of_some, when=partial(_meets, condition, is_met))
    numbers = architecture_entries(architecture, "numbers")
    rules += [NameRule(f"blk.*.{key}", (name,)) for key, name in numbers.items()]
    if ARCHITECTURES[architecture].get("norm_offset"):
        rules = [replace(rule, transform=_OFFSET) if _has_offset(rule.hf_name) else rule for rule in rules]
    return tuple(rules)


def _meets(condition: str, is_met: bool, spec: ModelSpec) -> bool:
    """Return whether a condition of gguf.toml is met by a model, or is not."""
    latent = spec.attention.latent
    conditions = {
        "two_norms": spec.block_order == "parallel",
        "query_latent": latent is not None and latent.query_rank is not None,
    }
    return conditions[condition] == is_met


def _has_offset(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith(_PLAIN_NORMS)


def split_latents(joint: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Divide the matrix of a latent's keys and values into those of files: keys [H, R, K], values [H, V, R].

    H heads, R rank of the latent, K dims of a key that are not rotated, V dims of a value.
    """
    part = spec.attention
    assert part.latent is not None
    heads = joint.unflatten(0, (part.num_heads, -1))
    keys, values = heads.split([part.head_dim - part.latent.rotary_dim, part.value_size], 1)
    return keys.transpose(1, 2).contiguous(), values


def join_latents(keys: Tensor, values: Tensor) -> Tensor:
    """The inverse of `split_latents`. It also works on the meta device."""
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
