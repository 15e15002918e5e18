"""The key-value cache: pages of all sequences in one tensor a layer, and attention of a step's tokens to them.

What a token sees is computed in the same operations, on operands of the same size, whoever else is in the batch and
in whatever chunks a prompt is read: keys and values are gathered up to the next multiple of SPAN positions, a token
is always in a product of a multiple of ROWS rows, and of none of the kernels does the result for a row depend on how
many there are. So the result is the same, to the last bit.

Shapes: T tokens of a step, H heads in G groups of R, K head size, P pages, S keys; of a group of tokens, N sequences
with Q tokens each, M = Q·R rows, filled up.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.infer.pages import SCRAP, ZEROS
from jingu.model.attention import score_bias
from jingu.model.products import attend
from jingu.model.rotary import Rotary, rotary_tables
from jingu.model.spec import ModelSpec, RotaryPositions

SPAN = 128
ROWS = 4
WIDTH = 16
ALONE = -1


@dataclass(eq=False)
class Held:
    """What the cache has of a sequence.

    Attributes:
        pages: in their order.
        source: of each layer, keys and values of an encoder's states [1, S, G, K].
    """

    pages: list[int] = field(default_factory=list)
    source: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Tokens of one sequence in a step: as many as `ids`, from a position on. Those at the positions `mutual` see each
    other, too, and not only what is before them: all of them are in one step."""

    held: Held
    first: int
    ids: Sequence[int]
    mutual: range = range(0)


@dataclass(eq=False)
class _Group:
    """Neighbouring rows of a step whose attention is computed together."""

    helds: list[Held]
    tokens: int  # Q
    rows: slice
    pages: Tensor  # [N · S / page]
    run: slice | None  # the same, of one sequence whose pages have neighbouring numbers
    positions: Tensor  # [N, Q]
    mutual: range
    bias: Tensor | None = None


def page_bytes(spec: ModelSpec, page_tokens: int, itemsize: int) -> int:
    """Bytes that a page takes in all layers together, for elements of so many bytes."""
    part = spec.attention
    return 2 * spec.layers * part.kv_heads * _wide(part.head_size) * page_tokens * itemsize


class PagedCache:
    """Keys and values of many sequences; see `jingu.model.attention.Cache`.

    A layer's memory is allocated with its first keys, whose heads, dtype and device it takes: under a layout a rank
    may hold only some of the heads, and compute in another dtype than it keeps weights in.
    """

    def __init__(self, spec: ModelSpec, pages: int, page_tokens: int, device: torch.device) -> None:
        self.spec, self.pages, self.page_tokens, self.device = spec, pages, page_tokens, device
        self._layers = [_Layer(self, number) for number in range(spec.layers)]
        self._rotary: Rotary | None = None
        self.reading: Held | None = None
        self.groups: list[_Group] = []
        self.count = 0
        """Tokens of the step."""
        self.slots_T = torch.empty(0, dtype=torch.int64)
        """Where the step's tokens are kept."""
        self.stretch: slice | None = None
        """The same, of those that do not fill up, where these places lie one after another."""
        self.bias_NH: Tensor | None = None
        self.in_place = True
        """Whether pages and places that lie one after another are used where they are, not by their numbers."""
        self.multiple = ROWS
        """A step's rows are filled up to a multiple of this."""

    def layer(self, number: int) -> _Layer:
        """The part of one block."""
        return self._layers[number]

    def plan(self, parts: Sequence[Part], reading: Held | None) -> tuple[Tensor, Tensor, list[int]]:
        """Prepare for a step.

        Args:
            parts: those of one token first.
            reading: the sequence whose source the encoder reads in this step.

        Returns:
            Tokens and positions [1, T], filled up to a `multiple`; and of each part, where it begins.
        """
        cuts: dict[tuple[int, int, int], list[tuple[Part, int]]] = {}
        for number, part in enumerate(parts):
            begin, end = part.first, part.first + len(part.ids)
            while begin < end:
                upto = min((begin // SPAN + 1) * SPAN, end)
                # Tokens that are alone go together by the keys that they see.
                alone = len(part.ids) == 1
                last = max(upto, part.mutual.stop) if begin < part.mutual.stop else upto
                kind = ALONE if alone else number
                cuts.setdefault((kind, upto - begin, -(-last // SPAN)), []).append((part, begin))
                begin = upto
        ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        self.groups = []
        starts = [0] * len(parts)
        places = {id(part): number for number, part in enumerate(parts)}
        for (kind, tokens, spans), members in cuts.items():
            rows = slice(len(ids), len(ids) + tokens * len(members))
            pages: list[int] = []
            begins: list[int] = []
            for part, begin in members:
                if begin == part.first:
                    starts[places[id(part)]] = len(ids)
                ids += part.ids[begin - part.first : begin - part.first + tokens]
                positions += range(begin, begin + tokens)
                slots += [
                    part.held.pages[place // self.page_tokens] * self.page_tokens + place % self.page_tokens
                    for place in range(begin, begin + tokens)
                ]
                last, wanted = len(part.held.pages), spans * SPAN // self.page_tokens
                pages += [*part.held.pages[:wanted], *[ZEROS] * (wanted - len(part.held.pages))]
                begins.append(begin)
            run = None
            # Only where there is no other: what others have written may be no finite number.
            alone = self.in_place and kind == ALONE and len(parts) == 1
            if alone and pages[:last] == list(range(pages[0], pages[0] + last)):
                run = slice(pages[0], pages[0] + wanted) if pages[0] + wanted <= self.pages else None
            positions_NQ = torch.tensor(begins, device=self.device)[:, None] + torch.arange(tokens, device=self.device)
            helds = [part.held for part, _ in members]
            mutual = range(0) if tokens == 1 else members[0][0].mutual
            pages_NS = torch.tensor(pages, device=self.device)
            self.groups.append(_Group(helds, tokens, rows, pages_NS, run, positions_NQ, mutual))
        self.count, spare = len(ids), -len(ids) % self.multiple
        stretch = range(slots[0], slots[0] + self.count)
        self.stretch = slice(stretch.start, stretch.stop) if self.in_place and slots == list(stretch) else None
        self.slots_T = torch.tensor(slots + [SCRAP * self.page_tokens] * spare, device=self.device)
        self.reading = reading
        made = torch.tensor([ids + [0] * spare, positions + [0] * spare], device=self.device)
        return made[:1], made[1:], starts

    @property
    def shape(self) -> Hashable:
        """Of a step of one token a sequence: steps where it is the same differ only in `tensors`. None: of others."""
        if self.in_place or self.reading is not None or any(group.tokens > 1 for group in self.groups):
            return None
        return (
            self.count,
            *(group.pages.shape[0] for group in self.groups),
            *(len(group.helds) for group in self.groups),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """What a step reads, as `plan` has prepared it."""
        return [self.slots_T, *(part for group in self.groups for part in (group.pages, group.positions))]

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Let the step read these."""
        self.slots_T = tensors[0]
        for group, pages, positions in zip(self.groups, tensors[1::2], tensors[2::2], strict=True):
            group.pages, group.positions, group.bias = pages, positions, None

    def begin(self, bias_NH: Tensor | None) -> None:
        """Take the biases of relative positions, before the first layer."""
        self.bias_NH = bias_NH

    def rotary(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary | None:
        """Tables of a step's positions; each position's is the same in every step."""
        if not isinstance(self.spec.position, RotaryPositions):
            return None
        if self._rotary is None:
            last = -(-self.spec.context // SPAN) * SPAN
            tables = [
                rotary_tables(
                    self.spec.position,
                    self.spec.attention.head_size,
                    torch.arange(first, first + SPAN, device=positions_BT.device),
                    dtype,
                    each=True,
                )
                for first in range(0, last, SPAN)
            ]
            self._rotary = torch.cat([cos for cos, _ in tables]), torch.cat([sin for _, sin in tables])
        cos, sin = self._rotary
        return cos[positions_BT], sin[positions_BT]

    def copy(self, page: int, to: int) -> None:
        """Copy a page's keys and values of all layers."""
        for layer in self._layers:
            layer.copy(page, to)

    def clear(self, pages: Sequence[int]) -> None:
        """Fill pages with zeros: what is no finite number would spoil products, even where it is not seen."""
        for layer in self._layers:
            layer.clear(pages)


class _Layer:
    def __init__(self, cache: PagedCache, number: int) -> None:
        self._cache, self._number = cache, number
        self._store: Tensor | None = None  # [P, page, 2, G, K]
        self._places: tuple[Tensor, ...] = ()  # keys and values of it [1, P · page, G, K]

    def attend(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scale: float | None, first_head: int) -> Tensor:
        cache, groups, size = self._cache, k_BTGK.shape[2], k_BTGK.shape[3]
        scale = size**-0.5 if scale is None else scale
        if size % WIDTH:
            q_BTHK, k_BTGK, v_BTGK = (_wide_heads(x) for x in (q_BTHK, k_BTGK, v_BTGK))
        if self._store is None:
            with torch.inference_mode(False):  # it is also written to between forwards
                self._store = zeros((cache.pages, cache.page_tokens, 2, groups, k_BTGK.shape[3]), k_BTGK)
                self._places = self._store.flatten(0, 1).unsqueeze(0).unbind(2)
        keys, values = self._places
        if cache.stretch is not None:
            keys[:, cache.stretch].copy_(k_BTGK[:, : cache.count])
            values[:, cache.stretch].copy_(v_BTGK[:, : cache.count])
        else:
            keys.index_copy_(1, cache.slots_T, k_BTGK)
            values.index_copy_(1, cache.slots_T, v_BTGK)
        y_BTHK = torch.zeros_like(q_BTHK)
        for group in cache.groups:
            bias = self._bias(group, q_BTHK.shape[2], groups, q_BTHK, first_head)
            # Pages that lie one after another are seen where they are.
            pages = self._store.index_select(0, group.pages) if group.run is None else self._store[group.run]
            held = pages.view(len(group.helds), -1, 2, *pages.shape[3:])
            k_NGSK, v_NGSK = held.permute(2, 0, 3, 1, 4)
            _attend(y_BTHK[:, group.rows], q_BTHK[:, group.rows], k_NGSK, v_NGSK, bias, scale)
        return y_BTHK if size == y_BTHK.shape[3] else y_BTHK[..., :size]

    def tokens(self, rows: int) -> int:
        whole = rows == len(self._cache.slots_T)  # else a rank has a part of them
        return self._cache.count if whole else rows

    def _bias(self, group: _Group, heads: int, groups: int, like: Tensor, first_head: int) -> Tensor:
        """What is added to the scores [N, G or 1, M, S]; made by the first layer."""
        if group.bias is None:
            cache, sequences = self._cache, len(group.helds)
            keys_S = torch.arange(group.pages.numel() // sequences * cache.page_tokens, device=cache.device)
            places_NQ1, mutual = group.positions[:, :, None], group.mutual
            distance = places_NQ1 - keys_S
            seen = distance >= 0
            if mutual:
                seen |= (places_NQ1 >= mutual.start) & (places_NQ1 < mutual.stop) & (keys_S < mutual.stop)
            dtype = torch.promote_types(like.dtype, torch.float32)
            bias = score_bias(cache.spec, distance, seen, dtype, cache.bias_NH)
            if bias.dim() == 4:  # of each head
                bias = bias.narrow(1, first_head, heads).unflatten(1, (groups, -1)).transpose(2, 3)
            else:
                bias = bias[:, None, :, None].expand(-1, -1, -1, heads // groups, -1)
            group.bias = _filled(bias.flatten(2, 3))
        return group.bias

    def read(self, k_BSGK: Tensor, v_BSGK: Tensor) -> None:
        held = self._cache.reading
        assert held is not None
        held.source[self._number] = _wide_heads(k_BSGK), _wide_heads(v_BSGK)

    def attend_source(self, q_BTHK: Tensor, scale: float | None) -> Tensor:
        size = q_BTHK.shape[3]
        scale = size**-0.5 if scale is None else scale
        q_BTHK = _wide_heads(q_BTHK)
        y_BTHK = torch.zeros_like(q_BTHK)
        for group in self._cache.groups:
            for number, held in enumerate(group.helds):
                rows = slice(group.rows.start + number * group.tokens, group.rows.start + (number + 1) * group.tokens)
                k, v = (x.transpose(1, 2) for x in held.source[self._number])
                _attend(y_BTHK[:, rows], q_BTHK[:, rows], k, v, None, scale)
        return y_BTHK[..., :size]

    def copy(self, page: int, to: int) -> None:
        if self._store is not None:
            self._store[to] = self._store[page]

    def clear(self, pages: Sequence[int]) -> None:
        if self._store is not None:
            self._store[list(pages)] = 0


def _attend(y_BXHK: Tensor, q_BXHK: Tensor, k_NGSK: Tensor, v_NGSK: Tensor, bias: Tensor | None, scale: float) -> None:
    """Write into `y_BXHK` [1, N·Q, H, K] what queries alike see."""
    sequences, groups, _, size = k_NGSK.shape
    split = (sequences, -1, groups, q_BXHK.shape[2] // groups, size)
    q_NGQRK = q_BXHK.view(split).transpose(1, 2)
    queries, repeats = q_NGQRK.shape[2:4]
    q_NGMK = _filled(q_NGQRK.flatten(2, 3))
    if sequences * groups == 1 and q_NGMK.device.type == "cpu" and torch.get_num_threads() > 1:
        # A kernel that has one piece of work shares its sums out among threads, and adds up in another order.
        q_NGMK, k_NGSK, v_NGSK = (x.expand(2, -1, -1, -1) for x in (q_NGMK, k_NGSK, v_NGSK))
    y_NGMK = attend(q_NGMK, k_NGSK, v_NGSK, bias, causal=False, scale=scale)[:sequences]
    y_NGQRK = y_NGMK[:, :, : queries * repeats].unflatten(2, (queries, repeats))
    y_BXHK.view(split).copy_(y_NGQRK.transpose(1, 2))


def _filled(rows: Tensor) -> Tensor:
    """Filled up [..., M, x] to a multiple of ROWS."""
    spare = -rows.shape[-2] % ROWS
    return F.pad(rows, (0, 0, 0, spare)) if spare else rows


def _wide_heads(x: Tensor) -> Tensor:
    """Filled up [..., K] to a multiple of WIDTH: kernels treat rows of other sizes by their places."""
    spare = _wide(x.shape[-1]) - x.shape[-1]
    return F.pad(x, (0, spare)) if spare else x


def _wide(size: int) -> int:
    return -(-size // WIDTH) * WIDTH


def zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros; on CPUs of memory that is taken only where it is written."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    made = torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * like.itemsize), dtype=np.uint8))
    return made.view(like.dtype)
