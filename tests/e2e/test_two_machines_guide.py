"""docs/guides/two-machines.md, followed literally on two new machines, with a wheel of this tree."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.nodes import PATH, ROOT, Nodes, interrupt, read_output_until, start_nodes, why_no_nodes
from tests.limits import PATIENCE

pytestmark = pytest.mark.slow
PASSWORD = "a long secret"
# Answers for ssh-copy-id, which asks a person.
ASK = f"""#!/bin/sh
case "$1" in *yes/no*) echo yes;; *) echo '{PASSWORD}';; esac
"""
PAGE = Path(ROOT) / "docs" / "guides" / "two-machines.md"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Nodes]:
    """Two machines on which nobody has logged in."""
    reason = why_no_nodes()
    if reason:
        pytest.skip(reason)
    with start_nodes(tmp_path / "nodes", 2, PASSWORD) as nodes:
        yield nodes


class Terminal:
    """A terminal on node1: what `cd` and `source` change lasts from block to block."""

    def __init__(self, nodes: Nodes, variables: dict[str, str]) -> None:
        self._nodes = nodes
        self._variables = variables
        self._before = "set -e\n"

    def start(self, block: str) -> subprocess.Popen[str]:
        """Start the commands of a block."""
        lines = block.splitlines()
        changes = [line for line in lines if line.startswith(("cd ", "source "))]
        script = self._before + "\n".join([*lines[:-1], f"exec {lines[-1]}" if lines[-1] not in changes else lines[-1]])
        self._before += "".join(f"{line}\n" for line in changes)
        return self._nodes.start("bash", "-c", script, node=1, **self._variables)

    def run(self, block: str) -> str:
        """Run the commands of a block; none of them may fail. Return the output."""
        process = self.start(block)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, (block, output)
        return output


def test_page_works_as_written(machines: Nodes, wheels: Path, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (run_yaml,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    install, keys, check, prepare, train, watch, resume = blocks
    assert text.index(check) < text.index(run_yaml) < text.index(prepare)
    ask = tmp_path / "ask"
    ask.write_text(ASK)
    ask.chmod(0o755)
    variables = {
        "HOME": str(tmp_path / "nodes" / "home"),
        "PYTHONPATH": "",
        "PATH": f"{Path(sys.base_prefix) / 'bin'}:{PATH}",
        # A package index with jingu alone: the packages that it needs are those of this environment.
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_DEPS": "1",
        "SSH_ASKPASS": str(ask),
        "SSH_ASKPASS_REQUIRE": "force",
    }
    first = Terminal(machines, variables)
    folder = tmp_path / "nodes" / "mnt" / "demo"
    first.run(install)
    (site,) = folder.glob(".venv/lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    assert (site / "jingu").is_dir()
    first.run(keys)
    table = first.run(check)
    assert " FAILS " not in table and "node2  ok     clock" in table and not (folder / "failing_nodes.txt").exists()
    (folder / "run.yaml").write_text(run_yaml, encoding="utf-8")
    first.run(prepare)
    run = first.start(train)
    output = read_output_until(run, "step 30 of")
    assert all(f"{node}: 1 rank, rendezvous at 10.77.0.1:" in output for node in ("node1", "node2"))
    second = Terminal(machines, variables)
    board = second.start(watch)
    read_output_until(board, "demo: ")
    interrupt(board)
    board.communicate(timeout=PATIENCE)
    interrupt(run)
    rest, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130 and "Stopped and saved at step" in rest, output + rest
    output = first.run(resume)
    assert "Resuming from step" in output and "Complete: 200 steps" in output, output
    assert (folder / "runs" / "demo" / "report.html").exists()
