"""The command in a process of its own: SIGTERM while clients are served drops no request silently."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from jingu.formats.export import export_hf
from jingu.infer.inference_model import InferenceModel
from tests.limits import PATIENCE


@pytest.fixture(scope="module")
def folder(tiny_model: InferenceModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model as a Hugging Face folder."""
    place = tmp_path_factory.mktemp("model")
    tiny_model.tokenizer.save(place / "tokenizer")
    export_hf(tiny_model.spec, tiny_model.module.state_dict().__getitem__, place / "tokenizer", place / "tiny")
    return place / "tiny"


class Command:
    """A `jingu serve` process and its output."""

    def __init__(self, folder: Path, *message: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jingu", "serve", str(folder), "--port", "0", "--precision", "fp32", *message],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        host, _, port = self.said.strip().rpartition("http://")[2].rpartition(":")
        self.host, self.port = host, int(port)

    def ended(self) -> tuple[int, list[dict[str, object]]]:
        """Return the exit code and the log lines."""
        _, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, [json.loads(line) for line in err.splitlines()]


def ask(command: Command, number: int, started: threading.Barrier, outcomes: list[str]) -> None:
    """Request one long text; every other client streams."""
    connection = http.client.HTTPConnection(command.host, command.port, timeout=PATIENCE)
    path = "/generate_stream" if number % 2 else "/generate"
    body = {"inputs": "the weather", "parameters": {"max_new_tokens": 100 + number, "do_sample": True, "seed": number}}
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        if number < 4:
            started.wait(120)
        answer = connection.getresponse()
        text = answer.read().decode()
    except (OSError, http.client.HTTPException):
        outcomes.append("closed")
        return
    if answer.status != 200:
        assert json.loads(text)["error"]
        outcomes.append(f"told {answer.status}")
    elif number % 2:
        last = json.loads(text.strip().split("data: ")[-1])
        outcomes.append("whole" if last.get("details") else "told in the stream" if "error" in last else "cut")
    else:
        assert json.loads(text)["generated_text"] is not None
        outcomes.append("whole")


def test_sigterm_under_load_answers_every_request(folder: Path) -> None:
    command = Command(folder, "--max-num-seqs", "4", "--grace", "2")
    started, outcomes = threading.Barrier(5), list[str]()
    clients = [threading.Thread(target=ask, args=(command, number, started, outcomes)) for number in range(24)]
    for client in clients:
        client.start()
    started.wait(120)
    command.process.send_signal(signal.SIGTERM)
    for client in clients:
        client.join(120)
    code, lines = command.ended()
    assert code == 0
    counted = Counter(outcomes)
    assert sum(counted.values()) == 24 and "cut" not in counted, counted
    answered = [line for line in lines if line["event"] == "request"]
    # Whatever was accepted has its line, and whoever was not answered had not been accepted.
    assert len(answered) == 24 - counted["closed"], (counted, lines)
    assert not [line for line in lines if line["level"] == "error"]


def test_ctrl_c_ends_the_server(folder: Path) -> None:
    command = Command(folder, "--name", "mine")
    assert command.said.startswith("mine is served at http://127.0.0.1:")
    command.process.send_signal(signal.SIGINT)
    assert command.ended() == (0, [])
