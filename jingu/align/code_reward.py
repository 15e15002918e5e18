"""The reward of generated code: it passes tests in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Any

from jingu.align.scorer import RewardContext, RewardScorer
from jingu.config.sections.rewards import PythonTestsReward
from jingu.errors import JinguError
from jingu.runtime.gpus import num_usable_cores
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


class SandboxScorer(RewardScorer):
    """Runs the tests of generated code, several answers at a time.

    Raises:
        JinguError: code cannot be isolated on this machine.
    """

    def __init__(self, settings: PythonTestsReward, context: RewardContext) -> None:
        self._settings = settings
        self._where = context.where
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
        workers = min(2 * num_usable_cores(), _MAX_WORKERS)
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


# Read the Python code in an answer: fenced blocks of Markdown.

# Containers before a line: quotes and items of lists.
_QUOTES = re.compile(r"(?:[ \t]{0,3}>[ \t]?)*")
_CONTAINERS = re.compile(r"(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))*[ \t]*")
_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*([^\n]*?)[ \t]*$")
_LANGUAGE = re.compile(r"[{.\s]*(?:language-|lang=|class=)?[\"']?\.?([\w+#-]+)")
_PYTHON = frozenset(["python", "python2", "python3", "py", "py2", "py3", "ipython", "ipython3", "cpython", "jupyter"])
# Languages of blocks that hold Markdown in turn.
_MARKDOWN = frozenset(["markdown", "md", "mdx", "rst"])
# Up to the last line that ends the reasoning, or all of a text that begins it and does not end it.
_REASONING = re.compile(r"(?s).*</think>[ \t\r]*(?:\n|$)|\s*<think>(?!.*</think>).*")
_STATEMENT = re.compile(
    r"^\s*(?:def|class|import|from|return|for|while|if|with|try|async|@)\b|\w\s*[+*/-]?=|\w\(", re.M
)
_DEFINITION = re.compile(
    r"^(?:(?:async[ \t]+)?def[ \t]+(\w+)|class[ \t]+(\w+)|(\w+)[ \t]*(?::[^=\n]+)?=(?!=)"
    r"|(?:from[ \t].+)?import[ \t]+(.+))",
    re.MULTILINE,
)


@dataclass
class _Block:
    language: str
    lines: list[str] = field(default_factory=list)


def extract_code(completion: str, names: Sequence[str] = ()) -> str:
    """Return the Python code of an answer.

    It is that of the last block of Python that defines one of `names`, and of the blocks before it that define what it
    uses; blocks without a language count if there are none of Python. An answer without blocks is code itself.

    Args:
        names: what tests use of the code.
    """
    # Code before the end of the reasoning is none of the answer; a text that never ends it has no answer.
    reasoning = _REASONING.match(completion)
    if reasoning is not None:
        completion = completion[reasoning.end() :]
    blocks = list(_blocks(completion.splitlines()))
    texts = ["\n".join(block.lines) for block in blocks if block.language in _PYTHON]
    if not texts:
        texts = ["\n".join(block.lines) for block in blocks if not block.language]
        texts = [text for text in texts if _STATEMENT.search(text)]
    # Code without a fence around it may have some in its comments.
    is_bare = not any(_defined_names(text) & {*names} for text in texts) and bool(_defined_names(completion) & {*names})
    if is_bare or not blocks:
        return completion
    last = max((index for index, text in enumerate(texts) if _defined_names(text) & {*names}), default=len(texts) - 1)
    code = texts[last] if texts else ""
    for text in reversed(texts[: max(last, 0)]):
        missing = {*re.findall(r"[^\W\d]\w*", code), *names} - _defined_names(code)
        if _defined_names(text) & missing:
            code = f"{text}\n\n{code}"
    return code


def _defined_names(code: str) -> set[str]:
    """Return the names that code defines at its top level."""
    names: set[str] = set()
    for function, kind, variable, imported_names in _DEFINITION.findall(code):
        names |= {function, kind, variable, *re.findall(r"\w+", imported_names)}
    return names - {""}


def _blocks(lines: Sequence[str]) -> Iterator[_Block]:
    """Yield the fenced blocks of some lines, those in blocks of Markdown in turn."""
    position = 0
    while position < len(lines):
        start = _CONTAINERS.match(lines[position])
        opening = _FENCE.match(lines[position], start.end()) if start else None
        position += 1
        if start is None or opening is None or (opening[1][0] == "`" and "`" in opening[2]):
            continue
        block = _Block(_language(opening[2]))
        position = _read_block(lines, position, block, start[0], opening[1])
        if block.language in _MARKDOWN:
            yield from _blocks(block.lines)
        else:
            yield block


def _language(info: str) -> str:
    match = _LANGUAGE.match(info)
    return match[1].lower() if match else ""


def _read_block(lines: Sequence[str], position: int, block: _Block, container: str, fence: str) -> int:
    """Append the lines of a block, and return the position after it. A block may lack its end."""
    quotes = container.count(">")
    # Most authors write a space after ">", which belongs to it.
    space = " " if quotes and container.rpartition(">")[2].startswith(" ") else ""
    indent = len(container.rpartition(">")[2].expandtabs(4).removeprefix(space))
    inner = 0  # open blocks in a block of Markdown
    while position < len(lines):
        line = _without_quotes(lines[position], quotes, space)
        text = line.lstrip(" \t")
        line = line[: len(line) - len(text)].expandtabs(4) + text
        position += 1
        width = len(line) - len(text)
        closing_fence = _FENCE.match(line, width)
        is_fence = closing_fence is not None and closing_fence[1][0] == fence[0] and len(closing_fence[1]) >= len(fence)
        # Deeper fences belong to the code: to a docstring, say.
        if closing_fence is not None and is_fence and width < indent + 4:
            if block.language in _MARKDOWN and closing_fence[2]:
                inner += 1
            elif not closing_fence[2]:
                if not inner:
                    break
                inner -= 1
        block.lines.append(line[min(width, indent) :])
    return position


def _without_quotes(line: str, count: int, space: str) -> str:
    match = _QUOTES.match(line)
    quotes = match[0] if match else ""
    if not count or quotes.count(">") < count:
        return line
    end = [index for index, character in enumerate(quotes) if character == ">"][count - 1] + 1
    return line[end:].removeprefix(space)
