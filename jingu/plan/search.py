"""Search for the fastest layouts among all valid ones that fit into memory.

It is a branch and bound search: groups of layouts are tried in the order of a lower bound of their step time, and the
search ends when the bound of the next group is above the best layouts. The bound is the computation of a rank's share
of the model, which no schedule makes shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import inf

from jingu.config.sections.parallel import HostOffloadSettings, NoOffloadSettings, ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError
from jingu.parallel.mesh import AxisSizes, resolve_axis_sizes
from jingu.parallel.stages import check_layout
from jingu.plan.intervals import memory_margin
from jingu.plan.machine import Machine
from jingu.plan.memory import stage_memory
from jingu.plan.step_time import idle_share, model_seconds, step_time
from jingu.plan.workload import Workload

# Pipelines to try: schedule and stages per rank.
_SCHEDULES = (("1f1b", "auto"), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", "auto"), ("zbv", "auto"))
_CHECKPOINTING = tuple(ActivationCheckpointingSettings(type=kind) for kind in ("none", "selective", "full"))
_OFFLOAD = (NoOffloadSettings(), HostOffloadSettings())
MAX_MICRO_BATCH = 64


@dataclass(frozen=True)
class Plan:
    """A layout with its estimates.

    Attributes:
        seconds: seconds of a step, by term.
        memory: bytes of the fullest GPU.
    """

    work: Workload
    seconds: dict[str, float]
    memory: float

    @property
    def step(self) -> float:
        return sum(self.seconds.values())


@dataclass
class SearchResult:
    """The best layouts, and why others were rejected.

    Attributes:
        num_estimates: number of estimated layouts.
        rejections: number of rejected layouts by reason; examples: one example for each reason.
        conflicts: cached results of `_conflict`.
        nearest: the layout that is short of the least memory: missing bytes and description.
    """

    best: list[Plan]
    num_estimates: int = 0
    rejections: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    conflicts: dict[tuple[object, ...], JinguError | None] = field(default_factory=dict)
    nearest: tuple[float, str] = (inf, "")

    def reject(self, reason: str, example: str, number: int = 1) -> None:
        """Count layouts that are rejected for a reason."""
        self.rejections[reason] += number
        self.examples.setdefault(reason, example)


@dataclass(frozen=True)
class Grid:
    """Sizes of the mesh axes and the ZeRO stage: a candidate before batch, schedule and checkpointing are chosen."""

    sizes: AxisSizes
    settings: ParallelSettings


def search_layouts(
    base: Workload, ranks: int, machine: Machine, rows: int, *, best: int = 5, prune: bool = True
) -> SearchResult:
    """Return the fastest layouts of a step on a number of ranks.

    Args:
        base: a step of the run in any layout; only its model, sequence and software matter.
        rows: sequences of a step over all ranks.
        best: number of layouts to return.
        prune: whether to skip layouts that cannot be among the best.
    """
    result = SearchResult([])
    # Try groups of layouts in the order of the lower bound of their step time.
    groups = list(_groups(base, ranks, rows, machine, result))
    order = sorted(range(len(groups)), key=lambda number: groups[number].bound) if prune else range(len(groups))
    top: list[tuple[float, float, int, Plan]] = []
    for number in order:
        if prune and len(top) == best and groups[number].bound > top[-1][0]:
            break
        for work in _layouts(base, groups[number], result):
            if prune and len(top) == best and _bound(work, groups[number], machine) > top[-1][0]:
                continue
            plan = _evaluate(work, machine, result)
            if plan is not None:
                top.append((plan.step, plan.memory, result.num_estimates, plan))
        top = sorted(top)[:best]
    result.best = [plan for *_, plan in top]
    return result


def _bound(work: Workload, group: _LayoutGroup, machine: Machine) -> float:
    """Return a lower bound of a layout's step time: that of its group, plus the minimum bubble of its schedule."""
    # The bubble is smallest if all stages take equally long. Ranks that share a core do not idle.
    idle = 0.0 if machine.ranks_per_core > 1 else idle_share(work) * (work.sizes.pipeline - 1)
    return group.bound * (1 + idle / work.accumulation)


def _evaluate(work: Workload, machine: Machine, result: SearchResult) -> Plan | None:
    """Return the estimates of a layout, with offload if it does not fit otherwise; None if it does not fit at all."""
    for offload in _OFFLOAD:
        if offload.type != "none" and machine.is_shared:
            # Main memory is the only memory.
            return None
        if offload.type != "none":
            work = replace(work, parallel=work.parallel.model_copy(update={"offload": offload}))
        result.num_estimates += 1
        memories = [stage_memory(work, stage) for stage in work.stages]
        memory = max(memory.total for memory in memories)
        host_bytes = max(sum(memory.host.values()) for memory in memories)
        if host_bytes > machine.host_bytes:
            result.reject(
                "out of main memory", f"{describe_layout(work)} offloads {host_bytes / 2**30:,.0f} GiB per GPU"
            )
            return None
        usable = machine.usable_bytes / memory_margin(machine)
        if memory <= usable:
            return Plan(work, step_time(work, machine), memory)
        result.rejections["out of memory"] += 1
        if memory - usable < result.nearest[0]:
            result.nearest = (memory - usable, describe_layout(work))
        # Offload cannot help if the rest without the offloaded state is already too large.
        if max(memory.total - memory.state for memory in memories) > usable:
            return None
    return None


@dataclass(frozen=True)
class _LayoutGroup:
    """Layouts that differ only in schedule and offload; `bound` is a lower bound of their step time in seconds."""

    bound: float
    grid: Grid
    micro_batch: int
    accumulation: int
    checkpointing: ActivationCheckpointingSettings


def _groups(base: Workload, ranks: int, rows: int, machine: Machine, result: SearchResult) -> Iterator[_LayoutGroup]:
    """Yield all combinations of a grid, a micro-batch and a kind of activation checkpointing."""
    seconds: dict[tuple[object, ...], float] = {}
    for grid in _grids(base, ranks, result):
        sizes = grid.sizes
        if rows % sizes.data:
            result.reject("the batch does not divide", f"{rows:,} sequences over {sizes.data:,} data-parallel ranks")
            continue
        share = rows // sizes.data
        for micro, checkpointing in product(_divisors(share, MAX_MICRO_BATCH), _CHECKPOINTING):
            # The computation of a micro-batch does not depend on the ZeRO stage or the pipeline stages.
            key = (sizes.tensor, sizes.context, sizes.expert, grid.settings.context_method, micro, checkpointing.type)
            if key not in seconds:
                work = replace(
                    base, sizes=sizes, parallel=grid.settings, micro_batch=micro, checkpointing=checkpointing
                )
                seconds[key] = model_seconds(work, machine) * (1 - 1e-9)
            bound = seconds[key] * (share // micro) / sizes.pipeline
            yield _LayoutGroup(bound, grid, micro, share // micro, checkpointing)


def _grids(base: Workload, ranks: int, result: SearchResult) -> Iterator[Grid]:
    """Yield all divisions of the ranks over the axes that the model allows."""
    spec, nodes = base.spec, base.parallel
    layers = (spec.num_encoder_layers or 0) + spec.num_layers
    longest = max(1, base.sequence // 512)
    heads = min(layer.attention.num_heads for layer in spec.kinds)
    for pipeline, tensor, context in product(_divisors(ranks), repeat=3):
        if ranks % (pipeline * tensor * context) or context > longest or tensor > heads:
            continue
        if pipeline > layers:
            result.reject("fewer blocks than stages", f"{layers} blocks over {pipeline} stages")
            continue
        data = ranks // (pipeline * tensor * context)
        for zero, shard in {(0, 1), *((zero, size) for zero in (1, 2, 3) for size in (data, 8) if data % size == 0)}:
            if zero and shard == 1 and data > 1:
                continue
            experts = _expert_sizes(base, shard * context)
            for expert, method in product(experts, ("ulysses", "ring") if context > 1 else ("ulysses",)):
                settings = nodes.model_copy(
                    update={
                        "pipeline": pipeline,
                        "tensor": tensor,
                        "context": context,
                        "zero_stage": zero,
                        "shard": shard,
                        "replicate": data // shard,
                        "expert": expert,
                        "context_method": method,
                    }
                )
                try:
                    yield Grid(resolve_axis_sizes(settings, ranks, spec), settings)
                except JinguError as error:
                    result.reject(_reason(error), f"{error.what}")


def _reason(error: JinguError) -> str:
    """Return the kind of an error, without its numbers."""
    where = str(error.where or "layout").rpartition(".")[2]
    return {"tensor": "heads or dims do not divide", "context": "heads do not divide"}.get(
        where, f"{where} does not fit"
    )


def _expert_sizes(base: Workload, ranks: int) -> list[int]:
    part = base.spec.experts
    if part is None:
        return [1]
    return [size for size in _divisors(part.num_experts) if ranks % size == 0]


def _layouts(base: Workload, group: _LayoutGroup, result: SearchResult) -> Iterator[Workload]:
    """Yield the layouts of a group, one for each valid schedule."""
    sizes, kind = group.grid.sizes, group.checkpointing.type
    for schedule, stages in _SCHEDULES if sizes.pipeline > 1 else _SCHEDULES[:1]:
        update = {"pipeline_schedule": schedule, "stages_per_rank": stages}
        # Many layouts share these parts, so check once whether they are compatible.
        zero = group.grid.settings.zero_stage
        key = (schedule, stages, sizes.pipeline, zero, kind, sizes.expert > 1, group.accumulation)
        if key not in result.conflicts:
            result.conflicts[key] = _conflict(group.grid.settings.model_copy(update=update), kind, base, group)
        error = result.conflicts[key]
        if error is not None:
            result.reject(_reason(error), error.what)
            continue
        yield replace(
            base,
            sizes=sizes,
            parallel=group.grid.settings.model_copy(update=update),
            micro_batch=group.micro_batch,
            accumulation=group.accumulation,
            checkpointing=group.checkpointing,
        )


def _conflict(settings: ParallelSettings, kind: str, base: Workload, group: _LayoutGroup) -> JinguError | None:
    """Return the error of an invalid layout; None if it is valid."""
    try:
        check_layout(settings, kind, base.spec, group.grid.sizes, group.accumulation)
    except JinguError as error:
        return error
    return None


@cache
def _divisors(number: int, largest: int | None = None) -> tuple[int, ...]:
    return tuple(n for n in range(1, min(number, largest or number) + 1) if number % n == 0)


def describe_layout(work: Workload) -> str:
    """Return a short description of a layout."""
    settings = work.parallel
    parts = [str(work.sizes), f"ZeRO {settings.zero_stage}", f"micro-batch {work.micro_batch}"]
    if work.sizes.expert > 1:
        parts.insert(1, f"{work.sizes.expert} expert")
    if work.sizes.pipeline > 1:
        parts.append(settings.pipeline_schedule)
    if work.sizes.context > 1:
        parts.append(settings.context_method)
    if work.checkpointing.type != "none":
        parts.append(f"{work.checkpointing.type} recomputation")
    if settings.offload.type != "none":
        parts.append(f"offload to {settings.offload.type}")
    return ", ".join(parts)
