"""Training speed: tokens per second, and the share of the machine's peak (model FLOPs utilization)."""

from __future__ import annotations

import time
from collections.abc import Callable

from jingu.model.count import flops_per_token
from jingu.model.decoder import parameter_shapes
from jingu.training.checkpointing import Progress
from jingu.training.run import Run

# What an interval between two logged steps counts in the average speed, relative to the one after it: the average is
# over about 20 intervals.
_DECAY = 0.95


class ThroughputMeter:
    """A clock of training time, without evaluation and saving, that also knows how much is computed in it.

    Args:
        flops_per_token: floating-point operations per token, forward and backward.
        measure_peak: measures the peak of all ranks together, in FLOP/s.
    """

    def __init__(self, flops_per_token: float, measure_peak: Callable[[], float]) -> None:
        self.flops_per_token = flops_per_token
        self.peak = measure_peak()
        self._measure_peak = measure_peak

    def start(self, progress: Progress) -> None:
        """Start the clock."""
        self._start = time.perf_counter()
        self._logged_tokens = progress.tokens
        self._logged_seconds = progress.seconds
        self._average_tokens = 0.0
        self._average_seconds = 0.0

    def update(self, progress: Progress) -> None:
        """Add the time since the last call to the training time of the run."""
        now = time.perf_counter()
        progress.seconds += now - self._start
        self._start = now

    def skip(self) -> None:
        """Discard the time since the last call."""
        self._start = time.perf_counter()

    def tokens_per_second(self, progress: Progress) -> float:
        """Return the speed since the last call."""
        tokens = progress.tokens - self._logged_tokens
        seconds = progress.seconds - self._logged_seconds
        self._logged_tokens = progress.tokens
        self._logged_seconds = progress.seconds
        self._average_tokens = _DECAY * self._average_tokens + tokens
        self._average_seconds = _DECAY * self._average_seconds + seconds
        return tokens / max(seconds, 1e-9)

    def average_tokens_per_second(self) -> float:
        """Return the speed over the last calls of `tokens_per_second`, which predicts the time left."""
        return self._average_tokens / max(self._average_seconds, 1e-9)

    def peak_share(self, tokens_per_second: float) -> float:
        """Return the share of the machine's peak that training reaches.

        A share above 1 shows that the measurement of the peak was disturbed. It is then repeated, and what training
        reached counts as a measurement, too.
        """
        flops = tokens_per_second * self.flops_per_token
        if flops > self.peak:
            self.peak = max(flops, self._measure_peak())
        return flops / self.peak


def training_flops_per_token(run: Run) -> float:
    """Return the floating-point operations per token of text, forward and backward."""
    shapes = parameter_shapes(run.spec)
    length = run.config.batch.sequence_length
    objective = run.objective
    if objective is None or not objective.source_length:
        return flops_per_token(run.spec, shapes, length)
    # An encoder-decoder computes source and target of a text; per token of the text, that is a share of the target's.
    per_target_token = flops_per_token(run.spec, shapes, objective.target_length, objective.source_length)
    return per_target_token * objective.target_length / length
