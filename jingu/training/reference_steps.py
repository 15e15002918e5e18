"""Measurements of small training steps in several layouts, with which `jingu doctor` calibrates plans for CPUs."""

from __future__ import annotations

import time
from dataclasses import asdict
from statistics import mean, median
from typing import Any

import torch

from jingu.config.schema import RunConfig
from jingu.model.resolve import spec_from_settings
from jingu.parallel.layout import Precision
from jingu.parallel.stages import plan_layout
from jingu.plan.actual import StepSeconds, StepTimer, complete_terms, computing_clock, widest_axis
from jingu.plan.calibration import Measurement
from jingu.plan.forecast import run_software, run_workload
from jingu.plan.machine import Machine
from jingu.runtime.ranks import RankInfo, gather_from_all
from jingu.training.replay_run import prepare_step

# Number of steps that are timed operation by operation, and number of steps that are timed as a whole.
_TIMED, _WHOLE = 3, 5
_FP32 = Precision("fp32", torch.float32, torch.float32, torch.float32)


def reference_runs(world: int) -> list[dict[str, Any]]:
    """Return settings of small runs on a number of ranks.

    These are two sizes of model with ZeRO stage 3 and, if the ranks can be divided, runs with tensor, pipeline and
    expert parallelism.
    """
    # A few ranks along an axis are enough to measure its collectives.
    axis = next((ranks for ranks in (4, 2, 3) if world % ranks == 0), 1)
    heads = 6 if axis == 3 else 4
    small = {"num_layers": 2, "hidden_size": 32 * heads, "num_heads": heads}
    wide = small | {"hidden_size": 96 * heads}
    mixture = small | {
        "family": "mixtral",
        "intermediate_size": small["hidden_size"],
        "experts": {"num_experts": 2 * axis, "num_experts_per_token": 2},
    }
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = [(small, {"zero_stage": 3}), (wide, {"zero_stage": 3})]
    if axis > 1:
        deep = small | {"num_layers": axis}
        runs += [(small, {"tensor": axis}), (deep, {"pipeline": axis}), (mixture, {"expert": axis})]
    batch = {"sequence_length": 192, "global_batch_size": 4 * world, "micro_batch_size": 4}
    return [{"model": model, "parallel": parallel, "batch": batch} for model, parallel in runs]


def measure_reference_steps(ranks: RankInfo, machine: Machine) -> list[Measurement]:
    """Return measured steps on the ranks of this process group. Every rank must call it."""
    return [_measure_step(settings, ranks, machine) for settings in reference_runs(ranks.world)]


def _measure_step(settings: dict[str, Any], ranks: RankInfo, machine: Machine) -> Measurement:
    """Return the measured step of one run. Every rank must call it."""
    # 1. Build the run. The first step also builds buffers and kernels, and is not measured.
    config = RunConfig.model_validate(settings | {"precision": {"type": "fp32"}})
    spec = spec_from_settings(config.model, 1024, config.batch.sequence_length)
    sizes, plan = plan_layout(config, ranks.world, spec)
    work = run_workload(config, spec, sizes, plan, run_software(_FP32))
    step, model, _ = prepare_step(config, spec, _FP32, ranks.world)
    step(0)
    # 2. Time steps operation by operation, which slows them down.
    timers = [StepTimer(model.activity, waits=sizes.pipeline == 1, widest=widest_axis(sizes)) for _ in range(_TIMED)]
    for timer in timers:
        with timer:
            step(1)
    # 3. Time other steps as a whole, to correct for that.
    seconds, computing = [], []
    for _ in range(_WHOLE):
        start, own_start = time.perf_counter(), computing_clock()
        step(1)
        seconds.append(time.perf_counter() - start)
        computing.append(computing_clock() - own_start)
    # 4. Combine the measurements of all ranks.
    everywhere = gather_from_all([[asdict(timer.seconds) for timer in timers], median(computing), median(seconds)])
    total = mean(step_median for *_, step_median in everywhere)
    terms = complete_terms(
        [StepSeconds(**fields) for step_timings, *_ in everywhere for fields in step_timings],
        mean(step_median for _, step_median, _ in everywhere),
        total,
        ranks_per_core=machine.ranks_per_core,
        is_pipeline=sizes.pipeline > 1,
    )
    return Measurement(work, machine, total, terms)
