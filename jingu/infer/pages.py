"""Which pages of the key-value cache are whose: counted references, and prefixes found again by what they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

ZEROS, SCRAP = 0, 1
"""Pages that no sequence owns: one that is never written, and one whose content is of no consequence."""


class Pages:
    """Numbers of pages. A page that nobody holds, but whose content has a name, is kept until its room is needed; the
    one not held for the longest goes first."""

    def __init__(self, count: int, tokens: int) -> None:
        self.count, self.tokens = count, tokens
        self._blank = list(range(count - 1, SCRAP, -1))
        self._holders = [0] * count
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def total(self) -> int:
        """Pages that sequences can have."""
        return self.count - 2

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._blank) + len(self._idle)

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-tokens // self.tokens)

    def take(self) -> int:
        """A page of one's own."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._named[self._names.pop(page)]
        self._holders[page] = 1
        return page

    def share(self, name: bytes) -> int | None:
        """The page of this name, held once more; None where there is none."""
        page = self._named.get(name)
        if page is not None:
            self._idle.pop(page, None)
            self._holders[page] += 1
        return page

    def hold(self, page: int) -> None:
        """Hold a page, that somebody holds, once more."""
        self._holders[page] += 1

    def shared(self, page: int) -> bool:
        """Whether more than one holds it."""
        return self._holders[page] > 1

    def release(self, page: int) -> None:
        """Hold a page once less."""
        self._holders[page] -= 1
        if not self._holders[page]:
            if page in self._names:
                self._idle[page] = None
            else:
                self._blank.append(page)

    def forget(self, page: int) -> None:
        """Let a page not be found again."""
        if page in self._names:
            del self._named[self._names.pop(page)]

    def name(self, page: int, name: bytes) -> None:
        """Let a full page be found again, unless another has the same content."""
        if name not in self._named and page not in self._names:
            self._named[name], self._names[page] = page, name


def name_of(before: bytes, ids: Sequence[int]) -> bytes:
    """The name of a page by its tokens and by the name of the page before it."""
    return blake2b(before + b"".join(id_.to_bytes(4, "little") for id_ in ids), digest_size=16).digest()
