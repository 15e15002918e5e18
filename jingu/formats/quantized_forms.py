"""Quantized matrices in the layout of compressed-tensors, which vLLM, SGLang and transformers load.

A matrix `NAME.weight` [O, I] is stored as several tensors, whose names begin with `NAME.`: the quantized values, their
scales, and in some forms the shape, zero points or a scale of all scales. `config.json` describes them under
`quantization_config` (https://github.com/vllm-project/compressed-tensors).

Shapes: O rows, I columns (input channels), S groups of columns that share a scale, K columns of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.formats.dequantize import FP4_VALUES
from jingu.formats.importance import Importance

# Matrices are named after their module: `weight` and these.
PACKED = "weight_packed"
SHAPE = "weight_shape"
_SCALE, _GLOBAL_SCALE = "weight_scale", "weight_global_scale"
# Group sizes of int4, from the most common one.
_GROUP_SIZES = (128, 64, 32)
_FP8 = torch.float8_e4m3fn
_MAX_FP8 = 448.0
# The borders between the positive numbers of FP4 (E2M1). A number on a border belongs to the neighbour with an even
# code, as in IEEE 754.
_FP4_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_EXPONENT_BIAS = 127
# Numbers that are rounded at a time.
_CACHE_ELEMENTS = 1 << 17
# Shares of the largest value of a group, of which the one with the smallest squared error is taken.
_CLIPPING = tuple(share / 100 for share in range(100, 69, -3))
_FP4_CLIPPING = (1.0, 0.92, 0.84, 0.76)


class QuantizedDtype(NamedTuple):
    """How the matrices of a model are quantized.

    Attributes:
        form: a name in `FORMS`.
        scales: dtype of scales, and of the other weights.
        importance: of the columns of each matrix; None: all are equally important.
    """

    form: str
    scales: torch.dtype
    importance: Importance | None = None


@dataclass(frozen=True)
class Form:
    """A form of quantized matrices.

    Attributes:
        format: its name in `quantization_config`.
        weights: description of the quantized weights there.
        parts: the stored tensors by suffix: their dtype (None: that of scales), and the rows and columns of the matrix
            for each of their numbers; 0 columns: all; 0 rows: the third value is the number of numbers instead.
        inputs: description of how inputs are quantized while the model runs; None: they are not.
        encode: returns the stored tensors of a matrix in the dtype of the scales, given the importance of its columns;
            None: all are equally important.
    """

    format: str
    weights: Mapping[str, Any]
    encode: Callable[[Tensor, Tensor | None], dict[str, Tensor]]
    parts: Mapping[str, tuple[torch.dtype | None, int, int]]
    inputs: Mapping[str, Any] | None = None

    def config(self, ignored_modules: Iterable[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a model.

        Args:
            ignored_modules: names of linear modules that are not quantized.
        """
        group = {"targets": ["Linear"], "weights": {**_WEIGHTS, **self.weights}, "input_activations": self.inputs}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.format,
            "config_groups": {"group_0": {**group, "output_activations": None}},
            "ignore": list(ignored_modules),
            "kv_cache_scheme": None,
        }

    def layout(self, shape: torch.Size, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return dtype and shape of the stored tensors of a matrix, by suffix.

        Args:
            dtype: that of the scales, unless the form has its own.
        """
        rows, columns = shape
        layout = {}
        for suffix, (part_dtype, height, width) in self.parts.items():
            size = torch.Size((width,))
            if height:
                size = torch.Size((rows // height, columns // width if width else 1))
            layout[suffix] = (part_dtype or dtype, size)
        return layout


_WEIGHTS: Mapping[str, Any] = {"symmetric": True, "dynamic": False, "actorder": None, "observer_kwargs": {}}
_FP8_WEIGHTS = {"num_bits": 8, "type": "float"}
_DYNAMIC = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "observer": None}


def choose_form(name: str, shapes: Mapping[str, torch.Size]) -> Form:
    """Return the form that `--dtype` names, for matrices of these shapes.

    Raises:
        JinguError: the form divides rows into groups of columns, and these do not divide all matrices.
    """
    if name == "fp8":
        weights = {**_FP8_WEIGHTS, "strategy": "channel"}
        parts = {"weight": (_FP8, 1, 1), _SCALE: (None, 1, 0)}
        encode = partial(_encode_fp8, block=None)
        return Form("float-quantized", weights, encode, parts, {**_DYNAMIC, "strategy": "token"})
    if name == "fp8_block":
        odd = next((key for key, shape in shapes.items() if any(size % _BLOCK for size in shape)), None)
        if odd is not None:
            what = (
                f"fp8_block has a scale for {_BLOCK} × {_BLOCK} numbers, and the matrix {odd} is {_size(shapes[odd])}."
            )
            raise JinguError(what, where="--dtype", fix=_USE_FP8)
        weights = {**_FP8_WEIGHTS, "strategy": "block", "block_structure": [_BLOCK, _BLOCK]}
        inputs = {**_DYNAMIC, "strategy": "group", "group_size": _BLOCK}
        parts = {"weight": (_FP8, 1, 1), _SCALE: (None, _BLOCK, _BLOCK)}
        return Form("float-quantized", weights, partial(_encode_fp8, block=_BLOCK), parts, inputs)
    common = gcd(*(shape[-1] for shape in shapes.values()))
    sizes = {"int4": _GROUP_SIZES, "nvfp4": (16,), "mxfp4": (32,)}[name]
    size = next((size for size in sizes if common % size == 0), None)
    if size is None:
        matrix, shape = next((key, shape) for key, shape in shapes.items() if shape[-1] % sizes[-1])
        what = f"{name} has a scale for {sizes[-1]} columns or more, and the matrix {matrix} has {shape[-1]}."
        raise JinguError(what, where="--dtype", fix=_USE_FP8)
    weights = {"num_bits": 4, "type": "int" if name == "int4" else "float", "strategy": "group", "group_size": size}
    if name == "int4":
        parts = {PACKED: (torch.int32, 1, 8), _SCALE: (None, 1, size), SHAPE: (torch.int64, 0, 2)}
        return Form("pack-quantized", weights, partial(_encode_int4, group_size=size), parts)
    if name == "mxfp4":
        parts = {PACKED: (torch.uint8, 1, 2), _SCALE: (torch.uint8, 1, size)}
        return Form("mxfp4-pack-quantized", {**weights, "scale_dtype": "torch.uint8"}, _encode_mxfp4, parts)
    scale = {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    parts = {PACKED: (torch.uint8, 1, 2), _SCALE: (_FP8, 1, size), _GLOBAL_SCALE: (torch.float32, 0, 1)}
    return Form("nvfp4-pack-quantized", {**weights, **scale}, _encode_nvfp4, parts)


def _size(shape: torch.Size) -> str:
    return " × ".join(map(str, shape))


# Names of the forms in `--dtype`.
FORMS = ("fp8", "fp8_block", "int4", "nvfp4", "mxfp4")
# Those whose scales are chosen by the errors that they cause.
CALIBRATED_FORMS = ("int4", "nvfp4", "mxfp4")
_BLOCK = 128
_USE_FP8 = "Use fp8, which has a scale for each row."


# Writing


def _encode_fp8(weight_OI: Tensor, _importance_I: Tensor | None, block: int | None) -> dict[str, Tensor]:
    """FP8 with a scale for each row, or for each square block."""
    values_OI = weight_OI.float()
    if block is None:
        largest = values_OI.abs().amax(1, keepdim=True)
    else:
        tiles = values_OI.unflatten(1, (-1, block)).unflatten(0, (-1, block))
        largest = tiles.abs().amax((1, 3))
    scale = _nonzero(largest / _MAX_FP8).to(weight_OI.dtype)
    scale_OI = scale.float()
    if block is not None:
        scale_OI = scale_OI.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return {"weight": (values_OI / scale_OI).clamp(-_MAX_FP8, _MAX_FP8).to(_FP8), _SCALE: scale}


def _encode_int4(weight_OI: Tensor, importance_I: Tensor | None, group_size: int) -> dict[str, Tensor]:
    """4-bit integers from -8 to 7 with a scale for each group of columns, eight in an int32 from the lowest bits."""

    def scales(largest_OS1: Tensor) -> Iterator[Tensor]:
        for share in _CLIPPING:
            yield _nonzero(largest_OS1 * share / 7.5).to(weight_OI.dtype).float()

    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight_OI.device)
    word_parts = []
    scale_parts = []
    for groups_OSK, weight_SK in _row_groups(weight_OI, importance_I, group_size):
        scale_OS1 = _best_scale(groups_OSK, weight_SK, scales, lambda x: x.round().clamp(-8, 7))
        codes_OI = (groups_OSK / scale_OS1).round().clamp(-8, 7).flatten(1).to(torch.int32) + 8
        # The highest four bits may set the sign. No bits overlap, so that the sum of 64 bits has the right lower half.
        word_parts.append((codes_OI.unflatten(1, (-1, 8)) << shifts).sum(2, dtype=torch.int64).to(torch.int32))
        scale_parts.append(scale_OS1.squeeze(2).to(weight_OI.dtype))
    shape = torch.tensor(weight_OI.shape, dtype=torch.int64)
    return {PACKED: torch.cat(word_parts), _SCALE: torch.cat(scale_parts), SHAPE: shape}


def _encode_nvfp4(weight_OI: Tensor, importance_I: Tensor | None) -> dict[str, Tensor]:
    """FP4 with a scale in FP8 for each 16 columns, which a scale in fp32 for the matrix divides."""
    global_scale = _MAX_FP8 * FP4_VALUES[-1] / _nonzero(weight_OI.float().abs().amax())

    def stored_scale(scale: Tensor) -> Tensor:
        return (scale * global_scale).clamp(2.0**-9, _MAX_FP8).to(_FP8)

    def scales(largest_OS1: Tensor) -> Iterator[Tensor]:
        for share in _FP4_CLIPPING:
            yield stored_scale(largest_OS1 * share / FP4_VALUES[-1]).float() / global_scale

    byte_parts = []
    scale_parts = []
    for groups_OSK, weight_SK in _row_groups(weight_OI, importance_I, 16):
        scale_OS1 = _best_scale(groups_OSK, weight_SK, scales, _round_fp4)
        byte_parts.append(_pack_fp4(groups_OSK / scale_OS1))
        scale_parts.append(stored_scale(scale_OS1).squeeze(2))
    return {PACKED: torch.cat(byte_parts), _SCALE: torch.cat(scale_parts), _GLOBAL_SCALE: global_scale.reshape(1)}


def _encode_mxfp4(weight_OI: Tensor, importance_I: Tensor | None) -> dict[str, Tensor]:
    """FP4 with a power of two for each 32 columns (OCP Microscaling Formats, 2023)."""

    def scales(largest_OS1: Tensor) -> Iterator[Tensor]:
        # The largest number of FP4 is 1.5 · 2². With the next power of two, no number is larger than that.
        exponents = torch.frexp(_nonzero(largest_OS1)).exponent - 1 - 2
        for offset in (0, 1):
            scale_exponents = (exponents + offset).clamp(-_EXPONENT_BIAS, _EXPONENT_BIAS)
            yield torch.ldexp(torch.ones_like(largest_OS1), scale_exponents)

    byte_parts = []
    scale_parts = []
    for groups_OSK, weight_SK in _row_groups(weight_OI, importance_I, 32):
        scale_OS1 = _best_scale(groups_OSK, weight_SK, scales, _round_fp4)
        byte_parts.append(_pack_fp4(groups_OSK / scale_OS1))
        exponents_OS = torch.frexp(scale_OS1.squeeze(2)).exponent - 1
        scale_parts.append((exponents_OS + _EXPONENT_BIAS).to(torch.uint8))
    return {PACKED: torch.cat(byte_parts), _SCALE: torch.cat(scale_parts)}


def _row_groups(
    weight_OI: Tensor, importance_I: Tensor | None, group_size: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield a few rows at a time, in groups [O, S, K] in fp32, and the importance of the columns [S, K].

    So the numbers stay in the CPU's cache.
    """
    weight_SK = None if importance_I is None else importance_I.float().unflatten(0, (-1, group_size))
    for rows in weight_OI.split(max(1, _CACHE_ELEMENTS // weight_OI.shape[1])):
        yield rows.float().unflatten(1, (-1, group_size)), weight_SK


def _best_scale(
    groups_OSK: Tensor,
    weight_SK: Tensor | None,
    scales: Callable[[Tensor], Iterator[Tensor]],
    round_numbers: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the scale [O, S, 1] of each group with the smallest squared error.

    Args:
        weight_SK: weights of the squares; None: all are equal.
        scales: yields possible scales, given the largest numbers [O, S, 1].
        round_numbers: rounds numbers that were divided by their scale.
    """
    largest_OS1 = groups_OSK.abs().amax(2, keepdim=True)
    best_OS1 = errors_OS1 = None
    for scale_OS1 in scales(largest_OS1):
        error_OSK = (round_numbers(groups_OSK / scale_OS1) * scale_OS1).sub_(groups_OSK).square_()
        if weight_SK is not None:
            error_OSK *= weight_SK
        error_OS1 = error_OSK.sum(2, keepdim=True)
        if best_OS1 is None or errors_OS1 is None:
            best_OS1, errors_OS1 = scale_OS1, error_OS1
            continue
        is_better_OS1 = error_OS1 < errors_OS1
        best_OS1 = torch.where(is_better_OS1, scale_OS1, best_OS1)
        errors_OS1 = torch.where(is_better_OS1, error_OS1, errors_OS1)
    assert best_OS1 is not None
    return best_OS1


def _nonzero(values: Tensor) -> Tensor:
    """Return values with 1 in place of 0, for scales of groups that are all zero."""
    return torch.where(values == 0, 1.0, values)


def _fp4_codes(magnitudes: Tensor) -> Tensor:
    """Return the codes 0 to 7 of positive numbers."""
    codes = torch.zeros_like(magnitudes, dtype=torch.uint8)
    for index, border in enumerate(_FP4_BORDERS):
        # Between the codes `index` and `index + 1`: a tie goes to the even one.
        codes += magnitudes > border if index % 2 == 0 else magnitudes >= border
    return codes


def _round_fp4(values: Tensor) -> Tensor:
    """Return the nearest numbers of FP4."""
    table = torch.tensor(FP4_VALUES, device=values.device)
    return table[_fp4_codes(values.abs()).int()].copysign(values)


def _pack_fp4(scaled_OSK: Tensor) -> Tensor:
    """Return the codes of numbers in FP4 [O, I / 2], two in a byte, the first in the lower half."""
    values_OI = scaled_OSK.flatten(1)
    codes = _fp4_codes(values_OI.abs()) | ((values_OI < 0).to(torch.uint8) << 3)
    pairs = codes.unflatten(1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)
