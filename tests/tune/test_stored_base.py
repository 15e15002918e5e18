"""Adapters on a base that stays as another tool has quantized it equal those on the dequantized matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.formats.export import convert
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.inference_model import load
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import build_model
from jingu.model.quantized_weight import StoredWeight
from jingu.parallel.stages import plan_layout
from jingu.plan.forecast import run_workload
from jingu.plan.memory import stage_memory
from jingu.plan.software import Software
from jingu.training.commands import open_run_with_plan
from jingu.training.initialize import keep_base
from jingu.training.run import open_run
from jingu.tune.adapter_commands import export, merge
from tests.conftest import Done, Library, peak_unmeasured, tiny
from tests.formats.test_packed_forms import change
from tests.formats.test_stored_weights import random_bytes

Train = Callable[..., None]
Read = Callable[[RunConfig], Done]
Adapted = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def base(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model as a folder in nf4 of bitsandbytes, with nested scales."""
    from jingu.training.commands import train

    place = tmp_path_factory.mktemp("bases")
    shape = {"model.hidden_size": 64, "model.intermediate_size": 128, "model.max_position_embeddings": 64}
    with peak_unmeasured():
        train(tiny(library, place, {**shape, "train.steps": 8, "name": "run"}))
    convert(place / "run", place / "nf4", "fp32")
    tensors = load_file(place / "nf4" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, state = bnb.quantize_4bit(tensors.pop(name), compress_statistics=True, quant_type="nf4")
        tensors |= {name: codes, **{f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}}
    change(place / "nf4", tensors, {"quant_method": "bitsandbytes"})
    return place / "nf4"


@pytest.fixture(scope="module", params=["nf4", "mxfp4"])
def experts_base(request: pytest.FixtureRequest, library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts that are stored one by one in nf4, or all in one tensor in MXFP4."""
    from jingu.training.commands import train

    place = tmp_path_factory.mktemp("experts")
    family = {"nf4": "qwen3_moe", "mxfp4": "gpt_oss"}[request.param]
    shape = {"model.family": family, "model.hidden_size": 64, "model.intermediate_size": 64}
    shape |= {"model.experts.num_experts": 4, "model.experts.num_experts_per_token": 2, "model.num_layers": 2}
    with peak_unmeasured():
        train(tiny(library, place, {**shape, "train.steps": 4, "name": "run"}))
    convert(place / "run", place / "base", "fp32")
    tensors = load_file(place / "base" / "model.safetensors")
    if request.param == "nf4":
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            codes, state = bnb.quantize_4bit(tensors.pop(name), compress_statistics=True, quant_type="nf4")
            tensors |= {name: codes, **{f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}}
        change(place / "base", tensors, {"quant_method": "bitsandbytes"})
        return place / "base"
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = random_bytes(count, outputs, inputs // 32, 16)
        tensors[f"{name}_scales"] = random_bytes(count, outputs, inputs // 32) % 4 + 118
    change(place / "base", tensors, {"quant_method": "mxfp4"})
    return place / "base"


@pytest.fixture
def adapted(base: Path, library: Library, tmp_path: Path) -> Adapted:
    def make(changes: dict[str, Any], name: str = "adapted") -> RunConfig:
        tune = {"type": "lora", "rank": 3, "alpha": 6.0, "quantization": "stored"}
        plain = {"model": {}, "initialize": {"from": str(base)}, "tune": tune, "train.steps": 3}
        return tiny(library, tmp_path, {**plain, "optimizer.lr": 4e-3, "checkpoint.every": 3, **changes, "name": name})

    return make


def logits(path: Path) -> Tensor:
    model = load_model(open_model(path), torch.float64)
    with torch.no_grad():
        return model.logits(model(torch.arange(5, 29).view(2, 12)))


@pytest.mark.parametrize("precision", ["fp64", pytest.param("bf16", marks=pytest.mark.slow)])
def test_lora_on_a_stored_base(
    precision: str, base: Path, adapted: Adapted, train_on: Train, done: Read, tmp_path: Path
) -> None:
    """Losses and adapters are equal to the last bit; what peft reads, and what is merged, is the same model."""
    changes = {"precision.type": precision, "train.activation_checkpointing.type": "full"}
    packed = adapted(changes)
    plain = adapted({**changes, "tune.quantization": None}, "plain")
    train_on(1, packed, plain)
    assert done(packed).column("loss") == done(plain).column("loss")
    expected = done(plain).tensors()
    assert done(packed).tensors().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in done(packed).tensors().items())
    run = tmp_path / packed.name
    trained = logits(run)
    assert (trained - logits(base)).abs().max() > 1e-3
    export(run, tmp_path / "peft")
    torch.testing.assert_close(logits(tmp_path / "peft"), trained, rtol=1e-9, atol=1e-9)
    merge(run, tmp_path / "merged", dtype="fp32")
    torch.testing.assert_close(logits(tmp_path / "merged"), trained, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layout", [{"parallel.zero_stage": 3}, {"parallel.pipeline": 2}, {"parallel.context": 2}], ids=str
)
def test_ranks_equal_one_process(layout: dict[str, Any], adapted: Adapted, train_on: Train, done: Read) -> None:
    alone, sharded = adapted({}, "alone"), adapted(layout, "sharded")
    train_on(1, alone)
    train_on(2, sharded)
    assert done(sharded).column("loss") == pytest.approx(done(alone).column("loss"), rel=1e-9)


def test_experts_are_divided_over_ranks(experts_base: Path, adapted: Adapted, train_on: Train, done: Read) -> None:
    start = {"initialize.from": str(experts_base), "precision.type": "fp64"}
    plain, alone = adapted({**start, "tune.quantization": None}, "plain"), adapted(start, "alone")
    divided = adapted({**start, "parallel.expert": 2, "parallel.zero_stage": 2}, "divided")
    train_on(1, plain, alone)
    train_on(2, divided)
    assert done(alone).column("loss") == done(plain).column("loss")
    assert done(divided).column("loss") == pytest.approx(done(alone).column("loss"), rel=1e-9)
    assert done(divided).column("grad_norm") == pytest.approx(done(alone).column("grad_norm"), rel=1e-9)


def generate(path: Path, precision: Any, adapter: Path | None = None) -> tuple[list[int], Any]:
    model = load(path, precision, adapters={} if adapter is None else {"a": adapter})
    name = None if adapter is None else "a"
    prompts = ((5, 6, 7), tuple(range(9, 40)))
    requests = [Request(ids, SamplingParams(), 20, adapter=name, ignore_eos=True) for ids in prompts]
    results = Engine(model, EngineSettings()).run(requests)
    return [event.token.id for events in results for event in events if event.token is not None], model.module


def test_generated_text_equals_that_of_the_dequantized_model(
    base: Path, adapted: Adapted, train_on: Train, tmp_path: Path
) -> None:
    config = adapted({})
    train_on(1, config)
    for adapter in (None, tmp_path / config.name):
        expected, plain = generate(base, "fp32", adapter)
        ids, module = generate(base, "stored", adapter)
        assert ids == expected and len(ids) == 40
        assert sum(isinstance(part, StoredWeight) for part in module.modules()) == 14
        assert not any(isinstance(part, StoredWeight) for part in plain.modules())
    with pytest.raises(JinguError, match="no quantized matrices to keep as they are stored, or adapters are merged"):
        load(tmp_path / config.name, "stored")


def test_the_plan_knows_the_stored_bytes(adapted: Adapted) -> None:
    config = adapted({})
    spec = open_run(config).spec
    work = run_workload(config, spec, *plan_layout(config, 1, spec), Software(weight_bytes=8.0, compute_bytes=8.0))
    with torch.device("meta"):
        model = build_model(spec)
    keep_base(config, spec, torch.device("cpu"))(model)
    kept = [part for part in model.modules() if isinstance(part, StoredWeight)]
    stored = sum(part.nbytes for weight in kept for part in weight.parts())
    plain = 8 * sum(parameter.numel() for parameter in model.parameters())
    assert stage_memory(work, work.stages[0]).device["weights"] == pytest.approx(stored + plain, rel=1e-6)


def test_errors(adapted: Adapted, base: Path, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match="cannot be divided over ranks of `tensor`"):
        open_run_with_plan(adapted({"parallel.tensor": 2}), 2)
    for init in ("pissa", "loftq"):
        with pytest.raises(
            JinguError, match=rf"{init} changes the frozen matrices, or starts from the error of quantizing them"
        ):
            open_run(adapted({"tune.init_lora_weights": init}))
    convert(base, tmp_path / "plain", "fp32")
    with pytest.raises(JinguError, match="no quantized matrices to keep"):
        open_run(adapted({"initialize.from": str(tmp_path / "plain")}))
