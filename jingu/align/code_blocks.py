"""Read the Python code in an answer: fenced blocks of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Containers before a line: quotes and items of lists.
_QUOTES = re.compile(r"(?:[ \t]{0,3}>[ \t]?)*")
_CONTAINERS = re.compile(r"(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))*[ \t]*")
_FENCE = re.compile(r"(`{3,}|~{3,})[ \t]*([^\n]*?)[ \t]*$")
_LANGUAGE = re.compile(r"[{.\s]*(?:language-|lang=|class=)?[\"']?\.?([\w+#-]+)")
_PYTHON = frozenset(["python", "python2", "python3", "py", "py2", "py3", "ipython", "ipython3", "cpython", "jupyter"])
# Languages of blocks that hold Markdown in turn.
_MARKDOWN = frozenset(["markdown", "md", "mdx", "rst"])
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
    blocks = list(_blocks(completion.splitlines()))
    texts = ["\n".join(block.lines) for block in blocks if block.language in _PYTHON]
    if not texts:
        texts = ["\n".join(block.lines) for block in blocks if not block.language]
        texts = [text for text in texts if _STATEMENT.search(text)]
    # Code without a fence around it may have some in its comments.
    is_bare = not any(_defined(text) & {*names} for text in texts) and bool(_defined(completion) & {*names})
    if is_bare or not blocks:
        return completion
    last = max((index for index, text in enumerate(texts) if _defined(text) & {*names}), default=len(texts) - 1)
    code = texts[last] if texts else ""
    for text in reversed(texts[: max(last, 0)]):
        missing = {*re.findall(r"[^\W\d]\w*", code), *names} - _defined(code)
        if _defined(text) & missing:
            code = f"{text}\n\n{code}"
    return code


def _defined(code: str) -> set[str]:
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
