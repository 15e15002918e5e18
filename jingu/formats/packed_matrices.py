"""Quantized matrices that are stored as several tensors: their parts are found by name, checked, and read as one.

`jingu/formats/packed_forms.py` has the forms that they can have. The names of the tensors of a matrix begin with a
common stem, which is followed by the suffixes in `PackedForm.parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jingu.checkpoint.mapped_files import map_tensor
from jingu.errors import JinguError
from jingu.formats.dequantize import Codes, dequantize
from jingu.formats.safetensors import TensorLocation
from jingu.runtime.device import single_thread

Config = Mapping[str, Any]
Dtypes = tuple[torch.dtype, ...]
Parts = Mapping[str, Tensor]
Locations = Mapping[str, TensorLocation]
# A stored tensor: the file, its key there, and its location.
Place = tuple[Path, str, TensorLocation]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP32 = (torch.float32,)
BYTES = (torch.uint8,)
INT8 = (torch.int8,)
# Suffixes of scales of activations and of the KV cache, which jingu does not need.
_ACTIVATION_SCALES = (
    *(".input_scale", ".input_scale_ub", ".input_global_scale", ".activation_scale", "_proj_activation_scale"),
    *(".k_scale", ".v_scale"),
)
# Suffixes of the parts by which scales are divided.
_DIVISORS = ("weight_global_scale",)
_GET_AGAIN = "Get the files again."
# Another name of a scale, and the usual one.
_RENAMED = (".qscale_weight", ".weight_scale_inv")
# The dtype of scales that are powers of two. Other readers refuse it.
_POWERS = "F8_E8M0"
# `PackedForm.shape` gets this function, which reads a part by its suffix.
ReadPart = Callable[[str], Tensor]


@dataclass(frozen=True)
class PackedForm:
    """A form of matrices.

    Attributes:
        name: for messages.
        parts: the dtypes of the tensors of a matrix, by suffix. The first one holds the codes. If its suffix is also
            that of plain matrices, its dtype tells them apart.
        optional: those of the tensors that may be missing.
        shape: checks the places of the tensors and returns the shape of the matrix. Raises ValueError.
        codes: returns the codes with their scales. Raises ValueError.
        suffix: what follows the stem in the name of the matrix.
        is_transposed: whether matrices of all experts are `[E, I, O]`.
        blocks: returns rows [..., O, bytes] as GGUF's type MXFP4 stores them; None: no type of GGUF stores the codes.
            Raises ValueError.
    """

    name: str
    parts: Mapping[str, Dtypes]
    optional: Mapping[str, Dtypes]
    shape: Callable[[Locations, ReadPart, Config], torch.Size]
    codes: Callable[[Parts, Config], Codes]
    suffix: str = ""
    is_transposed: bool = False
    blocks: Callable[[Parts], Tensor] | None = None

    @property
    def dtypes(self) -> dict[str, Dtypes]:
        """The dtypes of all tensors by suffix."""
        return {**self.parts, **self.optional}

    @property
    def first(self) -> str:
        """The suffix of the tensor that holds the codes."""
        return next(iter(self.parts))


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in a form. It can be used like the location of a tensor.

    Attributes:
        parts: the stored tensors by suffix.
        config: the model's `quantization_config`.
        is_transposed: whether the parts have a row for each column.
        rows: the rows of the matrix that are meant; None: all.
        tensors: the parts in memory, mapped from the files or copied to a device; None: they are mapped in each read.
    """

    form: PackedForm
    parts: Mapping[str, Place]
    config: Config
    shape: torch.Size
    is_transposed: bool = False
    rows: slice | None = None
    dtype: str = "quantized"
    tensors: Parts | None = None

    @property
    def bytes(self) -> int:
        return sum(location.bytes for _, _, location in self.parts.values())

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The parts in memory."""
        return tuple((self.tensors or {}).values())

    def read(self) -> Tensor:
        """Return the dequantized matrix. Raises JinguError if a part holds what the form does not know."""
        parts = self.tensors or {suffix: _read_place(place) for suffix, place in self.parts.items()}
        device = parts[self.form.first].device
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        rows = None if self.is_transposed else self.rows
        with single_thread() if threads > 1 else nullcontext():
            if self.tensors is None:
                self._check(parts)
            try:
                matrix = dequantize(self.form.codes(parts, self.config), threads, rows, device)
            except ValueError as error:
                raise _wrong_part(self.form, self.parts[self.form.first], str(error)) from None
        if self.is_transposed:
            matrix = matrix.transpose(-2, -1)
            return matrix if self.rows is None else matrix[self.rows]
        return matrix

    def read_blocks(self) -> Tensor:
        """Return the matrix with the bytes of GGUF's blocks (`PackedForm.blocks`) in place of its columns."""
        assert self.form.blocks is not None
        parts = {suffix: _read_place(place) for suffix, place in self.parts.items()}
        try:
            blocks = self.form.blocks(parts)
        except ValueError as error:
            raise _wrong_part(self.form, self.parts[self.form.first], str(error)) from None
        blocks = blocks if self.rows is None else blocks[..., self.rows, :]
        return blocks.transpose(-2, -1) if self.is_transposed else blocks

    def to(self, device: torch.device, files: Callable[[Path], Tensor]) -> PackedMatrix:
        """Return the matrix with its parts in memory. On CPU they stay mapped from the files.

        Args:
            files: returns the bytes of a file. One mapping for each file rather than for each tensor, since a process
                can have only some ten thousands.
        """
        tensors = {}
        for suffix, (path, _, location) in self.parts.items():
            raw = files(path)[location.begin : location.begin + location.bytes]
            assert isinstance(location.dtype, torch.dtype)
            raw = raw.clone() if location.begin % location.dtype.itemsize else raw
            tensors[suffix] = raw.view(location.dtype).view(location.shape).to(device)
        with single_thread():
            self._check(tensors)
        return replace(self, tensors=tensors)

    def _check(self, parts: Parts) -> None:
        """Raise JinguError if a scale is not finite, or a divisor is zero."""
        for suffix, part in parts.items():
            if suffix == self.form.first or not part.dtype.is_floating_point or part.dtype == torch.float8_e8m0fnu:
                continue
            numbers = part.float() if part.dtype.itemsize == 1 else part
            is_good = numbers.isfinite()
            if suffix in _DIVISORS:
                is_good &= numbers != 0
            if not bool(is_good.all()):
                problem = f"{self.parts[suffix][1]} has the number {float(numbers[~is_good].flatten()[0]):g}"
                raise _wrong_part(self.form, self.parts[self.form.first], problem)

    def narrow(self, rows: slice) -> PackedMatrix:
        """Return some rows of a matrix [O, I]."""
        return replace(self, rows=rows, shape=torch.Size((rows.stop - rows.start, *self.shape[1:])))

    def part(self, expert: int, number: int = 0, count: int = 1) -> PackedMatrix:
        """Return one of `count` equal ranges of rows of an expert's matrix, of a matrix [E, O, I]."""
        parts, tensors = dict(self.parts), dict(self.tensors or {})
        for suffix, (path, key, location) in self.parts.items():
            # One scale for all experts has no dim for them.
            if location.shape and location.shape[0] == self.shape[0]:
                parts[suffix] = (path, key, location.part(expert))
                if tensors:
                    tensors[suffix] = tensors[suffix][expert]
        size = self.shape[1] // count
        rows = None if count == 1 else slice(number * size, (number + 1) * size)
        return replace(self, parts=parts, shape=torch.Size((size, *self.shape[2:])), rows=rows, tensors=tensors or None)


# A tensor or a quantized matrix: the file, its name, and its location.
Stored = tuple[Path, str, TensorLocation | PackedMatrix]


def _read_place(place: Place) -> Tensor:
    path, _, location = place
    assert isinstance(location.dtype, torch.dtype)
    return map_tensor(path, location.begin, location.shape, location.dtype)


def _wrong_part(form: PackedForm, place: Place, problem: str) -> JinguError:
    return JinguError(f"{place[1]} is no matrix in {form.name}: {problem}.", where=place[0], fix=_GET_AGAIN)


# Finding matrices


def join_packed(tensors: Mapping[str, Place], forms: Sequence[PackedForm], config: Config) -> dict[str, Stored]:
    """Return the tensors with each quantized matrix as one, and without scales of activations.

    Args:
        forms: the forms that matrices can have.
        config: the model's `quantization_config`.

    Raises:
        JinguError: a part of a matrix is missing, or has a dtype or shape that its form does not have.
    """
    if not forms:
        return dict(tensors)
    plain = {}
    for key, (path, name, location) in tensors.items():
        if not key.endswith(_ACTIVATION_SCALES):
            dtype = torch.float8_e8m0fnu if location.dtype == _POWERS else location.dtype
            plain[key.replace(*_RENAMED)] = (path, name, replace(location, dtype=dtype))
    matrices: dict[str, Stored] = {}
    for stem in dict.fromkeys(stem for key in plain if (stem := _find_stem(key, plain, forms)) is not None):
        form = _choose_form(stem, plain, forms)
        parts = {suffix: plain.pop(stem + suffix) for suffix in form.dtypes if stem + suffix in plain}
        name = stem + form.suffix
        if name in plain or name in matrices:
            what = f"{parts[form.first][1]} is a matrix in {form.name}, and another tensor is the same matrix {name}."
            raise JinguError(what, where=parts[form.first][0], fix="Delete one of them, or get the files again.")
        shape = _check_parts(form, stem, parts, config)
        matrix = PackedMatrix(form, parts, config, shape, form.is_transposed and len(shape) == 3)
        matrices[name] = (parts[form.first][0], name, matrix)
    return plain | matrices


def marks(forms: Iterable[PackedForm]) -> set[str]:
    """Return the suffixes that only parts of quantized matrices have."""
    return {suffix for form in forms for suffix in form.dtypes if suffix not in ("", "weight", "_scale")}


def _find_stem(key: str, tensors: Mapping[str, Place], forms: Sequence[PackedForm]) -> str | None:
    """Return the stem of a tensor if it is a part of a quantized matrix."""
    for suffix in (suffix for form in forms for suffix in form.dtypes):
        stem = key.removesuffix(suffix)
        if key.endswith(suffix) and (suffix in marks(forms) or (suffix == "_scale" and stem in tensors)):
            return stem
    # What remains is named like a plain matrix.
    dtype = tensors[key][2].dtype
    for form in forms:
        if key.endswith(form.first) and dtype in form.parts[form.first] and dtype not in FLOATS:
            return key.removesuffix(form.first)
    return None


def _choose_form(stem: str, tensors: Mapping[str, Place], forms: Sequence[PackedForm]) -> PackedForm:
    """Return the form of the tensors with a stem. Raises JinguError if they have none."""
    present = [form for form in forms if stem + form.first in tensors]
    for form in present:
        if tensors[stem + form.first][2].dtype in form.parts[form.first]:
            return form
    if present:
        place = tensors[stem + present[0].first]
        raise _wrong_part(present[0], place, f"it is stored as {dtype_name(place[2])}")
    part = next(stem + suffix for form in forms for suffix in form.dtypes if stem + suffix in tensors)
    codes_names = " or ".join(dict.fromkeys(stem + form.first for form in forms))
    what = f"{part} is a part of a quantized matrix, whose tensor {codes_names} is missing."
    raise JinguError(what, where=tensors[part][0], fix=_GET_AGAIN)


def dtype_name(location: TensorLocation) -> str:
    """Return the name of a dtype for messages."""
    return str(location.dtype).removeprefix("torch.")


def _check_parts(form: PackedForm, stem: str, parts: Mapping[str, Place], config: Config) -> torch.Size:
    """Return the shape of a matrix. Raises JinguError if its parts do not fit together."""
    for suffix, dtypes in form.dtypes.items():
        if suffix in parts and parts[suffix][2].dtype not in dtypes:
            raise _wrong_part(form, parts[form.first], f"{stem}{suffix} is stored as {dtype_name(parts[suffix][2])}")
        if suffix not in parts and suffix in form.parts:
            path, key, _ = parts[form.first]
            what = f"{key} is a matrix in {form.name}, and its tensor {stem}{suffix} is missing."
            raise JinguError(what, where=path, fix=_GET_AGAIN)
    locations = {suffix: location for suffix, (_, _, location) in parts.items()}
    try:
        return form.shape(locations, lambda suffix: _read_place(parts[suffix]), config)
    except ValueError as error:
        raise _wrong_part(form, parts[form.first], str(error)) from None


def expect(parts: Locations, suffix: str, *shapes: tuple[int, ...]) -> None:
    """Raise ValueError if a part has none of these shapes."""
    if suffix in parts and tuple(parts[suffix].shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{suffix.strip('._') or 'weight'} has the shape {list(parts[suffix].shape)}, not {allowed}")


def matrix_shape(location: TensorLocation, name: str, dims: tuple[int, ...] = (2,)) -> torch.Size:
    """Return the shape of a part, which has so many dims. Raises ValueError."""
    if len(location.shape) not in dims or 0 in location.shape:
        raise ValueError(f"{name} has the shape {list(location.shape)}")
    return location.shape
