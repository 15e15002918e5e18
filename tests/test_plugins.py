"""Plug-ins: the example package is installed and each of its entries is used; broken ones stop nothing."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jingu.plugins import KINDS
from tests.conftest import TINY_LLAMA, Done, Library

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
ENTRIES = {
    group.removeprefix("jingu.v1."): names
    for group, names in tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"].items()
}

Run = Callable[..., subprocess.CompletedProcess[str]]


def install(folder: Path, name: str, version: str, groups: dict[str, dict[str, str]]) -> None:
    """Write what pip writes of a package besides its modules."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in group_entries.items())
        for group, group_entries in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example package: the contents of its wheel, which is all that pip installs."""
    source, folder = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_with(folder: Path, code: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python with a folder of packages on its path, which processes that it starts inherit."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{EXAMPLE.parents[1]}"},
        check=False,
    )
    assert not check or result.returncode == 0, result.stderr
    return result


COMMAND = "import sys; from jingu.cli import main; sys.exit(main(sys.argv[1:]))"


def test_the_example_has_every_kind() -> None:
    assert ENTRIES.keys() == KINDS.keys()


def test_plugins_are_listed(site: Path) -> None:
    output = run_with(site, COMMAND, "plugins").stdout
    lines = [line.split() for line in output.splitlines()[1:]]
    expected = {(kind, name, "jingu-example", "1.0", "ok") for kind, names in ENTRIES.items() for name in names}
    assert {(*line[:4], line[-1]) for line in lines} == expected


def test_help_imports_neither_plugins_nor_torch(site: Path) -> None:
    code = (
        "import sys; from jingu.cli import main; main(['--help']); print({'torch', 'jingu_example'} & {*sys.modules})"
    )
    assert run_with(site, code).stdout.splitlines()[-1] == "set()"


def test_settings_of_plugins_are_read_without_torch(site: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {type: signum, momentum: 0.5}\nschedule: {type: polynomial}\ntask: {type: margin}\n")
    code = (
        "import sys; from pathlib import Path; from jingu.config.load import load_config;"
        "config = load_config(Path(sys.argv[1]));"
        "print(config.optimizer.momentum, config.schedule.power, config.task.margin, 'torch' in sys.modules)"
    )
    assert run_with(site, code, str(file)).stdout.split() == ["0.5", "2.0", "1.0", "False"]
    file.write_text("optimizer: {type: signum, momentun: 0.5}\n")
    result = run_with(site, COMMAND, "train", str(file), check=False)
    assert result.returncode == 2 and "Did you mean optimizer.momentum?" in result.stderr


TRAIN = """
import json, sys
from pathlib import Path
from jingu.config.load import load_config
from jingu.training.commands import train
for file in sys.argv[1:]:
    assert train(load_config(Path(file))) == 0
"""


@pytest.fixture
def train_files(site: Path, library: Library, tmp_path: Path) -> Callable[..., list[Done]]:
    """Train tiny runs with the example's plug-ins, in one process; each argument has the sections of a run."""

    def train(*runs: dict[str, Any]) -> list[Done]:
        files = []
        for number, sections in enumerate(runs):
            tree: dict[str, Any] = {
                "name": f"run-{number}",
                "runs_dir": str(tmp_path / "runs"),
                "tokenizer": {"path": str(library.tokenizer)},
                "data": {"path": str(library.data)},
                "batch": {"sequence_length": 16, "global_batch_size": 4},
                "train": {"steps": 3, "log_every": 1, "compile": False},
                "evaluation": {"every": 0},
                "precision": {"type": "fp32"},
                **sections,
            }
            files.append(tmp_path / f"run-{number}.yaml")
            files[-1].write_text(yaml.safe_dump(tree))
        run_with(site, TRAIN, *map(str, files))
        return [Done(tmp_path / "runs" / file.stem) for file in files]

    return train


@pytest.mark.slow
def test_runs_use_plugins(train_files: Callable[..., list[Done]], site: Path, tmp_path: Path) -> None:
    """A family, an optimizer, a schedule and a tracker; then rewards, an advantage and an environment."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{number}", "answer": "7"}) + "\n" for number in range(4)))
    task = {
        "type": "grpo",
        "prompts": str(prompts),
        "prompts_per_step": 2,
        "answers_per_prompt": 3,
        "advantage": "rank",
    }
    rewards = [{"type": "palindrome"}, {"type": "keywords", "words": ["e", "x"]}]
    environment = {"path": "guess_number", "max_turns": 2}
    first, second = train_files(
        {
            "model": {**TINY_LLAMA, "family": "example", "num_kv_heads": 4, "max_position_embeddings": 64},
            "optimizer": {"type": "signum", "lr": 1e-3},
            "schedule": {"type": "polynomial", "warmup": 0},
            "train": {"steps": 3, "log_every": 1, "trackers": ["csv"], "compile": False},
        },
        {
            "initialize": {"from": str(tmp_path / "runs" / "run-0")},
            "batch": {"sequence_length": 48},
            "task": {**task, "max_new_tokens": 16, "rewards": rewards, "environment": environment},
            "train": {"steps": 1, "log_every": 1, "compile": False},
        },
    )
    assert first.column("lr") == pytest.approx([1e-3 * ((3 - step) / 4) ** 2 for step in range(3)])
    rows = list(csv.reader((first.folder / "metrics.csv").open()))
    assert [float(value) for _, name, value in rows if name == "train/loss"] == first.column("loss")
    # A checkpoint says with which plug-ins it was made.
    assert '"jingu-example": "1.0"' in "".join(path.read_text() for path in first.checkpoint().glob("*.json"))
    export = first.folder / "export"
    assert run_with(site, COMMAND, "export", str(first.folder), "--to", str(export)).returncode == 0
    assert json.loads((export / "config.json").read_text())["architectures"] == ["ExampleForCausalLM"]
    inspected = json.loads(run_with(site, COMMAND, "model", "inspect", str(export), "--json").stdout)
    assert "example" in json.dumps(inspected)
    assert {"rewards/palindrome", "rewards/keywords", "rewards/environment"} <= second.lines("train")[-1].keys()


USE = """
import sys
from pathlib import Path
import torch
from jingu.config.schema import RunConfig
from jingu.config.sections.pairs import AnswerLogProbs
from jingu.evaluate.answer_filters import apply_steps
from jingu.evaluate.text_metrics import OVERLAPS
from jingu.text.corpus import find_files
from jingu.text.document_reader import ReadCounts, Span, read_documents

config = RunConfig.model_validate({"data": {"input": [sys.argv[1]], "suffixes": [".srt"], "on_error": "skip"}})
counts = ReadCounts()
spans = [Span(file, 0, file.size) for file in find_files(config.data)]
print([document.text for document in read_documents(spans, config.data, counts)], len(counts.skipped))
print(apply_steps([{"function": "last_line"}], ["one\\ntwo\\n"], {}), OVERLAPS["same_first_word"]("a b", "a c"))
sides = [AnswerLogProbs(torch.tensor([value]), torch.tensor([0.0]), torch.tensor([2])) for value in (-1.0, -2.0)]
for task in ({"type": "margin"}, {"type": "dpo", "loss": "squared_hinge", "beta": 1.0}):
    print(RunConfig.model_validate({"task": task}).task.pair_losses(*sides).item())
"""


def test_texts_and_losses_of_plugins(site: Path, tmp_path: Path) -> None:
    """The reader leaves out a file that it cannot read; the losses of log-probabilities -1 and -2 of two tokens."""
    (tmp_path / "a.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\nHello\nthere\n\n2\n0 --> 1\nyou\n")
    (tmp_path / "b.srt").write_text("no subtitles\n")
    lines = run_with(site, USE, str(tmp_path)).stdout.splitlines()
    assert lines == ["['Hello\\nthere\\nyou'] 1", "['two'] 1.0", "0.5", "0.0"]


def test_broken_plugins_are_named_and_stop_nothing(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text((EXAMPLE / "jingu_example" / "texts.py").read_text())
    # Its rewards name a module that is not there.
    (tmp_path / "good_settings.py").write_text((EXAMPLE / "jingu_example" / "settings.py").read_text())
    (tmp_path / "fails.py").write_text("raise RuntimeError('two\\nlines')\n")
    (tmp_path / "leaves.py").write_text("import sys; sys.exit('bye')\n")
    groups = {
        "jingu.v1.metrics": {
            "works": "good:same_first_word",
            "squad_f1": "good:same_first_word",
            "fails": "fails:metric",
            "leaves": "leaves:metric",
            "absent": "good:nothing",
            "module": "good:re",
            "twice": "good:same_first_word",
        },
        "jingu.v2.metrics": {"new": "good:same_first_word", "works": "good:same_first_word"},
        "jingu.v1.colors": {"red": "good:re"},
        "jingu.v1.optimizers": {"odd": "good:last_line"},
        "jingu.v1.schedules": {"polynomial": "good_settings:PolynomialSettings"},
        "jingu.v1.rewards": {"keywords": "good_settings:KeywordsReward"},
    }
    install(tmp_path, "broken", "0.3", groups)
    install(tmp_path, "other", "2.0", {"jingu.v1.metrics": {"twice": "good:same_first_word"}})
    result = run_with(tmp_path, COMMAND, "plugins", check=False)
    assert result.returncode == 1
    states = {tuple(line.split()[:3]): line.split("  ")[-1].strip() for line in result.stdout.splitlines()[1:]}
    imports = "it cannot be imported"
    version = "it is written for version 2 of the plug-in interface, and this jingu has 1"
    expected = {
        ("colors", "red", "broken"): "there is no kind colors of plug-ins",
        ("metrics", "absent", "broken"): f"{imports} (AttributeError: module 'good' has no attribute 'nothing')",
        ("metrics", "fails", "broken"): f"{imports} (RuntimeError: two lines)",
        ("metrics", "leaves", "broken"): f"{imports} (SystemExit: bye)",
        ("metrics", "module", "broken"): "it is no function",
        ("metrics", "new", "broken"): version,
        ("metrics", "squad_f1", "broken"): "jingu itself has an entry of this name",
        ("metrics", "twice", "broken"): "other has an entry of the same name",
        ("metrics", "twice", "other"): "broken has an entry of the same name",
        ("metrics", "works", "broken"): "ok",
        ("optimizers", "odd", "broken"): "it is not a subclass of OptimizerBase",
        ("rewards", "keywords", "broken"): f"jingu_example.rewards:KeywordsScorer: {imports} (ModuleNotFoundError: No "
        "module named 'jingu_example')",
        ("schedules", "polynomial", "broken"): "ok",
    }
    assert states == expected
    # What is read while the table is used: one line for each, and the others work.
    code = "from jingu.evaluate.text_metrics import OVERLAPS; print('works' in OVERLAPS, 'fails' in OVERLAPS)"
    result = run_with(tmp_path, code)
    assert result.stdout.split() == ["True", "False"]
    names = [line.split()[2] for line in result.stderr.splitlines() if line.startswith("The plug-in ")]
    assert sorted(names) == sorted(name for kind, name, _ in expected if kind == "metrics" and name != "works")
    result = run_with(tmp_path, COMMAND, "config", "schema")
    assert (
        json.loads(result.stdout) and "The plug-in odd (optimizers) of broken 0.3 is ignored: it is no" in result.stderr
    )


FAILING = """
from typing import Literal
from jingu.config.sections.schedules import Moment, ScheduleBase

class FailingSettings(ScheduleBase):
    type: Literal["failing"] = "failing"

    def decayed_rate(self, moment: Moment) -> float:
        return {}["rate"] if moment.step == 2 else 1.0

def count(answer: str, reference: str) -> float:
    raise ConnectionError("the judge is away")
"""


@pytest.fixture
def failing_site(tmp_path: Path) -> Path:
    """A folder with a package whose plug-ins can be imported, and raise exceptions when they are used."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "failing.py").write_text(FAILING)
    groups = {
        "jingu.v1.schedules": {"failing": "failing:FailingSettings"},
        "jingu.v1.metrics": {"judge": "failing:count"},
    }
    install(folder, "failing-plugin", "0.1", groups)
    return folder


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_exceptions_of_plugins_are_not_restarted(
    failing_site: Path, processes: str, library: Library, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    tree = {
        "runs_dir": str(tmp_path / "runs"),
        "tokenizer": {"path": str(library.tokenizer)},
        "data": {"path": str(library.data)},
        "model": TINY_LLAMA,
        "schedule": {"type": "failing", "warmup": 0},
        "batch": {"sequence_length": 16, "global_batch_size": 4},
        "train": {"steps": 5, "compile": False},
        "evaluation": {"every": 0},
        "precision": {"type": "fp32"},
    }
    file.write_text(yaml.safe_dump(tree))
    result = run_with(failing_site, COMMAND, "train", str(file), "--processes", processes, check=False)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("Traceback") == 1 and "KeyError: 'rate'" in result.stderr
    assert "failing-plugin: the code of this plug-in has raised KeyError." in " ".join(result.stderr.split())


def test_failures_of_the_machine_are_not_the_plugin_s(failing_site: Path) -> None:
    code = (
        "from jingu.cli import main; from jingu.evaluate.text_metrics import OVERLAPS; import jingu.cli;"
        "jingu.cli._run = lambda words: OVERLAPS['judge']('', ''); main([])"
    )
    result = run_with(failing_site, code, check=False)
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == "ConnectionError: the judge is away"
