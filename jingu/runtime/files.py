"""Write files and folders atomically: a file or folder with its final name is always complete."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jingu.errors import JinguError

# The folder of the package `jingu`.
PACKAGE_ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder that is deleted after the block, even if this process is killed.

    Args:
        prefix: beginning of the folder's name.
        parent: where to create the folder; None: the system's folder for temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    # A shell in its own session waits until the pipe is closed, by the end of the block or of this process, and then
    # deletes the folder.
    command = ["sh", "-c", 'read -r line; rm -rf "$0"', str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield folder


@contextmanager
def create_folder_atomically(path: Path, progress: str | None = None) -> Iterator[Path]:
    """Yield an empty folder beside `path` that is renamed to `path` after the block, and deleted if the block fails.

    A folder that a killed process left behind is emptied and used again.

    Args:
        path: the final folder; it must not exist, or must be empty.
        progress: name of a file that resumable work writes into the folder. A folder with this file is neither emptied
            nor deleted.

    Raises:
        JinguError: another process is writing the folder, something else has appeared at `path`, or the folder cannot
            be written.
    """
    partial = path.absolute().with_name(f".{path.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with lock_folder(partial, "another process is writing this folder now.", "Wait for it, or stop it.", path):
            for item in () if _is_resumable(partial, progress) else partial.iterdir():
                shutil.rmtree(item) if item.is_dir() else item.unlink()
            try:
                yield partial
                # Flush contents before the rename, and the rename before returning.
                for item in (*partial.iterdir(), partial):
                    fsync_path(item)
                partial.rename(path)
                fsync_path(partial.parent)
            except BaseException:
                if not _is_resumable(partial, progress):
                    shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            what = "something else appeared here while this was being written."
            raise JinguError(what, where=path, fix="Choose another path.") from error
        resume = "run the command again to resume, or " if _is_resumable(partial, progress) else ""
        raise write_error(error, path, f"{resume}choose another path") from error


@contextmanager
def lock_folder(folder: Path, what: str, fix: str, where: Path | None = None) -> Iterator[None]:
    """Lock a folder within the block. The lock ends with the process, even if that is killed.

    Args:
        what, fix, where: parts of the error if another process has locked the folder; where=None: the folder.

    Raises:
        JinguError: another process has locked the folder.
        OSError: the folder cannot be opened.
    """
    locked_error = JinguError(what, where=where or folder, fix=fix)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise locked_error from None
        except OSError:
            pass  # some network file systems have no locks
        # Another process may have renamed the folder before we locked it. Then we have locked the wrong folder.
        if not folder.exists() or not os.path.samestat(folder.stat(), os.fstat(descriptor)):
            raise locked_error
        yield
    finally:
        os.close(descriptor)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old text or the new text. Raises OSError if it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        fsync_path(partial)
        partial.replace(path)
    except OSError as error:
        error.filename = error.filename and str(path)  # not the name of the temporary file
        raise
    finally:
        with suppress(OSError):  # a read-only file system
            partial.unlink(missing_ok=True)


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a file. Raises JinguError if it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except OSError as error:
        raise read_error(path, error) from error
    except UnicodeDecodeError as error:
        what = f"the file is not UTF-8 text: byte {error.start:,} is not part of a character."
        raise JinguError(what, where=path, fix="Save it again as UTF-8.") from error


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        fix: what the user can do if the file is damaged.

    Raises:
        JinguError: the file cannot be read, or holds no JSON object.
    """
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise JinguError(f"the file is damaged ({error}).", where=path, fix=fix) from error
    if not isinstance(value, dict):
        raise JinguError("the file is damaged (not a JSON object).", where=path, fix=fix)
    return value


def read_error(path: Path | str, error: OSError) -> JinguError:
    """Return the error for a file that cannot be read."""
    what = f"the file cannot be read ({error.strerror})."
    return JinguError(what, where=path, fix="Check its path, its permissions and its disk.")


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_resumable(partial: Path, progress: str | None) -> bool:
    """Return whether a partial folder contains work that can be resumed."""
    return progress is not None and (partial / progress).is_file()


def write_error(error: OSError, path: Path, or_else: str = "choose another path") -> JinguError:
    """Return the error for a file or folder that cannot be written.

    Args:
        or_else: an alternative to fixing the disk or the permissions.
    """
    # numpy reports a full disk without an error number.
    is_short_write = error.errno is None and re.fullmatch(r"\d+ requested and \d+ written", str(error))
    if is_short_write or error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JinguError("the disk is full.", where=path, fix=f"Make room, or {or_else}.")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        file = next(parent for parent in (path, *path.parents) if parent.exists())
        return JinguError("there is a file where a folder should be.", where=file, fix=f"Move it away, or {or_else}.")
    what = f"this cannot be written ({error.strerror or error})."
    return JinguError(what, where=path, fix=f"Fix its permissions, or {or_else}.")
