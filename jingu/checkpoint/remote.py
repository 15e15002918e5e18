"""Checkpoints at a URL: in an object store or any other storage that fsspec opens.

Such a store may be unable to rename files. A file becomes visible only when it is complete. A checkpoint is complete if
it has a manifest, which is written last and deleted first.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Literal, cast

from jingu.text.corpus_file import is_url, open_filesystem


class RemotePath:
    """A file or folder at a URL, with the part of the interface of `pathlib.Path` that checkpoints need.

    The exceptions of the stores differ; all of them are converted to OSError. Nothing is cached, as other ranks write
    to the same store.
    """

    def __init__(self, store: Any, path: str) -> None:
        self._store = store
        self._path = path

    @staticmethod
    def at(url: str) -> RemotePath:
        """Return the folder at a URL (or a local path). Raise JinguError if no installed package supports the URL."""
        store, path = open_filesystem(url)
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
        """Return the path itself: a URL is never relative."""
        return self

    def exists(self) -> bool:
        return bool(self._call(self._store.exists, self._path))

    def is_dir(self) -> bool:
        return bool(self._call(self._store.isdir, self._path))

    def stat(self) -> SimpleNamespace:
        """Return an object with `st_size`."""
        return SimpleNamespace(st_size=int(self._call(self._store.size, self._path)))

    def iterdir(self) -> Iterator[RemotePath]:
        paths = [str(path).rstrip("/") for path in self._call(self._store.ls, self._path, detail=False)]
        return (RemotePath(self._store, path) for path in paths if path != self._path)

    def mkdir(self, *, parents: Literal[True], exist_ok: Literal[True]) -> None:
        """Create the folder and its parents, if they do not exist."""
        self._call(self._store.makedirs, self._path, exist_ok=True)

    def open(self, mode: Literal["wb", "xb"], buffering: Literal[0]) -> IO[bytes]:
        """Open a file for writing. It becomes visible when it is closed, and replaces an existing file."""
        return cast(IO[bytes], self._call(self._store.open, self._path, "wb"))

    def read_bytes(self, begin: int | None = None, end: int | None = None) -> bytes:
        return bytes(self._call(self._store.cat_file, self._path, start=begin, end=end))

    def upload(self, file: Path) -> None:
        """Copy a local file here."""
        self._call(self._store.put_file, str(file), self._path)

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete the file, if there is one."""
        if self.exists():
            self._call(self._store.rm_file, self._path)

    def remove(self) -> None:
        """Delete the folder with everything in it, if there is one."""
        if self.exists():
            self._call(self._store.rm, self._path, recursive=True)

    def _call(self, operation: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call an operation of the store; convert its errors to an OSError with a message in `strerror`."""
        self._store.invalidate_cache()
        try:
            return operation(*arguments, **keywords)
        except OSError as error:
            if error.strerror is None:
                error.strerror = str(error)
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(self)) from error


CheckpointPath = Path | RemotePath


def checkpoint_path(text: str) -> CheckpointPath:
    """Return the path for a local path or a URL."""
    return RemotePath.at(text) if is_url(text) else Path(text)
