"""`jingu checkpoint list | verify | diff | prune`, and `jingu import | export`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jingu.checkpoint.export import export_hf
from jingu.checkpoint.files import read_state, remove
from jingu.checkpoint.files import verify as problems_of
from jingu.checkpoint.hub import OpenModel, checkpoints_in, config_of, open_model
from jingu.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest
from jingu.checkpoint.remote import Place, place
from jingu.checkpoint.resume import (
    Keep,
    all_steps,
    clear_leftovers,
    copies_of,
    find_latest,
    newest,
    step_folder,
)
from jingu.checkpoint.resume import prune as prune_steps
from jingu.checkpoint.store import Reader
from jingu.errors import JinguError
from jingu.model.families import FAMILIES
from jingu.runtime.device import PRECISIONS
from jingu.runtime.files import locked

_ELEMENTS = 1 << 20


def convert(model: Path, to: Path, dtype: str = "auto", check: bool = False) -> None:
    """Write any model (a run, a step of one, a Hugging Face folder, a GGUF file) as a Hugging Face folder.

    Args:
        dtype: of the weights; auto: that most of them are stored in (fp32 where they are quantised).
        check: refuse weights that hold NaN or infinity.

    Raises:
        JinguError: the model cannot be read, it has no tokenizer, `to` holds something, or the check fails.
    """
    write_model(open_model(model), to, dtype, check)


def write_model(opened: OpenModel, to: Path, dtype: str, check: bool) -> None:
    """Write an open model as a Hugging Face folder, and say so. Raises as `convert` does."""
    if opened.spec.adapter is not None:
        raise JinguError(
            "the run trained a prompt, which no weights can stand for.",
            where=opened.where,
            fix="`jingu tune export` writes it as peft loads it.",
        )
    kind = PRECISIONS.get(dtype, opened.dtype)
    export_hf(
        opened.spec,
        opened.read,
        opened.tokenizer(),
        to,
        kind,
        special_ids=opened.special_ids,
        generation=opened.generation,
        check=check,
    )
    replaces_code = FAMILIES[opened.spec.family].replaces_code
    loader = "the code that its makers publish" if replaces_code else "transformers"
    print(f"Wrote {to} in {str(kind).removeprefix('torch.')}; {loader} loads it as it is.")


def list_checkpoints(path: Place) -> None:
    """Print the checkpoints of a run, and the copies of them: step, size, what is in it, complete or not."""
    config, checkpoints = config_of(path) if isinstance(path, Path) else None, _checkpoints_of(path)
    copies = None if config is None else copies_of(config)
    rows = _rows(checkpoints)
    if not rows and copies is None:
        raise _nothing_in(path)
    print_table(_HEADER, rows, right=(1, 2, 3))
    if copies is not None:
        print(f"\nCopies at {copies}:")
        print_table(_HEADER, _rows(place(copies)), right=(1, 2, 3))


_HEADER = ("checkpoint", "size", "tensors", "ranks", "state")


def _rows(checkpoints: Place) -> list[tuple[str, ...]]:
    unfinished = sorted(checkpoints.glob(".step-*.partial")) if isinstance(checkpoints, Path) else ()
    words = "unfinished: being written, or left by a run that was killed"
    rows = [(folder, _row(folder)) for folder in (step_folder(checkpoints, step) for step in all_steps(checkpoints))]
    rows += [(path, (path.name, size_in_words(sum(_sizes(path).values())), "", "", words)) for path in unfinished]
    # What a run in training has deleted or completed meanwhile is left out.
    return [row for folder, row in rows if row[-1] == "complete" or folder.is_dir()]


def _row(folder: Place) -> tuple[str, ...]:
    sizes = _sizes(folder)
    size = size_in_words(sum(sizes.values()))
    try:
        manifest = read_manifest(folder / MANIFEST)
    except CheckpointError as error:
        return folder.name, size, "", "", f"not usable: {error.what}"
    short = [name for name, record in manifest.files.items() if sizes.get(name) != record.bytes]
    state = f"damaged: {', '.join(short)} missing or cut short" if short else "complete"
    return folder.name, size, str(len(manifest.tensors)), str(manifest.ranks), state


def verify(path: Place) -> None:
    """Read a checkpoint, or all those of a run, to the last byte, and say what is wrong with it.

    Raises:
        JinguError: something is.
    """
    checkpoints = path.parent if _is_step(path) else _checkpoints_of(path)
    folders = [path] if _is_step(path) else [step_folder(checkpoints, step) for step in all_steps(checkpoints)]
    if not folders:
        raise _nothing_in(path)
    damaged = []
    for folder in folders:
        problems = problems_of(folder)
        if problems and not _is_step(path) and not folder.is_dir():
            print(f"{folder.name}: deleted meanwhile")
        elif problems:
            damaged.append(folder)
            print(f"{folder.name}: damaged")
            for problem in problems:
                print(f"  {problem}")
        else:
            manifest = read_manifest(folder / MANIFEST)
            size = size_in_words(sum(record.bytes for record in manifest.files.values()))
            tensors, files = len(manifest.tensors), len(manifest.files) + 1
            print(f"{folder.name}: good ({tensors} tensors in {files} files, {size}; every byte matches its checksum)")
    if damaged:
        good = find_latest(checkpoints).step
        raise JinguError(
            f"{len(damaged)} of {len(folders)} checkpoints {'is' if len(damaged) == 1 else 'are'} damaged: "
            f"{', '.join(folder.name for folder in damaged)}.",
            where=path,
            fix="No other checkpoint here is good: restore one from a copy, or start the run anew."
            if good is None
            else f"The newest good one is step {good}, and training goes on from there; delete the damaged one.",
        )


def prune(run: Place, keep: int = 1, keep_every: int = 0, keep_best: int = 0, damaged: bool = False) -> None:
    """Delete the checkpoints of a run that need not stay; what verifies last always does.

    Raises:
        JinguError: the run has no good checkpoint, and nothing is deleted; or it is being trained.
    """
    checkpoints = _checkpoints_of(run)
    folder = checkpoints.parent if isinstance(checkpoints, Path) else run
    busy = "a process is training this run now.", "Wait for it, or stop it."
    with locked(folder, *busy) if isinstance(folder, Path) else nullcontext():
        found = find_latest(checkpoints)
        if found.step is None:
            raise JinguError(
                "no checkpoint here is good, and nothing was deleted.", where=run, fix="See `jingu checkpoint verify`."
            )
        before, stay = _bytes_below(checkpoints), Keep(keep, keep_every, keep_best)
        deleted = [step_folder(checkpoints, step).name for step in prune_steps(checkpoints, stay, found.step)]
        if isinstance(checkpoints, Path):
            clear_leftovers(checkpoints)
        for folder, reason in found.passed_over:
            if damaged:
                remove(folder)
                deleted.append(folder.name)
            else:
                print(f"{folder.name} stays, though it is of no use ({reason}); --damaged deletes such, too.")
    room = size_in_words(before - _bytes_below(checkpoints))
    print(f"Deleted {', '.join(deleted)}: {room} of room." if deleted else "Nothing was to be deleted.")


def _bytes_below(checkpoints: Place) -> int:
    return sum(sum(_sizes(folder).values()) for folder in checkpoints.iterdir() if folder.is_dir())


@dataclass(frozen=True)
class Difference:
    """How a tensor differs between two checkpoints."""

    largest: float
    """Largest absolute difference of two elements."""
    norm_a: float
    norm_b: float


def diff(first: Place, second: Place) -> None:
    """Print what differs between two checkpoints, tensor by tensor; a run stands for its newest checkpoint."""
    folder_a, folder_b = _locate(first), _locate(second)
    reader_a, reader_b = Reader(folder_a), Reader(folder_b)
    names_a, names_b = set(reader_a.manifest.tensors), set(reader_b.manifest.tensors)
    rows: list[tuple[str, ...]] = []
    equal = 0
    for name in sorted(names_a & names_b):
        tensor_a, tensor_b = reader_a.read(name), reader_b.read(name)
        if (tensor_a.shape, tensor_a.dtype) != (tensor_b.shape, tensor_b.dtype):
            rows.append((name, f"{_kind(tensor_a)} → {_kind(tensor_b)}", "", "", ""))
        elif _same_bytes(tensor_a, tensor_b):
            equal += 1
        else:
            found = difference(tensor_a, tensor_b)
            figures = (f"{value:.6g}" for value in (found.largest, found.norm_a, found.norm_b))
            rows.append((name, _kind(tensor_a), *figures))
    if rows:
        print_table(("tensor", "kind", "largest difference", "norm in first", "norm in second"), rows, right=(2, 3, 4))
        print()
    for which, only in (("the first", names_a - names_b), ("the second", names_b - names_a)):
        for name in sorted(only):
            print(f"only in {which}: {name}")
    state_a, state_b = read_state(folder_a), read_state(folder_b)
    for key in sorted(state_a.keys() | state_b.keys()):
        if state_a.get(key) != state_b.get(key):
            print(f"state {key}: {_short(state_a.get(key))} → {_short(state_b.get(key))}")
    print(f"{equal} tensors are equal to the last bit, {len(rows)} differ.")


def difference(a: Tensor, b: Tensor) -> Difference:
    """Largest difference and Euclidean norms, in fp64, of two tensors of one shape and dtype."""
    largest = squares_a = squares_b = 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    for part_a, part_b in zip(a.reshape(-1).split(_ELEMENTS), b.reshape(-1).split(_ELEMENTS), strict=True):
        wide_a, wide_b = part_a.to(wide), part_b.to(wide)
        part_largest = float((wide_a - wide_b).abs().max()) if len(part_a) else 0.0
        # max() of Python forgets a NaN; a NaN is what the reader must see.
        largest = part_largest if part_largest != part_largest else max(part_largest, largest)
        squares_a += float(wide_a.abs().square().sum())
        squares_b += float(wide_b.abs().square().sum())
        if largest != largest:
            break
    return Difference(largest, squares_a**0.5, squares_b**0.5)


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# Where things are


def _is_step(path: Place) -> bool:
    return path.name.startswith("step-") or (path / MANIFEST).exists()


def _checkpoints_of(path: Place) -> Place:
    """The folder of checkpoints, given a run or that folder itself."""
    if not path.is_dir():
        raise JinguError("there is no such folder.", where=path, fix="Give a run, such as runs/NAME, or a checkpoint.")
    inside = checkpoints_in(path) if isinstance(path, Path) else path / "checkpoints"
    return inside if inside.is_dir() else path


def _nothing_in(path: Place) -> JinguError:
    return JinguError("there is no checkpoint here.", where=path, fix="`jingu train` writes the first one.")


def _locate(path: Place) -> Place:
    """A checkpoint's folder, given it or a run (its newest complete one)."""
    return path if _is_step(path) else newest(_checkpoints_of(path), path)


# Printing


def _sizes(folder: Place) -> dict[str, int]:
    """Bytes of the files in a folder, by name; without those that a run in training deletes meanwhile."""
    sizes = {}
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                if path.is_file():
                    sizes[path.name] = path.stat().st_size
    return sizes


def size_in_words(count: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]) -> None:
    """Print columns under a header; those numbered in `right` end at the same place."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
