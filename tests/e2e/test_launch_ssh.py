"""`jingu launch ssh` with real sshd processes on this machine: the same bits, errors in one sentence, and Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import jingu
from jingu.cli import main
from jingu.errors import JinguError
from jingu.launch.start import check_versions
from tests.e2e.conftest import read_until
from tests.limits import PATIENCE, free_port

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
needs_sshd = pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="needs sshd and ssh")


@pytest.fixture(scope="module")
def ssh_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An sshd on the loopback address that accepts one key, and the options with which a client reaches it."""
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    settings = {
        "Port": port,
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
        "PidFile": "none",
    }
    lines = [f"{name} {value}\n" for name, value in settings.items()]
    lines += [f"ListenAddress 127.0.0.{number}\n" for number in (1, 2)]
    (folder / "config").write_text("".join(lines))
    Path("/run/sshd").mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.PIPE, text=True)
    read_until(process, "Server listening")
    yield (
        f"-p {port} -i {folder / 'user'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    )
    process.terminate()
    process.communicate()


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    """Two names of this machine, with a slot each."""
    file = tmp_path / "hosts"
    file.write_text("# two nodes\n127.0.0.1 slots=1\n127.0.0.2 slots=2\n")
    return file


def start(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(jingu.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "jingu", "launch", "ssh", *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, bufsize=1)


@needs_sshd
@pytest.mark.slow
def test_two_nodes_train_to_the_same_bits(run_file, tiny_run, done, train_on, hostfile, ssh_options):
    settings = {"train.steps": 4}
    train_on(2, tiny_run(settings, name="local"))
    words = ["--hostfile", str(hostfile), "--ssh-options", ssh_options, "--exclude", "127.0.0.2:1"]
    process = start(*words, run_file(settings | {"train.steps": 9}, name="remote"), "train.steps=4")
    _, output = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    local, remote = (done(tiny_run(settings, name=name)) for name in ("local", "remote"))
    assert remote.column("loss") == local.column("loss")
    assert "127.0.0.1: 1 rank, rendezvous at 127.0.0.1:" in output and "Complete: 4 steps" in output


@needs_sshd
@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_nothing_behind(run_file, tiny_run, done, hostfile, ssh_options):
    settings = {"train.steps": 50_000}
    words = ["--hostfile", str(hostfile), "--ssh-options", ssh_options, "--include", "127.0.0.1@127.0.0.2:1"]
    process = start(*words, "train", run_file(settings, name="stopped"))
    read_until(process, "step 3 of")
    mine = [p for p in psutil.process_iter(["cmdline"]) if "jingu.launch.node" in (p.info["cmdline"] or [])]
    ranks = [child for node in mine for child in node.children(recursive=True)]
    assert len(mine) == 2 and len(ranks) >= 2
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Stopped and saved at step" in output, output
    assert not psutil.wait_procs(mine + ranks, timeout=PATIENCE)[1]
    assert done(tiny_run(settings, name="stopped")).checkpoint().is_dir()


@needs_sshd
@pytest.mark.slow
def test_what_a_node_lacks_is_one_sentence(run_file, tmp_path, hostfile, ssh_options, capsys):
    wrong_key = ["--ssh-options", ssh_options.replace("/user ", "/host ")]
    assert main(["launch", "ssh", "--hostfile", str(hostfile), *wrong_key, run_file()]) == 2
    assert "127.0.0.1: the host cannot be reached by ssh (" in (error := capsys.readouterr().err)
    assert "Permission denied" in error
    hostfile.write_text("no-such-host.invalid slots=1\n")
    assert main(["launch", "ssh", "--hostfile", str(hostfile), run_file()]) == 2
    assert "no-such-host.invalid: the host cannot be reached by ssh (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--include", "node1:0@node3"], "--include: node3 is not in the hostfile. It lists node1 and node2."),
        (["--exclude", "node2:4"], "--exclude: node2 has no slot 4: it has 4, counted from 0."),
        (["--include", "node1", "--exclude", "node2"], "--include and --exclude cannot be combined."),
        (["--exclude", "node1@node2"], "--exclude node1@node2: no slot remains."),
        (["--environment", "missing"], "missing: the file cannot be read"),
    ],
)
def test_wrong_nodes_are_one_sentence(run_file, tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("node1 slots=2\nnode2 slots=4\n")
    assert main(["launch", "ssh", "--hostfile", "hosts", *words, "train", run_file()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("node1 slots=0", "hosts:1: the line 'node1 slots=0' is no host."),
        ("node1 slots=1\n\nnode1 slots=2", "hosts:3: node1 is listed twice."),
        ("# nothing", "hosts: the file lists no host."),
    ],
)
def test_a_wrong_hostfile_is_one_sentence(run_file, tmp_path, monkeypatch, capsys, text, sentence):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text(text)
    assert main(["launch", "ssh", "--hostfile", "hosts", run_file()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data", "build"], "data does not run on several nodes. Name one of train, align,"),
        ([], "the command to launch is missing."),
        (["train"], "train needs the file of a run."),
        (["align"], "align needs the file of stages."),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_a_wrong_command_is_one_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("node1 slots=1\n")
    assert main(["launch", "ssh", "--hostfile", "hosts", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_node_with_another_version_is_named():
    same = {"Python": "3.11", "jingu": "0.1.0", "torch": "2.13.0"}
    check_versions({"node1": same, "node2": dict(same)})
    with pytest.raises(JinguError) as caught:
        check_versions({"node1": same, "node2": same | {"torch": "2.12.0", "jingu": "0.2.0"}})
    text = "node2: the node has jingu 0.2.0 (0.1.0 on node1) and torch 2.12.0 (2.13.0 on node1)."
    assert str(caught.value).startswith(text)
