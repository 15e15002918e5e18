"""Text as it grows by tokens: no character is broken, no stop string is let through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What decoders put where bytes are not (yet) a character.
_BROKEN = "\ufffd"


class IncrementalDetokenizer:
    """Turns ids, one by one, into pieces of text that can be shown at once.

    Bytes of an unfinished character, and text that may be the beginning of a stop string, wait for what follows.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Decoded text of ids[begin:] is compared with that of ids[begin:context_end], since decoders treat the first
        # token of a text differently (a leading space) and single tokens may be parts of characters.
        self._begin = 0
        self._context_end = 0
        self._shown = 0
        self._pending = ""
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
        context = self._decode(self._ids[self._begin : self._context_end])
        whole = self._decode(self._ids[self._begin :])[len(context) :]
        sure = whole if final else whole.rstrip(_BROKEN)
        fresh = sure[self._shown :]
        if len(sure) == len(whole) and whole:
            self._begin, self._context_end, self._shown = self._context_end, len(self._ids), 0
        else:
            self._shown = max(self._shown, len(sure))
        return fresh

    def _settle(self, fresh: str, *, final: bool) -> str:
        """Hold back what may become a stop string."""
        text = self._pending + fresh
        stop_places = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if stop_places:
            self.stopped, self._pending = True, ""
            return text[: min(stop_places)]
        keep = 0 if final else max((partial_match_length(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]


def partial_match_length(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
