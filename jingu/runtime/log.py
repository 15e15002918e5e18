"""Where words go: a file a rank, and the terminal for the first rank."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jingu.errors import JinguError
from jingu.runtime.ranks import Ranks, first_to_fail

LOGGER = logging.getLogger("jingu")


def say(message: str) -> None:
    """Tell the person at the terminal (first rank) and the rank's log file."""
    LOGGER.info(message)


def warn(message: str) -> None:
    """As `say`, of what went wrong while the run goes on."""
    LOGGER.warning(message)


@contextmanager
def logging_to(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Log into FOLDER/rank-NNNNN.log, and to the terminal too where this is the first rank. What breaks the block
    off is logged as well, so that each rank's file tells how it ended."""
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
        LOGGER.exception("the run broke off")
        raise
    finally:
        for handler in handlers:
            LOGGER.removeHandler(handler)
            handler.close()


@contextmanager
def one_voice(ranks: Ranks) -> Iterator[None]:
    """Let only the first rank that fails tell of it, and which rank it is. The others leave quietly: their failures
    follow from that one, or are the same one."""
    try:
        yield
    except Exception as error:
        if first_to_fail(ranks):
            me = f"rank {ranks.rank} of {ranks.world}, on {ranks.host}"
            if re.search(r"Connection (reset|closed) by peer", str(error)):
                # Its traceback, which is in its log, tells only where it waited.
                print(f"jingu: {me}, lost its connection to another rank, which has ended.", file=sys.stderr)
                raise SystemExit(1) from None
            if ranks.world > 1:
                error.add_note(f"This was {me}.")
            raise
        raise SystemExit(2 if isinstance(error, JinguError) else 1) from None


class _FileHandler(logging.FileHandler):
    """On a full disk the log ends, and the run does not."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        pass


class _TerminalHandler(logging.Handler):
    """Prints above the progress bar rather than through it. Errors reach the terminal by the command line."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        if record.levelno < logging.ERROR:
            loud = "WARNING: " if record.levelno == logging.WARNING else ""
            tqdm.write(loud + record.getMessage(), file=sys.stderr)
