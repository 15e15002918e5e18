"""What leaves the repository: examples in the package, wheel and source archive, notebooks, container images."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jingu.cli import main
from jingu.config.load import dump_yaml, load_config
from jingu.version import __version__
from tests.test_readme import MODULES, SMALL

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("notebooks/*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILES = sorted(ROOT.glob("docker/*.Dockerfile"))


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command in a folder; return its standard output."""
    environment = {**os.environ, **variables}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, (command, result.stdout[-2000:], result.stderr[-4000:])
    return result.stdout


# Examples


def test_examples_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[1 : lines.index("")]]
    assert {"quickstart", "grpo", "align/preferences", "plugin", "notebooks/pretrain"} <= {*names}
    assert all(len(line.split()) > 2 for line in lines[1 : len(names)])


def test_an_example_comes_with_the_files_that_it_mentions(tmp_path: Path) -> None:
    assert main(["example", "grpo", "--to", str(tmp_path)]) == 0
    assert sorted(file.name for file in (tmp_path / "examples").iterdir()) == ["grpo.py", "grpo.yaml", "sort.yaml"]
    assert main(["example", "plugin", "--to", str(tmp_path)]) == 0
    copied = {file.relative_to(tmp_path / "examples") for file in (tmp_path / "examples").rglob("plugin/**/*.py")}
    assert copied == {file.relative_to(EXAMPLES) for file in EXAMPLES.rglob("plugin/**/*.py")} != set()


def test_files_of_the_user_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example", "sort", "--to", str(tmp_path)]) == 0
    assert main(["example", "sort", "--to", str(tmp_path)]) == 0  # the same contents
    file = tmp_path / "examples" / "sort.yaml"
    file.write_text("name: mine\n")
    assert main(["example", "sort", "--to", str(tmp_path)]) == 2
    assert "sort.yaml: this file exists, with other contents." in capsys.readouterr().err
    assert file.read_text() == "name: mine\n"
    assert main(["example", "sorf"]) == 2
    assert "The nearest are sort" in capsys.readouterr().err


def test_mistakes_in_settings_of_the_quickstart_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "optimizer.lrr=1"]) == 2
    assert capfd.readouterr().err.startswith("jingu: optimizer.lrr=1: optimizer.lrr is not a setting.")
    assert sorted(file.name for file in tmp_path.rglob("*") if file.is_file()) == ["quickstart.py", "quickstart.yaml"]


# Notebooks

SMALL_NOTEBOOKS: dict[str, dict[str, Any]] = {
    "pretrain": {"STEPS": 3, "MODULES": 12},
    "tune_and_export": {"STEPS": 3},
    "grpo": {"FIRST_STEPS": 3, "STEPS": 2, "QUESTIONS": 5},
}


def test_notebooks_have_no_output() -> None:
    assert {path.stem for path in NOTEBOOKS} == SMALL_NOTEBOOKS.keys()
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)
        assert sum("parameters" in cell["metadata"].get("tags", ()) for cell in codes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path) -> None:
    """All cells in order, in one process, with the parameters of a small run."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            parts.append("".join(cell["source"]))
            if "parameters" in cell["metadata"].get("tags", ()):
                values = SMALL_NOTEBOOKS[path.stem]
                assert all(f"{name} =" in parts[-1] for name in values)
                parts += [f"{name} = {value!r}" for name, value in values.items()]
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(parts), encoding="utf-8")
    run([sys.executable, str(script)], tmp_path, PYTHONPATH=str(ROOT))
    assert list(tmp_path.glob("runs/*/metrics.jsonl"))


# Container images


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfiles_copy_and_install_what_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    sources = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert "jingu" in sources and all((ROOT / source).exists() and f"!{source}" in allowed for source in sources)
    (extras,) = re.findall(r'"/jingu\[([\w,]+)\]"', text)
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
    assert re.findall(r"^(?:USER|ENTRYPOINT) .*$", text, re.MULTILINE) == ["USER jingu", 'ENTRYPOINT ["jingu"]']
    # What the build of the package reads besides the package: its readme and its licenses.
    needed = {PROJECT["readme"], *(file for file in PROJECT["license-files"] if "/" not in file)}
    assert needed <= {*sources}


def test_there_is_an_image_for_cpus_and_one_for_gpus() -> None:
    assert [path.stem for path in DOCKERFILES] == ["cpu", "cuda"]


# Wheel and source archive


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source archive, built from this tree."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], ROOT)
    (wheel,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    return wheel, source


@pytest.mark.slow
def test_archives_have_the_same_files(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """A wheel of the source archive equals that of the tree, and has every example."""
    wheel, source = archives
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / f"jingu-{__version__}"
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], folder)
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as second:
        assert {each.filename: each.CRC for each in first.infolist()} == {
            each.filename: each.CRC for each in second.infolist()
        }
        names = set(first.namelist())
    files = {file.relative_to(ROOT).as_posix() for file in EXAMPLES.rglob("*") if file.is_file()}
    expected = {f"jingu/{file}" for file in files if "__pycache__" not in file}
    assert {name for name in names if name.startswith("jingu/examples/")} == expected
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
    assert (folder / "tests" / "test_travel.py").exists() and (folder / "Makefile").exists()


@pytest.mark.slow
def test_the_wheel_works_in_a_clean_environment(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """One command from the wheel to a trained model and its report, without a clone. Only its dependencies are shared
    with this environment, to save downloads."""
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], tmp_path)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(archives[0])], tmp_path)
    (site,) = environment.glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    jingu = str(environment / "bin" / "jingu")
    variables = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    where = run([str(python), "-c", "import jingu; print(jingu.__file__)"], tmp_path, **variables)
    assert Path(where.strip()).is_relative_to(environment)
    assert run([jingu, "--version"], tmp_path, **variables).split() == ["jingu", __version__]

    # A small version of the quickstart, on a few files.
    folder = tmp_path / "work"
    folder.mkdir()
    run([jingu, "example", "quickstart"], folder, **variables)
    with contextlib.chdir(folder):
        small = dump_yaml(load_config(Path("examples/quickstart.yaml"), SMALL))
        Path("examples/quickstart.yaml").write_text(small, encoding="utf-8")
    text = folder / "build" / "quickstart" / "text"
    text.mkdir(parents=True)
    for name in MODULES:
        shutil.copy(Path(sysconfig.get_paths()["stdlib"], f"{name}.py"), text)
    output = run([jingu, "quickstart", "train.steps=4"], folder, **variables)
    assert "Bits per byte" in output
    assert (folder / "runs" / "quickstart" / "report.html").stat().st_size > 10_000
    assert (folder / "build" / "quickstart" / "exported" / "config.json").exists()
