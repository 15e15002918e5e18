"""The identity of prepared data: everything that can change a byte of it is compared, in each command that stores."""

from __future__ import annotations

import bz2
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from jingu.align.commands import prepare as prepare_pairs
from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, TokenizerSettings
from jingu.config.sections.train import BatchSettings
from jingu.data.build import build
from jingu.errors import JinguError
from jingu.runtime import checksums
from jingu.runtime.checksums import ContentRecord, record_file
from jingu.text.corpus import describe_records, find_files, record_files
from jingu.text.identity import TABLE
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_commands import train as train_tokenizer
from jingu.training.run import open_run
from jingu.tune.prepare import prepare
from tests.conftest import MakeRun

Command = Callable[[RunConfig], None]


def test_every_setting_is_in_the_table() -> None:
    listed = [key for section in ("settings", "shown", "unchanged") for key in TABLE[section]]
    assert len(listed) == len(set(listed))
    sections = {"data": DataSettings, "tokenizer": TokenizerSettings, "batch": BatchSettings}
    fields = {f"{name}.{field}" for name, section in sections.items() for field in section.model_fields}
    assert set(listed) == fields


def jsonl(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


ROWS = [
    {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f"a {n}"}]} for n in range(9)
]
PAIRS = [{"prompt": f"q {n}", "chosen": f"yes {n}", "rejected": f"bad {n}"} for n in range(9)]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture
def make(tiny_run: MakeRun, library: Any, tmp_path: Path) -> Callable[..., RunConfig]:
    """Configurations over copies of a corpus, rows, a template and a tokenizer."""
    Tokenizer.load(library.tokenizer).save(tmp_path / "base")
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    jsonl(tmp_path / "rows.jsonl", ROWS)
    jsonl(tmp_path / "pairs.jsonl", PAIRS)
    jsonl(tmp_path / "texts.jsonl", [{"text": f"text {n}", "body": f"body {n}"} for n in range(99)])

    def make(product: str, changes: dict[str, Any]) -> RunConfig:
        objective = {"type": product, "template": str(tmp_path / "t.jinja")}
        file = {"supervised": "rows.jsonl", "preference": "pairs.jsonl"}.get(product, "texts.jsonl")
        settings = {
            "data.input": str(tmp_path / file),
            "data.path": str(tmp_path / "data"),
            "data.suffixes": [".jsonl"],
            "tokenizer.path": str(tmp_path / ("trained" if product == "tokenizer" else "base")),
            "tokenizer.vocab_size": 300,
        }
        if product in ("supervised", "preference"):
            settings["data.objective"] = objective
        return tiny_run({**settings, **changes})

    return make


COMMANDS: dict[str, Command] = {
    "documents": build,
    "supervised": prepare,
    "preference": prepare_pairs,
    "tokenizer": train_tokenizer,
}


def edit(name: str, old: str, new: str) -> Callable[[Path], dict[str, Any]]:
    """Return an edit of a file that keeps its size."""

    def change(folder: Path) -> dict[str, Any]:
        path = folder / name
        content = path.read_text(encoding="utf-8")
        assert old in content and len(old) == len(new)
        path.write_text(content.replace(old, new), encoding="utf-8")
        return {}

    return change


def swap(folder: Path) -> dict[str, Any]:
    jsonl(folder / "pairs.jsonl", [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in PAIRS])
    return {}


def rename(folder: Path) -> dict[str, Any]:
    """Another file that the same command would read otherwise."""
    (folder / "texts.jsonl").rename(folder / "texts.txt")
    return {"data.input": str(folder / "texts.txt")}


def restore_times(folder: Path) -> dict[str, Any]:
    """An edit in place whose time of modification is set back."""
    path = folder / "rows.jsonl"
    status = path.stat()
    edit("rows.jsonl", "a 3", "b 3")(folder)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return {}


def change_special_name(folder: Path) -> dict[str, Any]:
    """A token that templates name, which determines no ids of text."""
    path = folder / "base" / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"eos_token": "<|endoftext|>", "bos_token": "<s>"}
    path.write_text(json.dumps(config))
    return {}


def setting(key: str, value: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {key: value}


EDITS: dict[str, list[tuple[str, Callable[[Path], dict[str, Any]], str]]] = {
    "documents": [
        ("text", edit("texts.jsonl", "text 5", "best 5"), "corpus"),
        ("name", rename, "corpus"),
        ("field", setting("data.text_field", "body"), "text_field"),
        ("fraction", setting("data.validation_fraction", 0.3), "validation_fraction"),
        ("duplicates", setting("data.duplicates", "drop"), "duplicates"),
        ("shards", setting("data.shard_tokens", 1000), "shard_tokens"),
        ("utf8", setting("data.invalid_utf8", "skip"), "invalid_utf8"),
    ],
    "supervised": [
        ("label", edit("rows.jsonl", "a 5", "b 5"), "corpus"),
        ("times", restore_times, "corpus"),
        ("template", edit("t.jinja", "<{{ m.role }}>", "[{{ m.role }}]"), "template_text"),
        ("names", change_special_name, "special_names"),
        ("columns", setting("data.objective.columns", {"messages": "messages"}), "objective.columns"),
        ("loss", setting("data.objective.loss_on", "last_assistant"), "objective.loss_on"),
        ("length", setting("batch.sequence_length", 34), "sequence_length"),
    ],
    "preference": [
        ("swap", swap, "corpus"),
        ("template", edit("t.jinja", "eos_token", "bos_token"), "template_text"),
        ("fraction", setting("data.validation_fraction", 0.3), "validation_fraction"),
        ("special", setting("data.objective.parse_special_tokens", True), "objective.parse_special_tokens"),
    ],
    "tokenizer": [
        ("text", edit("texts.jsonl", "text 5", "best 5"), "corpus"),
        ("documents", setting("data.escaped_newlines", True), "escaped_newlines"),
        ("field", setting("data.text_field", "body"), "text_field"),
        ("special", setting("tokenizer.special_tokens", ["<|endoftext|>", "<x>"]), "special_tokens"),
        ("sample", setting("tokenizer.sample_bytes", 1000), "sample_bytes"),
    ],
}
CASES = [(product, *case) for product, cases in EDITS.items() for case in cases]


@pytest.mark.parametrize(
    ("product", "change", "key"), [(p, c, k) for p, _, c, k in CASES], ids=[f"{p}-{name}" for p, name, _, _ in CASES]
)
def test_each_edit_is_noticed_by_what_prepares_and_by_what_trains(
    product: str,
    change: Callable[[Path], dict[str, Any]],
    key: str,
    make: Callable[..., RunConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = COMMANDS[product]
    command(make(product, {}))
    command(make(product, {}))
    assert "already" in capsys.readouterr().out
    task = {"task.type": "dpo"} if product == "preference" else {}
    if product != "tokenizer":
        open_run(make(product, task))
    changes = change(tmp_path)
    with pytest.raises(JinguError, match=rf"with other settings: .*{key}.* was .* and is now") as caught:
        command(make(product, changes))
    assert "Delete the folder" in str(caught.value)
    if product != "tokenizer":
        with pytest.raises(JinguError, match=r"with other settings|has changed since the data set"):
            open_run(make(product, {**task, **changes}))


def test_without_a_corpus_only_its_name_is_compared(make: Callable[..., RunConfig], tmp_path: Path) -> None:
    build(make("documents", {}))
    (tmp_path / "texts.jsonl").unlink()
    open_run(make("documents", {}))
    open_run(make("documents", {"data.input": []}))
    with pytest.raises(JinguError, match=r"input was .*texts\.jsonl.* and is now .*other\.jsonl"):
        open_run(make("documents", {"data.input": str(tmp_path / "other.jsonl")}))
    with pytest.raises(JinguError, match="text_field was "):
        open_run(make("documents", {"data.input": [], "data.text_field": "body"}))


def test_what_was_built_is_trained_as_the_message_says(make: Callable[..., RunConfig], tmp_path: Path) -> None:
    build(make("documents", {}))
    edit("texts.jsonl", "text 5", "best 5")(tmp_path)
    with pytest.raises(JinguError, match=r"set data\.input=\[\]"):
        open_run(make("documents", {}))
    open_run(make("documents", {"data.input": []}))


# Records of files


def test_an_unchanged_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 sparse files of 1 GB: only their records are compared."""
    files = []
    known = {}
    for number in range(100):
        path = tmp_path / f"{number}.txt"
        with path.open("wb") as file:
            file.truncate(1 << 30)
        size, stamp, _ = checksums._stat(str(path))
        known[str(path)] = ContentRecord(str(path), size, stamp, "0")
        files.append(path)
    monkeypatch.setattr(checksums, "hash_file", lambda path: pytest.fail("it was read"))
    found = find_files(DataSettings(input=str(tmp_path)))
    assert describe_records(record_files(found, known))["bytes"] == 100 << 30


@pytest.mark.parametrize("kind", ["content", "replaced", "touched", "linked"])
def test_a_record_is_trusted_only_if_nothing_changed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    os.utime(path, ns=(10**18, 10**18))
    size, stamp, _ = checksums._stat(str(path))
    known = {str(path): ContentRecord(str(path), size, stamp, "recorded")}
    assert record_file(path, known).xxh3 == "recorded"
    if kind == "content":
        path.write_bytes(b"two")
        os.utime(path, ns=(10**18, 10**18))
    elif kind == "replaced":
        (tmp_path / "b").write_bytes(b"two")
        os.utime(tmp_path / "b", ns=(10**18, 10**18))
        (tmp_path / "b").replace(path)
    elif kind == "touched":
        path.touch()
    else:
        (tmp_path / "b").write_bytes(b"two")
        path.unlink()
        path.symlink_to(tmp_path / "b")
    assert record_file(path, known).xxh3 != "recorded"
    # A file that has just changed may change again within the resolution of its times.
    assert record_file(path).stamp == ""


def test_a_url_is_known_by_its_version() -> None:
    memory = fsspec.filesystem("memory")
    settings = DataSettings(input="memory://identity/a.txt")
    seen = set()
    for text in (b"one", b"two"):
        memory.pipe("/identity/a.txt", text)
        seen.add(describe_records(record_files(find_files(settings)))["content"])
    assert len(seen) == 2


# What is not data


def test_folders_and_patterns_leave_out_what_is_not_data(tmp_path: Path) -> None:
    names = [".ipynb_checkpoints/x.jsonl", "__MACOSX/x.jsonl", "_temporary/x.jsonl", ".x.jsonl", "~$x.jsonl"]
    others = ["x.jsonl~", "x.jsonl.tmp", "x.jsonl.lock", "x.jsonl.bak", "_SUCCESS"]
    for name in ["x.jsonl", "in/y.jsonl", *names, *others]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def listed(*inputs: str) -> list[str]:
        files = find_files(DataSettings(input=list(inputs), suffixes=[".jsonl"]))
        return sorted(str(Path(file.path).relative_to(tmp_path)) for file in files)

    assert listed(str(tmp_path)) == listed(f"{tmp_path}/**/*") == ["in/y.jsonl", "x.jsonl"]
    # What is named is read.
    assert listed(f"{tmp_path}/.ipynb_checkpoints") == [".ipynb_checkpoints/x.jsonl"]
    assert listed(f"{tmp_path}/__MACOSX/*") == ["__MACOSX/x.jsonl"]
    assert listed(f"{tmp_path}/*.tmp") == ["x.jsonl.tmp"]
    assert listed(f"{tmp_path}/x.jsonl~") == ["x.jsonl~"]
    with pytest.raises(JinguError, match="no file but hidden and temporary ones matches"):
        listed(f"{tmp_path}/_temp*")


def test_a_file_with_several_names_counts_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "c.txt").hardlink_to(tmp_path / "a.txt")
    (tmp_path / "d.txt").write_text("one")
    assert [Path(file.path).name for file in find_files(DataSettings(input=str(tmp_path)))] == ["a.txt", "d.txt"]
    assert "b.txt is " in caplog.text and "under another name; it is read once" in caplog.text


def test_bzip2_is_read_and_archives_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt.bz2").write_bytes(bz2.compress(b"one"))
    (file,) = find_files(DataSettings(input=str(tmp_path / "a.txt.bz2")))
    with file.open() as stream:
        assert stream.read() == b"one"
    for name in ("a.tar.gz", "a.zip", "a.txt.lz4"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(JinguError, match="is an archive or a compression that is not read as text"):
            find_files(DataSettings(input=str(tmp_path / name)))
