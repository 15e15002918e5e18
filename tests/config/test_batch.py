"""Batch arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.config.batch_plan import MAX_AUTO_TOKENS, BatchPlan, plan_batch
from jingu.config.sections.train import BatchSettings
from jingu.errors import JinguError


@pytest.mark.parametrize(
    ("settings", "ranks", "plan"),
    [
        (BatchSettings(), 1, BatchPlan(32, 16, 2, 16384)),
        (BatchSettings(), 2, BatchPlan(16, 16, 1, 16384)),
        (BatchSettings(global_batch_size=24, micro_batch_size=3), 4, BatchPlan(6, 3, 2, 12288)),
        (BatchSettings(global_batch_size=21, sequence_length=1000), 1, BatchPlan(21, 7, 3, 21000)),
        (BatchSettings(global_batch_size=17, sequence_length=1000), 1, BatchPlan(17, 1, 17, 17000)),
        (BatchSettings(global_batch_size=3, sequence_length=2**20), 3, BatchPlan(1, 1, 1, 3 * 2**20)),
        (BatchSettings(global_batch_size=1, sequence_length=1), 1, BatchPlan(1, 1, 1, 1)),
    ],
)
def test_the_batch_is_divided(settings: BatchSettings, ranks: int, plan: BatchPlan) -> None:
    assert plan_batch(settings, ranks) == plan


@given(length=st.integers(1, 20_000), rows=st.integers(1, 400), ranks=st.integers(1, 9))
def test_an_automatic_micro_batch_is_the_largest_that_fits(length: int, rows: int, ranks: int) -> None:
    plan = plan_batch(BatchSettings(sequence_length=length, global_batch_size=rows * ranks), ranks)
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and n * length <= MAX_AUTO_TOKENS]
    assert plan.micro_batch_size == max(fitting, default=1)
    assert plan.micro_batch_size * plan.accumulation * ranks * length == plan.tokens_per_step


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        (
            BatchSettings(global_batch_size=30),
            4,
            "batch.global_batch_size 30 cannot be divided over 4 ranks: take 28 or 32.",
        ),
        (BatchSettings(global_batch_size=2), 4, "batch.global_batch_size 2 cannot be divided over 4 ranks: take 4."),
        (
            BatchSettings(global_batch_size=1_000_001),
            2,
            "batch.global_batch_size 1,000,001 cannot be divided over 2 ranks: take 1,000,000 or 1,000,002.",
        ),
        (
            BatchSettings(global_batch_size=32, micro_batch_size=3),
            2,
            "batch.micro_batch_size 3 does not divide the 16 sequences of a rank (batch.global_batch_size 32 over 2 "
            "ranks): "
            "take 2 or 4, or auto.",
        ),
        (
            BatchSettings(global_batch_size=30, micro_batch_size=8),
            1,
            "batch.micro_batch_size 8 does not divide batch.global_batch_size 30: take 6 or 10, or auto.",
        ),
        (
            BatchSettings(global_batch_size=32, micro_batch_size=64),
            1,
            "batch.micro_batch_size 64 does not divide batch.global_batch_size 32: take 32, or auto.",
        ),
    ],
)
def test_what_cannot_be_divided_is_told_with_numbers_that_can(settings: BatchSettings, ranks: int, words: str) -> None:
    with pytest.raises(JinguError) as raised:
        plan_batch(settings, ranks)
    assert str(raised.value) == words
