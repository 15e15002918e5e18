"""`jingu train --auto-layout`: choose the layout of a run before its ranks start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from jingu.config.load import load_stored_config
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError, pluralize
from jingu.parallel.stages import plan_layout
from jingu.plan.forecast import describe_rejection, layout_settings
from jingu.plan.machine import nominal_machine
from jingu.plan.search import describe_layout
from jingu.plan.workload import Workload
from jingu.runtime.ranks import choose_device, count_ranks, is_first_process
from jingu.training.plan_commands import resolve_spec, search_run


def choose_layout(config: RunConfig, processes: int | None, rows_per_group: int = 1) -> RunConfig:
    """Return a run in the fastest layout that fits on this machine, or in the layout with which it has started before.

    The layout is the section `parallel`, `batch.micro_batch_size` and `train.activation_checkpointing`.

    Args:
        processes: number of ranks to start, unless a launcher has started them.
        rows_per_group: number of neighboring rows that must be in one micro-batch (`TaskFactory.rows_per_group`).

    Raises:
        JinguError: no layout fits; the message says why.
    """
    ranks, local_ranks = count_ranks(processes)
    spec, _ = resolve_spec(config)
    # 1. A run that resumes keeps its stored layout, as long as it is possible on this number of ranks.
    stored = Path(config.runs_dir) / config.name / "config.yaml"
    prefix = ""
    if stored.exists():
        old = load_stored_config(stored)
        layout = (old.parallel, old.batch.micro_batch_size, old.train.activation_checkpointing)
        config = _replace_layout(config, *layout)
        try:
            plan_layout(config, ranks, spec, rows_per_group)
        except JinguError as error:
            prefix = f"the stored layout does not suit {pluralize(ranks, 'rank')} ({error.what}); "
        else:
            _announce(f"the layout of {stored}, because the run has started before.")
            return config
    # 2. Search. The search ignores `rows_per_group`, so each layout is checked once more.
    machine = nominal_machine(choose_device(config.device.type, 0)).with_nodes(local_ranks)
    result = search_run(config, spec, machine, ranks)
    plans, rejected = [], [describe_rejection(result, reason) for reason, _ in result.rejected.most_common()]
    for plan in result.best:
        try:
            plan_layout(_apply_work(config, plan.work), ranks, spec, rows_per_group)
            plans.append(plan)
        except JinguError as error:
            rejected.insert(0, f"{describe_layout(plan.work)}: {error.what}")
    if not plans:
        raise JinguError(
            f"no layout of {pluralize(ranks, 'rank')} fits on this machine. {'; '.join(rejected)}",
            where="--auto-layout",
            fix="Change the batch, the model or the number of ranks; `jingu plan FILE --search` compares machines.",
        )
    # 3. Announce the layout that was chosen, and why it is better than the next best one.
    best, *others = plans
    reason = f"no other fits ({rejected[0]})" if rejected else "there is no other"
    if others:
        reason = f"next is {describe_layout(others[0].work)}, {others[0].step / best.step:.3g} times its estimated step"
    _announce(f"{prefix}{describe_layout(best.work)} ({layout_settings(best.work)}); {reason}.")
    return _apply_work(config, best.work)


def _replace_layout(
    config: RunConfig,
    parallel: ParallelSettings,
    micro_batch: int | Literal["auto"],
    checkpointing: ActivationCheckpointingSettings,
) -> RunConfig:
    """Return the settings of a run in another layout."""
    batch = config.batch.model_copy(update={"micro_batch_size": micro_batch})
    train = config.train.model_copy(update={"activation_checkpointing": checkpointing})
    return config.model_copy(update={"parallel": parallel, "batch": batch, "train": train})


def _apply_work(config: RunConfig, work: Workload) -> RunConfig:
    """Return the settings of a run in the layout of a workload."""
    return _replace_layout(config, work.parallel, work.micro_batch, work.checkpointing)


def _announce(text: str) -> None:
    """Print the layout to stderr, in the first process only."""
    if is_first_process():
        print(f"Layout: {text}", file=sys.stderr, flush=True)
