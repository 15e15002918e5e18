"""The timeline of a pipeline: complete, in order, with the idle shares of published formulas and of the planner."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from jingu.config.sections.parallel import ParallelSettings
from jingu.model.resolve import find_preset
from jingu.parallel.mesh import AxisSizes
from jingu.plan import timeline
from jingu.plan.collectives import ALL_TO_ALL_SPEED
from jingu.plan.data_parallel import CONTENTION, data_loads, data_time
from jingu.plan.machine import Efficiency, Machine, find_machine
from jingu.plan.software import Software
from jingu.plan.step_time import StageTime, idle_share, stage_time, step_time
from jingu.plan.timeline import simulate_pipeline
from jingu.plan.workload import Workload, model_sizes

MACHINE = find_machine("a100-80")


def make_work(schedule: str, ranks: int, batches: int, stages: int | str = "auto") -> Workload:
    """A step of an 8B model on so many ranks of a pipeline."""
    settings = ParallelSettings.model_validate(
        {"pipeline": ranks, "pipeline_schedule": schedule, "stages_per_rank": stages, "zero_stage": 1}
    )
    sizes = AxisSizes(ranks, 1, 1, 1, 1, 1)
    return Workload(model_sizes(find_preset("llama-3-8b"), 2), sizes, settings, 4096, 1, batches)


@pytest.fixture
def equal_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ranks take as long, a backward pass twice as long as a forward pass, and sending nothing."""
    monkeypatch.setattr(timeline, "stage_time", lambda *_: StageTime({}, 1.0, 2.0))
    monkeypatch.setattr(timeline, "boundary_seconds", lambda *_: 0.0)


@pytest.mark.parametrize(
    ("schedule", "ranks", "batches", "stages"),
    [
        ("gpipe", 3, 5, 1),
        ("1f1b", 5, 3, 1),
        ("1f1b", 3, 7, 1),
        ("interleaved", 3, 6, 3),
        ("zero_bubble", 4, 8, 2),
        ("zero_bubble", 3, 3, 1),
        ("zbv", 3, 7, 2),
        ("zbv", 4, 2, 2),
    ],
)
def test_every_pass_has_its_place(schedule: str, ranks: int, batches: int, stages: int) -> None:
    work = make_work(schedule, ranks, batches, stages)
    drawn = simulate_pipeline(work, MACHINE)
    # 1. Each micro-batch passes each stage once, up to so many that the pipeline is full.
    done = {(p.kind, p.stage, p.batch): p for own in drawn.ranks for p in own}
    kinds = {"forward", "backward"} | ({"weights"} if schedule in ("zero_bubble", "zbv") else set())
    last = ranks * stages - 1
    assert drawn.batches == min(batches, 2 * ranks)
    assert set(done) == {(k, s, b) for k in kinds for s in range(last + 1) for b in range(drawn.batches)}
    assert sum(map(len, drawn.ranks)) == len(done)
    # 2. A rank takes one pass at a time; a pass follows what it needs.
    for own in drawn.ranks:
        assert all(before.end <= after.start for before, after in pairwise(own))
    for (kind, stage, batch), own_pass in done.items():
        if kind == "forward" and stage:
            assert done["forward", stage - 1, batch].end <= own_pass.start
        if kind == "backward":
            needed = ("backward", stage + 1, batch) if stage < last else ("forward", stage, batch)
            assert done[needed].end <= own_pass.start
        if kind == "weights":
            assert done["backward", stage, batch].end <= own_pass.start


@pytest.mark.parametrize(
    ("schedule", "stages", "batches"),
    [("gpipe", 1, 8), ("gpipe", 1, 32), ("1f1b", 1, 8), ("1f1b", 1, 50), ("interleaved", 2, 16), ("interleaved", 4, 8)],
)
def test_idle_shares_are_those_of_narayanan_et_al(schedule: str, stages: int, batches: int, equal_stages: None) -> None:
    """Narayanan et al. (2021), sections 2.2.1 and 2.2.2: bubbles take (p - 1) / (v m) of the ideal time."""
    bubble = (4 - 1) / (stages * batches)
    drawn = simulate_pipeline(make_work(schedule, 4, batches, stages), MACHINE)
    assert drawn.idle == pytest.approx([bubble / (1 + bubble)] * 4, abs=1e-12)


def test_split_backward_passes_fill_bubbles(equal_stages: None) -> None:
    idle = {
        name: max(simulate_pipeline(make_work(name, 4, 16), MACHINE).idle)
        for name in ("1f1b", "interleaved", "zero_bubble", "zbv")
    }
    assert idle["1f1b"] > idle["interleaved"] > idle["zero_bubble"] >= idle["zbv"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_the_slowest_rank_waits_as_long_as_the_plan_says(schedule: str) -> None:
    work = make_work(schedule, 4, 32)
    seconds = step_time(work, MACHINE)
    passes = sum(seconds.values()) - seconds["optimizer"] - seconds["data"]
    assert min(simulate_pipeline(work, MACHINE).idle) == pytest.approx(seconds["bubble"] / passes, abs=0.01)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        *(("gpipe", 1), ("interleaved", 2), ("interleaved", 4)),
        *(("zero_bubble", 1), ("zero_bubble", 2), ("zero_bubble", 3), ("zbv", 2)),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_bubbles_are_those_of_the_schedule(schedule: str, stages: int, ranks: int, equal_stages: None) -> None:
    """Also with fewer micro-batches than ranks, which leave more of the bubble empty."""
    for batches in (1, 2, 3, ranks - 1, ranks, 2 * ranks, 4 * ranks):
        if schedule in ("interleaved", "zero_bubble") and batches % max(1, batches // ranks):
            continue  # refused
        work = make_work(schedule, ranks, batches, stages)
        bubble = idle_share(work) * (ranks - 1) / batches
        assert min(simulate_pipeline(work, MACHINE).idle) == pytest.approx(bubble / (1 + bubble), abs=1e-9)


def test_ranks_of_a_pipeline_have_stages_of_their_own() -> None:
    work = make_work("1f1b", 4, 8)
    assert [stage.rank for stage in work.rank_stages] == [0, 1, 2, 3]
    assert sum(stage.num_blocks for stage in work.rank_stages) == 32
    # Equal ones are one, of which the first counts.
    assert sum(stage.count for stage in work.stages) == 4 and len(work.stages) == 3


def test_ranks_that_wait_leave_their_cores_to_others() -> None:
    """Two stages on one core take as long as the work of both; on a core each, as long as the bubble says."""
    work = make_work("1f1b", 2, 4)
    alone = MACHINE.model_copy(update={"is_shared": True, "gpus_per_node": 2, "cores": 2})
    crowded = alone.model_copy(update={"cores": 1})
    free, shared = step_time(work, alone), step_time(work, crowded)
    assert free["bubble"] > 0 and shared["bubble"] == 0
    times = [(stage, stage_time(work, stage, crowded)) for stage in work.stages]
    both = sum(stage.count * (time.forward + time.backward) for stage, time in times)
    others = ("data", "pipeline", "bubble", "optimizer")
    assert sum(value for term, value in shared.items() if term not in others) == pytest.approx(4 * both / 2)


def test_tokens_travel_once_to_each_node_that_has_their_experts() -> None:
    """Of 4 nodes, 8 experts of a token are on 4 × (1 - (3/4)⁸) in the mean; its copies travel to three quarters."""
    spec = find_preset("qwen3-30b-a3b")
    sizes, settings = AxisSizes(1, 1, 32, 1, 1, 32), ParallelSettings(expert=32)
    plain = Workload(model_sizes(spec, 2), sizes, settings, 4096, 1, 1)
    once = replace(plain, software=Software(sends_to_nodes=True))
    # Without latency, on a network so slow that links do not count.
    efficiency = Efficiency(nic=1e-3, hop_us=1e-9)
    machine = MACHINE.model_copy(update={"efficiency": efficiency})
    times = [step_time(work, machine)["expert"] for work in (plain, once)]
    assert times[1] / times[0] == pytest.approx(4 * (1 - 0.75**8) / 8)
    rows = 4096 * 2048 * 8 * 2 * (32 - 8) / 32
    # There and back, in the forward pass of each layer and in its backward pass.
    assert times[0] == pytest.approx(48 * 4 * rows / (MACHINE.nic_gbs * 1e9 * 1e-3 * ALL_TO_ALL_SPEED), rel=1e-6)


def test_an_exchange_beside_computation_costs_what_the_computation_does_not_hide() -> None:
    work = Workload(
        model_sizes(find_preset("qwen3-30b-a3b"), 2),
        AxisSizes(1, 1, 32, 1, 1, 32),
        ParallelSettings(expert=32),
        4096,
        1,
        1,
    )
    beside = replace(work, software=Software(overlaps_experts=True))
    alone, exposed = step_time(work, MACHINE), step_time(beside, MACHINE)
    assert 0 <= exposed["expert"] < alone["expert"]


def test_ranks_that_take_turns_send_for_twice_as_long() -> None:
    """A rank receives a micro-batch and its gradients, and sends both on: two messages at a time, or one."""
    work = make_work("1f1b", 4, 8)
    in_turn = replace(work, software=replace(work.software, sends_in_turn=True))
    both, single = step_time(work, MACHINE), step_time(in_turn, MACHINE)
    assert single["pipeline"] == pytest.approx(2 * both["pipeline"])
    assert both["pipeline"] > 0 and single["bubble"] == both["bubble"]


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_stages_of_a_rank_take_as_long_as_their_parts(schedule: str) -> None:
    """The last stage has the head beside its blocks; those of a rank together take as long as the plan says."""
    work = make_work(schedule, 4, 8)
    ranks = simulate_pipeline(work, MACHINE).ranks
    seconds = {p.stage: p.end - p.start for passes in ranks for p in passes if p.kind == "forward" and p.batch == 0}
    last = next(stage for stage in work.single_stages if stage.has_head)
    alone = stage_time(work, last, MACHINE).forward
    assert seconds[len(seconds) - 1] == pytest.approx(alone, rel=0.01)
    pair = [stage for stage in seconds if work.single_stages[stage].rank == last.rank]
    both = stage_time(work, work.rank_stages[last.rank], MACHINE).forward
    assert sum(seconds[stage] for stage in pair) == pytest.approx(both)
    # 32 blocks and a head cannot be divided equally over 8 stages.
    assert max(seconds.values()) > 1.2 * min(seconds.values())


def test_only_ranks_with_the_same_experts_exchange_their_weights_and_gradients() -> None:
    """With all experts over all ranks, the remaining weights alone travel; over half of them, pairs share experts."""
    model = model_sizes(find_preset("mixtral-8x7b"), 2)
    machine = MACHINE.model_copy(update={"efficiency": Efficiency(hop_us=1e-9)})

    def gather_seconds(expert: int, ranks: int = 8) -> float:
        work = Workload(model, AxisSizes(1, 1, ranks, 1, 1, expert), ParallelSettings(expert=expert), 4096, 1, 1)
        return data_time(data_loads(work, work.stages[0], machine), work.sizes, machine).gather

    rate = machine.link_gbs * machine.efficiency.link * 1e9
    # Three matrices of 4,096 × 14,336 in each of 8 experts of 32 layers, in bf16.
    experts = 2 * 32 * 8 * 3 * 4096 * 14336
    others = gather_seconds(8)
    assert gather_seconds(1) - others == pytest.approx(experts * 7 / 8 / rate)
    assert gather_seconds(4) - others == pytest.approx(experts / 4 / 2 / rate)
    # On two nodes, a ring that exchanges experts has one network card, and one of all ranks has eight.
    network = machine.nic_gbs * machine.efficiency.nic * 1e9
    others = gather_seconds(1, ranks=16) - experts * 15 / 16 / (8 * network)
    assert gather_seconds(8, ranks=16) - others == pytest.approx(experts / 8 / 2 / network)


def test_communication_across_nodes_slows_computation_down_less_than_within_a_node() -> None:
    model = model_sizes(find_preset("llama-3-8b"), 2)
    slow = MACHINE.model_copy(update={"nic_gbs": 1.0})

    def contention(ranks: int, machine: Machine) -> float:
        work = Workload(model, AxisSizes(1, 1, ranks, 1, 1, 1), ParallelSettings(), 4096, 1, 1)
        return data_time(data_loads(work, work.stages[0], machine), work.sizes, machine).contention

    assert contention(8, slow) == pytest.approx(CONTENTION, rel=0.02)
    of_links = 8 * slow.nic_gbs * slow.efficiency.nic / (slow.link_gbs * slow.efficiency.link)
    assert contention(16, slow) == pytest.approx(CONTENTION * of_links * 16 / 15, rel=0.02)
    assert contention(1, slow) == 0.0
