"""Prepared rows: packs that do not contaminate each other, lengths, splits, and a run that learns from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.config.schema import RunConfig, SupervisedSettings
from jingu.data.batch import IGNORED
from jingu.data.indexed import IndexedReader
from jingu.data.supervised import open_supervised
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.tune.prepare import Tally, makers, prepare
from tests.conftest import Done, MakeRun

ROWS = [
    *({"instruction": f"def f{n}", "output": f"return {n}"} for n in range(60)),
    *({"text": f"import m{n}"} for n in range(20)),
    {"type": "conversation", "rounds": [[who, f"{who} {n} " + "x" * 12] for n in range(4) for who in ("ask", "ans")]},
]


@pytest.fixture
def tuning(tiny_run: MakeRun, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(rows: list[Any] = ROWS, /, **changes: Any) -> RunConfig:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data = {"input": str(file), "path": str(tmp_path / "rows"), "held_out": 0.1}
        objective = {"type": "supervised", "template": "plain"}
        settings = {f"data.{key}": value for key, value in {**data, "objective": objective}.items()}
        return tiny_run({**settings, **{key.replace("__", "."): value for key, value in changes.items()}})

    return make


def test_packs_hold_every_row_once_with_its_own_positions(tuning: Callable[..., RunConfig]) -> None:
    config = tuning()
    prepare(config)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    seen = []
    for split in ("train", "held_out"):
        objective = config.data.objective
        assert isinstance(objective, SupervisedSettings)
        packed = open_supervised(Path(config.data.path), split, objective, 33, seed=1)
        rows, trained = (
            IndexedReader(Path(config.data.path) / f"{name}-00000") for name in (split, f"{split}-trained")
        )
        expected = {}
        for number in range(len(rows)):
            ids, mask = rows[number], trained[number]
            labels = [id_ if on else IGNORED for id_, on in zip(ids[1:].tolist(), mask[1:].tolist(), strict=True)]
            expected[tuple(ids[:-1].tolist())] = labels
        batch = packed.batch(0, len(packed) + 1)
        assert batch.positions is not None and batch.documents is not None
        assert (batch.labels[-1] == IGNORED).all()
        for line in range(len(packed)):
            assert (batch.labels[line, batch.documents[line] < 0] == IGNORED).all()
            for document in range(int(batch.documents[line].max()) + 1):
                there = batch.documents[line] == document
                tokens = batch.tokens[line, there].tolist()
                assert batch.positions[line, there].tolist() == list(range(len(tokens)))
                assert batch.labels[line, there].tolist() == expected.pop(tuple(tokens))
                seen.append(tokenizer.decode(tokens))
        assert not expected
    texts = [f"def f{n}\nreturn {n}" for n in range(60)] + [f"import m{n}" for n in range(20)]
    assert sorted(text for text in seen if not text.startswith("ask")) == sorted(texts)


def made(config: RunConfig) -> tuple[list[str], Tally]:
    tally = Tally()
    ((_, maker),) = makers(config)
    return [maker.tokenizer.decode(row.ids) for _, _, row in maker.rows(tally)], tally


def test_lengths(tuning: Callable[..., RunConfig]) -> None:
    long = ROWS[-1]
    tokenizer_length = 34
    cut, tally = made(tuning([long]))
    assert (len(cut), tally.cut) == (1, 1) and tally.tokens == tokenizer_length
    objective = {"type": "supervised", "template": "plain"}
    with pytest.raises(JinguError, match="no row is left"):
        prepare(tuning([long], data__objective={**objective, "longer": "drop"}))
    divided, tally = made(tuning([long], data__objective={**objective, "longer": "split"}, batch__sequence_length=64))
    assert tally.divided == 1 and tally.cut == 0 and len(divided) > 1
    assert "".join(divided) == "".join(f"ask {n} {'x' * 12}\nans {n} {'x' * 12}" for n in range(4))


def test_mistakes_are_told_or_left_out(tuning: Callable[..., RunConfig]) -> None:
    rows = [*ROWS[:9], {"instruction": "a", "output": ""}, ROWS[0], {"prompt": "a", "completion": "b"}]
    with pytest.raises(JinguError, match="row 10: field output"):
        prepare(tuning(rows))
    config = tuning(rows, data__on_error="skip", data__duplicates="drop")
    prepare(config)
    assert "row 10: field output" in (Path(config.data.path) / "skipped.txt").read_text(encoding="utf-8")
    _, tally = made(config)
    assert tally.left_out == {"copies": 1} and tally.rows == 10 and tally.copies == 1


def test_other_settings_are_refused(tuning: Callable[..., RunConfig], train_on: Callable[..., None]) -> None:
    prepare(tuning())
    with pytest.raises(JinguError, match="built otherwise: objective"):
        prepare(tuning(data__objective={"type": "supervised", "template": "alpaca"}))
    with pytest.raises(JinguError, match="made otherwise: train_on"):
        train_on(1, tuning(data__objective={"type": "supervised", "template": "plain", "train_on": "all"}))
    with pytest.raises(JinguError, match="made otherwise: sequence_length was 33 and is now 32"):
        train_on(1, tuning(batch__sequence_length=32))


def test_a_run_learns_from_rows_in_every_layout(
    tuning: Callable[..., RunConfig], train_on: Callable[..., None], done: Callable[[RunConfig], Done]
) -> None:
    config = tuning(evaluation__every=10)
    prepare(config)
    train_on(1, config)
    alone = done(config)
    losses = alone.column("loss")
    assert losses[-1] < losses[0] / 2
    for number, changes in enumerate([{"zero": 3}, {"pipeline": 2}]):
        other = config.model_copy(
            update={"name": f"two-{number}", "parallel": config.parallel.model_copy(update=changes)}
        )
        train_on(2, other)
        assert done(other).column("loss") == pytest.approx(losses, rel=1e-9)
        assert done(other).column("loss", "evaluation") == pytest.approx(alone.column("loss", "evaluation"), rel=1e-9)
        found = done(other).tensors()
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


def test_rows_of_a_pack_do_not_see_each_other(tuning: Callable[..., RunConfig]) -> None:
    """The loss of a pack is the sum of those of its rows, each alone."""
    from jingu.model.decoder import Decoder
    from jingu.model.initialise import initialise
    from jingu.train.run import open_run

    config = tuning()
    prepare(config)
    run = open_run(config)
    model = Decoder(run.spec).double()
    initialise(model, run.spec, 3)
    batch = run.source.batch(0, 0, 1)
    assert batch.documents is not None
    together = model(batch.tokens, batch.positions, batch.documents)
    for document in range(int(batch.documents.max()) + 1):
        there = batch.documents[0] == document
        torch.testing.assert_close(model(batch.tokens[:, there]), together[:, there], rtol=1e-9, atol=1e-12)
