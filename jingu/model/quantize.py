"""Select and replace the matrices of a model that are quantized.

Matrices of attention, feed-forwards and experts get the requested format. For inference, embedding and head are
quantized, too, always to int8. Adapters, norms, biases, positions and routers are not quantized, and neither are
matrices whose shapes no kernel supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from jingu.model.experts import GroupedLinear
from jingu.model.layers import Linear
from jingu.model.quantized_weight import QuantizedWeight, StoredWeight, can_quantize
from jingu.model.spec import QuantizationFormat


def quantize_blocks(model: nn.Module, kind: QuantizationFormat) -> None:
    """Replace the matrices of a model's blocks by quantized ones. Their values and scales are uninitialized."""
    for _, module in _block_matrices(model):
        _quantize_weight(module, kind)


def keep_stored(model: nn.Module, keep: Callable[[str], StoredWeight | None]) -> int:
    """Replace the matrices of a model's blocks by those that `keep` returns for their names; return their number."""
    number = 0
    for name, module in _block_matrices(model):
        weight = keep(f"{name}.weight")
        if weight is not None:
            del module.weight
            module.weight = weight
            number += 1
    return number


def _block_matrices(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and the modules of the matrices that can be quantized."""
    for name, module in list(model.named_modules()):
        in_block = "blocks." in name and ".prompt." not in name
        is_router = name.rpartition(".")[2] == "router"
        # Experts that are read when they are needed have no matrix here.
        has_matrix = isinstance(module, Linear | GroupedLinear) and hasattr(module, "weight")
        if in_block and has_matrix and not is_router:
            yield name, module


def quantize_embedding_and_head(model: Any, dtype: torch.dtype) -> None:
    """Replace embedding and head by uninitialized int8 matrices; `dtype` is that of the hidden states."""
    # A head that is normalized is quantized after normalization. If it is tied, the embedding itself must stay
    # unnormalized, and is not quantized.
    unit_rows = model.spec.normalize_lm_head
    if model.head is not None and model.head.bias is None:
        _quantize_weight(model.head, "int8", unit_rows=unit_rows)
    if model.embedding is not None and not (model.spec.tie_word_embeddings and unit_rows):
        _quantize_weight(model.embedding, "int8")
        model.embedding.compute = dtype


def _quantize_weight(module: Any, kind: QuantizationFormat, *, unit_rows: bool = False) -> None:
    shape: torch.Size = module.weight.shape
    if can_quantize(shape[-2], shape[-1], kind):
        del module.weight
        module.weight = QuantizedWeight(kind, shape, unit_rows=unit_rows)
