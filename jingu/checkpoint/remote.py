"""Folders of checkpoints at an address: an object store or shared storage, whatever fsspec knows.

Such a store need not be able to rename. A file appears there whole, and a checkpoint is complete where its manifest
is, which is written last and deleted first.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Literal, cast

from jingu.text.storage import filesystem, is_address


class RemotePath:
    """A file or a folder at an address: what `pathlib.Path` is on a disk, as far as checkpoints need it.

    Stores fail each in a way of its own: here all of them raise an OSError.
    """

    def __init__(self, store: Any, path: str) -> None:
        self._store, self._path = store, path

    @staticmethod
    def at(address: str) -> RemotePath:
        """The folder at an address (or at a local path). Raises JinguError where nothing installed knows the way."""
        store, path = filesystem(address)
        return RemotePath(store, str(path).rstrip("/"))

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._store, self._path.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._store, f"{self._path}/{name}")

    def __str__(self) -> str:
        return str(self._store.unstrip_protocol(self._path))

    def absolute(self) -> RemotePath:
        """Itself: an address is never relative."""
        return self

    def exists(self) -> bool:
        return bool(self._ask(self._store.exists, self._path))

    def is_file(self) -> bool:
        return bool(self._ask(self._store.isfile, self._path))

    def is_dir(self) -> bool:
        return bool(self._ask(self._store.isdir, self._path))

    def stat(self) -> SimpleNamespace:
        """`st_size`, as a local file has it."""
        return SimpleNamespace(st_size=int(self._ask(self._store.size, self._path)))

    def iterdir(self) -> Iterator[RemotePath]:
        paths = [str(path).rstrip("/") for path in self._ask(self._store.ls, self._path, detail=False)]
        return (RemotePath(self._store, path) for path in paths if path != self._path)

    def mkdir(self, *, parents: Literal[True], exist_ok: Literal[True]) -> None:
        """Make the folder, and those above it; one that is there is well, too."""
        self._ask(self._store.makedirs, self._path, exist_ok=True)

    def open(self, mode: Literal["wb", "xb"], buffering: Literal[0]) -> IO[bytes]:
        """A new file, there when it is closed; it takes the place of one that is there."""
        return cast(IO[bytes], self._ask(self._store.open, self._path, "wb"))

    def read_bytes(self, begin: int | None = None, end: int | None = None) -> bytes:
        return bytes(self._ask(self._store.cat_file, self._path, start=begin, end=end))

    def upload(self, file: Path) -> None:
        """Become a copy of a local file."""
        self._ask(self._store.put_file, str(file), self._path)

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete the file, where there is one."""
        if self.exists():
            self._ask(self._store.rm_file, self._path)

    def remove(self) -> None:
        """Delete the folder with all that is in it, where there is one."""
        if self.exists():
            self._ask(self._store.rm, self._path, recursive=True)

    def _ask(self, what: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self._store.invalidate_cache()  # others write here, too
        try:
            return what(*arguments, **keywords)
        except OSError as error:
            if error.strerror is None:
                error.strerror = str(error)
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(self)) from error


Place = Path | RemotePath
"""A file or a folder of checkpoints."""


def place(text: str) -> Place:
    """A local path, or an address."""
    return RemotePath.at(text) if is_address(text) else Path(text)
