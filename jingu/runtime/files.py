"""Files and folders that appear whole under their final name, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jingu.errors import JinguError


@contextmanager
def new_folder(path: Path, progress: str | None = None) -> Iterator[Path]:
    """Yield an empty sibling of `path` that takes its name when the block ends well, and goes away otherwise.

    A sibling left by a killed process is emptied and used again; one that a living process holds is refused. Work that
    can go on writes a file named `progress` there: where it is found, the sibling is neither emptied nor removed.
    """
    partial = path.absolute().with_name(f".{path.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with locked(partial, "another process is writing this folder now.", "Wait for it, or stop it.", path):
            for left in () if _goes_on(partial, progress) else partial.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            try:
                yield partial
                for item in (*partial.iterdir(), partial):
                    sync(item)
                partial.rename(path)
                sync(partial.parent)
            except BaseException:
                if not _goes_on(partial, progress):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            what = "something else appeared here while this was being written."
            raise JinguError(what, where=path, fix="Choose another path.") from error
        kept = "run the command again (it goes on with what is done), or " if _goes_on(partial, progress) else ""
        raise cannot_write(error, path, f"{kept}choose another path") from error


@contextmanager
def locked(folder: Path, what: str, fix: str, where: Path | None = None) -> Iterator[None]:
    """Hold a folder, while inside, against whoever else would. The lock goes with the process, however it ends.

    Raises:
        JinguError: with these words (about `where`, or the folder), another process holds it.
        OSError: it cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every shared file system has locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JinguError(what, where=where or folder, fix=fix) from None
        if not _is_at(folder, descriptor):  # who held it gave it another name meanwhile: this lock holds nobody off
            raise JinguError(what, where=where or folder, fix=fix)
        yield
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether what is open is what has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def replace_text(path: Path, text: str) -> None:
    """Write a file in one go: whoever reads it finds the old text or the new. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.replace(path)
    except OSError as error:
        error.filename = error.filename and str(path)  # the name that people know
        raise
    finally:
        with suppress(OSError):  # a disk that can only be read
            partial.unlink(missing_ok=True)


def unreadable(path: Path | str, error: OSError) -> JinguError:
    """The words for a file that cannot be read."""
    what = f"the file cannot be read ({error.strerror})."
    return JinguError(what, where=path, fix="Check its path, its permissions and its disk.")


def sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _goes_on(partial: Path, progress: str | None) -> bool:
    return progress is not None and (partial / progress).is_file()


def cannot_write(error: OSError, path: Path, other: str = "choose another path") -> JinguError:
    """The words for a file or folder that cannot be written.

    Args:
        other: what can be done instead of mending the place.
    """
    short = error.errno is None and re.fullmatch(r"\d+ requested and \d+ written", str(error))  # numpy's words
    if short or error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JinguError("the disk is full.", where=path, fix=f"Make room, or {other}.")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        file = next(place for place in (path, *path.parents) if place.exists())
        return JinguError("there is a file where a folder should be.", where=file, fix=f"Move it away, or {other}.")
    what = f"this cannot be written ({error.strerror or error})."
    return JinguError(what, where=path, fix=f"Mend its permissions, or {other}.")
