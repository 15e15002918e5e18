"""`jingu launch pdsh` with a stand-in for pdsh 2.34, and `jingu launch slurm` within an allocation."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import jingu
from jingu.cli import main
from jingu.config.load import dump_yaml
from jingu.errors import JinguError
from jingu.launch import node
from jingu.launch.start import Start, installed_versions
from jingu.runtime import ranks
from tests.e2e.conftest import read_until
from tests.launch.programs import install
from tests.limits import PATIENCE

# Like the real one: the shell of each node has an open input that nobody writes to, its output is prefixed, and
# failures are announced.
PDSH = """
words = sys.argv[1:]
hosts, command = words[words.index("-w") + 1].split(","), words[-1]
json.dump([words, os.environ["PDSH_RCMD_TYPE"], os.environ["PDSH_SSH_ARGS_APPEND"]], open(RECORD, "w"))
nodes = []
for number, host in enumerate(hosts):
    shell = command.replace("%n", str(number)).replace("%h", host)
    prefix = f" 2>&1 | sed -u 's/^/{host}: /' >&2; exit ${{PIPESTATUS[0]}}"
    nodes.append(subprocess.Popen(["bash", "-c", f"({shell}){prefix}"], stdin=subprocess.PIPE))
codes = [node.wait() for node in nodes]
for host, code in zip(hosts, codes):
    if code:
        print(f"pdsh@here: {host}: ssh exited with exit code {code}", file=sys.stderr)
sys.exit(max(codes))
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of a slot each, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    Path("run.yaml").write_text("name: My.run\n")
    return Path("hosts")


def test_pdsh_runs_a_node_process_on_every_node(hosts, tmp_path, monkeypatch, capfd):
    record = install(monkeypatch, tmp_path / "bin", "pdsh", PDSH)
    # The start is there while the nodes run: an interpreter in the place of the node's prints it.
    monkeypatch.setattr("jingu.launch.pdsh.node_command", lambda file, number: f"cat {file}; echo; exit 1{number}")
    assert main(["launch", "pdsh", "--hostfile", "hosts", "run.yaml", "optimizer.lr=0.5"]) == 11
    words, kind, options = json.loads(record.read_text())
    assert words[:-1] == ["-S", "-b", "-f", "2", "-w", "127.0.0.1,127.0.0.2"] and kind == "ssh"
    # ssh asks no questions on the terminal, and gives up in time.
    assert options == "-o BatchMode=yes -o ConnectTimeout=6"
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("127.0.0.2: {"))
    start = Start.from_json(line.removeprefix("127.0.0.2: "))
    assert start.words == ["train", "{config}"] and start.slots == [[0], [0]] and start.master[0] == "127.0.0.1"
    assert "lr: 0.5" in (start.config or "") and not list(Path("pdsh").iterdir())


def test_a_node_that_pdsh_does_not_reach_is_one_sentence(hosts, tmp_path, monkeypatch, capfd):
    install(monkeypatch, tmp_path / "bin", "pdsh", PDSH)
    monkeypatch.setattr("jingu.launch.pdsh.node_command", lambda *_: "exit $((%n * 255))")
    Path("failing_nodes.txt").write_text("of an earlier doctor\n")
    assert main(["launch", "pdsh", "--hostfile", "hosts", "doctor"]) == 2
    assert "127.0.0.2: the host cannot be reached by pdsh." in capfd.readouterr().err
    assert Path("failing_nodes.txt").read_text() == "127.0.0.2\n"
    monkeypatch.setenv("PATH", "")
    assert main(["launch", "pdsh", "--hostfile", "hosts", "run.yaml"]) == 2
    assert "there is no pdsh on this machine." in capfd.readouterr().err


def test_a_node_with_another_version_refuses_a_start_from_a_file(tmp_path):
    file = tmp_path / "start.json"
    file.write_text(Start(["doctor"], slots=[[0]], versions=installed_versions() | {"jingu": "0.0.7"}).to_json())
    with pytest.raises(JinguError, match=r"\(0\.0\.7 on the launcher\)"):
        node.main([str(file)])


def test_a_start_that_is_missing_or_meets_at_a_port_in_use_is_one_sentence(tmp_path):
    with pytest.raises(JinguError, match="the node has another folder of this name"):
        node.main([str(tmp_path / "start.json"), "0"])
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        start = Start(["doctor"], slots=[[0], [0]], master=("127.0.0.1", port))
        with pytest.raises(JinguError, match=f"the ranks cannot meet at port {port}"):
            node.run_node(start, 0)


def test_a_node_that_does_not_reach_the_first_one_is_one_sentence(monkeypatch):
    monkeypatch.setattr(ranks, "REACH_SECONDS", 0.01)
    start = Start(["doctor"], slots=[[0], [0]], master=("no-such-host.invalid", 1))
    with pytest.raises(JinguError, match=r"the master address no-such-host.invalid:1 cannot be reached"):
        node.run_node(start, 1)


@pytest.mark.slow
def test_ctrl_c_reaches_the_ranks_and_the_same_command_goes_on(tiny_run, done, train_on, hosts, tmp_path, monkeypatch):
    settings = {"train.steps": 400}
    train_on(2, tiny_run(settings, name="local"))
    Path("run.yaml").write_text(dump_yaml(tiny_run(settings, name="remote")))
    install(monkeypatch, tmp_path / "bin", "pdsh", PDSH)
    monkeypatch.setenv("PYTHONPATH", str(Path(jingu.__file__).parents[1]))
    words = ["-m", "jingu", "launch", "pdsh", "--hostfile", "hosts", "train", "run.yaml"]
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        read_until(process, "step 3 of")
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Stopped and saved at step" in output, output
    subprocess.run([sys.executable, *words], check=True, timeout=PATIENCE)
    assert done(tiny_run(name="remote")).column("loss") == done(tiny_run(name="local")).column("loss")


def test_within_an_allocation_srun_starts_a_step(hosts, tmp_path, monkeypatch, capsys):
    code = "json.dump([sys.argv[1:], os.environ['JINGU_START']], open(RECORD, 'w')); sys.exit(7)"
    record = install(monkeypatch, tmp_path / "bin", "srun", code)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert main(["launch", "slurm", "--nodes", "2", "--slots", "4", "run.yaml"]) == 7
    words, start = json.loads(record.read_text())
    assert words[:4] == ["--nodes=2", "--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=1"]
    assert words[5:] == ["-m", "jingu.launch.node"]
    assert Start.from_json(start).slots == [[0, 1, 2, 3]] * 2
    assert main(["launch", "slurm", "--nodes", "3", "run.yaml"]) == 2
    assert "the allocation has 2 nodes, and --nodes is 3." in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert main(["launch", "slurm", "--nodes", "2", "run.yaml"]) == 2
    assert "there is no srun on this machine." in capsys.readouterr().err


def test_ctrl_c_within_an_allocation_lets_the_ranks_save(hosts, tmp_path, monkeypatch):
    code = """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.kill(os.getppid(), signal.SIGINT)
    signal.sigwait([signal.SIGUSR1])
    sys.exit(0)
    """
    install(monkeypatch, tmp_path / "bin", "srun", code)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert main(["launch", "slurm", "run.yaml"]) == 130


@pytest.mark.parametrize("words", [["evaluate", "runs/a", "arc", "--limit", "5"], ["serve", "runs/a", "--port", "80"]])
def test_commands_without_a_file_travel_as_they_are(hosts, monkeypatch, capsys, words):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["launch", "slurm", "--nodes", "2", "--write", *words]) == 0
    script = capsys.readouterr().out
    variable = next(line for line in script.splitlines() if line.startswith("export JINGU_START="))
    start = Start.from_json(shlex.split(variable)[1].partition("=")[2])
    assert start.words == words and start.config is None and start.slots == [[0], [0]]
    assert f"#SBATCH --job-name={words[0]}\n" in script


def test_stages_travel_as_their_text(hosts, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    stages = "# two\ntask: {type: pretraining}\nstages:\n- name: base\n- name: more\n  initialize: {from: base}\n"
    Path("stages.yaml").write_text(stages)
    words = ["launch", "slurm", "--write", "align", "--from", "more", "stages.yaml"]
    assert main(words) == 0
    variable = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("export JINGU_START="))
    start = Start.from_json(shlex.split(variable)[1].partition("=")[2])
    assert start.words == ["align", "--from", "more", "{config}"] and start.config == stages
    Path("stages.yaml").write_text("stages: [{name: base, trian: {}}]\n")
    assert main(words) == 2
    assert "Did you mean train?" in capsys.readouterr().err
