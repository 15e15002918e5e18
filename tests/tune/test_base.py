"""Adapters on a base quantized to 8 or 4 bits equal those on the dequantized matrices, in less memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint.resume import step_folder
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.formats.export import export_hf
from jingu.formats.models import open_adapter_run, open_model
from jingu.formats.stored_model import StoredModel, fake_quantize, load_model
from jingu.model.adapter_specs import Lora
from jingu.model.decoder import build_model
from jingu.model.grouped_matmul import QuantizedGroupedMatmul, grouped_matmul
from jingu.model.matmul_kernels import linear
from jingu.model.quantized_weight import BATCH_INVARIANT_ROWS, QuantizedWeight, dequantize, quantize
from jingu.model.spec import QuantizationFormat, replace_fields
from jingu.model.trainable import is_adapter
from jingu.parallel.stages import plan_layout
from jingu.training.commands import open_run_with_plan
from jingu.training.run import open_run
from jingu.tune.adapter_commands import merge
from tests.conftest import Done, Library, peak_unmeasured, tiny
from tests.dist.test_layouts import tiny as small
from tests.tune.test_lora import mean_loss

TOKENS = torch.arange(5, 29).view(2, 12)
KINDS: tuple[QuantizationFormat, ...] = ("int8", "int4", "nf4")
LORA = {"type": "lora", "rank": 3, "alpha": 6.0}
Train = Callable[..., None]
Read = Callable[[RunConfig], Done]


@pytest.fixture(scope="module")
def runs(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with matrices that can be quantized, and folders (`int8` …) with their dequantized weights."""
    from jingu.training.commands import train

    place = tmp_path_factory.mktemp("bases")
    shape = {
        "model.hidden_size": 64,
        "model.intermediate_size": 128,
        "model.max_position_embeddings": 64,
        "train.steps": 8,
    }
    with peak_unmeasured():
        train(tiny(library, place, {**shape, "name": "base"}))
        train(
            tiny(library, place, {**shape, "name": "mixture", "model.family": "mixtral", "model.intermediate_size": 64})
        )
    base = open_model(place / "base")
    for kind in KINDS:
        spec = base.spec.model_copy(update={"quantization": kind})
        export_hf(base.spec, fake_quantize(base, spec).read, base.tokenizer(), place / kind, torch.float64)
    return place


@pytest.fixture
def adapted(runs: Path, library: Library, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(changes: dict[str, Any], name: str = "adapted", base: str = "base") -> RunConfig:
        plain = {"model": {}, "initialize": {"from": str(runs / base)}, "tune": {**LORA}, "train.steps": 8}
        return tiny(
            library,
            tmp_path,
            {
                **plain,
                "optimizer.lr": 4e-3,
                "checkpoint": {"every": 1, "keep_last": 8, "async_save": False},
                **changes,
                "name": name,
            },
        )

    return make


def logits(stored: StoredModel, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    model = load_model(stored, dtype)
    with torch.no_grad():
        return model.logits(model(TOKENS))


def beside(run: Path) -> StoredModel:
    """Return a run's base with unmerged adapters, quantized."""
    own, base, _ = open_adapter_run(run)
    return StoredModel(own.spec, lambda name: (own if is_adapter(name) else base).read(name), None, run)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients_equal_those_of_the_dequantized_matrix(
    kind: QuantizationFormat, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight_EOI = torch.randn(3, 32, 128, generator=generator)
    packed = QuantizedWeight(kind, weight_EOI.shape)
    packed.values.data, packed.scales.data = quantize(weight_EOI, kind)
    whole_EOI = dequantize(*quantize(weight_EOI, kind), kind)
    off = (whole_EOI - weight_EOI).norm() / weight_EOI.norm()
    assert 1e-3 < off < {"int8": 0.01, "int4": 0.1, "nf4": 0.1}[kind]
    one = QuantizedWeight(kind, weight_EOI.shape[1:])
    one.values.data, one.scales.data = packed.values[1], packed.scales[1]
    x, y = (torch.randn(2, 5, 128, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    y.data = x.data
    upstream = torch.randn(2, 5, 32, generator=generator).to(dtype)
    exact = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    # `linear` pads rows to a multiple of BATCH_INVARIANT_ROWS. So does the reference: some CPUs' kernels add up in
    # another order for other numbers of rows.
    padded_y = torch.nn.functional.pad(y.flatten(0, 1), (0, 0, 0, -10 % BATCH_INVARIANT_ROWS))
    whole_product = torch.nn.functional.linear(padded_y, whole_EOI[1].to(dtype))[:10].view(2, 5, 32)
    for result, expected in (
        (linear(x, one), whole_product),  # type: ignore[arg-type]
        (
            QuantizedGroupedMatmul.apply(
                x.flatten(0, 1), packed.values, packed.scales, kind, torch.tensor([4, 4, 10])
            ).view(2, 5, 32),
            grouped_matmul(y.flatten(0, 1), whole_EOI.to(dtype), torch.tensor([4, 4, 10])).view(2, 5, 32),
        ),
    ):
        torch.testing.assert_close(result, expected, rtol=exact, atol=exact)
        gradients = [torch.autograd.grad(value, of, upstream)[0] for value, of in ((result, x), (expected, y))]
        torch.testing.assert_close(*gradients, rtol=exact, atol=exact)


@pytest.mark.parametrize(
    "kind", [pytest.param("int8", marks=pytest.mark.slow), pytest.param("int4", marks=pytest.mark.slow), "nf4"]
)
def test_lora_on_quantized_matrices(
    kind: QuantizationFormat, runs: Path, adapted: Callable[..., RunConfig], train_on: Train, done: Read, tmp_path: Path
) -> None:
    """With activation checkpointing, micro-batches, DoRA and resuming; inference gives the same answers."""
    changes = {"tune.use_dora": kind == "int4", "train.activation_checkpointing.type": "full"}
    config = adapted({**changes, "tune.quantization": kind})
    plain = adapted(changes, name="plain", base=kind)
    train_on(1, config, plain)
    run = tmp_path / config.name
    losses, tensors = done(config).column("loss"), done(config).tensors()
    assert losses == pytest.approx(done(plain).column("loss"), rel=1e-12)
    before, after = (mean_loss(beside(step_folder(run / "checkpoints", step)), open_run(config)) for step in (1, 8))
    assert after < before - 0.005
    expected = done(plain).tensors()
    assert tensors.keys() == expected.keys() and all("lora" in name for name in tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
    shutil.rmtree(step_folder(run / "checkpoints", 8))
    train_on(1, config)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in done(config).tensors().items())
    apart = logits(beside(run))
    torch.testing.assert_close(logits(open_model(run)), apart, rtol=1e-9, atol=1e-9)
    merge(run, tmp_path / "merged", dtype="fp32")
    torch.testing.assert_close(logits(open_model(tmp_path / "merged")), apart, rtol=1e-5, atol=1e-5)
    raw = logits(open_model(runs / "base"))
    assert (apart - raw).abs().max() > 1e-2


def test_memory_of_quantized_weights(adapted: Callable[..., RunConfig]) -> None:
    """Return the bytes of the model's blocks, and of the same in bf16."""
    sizes: dict[str | None, float] = {}
    for kind in (None, *KINDS):
        spec = open_run(adapted({"tune.quantization": kind})).spec
        with torch.device("meta"):
            servers = build_model(spec).bfloat16().blocks.named_parameters()
        sizes[kind] = sum(item.nbytes for name, item in servers if not is_adapter(name) and "norm" not in name)
    plain = sizes[None]
    assert [sizes[kind] / plain for kind in KINDS] == pytest.approx([0.5, 0.3125, 0.28125], rel=0.03)


AGAIN, OFFLOAD = "train.activation_checkpointing.type", "parallel.offload.type"


@pytest.mark.parametrize(
    "layouts",
    [
        [
            {"parallel.tensor": 2},
            {"parallel.pipeline": 2},
            {"parallel.zero_stage": 2, OFFLOAD: "host", AGAIN: "selective", "parallel.expert": 1},
        ],
        pytest.param(
            [
                {"parallel.zero_stage": 1, OFFLOAD: "disk", AGAIN: "full"},
                {"parallel.zero_stage": 0},
                {"parallel.zero_stage": 3},
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_in_every_layout(
    layouts: list[dict[str, Any]], adapted: Callable[..., RunConfig], train_on: Train, done: Read
) -> None:
    for base, kind in (("base", "int4"), ("mixture", "int8")):
        changes = {"tune.quantization": kind, "train.steps": 3, "checkpoint.every": 0}
        alone = adapted(changes, f"{base}-alone", base)
        train_on(1, alone)
        for number, layout in enumerate(layouts):
            other = adapted({**changes, **layout}, f"{base}-{number}", base)
            train_on(2, other)
            for column in ("loss", "grad_norm"):
                expected = pytest.approx(done(alone).column(column), rel=1e-9)
                assert done(other).column(column) == expected, layout


@pytest.mark.parametrize("kind", ["int4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "nf4"))])
def test_ranks_in_bf16_equal_one_process(
    kind: QuantizationFormat, adapted: Callable[..., RunConfig], train_on: Train, done: Read
) -> None:
    """FSDP gathers and casts quantized weights."""
    changes = {"tune.quantization": kind, "train.steps": 3, "checkpoint.every": 0, "precision.type": "bf16"}
    alone, sharded = adapted(changes, "alone"), adapted({**changes, "parallel.zero_stage": 3}, "sharded")
    train_on(1, alone)
    train_on(2, sharded)
    assert done(sharded).column("loss") == pytest.approx(done(alone).column("loss"), rel=1e-3)


def test_errors(adapted: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JinguError, match=r"cannot share the 64 inputs of .* in whole groups of 64"):
        open_run_with_plan(adapted({"tune.quantization": "nf4", "parallel.tensor": 4}), 4)
    narrow = replace_fields(small("llama"), quantization="int4", adapter=Lora(rank=2, alpha=4.0, target_modules=("*",)))
    with pytest.raises(JinguError, match="no matrix of a block can be quantized"):
        plan_layout(RunConfig(), 1, narrow)
    monkeypatch.setattr("jingu.model.quantized_weight.find_spec", lambda name: None)
    with pytest.raises(JinguError, match="rounded to nf4 by the bitsandbytes package"):
        open_run_with_plan(adapted({"tune.quantization": "nf4"}), 1)
