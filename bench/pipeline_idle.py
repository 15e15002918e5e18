"""What ranks of a pipeline wait, in a simulation of the schedules' own lists of actions.

No ranks run. Each schedule of `torch.distributed.pipelining` says what each rank does in which order; an action starts
when its rank is free and what it needs is there. Travelling takes no time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from jingu.config.sections.model import ModelSettings
from jingu.config.sections.parallel import ParallelSettings
from jingu.model.build import spec_from_settings
from jingu.model.decoder import Decoder
from jingu.model.initialise import initialise
from jingu.parallel.pipeline import SCHEDULES
from jingu.parallel.stages import stages_per_rank


class Action(NamedTuple):
    """What a rank does."""

    kind: str
    """F: forward; B: backward; I and W: the parts of a backward pass for states and for parameters."""
    stage: int
    micro_batch: int


class _Recorder:
    """A stage that only notes what a schedule asks of it."""

    submod = None

    def __init__(self, index: int, stages: int, ranks: int, rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, rank
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.seen: list[Action] = []

    def forward_one_chunk(self, number: int, *_arguments: Any, **_keywords: Any) -> None:
        self.seen.append(Action("F", self.stage_index, number))

    def backward_one_chunk(self, number: int, **_keywords: Any) -> None:
        self.seen.append(Action("B", self.stage_index, number))

    def get_fwd_recv_ops(self, _number: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _factor: int) -> None:
        """Nothing."""


def actions(settings: ParallelSettings, ranks: int, micro_batches: int) -> list[list[Action]]:
    """What each rank does, in its order."""
    each, made = stages_per_rank(settings), SCHEDULES[settings.schedule]
    if settings.schedule in ("gpipe", "1f1b"):
        stages = [_Recorder(rank, ranks, ranks, rank) for rank in range(ranks)]
        for stage in stages:
            schedule = made(stage, micro_batches, loss_fn=lambda *_: None)
            schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
            schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches)
        return [stage.seen for stage in stages]
    held = [SimpleNamespace(**vars(_Recorder(number, ranks * each, ranks, 0)), submod=None) for number in range(each)]
    order = made(held, micro_batches, loss_fn=lambda *_: None).pipeline_order_with_comms
    kinds = {"F", "B", "I", "W"}
    return [[Action(it[1].value, it[0], it[2]) for it in order[rank] if it[1].value in kinds] for rank in range(ranks)]


def idle(order: list[list[Action]], seconds: Mapping[str, float]) -> float:
    """Share of the step in which ranks wait.

    Args:
        seconds: time of each kind of action on one stage; a backward pass takes that of its parts.
    """
    stages = 1 + max(action.stage for rank in order for action in rank)
    times = {**seconds, "B": seconds["I"] + seconds["W"]}
    ends: dict[tuple[str, int, int], float] = {}
    clocks, places = [0.0] * len(order), [0] * len(order)
    while any(place < len(rank) for place, rank in zip(places, order, strict=True)):
        before = sum(places)
        for number, rank in enumerate(order):
            while places[number] < len(rank):
                action = rank[places[number]]
                needed = [ends.get(key) for key in _needed(action, stages)]
                if None in needed:
                    break
                clocks[number] = max([clocks[number], *filter(None, needed)]) + times[action.kind]
                ends["I" if action.kind == "B" else action.kind, action.stage, action.micro_batch] = clocks[number]
                places[number] += 1
        assert sum(places) > before, "the ranks wait for each other"
    busy = sum(times[action.kind] for rank in order for action in rank)
    return 1 - busy / (len(order) * max(clocks))


def _needed(action: Action, stages: int) -> list[tuple[str, int, int]]:
    """The actions that must have ended; an end of I is that of a whole backward pass, too."""
    kind, stage, number = action
    if kind == "F":
        return [("F", stage - 1, number)] if stage else []
    if kind == "W":
        return [("I", stage, number)]
    return [("F", stage, number), *([("I", stage + 1, number)] if stage + 1 < stages else [])]


def ratio(
    schedule: str, ranks: int, micro_batches: int, seconds: Mapping[str, float], each: int | str = "auto"
) -> float:
    """Idle share of a schedule in units of (p - 1) / (m + p - 1).

    Args:
        seconds: times of all blocks of a rank together, which its stages share evenly.
    """
    settings = ParallelSettings.model_validate({"schedule": schedule, "stages_per_rank": each})
    share = {kind: time / stages_per_rank(settings) for kind, time in seconds.items()}
    return idle(actions(settings, ranks, micro_batches), share) * (micro_batches + ranks - 1) / (ranks - 1)


def measured() -> dict[str, float]:
    """Seconds of a block's forward pass and of the parts of its backward pass, on one thread."""
    torch.set_num_threads(1)
    spec = spec_from_settings(ModelSettings(layers=1, width=256, heads=4), 64, 128)
    model = Decoder(spec)
    initialise(model, spec, 0)
    block, parameters = model.blocks[0], list(model.blocks[0].parameters())
    mask = torch.ones(128, 128, dtype=torch.bool).tril()
    taken: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    for _ in range(10):
        states = torch.randn(4, 128, 256, requires_grad=True)
        started = time.perf_counter()
        made = block(states, None, mask, None)[0]
        forward = time.perf_counter()
        torch.autograd.grad(made.sum(), states, retain_graph=True)
        inputs = time.perf_counter()
        torch.autograd.grad(made.sum(), [states, *parameters])
        whole = time.perf_counter() - inputs
        for kind, seconds in (("F", forward - started), ("I", inputs - forward), ("W", whole - (inputs - forward))):
            taken[kind].append(seconds)
    return {kind: median(seconds[2:]) for kind, seconds in taken.items()}


def run() -> str:
    """The table, as Markdown."""
    seconds = measured()
    parts = ", ".join(f"{kind} {1e3 * value:.1f} ms" for kind, value in seconds.items())
    lines = [
        f"Idle time in units of (p − 1) / (m + p − 1), p ranks and m micro-batches, with measured times ({parts}):",
        "",
        f"| p | m | {' | '.join(SCHEDULES)} |",
        f"|---|---|{'---|' * len(SCHEDULES)}",
    ]
    for ranks in (2, 4, 8):
        for number in (2 * ranks, 4 * ranks):
            cells = " | ".join(f"{ratio(schedule, ranks, number, seconds):.2f}" for schedule in SCHEDULES)
            lines.append(f"| {ranks} | {number} | {cells} |")
    return "\n".join(lines)
