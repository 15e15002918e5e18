"""Kernels of flash-linear-attention (the package `fla`) for the recurrences of mixers, on GPUs.

Each function takes the arguments of the chunked form that it replaces, and returns its results. The kernels multiply
in 16 bits, so they serve models that compute in bf16 or fp16; decoding keeps the recurrent forms.

The kernels take documents as one row and the borders between them, so borders are read from the device once a layer.

Shapes: B rows, T tokens, N sequences (the documents of all rows), H heads, K key size, V value size. For Mamba-2, whose
state is that of linear attention with one decay per head, K is the state size and V the head size.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from jingu.errors import JinguError
from jingu.model.gated_delta import GatedDeltaMixer
from jingu.model.mixer_specs import GatedDelta, MixerKernels, StateSpace
from jingu.model.spec import ModelSpec
from jingu.model.state_space import StateSpaceInputs, StateSpaceMixer, add_skip


def set_mixer_kernels(
    model: nn.Module, spec: ModelSpec, kernels: MixerKernels, device_type: str, compute: torch.dtype
) -> None:
    """Let the mixers of a model, or of a stage of it, compute with the kernels that the setting names.

    Raises:
        JinguError: as `use_mixer_kernels`.
    """
    for module in model.modules() if use_mixer_kernels(spec, kernels, device_type, compute) else ():
        if isinstance(module, GatedDeltaMixer):
            module.kernel = delta_rule
        elif isinstance(module, StateSpaceMixer):
            module.kernel = state_space


def use_mixer_kernels(spec: ModelSpec, kernels: MixerKernels, device_type: str, compute: torch.dtype) -> bool:
    """Return whether the setting asks for the kernels of flash-linear-attention where they can be used.

    Raises:
        JinguError: they were requested, and cannot be used.
    """
    if kernels == "torch":
        return False
    obstacle = _find_obstacle(spec, device_type, compute)
    if obstacle is not None and kernels == "fla":
        raise JinguError(
            f"fla cannot be used, because {obstacle}.",
            where="train.mixer_kernels",
            fix="Set it to auto, which computes with PyTorch where the kernels cannot be used.",
        )
    return obstacle is None


def _find_obstacle(spec: ModelSpec, device_type: str, compute: torch.dtype) -> str | None:
    """Return why the kernels cannot be used; None if they can."""
    if not any(isinstance(layer.state_mixer, GatedDelta | StateSpace) for layer in spec.kinds):
        return "no layer of the model has the delta rule or the state space of Mamba-2"
    if device_type != "cuda":
        return f"its kernels run on CUDA only, and the device is {device_type}"
    if compute not in (torch.bfloat16, torch.float16):
        return f"its kernels multiply in 16 bits, and the model computes in {str(compute).removeprefix('torch.')}"
    if find_spec("fla") is None:
        return "the package flash-linear-attention is not installed"
    return None


def delta_rule(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    starts_BT: Tensor | None = None,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule, or Kimi's with a decay per channel; see `chunked_delta_rule`."""
    if log_decay_BTH.dim() == 4:
        kernel = import_module("fla.ops.kda").chunk_kda
    else:
        kernel = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    inputs = (q_BTGK, k_BTGK, v_BTHV, log_decay_BTH, beta_BTH)
    return _compute(kernel, inputs, starts_BT, state_BHKV, use_qk_l2norm_in_kernel=True)


def state_space(
    inputs: StateSpaceInputs, starts_BT: Tensor | None = None, state_BHSP: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence of Mamba-2; see `chunked_state_space`."""
    kernel = import_module("fla.ops.simple_gla").chunk_simple_gla
    repeats = inputs.x.shape[2] // inputs.b.shape[2]
    b_BTHS, c_BTHS = (x.repeat_interleave(repeats, 2) for x in (inputs.b, inputs.c))
    written_BTHP = (inputs.x * inputs.step.unsqueeze(-1)).to(inputs.x.dtype)
    parts = (c_BTHS, b_BTHS, written_BTHP, inputs.step * inputs.rate)
    y_BTHP, state = _compute(kernel, parts, starts_BT, state_BHSP, scale=1.0)
    return add_skip(y_BTHP, inputs.x, inputs), state


def _compute(
    kernel: Callable[..., Any],
    parts: tuple[Tensor, ...],
    starts_BT: Tensor | None,
    state_BHKV: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, T, H, V] of a kernel, and the states [B, H, K, V] after the last token of each row."""
    if starts_BT is None:
        y_BTHV, state = kernel(*parts, initial_state=state_BHKV, output_final_state=True, **options)
        return y_BTHV, state
    # Join the rows; a sequence is a document, or the part of one at the start of a row.
    rows, tokens = starts_BT.shape
    begins_BT = starts_BT.index_fill(1, starts_BT.new_zeros(1, dtype=torch.long), True)
    border_N = begins_BT.flatten().nonzero().squeeze(1)
    borders = torch.cat((border_N, border_N.new_tensor([rows * tokens])))
    last_B = begins_BT.sum(1).cumsum(0) - 1
    initial_NHKV = None
    if state_BHKV is not None:
        # The first sequence of a row continues its state, unless a document starts with its first token.
        first_B = last_B + 1 - begins_BT.sum(1)
        continued_BHKV = state_BHKV.masked_fill(starts_BT[:, 0, None, None, None], 0)
        initial_NHKV = state_BHKV.new_zeros(len(border_N), *state_BHKV.shape[1:]).index_copy(0, first_B, continued_BHKV)
    joined = (part.reshape(1, rows * tokens, *part.shape[2:]) for part in parts)
    y_1THV, state_NHKV = kernel(
        *joined, initial_state=initial_NHKV, output_final_state=True, cu_seqlens=borders, **options
    )
    return y_1THV.view(rows, tokens, *y_1THV.shape[2:]), state_NHKV[last_B]
