"""Calibration: constants are found again, and few measurements do not move them far."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jingu.config.load import dump_yaml
from jingu.errors import JinguError
from jingu.plan.calibration import Measurement, fit_efficiency, prediction_errors, residual_interval
from jingu.plan.machine import Efficiency, find_machine
from jingu.plan.step_time import step_time
from jingu.training.plan_calibrate import calibrate
from tests.plan.test_memory import LLAMA, settings, workload


def measurements(efficiency: Efficiency) -> list[Measurement]:
    """Return steps of several layouts, as a machine of this efficiency takes them."""
    result = []
    for ranks, parallel in ((1, {}), (2, {"tensor": 2}), (4, {"zero_stage": 3}), (2, {"pipeline": 2})):
        config, spec = settings({**LLAMA, "hidden_size": 960, "intermediate_size": 4096}, parallel)
        work = workload(config, spec, ranks)
        machine = find_machine("a100-80").model_copy(update={"efficiency": efficiency})
        result.append(Measurement(work, find_machine("a100-80"), sum(step_time(work, machine).values())))
    return result


def test_a_slower_machine_is_recognized() -> None:
    slow = Efficiency(kernel_us=20.0, hop_us=15.0)
    steps = measurements(slow)
    before = prediction_errors(steps, Efficiency())
    after = prediction_errors(steps, fit_efficiency(steps))
    assert max(map(abs, before)) > 0.3
    assert max(map(abs, after)) < 0.1


def test_measured_terms_say_which_constant_is_wrong() -> None:
    """One step alone: its total fits a slower memory as well as slower products; its terms tell them apart."""
    slow = Efficiency(memory=0.35)
    work, machine = measurements(slow)[0].work, find_machine("a100-80")
    terms = Measurement(work, machine, 1.0).plan_terms(slow)
    step = Measurement(work, machine, sum(terms.values()), terms)
    fitted, from_total = fit_efficiency([step]), fit_efficiency([replace(step, terms={})])
    assert fitted.memory == pytest.approx(0.35, rel=0.3) != from_total.memory
    assert fitted.matmul == pytest.approx(Efficiency().matmul, rel=0.05)


def test_the_interval_holds_what_the_runs_logged() -> None:
    steps = [
        replace(step, step_seconds=tuple(step.seconds * n / 10 for n in range(8, 13)))
        for step in measurements(Efficiency())
    ]
    assert residual_interval(steps) == pytest.approx((0.8, 1.2), rel=1e-3)


def test_exact_predictions_change_nothing() -> None:
    fitted = fit_efficiency(measurements(Efficiency())).model_dump()
    assert fitted == pytest.approx(Efficiency().model_dump(), rel=1e-6)


def test_a_calibrated_machine_file_can_be_planned_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, spec = settings(LLAMA, {"zero_stage": 2})
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_yaml(config))
    (run / "model.json").write_text(spec.to_json())
    tokens = config.batch.global_batch_size * config.batch.sequence_length
    start = {"type": "start", "step": 0, "ranks": 2, "precision": "bf16", "tokens_per_step": tokens}
    steps = [{"type": "train", "step": n, "tokens_per_second": tokens / 0.1} for n in range(5)]
    # An earlier start on one rank took longer, and does not count.
    earlier = [{**start, "ranks": 1}, *({**step, "tokens_per_second": tokens / 0.9} for step in steps)]
    lines = (json.dumps(line) + "\n" for line in (*earlier, start, *steps))
    (run / "metrics.jsonl").write_text("".join(lines))
    calibrate([run], "a100-80", tmp_path / "cluster.yaml")
    out = capsys.readouterr().out
    assert "0.100 s per step" in out and "9 of 10 logged steps" in out
    machine = find_machine(str(tmp_path / "cluster.yaml"))
    assert machine.efficiency.kernel_us > Efficiency().kernel_us
    assert machine.interval is not None and 1.0 <= machine.interval[0] <= machine.interval[1] < 1.3
    (run / "metrics.jsonl").write_text(json.dumps(start) + "\n")
    with pytest.raises(JinguError, match="too few logged steps"):
        calibrate([run], "a100-80", tmp_path / "cluster.yaml")
    rollouts, _ = settings(LLAMA, {"zero_stage": 2}, task={"type": "grpo"})
    (run / "config.yaml").write_text(dump_yaml(rollouts))
    with pytest.raises(JinguError, match="generates answers"):
        calibrate([run], "a100-80", tmp_path / "cluster.yaml")
