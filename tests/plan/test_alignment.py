"""Plans of runs that learn from their own answers: every model counted, in the fullest phase of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.cli import main
from jingu.model.decoder import Decoder
from jingu.model.layers import Linear
from jingu.plan.forecast import Forecast, forecast
from jingu.plan.machine import find_machine, nominal_machine
from jingu.plan.workload import num_parameters
from jingu.training.plan_commands import PlanRequest, forecast_fitting
from jingu.training.plan_task import add_task
from tests.plan.test_memory import LLAMA, bytes_on_fake_ranks, settings, workload

TASK = {"type": "grpo", "prompts_per_step": 4, "answers_per_prompt": 4, "max_new_tokens": 8}


def plan_of(task: dict[str, Any], ranks: int = 2, model: dict[str, Any] = LLAMA) -> tuple[Forecast, Forecast]:
    """Return the forecast of updates alone, and that of the whole step."""
    config, spec = settings(model, {"zero_stage": 3}, task=TASK | task)
    updates = forecast(workload(config, spec, ranks), find_machine("h100"), 10)
    return updates, add_task(updates, config, spec)


def test_the_reference_is_laid_out_like_the_trained_model() -> None:
    _, plan = plan_of({"kl": {"type": "kl"}})
    config, spec = settings(LLAMA, {"zero_stage": 3})
    owned = bytes_on_fake_ranks(config, spec, 2, 0)
    assert plan.memory.device["reference weights"] == owned["weights"] == plan.memory.device["weights"]
    assert plan.memory.device["optimizer state"] == owned["optimizer state"]
    assert plan.seconds["reference"] > 0


def test_the_fullest_phase_counts() -> None:
    updates, plan = plan_of({})
    assert set(plan.phases) == {"update", "generation"}
    assert plan.phases["update"] == updates.memory.total
    assert plan.memory.total == max(plan.phases.values())
    # Short sequences of a larger model take less than the whole copies that two ranks gather.
    model = {**LLAMA, "hidden_size": 480, "num_layers": 12, "intermediate_size": 2048}
    _, plan = plan_of({}, model=model)
    assert plan.phases["generation"] > plan.phases["update"]
    assert plan.memory.device["gathered copy"] == 4 * num_parameters(plan.work.spec)
    _, alone = plan_of({}, ranks=1, model=model)
    assert "gathered copy" not in alone.memory.device


def test_matrices_are_copied_for_the_kernels_of_a_cpu() -> None:
    """One rank shares the weights otherwise, and adapters or exact training keep them as they are."""
    config, spec = settings(LLAMA, {}, task=TASK)
    updates = forecast(workload(config, spec, 1), nominal_machine(torch.device("cpu")), 10)
    model = Decoder(spec)
    linears = (module for module in model.modules() if isinstance(module, Linear))
    numbers = sum(linear.weight.numel() for linear in linears)
    with_head = numbers + (model.embedding.weight.numel() if model.head is None else 0)
    both = [add_task(updates, config, spec).phases["generation"]]
    exact = settings(LLAMA, {}, task=TASK | {"exact": True})[0]
    both.append(add_task(updates, exact, spec).phases["generation"])
    assert both[0] - both[1] == with_head * updates.work.software.compute_bytes


def test_reward_models_lie_in_main_memory_and_teachers_on_the_cards() -> None:
    reward = {"type": "model", "model": "runs/missing"}
    _, plan = plan_of({"rewards": [reward, {**reward, "name": "other"}]})
    size = 4.0 * num_parameters(plan.work.spec.model_copy(update={"score_head": True}))
    assert plan.memory.host == {"reward model 1 weights": size, "reward model 2 weights": size}
    assert "runs/missing does not exist yet, and is as large as the trained model" in plan.assumptions
    task = {name: value for name, value in TASK.items() if name != "type"}
    _, plan = plan_of({"type": "distill", "teacher": "runs/missing", **task})
    assert plan.memory.device["teacher weights"] > 0 and plan.seconds["teacher"] > 0


def test_a_critic_is_trained_after_the_policy() -> None:
    """Its weights and state stay on the card; its gradients and activations come when those of the policy are gone."""
    _, plan = plan_of({"type": "ppo", "answers_per_prompt": 1})
    assert {"reference", "critic"} < plan.seconds.keys()
    config, spec = settings(LLAMA, {"zero_stage": 3})
    owned = bytes_on_fake_ranks(config, spec.model_copy(update={"score_head": True}), 2, 0)
    assert plan.memory.device["critic weights"] == owned["weights"]
    assert plan.memory.device["critic optimizer state"] == owned["optimizer state"]
    assert plan.phases["critic update"] < plan.phases["update"]  # it has no logits
    _, shared = plan_of({"type": "ppo", "answers_per_prompt": 1, "critic": {"type": "shared"}})
    assert "critic weights" not in shared.memory.device


def test_a_step_of_several_updates_takes_as_many() -> None:
    updates, plan = plan_of({"updates_per_step": 2})
    for term, seconds in updates.seconds.items():
        assert plan.seconds[term] == 2 * seconds
    assert plan.seconds["log-probabilities"] > 0 and plan.seconds["generation"] > 0
    assert plan.to_json()["tokens_per_second"] == pytest.approx(2 * 32 * 16 / plan.step)


def test_jingu_plan_shows_the_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    run = {"model": {**LLAMA, "vocab_size": 320}, "tokenizer": {"vocab_size": 320}}
    file.write_text(json.dumps({**run, "task": TASK}))
    words = ["plan", str(file), "--on", "h100", "--gpus", "2", "batch.sequence_length=32"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "phases: update" in out and "generation" in out
    file.write_text(json.dumps({**run, "task": {"type": "dpo"}}))
    assert main([*words, "batch.global_batch_size=8"]) == 0
    assert "log-probabilities of the reference are computed before the first step" in capsys.readouterr().out


def test_a_layout_must_also_hold_what_the_task_adds() -> None:
    """Of two layouts, the update and the reference beside it fit only in the second."""
    task = TASK | {"kl": {"type": "kl"}}
    works = []
    for stage in (0, 3):
        config, spec = settings(LLAMA, {"zero_stage": stage}, task=task)
        works.append(workload(config, spec, 2))
    request = PlanRequest(config, spec, True, [])
    totals = [forecast_fitting(request, [work], find_machine("h100"), None).memory.total for work in works]
    assert totals[0] > totals[1]
    # Some of a card is not for tensors (`Machine.usable_bytes`), and plans have a margin of a tenth.
    memory = 1.1 * sum(totals) / 2 / 2**30 + 1.5
    small = find_machine("h100").model_copy(update={"memory_gib": memory})
    assert forecast_fitting(request, works, small, None).work is works[1]
    assert forecast_fitting(request, works[:1], small, None).spare < 0
