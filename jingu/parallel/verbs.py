"""`jingu config show`."""

from __future__ import annotations

from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.config.sections.train import in_steps
from jingu.model.build import spec_from_settings
from jingu.parallel.stages import divide_blocks, plan_layout


def show(config: RunConfig, processes: int | None = None) -> None:
    """Print every setting of a run, and what follows from them, as a YAML file that works in place of the first."""
    ranks = processes or 1
    rows = derived(config, ranks)
    width = max(len(name) for name, _ in rows)
    print(dump_yaml(config))
    print(f"# What follows, on {ranks:,} rank{'s' if ranks > 1 else ''}:")
    for name, words in rows:
        print(f"#   {name:<{width}}  {words}")


def derived(config: RunConfig, ranks: int) -> list[tuple[str, str]]:
    """The arithmetic of a run, named and in words. Raises JinguError where ranks, model or batch cannot be divided."""
    batch, steps = config.batch, config.train.steps
    spec = spec_from_settings(config.model, config.tokenizer.vocabulary, batch.sequence_length)
    sizes, plan = plan_layout(config, ranks, spec)
    rows = [
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
        rows.insert(1, ("stages", f"{len(parts)} of {blocks} blocks ({config.parallel.schedule})"))
    if config.schedule.type == "warmup-stable-decay":
        rows.append(("decay", _length(config.schedule.decay, steps)))
    return rows


def _length(length: int | float, steps: int) -> str:
    whole = in_steps(length, steps)
    return f"{whole:,} steps" + ("" if isinstance(length, int) else f" = {length} × {steps:,}")
