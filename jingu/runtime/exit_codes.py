"""The exit codes of jingu: one meaning for each, in every rank, node and launcher. Does not import torch."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

# An error that jingu does not explain; its traceback was printed.
EXIT_FAILED = 1
# An error that a person must fix; one sentence was printed.
EXIT_MISTAKE = 2
# A node was lost; or a rank ended because its connection to another rank did (EX_UNAVAILABLE of sysexits.h).
EXIT_LOST = 69
# The watchdog has ended the ranks because the run hangs (EX_SOFTWARE).
EXIT_STALLED = 70
# The run was saved after a scheduler's signal (EX_TEMPFAIL).
EXIT_PREEMPTED = 75
# Ctrl-C. The run was saved.
EXIT_INTERRUPTED = 130
# A rank that signal n has killed is 128 + n, as in a shell.
_SIGNALED = 128
# The watchdog kills ranks with this signal, which nobody else uses, so that its kills are not mistaken for others.
WATCHDOG_SIGNAL = signal.SIGRTMAX


class Restart(Enum):
    """When a launcher starts a command again after an exit code."""

    NEVER = "never"
    COUNTED = "with `--max-restarts`"
    ALWAYS = "always"


@dataclass(frozen=True)
class ExitCode:
    """A row of the table of exit codes.

    Attributes:
        code: the code, or how it is computed.
        meaning: what has happened, as the guide says it.
    """

    code: str
    meaning: str
    restart: Restart


# The guide has the same table (tests/runtime/test_exit_codes.py).
EXIT_CODES = (
    ExitCode("0", "the command is complete", Restart.NEVER),
    ExitCode(str(EXIT_FAILED), "an error that jingu does not explain; it prints a traceback", Restart.COUNTED),
    ExitCode(str(EXIT_MISTAKE), "an error that you must fix; one sentence says how", Restart.NEVER),
    ExitCode(str(EXIT_LOST), "a node was lost, or rebooted; start again", Restart.ALWAYS),
    ExitCode(str(EXIT_STALLED), "the run hung, and the watchdog ended it", Restart.COUNTED),
    ExitCode(str(EXIT_PREEMPTED), "saved after a scheduler's signal (SIGTERM, SIGUSR1); start again", Restart.ALWAYS),
    ExitCode(str(EXIT_INTERRUPTED), "Ctrl-C; the run was saved", Restart.NEVER),
    ExitCode(
        f"{_SIGNALED} + n",
        "a rank was killed by signal n: 137 by SIGKILL (often because memory ran out), 139 by SIGSEGV",
        Restart.COUNTED,
    ),
)


def find_restart(code: int) -> Restart:
    """Return when a command with this exit code is started again."""
    return next((row.restart for row in EXIT_CODES if row.code == str(code)), Restart.COUNTED)


def exit_code_of(returncode: int, stop_signals: Collection[int] = ()) -> int:
    """Return the exit code for a return code of `subprocess`, in which a signal is a negative number.

    Args:
        stop_signals: signals by which the launcher was asked to stop, and which it has sent to the rank. They kill a
            rank that does not handle them yet, and has nothing to save.
    """
    if returncode == -WATCHDOG_SIGNAL:
        return EXIT_STALLED
    if -returncode in stop_signals:
        return EXIT_INTERRUPTED if -returncode == signal.SIGINT else EXIT_PREEMPTED
    return _SIGNALED - returncode if returncode < 0 else returncode


def killing_signal(code: int) -> signal.Signals | None:
    """Return the signal that has killed a rank with this exit code; None if none has."""
    if code == EXIT_INTERRUPTED or code - _SIGNALED not in {number.value for number in signal.Signals}:
        return None
    return signal.Signals(code - _SIGNALED)


def combine_exit_codes(codes: Iterable[int], is_node_lost: bool = False, is_whole: bool = True) -> int:
    """Return one exit code for ranks or nodes: that of the cause, not those of ranks that ended because of it.

    Args:
        codes: their exit codes; 0 is success.
        is_node_lost: whether a node was lost, without an exit code.
        is_whole: whether these are all ranks of the run. Then a connection that was lost, without a lost node, is the
            consequence of an unexplained exit.
    """
    failures = [code for code in codes if code]
    if EXIT_MISTAKE not in failures and EXIT_INTERRUPTED not in failures and is_node_lost:
        return EXIT_LOST
    # Libraries abort when a connection ends, so an abort may be a consequence, as EXIT_LOST is.
    consequences = (_SIGNALED + signal.SIGABRT, EXIT_PREEMPTED, EXIT_LOST)
    kills = [code for code in failures if killing_signal(code) not in (None, signal.SIGABRT)]
    other_causes = [code for code in failures if code not in consequences]
    order = (EXIT_MISTAKE, EXIT_INTERRUPTED, *kills, EXIT_STALLED, *other_causes, *consequences)
    code = next((code for code in order if code in failures), 0)
    return EXIT_FAILED if code == EXIT_LOST and is_whole else code
