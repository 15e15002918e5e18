"""Pseudo-random permutations that are computed instead of stored.

A permutation of [0, n) is a keyed Feistel network over the smallest even number of bits that holds n, with cycle
walking: an image outside [0, n) is permuted again until it falls inside (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002). The cost of any part of the order does not depend on n, and no order is stored in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROUNDS = 8
MAX_SIZE = 1 << 48
# Up to this size, positions are sorted by a keyed hash instead, as a network of so few bits would mix poorly.
SORTED_SIZE = 256

Int64Array = npt.NDArray[np.int64]


class Permutation:
    """The permutation of [0, n) for a seed, an epoch and further ids; the same on every machine."""

    def __init__(self, n: int, seed: int, epoch: int, *ids: int) -> None:
        if not 1 <= n <= MAX_SIZE:
            raise ValueError(f"a permutation must have 1 to {MAX_SIZE} positions, not {n}")
        self.n = n
        # The network splits a number into two halves of equal width.
        self._half_bits = np.uint64((n - 1).bit_length() + 1 >> 1)
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)
        self._keys = random_uint64("order", ROUNDS, seed, epoch, *ids)

    def __call__(self, positions: Int64Array) -> Int64Array:
        """Return the image of each position. Raises ValueError for positions outside [0, n)."""
        x = positions.astype(np.uint64)
        if len(x) and int(x.max()) >= self.n:
            raise ValueError(f"a position outside [0, {self.n})")
        if self.n <= SORTED_SIZE:
            hashes = mix_bits(mix_bits(np.arange(self.n, dtype=np.uint64) + self._keys[0]) + self._keys[1])
            return np.argsort(hashes)[x]
        x = self._feistel(x)
        # Cycle walking. The network covers at most 4 n numbers, so few rounds are enough.
        while len(outside := np.flatnonzero(x >= np.uint64(self.n))):
            x[outside] = self._feistel(x[outside])
        return x.astype(np.int64)

    def _feistel(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        high = x >> self._half_bits
        low = x & self._half_mask
        for key in self._keys:
            high, low = low, high ^ (mix_bits(low + key) & self._half_mask)
        return (high << self._half_bits) | low


@dataclass(frozen=True)
class BlockPermutation:
    """A permutation of [0, n) for slow storage: blocks in random order, windows mixed within a few open blocks.

    Reads stay within `open_blocks` large blocks at a time. [0, n) is cut into blocks of `block_size`; the last one
    may be shorter and takes a random turn among the others. Nothing is stored, as in `Permutation`.
    """

    n: int
    block_size: int
    open_blocks: int
    seed: int
    epoch: int

    def __call__(self, positions: Int64Array) -> Int64Array:
        """Return the image of each position. Raises ValueError for positions outside [0, n)."""
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.n:
            raise ValueError(f"a position outside [0, {self.n})")
        # First mix the positions within each group of open blocks.
        mixed_positions = np.empty_like(positions)
        for group, mask in masks_by_value(self._turns(positions) // self.open_blocks):
            turns = np.array([group * self.open_blocks, (group + 1) * self.open_blocks])
            start, end = self._turn_starts(turns).tolist()
            mixed_positions[mask] = start + self._permutation(end - start, 1, group)(positions[mask] - start)
        # Then replace the turn of each position by the block that has this turn.
        turns = self._turns(mixed_positions)
        return self._blocks(turns) * self.block_size + mixed_positions - self._turn_starts(turns)

    def _permutation(self, n: int, *ids: int) -> Permutation:
        return Permutation(n, self.seed, self.epoch, *ids)

    @property
    def _num_full_blocks(self) -> int:
        return self.n // self.block_size

    @property
    def _num_missing(self) -> int:
        """Windows by which the short block is shorter than the others."""
        return self.block_size - self.n % self.block_size

    @property
    def _short_turn(self) -> int:
        """The turn of the short block, which may be empty."""
        return int(random_uint64("order", 1, self.seed, self.epoch, 2)[0]) % (self._num_full_blocks + 1)

    def _turn_starts(self, turns: Int64Array) -> Int64Array:
        """Return the first position of each turn; n for turns past the last."""
        shift = np.where(turns > self._short_turn, self._num_missing, 0)
        return np.minimum(turns * self.block_size - shift, self.n)

    def _turns(self, positions: Int64Array) -> Int64Array:
        """Return the turn to which each position belongs."""
        after_short = np.maximum((positions + self._num_missing) // self.block_size, self._short_turn)
        is_before = positions < self._short_turn * self.block_size
        return np.where(is_before, positions // self.block_size, after_short)

    def _blocks(self, turns: Int64Array) -> Int64Array:
        """Return the block that has each turn."""
        blocks = np.full_like(turns, self._num_full_blocks)
        is_full = turns != self._short_turn
        if self._num_full_blocks:
            full_turns = turns[is_full] - (turns[is_full] > self._short_turn)
            blocks[is_full] = self._permutation(self._num_full_blocks, 3)(full_turns)
        return blocks


def masks_by_value(values: Int64Array) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
    """Yield each distinct value and the mask of where it occurs."""
    for value in np.unique(values).tolist():
        yield value, values == value


def window_offset(sequence_length: int, seed: int, epoch: int) -> int:
    """Return the offset of an epoch's windows in tokens: 0 in the first epoch, random in later ones."""
    if epoch == 0:
        return 0
    return int(random_uint64("order", 1, seed, epoch, 4)[0]) % sequence_length


def random_uint64(purpose: str, count: int, *numbers: int) -> npt.NDArray[np.uint64]:
    """Return `count` random 64-bit numbers: a pure function of the purpose and of `numbers`.

    Changing what this returns changes the samples of every run that is resumed.
    """
    message = " ".join(map(str, numbers)).encode()
    digest = hashlib.blake2b(message, digest_size=8 * count, person=f"jingu {purpose}".encode()).digest()
    return np.frombuffer(digest, "<u8")


def mix_bits(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, 2014): every bit depends on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
