"""Allocation of KV cache blocks with reference counts, and a prefix cache of full blocks, keyed by content hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

# Two blocks belong to no sequence. The first stays zero: it pads block tables where a sequence has no block yet. The
# second receives the keys and values of padding rows, which are never read.
ZERO_BLOCK = 0
SCRATCH_BLOCK = 1


class BlockManager:
    """Allocates blocks and counts their references.

    A block without references stays in the prefix cache if it has a content hash, until its memory is needed. The least
    recently used block is evicted first.

    Attributes:
        reach: the most tokens that a token attends to in the layers of these blocks, including itself; None: all.
    """

    def __init__(self, num_blocks: int, block_size: int, reach: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reach = reach
        self._unused = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._ref_counts = [0] * num_blocks
        self._hash_of_block: dict[int, bytes] = {}
        self._block_of_hash: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """Number of blocks that sequences can use."""
        return self.num_blocks - 2

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, including evictable blocks of the prefix cache."""
        return len(self._unused) + len(self._evictable)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks this many tokens need."""
        return -(-tokens // self.block_size)

    def most_blocks(self, tokens: int, step_tokens: int = 1) -> int:
        """Return the most blocks that a sequence of this many tokens holds at a time.

        Args:
            step_tokens: the most of its tokens that one step computes.
        """
        if self.reach is None:
            return self.blocks_for(tokens)
        # The window of the step's first token may begin anywhere in a block.
        return min(self.blocks_for(tokens), (self.reach + step_tokens - 3) // self.block_size + 2)

    def first_needed(self, position: int) -> int:
        """Return the index of the first block that a token at this position attends to."""
        return 0 if self.reach is None else max(position + 1 - self.reach, 0) // self.block_size

    def release_behind(self, blocks: list[int], position: int) -> None:
        """Release the blocks that neither the token at this position nor a later one attends to. The zero block takes
        their place in the list."""
        for index in range(self.first_needed(position) - 1, -1, -1):
            if blocks[index] == ZERO_BLOCK:
                break
            self.release(blocks[index])
            blocks[index] = ZERO_BLOCK

    def release_all(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a sequence."""
        for block in blocks:
            if block != ZERO_BLOCK:
                self.release(block)

    def cached_prefix(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """Return the numbers of leading blocks, up to `most`, after which a sequence can continue: those that it then
        attends to are cached."""
        numbers = [0]
        run = 0
        for count, content in enumerate(hashes[:most], 1):
            run = run + 1 if content in self._block_of_hash else 0
            if run >= count - self.first_needed(count * self.block_size):
                numbers.append(count)
            elif self.reach is None:
                break
        return numbers

    def acquire_prefix(self, hashes: Sequence[bytes], count: int) -> list[int]:
        """Add references to the cached blocks that a sequence attends to after its first `count` blocks, and return
        these blocks."""
        first = self.first_needed(count * self.block_size)
        blocks = [ZERO_BLOCK] * first
        for content in hashes[first:count]:
            block = self._block_of_hash[content]
            self._evictable.pop(block, None)
            self._ref_counts[block] += 1
            blocks.append(block)
        return blocks

    def allocate(self) -> int:
        """Return a block with one reference, evicting the least recently used one if needed."""
        if self._unused:
            block = self._unused.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._block_of_hash[self._hash_of_block.pop(block)]
        self._ref_counts[block] = 1
        return block

    def acquire_all(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block of a sequence."""
        for block in blocks:
            self._ref_counts[block] += block != ZERO_BLOCK

    def is_shared(self, block: int) -> bool:
        """Return whether there is more than one reference to a block."""
        return self._ref_counts[block] > 1

    def release(self, block: int) -> None:
        """Drop a reference. A block without references becomes evictable if it is cached, else unused."""
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        if block in self._hash_of_block:
            self._evictable[block] = None
        else:
            self._unused.append(block)

    def cache(self, block: int, content: bytes) -> None:
        """Put a full block into the prefix cache, unless another block has the same content."""
        if content not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[content] = block
            self._hash_of_block[block] = content

    def uncache(self, block: int) -> None:
        """Remove a block from the prefix cache."""
        if block in self._hash_of_block:
            del self._block_of_hash[self._hash_of_block.pop(block)]


def hash_block(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the content hash of a block: the hash of its tokens and of the previous block's hash."""
    return blake2b(previous + b"".join(id_.to_bytes(4, "little") for id_ in token_ids), digest_size=16).digest()
