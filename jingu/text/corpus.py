"""The corpus: the list of files that `data.input` names, and its division into units of work.

Both depend only on the input, not on ranks or workers.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jingu.config.sections.data import DataSettings, SourceSettings
from jingu.errors import JinguError, join_words
from jingu.runtime.checksums import NO_RECORDS, ContentRecord, Records, digest_records, record_file
from jingu.runtime.files import read_error, read_json
from jingu.runtime.hub import download_rows, parse_name
from jingu.runtime.log import log_warning
from jingu.text.corpus_file import (
    CorpusFile,
    check_archive,
    is_url,
    open_filesystem,
    read_errors,
    strip_compression_suffix,
    url_version,
)
from jingu.text.document_reader import ReadCounts, Span, corpus_file_error, read_documents

# Approximate minimum size of a unit of work, which is several small files or a part of a large one, such as a .jsonl.
UNIT_BYTES = 1 << 20
# Approximate maximum number of units: those of a large corpus are larger. (Files that cannot be divided add units.)
MAX_UNITS = 4096
# A corpus is sampled in chunks of this size, in bytes.
SAMPLE_CHUNK_BYTES = 256 << 10
# Names that programs give to what is not, or not yet, data. Hidden names, with a dot before them, are none either.
_OTHER_FOLDERS = ("__MACOSX", "__pycache__", "_temporary", "lost+found")
_OTHER_PREFIXES = (".", "~$")
_OTHER_ENDINGS = ("~", ".bak", ".crdownload", ".lock", ".part", ".partial", ".swp", ".temp", ".tmp")
_OTHER_FILES = ("_SUCCESS", "Thumbs.db", "desktop.ini")


def validate_sources(data: DataSettings) -> list[SourceSettings]:
    """Return `data.all_sources`. Raises JinguError if the settings contradict each other."""
    defaults = DataSettings()
    if data.sources and (data.input != defaults.input or data.path != defaults.path):
        what = "data.sources is set, and so is data.input or data.path."
        raise JinguError(what, where="data", fix="Make the one corpus another of data.sources.")
    paths = [source.path for source in data.all_sources]
    for path in paths:
        if paths.count(path) > 1:
            raise JinguError(f"two sources have the same path, {path}.", where="data.sources")
    return data.all_sources


def find_files(settings: DataSettings) -> list[CorpusFile]:
    """Return every file of `data.input` once: inputs in their order, the files of a folder or pattern sorted.

    A folder is searched recursively for files with one of `data.suffixes`, also compressed ones. In a folder that
    `datasets` saved, the .arrow files are taken. A file that is named directly or matches a pattern (`*`, `?`, `[…]`,
    `**`) may have any suffix. A URL (such as s3://…) names a file or is a pattern; a name on a hub is a data set there
    (`jingu.runtime.hub`). Folders and patterns leave out what is not data (`_is_data`). A file with several names,
    through links, counts once.

    Raises:
        JinguError: there is no input, an input matches no file, or a file cannot be read more than once.
    """
    inputs: list[str] = []
    for source in settings.all_sources:
        inputs += [source.input] if isinstance(source.input, str) else source.input
    if not inputs:
        fix = "Name text files, .jsonl files, folders or patterns."
        raise JinguError("there is no corpus.", where="data.input", fix=fix)
    paths = dict.fromkeys(path for name in inputs for path in _expand_input(name, settings.suffixes))
    files: list[CorpusFile] = []
    # The name of each local file by its device and inode.
    names: dict[tuple[int, int], str] = {}
    for path in paths:
        try:
            if is_url(path):
                size = open_filesystem(path)[0].size(path)
            else:
                status = Path(path).stat()
                size = status.st_size
                name = names.setdefault((status.st_dev, status.st_ino), path)
                if name != path and (status.st_nlink > 1 or os.path.realpath(name) == os.path.realpath(path)):
                    _warn_once(f"{path} is {name} under another name; it is read once.")
                    continue
        except OSError as error:
            raise read_error(path, error) from error
        if not is_url(path) and not Path(path).is_file():
            what = "this is a pipe, a socket or a device, and a corpus is read more than once."
            raise JinguError(what, where=path, fix="Write its content to a file, and name that in data.input.")
        check_archive(path)
        file = CorpusFile(path, size)
        # A file can be divided if it contains many documents and any part of it can be read separately.
        has_parts = file.kind in ("lines", "parquet") or (file.kind == "text" and settings.documents != "file")
        files.append(replace(file, splits=has_parts and not file.compression, number=len(files)))
    return files


@cache
def _warn_once(message: str) -> None:
    """Log a warning, unless this process has logged it before: a command lists its files several times."""
    log_warning(message)


def record_files(files: list[CorpusFile], records: Records = NO_RECORDS) -> list[ContentRecord]:
    """Return the records of the files of a corpus; those that known records describe are not read.

    A file at a URL is not read: its server's version of it stands for its content.

    Raises:
        JinguError: a file cannot be read.
    """
    return [
        ContentRecord(file.path, file.size, "", url_version(file.path))
        if is_url(file.path)
        else record_file(file.path, records)
        for file in files
    ]


def describe_records(records: Sequence[ContentRecord]) -> dict[str, Any]:
    """Return data that identify a corpus: number of files, bytes, and a hash of names and contents."""
    size = sum(record.size for record in records)
    return {"files": len(records), "bytes": size, "content": digest_records(records)}


def describe_listing(records: Sequence[ContentRecord]) -> dict[str, Any]:
    """Return what older versions stored of a corpus: instead of its contents, a hash of names and sizes."""
    digest = hashlib.blake2b(digest_size=8)
    for record in records:
        digest.update(f"{Path(record.path).name}\0{record.size}\0".encode("utf-8", "surrogateescape"))
    size = sum(record.size for record in records)
    return {"files": len(records), "bytes": size, "listing": digest.hexdigest()}


def plan_units(files: list[CorpusFile], unit_bytes: int | None = None) -> list[tuple[Span, ...]]:
    """Divide the corpus into units of work, each a sequence of spans of files.

    Args:
        unit_bytes: approximate bytes per unit; None: chosen by the size of the corpus.
    """
    if unit_bytes is None:
        unit_bytes = max(UNIT_BYTES, sum(file.size for file in files) // MAX_UNITS)
    units: list[tuple[Span, ...]] = []
    unit: list[Span] = []
    size = 0
    for file in files:
        # An empty file also gets a span.
        file_bytes = max(file.size, 1)
        for start in range(0, file_bytes, unit_bytes if file.splits else file_bytes):
            end = min(start + unit_bytes, file.size) if file.splits else file.size
            unit.append(Span(file, start, end))
            size += end - start
            if size >= unit_bytes:
                units.append(tuple(unit))
                unit = []
                size = 0
    if unit:
        units.append(tuple(unit))
    return units


def sample_texts(files: list[CorpusFile], settings: DataSettings, sample_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield texts of about `sample_bytes` in total, sampled evenly from the corpus.

    Long text files are sampled in chunks, so that at most a chunk is in memory. From files that can only be read from
    their beginning, such as compressed ones, the first documents are taken.

    Yields:
        A text, and the position in the corpus in bytes, for a progress bar.
    """
    total = sum(file.size for file in files)
    bytes_read = 0
    sampled_bytes = 0
    for file in files:
        if not file.splits and (file.compression or file.kind != "text"):
            bytes_read += file.size
            for document in read_documents([Span(file, 0, file.size)], settings, ReadCounts()):
                # Stop when the share of the sample, sampled_bytes / sample_bytes, reaches that of the corpus,
                # seen / total.
                if sampled_bytes * total >= sample_bytes * bytes_read:
                    break
                sampled_bytes += document.bytes
                yield document.text, bytes_read
            continue
        for start in range(0, file.size, SAMPLE_CHUNK_BYTES):
            span = Span(file, start, min(start + SAMPLE_CHUNK_BYTES, file.size))
            is_sampled = sampled_bytes * total < sample_bytes * (bytes_read + span.end - start)
            bytes_read += span.end - start
            if not is_sampled:
                continue
            sampled_bytes += span.end - start
            if file.splits or file.size <= SAMPLE_CHUNK_BYTES:
                for document in read_documents([span], settings, ReadCounts()):
                    yield document.text, bytes_read
            else:
                yield _read_chunk(span), bytes_read


def _expand_input(name: str, suffixes: list[str]) -> list[str]:
    """Return the paths of the files that one entry of `data.input` names."""
    if is_url(name):
        return _expand_url(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _walk_folder(path, suffixes)
    if path.exists():
        return [str(path)]
    if (hub_name := parse_name(name)) is not None:
        return [str(download_rows(hub_name))]
    matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (keeps absolute patterns simple)
    data_matches = [match for match in matches if _is_data_match(match, str(path))]
    if not data_matches:
        what = f'there is no file or folder "{name}".'
        if glob.has_magic(name):
            left_out = " but hidden and temporary ones" if matches else ""
            what = f'no file{left_out} matches the pattern "{name}".'
        fix = f"The path is {path.absolute()}; check the spelling and the current folder."
        raise JinguError(what, where="data.input", fix=fix)
    files: list[str] = []
    for match in data_matches:
        files += _walk_folder(Path(match), suffixes) if Path(match).is_dir() else [match]
    return files


def _is_data(name: str) -> bool:
    """Return whether a file or folder of this name is data: it is not hidden, temporary, a copy or a lock."""
    is_other = name in (*_OTHER_FOLDERS, *_OTHER_FILES) or name.startswith(_OTHER_PREFIXES)
    return not (is_other or name.lower().endswith(_OTHER_ENDINGS))


def _is_data_match(match: str, pattern: str) -> bool:
    """Return whether a match of a pattern is data.

    What the pattern itself spells out is taken: the folders before its first wildcard, and the ending of its last part.
    """
    parts = Path(pattern).parts
    literal = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    *folders, name = Path(match).parts[literal:] or ("data",)
    names_ending = any(parts[-1].lower().endswith(ending) for ending in _OTHER_ENDINGS)
    names_hidden = parts[-1].startswith(_OTHER_PREFIXES)
    spelled_folders = [part for part in parts if not glob.has_magic(part)]
    return all(_is_data(part) or part in spelled_folders for part in folders) and (
        names_ending or names_hidden or _is_data(name)
    )


def _expand_url(url: str) -> list[str]:
    """Return the URLs of the files that a URL, or a pattern of URLs, names."""
    filesystem, path = open_filesystem(url)
    matches = [path]
    if glob.has_magic(path):
        matches = [match for match in sorted(filesystem.glob(path)) if _is_data_match(match, path)]
    if not matches or not all(filesystem.isfile(match) for match in matches):
        fix = "Check its spelling and your access."
        raise JinguError(f'no file has the URL "{url}".', where="data.input", fix=fix)
    return [filesystem.unstrip_protocol(match) for match in matches]


def _walk_folder(folder: Path, suffixes: list[str]) -> list[str]:
    """Return the files in a folder with one of the suffixes, sorted, without those that are not data.

    Links are followed; each folder is visited once.

    Raises:
        JinguError: there is no such file, or `datasets` saved several splits here.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(item.name for item in folder.iterdir() if item.is_dir()))
        what = f"`datasets` saved several splits here: {splits}."
        raise JinguError(what, where=folder, fix="Name the folder of one of them.")
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        fix = "Save the dataset again with save_to_disk."
        state = read_json(folder / "state.json", fix)
        try:
            return [str(folder / file["filename"]) for file in state["_data_files"]]
        except (KeyError, TypeError) as error:
            what = "the file lacks the names of the data files (_data_files)."
            raise JinguError(what, where=folder / "state.json", fix=fix) from error
    endings = tuple(suffix.lower() for suffix in suffixes)
    files: list[str] = []
    other_suffixes: Counter[str] = Counter()
    visited_folders: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        # A link can point to one of its parent folders: visit each folder once.
        if os.path.realpath(parent) in visited_folders:
            folders.clear()
            continue
        visited_folders.add(os.path.realpath(parent))
        folders[:] = sorted(filter(_is_data, folders))
        for name in filter(_is_data, names):
            if name.lower().endswith(endings) or strip_compression_suffix(name).endswith(endings):
                files.append(str(Path(parent, name)))
            else:
                other_suffixes[Path(name).suffix or "(no suffix)"] += 1
    if not files:
        contents = ", ".join(f"{count} {suffix}" for suffix, count in other_suffixes.most_common(5))
        fix = "Set data.suffixes to the suffixes of your files."
        if not contents:
            fix = "Set data.input to the folder of your texts."
        what = f"no file in this folder ends in {join_words(suffixes)}; it contains {contents or 'no files at all'}."
        raise JinguError(what, where=folder, fix=fix)
    return sorted(files)


def _read_chunk(span: Span) -> str:
    """Read a part of a long text file, without cut characters at its ends and without bytes that are not UTF-8."""
    try:
        with closing(span.file.open()) as stream:
            stream.seek(span.start)
            return stream.read(span.end - span.start).decode(errors="ignore")
    except read_errors() as error:
        raise corpus_file_error(span.file, error) from error
