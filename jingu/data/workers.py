"""Tasks done by several processes: of this machine, or of a Ray cluster."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any, Literal, TypeVar

from jingu.errors import JinguError
from jingu.text.storage import package

Task = TypeVar("Task")
Result = TypeVar("Result")
Executor = Literal["processes", "ray"]


def spread(
    job: Callable[[Task], Result], tasks: Sequence[Task], workers: int, executor: Executor = "processes"
) -> Generator[Result, None, None]:
    """Results, which should be small, in the order of the tasks; by so many processes (1: this one), or by Ray.

    Raises JinguError where a process was killed or Ray is missing, and what a task raised.
    """
    if executor == "ray":
        yield from _on_ray(job, tasks)
    elif workers == 1:
        yield from map(job, tasks)
    else:
        yield from _in_processes(job, tasks, workers)


def _in_processes(job: Callable[[Task], Result], tasks: Sequence[Task], workers: int) -> Generator[Result, None, None]:
    # spawn: a forked child would inherit the threads of the tokenizer and of torch.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_follow_parent)
    try:
        yield from pool.map(job, tasks)
    except BrokenProcessPool as error:
        raise JinguError(
            "a process of its own was killed, most likely because memory ran out.",
            where="data.workers",
            fix="Set it to a smaller number.",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and end when the parent ends, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _on_ray(job: Callable[[Task], Result], tasks: Sequence[Task]) -> Generator[Result, None, None]:
    """The cluster is the one that RAY_ADDRESS names, or else one on this machine that is started, and ends with this.

    Its machines must see the files that the tasks read and write.
    """
    ray: Any = package("ray", "building on a cluster", "--executor ray")
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    waiting: list[Any] = []
    try:
        remote, held = ray.remote(_done), ray.put(job)
        waiting += [remote.remote(held, task) for task in tasks]
        while waiting:
            yield ray.get(waiting[0])
            del waiting[0]
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, JinguError):
            raise error.cause from None
        raise
    finally:
        for left in waiting:
            ray.cancel(left)
        if started:
            ray.shutdown()


def _done(job: Callable[[Task], Result], task: Task) -> Result:
    """A task: the job is one object that all share."""
    return job(task)
