"""Many ranks for tests: one pool of worker processes that join a fresh gloo group for every call."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.limits import PATIENCE

# What ranks import in any case, and would each import again.
PRELOADED = ("jingu.training.commands", "jingu.parallel.scheduled_stage", "tests.conftest", "torch._dynamo")
PRELOADED += ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed._tools")


class RankError(AssertionError):
    """A call failed on some rank; carries that rank's traceback."""


def fork_context() -> Any:
    """Return where processes start as forks of one process that has imported what ranks need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


class RankPool:
    """Worker processes that live as long as the test session. They start when they are first needed: as forks of one
    process that has imported torch and jingu, with no thread but its first.

    `run(function, 4, ...)` calls `function(rank, world, ...)` on four of them, joined in a gloo group with one
    thread each, and returns the results by rank. The function must be importable (defined in a module).
    """

    def __init__(self, timeout: float = PATIENCE) -> None:
        self._timeout = timeout
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def _start(self, world: int) -> None:
        """Have as many workers as ranks."""
        context, started = fork_context(), len(self._workers)
        for _ in range(started, world):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(there,), daemon=True)
            worker.start()
            there.close()
            self._workers.append((worker, here))
        for rank in range(started, world):  # or the others would wait for these until they time out
            self._receive(rank)

    def run(self, function: Callable[..., Any], world: int, *arguments: Any, **keywords: Any) -> list[Any]:
        """Results of `function(rank, world, *arguments, **keywords)`, by rank.

        Raises:
            RankError: with the traceback of the first rank that failed.
        """
        self._start(world)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a rank may be late
            store = str(Path(folder) / "store")
            for rank in range(world):
                self._workers[rank][1].send((_address(function), rank, world, store, arguments, keywords))
            answers = self._receive_all(world)
        failed = [(rank, text) for rank, (good, text) in sorted(answers.items()) if not good]
        if failed:
            # A rank that fails leaves the others waiting in a collective: the first cause is the shortest story.
            self.close()
            raise RankError("\n".join(f"rank {rank} of {world}:\n{text}" for rank, text in failed))
        return [answers[rank][1] for rank in range(world)]

    def _receive_all(self, world: int) -> dict[int, tuple[bool, Any]]:
        """Answers by rank, in the order in which they come: the others may wait for a rank that has died."""
        answers: dict[int, tuple[bool, Any]] = {}
        ranks = {self._workers[rank][1]: rank for rank in range(world)}
        while ranks:
            ready = wait(list(ranks), self._timeout)
            for pipe in ready or list(ranks):
                rank = ranks.pop(pipe)
                answers[rank] = self._receive(rank) if ready else (False, f"no answer in {self._timeout:.0f} s")
                if not self._workers[rank][0].is_alive():
                    return answers
        return answers

    def _receive(self, rank: int) -> tuple[bool, Any]:
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(self._timeout):
                return pipe.recv()
        except EOFError:
            process.join(self._timeout)
            return False, f"the process died with exit code {process.exitcode}"
        return False, f"no answer in {self._timeout:.0f} s"

    def close(self) -> None:
        """End the workers; the next `run` starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Where a worker finds the function: its module's file (tests are not packages), name and qualified name."""
    module = importlib.import_module(function.__module__)
    return str(Path(str(module.__file__)).resolve()), function.__module__, function.__qualname__


def _find(address: tuple[str, str, str]) -> Callable[..., Any]:
    import importlib.util
    import sys

    file, name, qualified = address
    module = sys.modules.get(name)
    if module is None and name.startswith("jingu"):
        module = importlib.import_module(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Any = module
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from jingu.runtime.ranks import clear_mesh_caches

    torch.set_num_threads(1)
    os.fsync = lambda _: None
    pipe.send((True, "ready"))
    while True:
        try:
            address, rank, world, store, arguments, keywords = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),  # type: ignore[attr-defined]
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=PATIENCE),
            )
            try:
                dist.barrier()  # a rank that is done at once would break off those that still connect
                answer = (True, _find(address)(rank, world, *arguments, **keywords))
            finally:
                dist.destroy_process_group()
                clear_mesh_caches()
                gc.collect()  # models refer to groups in circles, and each one left has threads that never rest
                gc.freeze()  # or the next time looks through all of torch again, for longer than most calls take
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
