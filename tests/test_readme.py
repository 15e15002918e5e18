"""Tests of the READMEs and tours: both languages have the same content, and all commands work."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from jingu.checkpoint.save_folder import tensor_names
from jingu.cli import main
from jingu.config.load import dump_yaml, load_config
from jingu.report.record import read_run
from jingu.text.tokenizer_training import train_tokenizer
from tests.forked_rank import fork_ranks
from tests.hub_server import serve_hub
from tests.limits import PATIENCE

ROOT = Path(__file__).parents[1]
# In each language, the README and the tour.
ENGLISH, CHINESE = (
    "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)
    for names in (("README.md", "docs/tour.md"), ("README.zh-CN.md", "docs/tour.zh-CN.md"))
)

# A small version of the quickstart: seconds instead of minutes.
SMALL = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "batch.sequence_length=128",
    "batch.global_batch_size=4",
]
SMALL += [
    "tokenizer.vocab_size=400",
    "train.log_every=2",
    "evaluation.num_sequences=2",
    "evaluation.num_sequences_at_end=4",
]
SMALL += ["data.validation_fraction=0.2", "train.compile=false", "evaluation.max_new_tokens=8"]
MODULES = ["shelve", "bisect", "textwrap", "heapq", "queue", "sched", "fnmatch", "glob", "stat", "string", "timeit"]


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Return the commands in order, as lists of words without comments."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def names_in_tree(text: str) -> list[str]:
    """Return the entries of the run's folder that the README lists."""
    (tree,) = blocks(text, "text")
    return [line.split()[0] for line in tree.splitlines()[1:]]


def spans(text: str) -> list[str]:
    """Return the inline code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def run_shell_line(words: list[str]) -> int:
    """Run `jingu ...` in this process, optionally with its output redirected to a file."""
    assert words[0] == "jingu"
    if ">" not in words:
        return main(words[1:])
    index = words.index(">")
    with Path(words[index + 1]).open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        return main(words[1:index])


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which a small version of examples/quickstart.py has run; the tests run in it."""
    folder = tmp_path_factory.mktemp("clone")
    threads = torch.get_num_threads()
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        (folder / "examples").mkdir()
        shutil.copy(ROOT / "examples" / "quickstart.py", "examples")
        small = load_config(ROOT / "examples" / "quickstart.yaml", SMALL)
        (folder / "examples" / "quickstart.yaml").write_text(dump_yaml(small), encoding="utf-8")
        text = folder / "build" / "quickstart" / "text"
        text.mkdir(parents=True)
        for name in MODULES:
            shutil.copy(Path(sysconfig.get_paths()["stdlib"], f"{name}.py"), text)
        spec = importlib.util.spec_from_file_location("quickstart", "examples/quickstart.py")
        assert spec is not None and spec.loader is not None
        quickstart = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(quickstart)
        patch.setattr(sys, "argv", ["quickstart.py", "train.steps=8"])
        patch.setattr(
            quickstart, "run_jingu", lambda *words: run_shell_line(["jingu", *words]) and pytest.fail(f"{words}")
        )
        quickstart.main()
        yield folder
    torch.set_num_threads(threads)


# The text


def test_both_languages_have_the_same_commands() -> None:
    assert commands(ENGLISH) == commands(CHINESE)
    assert len(commands(ENGLISH)) > 10


def test_both_languages_have_the_same_examples_names_and_links() -> None:
    assert [yaml.safe_load(block) for block in blocks(ENGLISH, "yaml")] == [
        yaml.safe_load(block) for block in blocks(CHINESE, "yaml")
    ]
    assert blocks(ENGLISH, "console") == blocks(CHINESE, "console")
    assert blocks(ENGLISH, "shell") == blocks(CHINESE, "shell")
    assert blocks(ENGLISH, "sh") == blocks(CHINESE, "sh")
    assert names_in_tree(ENGLISH) == names_in_tree(CHINESE)
    assert sorted(set(spans(ENGLISH))) == sorted(set(spans(CHINESE)))
    # Beside links to the other language.
    others = r"\]\((?!README|(?:docs/)?tour|#)([^)]+)\)"
    links = [sorted(re.findall(others, text)) for text in (ENGLISH, CHINESE)]
    assert links[0] == links[1]
    numbers = [
        [len(re.findall(each, text, re.MULTILINE)) for each in ("^## ", "^- ", r"^\|")] for text in (ENGLISH, CHINESE)
    ]
    assert numbers[0] == numbers[1] and numbers[0][0] > 15


def test_tour_has_ten_lines() -> None:
    assert len(blocks(ENGLISH, "bash")[1].splitlines()) == 10


@pytest.mark.parametrize(("target", "runs"), [("quickstart", "examples/quickstart.py"), ("test", "pytest")])
def test_make_targets_exist(target: str, runs: str) -> None:
    assert ["make", target] in commands(ENGLISH)
    # Under `make test` a make within this one would otherwise announce the folder it enters and leaves.
    command = ["make", "--dry-run", "--no-print-directory", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert runs in done.stdout.splitlines()[-1]


# The behavior


def test_quickstart_writes_what_the_readme_lists(after_quickstart: Path) -> None:
    run = after_quickstart / "runs" / "quickstart"
    listed = names_in_tree(ENGLISH)
    for name in listed:
        assert (run / name).is_dir() if name.endswith("/") else (run / name).is_file(), name
    assert {path.name for path in run.iterdir()} == {name.rstrip("/") for name in listed}
    record = read_run(run)
    assert max(record.train) == 8
    assert record.evaluations


def test_every_command_works(after_quickstart: Path) -> None:
    for words in commands(ENGLISH):
        if words[0] != "make":
            with fork_ranks():
                assert run_shell_line(words) == 0, words
    one, two = (read_run(after_quickstart / "runs" / name) for name in ("one", "two"))
    assert [run.starts[0]["ranks"] for run in (one, two)] == [1, 2]
    assert sorted(one.train) == sorted(two.train) == list(range(2, 21, 2))
    for step, row in one.train.items():  # "their losses agree up to rounding"
        assert row["loss"] == pytest.approx(two.train[step]["loss"], rel=1e-4)
    stored = [tensor_names(after_quickstart / f"runs/{name}/checkpoints/step-00000020") for name in ("one", "two")]
    assert stored[0] == stored[1]
    assert any(name.startswith("optimizer/") for name in stored[0])  # saved just after an evaluation
    exported = after_quickstart / "build" / "my-llama"
    assert AutoModelForCausalLM.from_pretrained(exported).config.num_hidden_layers == 1
    assert len(AutoTokenizer.from_pretrained(exported)) == 400


def test_same_command_again_changes_nothing(after_quickstart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After `make quickstart` is complete, a second one changes nothing."""
    for verb in (["tokenizer", "train"], ["data", "build"], ["train"]):
        assert main([*verb, "examples/quickstart.yaml", *(["train.steps=8"] if verb == ["train"] else [])]) == 0
    assert max(read_run(after_quickstart / "runs" / "quickstart").train) == 8
    capsys.readouterr()
    assert main(["train", "examples/quickstart.yaml", "train.steps=9"]) == 2
    assert "name=" in capsys.readouterr().err


def test_errors_are_reported_as_written(after_quickstart: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks(ENGLISH, "console")
    command, *expected = block.splitlines()
    assert main(shlex.split(command.removeprefix("$ "))[1:]) == 2
    assert capsys.readouterr().err.splitlines() == expected


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_serving_works_as_written(after_quickstart: Path) -> None:
    """Runs the server in a process of its own, on a free port, and the curl commands as written."""
    (block,) = blocks(ENGLISH, "shell")
    serve, *requests = [shlex.split(line) for line in block.splitlines()]
    command = [sys.executable, "-m", *serve, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert server.stdout is not None
    name, _, address = server.stdout.readline().strip().rpartition(" is served at ")
    assert name == "quickstart"
    answers = []
    for words in requests:
        command = [word.replace("http://127.0.0.1:8000", address) for word in words]
        answers.append(subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout)
    server.terminate()
    assert server.wait(300) == 0
    assert isinstance(json.loads(answers[0])["generated_text"], str)
    assert answers[1].startswith("data: {") and answers[1].endswith("data: [DONE]\n\n")


def test_example_file_is_a_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(ENGLISH, "yaml")
    Path("mine.yaml").write_text(example, encoding="utf-8")
    Path("my-texts").mkdir()
    for number in range(300):
        Path("my-texts", f"{number}.txt").write_text(f"The {number}th text. " * 9, encoding="utf-8")
    threads = torch.get_num_threads()
    small = ["model.num_layers=1", "batch.global_batch_size=2", "train.steps=1", "evaluation.num_sequences=1"]
    for verb in (["tokenizer", "train"], ["data", "build"], ["train"]):
        assert main([*verb, "mine.yaml", *small]) == 0, capsys.readouterr().err
    torch.set_num_threads(threads)
    assert Path("runs", "mine", "checkpoints", "step-00000001").is_dir()


@pytest.mark.slow
def test_the_tour_from_the_hub_works_as_written(tmp_path: Path) -> None:
    """With a tiny model and few rows under the names of the README."""
    base = tmp_path / "base"
    config = Qwen3Config(
        vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=48, max_position_embeddings=512, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    train_tokenizer(iter(["Machine learning is what it is. " * 9]), 400, ["<|endoftext|>"]).save(base)
    tokenizer_config = json.loads((base / "tokenizer_config.json").read_text())
    tokenizer_config["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    rows = [{"instruction": f"Say {number}.", "input": "", "output": f"It is {number}."} for number in range(60)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (block,) = blocks(ENGLISH, "sh")
    with serve_hub() as hub:
        hub.add("Qwen/Qwen3-0.6B", {file.name: file.read_bytes() for file in base.iterdir()})
        hub.add("tatsu-lab/alpaca", {"train.jsonl": lines.encode()}, "datasets")
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[1] == "train":
                words += ["train.steps=2", "evaluation.every=0"]
            words = [sys.executable, "-m", *words]
            environment = {"HF_TOKEN": "hf_own", "PYTHONPATH": str(ROOT)}
            process = hub.start(words, tmp_path / "cache", tmp_path, **environment)
            assert process.returncode == 0, (line, process.stderr)
        repository = hub.repositories["models/YOU/qwen3-alpaca"]
    assert repository.is_private and "README.md" in repository.commits[repository.tags["main"]]
    assert (tmp_path / "build" / "tune.gguf").stat().st_size > 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "build" / "tune-fp8", dtype=torch.float32) is not None
