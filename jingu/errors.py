"""The one error that a user can mend. Everything else is a bug and shows its traceback."""

from collections.abc import Sequence


class JinguError(Exception):
    """A mistake the user can mend: what happened, where, and what to do about it.

    The command line prints it as one readable paragraph and leaves with exit code 2.
    """

    def __init__(self, what: str, *, where: object | None = None, fix: str | None = None) -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        """Cross a process boundary whole: `args` alone would pass the keywords by position."""
        return _rebuilt, (type(self), self.what, self.where, self.fix)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where is not None else ""
        remedy = f" {self.fix}" if self.fix else ""
        return f"{place}{self.what}{remedy}"


def _rebuilt(kind: type[JinguError], what: str, where: object | None, fix: str | None) -> JinguError:
    return kind(what, where=where, fix=fix)


def refuse(wrong: bool, name: str, value: object, allowed: str) -> None:
    """JinguError where a value is outside what is allowed."""
    if wrong:
        raise JinguError(f"it is {value}, and should be {allowed}.", where=name)


def counted(number: int, noun: str) -> str:
    """`1 shard`, `1,200 shards`, `2 processes`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def either(words: Sequence[str], last: str = "or") -> str:
    """`a`, `a or b`, `a, b or c`."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
