"""Compute the batch per rank and the gradient accumulation steps from global batch, micro-batch and ranks."""

from __future__ import annotations

from dataclasses import dataclass

from jingu.config.sections.train import BatchSettings
from jingu.errors import JinguError, join_words

MAX_AUTO_TOKENS = 8192
"""Maximum tokens per micro-batch if its size is auto."""


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch of an optimizer step is divided over data-parallel ranks and micro-batches."""

    rows_per_rank: int
    """Sequences per optimizer step on one rank."""
    micro_batch_size: int
    """Sequences in a forward pass of one rank."""
    accumulation: int
    """Gradient accumulation steps: micro-batches per optimizer step on one rank."""
    tokens_per_step: int
    """Tokens per step, over all ranks and all updates of the step."""
    updates: int = 1
    """Optimizer steps per rollout, each with a global batch of its answers; 1 for tasks without rollouts."""
    lr_scale: float = 1.0
    """Factor on the learning rate of every trained model; below 1 only after a rollback (`train.on_divergence`)."""


def plan_batch(
    batch: BatchSettings, ranks: int, pipeline: int = 1, rows_per_group: int = 1, updates: int = 1
) -> BatchPlan:
    """Divide the global batch over data-parallel ranks, and each share into micro-batches.

    Args:
        ranks: number of data-parallel ranks.
        pipeline: number of pipeline ranks. With several, an automatic micro-batch size leaves at least four
            micro-batches per pipeline rank, or one per sequence.
        rows_per_group: number of neighboring sequences that must be in the same micro-batch.
        updates: optimizer steps per rollout.

    Raises:
        JinguError: a size does not divide the other. The message names the nearest sizes that do.
    """
    # 1. Divide the global batch over the ranks, in whole groups.
    size = batch.global_batch_size
    unit = ranks * rows_per_group
    groups = f" in groups of {rows_per_group}" if rows_per_group > 1 else ""
    if size % unit:
        below, above = size - size % unit, size - size % unit + unit
        what = f"batch.global_batch_size {size:,} cannot be divided over {ranks:,} ranks{groups}:"
        raise JinguError(what, fix=f"take {_sizes(below, above)}.")
    # 2. Choose or check the micro-batch size: a divisor of the rows of a rank, in whole groups.
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
