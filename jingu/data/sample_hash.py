"""A running hash of the samples that a run has trained on, stored in every checkpoint.

It depends only on the samples of each step, and not on ranks, workers or restarts. A resumed run therefore detects when
it would repeat or skip samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from jingu.data.mixture import MixtureDataset
from jingu.errors import JinguError


@dataclass(frozen=True)
class SampleHash:
    """The hash after `step` steps, and an earlier one from which the last part can be recomputed."""

    step: int = 0
    hash: str = ""
    since: int = 0
    hash_since: str = ""


def extend_sample_hash(sample_hash: SampleHash, dataset: MixtureDataset, step: int) -> SampleHash:
    """Return the hash after `step` steps, computed from one after the same number of steps or fewer.

    A step hashes the hash before it and then, row by row, the source and what the source reads the row by.
    """
    digest = sample_hash.hash
    for number in range(sample_hash.step, step):
        source_ids, _, locations = dataset.locate(number)
        content = np.stack([source_ids, locations], axis=1).astype("<i8").tobytes()
        if dataset.dropped is not None and number in dataset.dropped:
            content += dataset.dropped.digest()
        # Checkpoints hold this hash: the personalization must never change.
        message = bytes.fromhex(digest) + content
        digest = hashlib.blake2b(message, digest_size=16, person=b"jingu receipt").hexdigest()
    return SampleHash(step, digest, sample_hash.step, sample_hash.hash)


def check_sample_hash(sample_hash: SampleHash, dataset: MixtureDataset, where: object) -> None:
    """Raise JinguError unless the samples since the earlier step of the hash are the same now."""
    actual_hash = extend_sample_hash(SampleHash(sample_hash.since, sample_hash.hash_since), dataset, sample_hash.step)
    if actual_hash.hash != sample_hash.hash:
        raise JinguError(
            f"the samples of steps {sample_hash.since + 1} to {sample_hash.step} are not those that the run was "
            f"trained on (hash {sample_hash.hash[:12]}, now {actual_hash.hash[:12]}). "
            "Resuming would repeat some samples and skip others.",
            where=where,
            fix="Restore the data sets, settings and jingu version of the run, or start a new one (name=...).",
        )
