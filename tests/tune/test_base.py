"""Adapters beside a base of 8 or 4 bits: those beside the matrices that it stands for, in less memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint.export import export_hf
from jingu.checkpoint.hub import OpenModel, load_model, open_model, open_run_apart, rounded
from jingu.checkpoint.resume import step_folder
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.model.adapters import is_adapter
from jingu.model.decoder import make_model
from jingu.model.grouped import PackedProduct, grouped_product
from jingu.model.packed import Packed, pack, unpack
from jingu.model.products import linear
from jingu.model.spec import Kind, Lora, replaced
from jingu.parallel.stages import plan_layout
from jingu.train.run import open_run
from jingu.train.verbs import open_with_plan
from jingu.tune.adapters import merge
from tests.conftest import Done, Library, peak_unmeasured, tiny
from tests.dist.test_layouts import tiny as small
from tests.tune.test_lora import mean_loss

TOKENS = torch.arange(5, 29).view(2, 12)
KINDS: tuple[Kind, ...] = ("int8", "int4", "nf4")
LORA = {"type": "lora", "rank": 3, "alpha": 6.0}
Train = Callable[..., None]
Read = Callable[[RunConfig], Done]


@pytest.fixture(scope="module")
def runs(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of matrices that pack, and the folders `int8` … of what they stand for then."""
    from jingu.train.verbs import train

    place = tmp_path_factory.mktemp("bases")
    shape = {"model.width": 64, "model.feed_forward": 128, "model.context": 64, "train.steps": 8}
    with peak_unmeasured():
        train(tiny(library, place, {**shape, "name": "base"}))
        train(tiny(library, place, {**shape, "name": "mixture", "model.family": "mixtral", "model.feed_forward": 64}))
    base = open_model(place / "base")
    for kind in KINDS:
        spec = base.spec.model_copy(update={"base": kind})
        export_hf(base.spec, rounded(base, spec).read, base.tokenizer(), place / kind, torch.float64)
    return place


@pytest.fixture
def adapted(runs: Path, library: Library, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(changes: dict[str, Any], name: str = "adapted", base: str = "base") -> RunConfig:
        plain = {"model": {}, "initialize": {"from": str(runs / base)}, "tune": {**LORA}, "train.steps": 8}
        return tiny(
            library,
            tmp_path,
            {**plain, "optimizer.lr": 4e-3, "checkpoint": {"every": 1, "keep": 8}, **changes, "name": name},
        )

    return make


def logits(opened: OpenModel, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    model = load_model(opened, dtype)
    with torch.no_grad():
        return model.logits(model(TOKENS))


def beside(run: Path) -> OpenModel:
    """A run's adapters and its base, unmerged and packed."""
    own, base, _ = open_run_apart(run)
    return OpenModel(own.spec, lambda name: (own if is_adapter(name) else base).read(name), None, run)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients_are_those_of_the_matrix_that_is_stood_for(kind: Kind, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight_EOI = torch.randn(3, 32, 128, generator=generator)
    packed = Packed(kind, weight_EOI.shape)
    packed.values.data, packed.scales.data = pack(weight_EOI, kind)
    whole_EOI = unpack(*pack(weight_EOI, kind), kind)
    off = (whole_EOI - weight_EOI).norm() / weight_EOI.norm()
    assert 1e-3 < off < {"int8": 0.01, "int4": 0.1, "nf4": 0.1}[kind]
    one = Packed(kind, weight_EOI.shape[1:])
    one.values.data, one.scales.data = packed.values[1], packed.scales[1]
    x, y = (torch.randn(2, 5, 128, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    y.data = x.data
    upstream = torch.randn(2, 5, 32, generator=generator).to(dtype)
    exact = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for found, expected in (
        (linear(x, one), torch.nn.functional.linear(y, whole_EOI[1].to(dtype))),  # type: ignore[arg-type]
        (
            PackedProduct.apply(x.flatten(0, 1), packed.values, packed.scales, kind, torch.tensor([4, 4, 10])).view(
                2, 5, 32
            ),
            grouped_product(y.flatten(0, 1), whole_EOI.to(dtype), torch.tensor([4, 4, 10])).view(2, 5, 32),
        ),
    ):
        torch.testing.assert_close(found, expected, rtol=exact, atol=exact)
        gradients = [torch.autograd.grad(given, of, upstream)[0] for given, of in ((found, x), (expected, y))]
        torch.testing.assert_close(*gradients, rtol=exact, atol=exact)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_lora_beside_the_rounded_matrices(
    kind: Kind, runs: Path, adapted: Callable[..., RunConfig], train_on: Train, done: Read, tmp_path: Path
) -> None:
    """With recomputed blocks, micro-batches and magnitudes, and gone on with; and its adapters answer so everywhere."""
    changes = {"tune.dora": kind == "int4", "train.activation_checkpointing.type": "full"}
    config = adapted({**changes, "tune.base": kind})
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


def test_its_memory_is_that_of_few_bits(adapted: Callable[..., RunConfig]) -> None:
    """What the blocks of the model hold, in bytes, beside that in bf16."""
    sizes: dict[str | None, float] = {}
    for kind in (None, *KINDS):
        spec = open_run(adapted({"tune.base": kind})).spec
        with torch.device("meta"):
            held = make_model(spec).bfloat16().blocks.named_parameters()
        sizes[kind] = sum(each.nbytes for name, each in held if not is_adapter(name) and "norm" not in name)
    plain = sizes[None]
    assert [sizes[kind] / plain for kind in KINDS] == pytest.approx([0.5, 0.3125, 0.28125], rel=0.03)


AGAIN, OFFLOAD = "train.activation_checkpointing.type", "parallel.offload.type"


@pytest.mark.parametrize(
    "layouts",
    [
        [
            {"parallel.tensor": 2},
            {"parallel.pipeline": 2},
            {"parallel.zero": 2, OFFLOAD: "host", AGAIN: "selective", "parallel.expert": 1},
        ],
        pytest.param(
            [{"parallel.zero": 1, OFFLOAD: "disk", AGAIN: "full"}, {"parallel.zero": 0}, {"parallel.zero": 3}],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_in_every_layout(
    layouts: list[dict[str, Any]], adapted: Callable[..., RunConfig], train_on: Train, done: Read
) -> None:
    for base, kind in (("base", "int4"), ("mixture", "int8")):
        changes = {"tune.base": kind, "train.steps": 3}
        alone = adapted(changes, f"{base}-alone", base)
        train_on(1, alone)
        for number, layout in enumerate(layouts):
            other = adapted({**changes, **layout}, f"{base}-{number}", base)
            train_on(2, other)
            for column in ("loss", "grad_norm"):
                expected = pytest.approx(done(alone).column(column), rel=1e-9)
                assert done(other).column(column) == expected, layout


@pytest.mark.parametrize("kind", ["int4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "nf4"))])
def test_ranks_in_bf16_compute_what_one_does(
    kind: Kind, adapted: Callable[..., RunConfig], train_on: Train, done: Read
) -> None:
    """What the engine gathers, and casts, is of the same few bits."""
    changes = {"tune.base": kind, "train.steps": 3, "precision.type": "bf16"}
    alone, sharded = adapted(changes, "alone"), adapted({**changes, "parallel.zero": 3}, "sharded")
    train_on(1, alone)
    train_on(2, sharded)
    assert done(sharded).column("loss") == pytest.approx(done(alone).column("loss"), rel=1e-3)


def test_mistakes(adapted: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JinguError, match=r"cannot share the 64 inputs of .* in whole groups of 64"):
        open_with_plan(adapted({"tune.base": "nf4", "parallel.tensor": 4}), 4)
    narrow = replaced(small("llama"), base="int4", adapter=Lora(rank=2, alpha=4.0, targets=("*",)))
    with pytest.raises(JinguError, match="none of the blocks' matrices has a multiple of 16 rows"):
        plan_layout(RunConfig(), 1, narrow)
    monkeypatch.setattr("jingu.model.packed.find_spec", lambda name: None)
    with pytest.raises(JinguError, match="rounded to nf4 by the bitsandbytes package"):
        open_with_plan(adapted({"tune.base": "nf4"}), 1)
