"""One command of the command line: its arguments, and how they are parsed."""

from __future__ import annotations

import argparse
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar, is_typeddict

from jingu.errors import JinguError, join_words

T = TypeVar("T")
# Larger numbers are no seeds, and no sizes of anything.
MAX_INTEGER = 10**18

# The name of an argument, and argparse's keywords for it. The command's function has a parameter of the same name.
Argument = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        help: one line.
        target: the function that runs it, as module:function within `jingu`. A parameter whose type is a dataclass or a
            TypedDict takes all options that are its fields.
        arguments: its options and positional arguments.
        run_file: whether it takes RUN.yaml and overrides. Its function's first argument is then the configuration.
        on_ranks: whether it takes --processes, and runs on that many ranks.
    """

    help: str
    target: str
    arguments: tuple[Argument, ...]
    run_file: bool
    on_ranks: bool

    def run(self, options: dict[str, Any], *positional: Any) -> int:
        """Call the function, and return the exit code."""
        function = self.function()
        return function(*positional, **group_options(function, options)) or 0

    def function(self) -> Callable[..., int | None]:
        """Import the function and return it."""
        function: Callable[..., int | None] = pkgutil.resolve_name(f"jingu.{self.target}")
        return function


def command(
    help_line: str, target: str, *arguments: Argument, run_file: bool = False, on_ranks: bool = False
) -> Command:
    """Make a command; see the attributes of `Command`."""
    if on_ranks:
        help_text = "number of ranks on this machine (default: 1)"
        arguments += (option("--processes", "N", integer(1), help_text),)
    return Command(help_line, target, arguments, run_file, on_ranks)


def group_options(function: Callable[..., object], options: dict[str, Any]) -> dict[str, Any]:
    """Return options by the parameters of a function, some of which take several; None means their default."""
    ungrouped = dict(options)
    groups = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind = parameter.annotation
        if is_dataclass(kind) or is_typeddict(kind):
            members = {member: ungrouped.pop(member) for member in kind.__annotations__ if member in ungrouped}
            if members:
                groups[name] = kind(**{member: value for member, value in members.items() if value is not None})
    return {**ungrouped, **groups}


def path_argument(name: str, metavar: str, help_text: str) -> Argument:
    """Return a required path."""
    return name, {"metavar": metavar, "type": expand_path, "help": help_text}


def option(
    name: str, metavar: str, convert: Callable[[str], Any], help_text: str, default: Any = None, **more: Any
) -> Argument:
    """Return an option with a value; `more` is argparse's."""
    if default is not None:
        help_text += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    return name, {"metavar": metavar, "type": convert, "help": help_text, "default": default, **more}


def repeatable_option(name: str, metavar: str, help_text: str, **more: Any) -> Argument:
    """Return an option that can be given several times; `more` is argparse's."""
    return name, {"metavar": metavar, "action": "append", "help": f"{help_text}; can be repeated", **more}


def flag(name: str, help_text: str, **more: Any) -> Argument:
    """Return an option without a value."""
    return name, {"action": "store_true", "help": help_text} | more


def expand_path(text: str) -> Path:
    """Return a path; a leading ~ is the home folder."""
    return Path(text).expanduser()


def converter(read: Callable[[str], T], is_valid: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """Return a function that converts the text of an argument; `expected` describes the values that are valid."""

    def convert(text: str) -> T:
        try:
            value = read(text)
        except ValueError:
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"takes {expected}, not {text}.")
        return value

    return convert


def integer(minimum: int, maximum: int = MAX_INTEGER) -> Callable[[str], int]:
    """Return a converter for whole numbers within limits."""
    limits = f"{minimum} or more" if maximum == MAX_INTEGER else f"{minimum} to {maximum}"
    return converter(int, lambda value: minimum <= value <= maximum, f"a whole number ({limits})")


def number(is_valid: Callable[[float], bool], limits: str) -> Callable[[str], float]:
    """Return a converter for numbers that are valid; `limits` describes them."""
    return converter(float, is_valid, f"a number ({limits})")


def choice(*choices: str) -> Callable[[str], str]:
    """Return a converter for one of several words."""
    return converter(str, choices.__contains__, join_words(choices))


def read_part(text: str) -> tuple[int, int]:
    """Convert I/N, part I of N."""
    index, _, count = text.partition("/")
    return int(index), int(count)


def parse(name: str, entry: Command, words: list[str]) -> dict[str, Any] | None:
    """Return the arguments of a command by the parameters of its function; None if its help was printed."""
    description = entry.help[0].upper() + entry.help[1:] + "."
    parser = _Parser(prog=f"jingu {name}", description=description, allow_abbrev=False, add_help=False)
    if entry.run_file:
        parser.add_argument("file", metavar="RUN.yaml", type=expand_path, help="configuration of the run")
        help_text = "settings to override, such as optimizer.lr=3e-4"
        parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=help_text)
    for argument, keywords in entry.arguments:
        parser.add_argument(argument, **keywords)
    parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    # Help goes before errors, wherever it stands; behind -- it is an argument like any other.
    if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        parser.print_help()
        return None
    options, unknown = parser.parse_known_args(words)
    # argparse reports overrides that follow an option as unknown.
    for word in unknown:
        if word.startswith("-") or not hasattr(options, "overrides"):
            raise _unknown_argument(word, name, entry)
        options.overrides.append(word)
    del options.help
    return vars(options)


class _Parser(argparse.ArgumentParser):
    """argparse, but errors are raised as JinguError."""

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ").removesuffix(".")
        required = "the following arguments are required: "
        if text.startswith(required):
            missing = text.removeprefix(required).split(", ")
            text = join_words(missing, "and") + (" is missing" if len(missing) == 1 else " are missing")
        argument, _, reason = text.partition(": ")
        if reason.startswith("expected "):
            text = f"{argument} needs a value"
        elif reason.startswith("takes "):
            text = f"{argument} {reason}"
        raise JinguError(f"{text}.", fix=f"See `{self.prog} --help`.")


def _unknown_argument(word: str, name: str, entry: Command) -> JinguError:
    if not word.startswith("-"):
        return JinguError(f"there is one argument too many: {word}.", fix=f"See `jingu {name} --help`.")
    option_name, sign, value = word.partition("=")
    options = [argument for argument, _ in entry.arguments if argument.startswith("-")]
    close = get_close_matches(option_name, options, n=1)
    if close and not (entry.run_file and "." in option_name):
        fix = f"Did you mean {close[0]}?"
    elif entry.run_file:
        fix = f"Settings are written without dashes: {option_name.lstrip('-')}={value if sign else 'value'}."
    else:
        fix = f"See `jingu {name} --help`."
    return JinguError(f"there is no option {option_name}.", fix=fix)
