"""Comparison of a run with its plan: each run writes planned and measured time and memory into its metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import mean, median
from typing import TYPE_CHECKING

from jingu.parallel.mesh import resolve_axis_sizes
from jingu.plan.actual import StepSeconds, StepTimer, complete_terms, computing_clock, widest_axis
from jingu.plan.forecast import Forecast, run_software, run_workload
from jingu.plan.machine import Machine, nominal_machine
from jingu.plan.memory import stage_memory
from jingu.plan.step_time import step_time
from jingu.runtime.device import peak_memory
from jingu.runtime.ranks import count_ranks, gather_from_all
from jingu.training.plan_task import add_task
from jingu.training.precision import choose_precision

if TYPE_CHECKING:
    from jingu.training.loop import Trainer, WriteMetrics

# The step whose operations are timed, counted from 1 at each start. Earlier steps also build caches and buffers. With
# profiling, it comes after the profiled steps.
TIMED_STEP = 3


class PlanCheck:
    """Measures one step by term and all logged steps as a whole, and writes both together with the planned values.

    Steps are measured by term only on CPUs, and only if they are not compiled.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._speeds: list[float] = []
        self._computing: deque[float] = deque(maxlen=100)
        self._is_warm = self._is_written = False
        self._measured: StepSeconds | None = None

    @contextmanager
    def step(self, trainer: Trainer) -> Iterator[None]:
        """Measure the step that is taken within the block."""
        self._steps += 1
        start = computing_clock()
        if self._steps != _timed_step(trainer) or trainer.is_compiled or trainer.ranks.device.type != "cpu":
            yield
            self._computing.append(computing_clock() - start)
            return
        sizes = resolve_axis_sizes(trainer.run.config.parallel, trainer.ranks.world, trainer.run.spec)
        timer = StepTimer(trainer.model.activity, waits=sizes.pipeline == 1, widest=widest_axis(sizes))
        self._measured = timer.seconds
        with timer:
            yield

    def log(self, trainer: Trainer, step: int, speed: float, write: WriteMetrics) -> None:
        """Add the speed since the last logged step, and write the line `plan` if it is due.

        The line is written as soon as there is a speed, and again at the last step. All ranks must call this at the
        same steps.

        Args:
            speed: tokens per second.
        """
        # 1. Ignore the first logged steps: they include warmup and the step that is timed by term.
        self._speeds += [speed] * self._is_warm
        self._is_warm = self._steps >= _timed_step(trainer)
        if not self._speeds or (self._is_written and step < trainer.run.config.train.steps):
            return
        # 2. Plan the step of this run.
        self._is_written = True
        seconds = trainer.plan.tokens_per_step / median(self._speeds)
        config, spec, device = trainer.run.config, trainer.run.spec, trainer.ranks.device
        sizes = resolve_axis_sizes(config.parallel, trainer.ranks.world, spec)
        software = run_software(choose_precision(config.precision, device))
        work = run_workload(config, spec, sizes, trainer.plan, software)
        machine = _measured_machine(trainer)
        memory = stage_memory(work, work.stages[0])
        updates = Forecast(work, machine, config.train.steps, step_time(work, machine), memory, None, [])
        planned = add_task(updates, config, spec)
        # 3. Complete the measured terms with those of all ranks.
        actual = {}
        if self._measured is not None:
            # A collective: all ranks log at the same steps.
            everywhere = gather_from_all([asdict(self._measured), median(self._computing)])
            actual = complete_terms(
                [StepSeconds(**measured) for measured, _ in everywhere],
                mean(computing for _, computing in everywhere),
                seconds,
                ranks_per_core=machine.ranks_per_core,
                is_pipeline=sizes.pipeline > 1,
            )
        write(
            "plan",
            step,
            planned=planned.seconds,
            actual=actual,
            planned_seconds=planned.step,
            actual_seconds=seconds,
            planned_memory_bytes=planned.memory.total,
            actual_memory_bytes=peak_memory(device),
        )


def _timed_step(trainer: Trainer) -> int:
    """Return the number of the step that is timed by term, counted from 1 at each start."""
    return TIMED_STEP + trainer.run.config.train.profile.steps


def _measured_machine(trainer: Trainer) -> Machine:
    """Return this machine with the peak FLOP/s that the run has measured."""
    ranks = trainer.ranks
    machine = nominal_machine(ranks.device).with_nodes(count_ranks(ranks.world)[1])
    peak = trainer.meter.peak / ranks.world / 1e12
    matmul = peak if machine.is_shared else min(peak, machine.matmul_tflops)
    return machine.model_copy(update={"peak_tflops": peak, "matmul_tflops": matmul})
