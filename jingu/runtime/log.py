"""Where words go: a file a rank, and the terminal for the first rank."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from jingu.runtime.ranks import Ranks

LOGGER = logging.getLogger("jingu")


def say(message: str) -> None:
    """Tell the person at the terminal (first rank) and the rank's log file."""
    LOGGER.info(message)


def open_log(folder: Path, ranks: Ranks) -> list[logging.Handler]:
    """Log into FOLDER/rank-NNNNN.log, and to the terminal too where this is the first rank."""
    folder.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(folder / f"rank-{ranks.rank:05d}.log", encoding="utf-8")]
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if ranks.is_first:
        handlers.append(_TerminalHandler())
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    for handler in handlers:
        LOGGER.addHandler(handler)
    return handlers


def close_log(handlers: list[logging.Handler]) -> None:
    """Stop logging to `handlers` and close their files."""
    for handler in handlers:
        LOGGER.removeHandler(handler)
        handler.close()


class _TerminalHandler(logging.Handler):
    """Prints above the progress bar rather than through it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(record.getMessage(), file=sys.stderr)
