"""Plans with other training systems, and the intervals of their figures."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bench.planning_rows import gpt, workload
from jingu.cli import main
from jingu.plan.forecast import describe_software
from jingu.plan.intervals import memory_margin, plan_interval
from jingu.plan.machine import find_machine
from jingu.plan.memory import fullest_stage
from jingu.plan.software import Software, find_software, software_library
from jingu.plan.step_time import step_time
from jingu.plan.workload import num_parameters

A100 = find_machine("a100-80")
WORDS = [
    "plan",
    "llama-2-7b",
    "--on",
    "a100-80",
    "--gpus",
    "8",
    "batch.global_batch_size=64",
    "batch.micro_batch_size=2",
    "parallel.zero_stage=3",
]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main([*WORDS, "--json", *words])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_command_says_which_software_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(WORDS) == 0
    assert "assumed: the kernels and the engine of jingu (fused attention" in capsys.readouterr().out
    assert main([*WORDS, "--software", "megatron-2021", "batch.sequence_length=512"]) == 0
    assert "of megatron-2021 (attention that stores its scores" in capsys.readouterr().out
    for name, words in (
        ("megatron-deepspeed", "launches that wait for the GPU"),
        ("llm-foundry", "written for Ampere"),
    ):
        assert words in describe_software(find_software(name))


def test_settings_of_the_software_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    before = plan(capsys)
    stored = plan(capsys, "--software", "fused_attention=false")
    # Two rows of 4,096 tokens, 32 layers of 32 heads, 5 bytes a score.
    scores = 5 * 2 * 32 * 32 * 4096**2
    grown = stored["memory"]["activations"] - before["memory"]["activations"]
    assert grown == pytest.approx(scores, rel=0.02)
    assert not stored["fits"] and stored["step_seconds"] > before["step_seconds"]
    exposed = plan(capsys, "--software", "overlap=0")
    assert exposed["seconds"]["data"] > before["seconds"]["data"]
    assert exposed["memory"] == before["memory"]
    assert stored["software_changes"] == {"fused_attention": False}


def test_blocks_are_compiled_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    """On GPUs, unless the run says otherwise, or its schedule splits backward passes."""
    compiled, eager = plan(capsys), plan(capsys, "train.compile=false")
    assert eager["software_changes"] == {"compiles_blocks": False} and not compiled["software_changes"]
    # A run of a few minutes is not compiled.
    assert plan(capsys, "train.steps=3")["memory"] == eager["memory"]
    # Of two rows of 4,096 tokens in 32 layers: RMS norms save a copy in fp32 and a result in fp32 less, and half an
    # input; a gate one result less.
    less = 2 * 4096 * 32 * (2 * 4096 * (4 + 2) + 11008 * 2)
    assert eager["memory"]["activations"] - compiled["memory"]["activations"] == pytest.approx(less, rel=1e-6)
    assert eager["seconds"]["elementwise"] > 1.3 * compiled["seconds"]["elementwise"]
    staged = ["parallel.pipeline=2", "parallel.zero_stage=1"]
    for schedule in ("1f1b", "zero_bubble"):
        words = [*staged, f"parallel.pipeline_schedule={schedule}"]
        figures = [plan(capsys, *words, f"train.compile={kind}") for kind in ("auto", "false")]
        saves = figures[0]["memory"]["activations"] < figures[1]["memory"]["activations"]
        faster = figures[0]["seconds"]["elementwise"] < figures[1]["seconds"]["elementwise"]
        assert saves == faster == (schedule == "1f1b")
    main([*WORDS, *staged, "parallel.pipeline_schedule=zero_bubble"])
    assert "blocks that are not compiled" in capsys.readouterr().out


def test_what_the_benchmark_plans_is_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row of 1T of Narayanan et al. (2021) by both."""
    work = workload(
        gpt(128, 25600, 160, 2048),
        {"tensor": 8, "pipeline": 64, "replicate": 6},
        1,
        3072,
        software_library()["megatron-2021"],
    )
    (tmp_path / "run.yaml").write_text(
        "{model: {family: gpt2, num_layers: 128, hidden_size: 25600, num_heads: 160},"
        " tokenizer: {vocab_size: 51200, path: nowhere},"
        " batch: {sequence_length: 2048, global_batch_size: 3072, micro_batch_size: 1},"
        " parallel: {pipeline: 64, tensor: 8, zero_stage: 0}, train: {activation_checkpointing: {type: full}}}"
    )
    words = ["plan", str(tmp_path / "run.yaml"), "--on", "a100-80", "--nodes", "384", "--software", "megatron-2021"]
    assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["seconds"] == pytest.approx(step_time(work, A100))
    assert figures["memory_total"] == pytest.approx(fullest_stage(work)[1].total)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("megatron", "Nearest names: megatron"),
        ("fused=true", "Did you mean fused_attention?"),
        ("fused_attention=2", "is not true or false"),
        ("overlap=much", "is not a number that is not negative"),
        ("overlap=-1", "is not a number that is not negative"),
        ("megatron-2021,overlap=inf", "is not a number that is not negative"),
    ],
)
def test_unknown_software_is_refused(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--software", text]) == 2
    assert message in capsys.readouterr().err


def test_zero_without_fsdp_shards_the_optimizer_state_alone() -> None:
    """Bytes of a parameter on 4 ranks: weights 2, gradients 2, and 12 of masters and moments, divided by the stage."""
    software = find_software("megatron-2021")
    spec = gpt(4, 1024, 16, 1024, tie_word_embeddings=True)
    for stage, divided in (
        (0, ()),
        (1, ("state",)),
        (2, ("state", "gradients")),
        (3, ("state", "gradients", "weights")),
    ):
        work = workload(spec, {"shard": 4} if stage else {"replicate": 4}, 1, 8, software, zero_stage=stage)
        parts = fullest_stage(work)[1].device
        whole = {
            "weights": parts["weights"] + parts.get("compute weights", 0.0),
            "gradients": parts["gradients"],
            "state": parts["optimizer state"],
        }
        for (part, size), bytes_each in zip(whole.items(), (2, 2, 12), strict=True):
            expected = bytes_each * num_parameters(spec) / (4 if part in divided else 1)
            assert size == pytest.approx(expected, rel=1e-3), (stage, part)


def test_launches_of_a_host_that_waits_add_their_time() -> None:
    work = workload(gpt(4, 4096, 32, 2048), {"tensor": 2}, 4, 8, find_software("jingu,kernels=100"))
    waits = workload(
        gpt(4, 4096, 32, 2048), {"tensor": 2}, 4, 8, find_software("jingu,kernels=100,hides_launches=false")
    )
    hidden, added = step_time(work, A100), step_time(waits, A100)
    # Two micro-batches of 4 blocks: kernels of the forward pass, of its recomputation, of the backward pass, which has
    # twice as many, and of the collectives: 4 in each of the three passes.
    launches = 2 * 4 * (100 * 5 + 12) * A100.efficiency.kernel_us * 1e-6
    assert hidden["launch"] == 0 and added["launch"] == pytest.approx(launches)


def test_kernels_written_for_ampere_are_slower_on_hopper() -> None:
    spec = gpt(4, 4096, 32, 8192)
    works = [workload(spec, {}, 1, 1, find_software(f"jingu,ampere_attention={value}")) for value in ("false", "true")]
    for name, speed in (("a100", 1.0), ("h100", 0.7)):
        new, old = (step_time(work, find_machine(name))["attention"] for work in works)
        assert new / old == pytest.approx(speed)


def test_every_system_can_be_planned_and_described() -> None:
    names = {field.name for field in fields(Software)}
    for name, software in software_library().items():
        assert software.name == name and set(software.changes()) < names
        assert name in describe_software(software)
        work = workload(gpt(4, 1024, 16, 1024), {"pipeline": 2, "tensor": 2}, 1, 8, software)
        assert min(step_time(work, A100).values()) >= 0 < fullest_stage(work)[1].total


def test_a_name_keeps_what_the_precision_decides() -> None:
    base = Software(weight_bytes=8.0, compute_bytes=8.0)
    assert find_software("jingu,overlap=0", base).compute_bytes == 8.0
    assert find_software("", base) is not None and find_software("overlap=0.5", base).weight_bytes == 8.0


def test_figures_have_intervals_and_memory_a_margin(capsys: pytest.CaptureFixture[str]) -> None:
    figures = plan(capsys, "--price", "2")
    for name in ("step_seconds", "days", "kilowatt_hours", "price"):
        low, high = figures[f"{name}_interval"]
        assert low < figures[name] < high
        assert high / figures[name] == pytest.approx(figures["step_seconds_interval"][1] / figures["step_seconds"])
    low, high = figures["memory_interval"]
    assert low < figures["memory_total"] < high
    # A layout fits only if the upper bound does.
    assert figures["fits"] == (figures["memory_total"] * memory_margin(A100) <= figures["memory_usable"])


def test_a_run_far_from_what_was_measured_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    near = workload(gpt(4, 1024, 16, 1024), {}, 1, 8, Software())
    assert plan_interval(near, A100).reasons == ()
    far = plan_interval(near, find_machine("mi300x"))
    assert far.reasons == ("no run on mi300x was measured",)
    assert far.seconds[0] < plan_interval(near, A100).seconds[0]
    assert far.seconds[1] > plan_interval(near, A100).seconds[1]
    assert main([*WORDS[:2], "--on", "mi300x", "--gpus", "8", *WORDS[6:]]) == 0
    assert "far from measured ground: no run on mi300x was measured" in capsys.readouterr().out
