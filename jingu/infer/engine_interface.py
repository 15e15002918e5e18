"""The interface of the engine: its settings, its statistics and the methods that callers use."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Protocol

from jingu.errors import refuse
from jingu.infer.attention_backend import DEFAULT_BLOCK_SIZES, KV_SPAN, BackendName
from jingu.infer.block_manager import BlockManager
from jingu.infer.expert_offload import ExpertOffloadStats
from jingu.infer.inference_model import InferenceModel
from jingu.infer.kv_cache import MAX_MEMORY_SHARE, cache_reaches, pool_bytes
from jingu.infer.request import Event, Request
from jingu.infer.scheduler import most_step_tokens
from jingu.model.parts import state_bytes
from jingu.runtime.device import total_memory


@dataclass(frozen=True)
class EngineSettings:
    """Batch size, KV cache and attention backend of the engine.

    Attributes:
        max_num_seqs: maximum number of running sequences.
        block_size: tokens of a KV cache block, a divisor of 128; None: 8 on CPUs, 64 on other devices.
        kv_cache_bytes: size of the KV cache; None: enough for `max_num_seqs` sequences of the full context length, but
            at most a quarter of the memory. CPUs use memory only as blocks are first written.
        prefill_chunk_size: maximum number of prompt tokens in a step (chunked prefill).
        max_prefill_seconds: prompts add about this many seconds at most to a step in which other sequences generate;
            None: there is no limit. Schedules then depend on measured times, so ranks need None.
        num_speculative_tokens: draft tokens of a sequence in a step. A draft model proposes them, or prompt lookup if
            there is none. They do not change outputs. 0 disables speculation; None: 4 with a draft model, 1 with
            `use_predictions`, else 0.
        use_predictions: whether the model's own layer of multi-token prediction proposes the draft tokens.
        attention_backend: gather runs on every device; flash is FlashAttention-3 on CUDA; flex is FlexAttention on
            CUDA; auto is the first of flash, flex and gather that can be used.
    """

    max_num_seqs: int = 64
    block_size: int | None = None
    kv_cache_bytes: int | None = None
    prefill_chunk_size: int = 512
    max_prefill_seconds: float | None = None
    num_speculative_tokens: int | None = None
    use_predictions: bool = False
    attention_backend: BackendName = "auto"

    def __post_init__(self) -> None:
        refuse(self.max_num_seqs < 1, "max_num_seqs", self.max_num_seqs, "1 or more")
        size = self.block_size
        refuse(size is not None and size < 1, "block_size", size, "1 or more")
        refuse(size is not None and KV_SPAN % size > 0, "block_size", size, f"a divisor of {KV_SPAN}")
        refuse(self.prefill_chunk_size < 1, "prefill_chunk_size", self.prefill_chunk_size, "1 or more")
        count = self.num_speculative_tokens
        refuse(count is not None and count < 0, "num_speculative_tokens", count, "0 or more")

    def draft_tokens(self, draft_model: InferenceModel | None) -> int:
        """Return the number of draft tokens of a sequence in a step."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if self.use_predictions:
            return 1
        return 0 if draft_model is None else 4

    def tokens_per_block(self, model: InferenceModel) -> int:
        """Return the tokens of a KV cache block."""
        kind = "cpu" if model.parameter.device.type == "cpu" else "other"
        return self.block_size or DEFAULT_BLOCK_SIZES[kind]

    def state_memory(self, model: InferenceModel) -> int:
        """Return the bytes of the states of `max_num_seqs` sequences, and of as many prefixes; 0 without states.

        Raises:
            JinguError: they take more than half of the memory for sequences.
        """
        itemsize = model.parameter.itemsize
        states = sum(int(state_bytes(model.spec, layer, itemsize)) for layer in model.spec.layers)
        size = 2 * states * self.max_num_seqs
        limit = int(total_memory(model.parameter.device) * MAX_MEMORY_SHARE)
        what = f"at most {limit // (4 * max(states, 1))}, since states may take half of the memory for sequences"
        refuse(2 * size > limit, "max_num_seqs", self.max_num_seqs, what)
        return size

    def pools(self, model: InferenceModel) -> list[BlockManager]:
        """Return the allocators of the KV cache blocks, one for each pool.

        A pool of a window has blocks for the windows of `max_num_seqs` sequences. If these take more than half of the
        memory, it has fewer, but enough for as many sequences of the full context as the memory holds.
        """
        # 1. Find how many blocks each pool can use, and those of one sequence while it is computed and afterwards.
        block_size = self.tokens_per_block(model)
        sizes = pool_bytes(model.spec, block_size, model.parameter.itemsize)
        pools = [BlockManager(0, block_size, reach) for reach in cache_reaches(model.spec)]
        context = model.spec.max_position_embeddings
        step_tokens = most_step_tokens(self.prefill_chunk_size, model.spec.has_state)
        computed = [pool.most_blocks(context, step_tokens) for pool in pools]
        decoding = [pool.most_blocks(context) for pool in pools]
        most = [
            max_blocks + (self.max_num_seqs - 1) * blocks for max_blocks, blocks in zip(computed, decoding, strict=True)
        ]
        budget = self.kv_cache_bytes
        if not any(sizes):
            # Without attention, blocks need no memory, and no size of the KV cache says how many there are.
            sizes, budget = [1], most[0]
        if budget is None:
            limit = int(total_memory(model.parameter.device) * MAX_MEMORY_SHARE) - self.state_memory(model)
            budget = min(sum(size * blocks for size, blocks in zip(sizes, most, strict=True)), limit)
        # 2. Divide the memory. The first pool, whose layers attend to the most tokens, takes what the others leave.
        equal = max(budget // sum(sizes), 1)
        num_streams = budget / sum(size * blocks for size, blocks in zip(sizes, decoding, strict=True))
        counts = [equal]
        for number in range(1, len(pools)):
            half = budget // (2 * sum(sizes[1:]))
            count = max(half, computed[number], math.ceil(num_streams * decoding[number]))
            counts.append(min(count, equal, most[number]))
        counts[0] = max((budget - sum(map(operator.mul, counts[1:], sizes[1:]))) // sizes[0], 1)
        # Each pool has a zero block and a scratch block besides.
        return [BlockManager(count + 2, block_size, pool.reach) for count, pool in zip(counts, pools, strict=True)]


@dataclass
class EngineStats:
    """The engine's current state, and totals since its start.

    Attributes:
        running: number of running sequences.
        waiting: number of waiting sequences.
        used_blocks: KV cache blocks of running sequences, in all pools.
        total_blocks: KV cache blocks that sequences can use, in all pools.
        used_bytes: bytes of the used blocks, and of the states of running sequences and of prefixes.
        total_bytes: bytes of all blocks, and of the states of as many sequences as can run at a time and of prefixes.
        cached_tokens: tokens in the used blocks of the first pool; the other slots of these blocks are fragmentation.
        generated_tokens: total number of generated tokens.
        prompt_tokens: total number of prompt tokens of all requests.
        prefix_cache_hits: the part of `prompt_tokens` that was found in the prefix cache.
        draft_tokens: total number of draft tokens.
        accepted_tokens: the part of `draft_tokens` that was accepted.
        steps: total number of steps with a forward pass.
        step_seconds: total seconds of steps.
        forward_seconds: the part of `step_seconds` in forward passes, including those of the draft model.
        experts: statistics of expert offload; None if all experts are in memory.
    """

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    used_bytes: int = 0
    total_bytes: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    prefix_cache_hits: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    experts: ExpertOffloadStats | None = None


class StepEngine(Protocol):
    """The methods that callers use, of `Engine` or of `DistributedEngine`."""

    model: InferenceModel

    def submit(self, request: Request) -> int:
        """See `Engine.submit`."""

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """See `Engine.max_new_tokens`."""

    def cancel(self, request_id: int) -> None:
        """See `Engine.cancel`."""

    @property
    def busy(self) -> bool:
        """See `Engine.busy`."""

    def step(self) -> list[Event]:
        """See `Engine.step`."""

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
