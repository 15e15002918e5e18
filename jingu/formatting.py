"""Format numbers and text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

MISSING = "–"


def show_control_characters(value: object) -> str:
    """Return text in which visible symbols replace control characters (except newline and tab) and lone surrogates."""
    return "".join(map(_show_character, str(value)))


def _show_character(character: str) -> str:
    code = ord(character)
    if code < 32 and character not in "\n\t":
        return chr(0x2400 + code)
    return "\ufffd" if 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code & 0xFFFE == 0xFFFE else character


def format_number(value: float) -> str:
    """Return a number with four significant digits, or rounded to an integer from 1,000: 12,345 · 1.712 · 2e-5."""
    if not math.isfinite(value):
        return MISSING
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e+")


def format_short(value: float) -> str:
    """Return a short form of a number, for axes and counts: 800 · 1,200 · 12.5k · 4.2M · 1.3B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return format_number(value)


def format_rounded(value: float) -> str:
    """Return a short form with three significant digits from 10,000: 940 · 1,200 · 42k · 4.21M."""
    return format_short(value if abs(value) < 10_000 else float(f"{value:.3g}"))


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units: 3.2 s · 58 s · 3 min 58 s · 2 h 05 min · 3 d 4 h."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours = minutes // 60
    if not minutes:
        return f"{rest} s"
    if not hours:
        return f"{minutes} min {rest:02} s"
    if hours < 48:
        return f"{hours} h {minutes % 60:02} min"
    return f"{hours // 24} d {hours % 24} h"


def memory_unit(value: float) -> tuple[float, str]:
    """Return the binary unit in which to show a number of bytes, GiB or MiB: its size in bytes, and its name."""
    return (2.0**30, "GiB") if value >= 2**30 else (2.0**20, "MiB")


def format_bytes(count: float) -> str:
    """Return a number of bytes in a decimal unit that fits: 512 B · 4.2 MB · 13.1 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int]) -> None:
    """Print rows under a header, with aligned columns.

    Args:
        right: indices of the columns to align right.
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def format_score(value: float) -> str:
    """Return a value or an error as a cell of a table; N/A if it is unknown."""
    if not math.isfinite(value):
        return "N/A"
    return f"{value:.4g}" if abs(value) > 1e4 else f"{value:.4f}"
