"""Prepared rows: packs that do not contaminate each other, lengths, splits, and a run that learns from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.config.schema import RunConfig
from jingu.config.sections.data import SupervisedSettings
from jingu.data.batch import IGNORED
from jingu.data.build import PROGRESS
from jingu.data.indexed import IndexedReader
from jingu.data.loader import Loader
from jingu.data.manifest import Manifest
from jingu.data.supervised import open_supervised
from jingu.errors import JinguError
from jingu.runtime.files import new_folder
from jingu.text.readers import Tally
from jingu.text.tokenizer import Tokenizer
from jingu.train.run import open_run
from jingu.train.task import Pretraining
from jingu.train.verbs import train
from jingu.tune.prepare import makers, prepare, units_of
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
        packed = open_supervised(Path(config.data.path), split, objective, config.batch, seed=1)
        rows, trained = (
            IndexedReader(Path(config.data.path) / f"{name}-00000") for name in (split, f"{split}-weights")
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
    (maker,) = makers(config)
    spans = [span for unit in units_of(config.data) for span in unit]
    return [maker.tokenizer.decode(row.ids) for span in spans for _, row in maker.rows(span, tally)], tally


def test_lengths(tuning: Callable[..., RunConfig]) -> None:
    long = ROWS[-1]
    tokenizer_length = 34
    cut, tally = made(tuning([long]))
    assert (len(cut), tally.rows["cut"]) == (1, 1) and tally.rows["tokens"] == tokenizer_length
    objective = {"type": "supervised", "template": "plain"}
    with pytest.raises(JinguError, match="no row is left"):
        prepare(tuning([long], data__objective={**objective, "longer": "drop"}))
    divided, tally = made(tuning([long], data__objective={**objective, "longer": "split"}, batch__sequence_length=64))
    assert tally.rows["divided"] == 1 and tally.rows["cut"] == 0 and len(divided) > 1
    assert "".join(divided) == "".join(f"ask {n} {'x' * 12}\nans {n} {'x' * 12}" for n in range(4))


def test_mistakes_are_told_or_left_out(tuning: Callable[..., RunConfig]) -> None:
    rows = [*ROWS[:9], {"instruction": "a", "output": ""}, ROWS[0], {"prompt": "a", "completion": "b"}]
    with pytest.raises(JinguError, match="row 10: field output"):
        prepare(tuning(rows))
    config = tuning(rows, data__on_error="skip", data__duplicates="drop")
    prepare(config)
    assert "row 10: field output" in (Path(config.data.path) / "skipped.txt").read_text(encoding="utf-8")
    manifest = Manifest.load(Path(config.data.path))
    assert manifest is not None and (manifest.skipped, manifest.duplicates) == (1, 1)
    assert manifest.train.documents + manifest.held_out.documents == 10


def test_rows_are_prepared_once_and_by_no_rank(tuning: Callable[..., RunConfig]) -> None:
    """Ranks only read: they make nothing that is not there, and of two that prepare the second is told."""
    config = tuning()
    place = Path(config.data.path)
    for world in (1, 2):
        with pytest.raises(JinguError, match="Run `jingu tune prepare` first"):
            train(config, world)
    assert not place.exists()
    with new_folder(place, PROGRESS), pytest.raises(JinguError, match="another process is writing this folder"):
        prepare(config)


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
    for number, changes in enumerate([{"zero": 3}]):
        other = config.model_copy(
            update={"name": f"two-{number}", "parallel": config.parallel.model_copy(update=changes)}
        )
        train_on(2, other)
        assert done(other).column("loss") == pytest.approx(losses, rel=1e-9)
        assert done(other).column("loss", "evaluation") == pytest.approx(alone.column("loss", "evaluation"), rel=1e-9)
        found = done(other).tensors()
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10)


TERMS = {"train__label_smoothing": 0.1, "train__z_loss": 1e-3, "train__noise": 5.0, "train__steps": 5}
WEIGHED = [
    *ROWS[:40],
    *(
        {"type": "conversation", "rounds": [["ask", "a"], ["ans", f"b{n}", 0.25], ["ask", "c"], ["ans", "d", 1.5]]}
        for n in range(9)
    ),
]


def test_weights_noise_smoothing_and_z_loss_in_every_layout(
    tuning: Callable[..., RunConfig], train_on: Callable[..., None], done: Callable[[RunConfig], Done]
) -> None:
    config = tuning(WEIGHED, evaluation__every=5, **TERMS)
    prepare(config)
    train_on(1, config)
    alone = done(config)
    losses = alone.column("loss")
    for number, changes in enumerate([{"pipeline": 2}, {"tensor": 2}, {"context": 2}]):
        other = config.model_copy(
            update={"name": f"two-{number}", "parallel": config.parallel.model_copy(update=changes)}
        )
        train_on(2, other)
        assert done(other).column("loss") == pytest.approx(losses, rel=1e-9)
        found = done(other).tensors()
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-10, msg=f"{changes} {name}")


def test_evaluations_leave_out_what_only_training_adds(
    tuning: Callable[..., RunConfig], train_on: Callable[..., None], done: Callable[[RunConfig], Done]
) -> None:
    found = []
    for name, terms in (("with", TERMS), ("without", {})):
        settings = {"name": name, "evaluation__every": 1, "train__steps": 1, "optimizer__lr": 1e-15}
        config = tuning(WEIGHED, **{**terms, **settings})
        prepare(config)
        train_on(1, config)
        found.append((done(config).column("loss")[0], done(config).column("loss", "evaluation")[0]))
    assert found[0][0] != pytest.approx(found[1][0], rel=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9)


def test_an_answers_weight_is_a_factor_on_its_loss(tuning: Callable[..., RunConfig]) -> None:
    config = tuning(WEIGHED[40:])
    prepare(config)
    run = open_run(config)
    batch = run.source.batch(0, 0, 8)
    assert batch.weights is not None
    weights = batch.weights[batch.labels >= 0]
    assert set(weights.tolist()) == {0.25, 1.5}
    assert not batch.weights[batch.labels < 0].any()


@pytest.mark.parametrize("sequences", ["padded", "by_length"])
def test_a_row_a_sequence(sequences: str, tuning: Callable[..., RunConfig]) -> None:
    """Every row once an epoch, in batches as long as their longest; by length, of little padding."""
    rows = [{"text": "x" * (1 + n % 31)} for n in range(62)]
    objective = {"type": "supervised", "template": "plain", "sequences": sequences}
    prepare(tuning(rows))
    run = open_run(tuning(rows, data__objective=objective))  # prepared data serves all of them
    source, (sequences_, *_) = run.source, run.source.sources
    steps = len(sequences_) // 8
    batches = [source.batch(step, first, 4) for step in range(steps) for first in (0, 4)]
    lengths = [(batch.documents >= 0).sum(1) for batch in batches]
    found = torch.cat(lengths).tolist()
    there = (sequences_.dataset.document_lengths() - 1).tolist()
    assert not Counter(found) - Counter(there)
    assert len(found) == len(there) // 8 * 8
    for batch, used in zip(batches, lengths, strict=True):
        assert batch.tokens.shape[1] == min(-(-int(used.max()) // 5) * 5, 33)
    padding = 1 - sum(found) / sum(batch.tokens.numel() for batch in batches)
    assert (padding < 0.2) == (sequences == "by_length")
    again = open_run(tuning(rows, data__objective=objective)).source.batch(1, 0, 4)
    torch.testing.assert_close(again.tokens, source.batch(1, 0, 4).tokens)
    assert not torch.equal(source.batch(0, 0, 8).documents, source.batch(steps, 0, 8).documents)


def test_several_sources_are_measured_together(tuning: Callable[..., RunConfig], tmp_path: Path) -> None:
    for name, rows in (("a", ROWS[:30]), ("b", ROWS[30:70])):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    sources = [{"path": str(tmp_path / name), "input": str(tmp_path / f"{name}.json")} for name in "ab"]
    config = tuning(data__input=[], data__path="data", data__sources=sources, evaluation__every=10)
    prepare(config)
    run = open_run(config)
    assert run.held_out is not None
    found = run.held_out.supervised
    assert found is not None
    manifests = [Manifest.load(tmp_path / name) for name in "ab"]
    tokens = sum(each.held_out.tokens - each.held_out.documents for each in manifests if each is not None)
    assert int((found.batch(0, len(found)).documents >= 0).sum()) == tokens


def test_many_processes_make_what_one_does(tuning: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"instruction": f"q{n}", "output": "a" * 900} for n in range(5000)]
    made = []
    for workers in (1, 2):
        config = tuning(rows, data__workers=workers, data__path=str(tuning().runs) + str(workers))
        prepare(config)
        manifest = Manifest.load(Path(config.data.path))
        assert manifest is not None
        made.append(
            [shard for split in (manifest.train, manifest.held_out) for shard in (*split.shards, *split.beside)]
        )
    assert made[0] == made[1] and len(made[0]) == 4


def test_rows_of_a_pack_do_not_see_each_other(tuning: Callable[..., RunConfig]) -> None:
    """The loss of a pack is the sum of those of its rows, each alone."""
    from jingu.model.decoder import Decoder
    from jingu.model.initialise import initialise

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


def test_a_row_alone_needs_no_mask(tuning: Callable[..., RunConfig]) -> None:
    """What fills up a sequence changes nothing, although nothing hides it."""
    from jingu.model.decoder import Decoder
    from jingu.model.initialise import initialise
    from jingu.parallel.mesh import axis_sizes, build_mesh
    from jingu.runtime.ranks import joined

    config = tuning(data__objective={"type": "supervised", "template": "plain", "sequences": "padded"})
    prepare(config)
    run = open_run(config)
    model = Decoder(run.spec).double()
    initialise(model, run.spec, 3)
    with joined("cpu", 1) as ranks:
        mesh = build_mesh(axis_sizes(config.parallel, 1, run.spec), ranks.device)
        task = Pretraining(Loader(run.source.batch, pinned=False), None, run.spec, mesh, config)
    batch = task.batch(0, 0, 4)
    assert batch.documents is None
    found = []
    for rows in (batch, run.source.batch(0, 0, 4)):
        found.append(task.loss(model, rows))
        found += torch.autograd.grad(found[-1], list(model.parameters()))
    half = len(found) // 2
    for mine, other in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
