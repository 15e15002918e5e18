"""Files of a corpus, wherever they lie and however they are packed: opened, sized and told apart by their names."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import IO, Any, Literal, cast

from jingu.errors import JinguError

COMPRESSIONS = {".gz": "gzip", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
KINDS: dict[str, Kind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
Kind = Literal["text", "lines", "json", "parquet", "arrow"]


@dataclass(frozen=True)
class CorpusFile:
    """A file of the corpus and its size in bytes, as it is stored."""

    path: str
    """A local path, or an address (such as s3://…) that fsspec opens."""
    size: int
    splits: bool = False
    """Whether any part of it can be read by itself."""
    number: int = 0
    """Its place among the files of the corpus."""

    @property
    def compression(self) -> str:
        """gzip, xz or zstd; empty where it is stored as it is."""
        return COMPRESSIONS.get(os.path.splitext(self.path.lower())[1], "")  # noqa: PTH122 (not every path is local)

    @property
    def kind(self) -> Kind:
        """What it holds, by its ending before that of the compression."""
        return KINDS.get(os.path.splitext(plain_name(self.path))[1], "text")  # noqa: PTH122

    def open(self) -> IO[bytes]:
        """The content, uncompressed, from its first byte on. Raises OSError, or JinguError where a package lacks."""
        if is_address(self.path):
            raw = cast(IO[bytes], filesystem(self.path)[0].open(self.path, "rb"))
        else:
            raw = open(self.path, "rb")  # noqa: PTH123, SIM115 (the caller closes it)
        if self.compression == "gzip":
            return cast(IO[bytes], gzip.open(raw))
        if self.compression == "xz":
            return cast(IO[bytes], lzma.open(raw))
        if self.compression == "zstd":
            return cast(IO[bytes], io.BufferedReader(_Zstd(raw, self.path), 1 << 20))
        return raw


class _Zstd(io.RawIOBase):
    """Frames of zstd, one after another; the library's own reader takes a cut file for a shorter one."""

    def __init__(self, raw: IO[bytes], path: str) -> None:
        self._raw, self._library = raw, package("zstandard", "reading zstd", path)
        self._frame: Any = None
        self._left, self._out = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._out:
            packed = self._left or self._raw.read(1 << 17)
            if not packed:
                if self._frame is not None:
                    raise EOFError("its last frame is not whole")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            self._out, self._left = self._frame.decompress(packed), b""
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._out))
        buffer[:count], self._out = self._out[:count], self._out[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def plain_name(path: str) -> str:
    """A path in small letters, without the ending of a compression."""
    name, ending = os.path.splitext(path.lower())  # noqa: PTH122
    return name if ending in COMPRESSIONS else path.lower()


def is_address(path: str) -> bool:
    """Whether a path is an address, such as s3://bucket/name, rather than a local one."""
    return "://" in path


def filesystem(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it. JinguError where what it needs is not installed."""
    fsspec = package("fsspec", "reading fsspec", address)
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(address)
        return found
    except (ImportError, ValueError) as error:
        fix = "Check how it begins, or install the package that opens such addresses (s3fs for s3://)."
        raise JinguError(f"the address cannot be opened ({error}).", where=address, fix=fix) from error


def package(name: str, what: str, where: str) -> ModuleType:
    """An optional package; JinguError where it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        fix = f"Install it: `pip install {name.partition('.')[0]}`."
        raise JinguError(f"{what} needs the package {name.partition('.')[0]}.", where=where, fix=fix) from None


def damages() -> tuple[type[Exception], ...]:
    """What reading raises, and decompressing data that is cut or changed."""
    found: list[type[Exception]] = [OSError, EOFError, zlib.error, lzma.LZMAError]
    with suppress(ImportError):
        found.append(import_module("zstandard").ZstdError)
    return tuple(found)
