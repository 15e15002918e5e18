"""Basic layers: linear, embedding, norms, feed-forward. Weights stay uninitialized until `init_weights` or a file
fills them.

A weight may have a wider dtype than the hidden states. It is then a master weight, and is rounded in each use.

Shapes: B rows, T tokens, D hidden size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import lcm
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jingu.model.feed_forward_specs import Activation, GatedFeedForward, PlainFeedForward
from jingu.model.matmul_kernels import linear
from jingu.model.norm_specs import LayerNorm, Norm, RmsNorm
from jingu.model.part_spec import ModuleRow, Rows, styles
from jingu.model.quantized_weight import QuantizedWeight
from jingu.model.scaled_matmul import Scaling, scaled_linear
from jingu.tables import import_name


class Linear(nn.Linear):
    """A linear layer that computes with `matmul_kernels.linear`, or in FP8.

    Attributes:
        bias_share: factor of the bias: 1, or 0 under tensor parallelism on all ranks but one, if the ranks' results are
            summed.
        scaling: kind of the scales of FP8 matmuls; None: compute in the dtype of the input.
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
    """An embedding, whose weight may be quantized.

    Attributes:
        compute: dtype of the result; None: the dtype of the weight (fp32 if it is quantized).
    """

    compute: torch.dtype | None = None

    def reset_parameters(self) -> None:
        """Do nothing: weights come from `init_weights` or from a file."""

    def forward(self, input: Tensor) -> Tensor:
        weight = cast(Tensor | QuantizedWeight, self.weight)
        return (weight.rows(input) if isinstance(weight, QuantizedWeight) else super().forward(input)).to(self.compute)


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019), computed in at least fp32 and rounded once.

    Attributes:
        wide_weight: the factor in the dtype of the computation, if the model was prepacked for inference; saves a cast.
        is_whole: whether this rank has the whole vectors.
    """

    wide_weight: Tensor | None = None
    is_whole = True

    def __init__(self, spec: RmsNorm, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width)) if spec.has_weight else None
        self.epsilon = spec.eps
        self.offset = spec.offset

    def factor(self, x_BTD: Tensor, wide: torch.dtype) -> Tensor | float:
        """Return the factor of the normalized hidden states."""
        if self.weight is None:
            return 1.0
        weight = self.weight.to(x_BTD.dtype)
        return 1.0 + weight.to(wide) if self.offset else weight

    def mean_square(self, wide_BTD: Tensor) -> Tensor:
        """Return the mean of the squares. Tensor parallelism replaces this where ranks have parts of the vectors."""
        return wide_BTD.pow(2).mean(-1, keepdim=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Inference: fewer operations, partly in place.
        if self.is_whole and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            wide = x_BTD if x_BTD.dtype in (torch.float32, torch.float64) else x_BTD.float()
            norm = torch.linalg.vector_norm(wide, 2, -1, True)
            epsilon = _constant(self.epsilon, wide.dtype, wide.device)
            scale = torch.addcmul(epsilon, norm, norm, value=1 / wide.shape[-1]).rsqrt_()
            factor = self.factor(x_BTD, wide.dtype) if self.wide_weight is None else self.wide_weight
            y_BTD = (wide * scale).mul_(factor)
            return y_BTD if wide is x_BTD else y_BTD.to(x_BTD.dtype)
        # Training: on CPUs these operations are several times faster than `F.rms_norm`; compiled, they are as fast.
        wide = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
        scale = torch.rsqrt(self.mean_square(wide) + self.epsilon)
        return (wide * scale * self.factor(x_BTD, wide.dtype)).to(x_BTD.dtype)


class LayerNormLayer(nn.LayerNorm):
    """PyTorch's LayerNorm with a weight whose dtype may be wider than that of the hidden states."""

    def __init__(self, spec: LayerNorm, width: int) -> None:
        super().__init__(width, spec.eps, bias=spec.bias)

    def forward(self, input: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        bias = None if bias is None else bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, self.weight.to(input.dtype), bias, self.eps)


class HeadNorm(nn.Module):
    """A norm of each head with weights of its own: vectors of H · K elements are normalized in groups of K."""

    def __init__(self, spec: Norm, heads: int, head_dim: int) -> None:
        super().__init__()
        self.spec, self.head_dim = spec, head_dim
        self.weight = nn.Parameter(torch.empty(heads * head_dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        x_BTHK = x_BTD.unflatten(-1, (-1, self.head_dim)).to(wide)
        normalize = F.layer_norm if isinstance(self.spec, LayerNorm) else F.rms_norm
        y_BTD = normalize(x_BTHK, (self.head_dim,), eps=self.spec.eps).flatten(-2)
        return (y_BTD * self.weight.to(x_BTD.dtype)).to(x_BTD.dtype)


@lru_cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of one number, which is created only once."""
    return torch.tensor(value, dtype=dtype, device=device)


def build_norm(spec: Norm, width: int) -> nn.Module:
    """Return an uninitialized norm of the type that the spec names, for vectors of `width` elements."""
    norm: nn.Module = import_name(spec.module)(spec, width)
    return norm


def build_query_norm(spec: Norm, width: str, heads: int, head_dim: int) -> nn.Module:
    """Return an uninitialized norm of queries or keys.

    Args:
        width: `AttentionSpec.qk_norm_width`.
    """
    if width == "each_head":
        return HeadNorm(spec, heads, head_dim)
    return build_norm(spec, head_dim * (heads if width == "all_heads" else 1))


def build_linear(row: ModuleRow) -> Linear:
    """Return the uninitialized linear layer of a row."""
    outputs, inputs = row.shape
    layer = Linear(inputs, outputs, bias=row.bias)
    layer.weight.requires_grad_(row.is_trained)
    return layer


def build_embedding(row: ModuleRow) -> Embedding:
    """Return the uninitialized table of a row."""
    number, width = row.shape
    return Embedding(number, width)


# Elementwise CPU kernels process this many elements at once: two of the widest vector registers.
_VECTOR = 64
# PyTorch uses several threads for more than _SHARED elements, and gives each thread at least _SHARE elements.
_SHARE, _SHARED = 32768, 16384


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(x / cap): numbers that are almost equal near zero, and below `cap` everywhere."""
    return torch.tanh(x / cap) * cap


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """Return xIELU (Huang and Schlag, 2024) with β = 0.5; its trained numbers are given before softplus."""
    positive = F.softplus(alpha_p) * x * x + 0.5 * x
    negative = (torch.expm1(x.clamp_max(-1e-6)) - x) * (0.5 + F.softplus(alpha_n)) + 0.5 * x
    return torch.where(x > 0, positive, negative)


class Vector(nn.Module):
    """A vector that is a parameter, as a module, so that it has the name of a weight.

    Attributes:
        is_trained: whether it is trained by gradients.
        is_wide: whether it keeps at least fp32; see `widen_vectors`. Modules get such a vector by a call, before which
            FSDP gathers it.
    """

    def __init__(self, row: ModuleRow) -> None:
        super().__init__()
        self.is_trained = row.is_trained
        self.is_wide = row.is_wide or not row.is_trained
        self.weight = nn.Parameter(torch.empty(row.shape), requires_grad=row.is_trained)

    def forward(self) -> Tensor:
        return self.weight


def widen_vectors(model: nn.Module) -> None:
    """Give some vectors of a model at least fp32, after a cast of the model to a narrower dtype.

    A correction of router scores changes by a thousandth per step, which bf16 would round away. Rates of decay of slow
    heads would become zero.
    """
    for module in model.modules():
        if isinstance(module, Vector) and module.is_wide:
            wide = torch.promote_types(module.weight.dtype, torch.float32)
            module.weight = nn.Parameter(module.weight.to(wide), requires_grad=module.weight.requires_grad)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation function, with the guarantee of `apply_batch_invariant`."""
    return apply_batch_invariant(_ACTIVATIONS[activation], x)


def apply_batch_invariant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function so that an element's result does not depend on its position in the tensor.

    This concerns inference on CPUs. The last elements of a tensor, and of each thread's share of it, are computed by
    other instructions if they do not fill a vector register. Therefore rows are padded to whole registers, and the
    number of rows is padded so that all threads have equally many.
    """
    size = x.shape[-1]
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling() or not x.numel():
        return function(x)
    spare = -size % _VECTOR
    rows = x.numel() // size
    if spare_rows := _spare_rows(rows, size + spare):
        return function(F.pad(x.reshape(rows, size), (0, spare, 0, spare_rows)))[:rows, :size].reshape(x.shape)
    return function(F.pad(x, (0, spare)))[..., :size] if spare else function(x)


def _spare_rows(rows: int, size: int) -> int:
    """Return how many rows of `size` elements to add so that PyTorch's threads get equally many rows."""
    filled, threads = rows, torch.get_num_threads()
    while filled * size > _SHARED and filled % (shares := lcm(threads, min(threads, -(-filled * size // _SHARE)))):
        filled += -filled % shares
    return filled - rows


class FeedForwardLayer(nn.Module):
    """A plain or gated feed-forward."""

    def __init__(self, spec: PlainFeedForward | GatedFeedForward, rows: Rows) -> None:
        super().__init__()
        self.activation: Activation = spec.activation
        self.gate_scale, self.output_scale = 1.0, 1.0
        if isinstance(spec, GatedFeedForward):
            self.gate_scale, self.output_scale = spec.gate_scale, spec.output_scale
        self.sharding = styles(rows)
        self.gate = build_linear(rows["gate"]) if "gate" in rows else None
        self.up = build_linear(rows["up"])
        self.down = build_linear(rows["down"])
        # The trained numbers of xIELU.
        self.alpha_p, self.alpha_n = (Vector(rows[name]) if name in rows else None for name in ("alpha_p", "alpha_n"))
        # Gate and up as one matrix, if the model was prepacked for inference.
        self.gate_up: Linear | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self._compute(x_BTD)
        return y_BTD if self.output_scale == 1.0 else y_BTD * self.output_scale

    def _compute(self, x_BTD: Tensor) -> Tensor:
        """Return the results before they are scaled."""
        gate_up = self.gate_up
        if gate_up is not None:
            gate_BTF, up_BTF = gate_up(x_BTD).chunk(2, -1)
            return self.down(self._activate_gate(gate_BTF).mul_(up_BTF))
        up_BTF = self.up(x_BTD)
        if self.alpha_p is not None and self.alpha_n is not None:
            alphas = self.alpha_p.weight.to(up_BTF.dtype), self.alpha_n.weight.to(up_BTF.dtype)
            return self.down(apply_batch_invariant(lambda x: xielu(x, *alphas), up_BTF))
        if self.gate is None:
            return self.down(activate(up_BTF, self.activation))
        return self.down(self._activate_gate(self.gate(x_BTD)) * up_BTF)

    def _activate_gate(self, gate_BTF: Tensor) -> Tensor:
        """Return the activated gate."""
        return activate(gate_BTF if self.gate_scale == 1.0 else gate_BTF * self.gate_scale, self.activation)
