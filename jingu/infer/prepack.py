"""A model made to answer fast. Its matrices lie as CPUs multiply few rows by them fastest: packed ones in the order of
their kernels, and of the others those with the same input as one, in oneDNN's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from jingu.compat.torch import call_forward_directly
from jingu.model.attention import SelfAttention
from jingu.model.decoder import Decoder
from jingu.model.experts import MoELayer
from jingu.model.layers import Embedding, FeedForwardLayer, Linear, RMSNorm
from jingu.model.matmul_kernels import matmul_dtype
from jingu.model.quantized_weight import PrepackedQuantizedWeight, PrepackedWeight, QuantizedWeight, can_quantize
from jingu.runtime.device import collapse_to_huge_pages


def prepack_weights(model: Decoder) -> None:
    """Arrange a model, or a rank's part of one, in place; from then on it only computes. Matrices of routers stay as
    they are, and those of experts that are not packed; and what there is no kernel for."""
    _arrange_matrices(model)
    for part in model.modules():
        if isinstance(part, RMSNorm) and part.weight.dtype in (torch.bfloat16, torch.float16):
            part.wide = part.weight.detach().float()
        # The search for hooks at every call of a module takes a twentieth of a step with one token.
        call_forward_directly(part)


def _arrange_matrices(model: Decoder) -> None:
    parameter = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    dtype = parameter.dtype
    if parameter.device.type != "cpu" or dtype == torch.float64:
        return
    head: Any = (model.head or model.embedding) if model.is_last else None
    if head is not None and _takes(head.weight):
        model.arranged_head = PrepackedQuantizedWeight.of(
            head.weight.kind, head.weight.values, head.weight.scales, dtype
        )
    missing = dtype in (torch.bfloat16, torch.float16) and matmul_dtype(dtype, parameter.device) != dtype
    ordered = not missing and bool(torch.backends.mkldnn.is_available())
    for part in list(model.modules()):
        if isinstance(part, SelfAttention):
            three = (part.q, part.k, part.v)
            rows = [_rows(projection) for projection in three]
            part.qkv = _joined(three, dtype, ordered)
            part.sizes = [count // part.head_dim for count in rows]  # a rank may have some of the heads
        elif isinstance(part, FeedForwardLayer) and part.gate is not None:
            part.gate_up = _joined((part.gate, part.up), dtype, ordered)
    for part in list(model.modules()):
        packed = dict(part.named_children()).get("weight")
        if isinstance(packed, QuantizedWeight) and _takes(packed) and not isinstance(part, Embedding):
            _replace(part, _of_packed(packed, dtype))
    if not ordered:
        return
    if head is not None and isinstance(head.weight, Tensor):
        weight = normalize(head.weight) if model.spec.normalize_lm_head else head.weight
        model.arranged_head = PrepackedWeight.of(weight)
        if model.head is not None:
            _forget(model.head)
    routers = {part.router for part in model.modules() if isinstance(part, MoELayer)}  # multiplied in fp32
    for part in model.modules():
        if part in routers:
            continue
        if type(part) is Linear and isinstance(part.weight, Tensor) and not part.weight.is_meta:
            _replace(part, PrepackedWeight.of(part.weight))
    arranged = [model.arranged_head, *(part.weight for part in model.modules() if isinstance(part, Linear))]
    collapse_to_huge_pages(
        weight.block for weight in arranged if isinstance(weight, PrepackedQuantizedWeight | PrepackedWeight)
    )


def _rows(part: Any) -> int:
    weight = getattr(part, "weight", ())
    return len(weight.values if isinstance(weight, QuantizedWeight) else weight)


def _takes(weight: Any) -> bool:
    """Whether there are kernels for a packed matrix; of a rank's part of one not always."""
    if not isinstance(weight, QuantizedWeight):
        return False
    outputs, inputs = weight.values.shape[-2:]
    return can_quantize(outputs, inputs if weight.kind == "int8" else 2 * inputs, weight.kind)


def _of_packed(
    packed: QuantizedWeight, dtype: torch.dtype
) -> PrepackedQuantizedWeight | tuple[PrepackedQuantizedWeight, ...]:
    """A matrix, or one for each expert."""
    if packed.values.dim() == 2:
        return PrepackedQuantizedWeight.of(packed.kind, packed.values, packed.scales, dtype)
    pairs = zip(packed.values, packed.scales, strict=True)
    return tuple(PrepackedQuantizedWeight.of(packed.kind, values, scales, dtype) for values, scales in pairs)


def _joined(parts: Sequence[Linear], dtype: torch.dtype, ordered: bool) -> Linear | None:
    """One matrix of several with the same input, whose own go; None where they are of another kind, or there is no
    kernel for it."""
    if any(type(part) is not Linear for part in parts):
        return None
    weights: list[Any] = [part.weight for part in parts]
    joined: PrepackedWeight | PrepackedQuantizedWeight
    if all(_takes(weight) and weight.kind == weights[0].kind for weight in weights):
        values, scales = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("values", "scales"))
        joined = PrepackedQuantizedWeight.of(weights[0].kind, values, scales, dtype)
    elif ordered and all(isinstance(weight, Tensor) for weight in weights):
        joined = PrepackedWeight.of(torch.cat([weight.detach() for weight in weights]))
    else:
        return None
    whole = Linear(parts[0].in_features, sum(part.out_features for part in parts), bias=False, device="meta")
    if parts[0].bias is not None:
        whole.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    for part in parts:
        _forget(part)
    _replace(whole, joined)
    return whole


def _replace(
    part: Any, weight: PrepackedWeight | PrepackedQuantizedWeight | tuple[PrepackedQuantizedWeight, ...]
) -> None:
    del part.weight
    part.weight = weight


def _forget(part: nn.Module) -> None:
    """Let go of a matrix that another stands for now."""
    part.weight = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
