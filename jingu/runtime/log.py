"""Logging: one file per rank; the first rank also logs to the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jingu.errors import JinguError
from jingu.plugins import failing_package
from jingu.runtime.exit_codes import EXIT_FAILED, EXIT_LOST, EXIT_MISTAKE
from jingu.runtime.ranks import RankInfo, is_first_failure, is_lost_connection

LOGGER = logging.getLogger("jingu")


def log_info(message: str) -> None:
    """Log a message to the rank's file, and on the first rank to the terminal."""
    LOGGER.info(message)


def log_warning(message: str) -> None:
    """Log a warning: something went wrong, but the run continues."""
    LOGGER.warning(message)


@contextmanager
def log_to_folder(folder: Path, ranks: RankInfo) -> Iterator[None]:
    """Log to FOLDER/rank-NNNNN.log within the block, and on the first rank also to the terminal.

    An exception that leaves the block is logged too, so that the file of each rank shows how it ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [_FileHandler(folder / f"rank-{ranks.rank:05d}.log", encoding="utf-8")]
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if ranks.is_first:
        handlers.append(_TerminalHandler())
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    for handler in handlers:
        LOGGER.addHandler(handler)
    try:
        yield
    except JinguError as error:
        LOGGER.error("%s", error)
        raise
    except Exception:
        LOGGER.exception("the run failed")
        raise
    finally:
        for handler in handlers:
            LOGGER.removeHandler(handler)
            try:
                handler.close()
            except OSError as error:  # a full disk: the reason and the exit code of the run count, not its log
                print(f"jingu: WARNING: the end of the log in {folder} is missing ({error}).", file=sys.stderr)


@contextmanager
def report_first_failure(ranks: RankInfo) -> Iterator[None]:
    """Report only the exception of the first rank that fails, with the number of that rank.

    The other ranks exit silently, because their failures are the same or follow from the first one.
    """
    try:
        yield
    except Exception as error:
        is_lost = ranks.world > 1 and is_lost_connection(error)
        if is_first_failure(ranks):
            name = f"rank {ranks.rank} of {ranks.world}, on {ranks.host}"
            if is_lost:
                # Print no traceback: it only shows where this rank was waiting, and it is in the log.
                print(f"jingu: {name}, lost its connection to another rank, which has exited.", file=sys.stderr)
                raise SystemExit(EXIT_LOST) from None
            if ranks.world > 1:
                error.add_note(f"This was {name}.")
            raise
        is_mistake = isinstance(error, JinguError) or failing_package(error) is not None
        code = EXIT_MISTAKE if is_mistake else EXIT_FAILED
        raise SystemExit(EXIT_LOST if is_lost else code) from None


class _FileHandler(logging.FileHandler):
    """A file handler that ignores a full disk: the log ends, but the run continues."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        pass


class _TerminalHandler(logging.Handler):
    """Prints above progress bars. It skips errors, because the command line prints them."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        if record.levelno < logging.ERROR:
            prefix = "WARNING: " if record.levelno == logging.WARNING else ""
            with suppress(OSError):  # a terminal that is gone, or a log on a full disk, must not end a run
                tqdm.write(prefix + record.getMessage(), file=sys.stderr)
