"""Nodes with different settings, with an unreachable master, or whose launcher is killed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

import jingu
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.runtime import ranks as ranks_module
from jingu.runtime.ranks import check_equal_on_all_ranks
from jingu.runtime.signals import StopRequest
from jingu.training import commands
from jingu.training.commands import train_on_rank
from jingu.training.run import Run, open_run
from jingu.training.run_folder import lock_run
from tests.conftest import peak_unmeasured, this_rank
from tests.e2e.conftest import read_until
from tests.e2e.test_dying_rank import LOCAL, LONG
from tests.limits import PATIENCE, free_port

ROOT = str(Path(jingu.__file__).parents[1])


def test_another_program_at_the_master_address_is_one_sentence(monkeypatch):
    """PyTorch would try again for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(JinguError) as caught, ranks_module.join_process_group("cpu", 1):
            pass
        thread.join()
    assert (
        caught.value.what == f"what answers at the master address 127.0.0.1:{port} is not rank 0, but another program."
    )


def start_node(number: int, port: int, *words: str) -> subprocess.Popen[str]:
    """Start one of two torchrun agents with one rank each."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
    agent += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    command = [*agent, "-m", "jingu", "train", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_two_nodes_with_different_settings_do_not_train(run_file, tiny_run, done):
    """Two torchrun agents, of which one was started with another learning rate and another seed."""
    config = {"train.steps": 4}
    file = run_file(config, name="two-nodes")
    port = free_port()
    nodes = [start_node(0, port, file), start_node(1, port, file, "optimizer.lr=0.123", "seed=77")]
    output = "".join(node.communicate(timeout=PATIENCE)[1] for node in nodes)
    assert all(node.returncode not in (0, None) for node in nodes)
    host = socket.gethostname()
    lr = tiny_run(config).optimizer.lr
    assert f"optimizer.lr is {lr} on {host} (rank 0) and 0.123 on {host} (rank 1)" in output
    assert f"seed is {tiny_run(config).seed} on {host} (rank 0) and 77 on {host} (rank 1)" in output
    assert output.count("the ranks were not started alike") == 1
    assert not done(tiny_run(config, name="two-nodes")).folder.exists()


def compare_tokenizers(rank: int, world: int) -> str:
    values = {"same": [1, 2], "tokenizer": "b" if rank == 2 else "a"}
    try:
        check_equal_on_all_ranks(values, f"node-{rank}")
    except JinguError as error:
        return error.what
    return ""


def test_every_rank_names_the_node_and_the_key_that_differ(ranks):
    what = "the ranks were not started alike: tokenizer is a on node-0 (rank 0) and b on node-2 (rank 2)."
    assert ranks.run(compare_tokenizers, 3) == [what] * 3


def train_with_other_inputs(rank: int, world: int, config: RunConfig, kind: str) -> str:
    """Return the error of this rank, if it is the one that reports it. Rank 1 has something else."""
    with pytest.MonkeyPatch.context() as patch, peak_unmeasured():
        if rank == 1 and kind == "library":
            patch.setattr(commands, "library_versions", lambda: {"torch": "1.2.3"})
        elif rank == 1 and kind == "code":
            patch.setattr(commands, "PACKAGE_ROOT", Path(__file__).parent)
        elif rank == 1 and kind == "data":
            patch.setattr(Run, "data_checksums", "of other data")
        try:
            train_on_rank(config, replace(this_rank(rank, world), host=f"node-{rank}"), StopRequest())
        except JinguError as error:
            return error.what
        except SystemExit:
            return ""
    return "it trains"


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("library", "version of torch", "1.2.3"),
        ("code", "code of jingu", ""),
        ("data", "checksums of the data", "of other data"),
    ],
)
def test_other_code_libraries_and_data_are_named(kind, key, value, tiny_run, ranks, done):
    config = tiny_run({"train.steps": 1})
    (words,) = filter(None, ranks.run(train_with_other_inputs, 2, config, kind))
    assert "the ranks were not started alike: " in words
    assert re.search(rf"\b{key} is .+ on node-0 \(rank 0\) and {value}.* on node-1 \(rank 1\)", words)
    assert not done(config).folder.exists()


def test_the_ranks_of_a_killed_launcher_exit(run_file, tiny_run, done, tmp_path):
    """The ranks stop as after SIGTERM, and save. Nothing remains in the temporary folder."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    # PyTorch's compiler makes this folder when it is imported, and would make it in the temporary folder.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, *(word.format(file=run_file(LONG, name="orphans")) for word in LOCAL)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, bufsize=1)
    read_until(process, "epochs)")  # the last words before the first step
    ranks = [child for child in psutil.Process(process.pid).children() if "RANK" in child.environ()]
    assert len(ranks) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
    for rank in alive:
        rank.kill()
    assert not alive
    process.stderr.close()
    assert done(tiny_run(LONG, name="orphans")).checkpoint().is_dir()
    assert [path.name for path in temporary.iterdir()] == []


def test_a_run_in_training_names_the_process_that_trains_it(tiny_run):
    run = open_run(tiny_run(name="owned"))
    with lock_run(run), pytest.raises(JinguError) as caught, lock_run(run):
        pass
    assert caught.value.what == f"process {os.getpid()} on {socket.gethostname()} is training this run now."
    with lock_run(run):
        pass
    assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoints"]


@pytest.mark.parametrize("address", ["no-such-host.invalid", "127.0.0.1"])
def test_an_unreachable_master_address_is_one_sentence(address, monkeypatch):
    """A machine that does not exist; and one that refuses until the time in which rank 0 may start is over."""
    port = free_port()
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks_module, "COLLECTIVE_TIMEOUT", timedelta(0))
    if address != "127.0.0.1":
        monkeypatch.setattr(ranks_module, "REACH_SECONDS", 0.1)
    with pytest.raises(JinguError) as caught, ranks_module.join_process_group("cpu", 1):
        pass
    assert caught.value.what.startswith(f"the master address {address}:{port} cannot be reached (")
    assert "Check MASTER_ADDR and MASTER_PORT" in str(caught.value)
