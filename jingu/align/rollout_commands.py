"""`jingu align score` and `jingu align replay`: rewards of saved answers, and a step of a run repeated."""

from __future__ import annotations

import json
import signal
import tempfile
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.align.policy_checks import check_policy_run
from jingu.align.policy_learning import PolicyLearning
from jingu.align.prompt_set import Prompt, common_columns, load_prompts
from jingu.align.reward_list import Rewards
from jingu.checkpoint.resume import checkpoints_path, complete_steps, step_folder
from jingu.config.load import load_stored_config
from jingu.config.schema import RunConfig
from jingu.config.sections.policies import RolloutSettings
from jingu.errors import JinguError
from jingu.runtime.files import read_text, write_text_atomically
from jingu.runtime.ranks import join_process_group
from jingu.runtime.signals import StopRequest
from jingu.text.tokenizer import Tokenizer
from jingu.training.commands import train_on_rank
from jingu.training.run import Run
from jingu.training.task import TaskFactory


def score(config: RunConfig, answers: Path | None = None, to: Path | None = None, best: bool = False) -> int:
    """Print the mean of each reward of the run over saved answers.

    Args:
        answers: JSON Lines file of rows with `prompt`, `completion` and columns, or a file in the folder `rollouts` of
            a run; None takes the newest rollout of this run.
        to: file to write the answers with their rewards to.
        best: write only the best answer to each prompt, as a row of instruction data.

    Raises:
        JinguError: the task has no rewards, or an environment; the file cannot be read, or a reward fails.
    """
    settings = _rollout_settings(config)
    if settings.environment is not None or not settings.rewards:
        what = "saved answers are scored by rewards alone, without an environment."
        raise JinguError(what, where="task.rewards", fix="List rewards, and leave out task.environment.")
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    if answers is None:
        folder = Path(config.runs_dir) / config.name / "rollouts"
        answers = max(folder.glob("step_*.jsonl"), key=lambda file: file.stat().st_mtime, default=None)
        if answers is None:
            raise JinguError("the run has no answers yet.", where=folder, fix="Name a file of answers with --answers.")
    rows = _read_rows(answers)
    if all({"row", "text", "ids"} <= row.keys() for row in rows):
        prompts = load_prompts(settings, tokenizer, config.batch.sequence_length, config.initialize.from_).prompts
        _check_prompts(rows, prompts, answers, settings.prompts)
        sources = [prompts[row["row"]].messages or prompts[row["row"]].text for row in rows]
        rows = [_rollout_answer(row, prompts[row["row"]]) for row in rows]
    else:
        rows = [_saved_answer(row, tokenizer) for row in rows]
        sources = [row["prompt"] for row in rows]
    rewards = Rewards(settings.rewards, common_columns(rows), tokenizer)
    try:
        parts = rewards.score(rows)
    finally:
        rewards.close()
    totals = [rewards.total(values) for values in parts]
    for name in [*rewards.names, "reward"]:
        values = totals if name == "reward" else [scores[name] for scores in parts]
        numbers = [value for value in values if value is not None]
        mean = f"{fmean(numbers):.4f}" if numbers else "none"
        audit = " (audit)" if name in rewards.audit_names else ""
        print(f"{name + audit:30} {mean:>10}  {len(numbers):,} of {len(rows):,} answers")
    if to is not None:
        results = [
            {**row, "rewards": scores, "reward": total} for row, scores, total in zip(rows, parts, totals, strict=True)
        ]
        lines = (json.dumps(row, ensure_ascii=False) for row in (_best_rows(results, sources) if best else results))
        write_text_atomically(to, "".join(f"{line}\n" for line in lines))
    return 0


def _best_rows(rows: list[dict[str, Any]], prompts: list[Any]) -> list[dict[str, Any]]:
    """Return the best answer to each prompt (the first of a tie) as a row of instruction data.

    Args:
        prompts: the prompt of each row: a text, or a list of messages.
    """
    best: dict[str, dict[str, Any]] = {}
    for row, prompt in zip(rows, prompts, strict=True):
        key = json.dumps(prompt)
        if row["reward"] is not None and (key not in best or row["reward"] > best[key]["reward"]):
            answer = row["completion"]
            completion = answer if isinstance(prompt, str) else [{"role": "assistant", "content": answer}]
            best[key] = {"prompt": prompt, "completion": completion, "reward": row["reward"]}
    return list(best.values())


def _rollout_settings(config: RunConfig) -> RolloutSettings:
    if not isinstance(config.task, RolloutSettings):
        what = f"a run of the task {config.task.type} generates no answers."
        raise JinguError(what, where="task.type", fix="Name a run of the task grpo.")
    return config.task


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                rows.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                fix = "Correct the line."
                raise JinguError(f"line {number} is not a JSON object.", where=path, fix=fix) from error
    if not rows:
        raise JinguError("it has no rows.", where=path, fix="Write one answer a line.")
    return rows


def _check_prompts(rows: list[dict[str, Any]], prompts: list[Prompt], answers: Path, file: str) -> None:
    """Raise JinguError unless each recorded answer is one to today's prompt of its row: by its ids, and by its text."""
    for row in rows:
        number = row["row"]
        prompt = prompts[number] if isinstance(number, int) and 0 <= number < len(prompts) else None
        is_same = prompt is not None and list(prompt.ids) == list(row.get("prompt_ids", ()))
        if prompt is None or not is_same or row.get("prompt", prompt.text) != prompt.text:
            raise JinguError(
                f"its answers are to other prompts than those in {file} now: row {number} "
                f"{'is missing' if prompt is None else 'has another prompt, or is rendered or encoded otherwise'}.",
                where=answers,
                fix="Restore the prompts, the template and the tokenizer of the run, or name a file with both prompts "
                "and completions (--answers).",
            )


def _rollout_answer(row: dict[str, Any], prompt: Prompt) -> dict[str, Any]:
    """Return a line of a rollout as rewards see it."""
    answer = {"completion": row["text"], "completion_ids": row["ids"], "prompt_ids": row["prompt_ids"]}
    return {**prompt.columns, "prompt": prompt.text, **answer}


def _saved_answer(row: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a row of a user's file as rewards see it."""
    if not isinstance(row.get("prompt"), str) or not isinstance(row.get("completion"), str):
        raise JinguError("a row lacks the texts prompt and completion.", where="--answers", fix="Add them.")
    return {"completion_ids": tokenizer.encode(row["completion"]), **row}


def replay(run: Path, step: int) -> int:
    """Repeat a step of a run from the newest earlier checkpoint, and compare the new file of answers with the old one.

    Returns:
        0 if both files are equal byte by byte, else 1, with the first difference on standard output.

    Raises:
        JinguError: the run has no such step.
    """
    stored = run / "config.yaml"
    recorded = run / "rollouts" / f"step_{step}.jsonl"
    if not stored.is_file() or not recorded.is_file():
        raise JinguError(f"the run has no answers of step {step}.", where=run, fix="Name a step in its rollouts/.")
    config = load_stored_config(stored)
    _rollout_settings(config)
    checkpoints = checkpoints_path(run, config)
    start = max((number for number in complete_steps(checkpoints) if number < step), default=0)
    request = StopRequest()

    class Replay(PolicyLearning):
        """Asks the training loop to stop after the replayed step."""

        def __init__(self, run: Run, mesh: DeviceMesh, compile: bool) -> None:
            super().__init__(run, mesh, compile)
            self.updates = start * self.settings.updates_per_step

        def end_step(self) -> dict[str, Tensor | float]:
            self.updates += 1
            if self.updates >= step * self.settings.updates_per_step:
                request.signal = signal.SIGINT
            return super().end_step()

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / config.name
        (copy / "checkpoints").mkdir(parents=True)
        if start:
            source = step_folder(checkpoints, start)
            step_folder(copy / "checkpoints", start).symlink_to(Path(str(source)).absolute())
        checkpoint = config.checkpoint.model_copy(update={"every": 0, "url": None, "copy_to": None})
        config = config.model_copy(update={"runs_dir": folder, "checkpoint": checkpoint})
        threads = None if config.device.threads == "auto" else config.device.threads
        with join_process_group(config.device.type, threads) as ranks:
            train_on_rank(config, ranks, request, task_factory=TaskFactory(Replay, check=check_policy_run))
        replayed = (copy / "rollouts" / recorded.name).read_bytes()
    difference = _first_difference(recorded.read_bytes(), replayed)
    print(f"Step {step}, from the checkpoint of step {start}: {difference or 'the same bytes'}.")
    return 1 if difference else 0


def _first_difference(recorded: bytes, replayed: bytes) -> str:
    """Describe the first difference of two files of answers; empty if they are equal byte by byte."""
    if recorded == replayed:
        return ""
    pairs = zip_longest(recorded.splitlines(), replayed.splitlines(), fillvalue=b"")
    for number, (before, after) in enumerate(pairs, start=1):
        if before == after:
            continue
        try:
            old, new = (dict(json.loads(line)) for line in (before, after))
        except (ValueError, TypeError):
            return f"line {number} of one of the files is not a JSON object"
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                return f"line {number} differs in {_describe_values(name, old.get(name), new.get(name))}"
        return f"line {number} has other bytes for the same values"
    return "one of the files ends within a line"


def _describe_values(name: str, before: Any, after: Any) -> str:
    """Describe the recorded and the new value of a field; for lists, the first elements that differ."""
    if isinstance(before, list) and isinstance(after, list):
        pairs = enumerate(zip_longest(before, after))
        index, (before, after) = next(item for item in pairs if item[1][0] != item[1][1])
        name = f"{name}[{index}]"
    return f"{name}: {json.dumps(before)[:200]} was recorded, and now it is {json.dumps(after)[:200]}"
