"""The exception for errors that the user can fix, and helpers for messages.

Any other exception is a bug, and shows its traceback.
"""

from collections.abc import Sequence
from functools import partial


class JinguError(Exception):
    """An error that the user can fix.

    The command line prints it as one paragraph and exits with code 2.

    Attributes:
        what: what is wrong.
        where: the file, setting or option at fault.
        fix: what to do about it.
    """

    def __init__(self, what: str, *, where: object | None = None, fix: str | None = None) -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the keyword arguments, which `args` would pass by position."""
        return partial(type(self), self.what, where=self.where, fix=self.fix), ()

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where is not None else ""
        fix = f" {self.fix}" if self.fix else ""
        return f"{where}{self.what}{fix}"


def refuse(wrong: bool, name: str, value: object, allowed: str) -> None:
    """Raise JinguError if `wrong`.

    Args:
        wrong: whether the value is wrong.
        name: the setting or option that has the value.
        value: the value.
        allowed: description of the allowed values.
    """
    if wrong:
        raise JinguError(f"it is {value}, and should be {allowed}.", where=name)


def pluralize(number: int, noun: str) -> str:
    """Return a number and its noun: `1 shard`, `1,200 shards`, `2 processes`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def join_words(words: Sequence[str], last: str = "or") -> str:
    """Return words as an enumeration with `last` before the last word: `a`, `a or b`, `a, b or c`."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
