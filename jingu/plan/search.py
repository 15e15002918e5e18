"""Search for the fastest layouts among all valid ones that fit into memory.

It is a branch and bound search: cells of layouts are tried in the order of a lower bound of their step time, and the
search ends when the bound of the next cell is above the best layouts. The bound is the computation of a rank's share
of the model, which no schedule makes shorter. Left out are: activation checkpointing of some blocks only, stages of
given sizes, and offload where a layout fits without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, inf
from typing import Literal, NamedTuple

import numpy as np

from jingu.config.batch_plan import divisors
from jingu.config.sections.parallel import HostOffloadSettings, NoOffloadSettings, ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError
from jingu.parallel.mesh import AxisSizes
from jingu.plan.activations import block_activations, boundary_bytes, num_stage_buffers
from jingu.plan.data_parallel import DataTime, data_loads, data_seconds, data_time
from jingu.plan.in_flight import moments_in_flight, stages_of_rank
from jingu.plan.intervals import memory_margin
from jingu.plan.layouts import (
    data_divisions,
    describe_layout,
    layout_conflict,
    model_divisions,
    rejection_reason,
    schedule_names,
)
from jingu.plan.machine import Machine
from jingu.plan.memory import least_memory, stage_memory
from jingu.plan.step_time import (
    StageTime,
    idle_share,
    model_seconds,
    optimizer_seconds,
    schedule_time,
    step_time,
)
from jingu.plan.workload import BlockSizes, Stage, Workload

_CHECKPOINTING = tuple(ActivationCheckpointingSettings(type=kind) for kind in ("none", "selective", "full"))
_MODEL_AXES = ("pipeline", "tensor", "context", "expert")
# Rounding of shards: one with more state can be smaller by at most this share.
ROUNDING = 0.98
_OFFLOAD = (NoOffloadSettings(), HostOffloadSettings())


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
class _Cache:
    """Results that many layouts of a search share.

    Attributes:
        conflicts: those of `layout_conflict`; settings: those of `_change`; schedules: those of `_schedules`.
        loads: the loads of schedules; data_times: the collectives of a stage; model_times: seconds of a micro-batch.
        block_bytes: what a block of each kind stores of a micro-batch, for each kind of checkpointing.
    """

    conflicts: dict[tuple[object, ...], JinguError | None] = field(default_factory=dict)
    settings: dict[tuple[object, ...], ParallelSettings] = field(default_factory=dict)
    schedules: dict[tuple[int, int], list[_Schedule]] = field(default_factory=dict)
    loads: dict[tuple[object, ...], _Load] = field(default_factory=dict)
    data_times: dict[tuple[object, ...], tuple[dict[int, DataTime], float]] = field(default_factory=dict)
    model_times: dict[tuple[object, ...], float] = field(default_factory=dict)
    block_bytes: dict[tuple[object, ...], list[dict[BlockSizes, float]]] = field(default_factory=dict)


@dataclass
class SearchResult:
    """The best layouts, and why others were rejected.

    Attributes:
        num_estimates: number of estimated layouts.
        rejections: number of rejected layouts by reason; examples: one example for each reason.
        cache: results that layouts share.
        nearest: the layout that is short of the least memory: missing bytes and description.
        smallest: the same for lower bounds, of layouts that are rejected by these before they are estimated.
    """

    best: list[Plan]
    num_estimates: int = 0
    rejections: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    cache: _Cache = field(default_factory=_Cache)
    nearest: tuple[float, str] = (inf, "")
    smallest: tuple[float, str] = (inf, "")

    def reject(self, reason: str, example: str, number: int = 1) -> None:
        """Count layouts that are rejected for a reason."""
        self.rejections[reason] += number
        self.examples.setdefault(reason, example)


@dataclass(frozen=True)
class _Load:
    """What a schedule with a number of micro-batches stores, for micro-batches of any size.

    Attributes:
        stages: of each distinct stage, the kinds of blocks with their number times that of micro-batches in flight, and
            the number of stage buffers.
    """

    stages: tuple[tuple[dict[BlockSizes, float], float], ...]

    def num_bytes(self, block_bytes: dict[BlockSizes, float], buffer_bytes: float) -> float:
        """Return a lower bound of the activations of the fullest rank.

        Args:
            block_bytes: bytes that a block of each kind stores of a micro-batch.
            buffer_bytes: bytes that a stage sends of a micro-batch.
        """
        return max(
            sum(block_bytes[block] * number for block, number in blocks.items()) + buffer_bytes * buffers
            for blocks, buffers in self.stages
        )


@dataclass(frozen=True)
class _Cell:
    """Layouts that differ only in schedule, ZeRO and the division of the data-parallel ranks.

    Attributes:
        bound: lower bound of their step time in seconds: the computation of a rank's share of the model.
        settings: sizes of the axes that divide the model, and the method of context parallelism.
        data: number of data-parallel ranks.
        block_bytes: least that a block of each kind stores of a micro-batch.
    """

    bound: float
    settings: ParallelSettings
    data: int
    micro_batch: int
    accumulation: int
    checkpointing: ActivationCheckpointingSettings
    block_bytes: dict[BlockSizes, float]


def search_layouts(base: Workload, ranks: int, machine: Machine, rows: int, *, best: int = 5) -> SearchResult:
    """Return the fastest layouts of a step on a number of ranks.

    Args:
        base: a step of the run in any layout; only its model, sequence and software matter.
        rows: sequences of a step over all ranks.
        best: number of layouts to return.
    """
    result = SearchResult([])
    draft = SearchResult([], cache=result.cache)
    divisions = list(model_divisions(base, ranks, result.reject))
    # 1. Layouts that are likely to fit give an upper bound, so that far slower ones need not be estimated.
    limit = inf
    seconds: list[float] = []
    for cell in sorted(_cells(base, divisions, rows, machine, draft, first_only=True), key=lambda cell: cell.bound):
        if cell.bound > limit:
            break
        plans = _search_cell(base, cell, machine, draft, limit, first_only=True)
        seconds = sorted(seconds + [plan.step for plan in plans])[:best]
        limit = seconds[-1] if len(seconds) == best else inf
    # 2. All layouts.
    top: list[Plan] = []
    for cell in sorted(_cells(base, divisions, rows, machine, result, limit), key=lambda cell: cell.bound):
        if cell.bound > limit:
            break
        top += _search_cell(base, cell, machine, result, limit)
        top = sorted(top, key=lambda plan: (plan.step, plan.memory))[:best]
        limit = min(limit, top[-1].step) if len(top) == best else limit
    result.best = top
    return result


def _idle_bound(work: Workload, machine: Machine) -> float:
    """Return a lower bound of the bubble of a layout, in the time of one micro-batch on a rank.

    It is exact if all stages take equally long. If the slowest stage of 1F1B is among the first, it waits for less; but
    for at least half of that.
    """
    if machine.ranks_per_core > 1:
        # Ranks that share a core do not idle.
        return 0.0
    idle = idle_share(work) * (work.sizes.pipeline - 1)
    return idle / 2 if work.parallel.pipeline_schedule == "1f1b" else idle


def _evaluate(
    work: Workload,
    machine: Machine,
    result: SearchResult,
    limit: float,
    times: _CellTime,
    seconds: float,
    *,
    may_fit: bool,
) -> tuple[Plan | None, bool]:
    """Return the estimates of a layout, with offload if it does not fit otherwise.

    Args:
        seconds: the step time without the optimizer.
        may_fit: whether it may fit without offload.

    Returns:
        The plan, or None if the layout does not fit at all or takes longer than `limit` seconds; and whether it does
        not fit so clearly that one with more state on a GPU cannot fit either.
    """
    usable = machine.usable_bytes / memory_margin(machine)
    for offload in _OFFLOAD[: 1 if machine.is_shared else 2]:
        if offload.type != "none":
            work = replace(work, parallel=work.parallel.model_copy(update={"offload": offload}))
        elif not may_fit:
            continue
        if seconds + optimizer_seconds(work, times.slowest, machine) > limit:
            return None, False
        result.num_estimates += 1
        memory = temporary = host_bytes = 0.0
        for stage in work.stages:
            of_stage = stage_memory(work, stage)
            memory, temporary = max(memory, of_stage.total), max(temporary, of_stage.total - of_stage.state)
            host_bytes = max(host_bytes, sum(of_stage.host.values()))
            # Other stages cannot change the answer.
            if memory - usable > max(0.0, result.nearest[0]):
                break
        if host_bytes > machine.host_bytes:
            result.reject(
                "out of main memory", f"{describe_layout(work)} offloads {host_bytes / 2**30:,.0f} GiB per GPU"
            )
            return None, host_bytes * ROUNDING > machine.host_bytes
        if memory <= usable:
            return Plan(work, step_time(work, machine), memory), False
        result.rejections["out of memory"] += 1
        if memory - usable < result.nearest[0]:
            result.nearest = (memory - usable, describe_layout(work))
        # Offload cannot help if what is not state is already too large.
        if temporary > usable:
            return None, temporary * ROUNDING > usable
    return None, memory * ROUNDING > usable


def _cells(
    base: Workload,
    divisions: list[ParallelSettings],
    rows: int,
    machine: Machine,
    result: SearchResult,
    limit: float = inf,
    *,
    first_only: bool = False,
) -> Iterator[_Cell]:
    """Yield the divisions of the model and of the rows that may take at most `limit` seconds.

    Args:
        divisions: divisions of the model over ranks.
        first_only: whether to yield only those with the smallest or the largest micro-batches, without checkpointing or
            with full checkpointing.
    """
    seconds, memory = result.cache.model_times, result.cache.block_bytes
    usable = machine.usable_bytes / memory_margin(machine)
    kinds = range(len(_CHECKPOINTING))
    # Without recomputation, a step takes least, so it bounds the others.
    bounds = [(kind,) if kind == 0 else (0, kind) for kind in kinds]
    for settings in divisions:
        pipeline, tensor, context, expert = (int(getattr(settings, axis)) for axis in _MODEL_AXES)
        data = int(settings.replicate) * int(settings.shard)
        if rows % data:
            result.reject("the batch does not divide", f"{rows:,} sequences over {data:,} data-parallel ranks")
            continue
        share = rows // data
        blocks = ceil(len(base.model.blocks) / pipeline)
        sizes = AxisSizes(1, 1, 1, context, tensor, expert)
        micros, of_kinds = (sorted({1, share}), kinds[::2]) if first_only else (divisors(share), kinds)
        for micro, kind in product(micros, of_kinds):
            # The computation of a micro-batch does not depend on the pipeline.
            size = (tensor, context, expert, micro)
            if size not in memory:
                memory[size] = _block_bytes(replace(base, sizes=sizes, micro_batch=micro))
            block_bytes = memory[size][kind]
            # Some rank has this many blocks, and the backward pass of each block needs all of its activations.
            short = max(*memory[size][0].values(), blocks * min(block_bytes.values())) - usable
            if short > 0:
                result.rejections["out of memory"] += 1
                if short < result.smallest[0]:
                    layout = AxisSizes(pipeline, 1, 1, context, tensor, expert)
                    result.smallest = (short, f"{layout}, micro-batch {micro}")
                continue
            accumulation, bound = share // micro, 0.0
            for number in bounds[kind]:
                key = (*size, settings.context_method, number)
                if key not in seconds:
                    checkpointing = _CHECKPOINTING[number]
                    work = replace(base, sizes=sizes, parallel=settings, micro_batch=micro, checkpointing=checkpointing)
                    seconds[key] = model_seconds(work, machine) * (1 - 1e-9)
                bound = seconds[key] * accumulation / pipeline
                if bound > limit:
                    break
            if bound <= limit:
                yield _Cell(bound, settings, data, micro, accumulation, _CHECKPOINTING[kind], block_bytes)


class _Schedule(NamedTuple):
    """A schedule of a pipeline.

    Attributes:
        slowdown: lower bound of the time of a step, relative to the computation.
        stages: number of stages per rank.
    """

    slowdown: float
    name: str
    stages: int | str


def _schedules(base: Workload, cell: _Cell, machine: Machine, result: SearchResult) -> list[_Schedule]:
    """Return all schedules for the pipeline and the micro-batches of a cell, in the order of their slowdown."""
    pipeline, spec = int(cell.settings.pipeline), base.spec
    key = (pipeline, cell.accumulation)
    if key not in result.cache.schedules:
        sizes = replace(base.sizes, pipeline=pipeline)
        schedules = []
        for name, stages in schedule_names(pipeline, (spec.num_encoder_layers or 0) + spec.num_layers):
            settings = _change(cell.settings, result, pipeline_schedule=name, stages_per_rank=stages)
            work = replace(base, sizes=sizes, parallel=settings, accumulation=cell.accumulation)
            schedules.append(_Schedule(1 + _idle_bound(work, machine) / cell.accumulation, name, stages))
        result.cache.schedules[key] = sorted(schedules, key=lambda schedule: schedule.slowdown)
    return result.cache.schedules[key]


@dataclass(frozen=True)
class _CellTime:
    """What the layouts of a cell with one schedule share.

    Attributes:
        seconds: lower bound of the step time without data parallelism and optimizer.
        slowest: the slowest stage; stage: its time.
    """

    seconds: float
    slowest: Stage
    stage: StageTime


def _search_cell(
    base: Workload, cell: _Cell, machine: Machine, result: SearchResult, limit: float, *, first_only: bool = False
) -> list[Plan]:
    """Return the layouts of a cell that fit and take at most `limit` seconds.

    Args:
        first_only: whether to try only 1F1B, with as much of the state sharded as possible.
    """
    first, kind = cell.settings, cell.checkpointing.type
    pipeline, tensor, context, expert = (int(getattr(first, axis)) for axis in _MODEL_AXES)
    usable = machine.usable_bytes / memory_margin(machine)
    sizes = AxisSizes(pipeline, 1, cell.data, context, tensor, expert)
    buffer_bytes = boundary_bytes(_layout(base, cell, sizes, first))
    plans: list[Plan] = []
    for slowdown, schedule, stages in _schedules(base, cell, machine, result):
        if cell.bound * slowdown > limit:
            break
        if first_only and schedule != "1f1b":
            continue
        place = (pipeline, schedule, stages, cell.accumulation)
        key = (*place, kind, expert > 1)
        if result.cache.conflicts.get(key) is not None and not _is_valid(base, key, result):
            continue
        # What does not depend on ZeRO: bounds of memory and time, validity.
        load = result.cache.loads.get(place)
        if load is not None and load.num_bytes(cell.block_bytes, buffer_bytes) > usable:
            result.rejections["out of memory"] += 1
            continue
        settings = _change(first, result, pipeline_schedule=schedule, stages_per_rank=stages)
        work = _layout(base, cell, sizes, settings)
        if not _is_valid(work, key, result):
            continue
        if load is None:
            result.cache.loads[place] = _Load(tuple(_in_flight(work, stage) for stage in work.stages))
        times = _cell_time(work, machine)
        if times.seconds > limit:
            continue
        plans += _search_divisions(work, key, times, machine, result, limit, first_only=first_only)
    return plans


def _search_divisions(
    work: Workload,
    key: tuple[object, ...],
    times: _CellTime,
    machine: Machine,
    result: SearchResult,
    limit: float,
    *,
    first_only: bool,
) -> list[Plan]:
    """Return the layouts of a cell with one schedule that fit and take at most `limit` seconds.

    They are all divisions of the data-parallel ranks, beginning with those that shard most.

    Args:
        work: one of them.
        key: what decides whether it is valid.
        first_only: whether to try only those that shard most.
    """
    plans: list[Plan] = []
    memory: Literal["fits", "offloads", "too large"] | None = None
    stage, context, data_ranks = times.slowest, work.sizes.context, work.sizes.data
    data_times, least = _data_times(work, stage, machine, result)
    # Most cells have no layout that is fast enough, whatever computation hides.
    passes = (times.stage.forward, times.stage.backward)
    hidden = 0.0 if machine.is_shared else work.software.overlap * sum(passes)
    if times.seconds + max(0.0, least - hidden) > limit:
        return plans
    for zero, shards in data_divisions(data_ranks, context):
        for shard in shards[:1] if first_only else shards:
            data = data_times.get(shard)
            if data is None:
                continue
            seconds = times.seconds + data_seconds(work, stage, passes, data, zero, is_shared=machine.is_shared)
            if seconds > limit:
                continue
            layout = _divide(work, shard, zero, result)
            if not _is_valid(layout, (*key, zero), result):
                break
            # Most cells have no layout that is fast enough, so their memory need not be known.
            memory = memory or _bound_memory(work, machine, result)
            if memory == "too large":
                return plans
            may_fit = memory == "fits"
            plan, is_too_large = _evaluate(layout, machine, result, limit, times, seconds, may_fit=may_fit)
            plans += [plan] if plan is not None else []
            if is_too_large:
                break
    return plans


def _data_times(
    work: Workload, stage: Stage, machine: Machine, result: SearchResult
) -> tuple[dict[int, DataTime], float]:
    """Return the collectives of data parallelism by how many ranks share the state, and the fewest seconds of all."""
    sizes = work.sizes
    key = (stage, sizes.data, sizes.context, sizes.tensor, sizes.expert)
    if key not in result.cache.data_times:
        shards = [shard for shard in divisors(sizes.data) if shard * sizes.context % sizes.expert == 0]
        loads = data_loads(work, stage, machine)
        of_shards = {
            shard: data_time(loads, replace(sizes, shard=shard, replicate=sizes.data // shard), machine)
            for shard in shards
        }
        result.cache.data_times[key] = of_shards, min(time.total for time in of_shards.values()) * (1 - 1e-9)
    return result.cache.data_times[key]


def _divide(work: Workload, shard: int, zero: int, result: SearchResult) -> Workload:
    """Return a layout in which `shard` of the data-parallel ranks share the state."""
    division = {"replicate": work.sizes.data // shard, "shard": shard}
    settings = _change(work.parallel, result, zero_stage=zero, **division)
    return replace(work, sizes=replace(work.sizes, **division), parallel=settings)


def _layout(base: Workload, cell: _Cell, sizes: AxisSizes, settings: ParallelSettings) -> Workload:
    return Workload(
        base.model,
        sizes,
        settings,
        base.sequence,
        cell.micro_batch,
        cell.accumulation,
        cell.checkpointing,
        base.optimizer,
        base.software,
    )


def _change(settings: ParallelSettings, result: SearchResult, **update: object) -> ParallelSettings:
    """Return settings with an update; those of all layouts of a division of the model are the same objects."""
    key = (id(settings), *update.values())
    if key not in result.cache.settings:
        result.cache.settings[key] = settings.model_copy(update=update)
    return result.cache.settings[key]


def _block_bytes(work: Workload) -> list[dict[BlockSizes, float]]:
    """Return the least that a block of each kind stores of a micro-batch, in bytes, for each kind of checkpointing."""
    sizes = {block: block_activations(block, work) for block in dict.fromkeys(work.model.blocks)}
    return [{block: size[kind] for block, size in sizes.items()} for kind in range(len(_CHECKPOINTING))]


def _in_flight(work: Workload, stage: Stage) -> tuple[dict[BlockSizes, float], float]:
    """Return how many blocks of each kind a rank stores activations of at one moment of a step, and how many stage
    buffers it has then."""
    stages, moments = stages_of_rank(work, stage), moments_in_flight(work, stage)
    moment = np.argmax(moments.num_activations @ [single.num_blocks for single in stages])
    counts = moments.num_activations[moment]
    numbers: dict[BlockSizes, float] = {}
    for single, count in zip(stages, counts, strict=True):
        for block, members in single.blocks:
            numbers[block] = numbers.get(block, 0.0) + float(count) * len(members)
    return numbers, float(num_stage_buffers(work, stage, moments, saves_input=True)[moment])


def _cell_time(work: Workload, machine: Machine) -> _CellTime:
    """Return what the layouts of a cell with one schedule share."""
    terms, slowest, time = schedule_time(work, machine)
    return _CellTime(sum(terms.values()) * (1 - 1e-9), slowest, time)


def _bound_memory(work: Workload, machine: Machine, result: SearchResult) -> Literal["fits", "offloads", "too large"]:
    """Return whether a layout of a cell with one schedule may fit, only with offload, or not at all."""
    usable = machine.usable_bytes / memory_margin(machine)
    temporary, least = least_memory(work, work.sizes.data, usable)
    excess = (least if machine.is_shared else temporary) - usable
    if excess > 0:
        result.rejections["out of memory"] += 1
        if excess < result.smallest[0]:
            result.smallest = (excess, describe_layout(work))
        return "too large"
    return "fits" if least <= usable else "offloads"


def _is_valid(work: Workload, key: tuple[object, ...], result: SearchResult) -> bool:
    """Return whether the parts of a layout fit together; if not, count it as rejected.

    Args:
        key: what decides that. Many layouts share it, so it is checked once.
    """
    if key not in result.cache.conflicts:
        result.cache.conflicts[key] = layout_conflict(work)
    error = result.cache.conflicts[key]
    if error is not None:
        result.reject(rejection_reason(error), error.what)
    return error is None
