"""Complete runs with divided blocks: they evaluate, write samples, save, and resume in another layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

EXPERTS = {
    "model.family": "mixtral",
    "model.experts.num_experts": 6,
    "model.experts.num_experts_per_token": 2,
    "model.experts.aux_loss_coef": 0.02,
    "model.experts.capacity_factor": 1.25,
}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": ({}, {"tensor": 2, "shard": 2}),
    "context": ({"model.family": "bloom", "model.num_kv_heads": None}, {"tensor": 2, "context": 2}),
    "ring": ({}, {"context": 4, "context_method": "ring"}),
    "expert": (EXPERTS, {"expert": 2, "shard": 2, "context": 2, "zero_stage": 3}),
}

TASK = """
task: names
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{a}}"
doc_to_choice: [one, two]
doc_to_target: 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["context", "tensor", "ring", "expert"])
def test_resuming_in_another_layout_equals_the_uninterrupted_run(kind, tiny_run, train_on, done, tmp_path):
    """One process trains 2 steps and saves, then 4 ranks load and train 2 more; and vice versa."""
    task = tmp_path / "task.yaml"
    task.write_text(TASK, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"a": "def "}\n{"a": "if x"}\n', encoding="utf-8")
    model, layout = LAYOUTS[kind]
    changes = {**model, "train.steps": 4, "schedule.type": "constant", "schedule.warmup": 2, "evaluation.every": 2}
    changes |= {"evaluation.num_sequences": 5, "evaluation.sample_prompts": ["def "], "evaluation.max_new_tokens": 4}
    changes |= {"evaluation.tasks": [str(task)]}
    divided = {f"parallel.{axis}": size for axis, size in layout.items()}
    alone = tiny_run(changes, name="alone")
    train_on(1, alone)
    one = done(alone)
    for name, first, then in (("spreads", (1, {}), (4, divided)), ("gathers", (4, divided), (1, {}))):
        train_on(first[0], tiny_run({**changes, **first[1], "train.steps": 2}, name=name))
        train_on(then[0], tiny_run({**changes, **then[1]}, name=name))
        many = done(tiny_run(name=name))
        for column in ("loss", "grad_norm"):
            assert many.column(column) == pytest.approx(one.column(column), rel=1e-9), (name, column)
        assert many.column("loss", "evaluation") == pytest.approx(one.column("loss", "evaluation"), rel=1e-9)
        for measure in ("bits_per_byte", "margin", "p_gold", "acc"):
            key = f"tasks/names/{measure}"
            assert many.column(key, "evaluation") == pytest.approx(one.column(key, "evaluation"), rel=1e-9)
        assert many.column("text", "sample") == one.column("text", "sample")
        weights = one.tensors()
        for key, tensor in many.tensors().items():
            torch.testing.assert_close(tensor, weights[key], rtol=1e-9, atol=1e-10, msg=f"{name} {key}")


def test_label_smoothing_and_z_loss_over_a_divided_vocabulary(tiny_run, train_on, done):
    changes = {"train.steps": 3, "train.label_smoothing": 0.1, "train.z_loss_coef": 1e-2}
    alone, divided = tiny_run(changes, name="alone"), tiny_run({**changes, "parallel.tensor": 2}, name="divided")
    train_on(1, alone)
    train_on(2, divided)
    assert done(divided).column("loss") == pytest.approx(done(alone).column("loss"), rel=1e-9)
    assert done(divided).column("grad_norm") == pytest.approx(done(alone).column("grad_norm"), rel=1e-9)
