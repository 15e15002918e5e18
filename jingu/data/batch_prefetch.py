"""Prefetching of batches on a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from jingu.data.batch import Batch, map_tensors
from jingu.runtime.device import make_worker_threads


class BatchPrefetcher:
    """Prepares the micro-batches of the next step while the current one trains.

    Batches depend only on the arguments of `batch`. One thread is enough, since reading and copying release the GIL. At
    most the rows of one step of this rank are in memory.
    """

    def __init__(self, make_batch: Callable[[int, int, int], Batch], device_type: str = "cpu") -> None:
        """Prefetch what `make_batch(step, first, count)` returns, into pinned memory if a device copies from it."""
        self._make_batch = make_batch
        self._pin_memory = device_type not in ("cpu", "mps")
        self._thread = make_worker_threads(1, "jingu-loader")
        self._futures: dict[tuple[int, int, int], Future[Batch]] = {}

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Return rows [first, first + count) of a step, and start to prepare those of the next step."""
        # Drop rows of other steps: after a rollback they are not requested any more.
        self._futures = {key: future for key, future in self._futures.items() if key[0] in (step, step + 1)}
        future = self._futures.pop((step, first, count), None) or self._submit(step, first, count)
        batch = future.result()
        self._futures[step + 1, first, count] = self._submit(step + 1, first, count)
        return batch

    def _submit(self, step: int, first: int, count: int) -> Future[Batch]:
        return self._thread.submit(self._prepare, step, first, count)

    def _prepare(self, step: int, first: int, count: int) -> Batch:
        batch = self._make_batch(step, first, count)
        if self._pin_memory:
            batch = map_tensors(batch, lambda tensor: tensor.pin_memory())
        return batch
