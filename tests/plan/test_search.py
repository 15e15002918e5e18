"""The search for a layout: what it skips could not be among the best, and it says why layouts fail."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from jingu.config.sections.parallel import ParallelSettings
from jingu.model.families import FAMILIES
from jingu.model.feed_forward_specs import Experts
from jingu.model.spec import ModelSpec, replace_fields
from jingu.parallel.mesh import AxisSizes
from jingu.plan.machine import find_machine, machine_library
from jingu.plan.memory import fullest_stage
from jingu.plan.search import SearchResult, search_layouts
from jingu.plan.workload import Workload, model_sizes


def base(spec: ModelSpec, sequence: int) -> Workload:
    return Workload(model_sizes(spec, 2), AxisSizes(1, 1, 1, 1, 1, 1), ParallelSettings(), sequence, 1, 1)


def small_model(generator: random.Random) -> ModelSpec:
    """Return a model of random dimensions, some with experts."""
    heads = generator.choice([4, 6, 8, 12])
    fields: dict[str, Any] = {
        "num_layers": generator.choice([2, 5, 8]),
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


def outcome(result: SearchResult) -> list[tuple[float, float]]:
    return [(plan.step, plan.memory) for plan in result.best]


def check_cells(seed: int, number: int) -> None:
    """Compare the search with one that tries everything, in random cells."""
    generator = random.Random(seed)
    skipped = 0
    for _ in range(number):
        work = base(small_model(generator), generator.choice([512, 1024]))
        ranks, rows = generator.choice([2, 3, 4, 6, 8]), generator.choice([6, 8, 24])
        # A card on which some layouts fit, and others do not.
        memory = generator.choice([2, 4, 12])
        machine = find_machine(generator.choice(["a100-80", "h100", "rtx-4090"])).model_copy(
            update={"memory_gib": memory, "gpus_per_node": generator.choice([2, 8])}
        )
        pruned = search_layouts(work, ranks, machine, rows, best=3)
        brute = search_layouts(work, ranks, machine, rows, best=3, prune=False)
        assert outcome(pruned) == outcome(brute)
        skipped += brute.num_estimates - pruned.num_estimates
    assert skipped > 0


def test_the_pruned_search_equals_brute_force() -> None:
    check_cells(0, 3)


@pytest.mark.slow
def test_the_pruned_search_equals_brute_force_in_many_cells() -> None:
    check_cells(1, 200)


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


def test_every_machine_of_the_library_can_be_planned_on() -> None:
    spec = FAMILIES["llama"].presets["llama-3.2-1b"]
    for (name, machine), ranks in product(machine_library().items(), (1,)):
        result = search_layouts(base(spec, 512), ranks, machine, 2, best=1)
        assert result.best, name
