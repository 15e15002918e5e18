"""The kit for a card goes on where it was interrupted, and reports what it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import cuda


def test_unknown_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cuda.main(["--out", str(tmp_path), "train-70b"])
    assert "there is no part train-70b; the parts are probe, checks," in capsys.readouterr().err


def test_parts_with_results_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probe.json").write_text(json.dumps({"part": "probe", "seconds": 2.0, "rows": [{"a|b": 1234.5}]}))
    commands = []

    def run(command: list[str], **_: object) -> object:
        commands.append(command)
        raise cuda.subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(cuda.subprocess, "run", run)
    cuda.main(["--out", str(tmp_path), "--device", "cpu", "probe", "profile"])
    assert [command[5] for command in commands] == ["profile"]
    assert (tmp_path / "profile.problem.txt").read_text() == "not done after 480 s"
    assert "## probe (2 s)" in (tmp_path / "results.md").read_text()
    [part] = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert part["rows"] == [{"a|b": 1234.5}]


@pytest.mark.slow
def test_the_kit_runs_to_its_end_on_the_cpu(tmp_path: Path) -> None:
    cuda.main(["--out", str(tmp_path), "--device", "cpu", "--small"])
    assert not list(tmp_path.glob("*.problem.txt"))
    assert {file.stem for file in tmp_path.glob("*.json")} == {*cuda.PARTS, "results"}
    assert "failed" not in (tmp_path / "results.md").read_text()
