"""`jingu verify`: layouts that compute the same are called equal; mistakes planted in one are found, and named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from jingu.cli import main
from jingu.config.load import dump_yaml, load_config
from jingu.errors import JinguError
from jingu.training import verify as verify_module
from jingu.training.trace import ModuleTrace, _coefficients, max_difference
from jingu.training.verify import (
    TOLERANCES,
    Comparison,
    LayoutRunner,
    compare_runs,
    explain_divergence,
    first_divergence,
    short_run_overrides,
    valid_layouts,
)

# What is planted in one layout


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def missing_reduction() -> Iterator[None]:
    """One block's gradients are never added up over the ranks."""
    from jingu.parallel import pipeline

    honest = pipeline.prepare_backward

    def planted(model: Any, zero: int, *, last: bool) -> None:
        honest(model, zero, last=last)
        model.blocks[0].set_requires_gradient_sync(False)

    with replaced(pipeline, "prepare_backward", planted):
        yield


@contextmanager
def wrong_gradient_scale() -> Iterator[None]:
    """One block's gradients are averaged over the ranks where they should be added."""
    from torch.distributed.fsdp import FSDPModule

    honest = FSDPModule.set_gradient_divide_factor

    def planted(self: Any, factor: float) -> None:
        honest(self, 2.0 if hasattr(self, "attention") and self.last else factor)

    from jingu.model.decoder import Decoder

    made = Decoder.__init__

    def marked(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        for block in self.blocks:
            block.last = block is self.blocks[-1]

    with replaced(FSDPModule, "set_gradient_divide_factor", planted), replaced(Decoder, "__init__", marked):
        yield


@contextmanager
def wrong_activation_scale() -> Iterator[None]:
    """The second block's attention is a little too large on one rank."""
    import torch.distributed as dist

    from jingu.model.block import Block

    honest, calls = Block.forward, [0]

    def planted(self: Any, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] % 2 == 0 and dist.get_rank() == 1:
            with replaced(
                self.attention, "forward", lambda *a: type(self.attention).forward(self.attention, *a) * 1.01
            ):
                return honest(self, *arguments)
        return honest(self, *arguments)

    with replaced(Block, "forward", planted):
        yield


@contextmanager
def dropped_layer() -> Iterator[None]:
    """The second block is left out."""
    from jingu.model.decoder import Decoder

    made = Decoder.__init__

    def planted(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        del self.blocks[-1]
        self.block_range = self.block_range[:-1]
        self.kind_numbers = self.kind_numbers[:-1]

    with replaced(Decoder, "__init__", planted):
        yield


@contextmanager
def boundary_that_drops_a_layer() -> Iterator[None]:
    """The second stage of a pipeline begins one block too late."""
    from jingu.parallel import pipeline

    honest = pipeline.split_blocks

    def planted(*arguments: Any) -> list[range]:
        first, second = honest(*arguments)
        return [first, range(second.start + 1, second.stop)]

    with replaced(pipeline, "split_blocks", planted):
        yield


@contextmanager
def missing_reduction_of_activations() -> Iterator[None]:
    """What ranks of `tensor` have computed of the first attention is not added up."""
    from jingu.parallel.token_sharding import TokenSharding

    honest, calls = TokenSharding.scatter, [0]

    def planted(self: Any, y_BCD: Any) -> Any:
        calls[0] += 1
        scale = self.tensor if calls[0] % 5 == 2 and self.tensor_rank == 0 else calls[0] % 5 != 2
        return honest(self, y_BCD * scale)  # the first rank's part, on all of them

    with replaced(TokenSharding, "scatter", planted):
        yield


PLANTS = {
    "nothing": None,
    "missing reduction": missing_reduction,
    "wrong gradient scale": wrong_gradient_scale,
    "wrong activation scale": wrong_activation_scale,
    "dropped layer": dropped_layer,
    "boundary that drops a layer": boundary_that_drops_a_layer,
    "missing reduction of activations": missing_reduction_of_activations,
}


ROUGH = ("nothing", "wrong activation scale")
"""Recorded in fp32, too."""


def record(rank: int, world: int, configs: list[tuple[Any, str]]) -> None:
    """Leave short runs behind, as `jingu train --trace` does, each with something planted."""
    from contextlib import nullcontext

    from jingu.runtime.ranks import RankInfo
    from jingu.runtime.signals import StopRequest
    from jingu.training import session
    from jingu.training.commands import train_on_rank

    for config, plant in configs:
        trace = Path(config.runs_dir) / config.name / "trace"
        me = RankInfo(rank, world, torch.device("cpu"))
        with (
            PLANTS[plant]() if PLANTS[plant] else nullcontext(),
            replaced(session, "measure_peak_flops", lambda *_: 1e9),
        ):
            assert train_on_rank(config, me, StopRequest(), trace) == 0


def compared(tmp_path: Path, name: str) -> list[Comparison]:
    return list(compare_runs(tmp_path / "runs" / "one", tmp_path / "runs" / name, 2))


def test_a_pipeline(tmp_path, tiny_run, ranks):
    """Stages are found under the names of the whole model; a boundary that drops a layer is named."""
    changes = {"model.num_layers": 4, "parallel.zero_stage": 0}
    ranks.run(record, 1, [(short(tmp_path, tiny_run, "one", **changes), "nothing")])
    changes |= {"parallel.pipeline": 2, "parallel.layers_per_stage": [2, 2]}
    plants = ["nothing", "boundary that drops a layer"]
    runs = [(short(tmp_path, tiny_run, f"run-{number}", **changes), plant) for number, plant in enumerate(plants)]
    ranks.run(record, 2, runs)
    honest = compared(tmp_path, "run-0")
    assert first_divergence(honest, 1e-9) is None
    assert len({check.name for check in honest if check.kind == "output"}) == 50
    worst = first_divergence(compared(tmp_path, "run-1"), 1e-9)
    assert (
        worst is not None and worst.description == "the output of blocks.2.attention_norm in the forward pass (step 1)"
    )


def test_tensor_and_context_parallelism(tmp_path, tiny_run, ranks):
    """Every module that tensor parallelism divides is compared; a sum over ranks that is missing is named."""
    ranks.run(record, 1, [(short(tmp_path, tiny_run, "one"), "nothing")])
    layouts = {"tensor": {"parallel.tensor": 2}, "context": {"parallel.context": 2}}
    runs = [(short(tmp_path, tiny_run, axis, **changes), "nothing") for axis, changes in layouts.items()]
    plant = "missing reduction of activations"
    runs.append((short(tmp_path, tiny_run, "planted", **layouts["tensor"]), plant))
    ranks.run(record, 2, runs)
    for axis, modules in (("tensor", 26), ("context", 20)):
        honest = compared(tmp_path, axis)
        assert first_divergence(honest, 1e-9) is None, axis
        assert len({check.name for check in honest if check.kind == "output"}) == modules, axis
    worst = first_divergence(compared(tmp_path, "planted"), 1e-9)
    assert worst is not None and worst.description == "the output of blocks.0.attention in the forward pass (step 1)"


def short(tmp_path: Path, tiny_run: Any, name: str, steps: int = 2, precision: str = "fp64", **changes: Any) -> Any:
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(tiny_run(changes)))
    return load_config(
        file,
        [
            *short_run_overrides(tmp_path / "runs", name, steps, precision),
            "batch.micro_batch_size=2",
            "schedule.warmup=1.0",
        ],
    )


def test_planted_mistakes_are_found_and_named(tmp_path, tiny_run, ranks):
    alone = [(short(tmp_path, tiny_run, f"one-{kind}", precision=kind), "nothing") for kind in ("fp64", "fp32")]
    ranks.run(record, 1, alone)
    runs = []
    plants = list(PLANTS)[:5]
    for number, plant in enumerate(plants):
        # Of the mistakes one is enough to see that it does not shrink.
        for kind in ("fp64", "fp32") if plant in ROUGH else ("fp64",):
            zero = {"parallel.zero_stage": 2, "evaluation.every": 0}
            runs.append((short(tmp_path, tiny_run, f"{number}-{kind}", precision=kind, **zero), plant))
    ranks.run(record, 2, runs)
    words = {}
    for number, plant in enumerate(plants):
        exact, rough = (
            list(compare_runs(tmp_path / "runs" / f"one-{kind}", tmp_path / "runs" / f"{number}-{kind}", 2))
            if kind == "fp64" or plant in ROUGH
            else []
            for kind in ("fp64", "fp32")
        )
        worst = first_divergence(exact, TOLERANCES["fp64"])
        words[plant] = explain_divergence(worst, "fp64", rough, "fp32") if worst else "equal"
        if worst is None:
            assert first_divergence(rough, TOLERANCES["fp32"]) is None
            assert {check.kind for check in exact} == {"output", "loss", "gradient", "weight"}
            assert max(check.difference for check in exact) < 1e-12 < max(check.difference for check in rough)
            assert len({check.name for check in exact if check.kind == "output"}) == 26
    assert words.pop("nothing") == "equal"
    first = {
        plant: (text.split("): ")[0] + ")").removeprefix("diverged. The first difference is in ")
        for plant, text in words.items()
    }
    assert first == {
        "missing reduction": "the gradient of blocks.0.feed_forward.down.weight (step 1)",
        "wrong gradient scale": "the gradient of blocks.1.feed_forward.down.weight (step 1)",
        "wrong activation scale": "the output of blocks.1.attention in the forward pass (step 1)",
        "dropped layer": "the output of blocks.1.attention_norm in the forward pass (step 1)",
    }
    assert words["wrong activation scale"].endswith("It does not shrink in fp64: a bug, not rounding.")


def test_rounding_is_told_from_a_bug():
    worst = Comparison("loss", 2, "loss", 2e-3)
    exact = [
        Comparison("loss", 1, "loss", 1e-16),
        Comparison("loss", 2, "loss", 3e-14),
        Comparison("weight", 2, "loss", 1.0),
    ]
    assert explain_divergence(worst, "fp32", exact, "fp64") == (
        "diverged. The first difference is in loss (step 2): 2.0e-03 of its size in fp32 and 3.0e-14 in fp64. It "
        "shrinks in fp64: rounding, not a bug."
    )
    assert explain_divergence(Comparison("loss", 2, "loss", 2e-8), "fp64", [worst], "fp32").endswith(
        "rounding, not a bug."
    )
    assert explain_divergence(Comparison("loss", 2, "loss", 2e-4), "fp64", [worst], "fp32").endswith(
        "a bug, not rounding."
    )
    assert first_divergence([Comparison("loss", 1, "loss", float("nan"))], 1.0) is not None


# Traces


@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["features", "tokens", "summands"]),
    st.data(),
)
def test_traces_are_laid_over_one_another(data_ranks, tokens, features, contexts, tensors, divided, data):
    """Rows over ranks, tokens over `context` (filled up at the end), and over `tensor` one of three things."""
    per_rank = -(-tokens // (contexts * tensors))
    per_context = per_rank * tensors
    # Otherwise a part is as long as the whole, and its shape does not tell which of the two it is.
    assume(contexts == 1 or per_context < tokens)
    assume(per_rank < tokens or contexts * tensors == 1)
    generator = torch.Generator().manual_seed(7)
    x_BTF = torch.randn(2 * data_ranks, tokens, features * tensors, generator=generator, dtype=torch.float64)

    def noted(values_BTF: torch.Tensor, row: int, context: int, tensor: int, alone: bool) -> ModuleTrace:
        axes = {"context": (context, 1 if alone else contexts), "tensor": (tensor, 1 if alone else tensors)}
        size, cpu = values_BTF.shape[-1], torch.device("cpu")
        whole, part = (values_BTF @ _coefficients(size, first, cpu) for first in (0, tensor * size))
        return ModuleTrace(row, axes, size, divided == "summands" and not alone, whole, part)

    # A context rank that is alone cuts the row where it sees all of it.
    fill = 0 if contexts == 1 and divided != "tokens" else contexts * per_context - tokens
    filled = torch.nn.functional.pad(x_BTF, (0, 0, 0, fill), value=3.0)

    def cut(x: torch.Tensor) -> list[ModuleTrace]:
        blocks = []
        for rank in range(data_ranks):
            for context in range(contexts):
                rows = x[2 * rank : 2 * rank + 2, context * per_context : (context + 1) * per_context]
                for tensor in range(tensors):
                    part = rows
                    if divided == "tokens":
                        part = rows[:, tensor * per_rank : (tensor + 1) * per_rank]
                    elif divided == "features":
                        part = rows[..., tensor * features : (tensor + 1) * features]
                    else:
                        part = rows * ((tensor + 1) / sum(range(1, tensors + 1)))
                    blocks.append(noted(part, 2 * rank, context, tensor, False))
        return blocks

    one = [noted(x_BTF, 0, 0, 0, True)]
    apart = max_difference(one, cut(filled))
    assert apart is not None and apart < 1e-13
    place = tuple(data.draw(st.integers(0, size - 1)) for size in x_BTF.shape)
    filled[place] += 0.1
    assert max_difference(one, cut(filled)) > 1e-4
    assert max_difference(one, one) == 0.0


# The verb


@pytest.fixture
def bench(tmp_path, tiny_run):
    return LayoutRunner(tmp_path, tiny_run({"parallel.zero_stage": 3, "batch.micro_batch_size": 8}), 2)


def test_layouts(bench):
    alone = bench.layout(["parallel={zero_stage: 0}"], 1)
    assert str(alone) == "1 process" and alone.config.batch.micro_batch_size == 8
    two = bench.layout(["parallel.replicate=2", "parallel.shard=2"], None)
    assert (two.ranks, str(two), two.config.batch.micro_batch_size) == (4, "2 replicate × 2 shard, zero 3", "auto")
    with pytest.raises(JinguError, match=r"does not divide|is not the number of ranks"):
        bench.layout(["parallel.shard=3"], 4)
    with pytest.raises(JinguError, match="tensr is not a setting"):
        bench.layout(["parallel.tensr=3"], 4)
    found = [str(layout) for layout in valid_layouts(bench, 4)]
    assert {"4 replicate, zero 0", "4 shard, zero 1", "2 replicate × 2 shard, zero 3"} <= set(found)
    assert {"2 pipeline × 2 tensor, gpipe, zero 0", "2 pipeline × 2 shard, 1f1b, zero 3"} <= set(found)
    assert {"2 context × 2 tensor, zero 0", "4 context, ring, zero 3"} <= set(found)
    assert len(found) == len(set(found))


def test_the_verb(tmp_path, tiny_run, monkeypatch, capsys, ranks):
    """Its runs are those of the pool; tests/test_readme.py has the command with processes of its own."""

    def start(processes: int, words: list[str], output: Path) -> int:
        assert words[0] == "train" and words[2] == "--trace"
        ranks.run(record, processes, [(load_config(Path(words[1]), []), "nothing")])
        return 0

    monkeypatch.setattr(verify_module, "launch_local_ranks", start)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(dump_yaml(tiny_run({"evaluation.every": 5})))
    assert main(["verify", "run.yaml", "--steps", "2", "--against", "parallel.zero_stage=3", "parallel.shard=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 process vs. 2 shard, zero 3, 2 steps: equal in fp64. The largest difference is ")
    assert "Gradients were not compared" not in out
    Path("adafactor.yaml").write_text(dump_yaml(tiny_run({"optimizer": {"type": "adafactor"}})))
    assert main(["verify", "adafactor.yaml", "--steps", "1", "--against", "parallel.shard=2"]) == 0
    assert "Gradients were not compared, because the optimizer stores no first moment." in capsys.readouterr().out
    assert list(Path(tiny_run().runs_dir).iterdir()) == []
    assert main(["verify", "run.yaml", "--against", "parallel.shard=3"]) == 2
    assert "batch.global_batch_size 8 cannot be divided over 3 ranks" in capsys.readouterr().err


EXPERTS = {"model.family": "mixtral", "model.experts.num_experts": 4, "model.experts.num_experts_per_token": 2}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["llama", "mixtral"])
def test_every_layout_of_two_ranks(changes, tmp_path, tiny_run, monkeypatch, capsys):
    """With four blocks, so that schedules with two stages a rank take part."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(dump_yaml(tiny_run({"model.num_layers": 4, **changes})))
    code = main(["verify", "run.yaml", "--steps", "2", "--all", "2"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert all(name in out for name in ("2 pipeline, zbv, zero 0", "2 context, ring, zero 3", "2 tensor, zero 0")), out


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, ["parallel.tensor=2"]),
        ({}, ["parallel.context=2"]),
        ({}, ["parallel.context=2", "parallel.context_method=ring", "parallel.zero_stage=3"]),
        ({}, ["parallel.pipeline=2", "parallel.pipeline_schedule=zbv"]),
        (EXPERTS, ["parallel.expert=2", "parallel.shard=2"]),
    ],
    ids=["tensor", "context", "ring", "pipeline", "expert"],
)
def test_narrow_formats_differ_by_rounding_alone(precision, changes, layout, tmp_path, tiny_run, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(dump_yaml(tiny_run({"model.num_layers": 4, **changes})))
    code = main(["verify", "run.yaml", "--steps", "2", "--precision", precision, "--against", *layout])
    out = capsys.readouterr().out
    assert code == 0 or "It shrinks in fp64: rounding, not a bug" in out, out
