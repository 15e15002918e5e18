"""Records of what a command made."""

from __future__ import annotations

from pathlib import Path

import pytest

from jingu.errors import JinguError
from jingu.text.build_record import read_record, refuse_changes


def test_records(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none", "r.json", "make") is None
    assert read_record(tmp_path, "r.json", "make") is None
    (tmp_path / "r.json").write_text('{"a": 1}')
    assert read_record(tmp_path, "r.json", "make") == {"a": 1}
    for bad in ("{", "[1]"):
        (tmp_path / "r.json").write_text(bad)
        with pytest.raises(JinguError, match=r"r\.json: the file is damaged \(.+\)\. Move it away"):
            read_record(tmp_path, "r.json", "make")
    with pytest.raises(JinguError) as caught:
        read_record(tmp_path, "other.json", "jingu data build")
    assert str(caught.value) == (
        f"{tmp_path}: `jingu data build` did not make what is here. Move it away or choose another path."
    )
    with pytest.raises(JinguError, match=r'x: made with other settings: b was \[2\] and is now "春"\. Mend it\.'):
        refuse_changes({"a": 1, "b": [2]}, {"a": 1, "b": "春", "c": None}, "made", Path("x"), "Mend it.")
    refuse_changes({"a": 1}, {"a": 1, "c": None}, "made", Path("x"), "Mend it.")
    then, now = ({"corpus": {"files": n, "bytes": n * 600, "listing": f"0123456789abcde{n}"}} for n in (1, 2))
    told = r"corpus was 1 file of 600 bytes \(names and sizes 012345\) and is now 2 files of 1,200 bytes "
    with pytest.raises(JinguError, match=told):
        refuse_changes(then, now, "made", Path("x"), "Mend it.")
