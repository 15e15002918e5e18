"""`jingu config show` and `jingu plan`: layout, memory, time and cost of a run, computed before it starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from jingu.config import deepspeed
from jingu.config.batch_plan import BatchPlan
from jingu.config.load import config_from_tree, dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.schedules import WsdSettings, resolve_steps
from jingu.config.sections.tasks import PretrainingSettings
from jingu.config.sections.train import PrecisionSettings
from jingu.config.sections.tune import AdapterBase, FullSettings
from jingu.errors import JinguError, pluralize
from jingu.formatting import format_bytes, format_rounded, memory_unit, print_table
from jingu.model.count import count_parameters, flops_per_token
from jingu.model.parameter_table import parameter_sizes
from jingu.model.resolve import find_preset, spec_from_settings
from jingu.model.spec import ModelSpec
from jingu.parallel.mesh import AXES, AxisSizes
from jingu.parallel.stages import plan_layout, split_blocks
from jingu.plan.forecast import (
    Forecast,
    estimate_memory,
    forecast,
    gpu_software,
    print_clusters,
    print_forecast,
    print_search,
    print_serving,
    require_memory,
    run_software,
    run_workload,
)
from jingu.plan.machine import Machine, find_machine
from jingu.plan.memory import fullest_stage
from jingu.plan.search import SearchResult, search_layouts
from jingu.plan.serving import SERVED_BYTES, plan_serving, served_form
from jingu.plan.software import Software, find_software
from jingu.plan.workload import Workload, num_parameters
from jingu.runtime.hub import CONFIG_FILES, is_available, local_path, parse_name
from jingu.training.plan_task import add_task
from jingu.training.schedule import check_schedule

if TYPE_CHECKING:
    from jingu.parallel.layout import Precision


def show_config(config: RunConfig, processes: int | None = None) -> None:
    """Print all settings of a run as YAML, followed by comments with the values that are computed from them.

    Args:
        processes: number of ranks; None: one.
    """
    world = processes or 1
    rows = derive_plan(config, world)
    width = max(len(name) for name, _ in rows)
    print(dump_yaml(config))
    print(f"# What follows, on {pluralize(world, 'rank')}:")
    for name, text in rows:
        print(f"#   {name:<{width}}  {text}")


def derive_plan(config: RunConfig, world: int) -> list[tuple[str, str]]:
    """Return the values that follow from the settings of a run, such as tokens per step, as pairs of name and text.

    Args:
        world: number of ranks.

    Raises:
        JinguError: ranks, model or batch cannot be divided.
    """
    batch = config.batch
    steps = config.train.steps
    check_schedule(config)
    spec, missing = resolve_spec(config)
    sizes, plan = plan_layout(config, world, spec)
    parameters = num_parameters(spec)
    model = f"that of {missing}" if missing else f"{spec.family}, {format_rounded(parameters)} parameters"
    experts = f", {sizes.expert} expert" if sizes.expert > 1 else ""
    rows = [
        ("model", model),
        ("layout", f"{world:,} = {sizes} (ZeRO {config.parallel.zero_stage}{experts})"),
        ("tokens per step", f"{plan.tokens_per_step:,} = {batch.global_batch_size:,} × {batch.sequence_length:,}"),
        ("tokens of the run", f"{plan.tokens_per_step * steps:,} = {steps:,} steps × {plan.tokens_per_step:,}"),
        ("sequences per rank", f"{plan.rows_per_rank:,} = {batch.global_batch_size:,} / {sizes.data:,}"),
        (
            "micro-batches per step",
            f"{plan.accumulation:,} = {plan.rows_per_rank:,} / {plan.micro_batch_size:,} (batch.micro_batch_size)",
        ),
        ("tokens per forward pass", f"{plan.micro_batch_size * batch.sequence_length:,}"),
        ("warm-up", _format_steps(config.schedule.warmup, steps)),
    ]
    if sizes.pipeline > 1:
        stages = split_blocks(config.parallel, sizes.pipeline, spec)
        blocks = ", ".join(str(len(stage)) for stage in stages)
        rows.insert(2, ("stages", f"{len(stages)} of {blocks} blocks ({config.parallel.pipeline_schedule})"))
    if isinstance(config.schedule, WsdSettings):
        rows.append(("decay", _format_steps(config.schedule.decay, steps)))
    memory = f"unknown until {missing} exists" if missing else _format_memory(config, spec, sizes, plan)
    return [*rows, ("memory per rank", memory)]


def resolve_spec(config: RunConfig) -> tuple[ModelSpec, str | None]:
    """Return the spec of a run; and None, or the path of the initial model or tokenizer that does not exist yet.

    Without them, and without a preset, the spec is the one that the settings alone describe.
    """
    initial_model = config.initialize.from_
    tokenizer = Path(config.tokenizer.path)
    vocabulary, length = config.tokenizer.vocab_size, config.batch.sequence_length
    # 1. A model on a hub: its config says all that a plan needs.
    if initial_model is not None and not Path(initial_model).exists() and parse_name(initial_model) is not None:
        from jingu.formats.huggingface import spec_from_config

        defaults = spec_from_config(local_path(initial_model, CONFIG_FILES) / "config.json")
        spec = spec_from_settings(config.model, defaults.vocab_size, config.document_length, defaults)
        return _add_tuning(spec, config), None
    # 2. Random weights, or a model that exists here.
    if tokenizer.exists():
        from jingu.text.tokenizer import Tokenizer

        if initial_model is None:
            vocabulary, length = Tokenizer.load(tokenizer).vocab_size, config.document_length
        elif Path(initial_model).exists():
            from jingu.training.run_spec import build_run_spec

            spec = build_run_spec(config, Path(config.runs_dir) / config.name, Tokenizer.load(tokenizer))
            return _add_tuning(spec, config), None
    # 3. What does not exist yet: the settings describe the model.
    spec = spec_from_settings(config.model, vocabulary, length)
    if initial_model is None or config.model.preset is not None:
        return _add_tuning(spec, config), None
    return _add_tuning(spec, config), str(tokenizer) if Path(initial_model).exists() else initial_model


def _add_tuning(spec: ModelSpec, config: RunConfig) -> ModelSpec:
    """Return the spec with the heads of `task` and the adapters or frozen parameters of `tune`."""
    if isinstance(config.task, PretrainingSettings) and config.tune == FullSettings() and not spec.score_head:
        return spec
    # Imported late, because it imports all of training, which takes longer than a plan.
    from jingu.training.run_spec import apply_tuning

    return apply_tuning(spec, config)


def _format_memory(config: RunConfig, spec: ModelSpec, sizes: AxisSizes, plan: BatchPlan) -> str:
    """Return the memory of the fullest rank, in total and by part, as text."""
    from jingu.runtime.ranks import choose_device
    from jingu.training.precision import choose_precision

    precision = choose_precision(config.precision, choose_device(config.device.type, 0))
    memory = estimate_memory(config, spec, sizes, plan, precision)
    unit, unit_name = memory_unit(memory.total)
    parts = " + ".join(f"{size / unit:,.1f} {part}" for part, size in memory.device.items())
    text = f"{memory.total / unit:,.1f} {unit_name} = {parts}"
    if memory.host:
        place = {"host": "in main memory", "disk": "on disk"}[config.parallel.offload.type]
        text += f"; {sum(memory.host.values()) / unit:,.1f} {unit_name} {place}"
    return text


def _format_steps(length: int | float, steps: int) -> str:
    """Return a number of steps as text; for a share of the run (a float), with its computation."""
    text = pluralize(resolve_steps(length, steps), "step")
    return text if isinstance(length, int) else f"{text} = {length} × {steps:,}"


# jingu plan


# Most ranks of a pipeline that `--exact` replays all.
MAX_REPLAYS = 4
# Numbers of nodes that `--gpus-needed` tries.
NODES = [2**power for power in range(8)]


@dataclass(frozen=True)
class PlanRequest:
    """The run that `jingu plan` plans.

    Attributes:
        has_layout: whether the settings name a layout; if not, the best one is searched for.
        assumptions: sentences about what the plan assumes of the run.
        software: the training system, as `PlanQuery` names it.
    """

    config: RunConfig
    spec: ModelSpec
    has_layout: bool
    assumptions: list[str]
    software: str = ""

    def execution(self, machine: Machine, ranks: int) -> Software:
        """Return how the run executes a step on a machine, such as the bytes of its dtypes."""
        config = self.config
        if machine.is_shared:
            # Blocks that are not compiled need more memory, and not every CPU has a compiler.
            base = run_software(_precision(config, machine), is_compiled=config.train.compile is True)
        else:
            # The same estimate of the time as in training: half of the peak.
            length = config.batch.sequence_length
            flops = flops_per_token(self.spec, parameter_sizes(self.spec), length) * config.batch.global_batch_size
            seconds = config.train.steps * flops * length / (0.5 * machine.matmul_flops * ranks)
            base = gpu_software(config.precision, is_compiled=config.train.uses_compiler(seconds))
        return find_software(self.software, base)


@dataclass(frozen=True)
class PlanQuery:
    """The arguments of `jingu plan`.

    Attributes:
        target: the configuration file of a run, a preset, a Hugging Face config (or its folder), or a DeepSpeed
            configuration.
        overrides: settings that override those of the target, as on the command line.
        on: the machine: a name of the library, a YAML file, or `here`.
        gpus: GPUs per node; None: as many as the machine has.
        mode: `search` compares all layouts; `clusters` tries several numbers of nodes; `exact` replays a step of the
            fullest rank; `serve` plans generation instead of training; `fit` asks what the GPUs can do. A number is
            the same as `clusters`, and also the days within which the run must end. None plans the layout of the
            settings; for a model without settings, the best layout.
        price: price per GPU-hour; None: unknown.
        software: the training system that executes the run, or changes of jingu's settings (`find_software`).
    """

    target: str
    overrides: Sequence[str]
    on: str = "here"
    nodes: int = 1
    gpus: int | None = None
    mode: str | float | None = None
    price: float | None = None
    software: str = ""

    def machine(self) -> Machine:
        """Return the machine, with `gpus` GPUs per node."""
        machine = find_machine(self.on)
        return machine.with_nodes(self.gpus or machine.gpus_per_node)


def plan(query: PlanQuery, as_json: bool = False) -> int:
    """Print the plan of a run: memory of the fullest rank, time of a step, cost.

    Args:
        as_json: print JSON instead of tables.

    Returns:
        The exit code: 0; 1 if no layout fits into memory, or none ends within the days of `mode`.

    Raises:
        JinguError: the target or the machine is unknown, or the layout is impossible.
    """
    # 1. Read the machine and the run.
    machine, mode, price = query.machine(), query.mode, query.price
    ranks = query.nodes * machine.gpus_per_node
    # A served model has no adapters; how its weights are quantized is read below.
    overrides = [word for word in query.overrides if mode != "serve" or not word.startswith("tune.")]
    request = replace(_read_target(query.target, overrides, ranks), software=query.software)
    config, spec = request.config, request.spec
    # 2. Modes that print something other than a forecast of one layout.
    if mode == "serve":
        size = _served_bytes(query, spec)
        serving = plan_serving(spec, machine, query.gpus or 1, config.batch.sequence_length, size)
        if as_json:
            print(json.dumps(asdict(serving)))
        else:
            print_serving(serving, machine)
        return 0 if serving.max_streams else 1
    if mode == "fit":
        return _fit(query, as_json=as_json)
    if mode == "clusters" or isinstance(mode, float):
        return _plan_clusters(request, machine, price, mode if isinstance(mode, float) else None, as_json=as_json)
    if mode == "exact":
        return _replay(request, machine, ranks, as_json=as_json)
    # 3. Forecast the layout of the settings, or search for the best one.
    if mode is None and request.has_layout:
        work = run_workload(config, spec, *plan_layout(config, ranks, spec), request.execution(machine, ranks))
        outcome = forecast_fitting(request, [work], machine, price)
    else:
        result = search_run(request, machine, ranks)
        if not as_json and (mode or not result.best):
            print_search(result, machine)
        if not result.best:
            return 1
        outcome = forecast_fitting(request, [layout.work for layout in result.best], machine, price)
    # 4. Print the forecast. After a search, its table is printed already.
    if as_json:
        print(json.dumps(outcome.to_json()))
    elif mode is None:
        print_forecast(outcome)
    elif outcome.spare < 0:
        print("None of these layouts has room for generation and the models beside the trained one.")
    return 0 if outcome.spare >= 0 else 1


def _served_bytes(query: PlanQuery, spec: ModelSpec) -> float:
    """Return the bytes of a served weight. Raises JinguError for weights in their stored form that cannot be served."""
    form = served_form(query.overrides)
    if form != "stored":
        return SERVED_BYTES[form]
    if (query.gpus or 1) > 1:
        what = f"matrices in their stored form cannot be divided over {query.gpus} GPUs."
        raise JinguError(what, where="--gpus", fix="Set it to 1, or choose another tune.quantization.")
    _check_folder(query.target)
    from jingu.formats.models import open_model
    from jingu.formats.stored_model import served_bytes

    model = open_model(Path(query.target).expanduser())
    return served_bytes(model, SERVED_BYTES["bf16"]) / count_parameters(spec, parameter_sizes(spec)).total


def _check_folder(target: str) -> None:
    """Raise JinguError unless a target is a folder, whose files have matrices in their stored form."""
    if not Path(target).expanduser().is_dir():
        what = f"{target} is no folder with a model's files, whose size matrices in their stored form have."
        fix = "Name a Hugging Face folder, or choose another form, such as int4."
        raise JinguError(what, where="tune.quantization=stored", fix=fix)


def _fit(query: PlanQuery, *, as_json: bool) -> int:
    """Print what fits on a number of GPUs (default: 1) by kind of training; return the exit code."""
    from jingu.training.plan_fit import TUNINGS, fit_streams, fit_training, print_fit

    gpus = query.gpus or 1
    machine = find_machine(query.on).with_nodes(gpus)
    trainings = []
    for tuning, words in TUNINGS.items():
        request = replace(_read_target(query.target, [*query.overrides, *words], gpus), software=query.software)
        software = request.execution(machine, gpus)
        trainings += fit_training(tuning, request.config, request.spec, software, machine, gpus)
    served = fit_streams(_read_target(query.target, query.overrides, gpus).spec, machine, gpus)
    return print_fit(trainings, served, machine, gpus, as_json)


def _axis_of(group: str, sizes: AxisSizes) -> str:
    """Return the mesh axis of a process group; the default group is also that of an axis that spans all ranks."""
    spans_all = (axis for axis, size in zip(AXES, sizes.shape, strict=True) if size == prod(sizes.shape))
    return group.removeprefix("mesh_") if group.startswith("mesh_") else next(spans_all, "all ranks")


def _replay(request: PlanRequest, machine: Machine, ranks: int, *, as_json: bool) -> int:
    """Replay a step of the fullest rank, and print its peak memory and its collectives; return the exit code 0."""
    import torch

    from jingu.runtime.device import total_memory

    precision = _precision(request.config, machine)
    config, spec = request.config, request.spec
    memory = estimate_memory(config, spec, *plan_layout(config, ranks, spec), precision)
    # The replay allocates as much memory as one rank of the run.
    require_memory(memory, total_memory(torch.device("cpu")) / 2, "the replay, which takes half of this machine,")
    # Imported late, because it imports all of training.
    from jingu.training.replay_run import replay_run

    # Stages differ in ways that only a replay knows, so each of a few ranks of the pipeline is tried.
    work = run_workload(config, spec, *plan_layout(config, ranks, spec), request.execution(machine, ranks))
    pipeline = work.sizes.pipeline
    stages = range(pipeline) if pipeline <= MAX_REPLAYS else {0, fullest_stage(work)[0].rank, pipeline - 1}
    records = {stage: replay_run(config, spec, precision, ranks, stage * (ranks // pipeline)) for stage in stages}
    fullest, record = max(records.items(), key=lambda pair: pair[1].peak)
    if as_json:
        calls = [
            {
                "axis": _axis_of(group, work.sizes),
                "operation": name,
                "calls": number,
                "bytes": record.sizes[group, name],
            }
            for (group, name), number in record.calls.items()
        ]
        figures = {"begin": record.begin, "peak": record.peak, "collectives": calls}
        print(json.dumps({"rank": fullest * (ranks // pipeline)} | figures))
        return 0
    if pipeline > 1:
        print(f"the fullest rank is rank {fullest} of the pipeline")
    print(f"tensors before the step: {format_bytes(record.begin)}; at the peak: {format_bytes(record.peak)}\n")
    rows = [
        (_axis_of(group, work.sizes), name.strip("_"), f"{number:,}", format_bytes(record.sizes[group, name]))
        for (group, name), number in sorted(record.calls.items())
    ]
    print_table(("axis", "collective", "calls", "size"), rows, [2, 3])
    return 0


def search_run(request: PlanRequest, machine: Machine, ranks: int) -> SearchResult:
    """Return the best layouts of a run on a number of ranks; the layout of its settings is ignored."""
    config = request.config.model_copy(update={"parallel": ParallelSettings()})
    rows = config.batch.global_batch_size
    one = BatchPlan(rows, 1, rows, rows * config.batch.sequence_length)
    sizes = AxisSizes(1, 1, 1, 1, 1, 1)
    base = run_workload(config, request.spec, sizes, one, request.execution(machine, ranks))
    return search_layouts(base, ranks, machine, rows)


def _plan_clusters(
    request: PlanRequest, machine: Machine, price: float | None, days: float | None, *, as_json: bool
) -> int:
    """Print the best layout on 1, 2, 4, ... nodes.

    Args:
        days: days within which the run must end; None: no limit.

    Returns:
        The exit code: 0; 1 if no layout fits into memory and ends within the days.
    """
    forecasts = _forecast_clusters(request, machine, price, NODES)
    if as_json:
        print(json.dumps([result.to_json() for result in forecasts]))
    elif forecasts:
        print_clusters(forecasts, days)
    else:
        print(f"No layout fits on up to {NODES[-1]} nodes of {machine.name}.")
    return int(not any(days is None or result.days <= days for result in forecasts))


def _forecast_clusters(
    request: PlanRequest, machine: Machine, price: float | None, sizes: Iterable[int]
) -> list[Forecast]:
    """Return the forecast of the best layout for each number of nodes on which the run fits.

    Args:
        sizes: numbers of nodes.
    """
    forecasts = []
    for ranks in (nodes * machine.gpus_per_node for nodes in sizes):
        result = search_run(request, machine, ranks)
        if result.best:
            outcome = forecast_fitting(request, [layout.work for layout in result.best], machine, price)
            forecasts += [outcome] * (outcome.spare >= 0)
    return forecasts


def forecast_fitting(
    request: PlanRequest, works: Sequence[Workload], machine: Machine, price: float | None
) -> Forecast:
    """Return the forecast of the fastest layout that fits into memory; if none fits, that of the first one.

    Unlike the search, it accounts for what the task adds to a step, such as generation and other models.

    Args:
        works: workloads of one update in several layouts, the fastest update first.
    """
    config = request.config
    outcomes = [
        add_task(forecast(work, machine, config.train.steps, price, list(request.assumptions)), config, request.spec)
        for work in works
    ]
    fitting = [outcome for outcome in outcomes if outcome.spare >= 0]
    best = min(fitting, key=lambda outcome: outcome.step, default=outcomes[0])
    if len(works) > 1 and best.phases:
        best.assumptions.append(
            f"of the {len(works)} layouts with the fastest updates, that with the fastest step is the best"
        )
    return best


def forecast_for_page(query: PlanQuery) -> tuple[Forecast, list[Forecast]]:
    """Return the forecast of a run, and those of its best layouts on a quarter to four times as many GPUs.

    Raises:
        JinguError: as for `plan`; or no layout fits into memory.
    """
    machine, nodes, price = query.machine(), query.nodes, query.price
    ranks = nodes * machine.gpus_per_node
    request = replace(_read_target(query.target, query.overrides, ranks), software=query.software)
    config, spec = request.config, request.spec
    if query.mode == "search" or not request.has_layout:
        result = search_run(request, machine, ranks)
        if not result.best:
            fix = "Plan with more --nodes; --search without --html says what each layout lacks."
            raise JinguError(f"no layout fits on {ranks:,} × {machine.name}.", where=query.target, fix=fix)
        works = [layout.work for layout in result.best]
    else:
        works = [run_workload(config, spec, *plan_layout(config, ranks, spec), request.execution(machine, ranks))]
    outcome = forecast_fitting(request, works, machine, price)
    sizes = [nodes // 2**power for power in (2, 1) if nodes % 2**power == 0] + [nodes * 2**power for power in range(3)]
    return outcome, _forecast_clusters(request, machine, price, sizes)


def _precision(config: RunConfig, machine: Machine) -> Precision:
    """Return the precision of a run on a machine. `auto` is bf16 on GPUs, and that of this machine's CPU on CPUs."""
    import torch

    from jingu.training.precision import choose_precision

    settings = config.precision
    if settings.type == "auto" and not machine.is_shared:
        settings = PrecisionSettings(type="bf16", reduce=settings.reduce)
    # Resolved for a CPU, which supports all dtypes: whether the planned GPUs support one cannot be checked here.
    return choose_precision(settings, torch.device("cpu"))


def _read_target(target: str, overrides: Sequence[str], ranks: int) -> PlanRequest:
    """Return the run that the first argument of `jingu plan` names.

    Args:
        ranks: number of ranks, which sizes the default batch and converts the batch of DeepSpeed.
    """
    path = Path(target).expanduser()
    if "tune.type=qlora" in overrides:
        overrides = [word for word in overrides if word != "tune.type=qlora"]
        overrides = ["tune.type=lora", "tune.quantization=nf4", *overrides]
    if path.suffix in (".yaml", ".yml"):
        config = load_config(path, overrides)
        spec, missing = resolve_spec(config)
        assumptions = [f"the model is that of the settings: {missing} does not exist yet"] if missing else []
        if missing is None and not is_available(config.tokenizer.path):
            assumptions.append(f"the tokenizer has {config.tokenizer.vocab_size:,} entries (tokenizer.vocab_size)")
        return PlanRequest(config, spec, True, assumptions)
    path = local_path(path, CONFIG_FILES)
    if path.is_dir() or path.name == "config.json":
        from jingu.formats.huggingface import spec_from_config

        spec = spec_from_config(path / "config.json" if path.is_dir() else path)
    elif path.suffix == ".json":
        settings, notes = deepspeed.convert(deepspeed.read(path), ranks, path)
        config = config_from_tree(settings, overrides)
        spec, _ = resolve_spec(config)
        return PlanRequest(config, spec, True, [f"{key}: {note}" for key, note in notes.items()])
    else:
        spec = find_preset(target)
    # A model without settings: assume batches of about four million tokens, which are common in pretraining.
    length = min(spec.max_position_embeddings, 4096)
    defaults = [
        f"batch.sequence_length={length}",
        f"batch.global_batch_size={max(ranks, 2**22 // length // ranks * ranks)}",
    ]
    config = config_from_tree({}, [*defaults, *overrides])
    if any(word.startswith("model.") for word in overrides):
        spec = spec_from_settings(config.model, spec.vocab_size, 1, start=spec)
    longest = max(spec.max_position_embeddings, config.batch.sequence_length)
    # Adapters and heads are those of `tune` and `task`, as if training started from the named model.
    initialize = config.initialize.model_copy(update={"from_": config.initialize.from_ or target})
    with_model = config.model_copy(update={"initialize": initialize})
    if isinstance(config.tune, AdapterBase) and config.tune.quantization == "stored":
        _check_folder(target)
    spec = _add_tuning(spec.model_copy(update={"max_position_embeddings": longest}), with_model)
    config = with_model if spec.quantization == "stored" else config
    has_layout = any(word.startswith("parallel.") for word in overrides)
    batch = config.batch
    assumptions = [f"{batch.global_batch_size:,} sequences of {batch.sequence_length:,} tokens per step"]
    return PlanRequest(config, spec, has_layout, assumptions)
