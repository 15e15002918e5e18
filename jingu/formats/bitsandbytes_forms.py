"""The forms in which bitsandbytes stores quantized matrices (Dettmers et al., 2022 and 2023).

They are nf4 and fp4, whose scales may be quantized again, and int8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from jingu.formats.dequantize import Codes, code_table, look_up, signed_bytes
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
    dtype_name,
    expect,
    matrix_shape,
)

_STATE = ".quant_state.bitsandbytes__"


def _quant_state(read: ReadPart, suffix: str) -> dict[str, Any]:
    """Return the values that bitsandbytes stores as JSON in a tensor of bytes. Raises ValueError."""
    try:
        state = json.loads(bytes(read(suffix).tolist()))
        values = {key: state[key] for key in ("blocksize", "shape", "dtype")}
        sizes = [values["blocksize"], *values["shape"]]
        if "nested_offset" in state:
            values |= {"nested_blocksize": state["nested_blocksize"], "nested_offset": float(state["nested_offset"])}
            sizes.append(values["nested_blocksize"])
        if not all(isinstance(size, int) and size > 0 for size in sizes) or sizes[0] % 2:
            raise ValueError(f"its sizes are {sizes}")
        if values["dtype"] not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"its dtype is {values['dtype']!r}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{suffix.strip('.')} is damaged ({error})") from None
    return values


def _state_suffix(parts: Mapping[str, Any]) -> str:
    suffix = next((suffix for suffix in parts if suffix.startswith(_STATE)), None)
    if suffix is None:
        raise ValueError(f"its tensor {_STATE}nf4 is missing")
    return suffix


def _bnb4_shape(parts: Locations, read: ReadPart, _config: Config) -> torch.Size:
    state = _quant_state(read, _state_suffix(parts))
    shape = torch.Size(state["shape"])
    num_scales = -(-shape.numel() // state["blocksize"])
    if parts[""].bytes != -(-shape.numel() // 2):
        raise ValueError(f"it has {parts[''].bytes} bytes for a matrix {list(shape)}")
    expect(parts, ".quant_map", (16,))
    expect(parts, ".absmax", (num_scales,))
    if ("nested_offset" in state) != (parts[".absmax"].dtype == torch.uint8):
        raise ValueError(f"absmax is stored as {dtype_name(parts['.absmax'])}")
    if "nested_offset" in state:
        if ".nested_absmax" not in parts or ".nested_quant_map" not in parts:
            raise ValueError("nested_absmax or nested_quant_map is missing")
        expect(parts, ".nested_absmax", (-(-num_scales // state["nested_blocksize"]),))
        expect(parts, ".nested_quant_map", (256,))
    return shape


def _codes_of_bnb4(parts: Parts, _config: Config) -> Codes:
    state = _quant_state(parts.__getitem__, _state_suffix(parts))
    shape = torch.Size(state["shape"])
    absmax = parts[".absmax"]
    if "nested_offset" in state:
        size = state["nested_blocksize"]
        nested = parts[".nested_absmax"].float().repeat_interleave(size)[: len(absmax)]
        absmax = parts[".nested_quant_map"].float()[absmax.int()] * nested + state["nested_offset"]
    # The blocks follow each other through all rows. Each one is a row of codes; the last one may be cut.
    size = state["blocksize"]
    code_bytes = parts[""].view(torch.uint8).flatten()
    if len(code_bytes) % (size // 2):
        code_bytes = torch.cat([code_bytes, code_bytes.new_zeros(-len(code_bytes) % (size // 2))])
    read_codes = look_up(code_bytes.view(-1, size // 2), code_table(parts[".quant_map"], low_first=False))
    return Codes(shape, getattr(torch, state["dtype"]), read_codes, absmax.unsqueeze(1), size, columns=size)


def _bnb8_shape(parts: Locations, _read: ReadPart, _config: Config) -> torch.Size:
    shape = matrix_shape(parts["weight"], "weight")
    expect(parts, "SCB", (shape[0],), (shape[0], 1))
    return shape


def _codes_of_bnb8(parts: Parts, _config: Config) -> Codes:
    if "weight_format" in parts and int(parts["weight_format"].max()):
        raise ValueError(f"weight_format is {int(parts['weight_format'].max())}, and only rows (0) are known")
    weight_OI = parts["weight"]
    scale = parts["SCB"].reshape(-1, 1)
    # The library multiplies by the reciprocal of 127 last.
    read_codes, factor = signed_bytes(weight_OI), 7.874015748698502e-3
    return Codes(weight_OI.shape, torch.float32, read_codes, scale, weight_OI.shape[1], factor=factor)


_NESTED = {".nested_absmax": FP32, ".nested_quant_map": FP32}
BNB_4BIT = PackedForm(
    "bitsandbytes' 4 bits",
    {"": (*BYTES, *FLOATS), ".absmax": (torch.float32, torch.uint8), ".quant_map": FP32},
    {f"{_STATE}nf4": BYTES, f"{_STATE}fp4": BYTES, **_NESTED},
    _bnb4_shape,
    _codes_of_bnb4,
)
BNB_8BIT = PackedForm(
    "bitsandbytes' int8",
    {"weight": INT8, "SCB": FP32},
    {"weight_format": BYTES},
    _bnb8_shape,
    _codes_of_bnb8,
    "weight",
)
