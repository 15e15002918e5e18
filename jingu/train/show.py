"""`jingu config show`: every setting of a run, and what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from jingu.config.batch import BatchPlan
from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.config.sections.train import in_steps
from jingu.errors import counted
from jingu.model.build import spec_from_settings
from jingu.model.decoder import all_blocks, parameter_shapes
from jingu.model.spec import ModelSpec
from jingu.parallel.mesh import AxisSizes, build_mesh
from jingu.parallel.sharing import local
from jingu.parallel.stages import divide_blocks, plan_layout
from jingu.runtime.ranks import choose_device
from jingu.text.tokenizer import Tokenizer
from jingu.train.begin import spec_of_run, trained_spec
from jingu.train.optimizer import build_optimizer
from jingu.train.precision import choose_precision
from jingu.train.session import lay_out
from jingu.words import rounded


def show(config: RunConfig, processes: int | None = None) -> None:
    """Print every setting of a run, and what follows from them, as a YAML file that works in place of the first."""
    ranks = processes or 1
    rows = derived(config, ranks)
    width = max(len(name) for name, _ in rows)
    print(dump_yaml(config))
    print(f"# What follows, on {counted(ranks, 'rank')}:")
    for name, words in rows:
        print(f"#   {name:<{width}}  {words}")


def derived(config: RunConfig, ranks: int) -> list[tuple[str, str]]:
    """The arithmetic of a run, named and in words. Raises JinguError where ranks, model or batch cannot be divided."""
    batch, steps = config.batch, config.train.steps
    spec, missing = _spec(config)
    sizes, plan = plan_layout(config, ranks, spec)
    numbers = sum(shape.numel() for shape in parameter_shapes(spec).values())
    rows = [
        ("model", f"{spec.family}, {rounded(numbers)} parameters" if missing is None else f"that of {missing}"),
        ("layout", f"{ranks:,} = {sizes} (ZeRO {config.parallel.zero})"),
        ("tokens a step", f"{plan.tokens_per_step:,} = {batch.global_size:,} × {batch.sequence_length:,}"),
        ("tokens of the run", f"{plan.tokens_per_step * steps:,} = {steps:,} steps × {plan.tokens_per_step:,}"),
        ("sequences a rank", f"{plan.rows_per_rank:,} = {batch.global_size:,} / {sizes.data:,}"),
        (
            "micro batches a step",
            f"{plan.accumulation:,} = {plan.rows_per_rank:,} / {plan.micro_size:,} (batch.micro_size)",
        ),
        ("tokens a forward pass", f"{plan.micro_size * batch.sequence_length:,}"),
        ("warm-up", _length(config.schedule.warmup, steps)),
    ]
    if sizes.pipeline > 1:
        parts = divide_blocks(config.parallel, sizes.pipeline, spec)
        blocks = ", ".join(str(len(part)) for part in parts)
        rows.insert(2, ("stages", f"{len(parts)} of {blocks} blocks ({config.parallel.schedule})"))
    if config.schedule.type == "warmup-stable-decay":
        rows.append(("decay", _length(config.schedule.decay, steps)))
    memory = f"told once {missing} is there" if missing is not None else _memory(config, spec, ranks, sizes, plan)
    return [*rows, ("memory of a rank", memory)]


def _spec(config: RunConfig) -> tuple[ModelSpec, str | None]:
    """That of the run; or that of its settings, and what must be there before the run's is known."""
    begins, tokenizer = config.initialize.from_, Path(config.tokenizer.path)
    if tokenizer.exists() and (begins is None or Path(begins).exists()):
        spec = spec_of_run(config, Path(config.runs) / config.name, Tokenizer.load(tokenizer))
        return trained_spec(spec, config), None
    spec = spec_from_settings(config.model, config.tokenizer.vocabulary, config.batch.sequence_length)
    if begins is None or config.model.preset is not None:
        return trained_spec(spec, config), None
    return spec, begins


def _memory(config: RunConfig, spec: ModelSpec, ranks: int, sizes: AxisSizes, plan: BatchPlan) -> str:
    """What the fullest rank holds, in words."""
    each = [needs(config, spec, ranks, sizes, plan, place) for place in range(sizes.pipeline)]
    most = max(each, key=lambda needed: sum(needed.values()))
    total, offload = sum(most.values()), config.parallel.offload.type
    unit, name = (2**30, "GiB") if total >= 2**30 else (2**20, "MiB")
    parts = " + ".join(f"{size / unit:,.1f} {what}" for what, size in most.items() if size)
    where = {"none": "", "host": ", some of it in main memory", "disk": ", some of it on disk"}[offload]
    more = "one block" if config.train.activation_checkpointing.type == "full" else "activations"
    return f"{total / unit:,.1f} {name} = {parts}{where}; and what {more} and one piece of the loss take"


def needs(
    config: RunConfig, spec: ModelSpec, ranks: int, sizes: AxisSizes, plan: BatchPlan, place: int = 0
) -> dict[str, int]:
    """Bytes that a rank at this place of the pipeline holds at a time, by what they are for.

    Counted on the model itself, laid out without memory among ranks that are only pretended.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    precision = choose_precision(config.precision, choose_device(config.device.type, 0))
    first = place * (ranks // sizes.pipeline)  # of those at this place: it never holds less than the others
    dist.init_process_group("fake", store=FakeStore(), rank=first, world_size=ranks)
    try:
        model = lay_out(spec, config, build_mesh(sizes, torch.device("cpu")), precision, compiles=False)
        state = [each for kept in build_optimizer(config.optimizer, model).state.values() for each in kept.values()]
    finally:
        dist.destroy_process_group()
    stages: list[Any] = list(getattr(model, "stages", [model]))
    held = [parameter for stage in stages for parameter in stage.parameters()]
    trained, zero = [parameter for parameter in held if parameter.requires_grad], config.parallel.zero
    blocks = [block for stage in stages for _, block in all_blocks(stage)]
    found = {
        "weights": sum(local(each).nbytes for each in held),
        "gradients": sum(local(each).nbytes for each in trained),
        "optimizer state": sum(local(each).nbytes for each in state),
    }
    if isinstance(held[0], DTensor):
        if zero <= 1 and plan.accumulation > 1:
            found["gradients"] = sum(each.numel() for each in trained) * precision.reduce.itemsize
        of_all, *of_blocks = (
            sum(each.numel() * min(each.itemsize, precision.compute.itemsize) for each in parameters)
            for parameters in (held, *(block.parameters() for block in blocks))
        )
        # Of ZeRO 3 a block's are gathered when it computes, the next one's beside it.
        found["gathered weights"] = of_all - (sum(of_blocks) - 2 * max(of_blocks) if zero == 3 else 0)
    again = config.train.activation_checkpointing
    if again.type == "full":
        number = len([block for stage in stages for n, block in all_blocks(stage) if n % again.every == 0])
        under_way = {"gpipe": plan.accumulation, "1f1b": sizes.pipeline - place}.get(
            config.parallel.schedule, 2 * sizes.pipeline
        )
        under_way = min(plan.accumulation, under_way) if sizes.pipeline > 1 else 1
        tokens = plan.micro_size * -(-config.batch.sequence_length // (sizes.context * sizes.tensor))
        found["inputs of blocks"] = number * under_way * tokens * spec.width * precision.compute.itemsize
    return found


def _length(length: int | float, steps: int) -> str:
    whole = in_steps(length, steps)
    return counted(whole, "step") + ("" if isinstance(length, int) else f" = {length} × {steps:,}")
