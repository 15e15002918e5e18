"""Allocation of KV cache blocks: reference counts, and a prefix cache of full blocks by the hash of their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

# Two blocks belong to no sequence. The first is never written: it stands where a sequence has no block yet. The second
# takes the keys and values of padding rows, which nobody reads.
ZERO_BLOCK = 0
SCRATCH_BLOCK = 1


class BlockManager:
    """Block numbers with their reference counts.

    A block that nobody refers to stays in the prefix cache while its content has a hash, until its memory is needed;
    the least recently used one is evicted first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._unused = list(range(num_blocks - 1, SCRATCH_BLOCK, -1))
        self._ref_counts = [0] * num_blocks
        self._hash_of_block: dict[int, bytes] = {}
        self._block_of_hash: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can have."""
        return self.num_blocks - 2

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._unused) + len(self._evictable)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks this many tokens fill."""
        return -(-tokens // self.block_size)

    def allocate(self) -> int:
        """Return a block with one reference, evicting the least recently used one if needed."""
        if self._unused:
            block = self._unused.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._block_of_hash[self._hash_of_block.pop(block)]
        self._ref_counts[block] = 1
        return block

    def acquire_cached(self, content: bytes) -> int | None:
        """Return the block with this content's hash, with one more reference; None if there is none."""
        block = self._block_of_hash.get(content)
        if block is not None:
            self._evictable.pop(block, None)
            self._ref_counts[block] += 1
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to an allocated block."""
        self._ref_counts[block] += 1

    def is_shared(self, block: int) -> bool:
        """Return whether there is more than one reference to a block."""
        return self._ref_counts[block] > 1

    def release(self, block: int) -> None:
        """Drop a reference. Without references a block stays in the prefix cache or becomes unused."""
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
    """Return the hash of a block: of its tokens and of the hash of the block before it."""
    return blake2b(previous + b"".join(id_.to_bytes(4, "little") for id_ in token_ids), digest_size=16).digest()
