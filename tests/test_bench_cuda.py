"""The kit for a card goes on where it was interrupted, and reports what it has, failures included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cuda
from bench.card_parts import Place, attempt, reached


def test_unknown_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cuda.main(["--out", str(tmp_path), "train-70b"])
    assert "there is no part train-70b; the parts are probe, checks," in capsys.readouterr().err


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no NPU device is to be found.* It needs the package torch_npu"):
        cuda.main(["--out", str(tmp_path), "--device", "npu"])


def test_parts_with_results_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that failed is run again, and one that fails does not stop the next."""
    done = {"part": "probe", "complete": True, "seconds": 2.0, "rows": [{"a|b": 1234.5}]}
    (tmp_path / "probe.json").write_text(json.dumps(done))
    (tmp_path / "checks.problem.txt").write_text("an old traceback")
    names: list[str] = []

    def run(command: list[str]) -> str | None:
        names.append(command[5])
        if command[5] == "checks":
            # It has measured something before it fails.
            rows = [{"test": "x", "result": "passed"}]
            half = {"part": "checks", "complete": False, "seconds": 1.0, "rows": rows}
            (tmp_path / "checks.json").write_text(json.dumps(half))
            return "Traceback ...\nRuntimeError: no kernel"
        (tmp_path / "profile.json").write_text(json.dumps({**done, "part": "profile"}))
        return None

    monkeypatch.setattr(cuda, "run_process", run)
    cuda.main(["--out", str(tmp_path), "--device", "cpu", "probe", "checks", "profile"])
    assert names == ["checks", "profile"]
    page = (tmp_path / "results.md").read_text()
    assert "## probe (2 s)\n" in page and "## checks (1 s, not complete)" in page and "RuntimeError: no kernel" in page
    parts = {part["part"]: part for part in json.loads((tmp_path / "results.json").read_text())["parts"]}
    assert parts["probe"]["rows"] == [{"a|b": 1234.5}]
    assert parts["checks"]["problem"].endswith("no kernel") and len(parts["checks"]["rows"]) == 1
    cuda.main(["--out", str(tmp_path), "--device", "cpu", "probe", "checks", "profile"])
    assert names == ["checks", "profile", "checks"]
    # Nor does a part count of which every figure failed.
    (tmp_path / "profile.json").write_text(json.dumps({**done, "part": "profile", "rows": [{"problem": "no card"}]}))
    cuda.main(["--out", str(tmp_path), "--device", "cpu", "profile"])
    assert names[-1] == "profile"


def test_a_part_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SECONDS", 0.2)
    problem = cuda.run_process(["sh", "-c", "echo measured; sleep 1000 & wait"])
    assert problem == "measured\n\nnot done after 0.2 s"
    assert cuda.run_process(["sh", "-c", "exit 0"]) is None


def test_a_figure_that_fails_does_not_end_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("out of memory\nat length")

    def part(place: Place) -> Iterator[dict[str, Any]]:
        yield attempt(place, {"model": "8b"}, fail)
        yield attempt(place, {"model": "1b"}, lambda: {"tokens/s": 3.5})

    monkeypatch.setitem(cuda.PARTS, "probe", part)
    cuda.run_part("probe", "cpu", True, tmp_path)
    cuda.write_report(tmp_path)
    record = json.loads((tmp_path / "probe.json").read_text())
    assert record["complete"] and [row.get("problem") for row in record["rows"]] == ["out of memory", None]
    page = (tmp_path / "results.md").read_text()
    assert "| 8b | out of memory |  |" in page and "| 1b |  | 3.5 |" in page
    assert "in fail\n    raise RuntimeError" in page


def test_targets() -> None:
    place = Place("cpu", True)
    assert reached(place, 0.6, 0.55) == "not measured"
    place.small, place.device = False, torch.device("cuda")
    assert [reached(place, value, 0.55) for value in (0.54, 0.55)] == ["no", "yes"]


@pytest.mark.slow
def test_the_kit_runs_to_its_end_on_the_cpu(tmp_path: Path) -> None:
    cuda.main(["--out", str(tmp_path), "--device", "cpu", "--small"])
    assert not list(tmp_path.glob("*.problem.txt"))
    records = [json.loads((tmp_path / f"{name}.json").read_text()) for name in cuda.PARTS]
    assert all(record["complete"] for record in records)
    problems = [row["problem"] for record in records for row in record["rows"] if "problem" in row]
    assert problems == []
