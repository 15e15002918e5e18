"""A made-up run that looks like a real one, for the report's tests (and for looking at the page)."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFIG = """\
name: stdlib-llama
seed: 0
data:
  input: corpus/
  path: data
  suffixes: [.py]
  validation_fraction: 0.05
model:
  family: llama
  num_layers: 6
  hidden_size: 256
  num_heads: 4
batch:
  sequence_length: 256
  global_batch_size: 32
optimizer:
  type: adamw
  lr: 0.003
  weight_decay: 0.1
schedule:
  type: wsd
  warmup: 60
  decay: 0.3
train:
  steps: 1200
evaluation:
  every: 100
  sample_prompts: ["def ", "class Test"]  # <- continued at each evaluation
"""

WRITING = {
    100: ("e(self, self.s\n        self.\n   )) (e, ret", ":\n\n    def self(s, self):\n  s  s = e\n"),
    500: (
        "get_name(self, name):\n        return self._name\n\n    def set(self, name):\n        self._name =",
        "(unittest.TestCase):\n\n    def test_test(self):\n        self.assertEqual(self, self)\n",
    ),
    1000: (
        'read_bytes(self, size=-1):\n        """Read and return up to size bytes."""\n'
        '        if size < 0:\n            raise ValueError("size must be >= 0")\n        data = self._read(size)\n',
        "Parser(unittest.TestCase):\n\n    def setUp(self):\n        self.parser = Parser()\n\n"
        "    def test_empty(self):\n        self.assertEqual(self.parser.parse(''), [])\n",
    ),
}


def _loss(step: int) -> float:
    settling = max(0.0, (step - 840) / 360)
    return 1.72 + 6.6 * math.exp(-step / 45) + 1.9 * math.exp(-step / 420) - 0.22 * settling


def realistic_rows(steps: int = 1200, log_every: int = 10, evaluate_every: int = 100) -> list[dict[str, Any]]:
    """The lines of a small Llama's run on Python sources, resumed on the way, twice from the same step."""
    chance = random.Random(7)
    start = {"type": "start", "step": 0, "time": "2026-01-01T12:00:00+00:00", "ranks": 1, "device": "cpu"}
    start |= {"precision": "fp32", "parameters": 4_213_760, "peak_flops": 1.4e11, "tokens_per_step": 8192}
    rows: list[dict[str, Any]] = [start | {"resumed_from": None}]
    rows.append({"type": "baseline", "name": "gzip -9", "bits_per_byte": 1.882})
    rows.append({"type": "baseline", "name": "xz -9", "bits_per_byte": 1.665})
    for step in range(log_every, steps + 1, log_every):
        rate = 41_000 + chance.gauss(0, 700) - (9_000 if step % 230 == 0 else 0)
        spike = 6.0 if step == 460 else 0.0
        lr = 3e-3 * min(1.0, step / 60, max(0.02, (steps - step) / (0.3 * steps)))
        row = {"type": "train", "step": step, "loss": _loss(step) + chance.gauss(0, 0.035) + spike / 8, "lr": lr}
        row |= {"grad_norm": 0.42 + 2.8 * math.exp(-step / 60) + abs(chance.gauss(0, 0.05)) + spike}
        row |= {"tokens": step * 8192, "tokens_per_second": rate, "seconds": step * 8192 / 41_200}
        row |= {
            "peak_share": rate * 4_213_760 * 6 / 1.4e11 / 13.4,
            "memory_bytes": 1_310_000_000 + min(step, 300) * 90_000,
        }
        rows.append(row)
        if step % evaluate_every == 0:
            loss = _loss(step) + 0.06
            rows.append({"type": "evaluation", "step": step, "loss": loss, "bits_per_byte": loss / 1.58})
            rows[-1] |= {"tokens": 120_000, "bytes": 273_540, "seconds": 3.2}
            stage = WRITING[max((at for at in WRITING if at <= step), default=100)]
            for prompt, text in zip(("def ", "class Test"), stage, strict=True):
                rows.append({"type": "sample", "step": step, "prompt": prompt, "text": text})
        if step == 600:
            rows += 2 * [start | {"step": 600, "time": "2026-01-01T12:09:41+00:00", "resumed_from": 600}]
    return rows


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (or raw text) as a run's folder."""

    def make(rows: list[dict[str, Any]], *, tail: str = "", name: str = "stdlib-llama") -> Path:
        return write_run(tmp_path / "runs" / name, rows, tail)

    return make


@pytest.fixture
def realistic() -> list[dict[str, Any]]:
    return realistic_rows()


def write_run(run: Path, rows: list[dict[str, Any]], tail: str = "") -> Path:
    run.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(lines + tail, encoding="utf-8")
    (run / "config.yaml").write_text(CONFIG, encoding="utf-8")
    (run / "model.json").write_text(json.dumps({"family": "llama", "num_layers": 6, "hidden_size": 256}, indent=2))
    return run
