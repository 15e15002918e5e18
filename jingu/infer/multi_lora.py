"""Several LoRA adapters on one base model: each row of a batch uses one of them, or none.

The matrices of all adapters of a linear layer are concatenated along the rank: C columns, each of one adapter. Two
matrix products and a mask serve any mixture of adapters, and the result of a row depends on no other row.

Shapes: B rows, T tokens, I inputs, O outputs, R rank, C columns of all adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from jingu.errors import JinguError
from jingu.formats.models import load_adapters
from jingu.formats.stored_model import StoredModel
from jingu.model.decoder import Decoder, parameter_shapes
from jingu.model.layers import Linear
from jingu.model.spec import Lora
from jingu.parallel.pipeline import Model

# The number that stands for no adapter.
NO_ADAPTER = -1
# The A and B matrices of an adapter by module name; B is multiplied by the scale.
LoraWeights = dict[str, tuple[Tensor, Tensor]]


class LoraAdapters:
    """The adapters of a model, and which rows of the present forward pass use which.

    Attributes:
        names: by number.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._chosen_BT: Tensor | None = None

    def number(self, name: str | None) -> int:
        """Return the number of an adapter. Raise JinguError for an unknown name."""
        if name is None:
            return NO_ADAPTER
        if name not in self.names:
            names = ", ".join(self.names) or "none"
            raise JinguError(f"there is no adapter {name}.", where="adapter", fix=f"There are: {names}.")
        return self.names.index(name)

    @contextmanager
    def select(self, parts: Sequence[tuple[int, int, int]], rows: int, device: torch.device) -> Iterator[None]:
        """Select adapters for the rows of the forward pass inside of this context.

        Args:
            parts: (first row, number of rows, number of their adapter).
            rows: of the forward pass; those in no part use no adapter.
        """
        if any(number != NO_ADAPTER for _, _, number in parts):
            adapters_BT = torch.full((1, rows), NO_ADAPTER)
            for first, count, number in parts:
                adapters_BT[:, first : first + count] = number
            self._chosen_BT = adapters_BT.to(device)
        try:
            yield
        finally:
            self._chosen_BT = None

    def mask(self, owner_C: Tensor) -> Tensor | None:
        """Return whether a row uses the adapter of a column [B, T, C]; None if no row uses any."""
        return None if self._chosen_BT is None else self._chosen_BT[..., None] == owner_C


class MultiLoraLinear(nn.Module):
    """A linear layer, plus what each row's adapter adds."""

    owners: Tensor

    def __init__(self, base: Linear, adapters: LoraAdapters, parts: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """`parts`: by the adapter's number, its matrices [R, I] and, times its scale, [O, R]."""
        super().__init__()
        self.base = base
        self._mask = adapters.mask
        self.a = _map(torch.cat([a_RI for a_RI, _ in parts.values()]))
        self.b = _map(torch.cat([b_OR for _, b_OR in parts.values()], 1))
        owners = [torch.full((len(a_RI),), number) for number, (a_RI, _) in parts.items()]
        self.register_buffer("owners", torch.cat(owners).to(self.a.weight.device))

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Return the outputs [B, T, O]."""
        y_BTO: Tensor = self.base(x_BTI)
        mask_BTC = self._mask(self.owners)
        return y_BTO if mask_BTC is None else y_BTO + self.b(self.a(x_BTI) * mask_BTC)


def _map(weight_OI: Tensor) -> Linear:
    linear = Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight_OI, requires_grad=False)
    return linear


def read_lora_adapters(paths: Mapping[str, Path], base: StoredModel) -> dict[str, LoraWeights]:
    """Read adapters for a model and return them by name.

    Args:
        paths: name → a run that trained adapters, or a folder of peft's.

    Raises:
        JinguError: there are none, or no LoRA of plain matrices, or they are for another model.
    """
    if paths and base.spec.num_encoder_layers is not None:
        raise JinguError(
            "adapters beside a model with an encoder are not supported.",
            where="--adapter",
            fix="Merge one into the model with `jingu tune merge`.",
        )
    sizes, weights = parameter_shapes(base.spec) if paths else {}, dict[str, LoraWeights]()
    for name, path in paths.items():
        weights[name] = _read(path, base)
        for module, (a_RI, b_OR) in weights[name].items():
            if sizes.get(f"{module}.weight") != (len(b_OR), a_RI.shape[1]):
                raise JinguError(
                    f"the model has no matrix {module} of this size.", where=path, fix="Choose another base."
                )
    return weights


def attach_lora_adapters(model: Model, adapters: Mapping[str, LoraWeights], dtype: torch.dtype) -> LoraAdapters:
    """Replace linear layers of a model, or of this rank's part of it, by ones with adapters, in place."""
    lora_adapters, device = LoraAdapters(list(adapters)), next(model.parameters()).device
    stages = model.stages
    stage_by_layer = {
        name: stage for stage in stages for name, child in stage.named_modules() if isinstance(child, Linear)
    }
    parts_by_layer: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for number, pairs in enumerate(adapters.values()):
        for name, (a_RI, b_OR) in pairs.items():
            if name in stage_by_layer:
                mine = _cut(model, name, 1, a_RI), _cut(model, name, 0, b_OR)
                parts_by_layer.setdefault(name, {})[number] = mine[0].to(device, dtype), mine[1].to(device, dtype)
    for name, parts in parts_by_layer.items():
        parent, _, leaf = name.rpartition(".")
        holder = stage_by_layer[name].get_submodule(parent)
        setattr(holder, leaf, MultiLoraLinear(getattr(holder, leaf), lora_adapters, parts))
    return lora_adapters


def _cut(model: Model, name: str, dim: int, whole: Tensor) -> Tensor:
    """Return the shard of an adapter's matrix for a rank's shard of the weight, along the dim that they share."""
    if isinstance(model, Decoder):
        return whole
    part = model.sharding.parts[f"{name}.weight"]
    return replace(part, dims=tuple(split_dim if split_dim == dim else None for split_dim in part.dims)).cut(whole)


def _read(path: Path, base: StoredModel) -> LoraWeights:
    own = load_adapters(path, base)
    if own.is_prefix_lm != base.is_prefix_lm:
        what = "of the model and its adapter, one was trained to see beginnings in both directions and one was not."
        raise JinguError(what, where=path, fix="Serve the adapter's run by itself.")
    adapter = own.spec.adapter
    names = [name for name in parameter_shapes(own.spec) if name.endswith(".lora_a")]
    if not isinstance(adapter, Lora) or adapter.use_dora or any(".experts." in name for name in names):
        raise JinguError(
            "only LoRA of plain matrices can stand beside a model.",
            where=path,
            fix="`jingu tune merge` writes a model of it, if it is of another kind that can be merged.",
        )
    pairs = {}
    for name in names:
        module = name.removesuffix(".lora_a")
        pairs[module] = own.read(name), adapter.of_module(module).scale * own.read(f"{module}.lora_b")
    return pairs
