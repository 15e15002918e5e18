"""Every figure of `jingu plan --json` against a run, or against other figures. An unlisted figure fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from jingu.cli import main
from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from jingu.config.sections import optimizers, tasks
from jingu.plan import forecast, weight_memory
from jingu.plan.machine import Machine
from jingu.plan.memory import STATE
from jingu.plan.weight_memory import rank_share
from jingu.training.commands import train
from jingu.training.optimizer import ShardedOptimizer
from jingu.training.run import open_run
from tests.align.preferences import preference_run
from tests.conftest import MakeRun, peak_unmeasured
from tests.mutants import mutated
from tests.plan.test_checkpoint_size import saved_bytes
from tests.plan.test_memory import LLAMA, settings, workload

OPTIMIZERS = ("adamw", "lion", "adafactor", "muon", "sgd")
QUICK = {("pretraining", "lion"), ("pretraining", "muon"), ("dpo", "adamw"), ("dpo", "sgd")}
TASKS = ("pretraining", "dpo", "simpo", "orpo", "cpo", "kto", "reward", "grpo", "ppo", "distill")
MACHINE = Machine(
    name="test",
    memory_gib=10.0,
    peak_tflops=0.1,
    matmul_tflops=0.05,
    memory_gbs=10.0,
    link_gbs=2.0,
    nic_gbs=1.0,
    host_gbs=3.0,
    host_gib=20.0,
    disk_gbs=0.7,
    watts=90.0,
    gpus_per_node=1,
    is_shared=True,
    cores=1,
    interval=(0.5, 2.0),
)
# Parts of memory and of a step's time that only a model of the machine can give: their sums are compared, and
# test_memory, test_alignment and test_published compare them with measurements.
ESTIMATED = {
    "memory.compute weights",
    "memory.activations",
    "memory.recomputation",
    "memory.backward",
    "memory.loss",
    "memory.reduction",
    "memory.cache",
    "memory.gathered copy",
    "memory.prepacked copy",
    "memory_phases.*",
    "seconds.*",
    "mfu",
}


@dataclass(frozen=True)
class Result:
    """A run, and what its ranks held.

    Attributes:
        state: bytes of weights, gradients and optimizer state of the trained model, and of a critic, by part.
    """

    config: RunConfig
    folder: Path
    state: dict[str, float]

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [record for record in map(json.loads, lines) if record["type"] == "train"]


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a tree of dicts with its dotted path; a list is one value."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def step_tokens(run: Result) -> int:
    """Return the tokens of the rows of a step, padding included."""
    batch = run.config.batch
    return batch.sequence_length * batch.global_batch_size * getattr(run.config.task, "updates_per_step", 1)


def kilowatt_hours(plan: dict[str, Any]) -> float:
    """An idle device takes a fifth of its power; it waits in bubbles and for gradients."""
    busy = 1 - (plan["seconds"]["bubble"] + plan["seconds"]["data"]) / plan["step_seconds"]
    return plan["days"] * 24 * plan["ranks"] * MACHINE.watts * (0.2 + 0.8 * busy) / 1000


def checkpoint_interval(plan: dict[str, Any]) -> float:
    """Young (1974): the root of twice the time of a save times the mean time between failures."""
    seconds = plan["checkpoint_bytes"] / plan["ranks"] / (MACHINE.host_gbs * 1e9)
    # Llama 3 (2024), section 3.3.4: 419 failures of 16,384 GPUs in 54 days are one in 50,000 GPU-hours.
    return sqrt(2 * seconds * round(16_384 * 54 * 24 / 419, -4) * 3600 / plan["ranks"])


def sum_of(part: str) -> Callable[[dict[str, Any], Result], Any]:
    return lambda plan, run: pytest.approx(sum(plan[part].values()))


def state_of(part: str) -> Callable[[dict[str, Any], Result], Any]:
    return lambda plan, run: pytest.approx(run.state[part])


def interval_of(name: str) -> Callable[[dict[str, Any], Result], Any]:
    return lambda plan, run: pytest.approx([0.5 * plan[name], 2 * plan[name]])


# Settings of jingu on a CPU that differ from those on a GPU.
SOFTWARE = (
    *("compute_bytes", "gradient_bytes", "weight_bytes", "reduce_bytes", "state_share"),
    *("offload_copies_weights", "stores_biased_scores", "allocator_reuse", "chunk_logits", "logit_bytes"),
    "compiles_blocks",
)
# What each figure must equal, from the whole plan and the run.
EXPECTED: dict[str, Callable[[dict[str, Any], Result], Any]] = {
    "machine": lambda plan, run: "test",
    "ranks": lambda plan, run: 1,
    "layout": lambda plan, run: plan["layout"],
    "fits": lambda plan, run: 1.1 * plan["memory_total"] <= plan["memory_usable"],
    "software": lambda plan, run: "jingu",
    **{f"software_changes.{name}": (lambda plan, run, name=name: plan["software_changes"][name]) for name in SOFTWARE},
    "memory_interval": lambda plan, run: pytest.approx([0.9 * plan["memory_total"], 1.1 * plan["memory_total"]]),
    **{f"memory.{model}{part}": state_of(model + part) for model in ("", "critic ") for part in STATE},
    "memory.reference weights": state_of("weights"),
    "memory.teacher weights": state_of("weights"),
    "offloaded": lambda plan, run: {},
    "memory_total": sum_of("memory"),
    "memory_usable": lambda plan, run: pytest.approx(0.95 * 10.0 * 2**30),
    "step_seconds": sum_of("seconds"),
    "step_seconds_interval": lambda plan, run: pytest.approx([0.5 * plan["step_seconds"], 2 * plan["step_seconds"]]),
    **{f"{name}_interval": interval_of(name) for name in ("days", "kilowatt_hours", "price")},
    "far_from_measured": lambda plan, run: [],
    "tokens_per_second": lambda plan, run: pytest.approx(step_tokens(run) / plan["step_seconds"]),
    "days": lambda plan, run: pytest.approx(len(run.records) * plan["step_seconds"] / 86400),
    "kilowatt_hours": lambda plan, run: pytest.approx(kilowatt_hours(plan)),
    "price": lambda plan, run: pytest.approx(plan["days"] * 24 * 3.0),
    # The tensors of a checkpoint; it may also have counters, such as those of balanced routers.
    "checkpoint_bytes": lambda plan, run: pytest.approx(saved_bytes(run.folder), rel=1e-3),
    "checkpoint_interval_seconds": lambda plan, run: pytest.approx(checkpoint_interval(plan), rel=0.01),
    "checkpoint_write_seconds": lambda plan, run: pytest.approx(saved_bytes(run.folder) / 0.7e9, rel=1e-3),
    "assumptions": lambda plan, run: plan["assumptions"],
}


def make_run(task: str, optimizer: str, tiny_run: MakeRun, folder: Path, request: pytest.FixtureRequest) -> RunConfig:
    """Return a run of one or two steps of a task."""
    changes: dict[str, Any] = {"optimizer": {"type": optimizer}, "train.steps": 2, "checkpoint.every": 0}
    changes["schedule"] = {"type": "constant", "warmup": 0}
    if task == "pretraining":
        return tiny_run(changes)
    base = request.getfixturevalue("base")
    if task in ("grpo", "ppo", "distill"):
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"def f{number}"}) + "\n" for number in range(5)))
        changes["task"] = {
            "type": task,
            "prompts": str(prompts),
            "prompts_per_step": 4,
            "answers_per_prompt": 2,
            "max_new_tokens": 6,
            **({"teacher": base} if task == "distill" else {"rewards": [{"type": "length", "max_tokens": 3}]}),
        }
        changes |= {"batch": {"sequence_length": 17, "global_batch_size": 8, "micro_batch_size": 4}}
        return tiny_run(changes | {"initialize.from": base}, name=task)
    changes |= {"task": {"type": task}, "initialize.from": base}
    if task == "kto":
        changes["data.objective"] = {"type": "preference", "template": "plain", "rows": "labels"}
        changes["batch.sequence_length"] = 32
    return preference_run(tiny_run, folder, changes, name=task)


@pytest.fixture
def base(tiny_run: MakeRun) -> str:
    config = tiny_run({"train.steps": 1}, name="base")
    with peak_unmeasured():
        assert train(config) == 0
    return str(open_run(config).folder)


CASES = [
    pytest.param(task, optimizer, marks=() if (task, optimizer) in QUICK else pytest.mark.slow)
    for task in TASKS
    for optimizer in OPTIMIZERS
]


def test_every_task_and_optimizer_has_a_case() -> None:
    assert set(TASKS) == set(tasks.TASKS) and set(OPTIMIZERS) == set(optimizers.OPTIMIZERS)


@pytest.mark.parametrize(("task", "optimizer"), CASES)
def test_every_figure_of_a_plan_is_that_of_the_run(
    task: str,
    optimizer: str,
    tiny_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    config = make_run(task, optimizer, tiny_run, tmp_path, request)
    # 1. Train, and record the optimizers of the trained model and of a critic.
    built: list[ShardedOptimizer] = []
    original = ShardedOptimizer.__init__

    def record(self: ShardedOptimizer, *arguments: Any) -> None:
        original(self, *arguments)
        built.append(self)

    monkeypatch.setattr(ShardedOptimizer, "__init__", record)
    with peak_unmeasured():
        assert train(config) == 0
    # 2. Plan the same run, and compare every figure.
    result = Result(config, open_run(config).folder, state_bytes(built))
    assert differences(result, tmp_path, capsys) == []
    # 3. Change the tables of the plan: each change must show in a figure.
    if (task, optimizer) in MUTANTS:
        survivors = []
        for module, old, new in MUTANTS[task, optimizer]:
            with mutated(module, old, new):
                rank_share.cache_clear()
                if not differences(result, tmp_path, capsys):
                    survivors.append((module.__name__, old, new))
        rank_share.cache_clear()
        assert survivors == []


def differences(result: Result, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Plan a run that was trained; return the paths of figures that are wrong or that no test knows."""
    tmp_path, config = folder, result.config
    (tmp_path / "machine.yaml").write_text(yaml.safe_dump(json.loads(MACHINE.model_dump_json())))
    (tmp_path / "plan.yaml").write_text(dump_yaml(config), encoding="utf-8")
    capsys.readouterr()
    words = ["plan", str(tmp_path / "plan.yaml"), "--on", str(tmp_path / "machine.yaml"), "--price", "3", "--json"]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    wrong = []
    for path, value in leaves(plan):
        if path in EXPECTED:
            wrong += [f"{path}: {value}"] * (value != EXPECTED[path](plan, result))
        elif path not in ESTIMATED and path.partition(".")[0] + ".*" not in ESTIMATED:
            wrong.append(f"{path} is not listed")
        elif not value >= 0:
            wrong.append(f"{path}: {value}")
    return wrong


def test_a_waiting_device_takes_a_fifth_of_its_power() -> None:
    config, spec = settings(LLAMA, {"pipeline": 2})
    result = forecast.forecast(workload(config, spec, 2), MACHINE, 7)
    plan = result.to_json()
    assert plan["seconds"]["bubble"] > 0.01 * plan["step_seconds"]
    assert plan["kilowatt_hours"] == pytest.approx(kilowatt_hours(plan))


MUTANTS: dict[tuple[str, str], list[tuple[ModuleType, str, str]]] = {
    ("pretraining", "lion"): [
        (forecast, "sqrt(2 * stall", "sqrt(4 * stall"),
        (forecast, "HOURS_BETWEEN_FAILURES = 50_000", "HOURS_BETWEEN_FAILURES = 40_000"),
        (forecast, "hours * ranks * self.price", "hours * self.price * 2"),
        (forecast, "tokens / self.step,", "2 * tokens / self.step,"),
        (forecast, "(machine.disk_gbs * 1e9)", "(machine.disk_gbs * 1e6)"),
        (weight_memory, "part.num_trained * soft.weight_bytes", "part.num_trained * soft.compute_bytes / 2"),
        (optimizers, '{"master": master_bytes, "fp32"', '{"master": 2 * master_bytes, "fp32"'),
        (optimizers, 'return {"exp_avg": Slot("sharded", shape)}\n', "return adam_slots(shape)\n"),
    ],
    ("pretraining", "muon"): [
        (optimizers, "is_in_block and len(shape) > 1 else", "is_in_block else"),
        (optimizers, "if is_in_block and len", "if len"),
    ],
    ("pretraining", "adafactor"): [
        (optimizers, "shape[:-1], (*shape[:-2], shape[-1])", "shape[:-2], (*shape[:-2], shape[-1])"),
    ],
}


def state_bytes(optimizers: list[ShardedOptimizer]) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer state of each model by part."""
    sizes: dict[str, float] = {}
    # Every optimizer of the trained model has the same size; a critic is smaller, because its head is.
    by_size = {
        sum(weight.numel() for group in optimizer.param_groups for weight in group["params"]): optimizer
        for optimizer in optimizers
    }
    for name, size in zip(("", "critic "), sorted(by_size, reverse=True), strict=False):
        optimizer = by_size[size]
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        num_bytes = float(sum(weight.nbytes for weight in weights))
        states = (tensor for state in optimizer.state.values() for tensor in state.values())
        sizes |= {f"{name}weights": num_bytes, f"{name}gradients": num_bytes}
        sizes[f"{name}optimizer state"] = float(sum(tensor.nbytes for tensor in states))
    return sizes
