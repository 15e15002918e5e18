"""DeepSpeed's configurations, such as projects have them, as runs of ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jingu.cli import main
from jingu.config.deepspeed import convert, from_deepspeed, parse
from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from tests.mistakes import explain_mistake

TRAINER = """
{
    // as the examples of a well-known trainer have it
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                 "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3, /* everything */
        "overlap_comm": true,
        "contiguous_gradients": true,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": true,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false,
}
"""
PIPELINE = r"""
{
    "train_micro_batch_size_per_gpu": 2, # a comment of another kind
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale_window": 200, "hysteresis": 4},
    "optimizer": {"type": "Lion", "params": {"lr": 2e-4, "betas": [0.9, 0.999], "use_triton": true,
                                             "weight_decay": 2e-4}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 50,
                                                      "total_num_steps": 5000, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}},
    "model_topo": {"process_topology": {"axis": ["pipe", "data"], "dims": [4, 2]}, "parts": [9, 8, 8, 7]},
    "note": "http://example.org/a,] /* not a comment */ \" // nor this",
}
"""
DISK = """
{"train_batch_size": 64, "gradient_accumulation_steps": 4, "bf16": {"enabled": true},
 "communication_data_type": "fp32", "seed": 7, "tensorboard": {"enabled": true, "output_path": "logs"},
 "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "weight_decay": 0.1, "freeze_step": 400}},
 "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 900, "warmup_num_steps": 30,
                                                    "cos_min_ratio": 0.1}},
 "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false},
 "zero_optimization": {"stage": 3, "mics_shard_size": 8,
                       "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": true},
                       "offload_param": {"device": "cpu"}}}
"""


def converted(text: str, processes: int | None = None) -> tuple[RunConfig, dict[str, str]]:
    settings, notes = convert(parse(text, Path("ds.json")), processes)
    return RunConfig.model_validate(settings), notes


def test_auto_everywhere() -> None:
    config, notes = converted(TRAINER)
    assert config.parallel.zero_stage == 3 and config.train.log_every == 2000
    default = RunConfig()
    assert (config.precision, config.batch, config.train.max_grad_norm) == (default.precision, default.batch, 1.0)
    assert (config.schedule.type, config.schedule.warmup) == ("constant", 0.02)
    autos = {key for key, why in notes.items() if "launching program" in why}
    assert autos >= {"train_batch_size", "optimizer.params.lr", "fp16.enabled", "gradient_clipping"}
    assert notes["zero_optimization.overlap_comm"] == "PyTorch's sharding engine decides this"
    assert "export" in notes["zero_optimization.stage3_gather_16bit_weights_on_model_save"]
    assert "no counterpart" not in notes.values()


def test_a_pipeline_project() -> None:
    config, notes = converted(PIPELINE)
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == (2 * 16 * 2, 2)
    precision = config.precision
    assert precision.type == "fp16" and precision.initial_loss_scale == 4096.0
    assert (precision.loss_scale_window, precision.hysteresis, precision.min_loss_scale) == (200, 4, 1.0)
    optimizer = config.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.beta1, optimizer.beta2) == ("lion", 2e-4, 0.9, 0.999)
    assert optimizer.weight_decay == 2e-4
    assert (config.schedule.type, config.schedule.warmup, config.train.steps) == ("linear", 50, 5000)
    layout = config.parallel
    assert (layout.pipeline, layout.shard, layout.zero_stage, layout.layers_per_stage) == (4, 2, 1, [8, 8, 8, 6])
    assert notes["note"] == "no counterpart"
    ends = converted(PIPELINE.replace("[9, 8, 8, 7]", "[1, 15, 15, 1]"))
    assert (
        ends[0].parallel.layers_per_stage is None
        and "only the embedding or the head has no counterpart" in ends[1]["model_topo.parts"]
    )


def test_offload_and_what_is_not_there() -> None:
    config, notes = converted(DISK, processes=8)
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == (64, 2)
    assert (config.precision.type, config.precision.reduce, config.seed) == ("bf16", "fp32", 7)
    assert config.optimizer.type == "adamw" and config.optimizer.beta2 == 0.999
    assert (config.schedule.type, config.schedule.warmup, config.schedule.min_lr) == ("cosine", 30, 1e-5)
    assert config.train.activation_checkpointing.type == "full" and config.train.max_grad_norm is None
    assert (config.parallel.zero_stage, config.parallel.shard, config.train.tensorboard) == (3, 8, True)
    assert config.parallel.offload.type == "disk" and config.parallel.offload.path == "/nvme"
    assert notes["optimizer.type"] == "there is no OneBitAdam; AdamW is in its place"
    for key in (
        "optimizer.params.freeze_step",
        "activation_checkpointing.partition_activations",
        "tensorboard.output_path",
    ):
        assert notes[key] == "no counterpart"


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ('{"train_batch_size": 12}', (12, "auto")),
        ('{"train_micro_batch_size_per_gpu": 3}', (3, 3)),
        ('{"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}', (15, 3)),
        ('{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}', (30, 3)),
        ("{}", (32, "auto")),
    ],
)
def test_the_batch_triple(text: str, batch: tuple[int, int | str]) -> None:
    config, _ = converted(text)
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == batch
    # What DeepSpeed does where nothing is said: fp32, no ZeRO, a constant rate, no clipping.
    assert (config.precision.type, config.parallel.zero_stage, config.train.max_grad_norm) == ("fp32", 0, None)
    assert (config.schedule.type, config.schedule.warmup) == ("constant", 0)


def test_a_fixed_scale_and_old_keys() -> None:
    config, notes = converted('{"fp16": {"enabled": true, "loss_scale": 128}, "zero_optimization": true}')
    assert config.precision.type == "fp16" and config.precision.initial_loss_scale == 128.0
    assert "a fixed scale" in notes["fp16.loss_scale"] and config.parallel.zero_stage == 1
    config, _ = converted('{"zero_optimization": {"stage": 2, "cpu_offload": true}}')
    assert config.parallel.offload.type == "host"


def test_the_verb_prints_a_run_s_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(PIPELINE)
    assert main(["config", "from-deepspeed", str(file)]) == 0
    out = capsys.readouterr().out
    (tmp_path / "run.yaml").write_text(out)
    assert load_config(tmp_path / "run.yaml") == converted(PIPELINE)[0]
    assert "\n#   note: no counterpart\n" in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n"b" 2}', ":2: this is not JSON: expecting ':' delimiter."),
        ("[1]", ": the file contains no configuration (an object in braces)."),
        ('{"zero_optimization": {"stage": 5}}', ": parallel.zero_stage would be 5: input should be 0, 1, 2 or 3."),
        ('{"zero_optimization": "on"}', ": zero_optimization is 'on', and should be a whole number. Correct it."),
        (
            '{"train_batch_size": "x64"}',
            ": train_batch_size is 'x64', and should be a whole number of at least 1. Correct it.",
        ),
        (
            '{"train_micro_batch_size_per_gpu": [1]}',
            ": train_micro_batch_size_per_gpu is [1], and should be a whole number of at least 1. Correct it.",
        ),
        (
            '{"train_batch_size": 8, "gradient_accumulation_steps": 0}',
            ": gradient_accumulation_steps is 0, and should be a whole number of at least 1. Correct it.",
        ),
        (
            '{"optimizer": {"params": {"lr": "fast"}}}',
            ": optimizer.params.lr is 'fast', and should be a number. Correct it.",
        ),
        (
            '{"optimizer": {"params": {"betas": [0.9]}}}',
            ": optimizer.params.betas is [0.9], and should be a list of 2 numbers. Correct it.",
        ),
        (
            '{"fp16": {"enabled": true, "initial_scale_power": 1e9}}',
            ": fp16.initial_scale_power is 1000000000.0, and should be at most 127. Correct it.",
        ),
        (
            '{"model_topo": {"process_topology": {"axis": ["data"], "dims": [0]}}}',
            ": model_topo.process_topology.dims is 0, and should be a whole number of at least 1. Correct it.",
        ),
        (
            '{"model_topo": {"process_topology": {"axis": 5, "dims": [1]}}}',
            ": model_topo.process_topology.axis is 5, and should be a list of names. Correct it.",
        ),
        ('{"gradient_clipping": Infinity}', ": train.max_grad_norm would be inf: input should be a finite number."),
    ],
)
def test_mistakes(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "ds.json"
    assert explain_mistake(from_deepspeed, file, text) == f"{file}{words}"


@pytest.mark.parametrize(
    "key",
    [
        *("seed", "gradient_clipping", "zero_optimization.mics_shard_size", "fp16.loss_scale"),
        *("optimizer.params.weight_decay", "scheduler.params.warmup_num_steps", "scheduler.params.cos_min_ratio"),
        *("model_topo.process_topology.dims", "model_topo.parts", "fp16.initial_scale_power"),
    ],
)
def test_every_wrong_number_names_its_key(key: str, tmp_path: Path) -> None:
    # A schedule and a rate, without which some keys are not read.
    text = '{"optimizer": {"params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupCosineLR"}}'
    *path, last = key.split(".")
    for value in ("many", ["many"]):
        source: dict[str, Any] = json.loads(text)
        section = source
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
        # A text is the name of a method there.
        if (key, value) == ("model_topo.parts", "many"):
            continue
        with pytest.raises(JinguError, match=rf"^{tmp_path}/ds\.json: {re.escape(key)} is .*many.*, and should be "):
            convert(source, file=tmp_path / "ds.json")


def test_a_null_is_the_default() -> None:
    text = '{"train_batch_size": null, "gradient_clipping": null, "zero_optimization": {"stage": null}}'
    assert converted(text)[0] == converted("{}")[0]
