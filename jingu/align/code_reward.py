"""The reward of generated code: it passes tests in a sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from jingu.align.code_blocks import extract_code
from jingu.config.sections.rewards import PythonTestsReward
from jingu.errors import JinguError
from jingu.runtime.python_tests import PythonTests, parse_tests
from jingu.runtime.sandbox import Limits, Sandbox, SandboxError, passes_output, passes_tests

# Each may fill its memory.
_MAX_WORKERS = 32


@dataclass(frozen=True)
class OutputTests:
    """Tests of a program by what it prints.

    Attributes:
        pairs: standard input, and the expected output.
    """

    pairs: tuple[tuple[str, str], ...]


def read_tests(value: Any) -> PythonTests | OutputTests:
    """Return the tests in a column: statements, a list of statements, or pairs of an input and an output.

    Pairs are a list of {"input": ..., "output": ...}, or {"inputs": [...], "outputs": [...]}; either may be JSON text.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):  # statements may begin with a bracket
            value = json.loads(value)
    if isinstance(value, list) and value and all(isinstance(test, str) for test in value):
        value = "\n".join(value)
    if isinstance(value, str):
        return parse_tests(value)
    if isinstance(value, dict) and value.keys() == {"inputs", "outputs"}:
        inputs, outputs = value["inputs"], value["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are not lists of the same length")
        value = [{"input": text, "output": output} for text, output in zip(inputs, outputs, strict=True)]
    if not isinstance(value, list) or not value:
        raise ValueError("expected statements, or a list of inputs and outputs")
    pairs = []
    for pair in value:
        if not isinstance(pair, dict) or not {"input", "output"} <= pair.keys():
            raise ValueError("expected statements, or a list of inputs and outputs")
        if not isinstance(pair["input"], str) or not isinstance(pair["output"], str):
            raise ValueError("an input or an output is not a text")
        pairs.append((pair["input"], pair["output"]))
    return OutputTests(tuple(pairs))


# Most answers of a step share their tests with others.
@lru_cache(1 << 10)
def _read_json(text: str) -> PythonTests | OutputTests:
    return read_tests(json.loads(text))


def weak_fraction(settings: PythonTestsReward, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of answers whose tests run in the process of the answer, which can deceive them.

    Args:
        rows: the columns of each answer's row.
    """
    return fmean(_is_weak(json.dumps(row.get(settings.column))) for row in rows)


@lru_cache(1 << 10)
def _is_weak(text: str) -> bool:
    try:
        tests = _read_json(text)
    except ValueError:  # such answers are not scored
        return False
    return isinstance(tests, PythonTests) and tests.is_weak


class SandboxScorer:
    """Runs the tests of generated code, several answers at a time.

    Raises:
        JinguError: code cannot be isolated on this machine.
    """

    late: Sequence[int] = ()

    def __init__(self, settings: PythonTestsReward, where: str) -> None:
        self._settings = settings
        self._where = where
        self._limits = Limits(seconds=settings.timeout, memory_bytes=settings.memory_mb * 2**20)
        try:
            self._sandbox = Sandbox()
        except SandboxError as error:
            raise self._error(error) from error

    def _error(self, error: SandboxError) -> JinguError:
        return JinguError(
            f"code cannot be isolated on this machine ({error}).",
            where=self._where,
            fix="It needs Linux 5.12 with user namespaces, and libseccomp; in a container, allow unshare and mount.",
        )

    def score(self, answers: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Return 1 for each answer that passes its tests, else 0."""
        # Equal answers to the same prompt run once.
        keys = [(answer["completion"], json.dumps(answer[self._settings.column])) for answer in answers]
        unique = list(dict.fromkeys(keys))
        # More than cores: some programs only wait until their time ends.
        workers = min(2 * len(os.sched_getaffinity(0)), _MAX_WORKERS)
        try:
            with ThreadPoolExecutor(workers) as executor:
                values = dict(zip(unique, executor.map(self._passes, unique), strict=True))
        except SandboxError as error:
            raise self._error(error) from error
        return [float(values[key]) for key in keys]

    def _passes(self, key: tuple[str, str]) -> bool:
        completion, value = key
        try:
            tests = _read_json(value)
        except ValueError as error:
            what = f"{error}: {value[:80]}."
            raise JinguError(what, where=f"the column {self._settings.column}", fix="Correct the row.") from error
        if isinstance(tests, PythonTests):
            return passes_tests(self._sandbox, extract_code(completion, tests.names), tests, self._limits)
        code = extract_code(completion)
        return all(passes_output(self._sandbox, code, *pair, self._limits) for pair in tests.pairs)

    def close(self) -> None:
        """End the sandboxes."""
        self._sandbox.close()
