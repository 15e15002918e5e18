"""Alarms of policy learning: exploited rewards, entropy and KL out of range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from jingu.align.alarms import Alarms
from jingu.config.schema import RunConfig
from jingu.report.page import render_page
from jingu.report.record import read_run
from jingu.training.commands import train
from tests.conftest import Done, MakeRun
from tests.report.test_report import checked

pytestmark = pytest.mark.usefixtures("peak")


NORMAL = {"reward": 0.5, "truncated": 0.1, "dead_groups": 0.1, "entropy": 2.0, "kl": 0.05}


def test_alarms_name_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms()
    for step in range(30):
        # The reward rises, and what it should measure falls.
        alarms.check({**NORMAL, "reward": step / 30, "rewards/truth": 1 - step / 30}, ["truth"])
    assert [record.message for record in caplog.records if "the audit truth falls" in record.message]
    assert len(caplog.records) == 1  # once
    alarms.check({**NORMAL, "reward": 0.0, "rewards/truth": 0.0, "truncated": 0.6, "dead_groups": 0.9}, ["truth"])
    assert "raise task.max_new_tokens" in caplog.text and "set task.max_resampling" in caplog.text


@pytest.mark.parametrize(("agreement", "growth", "warns"), [(0.55, 0.0, True), (0.55, 0.01, False), (0.7, 0.0, False)])
def test_a_reward_that_does_not_rank_as_its_audit_warns(
    agreement: float, growth: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    alarms = Alarms()
    for step in range(25):
        metrics = {"reward": step / 30, "rewards/truth": 0.5 + growth * step, "agreement/truth": agreement}
        alarms.check({**NORMAL, **metrics}, ["truth"])
    assert ("rank only 55% of the pairs" in caplog.text) == warns


HACKED_REWARDS = """
def fluent(completions):
    return [float(text.count("e")) for text in completions]

def varied(completions):
    return [len(set(text)) / max(len(text), 1) for text in completions]
"""


def test_a_reward_that_is_exploited_raises_the_alarm(
    make: MakeRun, done: Callable[[RunConfig], Done], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The letter e is all that counts, and answers come to consist of it."""
    (tmp_path / "hack.py").write_text(HACKED_REWARDS)
    rewards: list[dict[str, Any]] = [
        {"type": "python", "function": f"{tmp_path}/hack.py:{name}", "audit": name == "varied"}
        for name in ("fluent", "varied")
    ]
    changes = {"task.rewards": rewards, "task.updates_per_step": 1, "optimizer.lr": 0.03, "schedule.warmup": 0}
    config = make({**changes, "train.steps": 24})
    assert train(config) == 0
    run = done(config)
    reward, audit = run.column("reward"), run.column("rewards/varied")
    assert fmean(reward[-5:]) > 2 * fmean(reward[:5]) and fmean(audit[-5:]) < 0.8 * fmean(audit[:5])
    words = "The reward rises while the audit varied falls"
    assert words in capfd.readouterr().err
    assert words in "".join(checked(render_page(read_run(run.folder))).text)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("entropy", 0.15, "End the run, or raise task.clip_high"),
        ("entropy", 6.5, "answers turn into noise. Lower optimizer.lr"),
        ("kl", 0.6, "Raise task.kl.beta"),
        ("kl", -0.02, "set precision.type=fp32"),
    ],
)
def test_entropy_and_kl_have_a_range(key: str, value: float, remedy: str, caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms()
    for step in range(30):
        # A single step out of range is noise.
        alarms.check({**NORMAL, "kl": -0.3 if step == 15 else 0.05}, [])
    assert not caplog.records
    for _ in range(12):
        alarms.check({**NORMAL, key: value}, [])
    assert len(caplog.records) == 1 and remedy in caplog.text


@pytest.mark.parametrize(("lr", "is_raised"), [(0.05, True), (1e-4, False)])
def test_a_run_that_leaves_its_reference_warns(
    make: MakeRun, done: Callable[[RunConfig], Done], capfd: pytest.CaptureFixture[str], lr: float, is_raised: bool
) -> None:
    start = make({"train.steps": 1}, name="start")
    assert train(start) == 0
    changes = {"task.kl": {"type": "kl", "beta": 1e-6}, "initialize": {"from": str(done(start).folder)}}
    changes |= {"task.prompts_per_step": 2, "batch.global_batch_size": 8, "schedule.warmup": 0}
    assert train(make({**changes, "optimizer.lr": lr, "train.steps": 20})) == 0
    log = capfd.readouterr().err
    assert ("The KL divergence from the reference exceeds" in log) == is_raised
    assert "The entropy" not in log
