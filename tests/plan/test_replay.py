"""A step that is replayed on ranks that do not exist does what it does on ranks that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jingu.plan.replay import StepRecord, recording
from jingu.training.replay_run import replay_on_rank, replay_run
from tests.plan.test_memory import BF16, GPT2, LLAMA, MIXTURE, settings


def run_of(model: dict[str, Any], parallel: dict[str, Any], checkpointing: str) -> tuple[Any, Any]:
    length = model["max_position_embeddings"]
    return settings(
        model,
        parallel,
        train={"activation_checkpointing": {"type": checkpointing}},
        batch={"sequence_length": length, "global_batch_size": 16, "micro_batch_size": 2},
    )


def on_gloo(rank: int, world: int, model: dict[str, Any], parallel: dict[str, Any], checkpointing: str) -> StepRecord:
    config, spec = run_of(model, parallel, checkpointing)
    # Threads of gloo free tensors a little later than the step needs them, which adds to some peaks.
    records = [replay_on_rank(config, spec, BF16, world) for _ in range(3)]
    return min(records, key=lambda record: record.peak)


SMALL = {**LLAMA, "num_layers": 2}
CELLS = [
    (2, SMALL, {"tensor": 2}, "selective"),
    (2, SMALL, {"pipeline": 2}, "none"),
    (2, {**LLAMA, "num_layers": 4}, {"pipeline": 2, "pipeline_schedule": "interleaved"}, "none"),
]
MORE_CELLS = [
    (2, SMALL, {"zero_stage": 3}, "full"),
    (1, LLAMA, {}, "none"),
    (2, LLAMA, {"zero_stage": 0}, "none"),
    (2, LLAMA, {"context": 2, "context_method": "ring"}, "none"),
    *(
        (world, model, parallel, checkpointing)
        for model in (LLAMA, GPT2)
        for checkpointing in ("none", "selective", "full")
        for world, parallel in (
            (2, {"zero_stage": 1}),
            (2, {"zero_stage": 2}),
            (4, {"zero_stage": 3}),
            (4, {"zero_stage": 3, "shard": 2, "replicate": 2}),
            (4, {"tensor": 2, "zero_stage": 2}),
            (4, {"tensor": 2, "pipeline": 2}),
            (2, {"context": 2}),
            (4, {"pipeline": 2, "pipeline_schedule": "interleaved", "zero_stage": 1}),
            (4, {"pipeline": 2, "pipeline_schedule": "gpipe", "zero_stage": 3}),
            (8, {"tensor": 2, "context": 2, "shard": 2, "context_method": "ring"}),
        )
    ),
    *(
        (world, MIXTURE, parallel, checkpointing)
        for checkpointing in ("none", "full")
        for world, parallel in (
            (1, {}),
            (2, {"expert": 2}),
            (4, {"expert": 2, "tensor": 2, "zero_stage": 3}),
            (4, {"expert": 4, "zero_stage": 1}),
            (4, {"expert": 2, "pipeline": 2}),
        )
    ),
    *(
        (world, model, parallel | {"offload": {"type": "host"}}, checkpointing)
        for model, checkpointing in ((LLAMA, "none"), (GPT2, "full"), (MIXTURE, "selective"))
        for world, parallel in ((1, {}), (2, {"zero_stage": 1}), (4, {"zero_stage": 3, "tensor": 2}))
    ),
    (2, LLAMA, {"pipeline": 2, "pipeline_schedule": "zero_bubble"}, "none"),
    (2, LLAMA, {"pipeline": 2, "pipeline_schedule": "zbv"}, "none"),
    (8, LLAMA, {"pipeline": 2, "tensor": 2, "zero_stage": 3}, "full"),
]


def check(ranks: Any, world: int, model: dict[str, Any], parallel: dict[str, Any], checkpointing: str) -> None:
    config, spec = run_of(model, parallel, checkpointing)
    real = ranks.run(on_gloo, world, model, parallel, checkpointing)
    replays = [replay_run(config, spec, BF16, world, rank) for rank in range(world)]
    # Where ranks have different experts, the router decides how many rows each receives; a replay takes it to be even.
    is_routed = any(key[1] == "all_to_all_single" for key in real[0].sizes) and "expert" in parallel
    for replayed, record in zip(replays, real, strict=True):
        assert replayed.calls == record.calls
        for key, size in record.sizes.items():
            if not (is_routed and key[1] == "all_to_all_single"):
                assert replayed.sizes[key] == size
        assert replayed.peak == pytest.approx(record.peak, rel=0.02 if is_routed else 0.01)
        assert record.peak > record.begin > 0
    # Each rank of a stage is replayed with an equal share of exactly what all of them send.
    count = world // parallel.get("pipeline", 1)
    for first in range(0, world, count):
        for key in real[first].sizes:
            total = sum(record.sizes[key] for record in real[first : first + count])
            assert all(replayed.sizes[key] * count == total for replayed in replays[first : first + count]), key


@pytest.mark.parametrize(("world", "model", "parallel", "checkpointing"), CELLS)
def test_a_replay_equals_the_step_on_ranks(
    ranks: Any, world: int, model: dict[str, Any], parallel: dict[str, Any], checkpointing: str
) -> None:
    check(ranks, world, model, parallel, checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "model", "parallel", "checkpointing"), MORE_CELLS)
def test_many_replays_equal_the_step_on_ranks(
    ranks: Any, world: int, model: dict[str, Any], parallel: dict[str, Any], checkpointing: str
) -> None:
    check(ranks, world, model, parallel, checkpointing)


def test_pipelines_count_what_ranks_send_each_other() -> None:
    config, spec = run_of(SMALL, {"pipeline": 2}, "none")
    record = replay_run(config, spec, BF16, 4, 0)
    assert record.calls["mesh_pipeline", "send"] == 4
    assert record.sizes["mesh_pipeline", "send"] == 4 * 2 * 32 * 48 * 2


def test_weights_without_storage_are_recorded() -> None:
    """Weights that oneDNN has packed for generation have a layout without storage; a step may use them."""
    packed = torch.ones(4, 4).to_mkldnn()
    with recording([packed]) as record:
        torch.ones(1024).add_(packed.to_dense().sum())
    assert record.begin == 0 and record.peak >= 4096
