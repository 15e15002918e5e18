"""The guide to your own model: its block computes the same in every layout as in one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest

from jingu.model.sharding_table import ShardingStyle
from jingu.training.verify import first_divergence
from tests.training import test_verify

GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "own-model.md").read_text(encoding="utf-8")
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero": {"parallel.zero_stage": 3},
    "tensor": {"parallel.tensor": 2},
    "context": {"parallel.context": 2, "parallel.zero_stage": 2},
    "pipeline": {"parallel.pipeline": 2, "parallel.zero_stage": 0},
    "pipeline-tensor": {
        "parallel.pipeline": 2,
        "parallel.tensor": 2,
        "train.activation_checkpointing.type": "selective",
    },
}


@contextmanager
def block_of_guide() -> Iterator[None]:
    """Replace the decoder's block by the block of the guide."""
    from jingu.model import decoder

    (code,) = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    # What was built with one block is not what the other builds.
    decoder.parameter_shapes.cache_clear()
    with test_verify.replaced(decoder, "Block", names["ParallelBlock"]):
        yield
    decoder.parameter_shapes.cache_clear()


def record(rank: int, world: int, runs: list[Any]) -> None:
    with block_of_guide():
        test_verify.record(rank, world, [(config, "nothing") for config in runs])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_block_of_the_guide_runs_in_every_layout(tmp_path, tiny_run, ranks):
    ranks.run(record, 1, [test_verify.short(tmp_path, tiny_run, "one")])
    runs = {name: test_verify.short(tmp_path, tiny_run, name, **changes) for name, changes in LAYOUTS.items()}
    last = runs.pop("pipeline-tensor")
    ranks.run(record, 2, list(runs.values()))
    ranks.run(record, 4, [last])
    for name in LAYOUTS:
        comparisons = test_verify.compared(tmp_path, name)
        assert first_divergence(comparisons, 1e-9) is None, name
        compared = {comparison.name for comparison in comparisons}
        assert {"blocks.0.feed_forward.gate.weight", "blocks.1.feed_forward.down", "blocks.0.norm"} <= compared


def test_every_style_is_documented():
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", GUIDE, re.MULTILINE)
    assert {word.strip("` ") for line in cells for word in line.split(",")} == set(get_args(ShardingStyle))
