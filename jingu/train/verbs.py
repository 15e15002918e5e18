"""`jingu train`: from a configuration to a trained run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch

from jingu.config.batch import BatchPlan
from jingu.config.explain import nearest
from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.config.tree import all_keys
from jingu.errors import JinguError, counted
from jingu.parallel.stages import plan_layout
from jingu.runtime.devices import choose_cards
from jingu.runtime.local import start_local_ranks
from jingu.runtime.log import logging_to, one_voice, say
from jingu.runtime.ranks import Ranks, all_agree, joined, under_launcher
from jingu.runtime.signals import SharedStop, StopRequest, listening
from jingu.train.run import Going, Run, held, open_run, write_run
from jingu.train.session import train_run
from jingu.train.trace import Trace


def train(
    config: RunConfig,
    processes: int | None = None,
    trace: Path | None = None,
    devices: str | None = None,
    allow: Sequence[str] | None = None,
    fresh_optimizer: bool = False,
    weights_only_from: str | None = None,
) -> int:
    """Train the run, on `processes` local ranks or on the ranks that a launcher started.

    Args:
        trace: folder for fingerprints of what every module gives in the first step.
        devices: CUDA cards to start ranks on, as `choose_cards` reads them.
        allow: keys and sections of the configuration that may have changed since the run began.
        fresh_optimizer: go on from the run's checkpoint with its weights and a new optimizer.
        weights_only_from: in place of `initialize.from`, the model whose weights a new run begins with.

    Returns:
        The exit code: 0 when the run is complete, 130 where a person asked it to stop, 75 where a
        scheduler did, and it saved.

    Raises:
        JinguError: the configuration, the data or the run's folder do not allow the run to start or to go on.
    """
    if weights_only_from is not None:
        begins = config.initialize.model_copy(update={"from_": weights_only_from})
        config = config.model_copy(update={"initialize": begins})
    for key in allow or ():
        if key not in all_keys():
            near = nearest(key, list(all_keys()))
            raise JinguError(f"{key} is not a setting.", where="--allow", fix=f"Did you mean {near}?" if near else None)
    going = Going(tuple(allow or ()), fresh_optimizer)
    cards = None if devices is None else _cards(config, devices, processes)
    processes = len(cards) if cards else processes
    if processes is not None and (processes > 1 or cards) and not under_launcher():
        return _start_ranks(config, processes, trace, going, cards)
    threads = None if config.device.threads == "auto" else config.device.threads
    with joined(config.device.type, threads) as ranks, listening(tell=ranks.is_first) as request:
        return train_joined(config, ranks, request, trace, going)


def train_joined(
    config: RunConfig, ranks: Ranks, request: StopRequest, trace: Path | None = None, going: Going | None = None
) -> int:
    """`train`, as one of the ranks of a group that exists."""
    stop = SharedStop(request, ranks.world)
    with ExitStack() as stack:
        # After a failure a question may still be on its way, and the group must not be left before it.
        stack.callback(stop.settle, timedelta(seconds=5))
        stack.enter_context(one_voice(ranks))
        run, plan = open_with_plan(config, ranks.world, going)
        error: Exception | None = None
        try:
            if ranks.is_first:
                stack.enter_context(held(run))
                write_run(run)
        except Exception as raised:
            error = raised
        if not all_agree(error is None):
            raise error or SystemExit(2)
        stack.enter_context(logging_to(run.folder / "log", ranks))
        for note in ranks.notes:
            say(note)
        if run.changes:
            say(f"Changed since the run was last started: {'; '.join(run.changes)}.")
        watch = None
        if trace is not None:
            listener = Trace(trace, ranks.rank, plan.rows_per_rank)
            stack.callback(listener.write)
            watch = listener.attach
        return 0 if train_run(run, plan, ranks, stop, watch) else stop.code


def open_with_plan(config: RunConfig, ranks: int, going: Going | None = None) -> tuple[Run, BatchPlan]:
    """The run and the division of its batch. Raises JinguError where ranks, model and batch do not fit together."""
    run = open_run(config, going)
    return run, plan_layout(config, ranks, run.spec)[1]


def _cards(config: RunConfig, devices: str, processes: int | None) -> list[int]:
    cards = choose_cards(devices, 0 if config.device.type == "cpu" else torch.cuda.device_count())
    if processes not in (None, len(cards)):
        what = f"--devices {devices} is {counted(len(cards), 'card')}, a rank each, and --processes says {processes}."
        raise JinguError(what, fix="Leave out --processes.")
    if under_launcher():
        raise JinguError(
            "--devices is for ranks that jingu starts, and these are started by torchrun.",
            fix="Set CUDA_VISIBLE_DEVICES for torchrun.",
        )
    return cards


def _start_ranks(config: RunConfig, processes: int, trace: Path | None, going: Going, cards: list[int] | None) -> int:
    """Check all that can be checked once, here, before any rank starts; then start them."""
    open_with_plan(config, processes, going)
    options = ["--trace", str(trace)] if trace else []
    options += [word for key in going.allow for word in ("--allow", key)]
    options += ["--fresh-optimizer"] if going.fresh_optimizer else []
    with tempfile.TemporaryDirectory(prefix="jingu-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_yaml(config), encoding="utf-8")
        return start_local_ranks(processes, ["train", str(file), *options], cards=cards)
