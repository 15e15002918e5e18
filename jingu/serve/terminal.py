"""`jingu chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.request import Request, room_after
from jingu.infer.sampling import Sampling
from jingu.infer.verbs import Compute, write
from jingu.runtime.files import cannot_write, replace_text, unreadable
from jingu.runtime.signals import handling
from jingu.tune.rows import Message, RowError
from jingu.tune.speak import Speech, speaking

_WHOLE = ("max_tokens", "top_k", "seed")
_SETTINGS = ("max_tokens", *(each.name for each in fields(Sampling) if each.name != "logit_bias"))
_COMMANDS = ("help", "system", "reset", "undo", "retry", "set", "save", "load", "quit")
_QUOTES = '"""'


def chat(
    model: Path,
    *,
    system: str | None = None,
    template: str | None = None,
    max_tokens: int = 1024,
    temperature: float = 0.7,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    **compute: Any,
) -> None:
    """Talk with a model; where it has no template for conversations, it continues the text.

    At a terminal a mistake is told and the conversation goes on; where lines come from elsewhere, it ends there.

    Args:
        model: a run, a step of a run, a Hugging Face folder, a GGUF file or a packaged model.
        system: the system prompt.
        template: a template's name or file; None: the model's own.
        max_tokens: most tokens of an answer.
        compute: as of `jingu.infer.verbs.Compute`.

    Raises:
        JinguError: what is wrong with the model, the settings or, not at a terminal, a message.
    """
    sampling = Sampling(temperature, top_k, 1.0 if top_p is None else top_p, repetition_penalty, seed, min_p)
    how = Compute(**compute)
    found, speech = speaking(lambda: how.load(model), model, template)
    talk = Conversation(how.engine(found, max_batch=1), speech, sampling, max_tokens)
    if system:
        talk.system(system)
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        import readline  # noqa: F401 (what is typed can be edited, and called back)

        print(f"{found.name}: {'a conversation' if speech else 'it continues the text'}. /help tells the commands.")
    converse(talk, at_terminal)


def converse(talk: Conversation, at_terminal: bool) -> None:
    """Read messages and commands until there are no more."""
    # Ctrl-C breaks off what is read or done; one that comes while the last is answered would end the program.
    with handling(signal.SIG_IGN, signal.SIGINT):
        while not talk.ended:
            try:
                with handling(signal.default_int_handler, signal.SIGINT):
                    words = _read(at_terminal)
                    if words is None:
                        return
                    if words.startswith("/") and not words.startswith("//"):
                        talk.command(words)
                    elif words.strip():
                        talk.say(words.removeprefix("/") if words.startswith("//") else words)
            except KeyboardInterrupt:
                print("\n/quit or Ctrl-D leaves.")
            except (JinguError, RowError) as error:
                if not at_terminal:
                    raise error if isinstance(error, JinguError) else JinguError(f"{error}.") from error
                print(f"jingu: {error}", file=sys.stderr)


def _read(at_terminal: bool) -> str | None:
    """The next message, None at the end: a line, and the next where it ends in a backslash; or what stands between
    lines of three quotes."""
    lines: list[str] = []
    quoted = False
    while True:
        line = _line(("… " if lines or quoted else "> ") if at_terminal else None)
        if line is None:
            return "\n".join(lines) if lines else None
        if line.strip() == _QUOTES:
            if quoted:
                return "\n".join(lines)
            quoted = not lines
            if quoted:
                continue
        goes_on = not quoted and line.endswith("\\")
        lines.append(line[:-1] if goes_on else line)
        if not quoted and not goes_on:
            return "\n".join(lines)


def _line(prompt: str | None) -> str | None:
    if prompt is None:
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


class Conversation:
    """What was said, and how it is answered.

    Attributes:
        messages: all turns, a system prompt first where there is one. A model without a template continues their texts.
        ended: whether to leave.
    """

    def __init__(self, engine: Engine, speech: Speech | None, sampling: Sampling, max_tokens: int) -> None:
        self.messages: list[Message] = []
        self.ended = False
        self._engine = engine
        self._speech = speech
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._answers = 0
        self._file: Path | None = None

    def say(self, text: str) -> None:
        """Say something, and print the answer as it comes."""
        said = Message("user", text)
        answer = write(self._engine, self._request([*self.messages, said]))
        self._answers += 1
        self.messages += [said, Message("assistant", answer.text)]
        full = answer.tokens < self._max_tokens
        cut = "cut off: the model's context is full" if full else f"cut off at max_tokens={answer.tokens}"
        end = {"cancelled": "stopped", "length": cut}.get(answer.finish or "")
        notes = [*([end] if end else []), *([answer.speed] if sys.stdin.isatty() else [])]
        if notes:
            print(f"({'; '.join(notes)})", file=sys.stderr)

    def _request(self, messages: Sequence[Message]) -> Request:
        """The engine's request for the answer to these. Each answer has another seed, so that /retry makes another."""
        found = self._engine.loaded
        if self._speech is not None:
            ids = self._speech.prompt(tuple(messages))
        else:
            ids = found.encode("".join(message.content for message in messages))
        room = room_after(found.spec, len(ids))
        if room < 1:
            raise JinguError(
                f"the conversation has {len(ids)} tokens, and the model's context is {found.spec.context}.",
                fix="Take back a message (/undo), or begin anew (/reset).",
            )
        sampling = replace(self._sampling, seed=self._sampling.seed + self._answers)
        return Request(ids, sampling, min(self._max_tokens, room), self._speech.stop if self._speech else ())

    # Commands

    def command(self, words: str) -> None:
        """Do what a line that begins with a slash says."""
        name, _, rest = words[1:].partition(" ")
        if name not in _COMMANDS:
            near = get_close_matches(name, _COMMANDS, n=1)
            fix = f"Did you mean /{near[0]}?" if near else "/help lists them; a message that begins with / is typed //."
            raise JinguError(f"there is no command /{name}.", fix=fix)
        getattr(self, name)(rest.strip())

    def help(self, _: str) -> None:
        """/help: what can be said."""
        for name in _COMMANDS:
            print(getattr(self, name).__doc__)
        print(
            f"A line that ends in \\ goes on in the next; {_QUOTES} alone on a line begins and ends a long message.\n"
            "Ctrl-C stops an answer. A message that begins with / is typed //."
        )

    def system(self, text: str) -> None:
        """/system TEXT: set the system prompt; without TEXT, show it."""
        said = [message for message in self.messages if message.role != "system"]
        if text:
            if self._speech is None:
                raise JinguError(
                    "the model continues text, and a system prompt has no place in that.",
                    fix="Name a template for conversations: --template chatml.",
                )
            self.messages = [Message("system", text), *said]
        else:
            print(self.messages[0].content if len(said) < len(self.messages) else "(none)")

    def reset(self, _: str) -> None:
        """/reset: begin anew; the system prompt stays."""
        self.messages = [message for message in self.messages if message.role == "system"]

    def undo(self, _: str) -> None:
        """/undo: take back the last message and its answer."""
        self._last_message()
        while self.messages.pop().role != "user":
            pass

    def retry(self, _: str) -> None:
        """/retry: another answer to the last message."""
        last, before = self._last_message(), list(self.messages)
        self.undo("")
        try:
            self.say(last.content)
        except BaseException:
            self.messages = before
            raise

    def _last_message(self) -> Message:
        last = next((message for message in reversed(self.messages) if message.role == "user"), None)
        if last is None:
            raise JinguError("nothing was said yet.")
        return last

    def set(self, words: str) -> None:
        """/set: show the settings; /set temperature=0.3 top_p=0.9 changes them."""
        for word in words.split():
            name, sign, value = word.partition("=")
            if name not in _SETTINGS or not sign:
                raise JinguError(f"there is no setting {name}.", fix=f"Known are {', '.join(_SETTINGS)}.")
            self._set(name, value)
        if not words:
            shown = self._settings().items()
            print("\n".join(f"{name}={'none' if value is None else value}" for name, value in shown))

    def _set(self, name: str, value: Any) -> None:
        try:
            none = name == "top_k" and value in ("none", None)
            given: Any = None if none else int(value) if name in _WHOLE else float(value)
        except (ValueError, TypeError):
            kind = "a whole number" if name in _WHOLE else "a number"
            raise JinguError(f"{name} takes {kind}, not {value}.") from None
        if name != "max_tokens":
            self._sampling = replace(self._sampling, **{name: given})
        elif given is None or given < 1:
            raise JinguError(f"max_tokens is {value}, and should be 1 or more.")
        else:
            self._max_tokens = int(given)

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in {"max_tokens": self._max_tokens, **asdict(self._sampling)}.items()
                if name in _SETTINGS}  # fmt: skip

    def save(self, name: str) -> None:
        """/save FILE: write the conversation as JSON, a row that `jingu tune` reads."""
        file = self._named(name)
        if file.exists() and file != self._file:
            raise JinguError("there is a file already.", where=file, fix="Choose another name.")
        said = [{"role": message.role, "content": message.content} for message in self.messages]
        value = {"settings": self._settings(), "messages": said}
        try:
            replace_text(file, json.dumps(value, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise cannot_write(error, file) from error
        self._file = file

    def load(self, name: str) -> None:
        """/load FILE: go on with a conversation that was saved so, or exported from the chat page."""
        file = self._named(name)
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            said = TypeAdapter(list[Message]).validate_python(value["messages"])
        except OSError as error:
            raise unreadable(file, error) from error
        except (ValueError, LookupError, TypeError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise JinguError(
                f"this is no conversation ({why}).", where=file, fix="Give a file that /save wrote."
            ) from error
        settings = value.get("settings")
        for key, setting in (settings if isinstance(settings, dict) else {}).items():
            if key in _SETTINGS:
                self._set(key, setting)
        self.messages, self._file = said, file
        print(f"{len(said)} message{'s' * (len(said) != 1)}")

    def _named(self, name: str) -> Path:
        if not name and self._file is None:
            raise JinguError("the name of a file is missing.", fix="Say for example /save talk.json.")
        return Path(name).expanduser() if name else self._file  # type: ignore[return-value]

    def quit(self, _: str) -> None:
        """/quit: leave (so does Ctrl-D)."""
        self.ended = True
