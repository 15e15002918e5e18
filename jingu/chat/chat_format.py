"""The chat format of a model: how a conversation becomes a prompt, and which token or text ends an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jingu.chat.messages import JsonObject, Message, check_characters
from jingu.chat.template_sources import load_template
from jingu.chat.templates import ChatTemplate
from jingu.chat.tokenization import encode_rendered
from jingu.config.load import load_stored_config
from jingu.config.sections.data import RowSettings
from jingu.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatFormat:
    """A chat template, and what ends an answer that was rendered with it.

    Attributes:
        eos_token_ids: the special tokens that end an answer, that of a plain answer first: some templates end an answer
            that calls a tool with another one. Empty if no special token ends an answer.
        stop: the text that ends an answer; empty if a special token does, or if the end of an answer is unknown.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    stop: tuple[str, ...]

    def encode_prompt(
        self,
        messages: tuple[Message, ...],
        tools: tuple[JsonObject, ...] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt: the conversation and the header of the answer.

        A special token inside a message is encoded as ordinary text, so that no message can end its own turn.

        Args:
            tools: definitions of the tools that the model may call.
            variables: further variables of the template, which are JSON values.
            continue_final: whether the model continues the last message instead of starting a new one.

        Raises:
            ConversationError: a message, tool or variable contains a reserved character, or the template refuses the
                conversation or ignores its tools.
        """
        # All of these can reach the text. JSON without escapes contains every string of a value.
        for message in messages:
            calls = json.dumps(message.tool_calls, ensure_ascii=False)
            for text in (message.content, message.reasoning_content, message.name, message.tool_call_id, calls):
                check_characters(text)
        check_characters(json.dumps([tools, dict(variables or {})], ensure_ascii=False))
        rendered = self.template.render_prompt(messages, tools, variables, continue_final=continue_final)
        return tuple(encode_rendered(rendered, self.tokenizer)[0])


def find_chat_format(path: Path, tokenizer: Tokenizer, template_name: str | None = None) -> ChatFormat | None:
    """Return the chat format of a model, or None if it has no template.

    The first of these templates is used: `template_name`, the template of the instruction tuning that trained the
    model, the tokenizer's own.

    Args:
        path: the model's folder or file.
        template_name: name of a template, as for `load_template`, or its file.

    Raises:
        JinguError: there is no such template, or it is not valid Jinja.
    """
    where = "--template" if template_name else "data.objective.template"
    name = template_name or _template_of_run(path, tokenizer) or "auto"
    if name == "auto" and tokenizer.chat_template is None:
        return None
    template = load_template(name, tokenizer, where=where)
    eos_token_ids = []
    stop = []
    for end in template.find_ends():
        if end in tokenizer.special_tokens:
            eos_token_ids.append(tokenizer.special_tokens[end])
        else:
            stop.append(end)
    return ChatFormat(template, tokenizer, tuple(eos_token_ids), tuple(stop))


def _template_of_run(path: Path, tokenizer: Tokenizer) -> str | None:
    """Return the template of the run that trained a model, as for `load_template`; None if `path` is not of a run.

    It is the text that the run keeps with its tokenizer, or else the setting `data.objective.template`.
    """
    # `path` is the run itself or one of its checkpoints, RUN/checkpoints/STEP.
    for run in (path, path.absolute().parent.parent):
        if (run / "config.yaml").is_file() and (run / "model.json").is_file():
            template = run / "tokenizer" / "chat_template.jinja"
            if template.is_file():
                is_own = template.read_text(encoding="utf-8") == tokenizer.chat_template
                return "auto" if is_own else str(template)
            objective = load_stored_config(run / "config.yaml").data.objective
            return objective.template if isinstance(objective, RowSettings) else None
    return None
