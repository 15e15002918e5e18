"""Every setting of the schema changes a run, or is classified as one that cannot, and is named then."""

from __future__ import annotations

from typing import Any

import pytest

from jingu.config.introspect import all_keys
from jingu.training.idle_settings import TABLE, _conditions, find_idle_settings
from jingu.training.run import open_run
from tests.conftest import MakeRun


def test_every_setting_is_classified() -> None:
    idle = [key for entry in TABLE["idle"].values() for key in entry["keys"]]
    listed = {*idle, *TABLE["effective"]["keys"]}
    assert not set(idle) & set(TABLE["effective"]["keys"])
    keys = all_keys()
    assert listed <= set(keys)
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    prefixes = tuple(f"{key}." for key in listed)
    assert [key for key in leaves if not f"{key}.".startswith(prefixes)] == []


PROMPTS = {"task": {"type": "grpo", "prompts_per_step": 4, "answers_per_prompt": 2}, "batch.global_batch_size": 8}
ROWS = {"data.objective": {"type": "supervised", "template": "plain"}}
BLOCKS = {"type": "blocks"}
OTHER: dict[str, Any] = {
    "data.text_field": "body",
    "data.documents": "line",
    "data.escaped_newlines": True,
    "data.invalid_utf8": "skip",
    "data.max_document_bytes": 5,
    "data.packing": "best_fit",
    "data.order": BLOCKS,
    "data.document_mask": True,
    "data.stages": [{"start_step": 0, "weights": [1.0]}],
    "data.temperature": 2.0,
    "data.drop": {"file": "x"},
    "data.local_cache": "x",
    "data.reader": "lazy",
    "data.path": "x",
    "data.sources": [{"path": "x"}],
    "data.num_workers": 3,
    "data.drop.start_step": 3,
    "train.label_smoothing": 0.1,
    "train.z_loss_coef": 0.1,
    "evaluation.num_sequences": 5,
    "evaluation.num_sequences_at_end": 5,
    "evaluation.sample_prompts": ["x"],
    "evaluation.max_new_tokens": 5,
    "evaluation.tasks": ["x"],
    "evaluation.task_documents": 5,
    "checkpoint.best_metric": "bits_per_byte",
    "checkpoint.when_busy": "skip",
    "checkpoint.in_memory.folder": "x",
    "train.activation_checkpointing.every": 2,
    "parallel.pipeline_schedule": "gpipe",
    "parallel.stages_per_rank": 2,
    "parallel.layers_per_stage": [2],
    "parallel.context_method": "ring",
    "parallel.async_tensor_parallel": True,
    "task.label_smoothing": 0.1,
    "task.alpha": 0.3,
}
BASES = {
    "rows": ROWS,
    "prompts": PROMPTS,
    "unevaluated": {},
    **{key: {} for key in ("unsampled", "untested", "undropped", "stored_activations", "not_in_memory")},
    **{key: {} for key in ("without_pipeline", "without_context", "without_tensor")},
    "waiting_saves": {"checkpoint.async_save": False},
    "unranked": {},
    "other_divergence": {"task.type": "dpo"},
    "unsmoothed": {"task.type": "dpo", "task.loss": "ipo"},
}


@pytest.mark.parametrize(
    ("condition", "key"), [(name, key) for name, entry in TABLE["idle"].items() for key in entry["keys"]]
)
def test_a_setting_without_effect_is_named(condition: str, key: str, tiny_run: MakeRun) -> None:
    spec = open_run(tiny_run()).spec
    base = {"evaluation.every": 0 if condition == "unevaluated" else 7, **BASES[condition]}

    def warnings(changes: dict[str, Any]) -> str:
        return " ".join(find_idle_settings(tiny_run({**base, **changes}), spec, has_validation=True))

    assert condition in _conditions(tiny_run(base))
    unset = {"data.path": "data", "data.num_workers": "auto"}
    base |= {name: value for name, value in unset.items() if name == key}
    assert key not in warnings({})
    assert key in warnings({key: OTHER[key]}) and TABLE["idle"][condition]["when"] in warnings({key: OTHER[key]})
