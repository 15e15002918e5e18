"""Which matrices of a model are rounded to 8 or 4 bits: those of attention and feed-forward, and of experts, to what is
asked for; embedding and head, for generation alone, to 8 in any case. Adapters, norms, biases, positions and routers
stay as they are, and matrices of shapes that the kernels do not take, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jingu.model.experts import GroupedLinear
from jingu.model.layers import Linear
from jingu.model.packed import Packed, packs
from jingu.model.spec import Kind


def round_blocks(model: nn.Module, kind: Kind) -> None:
    """Give the blocks of a model packed matrices in the place of their own, which are not filled."""
    for name, module in model.named_modules():
        within, leaf = "blocks." in name, name.rpartition(".")[2]
        if within and isinstance(module, Linear | GroupedLinear) and leaf != "router" and ".prompt." not in name:
            _round(module, kind)


def round_ends(model: Any, dtype: torch.dtype) -> None:
    """The same for embedding and head; `dtype` is that of the states."""
    unit_rows = model.spec.normalised_head
    if model.head is not None:
        _round(model.head, "int8", unit_rows=unit_rows)
    if model.embedding is not None and not (model.spec.tied_embeddings and unit_rows):
        _round(model.embedding, "int8")
        model.embedding.compute = dtype


def _round(module: Any, kind: Kind, *, unit_rows: bool = False) -> None:
    shape: torch.Size = module.weight.shape
    if packs(shape[-2], shape[-1], kind):
        del module.weight
        module.weight = Packed(kind, shape, unit_rows=unit_rows)
