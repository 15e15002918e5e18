"""Prepared rows: packing without cross-contamination, lengths, splits, and a run that learns from them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.align.preference_rows import PREFERENCES
from jingu.config.schema import RunConfig
from jingu.config.sections.data import SupervisedSettings
from jingu.data.batch import IGNORE_INDEX
from jingu.data.batch_prefetch import BatchPrefetcher
from jingu.data.build import PROGRESS_NAME
from jingu.data.dataset_manifest import DatasetManifest
from jingu.data.indexed_dataset import IndexedReader
from jingu.data.open_sources import open_supervised
from jingu.errors import JinguError
from jingu.runtime.files import create_folder_atomically
from jingu.text.document_reader import ReadCounts
from jingu.text.tokenizer import Tokenizer
from jingu.training.commands import train
from jingu.training.pretraining import Pretraining
from jingu.training.run import open_run
from jingu.tune.prepare import plan_row_units, prepare, row_tokenizers
from jingu.tune.preview import preview
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
        data = {"input": str(file), "path": str(tmp_path / "rows"), "validation_fraction": 0.1}
        objective = {"type": "supervised", "template": "plain"}
        settings = {f"data.{key}": value for key, value in {**data, "objective": objective}.items()}
        return tiny_run({**settings, **{key.replace("__", "."): value for key, value in changes.items()}})

    return make


def test_packed_rows_appear_once_with_their_own_positions(tuning: Callable[..., RunConfig]) -> None:
    config = tuning()
    prepare(config)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    observed = []
    for split in ("train", "validation"):
        objective = config.data.objective
        assert isinstance(objective, SupervisedSettings)
        packed = open_supervised(Path(config.data.path), split, objective, config.batch, seed=1)
        rows, trained = (
            IndexedReader(Path(config.data.path) / f"{name}-00000") for name in (split, f"{split}-weights")
        )
        expected = {}
        for number in range(len(rows)):
            ids, mask = rows[number], trained[number]
            labels = [id_ if on else IGNORE_INDEX for id_, on in zip(ids[1:].tolist(), mask[1:].tolist(), strict=True)]
            expected[tuple(ids[:-1].tolist())] = labels
        batch = packed.batch(0, len(packed) + 1)
        assert batch.positions is not None and batch.documents is not None
        assert (batch.labels[-1] == IGNORE_INDEX).all()
        for line in range(len(packed)):
            assert (batch.labels[line, batch.documents[line] < 0] == IGNORE_INDEX).all()
            for document in range(int(batch.documents[line].max()) + 1):
                paths = batch.documents[line] == document
                tokens = batch.tokens[line, paths].tolist()
                assert batch.positions[line, paths].tolist() == list(range(len(tokens)))
                assert batch.labels[line, paths].tolist() == expected.pop(tuple(tokens))
                observed.append(tokenizer.decode(tokens))
        assert not expected
    texts = [f"def f{n}\nreturn {n}" for n in range(60)] + [f"import m{n}" for n in range(20)]
    assert sorted(text for text in observed if not text.startswith("ask")) == sorted(texts)


def made(config: RunConfig) -> tuple[list[str], ReadCounts]:
    tally = ReadCounts()
    (maker,) = row_tokenizers(config)
    spans = [span for unit in plan_row_units(config.data) for span in unit]
    return [maker.tokenizer.decode(row.ids) for span in spans for _, row in maker.tokenize_span(span, tally)], tally


def test_rows_that_are_too_long(tuning: Callable[..., RunConfig]) -> None:
    long = ROWS[-1]
    tokenizer_length = 34
    cut, tally = made(tuning([long]))
    assert (len(cut), tally.rows["truncated"]) == (1, 1) and tally.rows["tokens"] == tokenizer_length
    objective = {"type": "supervised", "template": "plain"}
    with pytest.raises(JinguError, match="no row is left"):
        prepare(tuning([long], data__objective={**objective, "overflow": "drop"}))
    divided, tally = made(tuning([long], data__objective={**objective, "overflow": "split"}, batch__sequence_length=64))
    assert tally.rows["split"] == 1 and tally.rows["truncated"] == 0 and len(divided) > 1
    assert "".join(divided) == "".join(f"ask {n} {'x' * 12}\nans {n} {'x' * 12}" for n in range(4))


def test_bad_rows_stop_or_are_skipped(tuning: Callable[..., RunConfig]) -> None:
    rows = [*ROWS[:9], {"instruction": "a", "output": ""}, ROWS[0], {"prompt": "a", "completion": "b"}]
    with pytest.raises(JinguError, match="row 10: field output"):
        prepare(tuning(rows))
    config = tuning(rows, data__on_error="skip", data__duplicates="drop")
    prepare(config)
    assert "row 10: field output" in (Path(config.data.path) / "skipped.txt").read_text(encoding="utf-8")
    manifest = DatasetManifest.load(Path(config.data.path))
    assert manifest is not None and (manifest.skipped, manifest.duplicates) == (1, 1)
    assert manifest.train.documents + manifest.validation.documents == 10


def test_pairs_of_a_ranking_are_no_copies(tuning: Callable[..., RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    """They are in one split, though they are not equal; only a copy of the whole ranking is dropped."""
    rows = [{"prompt": f"Q{n % 9} ", "ranking": ["best", "good", "bad"]} for n in range(10)]
    config = tuning(
        rows,
        data__objective={"type": "preference", "template": "plain"},
        data__duplicates="drop",
        data__validation_fraction=0.4,
        batch__sequence_length=128,
    )
    preview(config, kind=PREFERENCES)
    assert "3 duplicates" in capsys.readouterr().out
    prepare(config, PREFERENCES)
    manifest = DatasetManifest.load(Path(config.data.path))
    assert manifest is not None and manifest.duplicates == 3
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    numbers = []
    for split in ("train", "validation"):
        pairs = IndexedReader(Path(config.data.path) / f"{split}-00000")
        numbers.append(Counter(tokenizer.decode(pairs[index].tolist())[:2] for index in range(len(pairs))))
    assert not numbers[0].keys() & numbers[1].keys()
    assert numbers[0] + numbers[1] == {f"Q{n}": 3 for n in range(9)}


@pytest.mark.parametrize(("turns", "expected"), [("auto", 11), ("whole", 10), ("each", 11)])
def test_a_template_that_rewrites_history(
    turns: str, expected: int, tuning: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """As Qwen3's own template: an answer renders differently once another turn follows."""
    template = tmp_path / "changing.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and loop.last %}! {% endif %}"
        "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [{"role": role, "content": "fox"} for role in ("user", "assistant")]
    rows = [*({"messages": [*messages[:1], {"role": "assistant", "content": f"fox {n}"}]} for n in range(9))]
    rows.append({"messages": [*messages, *messages]})
    settings = {"data__objective__template": str(template), "batch__sequence_length": 64}
    config = tuning(rows, data__objective__turns=turns, **settings)
    prepare(config)
    manifest = DatasetManifest.load(Path(config.data.path))
    assert manifest is not None and manifest.train.documents + manifest.validation.documents == expected
    # The setting is a part of what identifies the data.
    other = tuning(rows, data__objective__train_empty_reasoning=True, **settings)
    with pytest.raises(JinguError, match="train_empty_reasoning"):
        prepare(other)


def test_rows_of_which_a_template_leaves_out_a_part_are_skipped(
    tuning: Callable[..., RunConfig], tmp_path: Path
) -> None:
    template = tmp_path / "silent.jinja"
    template.write_text("{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}\n{% endif %}{% endfor %}")
    pair = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "quick"}]
    other = [pair[0], {"role": "assistant", "content": "brown"}]
    rows = [{"messages": pair}, {"messages": [{"role": "system", "content": "fox"}, *pair]}, {"messages": other}]
    with pytest.raises(JinguError, match=r"row 2: .*does not write this system message .message 1.: fox"):
        prepare(tuning(rows, data__objective__template=str(template)))
    config = tuning(rows, data__objective__template=str(template), data__on_error="skip")
    prepare(config)
    assert "row 2: the chat template" in (Path(config.data.path) / "skipped.txt").read_text(encoding="utf-8")


def test_rows_are_prepared_once_and_never_by_ranks(tuning: Callable[..., RunConfig]) -> None:
    """Ranks only read prepared data, and of two processes that prepare it the second fails."""
    config = tuning()
    place = Path(config.data.path)
    for world in (1, 2):
        with pytest.raises(JinguError, match="Run `jingu tune prepare` first"):
            train(config, world)
    assert not place.exists()
    with (
        create_folder_atomically(place, PROGRESS_NAME),
        pytest.raises(JinguError, match="another process is writing this folder"),
    ):
        prepare(config)


def test_data_prepared_again_in_one_process_have_the_new_template(
    tuning: Callable[..., RunConfig], tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    contents = []
    for word in ("one", "two"):
        file.write_text(f"{{% for m in messages %}}{word}{{{{ m.role }}}}: {{{{ m.content }}}}{{% endfor %}}")
        config = tuning(data__objective={"type": "supervised", "template": str(file)})
        prepare(config)
        contents.append((Path(config.data.path) / "train-00000.bin").read_bytes())
        shutil.rmtree(config.data.path)
    assert contents[0] != contents[1]


def test_changed_settings_are_refused(tuning: Callable[..., RunConfig], train_on: Callable[..., None]) -> None:
    prepare(tuning())
    with pytest.raises(JinguError, match="built with other settings: objective"):
        prepare(tuning(data__objective={"type": "supervised", "template": "alpaca"}))
    with pytest.raises(JinguError, match="made with other settings: loss_on"):
        train_on(1, tuning(data__objective={"type": "supervised", "template": "plain", "loss_on": "all"}))
    with pytest.raises(JinguError, match="made with other settings: sequence_length was 33 and is now 32"):
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
    for number, changes in enumerate([{"zero_stage": 3}]):
        other = config.model_copy(
            update={"name": f"two-{number}", "parallel": config.parallel.model_copy(update=changes)}
        )
        train_on(2, other)
        assert done(other).column("loss") == pytest.approx(losses, rel=1e-9)
        assert done(other).column("loss", "evaluation") == pytest.approx(alone.column("loss", "evaluation"), rel=1e-9)
        result = done(other).tensors()
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-7, atol=1e-10)


TERMS = {"train__label_smoothing": 0.1, "train__z_loss_coef": 1e-3, "train__neftune_alpha": 5.0, "train__steps": 5}
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
        result = done(other).tensors()
        for name, tensor in alone.tensors().items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-7, atol=1e-10, msg=f"{changes} {name}")


def test_evaluation_excludes_training_only_terms(
    tuning: Callable[..., RunConfig], train_on: Callable[..., None], done: Callable[[RunConfig], Done]
) -> None:
    result = []
    for name, terms in (("with", TERMS), ("without", {})):
        settings = {"name": name, "evaluation__every": 1, "train__steps": 1, "optimizer__lr": 1e-15}
        config = tuning(WEIGHED, **{**terms, **settings})
        prepare(config)
        train_on(1, config)
        result.append((done(config).column("loss")[0], done(config).column("loss", "evaluation")[0]))
    assert result[0][0] != pytest.approx(result[1][0], rel=1e-4)
    assert result[0][1] == pytest.approx(result[1][1], rel=1e-9)


def test_message_weights_scale_the_loss(tuning: Callable[..., RunConfig]) -> None:
    config = tuning(WEIGHED[40:])
    prepare(config)
    run = open_run(config)
    batch = run.source.batch(0, 0, 8)
    assert batch.weights is not None
    weights = batch.weights[batch.labels >= 0]
    assert set(weights.tolist()) == {0.25, 1.5}
    assert not batch.weights[batch.labels < 0].any()


@pytest.mark.parametrize("sequences", ["padded", "group_by_length"])
def test_one_row_per_sequence(sequences: str, tuning: Callable[..., RunConfig]) -> None:
    """Each row appears once per epoch, in batches as long as their longest row; grouping by length pads little."""
    rows = [{"text": "x" * (1 + n % 31)} for n in range(62)]
    objective = {"type": "supervised", "template": "plain", "packing": sequences}
    prepare(tuning(rows))
    run = open_run(tuning(rows, data__objective=objective))  # prepared data serves all of them
    source, (sequences_, *_) = run.source, run.source.sources
    steps = len(sequences_) // 8
    batches = [source.batch(step, first, 4) for step in range(steps) for first in (0, 4)]
    lengths = [(batch.documents >= 0).sum(1) for batch in batches]
    result = torch.cat(lengths).tolist()
    mask = (sequences_.dataset.document_lengths() - 1).tolist()
    assert not Counter(result) - Counter(mask)
    assert len(result) == len(mask) // 8 * 8
    for batch, used in zip(batches, lengths, strict=True):
        assert batch.tokens.shape[1] == min(-(-int(used.max()) // 5) * 5, 33)
    padding = 1 - sum(result) / sum(batch.tokens.numel() for batch in batches)
    assert (padding < 0.2) == (sequences == "group_by_length")
    again = open_run(tuning(rows, data__objective=objective)).source.batch(1, 0, 4)
    torch.testing.assert_close(again.tokens, source.batch(1, 0, 4).tokens)
    assert not torch.equal(source.batch(0, 0, 8).documents, source.batch(steps, 0, 8).documents)


def test_every_source_is_evaluated(tuning: Callable[..., RunConfig], tmp_path: Path) -> None:
    for name, rows in (("a", ROWS[:30]), ("b", ROWS[30:70])):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    sources = [{"path": str(tmp_path / name), "input": str(tmp_path / f"{name}.json")} for name in "ab"]
    config = tuning(data__input=[], data__path="data", data__sources=sources, evaluation__every=10)
    prepare(config)
    run = open_run(config)
    for name, rows in zip("ab", run.validation, strict=True):
        manifest = DatasetManifest.load(tmp_path / name)
        assert manifest is not None and rows.supervised_rows is not None and rows.name == name
        tokens = manifest.validation.tokens - manifest.validation.documents
        assert int((rows.supervised_rows.batch(0, len(rows)).documents >= 0).sum()) == tokens


@pytest.mark.slow
def test_several_processes_equal_one(tuning: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"instruction": f"q{n}", "output": "a" * 900} for n in range(5000)]
    row = []
    for workers in (1, 2):
        config = tuning(rows, data__num_workers=workers, data__path=str(tuning().runs_dir) + str(workers))
        prepare(config)
        manifest = DatasetManifest.load(Path(config.data.path))
        assert manifest is not None
        row.append(
            [shard for split in (manifest.train, manifest.validation) for shard in (*split.shards, *split.sidecars)]
        )
    assert row[0] == row[1] and len(row[0]) == 4


def test_packed_rows_do_not_attend_to_each_other(tuning: Callable[..., RunConfig]) -> None:
    """A packed row's hidden states equal those of the row alone."""
    from jingu.model.decoder import Decoder
    from jingu.model.inputs import Inputs
    from jingu.model.weight_init import init_weights

    config = tuning()
    prepare(config)
    run = open_run(config)
    model = Decoder(run.spec).double()
    init_weights(model, run.spec, 3)
    batch = run.source.batch(0, 0, 1)
    assert batch.documents is not None
    together = model(Inputs(batch.tokens, batch.positions, batch.documents))
    for document in range(int(batch.documents.max()) + 1):
        mask = batch.documents[0] == document
        torch.testing.assert_close(model(batch.tokens[:, mask]), together[:, mask], rtol=1e-9, atol=1e-12)


def test_a_padded_row_needs_no_mask(tuning: Callable[..., RunConfig]) -> None:
    """Padding changes nothing, although no mask hides it."""
    from jingu.model.decoder import Decoder
    from jingu.model.weight_init import init_weights
    from jingu.parallel.mesh import build_mesh, resolve_axis_sizes
    from jingu.runtime.ranks import join_process_group

    config = tuning(data__objective={"type": "supervised", "template": "plain", "packing": "padded"})
    prepare(config)
    run = open_run(config)
    model = Decoder(run.spec).double()
    init_weights(model, run.spec, 3)
    with join_process_group("cpu", 1) as ranks:
        mesh = build_mesh(resolve_axis_sizes(config.parallel, 1, run.spec), ranks.device)
        task = Pretraining(BatchPrefetcher(run.source.batch), run.spec, mesh, config)
    batch = task.batch(0, 0, 4)
    assert batch.documents is None
    result = []
    for rows in (batch, run.source.batch(0, 0, 4)):
        result.append(task.loss(model, rows))
        result += torch.autograd.grad(result[-1], list(model.parameters()))
    half = len(result) // 2
    for actual, other in zip(result[:half], result[half:], strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-10, atol=1e-12)
