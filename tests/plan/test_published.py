"""The planner against published runs, and against formulas of papers."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median

import pytest

from bench import planning
from bench.planning import FOLDER, SETS, PublishedSystem, held_out, measurement, time_errors
from jingu.plan.memory import fullest_stage
from jingu.plan.workload import num_parameters


@pytest.mark.parametrize(("name", "rows"), [("zero bubble", 6), ("OneFlow, V100", 6), ("torchtitan", 7)])
def test_memory_is_what_was_measured(name: str, rows: int) -> None:
    """Pipelines of 8 to 32 A100s (Qi et al., 2023), all axes on V100s, and ZeRO beside tensor parallelism on H100s."""
    errors = [case.memory_error for case in SETS[name](FOLDER) if case.memory_error is not None]
    assert len(errors) == rows
    assert fmean(map(abs, errors)) < 0.05
    assert max(map(abs, errors)) < 0.12


# Hidden size, layers and parameters in billions of the models of Table 1.
ZERO_MODELS = {"7.5B": (4096, 36, 7.5), "128B": (12288, 70, 128), "1T": (25600, 127, 1000)}
# Weights and gradients in fp16, master weights and moments in fp32. Sharded weights lie beside their masters.
ZERO = PublishedSystem(gradient_bytes=2.0, reduce_bytes=2.0)
ZERO_STAGES = {"os": (1, ZERO), "osg": (2, ZERO), "osgp": (3, replace(ZERO, weight_bytes=6.0, copies_weights=False))}


@pytest.mark.parametrize("row", planning.read_rows("zero_table1", FOLDER), ids=lambda row: f"{row['dp']} ranks")
def test_model_states_are_those_of_zero(row: dict[str, str]) -> None:
    """Rajbhandari et al., 2020, Table 1, to its last digit: gigabytes of a rank, by stage, of 16 bytes a parameter."""
    ranks = int(row["dp"])
    for name, printed in list(row.items())[1:]:
        model, _, stage = name.partition("_")
        hidden, layers, billions = ZERO_MODELS[model]
        # The vocabulary makes up for what blocks of this size leave.
        spec = planning.gpt(layers, hidden, 32, 1024, 1024, tie_word_embeddings=True)
        vocab = 1024 + round((billions * 1e9 - num_parameters(spec)) / hidden)
        spec = planning.gpt(layers, hidden, 32, 1024, vocab, tie_word_embeddings=True)
        # A single rank divides nothing, whatever the stage.
        zero_stage, software = ZERO_STAGES[stage if ranks > 1 else "osgp"]
        work = planning.workload(spec, {"shard": ranks}, 1, 2 * ranks, software, zero_stage=zero_stage)
        device = fullest_stage(work)[1].device
        parts = ("weights", "compute weights", "gradients", "optimizer state")
        total = sum(device.get(part, 0.0) for part in parts) / 1e9
        unit = 10.0 ** -len(printed.partition(".")[2])
        assert total == pytest.approx(float(printed), rel=2e-3, abs=unit), name


@pytest.mark.slow
def test_the_library_alone_predicts_published_steps() -> None:
    errors = [error for load in SETS.values() for error in time_errors([measurement(case) for case in load(FOLDER)])]
    assert len(errors) > 250
    assert median(map(abs, errors)) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("vTrain, several nodes", 0.09),
        ("vTrain, one node", 0.08),
        ("llm-foundry, A100", 0.07),
        ("llm-foundry, H100", 0.07),
        ("torchtitan", 0.12),
        ("mixtures, H100", 0.15),
        ("mixtures, B200, GB200, GB300", 0.15),
    ],
)
def test_constants_of_few_rows_predict_the_others(name: str, limit: float) -> None:
    errors, number = held_out(SETS[name](FOLDER))
    assert number <= planning.MAX_FIT
    assert fmean(map(abs, errors)) < limit
