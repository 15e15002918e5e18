"""Mixtures of experts larger than memory, after InfMoE (Zhang et al., 2021): some experts are resident, the others are
read from the model's own files when they are needed, and a little before; where they are rounded to few bits, from a
file that holds them so.

What lies resident is a number of slots, each with room for one expert of any layer. Threads fill them while others
compute. All decisions are taken by the thread that computes; what it says does not depend on them.

Shapes: B rows, T tokens, N = B·T tokens, D width, F inner size of an expert, L layers, E experts, K experts a token,
M = N·K choices.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from jingu.checkpoint.mapped_files import FileReader, FileRegion, file_region
from jingu.errors import JinguError
from jingu.formats.stored_model import StoredModel
from jingu.infer.reuse_distance import IntArray, ReuseDistancePredictor
from jingu.model.decoder import Block, Decoder, iterate_blocks
from jingu.model.experts import MoELayer, RoutingStats
from jingu.model.matmul_kernels import linear
from jingu.model.quantized_weight import PrepackedQuantizedWeight, can_quantize
from jingu.model.spec import Experts, QuantizationFormat
from jingu.parallel.offload import DiskStorage
from jingu.runtime.device import make_worker_threads, request_huge_pages

ExpertKey = tuple[int, int]
"""A layer, in the order of computation, and an expert of it."""
RouterOutput = tuple[Tensor, Tensor, RoutingStats | None]

OPTION = "--resident-experts"

NUM_READERS = 1
"""Threads that read. With two, more is given away before it is needed again, and the speed is the same."""
MIN_SLOTS = 2
"""One to compute with, one to fill meanwhile."""
PREFETCH_THRESHOLD = 0.97
"""How likely an expert must be needed next to be read ahead."""


@dataclass
class ExpertOffloadStats:
    """What has been needed and read.

    Attributes:
        resident_bytes: size of the slots.
        total_bytes: size of all experts.
        hits: times that a layer needed an expert which was resident, or being read ahead.
        misses: times that it was not.
        read_ahead: experts read because they were foreseen.
        bytes_moved: read into slots, as they are held there.
        waited_seconds: the computation stood still for them.
    """

    resident_bytes: int
    total_bytes: int
    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0

    def __str__(self) -> str:
        uses = max(1, self.hits + self.misses)
        return (
            f"{self.resident_bytes:,} of {self.total_bytes:,} bytes of experts were resident: {self.hits / uses:.0%} "
            f"of {uses:,} uses found theirs there, {self.bytes_read:,} bytes were read "
            f"({self.prefetched:,} experts ahead), {self.wait_seconds:.1f} s waited for them"
        )


class _Slot:
    """Room for one expert: its matrices."""

    def __init__(self, parts: dict[str, Tensor | PrepackedQuantizedWeight]) -> None:
        self.parts = parts
        self.memory = {
            part: memoryview(weight.flatten().view(torch.uint8).numpy().data)
            for part, weight in parts.items()
            if isinstance(weight, Tensor) and weight.device.type == "cpu"
        }
        self.used: torch.cuda.Event | None = None
        """When the device has done what was last asked of these matrices."""


class ExpertOffloader:
    """The experts of a model, a bounded number of them in memory."""

    def __init__(
        self,
        stored_model: StoredModel,
        resident: str,
        dtype: torch.dtype,
        device: torch.device,
        kind: QuantizationFormat | None = None,
    ) -> None:
        """
        Args:
            resident: how much may be resident: a share of all experts (25%), or bytes (3GB).
            dtype: that the model computes in.
            kind: that they are rounded to.

        Raises:
            JinguError: the model has no experts, or there is room for too few.
        """
        mixture = stored_model.spec.feed_forward
        if not isinstance(mixture, Experts):
            raise JinguError("the model has no mixture of experts.", where=OPTION, fix="Leave it out.")
        layers = stored_model.spec.num_layers + (stored_model.spec.num_encoder_layers or 0)
        inner = (mixture.intermediate_size, stored_model.spec.hidden_size)
        matrix = {"gate": inner, "up": inner, "down": (stored_model.spec.hidden_size, mixture.intermediate_size)}
        self._stored_model, self._dtype, self._device = stored_model, dtype, device
        self._rounded: dict[str, tuple[Tensor, Tensor]] = {}  # of all experts of a matrix: values and scales
        self._files = FileReader()
        self._stretches: dict[
            ExpertKey, dict[str, FileRegion]
        ] = {}  # of experts that lie there as they are computed with
        self._disk = None if kind is None else DiskStorage(Path(tempfile.gettempdir()), "TMPDIR")
        one = {part: _room_for(shape, kind, dtype, device) for part, shape in matrix.items()}
        self._expert_bytes = sum(weight.nbytes for weight in one.values())
        total = layers * mixture.num_experts * self._expert_bytes
        number = _slots(resident, total, self._expert_bytes)
        rooms = {part: _rooms(number, weight, device) for part, weight in one.items()}
        self._free = [_Slot({part: rooms[part][slot] for part in one}) for slot in range(number)]
        self._stats = ExpertOffloadStats(len(self._free) * self._expert_bytes, total)
        self._where: dict[ExpertKey, _Slot] = {}
        self._coming: dict[ExpertKey, Future[None]] = {}  # of these, what is being read
        self._settled_LE = np.zeros((layers, mixture.num_experts), dtype=bool)
        self._foresight = ReuseDistancePredictor(layers, mixture.num_experts, mixture.num_experts_per_token)
        self._loaders = make_worker_threads(NUM_READERS, "experts")
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._blocks: list[tuple[str, Block, MoELayer]] = []
        self._states: Tensor | None = None
        self._chosen_NK: IntArray | None = None
        self.trace: list[tuple[int, tuple[int, ...]]] | None = None
        """Set to a list, it is told of every visit of a layer: the experts that it needed."""

    def take_over(self, model: Decoder) -> None:
        """Take the experts' matrices away from a model on the meta device, and let it compute with those here."""
        names = {block: name for name, block in model.named_modules() if isinstance(block, Block)}
        for number, (_, block) in enumerate(iterate_blocks(model)):
            assert isinstance(block, Block) and isinstance(block.feed_forward, MoELayer)
            mixture = block.feed_forward
            for part, weight in self._free[0].parts.items():
                delattr(mixture, part)
                if isinstance(weight, PrepackedQuantizedWeight):
                    self._round(f"{names[block]}.feed_forward.{part}.weight", mixture.spec.num_experts, weight)
            mixture.compute = partial(self._compute, number)  # type: ignore[method-assign]
            mixture.route = partial(self._route, mixture.route)  # type: ignore[method-assign]
            block.feed_forward_norm.register_forward_pre_hook(self._remember)
            self._blocks.append((names[block], block, mixture))

    def _round(self, name: str, number: int, weight: PrepackedQuantizedWeight) -> None:
        """Put onto the disk what experts' matrices are rounded to; `weight` is what one of them needs."""
        assert self._disk is not None
        values, scales = (
            self._disk.zeros_like(part.new_empty((number, *part.shape), device="meta"))
            for part in (weight.values, weight.scales)
        )
        for expert in range(number):
            read = self._stored_model.read(name, expert).to(self._device)
            rounded = PrepackedQuantizedWeight.quantize(read, weight.kind, self._dtype)
            values[expert], scales[expert] = rounded.values, rounded.scales
        self._rounded[name] = values, scales

    def stats(self) -> ExpertOffloadStats:
        """What has been needed and read so far."""
        return replace(self._stats)

    # A visit of a layer

    def _remember(self, _norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the states before a block's last norm: the next layer's router is asked about them."""
        self._states = inputs[0]

    def _route(self, original: Callable[[Tensor], RouterOutput], logits_BTE: Tensor) -> RouterOutput:
        """`MoELayer.route`; what it chose is remembered."""
        routed = original(logits_BTE)
        self._chosen_NK = routed[0].flatten(0, -2).cpu().numpy()
        return routed

    def _compute(self, layer: int, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """`MoELayer.compute`, expert by expert: those that are here first, the others as they come."""
        counts = count_E.tolist()
        ends = list(accumulate(counts))
        needed = {expert for expert, count in enumerate(counts) if count}
        if self.trace is not None:
            self.trace.append((layer, tuple(needed)))
        assert self._chosen_NK is not None
        self._foresight.visit(layer, self._chosen_NK)
        self._settle(layer, set())
        absent = [expert for expert in needed if (layer, expert) not in self._where]
        self._stats.hits += len(needed) - len(absent)
        self._stats.misses += len(absent)
        ahead = self._foresee(layer + 1)
        y_MD = torch.empty_like(x_MD)
        self._read(layer, absent, ahead, needed)
        while needed:
            expert = self._next(layer, needed)
            if expert is not None:
                rows = slice(ends[expert] - counts[expert], ends[expert])
                y_MD[rows] = self._say(layer, self._where[layer, expert], x_MD[rows])
                needed.remove(expert)
            self._read(layer, absent, ahead, needed)
        return y_MD

    def _say(self, layer: int, slot: _Slot, x_MD: Tensor) -> Tensor:
        """What one expert says to its rows."""
        matrix = {part: partial(_times, weight) for part, weight in slot.parts.items()}
        y_MD = self._blocks[layer][2].speak(x_MD, matrix["gate"], matrix["up"], matrix["down"])
        if self._side is not None:
            slot.used = torch.cuda.Event()
            slot.used.record()
        return y_MD

    def _next(self, layer: int, needed: set[int]) -> int | None:
        """One of these that is here; where none is yet, the first one to come. None: another came, which was read
        ahead, and its slot can be had."""
        ready = [expert for expert in needed if self._settled_LE[layer, expert]]
        if ready:
            return min(ready)
        mine = [self._coming[layer, expert] for expert in needed if (layer, expert) in self._coming]
        start = perf_counter()
        wait(mine or self._coming.values(), return_when=FIRST_COMPLETED)
        self._stats.wait_seconds += perf_counter() - start
        self._settle(layer, needed)
        return min((expert for expert in needed if self._settled_LE[layer, expert]), default=None)

    # Slots

    def _read(self, layer: int, absent: list[int], ahead: list[int], needed: set[int]) -> None:
        """Begin to read what this layer misses, then ahead, as long as a thread is free and a slot can be had.

        No more at a time: what is needed once then goes through the slots of those that have spoken before it, and not
        through those of others that will be needed soon.
        """
        self._settle(layer, needed)
        while (absent or ahead) and len(self._coming) < NUM_READERS:
            key = (layer, absent[0]) if absent else (layer + 1, ahead[0])
            if key not in self._where:
                slot = self._slot(layer, needed, least=0.0 if absent else 1.5)
                if slot is None:
                    return
                self._fill(slot, key)
                self._stats.prefetched += not absent
            (absent or ahead).pop(0)

    def _slot(self, layer: int, needed: set[int], least: float = 0.0) -> _Slot | None:
        """A slot to fill anew: an empty one, or that of the expert which is likely to be needed last; none where that
        is in no more than `least` visits, or all are in use."""
        if not self._free:
            distance_LE = np.where(self._settled_LE, self._foresight.distance_LE, 0.0)
            distance_LE[layer, list(needed)] = 0.0
            last, expert = np.unravel_index(distance_LE.argmax(), distance_LE.shape)
            if distance_LE[last, expert] <= least:
                return None
            self._vacate((int(last), int(expert)))
        return self._free.pop()

    def _settle(self, layer: int, needed: set[int]) -> None:
        """See which experts have come. Where one could not be read, raise why if it is needed; else let it be."""
        for key in [key for key, future in self._coming.items() if future.done()]:
            wrong = self._coming[key].exception()
            if wrong is None:
                del self._coming[key]
                self._settled_LE[key] = True
                continue
            self._vacate(key)
            if key[0] == layer and key[1] in needed:
                raise wrong

    def _vacate(self, key: ExpertKey) -> None:
        self._free.append(self._where.pop(key))
        self._coming.pop(key, None)
        self._settled_LE[key] = False

    def _fill(self, slot: _Slot, key: ExpertKey) -> None:
        self._where[key] = slot
        self._stats.bytes_read += self._expert_bytes
        self._coming[key] = self._loaders.submit(self._load, slot, key)

    def _load(self, slot: _Slot, key: ExpertKey) -> None:
        """Read an expert into its slot; on a thread of its own."""
        if (stretches := self._stretches.get(key)) is not None:
            self._files.read_into([(stretch, slot.memory[part]) for part, stretch in stretches.items()])
            return
        with torch.no_grad(), nullcontext() if self._side is None else torch.cuda.stream(self._side):
            if self._side is not None and slot.used is not None:
                self._side.wait_event(slot.used)
            stretches = {}
            for part, weight in slot.parts.items():
                name = f"{self._blocks[key[0]][0]}.feed_forward.{part}.weight"
                if isinstance(weight, PrepackedQuantizedWeight):
                    values, scales = self._rounded[name]
                    weight.values.copy_(values[key[1]])
                    weight.scales.copy_(scales[key[1]])
                    continue
                read = self._stored_model.read(name, key[1])
                weight.copy_(read)
                if part in slot.memory and read.dtype == weight.dtype and (stretch := file_region(read)) is not None:
                    stretches[part] = stretch
            if self._side is not None:
                self._side.synchronize()
        if len(stretches) == len(slot.parts):
            self._stretches[key] = stretches

    # What comes next

    def _foresee(self, layer: int) -> list[int]:
        """What the next layer is almost sure to need, by what its router says of the present states."""
        # From an encoder to a decoder nothing can be foreseen.
        if layer == len(self._blocks) or len({self._blocks[n][0].rpartition(".")[0] for n in (layer - 1, layer)}) > 1:
            return []
        _, block, mixture = self._blocks[layer]
        assert self._states is not None and self._chosen_NK is not None
        states_ND = self._states.flatten(0, 1)[: len(self._chosen_NK)]  # the others only fill up
        # `forward` itself: a call would have these states remembered as that block's.
        x_ND = block.feed_forward_norm.forward(states_ND)
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        logits_NE = linear(x_ND.to(wide), mixture.router.weight.to(x_ND.dtype))
        guess_NK = logits_NE.topk(mixture.spec.num_experts_per_token, dim=-1).indices.cpu().numpy()
        likely_E = self._foresight.foresee(layer, guess_NK)
        return [
            expert for expert in (-likely_E).argsort(kind="stable").tolist() if likely_E[expert] >= PREFETCH_THRESHOLD
        ]


def _room_for(
    shape: tuple[int, int], kind: QuantizationFormat | None, dtype: torch.dtype, device: torch.device
) -> Tensor | PrepackedQuantizedWeight:
    """A rounded matrix of zeros, where it is to be rounded and can be; else one without memory."""
    if kind is None or not can_quantize(*shape, kind):
        return torch.empty(shape, dtype=dtype, device="meta")
    return PrepackedQuantizedWeight.quantize(torch.zeros(shape, device=device), kind, dtype)


def _rooms(
    number: int, weight: Tensor | PrepackedQuantizedWeight, device: torch.device
) -> list[Tensor] | list[PrepackedQuantizedWeight]:
    """Memory for so many matrices like one, in large pages where the system has them."""
    if isinstance(weight, PrepackedQuantizedWeight):
        parts = [_room(number, part, device) for part in (weight.values, weight.scales)]
        return [replace(weight, values=values, scales=scales) for values, scales in zip(*parts, strict=True)]
    return list(_room(number, weight, device))


def _room(number: int, weight: Tensor, device: torch.device) -> Tensor:
    room = torch.empty((number, *weight.shape), dtype=weight.dtype, device=device)
    if device.type == "cpu":
        request_huge_pages(room.data_ptr(), room.nbytes)
    return room


def _times(weight_OI: Tensor | PrepackedQuantizedWeight, x_MI: Tensor) -> Tensor:
    return linear(x_MI, weight_OI)


def _slots(resident: str, total: int, expert_bytes: int) -> int:
    """How many experts there is room for. Raises JinguError where these are too few."""
    count = min(total, parse_size(resident, total)) // expert_bytes
    if count < MIN_SLOTS:
        least = MIN_SLOTS * expert_bytes
        raise JinguError(
            f"{resident} of the {total:,} bytes that the experts have is room for {count} of them, and the least "
            f"is {MIN_SLOTS}.",
            where=OPTION,
            fix=f"Give {least:,} bytes or more, or {math.ceil(1000 * least / total) / 10}%.",
        )
    return count


def parse_size(text: str, whole: int) -> int:
    """Bytes of a share (25%) of the whole, or as said (800MB, 3GB, 1.5GiB, 1000000). Raises JinguError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B|B?)", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise JinguError(f"{text} is no size.", where=OPTION, fix="Give a share, such as 25%, or bytes, such as 3GB.")
    number, unit = float(match[1]), match[2].upper()
    if unit == "%":
        if number > 100:
            raise JinguError(f"{text} is more than all.", where=OPTION, fix="Give 100% or less.")
        return int(whole * number / 100)
    power = "KMGT".find(unit[0]) + 1 if len(unit) > 1 else 0
    return int(number * (1024 if "I" in unit else 1000) ** power)
