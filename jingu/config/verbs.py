"""`jingu config schema` and `jingu config show`."""

from __future__ import annotations

import json
from typing import Any

from jingu.config.batch import plan_batch
from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig, in_steps
from jingu.config.tree import sections


def schema() -> None:
    """Print the JSON Schema of a run's file, for editors that complete and check YAML."""
    print(json.dumps(json_schema(), indent=2))


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a run's file."""
    tree = RunConfig.model_json_schema()
    for field in RunConfig.model_fields.values():
        for tag, variant in sections(field).items():
            if tag and tag != field.get_default(call_default_factory=True).type:
                # Without its `type:` a section is of the default type, and only of that.
                tree["$defs"][variant.__name__]["required"] = ["type"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "A run of jingu"}


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
    """The arithmetic of a run, named and in words. Raises JinguError where the batch cannot be divided."""
    batch, steps = config.batch, config.train.steps
    plan = plan_batch(batch, ranks)
    rows = [
        ("tokens a step", f"{plan.tokens_per_step:,} = {batch.global_size:,} × {batch.sequence_length:,}"),
        ("tokens of the run", f"{plan.tokens_per_step * steps:,} = {steps:,} steps × {plan.tokens_per_step:,}"),
        ("sequences a rank", f"{plan.rows_per_rank:,} = {batch.global_size:,} / {ranks:,}"),
        (
            "micro batches a step",
            f"{plan.accumulation:,} = {plan.rows_per_rank:,} / {plan.micro_size:,} (batch.micro_size)",
        ),
        ("tokens a forward pass", f"{plan.micro_size * batch.sequence_length:,}"),
        ("warm-up", _length(config.schedule.warmup, steps)),
    ]
    if config.schedule.type == "warmup-stable-decay":
        rows.append(("decay", _length(config.schedule.decay, steps)))
    return rows


def _length(length: int | float, steps: int) -> str:
    whole = in_steps(length, steps)
    return f"{whole:,} steps" + ("" if isinstance(length, int) else f" = {length} × {steps:,}")
