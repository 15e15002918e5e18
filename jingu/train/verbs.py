"""`jingu train`: from a configuration to a trained run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from jingu.config.batch import plan_batch
from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.runtime.log import close_log, open_log
from jingu.runtime.ranks import Ranks, all_agree, joined, start_local_ranks, under_launcher
from jingu.runtime.signals import SharedStop, listening
from jingu.train.run import open_run, write_run
from jingu.train.session import train_run


def train(config: RunConfig, processes: int | None = None) -> int:
    """Train the run, on `processes` local ranks or on the ranks that a launcher started.

    Returns:
        The exit code: 0 when the run is complete, 130 where it was asked to stop and saved.

    Raises:
        JinguError: the configuration, the data or the run's folder do not allow the run to start.
    """
    if processes is not None and processes > 1 and not under_launcher():
        return _start_ranks(config, processes)
    threads = None if config.device.threads == "auto" else config.device.threads
    with joined(config.device.type, threads) as ranks, listening() as request:
        run, plan = open_run(config), plan_batch(config.batch, ranks.world)
        _first_rank(ranks, lambda: write_run(run))
        handlers = open_log(run.folder / "log", ranks)
        try:
            complete = train_run(run, plan, ranks, SharedStop(request, ranks.world))
        finally:
            close_log(handlers)
    return 0 if complete else 130


def _start_ranks(config: RunConfig, processes: int) -> int:
    """Check all that can be checked once, here, before any rank starts; then start them."""
    plan_batch(config.batch, processes)
    open_run(config)
    with tempfile.TemporaryDirectory(prefix="jingu-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_yaml(config), encoding="utf-8")
        return start_local_ranks(processes, ["train", str(file)])


def _first_rank(ranks: Ranks, action: Callable[[], None]) -> None:
    """Let the first rank act; where it fails, all ranks leave, and only it says why."""
    error: Exception | None = None
    if ranks.is_first:
        try:
            action()
        except Exception as raised:
            error = raised
    if not all_agree(error is None):
        raise error or SystemExit(2)
