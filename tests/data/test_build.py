"""`jingu data build`: content, order, split, counts, and what remains after a failure."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jingu.data.build as build_module
import jingu.data.shard_writer as writing_module
from jingu.config.schema import RunConfig
from jingu.data.build import build
from jingu.data.dataset import open_dataset
from jingu.data.dataset_manifest import DatasetManifest
from jingu.data.indexed_dataset import IndexedReader, IndexedWriter
from jingu.data.inspection import inspect
from jingu.errors import JinguError
from jingu.runtime.files import create_folder_atomically
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_training import train_tokenizer
from tests.limits import PATIENCE

MakeConfig = Callable[..., RunConfig]


def manifest_of(config: RunConfig) -> DatasetManifest:
    manifest = DatasetManifest.load(Path(config.data.path))
    assert manifest is not None
    return manifest


def documents_of(config: RunConfig, split: str) -> list[list[int]]:
    path = Path(config.data.path)
    readers = [IndexedReader(path / shard.name) for shard in manifest_of(config).split(split).shards]  # type: ignore[arg-type]
    return [reader[index].tolist() for reader in readers for index in range(len(reader))]


def tree(path: Path) -> dict[str, bytes]:
    files = {str(item.relative_to(path)): item.read_bytes() for item in path.rglob("*") if item.is_file()}
    if "inputs.json" in files:
        # A file that was written a moment ago has no stamp, since it could change without changing its time.
        records = [[name, size, checksum] for name, size, _, checksum in json.loads(files["inputs.json"])]
        files["inputs.json"] = json.dumps(records).encode()
    return files


def source_texts(corpus_folder: Path) -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in sorted(corpus_folder.glob("*.txt"))]
    lines = (corpus_folder / "lines.jsonl").read_text(encoding="utf-8").split("\n")
    return texts + [text for line in lines if (text := json.loads(line)["text"])]


def test_every_document_is_there_once_in_order(
    make_config: MakeConfig, corpus_folder: Path, data_tokenizer: Tokenizer
) -> None:
    config = make_config(shard_tokens=500)
    build(config)
    train, held_out = documents_of(config, "train"), documents_of(config, "validation")
    expected = [[*data_tokenizer.encode(text), data_tokenizer.eos_token_id] for text in source_texts(corpus_folder)]
    assert [ids for ids in expected if ids not in held_out] == train
    assert [ids for ids in expected if ids in held_out] == held_out
    assert 0.05 < len(held_out) / len(expected) < 0.4
    manifest = manifest_of(config)
    lengths = data_tokenizer.byte_lengths()
    for split, documents in ((manifest.train, train), (manifest.validation, held_out)):
        assert split.documents == len(documents)
        assert split.tokens == sum(map(len, documents))
        assert split.text_bytes == sum(int(lengths[ids].sum()) for ids in documents)
    assert manifest.train.text_bytes + manifest.validation.text_bytes == sum(
        len(text.encode()) for text in source_texts(corpus_folder)
    )
    assert len(manifest.train.shards) > 3
    assert all(shard.tokens >= 500 for shard in manifest.train.shards[:-1])
    assert (manifest.dtype, manifest.eos_token_id, manifest.empty) == ("uint16", 0, 1)


def test_the_number_of_workers_changes_no_byte(make_config: MakeConfig, tmp_path: Path, small_units: None) -> None:
    trees = []
    for workers in (1, 3):
        path = tmp_path / f"data-{workers}"
        build(make_config(path=str(path), num_workers=workers, shard_tokens=500))
        trees.append(tree(path))
    assert len(trees[0]) > 8
    assert trees[0] == trees[1]


@pytest.mark.slow
def test_a_ray_cluster_changes_no_byte(make_config: MakeConfig, tmp_path: Path, small_units: None) -> None:
    """A cluster on this machine, of two processors."""
    ray = pytest.importorskip("ray", reason="needs the package ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        build(make_config(path=str(tmp_path / "on-ray"), shard_tokens=500), executor="ray")
        (tmp_path / "bad.jsonl").write_text('{"text": "' + "x" * 1500 + '"}\n{"id": 1}\n')
        with pytest.raises(JinguError) as caught:
            build(make_config(input=[str(tmp_path / "bad.jsonl")]), executor="ray")
    finally:
        ray.shutdown()
    build(make_config(shard_tokens=500))
    assert tree(tmp_path / "on-ray") == tree(tmp_path / "data")
    assert str(caught.value).startswith(f'{tmp_path}/bad.jsonl:2: this line has no field "text"; its fields: "id".')


def test_without_ray_its_executor_is_explained(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        JinguError, match=r"--executor ray: building on a cluster needs the package ray\. Install it: `pip install ray`"
    ):
        build(make_config(), executor="ray")


def test_an_error_of_a_worker_is_reported_to_the_user(
    make_config: MakeConfig, tmp_path: Path, small_units: None
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "' + "x" * 1500 + '"}\n{"id": 1}\n')
    for workers in (1, 2):
        with pytest.raises(JinguError) as caught:
            build(make_config(input=[str(path)], num_workers=workers))
        assert str(caught.value) == (
            f'{path}:2: this line has no field "text"; its fields: "id". '
            "Set data.text_field to the field that holds the document."
        )
        assert [item.name for item in tmp_path.iterdir()] == ["bad.jsonl"]


def test_duplicates_are_in_the_same_split(make_config: MakeConfig, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {index % 40}"}) for index in range(160)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    config = make_config(input=str(tmp_path / "x.jsonl"), validation_fraction=0.3)
    build(config)
    train = {tuple(ids) for ids in documents_of(config, "train")}
    held_out = {tuple(ids) for ids in documents_of(config, "validation")}
    assert len(train) + len(held_out) == 40
    assert not train & held_out
    assert len(documents_of(config, "validation")) == 4 * len(held_out)


def test_the_split_does_not_depend_on_the_tokenizer(
    make_config: MakeConfig, corpus_folder: Path, tmp_path: Path, data_tokenizer: Tokenizer
) -> None:
    other = train_tokenizer(iter(["other text"]), 270, ["<a>", "<b>"])
    other.save(tmp_path / "other")
    first, second = make_config(), make_config(tokenizer=tmp_path / "other", path=str(tmp_path / "second"))
    build(first)
    build(second)
    ours = [data_tokenizer.decode(ids) for ids in documents_of(first, "validation")]
    assert ours == [other.decode(ids) for ids in documents_of(second, "validation")]


@pytest.mark.parametrize(("held_out", "sizes"), [(1e-9, (4, 1)), (0.999999, (1, 4)), (0.0, (5, 0))])
def test_a_small_corpus_holds_out_at_least_one(
    make_config: MakeConfig, tmp_path: Path, held_out: float, sizes: tuple[int, int]
) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": f"text {index}"}) for index in range(5)))
    config = make_config(input=str(tmp_path / "x.jsonl"), validation_fraction=held_out)
    build(config)
    manifest = manifest_of(config)
    assert (manifest.train.documents, manifest.validation.documents) == sizes
    assert len(list(Path(config.data.path).glob("validation-0*.bin"))) == min(sizes[1], 1)


@pytest.mark.parametrize(
    ("text", "validation"),
    [
        ("".join(f"line {index}\n" for index in range(50)), "".join(f"line {i}\n" for i in range(40, 50))),
        ("ab" * 40, 16),
    ],
)
def test_the_end_of_a_single_text_is_the_validation_split(
    make_config: MakeConfig, tmp_path: Path, text: str, validation: str | int
) -> None:
    (tmp_path / "only.txt").write_text(text)
    config = make_config(input=str(tmp_path / "only.txt"))
    build(config)
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    parts = []
    for split in ("train", "validation"):
        dataset = open_dataset(Path(config.data.path), split)
        parts.append(tokenizer.decode(dataset.gather(np.array([0]), dataset.tokens)[0].tolist()))
    assert "".join(parts) == text
    assert parts[1] == (text[-validation:] if isinstance(validation, int) else validation)
    manifest = manifest_of(config)
    assert [manifest.train.text_bytes, manifest.validation.text_bytes] == [len(part) for part in parts]


def test_one_document_cannot_be_split(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the only text")
    (tmp_path / "b.txt").write_text("the only text")
    with pytest.raises(JinguError) as caught:
        build(make_config(input=str(tmp_path / "*.txt")))
    assert str(caught.value) == (
        "data.validation_fraction: the corpus has only one document (or copies of one), which cannot be split into "
        "training and validation. Split the text into several files or .jsonl lines, or set data.validation_fraction "
        "to 0 and evaluation.every to 0 to train without evaluation."
    )
    build(make_config(input=str(tmp_path / "*.txt"), validation_fraction=0.0))


def test_an_empty_corpus_is_explained(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(JinguError) as caught:
        build(make_config(input=str(tmp_path / "*.txt"), invalid_utf8="skip"))
    assert str(caught.value) == (
        "data.input: the corpus contains no text: 1 document is empty, 1 not UTF-8. Name files that contain text."
    )
    assert not (tmp_path / "data").exists()


def test_invalid_documents_are_counted(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("a", b"one"), ("b", b"two"), ("c", b"\xffthree"), ("d", b"")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    build(make_config(input=str(tmp_path / "*.txt"), invalid_utf8="skip"))
    assert "left out: 1 empty, 1 not UTF-8; read with bytes replaced: 0" in capsys.readouterr().out
    build(make_config(input=str(tmp_path / "*.txt"), invalid_utf8="replace", path=str(tmp_path / "other")))
    assert "left out: 1 empty, 0 not UTF-8; read with bytes replaced: 1" in capsys.readouterr().out


def test_rebuilding_does_nothing_and_changed_settings_are_refused(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    build(config)
    output = capsys.readouterr().out
    before = tree(tmp_path / "data")
    build(make_config(num_workers=3))
    again = capsys.readouterr().out
    assert again.splitlines()[0] == f"data: already built in {tmp_path / 'data'}."
    assert again.splitlines()[1:] == output.splitlines()[1:]
    delete = "Delete the folder to build it again, or set data.path to another folder."
    with pytest.raises(JinguError) as caught:
        build(make_config(validation_fraction=0.3, suffixes=[".txt"]))
    assert f"{tmp_path / 'data'}: the data set here was built with other settings: corpus was " in str(caught.value)
    assert f"; validation_fraction was 0.2 and is now 0.3. {delete}" in str(caught.value)
    train_tokenizer(iter(["other"]), 260, ["<a>"]).save(tmp_path / "other")
    with pytest.raises(JinguError, match=r"was built with other settings: tokenizer was \"[0-9a-f]{32}\" and is now"):
        build(make_config(tokenizer=tmp_path / "other"))
    assert tree(tmp_path / "data") == before
    (tmp_path / "data" / "train-00000.bin").unlink()
    with pytest.raises(JinguError, match=r"train-00000\.bin: the file is missing; the manifest says [\d,]+ bytes\."):
        build(config)


def test_a_folder_with_other_content_is_not_touched(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("precious")
    with pytest.raises(JinguError) as caught:
        build(make_config())
    assert str(caught.value) == (
        f"{tmp_path / 'data'}: `jingu data build` did not make what is here. Move it away or choose another path."
    )
    assert tree(tmp_path) == {"data/thesis.txt": b"precious"}


def test_a_full_disk_leaves_nothing(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = IndexedWriter.add

    def full(self: IndexedWriter, *parts: Any) -> None:
        real(self, *parts)
        if self.tokens > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexedWriter, "add", full)
    with pytest.raises(JinguError) as caught:
        build(make_config())
    assert str(caught.value) == f"{tmp_path / 'data'}: the disk is full. Make room, or choose another path."
    assert list(tmp_path.iterdir()) == []


def killed_at(event: int, config: RunConfig) -> bool:
    """Build in a process of its own that is killed just before it touches its files for the event-th time.

    Returns whether it got through before.
    """
    child = os.fork()
    if not child:
        rest = [event]

        def count(name: str, arguments: tuple[Any, ...]) -> None:
            if name in ("open", "os.rename", "os.remove", "os.truncate") and "data" in str(arguments[0]):
                rest[0] -= 1
                if rest[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            build(config)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_a_build_killed_ten_times_equals_the_uninterrupted_one(
    make_config: MakeConfig, tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch, duplicates: str
) -> None:
    monkeypatch.setattr(build_module, "RESUMABLE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(build_module, "MAX_BUFFERED_IDS", 300)
    settings = {"shard_tokens": 500, "duplicates": duplicates}
    build(make_config(path=str(tmp_path / "undisturbed"), **settings))
    config = make_config(**settings)
    chance, kills = random.Random(3), 0
    while kills < 10:
        kills += not killed_at(chance.randint(1, 60), config)
        if (tmp_path / "data").exists():  # killed after it was done, or done
            assert tree(tmp_path / "data") == tree(tmp_path / "undisturbed")
            shutil.rmtree(tmp_path / "data")
    build(config)
    assert tree(tmp_path / "data") == tree(tmp_path / "undisturbed")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["data", "undisturbed"]


def test_a_killed_build_resumes(
    make_config: MakeConfig,
    tmp_path: Path,
    small_units: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build_module, "RESUMABLE_AFTER_SECONDS", 0.0)
    assert not killed_at(60, make_config())
    assert (tmp_path / ".data.partial" / "progress.json").exists()
    capsys.readouterr()
    build(make_config())
    assert f"data: resuming in {tmp_path / 'data'} after " in capsys.readouterr().out
    # What other settings began is of no use.
    assert not killed_at(60, make_config(path=str(tmp_path / "data-2")))
    build(make_config(path=str(tmp_path / "data-2"), validation_fraction=0.5))
    assert "resuming" not in capsys.readouterr().out
    build(make_config(path=str(tmp_path / "data-3"), validation_fraction=0.5))
    assert tree(tmp_path / "data-2") == tree(tmp_path / "data-3")


@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_the_last_part_joins_all_to_the_bytes_of_one_build(
    make_config: MakeConfig, tmp_path: Path, small_units: None, capsys: pytest.CaptureFixture[str], duplicates: str
) -> None:
    settings = {"shard_tokens": 500, "duplicates": duplicates}
    build(make_config(path=str(tmp_path / "whole"), **settings))
    config = make_config(**settings)
    for number in (3, 1, 1, 2):
        assert not (tmp_path / "data").exists()
        build(config, part=(number, 3))
    assert capsys.readouterr().out.count("data: built in ") == 2
    build(config, part=(2, 3))
    assert capsys.readouterr().out.startswith(f"data: already built in {tmp_path / 'data'}.")
    assert tree(tmp_path / "data") == tree(tmp_path / "whole")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["data", "whole"]
    inspect(tmp_path / "data")


def test_a_part_that_finishes_after_the_join_succeeds(
    make_config: MakeConfig, tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, locked, times = make_config(), build_module._acquire_lock, []

    def late(folder: Path) -> Any:
        times.append(folder)
        if len(times) == 3:  # the first part is encoded
            build(config, part=(2, 2))
            assert not folder.exists()
        return locked(folder)

    monkeypatch.setattr(build_module, "_acquire_lock", late)
    build(config, part=(1, 2))
    assert sorted(item.name for item in tmp_path.iterdir()) == ["data"]
    inspect(tmp_path / "data")


def test_parts_with_other_settings_are_not_joined(make_config: MakeConfig, tmp_path: Path, small_units: None) -> None:
    build(make_config(), part=(1, 2))
    with pytest.raises(JinguError) as caught:
        build(make_config(validation_fraction=0.5), part=(2, 2))
    assert str(caught.value) == (
        f"{tmp_path}/data.parts: other parts here were built with other settings: validation_fraction was 0.2 and is "
        "now 0.5. Delete the folder, and build all parts again."
    )


def test_a_part_reports_a_full_disk(
    make_config: MakeConfig, tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writing_module.np, "save", full)
        with pytest.raises(JinguError) as caught:
            build(make_config(), part=(1, 2))
    assert str(caught.value) == (
        f"{tmp_path}/data: the disk is full. Make room, or run the command again (it resumes)."
    )
    names = sorted(item.name for item in (tmp_path / "data.parts").iterdir())
    assert names == ["inputs.json", "progress.json"]
    build(make_config(), part=(1, 2))


def test_duplicates_are_dropped_on_request(
    make_config: MakeConfig, tmp_path: Path, small_units: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(duplicates="drop")
    build(config)
    assert "left out as copies of others: 5 documents" in capsys.readouterr().out
    both = documents_of(config, "train") + documents_of(config, "validation")
    build(make_config(path=str(tmp_path / "all")))
    remaining = documents_of(make_config(path=str(tmp_path / "all")), "train")
    assert (
        len(set(map(tuple, both)))
        == len(both)
        == manifest_of(config).train.documents + len(documents_of(config, "validation"))
    )
    assert {tuple(ids) for ids in remaining} <= {tuple(ids) for ids in both}


def test_invalid_documents_are_skipped_on_request_and_listed(
    make_config: MakeConfig, tmp_path: Path, small_units: None, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(60)]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, "{", *lines[:20], '{"body": 1}']))
    config = make_config(input=str(tmp_path / "x.jsonl"), path=str(tmp_path / "data"))
    build(config, on_error="skip")
    assert "left out because of errors: 2, listed in skipped.txt" in capsys.readouterr().out
    assert (tmp_path / "data" / "skipped.txt").read_text() == (
        f"{tmp_path}/x.jsonl:61: this line is not JSON (Expecting property name enclosed in double quotes at "
        f'column 2).\n{tmp_path}/x.jsonl:82: this line has no field "text"; its fields: "body".\n'
    )
    assert manifest_of(config).train.documents + manifest_of(config).validation.documents == 80


def test_two_builds_into_one_folder(make_config: MakeConfig, tmp_path: Path) -> None:
    with (
        create_folder_atomically(tmp_path / "data"),
        pytest.raises(JinguError, match="another process is writing this folder now"),
    ):
        build(make_config())


def test_a_full_disk_keeps_finished_units(
    make_config: MakeConfig, tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = IndexedWriter.add
    monkeypatch.setattr(build_module, "RESUMABLE_AFTER_SECONDS", 0.0)

    def full(self: IndexedWriter, *parts: Any) -> None:
        real(self, *parts)
        if self.tokens > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "add", full)
        with pytest.raises(
            JinguError,
            match=r"the disk is full\. Make room, or run the command again to resume, or choose",
        ):
            build(make_config())
    build(make_config())
    build(make_config(path=str(tmp_path / "other")))
    assert tree(tmp_path / "data") == tree(tmp_path / "other")


ORPHANS = """
import multiprocessing, os, signal, sys
from functools import partial
from jingu.config.schema import RunConfig
from jingu.data import build as module
from jingu.text.corpus import plan_units
def die(*_):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    module.plan_units = partial(plan_units, unit_bytes=700)
    module.tqdm.update = die
    module.build(RunConfig.model_validate_json(sys.argv[1]))
"""


def test_workers_end_with_a_killed_build(make_config: MakeConfig) -> None:
    command = [sys.executable, "-c", ORPHANS, make_config(num_workers=2).model_dump_json()]
    # The workers hold the pipe too: it closes, and the call returns, only when the last of them has ended.
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.split()) == 2


def test_documents_start_with_the_bos_token_of_the_tokenizer(
    make_config: MakeConfig, tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`<s>` before each document if the tokenizer's post-processor adds it, as Llama's does; nothing on request."""
    shutil.copytree(tokenizer_folder, tmp_path / "llama")
    spec = json.loads((tmp_path / "llama" / "tokenizer.json").read_text())
    end = Tokenizer.load(tokenizer_folder).eos_token_id
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 300, "content": "<s>"})
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [300], "tokens": ["<s>"]}},
    }
    (tmp_path / "llama" / "tokenizer.json").write_text(json.dumps(spec))
    with_it = make_config(tokenizer=tmp_path / "llama")
    build(with_it)
    assert "every document begins with 300, as the tokenizer's template says" in capsys.readouterr().out
    assert manifest_of(with_it).settings["bos_ids"] == [300]
    without = make_config(tokenizer=tmp_path / "llama", path=str(tmp_path / "without"), add_bos_token=False)
    build(without)
    for split in ("train", "validation"):
        result = documents_of(with_it, split)
        assert all(ids[0] == 300 and ids[-1] == end for ids in result)
        assert [ids[1:] for ids in result] == documents_of(without, split)
    with pytest.raises(JinguError, match=r"built with other settings: bos_ids was \[300\] and is now null"):
        build(make_config(tokenizer=tmp_path / "llama", add_bos_token=False))


def test_a_missing_tokenizer(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=r"none: there is no tokenizer folder here\. Run `jingu tokenizer train`"):
        build(make_config(tokenizer=tmp_path / "none"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["documents", "document"])
def test_memory_does_not_grow_with_the_input(make_config: MakeConfig, tmp_path: Path, kind: str) -> None:
    """A packed file, which is one unit, of 200 MB of text in many documents; one document of 90 MB."""
    count, repeated = (3000, 3000) if kind == "documents" else (1, 4_000_000)
    with gzip.open(tmp_path / "x.jsonl.gz", "wt", encoding="utf-8", compresslevel=1) as stream:
        for number in range(count):
            stream.write(
                json.dumps({"text": f"{number} " + "some words and 春眠. " * repeated}, ensure_ascii=False) + "\n"
            )
    config = make_config(input=str(tmp_path / "x.jsonl.gz"), validation_fraction=0.0)
    code = "import sys, torch; from jingu.config.schema import RunConfig; from jingu.data.build import build; "
    code += "from jingu.runtime.device import peak_memory; "
    code += "build(RunConfig.model_validate_json(sys.argv[1])); "
    code += "print(peak_memory(torch.device('cpu')) // 2**20)"
    done = subprocess.run(
        [sys.executable, "-c", code, config.model_dump_json()], check=True, capture_output=True, text=True
    )
    assert manifest_of(config).train.text_bytes > (80 if kind == "document" else 180) * 10**6
    assert int(done.stdout.split()[-1]) < 1000


def test_a_large_vocabulary_takes_int32(make_config: MakeConfig, tmp_path: Path) -> None:
    small = train_tokenizer(iter(["ab"]), 258, ["<a>"])
    small.save(tmp_path / "large")
    spec = json.loads((tmp_path / "large" / "tokenizer.json").read_text())
    spec["model"]["vocab"] |= {f"é{index}": 258 + index for index in range(65_500 - 258)}
    (tmp_path / "large" / "tokenizer.json").write_text(json.dumps(spec))
    config = make_config(tokenizer=tmp_path / "large")
    build(config)
    assert manifest_of(config).dtype == "int32"
    assert np.concatenate([np.array(ids) for ids in documents_of(config, "train")]).max() < 258


def test_inspect(make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JinguError) as caught:
        inspect(tmp_path / "data")
    assert str(caught.value) == f"{tmp_path / 'data'}: there is no data set here. Run `jingu data build`."
    build(make_config())
    built = capsys.readouterr().out.splitlines()
    inspect(tmp_path / "data")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"data: {tmp_path / 'data'}, ids as uint16 of a vocabulary of 300."
    assert shown[1 : len(built)] == built[1:]
    lengths = shown[len(built) : -1]
    assert lengths[0].startswith("  tokens per document: ")
    assert sum(int(line.split()[-1]) for line in lengths[1:]) == manifest_of(make_config()).train.documents
    assert shown[-1] == "  every file matches its checksum"
    for name in ("train-00000.bin", "validation-00000.idx"):
        path = tmp_path / "data" / name
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        with pytest.raises(JinguError) as caught:
            inspect(tmp_path / "data")
        assert str(caught.value) == (
            f"{path}: the content of the file does not match its checksum. "
            "Copy the file again, or delete the folder and build the data set again."
        )
        content[-3] ^= 1
        path.write_bytes(content)


def test_a_damaged_manifest_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    build(make_config())
    path = tmp_path / "data" / "manifest.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"format": 2}))
    with pytest.raises(
        JinguError, match=r"manifest\.json: the manifest is damaged, or of another version of jingu \(fo"
    ):
        inspect(tmp_path / "data")
    path.write_text("{")
    with pytest.raises(JinguError, match=r"manifest\.json: the file is damaged"):
        inspect(tmp_path / "data")


def test_a_file_name_that_is_not_utf_8(make_config: MakeConfig, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    path.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(5)) + "{bad\n")
    config = make_config(input=str(tmp_path), on_error="skip")
    build(config)
    assert "caf\\udce9.jsonl:6: this line is not JSON" in (Path(config.data.path) / "skipped.txt").read_text()
    dataset = open_dataset(Path(config.data.path), "train")
    assert dataset.document_origin(0, 0).startswith(str(path))
