"""Which changes make another run."""

from pathlib import Path

import pytest

from jingu.config.compare import CHANGEABLE_KEYS, breaking_changes
from jingu.config.introspect import all_keys
from jingu.config.load import load_config
from jingu.config.schema import RunConfig


def changed(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text("name: run\n")
    return load_config(file, overrides)


def test_the_same_run_has_no_differences() -> None:
    assert breaking_changes(RunConfig(), RunConfig()) == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("seed=1", "seed: 0 → 1"),
        ("model.hidden_size=64", "model.hidden_size: null → 64"),
        ("model.num_kv_heads=2", "model.num_kv_heads: null → 2"),
        ("model.tie_word_embeddings=true", "model.tie_word_embeddings: null → true"),
        ("batch.global_batch_size=64", "batch.global_batch_size: 32 → 64"),
        ("batch.sequence_length=64", "batch.sequence_length: 512 → 64"),
        ("optimizer.lr=1e-5", "optimizer.lr: 0.001 → 1e-05"),
        ("schedule.type=linear", "schedule.type: cosine → linear"),
        ("schedule.warmup=1.0", "schedule.warmup: 0.02 → 1.0"),
        ("train.steps=5", "train.steps: 1000 → 5"),
        ("train.max_grad_norm=null", "train.max_grad_norm: 1.0 → null"),
        ("precision.type=fp64", "precision.type: auto → fp64"),
        ("data.validation_fraction=0.5", "data.validation_fraction: 0.01 → 0.5"),
        ("tokenizer.vocab_size=300", "tokenizer.vocab_size: 4096 → 300"),
    ],
)
def test_changes_of_the_numbers_are_told(tmp_path: Path, override: str, told: str) -> None:
    assert breaking_changes(RunConfig(), changed(tmp_path, override)) == [told]


def test_one_step_is_not_the_whole_run(tmp_path: Path) -> None:
    one, whole = changed(tmp_path, "schedule.warmup=1"), changed(tmp_path, "schedule.warmup=1.0")
    assert breaking_changes(one, whole) == ["schedule.warmup: 1 → 1.0"]


def test_another_type_is_told_without_the_keys_that_only_one_has(tmp_path: Path) -> None:
    assert breaking_changes(RunConfig(), changed(tmp_path, "optimizer={type: lion, lr: 1e-3}")) == [
        "optimizer.type: adamw → lion",
        "optimizer.beta2: 0.95 → 0.99",
        "optimizer.weight_decay: 0.1 → 1.0",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "runs_dir=elsewhere",
        "tokenizer.path=elsewhere",
        "data.path=elsewhere",
        "data.num_workers=3",
        "batch.micro_batch_size=2",
        "parallel.zero_stage=3",
        "device.type=cpu",
        "device.threads=1",
        "train.compile=false",
        "train.activation_checkpointing.type=full",
        "train.log_every=1",
        "train.tensorboard=true",
        "train.trackers=[wandb]",
        "evaluation.every=7",
        "evaluation.sample_prompts=[a]",
        "checkpoint.every=7",
        "checkpoint.keep_last=7",
        "checkpoint.resume=never",
    ],
)
def test_changes_that_leave_the_numbers_alone(tmp_path: Path, override: str) -> None:
    assert changed(tmp_path, override) != RunConfig()
    assert breaking_changes(RunConfig(), changed(tmp_path, override)) == []


@pytest.mark.parametrize(
    ("schedule", "harmful"),
    [
        ("{type: constant, warmup: 10}", False),
        ("{type: constant, warmup: 0.0}", False),
        ("{type: constant, warmup: 0.1}", True),
        ("{type: inverse_sqrt, warmup: 10}", False),
        ("{type: linear, warmup: 10}", True),
        ("{type: wsd, warmup: 10}", True),
    ],
)
def test_a_run_can_be_made_longer_where_the_rate_does_not_depend_on_its_length(
    tmp_path: Path, schedule: str, harmful: bool
) -> None:
    old = changed(tmp_path, f"schedule={schedule}", "train.steps=10")
    new = changed(tmp_path, f"schedule={schedule}", "train.steps=20")
    assert breaking_changes(old, new) == (["train.steps: 10 → 20"] if harmful else [])


def test_every_harmless_key_exists() -> None:
    assert set(all_keys()) >= CHANGEABLE_KEYS
