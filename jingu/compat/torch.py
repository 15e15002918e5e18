"""Private APIs of PyTorch for a single process: CPU features, kernels, foreach operations, modules.

Private APIs for several ranks are in `jingu.compat.torch_distributed`, which takes longer to import.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves

_Function = TypeVar("_Function", bound=Callable[..., Any])

# CPU features


def cpu_has_bf16_units() -> bool:
    """Return whether the CPU multiplies bf16 matrices in hardware, and `ONEDNN_MAX_CPU_ISA` lets oneDNN do so."""
    has_units = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_units and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_has_fp16_units() -> bool:
    """Return whether the CPU multiplies fp16 matrices in hardware (AMX-FP16), and oneDNN may do so."""
    return bool(torch.cpu._is_amx_fp16_supported() and torch.ops.mkldnn._is_mkldnn_fp16_supported())


def has_triton() -> bool:
    """Return whether Triton is installed and supports the GPU."""
    # Imported here: torch.utils._triton is needed on CUDA only.
    from torch.utils import _triton

    return bool(_triton.has_triton())


# torch.compile


def compiler_is_loaded() -> bool:
    """Return whether the compiler was imported. If not, nothing has been compiled. (The import takes seconds.)"""
    return "torch._dynamo" in sys.modules


def set_recompile_limit(limit: int) -> None:
    """Set how many times `torch.compile` specializes one function before it falls back to eager mode."""
    torch._dynamo.config.recompile_limit = limit


def interrupt_compiled_code(function: _Function) -> _Function:
    """Let compiled code end before each call of a function, and start anew behind it.

    `torch.compiler.disable` does the same, but imports the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def raised_by_compiler(error: BaseException) -> bool:
    """Return whether an error comes from `torch.compile` itself rather than from the compiled code."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


# Modules and autograd


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a module by `function(tensor)`, as `Module.to` does."""
    module._apply(function)


def call_directly(module: nn.Module, function: Callable[..., object]) -> None:
    """Make `module(...)` call `function` directly, without looking for hooks, unless the module has forward hooks."""
    if not module._forward_pre_hooks and not module._forward_hooks:
        module._compiled_call_impl = function


def in_backward() -> bool:
    """Return whether the calling thread runs a backward pass; true also while activation checkpointing recomputes."""
    return bool(torch._C._current_graph_task_id() != -1)


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Return a context in which dispatch modes, such as selective activation checkpointing's, see no operations."""
    return _disable_current_modes()


# Foreach operations: one call for many tensors


def foreach_copy_(targets: list[Tensor], values: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each value into its target."""
    torch._foreach_copy_(targets, values, non_blocking=non_blocking)


def foreach_mul_(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply all tensors by the same factor, in place."""
    torch._foreach_mul_(tensors, factor)


def foreach_add_(tensors: list[Tensor], others: list[Tensor], *, alpha: float = 1.0) -> None:
    """Add `alpha` × `others[i]` to `tensors[i]`, in place."""
    torch._foreach_add_(tensors, others, alpha=alpha)


def foreach_lerp(tensors: list[Tensor], ends: list[Tensor], weight: float) -> list[Tensor]:
    """Return the linear interpolations between `tensors[i]` (weight 0) and `ends[i]` (weight 1)."""
    return list(torch._foreach_lerp(tensors, ends, weight))


def foreach_lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Interpolate linearly between `tensors[i]` (weight 0) and `ends[i]` (weight 1), in place."""
    torch._foreach_lerp_(tensors, ends, weight)


def foreach_sign_(tensors: list[Tensor]) -> None:
    """Replace each element by its sign, in place."""
    torch._foreach_sign_(tensors)


# Kernels for matmuls with quantized or prepacked weights. Shapes: N rows, I inputs, O outputs.


def int8_matmul(x_NI: Tensor, values_OI: Tensor, scales_O: Tensor) -> Tensor:
    """Return `x @ (values * scales).T` [N, O], for int8 values with one scale per output."""
    return torch._weight_int8pack_mm(x_NI, values_OI, scales_O)


def pack_int4(values_OI: Tensor) -> Tensor:
    """Pack a matrix of int32 numbers from 0 to 15 into the layout that `int4_matmul` reads."""
    # The second argument matters only for the kernels of other devices.
    packed_values: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_OI, 1)
    return packed_values


def unpack_halves(bytes_NB: Tensor, scale_N: Tensor, offset_N: Tensor) -> Tensor:
    """Return the numbers of 4 bits in bytes [N, 2 B], times a scale plus an offset per row, in fp32.

    The number in the lower bits of a byte is first. Scales and offsets are fp16; one of them can be for all rows.
    """
    # Each row ends with its scale and offset.
    end = torch.stack(torch.broadcast_tensors(scale_N, offset_N), 1).view(torch.uint8)
    rows = bytes_NB.new_empty(len(bytes_NB), bytes_NB.shape[1] + end.shape[1])
    rows[:, : bytes_NB.shape[1]] = bytes_NB
    rows[:, bytes_NB.shape[1] :] = end
    numbers: Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(rows)
    return numbers


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage among all storages that exist now, even if it is empty."""
    return int(storage._cdata)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the numbers from 0 to 15 [O, I] of a matrix that `pack_int4` has packed, as uint8."""
    outputs, inputs = len(packed), 2 * packed.shape[1]
    capability = torch.backends.cpu.get_cpu_capability()
    # The matrix is stored in blocks of rows. A block is stored column by column, and each byte has the values of two
    # rows: of row i and row i + block / 2 if the kernel uses vector instructions, else of neighboring rows.
    block = 64 if capability.startswith("AVX512") else 32
    is_halved = capability == "AVX2" or capability.startswith("AVX512")
    num_blocks = outputs // block
    size = num_blocks * block * inputs // 2
    parts = [
        (packed.flatten()[:size].view(num_blocks, inputs, block // 2), is_halved),
        (packed.flatten()[size:].view(1, inputs, (outputs - num_blocks * block) // 2), False),
    ]
    rows = []
    for bytes_BIH, is_split in parts:
        pairs_BIH2 = torch.stack([bytes_BIH & 15, bytes_BIH >> 4], -1)
        rows.append(pairs_BIH2.permute((0, 3, 2, 1) if is_split else (0, 2, 3, 1)).reshape(-1, inputs))
    return torch.cat(rows)


def int4_matmul(x_NI: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    """Return `x @ weight.T` [N, O] for a matrix that `pack_int4` has packed.

    Args:
        group_size: inputs that share a scale and a zero.
        scales_and_zeros: [I / group_size, O, 2]; a weight is (value - 8) × scale + zero.
    """
    y_NO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_NI, packed, group_size, scales_and_zeros)
    return y_NO


def pack_int4_on_gpu(pairs: Tensor) -> Tensor:
    """Pack a matrix into the layout that `int4_matmul_on_gpu` reads. O must be a multiple of 8, and I of 32.

    Args:
        pairs: numbers from 0 to 15, two per byte, the first in the high half [O, I / 2].
    """
    # The kernel reads this many tiles of 16 inputs at a time; more are faster.
    tiles = next(number for number in (8, 4, 2) if pairs.shape[1] % (8 * number) == 0)
    packed_values: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
    return packed_values


def int4_matmul_on_gpu(x_NI: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    """Return `x @ weight.T` [N, O] in bf16 on a GPU, for a matrix that `pack_int4_on_gpu` has packed.

    The other arguments are those of `int4_matmul`.
    """
    y_NO: Tensor = torch.ops.aten._weight_int4pack_mm(x_NI, packed, group_size, scales_and_zeros)
    return y_NO


def has_byte_kernels() -> bool:
    """Return whether this build of PyTorch has fbgemm's matmuls of 8-bit integers."""
    has_operator = hasattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32")
    # `pack_bytes` needs tensors of quantized dtypes, which a later version of PyTorch will remove.
    has_tensors = hasattr(torch, "_make_per_channel_quantized_tensor")
    return has_operator and has_tensors and "fbgemm" in torch.backends.quantized.supported_engines


def pack_bytes(values_OI: Tensor, scales_O: Tensor) -> object:
    """Pack a matrix of int8 values with one scale per output into fbgemm's layout, for `byte_matmul`."""
    zeros_O = torch.zeros(len(values_OI), dtype=torch.int64)
    with warnings.catch_warnings():
        # The warning says that tensors of quantized dtypes will be removed.
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        matrix = torch._make_per_channel_quantized_tensor(values_OI, scales_O.double(), zeros_O, 0)
    # On CPUs with VNNI, another library is the default.
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        packed_weight: object = torch.ops.quantized.linear_prepack(matrix, None)
    finally:
        torch.backends.quantized.engine = engine
    return packed_weight


def byte_matmul(x_NI: Tensor, packed: object) -> Tensor:
    """Return `x @ weight.T` [N, O] in fp32 for a matrix that `pack_bytes` has packed.

    The operator rounds x (fp32) to integers and clamps them to 8 bits, so callers must scale x to -127..127.
    """
    # The packed matrix is a script object, in which Python would look for tracers and for `__torch_function__`. That
    # alone takes longer than a small matmul, so call the operator directly.
    operator = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32._op
    with torch._C.DisableTorchFunctionSubclass():
        y_NO: Tensor = operator(x_NI, 1.0, 128, packed)
    return y_NO


def prepack_weight(weight_OI: Tensor, rows: int) -> Tensor:
    """Pack a matrix into oneDNN's own layout, chosen for matmuls with `rows` rows of inputs."""
    prepacked_weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, rows)
    return prepacked_weight


def prepacked_memory(prepacked: Tensor) -> tuple[int, int]:
    """Return the address and the number of bytes of a matrix that `prepack_weight` has packed."""
    return int(torch.ops.mkldnn.data_ptr(prepacked)), int(torch.ops.mkldnn._nbytes(prepacked))


def prepacked_linear(x: Tensor, prepacked: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` for a matrix that `prepack_weight` has packed."""
    # "none", [] and "" mean: no activation function after the matmul.
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, prepacked, bias, "none", [], "")
    return y
