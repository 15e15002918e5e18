"""The corpus: files, folders and patterns read as documents, in an order and in units fixed by the input alone."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jingu.config.sections.data import DataSettings, SourceSettings
from jingu.errors import JinguError, either
from jingu.runtime.files import unreadable
from jingu.text.readers import Span, Tally, read_documents
from jingu.text.storage import CorpusFile, filesystem, is_address, plain_name

UNIT_BYTES = 1 << 20
"""A unit of work holds at least about this many bytes: several small files, or a piece of a large .jsonl."""
MOST_UNITS = 4096
"""Units of a large corpus, but for those of files that cannot be divided."""
SAMPLE_BYTES = 256 << 10
"""Pieces in which a corpus is sampled."""


def checked_corpora(data: DataSettings) -> list[SourceSettings]:
    """`data.corpora`, where they do not contradict each other."""
    plain = DataSettings()
    if data.sources and (data.input != plain.input or data.path != plain.path):
        raise JinguError(
            "data.sources is there, and so is data.input or data.path.",
            where="data",
            fix="Make the one corpus another of data.sources.",
        )
    paths = [source.path for source in data.corpora]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise JinguError(f"two sources have the same path, {twice}.", where="data.sources")
    return data.corpora


def find_files(settings: DataSettings) -> list[CorpusFile]:
    """Every file of `data.input`, each once: inputs in the given order, a folder's or pattern's files sorted.

    A folder is read recursively and gives the files with one of `data.suffixes`, compressed ones too; where
    `datasets` saved it, its .arrow files. A file named directly or by a pattern (`*`, `?`, `[…]`, `**`) is taken
    whatever its ending. An address (such as s3://…) is a file or a pattern.
    """
    given = [source.input for source in settings.corpora]
    inputs = [name for each in given for name in ([each] if isinstance(each, str) else each)]
    if not inputs:
        fix = "Name text files, .jsonl files, folders or patterns."
        raise JinguError("no corpus is given.", where="data.input", fix=fix)
    files: list[CorpusFile] = []
    for path in dict.fromkeys(path for name in inputs for path in _expand(name, settings.suffixes)):
        try:
            size = filesystem(path)[0].size(path) if is_address(path) else Path(path).stat().st_size
        except OSError as error:
            raise unreadable(path, error) from error
        file = CorpusFile(path, size)
        by_parts = file.kind in ("lines", "parquet") or (file.kind == "text" and settings.documents != "file")
        files.append(replace(file, splits=by_parts and not file.compression, number=len(files)))
    return files


def describe_files(files: list[CorpusFile]) -> dict[str, Any]:
    """What tells this corpus from another without reading it: number, bytes, and a hash of names and sizes."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{Path(file.path).name}\0{file.size}\0".encode("utf-8", "surrogateescape"))
    return {"files": len(files), "bytes": sum(file.size for file in files), "listing": digest.hexdigest()}


def plan_units(files: list[CorpusFile], unit_bytes: int | None = None) -> list[tuple[Span, ...]]:
    """Cut the corpus into units of about `unit_bytes` (None: as suits its size); they depend on the files alone."""
    unit_bytes = unit_bytes or max(UNIT_BYTES, sum(file.size for file in files) // MOST_UNITS)
    units: list[tuple[Span, ...]] = []
    unit: list[Span] = []
    size = 0
    for file in files:
        step = unit_bytes if file.splits else max(file.size, 1)
        for start in range(0, max(file.size, 1), step):
            end = min(start + step, file.size)
            unit.append(Span(file, start, end))
            size += end - start
            if size >= unit_bytes:
                units.append(tuple(unit))
                unit, size = [], 0
    if unit:
        units.append(tuple(unit))
    return units


def sample_texts(files: list[CorpusFile], settings: DataSettings, sample_bytes: int) -> Iterator[tuple[str, int]]:
    """About `sample_bytes` of the corpus spread evenly over its bytes, as (text, bytes of input passed so far).

    Long text files are taken in pieces, so that no more than a piece is in memory; of files that can only be read
    from their beginning, the first documents.
    """
    total = sum(file.size for file in files)
    seen = taken = 0
    for file in files:
        if not file.splits and (file.compression or file.kind != "text"):
            seen += file.size
            for document in read_documents([Span(file, 0, file.size)], settings, Tally()):
                if taken * total >= sample_bytes * seen:
                    break
                taken += document.bytes
                yield document.text, seen
            continue
        for start in range(0, file.size, SAMPLE_BYTES):
            span = Span(file, start, min(start + SAMPLE_BYTES, file.size))
            wanted = taken * total < sample_bytes * (seen + span.end - start)
            seen += span.end - start
            if not wanted:
                continue
            taken += span.end - start
            if file.splits or file.size <= SAMPLE_BYTES:
                for document in read_documents([span], settings, Tally()):
                    yield document.text, seen
            else:
                yield _piece(span), seen


def _expand(name: str, suffixes: list[str]) -> list[str]:
    """The files that one entry of `data.input` stands for."""
    if is_address(name):
        return _addresses(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _walk(path, suffixes)
    if path.exists():
        return [str(path)]
    found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (keeps absolute patterns simple)
    if not found:
        what = (
            f'no file matches the pattern "{name}".'
            if glob.has_magic(name)
            else f'there is no file or folder "{name}".'
        )
        fix = f"It was looked for at {path.absolute()}; check the spelling and the folder you are in."
        raise JinguError(what, where="data.input", fix=fix)
    return [file for match in found for file in (_walk(Path(match), suffixes) if Path(match).is_dir() else [match])]


def _addresses(name: str) -> list[str]:
    """The files that an address or a pattern of addresses stands for."""
    system, path = filesystem(name)
    found = sorted(system.glob(path)) if glob.has_magic(path) else [path]
    if not found or not all(system.isfile(each) for each in found):
        raise JinguError(
            f'no file has the address "{name}".', where="data.input", fix="Check its spelling, and access."
        )
    return [system.unstrip_protocol(each) for each in found]


def _walk(folder: Path, suffixes: list[str]) -> list[str]:
    """The folder's files with one of the suffixes, sorted; links are followed, each folder once."""
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(item.name for item in folder.iterdir() if item.is_dir()))
        what = f"`datasets` saved several splits here: {splits}."
        raise JinguError(what, where=folder, fix="Name one of them, as a folder of this one.")
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [str(folder / file["filename"]) for file in state["_data_files"]]
    endings = tuple(suffix.lower() for suffix in suffixes)
    found: list[str] = []
    others: Counter[str] = Counter()
    visited = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(place) in visited:
            folders.clear()
            continue
        visited.add(os.path.realpath(place))
        folders.sort()
        for name in names:
            if name.lower().endswith(endings) or plain_name(name).endswith(endings):
                found.append(str(Path(place, name)))
            else:
                others[Path(name).suffix or "(no ending)"] += 1
    if not found:
        there = ", ".join(f"{count} {ending}" for ending, count in others.most_common(5)) or "no files at all"
        raise JinguError(
            f"no file in this folder ends in {either(suffixes)}; it holds {there}.",
            where=folder,
            fix="Set data.suffixes to the endings of your files."
            if others
            else "Set data.input to where your texts are.",
        )
    return sorted(found)


def _piece(span: Span) -> str:
    """A piece of a long text file; characters cut at its ends, and bytes that are not UTF-8, fall away."""
    try:
        with open(span.file.path, "rb") as stream:  # noqa: PTH123
            stream.seek(span.start)
            return stream.read(span.end - span.start).decode(errors="ignore")
    except OSError as error:
        raise unreadable(span.file.path, error) from error
