"""Training speed: tokens per second, and model FLOPs utilization (MFU), the share of the machine's peak."""

from __future__ import annotations

import time
from collections.abc import Callable

from jingu.model.count import flops_per_token
from jingu.model.decoder import parameter_shapes
from jingu.training.checkpointing import Progress
from jingu.training.run import Run

# Weight of an interval between logged steps in the average speed, relative to the next interval. The average covers
# about 20 intervals.
_DECAY = 0.95


class ThroughputMeter:
    """Measures training time, without evaluation and saving, and computes the training speed from it.

    Args:
        flops_per_token: floating-point operations per token, forward and backward.
        measure_peak: measures the peak of all ranks together, in FLOP/s.

    Attributes:
        peak: the measured peak of all ranks together, in FLOP/s.
    """

    def __init__(self, flops_per_token: float, measure_peak: Callable[[], float]) -> None:
        self.flops_per_token = flops_per_token
        self.peak = measure_peak()
        self._measure_peak = measure_peak

    def start(self, progress: Progress) -> None:
        """Start the clock. Call it before the first step."""
        self._start = time.perf_counter()
        self._logged_tokens = progress.tokens
        self._logged_seconds = progress.seconds
        self._average_tokens = 0.0
        self._average_seconds = 0.0

    def update(self, progress: Progress) -> None:
        """Add the time since the last `start`, `update` or `skip` to the training time, `progress.seconds`."""
        now = time.perf_counter()
        progress.seconds += now - self._start
        self._start = now

    def skip(self) -> None:
        """Discard the time since the last `start`, `update` or `skip`."""
        self._start = time.perf_counter()

    def tokens_per_second(self, progress: Progress) -> float:
        """Return the tokens per second since the last call of this method."""
        tokens = progress.tokens - self._logged_tokens
        seconds = progress.seconds - self._logged_seconds
        self._logged_tokens = progress.tokens
        self._logged_seconds = progress.seconds
        self._average_tokens = _DECAY * self._average_tokens + tokens
        self._average_seconds = _DECAY * self._average_seconds + seconds
        return tokens / max(seconds, 1e-9)

    def average_tokens_per_second(self) -> float:
        """Return the tokens per second over about 20 calls of `tokens_per_second`, to predict the time left."""
        return self._average_tokens / max(self._average_seconds, 1e-9)

    def peak_share(self, tokens_per_second: float) -> float:
        """Return the share of the machine's peak that training reaches at a speed, at most 1.

        If the speed is above the peak, the measurement of the peak was disturbed. It is then repeated, and the peak is
        at least the FLOP/s of training.
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
    # An encoder-decoder divides a text of `length` tokens into source and target. Convert from target tokens to tokens.
    per_target_token = flops_per_token(run.spec, shapes, objective.target_length, objective.source_length)
    return per_target_token * objective.target_length / length
