"""Folders that appear whole under their final name, or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jingu.errors import JinguError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty sibling of `path` that takes its name when the block ends well, and goes away otherwise.

    A sibling left by a killed process is emptied and used again; one that a living process holds is refused.
    """
    partial = path.absolute().with_name(f".{path.name}.partial")
    lock = None
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = _lock(partial, path)
        for left in partial.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield partial
            for item in (*partial.iterdir(), partial):
                _sync(item)
            partial.rename(path)
            _sync(partial.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise _mended(error, path) from error
    finally:
        if lock is not None:
            os.close(lock)


def read_record(path: Path, name: str, maker: str) -> dict[str, Any] | None:
    """The JSON object `name` in the folder `path`; None where the folder is missing or empty.

    A folder that holds other things is not ours to replace, and is refused; `maker` is the command that
    makes such folders.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    fix = "Move it away or choose another path."
    if not (path / name).is_file():
        raise JinguError(f"there is something here that `{maker}` did not make.", where=path, fix=fix)
    try:
        record = json.loads((path / name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise JinguError(f"the file is damaged ({error}).", where=path / name, fix=fix) from error
    if not isinstance(record, dict):
        raise JinguError("the file is damaged (not a JSON object).", where=path / name, fix=fix)
    return record


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What changed between two records, in words for people."""
    return [
        f"{key} was {json.dumps(then.get(key), ensure_ascii=False)}"
        f" and is now {json.dumps(now.get(key), ensure_ascii=False)}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    ]


def _lock(partial: Path, path: Path) -> int:
    """Hold `partial` for this process; the lock goes with the process, however it ends."""
    handle = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise JinguError(
            "another process is writing this folder now.", where=path, fix="Wait for it, or stop it."
        ) from None
    except BaseException:
        os.close(handle)
        raise
    return handle


def _sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mended(error: OSError, path: Path) -> JinguError:
    """The words for a failure of the file system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JinguError(
            "the disk is full; nothing was left behind.",
            where=path,
            fix="Free some space or choose a path on another disk, and run the command again.",
        )
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
        return JinguError(
            "something else appeared here while this was being written.", where=path, fix="Choose another path."
        )
    return JinguError(
        f"this cannot be written ({error.strerror}).",
        where=path,
        fix="Check its permissions, or choose another path.",
    )
