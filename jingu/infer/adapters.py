"""Several LoRA adapters beside one base: each row of a batch takes one of them, or none.

Beside a matrix lie the small matrices of all its adapters as one pair: C columns, each an adapter's. Two products do
for whatever mixture of adapters a batch has, and what a row gets depends on no other row.

Shapes: B rows, T tokens, I inputs, O outputs, R rank, C columns of all adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from jingu.checkpoint.hub import OpenModel
from jingu.checkpoint.peft import find_adapters
from jingu.errors import JinguError
from jingu.model.decoder import parameter_shapes
from jingu.model.layers import Linear
from jingu.model.spec import Lora
from jingu.parallel.pipeline import Model, stages_of
from jingu.parallel.sharing import sharing_of

NONE = -1
"""The number that stands for no adapter."""
Pairs = dict[str, tuple[Tensor, Tensor]]
"""By module, the small matrices of an adapter; the second times its scale."""


class Adapters:
    """The adapters beside a model.

    Attributes:
        names: of each, by its number.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._chosen_BT: Tensor | None = None

    def number(self, name: str | None) -> int:
        """The number of an adapter. Raises JinguError where there is none of this name."""
        if name is None:
            return NONE
        if name not in self.names:
            known = ", ".join(self.names) or "none"
            raise JinguError(f"there is no adapter {name}.", where="adapter", fix=f"There are: {known}.")
        return self.names.index(name)

    @contextmanager
    def chosen(self, parts: Sequence[tuple[int, int, int]], rows: int, device: torch.device) -> Iterator[None]:
        """Let the rows of the forward inside take adapters.

        Args:
            parts: of each, its first row, how many there are, and the number of the adapter that these take.
            rows: of the forward; those in no part take none.
        """
        if any(number != NONE for _, _, number in parts):
            chosen = torch.full((1, rows), NONE)
            for first, count, number in parts:
                chosen[:, first : first + count] = number
            self._chosen_BT = chosen.to(device)
        try:
            yield
        finally:
            self._chosen_BT = None

    def mask(self, owner_C: Tensor) -> Tensor | None:
        """[B, T, C] whether a row takes the adapter that a column belongs to; None where no row takes any."""
        return None if self._chosen_BT is None else self._chosen_BT[..., None] == owner_C


class LoraRows(nn.Module):
    """A linear map, and for each row what its adapter adds."""

    owners: Tensor

    def __init__(self, base: Linear, adapters: Adapters, parts: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """`parts`: by the adapter's number, its matrices [R, I] and, times its scale, [O, R]."""
        super().__init__()
        self.base = base
        self._mask = adapters.mask
        self.a = _map(torch.cat([a_RI for a_RI, _ in parts.values()]))
        self.b = _map(torch.cat([b_OR for _, b_OR in parts.values()], 1))
        owners = [torch.full((len(a_RI),), number) for number, (a_RI, _) in parts.items()]
        self.register_buffer("owners", torch.cat(owners).to(self.a.weight.device))

    def forward(self, x_BTI: Tensor) -> Tensor:
        """The map's outputs [B, T, O]."""
        y_BTO: Tensor = self.base(x_BTI)
        mask_BTC = self._mask(self.owners)
        return y_BTO if mask_BTC is None else y_BTO + self.b(self.a(x_BTI) * mask_BTC)


def _map(weight_OI: Tensor) -> Linear:
    made = Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight_OI, requires_grad=False)
    return made


def read_beside(paths: Mapping[str, Path], base: OpenModel) -> dict[str, Pairs]:
    """Adapters that are to stand beside a model, by their names.

    Args:
        paths: name → a run that trained adapters, or a folder of peft's.

    Raises:
        JinguError: there are none, or no LoRA of plain matrices, or they are for another model.
    """
    if paths and base.spec.encoder_layers is not None:
        raise JinguError(
            "adapters beside a model with an encoder are not supported.",
            where="--adapter",
            fix="Merge one into the model with `jingu tune merge`.",
        )
    sizes, found = parameter_shapes(base.spec) if paths else {}, dict[str, Pairs]()
    for name, path in paths.items():
        found[name] = _read(path, base)
        for module, (a_RI, b_OR) in found[name].items():
            if sizes.get(f"{module}.weight") != (len(b_OR), a_RI.shape[1]):
                raise JinguError(
                    f"the model has no matrix {module} of this size.", where=path, fix="Choose another base."
                )
    return found


def stand_beside(model: Model, adapters: Mapping[str, Pairs], dtype: torch.dtype) -> Adapters:
    """Give the matrices of a model, or of this rank's part of it, their adapters, in place."""
    made, device = Adapters(list(adapters)), next(model.parameters()).device
    stages = stages_of(model)
    here = {name: stage for stage in stages for name, child in stage.named_modules() if isinstance(child, Linear)}
    found: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    for number, pairs in enumerate(adapters.values()):
        for name, (a_RI, b_OR) in pairs.items():
            if name in here:
                mine = _cut(model, name, 1, a_RI), _cut(model, name, 0, b_OR)
                found.setdefault(name, {})[number] = mine[0].to(device, dtype), mine[1].to(device, dtype)
    for name, parts in found.items():
        parent, _, leaf = name.rpartition(".")
        holder = here[name].get_submodule(parent)
        setattr(holder, leaf, LoraRows(getattr(holder, leaf), made, parts))
    return made


def _cut(model: Model, name: str, dim: int, whole: Tensor) -> Tensor:
    """Of a small matrix the part that belongs to a rank's part of the large one, along the dim that they share."""
    if not hasattr(model, "sharing"):
        return whole
    part = sharing_of(model).parts[f"{name}.weight"]
    return replace(part, dims=tuple(each if each == dim else None for each in part.dims)).cut(whole)


def _read(path: Path, base: OpenModel) -> Pairs:
    own = find_adapters(path, base)
    if own.reads_whole != base.reads_whole:
        what = "of the model and its adapter, one was trained to see beginnings in both directions and one was not."
        raise JinguError(what, where=path, fix="Serve the adapter's run by itself.")
    adapter = own.spec.adapter
    names = [name for name in parameter_shapes(own.spec) if name.endswith(".lora_a")]
    if not isinstance(adapter, Lora) or adapter.magnitudes or any(".experts." in name for name in names):
        raise JinguError(
            "only LoRA of plain matrices can stand beside a model.",
            where=path,
            fix="`jingu tune merge` writes a model of it, if it is of another kind that can be merged.",
        )
    pairs = {}
    for name in names:
        module = name.removesuffix(".lora_a")
        pairs[module] = own.read(name), adapter.scale * own.read(f"{module}.lora_b")
    return pairs
