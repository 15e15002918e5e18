"""`jingu chat`: through a pipe, and at a real terminal (a pty)."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.chat.chat_format import find_chat_format
from jingu.chat.messages import Message
from jingu.cli import main
from jingu.config.sections.model import ModelSettings
from jingu.formats.export import export_hf
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel, load
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.runtime.signals import handle_signals
from jingu.serve import terminal as terminal_module
from jingu.text.tokenizer_training import train_tokenizer
from jingu.tune.row_formats import parse_row
from tests.infer.conftest import filled
from tests.limits import PATIENCE

GREEDY = ["--temperature", "0", "--precision", "fp32", "--device", "cpu"]
CONTEXT = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a Hugging Face folder, without a template of its own."""
    place = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(iter(["the stop is near, the end is far. " * 3, "的数据 🙂"]), 280, ["<|endoftext|>"])
    settings = ModelSettings(hidden_size=24, num_heads=3, num_layers=2, initializer_range=0.4)
    model = filled(settings, tokenizer, CONTEXT)
    tokenizer.save(place / "tokenizer")
    export_hf(model.spec, model.module.state_dict().__getitem__, place / "tokenizer", place / "tiny")
    return place / "tiny"


@pytest.fixture(scope="module")
def model(folder: Path) -> InferenceModel:
    return load(folder, "fp32", "cpu")


def piped(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", str(folder), *GREEDY, *options])


def answers(model: InferenceModel, template: str, *messages: str, max_tokens: int, system: str = "") -> list[str]:
    """Return the engine's answers, turn by turn."""
    speech = find_chat_format(Path("nowhere"), model.tokenizer, template)
    assert speech is not None
    turns = [Message("system", system)] if system else []
    for text in messages:
        turns.append(Message("user", text))
        request = Request(speech.encode_prompt(tuple(turns)), SamplingParams(), max_tokens, speech.stop)
        turns.append(Message("assistant", Engine(model).generate([request])[0]))
    return [turn.content for turn in turns if turn.role == "assistant"]


def test_piped_lines_are_messages(
    folder: Path, model: InferenceModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'the near\none \\\nand two\n\n"""\na\n\nb\n"""\n//set\n'
    assert piped(monkeypatch, folder, text, "--template", "chatml", "--max-tokens", "6", "--system", "far") == 0
    messages = ("the near", "one \nand two", "a\n\nb", "/set")
    expected = answers(model, "chatml", *messages, max_tokens=6, system="far")
    assert capsys.readouterr().out == "".join(f"{item}\n" for item in expected)


def test_a_model_without_a_template_continues_the_text(
    folder: Path, model: InferenceModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, folder, "the end\n is\n", "--max-tokens", "5") == 0
    (first,) = Engine(model).generate([Request(model.encode("the end"), SamplingParams(), 5)])
    (second,) = Engine(model).generate([Request(model.encode(f"the end{first} is"), SamplingParams(), 5)])
    printed = capsys.readouterr()
    assert printed.out == f"{first}\n{second}\n"
    assert printed.err == "(truncated at max_tokens=5)\n" * 2
    assert piped(monkeypatch, folder, "/system be brief\n") == 2
    assert "there is no place for a system prompt" in capsys.readouterr().err


def test_commands(
    folder: Path,
    model: InferenceModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "talk.json"
    text = ["/system near", "the", "stop", "/undo", "end", "/retry", f"/save {file}", "/save", "/reset", "/system"]
    text += ["the", f"/load {file}", "/set max_tokens=3 top_k=7", "/set", "far", "/quit", "not said"]
    assert piped(monkeypatch, folder, "\n".join(text), "--template", "chatml", "--max-tokens", "4") == 0
    expected = answers(model, "chatml", "the", "stop", max_tokens=4, system="near")
    first, end = answers(model, "chatml", "the", "end", max_tokens=4, system="near")
    printed = capsys.readouterr().out.removesuffix("\n")
    before, _, settings = printed.partition("5 messages\n")
    assert before == "\n".join([*expected, end, end, "near", first]) + "\n"
    assert "max_tokens=3\ntemperature=0.0\ntop_k=7\n" in settings
    saved = json.loads(file.read_text(encoding="utf-8"))
    turns = [("system", "near"), ("user", "the"), ("assistant", first), ("user", "end"), ("assistant", end)]
    assert [(item["role"], item["content"]) for item in saved["messages"]] == turns
    assert parse_row({"messages": saved["messages"]}).messages[0].role == "system"  # What `jingu tune` reads.
    assert saved["settings"]["max_tokens"] == 4


def test_sampling_defaults_of_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    recommended = {"temperature": 0.6, "top_k": 20}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(recommended), encoding="utf-8")
    for place, options, expected in (
        (tmp_path / "model", [], "temperature=0.6\ntop_k=20\n"),
        (tmp_path / "model", ["--temperature", "0"], "temperature=0.0\ntop_k=20\n"),
        (folder, ["--top-k", "5"], "temperature=0.7\ntop_k=5\n"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("/set\n"))
        assert main(["chat", str(place), *options]) == 0
        assert expected in capsys.readouterr().out


WORDS = st.lists(st.text("abcé.,-", min_size=1, max_size=20), max_size=30)


@given(words=WORDS, columns=st.integers(20, 40), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_words_are_wrapped_however_they_arrive(words: list[str], columns: int, sizes: list[int]) -> None:
    text = " ".join(words)
    wrapper, shown, start = terminal_module.WordWrapper(columns), "", 0
    for size in itertools.cycle(sizes):
        if start >= len(text):
            break
        shown += wrapper.push(text[start : start + size])
        start += size
    shown += wrapper.push(None)
    assert shown.split("\n") == (textwrap.wrap(text, columns, break_on_hyphens=False) or [""])


def test_chinese_code_and_long_words_are_wrapped() -> None:
    def wrap(text: str) -> str:
        wrapper = terminal_module.WordWrapper(20)
        return "".join([wrapper.push(character) for character in text]) + wrapper.push(None)

    assert wrap("天" * 25) == "\n".join(["天" * 10, "天" * 10, "天" * 5])
    assert wrap("one two three four 天天天") == "one two three four\n天天天"
    long_line = "value = compute(a, b, c) + compute(d, e, f)"
    assert wrap(f"```python\n{long_line}\n```\n{long_line}") == (
        f"```python\n{long_line}\n```\nvalue = compute(a,\nb, c) + compute(d,\ne, f)"
    )
    assert wrap("  a  b\n\n- c ") == "  a  b\n\n- c"
    # A word that does not end is shown when it fills a line.
    assert terminal_module.WordWrapper(20).push("x" * 19) == ""
    assert terminal_module.WordWrapper(20).push("x" * 25) == "x" * 20


def test_any_saved_conversation_can_be_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Including a system prompt alone, and an empty answer."""
    file = tmp_path / "talk.json"
    text = f"/system near\n/save {file}\n/load {file}\n/system\n"
    assert piped(monkeypatch, folder, text, "--template", "chatml") == 0
    assert capsys.readouterr().out == "1 message\nnear\n"
    value = {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": ""}]}
    file.write_text(json.dumps(value))
    assert piped(monkeypatch, folder, f"/load {file}\nfar\n", "--template", "chatml", "--max-tokens", "3") == 0
    assert capsys.readouterr().out.startswith("2 messages\n")
    for wrong in ('{"messages": [{"role": "god", "content": "a"}]}', '{"messages": 3}', '["a"]', '{"messages": [1]}'):
        file.write_text(wrong)
        assert piped(monkeypatch, folder, f"/load {file}\n") == 2
        assert "the file is not a conversation (" in capsys.readouterr().err


def test_retry_generates_another_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--template", "plain", "--max-tokens", "12"]
    assert piped(monkeypatch, folder, "/set temperature=1\nthe\n/retry\n", *options) == 0
    first, second = capsys.readouterr().out.split("\n", 1)
    assert first.strip() != second.strip()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rety", "there is no command /rety. Did you mean /retry?"),
        ("/undo", "there is no message yet."),
        ("/set temperature=hot", "temperature takes a number, not hot."),
        ("/set warmth=1", "there is no setting warmth."),
        ("/set top_p=2", "top_p: it is 2.0, and should be above 0 and at most 1."),
        ("/load nonesuch.json", "nonesuch.json: the file cannot be read"),
        ("/save", "the name of a file is missing."),
        ("the " * CONTEXT, f"but the model's context is {CONTEXT} tokens."),
        ("a\ufdd1", "U+FDD1 is not a character"),
    ],
)
def test_mistakes_are_told(
    line: str,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert piped(monkeypatch, folder, f"{line}\nthe\n", "--template", "chatml", "--max-tokens", "2") == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


@pytest.mark.parametrize(
    ("most", "output"),
    [
        (3, "(truncated at max_tokens=3)"),
        (4, "(truncated at max_tokens=4)"),
        (5, "(truncated: the model's context is full)"),
    ],
)
def test_truncation_is_reported(
    most: int, output: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, folder, "x" * (CONTEXT - 4), "--max-tokens", str(most)) == 0
    assert output in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_missing_template_is_reported_before_the_model_loads(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("jingu.infer.generate.load", lambda *_: pytest.fail("it is loaded"))
    port = ["--port", "0"] if command == "serve" else []
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    for template, output in (
        ("nonesuch", "there is no chat template nonesuch"),
        (str(broken), "the chat template is not valid Jinja"),
    ):
        assert main([command, str(folder), "--template", template, *port]) == 2
        assert output in capsys.readouterr().err


def test_an_existing_file_is_not_overwritten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    assert piped(monkeypatch, folder, f"/save {file}\n") == 2
    assert "the file exists already" in capsys.readouterr().err and file.read_text() == "mine"
    assert piped(monkeypatch, folder, f"/load {file}\n") == 2
    assert "the file is not a conversation" in capsys.readouterr().err


def test_repeated_ctrl_c_does_not_end_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pressed(io.StringIO):
        def readline(self, *size: int) -> str:
            if self.tell() == 0:
                self.seek(1)
                os.kill(os.getpid(), signal.SIGINT)
            return super().readline(*size)

    def pressing(*message: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        print(*message)

    monkeypatch.setattr("sys.stdin", Pressed("-"))
    monkeypatch.setattr(terminal_module, "print", pressing, raising=False)
    with handle_signals(signal.default_int_handler, signal.SIGINT):
        assert main(["chat", str(folder), *GREEDY]) == 0
    assert capsys.readouterr().out == "\nType /quit or Ctrl-D to leave.\n"


STAYS = """
import signal, time
from jingu.infer.engine import Engine
# Tests started in the background inherit that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
step, cancel, steps, stopped = Engine.step, Engine.cancel, [], []
def held(self):
    # The first answer goes on until it is stopped, however late that is.
    steps.append(1)
    if len(steps) < 20 or stopped:
        return step(self)
    time.sleep(0.01)
    return []
def ended(self, number):
    stopped.append(number)
    cancel(self, number)
Engine.step, Engine.cancel = held, ended
"""


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *message: str) -> None:
        self.master, slave = pty.openpty()
        # To open a terminal makes it that of a new session, from which Ctrl-C comes.
        code = "import os; os.open(os.ttyname(0), os.O_RDWR); from jingu.cli import main; raise SystemExit(main())"
        code = f"{STAYS}\n{code}"
        environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path), "INPUTRC": "/dev/null"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *message],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment,
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, pattern: str, seconds: float = PATIENCE, again: str = "") -> str:
        """What is shown up to where the pattern ends; it is then forgotten. Each second without more, `again` is typed:
        Python does not see a Ctrl-C that comes while readline draws."""
        end = time.monotonic() + seconds
        while not (result := re.search(pattern, self.shown)):
            assert time.monotonic() < end, self.shown
            if select.select([self.master], [], [], 1)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace").replace("\r\n", "\n")
            else:
                self.type(again)
        before, self.shown = self.shown[: result.end()], self.shown[result.end() :]
        return before

    def close(self) -> int:
        code = self.process.wait(120)
        os.close(self.master)
        return code


def test_at_a_terminal(folder: Path, model: InferenceModel, tmp_path: Path) -> None:
    """Ctrl-C stops the answer, then the line, never the program; after an error the conversation continues."""
    terminal = Terminal("chat", str(folder), *GREEDY, "--template", "chatml", "--max-tokens", "1900")
    try:
        terminal.until("a conversation. /help lists the commands.\n> ")
        terminal.type("the\n")
        terminal.until("the\n.{5}")
        terminal.type("\x03")
        terminal.until(r"\(stopped; \d+ tokens, [\d.]+ a second\)\n> ")
        terminal.type("not sent")
        terminal.until("not sent")
        terminal.type("\x03")
        terminal.until("Type /quit or Ctrl-D to leave.\n> ", again="\x03")
        terminal.type("/rset\n")
        terminal.until("Did you mean /reset\\?\n> ", again="/rset\n")  # a Ctrl-C of those above may take it away
        terminal.type("/reset\n")
        terminal.until("> ")
        terminal.type("/set max_tokens=5\n")
        terminal.until("> ")
        terminal.type('"""\nnear\nfar\n"""\n')
        (expected,) = answers(model, "chatml", "near\nfar", max_tokens=5)
        assert expected in terminal.until(r"\(truncated at max_tokens=5; 5 tokens.*\)\n> ")
        terminal.type("/undo\n")
        terminal.until("> ")
        terminal.type("\x1b[A\x1b[A\x1b[A\n")  # Up three times: the line before the closing quotes.
        (expected,) = answers(model, "chatml", "far", max_tokens=5)
        assert expected in terminal.until(r"\(truncated .*\)\n> ")
        terminal.type("\x04")
    except BaseException:
        terminal.process.send_signal(signal.SIGKILL)
        raise
    finally:
        code = terminal.close()
    assert code == 0
