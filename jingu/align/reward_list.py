"""Rewards of answers: a weighted list of functions, verifiers, models and servers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

import torch
from torch import Tensor

from jingu.align.code_reward import SandboxScorer, weak_fraction
from jingu.align.json_client import JsonClient, check_url, parse_reply
from jingu.align.prompt_set import ANSWER_NAMES, Prompt, describe_messages
from jingu.align.scorer import RewardContext, RewardScorer, Values
from jingu.align.verifiers import VERIFIERS, Answer, check_expected, find_verifier, verify
from jingu.align.worker import START_SECONDS, Worker, total_seconds
from jingu.config.sections.rewards import (
    JudgeReward,
    ModelReward,
    PythonReward,
    PythonTestsReward,
    RegexReward,
    Reward,
    ServerBase,
    VerifierBase,
)
from jingu.errors import JinguError, pluralize
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.model.decoder import Decoder
from jingu.runtime.log import log_warning
from jingu.tables import import_name
from jingu.text.tokenizer import Tokenizer

T = TypeVar("T")
# Larger rewards are mistakes, and their sums and squares would not be finite.
_MAX_REWARD = 1e100
# A grade that stands alone, and one in a line of its own: 7, 7/10, "Score: 7", "**Grade: 7 / 10**".
_GRADE = r"([-+]?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*(\d+(?:\.\d+)?))?\s*\.?"
_ALONE = re.compile(rf"\W*?(?:(?:score|grade|rating)\W*?)?{_GRADE}[\s*_`]*", re.IGNORECASE)
_LINE = re.compile(
    rf"^[\s*_#`]*(?:(?:final|overall|total)\s+)?(?:score|grade|rating)[\s*_`]*[:=][\s*_`]*{_GRADE}[\s*_`]*$",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class NamedReward:
    """A reward under its name."""

    name: str
    settings: Reward
    scorer: RewardScorer


class Rewards:
    """All rewards of a run.

    Args:
        settings: the settings of each reward.
        columns: names of the columns that the rows have.
        tokenizer: the tokenizer of the model that answers.

    Raises:
        JinguError: a reward cannot be computed: its function cannot be imported or takes other arguments, a column is
            missing, or a package is not installed.
    """

    def __init__(
        self,
        settings: Sequence[Reward],
        columns: Sequence[str],
        tokenizer: Tokenizer,
    ) -> None:
        self._rewards: list[NamedReward] = []
        names = _names(settings)
        self._worker = Worker()
        for number, (name, reward) in enumerate(zip(names, settings, strict=True)):
            where = f"task.rewards[{number}]"
            _check_columns(reward, columns, where)
            context = RewardContext(name, where, columns, tokenizer, self._worker)
            self._rewards.append(NamedReward(name, reward, _build_scorer(reward, context)))

    @property
    def names(self) -> list[str]:
        """Names of all rewards, in their order."""
        return [reward.name for reward in self._rewards]

    @property
    def audit_names(self) -> list[str]:
        """Names of the rewards that are only measured."""
        return [reward.name for reward in self._rewards if reward.settings.audit]

    @property
    def trained_names(self) -> list[str]:
        """Names of the rewards that are trained on."""
        return [reward.name for reward in self._rewards if not reward.settings.audit]

    def check_rows(self, prompts: Sequence[Prompt], path: Path | str) -> None:
        """Check the expected values of all rows.

        Args:
            path: the file of the rows, for error messages.

        Raises:
            JinguError: a reward cannot compare with the value in a row.
        """
        for name, settings in ((reward.name, reward.settings) for reward in self._rewards):
            if isinstance(settings, VerifierBase) and settings.expected_column is not None:
                values = [prompt.columns[settings.column] for prompt in prompts]
                problem = next(self._problems(name, settings, values), None)
                if problem is not None:
                    index, reason = problem
                    raise JinguError(
                        f"line {prompts[index].line}, column {settings.column}: {reason}.",
                        where=path,
                        fix=f"Correct the row, or leave it out: the reward {name} ({settings.type}) compares answers "
                        "with this column.",
                    )

    def _problems(self, name: str, settings: VerifierBase, values: Sequence[Any]) -> Iterator[tuple[int, str]]:
        """Yield the index of each value that a verifier cannot compare with, and the reason."""
        if not find_verifier(settings).is_slow:
            for index, value in enumerate(values):
                try:
                    check_expected(settings, value)
                except ValueError as error:
                    yield index, str(error)
            return
        # Reading some values takes long, and many rows have the same one.
        keys = [json.dumps(value) for value in values]
        unique = dict(zip(keys, values, strict=True))
        problems = dict(zip(unique, self._worker.check(name, settings, [*unique.values()]), strict=True))
        for index, key in enumerate(keys):
            if problems[key]:
                yield index, problems[key]

    def score(self, answers: Sequence[Answer]) -> list[dict[str, float | None]]:
        """Return the values of each answer by reward.

        Raises:
            JinguError: a reward with `on_error: stop` failed, or did not return a number for each answer.
        """
        parts = {reward.name: _score(reward, answers) for reward in self._rewards}
        return [{name: values[index] for name, values in parts.items()} for index in range(len(answers))]

    def late(self, count: int) -> list[list[str]]:
        """Return the names of the rewards whose timeout an answer exceeded, for each of the last `count` answers."""
        late = {reward.name: {*reward.scorer.late} for reward in self._rewards}
        return [[name for name, indices in late.items() if index in indices] for index in range(count)]

    def total(self, parts: Mapping[str, float | None]) -> float | None:
        """Return the weighted sum of all rewards except audits; None if a required one of these, or every one, is None.

        Raises:
            JinguError: the sum is too large.
        """
        trained_rewards = [reward for reward in self._rewards if not reward.settings.audit]
        if any(parts[reward.name] is None for reward in trained_rewards if reward.settings.required):
            return None
        values = [
            reward.settings.weight * value for reward in trained_rewards if (value := parts[reward.name]) is not None
        ]
        # Not fsum, which raises an exception if a partial sum overflows.
        total = sum(values)
        if not abs(total) <= _MAX_REWARD:
            what = f"the weighted sum of the rewards of an answer, {total:g}, is too large."
            raise JinguError(what, where="task.rewards", fix="Lower the weights, or the values that a reward returns.")
        return math.fsum(values) if values else None

    def close(self) -> None:
        """End all workers."""
        self._worker.close()
        for reward in self._rewards:
            reward.scorer.close()


def weak_fractions(settings: Sequence[Reward], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metric `weak_tests/NAME` of each reward that runs tests: the share of answers that can deceive them.

    Args:
        rows: the columns of each answer's row.
    """
    return {
        f"weak_tests/{name}": weak_fraction(reward, rows)
        for name, reward in zip(_names(settings), settings, strict=True)
        if isinstance(reward, PythonTestsReward)
    }


def check_columns(settings: Sequence[Reward], prompts: Sequence[Prompt], path: Path | str) -> None:
    """Raise JinguError if only some rows have a column that a verifier compares with.

    Args:
        path: the file of the rows.
    """
    for reward in settings:
        column = reward.expected_column
        without = [prompt.line for prompt in prompts if column not in prompt.columns]
        if column is not None and 0 < len(without) < len(prompts):
            what = f"line {without[0]} has no column {column}, which the reward {reward.type} compares with."
            raise JinguError(what, where=path, fix="Add it, or leave the row out.")


def _names(settings: Sequence[Reward]) -> list[str]:
    names: list[str] = []
    for reward in settings:
        default = reward.function.rpartition(":")[2] if isinstance(reward, PythonReward) else reward.type
        name = reward.name or default
        if name == "environment":
            what = "the name environment is reserved for the score of an environment."
            raise JinguError(what, where="task.rewards", fix="Set another name of the reward.")
        if name in names:
            raise JinguError(f"two rewards have the name {name}.", where="task.rewards", fix="Set name of one.")
        names.append(name)
    return names


def _check_columns(reward: Reward, columns: Sequence[str], where: str) -> None:
    for name in sorted({*columns, *([reward.column] if isinstance(reward, VerifierBase) else [])} & ANSWER_NAMES):
        raise JinguError(
            f"the name {name} is that of the prompt or of the answer itself, and cannot be a column.",
            where=f"{where}.column" if isinstance(reward, VerifierBase) else where,
            fix="Give the column another name in the rows.",
        )
    column = reward.expected_column
    if isinstance(reward, RegexReward) and reward.pattern is not None:
        try:
            re.compile(reward.pattern)
        except re.error as error:
            what = f"it is not a regular expression ({error})."
            raise JinguError(what, where=f"{where}.pattern", fix="Correct it.") from error
    if column is not None and column not in columns:
        raise JinguError(
            f"the rows have no column {column}, which the reward {reward.type} compares with.",
            where=f"{where}.column",
            fix=f"Their columns are {', '.join(columns) or 'none'} beside the prompt.",
        )
    package = find_verifier(reward).package if _has_verifier(reward) else None
    if package is not None and find_spec(package) is None:
        name = package.replace("_", "-")
        raise JinguError(f"it needs the {name} package.", where=where, fix=f"Install it: `pip install {name}`.")


def _score(reward: NamedReward, answers: Sequence[Answer]) -> Values:
    """Return the values of answers under a reward; None for all of them if it failed and `on_error` is not stop."""
    try:
        return _check_values(reward, reward.scorer.score(answers), answers)
    except JinguError as error:
        if reward.settings.on_error == "stop":
            raise
        log_warning(f"{reward.name} scores no answer of this step: {error}")
        return [None] * len(answers)


def _check_values(reward: NamedReward, values: Values, answers: Sequence[Answer]) -> Values:
    where = f"the reward {reward.name}"
    if len(values) != len(answers):
        raise JinguError(
            f"it returned {pluralize(len(values), 'value')} for {pluralize(len(answers), 'answer')}.",
            where=where,
            fix="Return one for each, None for what cannot be scored.",
        )
    checked_values: Values = []
    for value, answer in zip(values, answers, strict=True):
        if value is None or abs(value) <= _MAX_REWARD:
            checked_values.append(value)
            continue
        what = f"it returned {value:g} for an answer to the prompt {str(answer['prompt'])[:80]!r}."
        if reward.settings.on_error == "stop":
            raise JinguError(
                what, where=where, fix=f"Return a number up to {_MAX_REWARD:g}, or None for what cannot be scored."
            )
        log_warning(f"{where}: {what} The answer is not scored.")
        checked_values.append(None)
    return checked_values


class FunctionScorer(RewardScorer):
    """A Python function, in a process of its own."""

    def __init__(self, settings: PythonReward, context: RewardContext) -> None:
        self._name = context.name
        self._settings = settings
        self._columns = list(context.columns)
        self._where = context.where
        self._worker = Worker()
        # Import it now rather than after the first answers.
        self._ask([], START_SECONDS)

    def score(self, answers: Sequence[Answer]) -> Values:
        return self._ask(answers, self._settings.timeout)

    def _ask(self, answers: Sequence[Answer], timeout: float) -> Values:
        try:
            return list(self._worker.ask(self._name, self._settings, self._columns, answers, timeout)["scores"])
        except TimeoutError:
            raise JinguError(
                f"the reward {self._name} ({self._settings.function}) did not return within {timeout:g} seconds.",
                where=self._where,
                fix="Make it faster, or raise its timeout.",
            ) from None

    def close(self) -> None:
        self._worker.close()


class VerifierScorer(RewardScorer):
    """A verifier. Those that can hang run in processes that they share; an answer that takes too long scores 0."""

    def __init__(self, settings: Reward, context: RewardContext) -> None:
        self._name = context.name
        self._settings = settings
        self._worker = context.worker

    def score(self, answers: Sequence[Answer]) -> Values:
        settings = self._settings
        if not find_verifier(settings).is_slow:
            return [verify(settings, answer) for answer in answers]
        names = ["completion", *([settings.column] if isinstance(settings, VerifierBase) else [])]
        rows = [{name: answer.get(name) for name in names} for answer in answers]
        reply = self._worker.ask(self._name, settings, (), rows, total_seconds(settings.timeout, len(rows)))
        self.late = reply.get("late", ())
        if self.late:
            took = f"scoring {pluralize(len(self.late), 'answer')} took longer than {settings.timeout:g} seconds"
            log_warning(f"The reward {self._name}: {took}; the value is 0.")
        return list(reply["scores"])


class ModelScorer(RewardScorer):
    """A reward model, in this process."""

    def __init__(self, settings: ModelReward, context: RewardContext) -> None:
        self._checkpoint = open_model(Path(settings.model))
        self._model: Decoder | None = None
        where = f"{context.where}.model"
        if not self._checkpoint.spec.score_head:
            what = f"{settings.model} has no score head."
            raise JinguError(what, where=where, fix="Name a run of the task reward, or a model for classification.")
        folder = self._checkpoint.tokenizer_folder
        if folder is not None and Tokenizer.load(folder).vocab() != context.tokenizer.vocab():
            what = "the reward model has another vocabulary than the model that answers."
            raise JinguError(what, where=where, fix="Take one with the same tokenizer.")

    @torch.inference_mode()
    def score(self, answers: Sequence[Answer]) -> Values:
        if self._model is None:
            self._model = load_model(self._checkpoint, torch.float32)

        def head(hidden_BTD: Tensor, weight_1D: Tensor) -> Tensor:
            return hidden_BTD[:, -1].float() @ weight_1D[0].float()

        values: Values = []
        for answer in answers:
            tokens_BT = torch.tensor([[*answer["prompt_ids"], *answer["completion_ids"]]])
            values += self._model(tokens_BT, loss=head).tolist()
        return values


class ServerScorer(RewardScorer):
    """A server that scores answers."""

    def __init__(self, settings: ServerBase, context: RewardContext) -> None:
        self._settings = settings
        self._columns = context.columns
        self._where = where = context.where
        self._client = JsonClient(where, settings.timeout, settings.retries, settings.api_key_file)
        # Fail now if the URL is invalid or the API key cannot be read.
        check_url(settings.url, f"{where}.url")
        self._client.headers()

    def score(self, answers: Sequence[Answer]) -> Values:
        lists = {f"{name}s": [answer[name] for answer in answers] for name in ("prompt", "completion")}
        lists |= {name: [answer.get(name) for answer in answers] for name in ("messages", *self._columns)}
        return self._post(self._settings.url, lists, lambda reply: _read_scores(reply, len(answers)))

    def _post(self, url: str, body: object, read: Callable[[Any], T]) -> T:
        """Send a JSON request and return the reply as parsed by `read`."""
        return self._client.post(url, body, lambda content: read(parse_reply(content)), "scores")


class JudgeScorer(ServerScorer):
    """A language model that grades answers, behind OpenAI's protocol."""

    def __init__(self, settings: JudgeReward, context: RewardContext) -> None:
        super().__init__(settings, context)
        self._judge = settings
        columns, where = context.columns, context.where
        try:
            unknown = _template_columns(settings.template) - {"prompt", "completion", "messages", *columns}
        except ValueError as error:
            what = f"it has a brace that does not belong to a field ({error})."
            raise JinguError(what, where=f"{where}.template", fix="Write {{ and }} for braces.") from error
        if unknown:
            fields = ", ".join(["prompt", "completion", "messages", *columns])
            raise JinguError(
                f"it has a field that the rows lack: {{{min(unknown)}}}.",
                where=f"{where}.template",
                fix=f"The fields are {fields}. Write {{{{ and }}}} for braces.",
            )

    def score(self, answers: Sequence[Answer]) -> Values:
        with ThreadPoolExecutor(self._judge.concurrency) as executor:
            return list(executor.map(self._grade, answers))

    def _grade(self, answer: Answer) -> float | None:
        try:
            question = self._judge.template.format_map(
                {**answer, "messages": describe_messages(answer.get("messages") or ())}
            )
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise JinguError(
                f"it does not fit the row with the prompt {str(answer['prompt'])[:80]!r} "
                f"({type(error).__name__}: {error}).",
                where=f"{self._where}.template",
                fix="Correct the template, or the row.",
            ) from error
        messages = [{"role": "user", "content": question}]
        body = {"model": self._judge.model, "messages": messages, "temperature": 0}

        def read(reply: Any) -> float | None:
            content = reply["choices"][0]["message"].get("content")
            # A refusal, or reasoning alone, has no text.
            return read_grade(content, self._judge) if isinstance(content, str) else None

        return self._post(f"{self._judge.url.rstrip('/')}/chat/completions", body, read)


# How rewards that are no verifiers are computed, by the types of their settings.
SCORERS: dict[str, Callable[[Any, RewardContext], RewardScorer]] = {
    "model": ModelScorer,
    "python": FunctionScorer,
    "python_tests": SandboxScorer,
    "http": ServerScorer,
    "judge": JudgeScorer,
}


def _has_verifier(reward: Reward) -> bool:
    return reward.type in VERIFIERS or (reward.type not in SCORERS and isinstance(reward, VerifierBase))


def _build_scorer(reward: Reward, context: RewardContext) -> RewardScorer:
    """Return what computes a reward: jingu's, or that of a plug-in."""
    if reward.type in SCORERS:
        return SCORERS[reward.type](reward, context)
    if _has_verifier(reward):
        return VerifierScorer(reward, context)
    assert reward.IMPLEMENTATION is not None
    build: Callable[[Reward, RewardContext], RewardScorer] = import_name(reward.IMPLEMENTATION)
    return build(reward, context)


def _template_columns(template: str) -> set[str]:
    """Return the names of the columns in a template: `meta` for the field {meta[answer]:{width}}, and `width`.

    Raises:
        ValueError: a brace does not belong to a field.
    """
    names = set()
    for _, field, format_spec, _ in Formatter().parse(template):
        if field is not None:
            names |= {re.split(r"[.[]", field)[0], *_template_columns(format_spec or "")}
    return names


def read_grade(reply: str, settings: JudgeReward) -> float | None:
    """Return the grade in a judge's reply, which leaves the answer unscored (None) unless its form is clear: one number
    within the limits, alone or in a line such as "Score: 7"; or N/M, where M is the highest grade.
    """
    text = reply.rpartition("</think>")[2].strip()
    match = _ALONE.fullmatch(text)
    grades = [match.groups()] if match is not None else [line.groups() for line in _LINE.finditer(text)]
    values = {float(grade) for grade, _ in grades}
    is_other_scale = any(limit is not None and float(limit) != settings.max_grade for _, limit in grades)
    if len(values) != 1 or is_other_scale:
        return None
    (value,) = values
    return value if settings.min_grade <= value <= settings.max_grade else None


def _read_scores(reply: Any, count: int) -> Values:
    """Return the scores in a server's reply. Raises ValueError if they are no list of numbers, one for each answer."""
    scores = reply["scores"]
    if not isinstance(scores, list) or len(scores) != count:
        raise ValueError(f"expected a list of {pluralize(count, 'score')}, not {str(scores)[:80]}")
    for score in scores:
        if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
            raise ValueError(f"expected numbers as scores, not {str(score)[:80]}")
    return [None if score is None else float(score) for score in scores]
