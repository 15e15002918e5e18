"""`jingu tokenizer train` and `jingu tokenizer inspect`."""

from __future__ import annotations

from pathlib import Path

import pytest

from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, TokenizerSettings
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_commands import inspect, split_line, train


@pytest.fixture
def train_config(tmp_path: Path) -> RunConfig:
    (tmp_path / "corpus").mkdir()
    for index in range(20):
        (tmp_path / "corpus" / f"{index}.txt").write_text(f"seed {index}, seedling {index}, 种子种子\n" * 20)
    return RunConfig(
        tokenizer=TokenizerSettings(path=str(tmp_path / "tokenizer"), vocab_size=280),
        data=DataSettings(input=str(tmp_path / "corpus")),
    )


def with_vocabulary(config: RunConfig, vocabulary: int) -> RunConfig:
    return config.model_copy(update={"tokenizer": config.tokenizer.model_copy(update={"vocab_size": vocabulary})})


def test_train_once(train_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(train_config)
    said = capsys.readouterr().out
    path = tmp_path / "tokenizer"
    assert said.startswith(f"tokenizer: 280 entries in {path}.\n  ")
    assert "bytes per token (" in said
    assert Tokenizer.load(path).vocab_size == 280
    before = {item.name: item.stat().st_mtime_ns for item in path.iterdir()}
    assert sorted(before) == ["tokenizer.json", "tokenizer_config.json", "training.json"]
    train(train_config)
    assert capsys.readouterr().out == f"tokenizer: already trained in {path} (280 entries).\n"
    assert {item.name: item.stat().st_mtime_ns for item in path.iterdir()} == before
    with pytest.raises(JinguError) as caught:
        train(with_vocabulary(train_config, 281))
    assert str(caught.value) == (
        f"{path}: the tokenizer here was trained with other settings: vocab_size was 280 and is now 281. Delete the "
        "folder to train it again (then data sets must be built again too), or set tokenizer.path to another folder."
    )
    (path / "training.json").unlink()
    with pytest.raises(JinguError, match="`jingu tokenizer train` did not make what is here"):
        train(train_config)


def test_a_small_corpus_says_so(train_config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    train(with_vocabulary(train_config, 5000))
    assert "The sample has no more pairs to merge; tokenizer.vocab_size is 5,000." in capsys.readouterr().out


def test_an_empty_corpus_is_refused(train_config: RunConfig, tmp_path: Path) -> None:
    for file in (tmp_path / "corpus").iterdir():
        file.write_text("")
    with pytest.raises(JinguError) as caught:
        train(train_config)
    assert str(caught.value) == (
        "data.input: the corpus is empty: its files contain no text. Name files that contain text."
    )
    for file in (tmp_path / "corpus").iterdir():
        file.write_bytes(b"\xff\xfe no text")
    skipping = train_config.data.model_copy(update={"invalid_utf8": "skip"})
    with pytest.raises(JinguError, match=r"its files contain no text, or none that is UTF-8\."):
        train(train_config.model_copy(update={"data": skipping}))
    assert not (tmp_path / "tokenizer").exists()


def test_inspect(seed_tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed_tokenizer.save(tmp_path)
    inspect(tmp_path, text="    return seed\nmore")
    said = capsys.readouterr().out.splitlines()
    tokens = len(seed_tokenizer.encode("    return seed\nmore"))
    assert said[0] == f"tokenizer: 390 entries in {tmp_path}."
    assert said[1] == "  special tokens: <|endoftext|> = 0, <|user|> = 1; documents end with 0"
    assert said[3] == f"  {20 / tokens:.2f} bytes per token (20 bytes, {tokens} tokens)"
    assert said[5] == "  ···│·return│·seed"
    (tmp_path / "x.txt").write_text("\n\nThe fox\n")
    inspect(tmp_path, file=tmp_path / "x.txt")
    assert capsys.readouterr().out.splitlines()[-2] == "  The fox"
    inspect(tmp_path)
    assert "种子发芽了" in capsys.readouterr().out
    with pytest.raises(JinguError, match=r"none\.txt: the file cannot be read \(No such file or directory\)"):
        inspect(tmp_path, file=tmp_path / "none.txt")


def test_a_split_line_shows_every_character(seed_tokenizer: Tokenizer) -> None:
    shown = split_line(seed_tokenizer, "if\t🙂 春!")
    assert shown == "i│f│→│🙂(4)│·│春(2)│!"
