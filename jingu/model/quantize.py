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
from jingu.model.quantized_weight import QuantizedWeight, can_quantize
from jingu.model.spec import QuantizationFormat


def quantize_blocks(model: nn.Module, kind: QuantizationFormat) -> None:
    """Replace the matrices of a model's blocks by quantized ones, which are not filled."""
    for name, module in model.named_modules():
        within, leaf = "blocks." in name, name.rpartition(".")[2]
        if within and isinstance(module, Linear | GroupedLinear) and leaf != "router" and ".prompt." not in name:
            _round(module, kind)


def quantize_embedding_and_head(model: Any, dtype: torch.dtype) -> None:
    """Replace embedding and head by int8 matrices; `dtype` is that of the hidden states."""
    unit_rows = model.spec.normalize_lm_head
    if model.head is not None:
        _round(model.head, "int8", unit_rows=unit_rows)
    if model.embedding is not None and not (model.spec.tie_word_embeddings and unit_rows):
        _round(model.embedding, "int8")
        model.embedding.compute = dtype


def _round(module: Any, kind: QuantizationFormat, *, unit_rows: bool = False) -> None:
    shape: torch.Size = module.weight.shape
    if can_quantize(shape[-2], shape[-1], kind):
        del module.weight
        module.weight = QuantizedWeight(kind, shape, unit_rows=unit_rows)
