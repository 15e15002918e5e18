"""A command of the command line: its arguments, their types, and how they are parsed."""

from __future__ import annotations

import argparse
import gc
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, is_typeddict

from jingu.errors import JinguError, join_words

T = TypeVar("T")
# Largest integer argument: larger seeds and sizes make no sense.
_MAX_INTEGER = 10**18
# Keys of an entry in the table of commands that are not keywords of argparse.
_OWN_KEYS = frozenset({"name", "type", "min", "above", "max", "repeat", "mode"})

# The name of an argument and its keywords for argparse. The command's function has a parameter of the same name.
Argument = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        help: one line of help.
        target: the function that runs the command, as module:function within `jingu`. A parameter of the function
            whose type is a dataclass or a TypedDict receives all options that are its fields.
        arguments: options and positional arguments.
        run_file: whether the command takes RUN.yaml and overrides. The function's first argument is then the
            configuration.
        on_ranks: whether the command takes --processes, and runs on that many ranks.
    """

    help: str
    target: str
    arguments: tuple[Argument, ...]
    run_file: bool
    on_ranks: bool

    def run(self, options: dict[str, Any], *positional: Any) -> int:
        """Call the function with parsed options, and return the exit code."""
        function = self.function()
        return function(*positional, **group_options(function, options)) or 0

    def function(self) -> Callable[..., int | None]:
        """Import the function and return it."""
        # Imported objects live until the end, so garbage collection during an import finds nothing, but takes a tenth
        # of its time. Freeze these objects, so that later collections skip them too.
        gc.disable()
        try:
            function: Callable[..., int | None] = pkgutil.resolve_name(f"jingu.{self.target}")
        finally:
            _freeze_once()
            gc.enable()
        return function


@cache
def _freeze_once() -> None:
    """Freeze all objects, only the first time: a program that runs several commands may have garbage of earlier ones.

    Asking for the number of frozen objects would count all of them each time.
    """
    gc.freeze()


def group_options(function: Callable[..., object], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options as keyword arguments of a function.

    Options that are fields of a parameter's dataclass or TypedDict are combined into an object of that type; those
    that are None keep the default of their field.
    """
    ungrouped = dict(options)
    groups = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind = parameter.annotation
        if is_dataclass(kind) or is_typeddict(kind):
            members = {member: ungrouped.pop(member) for member in kind.__annotations__ if member in ungrouped}
            if members:
                groups[name] = kind(**{member: value for member, value in members.items() if value is not None})
    return {**ungrouped, **groups}


def read_argument(entry: Mapping[str, Any]) -> Argument:
    """Return an argument of a command, given its entry in the table.

    Args:
        entry: the keys of the entry. `name`: name of the argument; `type`: text (default), integer, number, flag, part,
            path, "path or URL"; `min`, `above`, `max`: limits of a number; `choices`: the allowed texts; `repeat`:
            whether the option can be repeated; `mode`: the option sets the parameter `mode` to this constant. The
            other keys are keywords of argparse.
    """
    keywords = {key: value for key, value in entry.items() if key not in _OWN_KEYS}
    default = entry.get("default")
    if default is not None:
        keywords["help"] += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
    if "mode" in entry:
        keywords |= {"action": "store_const", "const": entry["mode"], "dest": "mode"}
    elif entry.get("type") == "flag":
        keywords["action"] = "store_true"
    elif entry.get("repeat"):
        keywords["action"] = "append"
        keywords["help"] += "; can be repeated"
    else:
        keywords["type"] = _converter(entry)
    return entry["name"], keywords


def _converter(entry: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return the function that converts the text of an argument."""
    kind = entry.get("type", "text")
    if "choices" in entry:
        return _check(str, entry["choices"].__contains__, join_words(entry["choices"]))
    if kind in ("integer", "number"):
        return _number(int if kind == "integer" else float, entry)
    if kind == "part":
        return _check(_read_part, _is_part, "a part of several, such as 3/8")
    converters: dict[str, Callable[[str], Any]] = {"text": str, "path": expand_path, "path or URL": _path_or_url}
    return converters[kind]


def _number(read: Callable[[str], float], entry: Mapping[str, Any]) -> Callable[[str], float]:
    """Return a function that converts text to a number and checks the limits of an entry."""
    least = entry.get("min", entry.get("above"))
    largest = entry.get("max", _MAX_INTEGER if read is int else sys.float_info.max)

    def is_valid(value: float) -> bool:
        return least <= value <= largest and value != entry.get("above")

    limits = f"above {least}" if "above" in entry else f"{least} or more"
    if "max" in entry:
        limits = f"above {least}, at most {largest}" if "above" in entry else f"{least} to {largest}"
    return _check(read, is_valid, f"a {'whole ' * (read is int)}number ({limits})")


def _read_part(text: str) -> tuple[int, int]:
    """Convert I/N (part I of N) to two integers."""
    index, _, count = text.partition("/")
    return int(index), int(count)


def _is_part(part: tuple[int, int]) -> bool:
    return 1 <= part[0] <= part[1] <= 99_999


def expand_path(text: str) -> Path:
    """Return a path, in which a leading ~ is replaced by the home folder."""
    return Path(text).expanduser()


def _path_or_url(text: str) -> Any:
    from jingu.checkpoint import remote

    return remote.checkpoint_path(text) if "://" in text else expand_path(text)


def _check(read: Callable[[str], T], is_valid: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """Return a function that converts and checks the text of an argument.

    Args:
        read: converts the text; raises ValueError if it cannot.
        is_valid: whether a value is allowed.
        expected: description of the allowed values, for the error message.
    """

    def convert(text: str) -> T:
        try:
            value = read(text)
        except ValueError:
            value = None
        if value is None or not is_valid(value):
            raise argparse.ArgumentTypeError(f"takes {expected}, not {text}.")
        return value

    return convert


def parse(name: str, entry: Command, words: list[str]) -> dict[str, Any] | None:
    """Parse the arguments of a command.

    Args:
        name: name of the command, for messages.
        entry: the command.
        words: the arguments after the name.

    Returns:
        The values by the names of arguments; None if help was requested and printed.

    Raises:
        JinguError: an argument is missing, unknown or invalid.
    """
    description = entry.help[0].upper() + entry.help[1:] + "."
    parser = _Parser(prog=f"jingu {name}", description=description, allow_abbrev=False, add_help=False)
    parser.words = words
    if entry.run_file:
        parser.add_argument("file", metavar="RUN.yaml", type=expand_path, help="configuration of the run")
        help_text = "settings to override, such as optimizer.lr=3e-4"
        parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=help_text)
    for argument, keywords in entry.arguments:
        parser.add_argument(argument, **keywords)
    parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    # --help has precedence over errors, wherever it is; after -- it is an argument like any other.
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
    """An argument parser that raises JinguError, with messages in jingu's style.

    Attributes:
        words: the arguments to parse, for messages.
    """

    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message, in jingu's words, as a JinguError."""
        text = message.removeprefix("argument ").removesuffix(".")
        required = "the following arguments are required: "
        if text.startswith(required):
            missing = text.removeprefix(required).split(", ")
            # Some commands take another command, to which all options after it belong.
            late = [option for option in missing if any(word.partition("=")[0] == option for word in self.words)]
            if late:
                what = f"{late[0]} follows the command, as if it were an option of that command."
                raise JinguError(what, fix=f"Write {late[0]} before the command.")
            text = join_words(missing, "and") + (" is missing" if len(missing) == 1 else " are missing")
        argument, _, reason = text.partition(": ")
        if reason.startswith("expected "):
            text = f"{argument} needs a value"
        elif reason.startswith("takes "):
            text = f"{argument} {reason}"
        raise JinguError(f"{text}.", fix=f"See `{self.prog} --help`.")


def _unknown_argument(word: str, name: str, entry: Command) -> JinguError:
    """Return the error for an argument that the command does not have, with a suggestion."""
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
