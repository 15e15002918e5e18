"""The board of a run: on the terminal, as a page, as metrics; and the list of runs."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path

import pytest

from jingu.cli import main
from jingu.report.board import make_server, render_board
from jingu.runtime.files import lock_folder
from jingu.watch.pace import Pace, Window


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run at step 20 of 100, of which steps take 2 s, and the last ones 4 s."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    rows = [{"type": "start", "step": 0}]
    for step in range(1, 21):
        seconds = 2.0 * step + 2.0 * max(0, step - 18)
        values = {"loss": 5 - step / 10, "lr": 1e-3, "seconds": seconds, "tokens_per_second": 1234.0}
        rows.append({"type": "train", "step": step, **values, "memory_bytes": 3 * 2**30, "peak_share": 0.25})
    rows.append({"type": "evaluation", "step": 20, "loss": 3.25})
    rows.append({"type": "sample", "step": 20, "prompt": "Once", "text": " upon\x1b[2J a time"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("train: {steps: 100}\n")
    (folder / "model.json").write_text("{}")
    return folder


def test_board_shows_progress_and_samples(run):
    text = render_board(run)
    # 42 s for 19 steps, 80 times.
    assert text.startswith("mine: stopped, step 20 of 100, 2 min 57 s left\n[████████")
    assert "] 20%\nloss 3 · lr 0.001" in text
    assert "1,234 tokens/s · 25% of peak · 3.0 GiB per rank\nvalidation loss 3.25" in text
    assert "Once upon␛[2J a time" in text and "\x1b" not in text


def test_board_shows_the_verdict_of_the_watchdog(run):
    folder = run / "log" / "jingu-watch-1"
    folder.mkdir(parents=True)
    (folder / "verdict.txt").write_text("Training has made no progress for 60 s in step 21.\n")
    assert "Training has made no progress" in render_board(run)


def test_board_shows_the_plan_and_what_the_ranks_do(run):
    plan = {"planned_seconds": 1.5, "actual_seconds": 2.0, "planned_memory_bytes": 2**30, "actual_memory_bytes": 2**31}
    plan |= {"actual_memory": {"weights": 2.0**31}}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"type": "plan", "step": 20, **plan}) + "\n")
    folder = run / "log" / "jingu-watch-1"
    folder.mkdir(parents=True)
    paces = [Pace(rank, f"node{rank // 2}", 0, 2.0, compute=1.2 + rank / 10) for rank in range(4)]
    for node in (0, 1):
        window = Window(20, 5, paces[2 * node : 2 * node + 2], [])
        (folder / f"pace-0000{2 * node}.json").write_text(json.dumps(asdict(window)))
    text = "4 ranks on 2 nodes, step of 2 s: computing 1.2 to 1.5 s"
    assert text not in render_board(run)  # it has stopped
    with lock_folder(run, "", ""):
        board = render_board(run)
    assert f"\nstep 2 s (planned 1.5 s) · tensors 2.0 GiB (planned 1.0 GiB)\n{text}\n" in board


def test_runs_are_listed_with_their_state(run, capsys):
    other = run.with_name("done")
    other.mkdir()
    (other / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    (other / "config.yaml").write_text("train: {steps: 20}\n")
    with lock_folder(run, "", ""):
        assert main(["runs", str(run.parent)]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "step", "loss", "validation", "tokens/s"]
    assert first.split() == ["done", "complete", "20/20", "3", "3.25", "1,234"]
    assert second.split() == ["mine", "training", "20/100", "3", "3.25", "1,234"]


def test_a_folder_without_runs_is_one_sentence(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 2
    assert "there is no run here." in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "missing")]) == 2
    assert "there is no run here." in capsys.readouterr().err


def test_page_and_metrics_are_served_on_the_loopback_address_only(run):
    folder = run / "log" / "jingu-watch-1"
    folder.mkdir(parents=True)
    (folder / "verdict.txt").write_text("Training has made no progress for 60 s in step 21.\n")
    with make_server(run, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(address) as page:
            text = page.read().decode()
            assert "mine: stopped, step 20 of 100, 2 min 57 s left\n[████████" in text
            assert page.headers["Refresh"] == "10" and "Training has made no progress" in text
        with urllib.request.urlopen(f"{address}/metrics") as metrics:
            lines = metrics.read().decode().splitlines()
        assert 'jingu_loss{run="mine"} 3.0' in lines and 'jingu_validation_loss{run="mine"} 3.25' in lines
        for request in (f"{address}/config.yaml", urllib.request.Request(address, headers={"Host": "evil.example:80"})):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(request)
        server.shutdown()
        assert server.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_one_sentence(run, capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["watch", str(run), "--web", str(port)]) == 2
    assert f"--web: port {port} cannot be used (Address already in use)." in capsys.readouterr().err
