"""The process that computes a reward, so that nothing in it can hang or end the run: one JSON object a line.

A line has the settings of a reward, the names of the columns, and answers. The reply is {"scores": [...]} or
{"error": "..."}. Or a line calls a method of environments, and the reply is {"values": [[KEY, VALUE], ...]}.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from jingu.align.verifiers import VERIFIERS, Answer
from jingu.config.sections.rewards import PythonReward, Reward

Score = Callable[[Sequence[Answer]], Any]
ARGUMENTS = ("prompts", "completions", "completion_ids")


class RewardFunctionError(Exception):
    """A reward function that cannot be used, in words."""


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at `module:function` or `file.py:function`."""
    place, _, name = path.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            # Dataclasses and pickling look their module up by its name.
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


def build_python_reward(settings: PythonReward, columns: Sequence[str]) -> Score:
    """Return the user's function, called with the keywords that it takes.

    Raises:
        RewardFunctionError: it cannot be imported, or needs other arguments.
    """
    function = load_function(settings.function)
    names = [*ARGUMENTS, *columns]
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = [name for name in names if takes_all or name in inspect.signature(function).parameters]
    try:
        inspect.signature(function).bind(**dict.fromkeys(accepted))
    except TypeError as error:
        raise RewardFunctionError(f"{error}; it can have {', '.join(names)}") from error

    def score(answers: Sequence[Answer]) -> Any:
        lists = {name: [answer.get(name) for answer in answers] for name in columns}
        lists |= {f"{name}s": [answer[name] for answer in answers] for name in ("prompt", "completion")}
        lists["completion_ids"] = [answer["completion_ids"] for answer in answers]
        result = function(**{name: lists[name] for name in accepted})
        return asyncio.run(_wait(result)) if inspect.isawaitable(result) else result

    return score


async def _wait(result: Any) -> Any:
    return await result


def build_score(settings: Reward, columns: Sequence[str]) -> Score:
    """Return the function that scores answers."""
    if isinstance(settings, PythonReward):
        return build_python_reward(settings, columns)
    verify = VERIFIERS[settings.type]
    return lambda answers: [float(verify(settings, answer)) for answer in answers]


def _score(functions: dict[str, Score], request: dict[str, Any]) -> Sequence[Any]:
    """Return the scores that a request asks for."""
    key = json.dumps(request["settings"])
    if key not in functions:
        settings = TypeAdapter(Reward).validate_python(request["settings"])
        functions[key] = build_score(settings, request["columns"])
    # Without answers, the request only asks whether the function can be used.
    return list(functions[key](request["answers"])) if request["answers"] else []


def call_environments(environments: dict[int, Any], request: dict[str, Any]) -> list[tuple[int, Any]]:
    """Call a method of environments, by their keys: `begin` makes new ones in the place of all before.

    Raises:
        RewardFunctionError: the class cannot be imported or lacks a method, or a method returns something else.
    """
    method = request["method"]
    if method == "begin":
        build = load_function(request["environment"])
        missing = [name for name in ("begin", "step", "score") if not callable(getattr(build, name, None))]
        if missing:
            raise RewardFunctionError(f"{request['environment']} has no method {missing[0]}")
        environments.clear()
        environments.update((key, build()) for key, _ in request["arguments"])
    values: list[tuple[int, Any]] = []
    for key, argument in request["arguments"]:
        value = environments[key].score() if method == "score" else getattr(environments[key], method)(argument)
        if method == "step" and not isinstance(value, str | None):
            raise RewardFunctionError(f"step returned {value!r}, which is neither a text nor None")
        if method == "score":
            value = float(value)
            if not math.isfinite(value):
                raise RewardFunctionError(f"score returned {value}")
        values.append((key, None if method == "begin" else value))
    return values


def main() -> None:
    """Serve requests until the standard input ends."""
    # What a function prints must not get between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    functions: dict[str, Score] = {}
    environments: dict[int, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any]
        try:
            if "environment" in request:
                reply = {"values": call_environments(environments, request)}
            else:
                scores = _score(functions, request)
                reply = {"scores": [None if value is None else float(value) for value in scores]}
        except RewardFunctionError as error:
            reply = {"error": str(error)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
