"""Local ranks: what they are told, how their ends become one, and that no rank outlives its command.

A stand-in for jingu, with nothing to import, plays the ranks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jingu.runtime import launcher
from jingu.runtime.launcher import launch_local_ranks

START = """
import json, os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Starts ranks that run the code, in an empty folder."""

    def start(code: str, processes: int = 2, grace: float = 60.0) -> int:
        (tmp_path / "jingu").mkdir()
        (tmp_path / "jingu" / "__init__.py").touch()
        (tmp_path / "jingu" / "__main__.py").write_text(START + code)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(launcher, "GRACE_SECONDS", grace)
        return launch_local_ranks(processes, ["train", "run.yaml"])

    return start


def test_ranks_are_told_who_they_are(play, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert play("Path(rank).write_text(json.dumps([sys.argv[1:], dict(os.environ)]))", processes=3) == 0
    ports = set()
    for rank in "012":
        words, environment = json.loads((tmp_path / rank).read_text())
        assert words == ["train", "run.yaml"]
        assert (environment["LOCAL_RANK"], environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == (
            rank,
            "3",
            "3",
        )
        assert environment["MASTER_ADDR"] == "127.0.0.1" and int(environment["OMP_NUM_THREADS"]) >= 1
        ports.add(environment["MASTER_PORT"])
    assert len(ports) == 1


@pytest.mark.parametrize(
    ("codes", "whole"), [((0, 0), 0), ((130, 130), 130), ((2, 2), 2), ((0, 1), 1), ((1, 2), 2), ((2, 130), 2)]
)
def test_many_ends_are_one(play, codes, whole):
    assert play(f"sys.exit({codes}[int(rank)])") == whole


def test_a_killed_rank_takes_the_others_along(play, tmp_path, capfd):
    """The other one ignores all that can be ignored."""
    code = """
Path(rank).write_text(str(os.getpid()))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait_for("0", "1")
os.kill(os.getpid(), signal.SIGKILL) if rank == "1" else time.sleep(1000)
"""
    assert play(code, grace=0.2) == 137
    assert capfd.readouterr().err == (
        f"jingu: rank 1 on {socket.gethostname()} was killed by SIGKILL, most likely because memory ran out; ranks "
        "that did not exit by themselves were killed. Run the same command again to resume from the last checkpoint.\n"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "0").read_text()), 0)


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_that_comes_before_the_ranks_handle_it_is_no_failure(play, capfd, kind, code):
    """A preemption while ranks import or connect: they have nothing to save, and start again."""
    preempt = f"""
signal.signal(signal.SIGINT, signal.SIG_DFL)
Path(rank).touch()
wait_for("0", "1")
if rank == "0":
    os.kill(os.getppid(), {int(kind)})
time.sleep(1000)
"""
    assert play(preempt) == code
    assert "was killed" not in capfd.readouterr().err


def test_a_killed_rank_is_told_where_the_others_leave(play, capfd):
    assert play("os.kill(os.getpid(), signal.SIGSEGV) if rank == '1' else sys.exit(69)") == 139
    told = f"rank 1 on {socket.gethostname()} was killed by SIGSEGV; other ranks exited."
    assert told in capfd.readouterr().err


def test_the_launcher_tells_how_ranks_have_ended(play, tmp_path):
    """The file is gone with the launcher; a rank that is still there copies it."""
    code = """
if rank == "1":
    os._exit(0)
exits = Path(os.environ["JINGU_EXITS"])
while not exits.read_text():
    time.sleep(0.01)
Path("exits").write_text(exits.read_text())
sys.exit(69)
"""
    # A connection is lost, and all nodes are there: a rank has left for a reason that nobody knows.
    assert play(code) == 1
    assert re.fullmatch(r"\d+ 0\n", (tmp_path / "exits").read_text())


def test_a_mistake_that_a_rank_told_is_all_that_is_told(play):
    assert play("os.kill(os.getpid(), signal.SIGABRT) if rank == '0' else sys.exit(2)") == 2


def test_the_first_failure_is_the_verdict_where_others_hang(play):
    assert play("sys.exit(1) if rank == '1' else time.sleep(1000)", grace=0.2) == 1


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_each_rank_once(play, tmp_path, kind):
    code = f"""
seen = []
signal.signal({int(kind)}, lambda *_: seen.append(1))
Path(rank).touch()
wait_for("0", "1")
if rank == "0":
    os.kill(os.getppid(), {int(kind)})
while not seen:
    time.sleep(0.01)
Path(rank + "-seen").touch()
wait_for("0-seen", "1-seen")
Path(rank).write_text(str(len(seen)))
sys.exit(130)
"""
    before = signal.getsignal(kind)
    assert play(code) == 130
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["1", "1"]
    assert signal.getsignal(kind) == before


def test_a_signal_that_comes_while_ranks_are_started_reaches_those_to_come(play, tmp_path, monkeypatch):
    code = f"""
seen = []
signal.signal({int(signal.SIGTERM)}, lambda *_: seen.append(1))
Path(rank).touch()
while not seen:
    time.sleep(0.01)
sys.exit(130)
"""
    real = subprocess.Popen

    def start(*words, env, **more):
        child = real(*words, env=env, **more)
        while not (tmp_path / env["RANK"]).exists():
            assert child.poll() is None
            time.sleep(0.01)
        if env["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return child

    monkeypatch.setattr(subprocess, "Popen", start)
    assert play(code) == 130
