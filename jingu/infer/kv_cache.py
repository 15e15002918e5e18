"""The paged KV cache: keys and values of many sequences in blocks, one tensor for each layer.

Layers that attend equally far back share a pool of blocks: a sequence has a block table in each pool. In the pool of a
window, it holds only the blocks that its next tokens attend to.

Shapes: T tokens of a step, H query heads, G KV heads, K head dim, P blocks, S states of an encoder.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.infer import attention_backend
from jingu.infer.attention_backend import (
    KV_SPAN,
    QUERY_ROW_MULTIPLE,
    AttentionBackend,
    AttentionGroup,
    AttentionHeads,
)
from jingu.infer.block_manager import SCRATCH_BLOCK, ZERO_BLOCK
from jingu.model.components import LayerSpec, Position, RotaryPositions
from jingu.model.mixer_parts import Mixer, MixerState, RowPiece, mix_pieces
from jingu.model.parts import cached_numbers
from jingu.model.rotary import RotaryTables, rotary_tables
from jingu.model.spec import ModelSpec
from jingu.runtime.device import copy_to_device

# Heads are padded to a multiple of this: kernels treat rows of other sizes differently by their addresses.
HEAD_DIM_MULTIPLE = 16
# Number of tokens of each member of an attention group, spans of keys, and the members: (index of a chunk, first
# position).
GroupShape = tuple[int, int, list[tuple[int, int]]]
# Group key of the chunks that may share a group; other chunks use their own number.
_SHARED = -1


@dataclass(eq=False)
class BlockTable:
    """The cache entries of a sequence.

    Attributes:
        blocks: by pool, indices of its blocks, in the order of positions; the zero block stands for blocks behind the
            window.
        states: by layer, the state after the last computed token, of mixers that keep one. They are replaced, never
            changed in place, so forks may share them.
        draft_states: in a step with draft tokens, the states after its first token and after each draft token.
        cross_kv: by layer, the cross-attention keys and values of the encoder's states [1, S, G, K].
    """

    blocks: list[list[int]]
    states: dict[int, MixerState] = field(default_factory=dict)
    draft_states: list[dict[int, MixerState]] = field(default_factory=list)
    cross_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def accept(self, num_accepted: int) -> None:
        """Return to the states after the accepted draft tokens of a step."""
        if self.draft_states:
            self.states = self.draft_states[num_accepted]
            self.draft_states = []


@dataclass(frozen=True)
class SequenceChunk:
    """Tokens of one sequence in a step.

    Attributes:
        first: position of the first token.
        bidirectional: positions that attend to each other in both directions; they are all computed in one step.
        is_generated: whether a model with states computes its tokens one by one, as when they were generated.
        num_drafts: number of draft tokens at its end.
    """

    table: BlockTable
    first: int
    ids: Sequence[int]
    bidirectional: range = range(0)
    is_generated: bool = False
    num_drafts: int = 0


# Largest share of the memory that the blocks take, unless their size is set.
MAX_MEMORY_SHARE = 0.25


def cache_reaches(spec: ModelSpec) -> list[int | None]:
    """Return the pools of a model by how far back their layers attend (`AttentionSpec.reach`); None, for all tokens,
    comes first."""
    reaches = {_reach(spec, layer) for layer in spec.kinds if layer.has_attention}
    # Without attention, the scheduler still counts blocks, which take no memory.
    return sorted(reaches, key=lambda reach: reach or 0) or [None]


def _reach(spec: ModelSpec, layer: LayerSpec) -> int | None:
    reach = layer.attention.reach
    return None if reach is None or reach >= spec.max_position_embeddings else reach


def pool_bytes(spec: ModelSpec, block_size: int, itemsize: int) -> list[int]:
    """Return for each pool the bytes of a block in all of its layers together; `itemsize` is the size of an element."""
    reaches = cache_reaches(spec)
    sizes = [0] * len(reaches)
    for layer in (layer for layer in spec.layers if layer.has_attention):
        size = stored_numbers(layer) * block_size * itemsize
        sizes[reaches.index(_reach(spec, layer))] += size
    return sizes


def stored_numbers(layer: LayerSpec) -> int:
    """Return the numbers that a layer stores for each token: keys and values of one padded size, or latent vectors."""
    part = layer.attention
    if part.shares_kv:
        return 0
    if part.latent is not None:
        return _padded_size(cached_numbers(layer))
    return 2 * part.num_kv_heads * _padded_size(max(part.head_dim, part.value_size))


def block_bytes(spec: ModelSpec, block_size: int, itemsize: int) -> int:
    """Return the bytes of a block in all layers together; `itemsize` is the size of an element."""
    return sum(pool_bytes(spec, block_size, itemsize))


@dataclass
class PoolStep:
    """What the layers of a pool need in a step.

    Attributes:
        slots: [T] slots that the step's keys and values are written to; padding rows use the scratch block.
        first_slot: the first slot if they are contiguous, else None.
        groups: rows whose attention is computed together.
    """

    slots: Tensor
    first_slot: int | None
    groups: list[AttentionGroup]


class PagedKVCache:
    """Keys and values of many sequences; implements `jingu.model.attention.KVCache`.

    A layer's memory is allocated when its first keys arrive, with their number of heads, dtype and device: a rank of
    tensor parallelism may have only some of the heads, and the computation may use another dtype than the weights.

    Attributes:
        reaches: the pools; see `cache_reaches`.
        num_blocks: number of blocks of each pool.
        num_tokens: tokens of the current step, without padding.
        num_rows: rows of the current step, with padding.
        steps: the current step by pool.
        tables: block tables of the sequences of each attention group.
        pieces: the chunks of the step in the order of its rows, with their block tables.
        use_slices: whether contiguous blocks and slots are addressed as slices rather than by index.
        row_multiple: a step's rows are padded to a multiple of this, a power of two; see `pad`.
        encoding: the block table that receives the encoder's keys and values in this step; None: no encoder runs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        self.spec = spec
        self.reaches = cache_reaches(spec)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.backend = backend
        self.encoding: BlockTable | None = None
        self.steps: list[PoolStep] = []
        self.tables: list[list[BlockTable]] = []
        self.pieces: list[tuple[RowPiece, BlockTable]] = []
        self.num_tokens = 0
        self.num_rows = 0
        self.use_slices = True
        self.row_multiple = QUERY_ROW_MULTIPLE
        pools = {layer: self.reaches.index(_reach(spec, layer)) for layer in spec.kinds if layer.has_attention}
        self.layers = [
            _LayerKVCache(self, number, spec.kinds.index(layer), pools.get(layer, 0), spec.kv_source(number) or 0)
            for number, layer in enumerate(spec.layers)
        ]
        self._rotary: dict[Hashable, RotaryTables] = {}

    def pad(self, rows: int) -> int:
        """Return how many rows to compute in a step that needs `rows`: a multiple of `row_multiple`, and at most a
        sixteenth more than the next one.

        Between two powers of two it is one of 16 numbers, because oneDNN compiles kernels for each shape of a matmul.
        They take milliseconds, and a third of a megabyte that it does not free.
        """
        if self.row_multiple == 1:
            return rows
        multiple = max(self.row_multiple, 1 << max(rows.bit_length() - 5, 0))
        return rows + -rows % multiple

    def layer(self, number: int) -> _LayerKVCache:
        """Return the cache of one layer."""
        return self.layers[number]

    def plan(self, chunks: Sequence[SequenceChunk], encoding: BlockTable | None) -> tuple[Tensor, Tensor, list[int]]:
        """Prepare a step.

        Args:
            chunks: the tokens of the step; chunks of a single token come first.
            encoding: block table of the sequence whose source the encoder reads in this step.

        Returns:
            Tokens and positions [1, T], padded as `pad` says; and the first row of each chunk.
        """
        # 1. Order the tokens by the groups whose attention is computed together.
        ids: list[int] = []
        positions: list[int] = []
        starts = [0] * len(chunks)
        shapes = _group_by_shape(chunks)
        self.tables = [[chunks[number].table for number, _ in members] for _, _, members in shapes]
        for num_tokens, _, members in shapes:
            for number, begin in members:
                chunk = chunks[number]
                if begin == chunk.first:
                    starts[number] = len(ids)
                ids += chunk.ids[begin - chunk.first : begin - chunk.first + num_tokens]
                positions += range(begin, begin + num_tokens)
        order = sorted(range(len(chunks)), key=starts.__getitem__)
        self.pieces = [
            (RowPiece(len(chunks[number].ids), chunks[number].is_generated), chunks[number].table) for number in order
        ]
        for chunk in chunks:
            chunk.table.draft_states = [{} for _ in range(chunk.num_drafts and len(chunk.ids))]
        # Padding rows compute token 0 at position 0.
        self.num_tokens = len(ids)
        self.num_rows = self.pad(len(ids))
        self.encoding = encoding
        padding = [0] * (self.num_rows - len(ids))
        # 2. Find their slots and the blocks that they read, pool by pool.
        positions_NQ = [
            copy_to_device([begin for _, begin in members], self.device)[:, None]
            + torch.arange(num_tokens, device=self.device)
            for num_tokens, _, members in shapes
        ]
        self.steps = [self._plan_pool(pool, chunks, shapes, positions_NQ) for pool in range(len(self.reaches))]
        # 3. Copy the rows to the device.
        rows = copy_to_device([ids + padding, positions + padding], self.device)
        return rows[:1], rows[1:], starts

    def _plan_pool(
        self, pool: int, chunks: Sequence[SequenceChunk], shapes: list[GroupShape], positions_NQ: list[Tensor]
    ) -> PoolStep:
        """Return the slots and attention groups of a step's tokens in one pool."""
        slots: list[int] = []
        groups = []
        for (num_tokens, spans, members), group_positions in zip(shapes, positions_NQ, strict=True):
            first_row = len(slots)
            # All members begin in the same span, so that a token reads the same keys in any step.
            first = first_key(self.reaches[pool], members[0][1])
            first_block, num_blocks = first // self.block_size, spans * KV_SPAN // self.block_size
            blocks: list[int] = []
            for number, begin in members:
                chunk_blocks = chunks[number].table.blocks[pool]
                slots += [
                    chunk_blocks[position // self.block_size] * self.block_size + position % self.block_size
                    for position in range(begin, begin + num_tokens)
                ]
                # Pad to whole spans of keys with the zero block.
                blocks += chunk_blocks[first_block:num_blocks]
                blocks += [ZERO_BLOCK] * (num_blocks - len(chunk_blocks))
            groups.append(
                AttentionGroup(
                    len(members),
                    num_tokens,
                    slice(first_row, len(slots)),
                    copy_to_device(blocks, self.device),
                    self._contiguous(chunks, blocks, pool, first_block),
                    group_positions,
                    range(0) if num_tokens == 1 else chunks[members[0][0]].bidirectional,
                    first,
                )
            )
        neighbours = range(slots[0], slots[0] + len(slots))
        first_slot = slots[0] if self.use_slices and slots == list(neighbours) else None
        # Padding rows write to the scratch block.
        padding = [SCRATCH_BLOCK * self.block_size] * (self.num_rows - len(slots))
        return PoolStep(copy_to_device(slots + padding, self.device), first_slot, groups)

    def _contiguous(
        self, chunks: Sequence[SequenceChunk], blocks: list[int], pool: int, first_block: int
    ) -> slice | None:
        """Return the blocks of a single decoding sequence as a slice if they are contiguous in memory, else None."""
        # The slice extends beyond the sequence's last block, to a whole span. With several sequences, those blocks may
        # contain non-finite values of this step, which would spoil the result in spite of the mask.
        if not self.use_slices or len(chunks) != 1 or len(chunks[0].ids) != 1:
            return None
        first = blocks[0]
        num_own = len(chunks[0].table.blocks[pool]) - first_block
        if blocks[:num_own] != list(range(first, first + num_own)) or first + len(blocks) > self.num_blocks[pool]:
            return None
        return slice(first, first + len(blocks))

    @property
    def graph_shape(self) -> Hashable:
        """The key of a decoding step's CUDA graph: steps with the same key differ only in `graph_inputs`. None for
        steps that cannot be captured."""
        groups = [group for step in self.steps for group in step.groups]
        if self.use_slices or self.encoding is not None or any(group.num_tokens > 1 for group in groups):
            return None
        return (self.num_tokens, *((group.blocks.shape[0], group.num_seqs, group.first) for group in groups))

    @property
    def graph_inputs(self) -> list[Tensor]:
        """The tensors of the planned step that its forward pass reads."""
        groups = (group for step in self.steps for group in step.groups)
        slots = [step.slots for step in self.steps]
        return [*slots, *(part for group in groups for part in (group.blocks, group.positions))]

    def set_graph_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Replace the tensors that `graph_inputs` returned."""
        for step, slots in zip(self.steps, tensors, strict=False):
            step.slots = slots
        groups = [group for step in self.steps for group in step.groups]
        blocks_and_positions = tensors[len(self.steps) :]
        for group, blocks, positions in zip(groups, blocks_and_positions[::2], blocks_and_positions[1::2], strict=True):
            group.blocks = blocks
            group.positions = positions
            group.masks = {}

    def begin(self, bias_NH: Tensor | None) -> None:
        """Set the relative position biases, before the first layer."""
        self.backend.relative_bias = bias_NH

    def rotary(self, spec: Position, head_size: int, positions_BT: Tensor, dtype: torch.dtype) -> RotaryTables | None:
        """Return the rotary tables of a step's positions; those of all positions are computed in the first call."""
        if not isinstance(spec, RotaryPositions):
            return None
        key = spec, head_size
        if key not in self._rotary:
            tables = []
            for first in range(0, self.spec.max_position_embeddings, KV_SPAN):
                positions = torch.arange(first, first + KV_SPAN, device=positions_BT.device)
                tables.append(rotary_tables(*key, positions, dtype, lasts=positions))
            self._rotary[key] = torch.cat([cos for cos, _ in tables]), torch.cat([sin for _, sin in tables])
        cos, sin = self._rotary[key]
        return cos[positions_BT], sin[positions_BT]

    def copy(self, pool: int, block: int, to: int) -> None:
        """Copy a block's keys and values to another block, in all layers of a pool."""
        for layer in self.layers:
            if layer.store is not None and layer.pool == pool:
                layer.store[to] = layer.store[block]

    def clear(self, pool: int, blocks: Sequence[int]) -> None:
        """Zero blocks in all layers of a pool."""
        for layer in self.layers:
            if layer.store is not None and layer.pool == pool:
                layer.store.index_fill_(0, copy_to_device(list(blocks), self.device, torch.int64), 0)


def first_key(reach: int | None, position: int) -> int:
    """Return the first position whose key is read for the queries of a position's span: the begin of a span."""
    if reach is None:
        return 0
    begin = position // KV_SPAN * KV_SPAN
    return max(begin + 1 - reach, 0) // KV_SPAN * KV_SPAN


def _group_by_shape(chunks: Sequence[SequenceChunk]) -> list[GroupShape]:
    """Split the chunks of a step at multiples of KV_SPAN positions, and group parts of the same shape.

    Returns:
        Groups (number of tokens, number of key spans that they attend to, members). A member is (index of a chunk,
        first position). Whole chunks of equal length share a group, such as those of decoding sequences. Each part of a
        chunk that is split or bidirectional has a group of its own.
    """
    groups: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for number, chunk in enumerate(chunks):
        begin = chunk.first
        last = chunk.first + len(chunk.ids)
        is_whole = not chunk.bidirectional and begin // KV_SPAN == (last - 1) // KV_SPAN
        while begin < last:
            end = min((begin // KV_SPAN + 1) * KV_SPAN, last)
            keys_end = max(end, chunk.bidirectional.stop) if begin < chunk.bidirectional.stop else end
            kind = _SHARED if is_whole or len(chunk.ids) == 1 else number
            groups.setdefault((kind, end - begin, -(-keys_end // KV_SPAN)), []).append((number, begin))
            begin = end
    return [(num_tokens, spans, members) for (_, num_tokens, spans), members in groups.items()]


class _LayerKVCache:
    """Keys and values of one layer; implements `jingu.model.attention.LayerKVCache`."""

    def __init__(self, cache: PagedKVCache, number: int, kind: int, pool: int, source: int) -> None:
        """
        Args:
            source: number of the layer that stores the keys and values.
        """
        # A weak reference avoids a cycle, so that the memory is freed together with the engine.
        self._reference = weakref.ref(cache)
        self._number = number
        self._kind = kind
        self._source = source
        self.pool = pool
        self.store: Tensor | None = None  # [P, block size, 2, G, K]; 1 instead of 2 if the values are the keys
        self._slots: tuple[Tensor, ...] = ()  # views of its keys and its values, each [1, P · block size, G, K]

    @property
    def _cache(self) -> PagedKVCache:
        cache = self._reference()
        assert cache is not None
        return cache

    def attend(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGV: Tensor | None,
        scale: float | None,
        first_head: int,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        cache = self._cache
        step = cache.steps[self.pool]
        value_dim = k_BTGK.shape[3] if v_BTGV is None else v_BTGV.shape[3]
        scale = q_BTHK.shape[3] ** -0.5 if scale is None else scale
        q_BTHK, *kv_BTGK = pad_heads(q_BTHK, k_BTGK, *([] if v_BTGV is None else [v_BTGV]))
        # 1. Allocate the layer's memory in the first step. A layer that shares keys and values has none.
        is_shared = self._source != self._number
        store = cache.layers[self._source].store if is_shared else self.store
        if store is None:
            # Not in inference mode: blocks are also copied and cleared between forward passes.
            with torch.inference_mode(False):
                self.store = store = allocate_zeros(
                    (cache.num_blocks[self.pool], cache.block_size, len(kv_BTGK), *kv_BTGK[0].shape[2:]), k_BTGK
                )
                self._slots = self.store.flatten(0, 1).unsqueeze(0).unbind(2)
        # 2. Write the step's keys and values, before attention: a token attends to itself and to its chunk.
        num_tokens = cache.num_tokens
        padding = k_BTGK.shape[1] - num_tokens
        for slots, x_BTGK in () if is_shared else zip(self._slots, kv_BTGK, strict=True):
            if step.first_slot is not None:
                target = slots.narrow(1, step.first_slot, num_tokens)
                target.copy_(x_BTGK[:, :num_tokens] if padding else x_BTGK)
            else:
                slots.index_copy_(1, step.slots, x_BTGK)
        # 3. Compute attention group by group; padding rows become zeros.
        heads = AttentionHeads(scale, first_head, sinks_H)
        if len(step.groups) == 1 and not padding:
            y_BTHK = cache.backend.attend(q_BTHK, store, step.groups[0], self._kind, heads)
        else:
            parts = [
                cache.backend.attend(q_BTHK[:, group.rows], store, group, self._kind, heads) for group in step.groups
            ]
            y_BTHK = torch.cat([*parts, torch.zeros_like(q_BTHK[:, num_tokens:])], 1)
        return y_BTHK if value_dim == y_BTHK.shape[3] else y_BTHK[..., :value_dim]

    def mix(self, mixer: Mixer, x_BTD: Tensor) -> Tensor:
        cache = self._cache
        num_tokens = cache.num_tokens
        parts, gate = mixer.project(x_BTD)
        parts = [part[:, :num_tokens] for part in parts]
        if any(table.draft_states for _, table in cache.pieces):
            y = self._mix_drafts(mixer, parts)
        else:
            y = self._mix_pieces(mixer, parts, cache.pieces)
        # Padding rows become zeros.
        padding = x_BTD.shape[1] - num_tokens
        y = torch.cat([y, y.new_zeros(1, padding, *y.shape[2:])], 1) if padding else y
        return mixer.finish(y, gate)

    def _mix_pieces(self, mixer: Mixer, parts: list[Tensor], pieces: Sequence[tuple[RowPiece, BlockTable]]) -> Tensor:
        """Return the outputs [1, T, …] of pieces of sequences, and store their states."""
        before = _stack_states([table.states.get(self._number) for _, table in pieces])
        y, after = mix_pieces(mixer, parts, [piece for piece, _ in pieces], before)
        for number, (_, table) in enumerate(pieces):
            # A copy, so that a sequence does not keep the states of all others.
            copies = (None if part is None else part[number : number + 1].clone() for part in after)
            table.states[self._number] = MixerState(*copies)
        return y

    def _mix_drafts(self, mixer: Mixer, parts: list[Tensor]) -> Tensor:
        """Do the same in a step with draft tokens, each of which is a round of its own, and keep all of their states.

        The first round has the other pieces, too.
        """
        pieces = self._cache.pieces
        firsts = accumulate((piece.length for piece, _ in pieces), initial=0)
        pieces_by_row = list(zip(firsts, pieces, strict=False))
        outputs: list[Tensor] = []
        order: list[int] = []
        for number in range(max(len(table.draft_states) for _, table in pieces)):
            members: list[tuple[RowPiece, BlockTable]] = []
            rows: list[int] = []
            for first, (piece, table) in pieces_by_row:
                if number < max(len(table.draft_states), 1):
                    length = 1 if table.draft_states else piece.length
                    members.append((RowPiece(length, piece.decode), table))
                    rows += range(first + number, first + number + length)
            outputs.append(self._mix_pieces(mixer, [part[:, rows] for part in parts], members))
            order += rows
            for _, table in members:
                if table.draft_states:
                    table.draft_states[number][self._number] = table.states[self._number]
        # Bring the rows back into their order.
        return torch.cat(outputs, 1)[:, torch.tensor(order).argsort()]

    def tokens(self, rows: int) -> int:
        # With sequence parallelism a rank has only a part of the rows, and none of them count as padding.
        return self._cache.num_tokens if rows == self._cache.num_rows else rows

    def read(self, k_BSGK: Tensor, v_BSGK: Tensor) -> None:
        assert self._cache.encoding is not None
        k_BSGK, v_BSGK = pad_heads(k_BSGK, v_BSGK)
        self._cache.encoding.cross_kv[self._number] = k_BSGK, v_BSGK

    def attend_source(self, q_BTHK: Tensor, scale: float | None) -> Tensor:
        head_dim = q_BTHK.shape[3]
        scale = head_dim**-0.5 if scale is None else scale
        (q_BTHK,) = pad_heads(q_BTHK)
        y_BTHK = torch.zeros_like(q_BTHK)
        for group, tables in zip(self._cache.steps[0].groups, self._cache.tables, strict=True):
            # Sources differ in length, so each sequence is computed by itself.
            for number, table in enumerate(tables):
                first = group.rows.start + number * group.num_tokens
                rows = slice(first, first + group.num_tokens)
                k, v = (x.transpose(1, 2) for x in table.cross_kv[self._number])
                y_BTHK[:, rows] = attention_backend.attend_padded(q_BTHK[:, rows], k, v, None, AttentionHeads(scale))
        return y_BTHK[..., :head_dim]


def _stack_states(states: Sequence[MixerState | None]) -> MixerState:
    """Return the states [P, …] of sequences as one; those of sequences without a state are zeros."""
    tensors: list[Tensor | None] = []
    for parts in zip(*(state or MixerState() for state in states), strict=True):
        like = next((part for part in parts if part is not None), None)
        rows = [] if like is None else [torch.zeros_like(like) if part is None else part for part in parts]
        tensors.append(torch.cat(rows) if rows else None)
    return MixerState(*tensors)


def pad_heads(*x: Tensor) -> list[Tensor]:
    """Pad tensors [..., K] to the largest of their last dims, rounded up to a multiple of HEAD_DIM_MULTIPLE."""
    size = _padded_size(max(tensor.shape[-1] for tensor in x))
    return [tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1])) for tensor in x]


def _padded_size(head_dim: int) -> int:
    return -(-head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


def allocate_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros; on CPUs, in memory whose pages the system allocates when they are first written."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    # Not from PyTorch: in training, its allocator reuses freed memory, and would write all zeros immediately.
    num_bytes = math.prod(shape) * like.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)
