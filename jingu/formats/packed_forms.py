"""The forms in which other tools store quantized matrices, by quantization method.

- GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ): integers with several inputs (GPTQ) or outputs (AWQ) in a word.
- FP8: DeepSeek-V3, transformers, FBGEMM, ModelOpt, compressed-tensors. Also matrices of all experts [E, O, I].
- MXFP4: gpt-oss. Matrices of all experts as blocks [E, O, S, 16]; transformers' parameter is [E, I, O].
- bitsandbytes: `bitsandbytes_forms.py`.
- compressed-tensors: integers, NVFP4, MXFP4. NVFP4 of ModelOpt has other names.

Shapes: O rows (outputs), I columns (inputs), S groups of columns that share a scale, W words, B bytes, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.formats.bitsandbytes_forms import BNB_4BIT, BNB_8BIT
from jingu.formats.dequantize import (
    FP4_NUMBERS,
    FP8_NUMBERS,
    Codes,
    Groups,
    code_table,
    exponents,
    integers,
    look_up,
    signed_bytes,
    spread_bits,
    words_of_inputs,
    words_of_outputs,
)
from jingu.formats.packed_matrices import (
    BYTES,
    FLOATS,
    FP32,
    INT8,
    Config,
    Locations,
    PackedForm,
    Parts,
    ReadPart,
    expect,
    marks,
    matrix_shape,
)
from jingu.formats.safetensors import TensorLocation

_FP8 = (torch.float8_e4m3fn,)
_E8M0 = torch.float8_e8m0fnu
_INT32 = (torch.int32,)


# GPTQ and AWQ


def _gptq_shape(parts: Locations, _read: ReadPart, config: Config) -> torch.Size:
    num_words, outputs = matrix_shape(parts["qweight"], "qweight")
    num_groups = matrix_shape(parts["scales"], "scales")[0]
    num_bits, remainder = divmod(32 * matrix_shape(parts["qzeros"], "qzeros")[1], outputs)
    if remainder or num_bits not in (2, 4, 8):
        raise ValueError(f"qzeros {list(parts['qzeros'].shape)} means {num_bits} bits, and 2, 4 and 8 are known")
    # Modules may differ from the config.
    if not (config.get("dynamic") or config.get("extra_config")) and config.get("bits") != num_bits:
        raise ValueError(f"it has {num_bits} bits, and {config.get('bits')} in config.json")
    inputs = 32 * num_words // num_bits
    expect(parts, "scales", (num_groups, outputs))
    expect(parts, "qzeros", (num_groups, outputs * num_bits // 32))
    expect(parts, "g_idx", (inputs,), (0,))
    if not _has_index(parts):
        if _group_size(inputs, num_groups, config) is None:
            raise ValueError(f"scales has {num_groups} groups for {inputs} inputs")
        if config.get("desc_act") and num_groups > 1:
            raise ValueError("it has no g_idx, and its columns have the order of activations (desc_act in config.json)")
    return torch.Size((outputs, inputs))


def _has_index(parts: Mapping[str, Any]) -> bool:
    return "g_idx" in parts and parts["g_idx"].shape[0] > 0


def _group_size(inputs: int, num_groups: int, config: Config) -> int | None:
    """Return the number of inputs in a group; None if the groups do not fit to the inputs."""
    size = config.get("group_size", config.get("q_group_size"))
    size = size if isinstance(size, int) and size > 0 else inputs
    return size if -(-inputs // size) == num_groups else None


def _codes_of_gptq(parts: Parts, config: Config) -> Codes:
    words_WO, scale_SO, zero_words = parts["qweight"], parts["scales"], parts["qzeros"]
    num_groups, outputs = scale_SO.shape
    num_bits = 32 * zero_words.shape[1] // outputs
    inputs = 32 // num_bits * len(words_WO)
    if _gptq_format(config) == "gptq":
        # Version 1 stores zero points minus one, subtracted from the words, so that it may borrow from the next one.
        zero_words = zero_words + sum(1 << shift for shift in range(0, 31, num_bits))
    zero_SO = spread_bits(zero_words.contiguous().view(torch.uint8), num_bits)
    # Without an index, the groups were checked to fit.
    size = _group_size(inputs, num_groups, config) or 1
    groups = _check_index(parts["g_idx"], num_groups, size) if _has_index(parts) else size
    shape = torch.Size((outputs, inputs))
    return integers(shape, words_of_inputs(words_WO), num_bits, scale_SO.t(), groups, zero_SO.t())


def _check_index(index: Tensor, num_groups: int, size: int) -> Groups:
    """Return the groups of the columns: a number, if they are in order. Raises ValueError for one that is not there."""
    if torch.equal(index.long(), torch.arange(len(index), device=index.device) // size):
        return size
    smallest, largest = (int(each) for each in index.aminmax())
    if smallest < 0 or largest >= num_groups:
        raise ValueError(f"g_idx names group {largest if largest >= num_groups else smallest} of {num_groups}")
    return index.long()


def _gptq_format(config: Config) -> str:
    if "packing_format" in config:
        # AutoRound stores zero points minus one only in AutoGPTQ's layout.
        return "gptq" if "auto_gptq" in str(config["packing_format"]) else "gptq_v2"
    return str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()


def _gptq_problem(config: Config) -> str | None:
    if _gptq_format(config) not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {_gptq_format(config)!r}"
    if config.get("pack_dtype", "int32") != "int32":
        return f"pack_dtype {config['pack_dtype']!r}"
    return None if config.get("bits") in (2, 4, 8) else f"{config.get('bits')} bits"


def _awq_shape(parts: Locations, _read: ReadPart, config: Config) -> torch.Size:
    inputs, num_words = matrix_shape(parts["qweight"], "qweight")
    num_groups = matrix_shape(parts["scales"], "scales")[0]
    expect(parts, "scales", (num_groups, 8 * num_words))
    expect(parts, "qzeros", (num_groups, num_words))
    if _group_size(inputs, num_groups, config) is None:
        raise ValueError(f"scales has {num_groups} groups for {inputs} inputs")
    return torch.Size((8 * num_words, inputs))


def _codes_of_awq(parts: Parts, config: Config) -> Codes:
    words_IW, scale_SO = parts["qweight"], parts["scales"]
    inputs, num_words = words_IW.shape
    groups = _group_size(inputs, len(scale_SO), config)
    assert groups is not None
    zero_OS = words_of_outputs(parts["qzeros"])(slice(0, 8 * num_words))
    shape = torch.Size((8 * num_words, inputs))
    return Codes(shape, scale_SO.dtype, words_of_outputs(words_IW), scale_SO.t(), groups, zero_OS)


def _awq_problem(config: Config) -> str | None:
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        return f"version {version!r}"
    num_bits = config.get("bits", config.get("w_bit"))
    return None if num_bits == 4 else f"{num_bits} bits"


# FP8


def _fp8_shape(parts: Locations, _read: ReadPart, config: Config) -> torch.Size:
    suffix = next((suffix for suffix in ("_scale_inv", "_scale", "weight_scale") if suffix in parts), None)
    if suffix is None:
        raise ValueError("it has no scale")
    weight = next(parts[name] for name in ("", "weight") if name in parts)
    shape = matrix_shape(weight, "weight", (2, 3))
    scale = parts[suffix].shape
    if scale.numel() != 1:
        *before, rows, columns = shape
        # A scale for each row, or for each expert.
        grids = [(*before, rows), (*before, rows, 1), (*before, 1, 1), tuple(before)]
        block = _block(config)
        if block is not None:
            grids.insert(0, (*before, -(-rows // block[0]), -(-columns // block[1])))
        elif len(scale) == len(shape) and scale.numel() and not (rows % scale[-2] or columns % scale[-1]):
            grids.append((*before, *scale[-2:]))
        expect(parts, suffix, *(grid for grid in grids if grid))
    return shape


def _mapping(values: Any, key: str) -> Config:
    """Return the object under a key; an empty one if there is none."""
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _block(config: Config) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that share a scale; None: the config does not say. Raises ValueError."""
    block = config.get("weight_block_size")
    if block is None:
        groups = _mapping(config, "config_groups").values()
        blocks = [each for group in groups if (each := _mapping(group, "weights").get("block_structure"))]
        block = blocks[0] if blocks and all(each == blocks[0] for each in blocks) else None
    if block is None:
        return None
    sizes = tuple(block) if isinstance(block, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"its blocks have the size {block!r} in config.json")
    return sizes[0], sizes[1]


def _codes_of_fp8(parts: Parts, config: Config) -> Codes:
    return _bytes_with_scales(parts[""], parts.get("_scale_inv", parts.get("_scale")), _block(config), torch.float32)


def _bytes_with_scales(
    weight: Tensor,
    scale: Tensor | None,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
    zero: Tensor | None = None,
    index: Tensor | None = None,
) -> Codes:
    """Return the codes of matrices [..., O, I] of FP8 or 8-bit integers with a scale per matrix, row, block or group.

    Args:
        block: rows and columns of a block; None: the scales divide the matrix evenly.
        zero: zero points in the arrangement of the scales; None: 0.
        index: the group of each column; None: they are in order.
    """
    assert scale is not None
    *before, rows, columns = weight.shape
    if scale.dtype in (_E8M0, torch.uint8):
        scale = exponents(scale)
    # Give the scales the dims of the matrix.
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif tuple(scale.shape) == tuple(before):
        scale = scale.reshape(*before, 1, 1)
    elif scale.dim() == weight.dim() - 1:
        scale = scale.unsqueeze(-1)
    *_, num_rows, num_groups = scale.shape
    height = 1 if num_rows == rows else rows
    if num_rows not in (1, rows):
        height = block[0] if block else rows // num_rows
    groups: Groups = columns
    if num_groups > 1:
        groups = block[1] if block else columns // num_groups
    if index is not None:
        groups = _check_index(index, num_groups, columns // num_groups)

    def expand(values: Tensor) -> Tensor:
        values = values.float().reshape(scale.shape).expand(*before, num_rows, num_groups)
        return values.repeat_interleave(height, -2).narrow(-2, 0, rows).flatten(0, -2)

    bytes_OI = weight.flatten(0, -2)
    if weight.dtype == torch.int8:
        read_codes = signed_bytes(bytes_OI)
    else:
        read_codes = look_up(bytes_OI.view(torch.uint8), code_table(FP8_NUMBERS))
    zero_OS = None if zero is None else expand(zero)
    return Codes(weight.shape, dtype, read_codes, expand(scale), groups, zero_OS)


def _fp8_problem(config: Config) -> str | None:
    kind = config.get("expert_dtype", "fp8")
    return None if kind == "fp8" else f"expert_dtype {kind!r}"


# FP4


def _mxfp4_shape(parts: Locations, _read: ReadPart, _config: Config) -> torch.Size:
    *before, rows, num_groups, width = matrix_shape(parts["_blocks"], "blocks", (3, 4))
    expect(parts, "_blocks", (*before, rows, num_groups, 16))
    expect(parts, "_scales", (*before, rows, num_groups))
    # transformers' parameter of all experts is transposed.
    columns = num_groups * 2 * width
    return torch.Size((*before, columns, rows) if before else (rows, columns))


def _codes_of_mxfp4(parts: Parts, _config: Config) -> Codes:
    blocks, scale = parts["_blocks"], parts["_scales"]
    shape = torch.Size((*blocks.shape[:-2], blocks.shape[-2] * 2 * blocks.shape[-1]))
    # Powers of two times numbers of FP4 are exact in bf16.
    scale_OS = exponents(scale).view(-1, scale.shape[-1])
    return _fp4_with_scales(blocks.flatten(-2), shape, scale_OS, torch.bfloat16)


def _blocks_of_mxfp4(parts: Parts) -> Tensor:
    """Return rows as GGUF stores them: for 32 numbers a scale, and their codes, the first half in the lower bits."""
    codes, scale = parts["_blocks"], parts["_scales"].view(torch.uint8)
    exponents(scale)
    in_order = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    first, second = in_order.chunk(2, -1)
    return torch.cat([scale.unsqueeze(-1), first | second << 4], -1).flatten(-2)


def _fp4_with_scales(code_bytes: Tensor, shape: torch.Size, scale_OS: Tensor, dtype: torch.dtype) -> Codes:
    read_codes = look_up(code_bytes.flatten(0, -2), code_table(FP4_NUMBERS))
    return Codes(shape, dtype, read_codes, scale_OS, shape[-1] // scale_OS.shape[1])


def _fp4_shape(parts: Locations, _read: ReadPart, _config: Config) -> torch.Size:
    weight, scale = ("weight_packed", "weight_scale") if "weight_packed" in parts else ("weight", "weight_scale")
    rows, width = matrix_shape(parts[weight], weight)
    size = 32 if parts[scale].dtype == torch.uint8 else 16
    expect(parts, scale, (rows, 2 * width // size))
    if (2 * width) % size:
        raise ValueError(f"{weight} has {2 * width} columns, which {size} does not divide")
    for name in ("weight_global_scale", "weight_scale_2"):
        expect(parts, name, (), (1,))
    if size == 16 and not ("weight_global_scale" in parts or "weight_scale_2" in parts):
        raise ValueError("its tensor weight_global_scale is missing")
    return torch.Size((rows, 2 * width))


def _codes_of_modelopt(parts: Parts, _config: Config) -> Codes:
    scale_OS = parts["weight_scale"].float() * parts["weight_scale_2"].float()
    return _fp4_with_scales(parts["weight"], _unpacked_shape(parts["weight"]), scale_OS, torch.float32)


def _unpacked_shape(code_bytes: Tensor | TensorLocation) -> torch.Size:
    return torch.Size((*code_bytes.shape[:-1], 2 * code_bytes.shape[-1]))


# compressed-tensors


def _integer_shape(parts: Locations, read: ReadPart, config: Config) -> torch.Size:
    packed = matrix_shape(parts["weight_packed"], "weight_packed")
    expect(parts, "weight_shape", (2,))
    rows, columns = (int(size) for size in read("weight_shape"))
    num_bits = _num_bits(packed[1], columns)
    if rows != packed[0] or num_bits is None:
        raise ValueError(f"weight_packed has the shape {list(packed)}, and weight_shape is {[rows, columns]}")
    scale = matrix_shape(parts["weight_scale"], "weight_scale")
    if scale[0] not in (1, rows) or columns % scale[1]:
        raise ValueError(f"weight_scale has the shape {list(scale)} for a matrix {[rows, columns]}")
    expect(parts, "weight_zero_point", tuple(scale), (-(-rows * num_bits // 32), scale[1]))
    expect(parts, "weight_g_idx", (columns,))
    _check_scheme(parts, columns, scale[1], config)
    return torch.Size((rows, columns))


def _check_scheme(parts: Locations, columns: int, num_groups: int, config: Config) -> None:
    """Raise ValueError if a matrix lacks what the schemes in config.json say of all matrices."""
    schemes = [_mapping(group, "weights") for group in _mapping(config, "config_groups").values()]
    if not schemes:
        return
    if all(scheme.get("symmetric") is False for scheme in schemes) and "weight_zero_point" not in parts:
        raise ValueError("it has no weight_zero_point, and its scheme is not symmetric")
    if all(scheme.get("actorder") == "group" for scheme in schemes) and "weight_g_idx" not in parts:
        raise ValueError("it has no weight_g_idx, and its columns have the order of activations (actorder)")
    sizes = {scheme.get("group_size") if scheme.get("strategy") == "group" else None for scheme in schemes}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is not None and num_groups * size != columns:
        raise ValueError(f"weight_scale has {num_groups} groups for {columns} columns in groups of {size}")


def _num_bits(words: int, columns: int) -> int | None:
    """Return the bits of the integers in a row, of which the last word may be cut; None if no number fits."""
    fitting = [bits for bits in (2, 4, 8) if columns > 0 and -(-columns * bits // 32) == words]
    return fitting[0] if len(fitting) == 1 else None


def _byte_shape(parts: Locations, read: ReadPart, config: Config) -> torch.Size:
    expect(parts, "weight_g_idx", parts["weight"].shape[-1:])
    expect(parts, "weight_zero_point", tuple(parts["weight_scale"].shape))
    return _fp8_shape(parts, read, config)


def compressed_codes(parts: Parts, block: tuple[int, int] | None = None) -> Codes:
    """Return the codes of compressed-tensors' tensors, for numbers in the dtype in which that library multiplies.

    Args:
        parts: the tensors by suffix.
        block: rows and columns of the blocks that share a scale; None: the scales divide the matrix evenly.

    Raises:
        ValueError: a tensor holds what is not known.
    """
    scale = parts["weight_scale"]
    index = parts.get("weight_g_idx")
    if index is not None and int(index.min()) < 0:
        # What the library writes if columns are in order.
        index = None
    if "weight_packed" not in parts:
        return _bytes_with_scales(parts["weight"], scale, block, scale.dtype, parts.get("weight_zero_point"), index)
    if parts["weight_packed"].dtype == torch.uint8:
        if scale.dtype == torch.uint8:
            scale_OS = exponents(scale)
        else:
            scale_OS = scale.float() / parts["weight_global_scale"].float()
        code_bytes = parts["weight_packed"]
        return _fp4_with_scales(code_bytes, _unpacked_shape(code_bytes), scale_OS, torch.float32)
    rows, columns = (int(size) for size in parts["weight_shape"])
    num_bits = _num_bits(parts["weight_packed"].shape[1], columns)
    assert num_bits is not None
    # Codes and zero points are stored as unsigned integers.
    half = 2 ** (num_bits - 1)
    zero: Tensor | int = half
    if "weight_zero_point" in parts:
        zero = parts["weight_zero_point"]
        if zero.dtype == torch.int32:
            # They are packed along the rows.
            zero = spread_bits(zero.t().contiguous().view(torch.uint8), num_bits)[:, :rows].t()
        else:
            zero = zero.float() + half
    size = columns // scale.shape[1]
    groups = size if index is None else _check_index(index, scale.shape[1], size)
    packed_bytes = parts["weight_packed"].view(torch.uint8)
    shape = torch.Size((rows, columns))
    return integers(shape, lambda part: packed_bytes[part], num_bits, scale, groups, zero)


def _codes_of_compressed(parts: Parts, config: Config) -> Codes:
    return compressed_codes(parts, _block(config))


def _compressed_problem(config: Config) -> str | None:
    sparsity = _mapping(config, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        return f"sparsity_config {sparsity!r}"
    return None if config.get("format") in _FORMATS else f"format {config.get('format')!r}"


# The table

_PACKED_FORMATS = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FORMATS = (*_PACKED_FORMATS, "float-quantized", "int-quantized", "naive-quantized", "mixed-precision")
_INDEX = (torch.int32, torch.int64)
_FP8_SCALE = (*FLOATS, _E8M0, torch.uint8)

GPTQ = PackedForm(
    "GPTQ",
    {"qweight": _INT32, "qzeros": _INT32, "scales": FLOATS},
    {"g_idx": _INDEX},
    _gptq_shape,
    _codes_of_gptq,
    "weight",
)
AWQ = PackedForm(
    "AWQ", {"qweight": _INT32, "qzeros": _INT32, "scales": FLOATS}, {}, _awq_shape, _codes_of_awq, "weight"
)
FP8 = PackedForm("FP8", {"": _FP8}, {"_scale_inv": _FP8_SCALE, "_scale": _FP8_SCALE}, _fp8_shape, _codes_of_fp8)
MXFP4 = PackedForm(
    "MXFP4",
    {"_blocks": BYTES, "_scales": (torch.uint8, _E8M0)},
    {},
    _mxfp4_shape,
    _codes_of_mxfp4,
    is_transposed=True,
    blocks=_blocks_of_mxfp4,
)
MODELOPT_NVFP4 = PackedForm(
    "NVFP4",
    {"weight": BYTES, "weight_scale": _FP8, "weight_scale_2": FP32},
    {},
    _fp4_shape,
    _codes_of_modelopt,
    "weight",
)
COMPRESSED_INTEGERS = PackedForm(
    "pack-quantized",
    {"weight_packed": _INT32, "weight_scale": FLOATS, "weight_shape": _INDEX},
    {"weight_zero_point": (torch.int32, torch.int8), "weight_g_idx": _INDEX},
    _integer_shape,
    _codes_of_compressed,
    "weight",
)
COMPRESSED_FP4 = PackedForm(
    "FP4 of compressed-tensors",
    {"weight_packed": BYTES, "weight_scale": (*_FP8, torch.uint8)},
    {"weight_global_scale": FP32},
    _fp4_shape,
    _codes_of_compressed,
    "weight",
)
COMPRESSED_BYTES = PackedForm(
    "8 bits of compressed-tensors",
    {"weight": (*_FP8, *INT8), "weight_scale": FLOATS},
    {"weight_zero_point": (*INT8, *_FP8, *FLOATS), "weight_g_idx": _INDEX},
    _byte_shape,
    _codes_of_compressed,
    "weight",
)


class Method(NamedTuple):
    """A quantization method: the forms of its matrices, and a function that says why a config cannot be read."""

    forms: tuple[PackedForm, ...]
    problem: Callable[[Config], str | None] = lambda config: None


# By `quant_method`.
METHODS: Mapping[str, Method] = {
    "gptq": Method((GPTQ,), _gptq_problem),
    "awq": Method((AWQ,), _awq_problem),
    "fp8": Method((FP8,), _fp8_problem),
    "fbgemm_fp8": Method((FP8,)),
    "mxfp4": Method((MXFP4,)),
    "bitsandbytes": Method((BNB_4BIT, BNB_8BIT)),
    "modelopt": Method((MODELOPT_NVFP4, COMPRESSED_BYTES)),
    "compressed-tensors": Method((COMPRESSED_INTEGERS, COMPRESSED_FP4, COMPRESSED_BYTES), _compressed_problem),
}


# Methods of AutoRound, by `packing_format`.
_AUTO_ROUND = dict.fromkeys(("auto_round", "auto_round:auto_gptq", "auto_round:gptqmodel"), "gptq")
_AUTO_ROUND["auto_round:auto_awq"] = "awq"


def _method_name(config: Config) -> str:
    """Return the key in `METHODS` of the method that a config describes; another word if it is not known."""
    name = str(config.get("quant_method"))
    return _AUTO_ROUND.get(str(config.get("packing_format")), name) if name == "auto-round" else name


def check_method(config: Config, where: Path | str) -> None:
    """Raise JinguError if a model's `quantization_config` describes a form that is not read; it is named."""
    method = _method_name(config)
    problem = f"quant_method {str(config.get('quant_method'))!r}"
    if method == "auto-round":
        problem += f" with packing_format {config.get('packing_format')!r}"
    if method in METHODS:
        detail = METHODS[method].problem(config)
        if detail is None:
            return
        problem += f" with {detail}"
    names = ", ".join((*METHODS, "auto-round"))
    raise JinguError(
        f"the weights are quantized in a form that jingu does not read: {problem}.",
        where=where,
        fix=f"Use a release of the model in floating point, or in one of the forms {names}.",
    )


def find_forms(config: Config, names: Iterable[str], where: Path) -> tuple[PackedForm, ...]:
    """Return the forms that a model's matrices can have.

    Args:
        config: the model's `quantization_config`; empty: there is none.
        names: names of the stored tensors.

    Raises:
        JinguError: the config describes no form, and some tensors are parts of quantized matrices.
    """
    if config:
        return METHODS[_method_name(config)].forms
    suffixes = tuple(marks(form for method in METHODS.values() for form in method.forms))
    part = next((name for name in names if name.endswith(suffixes)), None)
    if part is not None:
        what = f"{part} is a part of a quantized matrix, and config.json has no quantization_config that describes it."
        raise JinguError(what, where=where, fix="Fetch the config.json of this release of the model.")
    return ()
