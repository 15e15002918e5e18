"""The scheduler: it selects the tokens of each step, and allocates KV cache blocks.

Waiting sequences are admitted in the order of arrival, as long as there are free blocks for their prompts. A step
computes one token of every decoding sequence, and a chunk of the prompts of the others (chunked prefill). If there are
too few blocks, the sequence admitted last is preempted: its blocks are freed, it waits, and it is computed again later,
with the same results.

Schedules do not depend on the rank, so that all ranks of a distributed engine have the same one.
"""

from __future__ import annotations

import time
from collections import abc, deque
from collections.abc import Iterator
from dataclasses import dataclass

from jingu.infer.block_manager import ZERO_BLOCK, BlockManager, hash_block
from jingu.infer.kv_cache import BlockTable, PagedKVCache
from jingu.infer.pacing import PrefillPacer
from jingu.infer.sequence import Sequence, SequenceGroup
from jingu.infer.state_cache import StateCache
from jingu.model.chunked_scan import CHUNK_SIZE


@dataclass(frozen=True)
class ScheduledSequence:
    """The tokens of a sequence in a step: its next `num_tokens` tokens, followed by draft tokens."""

    sequence: Sequence
    num_tokens: int
    draft_tokens: list[int]


class Scheduler:
    """The queues of waiting and running sequences.

    Args:
        pools: allocate the KV cache blocks of each pool.
        cache: has the contents of the blocks.
        max_num_seqs: maximum number of running sequences.
        prefill_chunk_size: maximum number of prompt tokens in a step.
        states: keeps states of prompts, for models with mixers that have some.
        pacer: reduces that number in steps that also generate, in which prompts then share it; None: prompts are
            computed one after the other.
    """

    def __init__(
        self,
        pools: abc.Sequence[BlockManager],
        cache: PagedKVCache,
        max_num_seqs: int,
        prefill_chunk_size: int,
        states: StateCache,
        pacer: PrefillPacer | None = None,
    ) -> None:
        self._pacer = pacer
        self._pools = pools
        self._block_size = pools[0].block_size
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk_size = prefill_chunk_size
        self._states = states
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prefix_cache_hits = 0

    def admit(self) -> Sequence | None:
        """Move waiting sequences to the running ones. Return the sequence whose source the encoder reads in this step:
        at most one, so that the encoder's result does not depend on other sequences."""
        # 1. Find the content of the blocks that running sequences are about to fill.
        pending = {
            content
            for running in self.running
            for content in running.block_hashes[running.num_computed // self._block_size :]
        }
        # 2. Limit texts to embed to one step's tokens, so that they take turns with prompts.
        pooled_tokens = sum(running.num_uncomputed for running in self.running if running.group.request.pooling)
        # 3. Admit sequences in order; skip those that have to wait for something else than free blocks.
        skipped_sequences: deque[Sequence] = deque()
        encoding = None
        while self.waiting and encoding is None and self._has_slots(self.waiting[0].group):
            sequence = self.waiting.popleft()
            if sequence.group.request.pooling:
                if pooled_tokens >= self._prefill_chunk_size:
                    skipped_sequences.append(sequence)
                    continue
                pooled_tokens += len(sequence.token_ids)
            # The last token is always computed, for its logits; so are all tokens if the request needs their outputs.
            hashes: list[bytes] = []
            if sequence.group.shares_blocks and not sequence.needs_all_tokens:
                hashes = self._hash_blocks(sequence, self._shared_tokens(sequence, len(sequence.token_ids) - 1))
            num_cached = self._cached_prefix(hashes, has_state=sequence.group.has_state)
            tables = [pool.acquire_prefix(hashes, num_cached) for pool in self._pools]
            full = any(self._num_new(pool, table, sequence) > pool.num_free for pool, table in self._each(tables))
            # Wait for a block that another sequence is about to fill, rather than compute it twice.
            coming = num_cached < len(hashes) and hashes[num_cached] in pending
            if full or coming:
                for pool, table in self._each(tables):
                    pool.release_all(table)
                skipped_sequences.append(sequence)
                if full:
                    break
                continue
            self._start(sequence, tables)
            if sequence.group.has_state and num_cached:
                sequence.table.states = self._states.restore(hashes[num_cached - 1])
            pending |= set(hashes[num_cached:])
            encoding = sequence if sequence.group.encoder_ids is not None else None
        self.waiting = skipped_sequences + self.waiting
        return encoding

    def _has_slots(self, group: SequenceGroup) -> bool:
        """Return whether `max_num_seqs` leaves room for a sequence of a group, with all sequences that it forks into.
        A running group that forks counts with all of its forks."""
        forking = {id(running.group): running.group for running in self.running if running.group.forks}
        num_slots = sum(not running.group.forks for running in self.running)
        num_slots += sum(running.num_forks for running in forking.values())
        return num_slots + group.num_forks <= self._max_num_seqs

    def _each(self, tables: list[list[int]]) -> Iterator[tuple[BlockManager, list[int]]]:
        """Yield each pool with a sequence's blocks in it."""
        return zip(self._pools, tables, strict=True)

    def _shared_tokens(self, sequence: Sequence, tokens: int) -> int:
        """Return how many of a sequence's first tokens may be in shared blocks: with states, those of the prompt up to
        the last position at which states are kept."""
        group = sequence.group
        return self._states.last_border(min(tokens, len(group.prompt_ids))) if group.has_state else tokens

    def _cached_prefix(self, hashes: abc.Sequence[bytes], *, has_state: bool) -> int:
        """Return the number of leading blocks with these hashes after which a sequence can continue in every pool."""
        numbers = self._pools[0].cached_prefix(hashes, len(hashes))
        for pool in self._pools[1:]:
            usable = set(pool.cached_prefix(hashes, numbers[-1]))
            numbers = [number for number in numbers if number in usable]
        return (self._states.select(hashes, numbers) if has_state else numbers)[-1]

    def _num_new(self, pool: BlockManager, prefix_blocks: list[int], sequence: Sequence) -> int:
        """Return how many blocks a waiting sequence allocates in a pool until its first new token."""
        num_tokens = len(sequence.token_ids) + sequence.group.request.generates
        group = sequence.group
        step_tokens = most_step_tokens(self._prefill_chunk_size, group.has_state, group.bidirectional.stop)
        num_prefix_blocks = sum(block != ZERO_BLOCK for block in prefix_blocks)
        num_later_blocks = pool.blocks_for(num_tokens) - len(prefix_blocks)
        return min(num_later_blocks, pool.most_blocks(num_tokens, step_tokens) - num_prefix_blocks)

    def _start(self, sequence: Sequence, tables: list[list[int]]) -> None:
        sequence.table = BlockTable(tables)
        sequence.num_cached_blocks = len(tables[0])
        sequence.num_computed = sequence.num_cached_blocks * self._block_size
        self.running.append(sequence)
        group = sequence.group
        if not group.start_time:
            group.start_time = time.perf_counter()
            group.cached_tokens = max(sequence.num_computed - group.num_virtual_tokens, 0)
            self.prefix_cache_hits += group.cached_tokens

    def schedule(self, drafts: abc.Mapping[Sequence, list[int]]) -> list[ScheduledSequence]:
        """Select the tokens of a step and allocate blocks for them. Sequences with a single token come first.

        Args:
            drafts: draft tokens of decoding sequences, to be verified in the step.
        """
        batch: list[ScheduledSequence] = []
        order, budget, most = list(self.running), self._prefill_chunk_size, {}
        prompts = [sequence for sequence in order if sequence.num_uncomputed > 1]
        if self._pacer is not None and prompts:
            budget = self._pacer.num_tokens(len(prompts) < len(order))
            # The oldest prompt gets half of the tokens, and those that later ones leave; of these, short ones come
            # first, so that they do not wait for long ones.
            oldest, *later = prompts
            most[oldest] = budget - min(budget // 2, sum(sequence.num_uncomputed for sequence in later))
            order.sort(key=lambda sequence: (sequence is not oldest, sequence.num_uncomputed))
        for sequence in order:
            # Bidirectional positions are computed together, even beyond the budget; decoding does not use the budget.
            is_bidirectional = budget > 0 and sequence.num_computed < sequence.group.bidirectional.stop
            if is_bidirectional or sequence.num_uncomputed == 1:
                num_tokens = sequence.num_uncomputed
            else:
                num_tokens = self._next_tokens(sequence, min(budget, most.get(sequence, budget)))
            # The sequence may have been preempted by an earlier one.
            if num_tokens < 1 or sequence not in self.running:
                continue
            draft_tokens = self._allocate(sequence, num_tokens, drafts.get(sequence, []))
            if draft_tokens is None:
                continue
            if sequence.num_uncomputed > 1:
                budget -= num_tokens
            batch.append(ScheduledSequence(sequence, num_tokens, draft_tokens))
        # Drop sequences that were preempted after they were scheduled.
        batch = [item for item in batch if item.sequence in self.running]
        return sorted(batch, key=lambda item: item.num_tokens + len(item.draft_tokens) > 1)

    def _next_tokens(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens of a sequence the next step computes.

        The prompt of a model with states is divided at whole chunks, and at the last of them, where states are kept for
        other sequences. A step ends with it, since generated tokens are computed one by one.
        """
        if budget < 1:
            return 0
        group = sequence.group
        num_prompt = len(group.prompt_ids) - sequence.num_computed
        if not group.has_state or num_prompt <= 0:
            return min(sequence.num_uncomputed, budget)
        # A whole chunk may exceed the budget.
        num_tokens = min(max(budget - budget % CHUNK_SIZE, CHUNK_SIZE), num_prompt)
        border = self._shared_tokens(sequence, len(group.prompt_ids)) - sequence.num_computed
        return min(num_tokens, border) if group.shares_blocks and border > 0 else num_tokens

    def _allocate(self, sequence: Sequence, num_tokens: int, draft_tokens: list[int]) -> list[int] | None:
        """Allocate blocks for a sequence's next tokens, preempting others if there are too few. Return the draft tokens
        that there is room for; None if the sequence itself was preempted."""
        # 1. Find how many blocks each pool lacks. All tables are equally long.
        tables = sequence.table.blocks
        last = sequence.num_computed // self._block_size
        # A block that another fork refers to is copied before it is written (copy-on-write).
        has_last = last < len(tables[0])
        copies = [has_last and pool.is_shared(table[last]) for pool, table in self._each(tables)]
        end = sequence.num_computed + num_tokens
        num_new = self._pools[0].blocks_for(end + len(draft_tokens)) - len(tables[0])
        if draft_tokens and not self._has_free(num_new, copies):
            # Draft tokens are not worth a preemption.
            draft_tokens = []
            num_new = self._pools[0].blocks_for(end) - len(tables[0])
        # 2. Make room.
        while not self._has_free(num_new, copies) and sequence in self.running:
            self._preempt(self.running[-1])
        if sequence not in self.running:
            return None
        # 3. Allocate.
        for number, (pool, table) in enumerate(self._each(tables)):
            if copies[number]:
                copy = pool.allocate()
                self._cache.copy(number, table[last], copy)
                pool.release(table[last])
                table[last] = copy
            table += [pool.allocate() for _ in range(num_new)]
        return draft_tokens

    def _has_free(self, num_new: int, copies: abc.Sequence[bool]) -> bool:
        """Return whether every pool has so many free blocks, and one more if a block is copied."""
        return all(num_new + copy <= pool.num_free for pool, copy in zip(self._pools, copies, strict=True))

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's blocks and move it to the front of the queue; a group that forks starts over as a whole."""
        group = sequence.group
        for running in self.running_of(group) if group.forks else [sequence]:
            self.remove(running)
        group.hypotheses.clear()
        self.waiting.appendleft(group.sequences[0 if group.forks else sequence.index])

    def running_of(self, group: SequenceGroup) -> list[Sequence]:
        """Return the running sequences of a group."""
        return [running for running in self.running if running.group is group]

    def remove(self, sequence: Sequence) -> None:
        """Release the blocks of a running sequence that ends or is preempted."""
        self.running.remove(sequence)
        if sequence.num_uncomputed > 1:
            # The prompt is unfinished, so no logits have been checked: its keys and values may not be finite.
            self.discard_content(sequence, sequence.num_cached_blocks)
        for pool, table in self._each(sequence.table.blocks):
            pool.release_all(table)

    def remove_group(self, group: SequenceGroup) -> None:
        """Remove a group from both queues."""
        for sequence in self.running_of(group):
            self.remove(sequence)
        self.waiting = deque(sequence for sequence in self.waiting if sequence.group is not group)

    def fork(self, parents: list[Sequence], forks: list[Sequence]) -> None:
        """Replace running sequences with forks that refer to their blocks."""
        position = self.running.index(parents[0])
        # Acquire before releasing, so that no block becomes free in between.
        for sequence in forks:
            for pool, table in self._each(sequence.table.blocks):
                pool.acquire_all(table)
        for sequence in parents:
            self.remove(sequence)
        self.running[position:position] = forks

    def mark_computed(self, sequence: Sequence, first: int) -> None:
        """Put the blocks that a sequence has filled into the prefix cache, from the one of position `first` on, and
        release those behind its windows."""
        if sequence.group.shares_blocks:
            tokens = self._shared_tokens(sequence, sequence.num_computed)
            hashes = self._hash_blocks(sequence, tokens)
            for number in range(first // self._block_size, tokens // self._block_size):
                for pool, table in self._each(sequence.table.blocks):
                    pool.cache(table[number], hashes[number])
            if sequence.group.has_state and tokens == sequence.num_computed:
                self._states.keep(sequence.table, hashes, tokens)
        for pool, table in self._each(sequence.table.blocks):
            pool.release_behind(table, sequence.num_computed)

    def discard_content(self, sequence: Sequence, first: int = 0) -> None:
        """Zero a sequence's unshared blocks from the index `first` on, and remove them from the prefix cache.
        Non-finite values would spoil the attention of later owners, even in masked positions."""
        for number, (pool, table) in enumerate(self._each(sequence.table.blocks)):
            private_blocks = [block for block in table[first:] if block != ZERO_BLOCK and not pool.is_shared(block)]
            self._cache.clear(number, private_blocks)
            for block in private_blocks:
                pool.uncache(block)
        self._states.discard(sequence.block_hashes[first:])

    def _hash_blocks(self, sequence: Sequence, tokens: int) -> list[bytes]:
        """Return the hashes of a sequence's blocks, at least of those that this many tokens fill. They are cached."""
        hashes = sequence.block_hashes
        block_size = self._block_size
        for first in range(len(hashes) * block_size, tokens // block_size * block_size, block_size):
            # Keys and values depend on the adapter too.
            adapter = sequence.group.adapter
            previous = hashes[-1] if hashes else str(adapter and adapter.number).encode()
            # They also depend on which of the tokens are multiplied by dequantized matrices.
            num_dequantized = min(max(sequence.group.num_dequantized - first, 0), block_size)
            previous += str(num_dequantized or "").encode()
            hashes.append(hash_block(previous, sequence.token_ids[first : first + block_size]))
        return hashes

    def cached_tokens(self) -> int:
        """Return the number of tokens in the blocks of running sequences, counting shared blocks once; with windows, in
        the layers that hold the most tokens."""
        block_size = self._block_size
        tokens_of_block = {
            block: min(sequence.num_computed - position * block_size, block_size)
            for sequence in self.running
            for position, block in enumerate(sequence.table.blocks[0])
            if block != ZERO_BLOCK and position * block_size < sequence.num_computed
        }
        return sum(tokens_of_block.values())


def most_step_tokens(prefill_chunk_size: int, has_state: bool, num_together: int = 0) -> int:
    """Return the most tokens of a sequence that a step computes; see `Scheduler._next_tokens`.

    Args:
        num_together: tokens of the sequence that are computed in one step.
    """
    return max(prefill_chunk_size, num_together, CHUNK_SIZE if has_state else 0)
