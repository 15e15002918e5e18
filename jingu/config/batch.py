"""Batch arithmetic: what follows from the global batch, the micro batch and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from jingu.config.sections.train import BatchSettings
from jingu.errors import JinguError, either

AUTO_TOKENS = 8192
"""Tokens that an automatic micro batch keeps to."""


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is divided: over ranks first, then into micro batches one after another."""

    rows_per_rank: int
    """Sequences of a step that one rank computes."""
    micro_size: int
    """Sequences of one forward pass on one rank."""
    accumulation: int
    """Forward passes of a rank in one step."""
    tokens_per_step: int
    """Tokens of a step, over all ranks."""


def plan_batch(batch: BatchSettings, ranks: int, pipeline: int = 1) -> BatchPlan:
    """Divide the global batch over data-parallel ranks, and each share into micro batches.

    Args:
        pipeline: ranks that micro-batches pass one after another; an automatic size then leaves four of them for each
            of these, or as many as there are sequences.

    Raises JinguError, with the nearest sizes that work, where one does not divide the other.
    """
    size = batch.global_size
    if size % ranks:
        below, above = size - size % ranks, size - size % ranks + ranks
        raise JinguError(
            f"batch.global_size {size:,} cannot be divided over {ranks:,} ranks:",
            fix=f"take {_sizes(below, above)}.",
        )
    rows = size // ranks
    least = min(rows, 4 * pipeline) if pipeline > 1 else 1
    micro = _auto(rows, batch.sequence_length, least) if batch.micro_size == "auto" else batch.micro_size
    if rows % micro:
        below = max(n for n in _divisors(rows) if n < micro)
        above = min((n for n in _divisors(rows) if n > micro), default=0)
        share = f"the {rows:,} sequences of a rank" if ranks > 1 else f"batch.global_size {rows:,}"
        why = f" (batch.global_size {size:,} over {ranks:,} ranks)" if ranks > 1 else ""
        raise JinguError(
            f"batch.micro_size {micro:,} does not divide {share}{why}:", fix=f"take {_sizes(below, above)}, or auto."
        )
    return BatchPlan(rows, micro, rows // micro, size * batch.sequence_length)


def _auto(rows: int, sequence_length: int, least: int) -> int:
    fitting = [n for n in _divisors(rows) if n * sequence_length <= AUTO_TOKENS and rows // n >= least]
    return max(fitting, default=1)


def _divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _sizes(*sizes: int) -> str:
    return either([f"{size:,}" for size in sizes if size])
