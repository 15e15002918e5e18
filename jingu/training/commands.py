"""`jingu train`: from a configuration to a trained run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Literal, TypeVar

import torch
import xxhash

from jingu.config.batch_plan import BatchPlan
from jingu.config.explain import closest_match
from jingu.config.introspect import all_keys
from jingu.config.load import dump_yaml, load_stored_config
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError, join_words, pluralize
from jingu.formats.run_inputs import RunInputs
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.stages import plan_layout
from jingu.plan.forecast import describe_rejection, layout_settings
from jingu.plan.layouts import describe_layout
from jingu.plan.machine import nominal_machine
from jingu.plan.workload import Workload
from jingu.runtime.collective_stop import CollectiveStop
from jingu.runtime.device import find_device_type
from jingu.runtime.files import PACKAGE_ROOT
from jingu.runtime.gpus import select_gpus
from jingu.runtime.launcher import launch_local_ranks
from jingu.runtime.log import log_info, log_to_folder, log_warning, report_first_failure
from jingu.runtime.ranks import (
    RankInfo,
    all_ranks_agree,
    check_equal_on_all_ranks,
    choose_device,
    count_ranks,
    find_ranks_that_share,
    gather_from_all,
    is_first_process,
    is_launched,
    join_process_group,
)
from jingu.runtime.signals import StopRequest, catch_stop_signals
from jingu.tables import flatten
from jingu.training.checkpointing import library_versions
from jingu.training.plan_commands import PlanRequest, resolve_spec, search_run
from jingu.training.pretraining import PRETRAINING
from jingu.training.run import RESUME_UNCHANGED, ResumeOptions, Run, open_run
from jingu.training.run_folder import lock_run, record_run_inputs, write_run_files
from jingu.training.session import check_start, train_run
from jingu.training.task import TaskFactory, find_task_factory
from jingu.training.trace import Trace
from jingu.watch.activity import watch_rank

T = TypeVar("T")
# Settings that may differ between nodes: paths, and how data is read.
NODE_KEYS = frozenset(
    {
        *("runs_dir", "tokenizer.path", "data.path", "data.local_cache", "data.num_workers", "data.reader"),
        *("device.threads", "parallel.offload.path", "checkpoint.in_memory.folder"),
    }
)


def train(
    config: RunConfig,
    processes: int | None = None,
    trace: Path | None = None,
    devices: str | None = None,
    resume_options: ResumeOptions = RESUME_UNCHANGED,
    weights_only_from: str | None = None,
    auto_layout: bool = False,
) -> int:
    """Train the run, on `processes` local ranks or on the ranks that a launcher started.

    Args:
        processes: number of local ranks to start; None: this process is the only rank, unless a launcher started it.
        trace: folder for fingerprints of every module's output in the first step.
        devices: GPUs or NPUs on which to start ranks, in the syntax of `select_gpus`.
        resume_options: what may differ from earlier starts of the run.
        weights_only_from: overrides `initialize.from`, the model whose weights a new run starts from.
        auto_layout: whether to replace the layout by the fastest one that fits; a run that resumes keeps its stored
            layout.

    Returns:
        The exit code: 0 if the run is complete; 130 if a person stopped it, and 75 if a scheduler did, both with the
        state saved.

    Raises:
        JinguError: the configuration, the data or the run's folder do not allow the run to start or to resume.
    """
    # 1. Check the options, and apply those that change the configuration.
    keys = list(all_keys())
    for key in resume_options.allow:
        if key not in keys:
            match = closest_match(key, keys)
            fix = f"Did you mean {match}?" if match else None
            raise JinguError(f"{key} is not a setting.", where="--allow", fix=fix)
    if weights_only_from is not None:
        initialize = config.initialize.model_copy(update={"from_": weights_only_from})
        config = config.model_copy(update={"initialize": initialize})
    task_factory = find_task_factory(config.task)
    gpus = None
    if devices is not None:
        gpus = _select_gpus(config, devices, processes)
        processes = len(gpus)
    if auto_layout:
        config = choose_layout(config, processes, task_factory.rows_per_group(config))
    # 2. Start local ranks, each of which runs this command again, or train in this process.
    if processes is not None and (processes > 1 or gpus) and not is_launched():
        return _launch_ranks(config, processes, trace, resume_options, gpus, task_factory)
    threads = None if config.device.threads == "auto" else config.device.threads
    with (
        join_process_group(config.device.type, threads) as ranks,
        catch_stop_signals(announce=ranks.is_first) as request,
    ):
        return train_on_rank(config, ranks, request, trace, resume_options, task_factory)


def train_on_rank(
    config: RunConfig,
    ranks: RankInfo,
    request: StopRequest,
    trace: Path | None = None,
    resume_options: ResumeOptions = RESUME_UNCHANGED,
    task_factory: TaskFactory = PRETRAINING,
) -> int:
    """Train the run as one rank of an existing process group, and return the exit code of `train`.

    Args:
        request: request of a signal to stop.
        trace: folder for fingerprints of every module's output in the first step.
    """
    stop = CollectiveStop(request, ranks.world)
    with ExitStack() as stack:
        # After a failure a collective may still be in flight. Leave the process group only after it has ended.
        stack.callback(stop.wait, timedelta(seconds=5))
        stack.enter_context(report_first_failure(ranks))
        # 1. Open the run, after checking that all ranks have the same settings and code, and then the same data.
        if ranks.world > 1:
            check_equal_on_all_ranks(_describe_start(config, resume_options), ranks.host)
        run, plan = open_run_with_plan(config, ranks.world, resume_options, task_factory)
        check_start(run, plan, ranks)
        if ranks.world > 1:
            inputs = {"checksums of the data": run.data_checksums, "tokenizer": run.tokenizer.fingerprint()}
            check_equal_on_all_ranks(inputs, ranks.host)
        # 2. Only the first rank writes the files of the run, and only once its state is loaded: a start that fails
        # leaves the records of earlier starts as they are. Contents are read now, while no timeout runs.

        def lock_and_record() -> RunInputs:
            stack.enter_context(lock_run(run))
            return record_run_inputs(run)

        run_inputs = _call_on_first(ranks, lock_and_record) or RunInputs()
        if config.checkpoint.url is None:
            _check_folder_is_shared(run.folder, ranks)
        # 3. Start the log, the record of this rank's activity for the watchdog, and the trace.
        stack.enter_context(log_to_folder(run.folder / "log", ranks))
        for note in ranks.notes:
            log_info(note)
        for warning in run.warnings:
            log_warning(warning)
        if run.changes:
            log_info(f"Changed since the run was last started: {'; '.join(run.changes)}.")
        activity = stack.enter_context(watch_rank(run.folder / "log", ranks, config.train.hang_timeout))
        tracer = None
        if trace is not None:
            tracer = Trace(trace, ranks.rank, plan.rows_per_rank)
            stack.callback(tracer.write)

        def on_model(model: ParallelModel) -> None:
            model.activity = activity
            activity.set_stage(model.rank)
            if tracer is not None:
                tracer.attach(model)
            _call_on_first(ranks, lambda: write_run_files(run, run_inputs))

        # 4. Train.
        is_complete = train_run(run, plan, ranks, stop, task_factory, on_model)
        return 0 if is_complete else stop.code


def _call_on_first(ranks: RankInfo, function: Callable[[], T]) -> T | None:
    """Call a function on the first rank, and return its result there. All ranks stop if it fails."""
    result: T | None = None
    error: Exception | None = None
    try:
        if ranks.is_first:
            result = function()
    except Exception as caught:
        error = caught
    if not all_ranks_agree(error is None):
        raise error or SystemExit(2)
    return result


def _check_folder_is_shared(folder: Path, ranks: RankInfo) -> None:
    """Raise JinguError on every rank if the nodes do not share the run's folder, to which all ranks write checkpoints.

    Every rank must call it.
    """
    if ranks.world == 1:
        return
    is_shared = find_ranks_that_share(folder)
    if is_shared is None:
        return
    hosts = gather_from_all(ranks.host)
    apart = list(dict.fromkeys(host for host, sees in zip(hosts, is_shared, strict=True) if not sees))
    if apart:
        what = f"the run's folder on {hosts[0]} is not shared with {join_words(apart, 'and')}."
        fix = "Set runs_dir to a folder that all nodes share (NFS, for example), or checkpoint.url to a bucket."
        raise JinguError(what, where=folder, fix=fix)


def _describe_start(config: RunConfig, resume_options: ResumeOptions) -> dict[str, object]:
    """Return what must be equal on all ranks: settings, resume options, code and library versions.

    The code is a hash of all files of jingu.
    """
    settings = flatten(config.model_dump(mode="json"))
    code = xxhash.xxh3_64()
    for file in sorted(PACKAGE_ROOT.rglob("*")):
        if file.suffix in (".py", ".toml", ".json"):
            code.update(file.read_bytes())
    return {
        **{key: value for key, value in settings.items() if key not in NODE_KEYS},
        "resume options": str(resume_options),
        "code of jingu": code.hexdigest(),
        **{f"version of {name}": number for name, number in library_versions().items()},
    }


def open_run_with_plan(
    config: RunConfig,
    world: int,
    resume_options: ResumeOptions = RESUME_UNCHANGED,
    task_factory: TaskFactory = PRETRAINING,
) -> tuple[Run, BatchPlan]:
    """Open the run, and divide its batch over `world` ranks.

    Raises:
        JinguError: ranks, model and batch do not fit together.
    """
    run = open_run(config, resume_options)
    task_factory.check(run)
    _, plan = plan_layout(config, world, run.spec, task_factory.rows_per_group(config))
    return run, plan


def _select_gpus(config: RunConfig, devices: str, processes: int | None) -> list[int]:
    """Return the indices of the GPUs that `--devices` selects. Raise JinguError if other options contradict it."""
    kind = find_device_type(config.device.type)
    gpus = select_gpus(devices, 0 if kind == "cpu" else torch.accelerator.device_count())
    if processes not in (None, len(gpus)):
        raise JinguError(
            f"--devices {devices} starts {pluralize(len(gpus), 'rank')}, one per GPU, but --processes is {processes}.",
            fix="Leave out --processes.",
        )
    if is_launched():
        raise JinguError(
            "--devices applies to ranks that jingu starts, and these were started by torchrun.",
            fix="Set CUDA_VISIBLE_DEVICES, or the variable of your devices, for torchrun.",
        )
    return gpus


def _launch_ranks(
    config: RunConfig,
    processes: int,
    trace: Path | None,
    resume_options: ResumeOptions,
    gpus: list[int] | None,
    task_factory: TaskFactory,
) -> int:
    """Start local ranks, and return the exit code.

    The run is opened here first, so that most errors are reported once and not by every rank.
    """
    open_run_with_plan(config, processes, resume_options, task_factory)
    arguments = ["--trace", str(trace)] if trace else []
    for key in resume_options.allow:
        arguments += ["--allow", key]
    if resume_options.fresh_optimizer:
        arguments.append("--fresh-optimizer")
    # Pass the configuration in an unnamed file, which disappears when the last process closes it.
    with tempfile.TemporaryFile() as file:
        file.write(dump_yaml(config).encode())
        file.flush()
        words = ["train", f"/dev/fd/{file.fileno()}", *arguments]
        return launch_local_ranks(processes, words, gpus=gpus, inherit=[file.fileno()])


# `jingu train --auto-layout`: choose the layout of a run before its ranks start.


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
    config_file = Path(config.runs_dir) / config.name / "config.yaml"
    prefix = ""
    if config_file.exists():
        old = load_stored_config(config_file)
        layout = (old.parallel, old.batch.micro_batch_size, old.train.activation_checkpointing)
        config = _replace_layout(config, *layout)
        try:
            plan_layout(config, ranks, spec, rows_per_group)
        except JinguError as error:
            prefix = f"the stored layout does not suit {pluralize(ranks, 'rank')} ({error.what}); "
        else:
            _announce(f"the layout of {config_file}, because the run has started before.")
            return config
    # 2. Search. The search ignores `rows_per_group`, so each layout is checked once more.
    machine = nominal_machine(choose_device(config.device.type, 0)).with_nodes(local_ranks)
    result = search_run(PlanRequest(config, spec, False, []), machine, ranks)
    plans, rejected = [], [describe_rejection(result, reason) for reason, _ in result.rejections.most_common()]
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
    best, *runners_up = plans
    reason = f"no other fits ({rejected[0]})" if rejected else "there is no other"
    if runners_up:
        second = runners_up[0]
        reason = f"next is {describe_layout(second.work)}, {second.step / best.step:.3g} times its estimated step"
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
