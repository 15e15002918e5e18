"""Writing a model as a Hugging Face folder: weights in safetensors, tensor by tensor, and what comes with them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jingu.checkpoint.files import write_all
from jingu.checkpoint.hub import INDEX, SPECIAL_IDS, WEIGHTS, write_json
from jingu.checkpoint.manifest import safetensors_header
from jingu.checkpoint.shards import DTYPE_NAMES, memory_of
from jingu.checkpoint.stream import ELEMENTS
from jingu.errors import JinguError
from jingu.model.decoder import parameter_shapes
from jingu.model.families import FAMILIES
from jingu.model.families.names import SAME, Entry, entries
from jingu.model.spec import ModelSpec
from jingu.runtime.device import one_thread
from jingu.runtime.files import new_folder
from jingu.text.tokenizer import Tokenizer

SHARD_BYTES = 5_000_000_000
"""Largest weight file of an export, but for one with a single larger tensor."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def export_hf(
    spec: ModelSpec,
    read: Callable[[str], Tensor],
    tokenizer_folder: Path,
    to: Path,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    *,
    special_ids: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    check: bool = False,
) -> None:
    """Write a Hugging Face folder that transformers loads as it is; it appears whole or not at all.

    Tensors pass through one at a time.

    Args:
        read: a parameter by jingu's name, whole (`OpenModel.read`, or a dictionary's `__getitem__`).
        tokenizer_folder: its files are copied.
        to: a new or empty folder.
        dtype: of the weights written.
        shard_bytes: largest weight file.
        special_ids: bos_token_id and the like; None or empty: the tokenizer's end token for all of them.
        generation: generation_config.json; None: the special ids.
        check: refuse weights that hold NaN or infinity in `dtype`.

    Raises:
        JinguError: the target holds something, the disk is full, the model has a shape that its Hugging Face
            architecture has not, or the check fails.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        kind = "an earlier export" if (to / "config.json").is_file() else "something"
        raise JinguError(
            f"there is {kind} here already, and it is not overwritten.",
            where=to,
            fix="Delete it first, or choose another folder.",
        )
    family = FAMILIES[spec.family]
    if not special_ids:
        tokenizer = Tokenizer.load(tokenizer_folder)
        special_ids = dict.fromkeys(SPECIAL_IDS[:3], tokenizer.end_id)
        if spec.encoder_layers is not None:
            special_ids |= {"pad_token_id": tokenizer.start_id, "decoder_start_token_id": tokenizer.start_id}
    config = {
        "architectures": [family.architectures[0]],
        **family.hf_config(spec),
        **special_ids,
        # Releases of transformers before 5 know the first name, later ones the second.
        "torch_dtype": str(dtype).removeprefix("torch."),
        "dtype": str(dtype).removeprefix("torch."),
    }
    with new_folder(to) as folder:
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", special_ids if generation is None else generation)
        for name in _TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, folder / name)
        if not (folder / "tokenizer.json").is_file():
            Tokenizer.load(tokenizer_folder).save(folder)
        with one_thread():  # casts and checks keep up with the disk
            broken = _write_weights(folder, spec, read, dtype, shard_bytes, check)
        if broken:
            raise JinguError(
                f"there is NaN or infinity in {len(broken)} of the weights, as {config['dtype']}: {', '.join(broken)}.",
                where=to,
                fix="Nothing was written. Take an earlier checkpoint, or another dtype where the weights are too large "
                "for this one.",
            )


def _write_weights(
    folder: Path,
    spec: ModelSpec,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    shard_bytes: int,
    check: bool,
) -> list[str]:
    """The weight files, and their index where there are several; the names of tensors that fail the check."""
    mapped = entries(FAMILIES[spec.family].rules, spec, parameter_shapes(spec))
    theirs = {entry.theirs: entry.shape for entry in mapped}
    sizes = [prod(shape) * dtype.itemsize for shape in theirs.values()]
    shards = _shards(mapped, sizes, shard_bytes)
    read = _once(read)
    table: dict[str, str] = {}
    broken: list[str] = []
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = safetensors_header((entry.theirs, DTYPE_NAMES[dtype], theirs[entry.theirs]) for entry in shard)
        with (folder / name).open("xb", buffering=0) as file:
            write_all(file, memoryview(header))
            for entry in shard:
                finite, elements = True, 0
                for piece in _pieces(_their_parts(entry, read), dtype):
                    finite = finite and not (check and _has_nan_or_infinity(piece))
                    elements += piece.numel()
                    write_all(file, memory_of(piece))
                if elements != prod(theirs[entry.theirs]):
                    raise ValueError(f"{entry.theirs} has {elements} elements")
                broken += [] if finite else [entry.theirs]
        table |= dict.fromkeys((entry.theirs for entry in shard), name)
    if len(shards) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": table})
    return broken


def _pieces(parts: Iterable[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor in pieces that are contiguous in main memory and of the dtype: cast or rearranged, a few rows a time."""
    for part in parts:
        for piece in part.split(max(1, ELEMENTS * len(part) // max(1, part.numel()))):
            yield piece.to("cpu", dtype).contiguous()


def _has_nan_or_infinity(tensor: Tensor) -> bool:
    """Both show in the extremes."""
    return bool(tensor.numel()) and not all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _once(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """`read`, which holds on to the last tensor: theirs of experts follow each other, each a slice of ours."""
    held: dict[str, Tensor] = {}

    def read_once(name: str) -> Tensor:
        if name not in held:
            held.clear()
            held[name] = read(name)
        return held[name]

    return read_once


def _their_parts(entry: Entry, read: Callable[[str], Tensor]) -> Iterator[Tensor]:
    """Their tensor, in parts along its first dim where it is ours, stacked."""
    if entry.transform is SAME and entry.expert is None:
        yield from (read(name).detach() for name in entry.ours)
    else:
        yield entry.to_theirs([read(name).detach() for name in entry.ours])


def _shards(mapped: Sequence[Entry], sizes: Sequence[int], shard_bytes: int) -> list[list[Entry]]:
    """Cut the list into runs of at most `shard_bytes`."""
    shards: list[list[Entry]] = [[]]
    held = 0
    for entry, size in zip(mapped, sizes, strict=True):
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += size
    return shards
