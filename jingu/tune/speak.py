"""How a model is spoken with: a conversation as ids, and what ends an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from jingu.checkpoint.hub import open_model
from jingu.config.load import load_config
from jingu.config.sections.data import SupervisedSettings
from jingu.errors import JinguError
from jingu.infer.load import Loaded
from jingu.text.tokenizer import Tokenizer
from jingu.tune.rows import RESERVED, Fields, Message, Row, RowError
from jingu.tune.supervise import encode
from jingu.tune.templates import Template, find_template


@dataclass(frozen=True)
class Speech:
    """A template, and what it writes after an answer.

    Attributes:
        end_ids: the special token that ends an answer; empty where no single token does.
        stop: the text that ends one; empty where a token does.
    """

    template: Template
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    stop: tuple[str, ...]

    def prompt(self, messages: tuple[Message, ...], tools: tuple[Fields, ...] = ()) -> tuple[int, ...]:
        """Ids after which the model is to answer. Special tokens that a text mentions are not such tokens.

        Raises:
            RowError: the template has no place for it.
        """
        for text in (*(message.content for message in messages), json.dumps(tools, ensure_ascii=False)):
            if found := RESERVED.search(text):
                raise RowError(f"U+{ord(found[0]):04X} is no character and cannot stand in text")
        return tuple(encode(self.template.prompt(messages, tools), self.tokenizer)[0])


def speaking(load: Callable[[], Loaded], path: Path, choice: str | None = None) -> tuple[Loaded, Speech | None]:
    """A model that ends its answers as its template does, and how to speak with it: as `find_speech`. What is wrong
    with a template that is named is told before the model is loaded, which takes its time."""
    if choice is not None:
        find_speech(path, Tokenizer.load(open_model(path).tokenizer()), choice)
    loaded = load()
    speech = find_speech(path, loaded.tokenizer, choice)
    ends = () if speech is None else speech.end_ids
    return replace(loaded, end_ids=tuple(dict.fromkeys((*loaded.end_ids, *ends)))), speech


def find_speech(path: Path, tokenizer: Tokenizer, choice: str | None = None) -> Speech | None:
    """How to speak with a model: by the template that is named, or else the one that its run was tuned with, or else
    the tokenizer's own; None where there is none.

    Args:
        path: the model's.
        choice: a template's name, or a file.

    Raises:
        JinguError: there is no such template.
    """
    where = "--template" if choice else "data.objective.template"
    choice = choice or _tuned_with(path) or "auto"
    if choice == "auto" and tokenizer.chat_template is None:
        return None
    template = find_template(choice, tokenizer, where=where)
    closing = _closing(template)
    ids = tokenizer.encode(closing, special=True)
    if ids and ids[0] in tokenizer.special_tokens.values():
        return Speech(template, tokenizer, (ids[0],), ())
    return Speech(template, tokenizer, (), (closing,) if closing else ())


def _tuned_with(path: Path) -> str | None:
    """The template of the run that trained a model, where that was instruction tuning."""
    for run in (path, path.absolute().parent.parent):
        if (run / "config.yaml").is_file() and (run / "model.json").is_file():
            objective = load_config(run / "config.yaml", []).data.objective
            return objective.template if isinstance(objective, SupervisedSettings) else None
    return None


def _closing(template: Template) -> str:
    """What a template writes after an answer."""
    try:
        shown = template.render(Row("messages", (Message("user", "question"), Message("assistant", "answer"))))
    except (RowError, JinguError):
        return ""
    start, end = shown.answers[-1]
    return shown.text[start:end].rpartition("answer")[2].strip()
