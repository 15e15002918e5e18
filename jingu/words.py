"""Numbers and texts as people read them."""

from __future__ import annotations

import math

ABSENT = "–"


def visible(value: object) -> str:
    """Text with control characters made visible, and no half surrogates."""
    return "".join(map(_visible, str(value)))


def _visible(character: str) -> str:
    code = ord(character)
    if code < 32 and character not in "\n\t":
        return chr(0x2400 + code)
    return "\ufffd" if 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code & 0xFFFE == 0xFFFE else character


def plain(value: float) -> str:
    """Four significant digits, thousands apart: 12,345 · 1.712 · 0.0003 · 2e-5."""
    if not math.isfinite(value):
        return ABSENT
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e+")


def short(value: float) -> str:
    """For axes and counts: 800 · 1,200 · 12.5k · 4.2M · 1.3B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return plain(value)


def rounded(value: float) -> str:
    """A count in three digits: 940 · 1,200 · 42k · 4.21M."""
    return short(value if abs(value) < 10_000 else float(f"{value:.3g}"))


def duration(seconds: float) -> str:
    """3.2 s · 58 s · 3 min 58 s · 2 h 05 min · 3 d 4 h."""
    if not math.isfinite(seconds):
        return ABSENT
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
    """Bytes in the unit in which `value` bytes read well, and its name."""
    return (2.0**30, "GiB") if value >= 2**30 else (2.0**20, "MiB")
