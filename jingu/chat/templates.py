"""Chat templates: render a conversation as text, and locate the assistant's answers in it.

The positions of answers decide which tokens are trained, so they are computed, never guessed: the trace of a rendered
text (`jingu.chat.tracing`) says which message wrote which piece of it, and `jingu.chat.answer_spans` finds in the piece
of an answer what a model generates there. What cannot be located is refused, and so is a conversation of which the
template leaves out a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jingu.chat.answer_spans import (
    EMPTY_WORDS,
    check_mark,
    common_length,
    find_end,
    find_header,
    find_turn,
    skip_empty_reasoning,
)
from jingu.chat.messages import ConversationError, JsonObject, Message
from jingu.chat.template_environment import to_json
from jingu.chat.template_renderer import (
    MESSAGE_END,
    Conversation,
    RenderedChat,
    RenderedPrompt,
    TemplateRenderer,
    plain_content,
)
from jingu.chat.tracing import (
    Span,
    TracedMessage,
)
from jingu.text.tokenizer import Tokenizer

Turns = Literal["auto", "whole", "each"]


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


class ChatTemplate(TemplateRenderer):
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
        super().__init__(source, tokenizer, where, parse_special_tokens=parse_special_tokens)
        self.tools_source = tools_source
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
        self._has_prompt = "add_generation_prompt" in source
        self._skips_empty_reasoning = not train_empty_reasoning and any(word in source for word in EMPTY_WORDS)
        # The text that the template writes after the messages for a new answer, by the further variables.
        self._constant_prompts: dict[str, RenderedPrompt] = {}

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
        conversation = self.start_conversation(messages, tools, variables)
        self.check_written(conversation, answers)
        return self.restore_mentions(conversation.traced.text, [], [])

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
        conversation = self.start_conversation(messages, tools, variables)
        if turns != "each" and all(index < conversation.traced.num_settled for index in answers):
            self.check_written(conversation, answers)
            return [self._finish(conversation, answers)]
        last = len(messages) - 1
        # Each answer with the conversation up to it.
        ends: dict[int, Conversation] = {}

        def end_at(index: int) -> Conversation:
            if index not in ends:
                ends[index] = conversation if index == last else self.cut(conversation, index + 1)
            return ends[index]

        unsettled_answers = [index for index in answers if index >= conversation.traced.num_settled]
        is_whole = turns == "whole" or all(
            self._renders_alike(conversation, end_at(index), index) for index in unsettled_answers
        )
        if is_whole and turns != "each":
            self.check_written(conversation, answers)
            return [self._finish(conversation, answers)]
        rendered_chats = []
        for index in answers:
            self.check_written(end_at(index), [index])
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
        conversation = self.start_conversation(messages, tools, variables, add_generation_prompt=not continue_final)
        text = conversation.traced.text
        if continue_final:
            text = self.cut_after_content(conversation)
        self.check_written(conversation, [])
        return self.restore_mentions(text, [], [])

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
            end = self.special_tokens.last(text)
            # What follows a call is known only if it is a token; it may be the call's own syntax.
            if not end and messages[1] is answer:
                end = text.rpartition("answer")[2].strip()
            ends.append(end)
        return [end for end in dict.fromkeys(ends) if end]

    def _renders_alike(self, full: Conversation, end: Conversation, index: int) -> bool:
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

    def _finish(self, conversation: Conversation, answers: Sequence[int]) -> RenderedChat:
        """Return a rendered conversation with the positions of answers."""
        text = conversation.traced.text
        spans = []
        for index in answers:
            answer = self._locate(conversation, index)
            text = answer.text
            spans.append((self._trained_start(conversation, index, answer), answer.span[1]))
        return self.restore_mentions(text, spans, answers)

    def _finish_one(self, conversation: Conversation, index: int) -> RenderedChat:
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
        return self.restore_mentions(text, [(start + shift, end + shift)], [index])

    def _trained_start(self, conversation: Conversation, index: int, answer: _Answer) -> int:
        """Return where an answer begins, after a prefill or an empty block of reasoning."""
        start, end = answer.span
        if answer.prefill_length or not self._skips_empty_reasoning:
            return start + answer.prefill_length
        return skip_empty_reasoning(answer.text, start, end, conversation.messages[index])

    def _locate(self, conversation: Conversation, index: int) -> _Answer:
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
        end = find_end(text, (start, turn[1]), message, self.special_tokens)
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

    def _find_prefill_end(self, conversation: Conversation, index: int, turn: Span) -> int:
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
        remainder = plain_content(message)[len(prefill) :]
        # 1. Mark the end of the prefill. Nothing else may change.
        marked_message = {**message, "content": self.probe_content(prefill + MESSAGE_END + remainder)}
        following = conversation.messages[index + 1 :]
        marked_text = self.trace(
            [*messages[:-1], marked_message, *following], conversation.tools, conversation.options
        ).text
        end = marked_text.find(MESSAGE_END)
        is_unique = marked_text.count(MESSAGE_END) == 1 and turn[0] < end <= turn[1]
        if not is_unique or marked_text.replace(MESSAGE_END, "") != conversation.traced.text:
            raise changed_error
        # 2. A model that continues the prompt sees the same, but for white space that a template trims at the end.
        start = TracedMessage({**message, "content": self.probe_content(prefill)})
        start.pop("tool_calls", None)
        traced_text = self.trace([*messages[:-1], start], conversation.tools, conversation.options)
        prompt = self.cut_after_content(conversation._replace(messages=[*messages[:-1], start], traced=traced_text))
        if not prompt.rstrip().endswith(marked_text[turn[0] : end].rstrip()):
            raise changed_error
        return end

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

    def _find_prompt(self, conversation: Conversation, index: int) -> RenderedPrompt:
        """Return the prompt of an answer."""
        # The text before a settled message is the begin of its prompt.
        if self.has_constant_prompt and 0 < index <= conversation.traced.num_settled:
            key = to_json([conversation.options, bool(conversation.tools)]) if conversation.options else ""
            key += "tools" if conversation.tools else ""
            if key not in self._constant_prompts:
                prompt = self._trace_prompt(conversation, 1)
                self._constant_prompts[key] = RenderedPrompt(None, prompt.tail)
            return self._constant_prompts[key]
        if index not in conversation.prompts:
            conversation.prompts[index] = self._trace_prompt(conversation, index)
        return conversation.prompts[index]

    def _trace_prompt(self, conversation: Conversation, count: int) -> RenderedPrompt:
        """Return the prompt after the first messages. If the template refuses them, the usual header stands for it."""
        try:
            options = conversation.options | {"add_generation_prompt": True}
            traced_text = self.trace(conversation.messages[:count], conversation.tools, options)
        except ConversationError:
            return RenderedPrompt(None, self._headers[0] if self._headers else "")
        tail = traced_text.text[traced_text.body_end :] if self._has_prompt else ""
        return RenderedPrompt(traced_text.text[: traced_text.body_end + len(tail)], tail)

    @cached_property
    def _headers(self) -> tuple[str, str] | None:
        """What answers to a question have in common before their content, as first and last messages; and what the last
        one has. None if the template refuses the conversations."""
        word = "jxqzw"
        question = {"role": "user", "content": self.probe_content("question")}
        answer = {"role": "assistant", "content": self.probe_content(word)}
        headers = []
        for messages in ([question, answer], [question, answer, question, answer]):
            try:
                traced_text = self.trace(messages, None, {})
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
        question = {"role": "user", "content": self.probe_content("question")}
        answer: JsonObject = {"role": "assistant", "content": self.probe_content("answer")}
        if role == "tool":
            call = {"id": "call00000", "type": "function", "function": {"name": "search", "arguments": {"a": "b"}}}
            answer = {**answer, "content": self.probe_content(""), "tool_calls": [call]}
        messages = [question, answer, {"role": role, "content": self.probe_content("next"), "name": "search"}]
        if role not in self._next_tokens:
            self._next_tokens[role] = ""
            try:
                traced_text = self.trace(messages, None, {})
                turn = find_turn(traced_text, 1, answer, self.where)
            except ConversationError:
                turn = None
            if turn is not None:
                start = turn[0] + common_length(
                    self._headers[0] if self._headers else "", traced_text.text[slice(*turn)]
                )
                end = find_end(traced_text.text, (start, turn[1]), answer, self.special_tokens)
                self._next_tokens[role] = traced_text.text[turn[1] : end] if end is not None and end > turn[1] else ""
        return self._next_tokens[role]

    @cached_property
    def _next_tokens(self) -> dict[str, str]:
        return {}
