"""fp16: the loss scale, steps that are skipped, and what of it a checkpoint remembers; the reduction's format."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jingu.config.sections.train import FP8Settings, FP16Settings, PrecisionSettings
from jingu.errors import JinguError
from jingu.training.precision import choose_precision, initial_loss_scale
from tests.conftest import train_all

FP16 = {"precision": {"type": "fp16", "initial_loss_scale": 1024.0}, "batch.micro_batch_size": 2}


def test_dtypes():
    cpu = torch.device("cpu")
    found = choose_precision(FP16Settings(), cpu)
    assert (found.compute, found.masters, found.reduce) == (torch.float16, torch.float32, torch.float32)
    found = choose_precision(PrecisionSettings(type="bf16", reduce="bf16"), cpu)
    assert (found.compute, found.masters, found.reduce) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert choose_precision(PrecisionSettings(type="fp64"), cpu).reduce == torch.float64


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_loss_scale_without_hysteresis_equals_torch(finite: list[bool], window: int):
    settings = FP16Settings(loss_scale_window=window, hysteresis=1, min_loss_scale=1e-30, initial_loss_scale=512.0)
    ours = initial_loss_scale(settings)
    theirs, tracker = torch.tensor(512.0), torch.tensor(0, dtype=torch.int32)
    for good in finite:
        ours.update(settings, finite=good)
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(not good)), 2.0, 0.5, window)
        assert (ours.value, ours.steady) == (theirs.item(), tracker.item())
    assert ours.skipped == finite.count(False)


def test_hysteresis_and_minimum():
    settings = FP16Settings(loss_scale_window=3, hysteresis=2, min_loss_scale=4.0, initial_loss_scale=16.0)
    scale, seen = initial_loss_scale(settings), []
    for good in [False, True, False, False, False, False, True, True, True, False, False]:
        scale.update(settings, finite=good)
        seen.append(scale.value)
    assert seen == [16.0, 16.0, 8.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 4.0]
    assert scale.skipped == 7


def test_fp16_follows_fp32(tiny_run, train_on, done):
    exact = tiny_run({"precision.type": "fp32", "train.steps": 8}, name="fp32")
    train_on(1, exact)
    losses = done(exact).column("loss")
    runs = [tiny_run({**FP16, "train.steps": 8, "parallel.zero_stage": zero}, name=f"fp16-{zero}") for zero in (0, 3)]
    train_on(2, *runs)
    for run in runs:
        assert done(run).column("loss") == pytest.approx(losses, rel=2e-3)
        assert done(run).column("loss") != losses
        assert done(run).column("skipped") == [0] * 8 and done(run).column("loss_scale") == [1024.0] * 8
        assert {tensor.dtype for tensor in done(run).tensors().values()} == {torch.float32}  # masters and state
    assert "loss_scale" not in done(exact).lines("train")[0]


def overflowing(rank: int, world: int, config: Any, who: int, when: int) -> None:
    """Train, where the loss of one rank is infinite at one step."""
    from jingu.training.pretraining import Pretraining

    honest, batch_of, at = Pretraining.loss, Pretraining.batch, [-1]

    def noting(self: Pretraining, step: int, first: int, count: int) -> Any:
        at[0] = step
        return batch_of(self, step, first, count)

    def loss(self: Pretraining, model: Any, batch: Any) -> Any:
        return honest(self, model, batch) * (torch.inf if (rank, at[0]) == (who, when) else 1.0)

    Pretraining.loss, Pretraining.batch = loss, noting
    try:
        assert train_all(rank, world, [config]) == [0]
    finally:
        Pretraining.loss, Pretraining.batch = honest, batch_of


def test_a_step_skipped_on_one_rank_is_skipped_on_all(tiny_run, ranks, done):
    changes = {**FP16, "train.steps": 4, "parallel.zero_stage": 0, "checkpoint.every": 1, "checkpoint.keep_last": 9}
    changes["precision"] = {**FP16["precision"], "hysteresis": 1}
    config = tiny_run(changes)
    ranks.run(overflowing, 2, config, 1, 2)
    run = done(config)
    assert run.column("skipped") == [0, 0, 1, 1]
    assert run.column("loss_scale") == [1024.0, 1024.0, 512.0, 512.0]
    from jingu.checkpoint import store

    folders = sorted((run.folder / "checkpoints").iterdir())
    readers = [store.CheckpointReader(folder) for folder in folders]
    weights = [{name: reader.read(name) for name in reader.manifest.tensors} for reader in readers]
    same = [all(torch.equal(now[name], before[name]) for name in now) for before, now in pairwise(weights)]
    assert same == [False, True, False]
    for rank in (0, 1):
        log = (run.folder / "log" / f"rank-{rank:05d}.log").read_text()
        assert "Step 3 is skipped: its gradient overflowed fp16. The loss scale is now 512.\n" in log


def test_a_stopped_run_resumes_with_its_loss_scale(tiny_run, train_on, done, monkeypatch):
    """The first steps overflow, and the scale has just fallen and grown again where the run is cut in two."""
    from jingu.runtime.collective_stop import CollectiveStop, StopDecision
    from jingu.training import commands

    precision = {"type": "fp16", "initial_loss_scale": 2.0**24, "loss_scale_window": 3, "hysteresis": 1}
    changes = {"precision": precision, "batch.micro_batch_size": 4, "train.steps": 12}
    whole = tiny_run(changes, name="whole")
    train_on(1, whole)
    expected = done(whole)
    assert expected.column("skipped")[0] == 1 and 1 < expected.column("skipped")[-1] < 12
    assert len(set(expected.column("loss_scale"))) > 2

    halves = tiny_run(changes, name="halves")
    calls = iter(range(100))

    def agree(self: CollectiveStop, *_wishes: bool) -> StopDecision:
        self.code = 130 if next(calls) == 6 else 0
        return StopDecision(self.code, False, False)

    with monkeypatch.context() as patch:
        patch.setattr(CollectiveStop, "agree", agree)
        assert commands.train(halves) == 130
    train_on(1, halves)
    for column in ("loss", "loss_scale", "skipped", "grad_norm"):
        assert done(halves).column(column) == expected.column(column)
    theirs = done(halves).tensors()
    for name, tensor in expected.tensors().items():
        assert torch.equal(theirs[name], tensor), name


def reduced_in(rank: int, world: int, configs: list[Any]) -> list[set[torch.dtype]]:
    """The dtypes in which each run adds up gradients over ranks."""
    import torch.distributed as dist

    names = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]
    originals, results = {name: getattr(dist, name) for name in names}, []
    for config in configs:
        seen: set[torch.dtype] = set()

        def noting(original: Any, seen: set[torch.dtype] = seen) -> Any:
            def call(*arguments: Any, **keywords: Any) -> Any:
                seen.add(keywords["output"].dtype if "output" in keywords else arguments[0].dtype)
                return original(*arguments, **keywords)

            return call

        for name in names:
            setattr(dist, name, noting(originals[name]))
        try:
            assert train_all(rank, world, [config]) == [0]
        finally:
            for name in names:
                setattr(dist, name, originals[name])
        results.append(seen)
    return results


def test_the_dtype_of_the_reduction_is_configurable(tiny_run, ranks, done):
    kinds = {"bf16": {"type": "bf16"}, "bf16-narrow": {"type": "bf16", "reduce": "bf16"}}
    kinds["fp32-narrow"] = {"type": "fp32", "reduce": "bf16"}
    runs = [
        tiny_run({"precision": kind, "parallel.zero_stage": 2, "train.steps": 3}, name=n) for n, kind in kinds.items()
    ]
    assert ranks.run(reduced_in, 2, runs)[0] == [{torch.float32}, {torch.bfloat16}, {torch.bfloat16}]
    norms = [done(run).column("grad_norm") for run in runs]
    assert norms[1] == pytest.approx(norms[0], rel=0.02) and norms[1] != norms[0]


@pytest.mark.parametrize("scaling", ["row", pytest.param("tensor", marks=pytest.mark.slow)])
def test_fp8_follows_fp32(scaling: str, tiny_run, train_on, done):
    sizes = {"model.intermediate_size": 48, "train.steps": 8, "batch.micro_batch_size": 2}
    exact = tiny_run({**sizes, "precision.type": "fp32"}, name="fp32")
    checkpointing = {"train.activation_checkpointing.type": "selective"}
    precision = {"precision": {"type": "fp8", "scaling": scaling}}
    changes = [{}, {"parallel.zero_stage": 3, **checkpointing}]
    runs = [tiny_run({**sizes, **precision, **change}, name=f"fp8-{n}") for n, change in enumerate(changes)]
    train_on(2, exact, *runs)
    for run in runs:
        assert done(run).column("loss") == pytest.approx(done(exact).column("loss"), rel=1e-2)
        assert done(run).column("loss") != done(exact).column("loss")


def test_fp8_is_refused_where_it_is_missing(monkeypatch):
    assert choose_precision(FP8Settings(), torch.device("cpu")).scaling == "row"
    with pytest.raises(JinguError, match="FP8 is supported only on NVIDIA GPUs"):
        choose_precision(FP8Settings(), torch.device("xpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    with pytest.raises(JinguError, match="NVIDIA A100-SXM4-80GB has no units for FP8"):
        choose_precision(FP8Settings(), torch.device("cuda", 0))


def test_bf16_is_refused_on_a_card_without_its_units(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    card = torch.device("cuda", 0)
    with pytest.raises(JinguError, match=r"^precision: Tesla V100-SXM2-32GB has no units for bf16; .*auto, fp16 or"):
        choose_precision(PrecisionSettings(type="bf16"), card)
    assert choose_precision(PrecisionSettings(type="auto"), card).compute == torch.float32
