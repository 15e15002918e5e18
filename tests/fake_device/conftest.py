"""Processes with a fake device, as no other test may see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def device_ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
