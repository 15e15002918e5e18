"""`jingu plan` on the command line: its guide's commands, foreign configurations, and bad input."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from jingu.cli import main

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "planning.md").read_text(encoding="utf-8")
TRILLION = next(block for block in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL) if "25600" in block)
COMMANDS = [line for line in re.findall(r"^jingu (plan .*)$", GUIDE, re.MULTILINE) if "calibrate" not in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_guide_work(command: str, plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command, comments=True)
    # The search over many cards is tried elsewhere.
    small = {"llama-3-8b": "llama-3.2-1b", "cpm2-moe-198b": "cpm2-11b"}
    words = [small.get(word, word) for word in words]
    if "cpm2-11b" in words:
        words += ["--nodes", "1", "batch.global_batch_size=8"]
    (plan_folder / "trillion.yaml").write_text(TRILLION)
    if {"--gpus-needed", "--gpus-needed-within"} & set(words):
        words += ["--gpus", "2", "batch.global_batch_size=4"]
    if "--exact" in words:
        words += ["batch.global_batch_size=4"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) > 2 or "--html" in words


def test_a_plan_as_json_adds_up(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--on", "h100", "--gpus", "4", "--json", "--price", "2", "parallel.tensor=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["ranks"] == 4
    assert sum(plan["memory"].values()) == pytest.approx(plan["memory_total"])
    assert sum(plan["seconds"].values()) == pytest.approx(plan["step_seconds"])
    assert 0 < plan["mfu"] < 1
    assert plan["tokens_per_second"] == pytest.approx(128 * 128 / plan["step_seconds"])
    assert plan["price"] == pytest.approx(plan["days"] * 24 * 4 * 2)
    assert plan["assumptions"] == ["the tokenizer has 1,000 entries (tokenizer.vocab_size)"]


def test_a_page_and_figures_come_together(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--on", "h100", "--gpus", "4", "--json", "--html", "plan.html"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 4
    assert "<html" in (plan_folder / "plan.html").read_text(encoding="utf-8")


def test_of_layouts_with_fast_updates_the_fastest_step_is_planned(
    plan_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "task={type: grpo, prompts_per_step: 32, answers_per_prompt: 4, max_new_tokens: 8}"
    assert main(["plan", "run.yaml", "--on", "h100", "--gpus", "4", "--search", "--json", task]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["seconds"]["generation"] > 0
    assert any("fastest updates" in assumption for assumption in plan["assumptions"])


def test_the_smallest_cluster_that_ends_in_time(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one node and on two; a deadline between their days leaves the larger one, and one before both leaves none."""
    words = ["plan", "llama-3.2-1b", "--on", "a100-80", "--gpus", "1", "--gpus-needed", "batch.global_batch_size=2"]
    assert main([*words, "--json"]) == 0
    clusters = json.loads(capsys.readouterr().out)
    # Pipelines use more GPUs than the batch has rows.
    assert [cluster["ranks"] for cluster in clusters][:4] == [1, 2, 4, 8]
    days = [cluster["days"] for cluster in clusters]
    one, two, fastest = days[0], days[1], min(days)
    assert two < one
    assert main([*words, "--gpus-needed-within", str((one + two) / 2), "--price", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert "too slow" in first and "smallest, cheapest" in second
    assert f"{2 * 2 * 24 * two:,.0f}" in second.split()
    assert main([*words, "--gpus-needed-within", str(fastest / 2)]) == 1


def test_a_run_that_does_not_fit_is_short_by_so_much(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["batch.global_batch_size=8", "parallel.zero_stage=0"]
    assert main(["plan", "llama-2-70b", "--on", "h100", "--gpus", "8", *settings]) == 1
    assert re.search(r"does not fit: short by [\d,.]+ GiB", capsys.readouterr().out)


def test_main_memory_must_hold_what_is_offloaded(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-405b", "--on", "h100", "parallel.zero_stage=3", "batch.micro_batch_size=1"]
    words += ["train.activation_checkpointing.type=full"]
    assert main([*words, "parallel.offload.type=host"]) == 1
    assert re.search(
        r"main memory +7\d\d\.\d+ +of 240\.0: does not fit: short by 5\d\d\.\d GiB", capsys.readouterr().out
    )
    # A disk is not limited.
    assert main([*words, "--on", "h200", "parallel.offload.type=disk", "parallel.offload.path=state"]) == 0
    # Main memory is the only memory of a CPU.
    (plan_folder / "cpu.yaml").write_text(
        "{memory_gib: 8, peak_tflops: 1, matmul_tflops: 1, memory_gbs: 50, link_gbs: 10, nic_gbs: 1, is_shared: true}"
    )
    assert main(["plan", "llama-3-8b", "--on", "cpu.yaml", "--gpus", "1", "parallel.offload.type=host"]) == 1
    assert "short by" in capsys.readouterr().out


def test_a_checkpoint_with_adapters_holds_the_adapters(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-2-7b", "--on", "h100", "--gpus", "1", "--json", "batch.global_batch_size=8"]
    settings = ["tune.type=lora", "tune.rank=8", "tune.target_modules=[q_proj]"]
    assert main([*words, *settings]) == 0
    # 32 layers, factors of 4096 × 8 and 8 × 4096; weights and two moments in fp32, and a number of steps for each.
    assert json.loads(capsys.readouterr().out)["checkpoint_bytes"] == 32 * 2 * (8 * 4096 * 12 + 4)


def test_other_systems_configurations_are_read(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (plan_folder / "ds_config.json").write_text(json.dumps(deepspeed))
    assert main(["plan", "ds_config.json", "model.preset=llama-3.2-1b", "--on", "a100-80", "--gpus", "8"]) == 0
    assert "8 shard, ZeRO 3, micro-batch 1" in capsys.readouterr().out
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    (plan_folder / "config.json").write_text(json.dumps(config))
    assert main(["plan", "config.json", "--on", "a100-80", "--gpus", "2", "batch.global_batch_size=8"]) == 0
    assert "8 sequences of 128 tokens per step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.yaml", "--on", "h10"], "Nearest names: h100"),
        (["llama-3-9b", "--on", "h100"], "llama-3-8b"),
        (
            ["run.yaml", "--on", "h100", "--gpus", "3", "parallel.tensor=3"],
            "8 attention heads cannot be divided over 3",
        ),
        (
            ["run.yaml", "--on", "h100", "--gpus", "16", "parallel.pipeline=16"],
            "8 blocks cannot be shared by 16 stages",
        ),
        (["nothing.json", "--on", "h100"], "nothing.json"),
        (["llama-2-70b", "--serve", "--on", "rtx-4090"], "short by"),
    ],
)
def test_bad_input_is_refused(
    words: list[str], message: str, plan_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_replay_is_that_of_the_fullest_rank(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one micro-batch in flight less, the last rank has the head and what the delayed weight gradients need."""
    (plan_folder / "small.yaml").write_text(
        "{model: {family: gpt2, num_layers: 4, hidden_size: 64, num_heads: 4},"
        " tokenizer: {vocab_size: 1000, path: nowhere},"
        " batch: {sequence_length: 64, global_batch_size: 8, micro_batch_size: 1},"
        " parallel: {pipeline: 2, pipeline_schedule: zero_bubble}}"
    )
    assert main(["plan", "small.yaml", "--exact", "--gpus", "2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["rank"] == 1 and figures["peak"] > figures["begin"]
    # The only axis has the default process group.
    assert {call["axis"] for call in figures["collectives"]} == {"pipeline"}
    for words, axis in ((["parallel.pipeline=1"], "shard"), (["parallel.pipeline=1", "parallel.tensor=2"], "tensor")):
        overrides = [*words, "parallel.pipeline_schedule=1f1b"]
        assert main(["plan", "small.yaml", *overrides, "--exact", "--gpus", "2"]) == 0
        out = capsys.readouterr().out
        assert axis in out and "default_pg" not in out and "mesh_" not in out


def test_a_replay_of_an_encoder_decoder(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plan_folder / "t5.yaml").write_text(
        "{model: {family: t5, num_layers: 2, num_encoder_layers: 2, hidden_size: 64, num_heads: 4},"
        " tokenizer: {vocab_size: 1000, path: nowhere},"
        " batch: {sequence_length: 64, global_batch_size: 8, micro_batch_size: 1}}"
    )
    assert main(["plan", "t5.yaml", "--exact", "--gpus", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak"] > 0


def test_what_a_card_can_do(plan_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.2-1b", "--fit", "--on", "RTX 4090"]
    assert main([*words, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    largest = {(row["tuning"], row["length"]): row["micro_batch"] for row in figures["training"]}
    # Adapters need less than full training, and longer rows more.
    assert largest["LoRA", 2048] >= largest["full", 2048] > 0
    assert largest["QLoRA (int4)", 8192] >= largest["QLoRA (int4)", 131072]
    streams = {(row["weights"], row["length"]): row["streams"] for row in figures["serving"]}
    assert streams["int4", 8192] > streams["bf16", 8192] > streams["bf16", 32768]
    assert main(["plan", "llama-3.1-405b", "--fit", "--on", "RTX 4090"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_quantized_weights_are_served_and_qlora_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3-8b", "--serve", "--on", "rtx-4090", "--json"]
    sizes = {}
    for form in ("bf16", "int8", "int4"):
        assert main([*words, f"tune.quantization={form}"]) == 0
        sizes[form] = json.loads(capsys.readouterr().out)["weights"]
    assert sizes["int4"] < 0.6 * sizes["int8"] < 0.4 * sizes["bf16"]
    assert main([*words, "tune.quantization=int3"]) == 2
    assert "not known" in capsys.readouterr().err
    # A stream of this length does not fit beside the weights.
    assert main([*words[:-1], "batch.sequence_length=131072"]) == 1
    assert "no stream fits: short by" in capsys.readouterr().out
    assert main(["plan", "llama-3-8b", "--on", "rtx-4090", "--gpus", "1", "--json", "tune.type=qlora"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["weights"] < 0.5 * sizes["bf16"]


def test_cards_without_bf16_are_planned_in_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    for card, has_note in (("T4", True), ("v100-16", True), ("RTX 3060", False)):
        main(["plan", "llama-3.2-1b", "--on", card, "--gpus", "1", "--json", "parallel.zero_stage=0"])
        notes = json.loads(capsys.readouterr().out)["assumptions"]
        assert any("has no bf16" in note for note in notes) == has_note
