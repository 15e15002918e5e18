"""`jingu data preview` and `jingu data inspect --document`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jingu.config.schema import RunConfig
from jingu.data.dataset import open_dataset
from jingu.data.inspection import inspect, preview
from jingu.data.open_sources import open_sources
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer


def run_of(built_folder: Path, tokenizer_folder: Path, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "tokenizer": {"path": str(tokenizer_folder)},
            "data": {"path": str(built_folder), **data},
            "batch": {"sequence_length": 90, "global_batch_size": 6},
            "train": {"steps": 100},
        }
    )


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_the_rows_of_a_step_with_their_documents(
    built_folder: Path, tokenizer_folder: Path, packing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_of(built_folder, tokenizer_folder, packing=packing)
    tokenizer = Tokenizer.load(tokenizer_folder)
    source, dataset = open_sources(config, tokenizer), open_dataset(built_folder, "train")
    preview(config, step=7, rows=5)
    head, *rows = capsys.readouterr().out.split("\nstep 7, row ")
    epochs = 600 / len(source.sources[0])
    assert epochs > 4
    assert head == (
        f"100 steps of 6 sequences:\n  data: 100.00% of the sequences, {epochs:.2f} epochs; "
        "more than 4 teach little more\n"
    )
    preview(config, step=99, rows=0)
    assert "never trained" not in capsys.readouterr().out
    preview(config, step=100, rows=0)
    assert "\nThe run ends before step 100 (counted from 0): " in capsys.readouterr().out
    batch = source.batch(7, 0, 6)
    assert len(rows) == 5
    for number, row in enumerate(rows):
        assert re.match(rf"{number}: data, sequence \d+ of its epoch \d\n", row)
        named = re.findall(r"^  data/train-(\d{5}):(\d+)  # (\d+) tokens of .+$", row, re.MULTILINE)
        remaining = int((batch.labels[number] >= 0).sum())
        assert sum(int(count) for *_, count in named) == remaining
        tokens = batch.tokens[number].tolist()[:remaining]
        assert row.endswith(tokenizer.decode(tokens) + "\n")
        at = 0
        for shard, document, count in named:
            start, length = dataset.document_range(int(shard), int(document))
            whole = dataset.gather(dataset.shard_starts[:1] + start, length)[0].tolist()
            part = tokens[at : at + int(count)]
            assert any(whole[place : place + len(part)] == part for place in range(length))
            at += int(count)


def test_preview_of_encoder_inputs_and_targets(
    built_folder: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, tokenizer = run_of(built_folder, tokenizer_folder), Tokenizer.load(tokenizer_folder)
    preview(run_of(built_folder, tokenizer_folder, objective={"type": "continuation"}), step=7, rows=1)
    read, _, written = capsys.readouterr().out.partition("\nreads: ")[2].partition("<|endoftext|>\nwrites: ")
    ids = open_sources(config, tokenizer).batch(7, 0, 1).tokens[0].tolist()
    assert read + written == tokenizer.decode(ids, keep_special_tokens=True) + "\n"


def test_shares_of_several_sources(
    built_folder: Path, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "again").symlink_to(built_folder, target_is_directory=True)
    sources = [{"path": str(built_folder), "weight": 3.0}, {"path": str(tmp_path / "again")}]
    config = run_of(built_folder, tokenizer_folder)
    data = {"sources": sources}
    config = RunConfig.model_validate(config.model_dump(exclude={"data"}) | {"data": data})
    preview(config, rows=0)
    assert re.fullmatch(
        r"100 steps of 6 sequences:\n  data: 75\.00% of the sequences, \S+ epochs.*\n"
        r"  again: 25\.00% of the sequences, \S+ epochs\n",
        capsys.readouterr().out,
    )


def test_every_document_has_an_origin(built_folder: Path, tokenizer_folder: Path, corpus_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    result = []
    for split in ("train", "validation"):
        dataset = open_dataset(built_folder, split)
        for shard, reader in enumerate(dataset.readers):
            for number in range(len(reader)):
                path, _, place = dataset.document_origin(shard, number).partition(":byte ")
                text = tokenizer.decode(reader[number].tolist())
                content = Path(path).read_bytes()
                assert text == (
                    json.loads(content[int(place) :].split(b"\n")[0])["text"] if place else content.decode()
                )
                result.append((path, place))
    assert len(set(result)) == len(result) == 65
    assert {path for path, _ in result} == {str(path) for path in corpus_folder.iterdir()}


def test_the_current_folder_can_be_a_data_set(
    built_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(built_folder)
    inspect(Path())
    assert "every file matches its checksum" in capsys.readouterr().out


def test_a_document_by_its_number(
    built_folder: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, tokenizer = open_dataset(built_folder, "train"), Tokenizer.load(tokenizer_folder)
    start, length = dataset.document_range(1, 0)
    ids = dataset.gather(dataset.shard_starts[:1] + start, length)[0].tolist()
    number = dataset.manifest.train.shards[0].documents
    inspect(built_folder, document=number, tokenizer=tokenizer_folder)
    assert capsys.readouterr().out == (
        f"data/train-00001:0  # {length} tokens of {dataset.document_origin(1, 0)}\n{tokenizer.decode(ids)}\n"
    )
    inspect(built_folder, document=number)
    assert capsys.readouterr().out.split("\n")[1] == " ".join(map(str, ids))
    with pytest.raises(JinguError, match=r"documents, numbered from 0, but no 99,999\."):
        inspect(built_folder, document=99_999)
