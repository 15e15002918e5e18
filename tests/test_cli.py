"""The command line: finds the command, passes its arguments, and reports errors in one paragraph."""

import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jingu
from jingu.cli import main
from jingu.command import group_options, parse
from jingu.command_table import COMMANDS
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.infer.sampling import SamplingParams
from jingu.runtime.signals import handle_signals
from tests.limits import PATIENCE

HEAVY = ("numpy", "pydantic", "safetensors", "tokenizers", "torch", "tqdm", "yaml")
# The least that each command can be called with.
LEAST = {
    "quickstart": [],
    "completion": ["bash"],
    "example": [],
    "plugins": [],
    "tokenizer inspect": ["folder"],
    "align": ["stages.yaml"],
    "plan": ["run.yaml"],
    "plan calibrate": ["run", "--on", "h100", "--to", "machine.yaml"],
    "launch ssh": ["--hostfile", "hosts", "run.yaml"],
    "launch slurm": ["run.yaml"],
    "doctor": [],
    "watch": ["run"],
    "runs": ["runs"],
    "sweep": ["run.yaml", "--grid", "seed=1,2"],
    "launch kubernetes": ["run.yaml"],
    "data inspect": ["folder"],
    "generate": ["model", "prompt"],
    "serve": ["model"],
    "chat": ["model"],
    "evaluate": ["model", "task"],
    "evaluate list": [],
    "evaluate transfer": ["run", "--tasks", "task"],
    "evaluate compare": ["a", "b"],
    "evaluate judge": ["a", "b", "--by", "judge"],
    "evaluate contamination": ["sums", "--data", "corpus"],
    "evaluate clean": ["results", "contamination"],
    "model list": [],
    "model inspect": ["model"],
    "model grow": ["model", "--to", "folder"],
    "tune export": ["run"],
    "tune merge": ["run", "--to", "folder"],
    "tune unmerge": ["m", "--to", "to", "--adapters", "run"],
    "align replay": ["run", "1"],
    "import": ["model", "--to", "folder"],
    "export": ["model"],
    "report": ["run"],
    "config from-deepspeed": ["file"],
    "config schema": [],
    "checkpoint list": ["run"],
    "checkpoint verify": ["run"],
    "checkpoint diff": ["one", "two"],
    "checkpoint prune": ["run"],
    "checkpoint export": ["run", "--to", "b"],
}


def run_python(code: str, *, pipe: str = "") -> subprocess.CompletedProcess[str]:
    command = f'"$PYTHON" -c "$CODE" {pipe}'
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        env={**os.environ, "PYTHON": sys.executable, "CODE": code, "PYTHONPATH": str(Path(jingu.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_sigterm_ends_the_first_process_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with handle_signals(signal.SIG_IGN, signal.SIGTERM):  # as the system does there
        assert main(["--version"]) == 0
        with pytest.raises(SystemExit) as left:
            signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of a mistake."""
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err.removesuffix("\n")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a function behind a command."""

    def put(name: str, function: Callable[..., Any]) -> None:
        module = ModuleType("jingu.stand_in")
        module.function = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "jingu.stand_in", module)
        monkeypatch.setitem(COMMANDS, name, replace(COMMANDS[name], target="stand_in:function"))

    return put


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("name: first\n")
    return "run.yaml"


# Help


def test_help_has_a_line_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert main([]) == 0
    assert capsys.readouterr().out == overview
    lines = overview.split("\n")
    for name, entry in COMMANDS.items():
        assert [line for line in lines if line.startswith(f"  {name} ") and line.endswith(entry.help)]
    assert max(map(len, lines)) <= 100


def test_help_of_a_group_and_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--help"]) == 0
    out = capsys.readouterr().out
    assert "data build" in out
    assert "generate" not in out
    for name, entry in COMMANDS.items():
        assert main([*name.split(), "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: jingu {name}")
        assert entry.help[1:] in out.replace("\n", " ")
        assert ("RUN.yaml [key=value ...]" in out) is entry.run_file


def test_help_imports_nothing_heavy() -> None:
    result = run_python(
        "import sys\n"
        "from jingu.cli import main; from jingu.command_table import COMMANDS\n"
        "for name in ['', *COMMANDS]: main([*name.split(), '--help'])\n"
        "main(['--version']); main(['trian']); main(['train', '--processes', 'x'])\n"
        f"print('heavy:', [name for name in {HEAVY} if name in sys.modules])\n"
    )
    assert result.stdout.rstrip().endswith("heavy: []"), result.stdout + result.stderr


def test_generation_and_plans_start_without_the_compiler() -> None:
    """PyTorch's compiler, FSDP and pipelines take longer to import than all else."""
    slow = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor")
    result = run_python(
        "import sys, jingu.infer.engine, jingu.serve.commands, jingu.training.plan_commands\n"
        f"print('slow:', [name for name in {slow} if name in sys.modules])\n"
    )
    assert result.stdout == "slow: []\n", result.stdout + result.stderr


def test_results_are_compared_without_pytorch() -> None:
    result = run_python("import sys, jingu.evaluate.comparison\nprint('torch' in sys.modules)")
    assert result.stdout == "False\n", result.stdout + result.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jingu {jingu.__version__}\n"


# The table


INTERNAL_SETTINGS = ("keys", "origins", "hosts", "patience", "body_bytes")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_function_behind_a_command_takes_what_it_is_given(name: str) -> None:
    entry = COMMANDS[name]
    assert entry.run_file is (name not in LEAST)
    options = parse(name, entry, LEAST.get(name, ["run.yaml"]))
    assert options is not None
    if entry.run_file:
        assert (options.pop("file"), options.pop("overrides")) == (Path("run.yaml"), [])
    if entry.on_ranks:
        assert options.pop("processes") is None  # This is for who starts the ranks.
    signature = inspect.signature(entry.function())
    grouped = group_options(entry.function(), options)
    signature.bind(*([RunConfig()] if entry.run_file else []), **grouped)
    given = {"config"} if entry.run_file else set()
    parameters = dict(signature.parameters)
    for injected in {"kind", "render"} - options.keys():  # not given by a user
        parameters.pop(injected, None)
    for group in grouped.keys() - options.keys():
        del parameters[group]
        kind = type(grouped[group])
        parameters |= inspect.signature(SamplingParams if kind is dict else kind).parameters
    # The fields that are not options: those of the Python interface, and those that follow from others.
    for internal in {"logit_bias", "presence_penalty", "frequency_penalty", *INTERNAL_SETTINGS} & parameters.keys():
        del parameters[internal]
    if not entry.on_ranks or name in ("evaluate", "evaluate transfer"):  # Its ranks share the documents, not the model.
        parameters.pop("pipeline", None)
    assert set(parameters) - given == set(options)  # What a function takes can be asked for.
    for option, value in options.items():
        # What is not given is what the function takes it to be, from the command line as from Python.
        default = parameters[option].default
        assert value in (None, default) or default is inspect.Parameter.empty, option


# What reaches a command


def test_a_command_from_a_run_file_gets_the_configuration(run_file: str, command: Callable[..., None]) -> None:
    calls: list[tuple[RunConfig, int | None]] = []
    command("train", lambda config, processes, **_: calls.append((config, processes)))
    assert main(["train", run_file]) == 0
    # Overrides may stand before, between and after options.
    assert main(["train", run_file, "seed=1", "--processes", "2", "train.steps=7", "seed=3"]) == 0
    assert main(["train", "--processes=3", run_file, "seed=4"]) == 0
    assert [(config.name, config.seed, processes) for config, processes in calls] == [
        ("first", 0, None),
        ("first", 3, 2),
        ("first", 4, 3),
    ]
    assert calls[1][0].train.steps == 7


def test_generate_gets_its_options(command: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    calls: list[dict[str, Any]] = []
    command("generate", lambda **options: calls.append(options))
    assert main(["generate", "~/m", "a=b", "--max-tokens", "5", "--stop", "x", "--stop=y", "--top-p=0.5"]) == 0
    assert main(["generate", "m", "--", "-1 is"]) == 0
    first, second = calls
    assert (first["model"], first["prompt"], first["max_tokens"]) == (Path("/home/me/m"), "a=b", 5)
    assert (first["stop"], first["top_p"], first["top_k"], first["seed"]) == (["x", "y"], 0.5, None, 0)
    assert (second["prompt"], second["temperature"], second["stop"]) == ("-1 is", None, None)


def test_export_and_report_get_paths(command: Callable[..., None]) -> None:
    calls: list[dict[str, Any]] = []
    command("export", lambda **options: calls.append(options))
    assert main(["export", "runs/a", "--to", "out", "--dtype", "bf16"]) == 0
    here = {"push": None, "public": False, "yes": False, "calibrate": None}
    assert calls == [{"model": Path("runs/a"), "to": Path("out"), "dtype": "bf16", "check": False, **here}]


# How it ends


def test_the_exit_code_is_the_command_s(run_file: str, command: Callable[..., None]) -> None:
    command("train", lambda config, processes, **_: 130)
    assert main(["train", run_file]) == 130


def test_a_mistake_the_user_can_mend(run_file: str, command: Callable[..., None], capsys: Any) -> None:
    def fail(config: RunConfig, **options: Any) -> None:
        raise JinguError("the corpus is empty.", where="data.input", fix="Name some files.")

    command("data build", fail)
    assert said(capsys, "data", "build", run_file) == "jingu: data.input: the corpus is empty. Name some files."


def test_a_bug_shows_its_traceback(run_file: str, command: Callable[..., None]) -> None:
    def fail(config: RunConfig, **options: Any) -> None:
        raise ZeroDivisionError

    command("data build", fail)
    with pytest.raises(ZeroDivisionError):
        main(["data", "build", run_file])


def test_ctrl_c_is_one_line(run_file: str, command: Callable[..., None], capsys: Any) -> None:
    def wait(config: RunConfig, **options: Any) -> None:
        raise KeyboardInterrupt

    command("data build", wait)
    assert main(["data", "build", run_file]) == 130
    assert capsys.readouterr().err == "\njingu: stopped.\n"


def test_a_reader_that_leaves_is_no_mistake() -> None:
    code = "from jingu.cli import main; raise SystemExit(main(['config', 'schema']))"
    result = run_python(code, pipe="| head -c 1")
    assert (result.stdout, result.stderr) == ("{", "")
    result = run_python(code, pipe="| true")
    assert (result.stderr, result.returncode) in (("", 0), ("", 141))


def test_long_words_are_wrapped_to_the_terminal(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((50, 20)))
    assert said(capsys, "train", "run.yaml", "--proces", "two").split("\n") == [
        "jingu: there is no option --proces. Did you mean",
        "  --processes?",
    ]


# Mistakes


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("trian run.yaml", "there is no command trian. Did you mean `jingu train`?"),
        ("tokeniser train run.yaml", "there is no command tokeniser. Did you mean `jingu tokenizer train`?"),
        ("tokenizer trian", "there is no command tokenizer trian. Did you mean `jingu tokenizer train`?"),
        ("chekpoint list", "there is no command chekpoint. Did you mean `jingu checkpoint list`?"),
        ("build run.yaml", "there is no command build. Did you mean `jingu data build`?"),
        ("frobnicate", "there is no command frobnicate. `jingu --help` lists them."),
        ("tokenizer", "tokenizer needs a subcommand: train, extend or inspect."),
        ("checkpoint", "checkpoint needs a subcommand: list, verify, prune, export or diff."),
        ("run.yaml", "the command is missing. Did you mean `jingu train run.yaml`?"),
        ("--procs 2", "there is no option --procs. The first word is a command; `jingu --help` lists them."),
        ("train", "RUN.yaml is missing. See `jingu train --help`."),
        ("generate model", "PROMPT is missing. See `jingu generate --help`."),
        ("generate", "MODEL and PROMPT are missing. See `jingu generate --help`."),
        ("generate model one two", "there is one argument too many: two. See `jingu generate --help`."),
        ("import model", "--to is missing. See `jingu import --help`."),
        (
            "launch ssh train run.yaml --hostfile hosts",
            "--hostfile follows the command, as if it were an option of that command. "
            "Write --hostfile before the command.",
        ),
        ("verify run.yaml --against", "--against needs a value. See `jingu verify --help`."),
        ("export model --to", "--to needs a value. See `jingu export --help`."),
        (
            "import model --to x --dtype int8",
            "--dtype takes auto, fp32, bf16 or fp16, not int8. See `jingu import --help`.",
        ),
        ("train run.yaml --proceses 2", "there is no option --proceses. Did you mean --processes?"),
        (
            "train run.yaml --workers 2",
            "there is no option --workers. Settings are written without dashes: workers=value.",
        ),
        (
            "train run.yaml --optimizer.lr=3e-4",
            "there is no option --optimizer.lr. Settings are written without dashes: optimizer.lr=3e-4.",
        ),
        (
            "train run.yaml --processes two",
            "--processes takes a whole number (1 or more), not two. See `jingu train --help`.",
        ),
        (
            "train run.yaml --processes 0",
            "--processes takes a whole number (1 or more), not 0. See `jingu train --help`.",
        ),
        (
            "generate model prompt --top-p 1.5",
            "--top-p takes a number (above 0, at most 1), not 1.5. See `jingu generate --help`.",
        ),
        (
            "generate model prompt --temperature hot",
            "--temperature takes a number (0 or more), not hot. See `jingu generate --help`.",
        ),
        ("report a --too b", "there is no option --too. Did you mean --to?"),
        ("config schema now", "there is one argument too many: now. See `jingu config schema --help`."),
    ],
)
def test_the_words_of_the_command_line(capsys: Any, words: str, answer: str) -> None:
    assert said(capsys, *words.split()) == f"jingu: {answer}"


def test_mistakes_in_the_file_reach_the_terminal(run_file: str, capsys: Any) -> None:
    assert said(capsys, "config", "show", "rum.yaml") == (
        "jingu: rum.yaml: there is no such file. Did you mean run.yaml?"
    )
    assert said(capsys, "config", "show", run_file, "--processes", "4", "batch.global_batch_size=30") == (
        "jingu: batch.global_batch_size 30 cannot be divided over 4 ranks: take 28 or 32."
    )
    assert said(capsys, "config", "show", "optimizer.lr=3", run_file) == (
        "jingu: optimizer.lr=3: there is no such file. The run's file comes first, then the settings to change."
    )
