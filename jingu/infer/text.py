"""Text as it grows by tokens: no character is broken, no stop string is let through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What decoders put where bytes are not (yet) a character.
_BROKEN = "\ufffd"


class TextStream:
    """Turns ids, one by one, into pieces of text that can be shown at once.

    Bytes of an unfinished character, and text that may be the beginning of a stop string, wait for what follows.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Decoded text of ids[begin:] is compared with that of ids[begin:known], since decoders treat the first token
        # of a text differently (a leading space) and single tokens may be parts of characters.
        self._begin = 0
        self._known = 0
        self._shown = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that the token settles; sets `stopped` when a stop string is complete (it is not part of the text)."""
        self._ids.append(token)
        return self._settle(self._fresh(final=False), final=False)

    def finish(self) -> str:
        """The text still held back."""
        return "" if self.stopped else self._settle(self._fresh(final=True), final=True)

    def _fresh(self, *, final: bool) -> str:
        """Characters that were not returned yet."""
        known = self._decode(self._ids[self._begin : self._known])
        whole = self._decode(self._ids[self._begin :])[len(known) :]
        sure = whole if final else whole.rstrip(_BROKEN)
        fresh = sure[self._shown :]
        if len(sure) == len(whole) and whole:
            self._begin, self._known, self._shown = self._known, len(self._ids), 0
        else:
            self._shown = max(self._shown, len(sure))
        return fresh

    def _settle(self, fresh: str, *, final: bool) -> str:
        """Hold back what may become a stop string."""
        text = self._held + fresh
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
