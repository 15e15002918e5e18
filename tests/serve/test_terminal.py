"""`jingu chat`: through a pipe, and at a real terminal (a pty)."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jingu.checkpoint.export import export_hf
from jingu.cli import main
from jingu.config.sections.model import ModelSettings
from jingu.infer.engine import Engine
from jingu.infer.load import Loaded, load
from jingu.infer.request import Request
from jingu.infer.sampling import Sampling
from jingu.runtime.signals import handling
from jingu.serve import terminal as terminal_module
from jingu.text.training import train_tokenizer
from jingu.tune.rows import Message, parse_row
from jingu.tune.speak import find_speech
from tests.infer.conftest import filled

GREEDY = ["--temperature", "0", "--precision", "fp32", "--device", "cpu"]
CONTEXT = 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a Hugging Face folder, without a template of its own."""
    place = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(iter(["the stop is near, the end is far. " * 3, "的数据 🙂"]), 280, ["<|endoftext|>"])
    settings = ModelSettings(width=24, heads=3, layers=2, initial_std=0.4)
    model = filled(settings, tokenizer, CONTEXT)
    tokenizer.save(place / "tokenizer")
    export_hf(model.spec, model.model.state_dict().__getitem__, place / "tokenizer", place / "tiny")
    return place / "tiny"


@pytest.fixture(scope="module")
def model(folder: Path) -> Loaded:
    return load(folder, "fp32", "cpu")


def piped(monkeypatch: pytest.MonkeyPatch, folder: Path, said: str, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    return main(["chat", str(folder), *GREEDY, *options])


def answers(model: Loaded, template: str, *said: str, max_tokens: int, system: str = "") -> list[str]:
    """What the engine answers, turn by turn."""
    speech = find_speech(Path("nowhere"), model.tokenizer, template)
    assert speech is not None
    turns = [Message("system", system)] if system else []
    for text in said:
        turns.append(Message("user", text))
        request = Request(speech.prompt(tuple(turns)), Sampling(), max_tokens, speech.stop)
        turns.append(Message("assistant", Engine(model).run([request])[0]))
    return [turn.content for turn in turns if turn.role == "assistant"]


def test_lines_of_a_pipe_are_messages(
    folder: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = 'the near\none \\\nand two\n\n"""\na\n\nb\n"""\n//set\n'
    assert piped(monkeypatch, folder, said, "--template", "chatml", "--max-tokens", "6", "--system", "far") == 0
    messages = ("the near", "one \nand two", "a\n\nb", "/set")
    expected = answers(model, "chatml", *messages, max_tokens=6, system="far")
    assert capsys.readouterr().out == "".join(f"{each}\n" for each in expected)


def test_a_model_without_a_template_continues_the_text(
    folder: Path, model: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, folder, "the end\n is\n", "--max-tokens", "5") == 0
    (first,) = Engine(model).run([Request(model.encode("the end"), Sampling(), 5)])
    (second,) = Engine(model).run([Request(model.encode(f"the end{first} is"), Sampling(), 5)])
    printed = capsys.readouterr()
    assert printed.out == f"{first}\n{second}\n"
    assert printed.err == "(cut off at max_tokens=5)\n" * 2
    assert piped(monkeypatch, folder, "/system be brief\n") == 2
    assert "continues text, and a system prompt has no place" in capsys.readouterr().err


def test_commands(
    folder: Path,
    model: Loaded,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "talk.json"
    said = ["/system near", "the", "stop", "/undo", "end", "/retry", f"/save {file}", "/save", "/reset", "/system"]
    said += ["the", f"/load {file}", "/set max_tokens=3 top_k=7", "/set", "far", "/quit", "not said"]
    assert piped(monkeypatch, folder, "\n".join(said), "--template", "chatml", "--max-tokens", "4") == 0
    expected = answers(model, "chatml", "the", "stop", max_tokens=4, system="near")
    first, end = answers(model, "chatml", "the", "end", max_tokens=4, system="near")
    printed = capsys.readouterr().out.removesuffix("\n")
    before, _, settings = printed.partition("5 messages\n")
    assert before == "\n".join([*expected, end, end, "near", first]) + "\n"
    assert "max_tokens=3\ntemperature=0.0\ntop_k=7\n" in settings
    saved = json.loads(file.read_text(encoding="utf-8"))
    turns = [("system", "near"), ("user", "the"), ("assistant", first), ("user", "end"), ("assistant", end)]
    assert [(each["role"], each["content"]) for each in saved["messages"]] == turns
    assert parse_row({"messages": saved["messages"]}).messages[0].role == "system"  # What `jingu tune` reads.
    assert saved["settings"]["max_tokens"] == 4


def test_what_was_saved_is_loaded_whatever_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also a system prompt alone, and an answer that was stopped before it began."""
    file = tmp_path / "talk.json"
    said = f"/system near\n/save {file}\n/load {file}\n/system\n"
    assert piped(monkeypatch, folder, said, "--template", "chatml") == 0
    assert capsys.readouterr().out == "1 message\nnear\n"
    value = {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": ""}]}
    file.write_text(json.dumps(value))
    assert piped(monkeypatch, folder, f"/load {file}\nfar\n", "--template", "chatml", "--max-tokens", "3") == 0
    assert capsys.readouterr().out.startswith("2 messages\n")
    for wrong in ('{"messages": [{"role": "god", "content": "a"}]}', '{"messages": 3}', '["a"]', '{"messages": [1]}'):
        file.write_text(wrong)
        assert piped(monkeypatch, folder, f"/load {file}\n") == 2
        assert "this is no conversation (" in capsys.readouterr().err


def test_retry_makes_another_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--template", "plain", "--max-tokens", "12"]
    assert piped(monkeypatch, folder, "/set temperature=1\nthe\n/retry\n", *options) == 0
    first, second = capsys.readouterr().out.split("\n", 1)
    assert first.strip() != second.strip()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/rety", "there is no command /rety. Did you mean /retry?"),
        ("/undo", "nothing was said yet."),
        ("/set temperature=hot", "temperature takes a number, not hot."),
        ("/set warmth=1", "there is no setting warmth."),
        ("/set top_p=2", "top_p: it is 2.0, and should be above 0 and at most 1."),
        ("/load nonesuch.json", "nonesuch.json: the file cannot be read"),
        ("/save", "the name of a file is missing."),
        ("the " * CONTEXT, f"and the model's context is {CONTEXT}."),
        ("a\ufdd1", "U+FDD1 is no character"),
    ],
)
def test_mistakes_are_told(
    line: str,
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert piped(monkeypatch, folder, f"{line}\nthe\n", "--template", "chatml", "--max-tokens", "2") == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.out == ""


@pytest.mark.parametrize(
    ("most", "told"),
    [(3, "(cut off at max_tokens=3)"), (4, "(cut off at max_tokens=4)"), (5, "(cut off: the model's context is full)")],
)
def test_what_cut_an_answer_off_is_told(
    most: int, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, folder, "x" * (CONTEXT - 4), "--max-tokens", str(most)) == 0
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["chat", "serve"])
def test_a_template_that_is_missing_is_told_before_the_model_is_loaded(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("jingu.infer.verbs.load", lambda *_: pytest.fail("it is loaded"))
    port = ["--port", "0"] if verb == "serve" else []
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    for template, told in (("nonesuch", "there is no template nonesuch"), (str(broken), "the template is not Jinja")):
        assert main([verb, str(folder), "--template", template, *port]) == 2
        assert told in capsys.readouterr().err


def test_a_file_that_was_there_is_not_overwritten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    assert piped(monkeypatch, folder, f"/save {file}\n") == 2
    assert "there is a file already" in capsys.readouterr().err and file.read_text() == "mine"
    assert piped(monkeypatch, folder, f"/load {file}\n") == 2
    assert "this is no conversation" in capsys.readouterr().err


def test_ctrl_c_while_one_is_answered_does_not_end_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pressed(io.StringIO):
        def readline(self, *size: int) -> str:
            if self.tell() == 0:
                self.seek(1)
                os.kill(os.getpid(), signal.SIGINT)
            return super().readline(*size)

    def pressing(*words: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        print(*words)

    monkeypatch.setattr("sys.stdin", Pressed("-"))
    monkeypatch.setattr(terminal_module, "print", pressing, raising=False)
    with handling(signal.default_int_handler, signal.SIGINT):
        assert main(["chat", str(folder), *GREEDY]) == 0
    assert capsys.readouterr().out == "\n/quit or Ctrl-D leaves.\n"


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
    """A program at a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        # To open a terminal makes it that of a new session, from which Ctrl-C comes.
        code = "import os; os.open(os.ttyname(0), os.O_RDWR); from jingu.cli import main; raise SystemExit(main())"
        code = f"{STAYS}\n{code}"
        environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path), "INPUTRC": "/dev/null"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
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

    def until(self, pattern: str, seconds: float = 120, again: str = "") -> str:
        """What is shown up to where the pattern ends; it is then forgotten. Each second without more, `again` is typed:
        Python does not see a Ctrl-C that comes while readline draws."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < end, self.shown
            if select.select([self.master], [], [], 1)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace").replace("\r\n", "\n")
            else:
                self.type(again)
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def close(self) -> int:
        code = self.process.wait(120)
        os.close(self.master)
        return code


def test_at_a_terminal(folder: Path, model: Loaded, tmp_path: Path) -> None:
    """Ctrl-C stops the answer, then the line, and never the program; a mistake is told, and one goes on."""
    terminal = Terminal("chat", str(folder), *GREEDY, "--template", "chatml", "--max-tokens", "1900")
    try:
        terminal.until("a conversation. /help tells the commands.\n> ")
        terminal.type("the\n")
        terminal.until("the\n.{5}")
        terminal.type("\x03")
        terminal.until(r"\(stopped; \d+ tokens, [\d.]+ a second\)\n> ")
        terminal.type("not sent")
        terminal.until("not sent")
        terminal.type("\x03")
        terminal.until("/quit or Ctrl-D leaves.\n> ", again="\x03")
        terminal.type("/rset\n")
        terminal.until("Did you mean /reset\\?\n> ", again="/rset\n")  # a Ctrl-C of those above may take it away
        terminal.type("/reset\n")
        terminal.until("> ")
        terminal.type("/set max_tokens=5\n")
        terminal.until("> ")
        terminal.type('"""\nnear\nfar\n"""\n')
        (expected,) = answers(model, "chatml", "near\nfar", max_tokens=5)
        assert expected in terminal.until(r"\(cut off at max_tokens=5; 5 tokens.*\)\n> ")
        terminal.type("/undo\n")
        terminal.until("> ")
        terminal.type("\x1b[A\x1b[A\x1b[A\n")  # Up three times: the line before the closing quotes.
        (expected,) = answers(model, "chatml", "far", max_tokens=5)
        assert expected in terminal.until(r"\(cut off .*\)\n> ")
        terminal.type("\x04")
    except BaseException:
        terminal.process.send_signal(signal.SIGKILL)
        raise
    finally:
        code = terminal.close()
    assert code == 0
