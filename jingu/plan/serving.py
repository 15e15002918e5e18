"""The plan of a served model: memory of weights and KV cache, throughput by batch size, and time to first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jingu.errors import JinguError
from jingu.model.count import count_parameters, generation_flops
from jingu.model.parameter_table import parameter_sizes
from jingu.model.parts import cached_numbers, cached_tokens, state_bytes
from jingu.model.spec import ModelSpec
from jingu.plan.machine import Machine

# Numbers of concurrent streams for which the plan shows the throughput.
BATCHES = (1, 4, 16, 64, 256)
# Bytes of a served weight, with the scales of its group.
SERVED_BYTES = {"bf16": 2.0, "int8": 1.06, "int4": 0.56, "nf4": 0.56}


@dataclass(frozen=True)
class ServingPlan:
    """A model on GPUs that share it by tensor parallelism.

    Attributes:
        weights: bytes of weights on a GPU; cache_per_stream: bytes of the KV cache of `context` tokens on a GPU.
        max_streams: sequences of `context` tokens whose cache fits.
        first_token: seconds until the first token of a prompt of `context` / 2 tokens.
        speeds: tokens per second of all streams, by their number.
    """

    gpus: int
    context: int
    weights: float
    cache_per_stream: float
    max_streams: int
    first_token: float
    speeds: dict[int, float]


def served_form(overrides: Sequence[str]) -> str:
    """Return the form of the served weights that settings name: `tune.quantization`, or nf4 with `tune.type=qlora`.

    `stored` is that of the files, which has no entry in `SERVED_BYTES`.

    Raises:
        JinguError: the size of such weights is not known.
    """
    form = "nf4" if "tune.type=qlora" in overrides else "bf16"
    for word in overrides:
        form = word.partition("=")[2] if word.startswith("tune.quantization=") else form
    if form not in (*SERVED_BYTES, "stored"):
        fix = f"Choose {', '.join(SERVED_BYTES)}, or stored."
        raise JinguError(f"the size of weights in the form {form} is not known.", where="tune.quantization", fix=fix)
    return form


def plan_serving(spec: ModelSpec, machine: Machine, gpus: int, context: int, weight_bytes: float = 2.0) -> ServingPlan:
    """Return memory and speed of a served model.

    Args:
        gpus: number of GPUs that share the model.
        context: tokens of a sequence, prompt and answer.
        weight_bytes: bytes per weight: 2 in bf16, about 1 or 0.56 if quantized.

    Raises:
        JinguError: the weights do not fit.
    """
    weights = count_parameters(spec, parameter_sizes(spec)).total * weight_bytes / gpus
    cache = cache_bytes(spec, context, gpus)
    room = machine.usable_bytes - weights
    if room <= 0:
        raise JinguError(
            f"the weights take {weights / 2**30:,.1f} GiB of each of {gpus} × {machine.name}, which have "
            f"{machine.usable_bytes / 2**30:,.1f} GiB: short by {-room / 2**30:,.1f} GiB.",
            where="--gpus",
            fix="Use more GPUs, or quantized weights (tune.quantization=int4).",
        )
    prompt = context // 2
    speeds = {n: n / decode_seconds(spec, machine, n, prompt, weights, gpus) for n in BATCHES}
    first = prompt_seconds(spec, machine, prompt, gpus)
    return ServingPlan(gpus, context, weights, cache, int(room / cache), first, speeds)


def cache_bytes(spec: ModelSpec, tokens: int, gpus: int = 1, number_bytes: float = 2.0) -> float:
    """Return the bytes of the KV cache of a sequence on a GPU. Layers with a window keep only its tokens."""
    total = 0.0
    for layer in spec.layers:
        # With more ranks than key-value heads, these are replicated; so is a latent vector.
        ranks = 1 if layer.attention.latent is not None else min(gpus, layer.attention.num_kv_heads)
        total += state_bytes(spec, layer, number_bytes)
        total += number_bytes * cached_numbers(layer) / ranks * cached_tokens(layer, tokens)
    return total


def decode_seconds(
    spec: ModelSpec, machine: Machine, streams: int, context: int, weights: float, gpus: int = 1
) -> float:
    """Return the seconds of a decode step, which generates one token of each stream.

    Args:
        context: tokens of each stream before the new one.
        weights: bytes of the weights on a GPU.
    """
    shapes = parameter_sizes(spec)
    count = count_parameters(spec, shapes)
    read = weights * _share_read(spec, count.active / count.total, streams)
    read += streams * cache_bytes(spec, context, gpus)
    compute = streams * generation_flops(spec, shapes, context) / _peak(machine, gpus)
    bandwidth = machine.memory_gbs * 1e9 * machine.efficiency.memory
    return max(read / bandwidth, compute, _launch(spec, machine)) + _latency(spec, machine, gpus)


def prompt_seconds(spec: ModelSpec, machine: Machine, prompt: int, gpus: int = 1) -> float:
    """Return the seconds of the prefill of a prompt, which gives the first token."""
    compute = prompt * generation_flops(spec, parameter_sizes(spec), prompt // 2) / _peak(machine, gpus)
    return compute + _latency(spec, machine, gpus) + _launch(spec, machine)


def _peak(machine: Machine, gpus: int) -> float:
    return machine.matmul_tflops * 1e12 * machine.efficiency.matmul * gpus


def _launch(spec: ModelSpec, machine: Machine) -> float:
    return spec.num_layers * 12 * machine.efficiency.kernel_us * 1e-6


def _latency(spec: ModelSpec, machine: Machine, gpus: int) -> float:
    """Return the latency in seconds of two all-reduces per layer."""
    return spec.num_layers * 2 * 2 * (gpus - 1) * machine.efficiency.hop_us * 1e-6


def _share_read(spec: ModelSpec, active: float, streams: int) -> float:
    """Return the share of the weights that a decode step reads; of a mixture of experts, only the chosen experts.

    Args:
        active: share of the weights that one token uses.
    """
    part = spec.experts
    if part is None:
        return 1.0
    active_share = part.num_experts_per_token / part.num_experts
    # The share of expert weights, from: active = dense + experts · active_share.
    experts = (1 - active) / (1 - active_share) if active_share < 1 else 0.0
    return 1 - experts * (1 - active_share) ** streams
