"""Trace which message wrote each piece of the text that a chat template renders.

The syntax tree of the template is instrumented. While a loop stands on one of the conversation's messages, what is
written belongs to that message, whatever way it came there: through aliases, slices, namespaces, filters or macros.
In a loop over indices, and in an expression outside of loops, the message is the one whose content was read. Marks in
the text say where the writer changes; `WriterTrace.divide` takes them out again.

The trace also notes when the template looks ahead, so that what is written can depend on later messages. Up to there,
each prefix of the conversation renders as a prefix of the text, and need not be rendered to know it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, nodes

from jingu.chat.messages import JsonObject

Span = tuple[int, int]

# Noncharacters that delimit answers, as `{% generation %}` marks them, and that precede the number of a writer.
# `check_characters` keeps them out of messages.
ANSWER_START = "\ufdd0"
ANSWER_END = "\ufdd1"
_WRITER_MARK = "\ufdd4"
_MARKS = re.compile(f"({ANSWER_START}|{ANSWER_END}|{_WRITER_MARK}.)", re.DOTALL)
# The number n of a writer is written as this code point plus n.
_FIRST_WRITER = 0x10000
_CONTENT_KEYS = frozenset({"content", "tool_calls", "reasoning_content", "thinking", "reasoning"})
# What `loop` says about the items after the current one.
_AHEAD = frozenset({"last", "nextitem", "length", "revindex", "revindex0"})
# The variable of the template that holds the trace, and the filters that call it.
TRACE = "jingu_trace"


class _Writer:
    """What the template stands on while it writes: a message, or a place that is not yet assigned to one.

    Attributes:
        message: index of the message; None: that of the only message whose content is read.
        line: line of the template; 0: the template as a whole, which stands on none.
        outer: the writer around this one.
        key: the number that a loop over indices stands on.
        reads: messages whose content was read.
        by_key: messages by the index under which the template looked them up.
    """

    __slots__ = ("by_key", "key", "line", "message", "outer", "reads")

    def __init__(self, message: int | None, line: int, outer: _Writer | None = None, key: Any = None) -> None:
        self.message = message
        self.line = line
        self.outer = outer
        self.key = key
        self.reads: set[int] | None = None
        self.by_key: dict[Any, int] | None = None

    def resolve(self) -> int | None:
        """Return the index of the message that writes; None if there is none, or if it is not clear which."""
        if self.message is not None or not self.line:
            return self.message
        if not self.reads:
            return self.outer.resolve() if self.outer else None
        if self.by_key and self.key in self.by_key:
            return self.by_key[self.key]
        return next(iter(self.reads)) if len(self.reads) == 1 else None


class TracedMessage(dict[str, Any]):
    """A message of a conversation, which notes when a template reads its content.

    The template's environment reads keys with `read`; `message[key]` is that of a dictionary, which is much faster.
    """

    __slots__ = ("_index", "_trace")
    _index: int
    _trace: WriterTrace

    def read(self, key: str) -> Any:
        """Return the value of a key, as a template reads it. Raises KeyError."""
        if key in _CONTENT_KEYS:
            writer = self._trace.writer
            if writer.message is None:
                writer.reads = {self._index, *(writer.reads or ())}
        return self[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.read(key) if key in self else default


class TracedMessages(Sequence[TracedMessage]):
    """The messages of a conversation from a first one on; it notes when the template looks ahead."""

    def __init__(self, messages: list[TracedMessage], trace: WriterTrace, first: int = 0) -> None:
        self._items = messages
        self._trace = trace
        self._first = first

    def __len__(self) -> int:
        self._trace.look_ahead()
        return len(self._items)

    def __bool__(self) -> bool:
        self._trace.look_ahead(self._first > 0)
        return bool(self._items)

    def __iter__(self) -> Iterator[TracedMessage]:
        self._trace.look_ahead()
        return iter(self._items)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            if isinstance(key.start, int) and key.start >= 0 and key.stop is None and key.step in (None, 1):
                return TracedMessages(self._items[key.start :], self._trace, self._first + key.start)
            self._trace.look_ahead()
            return self._items[key]
        message = self._items[key]
        index = message._index
        self._trace.look_ahead(key < 0 or index > max(self._trace.latest, 0))
        writer = self._trace.writer
        writer.by_key = {key: index, **(writer.by_key or {})}
        return message

    def __add__(self, items: Any) -> list[Any]:
        return list(self) + list(items)

    def __radd__(self, items: Any) -> list[Any]:
        return list(items) + list(self)

    def iterate(self) -> Iterator[TracedMessage]:
        """Return the messages for a loop, which looks ahead only if an earlier loop has been over all of them."""
        self._trace.look_ahead(self._trace.latest >= 0)
        return iter(self._items)


class TracedText(NamedTuple):
    """A rendered text.

    Attributes:
        pieces: for each message, start and end of each piece that it wrote; adjacent pieces are one.
        lines: for each message, the line of the template that stood on it; 0 if none did.
        marks: start and end of each answer that the template marks.
        num_settled: number of messages whose text, and all before it, depends on no later message. What prefixes of
            the conversation render is known up to them.
        body_end: end of what the statements up to the last loop wrote; a generation prompt follows.
        unclear: line of a loop that read several messages, so that its text belongs to none; 0 if there is none.
    """

    text: str
    pieces: list[list[Span]]
    lines: list[int]
    marks: list[Span]
    num_settled: int
    body_end: int
    unclear: int


class WriterTrace:
    """What happens while a template is rendered once."""

    __slots__ = (
        "_body_mark",
        "_is_silent",
        "_num_messages",
        "_num_settled",
        "_outer",
        "_over_messages",
        "_writers",
        "is_captured",
        "latest",
        "messages",
        "writer",
    )

    def __init__(self, entries: Sequence[JsonObject], is_silent: bool = False) -> None:
        self._is_silent = is_silent
        self._num_messages = self._num_settled = len(entries)
        # Whether marks were written into a captured text, which the template may have processed.
        self.is_captured = False
        self.latest = -1
        self.writer = _Writer(None, 0)
        self._writers = [self.writer]
        self._body_mark = "none"
        # For each loop, the writers around its runs that have not ended, and whether it is over messages.
        self._outer: dict[int, list[_Writer]] = {}
        self._over_messages: set[int] = set()
        messages = [entry if type(entry) is TracedMessage else TracedMessage(entry) for entry in entries]
        for index, message in enumerate(messages):
            message._index = index
            message._trace = self
        self.messages = TracedMessages(messages, self)

    def begin_loop(self, items: Any, loop: int) -> Any:
        """Return the items of a loop that begins."""
        self._outer.setdefault(loop, []).append(self.writer)
        if isinstance(items, TracedMessages):
            self._over_messages.add(loop)
            return items.iterate()
        return items

    def enter(self, item: Any, loop: int, line: int, is_captured: bool) -> str:
        """Return the mark at the begin of a loop's body; empty if the item has nothing to do with messages."""
        index = None
        if type(item) is TracedMessage:
            index = item._index
        elif isinstance(item, list | tuple):
            members = [member._index for member in item if type(member) is TracedMessage]
            if len(members) != 1:
                return ""
            index = members[0]
        elif type(item) is not int:
            return ""
        if index is not None and index > self.latest:
            self.latest = index
        self.is_captured |= is_captured
        return self._mark(_Writer(index, line, self._outer[loop][-1], key=item if index is None else None))

    def end_loop(self, loop: int) -> str:
        """Return the mark after a loop."""
        outer = self._outer[loop].pop()
        return "" if outer is self.writer else self._mark(outer)

    def begin_output(self, line: int) -> str:
        """Return the mark before an expression outside of loops."""
        return self._mark(_Writer(None, line, self.writer)) if self.writer.message is None else ""

    def end_output(self) -> str:
        """Return the mark after an expression outside of loops."""
        outer = self.writer.outer
        return self._mark(outer) if self.writer.message is None and outer else ""

    def look_ahead(self, is_ahead: bool = True) -> None:
        """Note that what is written from now on can depend on messages after the current one."""
        if is_ahead:
            self._num_settled = min(self._num_settled, max(self.latest, 0))

    def read_loop(self, value: Any, loop: int) -> Any:
        """Return what `loop` says about later items."""
        self.look_ahead(loop in self._over_messages)
        return value

    def end_body(self) -> str:
        """Return the mark after the last loop."""
        mark = self._mark(self._writers[0])
        self._body_mark = mark or self._body_mark
        return mark

    def _mark(self, writer: _Writer) -> str:
        self.writer = writer
        if self._is_silent:
            return ""
        self._writers.append(writer)
        return _WRITER_MARK + chr(_FIRST_WRITER + len(self._writers) - 1)

    def divide(self, marked_text: str) -> TracedText:
        """Return the text without marks, and what each message wrote."""
        pieces: list[list[Span]] = [[] for _ in range(self._num_messages)]
        lines = [0] * self._num_messages
        marks: list[Span] = []
        length = 0
        start = 0
        unclear = 0
        body_end = 0
        writer = self._writers[0]
        message = writer.resolve()
        parts = _MARKS.split(marked_text)
        texts = parts[::2]
        for text, mark in zip(texts, [*parts[1::2], ""], strict=True):
            if text:
                end = length + len(text)
                if message is not None:
                    message_pieces = pieces[message]
                    if message_pieces and message_pieces[-1][1] == length:
                        message_pieces[-1] = (message_pieces[-1][0], end)
                    else:
                        message_pieces.append((length, end))
                    lines[message] = writer.line
                elif writer.reads and writer.line and not text.isspace():
                    unclear = writer.line
                length = end
            if mark == self._body_mark:
                body_end = length
            if mark == ANSWER_START:
                start = length
            elif mark == ANSWER_END:
                marks.append((start, length))
            elif mark:
                writer = self._writers[ord(mark[1]) - _FIRST_WRITER]
                message = writer.message if writer.message is not None else writer.resolve()
        return TracedText("".join(texts), pieces, lines, marks, self._num_settled, body_end, unclear)


def add_filters(environment: Environment) -> None:
    """Give an environment the filters that `instrument` uses."""
    for name in ("begin_loop", "enter", "end_loop", "begin_output", "end_output", "read_loop", "end_body"):
        environment.filters[f"{TRACE}_{name}"] = getattr(WriterTrace, name)


def instrument(tree: nodes.Template, environment: Environment) -> None:
    """Make a template call its trace, the variable `TRACE`."""
    end = _last_loop(tree) + 1
    instrumentation = _Instrumentation(environment)
    epilogue = nodes.Template(tree.body[end:])
    tree.body = tree.body[:end]
    for part in (tree, epilogue):
        instrumentation.visit_body(part, loops=(), is_captured=False)
    tree.body += [instrumentation.write("end_body", tree.lineno), *epilogue.body]


class _Instrumentation:
    """Inserts calls of the trace into a syntax tree."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._num_loops = 0

    def _call(self, name: str, line: int, *args: Any) -> nodes.Filter:
        """Return a call of a method of the trace."""
        expressions = [arg if isinstance(arg, nodes.Expr) else nodes.Const(arg) for arg in args]
        call = nodes.Filter(nodes.Name(TRACE, "load"), f"{TRACE}_{name}", expressions, [], None, None)
        return call.set_lineno(line).set_environment(self._environment)  # type: ignore[return-value]

    def write(self, name: str, line: int, *args: Any) -> nodes.Output:
        """Return a statement that writes what a method of the trace returns."""
        output = nodes.Output([self._call(name, line, *args)])
        return output.set_lineno(line).set_environment(self._environment)  # type: ignore[return-value]

    def visit_body(self, node: nodes.Node, loops: tuple[int, ...], is_captured: bool) -> None:
        """Instrument the children of a node.

        Args:
            loops: numbers of the loops around it.
            is_captured: whether the template receives the text as a value, which it can process.
        """
        for name, value in list(node.iter_fields()):
            if isinstance(value, list):
                setattr(node, name, [item for child in value for item in self._visit(child, loops, is_captured)])
            elif isinstance(value, nodes.Node):
                (child,) = self._visit(value, loops, is_captured)
                setattr(node, name, child)

    def _visit(self, node: Any, loops: tuple[int, ...], is_captured: bool) -> list[Any]:
        """Return a node with calls of the trace in and around it."""
        if not isinstance(node, nodes.Node):
            return [node]
        if isinstance(node, nodes.For):
            return self._visit_loop(node, loops, is_captured)
        line = node.lineno
        if loops and isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
            # Only some attributes of `loop` say anything about later items.
            return [self._call("read_loop", line, node, loops[-1])] if node.attr in _AHEAD else [node]
        if isinstance(node, nodes.Name) and node.name == "loop" and loops and node.ctx == "load":
            return [self._call("read_loop", line, node, loops[-1])]
        captures = isinstance(node, nodes.Macro | nodes.CallBlock | nodes.FilterBlock | nodes.AssignBlock)
        self.visit_body(node, () if isinstance(node, nodes.Macro) else loops, is_captured or captures)
        if isinstance(node, nodes.Output) and not loops and not is_captured:
            parts: list[nodes.Expr] = []
            for part in node.nodes:
                is_constant = isinstance(part, nodes.TemplateData | nodes.Const)
                begin = [] if is_constant else [self._call("begin_output", line, line)]
                end = [] if is_constant else [self._call("end_output", line)]
                parts += [*begin, part, *end]
            node.nodes = parts
        return [node]

    def _visit_loop(self, node: nodes.For, loops: tuple[int, ...], is_captured: bool) -> list[nodes.Node]:
        self._num_loops += 1
        loop = self._num_loops
        line = node.lineno
        (items,) = self._visit(node.iter, loops, is_captured)
        if node.test is not None:
            (node.test,) = self._visit(node.test, (*loops, loop), is_captured)
        body = [item for child in node.body for item in self._visit(child, (*loops, loop), is_captured)]
        node.else_ = [item for child in node.else_ for item in self._visit(child, (*loops, loop), is_captured)]
        node.iter = self._call("begin_loop", line, items, loop)
        node.body = [self.write("enter", line, _load(node.target), loop, line, is_captured), *body]
        return [node, self.write("end_loop", line, loop)]


def _load(target: Any) -> nodes.Expr:
    """Return the expression that reads the target of a loop."""
    if isinstance(target, nodes.Tuple):
        return nodes.Tuple([_load(item) for item in target.items], "load")
    return nodes.Name(target.name, "load")


def has_constant_prompt(tree: nodes.Template) -> bool:
    """Return whether the generation prompt of a template depends only on its variables besides the conversation.

    It does if `add_generation_prompt` is read only after the last loop, where nothing depends on what the template
    computed before.
    """
    end = _last_loop(tree) + 1
    before = nodes.Template(tree.body[:end])
    after = nodes.Template(tree.body[end:])
    variables = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    variables |= {macro.name for macro in tree.find_all(nodes.Macro)} | {"messages", "tools"}
    return (
        all(name.name != "add_generation_prompt" for name in before.find_all(nodes.Name))
        and all(name.name not in variables for name in after.find_all(nodes.Name))
        and not _has(after, nodes.Call)
    )


def _last_loop(tree: nodes.Template) -> int:
    """Return the index of the last statement that contains a loop; -1 if there is none."""
    return max((index for index, node in enumerate(tree.body) if _has(node, nodes.For)), default=-1)


def _has(node: nodes.Node, kind: type[nodes.Node]) -> bool:
    return isinstance(node, kind) or node.find(kind) is not None
