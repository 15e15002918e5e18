"""The forecast of a run: memory and step time of its layout; from these speed, duration, energy, price, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isinf, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jingu.config.batch_plan import BatchPlan
from jingu.config.schema import RunConfig
from jingu.config.sections.train import Precision as PrecisionSettings
from jingu.errors import JinguError
from jingu.formatting import format_bytes, format_duration, format_rounded, memory_unit, print_table
from jingu.model.count import flops_per_token
from jingu.model.parameter_table import parameter_sizes
from jingu.model.spec import ModelSpec
from jingu.parallel.mesh import AXES, AxisSizes
from jingu.plan.intervals import Interval, memory_margin, plan_interval
from jingu.plan.layouts import describe_layout
from jingu.plan.machine import Machine
from jingu.plan.memory import RankMemory, fullest_stage
from jingu.plan.search import SearchResult
from jingu.plan.serving import ServingPlan
from jingu.plan.software import Software
from jingu.plan.step_time import step_time
from jingu.plan.weight_memory import checkpoint_bytes
from jingu.plan.workload import Workload, model_sizes

if TYPE_CHECKING:
    from jingu.parallel.layout import Precision

# Mean GPU-hours between failures: 419 failures of 16,384 GPUs in 54 days (Llama 3, 2024, section 3.3.4).
HOURS_BETWEEN_FAILURES = 50_000
# Power of an idle GPU, as a share of its power under load.
IDLE_POWER = 0.2
# Bytes of a number; other types have 2.
_ITEMSIZES = {"fp64": 8.0, "fp32": 4.0}


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run on a machine.

    Attributes:
        steps: steps of the run.
        seconds: seconds of a step, by term.
        memory: memory of the fullest GPU.
        price: price of a GPU-hour; None if unknown.
        assumptions: sentences about what the estimate assumes.
        updates: optimizer steps of a step.
        phases: bytes of the fullest GPU in each phase of a step, if there are several; `memory` is the maximum.
        further_models: workloads of the models that are trained and saved beside this one, such as a critic.
    """

    work: Workload
    machine: Machine
    steps: int
    seconds: dict[str, float]
    memory: RankMemory
    price: float | None
    assumptions: list[str]
    updates: int = 1
    phases: dict[str, float] = field(default_factory=dict)
    further_models: tuple[Workload, ...] = ()

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def days(self) -> float:
        return self.step * self.steps / 86400

    @property
    def gpu_hours(self) -> float:
        return self.days * 24 * self.work.ranks

    @property
    def spare(self) -> float:
        """Free bytes of the GPU, or of main memory if that is shorter; negative if the run does not fit.

        What the step may take counts, rather than what is planned.
        """
        device = self.machine.usable_bytes - self.memory.total * memory_margin(self.machine)
        if self.machine.is_shared:
            return device - self.host_bytes
        return min(device, self.machine.host_bytes - self.host_bytes) if self.host_bytes else device

    @property
    def interval(self) -> Interval:
        """Bounds of measured over planned figures, for 9 of 10 runs."""
        return plan_interval(self.work, self.machine)

    @property
    def host_bytes(self) -> float:
        """Bytes per GPU that are offloaded to main memory."""
        return 0.0 if self.work.parallel.offload.type == "disk" else sum(self.memory.host.values())

    def to_json(self) -> dict[str, Any]:
        """Return all figures: bytes, seconds, shares, joules."""
        work, machine = self.work, self.machine
        spec, ranks = work.spec, work.ranks
        tokens = work.tokens_per_step * self.updates
        flops = flops_per_token(spec, parameter_sizes(spec), work.sequence) * tokens
        hours = self.days * 24
        busy = (self.step - self.seconds["bubble"] - self.seconds["data"]) / self.step
        state = sum(map(checkpoint_bytes, (work, *self.further_models)))
        stall = state / ranks / (machine.host_gbs * 1e9)
        failures = HOURS_BETWEEN_FAILURES * 3600 / ranks
        interval = self.interval

        def bounds(value: float | None) -> list[float] | None:
            return None if value is None else [value * bound for bound in interval.seconds]

        energy = hours * ranks * machine.watts * (IDLE_POWER + (1 - IDLE_POWER) * busy) / 1000
        price = None if self.price is None else hours * ranks * self.price
        return {
            "machine": machine.name,
            "ranks": ranks,
            "layout": describe_layout(work),
            "software": work.software.name,
            "software_changes": work.software.changes(),
            "fits": self.spare >= 0,
            "memory": self.memory.device,
            "offloaded": self.memory.host,
            "memory_total": self.memory.total,
            "memory_interval": [self.memory.total * bound for bound in interval.memory],
            "memory_phases": self.phases,
            "memory_usable": machine.usable_bytes,
            "seconds": self.seconds,
            "step_seconds": self.step,
            "step_seconds_interval": bounds(self.step),
            "tokens_per_second": tokens / self.step,
            "mfu": flops / self.step / ranks / (machine.peak_tflops * 1e12),
            "days": self.days,
            "days_interval": bounds(self.days),
            "kilowatt_hours": energy,
            "kilowatt_hours_interval": bounds(energy),
            "price": price,
            "price_interval": bounds(price),
            "checkpoint_bytes": state,
            # Young's optimum (1974); a save costs the time of the copy to main memory.
            "checkpoint_interval_seconds": sqrt(2 * stall * failures),
            "checkpoint_write_seconds": state / max(1, ranks // machine.gpus_per_node) / (machine.disk_gbs * 1e9),
            "assumptions": self.assumptions,
            "far_from_measured": list(interval.reasons),
        }


def forecast(
    work: Workload, machine: Machine, steps: int, price: float | None = None, assumptions: list[str] | None = None
) -> Forecast:
    """Return the forecast of a run of this many steps."""
    notes = list(assumptions or [])
    if work.software.compute_bytes == 2 and not machine.has_bf16:
        notes.append(f"fp16 (precision.type=fp16), because {machine.name} has no bf16")
    return Forecast(work, machine, steps, step_time(work, machine), fullest_stage(work)[1], price, notes)


def run_workload(config: RunConfig, spec: ModelSpec, sizes: AxisSizes, plan: BatchPlan, software: Software) -> Workload:
    """Return the workload of a step of a run, in the layout of its settings."""
    stored = 0.0
    if spec.quantization == "stored" and config.initialize.from_ is not None:
        from jingu.formats.models import open_model
        from jingu.formats.stored_model import stored_bytes

        stored = stored_bytes(open_model(Path(config.initialize.from_)), software.compute_bytes)
    return Workload(
        model_sizes(spec, software.compute_bytes, stored),
        sizes,
        config.parallel,
        config.batch.sequence_length,
        plan.micro_batch_size,
        plan.accumulation,
        config.train.activation_checkpointing,
        config.optimizer,
        software,
    )


def run_software(precision: Precision, *, on_gpu: bool = False, is_compiled: bool = False) -> Software:
    """Return jingu's parameters of execution in a precision, on a CPU or a GPU, with compiled blocks or others."""
    library = Software()
    size, wide = precision.compute.itemsize, max(precision.compute.itemsize, 4)
    # The logits of a chunk, in at least fp32 as well, their softmax, and its gradient in the compute dtype.
    logits = size + wide + (wide + size) * (size < wide)
    return Software(
        weight_bytes=precision.masters.itemsize,
        gradient_bytes=precision.masters.itemsize,
        reduce_bytes=precision.reduce.itemsize,
        compute_bytes=precision.compute.itemsize,
        state_share=precision.masters.itemsize / 4,
        offload_copies_weights=on_gpu,
        stores_biased_scores=not on_gpu,
        allocator_reuse=library.allocator_reuse if on_gpu else 1.0,
        chunk_logits=library.chunk_logits if on_gpu else 2.0**22,
        logit_bytes=library.logit_bytes if on_gpu else logits,
        compiles_blocks=is_compiled,
    )


def gpu_software(settings: PrecisionSettings, *, is_compiled: bool) -> Software:
    """Return jingu's parameters of execution on a GPU, in bf16 unless the settings name another precision."""
    masters = 8.0 if settings.type == "fp64" else 4.0
    reduce = masters if settings.reduce == "auto" else _ITEMSIZES.get(settings.reduce, 2.0)
    compute = _ITEMSIZES.get(settings.type, 2.0)
    return Software(
        weight_bytes=masters,
        gradient_bytes=masters,
        reduce_bytes=reduce,
        compute_bytes=compute,
        state_share=masters / 4,
        compiles_blocks=is_compiled,
    )


def estimate_memory(
    config: RunConfig, spec: ModelSpec, sizes: AxisSizes, plan: BatchPlan, precision: Precision
) -> RankMemory:
    """Return the memory of the fullest rank of a run. It needs no process group."""
    return fullest_stage(run_workload(config, spec, sizes, plan, run_software(precision)))[1]


def require_memory(memory: RankMemory, available: float, owner: str) -> None:
    """Raise JinguError if a device cannot hold weights, gradients and optimizer state, even without activations.

    Args:
        owner: the device, for the message.
    """
    state = memory.state
    if state <= available:
        return
    raise JinguError(
        f"weights, gradients and optimizer state of one rank take {state / 2**30:,.1f} GiB, and {owner} has "
        f"{available / 2**30:,.1f} GiB of memory: short by {(state - available) / 2**30:,.1f} GiB.",
        where="model",
        fix="Choose a smaller model, share it among more ranks, or set parallel.offload; `jingu plan FILE --search` "
        "lists layouts that fit.",
    )


# Tables


def print_forecast(result: Forecast) -> None:
    """Print memory, time and cost as tables."""
    figures = result.to_json()
    unit, name = memory_unit(result.memory.total)
    print(f"{figures['layout']} on {result.work.ranks:,} × {result.machine.name}\n")
    rows = [(part, f"{size / unit:,.2f}", "") for part, size in result.memory.device.items()]
    rows += [(part, f"{size / unit:,.2f}", "offloaded") for part, size in result.memory.host.items()]
    # The main memory of a CPU is its only memory; that of a GPU's node has a row of its own.
    device, host = result.memory.total, result.host_bytes
    if result.machine.is_shared:
        device += host
    margin = memory_margin(result.machine)
    text = _compare_memory(device * margin, result.machine.usable_bytes, unit, name)
    rows.append(("total", f"{device / unit:,.2f}", text))
    if host and not result.machine.is_shared:
        rows.append(
            ("main memory", f"{host / unit:,.2f}", _compare_memory(host, result.machine.host_bytes, unit, name))
        )
    print_table(("memory of the fullest rank", name, ""), rows, [1])
    low, high = (device * bound / unit for bound in result.interval.memory)
    print(f"between {low:,.1f} and {high:,.1f} {name} in 9 of 10 runs; the upper bound must fit")
    if result.phases:
        print(f"phases: {', '.join(f'{phase} {size / unit:,.2f}' for phase, size in result.phases.items())} {name}")
    print()
    terms = [(term, f"{value:,.3f}", f"{value / result.step:.1%}") for term, value in result.seconds.items() if value]
    print_table(("time of a step", "s", "share"), [*terms, ("total", f"{result.step:,.3f}", "")], [1, 2])
    low, high = figures["step_seconds_interval"]
    source = "published runs" if result.machine.interval is None else "the runs of the calibration"
    print(f"between {low:,.3f} and {high:,.3f} s in 9 of 10 runs, by {source}")
    for reason in figures["far_from_measured"]:
        print(f"far from measured ground: {reason}")
    print()
    price = "" if figures["price"] is None else f", {_range(figures, 'price')} for the GPUs"
    print(f"{format_rounded(figures['tokens_per_second'])} tokens/s, MFU {figures['mfu']:.1%}")
    duration = format_duration(figures["days"] * 86400)
    print(f"{result.steps:,} steps: {duration}, {_range(figures, 'kilowatt_hours')} kWh{price}")
    print(
        f"checkpoint: {format_bytes(figures['checkpoint_bytes'])}, best every "
        f"{format_duration(figures['checkpoint_interval_seconds'])}"
    )
    print(f"assumed: {describe_software(result.work.block_software)}")
    machine = result.machine
    if not machine.is_shared:
        more = f", {machine.nic_gbs:,.4g} GB/s to other nodes" if result.work.ranks > machine.gpus_per_node else ""
        print(
            f"assumed: {machine.name} with {machine.host_gib:,.0f} GiB of main memory for each GPU and "
            f"{machine.gpus_per_node} GPUs a node{more}"
        )
    for assumption in result.assumptions:
        print(f"assumed: {assumption}")


def _range(figures: dict[str, Any], name: str) -> str:
    """Return a figure with its interval."""
    low, high = figures[f"{name}_interval"]
    return f"{figures[name]:,.0f} ({low:,.0f} to {high:,.0f})"


def _bounds(value: float, interval: tuple[float, float], digits: int) -> str:
    """Return the interval of a figure as text."""
    low, high = (value * bound for bound in interval)
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def describe_software(software: Software) -> str:
    """Return which kernels and which engine a plan assumes."""
    attention = "fused attention" if software.fused_attention else "attention that stores its scores"
    attention += ", by a kernel written for Ampere" if software.ampere_attention else ""
    tensor = (
        "sequence parallelism with tensor parallelism" if software.sequence_parallel else "whole norms and residuals"
    )
    loss = "the logits of all tokens at once" if software.whole_logits else "logits in chunks"
    overlap = f"communication beside {software.overlap:.0%} of the computation" if software.overlap else "no overlap"
    blocks = "compiled blocks" if software.compiles_blocks else "blocks that are not compiled"
    launches = "" if software.hides_launches else ", launches that wait for the GPU"
    text = (
        f"the kernels and the engine of {software.name} ({attention}, {blocks}, {tensor}, {loss}, {overlap}{launches})"
    )
    return f"{text}; --software changes them"


def _compare_memory(size: float, available: float, unit: float, name: str) -> str:
    fits = "fits" if size <= available else f"does not fit: short by {(size - available) / unit:,.1f} {name}"
    return f"of {available / unit:,.1f}: {fits}"


def print_search(result: SearchResult, machine: Machine) -> None:
    """Print the best layouts with their terms, and why others were rejected."""
    names = [term for term in (result.best[0].seconds if result.best else {}) if _matters(term, result)]
    rows = []
    for number, plan in enumerate(result.best, start=1):
        terms = [f"{plan.seconds[term]:.2f}" for term in names]
        interval = plan_interval(plan.work, machine)
        bounds = _bounds(plan.step, interval.seconds, 2), _bounds(plan.memory / 2**30, interval.memory, 1)
        figures = (f"{plan.step:.2f}", bounds[0], f"{plan.memory / 2**30:.1f}", bounds[1])
        rows.append((str(number), *figures, *terms, describe_layout(plan.work)))
    if rows:
        heads = ("", "s", "between", "GiB", "between")
        print_table((*heads, *names, "layout"), rows, range(len(heads) + len(names)))
        print(f"\nThe first: {layout_settings(result.best[0].work)}")
    else:
        print("No layout fits.")
    print(f"\n{result.num_estimates:,} layouts were estimated on {machine.name}. Layouts that fail:")
    for reason, number in result.rejections.most_common():
        print(f"  {number:>8,}  {describe_rejection(result, reason)}")


def describe_rejection(result: SearchResult, reason: str) -> str:
    """Return a reason for which layouts were rejected, with an example."""
    example = result.examples.get(reason, "")
    if reason == "out of memory":
        missing_bytes, layout = result.nearest
        example = f"the nearest layout is short by {format_bytes(missing_bytes)} per rank: {layout}"
        if isinf(missing_bytes):
            excess, layout = result.smallest
            example = f"every layout exceeds a rank's memory, this one by {format_bytes(excess)} or more: {layout}"
    return f"{reason}: {example}"


def print_serving(plan: ServingPlan, machine: Machine) -> None:
    """Print memory and speed of a served model."""
    print(f"{plan.gpus} × {machine.name}, sequences of {plan.context:,} tokens\n")
    print(f"weights          {plan.weights / 2**30:,.2f} GiB per GPU of {machine.usable_bytes / 2**30:,.1f}")
    print(
        f"cache            {format_bytes(plan.cache_per_stream)} per sequence and GPU: {plan.max_streams:,} streams fit"
    )
    if not plan.max_streams:
        short = plan.weights + plan.cache_per_stream - machine.usable_bytes
        print(f"no stream fits: short by {format_bytes(short)} per GPU")
    print(f"first token      {plan.first_token * 1000:,.0f} ms after a prompt of {plan.context // 2:,} tokens\n")
    rows = [
        (
            str(streams),
            f"{speed:,.0f}",
            f"{speed / streams:,.1f}",
            "" if streams <= plan.max_streams else "does not fit",
        )
        for streams, speed in plan.speeds.items()
    ]
    print_table(("streams", "tokens/s", "each", ""), rows, [0, 1, 2])


def print_clusters(forecasts: Sequence[Forecast], deadline: float | None = None) -> None:
    """Print clusters of several sizes, marking the smallest one and the one with the fewest GPU-hours.

    Args:
        deadline: maximum days of the run; slower clusters are not marked.
    """
    in_time = [result for result in forecasts if deadline is None or result.days <= deadline]
    hours = {result.work.ranks: result.gpu_hours for result in in_time}
    rows = []
    for result in forecasts:
        ranks = result.work.ranks
        notes = ["too slow"] * (ranks not in hours)
        notes += ["smallest"] * (ranks == min(hours, default=0))
        notes += ["cheapest"] * (ranks == min(hours, key=lambda ranks: hours[ranks], default=0))
        price = "" if result.price is None else f"{result.gpu_hours * result.price:,.0f}"
        days = (f"{result.days:,.2f}", _bounds(result.days, result.interval.seconds, 2))
        cells = (f"{ranks:,}", f"{result.step:.2f}", *days, f"{result.gpu_hours:,.0f}", price)
        rows.append((*cells, ", ".join(notes), describe_layout(result.work)))
    print_table(("GPUs", "step s", "days", "between", "GPU-hours", "price", "", "layout"), rows, range(6))


def layout_settings(work: Workload) -> str:
    """Return a layout as settings of a run's file."""
    parallel, sizes = work.parallel, work.sizes
    words = [f"parallel.{axis}={getattr(sizes, axis)}" for axis in (*AXES, "expert") if getattr(sizes, axis) > 1]
    words += [f"parallel.zero_stage={parallel.zero_stage}", f"batch.micro_batch_size={work.micro_batch}"]
    if sizes.pipeline > 1:
        words.append(f"parallel.pipeline_schedule={parallel.pipeline_schedule}")
        words += [f"parallel.stages_per_rank={parallel.stages_per_rank}"] * (parallel.stages_per_rank != "auto")
    if sizes.context > 1:
        words.append(f"parallel.context_method={parallel.context_method}")
    words += [f"parallel.offload.type={parallel.offload.type}"] * (parallel.offload.type != "none")
    return " ".join([*words, f"train.activation_checkpointing.type={work.checkpointing.type}"])


def _matters(term: str, result: SearchResult) -> bool:
    """Return whether a term is at least a hundredth of a step of any of the best layouts."""
    return any(plan.seconds[term] > 0.01 * plan.step for plan in result.best)
