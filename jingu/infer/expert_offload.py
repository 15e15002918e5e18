"""Expert offload: mixtures of experts larger than memory, after InfMoE (Zhang et al., 2021).

Some experts are resident, in a number of slots, each with room for one expert of any layer. The others are read from
the model's own files when a layer needs them, or prefetched shortly before; quantized ones are first written to a file.
Threads fill slots while the model computes. All decisions are made on the thread that computes, and results do not
depend on them.

Shapes: B rows, T tokens, N = B·T tokens, D hidden size, L layers, E experts, K experts a token, M = N·K choices.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from pydantic import ByteSize, TypeAdapter
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
from jingu.runtime.device import device_module, make_worker_threads, request_huge_pages

# A layer, in the order of computation, and an expert of it.
ExpertKey = tuple[int, int]
RouterOutput = tuple[Tensor, Tensor, RoutingStats | None]

OPTION = "--resident-experts"
# Threads that read. With two, more is evicted before it is needed again, and the speed is the same.
NUM_READERS = 1
# One slot to compute with, and one to fill meanwhile.
MIN_SLOTS = 2
# The probability from which an expert is prefetched.
PREFETCH_THRESHOLD = 0.97


@dataclass
class ExpertOffloadStats:
    """What has been needed and read.

    Attributes:
        resident_bytes: size of the slots.
        total_bytes: size of all experts.
        hits: times that a layer needed an expert which was resident or being prefetched.
        misses: times that it was neither.
        prefetched: experts that were prefetched.
        bytes_read: read into slots, in the format of the slots.
        wait_seconds: time that the computation waited for experts.
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
            f"{self.resident_bytes:,} of {self.total_bytes:,} bytes of experts were resident; {self.hits / uses:.0%} "
            f"of {uses:,} uses were hits; {self.bytes_read:,} bytes were read ({self.prefetched:,} experts were "
            f"prefetched); the model waited {self.wait_seconds:.1f} s for them"
        )


class _Slot:
    """Room for one expert: its matrices.

    Attributes:
        used: when the device has finished its last computation with these matrices.
    """

    def __init__(self, weights: dict[str, Tensor | PrepackedQuantizedWeight]) -> None:
        self.weights = weights
        self.used: Any | None = None
        # Bytes of those that can be read into directly.
        self.buffers = {
            part: memoryview(weight.flatten().view(torch.uint8).numpy().data)
            for part, weight in weights.items()
            if isinstance(weight, Tensor) and weight.device.type == "cpu"
        }


class ExpertOffloader:
    """The experts of a model, of which a limited number is in memory.

    Args:
        resident: how much may be resident: a share of all experts (25%), or bytes (3GB).
        dtype: that the model computes in.
        kind: format that the experts are quantized to; None: they are not.

    Attributes:
        trace: if it is a list, every visit of a layer is appended with the experts that it needs.

    Raises:
        JinguError: the model has no experts, or there is room for too few.
    """

    def __init__(
        self,
        stored_model: StoredModel,
        resident: str,
        dtype: torch.dtype,
        device: torch.device,
        kind: QuantizationFormat | None = None,
    ) -> None:
        spec = stored_model.spec
        experts = spec.feed_forward
        if not isinstance(experts, Experts):
            raise JinguError("the model has no mixture of experts.", where=OPTION, fix="Leave it out.")
        num_layers = spec.num_layers + (spec.num_encoder_layers or 0)
        up_shape = (experts.intermediate_size, spec.hidden_size)
        shapes = {"gate": up_shape, "up": up_shape, "down": up_shape[::-1]}
        self._stored_model = stored_model
        self._dtype = dtype
        self._device = device
        # Values and scales of all experts of a quantized matrix, on disk.
        self._disk = None if kind is None else DiskStorage(Path(tempfile.gettempdir()), "TMPDIR")
        self._quantized: dict[str, tuple[Tensor, Tensor]] = {}
        # Where experts lie in files, of those that lie there in the format of the slots.
        self._files = FileReader()
        self._regions: dict[ExpertKey, dict[str, FileRegion]] = {}
        # Slots, as many as there is room for.
        expert = {part: _template(shape, kind, dtype, device) for part, shape in shapes.items()}
        self._expert_bytes = sum(weight.nbytes for weight in expert.values())
        total_bytes = num_layers * experts.num_experts * self._expert_bytes
        num_slots = _count_slots(resident, total_bytes, self._expert_bytes)
        weights = {part: _allocate_like(weight, num_slots, device) for part, weight in expert.items()}
        self._free = [_Slot({part: weights[part][slot] for part in expert}) for slot in range(num_slots)]
        self._stats = ExpertOffloadStats(num_slots * self._expert_bytes, total_bytes)
        # Resident experts, and those that are being read; of these, whether they can be computed with.
        self._slot_of: dict[ExpertKey, _Slot] = {}
        self._pending: dict[ExpertKey, Future[None]] = {}
        self._ready_LE = np.zeros((num_layers, experts.num_experts), dtype=bool)
        self._predictor = ReuseDistancePredictor(num_layers, experts.num_experts, experts.num_experts_per_token)
        self._readers = make_worker_threads(NUM_READERS, "experts")
        self._stream = None if device.type in ("cpu", "mps") else device_module(device).Stream(device)
        self._blocks: list[tuple[str, Block, MoELayer]] = []
        # Of the block that is being computed: hidden states before its last norm, and the router's choices.
        self._states_BTD = torch.empty(0)
        self._chosen_NK: IntArray = np.empty((0, 0), dtype=np.int64)
        self.trace: list[tuple[int, tuple[int, ...]]] | None = None

    def take_over(self, model: Decoder) -> None:
        """Remove the experts' matrices from a model on the meta device; it then computes with these experts."""
        names = {block: name for name, block in model.named_modules() if isinstance(block, Block)}
        for layer, (_, block) in enumerate(iterate_blocks(model)):
            assert isinstance(block, Block) and isinstance(block.feed_forward, MoELayer)
            moe = block.feed_forward
            for part, weight in self._free[0].weights.items():
                delattr(moe, part)
                if isinstance(weight, PrepackedQuantizedWeight):
                    self._quantize(f"{names[block]}.feed_forward.{part}.weight", moe.spec.num_experts, weight)
            moe.compute = partial(self._compute, layer)  # type: ignore[method-assign]
            moe.route = partial(self._route, moe.route)  # type: ignore[method-assign]
            block.feed_forward_norm.register_forward_pre_hook(self._remember_states)
            self._blocks.append((names[block], block, moe))

    def _quantize(self, name: str, num_experts: int, template: PrepackedQuantizedWeight) -> None:
        """Write the quantized matrices of all experts to disk; `template` has the shapes of one expert."""
        assert self._disk is not None
        values, scales = (
            self._disk.zeros_like(part.new_empty((num_experts, *part.shape), device="meta"))
            for part in (template.values, template.scales)
        )
        for expert in range(num_experts):
            weight = self._stored_model.read(name, expert).to(self._device)
            quantized = PrepackedQuantizedWeight.quantize(weight, template.kind, self._dtype)
            values[expert] = quantized.values
            scales[expert] = quantized.scales
        self._quantized[name] = values, scales

    def stats(self) -> ExpertOffloadStats:
        """Return what has been needed and read so far."""
        return replace(self._stats)

    # A visit of a layer

    def _remember_states(self, _norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the hidden states before a block's last norm, to which the next layer's router is applied early."""
        self._states_BTD = inputs[0]

    def _route(self, original: Callable[[Tensor], RouterOutput], logits_BTE: Tensor) -> RouterOutput:
        """Compute `MoELayer.route`, and keep its choices."""
        output = original(logits_BTE)
        self._chosen_NK = output[0].flatten(0, -2).cpu().numpy()
        return output

    def _compute(self, layer: int, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """Compute `MoELayer.compute` expert by expert: first those that are resident, then the others as they come."""
        counts = count_E.tolist()
        ends = list(accumulate(counts))
        needed = {expert for expert, count in enumerate(counts) if count}
        if self.trace is not None:
            self.trace.append((layer, tuple(needed)))
        # 1. Learn from what is needed, and count what is missing.
        self._predictor.visit(layer, self._chosen_NK)
        self._collect(layer, set())
        missing = [expert for expert in needed if (layer, expert) not in self._slot_of]
        self._stats.hits += len(needed) - len(missing)
        self._stats.misses += len(missing)
        # 2. Read what is missing and prefetch for the next layer, while resident experts are computed.
        likely = self._predict(layer + 1)
        y_MD = torch.empty_like(x_MD)
        self._start_reads(layer, missing, likely, needed)
        while needed:
            expert = self._next_ready(layer, needed)
            if expert is not None:
                rows = slice(ends[expert] - counts[expert], ends[expert])
                y_MD[rows] = self._compute_expert(layer, self._slot_of[layer, expert], x_MD[rows])
                needed.remove(expert)
            self._start_reads(layer, missing, likely, needed)
        return y_MD

    def _compute_expert(self, layer: int, slot: _Slot, x_MD: Tensor) -> Tensor:
        """Return the output of one expert for its rows."""
        matmuls = {part: partial(linear, weight=weight) for part, weight in slot.weights.items()}
        y_MD = self._blocks[layer][2].speak(x_MD, matmuls["gate"], matmuls["up"], matmuls["down"])
        if self._stream is not None:
            slot.used = device_module(self._device).current_stream().record_event()
        return y_MD

    def _next_ready(self, layer: int, needed: set[int]) -> int | None:
        """Return a needed expert that is ready, waiting for the first one if none is. None: only a prefetched one came,
        whose slot can be reused."""
        ready = [expert for expert in needed if self._ready_LE[layer, expert]]
        if not ready:
            reads = [self._pending[layer, expert] for expert in needed if (layer, expert) in self._pending]
            start = perf_counter()
            wait(reads or self._pending.values(), return_when=FIRST_COMPLETED)
            self._stats.wait_seconds += perf_counter() - start
            self._collect(layer, needed)
            ready = [expert for expert in needed if self._ready_LE[layer, expert]]
        return min(ready, default=None)

    # Slots

    def _start_reads(self, layer: int, missing: list[int], likely: list[int], needed: set[int]) -> None:
        """Start to read what this layer misses, then what the next one will need, while readers and slots are free.

        No more at a time: what is needed only once then passes through the slots of experts that were computed before
        it, and does not evict others that will be needed soon.
        """
        self._collect(layer, needed)
        while (missing or likely) and len(self._pending) < NUM_READERS:
            key = (layer, missing[0]) if missing else (layer + 1, likely[0])
            if key not in self._slot_of:
                slot = self._allocate(layer, needed, min_distance=0.0 if missing else 1.5)
                if slot is None:
                    return
                self._slot_of[key] = slot
                self._pending[key] = self._readers.submit(self._read, slot, key)
                self._stats.bytes_read += self._expert_bytes
                self._stats.prefetched += not missing
            (missing or likely).pop(0)

    def _allocate(self, layer: int, needed: set[int], min_distance: float) -> _Slot | None:
        """Return a free slot, or that of the expert which will probably be needed last. None: that one is needed within
        `min_distance` visits, or all are in use."""
        if not self._free:
            distance_LE = np.where(self._ready_LE, self._predictor.distance_LE, 0.0)
            distance_LE[layer, list(needed)] = 0.0
            last, expert = np.unravel_index(distance_LE.argmax(), distance_LE.shape)
            if distance_LE[last, expert] <= min_distance:
                return None
            self._evict((int(last), int(expert)))
        return self._free.pop()

    def _collect(self, layer: int, needed: set[int]) -> None:
        """Mark experts as ready whose reads have ended. Raise the error of a failed read only if the expert is needed
        now."""
        for key in [key for key, future in self._pending.items() if future.done()]:
            error = self._pending[key].exception()
            if error is None:
                del self._pending[key]
                self._ready_LE[key] = True
                continue
            self._evict(key)
            if key[0] == layer and key[1] in needed:
                raise error

    def _evict(self, key: ExpertKey) -> None:
        self._free.append(self._slot_of.pop(key))
        self._pending.pop(key, None)
        self._ready_LE[key] = False

    def _read(self, slot: _Slot, key: ExpertKey) -> None:
        """Read an expert into its slot, on a reader's thread."""
        if (regions := self._regions.get(key)) is not None:
            self._files.read_into([(region, slot.buffers[part]) for part, region in regions.items()])
            return
        layer, expert = key
        regions = {}
        stream = nullcontext() if self._stream is None else device_module(self._device).stream(self._stream)
        with torch.no_grad(), stream:
            if self._stream is not None and slot.used is not None:
                self._stream.wait_event(slot.used)
            for part, weight in slot.weights.items():
                name = f"{self._blocks[layer][0]}.feed_forward.{part}.weight"
                if isinstance(weight, PrepackedQuantizedWeight):
                    values, scales = self._quantized[name]
                    weight.values.copy_(values[expert])
                    weight.scales.copy_(scales[expert])
                    continue
                stored = self._stored_model.read(name, expert)
                weight.copy_(stored)
                region = file_region(stored)
                if part in slot.buffers and stored.dtype == weight.dtype and region is not None:
                    regions[part] = region
            if self._stream is not None:
                self._stream.synchronize()
        if len(regions) == len(slot.weights):
            self._regions[key] = regions

    # Prediction

    def _predict(self, layer: int) -> list[int]:
        """Return the experts that a layer will almost certainly need: its router's choice for the present states."""
        # Nothing can be predicted from an encoder for a decoder.
        if layer == len(self._blocks) or len({self._blocks[n][0].rpartition(".")[0] for n in (layer - 1, layer)}) > 1:
            return []
        _, block, moe = self._blocks[layer]
        states_ND = self._states_BTD.flatten(0, 1)[: len(self._chosen_NK)]  # without padding rows
        # Call `forward` itself, without the hook that would keep these states as that block's.
        x_ND = block.feed_forward_norm.forward(states_ND)
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        logits_NE = linear(x_ND.to(wide), moe.router.weight.to(x_ND.dtype))
        guess_NK = logits_NE.topk(moe.spec.num_experts_per_token, dim=-1).indices.cpu().numpy()
        probability_E = self._predictor.predict(layer, guess_NK)
        order = (-probability_E).argsort(kind="stable").tolist()
        return [expert for expert in order if probability_E[expert] >= PREFETCH_THRESHOLD]


def _template(
    shape: tuple[int, int], kind: QuantizationFormat | None, dtype: torch.dtype, device: torch.device
) -> Tensor | PrepackedQuantizedWeight:
    """Return a matrix like those of experts: quantized if it can be, else without memory."""
    if kind is None or not can_quantize(*shape, kind):
        return torch.empty(shape, dtype=dtype, device="meta")
    return PrepackedQuantizedWeight.quantize(torch.zeros(shape, device=device), kind, dtype)


def _allocate_like(
    weight: Tensor | PrepackedQuantizedWeight, count: int, device: torch.device
) -> list[Tensor] | list[PrepackedQuantizedWeight]:
    """Return a number of matrices like one, in large pages where the system has them."""
    if isinstance(weight, PrepackedQuantizedWeight):
        parts = [_allocate_like(part, count, device) for part in (weight.values, weight.scales)]
        return [replace(weight, values=values, scales=scales) for values, scales in zip(*parts, strict=True)]
    memory = torch.empty((count, *weight.shape), dtype=weight.dtype, device=device)
    if device.type == "cpu":
        request_huge_pages(memory.data_ptr(), memory.nbytes)
    return list(memory)


def _count_slots(resident: str, total_bytes: int, expert_bytes: int) -> int:
    """Return how many experts there is room for. Raise JinguError where these are too few."""
    count = min(total_bytes, parse_size(resident, total_bytes)) // expert_bytes
    if count < MIN_SLOTS:
        least = MIN_SLOTS * expert_bytes
        raise JinguError(
            f"{resident} of the experts' {total_bytes:,} bytes is room for {count} of them; at least {MIN_SLOTS} must "
            "be resident.",
            where=OPTION,
            fix=f"Give {least:,} bytes or more, or {math.ceil(1000 * least / total_bytes) / 10}%.",
        )
    return count


def parse_size(text: str, whole: int) -> int:
    """Return the bytes of a share of the whole (25%), or of a size (800MB, 3GB, 1.5GiB, 1000000). Raise JinguError."""
    is_share = text.endswith("%")
    try:
        if is_share:
            size = int(whole * float(text[:-1]) / 100)
        else:
            size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValueError:
        size = 0
    if size < 1:
        fix = "Give a share, such as 25%, or bytes, such as 3GB."
        raise JinguError(f"{text} is not a size.", where=OPTION, fix=fix)
    if is_share and size > whole:
        raise JinguError(f"{text} is more than all.", where=OPTION, fix="Give 100% or less.")
    return size
