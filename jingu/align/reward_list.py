"""Rewards of answers: a weighted list of functions, verifiers, models and servers."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from jingu.align.code_reward import SandboxScorer, weak_fraction
from jingu.align.json_client import JsonClient, check_url, parse_reply
from jingu.align.prompt_set import ANSWER_NAMES, encode_text_prompt
from jingu.align.verifiers import REQUIRED_PACKAGES, SLOW_VERIFIERS, VERIFIERS, Answer, last_number
from jingu.config.sections.rewards import (
    HttpReward,
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
from jingu.text.tokenizer import Tokenizer

Values = list[float | None]
T = TypeVar("T")
# Seconds that a worker process may take to start and to import a function.
START_SECONDS = 120.0


class RewardScorer(Protocol):
    """Computes one reward of many answers."""

    def score(self, answers: Sequence[Answer]) -> Values:
        """Return the value of each answer, None if it cannot be scored. Raises JinguError if the reward fails."""

    def close(self) -> None:
        """Stop the processes that it uses."""


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
        verifiers = Worker()
        for number, (name, reward) in enumerate(zip(names, settings, strict=True)):
            where = f"task.rewards[{number}]"
            _check_columns(reward, columns, where)
            if isinstance(reward, ModelReward):
                scorer: RewardScorer = ModelScorer(reward, tokenizer, where)
            elif isinstance(reward, PythonTestsReward):
                scorer = SandboxScorer(reward, where)
            elif isinstance(reward, JudgeReward):
                scorer = JudgeScorer(reward, columns, where)
            elif isinstance(reward, HttpReward):
                scorer = ServerScorer(reward, columns, where)
            elif isinstance(reward, PythonReward):
                scorer = FunctionScorer(reward, columns, where)
            else:
                scorer = VerifierScorer(reward, verifiers)
            self._rewards.append(NamedReward(name, reward, scorer))

    @property
    def names(self) -> list[str]:
        """Names of all rewards, in their order."""
        return [reward.name for reward in self._rewards]

    @property
    def audit_names(self) -> list[str]:
        """Names of the rewards that are only measured."""
        return [reward.name for reward in self._rewards if reward.settings.audit]

    def score(self, answers: Sequence[Answer]) -> list[dict[str, float | None]]:
        """Return the values of each answer by reward.

        Raises:
            JinguError: a reward with `on_error: stop` failed, or did not return a number for each answer.
        """
        parts = {reward.name: _score(reward, answers) for reward in self._rewards}
        return [{name: values[index] for name, values in parts.items()} for index in range(len(answers))]

    def total(self, parts: Mapping[str, float | None]) -> float | None:
        """Return the weighted sum of all rewards except audits; None if all of these are None."""
        values = [
            reward.settings.weight * value
            for reward in self._rewards
            if not reward.settings.audit and (value := parts[reward.name]) is not None
        ]
        return math.fsum(values) if values else None

    def close(self) -> None:
        """End all workers."""
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
    column = reward.column if isinstance(reward, VerifierBase) else None
    if isinstance(reward, RegexReward) and reward.pattern is not None:
        column = None
        try:
            re.compile(reward.pattern)
        except re.error as error:
            what = f"it is not a regular expression ({error})."
            raise JinguError(what, where=f"{where}.pattern", fix="Correct it.") from error
    if column in ANSWER_NAMES:
        raise JinguError(
            f"the name {column} is that of the prompt or of the answer itself, which hides a column of this name.",
            where=f"{where}.column",
            fix="Give the column of the expected answers another name in the rows, and set it here.",
        )
    if column is not None and column not in columns:
        raise JinguError(
            f"the rows have no column {column}, which the reward {reward.type} compares with.",
            where=f"{where}.column",
            fix=f"Their columns are {', '.join(columns) or 'none'} beside the prompt.",
        )
    package = REQUIRED_PACKAGES.get(reward.type)
    if package is not None and find_spec(package) is None:
        name = package.replace("_", "-")
        raise JinguError(f"it needs the {name} package.", where=where, fix=f"Install it: `pip install {name}`.")


def _score(reward: NamedReward, answers: Sequence[Answer]) -> Values:
    """Return the values of answers under a reward; None for all of them if it failed and `on_error` is not stop."""
    try:
        return _checked(reward, reward.scorer.score(answers), answers)
    except JinguError as error:
        if reward.settings.on_error == "stop":
            raise
        log_warning(f"{reward.name} scores no answer of this step: {error}")
        return [None] * len(answers)


def _checked(reward: NamedReward, values: Values, answers: Sequence[Answer]) -> Values:
    where = f"the reward {reward.name}"
    if len(values) != len(answers):
        raise JinguError(
            f"it returned {pluralize(len(values), 'value')} for {pluralize(len(answers), 'answer')}.",
            where=where,
            fix="Return one for each, None for what cannot be scored.",
        )
    checked: Values = []
    for value, answer in zip(values, answers, strict=True):
        if value is None or math.isfinite(value):
            checked.append(value)
            continue
        what = f"it returned {value} for an answer to the prompt {str(answer['prompt'])[:80]!r}."
        if reward.settings.on_error == "stop":
            raise JinguError(what, where=where, fix="Return a finite number, or None for what cannot be scored.")
        log_warning(f"{where}: {what} The answer is not scored.")
        checked.append(None)
    return checked


class Worker:
    """A process that computes rewards. It starts with the first request.

    It ends with `close`, or else when this object is garbage-collected.

    Args:
        module: the Python module to run, which replies to each line of JSON with another one.
    """

    def __init__(self, module: str = "jingu.align.reward_worker") -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None
        self._ready: set[str] = set()  # rewards that the process has imported
        self._end: Callable[[], object] = lambda: None

    def ask(self, settings: Reward, columns: Sequence[str], answers: Sequence[Answer], timeout: float) -> Values:
        """Return the values of answers. If the process ends, by a timeout or by itself, the next call starts another.

        Raises:
            TimeoutError: the reward took longer than `timeout` seconds.
            JinguError: the reward failed.
        """
        key = settings.model_dump_json()
        if answers and key not in self._ready:
            # The timeout is for scoring alone: start the process and import the reward before it begins.
            self.ask(settings, columns, [], START_SECONDS)
            self._ready.add(key)
        request = {"settings": settings.model_dump(mode="json"), "columns": columns, "answers": answers}
        reply = self.exchange(request, timeout)
        if self._process is not None and self._process.poll() is not None:
            # Unlike other requests to a process, those for rewards do not depend on earlier ones.
            self.close()
        if "error" in reply:
            raise JinguError(f"{reply['error']}.", where=f"the reward {settings.type}", fix="Correct the reward.")
        return list(reply["scores"])

    def exchange(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and return the reply. After `timeout` seconds, kill the process and raise TimeoutError."""
        process = self._start()
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _kill(process)

        timer = threading.Timer(timeout, end)
        timer.daemon = True
        timer.start()
        reply = _exchange(process, json.dumps(request) + "\n")
        timer.cancel()
        if is_late.is_set():
            self.close()
            raise TimeoutError
        return reply

    def _start(self) -> subprocess.Popen[str]:
        """Return the process, after starting it if necessary."""
        if self._process is None:
            command = [sys.executable, "-m", self._module]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._end = weakref.finalize(self, _end_process, self._process)
        return self._process

    def close(self) -> None:
        """Kill the process."""
        self._process = None
        self._ready.clear()
        self._end()


# The following functions are finalizers or run in threads: a reference to the worker in one of them would keep the
# worker from ever being garbage-collected.


def _exchange(process: subprocess.Popen[str], line: str) -> dict[str, Any]:
    """Send a line to a worker's process and return its reply."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
        return dict(json.loads(process.stdout.readline()))
    except (OSError, ValueError):
        return {"error": f"its process ended with exit code {process.wait()}"}


def _end_process(process: subprocess.Popen[str]) -> None:
    """Kill a worker's process and its children, and wait for it."""
    _kill(process)
    with suppress(OSError), process:
        process.wait()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class FunctionScorer:
    """A Python function, in a process of its own."""

    def __init__(self, settings: PythonReward, columns: Sequence[str], where: str) -> None:
        self._settings = settings
        self._columns = list(columns)
        self._where = where
        self._worker = Worker()
        # Import it now rather than after the first answers.
        self._ask([], START_SECONDS)

    def score(self, answers: Sequence[Answer]) -> Values:
        return self._ask(answers, self._settings.timeout)

    def _ask(self, answers: Sequence[Answer], timeout: float) -> Values:
        try:
            return self._worker.ask(self._settings, self._columns, answers, timeout)
        except TimeoutError:
            raise JinguError(
                f"{self._settings.function} did not return within {timeout:g} seconds.",
                where=self._where,
                fix="Make it faster, or raise its timeout.",
            ) from None

    def close(self) -> None:
        self._worker.close()


class VerifierScorer:
    """A verifier. Those that can hang run in a process that they share; an answer that takes too long scores 0."""

    def __init__(self, settings: Reward, worker: Worker) -> None:
        self._settings = settings
        self._worker = worker

    def score(self, answers: Sequence[Answer]) -> Values:
        settings = self._settings
        if settings.type not in SLOW_VERIFIERS:
            return [float(VERIFIERS[settings.type](settings, answer)) for answer in answers]
        values: Values = []
        for answer in answers:
            try:
                values += self._worker.ask(settings, (), [answer], settings.timeout)
            except TimeoutError:
                name, limit = settings.name or settings.type, f"{settings.timeout:g} seconds"
                log_warning(f"The reward {name}: scoring an answer took longer than {limit}, so it scores 0.")
                values.append(0.0)
        return values

    def close(self) -> None:
        self._worker.close()


class ModelScorer:
    """A reward model, in this process."""

    def __init__(self, settings: ModelReward, tokenizer: Tokenizer, where: str) -> None:
        self._stored = open_model(Path(settings.model))
        self._tokenizer = tokenizer
        self._model: Decoder | None = None
        where = f"{where}.model"
        if not self._stored.spec.score_head:
            what = f"{settings.model} has no score head."
            raise JinguError(what, where=where, fix="Name a run of the task reward, or a model for classification.")
        folder = self._stored.tokenizer_folder
        if folder is not None and Tokenizer.load(folder).vocab() != tokenizer.vocab():
            what = "the reward model has another vocabulary than the model that answers."
            raise JinguError(what, where=where, fix="Take one with the same tokenizer.")

    @torch.inference_mode()
    def score(self, answers: Sequence[Answer]) -> Values:
        if self._model is None:
            self._model = load_model(self._stored, torch.float32)

        def head(hidden_BTD: Tensor, weight_1D: Tensor) -> Tensor:
            return hidden_BTD[:, -1].float() @ weight_1D[0].float()

        values: Values = []
        for answer in answers:
            prompt_ids = answer.get("prompt_ids") or encode_text_prompt(self._tokenizer, answer["prompt"])
            tokens_BT = torch.tensor([[*prompt_ids, *answer["completion_ids"]]])
            values += self._model(tokens_BT, loss=head).tolist()
        return values

    def close(self) -> None:
        """Nothing runs."""


class ServerScorer:
    """A server that scores answers."""

    def __init__(self, settings: ServerBase, columns: Sequence[str], where: str) -> None:
        self._settings = settings
        self._columns = columns
        self._where = where
        self._client = JsonClient(where, settings.timeout, settings.retries, settings.api_key_file)
        # Fail now if the URL is invalid or the API key cannot be read.
        check_url(settings.url, f"{where}.url")
        self._client.headers()

    def score(self, answers: Sequence[Answer]) -> Values:
        lists = {f"{name}s": [answer[name] for answer in answers] for name in ("prompt", "completion")}
        lists |= {name: [answer.get(name) for answer in answers] for name in self._columns}
        return self._post(self._settings.url, lists, lambda reply: [_number(value) for value in reply["scores"]])

    def close(self) -> None:
        """Nothing runs."""

    def _post(self, url: str, body: object, read: Callable[[Any], T]) -> T:
        """Send a JSON request and return the reply as parsed by `read`."""
        return self._client.post(url, body, lambda content: read(parse_reply(content)), "scores")


class JudgeScorer(ServerScorer):
    """A language model that grades answers, behind OpenAI's protocol."""

    def __init__(self, settings: JudgeReward, columns: Sequence[str], where: str) -> None:
        super().__init__(settings, columns, where)
        self._judge = settings
        try:
            unknown = _template_columns(settings.template) - {"prompt", "completion", *columns}
        except ValueError as error:
            what = f"it has a brace that does not belong to a field ({error})."
            raise JinguError(what, where=f"{where}.template", fix="Write {{ and }} for braces.") from error
        if unknown:
            raise JinguError(
                f"it has a field that the rows lack: {{{min(unknown)}}}.",
                where=f"{where}.template",
                fix=f"The fields are {', '.join(['prompt', 'completion', *columns])}. Write {{{{ and }}}} for braces.",
            )

    def score(self, answers: Sequence[Answer]) -> Values:
        with ThreadPoolExecutor(self._judge.concurrency) as executor:
            return list(executor.map(self._grade, answers))

    def _grade(self, answer: Answer) -> float | None:
        try:
            question = self._judge.template.format_map(answer)
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
            return _number(last_number(reply["choices"][0]["message"]["content"]))

        # A reply without a number leaves the answer unscored.
        return self._post(f"{self._judge.url.rstrip('/')}/chat/completions", body, read)


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


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
