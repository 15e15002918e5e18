"""`initialize.from`: runs that start from the weights of another model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.cli import main
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.model.spec import replace_fields
from jingu.text.tokenizer_training import train_tokenizer
from jingu.training.run import open_run
from tests.conftest import Done, Library, MakeRun

BEGIN = {"train.steps": 3, "optimizer.lr": 1e-3}
Trained = Callable[..., Done]


@pytest.fixture
def first(tiny_run: MakeRun, train_on: Callable[..., None]) -> Path:
    """A run of 4 steps."""
    config = tiny_run({"train.steps": 4}, name="first")
    train_on(1, config)
    return Path(config.runs_dir) / "first"


@pytest.fixture
def trained(train_on: Callable[..., None], done: Callable[[RunConfig], Done]) -> Trained:
    """Trains a run on so many ranks, and reads it back: `trained(config, 4)`."""

    def train(config: RunConfig, world: int = 1) -> Done:
        train_on(world, config)
        return done(config)

    return train


def second(tiny_run: MakeRun, begin: Path, **changes: Any) -> RunConfig:
    return tiny_run({**BEGIN, "model": {}, "initialize": {"from": str(begin)}, **changes}, name="second")


def test_a_run_starts_where_another_ended(first: Path, tiny_run: MakeRun, trained: Trained) -> None:
    """Without settings of `model`, it is that of the other run, and so is the first loss, on this run's first batch."""
    config = second(tiny_run, first)
    losses = trained(config).column("loss")
    run = open_run(config)
    assert run.spec == open_model(first).spec
    model = load_model(open_model(first), torch.float64)
    batch = run.source.batch(0, 0, 8)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            model.logits(model(batch.tokens)).flatten(0, 1), batch.labels.flatten()
        )
    assert losses[0] == pytest.approx(loss.item(), rel=1e-9)


LAYOUTS: list[dict[str, Any]] = [{"zero_stage": 3, "context": 2}, {"pipeline": 2, "tensor": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_in_every_layout(layout: dict[str, Any], first: Path, tiny_run: MakeRun, trained: Trained) -> None:
    alone = trained(second(tiny_run, first))
    many = trained(second(tiny_run, first, parallel=layout).model_copy(update={"name": "many"}), 4)
    assert many.column("loss") == pytest.approx(alone.column("loss"), rel=1e-9)
    found = many.tensors()
    for name, tensor in alone.tensors().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


def test_growing_between_stages(first: Path, tiny_run: MakeRun, trained: Trained, tmp_path: Path) -> None:
    """A run starts from a grown folder, and needs it no longer once it has a checkpoint."""
    grown = tmp_path / "grown"
    assert main(["model", "grow", str(first), "--to", str(grown), "--num-layers", "4", "--experts", "3"]) == 0
    config = second(tiny_run, grown)
    losses = trained(config).column("loss")
    assert open_run(config).spec.num_layers == 4
    plain = trained(second(tiny_run, first).model_copy(update={"name": "plain"}))
    # Export rounds nothing in fp64 runs but to fp64: the silent blocks and equal experts say the same at first.
    assert losses[0] == pytest.approx(plain.column("loss")[0], rel=1e-6)
    grown.rename(tmp_path / "away")
    assert len(trained(config).column("loss")) == 3


def refusal(config: RunConfig) -> str:
    with pytest.raises(JinguError) as caught:
        open_run(config)
    return str(caught.value)


def test_models_that_do_not_fit_are_refused(first: Path, tiny_run: MakeRun, tmp_path: Path) -> None:
    assert refusal(second(tiny_run, first, model={"num_layers": 3, "vocab_size": 400})) == (
        f"{first}: the run's model differs from the one that it starts from: vocab_size is 400, there 389; num_layers "
        "is 3, there 2. Leave out of `model` what the initial model decides; `jingu model grow` makes a larger one of "
        "it."
    )
    assert "differs from the one that it starts from: family is gpt2, there llama" in refusal(
        second(tiny_run, first, model={"preset": "gpt2"})
    )
    assert refusal(second(tiny_run, first, model={"family": "gpt2"})) == (
        "model.family: the model that the run starts from is of the family 'llama', not 'gpt2'. Leave it out: the "
        "family is known."
    )
    assert "there is no such model folder" in refusal(second(tiny_run, tmp_path / "nothing"))
    gone = first / "checkpoints" / "step-00000099"
    kept = next((first / "checkpoints").glob("step-*")).name
    assert refusal(second(tiny_run, gone)) == f"{gone}: the run has no such checkpoint. It has {kept}."
    deliberate = second(tiny_run, first, model={"rope_theta": 5e5, "max_position_embeddings": 77})
    assert open_run(deliberate).spec.max_position_embeddings == 77


def test_a_preset_of_the_same_dimensions_is_accepted(
    first: Path, tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So memory can be estimated before the model exists; its other fields count."""
    spec = open_run(second(tiny_run, first)).spec
    monkeypatch.setattr("jingu.model.resolve._preset", lambda _: replace_fields(spec, **{"norm.eps": 0.5}))
    assert open_run(second(tiny_run, first, model={"preset": "it"})).spec == spec


def test_another_tokenizer_is_refused(first: Path, library: Library, tiny_run: MakeRun) -> None:
    train_tokenizer(iter(["other text"] * 3), 270, ["<|endoftext|>"]).save(first / "tokenizer")
    words = refusal(second(tiny_run, first))
    assert "tokens of the initial model have other ids, or none, in the run's tokenizer." in words
    assert f"`jingu model grow {first} --tokenizer {library.tokenizer}` writes." in words


def test_a_second_language_stage(
    first: Path, library: Library, tiny_run: MakeRun, trained: Trained, tmp_path: Path
) -> None:
    """A tokenizer extended by a new language, the model grown for it, a data set of both, and a run that begins with
    what the first one knew: its scores of the old pieces are the first one's, and it is ahead of a beginner."""
    from jingu.data.build import build
    from jingu.text.tokenizer_commands import extend

    chinese = tmp_path / "zh"
    chinese.mkdir()
    (chinese / "poem.py").write_text("# 床前明月光，疑是地上霜。举头望明月，低头思故乡。\n" * 40, encoding="utf-8")
    both = {
        "tokenizer.base": str(library.tokenizer),
        "tokenizer.path": str(tmp_path / "tokenizer"),
        "tokenizer.vocab_size": 420,
        "data.input": [str(library.text), str(chinese)],
        "data.path": str(tmp_path / "data"),
        "evaluation.every": 3,
    }
    config = second(tiny_run, tmp_path / "grown", **both)
    extend(config)
    build(config)
    assert (
        main(["model", "grow", str(first), "--to", str(tmp_path / "grown"), "--tokenizer", both["tokenizer.path"]]) == 0
    )
    losses = trained(config).column("loss")
    fresh = trained(tiny_run({**BEGIN, **both}, name="fresh"))
    assert open_run(config).spec.vocab_size == 420
    assert losses[0] < fresh.column("loss")[0] - 0.1
    # What stood for the old pieces still does: the grown model's scores of them are those of the first.
    old, new = (load_model(open_model(path), torch.float64) for path in (first, tmp_path / "grown"))
    tokens = open_run(tiny_run({"train.steps": 4}, name="first")).source.batch(0, 0, 2).tokens
    with torch.no_grad():
        expected, found = (model.logits(model(tokens)) for model in (old, new))
    torch.testing.assert_close(found[..., :389], expected, rtol=1e-5, atol=1e-6)
