"""The one error that a user can mend. Everything else is a bug and shows its traceback."""


class JinguError(Exception):
    """A mistake the user can mend: what happened, where, and what to do about it.

    The command line prints it as one readable paragraph and leaves with exit code 2.
    """

    def __init__(self, what: str, *, where: object | None = None, fix: str | None = None) -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where is not None else ""
        remedy = f" {self.fix}" if self.fix else ""
        return f"{place}{self.what}{remedy}"
