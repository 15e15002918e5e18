"""`jingu chat`: chat with a model in the terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jingu.chat.chat_format import ChatFormat
from jingu.chat.messages import ConversationError, Message
from jingu.errors import JinguError, pluralize
from jingu.infer.engine import Engine
from jingu.infer.generate import InferenceOptions, print_stream
from jingu.infer.inference_model import load_chat_model
from jingu.infer.request import Request, max_new_tokens
from jingu.infer.sampling import SamplingOptions, SamplingParams, sampling_params
from jingu.runtime.files import read_error, write_error, write_text_atomically
from jingu.runtime.signals import handle_signals

_INTEGER_SETTINGS = ("max_tokens", "top_k", "seed")
_SETTINGS = ("max_tokens", *(param.name for param in fields(SamplingParams) if param.name != "logit_bias"))
_COMMANDS = ("help", "system", "reset", "undo", "retry", "set", "save", "load", "quit")
_QUOTES = '"""'
# On terminals narrower than this, words are not wrapped.
_MIN_COLUMNS = 20


def chat(
    model: Path,
    sampling: SamplingOptions,
    inference: InferenceOptions,
    system: str | None = None,
    template: str | None = None,
    max_tokens: int = 1024,
) -> None:
    """Chat with a model. A model without chat template continues the text.

    At a terminal, an error is printed and the conversation continues. With other input (a pipe or a file), the first
    error ends the conversation.

    Args:
        model: a run, a step of a run, a Hugging Face folder, a GGUF file or a packaged model.
        system: the system prompt.
        template: name or file of a chat template; None uses the model's own.
        max_tokens: maximum number of tokens of an answer.

    Raises:
        JinguError: the model or the settings cannot be used; or, if the input is not a terminal, a message.
    """
    inference = inference.use_int4_blocks(model)
    chat_model, chat_format = load_chat_model(lambda: inference.load(model), model, template)
    params = sampling_params(sampling, chat_model.default_sampling, temperature=0.7)
    session = ChatSession(inference.make_engine(chat_model, 1), chat_format, params, max_tokens)
    if system:
        session.system(system)
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        # The import gives `input` line editing and a history.
        import readline  # noqa: F401

        mode = "a conversation" if chat_format else "no chat template, it continues the text"
        print(f"{chat_model.name}: {mode}. /help lists the commands.")
    run_chat_loop(session, at_terminal)


def run_chat_loop(session: ChatSession, at_terminal: bool) -> None:
    """Handle messages and commands until the input or the session ends."""
    # Ctrl-C interrupts the current line or answer. At other times it is ignored, as it would end the program.
    with handle_signals(signal.SIG_IGN, signal.SIGINT):
        while not session.has_ended:
            try:
                with handle_signals(signal.default_int_handler, signal.SIGINT):
                    text = _read_message(at_terminal)
                    if text is None:
                        return
                    if text.startswith("/") and not text.startswith("//"):
                        session.run_command(text)
                    elif text.strip():
                        # Two slashes are the escape for a message that begins with a slash.
                        session.say(text.removeprefix("/") if text.startswith("//") else text)
            except KeyboardInterrupt:
                print("\nType /quit or Ctrl-D to leave.")
            except (JinguError, ConversationError) as error:
                if not at_terminal:
                    raise error if isinstance(error, JinguError) else JinguError(f"{error}.") from error
                print(f"jingu: {error}", file=sys.stderr)


def _read_message(at_terminal: bool) -> str | None:
    """Return the next message, None at the end of the input.

    A message is a line, or the lines between two lines of three quotes. A backslash at the end of a line continues the
    message in the next line.
    """
    lines: list[str] = []
    is_quoted = False
    while True:
        line = _read_line(("… " if lines or is_quoted else "> ") if at_terminal else None)
        if line is None:
            return "\n".join(lines) if lines else None
        if line.strip() == _QUOTES:
            if is_quoted:
                return "\n".join(lines)
            if not lines:
                is_quoted = True
                continue
        is_continued = not is_quoted and line.endswith("\\")
        lines.append(line[:-1] if is_continued else line)
        if not is_quoted and not is_continued:
            return "\n".join(lines)


def _read_line(prompt: str | None) -> str | None:
    if prompt is None:
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


class WordWrapper:
    """Wraps streamed text at spaces to the width of a terminal. Code blocks are not wrapped.

    Args:
        columns: width of the terminal.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._column = 0
        self._spaces = ""
        # The current word is withheld until its end, when it is known whether it fits into the line.
        self._word = ""
        self._in_code = False

    def push(self, text: str | None) -> str:
        """Add a piece of text and return the text to print now; None ends the text."""
        if text is None:
            return self._end_word()
        parts = []
        for character in text:
            if character == "\n":
                parts += [self._end_word(), self._spaces, "\n"]
                self._column = 0
                self._spaces = ""
            elif character == " ":
                parts.append(self._end_word())
                self._spaces += character
            else:
                self._word += character
                # Chinese and Japanese may break after any character; a word as long as a line must break.
                if _is_wide(character) or len(self._word) >= self._columns:
                    parts.append(self._end_word())
        return "".join(parts)

    def _end_word(self) -> str:
        """Return the withheld word, preceded by its spaces or, if it does not fit into the line, by a line break."""
        word = self._word
        if not word:
            return ""
        before = self._spaces
        if self._column == 0 and word.startswith("```"):
            self._in_code = not self._in_code
        width = sum(2 if _is_wide(character) else 1 for character in word)
        if not self._in_code and self._column > 0 and self._column + len(before) + width > self._columns:
            before = "\n"
            self._column = 0
        else:
            self._column += len(before)
        self._column += width
        self._spaces = ""
        self._word = ""
        return before + word


def _is_wide(character: str) -> bool:
    """Return whether a character takes two columns of a terminal."""
    return unicodedata.east_asian_width(character) in ("W", "F")


class ChatSession:
    """A conversation with a model, and the settings of its answers.

    Attributes:
        messages: all messages; the first one is the system prompt, if there is one.
        has_ended: whether the user has left.
    """

    def __init__(
        self, engine: Engine, chat_format: ChatFormat | None, sampling: SamplingParams, max_tokens: int
    ) -> None:
        self.messages: list[Message] = []
        self.has_ended = False
        self._engine = engine
        self._chat_format = chat_format
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._num_answers = 0
        self._file: Path | None = None

    def say(self, text: str) -> None:
        """Send a message, and print the answer while it is generated."""
        message = Message("user", text)
        # Messages are added only after the answer, so that an error does not change the conversation.
        request = self._build_request([*self.messages, message])
        columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0
        # Some terminals report a width of 0.
        layout = WordWrapper(columns).push if columns >= _MIN_COLUMNS else None
        answer = print_stream(self._engine, request, layout=layout)
        self._num_answers += 1
        self.messages += [message, Message("assistant", answer.text)]
        notes = []
        if answer.finish == "cancelled":
            notes.append("stopped")
        elif answer.finish == "length" and answer.tokens < self._max_tokens:
            notes.append("truncated: the model's context is full")
        elif answer.finish == "length":
            notes.append(f"truncated at max_tokens={answer.tokens}")
        if sys.stdin.isatty():
            notes.append(answer.speed)
        if notes:
            print(f"({'; '.join(notes)})", file=sys.stderr)

    def _build_request(self, messages: Sequence[Message]) -> Request:
        """Return the engine request for an answer to the messages."""
        model = self._engine.model
        if self._chat_format is not None:
            ids = self._chat_format.encode_prompt(tuple(messages))
            stop = self._chat_format.stop
        else:
            ids = model.encode("".join(message.content for message in messages))
            stop = ()
        room = max_new_tokens(model.spec, len(ids))
        if room < 1:
            raise JinguError(
                f"the conversation has {len(ids)} tokens, but the model's context is "
                f"{model.spec.max_position_embeddings} tokens.",
                fix="Remove a message (/undo), or start over (/reset).",
            )
        # Each answer has a seed of its own, so that /retry generates a different answer.
        sampling = replace(self._sampling, seed=self._sampling.seed + self._num_answers)
        return Request(ids, sampling, min(self._max_tokens, room), stop)

    # Commands. /help prints their docstrings.

    def run_command(self, line: str) -> None:
        """Run the command of a line that begins with a slash."""
        name, _, argument = line[1:].partition(" ")
        if name not in _COMMANDS:
            matches = get_close_matches(name, _COMMANDS, n=1)
            fix = "/help lists the commands; type // to begin a message with a slash."
            if matches:
                fix = f"Did you mean /{matches[0]}?"
            raise JinguError(f"there is no command /{name}.", fix=fix)
        getattr(self, name)(argument.strip())

    def help(self, _: str) -> None:
        """/help: list the commands"""
        for name in _COMMANDS:
            print(getattr(self, name).__doc__)
        print(
            f"End a line with \\ to continue it in the next; enclose a long message in lines of {_QUOTES}.\n"
            "Ctrl-C stops an answer. Type // to begin a message with a slash."
        )

    def system(self, text: str) -> None:
        """/system TEXT: set the system prompt; without TEXT, show it"""
        other_messages = [message for message in self.messages if message.role != "system"]
        if not text:
            print(self.messages[0].content if len(other_messages) < len(self.messages) else "(none)")
            return
        if self._chat_format is None:
            raise JinguError(
                "the model has no chat template, so there is no place for a system prompt.",
                fix="Name a chat template: --template chatml.",
            )
        self.messages = [Message("system", text), *other_messages]

    def reset(self, _: str) -> None:
        """/reset: start over; the system prompt stays"""
        self.messages = [message for message in self.messages if message.role == "system"]

    def undo(self, _: str) -> None:
        """/undo: remove the last message and its answer"""
        self._last_user_message()
        while self.messages.pop().role != "user":
            pass

    def retry(self, _: str) -> None:
        """/retry: generate another answer to the last message"""
        message = self._last_user_message()
        previous = list(self.messages)
        self.undo("")
        try:
            self.say(message.content)
        except BaseException:
            self.messages = previous
            raise

    def _last_user_message(self) -> Message:
        for message in reversed(self.messages):
            if message.role == "user":
                return message
        raise JinguError("there is no message yet.")

    def set(self, assignments: str) -> None:
        """/set: show the settings; /set temperature=0.3 top_p=0.9 changes them"""
        for assignment in assignments.split():
            name, sign, value = assignment.partition("=")
            if name not in _SETTINGS or not sign:
                raise JinguError(f"there is no setting {name}.", fix=f"The settings are {', '.join(_SETTINGS)}.")
            self._set(name, value)
        if not assignments:
            for name, value in self._settings().items():
                print(f"{name}={'none' if value is None else value}")

    def _set(self, name: str, value: Any) -> None:
        is_integer = name in _INTEGER_SETTINGS
        number: Any = None
        if name != "top_k" or value not in ("none", None):
            try:
                number = int(value) if is_integer else float(value)
            except (ValueError, TypeError):
                kind = "an integer" if is_integer else "a number"
                raise JinguError(f"{name} takes {kind}, not {value}.") from None
        if name != "max_tokens":
            self._sampling = replace(self._sampling, **{name: number})
        elif number < 1:
            raise JinguError(f"max_tokens is {value}, but must be at least 1.")
        else:
            self._max_tokens = number

    def _settings(self) -> dict[str, Any]:
        values = {"max_tokens": self._max_tokens, **asdict(self._sampling)}
        return {name: values[name] for name in _SETTINGS}

    def save(self, name: str) -> None:
        """/save FILE: write the conversation as JSON, which is also a row for `jingu tune`"""
        file = self._resolve_file(name)
        # Overwrite only the file that this session saved or loaded.
        if file.exists() and file != self._file:
            raise JinguError("the file exists already.", where=file, fix="Choose another name.")
        messages = [{"role": message.role, "content": message.content} for message in self.messages]
        value = {"settings": self._settings(), "messages": messages}
        try:
            write_text_atomically(file, json.dumps(value, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise write_error(error, file) from error
        self._file = file

    def load(self, name: str) -> None:
        """/load FILE: continue a conversation that /save wrote or the chat page exported"""
        file = self._resolve_file(name)
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            messages = TypeAdapter(list[Message]).validate_python(value["messages"])
        except OSError as error:
            raise read_error(file, error) from error
        except (ValueError, LookupError, TypeError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise JinguError(
                f"the file is not a conversation ({reason}).", where=file, fix="Name a file that /save wrote."
            ) from error
        settings = value.get("settings")
        if isinstance(settings, dict):
            for key in filter(settings.__contains__, _SETTINGS):
                self._set(key, settings[key])
        self.messages = messages
        self._file = file
        print(pluralize(len(messages), "message"))

    def _resolve_file(self, name: str) -> Path:
        """Return the path of a file; without a name, that of the file last saved or loaded."""
        if name:
            return Path(name).expanduser()
        if self._file is None:
            raise JinguError("the name of a file is missing.", fix="For example: /save chat.json.")
        return self._file

    def quit(self, _: str) -> None:
        """/quit: leave (as Ctrl-D does)"""
        self.has_ended = True
