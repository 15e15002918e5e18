"""Incremental detokenization: text of a stream of tokens, without incomplete characters and without stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokenizers decode an incomplete UTF-8 sequence to this character.
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Converts token ids, one by one, into pieces of text that can be shown immediately.

    The bytes of an incomplete character are withheld until it is complete. Text that may be the beginning of a stop
    string is withheld until it is clear that it is not.

    Attributes:
        stopped: whether a stop string has occurred. The text ends before it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # New text is the text of ids[begin:] without that of ids[begin:context_end]. New tokens cannot be decoded by
        # themselves: tokenizers may drop the leading space of the first token, and a token may be part of a character.
        self._begin = 0
        self._context_end = 0
        self._num_returned = 0
        self._withheld = ""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """Return the text that is still withheld."""
        return "" if self.stopped else self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        text = self._withheld + self._decode_new(final=final)
        positions = [position for position in map(text.find, self._stop) if position >= 0]
        if positions:
            self.stopped = True
            self._withheld = ""
            return text[: min(positions)]
        # The end of the text may be the beginning of a stop string.
        num_withheld = 0 if final else max((_partial_match_length(text, stop) for stop in self._stop), default=0)
        end = len(text) - num_withheld
        self._withheld = text[end:]
        return text[:end]

    def _decode_new(self, *, final: bool) -> str:
        """Return complete characters that were not returned before; with `final`, incomplete ones too."""
        context = self._decode(self._ids[self._begin : self._context_end])
        text = self._decode(self._ids[self._begin :])[len(context) :]
        complete = text if final else text.rstrip(_REPLACEMENT)
        new = complete[self._num_returned :]
        if text and len(complete) == len(text):
            # All characters are complete: these tokens become the context of the next ones.
            self._begin = self._context_end
            self._context_end = len(self._ids)
            self._num_returned = 0
        else:
            self._num_returned = max(self._num_returned, len(complete))
        return new


def _partial_match_length(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
