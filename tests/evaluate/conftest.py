"""A tiny decoder, and a folder for task files with their data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jingu.config.sections.model import ModelSettings
from jingu.evaluate.task_file import TaskIndex, TaskSettings
from jingu.infer.inference_model import InferenceModel
from jingu.model.decoder import build_model
from jingu.model.resolve import spec_from_settings
from jingu.model.weight_init import init_weights
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer

WriteTask = Callable[..., Path]
ROWS = [
    {"question": f"What is {number} + 1?", "label": number % 3, "choices": ["one", "two", "many"], "text": str(number)}
    for number in range(7)
]


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(["What is one and two? many things, 3 + 1. " * 3]), 290, ["<|endoftext|>"])


@pytest.fixture(scope="package")
def tiny(tokenizer: Tokenizer) -> InferenceModel:
    settings = ModelSettings(hidden_size=24, num_heads=3, num_layers=2, initializer_range=0.4)
    spec = spec_from_settings(settings, tokenizer.vocab_size, 64)
    model = build_model(spec)
    init_weights(model, spec, 1)
    return InferenceModel(model.eval(), spec, tokenizer)


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Write a task file, a multiple-choice task over `ROWS` unless its settings say something else; None removes."""

    def write(rows: list[dict[str, Any]] | None = None, **settings: Any) -> Path:
        (tmp_path / "rows.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in (ROWS if rows is None else rows)), encoding="utf-8"
        )
        content = {
            "task": "sums",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_target": "label",
            "doc_to_choice": "choices",
            **settings,
        }
        file = tmp_path / "sums.yaml"
        file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}), "utf-8")
        return file

    return write


def load_task(file: Path, **options: Any) -> TaskSettings:
    """The only task of a file."""
    index = TaskIndex(**options)
    (name,) = index.load(str(file))
    return index.tasks[name]
