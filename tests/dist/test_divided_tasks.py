"""Evaluation tasks during training: data-parallel ranks divide the documents, and measure the same to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jingu.config.schema import RunConfig
from jingu.data.build import build
from jingu.infer.engine import Engine
from jingu.text.tokenizer_commands import train as train_tokenizer
from tests.conftest import Done, MakeRun, peak_unmeasured, this_rank
from tests.dist.test_divided_runs import EXPERTS, TASK
from tests.rank_pool import RankPool

T5 = {
    "model.family": "t5",
    "model.num_kv_heads": None,
    "data.objective": {"type": "span_corruption", "noise_density": 0.25, "mean_span_length": 2.5, "num_sentinels": 8},
    "tokenizer.vocab_size": 397,
}
SHARDED = {"shard": 2, "zero_stage": 3}
# Ranks, their layout, changes of the model, and how many of the 7 contexts each rank computes.
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], list[int]]] = {
    "replicate": (3, {"replicate": 3, "zero_stage": 0}, {}, [3, 2, 2]),
    "shard": (2, SHARDED, {}, [4, 3]),
    "stages": (4, {"shard": 2, "pipeline": 2, "zero_stage": 1}, {}, [4, 3, 4, 3]),
    "tensor": (4, {"shard": 2, "tensor": 2}, {}, [4, 4, 3, 3]),
    "experts": (2, {**SHARDED, "expert": 2}, EXPERTS, [4, 3]),
    "encoder": (2, {"replicate": 2, "zero_stage": 0}, T5, [4, 3]),
    "sharded encoder": (2, SHARDED, T5, [7, 7]),
}


def count_contexts(rank: int, world: int, config: RunConfig) -> int:
    """Train, and return how many contexts the rank has computed."""
    from jingu.runtime.signals import StopRequest
    from jingu.training.commands import train_on_rank

    counts = []
    score_many = Engine.score_many

    def counted(engine: Engine, requests: Sequence[Any], adapter: str | None = None) -> Any:
        counts.append(len(requests))
        return score_many(engine, requests, adapter)

    Engine.score_many = counted  # type: ignore[method-assign]
    try:
        with peak_unmeasured():
            train_on_rank(config, this_rank(rank, world), StopRequest())
    finally:
        Engine.score_many = score_many  # type: ignore[method-assign]
    return sum(counts)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("replicate", "shard") else pytest.param(kind, marks=pytest.mark.slow) for kind in LAYOUTS],
)
def test_ranks_divide_the_documents(
    kind: str, tiny_run: MakeRun, ranks: RankPool, done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    world, layout, model, contexts = LAYOUTS[kind]
    (tmp_path / "task.yaml").write_text(TASK, encoding="utf-8")
    rows = [json.dumps({"a": "def name" + "(x, " * number}) for number in range(7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    # Weights do not change at this rate, and are the same in each layout.
    changes = {**model, "train.steps": 1, "optimizer.lr": 1e-30, "batch.global_batch_size": 12}
    changes |= {"evaluation.every": 1, "evaluation.num_sequences": 1, "evaluation.tasks": [str(tmp_path / "task.yaml")]}
    if kind.endswith("encoder"):
        # A tokenizer with sentinels, and the data set that it makes.
        changes |= {"tokenizer.path": str(tmp_path / "tokenizer"), "data.path": str(tmp_path / "data")}
        train_tokenizer(tiny_run(changes))
        build(tiny_run(changes))
    divided = {f"parallel.{axis}": size for axis, size in layout.items()}
    assert ranks.run(count_contexts, 1, tiny_run(changes, name="alone")) == [7]
    assert ranks.run(count_contexts, world, tiny_run({**changes, **divided}, name="divided")) == contexts
    one, many = (measures(done(tiny_run(name=name))) for name in ("alone", "divided"))
    # Ranks of `tensor` sum parts of each number, so that its last digit may differ.
    assert many == (pytest.approx(one, rel=1e-12, abs=1e-15) if "tensor" in layout else one) and len(one) == 11


def measures(files: Done) -> dict[str, float]:
    """What a run has measured of its task."""
    (row,) = files.lines("evaluation")
    return {key: value for key, value in row.items() if key.startswith("tasks/")}
