"""Name maps: names and layouts of a family's parameters in Hugging Face's files, for import and export.

A map pairs a module name of Hugging Face with a module name of jingu.

- `*` stands for the number of the block.
- A second `*` in Hugging Face's name stands for the number of an expert. Hugging Face has one tensor per expert, and
  jingu has one tensor for all experts, with one more dim.
- `{a,b}` stands for several modules. If both names have braces, they are paired one by one. If only jingu's name has
  them, Hugging Face's module holds all of jingu's, concatenated along dim 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jingu.model.mixer_specs import GatedDelta
from jingu.model.spec import ModelSpec
from jingu.tables import read_table

# The tables of families.toml, by family.
TABLES = read_table(__file__, "families.toml")

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Rearrange = Callable[[Tensor, ModelSpec], Tensor]


@dataclass(frozen=True)
class Transform:
    """A rearrangement of a tensor and its inverse. Both must also work on the meta device, where they give shapes.

    Attributes:
        of_experts: whether the tensor has the matrices, or biases, of all experts.
    """

    to_jingu: Rearrange
    to_hf: Rearrange
    of_experts: bool = False


IDENTITY = Transform(lambda tensor, spec: tensor, lambda tensor, spec: tensor)
TRANSPOSE = Transform(lambda tensor, spec: tensor.t(), lambda tensor, spec: tensor.t())

# The transform of tensors that hold no parameter.
CONSTANT = Transform(lambda tensor, spec: tensor, lambda tensor, spec: tensor)


def _swap_halves(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Exchange the halves of each head, for files whose rotary pairs turn in the other direction."""
    half = spec.attention.head_dim // 2
    return tensor.unflatten(0, (-1, 2, half)).flip(1).flatten(0, 2)


def _join_heads(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Rearrange the rows q, k and v of each key-value head to those of all heads' q, k and v."""
    heads = spec.attention
    parts = tensor.unflatten(0, (heads.num_kv_heads, -1, heads.head_dim))
    queries = parts.shape[1] - 2
    return _concatenate([part.flatten(0, 2) for part in parts.split([queries, 1, 1], 1)])


def _interleave_heads(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """The inverse of `_join_heads`."""
    heads = spec.attention
    kv_rows = heads.num_kv_heads * heads.head_dim
    parts = tensor.split([heads.num_heads * heads.head_dim, kv_rows, kv_rows])
    split = [part.unflatten(0, (heads.num_kv_heads, -1, heads.head_dim)) for part in parts]
    return _concatenate(split, 1).flatten(0, 2)


def _head_rows(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Return a vector of all heads with a row for each."""
    return tensor.unflatten(0, (-1, spec.attention.head_dim))


def _split_pairs(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Rearrange rows [E, 2·F, ...] of gate and up in turns to all gates of all experts, then all ups: [2·E, F, ...]."""
    return tensor.unflatten(1, (-1, 2)).movedim(2, 0).flatten(0, 1)


def _join_pairs(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """The inverse of `_split_pairs`."""
    return tensor.unflatten(0, (2, -1)).movedim(0, 2).flatten(1, 2)


def _split_gates(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Rearrange rows [E, 2·F, ...] of an expert's gate and up to those of all experts' gates and ups: [2·E, F, ...]."""
    return tensor.unflatten(1, (2, -1)).movedim(1, 0).flatten(0, 1)


def _join_gates(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """The inverse of `_split_gates`."""
    return tensor.unflatten(0, (2, -1)).movedim(0, 1).flatten(1, 2)


def _transposed(split: Rearrange, join: Rearrange) -> Transform:
    """Return the transform of matrices that are stored with inputs before outputs."""
    return Transform(
        lambda tensor, spec: split(tensor.transpose(1, 2), spec),
        lambda tensor, spec: join(tensor, spec).transpose(1, 2),
        of_experts=True,
    )


def _same(tensor: Tensor, spec: ModelSpec) -> Tensor:
    return tensor


def _mixer(spec: ModelSpec) -> GatedDelta:
    """Return the gated delta rule of a model."""
    return next(layer.mixer for layer in spec.kinds if isinstance(layer.mixer, GatedDelta))


def _grouped(sizes: Callable[[GatedDelta], list[int]]) -> Transform:
    """Return the transform of projections whose rows are grouped by key head: for each the rows of every part.

    Args:
        sizes: rows of each part for one key head.
    """

    def split(tensor: Tensor, spec: ModelSpec) -> Tensor:
        mixer = _mixer(spec)
        parts = tensor.unflatten(0, (mixer.num_key_heads, -1)).split(sizes(mixer), 1)
        return _concatenate([part.flatten(0, 1) for part in parts])

    def join(tensor: Tensor, spec: ModelSpec) -> Tensor:
        mixer = _mixer(spec)
        heads = mixer.num_key_heads
        parts = tensor.split([heads * size for size in sizes(mixer)])
        return _concatenate([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)

    return Transform(split, join)


def _values_per_key_head(mixer: GatedDelta) -> int:
    return mixer.num_heads // mixer.num_key_heads


def _concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(list(tensors), dim)


def _split_query_gates(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Rearrange the rows query and gate of each head to those of all heads' queries, then all gates."""
    heads = spec.attention
    return tensor.unflatten(0, (heads.num_heads, 2, heads.head_dim)).transpose(0, 1).flatten(0, 2)


def _join_query_gates(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """The inverse of `_split_query_gates`."""
    heads = spec.attention
    return tensor.unflatten(0, (2, heads.num_heads, heads.head_dim)).transpose(0, 1).flatten(0, 2)


INTERLEAVED_HEADS = Transform(_join_heads, _interleave_heads)
# Transforms by their names in families.toml.
TRANSFORMS = {
    "swap_halves": Transform(_swap_halves, _swap_halves),
    "head_rows": Transform(lambda tensor, spec: tensor.flatten(), _head_rows),
    "interleaved_heads": INTERLEAVED_HEADS,
    "transpose": TRANSPOSE,
    "query_gates": Transform(_split_query_gates, _join_query_gates),
    # q, k, v and gate; beta and decay.
    "delta_parts": _grouped(
        lambda mixer: [mixer.key_head_dim] * 2 + [_values_per_key_head(mixer) * mixer.value_head_dim] * 2
    ),
    "delta_rates": _grouped(lambda mixer: [_values_per_key_head(mixer)] * 2),
    # The kernels of convolutions of single channels have a dim of inputs.
    "depthwise": Transform(
        lambda tensor, spec: tensor.squeeze(1) if tensor.dim() == 3 else tensor,
        lambda tensor, spec: tensor.unsqueeze(1) if tensor.dim() == 2 else tensor,
    ),
    # One more dim than the parameter.
    "one_row": Transform(lambda tensor, spec: tensor.squeeze(0), lambda tensor, spec: tensor.unsqueeze(0)),
    "experts": Transform(_same, _same, of_experts=True),
    "experts_gates": Transform(_split_gates, _join_gates, of_experts=True),
    "experts_pairs": Transform(_split_pairs, _join_pairs, of_experts=True),
    "experts_transposed": _transposed(_same, _same),
    "experts_gates_transposed": _transposed(_split_gates, _join_gates),
    "experts_pairs_transposed": _transposed(_split_pairs, _join_pairs),
}


@dataclass(frozen=True)
class NameRule:
    """One tensor of Hugging Face, and the parameters of jingu that it holds.

    Attributes:
        hf_name: name of the tensor, with `*` for numbers.
        jingu_names: names of the parameters, with `*` for numbers.
        transform: converts the tensor to the parameters, concatenated along dim 0.
        when: whether the rule applies to a spec; other specs have these parameters under other names.
        has_predictions: whether the rule of a block applies to layers of multi-token prediction, too, as if they were
            further blocks.
    """

    hf_name: str
    jingu_names: tuple[str, ...]
    transform: Transform = IDENTITY
    when: Callable[[ModelSpec], bool] = lambda spec: True
    has_predictions: bool = True


@dataclass(frozen=True)
class TensorMapping:
    """A rule applied to one block of a model, and to one expert if there are experts.

    Attributes:
        hf_name: name of Hugging Face's tensor.
        jingu_shapes: names and shapes of jingu's parameters; with experts, the shape of one expert's matrix.
        transform: the rule's transform.
        spec: spec of the model, which the transform needs.
        expert: index of the expert whose matrix the tensor is; None: the tensor holds the whole parameters.
    """

    hf_name: str
    jingu_shapes: Mapping[str, torch.Size]
    transform: Transform
    spec: ModelSpec
    expert: int | None

    @property
    def shape(self) -> torch.Size:
        """The shape of Hugging Face's tensor."""
        import torch

        return self._join([torch.empty(shape, device="meta") for shape in self.jingu_shapes.values()]).shape

    def to_jingu(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return jingu's parameters (of an expert: its matrices), as views of Hugging Face's tensor if possible."""
        whole = self.transform.to_jingu(tensor, self.spec)
        pieces = (
            [whole] if len(self.jingu_shapes) == 1 else whole.split([shape[0] for shape in self.jingu_shapes.values()])
        )
        return dict(zip(self.jingu_shapes, pieces, strict=True))

    def to_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return Hugging Face's tensor, given jingu's whole parameters."""
        return self._join(tensors if self.expert is None else [whole[self.expert] for whole in tensors])

    def _join(self, pieces: Sequence[Tensor]) -> Tensor:
        import torch

        return self.transform.to_hf(pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)), self.spec)


@dataclass(frozen=True)
class ConstantTensor(TensorMapping):
    """A tensor of Hugging Face's files that holds a number and no parameter of jingu."""

    value: float = 0.0

    @property
    def shape(self) -> torch.Size:
        import torch

        return torch.Size(())

    def to_hf(self, tensors: Sequence[Tensor]) -> Tensor:
        import torch

        return torch.tensor(self.value)


def name_rules(
    *families: str,
    table: str = "names",
    transform: Transform = IDENTITY,
    when: Callable[[ModelSpec], bool] = lambda spec: True,
) -> tuple[NameRule, ...]:
    """Return the rules for weights and biases in the tables of families.toml.

    Args:
        families: the families whose tables apply; later ones override earlier ones.
        table: name of the table in each family.
        transform: the transform of all these rules.
        when: whether these rules apply to a spec.
    """
    names = {hf_name: name for family in families for hf_name, name in TABLES[family][table].items()}
    return rules_of_names(names, transform, when)


def rules_of_names(
    names: Mapping[str, str],
    transform: Transform = IDENTITY,
    when: Callable[[ModelSpec], bool] = lambda spec: True,
) -> tuple[NameRule, ...]:
    """Return the rules for weights and biases of modules, given jingu's names by those of Hugging Face.

    A name of jingu that ends with `.weight` or `.bias` is that of a parameter instead of a module.
    """
    rules: list[NameRule] = []
    for hf_name, jingu_name in names.items():
        if jingu_name.endswith((".weight", ".bias")):
            rules.append(NameRule(hf_name, tuple(_expand_braces(jingu_name)), transform, when))
            continue
        one, several = _expand_braces(hf_name), _expand_braces(jingu_name)
        pairs = [(one[0], several)] if len(one) == 1 else [(a, [b]) for a, b in zip(one, several, strict=True)]
        for kind in ("weight", "bias"):
            rules += [
                NameRule(f"{hf_module}.{kind}", tuple(f"{module}.{kind}" for module in modules), transform, when)
                for hf_module, modules in pairs
            ]
    return tuple(rules)


def _expand_braces(names: str) -> list[str]:
    """Expand `a.{b,c}` to `a.b` and `a.c`."""
    before, *choice = re.split(r"[{}]", names)
    return [f"{before}{part}{choice[1]}" for part in choice[0].split(",")] if choice else [before]


def _has_experts(name: str, shape: torch.Size) -> bool:
    """Return whether a parameter belongs to all experts of a layer."""
    return len(shape) == (2 if name.endswith(".bias") else 3)


# Rules for the score head of reward models, in all families.
_CLASSIFIER_RULES = name_rules("classifier")


def expand_rules(
    rules: Sequence[NameRule], spec: ModelSpec, parameters: Mapping[str, torch.Size]
) -> list[TensorMapping]:
    """Return the rules that apply to a spec, expanded for every block and expert, in module order.

    A rule applies if the model has all of its parameters, and these have an expert dim exactly if the rule has a `*`
    for it. For example, the rule for the head does not apply to a tied head, which is not a parameter.

    Args:
        parameters: names and shapes of the model's parameters.

    Raises:
        LookupError: a parameter belongs to no rule or to several.
    """
    mappings: list[TensorMapping] = []
    rules = (*rules, *_CLASSIFIER_RULES)
    for rule in (rule for rule in rules if rule.when(spec)):
        for number, names in _numbered_names(rule, spec):
            # Insert the number of the block. A `*` that remains stands for the expert.
            hf_name = rule.hf_name.replace("*", str(number), 1)
            # Skip rules for parameters that this model does not have, or has with (or without) an expert dim.
            if any(name not in parameters for name in names):
                continue
            if ("*" in hf_name or rule.transform.of_experts) != _has_experts(names[0], parameters[names[0]]):
                continue
            # One mapping per expert, or one mapping of the whole parameters.
            experts = range(parameters[names[0]][0]) if "*" in hf_name else (None,)
            shapes = {name: parameters[name][1:] if "*" in hf_name else parameters[name] for name in names}
            mappings += [TensorMapping(hf_name.replace("*", str(n)), shapes, rule.transform, spec, n) for n in experts]
    # Every parameter must come from exactly one rule. Count the tensors of experts once, by expert 0.
    mapped = [name for entry in mappings if not entry.expert for name in entry.jingu_shapes]
    if sorted(mapped) != sorted(parameters):
        raise LookupError(f"family {spec.family}: names mapped wrongly: {set(mapped) ^ set(parameters)}")
    order = {name: number for number, name in enumerate(parameters)}
    return sorted(mappings, key=lambda entry: order[next(iter(entry.jingu_shapes))])


def _numbered_names(rule: NameRule, spec: ModelSpec) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the number in Hugging Face's name of a rule, and jingu's names, for each block and each layer of
    multi-token prediction. The numbers of the latter follow those of the blocks."""
    first = rule.jingu_names[0]
    further = range(spec.mtp_layers)
    if "*" not in rule.hf_name:
        yield 0, tuple(name.replace("*", "0") for name in rule.jingu_names)
    elif first.startswith("mtp."):
        before = 0 if "mtp." in rule.hf_name else spec.num_layers
        for number in further:
            yield before + number, tuple(name.replace("*", str(number)) for name in rule.jingu_names)
    else:
        for number in range(max(spec.num_layers, spec.num_encoder_layers or 0)):
            yield number, tuple(name.replace("*", str(number)) for name in rule.jingu_names)
        for number in further if first.startswith("blocks.") and rule.has_predictions else ():
            block = f"mtp.{number}.block"
            yield spec.num_layers + number, tuple(name.replace("blocks.*", block) for name in rule.jingu_names)


def read_parameter(name: str, holders: Sequence[TensorMapping], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the parameter `name`, together with other parameters that the same tensor holds (not with experts).

    Only one tensor at a time is in memory.

    Args:
        holders: all tensors of Hugging Face that hold the parameter; with experts, one per expert in order.
        read: reads a tensor of Hugging Face by name.
    """
    first = holders[0].to_jingu(read(holders[0].hf_name))
    if holders[0].expert is None:
        return first
    whole = first[name].new_empty(len(holders), *first[name].shape)
    whole[0] = first[name]
    for entry in holders[1:]:
        whole[entry.expert] = entry.to_jingu(read(entry.hf_name))[name]
    return {name: whole}
