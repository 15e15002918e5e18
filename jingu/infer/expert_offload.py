"""Expert offload: mixtures of experts larger than memory, after InfMoE (Zhang et al., 2021).

Resident experts are in a fixed number of slots, each of which has room for one expert of any layer. Other experts are
read from the model's own files when a layer needs them, or prefetched shortly before. Quantized experts are written to
a temporary file once, when the model is loaded. A background thread fills slots while the model computes. All decisions
are made on the thread that computes, and results do not depend on them.

Shapes: B rows, T tokens, N = B·T tokens, D hidden size, L layers, E experts, K experts per token, M = N·K choices.
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
from numpy.typing import NDArray
from torch import Tensor, nn

from jingu.checkpoint.mapped_files import FileReader, FileRegion, file_region
from jingu.errors import JinguError
from jingu.formats.stored_model import StoredModel
from jingu.model.block import Block
from jingu.model.decoder import Decoder, iterate_blocks
from jingu.model.experts import MoELayer, RoutingStats
from jingu.model.feed_forward_specs import Experts
from jingu.model.matmul_kernels import linear
from jingu.model.quantized_weight import PrepackedQuantizedWeight, can_quantize
from jingu.model.spec import QuantizationFormat
from jingu.parallel.offload import DiskStorage
from jingu.runtime.device import device_module, make_worker_threads, parse_size, request_huge_pages

# (index of a layer in the order of computation, index of one of its experts).
ExpertKey = tuple[int, int]
RouterOutput = tuple[Tensor, Tensor, RoutingStats | None]

OPTION = "--resident-experts"
# Reader threads. Two are not faster, and evict more experts before they are needed again.
NUM_READERS = 1
# One slot to compute with, while the other one is filled.
MIN_SLOTS = 2
# Minimum probability that an expert will be needed, to prefetch it.
PREFETCH_THRESHOLD = 0.97


@dataclass
class ExpertOffloadStats:
    """Statistics of expert offload since its start.

    Attributes:
        resident_bytes: size of the slots.
        total_bytes: size of all experts.
        hits: number of times that a layer needed an expert which was resident or being prefetched.
        misses: number of times that it was neither.
        prefetched: number of prefetched experts.
        bytes_read: bytes read into slots, in the format of the slots.
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
    """Memory for the matrices of one expert.

    Attributes:
        used: device event that follows the last computation with these matrices; None before one, and on CPUs.
    """

    def __init__(self, weights: dict[str, Tensor | PrepackedQuantizedWeight]) -> None:
        self.weights = weights
        self.used: Any | None = None
        # Views of the matrices that file contents can be read into directly.
        self.buffers = {
            part: memoryview(weight.flatten().view(torch.uint8).numpy().data)
            for part, weight in weights.items()
            if isinstance(weight, Tensor) and weight.device.type == "cpu"
        }


class ExpertOffloader:
    """Computes a model's experts with a limited number of them in memory.

    Args:
        resident: how much may be resident: a share of all experts (25%), or bytes (3GB).
        dtype: dtype of the model's computation.
        kind: quantization format of the experts; None leaves them unquantized.

    Attributes:
        trace: for analysis: if it is a list, each computed layer is appended with the experts that it needed.

    Raises:
        JinguError: the model has no experts, or fewer than MIN_SLOTS would be resident.
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
        experts = spec.experts
        if experts is None:
            raise JinguError("the model has no mixture of experts.", where=OPTION, fix="Leave it out.")
        # Only layers with experts count.
        layers = (*[spec.default_layer] * (spec.num_encoder_layers or 0), *spec.layers)
        num_layers = sum(isinstance(layer.feed_forward, Experts) for layer in layers)
        up_shape = (experts.intermediate_size, experts.latent_size or spec.hidden_size)
        shapes = {"gate": up_shape} if experts.gated else {}
        shapes |= {"up": up_shape, "down": up_shape[::-1]}
        self._stored_model = stored_model
        self._dtype = dtype
        self._device = device
        # By name of a quantized matrix: the values and scales of all its experts, on disk.
        self._disk = None if kind is None else DiskStorage(Path(tempfile.gettempdir()), "TMPDIR")
        self._quantized: dict[str, tuple[Tensor, Tensor]] = {}
        # Where experts are stored, if the model's files have them in the format of the slots.
        self._files = FileReader()
        self._regions: dict[ExpertKey, dict[str, FileRegion]] = {}
        # As many slots as there is room for.
        expert = {part: _template(shape, kind, dtype, device) for part, shape in shapes.items()}
        self._expert_bytes = sum(weight.nbytes for weight in expert.values())
        total_bytes = num_layers * experts.num_experts * self._expert_bytes
        num_slots = _count_slots(resident, total_bytes, self._expert_bytes)
        weights = {part: _allocate_like(weight, num_slots, device) for part, weight in expert.items()}
        self._free = [_Slot({part: weights[part][slot] for part in expert}) for slot in range(num_slots)]
        self._stats = ExpertOffloadStats(num_slots * self._expert_bytes, total_bytes)
        # Slots of experts that are resident or being read, reads in progress, and which experts are resident.
        self._slot_of: dict[ExpertKey, _Slot] = {}
        self._pending: dict[ExpertKey, Future[None]] = {}
        self._ready_LE = np.zeros((num_layers, experts.num_experts), dtype=bool)
        self._predictor = ReuseDistancePredictor(num_layers, experts.num_experts, experts.num_experts_per_token)
        self._readers = make_worker_threads(NUM_READERS, "experts")
        self._stream = None if device.type in ("cpu", "mps") else device_module(device).Stream(device)
        self._blocks: list[tuple[str, Block, MoELayer]] = []
        # Inputs of the prediction, from the current block: hidden states before its last norm, and router choices.
        self._states_BTD = torch.empty(0)
        self._chosen_NK: IntArray = np.empty((0, 0), dtype=np.int64)
        self.trace: list[tuple[int, tuple[int, ...]]] | None = None

    def replace_experts(self, model: Decoder) -> None:
        """Replace the experts of a model on the meta device: remove their matrices, and compute with the slots."""
        names = {block: name for name, block in model.named_modules() if isinstance(block, Block)}
        for _, block in iterate_blocks(model):
            assert isinstance(block, Block)
            moe = block.feed_forward
            if not isinstance(moe, MoELayer):
                continue
            layer = len(self._blocks)
            for part, weight in self._free[0].weights.items():
                delattr(getattr(moe, part), "weight")
                if isinstance(weight, PrepackedQuantizedWeight):
                    self._quantize(f"{names[block]}.feed_forward.{part}.weight", moe.spec.num_experts, weight)
            moe.compute = partial(self._compute, layer)  # type: ignore[method-assign]
            moe.route = partial(self._route, moe.route)  # type: ignore[method-assign]
            (block.feed_forward_norm or moe).register_forward_pre_hook(self._remember_states)
            self._blocks.append((names[block], block, moe))

    def _quantize(self, name: str, num_experts: int, template: PrepackedQuantizedWeight) -> None:
        """Quantize the matrices of all experts and write them to disk; `template` has the shapes of one expert."""
        assert self._disk is not None
        values, scales = (
            self._disk.zeros_like(part.new_empty((num_experts, *part.shape), device="meta"))
            for part in (template.values, template.scales)
        )
        for expert in range(num_experts):
            weight = self._stored_model.read(name, expert).to(self._device)
            quantized_weight = PrepackedQuantizedWeight.quantize(weight, template.kind, self._dtype)
            values[expert] = quantized_weight.values
            scales[expert] = quantized_weight.scales
        self._quantized[name] = values, scales

    def stats(self) -> ExpertOffloadStats:
        """Return the statistics so far."""
        return replace(self._stats)

    # Computation of a layer

    def _remember_states(self, _norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the hidden states before a block's feed-forward and its norm, to apply the next router to them early."""
        self._states_BTD = inputs[0]

    def _route(self, original: Callable[[Tensor], RouterOutput], logits_BTE: Tensor) -> RouterOutput:
        """Call the original `MoELayer.route` and keep its choices."""
        output = original(logits_BTE)
        self._chosen_NK = output[0].flatten(0, -2).cpu().numpy()
        return output

    def _compute(self, layer: int, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """Implement `MoELayer.compute` expert by expert: resident experts first, then the others as they arrive."""
        counts = count_E.tolist()
        ends = list(accumulate(counts))
        active_experts = {expert for expert, count in enumerate(counts) if count}
        if self.trace is not None:
            self.trace.append((layer, tuple(active_experts)))
        # 1. Update the predictor with the router's choices, and count misses.
        self._predictor.visit(layer, self._chosen_NK)
        self._collect(layer, set())
        missing = [expert for expert in active_experts if (layer, expert) not in self._slot_of]
        self._stats.hits += len(active_experts) - len(missing)
        self._stats.misses += len(missing)
        # 2. Compute resident experts while missing ones are read, and while the next layer's are prefetched.
        likely = self._predict(layer + 1)
        y_MD = torch.empty_like(x_MD)
        self._start_reads(layer, missing, likely, active_experts)
        while active_experts:
            expert = self._next_ready(layer, active_experts)
            if expert is not None:
                rows = slice(ends[expert] - counts[expert], ends[expert])
                y_MD[rows] = self._compute_expert(layer, expert, x_MD[rows])
                active_experts.remove(expert)
            self._start_reads(layer, missing, likely, active_experts)
        return y_MD

    def _compute_expert(self, layer: int, expert: int, x_MD: Tensor) -> Tensor:
        """Return the output of one resident expert for its rows."""
        slot = self._slot_of[layer, expert]
        moe = self._blocks[layer][2]
        # The biases of all experts are resident.
        biases = {part: getattr(moe, part).bias_of(expert) for part in slot.weights}
        matmuls = {part: partial(linear, weight=weight, bias=biases[part]) for part, weight in slot.weights.items()}
        # The event lets the reader's stream wait before it overwrites the slot.
        y_MD = moe.run_experts(x_MD, matmuls.get("gate"), matmuls["up"], matmuls["down"])
        if self._stream is not None:
            slot.used = device_module(self._device).current_stream().record_event()
        return y_MD

    def _next_ready(self, layer: int, needed: set[int]) -> int | None:
        """Return a needed expert that is resident. If there is none, wait until a read ends. Return None if that read
        was a prefetch for another layer, whose slot can now be evicted."""
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
        """Start to read this layer's missing experts, then likely ones of the next layer, while readers and slots are
        free.

        Reads are started as late as possible: missing experts can then reuse the slots of experts that this layer has
        already computed, and do not evict others that will be needed soon.
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
        """Return a free slot, else evict the expert with the longest expected time until its next use. Return None if
        that is at most `min_distance` visits, or if all slots are in use."""
        if not self._free:
            distance_LE = np.where(self._ready_LE, self._predictor.distance_LE, 0.0)
            distance_LE[layer, list(needed)] = 0.0
            last, expert = np.unravel_index(distance_LE.argmax(), distance_LE.shape)
            if distance_LE[last, expert] <= min_distance:
                return None
            self._evict((int(last), int(expert)))
        return self._free.pop()

    def _collect(self, layer: int, needed: set[int]) -> None:
        """Mark experts as resident whose reads have ended. Raise the error of a failed read only if the expert is
        needed now; a failed prefetch is dropped."""
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
        """Read an expert into its slot, on a reader thread."""
        # 1. The shortcut of later reads: bytes in the format of the slot go from the file straight into it.
        if (regions := self._regions.get(key)) is not None:
            self._files.read_into([(region, slot.buffers[part]) for part, region in regions.items()])
            return
        # 2. Else read the tensors and convert them, on a stream of the reader's own, once the slot is not in use.
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
                stored_value = self._stored_model.read(name, expert)
                weight.copy_(stored_value)
                region = file_region(stored_value)
                if part in slot.buffers and stored_value.dtype == weight.dtype and region is not None:
                    regions[part] = region
            if self._stream is not None:
                self._stream.synchronize()
        # 3. Remember the place in the files, if all matrices allow the shortcut.
        if len(regions) == len(slot.weights):
            self._regions[key] = regions

    # Prediction

    def _predict(self, layer: int) -> list[int]:
        """Return the experts that a layer will almost certainly need, most likely first, by applying its router to the
        hidden states of the current layer."""
        # The states of an encoder do not predict the first layer of the decoder.
        if layer == len(self._blocks) or len({self._blocks[n][0].rpartition(".")[0] for n in (layer - 1, layer)}) > 1:
            return []
        _, block, moe = self._blocks[layer]
        states_ND = self._states_BTD.flatten(0, 1)[: len(self._chosen_NK)]  # without padding rows
        # Call `forward` directly to bypass the hook of `_remember_states`.
        norm = block.feed_forward_norm
        x_ND = states_ND if norm is None else norm.forward(states_ND)
        guess_NK = moe.choose(moe.router_logits(x_ND.unsqueeze(0)))[0][0].cpu().numpy()
        probability_E = self._predictor.predict(layer, guess_NK)
        order = (-probability_E).argsort(kind="stable").tolist()
        return [expert for expert in order if probability_E[expert] >= PREFETCH_THRESHOLD]


def _template(
    shape: tuple[int, int], kind: QuantizationFormat | None, dtype: torch.dtype, device: torch.device
) -> Tensor | PrepackedQuantizedWeight:
    """Return an example of an expert's matrix: a quantized one if its shape allows it, else one on the meta device."""
    if kind is None or not can_quantize(*shape, kind):
        return torch.empty(shape, dtype=dtype, device="meta")
    return PrepackedQuantizedWeight.quantize(torch.zeros(shape, device=device), kind, dtype)


def _allocate_like(
    weight: Tensor | PrepackedQuantizedWeight, count: int, device: torch.device
) -> list[Tensor] | list[PrepackedQuantizedWeight]:
    """Return `count` uninitialized matrices like `weight`, on CPUs in huge pages where the system has them."""
    if isinstance(weight, PrepackedQuantizedWeight):
        parts = [_allocate_like(part, count, device) for part in (weight.values, weight.scales)]
        return [replace(weight, values=values, scales=scales) for values, scales in zip(*parts, strict=True)]
    memory = torch.empty((count, *weight.shape), dtype=weight.dtype, device=device)
    if device.type == "cpu":
        request_huge_pages(memory.data_ptr(), memory.nbytes)
    return list(memory)


def _count_slots(resident: str, total_bytes: int, expert_bytes: int) -> int:
    """Return how many experts there is room for. Raise JinguError if there are fewer than MIN_SLOTS."""
    count = min(total_bytes, parse_size(resident, total_bytes, OPTION)) // expert_bytes
    if count < MIN_SLOTS:
        least = MIN_SLOTS * expert_bytes
        raise JinguError(
            f"{resident} of the experts' {total_bytes:,} bytes is room for {count} of them; at least {MIN_SLOTS} must "
            "be resident.",
            where=OPTION,
            fix=f"Give {least:,} bytes or more, or {math.ceil(1000 * least / total_bytes) / 10}%.",
        )
    return count


# Prediction of which experts will be needed, and when, from the experts of past tokens and from routers that are
# applied one layer early.
#
# A visit is the computation of one layer in one step.
#
# Shapes: L layers in the order of computation, E experts per layer, K experts per token, N tokens of a visit.

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
# Weight of the uniform prior over experts, in tokens.
_PRIOR_TOKENS = 4.0
# Largest weight of past tokens, in visits with as many tokens as the current one. Experts are needed in bursts, so a
# short memory predicts better.
_MEMORY_VISITS = 11.0
# Half-life, in tokens, of observations of a router's accuracy.
_HALF_LIFE = 64.0
# Accuracy of routers applied early, before it has been observed.
_PRIOR_ACCURACY = 0.5
_NEVER = 1e9


class ReuseDistancePredictor:
    """Estimates when each expert is needed next, in visits of layers.

    Layers are visited in a cycle, whose order is learned from the visits. The tokens of a visit are assumed to choose
    experts independently of each other, with the frequencies of recent choices.

    Attributes:
        distance_LE: expected visits until each expert is needed; for experts in use, until they are needed again.
    """

    def __init__(self, layers: int, experts: int, active: int) -> None:
        self._experts = experts
        self._active = active
        self._share_LE = np.full((layers, experts), active / experts)
        self._num_past_L = np.full(layers, _PRIOR_TOKENS)
        self._log_tokens_L = np.zeros(layers)  # logarithm of the tokens of a visit
        self._accuracy_LK = np.full((layers, active), _PRIOR_ACCURACY)  # accuracy of first guesses, second ones, ...
        self._guess: tuple[int, IntArray] | None = None
        self._next_layer = [*range(1, layers), 0]
        self._last_layer: int | None = None
        self.distance_LE: FloatArray = np.zeros((layers, experts))

    def visit(self, layer: int, chosen_NK: IntArray) -> None:
        """Update the estimates with a visit of a layer, whose tokens chose these experts."""
        # 1. Update the order of layers.
        num_tokens = len(chosen_NK)
        if self._last_layer is not None:
            self._next_layer[self._last_layer] = layer
        self._last_layer = layer
        # 2. Update the moving averages of the experts' frequencies and of the tokens of a visit.
        num_past = min(self._num_past_L[layer], _MEMORY_VISITS * num_tokens)
        chosen_E = self._share_LE[layer] * num_past + self._count(chosen_NK)
        self._share_LE[layer] = chosen_E / (num_past + num_tokens)
        self._num_past_L[layer] = num_past + num_tokens
        self._log_tokens_L[layer] += (np.log(num_tokens) - self._log_tokens_L[layer]) / 4
        # 3. The next visit of the layer, plus the expected number of cycles without a choice (geometric distribution).
        visits_L, cycle = self._visits_until(layer)
        self.distance_LE = visits_L[:, None] + cycle * (1 / self._visit_probability() - 1)
        # 4. Update the router's accuracy, if there was a guess for this visit.
        if self._guess is not None and self._guess[0] == layer and self._guess[1].shape == chosen_NK.shape:
            right_K = (self._guess[1][:, :, None] == chosen_NK[:, None]).any(2).mean(0)
            self._accuracy_LK[layer] += (right_K - self._accuracy_LK[layer]) * (1 - 0.5 ** (num_tokens / _HALF_LIFE))
        self._guess = None

    def predict(self, layer: int, guess_NK: IntArray) -> FloatArray:
        """Return the probability [E] that each expert of the next layer is needed, given its router's guess of each
        token's first choice, second choice and so on."""
        self._guess = layer, guess_NK
        guesses_KE = np.stack([self._count(guess_N) for guess_N in guess_NK.T])
        accuracy_K = np.clip(self._accuracy_LK[layer], 0.0, 0.99)
        # A token may also choose an expert that is not among its guesses.
        inactive_accuracy = min(0.99, (self._active - accuracy_K.sum()) / max(1, self._experts - self._active))
        log_unused_E = np.log1p(-accuracy_K) @ guesses_KE
        log_unused_E = log_unused_E + np.log1p(-inactive_accuracy) * (len(guess_NK) - guesses_KE.sum(0))
        probability_E: FloatArray = -np.expm1(log_unused_E)
        cycle = self._visits_until(layer)[1]
        self.distance_LE[layer] = 1 + (1 - probability_E) * cycle / self._visit_probability()[layer]
        return probability_E

    def _count(self, experts: IntArray) -> IntArray:
        return np.bincount(experts.ravel(), minlength=self._experts)

    def _visit_probability(self) -> FloatArray:
        """Return the probability [L, E] that an expert is needed in a visit of its layer."""
        tokens_L = np.exp(self._log_tokens_L)
        log_unused_LE = np.log1p(-np.minimum(self._share_LE, 0.999)) * tokens_L[:, None]
        return np.maximum(-np.expm1(log_unused_LE), 1e-6)

    def _visits_until(self, layer: int) -> tuple[FloatArray, int]:
        """Return the visits until the next one of each layer, and the number of layers in a cycle."""
        visits_L = np.full(len(self._next_layer), _NEVER)
        count = 0
        layer = self._next_layer[layer]
        while visits_L[layer] == _NEVER:
            count += 1
            visits_L[layer] = count
            layer = self._next_layer[layer]
        return visits_L, count
