"""Stops, layouts and numbers of workers do not change the samples of a run, and the sample hash proves it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jingu.data.dataset import open_dataset
from jingu.data.mixture import MixtureDataset, plan_mixture
from jingu.data.row_sources import WindowDataset
from jingu.data.sample_hash import SampleHash, check_sample_hash, extend_sample_hash
from jingu.errors import JinguError

SIZE = 6


@pytest.fixture(scope="module")
def source(built_folder: Path) -> MixtureDataset:
    """Two sources, one of them read in blocks, with stages and a cap; several epochs of each in 2,000 steps."""
    train, held_out = (open_dataset(built_folder, split) for split in ("train", "validation"))
    windows = WindowDataset(train, 16, 3), WindowDataset(held_out, 16, 4, 8, 3)
    stages = [(0, [1.0, 0.0]), (SIZE * 300 + 5, [3.0, 2.0]), (SIZE * 900, [1.0, 1.0])]
    return MixtureDataset(windows, plan_mixture(stages, [None, 20 * len(windows[1])]), SIZE)


def test_a_thousand_stops_repeat_or_skip_no_sample(source: MixtureDataset) -> None:
    chance = random.Random(4)
    sample_hash, step, stops = SampleHash(), 0, 0
    while stops < 1000:  # in about 1,000 steps
        # A session: on other ranks, with other micro-batches, asked for in another order.
        check_sample_hash(sample_hash, source, "step")
        ranks = chance.choice([1, 2, 3, 6])
        rows = SIZE // ranks
        micro = chance.choice([size for size in range(1, rows + 1) if rows % size == 0])
        for _ in range(chance.randint(0, 2)):
            pieces = {}
            requests = [(rank, first) for rank in range(ranks) for first in range(0, rows, micro)]
            chance.shuffle(requests)
            for rank, first in requests:
                pieces[rank * rows + first] = source.batch(step, rank * rows + first, micro)
            together = torch.cat([pieces[first].tokens for first in sorted(pieces)])
            assert torch.equal(together, source.batch(step, 0, SIZE).tokens)
            step += 1
        sample_hash = extend_sample_hash(sample_hash, source, step)
        if chance.random() < 0.5:  # killed within the next step, which is taken again
            source.batch(step, 0, chance.randint(0, SIZE))
        stops += 1
    assert sample_hash.hash == extend_sample_hash(SampleHash(), source, step).hash
    # What the hash stands for: every sample of every source once, in its source's order.
    used = [0, 0]
    for each in range(step):
        for which, number in zip(*(part.tolist() for part in source.locate(each)[:2]), strict=True):
            assert number == used[which]
            used[which] += 1
    assert used == source.mixture.counts(step * SIZE)
    assert used[0] > 3 * len(source.sources[0]) and used[1] == 20 * len(source.sources[1])


def test_a_sample_hash_of_other_samples_is_refused(source: MixtureDataset) -> None:
    sample_hash = extend_sample_hash(extend_sample_hash(SampleHash(), source, 7), source, 10)
    check_sample_hash(sample_hash, source, "there")
    others = [
        replace(source, global_batch_size=3),
        replace(source, sources=(replace(source.sources[0], seed=9), source.sources[1])),
        replace(source, mixture=plan_mixture([(0, [1.0, 1.0])], [None, None])),
    ]
    for other in others:
        with pytest.raises(JinguError) as caught:
            check_sample_hash(sample_hash, other, "there")
        assert str(caught.value).startswith(
            "there: the samples of steps 8 to 10 are not those that the run was trained on (hash "
            f"{sample_hash.hash[:12]}, now "
        )
    # From its earlier step on only: so checking costs no more than what was added last.
    check_sample_hash(replace(sample_hash, since=10, hash_since=sample_hash.hash), others[0], "there")
