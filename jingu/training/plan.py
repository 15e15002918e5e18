"""`jingu config show`: every setting of a run, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jingu.compat.torch_distributed import pretend_ranks
from jingu.config.batch_plan import BatchPlan
from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import resolve_steps
from jingu.errors import pluralize
from jingu.formatting import format_rounded, memory_unit
from jingu.model.adapter_layers import is_trained
from jingu.model.decoder import build_model, iterate_blocks, parameter_shapes
from jingu.model.inputs import Inputs
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import Experts, ModelSpec
from jingu.parallel.layout import Precision
from jingu.parallel.materialize import materialize
from jingu.parallel.mesh import AxisSizes, build_mesh
from jingu.parallel.pipeline import ParallelModel
from jingu.parallel.stages import plan_layout, rank_of_stage, split_blocks
from jingu.runtime.ranks import choose_device
from jingu.text.tokenizer import Tokenizer
from jingu.training.precision import choose_precision
from jingu.training.run import apply_tuning, build_run_spec
from jingu.training.schedule import check_schedule
from jingu.training.session import train_state_bytes, training_layout


def show_config(config: RunConfig, processes: int | None = None) -> None:
    """Print every setting of a run, and what follows from them, as a YAML file that can replace the first."""
    world = processes or 1
    rows = derive_plan(config, world)
    width = max(len(name) for name, _ in rows)
    print(dump_yaml(config))
    print(f"# What follows, on {pluralize(world, 'rank')}:")
    for name, text in rows:
        print(f"#   {name:<{width}}  {text}")


def derive_plan(config: RunConfig, world: int) -> list[tuple[str, str]]:
    """Return the arithmetic of a run as pairs of name and text.

    Raises:
        JinguError: ranks, model or batch cannot be divided.
    """
    batch = config.batch
    steps = config.train.steps
    check_schedule(config)
    spec, missing = _resolve_spec(config)
    sizes, plan = plan_layout(config, world, spec)
    parameters = sum(shape.numel() for shape in parameter_shapes(spec).values())
    model = f"that of {missing}" if missing else f"{spec.family}, {format_rounded(parameters)} parameters"
    experts = f", {sizes.expert} expert" if sizes.expert > 1 else ""
    rows = [
        ("model", model),
        ("layout", f"{world:,} = {sizes} (ZeRO {config.parallel.zero_stage}{experts})"),
        ("tokens a step", f"{plan.tokens_per_step:,} = {batch.global_batch_size:,} × {batch.sequence_length:,}"),
        ("tokens of the run", f"{plan.tokens_per_step * steps:,} = {steps:,} steps × {plan.tokens_per_step:,}"),
        ("sequences a rank", f"{plan.rows_per_rank:,} = {batch.global_batch_size:,} / {sizes.data:,}"),
        (
            "micro batches a step",
            f"{plan.accumulation:,} = {plan.rows_per_rank:,} / {plan.micro_batch_size:,} (batch.micro_batch_size)",
        ),
        ("tokens a forward pass", f"{plan.micro_batch_size * batch.sequence_length:,}"),
        ("warm-up", _format_steps(config.schedule.warmup, steps)),
    ]
    if sizes.pipeline > 1:
        stages = split_blocks(config.parallel, sizes.pipeline, spec)
        blocks = ", ".join(str(len(stage)) for stage in stages)
        rows.insert(2, ("stages", f"{len(stages)} of {blocks} blocks ({config.parallel.pipeline_schedule})"))
    if config.schedule.type == "wsd":
        rows.append(("decay", _format_steps(config.schedule.decay, steps)))
    memory = f"unknown until {missing} exists" if missing else _format_memory(config, spec, world, sizes, plan)
    return [*rows, ("memory of a rank", memory)]


def _resolve_spec(config: RunConfig) -> tuple[ModelSpec, str | None]:
    """Return the spec of the run and None; or the spec of its settings, and the initial model that must exist before
    the run's spec is known."""
    initial_model = config.initialize.from_
    tokenizer = Path(config.tokenizer.path)
    if tokenizer.exists() and (initial_model is None or Path(initial_model).exists()):
        spec = build_run_spec(config, Path(config.runs_dir) / config.name, Tokenizer.load(tokenizer))
        return apply_tuning(spec, config), None
    spec = spec_from_settings(config.model, config.tokenizer.vocab_size, config.batch.sequence_length)
    if initial_model is None or config.model.preset is not None:
        return apply_tuning(spec, config), None
    return spec, initial_model


def _format_memory(config: RunConfig, spec: ModelSpec, world: int, sizes: AxisSizes, plan: BatchPlan) -> str:
    """Return what the fullest rank of the pipeline holds, as text."""
    ranks = _distinct_ranks(config.parallel, sizes.pipeline, spec)
    estimates = [estimate_memory(config, spec, world, sizes, plan, rank) for rank in ranks]
    largest = max(estimates, key=lambda estimate: sum(estimate.values()))
    total = sum(largest.values())
    unit, unit_name = memory_unit(total)
    parts = " + ".join(f"{size / unit:,.1f} {purpose}" for purpose, size in largest.items() if size)
    place = {"none": "", "host": ", some of it in main memory", "disk": ", some of it on disk"}
    rest = "one chunk of the loss takes"
    if "activations" not in largest:
        rest = "activations and one chunk of the loss take"
    return f"{total / unit:,.1f} {unit_name} = {parts}{place[config.parallel.offload.type]}; and what {rest}"


def _distinct_ranks(settings: ParallelSettings, pipeline: int, spec: ModelSpec) -> list[int]:
    """Return the ranks of the pipeline that differ in what they hold. Of equal ones, the first has the most
    micro-batches in flight."""
    if pipeline == 1 or spec.num_encoder_layers is not None:
        return list(range(pipeline))
    stages = split_blocks(settings, pipeline, spec)
    ranks: dict[tuple[tuple[int, bool, bool], ...], int] = {}
    for rank in range(pipeline):
        # Embedding and head are in the first and the last stage.
        load = tuple(
            (len(blocks), number == 0, number == len(stages) - 1)
            for number, blocks in enumerate(stages)
            if rank_of_stage(settings, pipeline, number) == rank
        )
        ranks.setdefault(load, rank)
    return list(ranks.values())


def estimate_memory(
    config: RunConfig, spec: ModelSpec, world: int, sizes: AxisSizes, plan: BatchPlan, pipeline_rank: int = 0
) -> dict[str, int]:
    """Return the bytes that a rank holds at a time, by purpose.

    They are counted on the model itself, which is laid out on the meta device over a process group that is only
    pretended.
    """
    precision = choose_precision(config.precision, choose_device(config.device.type, 0))
    # The first rank of a stage never holds less than the others.
    pretend_ranks(pipeline_rank * (world // sizes.pipeline), world)
    try:
        mesh = build_mesh(sizes, torch.device("cpu"))
        model = materialize(spec, mesh, training_layout(config, compile=False), precision, weights=None)
        estimate = train_state_bytes(model, config)
    finally:
        dist.destroy_process_group()
    parameters = [parameter for stage in model.stages for parameter in stage.parameters()]
    if isinstance(parameters[0], DTensor):
        _add_gathered(estimate, model, config, plan, precision)
    # Activations stay until the backward pass, of each micro-batch in flight.
    checkpointing = config.train.activation_checkpointing
    in_flight = 1
    if sizes.pipeline > 1:
        by_schedule = {"gpipe": plan.accumulation, "1f1b": sizes.pipeline - pipeline_rank}
        in_flight = by_schedule.get(config.parallel.pipeline_schedule, 2 * sizes.pipeline)
        in_flight = min(plan.accumulation, in_flight)
    tokens = plan.micro_batch_size * -(-config.batch.sequence_length // (sizes.context * sizes.tensor))
    numbers = [number for stage in model.stages for number, _ in iterate_blocks(stage)]
    checkpointed = 0
    if checkpointing.type == "full":
        checkpointed = sum(number % checkpointing.every == 0 for number in numbers)
        input_bytes = tokens * spec.hidden_size * precision.compute.itemsize
        estimate["inputs of blocks"] = checkpointed * in_flight * input_bytes
    if (
        checkpointing.type != "selective"
        and spec.num_encoder_layers is None
        and not isinstance(spec.feed_forward, Experts)
    ):
        # A checkpointed block is recomputed, one at a time.
        blocks = (len(numbers) - checkpointed) * in_flight + min(1, checkpointed)
        estimate["activations"] = round(blocks * tokens * activation_bytes(spec, precision.compute))
    return estimate


@lru_cache(maxsize=16)
def activation_bytes(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Return the bytes per token that a decoder's block keeps for its backward pass, counted on the meta device."""

    def count(layers: int, length: int) -> int:
        with torch.device("meta"):
            model = build_model(spec.model_copy(update={"num_layers": layers, "quantization": None})).to(dtype)
            tokens = torch.zeros(1, length, dtype=torch.int64)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name, spec))
        weights = {id(parameter.untyped_storage()) for parameter in model.parameters()}
        storages: dict[int, torch.UntypedStorage] = {}

        def record(tensor: Tensor) -> Tensor:
            storages[id(tensor.untyped_storage())] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            model(Inputs(tokens))
        return sum(storage.nbytes() for number, storage in storages.items() if number not in weights)

    # The second of two blocks, without embedding and head. Attention on the meta device keeps its probabilities, which
    # grow with the square of the length; kernels of real devices do not keep them.
    length = min(64, spec.max_position_embeddings // 2)
    short, long = (count(2, size) - count(1, size) for size in (length, 2 * length))
    return (4 * short - long) / (2 * length)


def _add_gathered(
    estimate: dict[str, int], model: ParallelModel, config: RunConfig, plan: BatchPlan, precision: Precision
) -> None:
    """Add what ZeRO gathers and keeps whole beside the shards."""
    zero_stage = config.parallel.zero_stage
    parameters = [parameter for stage in model.stages for parameter in stage.parameters()]
    if zero_stage <= 1 and plan.accumulation > 1:
        # Gradients stay whole until the last micro-batch.
        whole = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        estimate["gradients"] = whole * precision.reduce.itemsize

    def gathered_bytes(parameters: Iterable[nn.Parameter]) -> int:
        return sum(parameter.numel() * min(parameter.itemsize, precision.compute.itemsize) for parameter in parameters)

    gathered = gathered_bytes(parameters)
    if zero_stage == 3:
        # ZeRO 3 gathers the parameters of one block while it computes, and those of the next one beside it.
        blocks = [gathered_bytes(block.parameters()) for stage in model.stages for _, block in iterate_blocks(stage)]
        gathered -= sum(blocks) - 2 * max(blocks)
    estimate["gathered weights"] = gathered


def _format_steps(length: int | float, steps: int) -> str:
    """Return a number of steps, and how it follows if it is a share of the run."""
    text = pluralize(resolve_steps(length, steps), "step")
    return text if isinstance(length, int) else f"{text} = {length} × {steps:,}"
