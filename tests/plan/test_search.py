"""The search for a layout: what it skips could not be among the best, and it says why layouts fail."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from pydantic import ValidationError

from jingu.config.sections.parallel import HostOffloadSettings, ParallelSettings
from jingu.config.sections.train import ActivationCheckpointingSettings
from jingu.errors import JinguError
from jingu.model.families import FAMILIES
from jingu.model.feed_forward_specs import Experts
from jingu.model.spec import ModelSpec, replace_fields
from jingu.parallel.mesh import AxisSizes, resolve_axis_sizes
from jingu.parallel.stages import check_layout
from jingu.plan.forecast import describe_rejection
from jingu.plan.machine import Machine, find_machine, machine_library
from jingu.plan.memory import fullest_stage, stage_memory
from jingu.plan.search import search_layouts
from jingu.plan.step_time import step_time
from jingu.plan.workload import Workload, model_sizes


def base(spec: ModelSpec, sequence: int) -> Workload:
    return Workload(model_sizes(spec, 2), AxisSizes(1, 1, 1, 1, 1, 1), ParallelSettings(), sequence, 1, 1)


def small_model(generator: random.Random) -> ModelSpec:
    """Return a model of random dimensions, some with experts."""
    heads = generator.choice([4, 6, 8, 12])
    fields: dict[str, Any] = {
        "num_layers": generator.choice([2, 3, 5]),
        "hidden_size": 128 * heads,
        "attention.num_heads": heads,
        "attention.num_kv_heads": generator.choice([heads, heads // 2]),
        "attention.head_dim": 128,
        "feed_forward.intermediate_size": 128 * generator.choice([11, 32]),
    }
    if generator.random() < 0.3:
        fields["feed_forward"] = Experts(num_experts=4, num_experts_per_token=2, intermediate_size=512)
        del fields["feed_forward.intermediate_size"]
    return replace_fields(FAMILIES["llama"].template, **fields)


def every_layout(work: Workload, ranks: int, rows: int) -> Iterator[Workload]:
    """Yield every layout of a step that the checks of training accept, without the code of the search."""
    spec, numbers = work.spec, range(1, max(ranks, rows) + 1)
    layers = spec.num_layers
    kinds = [ActivationCheckpointingSettings.model_validate({"type": kind}) for kind in ("none", "selective", "full")]
    meshes = [
        (pipeline, replicate, shard, context, tensor)
        for pipeline, replicate, shard, context, tensor in product(range(1, ranks + 1), repeat=5)
        if pipeline * replicate * shard * context * tensor == ranks
    ]
    schedules = [("gpipe", "auto"), ("1f1b", "auto"), ("zbv", "auto")]
    schedules += [(name, stages) for name in ("interleaved", "zero_bubble") for stages in range(1, layers + 1)]
    for mesh, zero, expert, method in product(meshes, range(4), (1, 2, 4), ("ulysses", "ring")):
        pipeline, replicate, shard, context, _ = mesh
        if (zero == 0 and shard > 1) or (context == 1 and method == "ring") or (spec.experts is None and expert > 1):
            continue
        # One rank of data parallelism has nothing to shard, whatever the stage; several have only with a shard.
        if zero and (shard * context == 1):
            continue
        for schedule, stages in schedules if pipeline > 1 else [("1f1b", "auto")]:
            tree = dict(zip(("pipeline", "replicate", "shard", "context", "tensor"), mesh, strict=True))
            tree |= {"zero_stage": zero, "expert": expert, "context_method": method}
            tree |= {"pipeline_schedule": schedule, "stages_per_rank": stages}
            for micro, kind in product(numbers, kinds):
                if rows % (replicate * shard * micro):
                    continue
                accumulation = rows // (replicate * shard * micro)
                try:
                    settings = ParallelSettings.model_validate(tree)
                    sizes = resolve_axis_sizes(settings, ranks, spec)
                    check_layout(settings, kind.type, spec, sizes, accumulation)
                except (JinguError, ValidationError):
                    continue
                yield replace(
                    work,
                    sizes=sizes,
                    parallel=settings,
                    micro_batch=micro,
                    accumulation=accumulation,
                    checkpointing=kind,
                )


def best_steps(work: Workload, ranks: int, rows: int, machine: Machine, number: int) -> list[float]:
    """Return the fastest steps of all layouts that fit, offloaded only if they do not fit otherwise."""
    steps = []
    for layout in every_layout(work, ranks, rows):
        offloaded = replace(layout, parallel=layout.parallel.model_copy(update={"offload": HostOffloadSettings()}))
        for choice in (layout, offloaded):
            memory = fullest_stage(choice)[1].total * 1.1
            host = max(sum(stage_memory(choice, stage).host.values()) for stage in choice.stages)
            if memory <= machine.usable_bytes and host <= machine.host_bytes:
                steps.append(sum(step_time(choice, machine).values()))
                break
    return sorted(steps)[:number]


def check_cells(seed: int, number: int, ranks: tuple[int, ...]) -> None:
    """Compare the search with an enumeration of every layout, in random small spaces."""
    generator = random.Random(seed)
    estimated = 0
    for _ in range(number):
        work = base(small_model(generator), generator.choice([512, 1024]))
        size, rows = generator.choice(ranks), generator.choice([4, 6, 8])
        # A card on which some layouts fit, and others do not.
        memory = generator.choice([3, 5, 14])
        machine = find_machine(generator.choice(["a100-80", "h100", "rtx-4090"])).model_copy(
            update={"memory_gib": memory, "gpus_per_node": generator.choice([2, 8])}
        )
        result = search_layouts(work, size, machine, rows, best=3)
        assert [plan.step for plan in result.best] == pytest.approx(best_steps(work, size, rows, machine, 3))
        estimated += result.num_estimates
    assert estimated > 0


def test_the_search_equals_an_enumeration() -> None:
    check_cells(0, 3, (2, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_search_equals_an_enumeration_of_many_spaces(seed: int) -> None:
    """200 spaces in all."""
    check_cells(seed + 1, 10, (2, 3, 4, 6, 8))


def test_the_best_layouts_fit_and_are_sorted() -> None:
    machine = find_machine("a100-80")
    result = search_layouts(base(FAMILIES["llama"].presets["llama-3.2-1b"], 2048), 8, machine, 32)
    steps = [plan.step for plan in result.best]
    assert len(steps) == 5
    assert steps == sorted(steps)
    for plan in result.best:
        assert fullest_stage(plan.work)[1].total == plan.memory <= machine.usable_bytes
        assert plan.work.sizes.data * plan.work.micro_batch * plan.work.accumulation == 32
        assert plan.work.ranks == 8


def test_rejected_layouts_have_reasons_with_numbers() -> None:
    machine = find_machine("rtx-4090")
    result = search_layouts(base(FAMILIES["llama"].presets["llama-3.1-405b"], 4096), 6, machine, 6)
    assert result.best == []
    assert result.rejections["out of memory"] > 10
    assert result.nearest[0] > 2**30
    assert "128 attention heads cannot be divided over 3 ranks" in " ".join(result.examples.values())


def test_layouts_whose_activations_are_too_large_say_by_how_much() -> None:
    work = base(FAMILIES["llama"].presets["llama-3.1-405b"], 131072)
    result = search_layouts(work, 2, find_machine("rtx-4090"), 2)
    assert result.best == [] and result.num_estimates == 0
    # A block stores at least its input and the result of attention and feed-forward.
    least = 131072 * 16384 * 2 / 2 - find_machine("rtx-4090").usable_bytes
    assert max(0.0, least) < result.smallest[0] < 2**50
    text = describe_rejection(result, "out of memory")
    assert f"every layout exceeds a rank's memory, this one by {result.smallest[0] / 1e9:.3g} GB or more: " in text


def test_every_machine_of_the_library_can_be_planned_on() -> None:
    spec = FAMILIES["llama"].presets["llama-3.2-1b"]
    for (name, machine), ranks in product(machine_library().items(), (1,)):
        result = search_layouts(base(spec, 512), ranks, machine, 2, best=1)
        assert result.best, name
