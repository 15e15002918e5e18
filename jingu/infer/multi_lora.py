"""Several LoRA adapters on one base model: each row of a batch uses one adapter, or none.

A forward pass multiplies all rows with the matrices of every adapter that it uses, and a mask selects the rows that use
the adapter. The result of a row depends on no other row and no other adapter. Adapters can be added and removed between
forward passes.

Shapes: B rows, T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from jingu.errors import JinguError
from jingu.formats.models import load_adapters
from jingu.formats.stored_model import StoredModel, read_lora_pair
from jingu.model.adapter_specs import Lora
from jingu.model.decoder import Decoder, parameter_shapes
from jingu.model.layers import Linear
from jingu.model.matmul_kernels import linear
from jingu.model.trainable import is_trained
from jingu.parallel.pipeline import Model

# By module name, the A and B matrices of an adapter; B includes the scale.
LoraWeights = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter of a model. Its matrices are freed when neither a name nor a request refers to it.

    Attributes:
        number: unique in the model, even among removed adapters and those of the same name.
    """

    number: int


class LoraAdapters:
    """The adapters of a model, and which rows of the current forward pass use which adapter.

    Args:
        model: the model, or this rank's shard of it, whose linear layers get adapters.
        dtype: dtype of the adapters' matrices.

    Attributes:
        masks: by adapter, which rows of the current forward pass use it [B, T, 1].
    """

    def __init__(self, model: Model | None = None, dtype: torch.dtype = torch.float32) -> None:
        self._model = model
        self._dtype = dtype
        self._by_name: dict[str, Adapter] = {}
        self._count = 0
        self._layers: dict[str, MultiLoraLinear] = {}
        self.masks: dict[Adapter, Tensor] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all adapters."""
        return tuple(self._by_name)

    def find(self, name: str) -> Adapter:
        """Return an adapter. Raise JinguError for an unknown name."""
        if name not in self._by_name:
            names = ", ".join(self._by_name) or "none"
            raise JinguError(f"there is no adapter {name}.", where="adapter", fix=f"There are: {names}.")
        return self._by_name[name]

    def attach(self, name: str, weights: LoraWeights) -> None:
        """Add an adapter to the model's linear layers; it replaces one of the same name for new requests."""
        adapter = Adapter(self._count)
        self._count += 1
        for layer_name, (a_RI, b_OR) in weights.items():
            layer = self._layers.get(layer_name) or self._wrap(layer_name)
            # The layer may be on another rank.
            if layer is not None and self._model is not None:
                device = next(self._model.parameters()).device
                shards = _cut(self._model, layer_name, 1, a_RI), _cut(self._model, layer_name, 0, b_OR)
                layer.pairs[adapter] = shards[0].to(device, self._dtype), shards[1].to(device, self._dtype)
        # Replace the whole dictionary, since other threads read it.
        self._by_name = {**self._by_name, name: adapter}

    def detach(self, name: str) -> None:
        """Remove an adapter. Requests in progress can still use it."""
        self._by_name = {other_name: adapter for other_name, adapter in self._by_name.items() if other_name != name}

    def _wrap(self, name: str) -> MultiLoraLinear | None:
        """Replace a linear layer by one with adapters and return that; None if the layer is on another rank."""
        parent, _, leaf = name.rpartition(".")
        for stage in self._model.stages if self._model is not None else ():
            layer = dict(stage.named_modules()).get(name)
            if isinstance(layer, Linear):
                self._layers[name] = MultiLoraLinear(layer, self)
                setattr(stage.get_submodule(parent), leaf, self._layers[name])
                return self._layers[name]
        return None

    @contextmanager
    def select(self, parts: Sequence[tuple[int, int, Adapter]], rows: int, device: torch.device) -> Iterator[None]:
        """Select adapters for the rows of the forward pass inside of this context.

        Args:
            parts: (first row, number of rows, their adapter); rows in no part use the base model.
            rows: number of rows of the forward pass.
        """
        masks: dict[Adapter, Tensor] = {}
        for first, count, adapter in parts:
            mask_BT1 = masks.setdefault(adapter, torch.zeros(1, rows, 1, dtype=torch.bool))
            mask_BT1[:, first : first + count] = True
        self.masks = {adapter: mask_BT1.to(device, non_blocking=True) for adapter, mask_BT1 in masks.items()}
        try:
            yield
        finally:
            self.masks = {}


class MultiLoraLinear(nn.Module):
    """A linear layer with a low-rank update by each row's adapter.

    Attributes:
        pairs: by adapter, its matrices A [R, I] and B [O, R]; B includes the scale.
    """

    def __init__(self, base: Linear, adapters: LoraAdapters) -> None:
        super().__init__()
        self.base = base
        self.pairs = WeakKeyDictionary[Adapter, tuple[Tensor, Tensor]]()
        self._adapters = adapters

    def forward(self, x_BTI: Tensor) -> Tensor:
        """Return the outputs [B, T, O]."""
        y_BTO: Tensor = self.base(x_BTI)
        for adapter, mask_BT1 in self._adapters.masks.items():
            if adapter in self.pairs:
                a_RI, b_OR = self.pairs[adapter]
                y_BTO = y_BTO + linear(linear(x_BTI, a_RI) * mask_BT1, b_OR)
        return y_BTO


def read_lora_adapter(path: Path, base: StoredModel) -> LoraWeights:
    """Read an adapter for a model.

    Args:
        path: a run that trained adapters, or a folder in the format of peft.

    Raises:
        JinguError: there is no adapter, it is not LoRA of plain matrices, or it belongs to another model.
    """
    if base.spec.num_encoder_layers is not None:
        raise JinguError(
            "adapters beside a model with an encoder are not supported.",
            where="--adapter",
            fix="Merge one into the model with `jingu tune merge`.",
        )
    sizes = parameter_shapes(base.spec)
    weights = _read(path, base)
    for module, (a_RI, b_OR) in weights.items():
        if sizes.get(f"{module}.weight") != (len(b_OR), a_RI.shape[1]):
            raise JinguError(f"the model has no matrix {module} of this size.", where=path, fix="Choose another base.")
    return weights


def _cut(model: Model, name: str, dim: int, whole: Tensor) -> Tensor:
    """Return this rank's shard of an adapter's matrix: it is split like the weight, along the dimension they share."""
    if isinstance(model, Decoder):
        return whole
    part = model.sharding.parts[f"{name}.weight"]
    return replace(part, dims=tuple(split_dim if split_dim == dim else None for split_dim in part.dims)).cut(whole)


def _read(path: Path, base: StoredModel) -> LoraWeights:
    adapters = load_adapters(path, base)
    if adapters.is_prefix_lm != base.is_prefix_lm:
        what = "of the model and its adapter, one was trained to see beginnings in both directions and one was not."
        raise JinguError(what, where=path, fix="Serve the adapter's run by itself.")
    adapter = adapters.spec.adapter
    trained_names = [name for name in parameter_shapes(adapters.spec) if is_trained(name, adapters.spec)]
    is_plain = all("blocks." in name and name.endswith((".lora_a", ".lora_b")) for name in trained_names)
    if not isinstance(adapter, Lora) or not is_plain or any(".experts." in name for name in trained_names):
        raise JinguError(
            "only LoRA of plain matrices can stand beside a model.",
            where=path,
            fix="`jingu tune merge` writes a model of it, if it is of another kind that can be merged.",
        )
    modules = [name.removesuffix(".lora_a") for name in trained_names if name.endswith(".lora_a")]
    return {module: read_lora_pair(adapters, base, module) for module in modules}
