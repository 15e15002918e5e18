"""Plans of random configurations: no negative numbers, and monotone where physics is."""

from __future__ import annotations

import random
from dataclasses import replace
from math import isfinite
from typing import Any

from bench.planning_rows import gpt
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError
from jingu.model.families import FAMILIES
from jingu.model.spec import ModelSpec, replace_fields
from jingu.parallel.mesh import AxisSizes, resolve_axis_sizes
from jingu.parallel.stages import check_layout
from jingu.plan.machine import Machine, find_machine
from jingu.plan.memory import fullest_stage
from jingu.plan.software import software_library
from jingu.plan.step_time import step_time
from jingu.plan.workload import Workload, model_sizes

NUMBER = 500


def random_spec(generator: random.Random) -> ModelSpec:
    heads, width = generator.choice([4, 8, 16, 64]), generator.choice([64, 128])
    layers, sequence = generator.choice([2, 4, 12, 48]), generator.choice([128, 2048, 16384, 2**20])
    if generator.random() < 0.5:
        return gpt(layers, heads * width, heads, sequence, generator.choice([512, 50304]))
    dims: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": heads * width,
        "attention.num_heads": heads,
        "attention.num_kv_heads": generator.choice([heads, heads // 4]),
        "attention.head_dim": width,
        "feed_forward.intermediate_size": 256 * generator.choice([1, 11, 43]),
        "max_position_embeddings": sequence,
    }
    return replace_fields(FAMILIES["llama"].template, **dims)


def random_work(generator: random.Random) -> Workload | None:
    """Return a random layout of a random model; None if the layout is not valid."""
    spec = random_spec(generator)
    axes = {axis: generator.choice([1, 1, 2, 4]) for axis in ("pipeline", "tensor", "context", "replicate")}
    axes["shard"] = generator.choice([1, 2, 8, 64])
    schedule = generator.choice(["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
    zero = generator.choice([1, 2, 3]) if axes["shard"] > 1 else 0
    try:
        settings = ParallelSettings.model_validate({**axes, "zero_stage": zero, "pipeline_schedule": schedule})
        ranks = axes["pipeline"] * axes["tensor"] * axes["context"] * axes["replicate"] * axes["shard"]
        sizes = resolve_axis_sizes(settings, ranks, spec)
        accumulation = generator.choice([1, 4, 8, 32])
        kind = generator.choice(["none", "selective", "full"])
        check_layout(settings, kind, spec, sizes, accumulation)
    except JinguError:
        return None
    software = generator.choice(list(software_library().values()))
    return Workload(
        model_sizes(spec, software.compute_bytes),
        sizes,
        settings,
        spec.max_position_embeddings,
        generator.choice([1, 3, 16]),
        accumulation,
        ActivationCheckpointingSettings.model_validate({"type": kind}),
        software=software,
    )


def random_works() -> list[Workload]:
    generator = random.Random(0)
    works: list[Workload] = []
    while len(works) < NUMBER:
        work = random_work(generator)
        works += [] if work is None else [work]
    return works


def total(work: Workload) -> float:
    return fullest_stage(work)[1].total


def step(work: Workload, machine: Machine) -> float:
    return sum(step_time(work, machine).values())


def test_plans_of_random_configurations_make_sense() -> None:
    machines = [find_machine(name) for name in ("a100-80", "h100", "v100-16", "rtx-4090", "ascend-910b")]
    for number, work in enumerate(random_works()):
        machine = machines[number % len(machines)]
        terms, memory = step_time(work, machine), fullest_stage(work)[1]
        assert all(value >= 0 and isfinite(value) for value in (*terms.values(), *memory.device.values()))
        assert memory.total > 0 < sum(terms.values())
        # 1. More recomputation never needs more memory.
        sizes = []
        for kind in ("full", "selective", "none"):
            checkpointing = ActivationCheckpointingSettings.model_validate({"type": kind})
            sizes.append(total(replace(work, checkpointing=checkpointing)))
        assert sizes == sorted(sizes)
        # 2. A larger micro-batch never needs less; more micro-batches never take less time.
        assert total(replace(work, micro_batch=2 * work.micro_batch)) >= memory.total
        assert step(replace(work, accumulation=2 * work.accumulation), machine) > sum(terms.values())
        # 3. On more GPUs of the same layout a GPU never has more.
        wider: AxisSizes = replace(work.sizes, shard=2 * work.sizes.shard)
        if work.parallel.zero_stage:
            assert total(replace(work, sizes=wider)) <= memory.total
