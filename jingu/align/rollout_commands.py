"""`jingu align score` and `jingu align replay`: rewards of saved answers, and a step of a run repeated."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.align.environment import Environments
from jingu.align.policy_checks import check_policy_run
from jingu.align.policy_learning import PolicyLearning
from jingu.align.prompt_set import Prompt, common_columns, encode_prompt_row, find_prompt_format, load_prompts
from jingu.align.reward_list import Rewards, check_columns
from jingu.align.rollouts import Sample, describe_answer, read_sample
from jingu.chat.chat_format import ChatFormat
from jingu.chat.messages import ConversationError, JsonObject
from jingu.chat.tokenization import encode_continuation, encode_prompt_and_answer
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
from jingu.tune.row_fields import TABLES


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
    environments = Environments(settings.environment) if settings.environment is not None else None
    if not settings.rewards or (environments is not None and environments.has_score):
        what = "saved answers are scored by rewards alone, without the class of an environment."
        raise JinguError(what, where="task.rewards", fix="List rewards, and leave out task.environment.path.")
    tools = environments.tools if environments is not None else ()
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    if answers is None:
        folder = Path(config.runs_dir) / config.name / "rollouts"
        answers = max(folder.glob("step_*.jsonl"), key=lambda file: file.stat().st_mtime, default=None)
        if answers is None:
            raise JinguError("the run has no answers yet.", where=folder, fix="Name a file of answers with --answers.")
    lines = _read_rows(answers)
    model = config.initialize.from_
    if all({"row", "text", "ids", "prompt_ids"} <= row.keys() for row in lines.values()):
        prompt_set = load_prompts(settings, tokenizer, config.batch.sequence_length, model, tools)
        prompts = _find_prompts(lines, prompt_set.prompts, answers, settings.prompts)
        samples = [_read_sample(row, number, answers) for number, row in lines.items()]
    else:
        chat_format = find_prompt_format(settings, tokenizer, model)
        pairs = [_saved_answer(row, number, answers, tokenizer, chat_format, tools) for number, row in lines.items()]
        prompts, samples = [prompt for prompt, _ in pairs], [sample for _, sample in pairs]
    rows = [describe_answer(sample, prompt) for sample, prompt in zip(samples, prompts, strict=True)]
    check_columns(settings.rewards, prompts, answers)
    rewards = Rewards(settings.rewards, common_columns([prompt.columns for prompt in prompts]), tokenizer)
    try:
        rewards.check_rows(prompts, answers)
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
            {
                **prompt.columns,
                "prompt": prompt.text if prompt.messages is None else prompt.messages,
                **{name: row[name] for name in ("completion", "completion_ids")},
                "rewards": scores,
                "reward": total,
            }
            for row, prompt, scores, total in zip(rows, prompts, parts, totals, strict=True)
        ]
        # Halves of characters, which UTF-8 lacks, are written as the escapes of JSON.
        texts = (json.dumps(row, ensure_ascii=False) for row in (_best_rows(results) if best else results))
        write_text_atomically(to, "".join(f"{text}\n".encode(errors="backslashreplace").decode() for text in texts))
    return 0


def _best_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the best answer to each prompt (the first of a tie) as a row of instruction data."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        prompt = row["prompt"]
        key = json.dumps(prompt)
        if row["reward"] is not None and (key not in best or row["reward"] > best[key]["reward"]):
            best[key] = row
    return [_tuning_row(row) for row in best.values()]


def _tuning_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer to a prompt as a row of instruction data, with what the template needs besides."""
    prompt, answer = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": answer, "reward": row["reward"]}
    names = {name for field in TABLES["row"] if field.name in ("tools", "chat_template_kwargs") for name in field.names}
    shape = {name: value for name, value in row.items() if name in names}
    completion = [{"role": "assistant", "content": answer}]
    return {"prompt": prompt, "completion": completion, "reward": row["reward"], **shape}


def _rollout_settings(config: RunConfig) -> RolloutSettings:
    if not isinstance(config.task, RolloutSettings):
        what = f"a run of the task {config.task.type} generates no answers."
        raise JinguError(what, where="task.type", fix="Name a run of the task grpo.")
    return config.task


def _read_rows(path: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a file by the number of their line."""
    rows = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            try:
                rows[number] = dict(json.loads(line))
            except (ValueError, TypeError, RecursionError) as error:
                fix = "Correct the line."
                raise JinguError(f"line {number} is not a JSON object.", where=path, fix=fix) from error
    if not rows:
        raise JinguError("it has no rows.", where=path, fix="Write one answer a line.")
    return rows


def _find_prompts(
    lines: Mapping[int, Mapping[str, Any]], prompts: Sequence[Prompt], path: Path, source: str
) -> list[Prompt]:
    """Return the prompt of each answer of a rollout: the one with the same ids, wherever its row is now.

    Raises:
        JinguError: there is none, or there are several with different columns.
    """
    by_ids: dict[tuple[int, ...], list[Prompt]] = {}
    for prompt in prompts:
        by_ids.setdefault(tuple(prompt.ids), []).append(prompt)
    matches = []
    for number, row in lines.items():
        same = by_ids.get(tuple(row["prompt_ids"]), [])
        same = [prompt for prompt in same if prompt.row == row["row"]] or same
        if not same or any(prompt.columns != same[0].columns for prompt in same):
            problem = "has several rows for" if same else "no longer has"
            raise JinguError(
                f"line {number}: {source} {problem} its prompt {str(row.get('prompt'))[:80]!r}.",
                where=path,
                fix="Score it with the prompts that it answers (task.prompts), or as rows of prompt, completion and "
                "columns.",
            )
        matches.append(same[0])
    return matches


def _read_sample(row: dict[str, Any], number: int, path: Path) -> Sample:
    """Return a line of a rollout. Raises JinguError if it is none."""
    try:
        return read_sample(row)
    except ValidationError as error:
        what = f"line {number} is no answer of a rollout ({error.errors()[0]['loc']}: {error.errors()[0]['msg']})."
        raise JinguError(what, where=path, fix="Correct the line.") from error


def _saved_answer(
    row: dict[str, Any],
    number: int,
    path: Path,
    tokenizer: Tokenizer,
    chat_format: ChatFormat | None,
    tools: tuple[JsonObject, ...],
) -> tuple[Prompt, Sample]:
    """Return the prompt and the answer in a row of a user's file, with the ids that a run would have.

    Raises:
        JinguError: it lacks a prompt or a completion.
    """
    fields = {name: value for name, value in row.items() if name not in ("completion", "completion_ids", "prompt_ids")}
    completion = row.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        completion = completion[0].get("content")
    try:
        prompt = replace(encode_prompt_row(fields, tokenizer, chat_format, tools), line=number)
        if not isinstance(completion, str):
            raise ConversationError("field completion: expected a text, or a list with the message of the assistant")
    except ConversationError as error:
        raise JinguError(f"line {number}: {error}.", where=path, fix="Correct the row.") from error
    ids = row.get("completion_ids")
    if ids is None and prompt.messages is None:
        prompt_ids, ids = encode_prompt_and_answer(tokenizer, prompt.text, completion)
        prompt = replace(prompt, ids=(*tokenizer.prompt_prefix_ids, *prompt_ids))
        ids = ids + _end_of_answer(row, prompt, tokenizer, chat_format)
    elif ids is None:
        ids = encode_continuation(tokenizer, completion) + _end_of_answer(row, prompt, tokenizer, chat_format)
    reason = str(row.get("finish_reason", "end"))
    return prompt, Sample(prompt.text, 0, 0, prompt.ids, tuple(ids), (0.0,) * len(ids), completion, reason)


def _end_of_answer(
    row: Mapping[str, Any], prompt: Prompt, tokenizer: Tokenizer, chat_format: ChatFormat | None
) -> list[int]:
    """Return the ids that end an answer in a run; none for an answer that was cut off."""
    if row.get("finish_reason") == "length":
        return []
    if prompt.messages is None or chat_format is None:
        return [tokenizer.eos_token_id]
    return [*chat_format.eos_token_ids] or tokenizer.encode("".join(chat_format.stop))


def replay(run: Path, step: int) -> int:
    """Repeat a step of a run from the newest earlier checkpoint, and compare the new file of answers with the old one.

    Returns:
        0 if both files are equal byte by byte, else 1, with the first difference on standard output.

    Raises:
        JinguError: the run has no such step.
    """
    config_file = run / "config.yaml"
    recorded_file = run / "rollouts" / f"step_{step}.jsonl"
    if not config_file.is_file() or not recorded_file.is_file():
        raise JinguError(f"the run has no answers of step {step}.", where=run, fix="Name a step in its rollouts/.")
    config = load_stored_config(config_file)
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
        replayed_bytes = (copy / "rollouts" / recorded_file.name).read_bytes()
    difference = _first_difference(recorded_file.read_bytes(), replayed_bytes)
    print(f"Step {step}, from the checkpoint of step {start}: {difference or 'the same bytes'}.")
    return 1 if difference else 0


def _first_difference(first: bytes, second: bytes) -> str:
    """Describe the first difference of two files of answers; empty if they are equal byte by byte."""
    if first == second:
        return ""
    pairs = zip_longest(first.splitlines(), second.splitlines(), fillvalue=b"")
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
