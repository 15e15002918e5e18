"""Chat templates: render a conversation as text, and locate the assistant's answers in it.

Templates are Jinja, with the extensions of transformers, and run in Jinja's sandbox
(`jingu.chat.template_environment`). The positions of answers decide which tokens are trained, so they are computed,
never guessed: the trace of a rendered text (`jingu.chat.tracing`) says which message wrote which piece of it, and
`jingu.chat.answer_spans` finds in the piece of an answer what a model generates there. What cannot be located is
refused, and so is a conversation of which the template leaves out a part.

A *mention* is a special token that a message contains as text, such as a question about `<|im_end|>`. It must not act
as a special token. Before rendering, each mention is replaced by a private code point between two `_MENTION_MARK`s;
after rendering, it is restored, and its position is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError
from jinja2.runtime import Context

from jingu.chat.answer_spans import (
    EMPTY_WORDS,
    REASONING_KEYS,
    SpecialTokens,
    check_mark,
    common_length,
    find_end,
    find_header,
    find_missing,
    find_turn,
    skip_empty_reasoning,
)
from jingu.chat.messages import ConversationError, JsonObject, Message, UnsupportedToolsError
from jingu.chat.template_environment import compile_template, to_json
from jingu.chat.tracing import (
    TRACE,
    Span,
    TracedMessage,
    TracedText,
    WriterTrace,
)
from jingu.errors import JinguError
from jingu.text.tokenizer import Tokenizer

Turns = Literal["auto", "whole", "each"]

# Noncharacters that delimit mentions in rendered text, or mark the end of a message's content.
_MENTION_MARK = "\ufdd2"
_MESSAGE_END = "\ufdd3"
_MENTION = re.compile(f"{_MENTION_MARK}(.){_MENTION_MARK}", re.DOTALL)
# The mention of special token k is written as this code point plus k.
_FIRST_MENTION = 0xF0000
# A template that contains one of these has a place for reasoning.
_REASONING_WORDS = ("reasoning", "thinking", "</think>")


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        answers: start and end of each located answer in `text`, in characters.
        mentions: start and end of each special token that is to be tokenized as text.
        messages: for each located answer, the index of its message.
    """

    text: str
    answers: tuple[Span, ...]
    mentions: tuple[Span, ...] = ()
    messages: tuple[int, ...] = ()


class _Conversation(NamedTuple):
    """A conversation as a template takes it, and as it wrote it.

    Attributes:
        messages: the messages as variables of the template, with mentions escaped.
        tools: the tools as a variable.
        options: further variables.
        prefills: by the indices of messages of which the start belongs to the prompt, that start.
    """

    messages: list[TracedMessage]
    tools: list[Any] | None
    options: dict[str, Any]
    traced: TracedText
    prompts: dict[int, _Prompt]
    prefills: dict[int, str]


class _Prompt(NamedTuple):
    """The prompt of an answer.

    Attributes:
        text: the whole prompt; None if it is not needed or not known.
        tail: what the template writes after the messages.
    """

    text: str | None
    tail: str


class _Answer(NamedTuple):
    """An answer in a rendered text.

    Attributes:
        text: longer than the rendered text if the conversation ends with the answer and only the next message would
            write the token that ends it.
        span: start and end of what a model generates.
        header_length: length of the header before it.
        continues_prompt: whether the text before the answer is that of its prompt.
        prefill_length: number of characters at the start of the span that belong to the prompt.
    """

    text: str
    span: Span
    header_length: int
    continues_prompt: bool
    prefill_length: int = 0


class ChatTemplate:
    """A chat template together with the special tokens of a tokenizer.

    Args:
        source: the Jinja source.
        where: name of the template in error messages.
        tools_source: the Jinja source for conversations with tools; None: `source`.
        parse_special_tokens: whether special tokens inside messages act as special tokens. Use it for trusted data
            only: a message can then end its own turn.
        train_empty_reasoning: whether the empty block of reasoning that a template writes for an answer without
            reasoning is a part of the answer.

    Raises:
        JinguError: the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        where: str,
        *,
        tools_source: str | None = None,
        parse_special_tokens: bool = False,
        train_empty_reasoning: bool = False,
    ) -> None:
        self.source = source
        self.tools_source = tools_source
        self.where = where
        # The texts that it renders with: they are a part of the identity of prepared data.
        self._for_tools = self
        if tools_source is not None:
            self._for_tools = ChatTemplate(
                tools_source,
                tokenizer,
                where,
                parse_special_tokens=parse_special_tokens,
                train_empty_reasoning=train_empty_reasoning,
            )
        try:
            self._template, self._has_constant_prompt = compile_template(source)
        except TemplateError as error:
            raise JinguError(f"the chat template is not valid Jinja ({error}).", where=where) from error
        self._has_prompt = "add_generation_prompt" in source
        self._skips_empty_reasoning = not train_empty_reasoning and any(word in source for word in EMPTY_WORDS)
        self._has_reasoning = any(word in source for word in _REASONING_WORDS)
        self._variables = {**self._template.globals, "documents": None, **tokenizer.special_names}
        self._variables["add_generation_prompt"] = False
        self._special = SpecialTokens(tokenizer.special_tokens, tokenizer.special_names["bos_token"])
        self._escaped_tokens = [] if parse_special_tokens else self._special.longest_first
        # The text that the template writes after the messages for a new answer, by the further variables.
        self._constant_prompts: dict[str, _Prompt] = {}

    @property
    def sources(self) -> tuple[str, ...]:
        """The Jinja sources: for conversations without tools, and with tools if there is another one."""
        return (self.source,) if self.tools_source is None else (self.source, self.tools_source)

    def render(
        self,
        messages: tuple[Message, ...],
        tools: tuple[JsonObject, ...] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        locate_answers: bool = True,
    ) -> RenderedChat:
        """Return the whole conversation as text, with the positions of its answers.

        Args:
            variables: further variables of the template.
            locate_answers: False: do not search for answers, which fails for some templates.

        Raises:
            ConversationError: the template refuses the conversation, leaves out a part of it, or the answers cannot be
                located reliably.
        """
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if locate_answers:
            return self.render_answers(messages, answers, tools, variables, turns="whole")[0]
        if tools and self._for_tools is not self:
            return self._for_tools.render(messages, tools, variables, locate_answers=False)
        conversation = self._start(messages, tools, variables)
        self._check_written(conversation, answers)
        return self._restore_mentions(conversation.traced.text, [], [])

    def render_answers(
        self,
        messages: tuple[Message, ...],
        answers: Sequence[int],
        tools: tuple[JsonObject, ...] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        turns: Turns = "auto",
    ) -> list[RenderedChat]:
        """Return the texts in which answers of a conversation are trained, with their positions.

        Some templates rewrite history: they drop the reasoning of an answer as soon as another turn follows. The text
        of the whole conversation then is none that a model sees or generates at that answer.

        Args:
            answers: indices of the messages to locate.
            turns: `whole`: one text, of the whole conversation; `each`: a text for each answer, which ends with it;
                `auto`: the former if each answer and what precedes it render alike in both.

        Raises:
            ConversationError: as for `render`.
        """
        if tools and self._for_tools is not self:
            return self._for_tools.render_answers(messages, answers, tools, variables, turns=turns)
        conversation = self._start(messages, tools, variables)
        if turns != "each" and all(index < conversation.traced.num_settled for index in answers):
            self._check_written(conversation, answers)
            return [self._finish(conversation, answers)]
        last = len(messages) - 1
        # Each answer with the conversation up to it.
        ends: dict[int, _Conversation] = {}

        def end_at(index: int) -> _Conversation:
            if index not in ends:
                ends[index] = conversation if index == last else self._cut(conversation, index + 1)
            return ends[index]

        unsettled_answers = [index for index in answers if index >= conversation.traced.num_settled]
        is_whole = turns == "whole" or all(
            self._renders_alike(conversation, end_at(index), index) for index in unsettled_answers
        )
        if is_whole and turns != "each":
            self._check_written(conversation, answers)
            return [self._finish(conversation, answers)]
        rendered_chats = []
        for index in answers:
            self._check_written(end_at(index), [index])
            rendered_chats.append(self._finish_one(end_at(index), index))
        return rendered_chats

    def render_prompt(
        self,
        messages: tuple[Message, ...],
        tools: tuple[JsonObject, ...] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
    ) -> RenderedChat:
        """Return the text of a prompt: the conversation and the header of the answer.

        Args:
            variables: further variables of the template.
            continue_final: whether the model continues the last message. The text then ends with that message's
                content.

        Raises:
            ConversationError: the template refuses the conversation, leaves out a part of it, or does not write the
                message to continue.
        """
        if tools and self._for_tools is not self:
            return self._for_tools.render_prompt(messages, tools, variables, continue_final=continue_final)
        conversation = self._start(messages, tools, variables, add_generation_prompt=not continue_final)
        text = conversation.traced.text
        if continue_final:
            text = self._cut_after_content(conversation)
        self._check_written(conversation, [])
        return self._restore_mentions(text, [], [])

    def find_ends(self) -> list[str]:
        """Return what ends an answer: the last special token of an answer, and of one that calls a tool; or the text
        after its content. Nothing if the template has no such end, or refuses the conversation.
        """
        call = {"name": "search", "arguments": {"text": "query"}, "id": "call00000"}
        question, answer = Message("user", "question"), Message("assistant", "answer")
        calling = Message("assistant", "", ({**call},))
        tool = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {}}}
        # The answer that ends the conversation tells how a model ends it.
        probes: list[tuple[tuple[Message, ...], tuple[JsonObject, ...]]] = [
            ((question, answer), ()),
            ((question, calling), (tool,)),
        ]
        ends = []
        for messages, tools in probes:
            try:
                (rendered_chat,) = self.render_answers(messages, [1], tools, turns="each")
            except ConversationError:
                continue
            text = rendered_chat.text[slice(*rendered_chat.answers[0])]
            end = self._special.last(text)
            # What follows a call is known only if it is a token; it may be the call's own syntax.
            if not end and messages[1] is answer:
                end = text.rpartition("answer")[2].strip()
            ends.append(end)
        return [end for end in dict.fromkeys(ends) if end]

    def _start(
        self,
        messages: tuple[Message, ...],
        tools: tuple[JsonObject, ...],
        variables: Mapping[str, Any] | None,
        **options: Any,
    ) -> _Conversation:
        """Render a conversation. Raise ConversationError if the template refuses it or ignores its tools."""
        if variables:
            options = {**self._escape_mentions(dict(variables)), **options}
        tool_entries = self._escape_mentions(list(tools)) if tools else None
        entries = [self._message_variables(message) for message in messages]
        calls = [call["function"] for entry in entries for call in dict.get(entry, "tool_calls", ())]
        traced_text: TracedText | None = None
        error: ConversationError | None = None
        try:
            traced_text = self._trace(entries, tool_entries, options)
        except ConversationError as failure:
            error = failure
        # Some templates expect arguments as JSON text: with objects, they fail or write Python's repr.
        if calls and (
            traced_text is None
            or any(call["arguments"] and str(call["arguments"]) in traced_text.text for call in calls)
        ):
            for call in calls:
                call["arguments"] = to_json(call["arguments"])
            traced_text = self._trace(entries, tool_entries, options)
        if traced_text is None:
            assert error is not None
            raise error
        prefills = {index: self._escape_prefill(item) for index, item in enumerate(messages) if item.prefill_length}
        conversation = _Conversation(entries, tool_entries, options, traced_text, {}, prefills)
        if tool_entries and not self._writes_tools(conversation):
            raise UnsupportedToolsError(f"the chat template {self.where} does not support tools")
        return conversation

    def _writes_tools(self, conversation: _Conversation) -> bool:
        """Return whether the text has all tools."""
        traced_text = conversation.traced
        names = [tool.get("function", tool).get("name") for tool in conversation.tools or [] if isinstance(tool, dict)]
        names = [name for name in names if isinstance(name, str) and name]
        if not all(name in traced_text.text for name in names):
            return False
        # What precedes the first message that a loop wrote has only words of the template, tools, and other messages.
        start = min((pieces[0][0] for pieces in traced_text.pieces if pieces), default=0)
        other_text = "".join(
            _plain_content(message)
            for message, pieces in zip(conversation.messages, traced_text.pieces, strict=True)
            if not pieces
        )
        before = traced_text.text[:start]
        if any(name in before and name not in self.source and name not in other_text for name in names):
            return True
        return traced_text.text != self._try_render(conversation.messages, None, conversation.options)

    def _message_variables(self, message: Message) -> TracedMessage:
        """Return a message as the dictionary that templates expect, which is that of transformers."""
        escape = self._escape_mentions
        content = escape(message.content)
        variables = TracedMessage(role=message.role, content=_content_parts(content) if self._takes_parts else content)
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                entry = {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
                calls.append({"id": call["id"], **entry} if "id" in call else entry)
            variables["tool_calls"] = escape(calls)
        if message.reasoning_content:
            variables.update(dict.fromkeys(REASONING_KEYS, escape(message.reasoning_content)))
        if message.name:
            variables["name"] = escape(message.name)
        if message.tool_call_id:
            variables["tool_call_id"] = escape(message.tool_call_id)
        return variables

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template expects contents as lists of parts, as those of models that also read images do."""
        word = "jxqzw"
        parts = [{"role": "user", "content": _content_parts(word)}]
        for content, expected_text in ((word, False), (parts[0]["content"], True)):
            text = self._try_render([{"role": "user", "content": content}], None, {}) or ""
            if word in text and "'type'" not in text and '"type"' not in text:
                return expected_text
        return False

    def _cut(self, conversation: _Conversation, count: int) -> _Conversation:
        """Return the first messages of a conversation."""
        messages = conversation.messages[:count]
        traced_text = self._trace(messages, conversation.tools, conversation.options)
        return conversation._replace(messages=messages, traced=traced_text)

    def _renders_alike(self, full: _Conversation, end: _Conversation, index: int) -> bool:
        """Return whether an answer and all before it render alike in a conversation and in its part up to it."""
        if end is full:
            return self._locate(full, index).continues_prompt
        expected_place = self._locate(end, index)
        try:
            answer = self._locate(full, index)
        except ConversationError:
            return False
        return (
            answer.continues_prompt
            and answer.span == expected_place.span
            and answer.text[: answer.span[1]] == expected_place.text[: answer.span[1]]
        )

    def _finish(self, conversation: _Conversation, answers: Sequence[int]) -> RenderedChat:
        """Return a rendered conversation with the positions of answers."""
        text = conversation.traced.text
        spans = []
        for index in answers:
            answer = self._locate(conversation, index)
            text = answer.text
            spans.append((self._trained_start(conversation, index, answer), answer.span[1]))
        return self._restore_mentions(text, spans, answers)

    def _finish_one(self, conversation: _Conversation, index: int) -> RenderedChat:
        """Return a conversation that ends with an answer, as a model sees and continues it at that moment."""
        answer = self._locate(conversation, index)
        prompt = conversation.prompts.get(index)
        if answer.continues_prompt or prompt is None:
            return self._finish(conversation, [index])
        start, end = answer.span
        assert prompt.text is not None
        before = prompt.text[: len(prompt.text) - len(prompt.tail) + answer.header_length]
        text = before + answer.text[start:]
        shift = len(before) - start
        start = self._trained_start(conversation, index, answer)
        return self._restore_mentions(text, [(start + shift, end + shift)], [index])

    def _trained_start(self, conversation: _Conversation, index: int, answer: _Answer) -> int:
        """Return where an answer begins, after a prefill or an empty block of reasoning."""
        start, end = answer.span
        if answer.prefill_length or not self._skips_empty_reasoning:
            return start + answer.prefill_length
        return skip_empty_reasoning(answer.text, start, end, conversation.messages[index])

    def _locate(self, conversation: _Conversation, index: int) -> _Answer:
        """Return what a model generates as an answer.

        Raises:
            ConversationError: it cannot be located, or the template marks something else as the answer.
        """
        traced_text = conversation.traced
        message = conversation.messages[index]
        text = traced_text.text
        turn = find_turn(traced_text, index, message, self.where)
        if turn is None:
            return _Answer(text, (0, 0), 0, True)
        # 1. The header.
        prompt = self._find_prompt(conversation, index)
        header_length: int | None = None
        continues_prompt = prompt.text is None or prompt.text.startswith(text[: turn[0]])
        if continues_prompt:
            tail = prompt.tail if prompt.text is None else prompt.text[turn[0] :]
            header_length = self._header_length(tail, text[slice(*turn)])
        if header_length is None and prompt.text is not None:
            # The template writes earlier messages otherwise while they are the last ones.
            continues_prompt = False
            header_length = self._header_length(prompt.tail, text[slice(*turn)])
        if header_length is None:
            raise ConversationError(
                f"in the chat template {self.where} an answer does not continue the generation prompt, or its header "
                f"is not known (line {traced_text.lines[index]})"
            )
        start = turn[0] + header_length
        # 2. The end token.
        end = find_end(text, (start, turn[1]), message, self._special)
        if end is None and not text[turn[1] :].strip():
            # The next message would write it; which one depends on who speaks next.
            token = self._next_token("tool" if message.get("tool_calls") else "user")
            text = text[: turn[1]] + token if token else text
            end = len(text) if token else None
        span = (start, turn[1] if end is None else end)
        if traced_text.marks:
            check_mark(traced_text, turn, span, message, self.where)
        prefill_length = 0
        if index in conversation.prefills:
            prefill_length = self._find_prefill_end(conversation, index, turn) - start
        return _Answer(text, span, header_length, continues_prompt, prefill_length)

    def _find_prefill_end(self, conversation: _Conversation, index: int, turn: Span) -> int:
        """Return where the prefill of an answer ends in the text.

        Args:
            turn: start and end of what the answer's message wrote.

        Raises:
            ConversationError: the template changes the text where the prefill ends, or writes it otherwise in a prompt
                that a model continues.
        """
        changed_error = ConversationError(
            f"the chat template {self.where} changes the text of message {index + 1}, so it cannot be located where "
            "the answer continues the prompt"
        )
        prefill = conversation.prefills[index]
        messages = conversation.messages[: index + 1]
        message = messages[index]
        remainder = _plain_content(message)[len(prefill) :]
        # 1. Mark the end of the prefill. Nothing else may change.
        marked_message = {**message, "content": self._probe_content(prefill + _MESSAGE_END + remainder)}
        following = conversation.messages[index + 1 :]
        marked_text = self._trace(
            [*messages[:-1], marked_message, *following], conversation.tools, conversation.options
        ).text
        end = marked_text.find(_MESSAGE_END)
        is_unique = marked_text.count(_MESSAGE_END) == 1 and turn[0] < end <= turn[1]
        if not is_unique or marked_text.replace(_MESSAGE_END, "") != conversation.traced.text:
            raise changed_error
        # 2. A model that continues the prompt sees the same, but for white space that a template trims at the end.
        start = TracedMessage({**message, "content": self._probe_content(prefill)})
        start.pop("tool_calls", None)
        traced_text = self._trace([*messages[:-1], start], conversation.tools, conversation.options)
        prompt = self._cut_after_content(conversation._replace(messages=[*messages[:-1], start], traced=traced_text))
        if not prompt.rstrip().endswith(marked_text[turn[0] : end].rstrip()):
            raise changed_error
        return end

    def _escape_prefill(self, message: Message) -> str:
        """Return the part of a message's content that belongs to the prompt, as the template takes it.

        Raises:
            ConversationError: it ends inside a special token.
        """
        prefill, remainder = (
            self._escape_mentions(part)
            for part in (message.content[: message.prefill_length], message.content[message.prefill_length :])
        )
        if prefill + remainder != self._escape_mentions(message.content):
            raise ConversationError("the text that an answer continues ends inside a special token")
        return str(prefill)

    def _header_length(self, tail: str, output: str) -> int | None:
        """Return the length of the header in what an answer's message wrote; None if it does not continue the prompt.

        Args:
            tail: the generation prompt. Without one, the header is what answers have in common before their content.
        """
        common, header = self._headers or ("", None)
        if tail.strip():
            return find_header(tail, output, common)
        if header is None:
            return None
        return len(header) if header.strip() and output.startswith(header) else 0

    def _find_prompt(self, conversation: _Conversation, index: int) -> _Prompt:
        """Return the prompt of an answer."""
        # The text before a settled message is the begin of its prompt.
        if self._has_constant_prompt and 0 < index <= conversation.traced.num_settled:
            key = to_json([conversation.options, bool(conversation.tools)]) if conversation.options else ""
            key += "tools" if conversation.tools else ""
            if key not in self._constant_prompts:
                prompt = self._trace_prompt(conversation, 1)
                self._constant_prompts[key] = _Prompt(None, prompt.tail)
            return self._constant_prompts[key]
        if index not in conversation.prompts:
            conversation.prompts[index] = self._trace_prompt(conversation, index)
        return conversation.prompts[index]

    def _trace_prompt(self, conversation: _Conversation, count: int) -> _Prompt:
        """Return the prompt after the first messages. If the template refuses them, the usual header stands for it."""
        try:
            options = conversation.options | {"add_generation_prompt": True}
            traced_text = self._trace(conversation.messages[:count], conversation.tools, options)
        except ConversationError:
            return _Prompt(None, self._headers[0] if self._headers else "")
        tail = traced_text.text[traced_text.body_end :] if self._has_prompt else ""
        return _Prompt(traced_text.text[: traced_text.body_end + len(tail)], tail)

    @cached_property
    def _headers(self) -> tuple[str, str] | None:
        """What answers to a question have in common before their content, as first and last messages; and what the last
        one has. None if the template refuses the conversations."""
        word = "jxqzw"
        question = {"role": "user", "content": self._probe_content("question")}
        answer = {"role": "assistant", "content": self._probe_content(word)}
        headers = []
        for messages in ([question, answer], [question, answer, question, answer]):
            try:
                traced_text = self._trace(messages, None, {})
                turns = [find_turn(traced_text, index, answer, self.where) for index in range(1, len(messages), 2)]
            except ConversationError:
                continue
            headers += [traced_text.text[slice(*turn)].partition(word)[0] for turn in turns if turn]
        if not headers:
            return None
        common = headers[0]
        for header in headers:
            common = common[: common_length(common, header)]
        return common, headers[0]

    def _next_token(self, role: str) -> str:
        """Return the special token with which the next message ends an answer; empty if it writes none."""
        question = {"role": "user", "content": self._probe_content("question")}
        answer: JsonObject = {"role": "assistant", "content": self._probe_content("answer")}
        if role == "tool":
            call = {"id": "call00000", "type": "function", "function": {"name": "search", "arguments": {"a": "b"}}}
            answer = {**answer, "content": self._probe_content(""), "tool_calls": [call]}
        messages = [question, answer, {"role": role, "content": self._probe_content("next"), "name": "search"}]
        if role not in self._next_tokens:
            self._next_tokens[role] = ""
            try:
                traced_text = self._trace(messages, None, {})
                turn = find_turn(traced_text, 1, answer, self.where)
            except ConversationError:
                turn = None
            if turn is not None:
                start = turn[0] + common_length(
                    self._headers[0] if self._headers else "", traced_text.text[slice(*turn)]
                )
                end = find_end(traced_text.text, (start, turn[1]), answer, self._special)
                self._next_tokens[role] = traced_text.text[turn[1] : end] if end is not None and end > turn[1] else ""
        return self._next_tokens[role]

    @cached_property
    def _next_tokens(self) -> dict[str, str]:
        return {}

    def _probe_content(self, text: str) -> Any:
        return _content_parts(text) if self._takes_parts else text

    def _check_written(self, conversation: _Conversation, answers: Sequence[int]) -> None:
        """Raise ConversationError if the template leaves out a part of the conversation.

        Args:
            answers: indices of the answers whose reasoning must be written, too. A template may drop that of others,
                if it has a place for reasoning at all.
        """
        traced_text = conversation.traced
        for index, message in enumerate(conversation.messages):
            # Most messages have nothing but a content, which the template writes as it is.
            pieces = traced_text.pieces[index]
            content = message["content"]
            if (
                len(message) == 2
                and pieces
                and type(content) is str
                and content in traced_text.text[slice(*pieces[-1])]
            ):
                continue
            is_complete = index in answers or not self._has_reasoning
            message_text = "\n".join(traced_text.text[slice(*piece)] for piece in traced_text.pieces[index])
            missing = find_missing(message, message_text, is_complete)
            if missing and not message_text.strip():
                # Another message, or a line outside of loops, may have written it.
                missing = find_missing(message, traced_text.text, is_complete)
                if not missing and not self._is_surely_written(conversation, index):
                    missing = "content"
            if missing:
                role = "tool result" if message["role"] == "tool" else f"{message['role']} message"
                if missing == "tools":
                    raise UnsupportedToolsError(
                        f"the chat template {self.where} does not support tools: it leaves out a call"
                    )
                if missing == "reasoning":
                    raise ConversationError(
                        f"the chat template {self.where} does not support reasoning here: it leaves that of message "
                        f"{index + 1} out"
                    )
                raise ConversationError(
                    f"the chat template {self.where} does not write this {role} (message {index + 1}): "
                    f"{_plain_content(message).strip()[:40]}"
                )

    def _is_surely_written(self, conversation: _Conversation, index: int) -> bool:
        """Return whether the content of a message is in the text because the template wrote it, not by coincidence."""
        content = _plain_content(conversation.messages[index])
        if not content.strip():
            return True
        text = conversation.traced.text
        other_parts = [*conversation.messages[:index], *conversation.messages[index + 1 :], conversation.tools or []]
        part = content.strip()
        if part not in self.source and part not in to_json(other_parts) and len(part) > 12:
            return True
        # Change the content; the text must change with it.
        changed_message = {**conversation.messages[index]}
        changed_message["content"] = _content_parts(part + _MESSAGE_END) if self._takes_parts else part + _MESSAGE_END
        messages = [*conversation.messages[:index], changed_message, *conversation.messages[index + 1 :]]
        other_text = self._try_render(messages, conversation.tools, conversation.options)
        return other_text is not None and other_text != text

    def _cut_after_content(self, conversation: _Conversation) -> str:
        """Return the text without what the template writes after the content of the last message.

        The content itself can occur in what follows it, so its end is marked.
        """
        text = conversation.traced.text
        *earlier, last = conversation.messages
        content = _plain_content(last)
        marked_content = content + _MESSAGE_END
        marked_message = {**last, "content": _content_parts(marked_content) if self._takes_parts else marked_content}
        marked_text = self._trace([*earlier, marked_message], conversation.tools, conversation.options).text
        if _MESSAGE_END not in marked_text:
            raise ConversationError(f"the chat template {self.where} does not write the message to continue")
        # A template may write the content several times; the last one is the message.
        head, tail = (part.replace(_MESSAGE_END, "") for part in marked_text.rsplit(_MESSAGE_END, 1))
        # A template that trims the content does not trim the white space in front of the mark.
        is_trimmed = head + tail != text
        return head.removesuffix(content[len(content.rstrip()) :]) if is_trimmed else head

    def _try_render(
        self, messages: Sequence[JsonObject], tools: list[Any] | None, options: Mapping[str, Any]
    ) -> str | None:
        """Return the text of messages; None if the template refuses them."""
        try:
            return self._trace(messages, tools, options).text
        except ConversationError:
            return None

    def _trace(self, messages: Sequence[JsonObject], tools: list[Any] | None, options: Mapping[str, Any]) -> TracedText:
        """Render messages, and trace which of them wrote each piece of the text."""
        trace = WriterTrace(messages)
        traced_text = trace.divide(self._run(trace, tools, options))
        if trace.is_captured:
            # The template may have processed a text with marks in it.
            silent = WriterTrace(messages, is_silent=True)
            if silent.divide(self._run(silent, tools, options)).text != traced_text.text:
                raise ConversationError(
                    f"the chat template {self.where} processes the text of a loop over messages (line "
                    f"{max(traced_text.lines, default=0)}), so its answers cannot be located"
                )
        return traced_text

    def _run(self, trace: WriterTrace, tools: list[Any] | None, options: Mapping[str, Any]) -> str:
        """Return what the template writes, with the marks of a trace."""
        variables = {**self._variables, **options, "messages": trace.messages, "tools": tools, TRACE: trace}
        try:
            # Does the same as `Template.render`, but does not copy the constant variables.
            context = Context(self._template.environment, variables, self._template.name, self._template.blocks)
            return "".join(self._template.root_render_func(context))
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise ConversationError(f"the chat template {self.where} refuses it ({error})") from error

    def _escape_mentions(self, value: Any) -> Any:
        """Return a JSON value with the special tokens in its strings escaped."""
        if not self._escaped_tokens:
            return value
        if isinstance(value, dict):
            return {key: self._escape_mentions(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._escape_mentions(item) for item in value]
        if not isinstance(value, str):
            return value
        return self._special.pattern.sub(self._escape, value)

    def _escape(self, match: re.Match[str]) -> str:
        return f"{_MENTION_MARK}{chr(_FIRST_MENTION + self._escaped_tokens.index(match[0]))}{_MENTION_MARK}"

    def _restore_mentions(self, text: str, spans: Sequence[Span], messages: Sequence[int]) -> RenderedChat:
        """Restore the escaped special tokens in a text, and shift the positions of the answers accordingly."""
        if _MENTION_MARK not in text:
            return RenderedChat(text, tuple(spans), (), tuple(messages))

        def restore(part: str) -> str:
            return _MENTION.sub(lambda match: self._escaped_tokens[ord(match[1]) - _FIRST_MENTION], part)

        def shift(start: int, end: int) -> Span:
            return len(restore(text[:start])), len(restore(text[:end]))

        return RenderedChat(
            restore(text),
            tuple(shift(start, end) for start, end in spans),
            tuple(shift(*match.span()) for match in _MENTION.finditer(text)),
            tuple(messages),
        )


def _content_parts(text: str) -> list[JsonObject]:
    return [{"type": "text", "text": text}]


def _plain_content(message: JsonObject) -> str:
    content = message["content"]
    return content if isinstance(content, str) else str(content[0]["text"])
