"""`tune.initial_adapter`: a run starts with the adapter that it names, whatever its rank and alpha say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.formats.export import convert
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.training.run import open_run
from tests.conftest import Done, MakeRun

Train = Callable[..., None]
Read = Callable[[RunConfig], Done]


@pytest.fixture
def base(tiny_run: MakeRun, train_on: Train, tmp_path: Path) -> Path:
    config = tiny_run({"train.steps": 2}, name="base")
    train_on(1, config)
    convert(Path(config.runs_dir) / "base", tmp_path / "base", "fp32")
    return tmp_path / "base"


@pytest.fixture
def adapted(tiny_run: MakeRun, base: Path) -> Callable[..., RunConfig]:
    """Configure a run of one step with adapters on the base."""

    def make(name: str, **tune: Any) -> RunConfig:
        settings = {"type": "lora", "target_modules": ["q_proj", "v_proj", "down_proj"], **tune}
        plain = {"model": {}, "initialize": {"from": str(base)}, "tune": settings, "train.steps": 1}
        return tiny_run(plain, name=name)

    return make


def first_loss(model: Path, config: RunConfig) -> float:
    """Return the loss of a model on the first batch of a run."""
    module = load_model(open_model(model), torch.float64)
    batch = open_run(config).source.batch(0, 0, 8)
    with torch.no_grad():
        scores = module.logits(module(batch.tokens)).flatten(0, 1)
    return torch.nn.functional.cross_entropy(scores, batch.labels.flatten()).item()


def write_peft(base: Path, to: Path, **settings: Any) -> Path:
    """Write strong adapters with peft."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **settings)
    model = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 1.5
    model.save_pretrained(to)
    return to


# Settings of peft's adapter, and of the run that starts from it.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rank-stabilized": ({"r": 4, "lora_alpha": 8, "use_rslora": True}, {"rank": 4, "alpha": 8}),
    "peft's default alpha": ({"r": 8}, {"rank": 8}),
    "another alpha": ({"r": 4, "lora_alpha": 32}, {"rank": 4, "alpha": 4, "use_rslora": True}),
    "DoRA": ({"r": 4, "lora_alpha": 12, "use_dora": True}, {"rank": 4, "alpha": 3, "use_dora": True}),
    "patterns in peft": (
        {"r": 4, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 24}},
        {"rank": 4, "alpha": 6},
    ),
    "patterns in both": (
        {"r": 4, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 24}},
        {"rank": 4, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 40}},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_start_is_the_adapter_that_is_named(
    case: str, base: Path, adapted: Callable[..., RunConfig], train_on: Train, done: Read, tmp_path: Path
) -> None:
    theirs, tune = CASES[case]
    adapter = write_peft(base, tmp_path / "adapter", **theirs)
    config = adapted("second", initial_adapter=str(adapter), **tune)
    expected = first_loss(adapter, config)
    assert abs(expected - first_loss(base, config)) > 0.01
    train_on(1, config)
    assert done(config).column("loss")[0] == pytest.approx(expected, rel=1e-6)


def test_adapters_of_a_run_with_another_strength(
    adapted: Callable[..., RunConfig], train_on: Train, done: Read
) -> None:
    first = adapted("first", rank=4, alpha=64, alpha_pattern={"q_proj": 200}, lora_bias=True)
    first = first.model_copy(update={"train": first.train.model_copy(update={"steps": 4})})
    train_on(1, first)
    folder = Path(first.runs_dir) / "first"
    second = adapted("second", rank=4, alpha=1, use_rslora=True, lora_bias=True, initial_adapter=str(folder))
    expected = first_loss(folder, second)
    train_on(1, second)
    assert done(second).column("loss")[0] == pytest.approx(expected, rel=1e-9)


def test_adapters_with_another_meaning_are_refused(
    base: Path, adapted: Callable[..., RunConfig], train_on: Train, tmp_path: Path
) -> None:
    pissa = adapted("pissa", rank=4, init_lora_weights="pissa")
    tokens = adapted("tokens", rank=4, trainable_token_indices=[3, 5])
    train_on(1, pissa, tokens)
    folders = {config.name: str(Path(config.runs_dir) / config.name) for config in (pissa, tokens)}
    peft = str(write_peft(base, tmp_path / "adapter", r=4))
    for number, (tune, words) in enumerate(
        (
            ({"initial_adapter": folders["pissa"]}, "have init_lora_weights 'pissa', and the run's have 'default'"),
            ({"initial_adapter": peft, "init_lora_weights": "olora"}, "and the run's have 'olora'"),
            ({"initial_adapter": folders["pissa"], "init_lora_weights": "pissa", "alpha": 2}, "another rank or alpha"),
            (
                {"initial_adapter": folders["tokens"], "trainable_token_indices": [3, 6]},
                r"have trainable_token_indices \(3, 5\), and the run's have \(3, 6\)",
            ),
            ({"initial_adapter": peft, "rank": 8}, r"has the shape \[4, 32\], and the run's has \[8, 32\]"),
            ({"initial_adapter": peft, "rank": 2}, r"has the shape \[4, 32\], and the run's has \[2, 32\]"),
            ({"initial_adapter": peft, "target_modules": ["q_proj"]}, "for other modules"),
        )
    ):
        with pytest.raises(JinguError, match=words):
            train_on(1, adapted(f"run-{number}", **{"rank": 4, **tune}))
