"""`jingu launch slurm`: write a batch script and submit it; within an allocation, run immediately."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jingu.config.load import load_config
from jingu.errors import JinguError, pluralize
from jingu.launch.hosts import read_environment
from jingu.launch.node_codes import CODES_VARIABLE, read_code
from jingu.launch.start import START_VARIABLE, prepare_start, strip_separator
from jingu.runtime.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED
from jingu.runtime.files import temporary_folder, write_text_atomically
from jingu.runtime.signals import STOP_SIGNALS, handle_signals

# Folder for scripts and logs, which the nodes must share.
FOLDER = Path("slurm")
# Commands whose work a job array divides into parts.
_ARRAYS = (("data", "build"), ("sweep",))
# Slurm signals the ranks this long before the time limit, so that they save; for a short job, at most a quarter of it.
_SECONDS_TO_SAVE = 180
# SRUN_CPUS_PER_TASK is exported because srun does not inherit the job's --cpus-per-task.
_SCRIPT = """#!/bin/bash
{directives}
{variables}
[ -n "$SLURM_CPUS_PER_TASK" ] && export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Each node writes its exit code there, because srun's does not tell which node was the cause.
export {codes}=$PWD/{name}-$SLURM_JOB_ID.codes
rm -rf "${codes}" && mkdir -p "${codes}"
{command}
code=$?
read -r code restart < <({read_code} "${codes}" $code || echo $code counted)
rm -rf "${codes}"
case $restart in
# Slurm's own count of restarts also has those without a failure.
counted) echo "exit code $code" >> {name}-$SLURM_JOB_ID.failures
[ "$(wc -l < {name}-$SLURM_JOB_ID.failures)" -le {max_restarts} ] && restart=always ;;
esac
# SIGTERM is sent by a person who cancels the job, by preemption, and by srun when a node fails. Only Slurm knows which.
state=$(scontrol --oneliner show job $SLURM_JOB_ID | grep -o 'JobState=[A-Z]*')
[ "$restart" = always ] && [ "$state" != JobState=CANCELLED ] && scontrol requeue $SLURM_JOB_ID
exit $code
"""


def launch_slurm(
    words: Sequence[str],
    nodes: int = 1,
    slots: int = 1,
    time: str | None = None,
    sbatch: Sequence[str] | None = None,
    environment: Path | None = None,
    max_restarts: int = 0,
    write: bool = False,
) -> int:
    """Submit a command as a Slurm job. It saves before its time limit, and resumes when Slurm starts it again.

    Args:
        nodes: nodes of the job; for `data build` and `sweep`, the number of parts, which are jobs of an array.
        slots: ranks per node.
        time: limit of the job, as Slurm writes it, such as 12:00:00.
        sbatch: further settings of the job, such as `partition=gpu`.
        max_restarts: how often the job is queued again after a failure, such as a lost node.
        write: print the script, and submit nothing.

    Raises:
        JinguError: the command is wrong, there is no Slurm here, or it refuses the job.
    """
    words = strip_separator(words)
    settings = {"nodes": str(nodes), "ntasks-per-node": "1", "open-mode": "append"}
    srun = ["srun", "--export=ALL"]
    python = [sys.executable, "-m"]
    # 1. Compose the command of a task: a part of a data set or sweep, or a node of a run.
    array = next(
        (list(array_option) for array_option in _ARRAYS if tuple(words[: len(array_option)]) == array_option), None
    )
    if array is not None:
        file = next(iter(words[len(array) :]), None)
        if file is None:
            raise JinguError(f"{' '.join(array)} needs the file of a run.", fix=f"Write `{' '.join(array)} FILE.yaml`.")
        load_config(Path(file), [])
        name = "-".join(array)
        settings |= {"nodes": "1", "array": f"1-{nodes}"}
        variables = read_environment(environment) if environment is not None else {}
        more = ["--processes", str(slots)] if array == ["sweep"] else []
        command = shlex.join([*srun, *python, "jingu", *words, *more, "--part"]) + f" $SLURM_ARRAY_TASK_ID/{nodes}"
    else:
        start = replace(prepare_start(words, environment), slots=[list(range(slots))] * nodes)
        name = start.name
        # The start is part of the script, which Slurm copies: later edits of the run's file do not affect this job.
        variables = {START_VARIABLE: start.to_json()}
        command = shlex.join([*srun, "--kill-on-bad-exit=1", *python, "jingu.launch.node"])
    # 2. Within an allocation, run immediately.
    if "SLURM_JOB_ID" in os.environ and not write and "array" not in settings:
        return _run_step(shlex.split(command), variables, nodes)
    # 3. Write the script.
    settings |= {"job-name": name, "output": str(FOLDER / f"{name}-%j.log")} | ({"time": time} if time else {})
    settings |= dict(setting.lstrip("-").partition("=")[::2] for setting in sbatch or ())
    if array != ["data", "build"]:
        limit = read_limit(settings.get("time", ""))
        settings.setdefault("signal", f"USR1@{min(_SECONDS_TO_SAVE, limit // 4)}")
    directives = [f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}" for key, value in settings.items()]
    script = _SCRIPT.format(
        directives="\n".join([*directives, "#SBATCH --requeue"]),
        variables="\n".join(f"export {key}={shlex.quote(value)}" for key, value in variables.items()),
        command=command,
        codes=CODES_VARIABLE,
        read_code=shlex.join([*python, "jingu.launch.node_codes"]),
        name=FOLDER / name,
        max_restarts=max_restarts,
    )
    FOLDER.mkdir(exist_ok=True)
    write_text_atomically(FOLDER / f"{name}.sbatch", script)
    if write:
        print(script, end="")
        return 0
    return _submit(FOLDER / f"{name}.sbatch")


def read_limit(text: str) -> int:
    """Return the seconds of a time limit in Slurm's notation; `sys.maxsize` for other text, which Slurm will judge.

    The forms are minutes, minutes:seconds, hours:minutes:seconds, and days-hours[:minutes[:seconds]].
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return sys.maxsize
    days, first, second, third = (int(number or 0) for number in match.groups())
    # The first number is in minutes unless there are days or three numbers.
    is_hours = match[1] is not None or match[4] is not None
    hours_and_minutes = 3_600 * first + 60 * second + third if is_hours else 60 * first + second
    return 86_400 * days + hours_and_minutes


def _run_step(command: Sequence[str], variables: Mapping[str, str], nodes: int) -> int:
    """Run a command as a step of the allocation in which this process is. Returns its exit code."""
    available = int(os.environ.get("SLURM_JOB_NUM_NODES", nodes))
    if nodes > available:
        what = f"the allocation has {pluralize(available, 'node')}, and --nodes is {nodes}."
        raise JinguError(what, fix="Ask salloc for more, or leave the allocation.")
    srun, *words = command
    program = shutil.which(srun)
    if program is None:
        raise JinguError("there is no srun on this machine.", fix="Launch where salloc has started a shell.")
    signals: list[int] = []
    # srun only reports its state on SIGINT, and kills the step on SIGTERM. So it runs in its own process group and
    # receives SIGUSR1 instead, which it forwards to the nodes, where the ranks save.
    words = [program, f"--nodes={nodes}", "--ntasks-per-node=1", *words]
    FOLDER.mkdir(exist_ok=True)
    # The nodes share the folder, and write their exit codes there.
    with temporary_folder(f"step-{os.environ['SLURM_JOB_ID']}-", FOLDER.absolute()) as codes:
        environment = {**os.environ, **variables, CODES_VARIABLE: str(codes)}
        process = subprocess.Popen(words, env=environment, process_group=0)

        def pass_on(number: int, _: object) -> None:
            signals.append(number)
            process.send_signal(signal.SIGUSR1)

        with handle_signals(pass_on, *STOP_SIGNALS):
            code = process.wait()
        code = read_code(codes, code)
    return EXIT_INTERRUPTED if code == EXIT_PREEMPTED and signal.SIGINT in signals else code


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
