"""Files of a corpus, local or at a URL, plain or compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import IO, Any, Literal, cast

from jingu.errors import JinguError
from jingu.plugins import Registry, expect_function

FileKind = Literal["text", "lines", "json", "parquet", "arrow", "reader"]
Reader = Callable[[IO[bytes]], Iterable[str]]
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".lzma": "xz", ".zst": "zstd", ".zstd": "zstd"}
# Archives of several files, and compressions that are not read.
_ARCHIVES = (".7z", ".br", ".lz4", ".rar", ".tar", ".tbz2", ".tgz", ".txz", ".z", ".zip")
# How files of these formats begin.
_MAGIC = {
    "gzip": b"\x1f\x8b",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ",
    "zstd": b"\x28\xb5\x2f\xfd",
    "parquet": b"PAR1",
    "zip": b"PK\x03\x04",
}
# The largest window of zstd that the format allows on machines of 64 bits.
_MAX_ZSTD_WINDOW = 1 << 31
# What a store says of the version of a file, the most exact first.
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "crc32c", "VersionId", "generation")
_TIME_KEYS = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
READERS: Registry[FileKind | Reader] = Registry(
    "readers",
    {"txt": "text", "jsonl": "lines", "ndjson": "lines", "json": "json", "parquet": "parquet", "arrow": "arrow"},
    expect_function,
)
"""The format of files by their suffixes, or the function of a plug-in that returns the texts of a file."""


@dataclass(frozen=True)
class CorpusFile:
    """A file of the corpus.

    Attributes:
        path: a local path, or a URL (such as s3://…) that fsspec opens.
        size: stored size in bytes, which is that of the compressed file.
        splits: whether any part of the file can be read separately.
        number: index of the file in the corpus.
    """

    path: str
    size: int
    splits: bool = False
    number: int = 0

    @property
    def compression(self) -> str:
        """The compression (gzip, bzip2, xz or zstd), by the suffix; empty for an uncompressed file."""
        return COMPRESSIONS.get(os.path.splitext(self.path.lower())[1], "")  # noqa: PTH122 (not every path is local)

    @property
    def kind(self) -> FileKind:
        """The format of the uncompressed content, by the suffix before that of the compression."""
        kind = self._reader
        return kind if isinstance(kind, str) else "reader"

    @property
    def _reader(self) -> FileKind | Reader:
        suffix = os.path.splitext(strip_compression_suffix(self.path))[1]  # noqa: PTH122
        return READERS.get(suffix[1:], "text")

    def read_texts(self, stream: IO[bytes]) -> Iterator[str]:
        """Yield the texts that the reader of a plug-in returns. Raises JinguError if it fails."""
        read = self._reader
        assert callable(read)
        try:
            for text in read(stream):
                if not isinstance(text, str):
                    raise TypeError(f"it returned {type(text).__name__}, not a text")
                yield text
        except read_errors():
            raise
        except Exception as error:
            what = f"the reader of its plug-in fails ({type(error).__name__}: {error})."
            raise JinguError(what, where=self.path, fix="Correct the file or the plug-in (`jingu plugins`).") from error

    def open(self) -> IO[bytes]:
        """Open the file and decompress it while it is read. Raises OSError, or JinguError if a package is missing."""
        if is_url(self.path):
            raw_file = cast(IO[bytes], open_filesystem(self.path)[0].open(self.path, "rb"))
        else:
            raw_file = open(self.path, "rb")  # noqa: PTH123, SIM115 (the caller closes it)
        if self.compression == "gzip":
            return cast(IO[bytes], gzip.open(raw_file))
        if self.compression == "bzip2":
            return cast(IO[bytes], bz2.open(raw_file))
        if self.compression == "xz":
            return cast(IO[bytes], lzma.open(raw_file))
        if self.compression == "zstd":
            return cast(IO[bytes], io.BufferedReader(_ZstdReader(raw_file, self.path), 1 << 20))
        return raw_file


class _ZstdReader(io.RawIOBase):
    """Reads the zstd frames of a file. Raises EOFError if the file is truncated, which the library's reader ignores."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file = file
        self._zstd = import_optional("zstandard", "reading zstd", path)
        # The decompressor of the current frame; None between frames.
        self._frame: Any = None
        # Bytes that are read but not decompressed, and decompressed bytes that are not returned yet.
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            chunk = self._input or self._file.read(1 << 17)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("its last frame is truncated")
                return 0
            if self._frame is None:
                self._frame = self._zstd.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW).decompressobj()
            self._output = self._frame.decompress(chunk)
            self._input = b""
            if self._frame.eof:
                # Bytes after the frame belong to the next one.
                self._input = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def strip_compression_suffix(path: str) -> str:
    """Return a path in lower case, without its compression suffix if it has one."""
    name, suffix = os.path.splitext(path.lower())  # noqa: PTH122
    return name if suffix in COMPRESSIONS else path.lower()


def check_archive(path: str) -> None:
    """Raise JinguError for a file whose suffix is that of an archive, or of a compression that is not read."""
    suffix = os.path.splitext(strip_compression_suffix(path))[1]  # noqa: PTH122
    if suffix in _ARCHIVES:
        what = f"{suffix} is an archive or a compression that is not read as text."
        raise JinguError(what, where=path, fix=f"Unpack it; {', '.join(COMPRESSIONS)} are read as they are.")


def is_misnamed(file: CorpusFile) -> bool:
    """Return whether a file that should be in a binary format is text, or begins like another format."""
    expected_format = file.compression or (file.kind if file.kind in ("parquet", "arrow") else "")
    if not expected_format or is_url(file.path):
        return False
    with suppress(OSError, UnicodeDecodeError), open(file.path, "rb") as raw_file:  # noqa: PTH123
        start = raw_file.read(256)
        if (name := next((name for name, magic in _MAGIC.items() if start.startswith(magic)), None)) is not None:
            return name != expected_format
        # The last character may be cut.
        return bool(start) and "\0" not in start[:-3].decode()
    return False


def is_url(path: str) -> bool:
    """Return whether a path is a URL, such as s3://bucket/name."""
    return "://" in path


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises:
        JinguError: the protocol is unknown, or the package for it is not installed.
    """
    fsspec = import_optional("fsspec", "opening URLs", url)
    try:
        filesystem: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return filesystem
    except (ImportError, ValueError) as error:
        fix = "Check the protocol, or install the package for it (s3fs for s3://)."
        raise JinguError(f"the URL cannot be opened ({error}).", where=url, fix=fix) from error


def url_version(url: str) -> str:
    """Return what the server of a URL says of the file's version: an ETag or a checksum, else a time; may be empty.

    Raises:
        JinguError: the file cannot be found.
    """
    try:
        filesystem, path = open_filesystem(url)
        about = filesystem.info(path)
    except OSError as error:
        raise JinguError(f"the URL cannot be opened ({error}).", where=url, fix="Check it and your access.") from error
    key = next((key for key in (*_VERSION_KEYS, *_TIME_KEYS) if about.get(key)), None)
    return "" if key is None else f"{key} {about[key]}"


def import_optional(name: str, purpose: str, where: str, package: str = "") -> ModuleType:
    """Import an optional package. Raises JinguError if it is not installed.

    Args:
        package: its name for pip, if that is another.
    """
    try:
        return import_module(name)
    except ImportError:
        package = package or name.partition(".")[0]
        fix = f"Install it: `pip install {package}`."
        raise JinguError(f"{purpose} needs the package {package}.", where=where, fix=fix) from None


def read_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a file, or decompressing a damaged or truncated one, can raise."""
    errors: list[type[Exception]] = [OSError, EOFError, zlib.error, lzma.LZMAError]
    with suppress(ImportError):
        errors.append(import_module("zstandard").ZstdError)
    return tuple(errors)
