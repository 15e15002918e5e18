"""The prefix cache of models with states: copies of the states at some borders of blocks.

Blocks of the KV cache have what attention needs of the tokens before; mixers with a state need their state there. It is
kept where steps of prompts end: at whole chunks of the mixers, so that a sequence that continues from it gets the same
numbers, to the bit. States of generated tokens are not kept, since they are computed token by token and not by chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from jingu.infer.kv_cache import BlockTable
from jingu.model.chunked_scan import CHUNK_SIZE
from jingu.model.mixer_parts import MixerState


class StateCache:
    """States by the content hash of the last block before them. The least recently used ones are dropped.

    Attributes:
        capacity: number of prefixes whose states are kept.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        self.capacity = capacity
        self._block_size = block_size
        self._states: OrderedDict[bytes, Mapping[int, MixerState]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def last_border(self, tokens: int) -> int:
        """Return the last position, up to a number of tokens, at which states can be kept."""
        size = max(CHUNK_SIZE, self._block_size)
        return tokens // size * size

    def select(self, hashes: Sequence[bytes], numbers: Sequence[int]) -> list[int]:
        """Return those numbers of leading blocks after which states are kept; 0 is always one of them."""
        return [number for number in numbers if number == 0 or hashes[number - 1] in self._states]

    def keep(self, table: BlockTable, hashes: Sequence[bytes], position: int) -> None:
        """Keep the states of a sequence that has computed its tokens before this position of its prompt."""
        if position == 0 or position != self.last_border(position):
            return
        content = hashes[position // self._block_size - 1]
        self._states[content] = dict(table.states)
        self._states.move_to_end(content)
        if len(self._states) > self.capacity:
            self._states.popitem(last=False)

    def restore(self, content: bytes) -> dict[int, MixerState]:
        """Return the states after a block. They may be shared: states are replaced, never changed in place."""
        self._states.move_to_end(content)
        return dict(self._states[content])

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Drop the states after blocks with these hashes."""
        for content in hashes:
            self._states.pop(content, None)
