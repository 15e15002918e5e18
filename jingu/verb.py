"""One verb of the command line: what it takes, and how the words after it are read."""

from __future__ import annotations

import argparse
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from jingu.errors import JinguError, either

Argument = tuple[str, dict[str, Any]]
"""A name and what argparse is told of it. A verb's function has a parameter of the same name."""


@dataclass(frozen=True)
class Verb:
    """One verb: a line of help, the function behind it as module:function (of `jingu`), and what it takes."""

    help: str
    target: str
    arguments: tuple[Argument, ...] = ()
    run_file: bool = False
    """Whether it takes RUN.yaml and overrides; its function's first argument is then the configuration."""
    on_ranks: bool = False
    """Whether it takes --processes, which starts the same words as so many ranks that share the model."""

    def function(self) -> Callable[..., int | None]:
        """The function, imported."""
        found: Callable[..., int | None] = pkgutil.resolve_name(f"jingu.{self.target}")
        return found

    def taking(self, *arguments: Argument) -> Verb:
        """The verb with its arguments."""
        if self.on_ranks:
            words = "ranks on this machine that share the model (1 where not given)"
            arguments += (option("--processes", "N", whole(1), words),)
        return replace(self, arguments=arguments)


def place(name: str, metavar: str, words: str) -> Argument:
    """A file or folder that must be given."""
    return name, {"metavar": metavar, "type": path, "help": words}


def option(
    flag: str, metavar: str, convert: Callable[[str], Any], words: str, default: Any = None, **more: Any
) -> Argument:
    """An option with a value; `more` is argparse's."""
    shown = "" if default is None else f" ({default:g})" if isinstance(default, float) else f" ({default})"
    return flag, {"metavar": metavar, "type": convert, "help": words + shown, "default": default, **more}


def several(flag: str, metavar: str, words: str) -> Argument:
    """An option that can be given again."""
    return flag, {"metavar": metavar, "action": "append", "help": f"{words}; can be given again"}


def switch(flag: str, words: str, **more: Any) -> Argument:
    """An option without a value."""
    return flag, {"action": "store_true", "help": words, **more}


def path(text: str) -> Path:
    """A file or folder; a leading ~ is the home folder."""
    return Path(text).expanduser()


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number of at least so much, and at most."""
    allowed = f"{least} or more" if most is None else f"{least} to {most}"

    def convert(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 18 or not least <= int(text) <= (most or math.inf):
            raise argparse.ArgumentTypeError(f"takes a whole number ({allowed}), not {text}.")
        return int(text)

    return convert


def number(fits: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """A number that fits, which is told in words."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"takes a number ({words}), not {text}.")
        return value

    return convert


def one_of(*choices: str) -> Callable[[str], str]:
    """One of some words."""

    def convert(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"takes {either(choices)}, not {text}.")
        return text

    return convert


def part(text: str) -> tuple[int, int]:
    """I/N, the I-th of N parts."""
    one, _, parts = text.partition("/")
    if not (one.isdecimal() and parts.isdecimal() and 1 <= int(one) <= int(parts) <= 99_999):
        raise argparse.ArgumentTypeError(f"takes a part of several, such as 3/8, not {text}.")
    return int(one), int(parts)


def parse(name: str, entry: Verb, words: list[str]) -> dict[str, Any] | None:
    """The arguments of a verb by the names of its function's parameters; None when its help was printed."""
    told = entry.help[0].upper() + entry.help[1:] + "."
    parser = _Parser(prog=f"jingu {name}", description=told, allow_abbrev=False, add_help=False)
    if entry.run_file:
        parser.add_argument("file", metavar="RUN.yaml", type=path, help="the file of the run")
        text = "settings to change, such as optimizer.lr=3e-4"
        parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)
    for flag, known in entry.arguments:
        parser.add_argument(flag, **known)
    parser.add_argument("-h", "--help", action="store_true", help=argparse.SUPPRESS)
    if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        parser.print_help()
        return None
    options, unknown = parser.parse_known_args(words)
    # argparse gives overrides that stand after an option as unknown.
    for word in unknown:
        if word.startswith("-") or not entry.run_file:
            raise _unknown(word, name, entry)
        options.overrides.append(word)
    del options.help
    return vars(options)


class _Parser(argparse.ArgumentParser):
    """argparse, with mistakes told as JinguError."""

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("argument ").removesuffix(".")
        if words.startswith("the following arguments are required: "):
            missing = words.removeprefix("the following arguments are required: ").split(", ")
            words = either(missing, "and") + (" is missing" if len(missing) == 1 else " are missing")
        name, _, reason = words.partition(": ")
        if reason.startswith("expected "):
            words = f"{name} needs a value after it"
        elif reason.startswith("takes "):
            words = f"{name} {reason}"
        raise JinguError(f"{words}.", fix=f"`{self.prog} --help` tells what it takes.")


def _unknown(word: str, name: str, entry: Verb) -> JinguError:
    fix = f"`jingu {name} --help` tells what it takes."
    if not word.startswith("-"):
        return JinguError(f"there is a word too many: {word}.", fix=fix)
    flag, sign, value = word.partition("=")
    near = get_close_matches(flag, [known for known, _ in entry.arguments if known.startswith("-")], n=1)
    if near and not (entry.run_file and "." in flag):
        fix = f"Did you mean {near[0]}?"
    elif entry.run_file:
        fix = f"A setting is written without dashes: {flag.lstrip('-')}={value if sign else 'value'}."
    return JinguError(f"there is no option {flag}.", fix=fix)
