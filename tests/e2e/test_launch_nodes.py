"""`jingu launch ssh` to four machines with their own networks: the same bits, a slow link, a lost one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jingu
from tests.limits import PATIENCE

PATH = f"{os.environ['PATH']}:/usr/sbin"
PROGRAMS = ("sshd", "ssh", "unshare", "ip", "tc")
MISSING = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING) or os.getuid() != 0, reason=f"needs root and {', '.join(PROGRAMS)}"),
]


@pytest.fixture
def on_nodes(tmp_path):
    """Run a shell script beside four nodes; `launch` in it launches a command on them. Returns what it prints."""
    folder = tmp_path / "nodes"
    folder.mkdir()
    (folder / "hostfile").write_text("".join(f"node{i} slots=1\n" for i in range(1, 5)))
    environment = {**os.environ, "PATH": PATH, "PYTHONPATH": str(Path(jingu.__file__).parents[1])}
    function = (
        f"cd {folder}; launch() {{ {sys.executable} -m jingu launch ssh "
        f'--hostfile hostfile --ssh-options "$(cat options)" "$@"; }}\n'
    )

    def run(script: str) -> str:
        words = ["unshare", "--net", "--mount", "bash", str(Path(__file__).with_name("ssh_nodes.sh")), str(folder)]
        result = subprocess.run(
            [*words, "bash", "-c", function + script],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return result.stdout

    return run


def test_four_nodes_train_to_the_same_bits(on_nodes, run_file, tiny_run, done, train_on):
    settings = {"train.steps": 4}
    train_on(4, tiny_run(settings, name="local"))
    output = on_nodes(f"launch train {run_file(settings, name='remote')}; echo code $?")
    assert "code 0" in output, output
    assert "node4: 1 ranks, meeting at 10.77.0.1:" in output and " over e0." in output
    assert done(tiny_run(name="remote")).column("loss") == done(tiny_run(name="local")).column("loss")


def test_an_unreachable_host_is_one_sentence(on_nodes, run_file):
    output = on_nodes(f"echo '10.77.0.9 slots=1' >> hostfile; launch {run_file()}; echo code $?")
    assert "10.77.0.9: the host cannot be reached by ssh (" in output and output.endswith("code 2\n"), output


def test_the_doctor_finds_a_slow_link(on_nodes):
    script = "ip netns exec n3 tc qdisc add dev e0 root tbf rate 80mbit burst 64kbit latency 200ms\n"
    output = on_nodes(f"{script}launch doctor --folder runs; echo code $?; cat failing_nodes.txt")
    assert output.endswith("code 2\nnode3\n"), output
    assert output.count(" FAILS ") == 1 and " FAILS  pairs " in output


def test_a_link_that_goes_down_ends_the_run(on_nodes, run_file):
    settings = {"train.steps": 50_000, "train.hang_timeout": 5}
    output = on_nodes(
        f"(launch train {run_file(settings, name='cut')} > log 2>&1; echo code $? >> log) &\n"
        "for i in $(seq 600); do grep -q 'step 20 of' log && break; sleep 0.3; done\n"
        "ip link set h4 down; wait; cat log"
    )
    assert "Training has stood still for" in output and "code 70" in output, output[-5000:]
    assert "rank 3 (node4)" in output and "The network between its node and that of rank 0 is down." in output, output
