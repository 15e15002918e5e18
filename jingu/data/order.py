"""A computed order: a permutation of [0, n) that is never stored.

A keyed Feistel network over the smallest even number of bits that holds n, with cycle walking: an image
outside [0, n) is permuted again until it falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). Any part of the order costs the same, at any n.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 8
LARGEST = 1 << 48
"""Most positions a permutation can have."""
SMALL = 256
"""Up to here positions are sorted by a keyed hash: a network of so few bits would mix badly."""


class Permutation:
    """The permutation of [0, n) for a seed and an epoch; the same on every machine."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 1 <= n <= LARGEST:
            raise ValueError(f"a permutation of {n} positions; it must have 1 to {LARGEST}")
        self.n = n
        self._half = np.uint64((n - 1).bit_length() + 1 >> 1)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS, person=b"jingu order")
        self._keys = np.frombuffer(digest.digest(), "<u8")

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every bit depends on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
