"""A receipt of what a run has been trained on: a running hash of its samples, kept in every checkpoint.

It depends on which tokens each step has read and on nothing else: no rank, no worker, no stop changes it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from jingu.data.batches import BatchSource
from jingu.errors import JinguError


@dataclass(frozen=True)
class Receipt:
    """The hash after `step` steps, and an earlier one, from which the last part can be computed again."""

    step: int = 0
    hash: str = ""
    since: int = 0
    hash_since: str = ""


def extend(receipt: Receipt, source: BatchSource, step: int) -> Receipt:
    """The receipt after `step` steps, from one after as many or fewer.

    A step's hash is that of the hash before it and, row by row, of the source and the place of the first token.
    """
    digest = receipt.hash
    for each in range(receipt.step, step):
        which, _, starts = source.locate(each)
        rows = np.stack([which, starts], axis=1).astype("<i8").tobytes()
        if source.dropped is not None and each in source.dropped:
            rows += source.dropped.digest()
        digest = hashlib.blake2b(bytes.fromhex(digest) + rows, digest_size=16, person=b"jingu receipt").hexdigest()
    return Receipt(step, digest, receipt.step, receipt.hash)


def check_receipt(receipt: Receipt, source: BatchSource, where: object) -> None:
    """JinguError unless the samples since the receipt's earlier step are computed now as they were then."""
    again = extend(Receipt(receipt.since, receipt.hash_since), source, receipt.step)
    if again.hash != receipt.hash:
        raise JinguError(
            f"the samples of steps {receipt.since + 1} to {receipt.step} are not those that the run was trained on "
            f"(receipt {receipt.hash[:12]}, now {again.hash[:12]}): to go on would repeat some and miss others.",
            where=where,
            fix="Put back the data sets, settings and version of jingu of the run, or start a new one (name=...).",
        )
