"""Derive the batch of a rank and gradient accumulation from the global batch, the micro-batch and the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from jingu.config.sections.train import BatchSettings
from jingu.errors import JinguError, join_words

MAX_AUTO_TOKENS = 8192
"""Maximum tokens of an automatic micro-batch."""


@dataclass(frozen=True)
class BatchPlan:
    """How an optimizer step is divided: over data-parallel ranks, then into consecutive micro-batches."""

    rows_per_rank: int
    """Sequences of a step on one rank."""
    micro_batch_size: int
    """Sequences in a forward pass of one rank."""
    accumulation: int
    """Gradient accumulation steps: forward passes of a rank in a step."""
    tokens_per_step: int
    """Tokens in a step, over all ranks."""
    updates: int = 1
    """Optimizer steps with what a step has generated; each has a global batch of its own."""
    lr_scale: float = 1.0
    """Factor on the learning rate of every model that the step trains; 1 unless the run has gone back."""


def plan_batch(
    batch: BatchSettings, ranks: int, pipeline: int = 1, rows_per_group: int = 1, updates: int = 1
) -> BatchPlan:
    """Divide the global batch over data-parallel ranks, and each share into micro-batches.

    Args:
        pipeline: ranks that micro-batches pass one after another; an automatic size then leaves four of them for each
            of these, or as many as there are sequences.
        rows_per_group: neighboring sequences that must be in one micro batch.
        updates: optimizer steps of a step.

    Raises JinguError, with the nearest sizes that work, where one does not divide the other.
    """
    size = batch.global_batch_size
    unit = ranks * rows_per_group
    groups = f" in groups of {rows_per_group}" if rows_per_group > 1 else ""
    if size % unit:
        below, above = size - size % unit, size - size % unit + unit
        what = f"batch.global_batch_size {size:,} cannot be divided over {ranks:,} ranks{groups}:"
        raise JinguError(what, fix=f"take {_sizes(below, above)}.")
    rows = size // ranks
    least = min(rows, 4 * pipeline) if pipeline > 1 else 1
    sizes = [n * rows_per_group for n in divisors(rows // rows_per_group)]
    if batch.micro_batch_size != "auto":
        micro = batch.micro_batch_size
    else:
        fitting = [n for n in sizes if n * batch.sequence_length <= MAX_AUTO_TOKENS and rows // n >= least]
        micro = max(fitting, default=rows_per_group)
    if micro not in sizes:
        below = max((n for n in sizes if n < micro), default=0)
        above = min((n for n in sizes if n > micro), default=0)
        share = f"the {rows:,} sequences of a rank" if ranks > 1 else f"batch.global_batch_size {rows:,}"
        why = f" (batch.global_batch_size {size:,} over {ranks:,} ranks)" if ranks > 1 else ""
        what = f"batch.micro_batch_size {micro:,} does not divide {share}{why}{groups}:"
        raise JinguError(what, fix=f"take {_sizes(below, above)}, or auto.")
    return BatchPlan(rows, micro, rows // micro, updates * size * batch.sequence_length, updates)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _sizes(*sizes: int) -> str:
    return join_words([f"{size:,}" for size in sizes if size])
