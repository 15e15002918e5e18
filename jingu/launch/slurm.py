"""`jingu launch slurm`: write a batch script, and submit it; within an allocation, run at once."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jingu.config.load import load_config
from jingu.errors import JinguError, pluralize
from jingu.launch.start import prepare_start
from jingu.runtime.files import write_text_atomically
from jingu.runtime.signals import EXIT_INTERRUPTED, EXIT_PREEMPTED, STOP_SIGNALS, handle_signals

# Scripts, starts and logs are in this folder, which the nodes must share.
FOLDER = Path("slurm")
# Commands that a job array does in parts.
_ARRAYS = (("data", "build"), ("sweep",))
# Time to save before the limit of the job.
_SECONDS_TO_SAVE = 180
# srun does not inherit the cores of the job by itself.
_SCRIPT = """#!/bin/bash
{directives}
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
{command}
code=$?
# The run was saved after the signal before the limit: it goes on when the job runs again.
[ $code -eq {preempted} ] && scontrol requeue $SLURM_JOB_ID
exit $code
"""


def launch_slurm(
    words: Sequence[str],
    nodes: int = 1,
    slots: int = 1,
    time: str | None = None,
    sbatch: Sequence[str] | None = None,
    environment: Path | None = None,
    write: bool = False,
) -> int:
    """Submit a command as a job of Slurm. It saves before its time limit, and goes on when Slurm starts it again.

    Args:
        nodes: nodes of the job; with `data build` and `sweep`, its parts, each a job of an array.
        slots: ranks of a node.
        time: limit of the job, as Slurm writes it, such as 12:00:00.
        sbatch: further settings of the job, such as `partition=gpu`.
        write: print the script, and submit nothing.

    Raises:
        JinguError: the command is wrong, there is no Slurm here, or it refuses the job.
    """
    settings = {"nodes": str(nodes), "ntasks-per-node": "1", "open-mode": "append"}
    python = [sys.executable, "-m"]
    # 1. The command of a task: a part of a data set, or a node of a run.
    array = next((list(own) for own in _ARRAYS if tuple(words[: len(own)]) == own), None)
    if array is not None:
        load_config(Path(next(iter(words[len(array) :]), "")), [])
        name = "-".join(array)
        settings |= {"nodes": "1", "array": f"1-{nodes}"}
        more = []
        if array == ["sweep"]:
            settings |= {"signal": f"USR1@{_SECONDS_TO_SAVE}"}
            more = ["--processes", str(slots)]
        command = f"srun {shlex.join([*python, 'jingu', *words, *more])} --part $SLURM_ARRAY_TASK_ID/{nodes}"
    else:
        start = replace(prepare_start(words, environment), slots=[list(range(slots))] * nodes, min_nodes=nodes)
        name = start.name
        file = FOLDER / f"{name}.json"
        _write(file, start.to_json())
        settings |= {"signal": f"USR1@{_SECONDS_TO_SAVE}"}
        command = shlex.join(["srun", "--kill-on-bad-exit=1", *python, "jingu.launch.node", str(file)])
    # 2. Within an allocation there is nothing to wait for.
    if "SLURM_JOB_ID" in os.environ and not write and "array" not in settings:
        return _run_step(shlex.split(command), nodes)
    # 3. The script.
    settings |= {"job-name": name, "output": str(FOLDER / f"{name}-%j.log")} | ({"time": time} if time else {})
    settings |= dict(setting.lstrip("-").partition("=")[::2] for setting in sbatch or ())
    directives = [f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}" for key, value in settings.items()]
    script = _SCRIPT.format(
        directives="\n".join([*directives, "#SBATCH --requeue"]), command=command, preempted=EXIT_PREEMPTED
    )
    _write(FOLDER / f"{name}.sbatch", script)
    if write:
        print(script, end="")
        return 0
    return _submit(FOLDER / f"{name}.sbatch")


def _run_step(command: Sequence[str], nodes: int) -> int:
    """Run a command as a step of the allocation in which this process is. Returns its exit code."""
    available = int(os.environ.get("SLURM_JOB_NUM_NODES", nodes))
    if nodes > available:
        what = f"the allocation has {pluralize(available, 'node')}, and --nodes is {nodes}."
        raise JinguError(what, fix="Ask salloc for more, or leave the allocation.")
    srun, *words = command
    program = shutil.which(srun)
    if program is None:
        raise JinguError("there is no srun on this machine.", fix="Launch where salloc has started a shell.")
    received: list[int] = []
    # In a process group of its own. srun would only report its state after Ctrl-C, and kill after a termination; it
    # passes this signal on to the nodes, whose ranks save.
    process = subprocess.Popen([program, f"--nodes={nodes}", "--ntasks-per-node=1", *words], process_group=0)

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        process.send_signal(signal.SIGUSR1)

    with handle_signals(pass_on, *STOP_SIGNALS):
        code = process.wait()
    # A person who stops a run sees the code of a run that a person has stopped.
    return EXIT_INTERRUPTED if code == EXIT_PREEMPTED and signal.SIGINT in received else code


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    write_text_atomically(path, text)


def _submit(script: Path) -> int:
    program = shutil.which("sbatch")
    if program is None:
        fix = "Launch on a login node of the cluster, or write the script with --write."
        raise JinguError("there is no sbatch on this machine.", fix=fix)
    result = subprocess.run([program, str(script)], capture_output=True, text=True, check=False)
    if result.returncode:
        words = " ".join(line.removeprefix("sbatch: error: ") for line in result.stderr.splitlines())
        raise JinguError(f"Slurm refuses the job ({words.rstrip('.')}).", where=script, fix="Change it with --sbatch.")
    print(f"{result.stdout.strip()}: {script}; its output is in {script.with_suffix('')}-*.log.")
    return 0
