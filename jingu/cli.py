"""The command line. The module of a command is imported only when the command runs."""

from __future__ import annotations

import os
import select
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from difflib import get_close_matches

from jingu.command import parse
from jingu.command_table import COMMANDS
from jingu.errors import JinguError, join_words
from jingu.runtime.spinning import sleep_on_busy_machine
from jingu.runtime.stderr import ignore_failing_stderr
from jingu.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; None: those of this process.

    Returns:
        The exit code: the command's (0 for success); 2 for an error that the user can fix; 130 after Ctrl-C; 141 if
        the reader of stdout has gone.
    """
    ignore_failing_stderr()
    if os.getpid() == 1:
        # As the first process of a container, jingu must handle SIGTERM itself: the system has no default action.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with sleep_on_busy_machine():
            code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except JinguError as error:
        print(_wrap("\n".join([f"jingu: {error}", *getattr(error, "__notes__", [])])), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\njingu: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        # Otherwise Python reports an error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        from jingu.plugins import failing_package

        package = failing_package(error)
        if package is None:
            raise
        traceback.print_exception(error)
        fix = "Correct it, or uninstall the package (`jingu plugins` lists what it adds)."
        print(
            _wrap(f"jingu: {package}: the code of this plug-in has raised {type(error).__name__}. {fix}"),
            file=sys.stderr,
        )
        return 2


def _is_stdout_closed() -> bool:
    """Return whether the reader of stdout has gone, as in `jingu ... | head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLERR)
    return bool(poll.poll(0))


def _run(words: list[str]) -> int:
    """Run the command that the arguments name; return its exit code."""
    # Help and version.
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(list(COMMANDS)))
        return 0
    if words[0] == "--version":
        print(f"jingu {__version__}")
        return 0
    name, rest = _find_command(words)
    if name not in COMMANDS:  # the name of a group, with --help
        print(_overview([member for member in COMMANDS if member.startswith(f"{name} ")]))
        return 0
    entry = COMMANDS[name]
    options = parse(name, entry, rest)
    if options is None:  # the command's help was printed
        return 0
    # Start the command again as several ranks, unless this process is one of them.
    if entry.on_ranks and (processes := options.pop("processes") or 1) > 1:
        from jingu.runtime.launcher import launch_local_ranks
        from jingu.runtime.ranks import is_launched

        if not is_launched():
            advice = "Start it again; with more --processes each rank needs less memory."
            return launch_local_ranks(processes, words, advice=advice)
    if not entry.run_file:
        return entry.run(options)
    from jingu.config.load import load_config

    config = load_config(options.pop("file"), options.pop("overrides"))
    return entry.run(options, config)


def _find_command(words: list[str]) -> tuple[str, list[str]]:
    """Return the name of the command at the beginning of the arguments, and the remaining arguments.

    For `GROUP --help`, return the name of the group. Raises JinguError if there is no such command.
    """
    first = words[0]
    # A command such as `evaluate` can be a group too, so look for a subcommand first.
    if " ".join(words[:2]) in COMMANDS:
        return " ".join(words[:2]), words[2:]
    if first in COMMANDS:
        return first, words[1:]
    members = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
    if not members:
        if first.endswith((".yaml", ".yml")):
            raise JinguError("the command is missing.", fix=f"Did you mean `jingu train {first}`?")
        if first.startswith("-"):
            fix = "The first word is a command; `jingu --help` lists them."
            raise JinguError(f"there is no option {first}.", fix=fix)
        raise _unknown_command(words, list(COMMANDS))
    if len(words) == 1:
        raise JinguError(f"{first} needs a subcommand: {join_words(members)}.")
    if words[1] in ("-h", "--help"):
        return first, []
    if words[1] not in members:
        raise _unknown_command([f"{first} {words[1]}"], [f"{first} {member}" for member in members])
    return f"{first} {words[1]}", words[2:]


def _unknown_command(words: list[str], choices: list[str]) -> JinguError:
    """Return the error for an unknown command, with a guess.

    The guess is the choice most similar to the first two words, or to the first one, or else a command whose last word
    is the first word (such as `build`).
    """
    close = [get_close_matches(name, choices, n=1) for name in (" ".join(words[:2]), words[0])]
    same_ending = [name for name in COMMANDS if name.endswith(f" {words[0]}")]
    guess = next((names[0] for names in [*close, same_ending] if names), None)
    fix = f"Did you mean `jingu {guess}`?" if guess else "`jingu --help` lists them."
    return JinguError(f"there is no command {words[0]}.", fix=fix)


def _overview(names: list[str]) -> str:
    """Return the help text that lists commands."""
    width = max(map(len, names))
    lines = "\n".join(f"  {name:<{width}}  {COMMANDS[name].help}" for name in names)
    return (
        "From raw text to a served language model with one tool, one file and one training loop.\n\n"
        f"{lines}\n\n"
        "`jingu COMMAND --help` lists the options of a command. A run is one YAML file; arguments like\n"
        "optimizer.lr=3e-4 after it override single settings."
    )


def _wrap(text: str) -> str:
    """Wrap text to the width of the terminal; return it unchanged if stderr is not a terminal."""
    if not sys.stderr.isatty():
        return text
    width = max(40, os.get_terminal_size(sys.stderr.fileno()).columns)
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
