"""Files and folders appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from jingu.errors import JinguError
from jingu.runtime.files import create_folder_atomically, read_text, write_error, write_text_atomically


def test_a_folder_takes_its_name_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "data"
    with create_folder_atomically(path) as place:
        (place / "x").write_text("1")
        assert not path.exists()
    assert [item.name for item in path.parent.iterdir()] == ["data"]
    assert (path / "x").read_text() == "1"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    for error in (ValueError("x"), KeyboardInterrupt(), JinguError("x")):
        with pytest.raises(type(error)), create_folder_atomically(tmp_path / "data") as place:
            (place / "sub").mkdir()
            raise error
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "the disk is full. Make room, or choose another path."),
        (errno.EDQUOT, "the disk is full. Make room, or choose another path."),
        (errno.EACCES, "this cannot be written (Permission denied). Fix its permissions, or choose another path."),
    ],
)
def test_a_failing_disk_is_explained(tmp_path: Path, code: int, words: str) -> None:
    import os

    with pytest.raises(JinguError) as caught, create_folder_atomically(tmp_path / "data") as place:
        (place / "x").write_text("1")
        raise OSError(code, os.strerror(code))
    assert str(caught.value).startswith(f"{tmp_path / 'data'}: {words}")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_used_again(tmp_path: Path) -> None:
    left = tmp_path / ".data.partial"
    (left / "sub").mkdir(parents=True)
    (left / "old").write_text("half")
    with create_folder_atomically(tmp_path / "data") as place:
        assert list(place.iterdir()) == []
        (place / "new").write_text("whole")
    assert [str(item.relative_to(tmp_path)) for item in tmp_path.rglob("*")] == ["data", "data/new"]


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with create_folder_atomically(tmp_path / "data") as place:
        (place / "x").write_text("1")
        with pytest.raises(JinguError) as caught, create_folder_atomically(tmp_path / "data"):
            pass
        assert str(caught.value) == (
            f"{tmp_path / 'data'}: another process is writing this folder now. Wait for it, or stop it."
        )
    assert (tmp_path / "data" / "x").read_text() == "1"


def test_who_is_let_in_when_another_is_done_does_not_take_a_third_one_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / ".data.partial"

    def flock(*_: object) -> None:
        partial.rename(tmp_path / "data")
        partial.mkdir()
        (partial / "x").write_text("1")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(JinguError, match="another process is writing this folder now"),
        create_folder_atomically(tmp_path / "data"),
    ):
        pass
    assert (partial / "x").read_text() == "1"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    with (
        pytest.raises(JinguError, match="something else appeared here"),
        create_folder_atomically(tmp_path / "data") as place,
    ):
        (place / "x").write_text("new")
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "x").write_text("theirs")
    assert (tmp_path / "data" / "x").read_text() == "theirs"
    assert [item.name for item in tmp_path.iterdir()] == ["data"]


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_text_atomically(path, "春\n")
    write_text_atomically(path, "夏\n")
    assert path.read_bytes() == "夏\n".encode()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text_atomically(path, "秋\n")
    assert [item.read_bytes() for item in tmp_path.iterdir()] == ["夏\n".encode()]
    with pytest.raises(OSError) as raised:
        write_text_atomically(tmp_path / "none" / "text", "秋\n")
    assert raised.value.filename == str(tmp_path / "none" / "text")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("8192 requested and 3072 written", "here: the disk is full. Make room, or choose another path."),
        ("strange", "here: this cannot be written (strange). Fix its permissions, or choose another path."),
    ],
)
def test_what_has_no_number_is_told_in_its_own_words(words: str, told: str) -> None:
    """Numpy gives none where the disk had room for a part."""
    assert str(write_error(OSError(words), Path("here"))) == told


def test_what_cannot_be_read_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    with pytest.raises(JinguError, match=r"the file cannot be read \(No such file or directory\)"):
        read_text(file)
    file.write_bytes("né".encode("latin-1"))
    with pytest.raises(JinguError, match=r"the file is not UTF-8 text: byte 1 is not part of a character\. Save it"):
        read_text(file)
    assert read_text(file, errors="replace") == "n\N{REPLACEMENT CHARACTER}"
