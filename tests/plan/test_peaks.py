"""The memory of plans in closed form against the peaks of replayed steps, and these against PyTorch's profiler."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from jingu.compat.torch_distributed import pretend_ranks
from jingu.parallel.layout import Precision
from jingu.parallel.sharding import local_tensor
from jingu.plan.memory import fullest_stage
from jingu.training.replay_run import prepare_step, replay_run
from tests.plan.test_memory import BF16, settings, workload

pytestmark = pytest.mark.usefixtures("bf16_units")
FP32 = Precision("fp32", torch.float32, torch.float32, torch.float32)
PRECISIONS = {"fp32": FP32, "bf16": BF16}
DIMS: dict[str, Any] = {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "max_position_embeddings": 256}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**DIMS, "family": "llama", "num_kv_heads": 4, "intermediate_size": 688, "vocab_size": 4096},
    "gpt2": {**DIMS, "family": "gpt2", "vocab_size": 4096},
    "mixtral": {
        **DIMS,
        "family": "mixtral",
        "intermediate_size": 256,
        "vocab_size": 4096,
        "experts": {"num_experts": 4, "num_experts_per_token": 2},
    },
    "deep": {
        **DIMS,
        "family": "llama",
        "num_layers": 8,
        "num_kv_heads": 4,
        "intermediate_size": 688,
        "vocab_size": 4096,
    },
    # The block is larger than the loss.
    "narrow": {**DIMS, "family": "llama", "num_kv_heads": 4, "intermediate_size": 688, "vocab_size": 64},
}
# Model, ranks, layout, precision, checkpointing, rows of a micro-batch and of a step.
Cell = tuple[str, int, dict[str, Any], str, str, int, int]
SCHEDULES = ("interleaved", "zero_bubble", "zbv")
KINDS = ("none", "selective", "full")
QUICK: list[Cell] = [
    ("llama", 1, {}, "bf16", "full", 2, 16),
    ("narrow", 1, {}, "fp32", "none", 2, 16),
    ("llama", 4, {"zero_stage": 3}, "bf16", "none", 2, 16),
    ("gpt2", 4, {"tensor": 4}, "bf16", "selective", 2, 16),
]
CELLS: list[Cell] = [
    *((model, 1, {}, name, kind, 2, 16) for model in MODELS for name in PRECISIONS for kind in KINDS),
    *(
        ("llama", 4, {"zero_stage": zero}, *kind, 2, 16)
        for zero in range(4)
        for kind in (("fp32", "none"), ("bf16", "full"))
    ),
    *(("llama", 2, {"zero_stage": 0}, name, "selective", 2, 16) for name in PRECISIONS),
    *(("gpt2", 2, {"zero_stage": 3}, name, "none", 2, 16) for name in PRECISIONS),
    *(("llama", 2, {"tensor": 2}, name, kind, 2, 16) for name in PRECISIONS for kind in ("none", "full")),
    *(("llama", 2, {"pipeline": 2}, name, kind, 2, 16) for name in PRECISIONS for kind in ("none", "full")),
    *(("llama", 2, {"pipeline": 2, "pipeline_schedule": "gpipe"}, "fp32", kind, 2, 16) for kind in ("none", "full")),
    *(("mixtral", 2, {"expert": 2}, name, "full", 2, 16) for name in PRECISIONS),
    *(("llama", 1, {}, name, "none", 2, 2) for name in PRECISIONS),
    *(("llama", 1, {}, name, "none", 8, 16) for name in PRECISIONS),
    *(("llama", 1, {"offload": {"type": "host"}}, "fp32", kind, 2, 16) for kind in KINDS),
    *(("narrow", 1, {}, name, "full", 4, 16) for name in PRECISIONS),
    *(("gpt2", 4, {"zero_stage": 2}, name, "full", 2, 16) for name in PRECISIONS),
    ("narrow", 2, {"zero_stage": 3}, "fp32", "full", 2, 16),
    # Selective checkpointing saves partial sums of all tokens, and experts have rows of all tokens.
    *(("llama", 2, {"tensor": 2}, name, "selective", 4, 16) for name in PRECISIONS),
    *(("gpt2", 4, {"tensor": 4}, "bf16", kind, 2, 16) for kind in KINDS),
    *(("mixtral", ranks, {"tensor": ranks}, "fp32", kind, 2, 16) for ranks, kind in ((2, "none"), (4, "full"))),
    *(("narrow", 2, {"tensor": 2}, name, "full", 2, 16) for name in PRECISIONS),
    *(
        ("llama", 4, {"tensor": 2, "pipeline": 2}, name, kind, 2, 16)
        for name in PRECISIONS
        for kind in ("none", "full")
    ),
    ("llama", 8, {"tensor": 4, "pipeline": 2}, "fp32", "none", 2, 16),
    ("gpt2", 4, {"tensor": 2, "pipeline": 2}, "bf16", "full", 2, 16),
    ("mixtral", 4, {"tensor": 2, "pipeline": 2}, "fp32", "none", 2, 16),
    *(("llama", 2, {"pipeline": 2}, "fp32", "selective", micro, 16) for micro in (2, 4)),
    # Several stages per rank, and split backward passes.
    *(
        ("deep", ranks, {"pipeline": ranks, "pipeline_schedule": schedule}, *kind, 2, 16)
        for ranks in (2, 4)
        for schedule in SCHEDULES
        for kind in (("fp32", "none"), ("bf16", "none"), ("fp32", "full"))
    ),
    *(("gpt2", 2, {"pipeline": 2, "pipeline_schedule": schedule}, "bf16", "none", 2, 16) for schedule in SCHEDULES),
    *(("mixtral", 2, {"pipeline": 2, "pipeline_schedule": schedule}, "fp32", "full", 2, 8) for schedule in SCHEDULES),
    *(
        ("llama", 4, {"tensor": 2, "pipeline": 2, "pipeline_schedule": schedule}, "fp32", "none", 2, 16)
        for schedule in SCHEDULES
    ),
    *(
        ("llama", 4, {"pipeline": 2, "pipeline_schedule": schedule, "zero_stage": 2}, "bf16", "none", 2, 32)
        for schedule in SCHEDULES
    ),
]


def run_of(cell: Cell) -> tuple[Any, Any, Precision]:
    model, _, parallel, name, kind, micro, rows = cell
    precision = PRECISIONS[name]
    config, spec = settings(
        MODELS[model],
        parallel,
        train={"activation_checkpointing": {"type": kind}},
        batch={"sequence_length": 256, "global_batch_size": rows, "micro_batch_size": micro},
        precision={"type": name},
    )
    return config, spec, precision


def relative_error(cell: Cell) -> float:
    """Return the error of the plan of the fullest rank."""
    config, spec, precision = run_of(cell)
    world = cell[1]
    work = workload(config, spec, world, precision)
    first = world // work.sizes.pipeline
    peaks = [replay_run(config, spec, precision, world, stage * first).peak for stage in range(work.sizes.pipeline)]
    memory = fullest_stage(work)[1]
    return (memory.total + sum(memory.host.values())) / max(peaks) - 1


@pytest.mark.parametrize("cell", QUICK)
def test_a_planned_peak_equals_a_replayed_one(cell: Cell) -> None:
    assert abs(relative_error(cell)) < 0.01


def test_checkpointing_saves_memory_with_split_backward_passes() -> None:
    peaks = [
        replay_run(*run_of(("llama", 2, {"pipeline": 2, "pipeline_schedule": "zbv"}, "fp32", kind, 2, 16)), 2, 0).peak
        for kind in ("none", "full")
    ]
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.slow
def test_planned_peaks_equal_replayed_ones_in_many_cells() -> None:
    errors = {str(cell): relative_error(cell) for cell in CELLS}
    assert len(errors) >= 60
    assert {cell: error for cell, error in errors.items() if abs(error) >= 0.01} == {}


def profiled_peak(config: Any, spec: Any, precision: Precision, ranks: int) -> int:
    """Return the peak of the first of simulated ranks by the events of PyTorch's allocator."""
    pretend_ranks(0, ranks)
    try:
        step, model, optimizer = prepare_step(config, spec, precision, ranks)
        step(0)
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step(1)
        current = top = 0
        for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                current += event.nbytes()
                top = max(top, current)
        states = (tensor for state in optimizer.state.values() for tensor in state.values())
        tensors = (local_tensor(tensor) for tensor in (*model.parameters(), *model.buffers(), *states))
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return top + sum(storages.values())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        ({"zero_stage": 0}, "fp32"),
        ({"zero_stage": 3}, "bf16"),
        # In bf16, attention on CPUs with AMX has a workspace, which only the allocator sees.
        ({"context": 4}, "fp32"),
        ({"tensor": 4}, "bf16"),
    ],
)
def test_a_replay_counts_what_the_allocator_counts(parallel: dict[str, Any], name: str) -> None:
    """Also the buffers into which FSDP gathers parameters, which exist before the step, and pending collectives."""
    cell = ("llama", 4, parallel, name, "none", 2, 16)
    config, spec, precision = run_of(cell)
    assert replay_run(config, spec, precision, 4, 0).peak == pytest.approx(
        profiled_peak(config, spec, precision, 4), rel=0.001
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        ("llama", 1, {}, "bf16", "none", 4, 16),
        ("llama", 1, {}, "bf16", "full", 4, 16),
        ("llama", 4, {"zero_stage": 3}, "bf16", "none", 2, 16),
        ("gpt2", 1, {}, "bf16", "none", 4, 16),
        ("mixtral", 1, {}, "bf16", "none", 4, 16),
    ],
)
@pytest.mark.usefixtures("compiler", "compiled_steps")
def test_a_planned_peak_of_compiled_blocks_equals_that_of_the_allocator(cell: Cell) -> None:
    config, spec, precision = run_of(cell)
    work = workload(config, spec, cell[1], precision)
    planned = [
        fullest_stage(replace(work, software=replace(work.software, compiles_blocks=is_compiled)))[1].total
        for is_compiled in (False, True)
    ]
    peak = profiled_peak(config, spec, precision, cell[1])
    assert planned[1] == pytest.approx(peak, rel=0.005)
    # RMS norms and gates are computed again, but not with activation checkpointing, and GPT-2 has neither.
    assert planned[0] > 1.05 * peak or cell[0] == "gpt2" or cell[4] == "full"
