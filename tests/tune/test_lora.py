"""Adapters: only they are trained and saved, in every layout, and peft and jingu read each other's files."""

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
from jingu.formats.export import convert
from jingu.formats.models import open_adapter_run, open_model
from jingu.formats.peft import read_adapters
from jingu.formats.stored_model import StoredModel, apply_adapters, load_model
from jingu.formatting import format_rounded
from jingu.model.adapter_layers import is_adapter
from jingu.model.decoder import build_model
from jingu.parallel import materialize
from jingu.training.run import Run, open_run
from jingu.tune.adapter_commands import export, merge
from tests.conftest import Done, MakeRun

TOKENS = torch.arange(5, 29).view(2, 12)
Train = Callable[..., None]
Read = Callable[[RunConfig], Done]


@pytest.fixture
def base(tiny_run: MakeRun, train_on: Train) -> Path:
    """Train a run of 10 steps."""
    config = tiny_run({"train.steps": 10}, name="base")
    train_on(1, config)
    return Path(config.runs_dir) / "base"


@pytest.fixture
def adapted(tiny_run: MakeRun, base: Path) -> MakeRun:
    """Return a function that configures a run with adapters on `base`."""

    def make(changes: dict[str, Any] | None = None, name: str = "adapted") -> RunConfig:
        tune = {
            "type": "lora",
            "rank": 3,
            "alpha": 6.0,
            "target_modules": ["blocks.*.attention.*", "*.feed_forward.down"],
        }
        plain = {"model": {}, "initialize": {"from": str(base)}, "tune": tune, "train.steps": 8, "optimizer.lr": 4e-3}
        return tiny_run({**plain, **(changes or {})}, name=name)

    return make


def logits(stored: StoredModel, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = load_model(stored, dtype)
    with torch.no_grad():
        return model.logits(model(TOKENS))


def mean_loss(stored: StoredModel, run: Run) -> float:
    """Return the mean loss over the batches that the run was trained on."""
    model = load_model(stored, torch.float64)
    losses = []
    for step in range(run.config.train.steps):
        batch = run.source.batch(step, 0, 8)
        with torch.no_grad():
            scores = model.logits(model(batch.tokens)).flatten(0, 1)
        losses.append(torch.nn.functional.cross_entropy(scores, batch.labels.flatten()).item())
    return sum(losses) / len(losses)


def unmerged(run: Path) -> torch.Tensor:
    """Return logits of the base with unmerged adapters."""
    apart, base, _ = open_adapter_run(run)
    model = build_model(apart.spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((apart if is_adapter(name) else base).read(name))
        return model.eval().logits(model(TOKENS))


@pytest.mark.parametrize(
    "layouts",
    [
        [{"parallel.zero_stage": 3}, {"parallel.tensor": 2}, {"parallel.pipeline": 2}],
        pytest.param([{"parallel.zero_stage": zero} for zero in range(3)], marks=pytest.mark.slow),
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
        result = many.tensors()
        for name, tensor in weights.items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-7, atol=1e-10, msg=f"{layout} {name}")


def test_a_run_resumes(adapted: MakeRun, train_on: Train, done: Read, capsys: pytest.CaptureFixture[str]) -> None:
    config = adapted({"checkpoint.every": 4})
    train_on(1, config)
    response = done(config)
    losses, weights = response.column("loss"), response.tensors()
    numbers = sum(tensor.numel() for name, tensor in weights.items() if name.startswith("model/"))
    assert f" parameters ({format_rounded(numbers)} of them trained), 1 rank " in capsys.readouterr().err
    shutil.rmtree(step_folder(response.folder / "checkpoints", 8))
    train_on(1, config)
    assert done(config).column("loss") == pytest.approx(losses, rel=1e-12)
    result = done(config).tensors()
    for name, tensor in weights.items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tune.use_rslora": True},
        {"tune.rank_pattern": {"down_proj": 5, "*.attention.q": 2}, "tune.alpha_pattern": {"1.self_attn.q_proj": 2.5}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_peft_loads_exported_adapters(
    changes: dict[str, Any], adapted: MakeRun, base: Path, train_on: Train, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = adapted(changes)
    train_on(1, config)
    run = Path(config.runs_dir) / "adapted"
    convert(base, tmp_path / "hf", "fp32")
    export(run, tmp_path / "adapter")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        before = reference(TOKENS).logits
        result = PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()(TOKENS).logits
    apart = unmerged(run)
    assert (apart - before).abs().max() > 0.001
    torch.testing.assert_close(result, apart, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(open_model(run)), apart, rtol=1e-5, atol=1e-5)
    merge(run, tmp_path / "merged")
    torch.testing.assert_close(logits(open_model(tmp_path / "merged")), apart, rtol=1e-5, atol=1e-5)


def test_peft_s_adapters_are_loaded(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    convert(base, tmp_path / "hf", "fp32")
    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    reference = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), settings).eval()
    reference.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = reference(TOKENS).logits
    under = open_model(tmp_path / "hf")
    result = apply_adapters(read_adapters(tmp_path / "adapter", under), under)
    torch.testing.assert_close(logits(result), expected, rtol=1e-4, atol=1e-4)


def test_the_base_is_stored_in_the_compute_dtype(
    adapted: MakeRun, train_on: Train, done: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 it takes half the memory and gives the same results, also sharded."""
    config = adapted({"precision.type": "bf16", "train.steps": 3})
    saved: dict[str, torch.dtype] = {}
    narrow = materialize._narrow_frozen

    def seen(model: torch.nn.Module, dtype: torch.dtype) -> None:
        narrow(model, dtype)
        saved.update({name: parameter.dtype for name, parameter in model.named_parameters()})

    monkeypatch.setattr(materialize, "_narrow_frozen", seen)
    train_on(1, config)
    losses = done(config).column("loss")
    assert saved["blocks.0.attention.q.weight"] == saved["embedding.weight"] == torch.bfloat16
    assert saved["blocks.0.attention.q.lora_a"] == saved["blocks.0.attention_norm.weight"] == torch.float32
    monkeypatch.setattr(materialize, "_narrow_frozen", lambda *_: None)
    wide = adapted({"precision.type": "bf16", "train.steps": 3}, name="wide")
    train_on(1, wide)
    assert done(wide).column("loss") == losses
    monkeypatch.undo()
    sharded = adapted({"precision.type": "bf16", "train.steps": 3, "parallel.zero_stage": 3}, name="sharded")
    train_on(2, sharded)
    assert done(sharded).column("loss") == pytest.approx(losses, rel=1e-3)


def test_errors(adapted: MakeRun, tiny_run: MakeRun, base: Path, train_on: Train, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=r"no matrix of the model has a name like \*query"):
        train_on(1, adapted({"tune.target_modules": ["*query"]}))
    with pytest.raises(JinguError, match=r"rank_pattern: no matrix with an adapter has a name like .*gate"):
        train_on(1, adapted({"tune.rank_pattern": {"gate_proj": 4}}))
    with pytest.raises(JinguError, match="the run starts from random weights"):
        train_on(1, tiny_run({"tune": {"type": "lora"}}, name="none"))
    with pytest.raises(JinguError, match="trained no adapters"):
        export(base, tmp_path / "adapter")
    with pytest.raises(JinguError, match=r"trained no adapters\. `jingu export` writes its model"):
        merge(base, tmp_path / "merged")
    with pytest.raises(JinguError, match="no adapter of peft here"):
        merge(base, tmp_path / "merged", base)
