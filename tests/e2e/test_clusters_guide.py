"""The commands of docs/guides/clusters.md, run as written on machines that ssh reaches, with fewer ranks and runs."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jingu.config.load import dump_yaml
from jingu.config.schema import RunConfig
from tests.launch.nodes import PATH, ROOT, Nodes, interrupt, read_output_until
from tests.launch.programs import install
from tests.limits import PATIENCE

# Two cores have no 16 ranks, and a test has no time for 60 runs or 500 steps.
SMALLER = {
    "slots=8": "slots=3",
    "node2:7": "node2:2",
    "--random 20": "--random 2",
    "--random 6": "--random 2",
    "--optuna 30": "--optuna 2",
    "warmup=10:500": "warmup=1:5",
}
# Stand-ins for sbatch and kubectl: test_launch_slurm.py has a real Slurm.
SUBMIT = """
json.dump([sys.argv[1:], sys.stdin.read()], open(RECORD, "w"))
print("Submitted batch job 7")
"""
REQUEST = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
HAS_OPTUNA = importlib.util.find_spec("optuna") is not None


def read_guide() -> str:
    """Return the guide with the smaller numbers."""
    text = (Path(ROOT) / "docs" / "guides" / "clusters.md").read_text(encoding="utf-8")
    for number, smaller in SMALLER.items():
        assert number in text
        text = text.replace(number, smaller)
    return text


def write_run(config: RunConfig, file: Path) -> None:
    file.write_text(dump_yaml(config), encoding="utf-8")


class Guide:
    """Runs the guide's commands in the folder that the nodes share.

    Args:
        programs: folder with the stand-ins, and with `jingu`.
    """

    def __init__(self, nodes: Nodes, programs: Path) -> None:
        self._nodes = nodes
        self._path = f"{programs}:{PATH}"
        (programs / "jingu").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m jingu "$@"\n')
        (programs / "jingu").chmod(0o755)
        # sshd gives its commands no other PATH.
        self._replacements = {"node1 jingu watch /data": f"node1 {programs}/jingu watch {nodes.folder}"}

    def run(self, command: str) -> str:
        """Run a command to its end, or until Ctrl-C where it has none. Return the output."""
        for text, replacement in self._replacements.items():
            command = command.replace(text, replacement)
        if " serve " in command:
            return self._run_until(command, "http://127.0.0.1:8000", "http://127.0.0.1:8000/health", node=1)
        if " --web " in command:
            return self._run_until(command, "http://127.0.0.1:8080", "http://127.0.0.1:8080/metrics")
        if "jingu watch " in command:
            return self._run_until(command, "mine: complete")
        code, output = self._nodes.run("bash", "-c", command, PATH=self._path)
        if " --optuna " in command and not HAS_OPTUNA:
            assert code == 2 and "pip install 'jingu[sweep]'" in output, (command, output)
        else:
            assert code == 0, (command, output)
        return output

    def _run_until(self, command: str, words: str, url: str = "", node: int | None = None) -> str:
        """Run a command until it prints these words, make a request to it from one of the nodes, and press Ctrl-C."""
        process = self._nodes.start("bash", "-c", f"exec {command}", PATH=self._path)
        output = read_output_until(process, words)
        if url:
            code, answer = self._nodes.run(sys.executable, "-c", REQUEST, url, node=node)
            assert code == 0, (command, answer)
        interrupt(process)
        rest, _ = process.communicate(timeout=PATIENCE)
        assert "Traceback" not in rest, (command, output + rest)
        return output + rest


@pytest.mark.slow
def test_guide_runs_as_written(
    nodes: Nodes, tiny_run: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = install(monkeypatch, tmp_path / "bin", "sbatch", SUBMIT)
    applied = install(monkeypatch, tmp_path / "bin", "kubectl", SUBMIT)
    text = read_guide()
    guide = Guide(nodes, tmp_path / "bin")
    # A run that six ranks, five or one can train, and five can serve.
    changes = {
        "runs_dir": "runs",
        "model.hidden_size": 60,
        "model.num_heads": 15,
        "model.num_kv_heads": 15,
        "model.intermediate_size": 60,
        "batch.global_batch_size": 30,
        "batch.micro_batch_size": 1,
        "train.steps": 6,
        "evaluation.every": 3,
        "precision": {"type": "fp32"},
    }
    write_run(tiny_run(changes, name="mine"), nodes.folder / "run.yaml")
    write_run(tiny_run(changes | {"optimizer.lr": 1e-3}, name="other"), nodes.folder / "other.yaml")
    (nodes.folder / "hosts").write_text("\n".join(re.findall(r"^node\d slots=\d", text, re.MULTILINE)))
    (nodes.folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\n")
    guide.run("jingu train other.yaml")
    outputs = {}
    mine = nodes.folder / "runs" / "mine"
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).splitlines():
        command = line.partition("  #")[0].strip()
        if re.match(r"jingu (launch ssh .*)?train ", command):
            # The same run on other nodes or with other settings.
            shutil.rmtree(mine, ignore_errors=True)
        outputs[command] = guide.run(command)
        if " slurm " in command and "--write" not in command:
            (script,), _ = json.loads(submitted.read_text())
            assert "Submitted batch job 7" in outputs[command]
            assert (nodes.folder / script).read_text().startswith("#!/bin/bash")
    assert "Complete: 6 steps" in outputs["jingu launch ssh --hostfile hosts train run.yaml optimizer.lr=3e-4"]
    job = yaml.safe_load((nodes.folder / "job.yaml").read_text())
    assert job["kind"] == "TrainJob"
    words, manifest = json.loads(applied.read_text())
    assert words == ["apply", "-f", "-"] and yaml.safe_load(manifest)["kind"] == "JobSet"
    assert "mine" in outputs["jingu runs runs"] and "other" in outputs["jingu runs runs"]
    sweep = json.loads((nodes.folder / "runs" / "mine-sweep" / "sweep.json").read_text())
    assert all(run["state"] == "complete" for run in sweep["runs"])
    assert len(list((mine / "profile").glob("step-*-rank-0.json"))) == 1
