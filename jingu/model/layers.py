"""Basic layers: linear, embedding, norms, feed-forward. Weights stay empty until `init_weights` or a file fills them.

A weight may have a wider dtype than the hidden states: it is then a master weight, and is rounded where it is used.

Shapes: B rows, T tokens, D hidden size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import lcm
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jingu.model.matmul_kernels import linear
from jingu.model.quantized_weight import QuantizedWeight
from jingu.model.scaled_matmul import Scaling, scaled_linear
from jingu.model.sharding_table import ShardingTable
from jingu.model.spec import Activation, GatedFeedForward, LayerNorm, Norm, PlainFeedForward


class Linear(nn.Linear):
    """A linear layer whose product is `matmul_kernels.linear`.

    Attributes:
        bias_share: share of the bias that is added: if ranks compute summands of the result, one of them adds it.
        scaling: scales of a product in FP8; None: the product is in the dtype of the input.
    """

    bias_share = 1.0
    scaling: Scaling | None = None

    def reset_parameters(self) -> None:
        """Do nothing: weights come from `init_weights` or from a file."""

    def forward(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        if bias is not None and self.bias_share != 1.0:
            bias = bias * self.bias_share
        if self.scaling is not None:
            return scaled_linear(input, self.weight, bias, self.scaling)
        return linear(input, self.weight, bias)


class Embedding(nn.Embedding):
    """An embedding.

    Attributes:
        compute: dtype of the result; None: that of the weight.
    """

    compute: torch.dtype | None = None

    def reset_parameters(self) -> None:
        """Do nothing: weights come from `init_weights` or from a file."""

    def forward(self, input: Tensor) -> Tensor:
        weight = cast(Tensor | QuantizedWeight, self.weight)
        return (weight.rows(input) if isinstance(weight, QuantizedWeight) else super().forward(input)).to(self.compute)


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019), computed in fp32 at least and rounded once.

    Attributes:
        wide_weight: the weight in the dtype of the computation, if the model is prepacked for inference.
    """

    wide_weight: Tensor | None = None

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x_BTD: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            wide = x_BTD if x_BTD.dtype in (torch.float32, torch.float64) else x_BTD.float()
            norm = torch.linalg.vector_norm(wide, 2, -1, True)
            epsilon = _constant(self.epsilon, wide.dtype, wide.device)
            scale = torch.addcmul(epsilon, norm, norm, value=1 / wide.shape[-1]).rsqrt_()
            weight = self.weight.to(x_BTD.dtype) if self.wide_weight is None else self.wide_weight
            y_BTD = (wide * scale).mul_(weight)
            return y_BTD if wide is x_BTD else y_BTD.to(x_BTD.dtype)
        # These operations are several times faster than `F.rms_norm` on CPUs, and as fast once compiled.
        wide = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight.to(x_BTD.dtype)).to(x_BTD.dtype)


class LayerNormLayer(nn.LayerNorm):
    """LayerNorm of PyTorch, with a weight that may be wider than the hidden states."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


@lru_cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def build_norm(spec: Norm, width: int) -> nn.Module:
    """The norm a spec names; both kinds have a `weight` of ones at first."""
    if isinstance(spec, LayerNorm):
        return LayerNormLayer(width, spec.eps)
    return RMSNorm(width, spec.eps)


# Elements of two of the widest registers: kernels go by as many.
_VECTOR = 64
# PyTorch gives each thread at least _SHARE elements, and uses several threads for more than _SHARED elements.
_SHARE, _SHARED = 32768, 16384


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply the activation function of a spec; see `apply_batch_invariant`."""
    return apply_batch_invariant(_ACTIVATIONS[activation], x)


def apply_batch_invariant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function so that an element's result does not depend on its position in the tensor.

    This matters without gradients, on CPUs. There, the last elements of a tensor, and of each thread's share of it, are
    computed by other instructions if they do not fill a vector register. So rows are padded to whole registers, and
    their number is padded so that all threads have as many.
    """
    size = x.shape[-1]
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling() or not x.numel():
        return function(x)
    # Pad rows to whole vector registers, and their number so that all threads have as many.
    spare = -size % _VECTOR
    rows = x.numel() // size
    if spare_rows := _spare_rows(rows, size + spare):
        return function(F.pad(x.reshape(rows, size), (0, spare, 0, spare_rows)))[:rows, :size].reshape(x.shape)
    return function(F.pad(x, (0, spare)))[..., :size] if spare else function(x)


def _spare_rows(rows: int, size: int) -> int:
    filled, threads = rows, torch.get_num_threads()
    while filled * size > _SHARED and filled % (shares := lcm(threads, min(threads, -(-filled * size // _SHARE)))):
        filled += -filled % shares
    return filled - rows


class FeedForwardLayer(nn.Module):
    """Plain or gated feed-forward."""

    SHARDING: ClassVar[ShardingTable] = {"gate": "column", "up": "column", "down": "row"}

    def __init__(self, spec: PlainFeedForward | GatedFeedForward, width: int) -> None:
        super().__init__()
        self.activation: Activation = spec.activation
        gated = isinstance(spec, GatedFeedForward)
        self.gate = Linear(width, spec.intermediate_size, bias=spec.bias) if gated else None
        self.up = Linear(width, spec.intermediate_size, bias=spec.bias)
        self.down = Linear(spec.intermediate_size, width, bias=spec.bias)
        # Gate and up as one, where a model is arranged for inference.
        self.gate_up: Linear | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_up = self.gate_up
        if gate_up is not None:
            gate_BTF, up_BTF = gate_up(x_BTD).chunk(2, -1)
            return self.down(activate(gate_BTF, self.activation).mul_(up_BTF))
        up_BTF = self.up(x_BTD)
        if self.gate is None:
            return self.down(activate(up_BTF, self.activation))
        return self.down(activate(self.gate(x_BTD), self.activation) * up_BTF)
