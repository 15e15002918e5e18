"""Asynchronous rollouts: answers generated during training, by weights that are a fixed number of steps old.

The rollout of step n always comes from the weights of step max(n - k, 0), where k is the staleness, regardless of which
weights happen to be ready. A run with generation processes is therefore as reproducible as a synchronous one.
Rollouts generated ahead are saved in the checkpoint, because the weights that generated them no longer exist then.

The loss is the decoupled objective of Hilton et al. (2022): its ratios compare with the log-probabilities under the
weights at the beginning of the step, and truncated importance sampling (Yao et al., 2025) corrects for the difference
between these and the log-probabilities of the sampler.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import IO, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save

from jingu.align.generation_sources import GenerationProcesses, GenerationServer
from jingu.align.rollouts import Generator, Sample, describe_error, raise_error, read_sample, whole_reader
from jingu.config.sections.policies import (
    GenerationProcessesSettings,
    GenerationServerSettings,
    GrpoSettings,
    PolicySettings,
)
from jingu.errors import JinguError
from jingu.model.decoder import parameter_shapes
from jingu.model.parameter_table import is_trained
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.zero import eval_mode
from jingu.runtime.futures import fulfill
from jingu.runtime.ranks import gather_from_all, wait_until_all_done
from jingu.training.run import Run

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """The answers of a step.

    Attributes:
        step: the step that trains on them, from 0.
        weights_step: the number of training steps of the weights that generated them.
        greedy: one greedy answer to each prompt, for ReMax; otherwise empty.
    """

    step: int
    weights_step: int
    samples: list[Sample]
    greedy: list[Sample] = field(default_factory=list)


class GenerationSource(Protocol):
    """Generates with the trainer's weights. Only the first rank has one, and calls it from a separate thread."""

    def update(self, weights: str, step: int) -> None:
        """Load the weights of a step for all generation from now on.

        Args:
            weights: path of a safetensors file.

        Raises:
            JinguError: the weights cannot be loaded.
        """

    def generate(self, step: int, *, greedy: bool = False) -> list[Sample]:
        """Return the answers to the prompts of a step, or one greedy answer to each. Raises JinguError."""

    def close(self) -> None:
        """Stop its processes or release its adapter, after the last rollout."""


class AsynchronousRollouts:
    """Rollouts that a source generates ahead. Every rank has one, and all ranks call its methods together.

    Args:
        device: the first rank's device.
    """

    def __init__(self, run: Run, generator: Generator, device: torch.device) -> None:
        settings = run.config.task
        assert isinstance(settings, PolicySettings)
        self._run = run
        self._precision = generator.precision
        self._has_greedy = isinstance(settings, GrpoSettings) and settings.advantage == "remax"
        self._staleness = settings.staleness
        source = settings.generation_source
        # A server has already loaded the base model.
        self._sends_adapters = isinstance(source, GenerationServerSettings)
        self._source: GenerationSource | None = None
        if dist.get_rank() == 0 and isinstance(source, GenerationServerSettings):
            self._source = GenerationServer(run, source, generator)
        elif dist.get_rank() == 0 and isinstance(source, GenerationProcessesSettings):
            self._source = GenerationProcesses(run, source, device)
        self._jobs = _JobQueue()
        # Rollouts by step. While one is being generated, the first rank has its future, and the others have None.
        self._in_flight: dict[int, Rollout | Future[Rollout] | None] = {}

    def take(self, model: ParallelModel, step: int) -> Rollout:
        """Return the rollout of a step, after starting the generation of later ones with the current weights.

        Raises:
            StepNotStartedError: the rollout could not be generated.
        """
        last = self._run.config.train.steps - 1
        steps = [number for number in range(step, step + self._staleness + 1) if number <= last]
        steps = [number for number in steps if number not in self._in_flight]
        if steps:
            self._start(model, step, steps)
        value = self._outcome(step)
        raise_error(value)
        del self._in_flight[step]
        if step == last and self._source is not None:
            self._source.close()
        return _read_rollout(value)

    def state(self) -> Any:
        """Wait for all rollouts in flight and return them as JSON, without those that failed."""
        outcomes = {step: self._outcome(step) for step in sorted(self._in_flight)}
        rollouts = {step: value for step, value in outcomes.items() if "error" not in value}
        self._in_flight |= {step: _read_rollout(value) for step, value in rollouts.items()}
        return list(rollouts.values())

    def load_state(self, state: Any) -> None:
        """Replace the rollouts in flight by those of a checkpoint; None for a checkpoint without any."""
        self._jobs.cancel()
        rollouts = [_read_rollout(value) for value in state or []]
        self._in_flight = {rollout.step: rollout for rollout in rollouts}

    def _start(self, model: ParallelModel, weights_step: int, steps: list[int]) -> None:
        """Start generating the rollouts of these steps with the model's current weights."""
        file = self._write_weights(model)
        if self._source is None or file is None:
            self._in_flight |= dict.fromkeys(steps)
            return
        update = self._jobs.submit(partial(_update, self._source, file, weights_step))
        for step in steps:
            self._in_flight[step] = self._jobs.submit(partial(self._generate, update, step, weights_step))

    def _generate(self, update: Future[None], step: int, weights_step: int) -> Rollout:
        """Return the rollout of a step, generated after a weight update has finished."""
        assert self._source is not None
        update.result()
        samples = self._source.generate(step)
        greedy = self._source.generate(step, greedy=True) if self._has_greedy else []
        return Rollout(step, weights_step, samples, greedy)

    def _outcome(self, step: int) -> dict[str, Any]:
        """Wait for the rollout of a step, and return it or its error as JSON on every rank."""
        rollout = self._in_flight[step]
        if isinstance(rollout, Rollout):
            return asdict(rollout)
        # Generation may take longer than the timeout of a collective, so poll until all ranks are done.
        wait_until_all_done(lambda seconds: rollout is None or rollout in wait([rollout], seconds).done)
        value: dict[str, Any] = {}
        if rollout is not None:
            try:
                value = asdict(rollout.result())
            except JinguError as error:
                value = describe_error(error)
        return dict(gather_from_all(value)[0])

    def _write_weights(self, model: ParallelModel) -> IO[bytes] | None:
        """Gather the weights into a file on the first rank; return None on the others. Every rank calls this."""
        names = [
            name for name in parameter_shapes(model.spec) if not self._sends_adapters or is_trained(name, model.spec)
        ]
        tensors = {}
        with eval_mode(model):
            read = whole_reader(model, self._precision)
            for name in names:
                weight = read(name)
                if self._source is not None:
                    tensors[name] = weight.cpu().contiguous()
        if self._source is None:
            return None
        file = _open_memory_file()
        file.write(save(tensors))
        file.flush()
        return file


class _JobQueue:
    """Calls functions one after another in a daemon thread.

    Weights therefore change only between rollouts, and rollouts are generated in the order of their steps.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._futures: list[Future[Any]] = []
        threading.Thread(target=_run_jobs, args=(self._jobs,), daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function, and return a future of its result."""
        future: Future[T] = Future()
        self._futures = [*(pending_future for pending_future in self._futures if not pending_future.done()), future]
        self._jobs.put(partial(fulfill, future, function))
        return future

    def cancel(self) -> None:
        """Cancel the functions that have not started."""
        for future in self._futures:
            future.cancel()


def _run_jobs(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()


def _update(source: GenerationSource, file: IO[bytes], step: int) -> None:
    """Load the weights in a file into the source, and free the file."""
    with file:
        source.update(_path_of(file), step)


def _read_rollout(value: dict[str, Any]) -> Rollout:
    samples = [[read_sample(sample) for sample in value[name]] for name in ("samples", "greedy")]
    return Rollout(value["step"], value["weights_step"], *samples)


def _open_memory_file() -> IO[bytes]:
    """Return a file in main memory, freed when it is closed or this process ends."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("weights"), "wb")
    return tempfile.NamedTemporaryFile()


def _path_of(file: IO[bytes]) -> str:
    """Return a path through which other processes on this machine can open a file."""
    return file.name if isinstance(file.name, str) else f"/proc/{os.getpid()}/fd/{file.fileno()}"
