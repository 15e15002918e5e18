"""What a served model takes: memory of weights and cache, tokens per second against the batch, the first token."""

from __future__ import annotations

from dataclasses import dataclass

from jingu.errors import JinguError
from jingu.model.count import count_parameters, generation_flops
from jingu.model.decoder import parameter_shapes
from jingu.model.spec import Experts, ModelSpec
from jingu.plan.machine import Machine

# Streams for which speeds are shown.
BATCHES = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class ServingPlan:
    """A model on cards that share it by tensor parallelism.

    Attributes:
        weights: bytes on a card; cache_per_token: bytes of keys and values of a token on a card.
        max_streams: sequences of `context` tokens whose cache fits.
        first_token: seconds until the first token of a prompt of `context` / 2 tokens.
        speeds: tokens per second of all streams, by their number.
    """

    cards: int
    context: int
    weights: float
    cache_per_token: float
    max_streams: int
    first_token: float
    speeds: dict[int, float]


def plan_serving(spec: ModelSpec, machine: Machine, cards: int, context: int, weight_bytes: float = 2.0) -> ServingPlan:
    """Return memory and speed of a served model.

    Args:
        cards: that share the model.
        context: tokens of a sequence, prompt and answer.
        weight_bytes: of a weight: 2 in bf16, about 1 or 0.56 quantized.

    Raises:
        JinguError: the weights do not fit.
    """
    shapes = parameter_shapes(spec)
    count = count_parameters(spec, shapes)
    part, rates = spec.attention, machine.efficiency
    weights = count.total * weight_bytes / cards
    # More ranks than key-value heads keep copies of them.
    heads = max(1.0, part.num_kv_heads / cards)
    cache = 2.0 * 2 * spec.num_layers * heads * part.head_dim
    room = machine.usable_bytes - weights
    if room <= 0:
        raise JinguError(
            f"the weights take {weights / 2**30:,.1f} GiB of each of {cards} × {machine.name}, which have "
            f"{machine.usable_bytes / 2**30:,.1f} GiB: short by {-room / 2**30:,.1f} GiB.",
            where="--gpus",
            fix="Use more cards, or quantized weights.",
        )
    peak = machine.matmul_tflops * 1e12 * rates.matmul * cards
    bandwidth = machine.memory_gbs * 1e9 * rates.memory
    prompt = context // 2
    # All-reduces of a layer's two halves.
    latency = spec.num_layers * 2 * 2 * (cards - 1) * rates.hop_us * 1e-6
    launch = spec.num_layers * 12 * rates.kernel_us * 1e-6
    speeds = {}
    for streams in BATCHES:
        read = weights * _share_read(spec, count.active / count.total, streams) + streams * prompt * cache
        compute = streams * generation_flops(spec, shapes, prompt) / peak
        speeds[streams] = streams / (max(read / bandwidth, compute, launch) + latency)
    first = prompt * generation_flops(spec, shapes, prompt // 2) / peak + latency + launch
    return ServingPlan(cards, context, weights, cache, int(room / (cache * context)), first, speeds)


def _share_read(spec: ModelSpec, active: float, streams: int) -> float:
    """Return the share of the weights that a step of several streams reads: of a mixture, the chosen experts'."""
    part = spec.feed_forward
    if not isinstance(part, Experts):
        return 1.0
    active_share = part.num_experts_per_token / part.num_experts
    # Active weights are the dense ones and the chosen share of the experts'.
    experts = (1 - active) / (1 - active_share) if active_share < 1 else 0.0
    return 1 - experts * (1 - active_share) ** streams
