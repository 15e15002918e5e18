"""Private names of PyTorch that one process needs: processor features, CPU kernels, foreach operations, modules.

What ranks need is in `jingu.compat.torch_distributed`, which takes longer to import.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves

# Processor features


def cpu_has_bf16_units() -> bool:
    """Return whether the CPU multiplies bf16 matrices in hardware, and oneDNN may do so (ONEDNN_MAX_CPU_ISA)."""
    has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_units and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_has_fp16_units() -> bool:
    """Return whether the CPU multiplies fp16 matrices in hardware."""
    return bool(torch.cpu._is_amx_fp16_supported() and torch.ops.mkldnn._is_mkldnn_fp16_supported())


def has_triton() -> bool:
    """Return whether Triton is installed and supports the GPU."""
    # Imported here: torch.utils._triton is needed on CUDA only.
    from torch.utils import _triton

    return bool(_triton.has_triton())


# torch.compile


def compiler_is_loaded() -> bool:
    """Return whether the compiler was imported, which takes seconds; where it was not, nothing has been compiled."""
    return "torch._dynamo" in sys.modules


def set_recompile_limit(limit: int) -> None:
    """Set how many times `torch.compile` specialises one function before it falls back to eager mode."""
    torch._dynamo.config.recompile_limit = limit


def raised_by_compiler(error: BaseException) -> bool:
    """Return whether `torch.compile` itself raised an error, rather than the code that it compiles."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


# Modules and autograd


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a module by `function` of it, as `Module.to` does."""
    module._apply(function)


def call_directly(module: nn.Module, function: Callable[..., object]) -> None:
    """Let calls of a module without hooks go straight to a function, without the search for hooks at every call."""
    if not module._forward_pre_hooks and not module._forward_hooks:
        module._compiled_call_impl = function


def in_backward() -> bool:
    """Return whether the calling thread is inside a backward pass, as where activation checkpointing recomputes."""
    return bool(torch._C._current_graph_task_id() != -1)


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Return a context in which no dispatch mode sees operations, as that of selective activation checkpointing."""
    return _disable_current_modes()


# Foreach operations: one call for many tensors


def foreach_copy_(targets: list[Tensor], values: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each value into its target."""
    torch._foreach_copy_(targets, values, non_blocking=non_blocking)


def foreach_mul_(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply all tensors by one factor, in place."""
    torch._foreach_mul_(tensors, factor)


def foreach_add_(tensors: list[Tensor], others: list[Tensor], *, alpha: float = 1.0) -> None:
    """Add `alpha` times the other tensor to each, in place."""
    torch._foreach_add_(tensors, others, alpha=alpha)


def foreach_lerp(tensors: list[Tensor], ends: list[Tensor], weight: float) -> list[Tensor]:
    """Return the interpolations from each tensor (weight 0) to its end (weight 1)."""
    return list(torch._foreach_lerp(tensors, ends, weight))


def foreach_lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Interpolate from each tensor (weight 0) to its end (weight 1), in place."""
    torch._foreach_lerp_(tensors, ends, weight)


def foreach_sign_(tensors: list[Tensor]) -> None:
    """Replace each element by its sign, in place."""
    torch._foreach_sign_(tensors)


# CPU kernels for weight matrices. N rows, I inputs, O outputs.


def int8_matmul(x_NI: Tensor, values_OI: Tensor, scales_O: Tensor) -> Tensor:
    """Return `x @ (values * scales).T` for int8 values with a scale for each output."""
    return torch._weight_int8pack_mm(x_NI, values_OI, scales_O)


def pack_int4(values_OI: Tensor) -> Tensor:
    """Return a matrix of int32 numbers from 0 to 15 in the order that `int4_matmul` reads."""
    # The second argument is for the kernels of other devices.
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_OI, 1)
    return packed


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has, even if both are empty."""
    return int(storage._cdata)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the numbers from 0 to 15 [O, I] of a matrix of `pack_int4`, as uint8."""
    outputs, inputs = len(packed), 2 * packed.shape[1]
    capability = torch.backends.cpu.get_cpu_capability()
    # Blocks of rows lie one after another, in each the bytes of one column after those of another. A byte has two rows:
    # neighbors, or with vector instructions one of each half of the block.
    block = 64 if capability.startswith("AVX512") else 32
    is_halved = capability == "AVX2" or capability.startswith("AVX512")
    num_blocks = outputs // block
    size = num_blocks * block * inputs // 2
    parts = [
        (packed.flatten()[:size].view(num_blocks, inputs, block // 2), is_halved),
        (packed.flatten()[size:].view(1, inputs, (outputs - num_blocks * block) // 2), False),
    ]
    rows = []
    for bytes_BIH, halved in parts:
        pairs_BIH2 = torch.stack([bytes_BIH & 15, bytes_BIH >> 4], -1)
        rows.append(pairs_BIH2.permute((0, 3, 2, 1) if halved else (0, 2, 3, 1)).reshape(-1, inputs))
    return torch.cat(rows)


def int4_matmul(x_NI: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    """Return `x @ weight.T` for a matrix of `pack_int4`.

    Args:
        group_size: inputs that share a scale.
        scales_and_zeros: [I / group_size, O, 2].
    """
    y_NO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_NI, packed, group_size, scales_and_zeros)
    return y_NO


def pack_int4_on_card(pairs: Tensor) -> Tensor:
    """Return a matrix in the order that `int4_matmul_on_card` reads. O is a multiple of 8, I of 32.

    Args:
        pairs: numbers from 0 to 15, two in a byte, the first in its high half [O, I / 2].
    """
    # The kernel reads so many tiles of 16 inputs at a time; more are faster.
    tiles = next(number for number in (8, 4, 2) if pairs.shape[1] % (8 * number) == 0)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
    return packed


def int4_matmul_on_card(x_NI: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    """Return `x @ weight.T` in bf16 for a matrix of `pack_int4_on_card`; else as `int4_matmul`."""
    y_NO: Tensor = torch.ops.aten._weight_int4pack_mm(x_NI, packed, group_size, scales_and_zeros)
    return y_NO


def has_byte_kernels() -> bool:
    """Return whether this build of PyTorch has fbgemm's products of 8-bit integers."""
    has_operator = hasattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32")
    # Tensors of quantized dtypes, of which the matrices are made, are to be removed in a later version.
    has_tensors = hasattr(torch, "_make_per_channel_quantized_tensor")
    return has_operator and has_tensors and "fbgemm" in torch.backends.quantized.supported_engines


def pack_bytes(values_OI: Tensor, scales_O: Tensor) -> object:
    """Return a matrix of int8 values, with a scale for each output, in fbgemm's layout."""
    zeros_O = torch.zeros(len(values_OI), dtype=torch.int64)
    with warnings.catch_warnings():
        # It says that such tensors are to be removed.
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        matrix = torch._make_per_channel_quantized_tensor(values_OI, scales_O.double(), zeros_O, 0)
    # Where the processor has VNNI, another library would be the default.
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        packed: object = torch.ops.quantized.linear_prepack(matrix, None)
    finally:
        torch.backends.quantized.engine = engine
    return packed


def byte_matmul(x_NI: Tensor, packed: object) -> Tensor:
    """Return `x @ weight.T` in fp32 for a matrix of `pack_bytes`; x, in fp32, is rounded to whole numbers up to 127."""
    # The operator takes an object, so Python searches it for tracers and for `__torch_function__`, which it does not
    # have: this alone takes longer than to multiply a small matrix.
    operator = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32._op
    with torch._C.DisableTorchFunctionSubclass():
        y_NO: Tensor = operator(x_NI, 1.0, 128, packed)
    return y_NO


def prepack_weight(weight_OI: Tensor, rows: int) -> Tensor:
    """Return a matrix in oneDNN's own order, the best one for products with `rows` rows."""
    prepacked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, rows)
    return prepacked


def prepacked_memory(prepacked: Tensor) -> tuple[int, int]:
    """Return the address and the number of bytes of a matrix of `prepack_weight`."""
    return int(torch.ops.mkldnn.data_ptr(prepacked)), int(torch.ops.mkldnn._nbytes(prepacked))


def prepacked_linear(x: Tensor, prepacked: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` for a matrix of `prepack_weight`."""
    # "none", [] and "" mean: no activation function after the product.
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, prepacked, bias, "none", [], "")
    return y
