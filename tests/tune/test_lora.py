"""Adapters: only they are trained and saved, in every layout; peft reads ours, and we read peft's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.checkpoint.hub import OpenModel, load_model, open_model, open_run_apart, with_adapters
from jingu.checkpoint.peft import read_adapters
from jingu.checkpoint.resume import step_folder
from jingu.checkpoint.verbs import convert
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.model.adapters import is_adapter
from jingu.model.decoder import make_model
from jingu.parallel import apply
from jingu.train.run import Run, open_run
from jingu.tune.adapters import export, merge
from jingu.words import rounded
from tests.conftest import Done, MakeRun

TOKENS = torch.arange(5, 29).view(2, 12)
Train = Callable[..., None]
Read = Callable[[RunConfig], Done]


@pytest.fixture
def base(tiny_run: MakeRun, train_on: Train) -> Path:
    """A run of 10 steps."""
    config = tiny_run({"train.steps": 10}, name="base")
    train_on(1, config)
    return Path(config.runs) / "base"


@pytest.fixture
def adapted(tiny_run: MakeRun, base: Path) -> MakeRun:
    """Makes a run that trains adapters beside `base`."""

    def make(changes: dict[str, Any] | None = None, name: str = "adapted") -> RunConfig:
        tune = {"type": "lora", "rank": 3, "alpha": 6.0, "targets": ["blocks.*.attention.*", "*.feed_forward.down"]}
        plain = {"model": {}, "initialize": {"from": str(base)}, "tune": tune, "train.steps": 8, "optimizer.lr": 4e-3}
        return tiny_run({**plain, **(changes or {})}, name=name)

    return make


def logits(opened: OpenModel, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = load_model(opened, dtype)
    with torch.no_grad():
        return model.logits(model(TOKENS))


def mean_loss(opened: OpenModel, run: Run) -> float:
    """Over the batches that the run was trained on."""
    model = load_model(opened, torch.float64)
    losses = []
    for step in range(run.config.train.steps):
        batch = run.source.batch(step, 0, 8)
        with torch.no_grad():
            scores = model.logits(model(batch.tokens)).flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(scores, batch.labels.flatten()).item())
    return sum(losses) / len(losses)


def unmerged(run: Path) -> torch.Tensor:
    """Logits of the base with the adapters beside its matrices."""
    apart, base, _ = open_run_apart(run)
    model = make_model(apart.spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((apart if is_adapter(name) else base).read(name))
        return model.eval().logits(model(TOKENS))


@pytest.mark.parametrize(
    "layouts",
    [
        [{"parallel.zero": 3}, {"parallel.tensor": 2}, {"parallel.pipeline": 2}],
        pytest.param([{"parallel.zero": zero} for zero in range(3)], marks=pytest.mark.slow),
    ],
)
def test_only_adapters_are_trained_and_saved_in_every_layout(
    layouts: list[dict[str, Any]], adapted: MakeRun, base: Path, train_on: Train, done: Read
) -> None:
    config = adapted()
    train_on(1, config)
    alone = done(config)
    losses, weights = alone.column("loss"), alone.tensors()
    run = open_run(config)
    before, after = (mean_loss(open_model(path), run) for path in (base, alone.folder))
    assert after < before - 0.005
    assert {name.rpartition(".")[2] for name in weights if name.startswith("model/")} == {"lora_a", "lora_b"}
    assert sum(name.startswith("model/") for name in weights) == 2 * 2 * 5
    assert len([name for name in weights if name.startswith("optimizer/exp_avg/")]) == 2 * 2 * 5
    for number, layout in enumerate(layouts):
        other = adapted(layout, name=f"layout-{number}")
        train_on(2, other)
        many = done(other)
        assert many.column("loss") == pytest.approx(losses, rel=1e-9), layout
        assert many.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-9), layout
        found = many.tensors()
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10, msg=f"{layout} {name}")


def test_a_run_goes_on_where_it_was(
    adapted: MakeRun, train_on: Train, done: Read, capsys: pytest.CaptureFixture[str]
) -> None:
    config = adapted({"checkpoint.every": 4})
    train_on(1, config)
    whole = done(config)
    losses, weights = whole.column("loss"), whole.tensors()
    numbers = sum(tensor.numel() for name, tensor in weights.items() if name.startswith("model/"))
    assert f" parameters ({rounded(numbers)} of them trained), 1 rank " in capsys.readouterr().err
    shutil.rmtree(step_folder(whole.folder / "checkpoints", 8))
    train_on(1, config)
    assert done(config).column("loss") == pytest.approx(losses, rel=1e-12)
    found = done(config).tensors()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_peft_loads_what_we_write(
    rank_stabilised: bool, adapted: MakeRun, base: Path, train_on: Train, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = adapted({"tune.rank_stabilised": rank_stabilised})
    train_on(1, config)
    run = Path(config.runs) / "adapted"
    convert(base, tmp_path / "hf", "fp32")
    export(run, tmp_path / "adapter")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        before = theirs(TOKENS).logits
        found = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()(TOKENS).logits
    apart = unmerged(run)
    assert (apart - before).abs().max() > 0.001
    torch.testing.assert_close(found, apart, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(open_model(run)), apart, rtol=1e-5, atol=1e-5)
    merge(run, tmp_path / "merged")
    torch.testing.assert_close(logits(open_model(tmp_path / "merged")), apart, rtol=1e-5, atol=1e-5)


def test_we_load_what_peft_writes(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    convert(base, tmp_path / "hf", "fp32")
    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    under = open_model(tmp_path / "hf")
    found = with_adapters(read_adapters(tmp_path / "adapter", under), under)
    torch.testing.assert_close(logits(found), expected, rtol=1e-4, atol=1e-4)


def test_the_base_is_kept_in_what_it_is_computed_with(
    adapted: MakeRun, train_on: Train, done: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 it takes half the memory and gives the same numbers, also sharded."""
    config = adapted({"precision.type": "bf16", "train.steps": 3})
    kept: dict[str, torch.dtype] = {}
    narrow = apply._narrow_frozen

    def seen(model: torch.nn.Module, dtype: torch.dtype) -> None:
        narrow(model, dtype)
        kept.update({name: parameter.dtype for name, parameter in model.named_parameters()})

    monkeypatch.setattr(apply, "_narrow_frozen", seen)
    train_on(1, config)
    losses = done(config).column("loss")
    assert kept["blocks.0.attention.q.weight"] == kept["embedding.weight"] == torch.bfloat16
    assert kept["blocks.0.attention.q.lora_a"] == kept["blocks.0.attention_norm.weight"] == torch.float32
    monkeypatch.setattr(apply, "_narrow_frozen", lambda *_: None)
    wide = adapted({"precision.type": "bf16", "train.steps": 3}, name="wide")
    train_on(1, wide)
    assert done(wide).column("loss") == losses
    monkeypatch.undo()
    sharded = adapted({"precision.type": "bf16", "train.steps": 3, "parallel.zero": 3}, name="sharded")
    train_on(2, sharded)
    assert done(sharded).column("loss") == pytest.approx(losses, rel=1e-3)


def test_mistakes(adapted: MakeRun, tiny_run: MakeRun, base: Path, train_on: Train, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=r"no matrix of the model has a name like \*q_proj"):
        train_on(1, adapted({"tune.targets": ["*q_proj"]}))
    with pytest.raises(JinguError, match="no model to begin with"):
        train_on(1, tiny_run({"tune": {"type": "lora"}}, name="none"))
    with pytest.raises(JinguError, match="trained no adapters"):
        export(base, tmp_path / "adapter")
    with pytest.raises(JinguError, match=r"trained no adapters\. `jingu export` writes its model"):
        merge(base, tmp_path / "merged")
    with pytest.raises(JinguError, match="no adapter of peft here"):
        merge(base, tmp_path / "merged", base)
