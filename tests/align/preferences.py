"""Preference rows of an invented kind, and tiny runs on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jingu.align.commands import prepare
from jingu.config.schema import RunConfig
from jingu.runtime.signals import StopRequest
from jingu.training.commands import train, train_on_rank
from jingu.training.task import find_task_factory
from tests.conftest import peak_unmeasured, this_rank

MakeRun = Callable[..., RunConfig]


def write_pairs(file: Path, count: int = 40) -> Path:
    """Write pairs whose chosen answer is "yes", and whose rejected one is "never" or longer."""
    words = ["heap", "list", "text", "line", "json", "code", "item", "word"]
    rows = [
        {
            "prompt": f"{number} is {words[number % len(words)]}?",
            "chosen": " yes" if number % 3 else " yes it is",
            "rejected": " never" if number % 2 else " never again",
        }
        for number in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def preference_run(tiny_run: MakeRun, folder: Path, changes: dict[str, Any], **more: Any) -> RunConfig:
    """Return a tiny run on such pairs, whose data set is prepared."""
    file = folder / "pairs.jsonl"
    if not file.exists():
        write_pairs(file)
    config = tiny_run(
        {
            "data.input": str(file),
            "data.path": str(folder / "preferences"),
            "data.suffixes": [".jsonl"],
            "data.objective": {"type": "preference", "template": "plain"},
            "batch.sequence_length": 48,
            "schedule": {"type": "constant", "warmup": 0},
            **changes,
        },
        **more,
    )
    prepare(config)
    return config


def train_on_ranks(rank: int, world: int, config: RunConfig) -> int:
    """Train a run of any task as a rank of a group that exists."""
    with peak_unmeasured():
        return train_on_rank(config, this_rank(rank, world), StopRequest(), task_factory=find_task_factory(config.task))


def train_here(config: RunConfig) -> None:
    """Train a run of any task in this process."""
    with peak_unmeasured():
        assert train(config) == 0
