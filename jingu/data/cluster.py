"""Tasks of a build on a Ray cluster. Its machines must see the corpus, the tokenizer and the data set's folder."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

from jingu.errors import JinguError
from jingu.text.storage import package

Task = TypeVar("Task")
Waiting = TypeVar("Waiting")
Result = TypeVar("Result")
AHEAD = 2
"""Tasks under way or waiting, for each processor of the cluster."""


def on_ray(job: Callable[[Task], Result], tasks: Sequence[Task]) -> Generator[Result, None, None]:
    """Results in the order of the tasks; only a few are under way or waiting at a time.

    The cluster is the one that RAY_ADDRESS names, or else one on this machine that is started, and ends with this.
    Raises JinguError where Ray is missing, and what a task raised.
    """
    ray: Any = package("ray", "building on a cluster", "--executor ray")
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    try:
        remote, held = ray.remote(job_of), ray.put(job)
        most = max(AHEAD * int(ray.cluster_resources().get("CPU", 1)), 1)
        yield from in_order(lambda task: remote.remote(held, task), ray.get, tasks, most)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, JinguError):
            raise error.cause from None
        raise
    finally:
        if started:
            ray.shutdown()


def in_order(
    submit: Callable[[Task], Waiting], result: Callable[[Waiting], Result], tasks: Iterable[Task], most: int
) -> Generator[Result, None, None]:
    """Results in the order of the tasks, of which so many are under way or waiting at a time."""
    waiting: deque[Waiting] = deque()
    for task in tasks:
        waiting.append(submit(task))
        if len(waiting) >= most:
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())


def job_of(job: Callable[[Task], Result], task: Task) -> Result:
    """A task: the job is one object that all share."""
    return job(task)
