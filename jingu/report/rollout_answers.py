"""Read from the rollouts of a run how its answers to the same prompts change over the steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from jingu.report.record import get_number, parse_line
from jingu.report.template import cut_text, spread

# Maximum numbers: rollouts to read (spread over the run), prompts on the page, and steps per prompt.
MAX_ROLLOUTS = 24
MAX_PROMPTS = 6
MAX_STEPS = 4


@dataclass(frozen=True)
class ShownAnswer:
    """The first answer to a prompt in a step.

    Attributes:
        step: step of the rollout.
        text: text of the answer.
        reward: reward of this answer; NaN if it has none.
        mean: mean reward of all answers to the prompt in this step.
        is_cut: whether the answer ended at the maximum number of tokens.
    """

    step: int
    text: str
    reward: float
    mean: float
    is_cut: bool


def read_answers(folder: Path) -> list[tuple[str, list[ShownAnswer]]]:
    """Return the prompts that occur most often in a run, at least in two steps, each with an answer from some steps."""
    files = {}
    for file in folder.glob("rollouts/step_*.jsonl"):
        number = file.stem.removeprefix("step_")
        if number.isdecimal():
            files[int(number)] = file
    # By row of the prompt: its text, and its answers in the order of steps.
    prompts: dict[int, tuple[str, list[ShownAnswer]]] = {}
    for step in spread(sorted(files), MAX_ROLLOUTS):
        for row, (prompt, answer) in _read_step(step, files[step], files[step].stat().st_mtime_ns).items():
            prompts.setdefault(row, (prompt, []))[1].append(answer)
    often = sorted(prompts.values(), key=lambda item: -len(item[1]))[:MAX_PROMPTS]
    return [(prompt, spread(answers, MAX_STEPS)) for prompt, answers in often if len(answers) > 1]


@lru_cache(maxsize=2 * MAX_ROLLOUTS)
def _read_step(step: int, path: Path, mtime: int) -> dict[int, tuple[str, ShownAnswer]]:
    """Return the prompts of a step by row, each with its first answer.

    Args:
        path: file of the rollout.
        mtime: modification time of the file in nanoseconds, so that the cache reads a file again if it has changed.
    """
    answers: dict[int, tuple[str, ShownAnswer]] = {}
    rewards: dict[int, list[float]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            values = parse_line(line) or {}
            row = values.get("row")
            if not isinstance(row, int):
                continue
            reward = get_number(values, "reward")
            rewards.setdefault(row, []).append(reward)
            prompt = cut_text(str(values.get("prompt", f"row {row:,}")))
            is_cut = values.get("finish_reason") == "length"
            answer = ShownAnswer(step, cut_text(str(values.get("text", ""))), reward, math.nan, is_cut)
            answers.setdefault(row, (prompt, answer))
    for row, (prompt, answer) in answers.items():
        finite = [reward for reward in rewards[row] if math.isfinite(reward)]
        answers[row] = (prompt, replace(answer, mean=fmean(finite) if finite else math.nan))
    return answers
