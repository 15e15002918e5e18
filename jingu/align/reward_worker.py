"""The process that computes rewards: user code in it can neither hang nor kill the run.

It reads and writes one JSON object per line. A request has the settings of a reward, the names of the columns, and
answers, and its reply is {"scores": [...], "late": [...]}, with the indices of answers that took too long; or it has
expected values to check, and its reply is {"problems": [...]}; or it calls a method of environments or their tools, and
its reply is {"values": [...]}. The reply to a failed request is {"error": "..."}.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jingu.runtime.json_lines import answer_requests

# Every rank starts such a process, so it must start fast: modules that not every reward needs are imported where they
# are used.
if TYPE_CHECKING:
    from jingu.align.verifiers import Answer
    from jingu.chat.messages import JsonObject
    from jingu.config.sections.rewards import Reward

    Score = Callable[[Sequence[Answer]], Any]

ARGUMENTS = ("prompts", "completions", "completion_ids", "completion_mask", "messages")


class RewardFunctionError(Exception):
    """A reward function, environment or tool cannot be used; the message says why."""


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at `module:function` or `file.py:function`, or the environment of a plug-in of this name."""
    if ":" not in path:
        from jingu.config.sections.policies import ENVIRONMENTS

        path = ENVIRONMENTS.get(path, path)
    place, _, name = path.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            # It may import modules beside it.
            sys.path.append(str(Path(place).resolve().parent))
            module = importlib.util.module_from_spec(spec)
            # Dataclasses look up their module by its name while they are defined.
            sys.modules.setdefault(module.__name__, module)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(place)
    except Exception as error:
        raise RewardFunctionError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardFunctionError(f"{place} has no function {name}")
    return cast(Callable[..., Any], function)


def build_python_reward(path: str, columns: Sequence[str]) -> Score:
    """Return the user's function at a path, called with the keywords that it takes.

    Raises:
        RewardFunctionError: it cannot be imported, or needs other arguments.
    """
    function = load_function(path)
    names = [*ARGUMENTS, *columns]
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted_names = [name for name in names if takes_all or name in inspect.signature(function).parameters]
    try:
        inspect.signature(function).bind(**dict.fromkeys(accepted_names))
    except TypeError as error:
        raise RewardFunctionError(f"{error}; it can have {', '.join(names)}") from error

    def score(answers: Sequence[Answer]) -> Any:
        # The plural names are those of lists over all answers.
        keys = {"prompts": "prompt", "completions": "completion"}
        lists = {name: [answer.get(keys.get(name, name)) for answer in answers] for name in accepted_names}
        result = function(**lists)
        if inspect.isawaitable(result):
            import asyncio

            result = asyncio.run(_wait(result))
        return read_scores(result, len(answers))

    return score


def read_scores(result: Any, count: int) -> list[float | None]:
    """Return what a function returned as numbers: a list, a tuple, an iterator, or an array or tensor of one dimension.

    Raises:
        RewardFunctionError: it is something else, such as a dictionary, or an element is no number.
    """
    if hasattr(result, "tolist"):
        values = result.tolist()
    elif isinstance(result, Iterator):
        # One more than needed shows that there are too many; an iterator may be endless.
        values = list(islice(result, count + 1))
    else:
        values = result
    if not isinstance(values, list | tuple):
        raise RewardFunctionError(f"it returned {_describe(result)}, not a list of numbers")
    return [None if value is None else _read_score(value) for value in values]


def _read_score(value: Any) -> float:
    """Return a number, or the value of an array or tensor with a single one."""
    if hasattr(value, "item") and hasattr(value, "ndim") and value.ndim == 0:
        value = value.item()
    if not isinstance(value, Real):
        raise RewardFunctionError(f"it returned a list with {_describe(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _describe(value: Any) -> str:
    """Return the type of a value and its beginning."""
    return f"{type(value).__name__} {repr(value)[:60]}"


async def _wait(result: Any) -> Any:
    return await result


def build_verifier(settings: dict[str, Any]) -> Reward:
    """Return the settings of a verifier, after importing what it needs: imports do not count towards its timeout."""
    from pydantic import TypeAdapter

    from jingu.align.verifiers import find_verifier
    from jingu.config.sections.rewards import Reward

    reward: Reward = TypeAdapter(Reward).validate_python(settings)
    verifier = find_verifier(reward)
    if verifier.package is not None:
        importlib.import_module(verifier.package)
    if verifier.warm_up is not None:
        verifier.warm_up()
    return reward


class RewardFunctions:
    """The rewards that this process has imported, by their settings."""

    def __init__(self) -> None:
        self._functions: dict[str, Score] = {}
        self._verifiers: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle a request. One without answers only checks that the reward can be used."""
        settings, answers = request["settings"], request["answers"]
        key = json.dumps(settings)
        if settings["type"] == "python":
            if key not in self._functions:
                self._functions[key] = build_python_reward(settings["function"], request["columns"])
            return {"scores": self._functions[key](answers) if answers else []}
        from jingu.align.process_pool import LATE, map_in_processes
        from jingu.align.verifiers import check_expected, verify

        if key not in self._verifiers:
            self._verifiers[key] = build_verifier(settings)
        reward = self._verifiers[key]
        if "check" in request:

            def check(value: Any) -> str:
                try:
                    check_expected(reward, value)
                except ValueError as error:
                    return str(error)
                return ""

            problems = map_in_processes(check, request["check"], reward.timeout)
            return {"problems": ["it cannot be read in time" if text == LATE else text for text in problems]}
        # Equal answers to one prompt are scored once.
        keys = [json.dumps(answer, sort_keys=True) for answer in answers]
        unique = dict(zip(keys, answers, strict=True))
        scores = map_in_processes(lambda answer: verify(reward, answer), [*unique.values()], reward.timeout)
        by_key = dict(zip(unique, scores, strict=True))
        values = [by_key[key] for key in keys]
        late = [index for index, value in enumerate(values) if value == LATE]
        return {"scores": [0.0 if isinstance(value, str) else value for value in values], "late": late}


class EnvironmentWorker:
    """The environments of a step and their tools."""

    def __init__(self) -> None:
        self._build: Callable[[], Any] | None = None
        self._environments: dict[int, Any] = {}
        # Tools that are functions, and the names of tools that are methods of the environment.
        self._functions: dict[str, Callable[..., Any]] = {}
        self._methods: list[str] = []

    def answer(self, request: dict[str, Any]) -> list[Any]:
        """Handle a request; return the tool definitions for "load", else (key, value) for each environment.

        Raises:
            RewardFunctionError: user code cannot be imported, lacks a method, or returns an invalid value.
        """
        method, arguments = request["method"], request["arguments"]
        if method == "load":
            return self._load(request["environment"], request["tools"])
        if method == "begin":
            self._environments = {key: self._build() for key, _ in arguments} if self._build else {}
        if method == "call":
            return [(key, [self._call(key, **call) for call in calls]) for key, calls in arguments]
        return [(key, self._call_environment(method, key, argument)) for key, argument in arguments]

    def _load(self, path: str | None, tools: list[str]) -> list[JsonObject]:
        """Import the class and the tools; return the definitions of the tools."""
        from jingu.align.tools import describe_tool

        if path is not None:
            self._build = load_function(path)
            missing = [name for name in ("begin", "step", "score") if not callable(getattr(self._build, name, None))]
            if missing:
                raise RewardFunctionError(f"{path} has no method {missing[0]}")
        definitions = []
        for tool in tools:
            name = tool.rpartition(":")[2]
            if ":" in tool:
                self._functions[name] = load_function(tool)
            elif self._build is None or not callable(getattr(self._build, name, None)):
                raise RewardFunctionError(f"{path or 'the environment'} has no method {name} to use as a tool")
            else:
                self._methods.append(name)
            try:
                function = self._functions[name] if ":" in tool else getattr(self._build(), name)  # type: ignore[misc]
                definitions.append(describe_tool(name, function))
            except ValueError as error:
                raise RewardFunctionError(str(error)) from error
        return definitions

    def _call(self, key: int, name: str, arguments: str) -> str:
        """Return the result of a tool."""
        from jingu.align.tools import call_tool

        function = getattr(self._environments[key], name) if name in self._methods else self._functions[name]
        return call_tool(function, arguments)

    def _call_environment(self, method: str, key: int, argument: Any) -> Any:
        """Return the checked value of a method of an environment."""
        environment = self._environments[key]
        if method == "begin":
            environment.begin(argument)
            return None
        if method == "step":
            reply = environment.step(argument)
            if not isinstance(reply, str | None):
                raise RewardFunctionError(f"step returned {reply!r}, which is neither a text nor None")
            return reply
        score = float(environment.score())
        if not math.isfinite(score):
            raise RewardFunctionError(f"score returned {score}")
        return score


def main() -> None:
    """Serve requests until standard input is closed."""
    rewards = RewardFunctions()
    environments = EnvironmentWorker()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"values": environments.answer(request)} if "method" in request else rewards.answer(request)

    # Without a thread that reads: requests fork this process.
    answer_requests(map(json.loads, sys.stdin), answer, RewardFunctionError)


if __name__ == "__main__":
    main()
