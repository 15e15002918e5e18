"""`jingu config show`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.config.sections.parallel import ParallelSettings
from jingu.config.sections.train import BatchSettings, PrecisionSettings, TrainSettings, WsdSettings
from jingu.errors import JinguError
from jingu.model.decoder import build_model, parameter_shapes
from jingu.model.inputs import Inputs
from jingu.model.resolve import spec_from_settings
from jingu.parallel.stages import plan_layout
from jingu.training import plan
from jingu.training.plan import estimate_memory, show_config


def test_config_show_prints_a_valid_file_and_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig(
        name="shown",
        batch=BatchSettings(sequence_length=100, global_batch_size=24, micro_batch_size=3),
        schedule=WsdSettings(warmup=7, decay=0.25),
        train=TrainSettings(steps=200),
        precision=PrecisionSettings(type="bf16"),
    )
    show_config(config, 4)
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text)
    assert load_config(tmp_path / "shown.yaml") == config
    followed, _, memory = text.split("\n\n")[-1].rpartition("#   memory of a rank       ")
    assert memory.endswith(
        "optimizer state + 26.3 gathered weights + 36.5 activations; and what one chunk of the loss takes\n"
    )
    assert followed == (
        "# What follows, on 4 ranks:\n"
        "#   model                  llama, 13.8M parameters\n"
        "#   layout                 4 = 4 shard (ZeRO 1)\n"
        "#   tokens a step          2,400 = 24 × 100\n"
        "#   tokens of the run      480,000 = 200 steps × 2,400\n"
        "#   sequences a rank       6 = 24 / 4\n"
        "#   micro batches a step   2 = 6 / 3 (batch.micro_batch_size)\n"
        "#   tokens a forward pass  300\n"
        "#   warm-up                7 steps\n"
        "#   decay                  50 steps = 0.25 × 200\n"
    )
    show_config(config)
    assert "# What follows, on 1 rank:\n" in capsys.readouterr().out
    show_config(config.model_copy(update={"parallel": ParallelSettings(pipeline=2)}), 4)
    assert "#   stages                 2 of 3, 3 blocks (1f1b)\n" in capsys.readouterr().out


def test_config_show_refuses_a_batch_that_cannot_be_divided(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JinguError, match="take 30 or 35"):
        show_config(RunConfig(), 5)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("ranks", "parallel", "expected"),
    [
        (1, {}, (4.0, 4.0, 8.0, 0.0)),
        (2, {"zero_stage": 0}, (4.0, 4.0, 8.0, 2.0)),
        (2, {"zero_stage": 1}, (2.0, 4.0, 4.0, 2.0)),
        (2, {"zero_stage": 2}, (2.0, 2.0, 4.0, 2.0)),
        (2, {"zero_stage": 3}, (2.0, 2.0, 4.0, 2.0)),
    ],
)
def test_estimated_memory_equals_a_count_by_hand(
    ranks: int, parallel: dict[str, Any], expected: tuple[float, ...]
) -> None:
    """Bytes a number of the model, all of which two ranks can halve: fp32 but for what is gathered."""
    model = {
        "family": "gpt2",
        "num_layers": 4,
        "hidden_size": 16,
        "num_heads": 2,
        "max_position_embeddings": 8,
        "vocab_size": 32,
    }
    batch = {"sequence_length": 8, "global_batch_size": 8, "micro_batch_size": 1}
    config = RunConfig.model_validate(
        {"model": model, "batch": batch, "parallel": parallel, "precision": {"type": "bf16"}}
    )
    spec = spec_from_settings(config.model, 32, 8)
    numbers = [shape.numel() for shape in parameter_shapes(spec).values()]
    of_block = sum(shape.numel() for name, shape in parameter_shapes(spec).items() if name.startswith("blocks.0."))
    found = estimate_memory(config, spec, ranks, *plan_layout(config, ranks, spec))
    steps = 4 * len(numbers)  # AdamW counts them for each parameter
    assert found["optimizer state"] - steps == expected[2] * sum(numbers)
    assert (found["weights"], found["gradients"]) == (expected[0] * sum(numbers), expected[1] * sum(numbers))
    gathered = sum(numbers) - (2 * of_block if parallel.get("zero_stage") == 3 else 0)  # two blocks of four at a time
    assert found.get("gathered weights", 0) == expected[3] * gathered


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zbv"])
def test_ranks_that_hold_the_same_are_estimated_once(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline of many ranks takes no longer than one of few, and the fullest rank is among them."""
    settings: dict[str, Any] = {
        "model": {"num_layers": 19, "hidden_size": 48, "num_heads": 6},
        "batch": {"sequence_length": 10, "global_batch_size": 16, "micro_batch_size": 1},
        "train": {"activation_checkpointing": {"type": "full"}},
        "parallel": {"pipeline": 8, "pipeline_schedule": schedule},
        "tokenizer": {"vocab_size": 320},
        "precision": {"type": "fp32"},
    }
    config = RunConfig.model_validate(settings)
    spec = spec_from_settings(config.model, 320, 10)
    sizes, batch_plan = plan_layout(config, 8, spec)
    every = [estimate_memory(config, spec, 8, sizes, batch_plan, rank) for rank in range(8)]
    ranks: list[int] = []

    def noting(*arguments: Any) -> dict[str, int]:
        ranks.append(arguments[-1])
        return every[arguments[-1]]

    monkeypatch.setattr(plan, "estimate_memory", noting)
    plan.derive_plan(config, 8)
    assert len(ranks) < 6
    assert max(sum(every[rank].values()) for rank in ranks) == max(sum(estimate.values()) for estimate in every)


def test_the_layout_names_the_ranks_of_experts() -> None:
    config = RunConfig.model_validate({"model": {"family": "mixtral"}, "parallel": {"expert": 4}})
    assert ("layout", "8 = 8 shard (ZeRO 1, 4 expert)") in plan.derive_plan(config, 8)
    assert ("layout", "8 = 8 shard (ZeRO 1)") in plan.derive_plan(RunConfig(), 8)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("length", [33, 128])
def test_activations_are_those_that_a_forward_pass_keeps(family: str, length: int) -> None:
    """On the CPU itself; kernels of attention keep a little more or less than on the meta device."""
    model = {"family": family, "num_layers": 2, "hidden_size": 64, "num_heads": 4, "max_position_embeddings": 256}
    spec = spec_from_settings(RunConfig.model_validate({"model": model}).model, 320, 256)

    def kept(layers: int) -> int:
        decoder = build_model(spec.model_copy(update={"num_layers": layers}))
        storages: dict[int, torch.Tensor] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = decoder(Inputs(torch.zeros(2, length, dtype=torch.int64)))
        assert out.requires_grad
        weights = {parameter.data_ptr() for parameter in decoder.parameters()}
        return sum(tensor.untyped_storage().nbytes() for at, tensor in storages.items() if at not in weights)

    per_token = (kept(2) - kept(1)) / (2 * length)
    assert plan.activation_bytes(spec, torch.float32) == pytest.approx(per_token, rel=0.15)


def test_activations_of_blocks_in_flight_are_counted() -> None:
    settings: dict[str, Any] = {
        "model": {"num_layers": 4, "hidden_size": 48, "num_heads": 6},
        "batch": {"sequence_length": 10, "global_batch_size": 8, "micro_batch_size": 2},
        "parallel": {"pipeline": 2},
        "precision": {"type": "fp32"},
    }
    counts = {}
    for kind in ("none", "full", "selective"):
        settings["train"] = {"activation_checkpointing": {"type": kind}}
        config = RunConfig.model_validate(settings)
        spec = spec_from_settings(config.model, 64, 10)
        layout = plan_layout(config, 2, spec)
        counts[kind] = [estimate_memory(config, spec, 2, *layout, rank).get("activations") for rank in (0, 1)]
    of_block = 2 * 10 * plan.activation_bytes(spec, torch.float32)
    assert counts == {
        "none": [round(2 * 2 * of_block), round(2 * of_block)], "full": [round(of_block)] * 2, "selective": [None] * 2,
    }  # fmt: skip


def test_recomputed_blocks_keep_their_inputs() -> None:
    settings: dict[str, Any] = {
        "model": {"num_layers": 4, "hidden_size": 48, "num_heads": 6},
        "batch": {"sequence_length": 10, "global_batch_size": 8, "micro_batch_size": 2},
        "train": {"activation_checkpointing": {"type": "full"}},
        "parallel": {"pipeline": 2},
        "precision": {"type": "fp32"},
    }
    config = RunConfig.model_validate(settings)
    spec = spec_from_settings(config.model, 64, 10)
    found = [
        estimate_memory(config, spec, 2, *plan_layout(config, 2, spec), place)["inputs of blocks"] for place in (0, 1)
    ]
    assert found == [2 * under_way * (2 * 10 * 48 * 4) for under_way in (2, 1)]
