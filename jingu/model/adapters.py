"""Adapters beside matrices: LoRA (Hu et al., 2022), DoRA (Liu et al., 2024), IA³ (Liu et al., 2022).

Shapes: R rank, I inputs, O outputs, E experts, M choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from hashlib import sha256

import torch
from torch import Tensor, nn

from jingu.errors import JinguError
from jingu.model.experts import GroupedLinear
from jingu.model.grouped import grouped_product
from jingu.model.layers import Linear
from jingu.model.noise import Draw, dropped
from jingu.model.packed import Packed
from jingu.model.products import linear
from jingu.model.quantised import round_blocks
from jingu.model.spec import Adapter, Ia3, Lora, ModelSpec

LEAVES = ("lora_a", "lora_b", "lora_m", "ia3_in", "ia3_out")
"""Names of an adapter's parameters, beside the `weight` of its module: the two small matrices, the lengths of rows,
factors of inputs and of outputs."""
_OWN = frozenset({*LEAVES, "prompt"})


class LoraLinear(Linear):
    """A linear map and its adapter."""

    first_input = 0
    """Number of the first input here, where a rank has some of them."""

    def __init__(self, plain: Linear, adapter: Lora, name: str, draw: Draw) -> None:
        """
        Args:
            plain: the map.
            name: in the model; what is dropped depends on it.
            draw: the keys by which it is.
        """
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        self.weight, self.bias = plain.weight, plain.bias
        self.scale, self.dropout, self.draw = adapter.scale, adapter.dropout, draw
        self.reads_source = name.endswith(("cross_attention.k", "cross_attention.v"))
        self.salt = int.from_bytes(sha256(name.encode()).digest()[:6], "little")
        self.lora_a = nn.Parameter(torch.empty(adapter.rank, plain.in_features))
        self.lora_b = nn.Parameter(torch.empty(plain.out_features, adapter.rank))
        self.lora_m = nn.Parameter(torch.empty(plain.out_features)) if adapter.magnitudes else None

    def forward(self, input: Tensor) -> Tensor:
        some = self._some(input)
        small = self.scale * linear(linear(some, self.lora_a), self.lora_b)
        if self.lora_m is None:
            return super().forward(input) + small
        # The lengths are taken as constants (section 4.3 of the paper).
        factor_O = (self.lora_m / self.row_squares().sqrt()).to(input.dtype)
        return super().forward(input) + (factor_O - 1) * linear(some, self.weight) + factor_O * small

    def _some(self, x_BTI: Tensor) -> Tensor:
        """The inputs that are not dropped."""
        keys = self.draw.source if self.reads_source else self.draw.own
        if not self.dropout or keys is None:
            return x_BTI
        return dropped(x_BTI, keys, self.salt, self.dropout, self.first_input)

    @torch.no_grad()
    def row_squares(self) -> Tensor:
        """[O] squared lengths of the rows of the sum of matrix and adapter, in fp32 at least."""
        weight: Tensor | Packed = self.weight
        whole = weight.whole() if isinstance(weight, Packed) else weight
        wide = torch.promote_types(torch.promote_types(whole.dtype, self.lora_b.dtype), torch.float32)
        return (whole.to(wide) + self.scale * (self.lora_b.to(wide) @ self.lora_a.to(wide))).square().sum(1)


class LoraGrouped(GroupedLinear):
    """A matrix for each expert, and an adapter of its own for each."""

    def __init__(self, plain: GroupedLinear, adapter: Lora) -> None:
        number, outputs, inputs = plain.weight.shape
        super().__init__(number, inputs, outputs)
        self.weight = plain.weight
        self.scale = adapter.scale
        self.lora_a = nn.Parameter(torch.empty(number, adapter.rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(number, outputs, adapter.rank))

    def all(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """As `GroupedLinear.all`, with the adapters."""
        x_MR = grouped_product(x_MI, self.lora_a.to(x_MI.dtype), ends_E)
        return super().all(x_MI, ends_E) + self.scale * grouped_product(x_MR, self.lora_b.to(x_MI.dtype), ends_E)

    def one(self, number: int, x_MI: Tensor) -> Tensor:
        """As `GroupedLinear.one`, with the adapter."""
        x_MR = linear(x_MI, self.lora_a[number])
        return super().one(number, x_MI) + self.scale * linear(x_MR, self.lora_b[number])


class Ia3Linear(Linear):
    """A linear map with a factor for each of its inputs, or of its outputs."""

    def __init__(self, plain: Linear, *, of_inputs: bool) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        self.weight, self.bias = plain.weight, plain.bias
        self.ia3_in = nn.Parameter(torch.empty(plain.in_features)) if of_inputs else None
        self.ia3_out = None if of_inputs else nn.Parameter(torch.empty(plain.out_features))

    def forward(self, input: Tensor) -> Tensor:
        if self.ia3_in is not None:
            return super().forward(input * self.ia3_in.to(input.dtype))
        assert self.ia3_out is not None
        return super().forward(input) * self.ia3_out.to(input.dtype)


def prepare_training(model: nn.Module, spec: ModelSpec) -> None:
    """Give the matrices that an adapter is for one each, in place, and mark what is trained."""
    adapter = spec.adapter
    if isinstance(adapter, Lora | Ia3):
        _add_beside(model, adapter)
    if spec.base is not None:
        round_blocks(model, spec.base)
    for name, parameter in model.named_parameters():
        if not is_trained(name, spec):
            parameter.requires_grad_(False)


def is_trained(name: str, spec: ModelSpec) -> bool:
    """Whether a parameter of a model is trained: where there are adapters, these alone."""
    return not matches(name, spec.frozen) if spec.adapter is None else is_adapter(name)


def _add_beside(model: nn.Module, adapter: Lora | Ia3) -> None:
    draw = Draw()
    for prefix, parent in list(model.named_modules()):
        draw = getattr(parent, "draw", draw)  # of the block that it is a part of
        for leaf, child in list(parent.named_children()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            # Routers and the head are weights that others multiply by.
            if "blocks." not in prefix or leaf == "router" or not matches(name, adapter.targets):
                continue
            if isinstance(child, Linear | GroupedLinear):
                setattr(parent, leaf, _adapted(name, child, adapter, draw))


def _adapted(name: str, child: Linear | GroupedLinear, adapter: Lora | Ia3, draw: Draw) -> Linear | GroupedLinear:
    if isinstance(child, GroupedLinear):
        if not isinstance(adapter, Lora) or adapter.magnitudes or adapter.dropout:
            raise JinguError(
                f"{name} holds the matrices of experts, which take LoRA alone, without dropout and magnitudes.",
                where="tune.targets",
                fix="Leave it out, or set tune.type=lora, tune.dropout=0 and tune.dora=false.",
            )
        return LoraGrouped(child, adapter)
    if isinstance(adapter, Lora):
        return LoraLinear(child, adapter, name, draw)
    return Ia3Linear(child, of_inputs=name.endswith("feed_forward.down"))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is like one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_targets(names: Collection[str], adapter: Adapter) -> None:
    """JinguError for a pattern that no module with an adapter of a model matches; `names` are its parameters'."""
    modules = {name.rpartition(".")[0] for name in names if name.endswith(LEAVES)}
    for pattern in adapter.targets if isinstance(adapter, Lora | Ia3) else ():
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise JinguError(
                f"no matrix of the model has a name like {pattern}.",
                where="tune.targets",
                fix="Names are such as blocks.0.attention.q and blocks.0.feed_forward.up; * stands for anything.",
            )


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return not _OWN.isdisjoint(name.split("."))


def add_adapter(
    adapter: Lora | Ia3, held: Collection[str], name: str, value: Tensor, read: Callable[[str], Tensor]
) -> Tensor:
    """A parameter `name` of a model, its adapter merged into it, where it has one.

    Args:
        held: names of the adapters' parameters, and perhaps of others.
        read: reads them.
    """
    module, _, leaf = name.rpartition(".")
    parts = {kind: read(f"{module}.{kind}") for kind in LEAVES if f"{module}.{kind}" in held}
    return merged(value, leaf, parts, adapter) if parts else value


def merged(value: Tensor, leaf: str, parts: Mapping[str, Tensor], adapter: Lora | Ia3) -> Tensor:
    """A weight or bias (`leaf`) of a matrix that does what another and its adapter do together; of experts, all. In
    fp32 at least."""
    wide = torch.promote_types(value.dtype, torch.float32)
    total, parts = value.to(wide), {kind: part.to(wide) for kind, part in parts.items()}
    if isinstance(adapter, Lora) and leaf == "weight":
        total = total + adapter.scale * (parts["lora_b"] @ parts["lora_a"])
        if "lora_m" in parts:
            total = total * (parts["lora_m"] / total.square().sum(1).sqrt()).unsqueeze(1)
    elif "ia3_out" in parts:
        total = total * (parts["ia3_out"].unsqueeze(1) if leaf == "weight" else parts["ia3_out"])
    elif "ia3_in" in parts and leaf == "weight":
        total = total * parts["ia3_in"]
    return total


def unmerged(
    value: Tensor, leaf: str, parts: Mapping[str, Tensor], adapter: Lora | Ia3, dtype: torch.dtype
) -> Tensor | None:
    """What `merged` made `value` of, in the dtype that it had; None where the numbers do not tell."""
    wide = torch.promote_types(value.dtype, torch.float32)
    if isinstance(adapter, Lora):
        found = value.to(wide)
        if leaf == "weight":
            found = found - adapter.scale * (parts["lora_b"].to(wide) @ parts["lora_a"].to(wide))
    else:
        found = value.to(wide) / merged(torch.ones_like(value, dtype=wide), leaf, parts, adapter)
    found = found.to(dtype)
    if not torch.equal(merged(found, leaf, parts, adapter).to(value.dtype), value):
        return None
    # Would a neighbour have given the same?
    for end in (-torch.inf, torch.inf):
        beside = torch.nextafter(found, torch.full_like(found, end))
        if bool((merged(beside, leaf, parts, adapter).to(value.dtype) == value).any()):
            return None
    return found
