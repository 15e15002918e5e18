"""Parallel execution of tasks by processes of this machine, or on a Ray cluster."""

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
from jingu.text.corpus_file import import_optional

Task = TypeVar("Task")
Result = TypeVar("Result")
Executor = Literal["processes", "ray"]


def map_tasks(
    function: Callable[[Task], Result], tasks: Sequence[Task], workers: int, executor: Executor = "processes"
) -> Generator[Result, None, None]:
    """Yield the result of each task, in the order of the tasks. Results should be small.

    Args:
        workers: number of processes on this machine; with 1, tasks run in this process.
        executor: Ray uses as many workers as its cluster has.

    Raises:
        JinguError: a worker process was killed, or Ray is missing.
        Exception: the exception of a task.
    """
    if executor == "ray":
        yield from _map_on_ray(function, tasks)
    elif workers == 1:
        yield from map(function, tasks)
    else:
        yield from _map_in_processes(function, tasks, workers)


def _map_in_processes(
    function: Callable[[Task], Result], tasks: Sequence[Task], workers: int
) -> Generator[Result, None, None]:
    # spawn, because a forked process would inherit the threads of the tokenizer and of torch.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_follow_parent)
    try:
        yield from pool.map(function, tasks)
    except BrokenProcessPool as error:
        what = "a worker process was killed, most likely because memory ran out."
        raise JinguError(what, where="data.num_workers", fix="Set it to a smaller number.") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """Initialize a worker: ignore Ctrl-C, which the parent handles, and exit when the parent does, even if killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _map_on_ray(function: Callable[[Task], Result], tasks: Sequence[Task]) -> Generator[Result, None, None]:
    """Run the tasks on the cluster that RAY_ADDRESS names, or else on one that is started on this machine.

    The cluster's machines must see the files that the tasks read and write. A cluster started here stops at the end.
    """
    ray: Any = import_optional("ray", "building on a cluster", "--executor ray")
    starts_cluster = not ray.is_initialized()
    if starts_cluster:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    pending: list[Any] = []
    try:
        remote = ray.remote(_call)
        # Put the function into the object store once, for all tasks.
        shared_function = ray.put(function)
        pending += [remote.remote(shared_function, task) for task in tasks]
        while pending:
            yield ray.get(pending[0])
            del pending[0]
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, JinguError):
            raise error.cause from None
        raise
    finally:
        for reference in pending:
            ray.cancel(reference)
        if starts_cluster:
            ray.shutdown()


def _call(function: Callable[[Task], Result], task: Task) -> Result:
    return function(task)
