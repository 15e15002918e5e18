"""A computed order: a permutation of [0, n) that is never stored.

A keyed Feistel network over the smallest even number of bits that holds n, with cycle walking: an image
outside [0, n) is permuted again until it falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). Any part of the order costs the same, at any n.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROUNDS = 8
LARGEST = 1 << 48
"""Most positions a permutation can have."""
SMALL = 256
"""Up to here positions are sorted by a keyed hash: a network of so few bits would mix badly."""

Numbers = npt.NDArray[np.int64]


class Permutation:
    """The permutation of [0, n) for a seed, an epoch and what else tells it from others; the same on every machine."""

    def __init__(self, n: int, seed: int, epoch: int, *more: int) -> None:
        if not 1 <= n <= LARGEST:
            raise ValueError(f"a permutation of {n} positions; it must have 1 to {LARGEST}")
        self.n = n
        self._half = np.uint64((n - 1).bit_length() + 1 >> 1)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = drawn("order", ROUNDS, seed, epoch, *more)

    def __call__(self, positions: Numbers) -> Numbers:
        """What stands at each of the positions, all of them in [0, n)."""
        x = positions.astype(np.uint64)
        if len(x) and int(x.max()) >= self.n:
            raise ValueError(f"a position outside [0, {self.n})")
        if self.n <= SMALL:
            return np.argsort(_mix(_mix(np.arange(self.n, dtype=np.uint64) + self._keys[0]) + self._keys[1]))[x]
        x = self._network(x)
        while len(outside := np.flatnonzero(x >= np.uint64(self.n))):
            x[outside] = self._network(x[outside])
        return x.astype(np.int64)

    def _network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


@dataclass(frozen=True)
class BlockOrder:
    """An order of [0, n) for slow storage: blocks in random order, and their windows mixed within `open` of them.

    So reads stay within a few large blocks at a time. n is cut into blocks of `block`, of which the last may be
    shorter; it takes a random place among the others. Pure and stored nowhere, as `Permutation` is.
    """

    n: int
    block: int
    open: int
    seed: int
    epoch: int

    def __call__(self, positions: Numbers) -> Numbers:
        """What stands at each of the positions, all of them in [0, n)."""
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.n:
            raise ValueError(f"a position outside [0, {self.n})")
        mixed = np.empty_like(positions)
        for group, inside in groups(self._block_at(positions) // self.open):
            first, end = self._starts(np.array([group * self.open, (group + 1) * self.open])).tolist()
            mixed[inside] = first + Permutation(end - first, self.seed, self.epoch, 1, group)(positions[inside] - first)
        turns = self._block_at(mixed)
        return self._identity(turns) * self.block + mixed - self._starts(turns)

    @property
    def _full(self) -> int:
        """Blocks of whole length."""
        return self.n // self.block

    @property
    def _short_turn(self) -> int:
        """The turn at which the short block comes (it may have no windows)."""
        return int(drawn("order", 1, self.seed, self.epoch, 2)[0]) % (self._full + 1)

    def _starts(self, turns: Numbers) -> Numbers:
        """The position at which the block of each turn begins; past the last, n."""
        return np.minimum(
            turns * self.block - np.where(turns > self._short_turn, self.block - self.n % self.block, 0), self.n
        )

    def _block_at(self, positions: Numbers) -> Numbers:
        """The turn to which each position belongs."""
        before = self._short_turn * self.block
        missing = self.block - self.n % self.block
        later = np.maximum((positions + missing) // self.block, self._short_turn)
        return np.where(positions < before, positions // self.block, later)

    def _identity(self, turns: Numbers) -> Numbers:
        """Which block has each turn."""
        blocks = np.full_like(turns, self._full)
        full = turns != self._short_turn
        if self._full:
            places = turns[full] - (turns[full] > self._short_turn)
            blocks[full] = Permutation(self._full, self.seed, self.epoch, 3)(places)
        return blocks


def groups(numbers: Numbers) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Each number that occurs, and where."""
    for number in np.unique(numbers).tolist():
        yield number, numbers == number


def window_offset(sequence_length: int, seed: int, epoch: int) -> int:
    """How far the windows of an epoch are moved, in tokens: not at all in the first, by chance in later ones."""
    return int(drawn("order", 1, seed, epoch, 4)[0]) % sequence_length if epoch else 0


def drawn(purpose: str, count: int, *numbers: int) -> npt.NDArray[np.uint64]:
    """So many numbers below 2^64, by chance: a function of the purpose and of `numbers` alone."""
    key, person = " ".join(map(str, numbers)).encode(), f"jingu {purpose}".encode()
    return np.frombuffer(hashlib.blake2b(key, digest_size=8 * count, person=person).digest(), "<u8")


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every bit depends on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
