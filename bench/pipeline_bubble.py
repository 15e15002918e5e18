"""The bubble (idle time) of pipeline schedules, simulated from the schedules' own lists of actions.

No ranks run. Each schedule of `torch.distributed.pipelining` defines the order of actions on each rank. An action
starts when its rank is free and its inputs are available. Communication takes no time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from jingu.config.sections.model import ModelSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.model.decoder import Decoder
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.parallel.scheduled_stage import SCHEDULES
from jingu.parallel.stages import stages_per_rank


class Action(NamedTuple):
    """One action of a rank."""

    kind: str
    """F: forward; B: backward; I and W: the parts of a backward pass for inputs and for weights."""
    stage: int
    micro_batch: int


class _Recorder:
    """A stage that only records the actions of a schedule."""

    submod = None

    def __init__(self, index: int, stages: int, ranks: int, rank: int) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = rank
        self.is_first = index == 0
        self.is_last = index == stages - 1
        self.actions: list[Action] = []

    def forward_one_chunk(self, number: int, *_arguments: Any, **_keywords: Any) -> None:
        self.actions.append(Action("F", self.stage_index, number))

    def backward_one_chunk(self, number: int, **_keywords: Any) -> None:
        self.actions.append(Action("B", self.stage_index, number))

    def get_fwd_recv_ops(self, _number: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _factor: int) -> None:
        """Do nothing: there are no gradients."""


def schedule_actions(settings: ParallelSettings, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of each rank, in order."""
    schedule_class = SCHEDULES[settings.pipeline_schedule]
    if settings.pipeline_schedule in ("gpipe", "1f1b"):
        stages = [_Recorder(rank, ranks, ranks, rank) for rank in range(ranks)]
        for stage in stages:
            schedule = schedule_class(stage, micro_batches, loss_fn=lambda *_: None)
            # These schedules have no list of actions, so one step runs on the recorders.
            schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
            schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches)
        return [stage.actions for stage in stages]
    num_stages = stages_per_rank(settings)
    recorders = [_Recorder(index, ranks * num_stages, ranks, 0) for index in range(num_stages)]
    local_stages = [SimpleNamespace(**vars(recorder), submod=None) for recorder in recorders]
    schedule = schedule_class(local_stages, micro_batches, loss_fn=lambda *_: None)
    order: list[list[Action]] = []
    for rank in range(ranks):
        # The list also has the communication, which takes no time here.
        steps = schedule.pipeline_order_with_comms[rank]
        actions = [Action(kind.value, stage, micro_batch) for stage, kind, micro_batch, *_ in steps]
        order.append([action for action in actions if action.kind in ("F", "B", "I", "W")])
    return order


def bubble_fraction(order: list[list[Action]], seconds: Mapping[str, float]) -> float:
    """Return the share of a step, averaged over ranks, in which ranks wait.

    Args:
        order: actions of each rank.
        seconds: duration of each kind of action (F, I, W) on one stage; B takes as long as I and W together.
    """
    stages = 1 + max(action.stage for rank in order for action in rank)
    times = {**seconds, "B": seconds["I"] + seconds["W"]}
    ends: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * len(order)
    positions = [0] * len(order)
    while any(position < len(actions) for position, actions in zip(positions, order, strict=True)):
        before = sum(positions)
        for rank, actions in enumerate(order):
            # Run this rank until one of its actions waits for another rank.
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                dependencies = [ends.get(key) for key in _dependencies(action, stages)]
                if None in dependencies:
                    break
                clocks[rank] = max([clocks[rank], *filter(None, dependencies)]) + times[action.kind]
                kind = "I" if action.kind == "B" else action.kind
                ends[kind, action.stage, action.micro_batch] = clocks[rank]
                positions[rank] += 1
        assert sum(positions) > before, "deadlock: the ranks wait for each other"
    busy = sum(times[action.kind] for rank in order for action in rank)
    return 1 - busy / (len(order) * max(clocks))


def _dependencies(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """Return the actions that must end before this one. The end of a full backward pass is recorded as that of I."""
    kind, stage, micro_batch = action
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("I", stage, micro_batch)]
    dependencies = [("F", stage, micro_batch)]
    if stage + 1 < stages:
        dependencies.append(("I", stage + 1, micro_batch))
    return dependencies


def relative_bubble(
    schedule: str, ranks: int, micro_batches: int, seconds: Mapping[str, float], num_stages: int | str = "auto"
) -> float:
    """Return the idle share of a schedule in units of (p - 1) / (m + p - 1), with p ranks and m micro-batches.

    That unit is the bubble of gpipe and 1f1b.

    Args:
        seconds: duration of each kind of action for all blocks of a rank; its stages have equal shares.
        num_stages: stages per rank.
    """
    settings = ParallelSettings.model_validate({"pipeline_schedule": schedule, "stages_per_rank": num_stages})
    share = {kind: time / stages_per_rank(settings) for kind, time in seconds.items()}
    return (
        bubble_fraction(schedule_actions(settings, ranks, micro_batches), share)
        * (micro_batches + ranks - 1)
        / (ranks - 1)
    )


def measure_block() -> dict[str, float]:
    """Return the seconds of a block's forward pass and of both parts of its backward pass, on one thread."""
    torch.set_num_threads(1)
    spec = spec_from_settings(ModelSettings(num_layers=1, hidden_size=256, num_heads=4), 64, 128)
    model = Decoder(spec)
    init_weights(model, spec, 0)
    block = model.blocks[0]
    parameters = list(block.parameters())
    mask = torch.ones(128, 128, dtype=torch.bool).tril()
    durations: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    for _ in range(10):
        states = torch.randn(4, 128, 256, requires_grad=True)
        times = [time.perf_counter()]
        output = block(states, None, mask, None)[0]
        times.append(time.perf_counter())
        torch.autograd.grad(output.sum(), states, retain_graph=True)
        times.append(time.perf_counter())
        torch.autograd.grad(output.sum(), [states, *parameters])
        times.append(time.perf_counter())
        forward, inputs, backward = (end - start for start, end in pairwise(times))
        durations["F"].append(forward)
        durations["I"].append(inputs)
        durations["W"].append(backward - inputs)
    return {kind: median(seconds[2:]) for kind, seconds in durations.items()}


def run() -> str:
    """Return the table as Markdown."""
    seconds = measure_block()
    parts = ", ".join(f"{kind} {1e3 * value:.1f} ms" for kind, value in seconds.items())
    lines = [
        f"Idle time in units of (p − 1) / (m + p − 1), with p ranks, m micro-batches and measured times ({parts}):",
        "",
        f"| p | m | {' | '.join(SCHEDULES)} |",
        f"|---|---|{'---|' * len(SCHEDULES)}",
    ]
    for ranks in (2, 4, 8):
        for number in (2 * ranks, 4 * ranks):
            cells = " | ".join(f"{relative_bubble(schedule, ranks, number, seconds):.2f}" for schedule in SCHEDULES)
            lines.append(f"| {ranks} | {number} | {cells} |")
    return "\n".join(lines)
