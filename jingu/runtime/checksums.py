"""Checksums of whole files, and records by which an unchanged file need not be read again.

A checksum is the xxh3-128 of all bytes. A record also has the file's size, inode, and times of modification and of its
last change of status. While all of these are equal, the recorded checksum applies; otherwise the file is read again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from jingu.errors import JinguError
from jingu.runtime.files import read_error

_BLOCK_BYTES = 4 << 20
# A file that changed this shortly before its checksum may change again without new times, whose resolution is limited:
# such a record is not trusted.
_SETTLING_NS = 2_000_000_000


@dataclass(frozen=True)
class ContentRecord:
    """A file whose content is known.

    Attributes:
        path: absolute path, or a URL.
        size: size in bytes.
        stamp: inode and times in nanoseconds, as text; empty if the record must not be trusted without reading.
        xxh3: checksum of all bytes in hex; for a URL what its server says of the version, such as an ETag.
    """

    path: str
    size: int
    stamp: str
    xxh3: str

    def to_json(self) -> list[Any]:
        """Return the record as a JSON value."""
        return [self.path, self.size, self.stamp, self.xxh3]


Records = Mapping[str, ContentRecord]
"""Records by path."""
NO_RECORDS: Records = MappingProxyType({})


def parse_records(value: object) -> dict[str, ContentRecord]:
    """Return records that `ContentRecord.to_json` wrote, by path, without what is something else: it is read again."""
    records = {}
    for item in value if isinstance(value, list) else []:
        if isinstance(item, list) and list(map(type, item)) == [str, int, str, str]:
            records[item[0]] = ContentRecord(*item)
    return records


def hash_file(path: Path | str) -> str:
    """Return the xxh3-128 of all bytes of a file in hex. Raises OSError if it cannot be read."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_BLOCK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (a corpus has many paths as text)
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def record_file(path: Path | str, records: Records = NO_RECORDS) -> ContentRecord:
    """Return the record of a local file. It is read, unless a known record still describes it.

    Raises:
        JinguError: the file cannot be read, or changes meanwhile.
    """
    absolute = os.path.abspath(path)  # noqa: PTH100 (keeps links, and is fast)
    try:
        now = time.time_ns()
        size, stamp, last_change = _stat(absolute)
        record = records.get(absolute)
        if record is not None and record.stamp and (record.size, record.stamp) == (size, stamp):
            return record
        checksum = hash_file(absolute)
        if _stat(absolute)[:2] != (size, stamp):
            what = "the file changed while it was read."
            raise JinguError(what, where=path, fix="Wait until it is complete, and run the command again.")
    except OSError as error:
        raise read_error(path, error) from error
    return ContentRecord(absolute, size, stamp if last_change < now - _SETTLING_NS else "", checksum)


def digest_records(records: Iterable[ContentRecord]) -> str:
    """Return one hash of the names, sizes and contents of files, in their order."""
    digest = xxhash.xxh3_128()
    for record in records:
        name = record.path.rpartition("/")[2]
        digest.update(f"{name}\0{record.size}\0{record.xxh3}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _stat(path: str) -> tuple[int, str, int]:
    """Return the size, the stamp and the last change of a file."""
    status = os.stat(path)  # noqa: PTH116 (a corpus has many files)
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_size, f"{status.st_ino} {times[0]} {times[1]}", max(times)
