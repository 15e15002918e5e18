"""The files under examples/: each loads as it is, divides as it says, and names what exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from jingu.config.batch import plan_batch
from jingu.config.load import dump_yaml, load_config
from jingu.config.schema import RunConfig
from jingu.config.tree import all_keys
from jingu.model.build import spec_from_settings

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_example", EXAMPLES / "quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_examples() -> None:
    assert EXAMPLES / "quickstart.yaml" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_loads_and_comes_back_the_same(file: Path, tmp_path: Path) -> None:
    config = load_config(file)
    (tmp_path / "again.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_can_be_laid_out(file: Path) -> None:
    config = load_config(file)
    for ranks in (1, 2):
        plan = plan_batch(config.batch, ranks)
        assert plan.micro_size * plan.accumulation * ranks == config.batch.global_size
    spec = spec_from_settings(config.model, config.tokenizer.vocabulary, config.batch.sequence_length)
    assert config.model.layers in (None, spec.layers)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_comments_name_settings_that_exist(file: Path) -> None:
    comments = re.findall(r"#(.*)", file.read_text(encoding="utf-8"))
    sections = "|".join(RunConfig.model_fields)
    for named in re.findall(rf"\b(?:{sections})\.\w+", " ".join(comments)):
        assert named in all_keys() or Path(named).suffix in (".md", ".py", ".yaml"), named


def test_names_are_different() -> None:
    names = [load_config(file).name for file in FILES]
    assert len(set(names)) == len(names)


def test_script_and_file_mean_the_same_places(quickstart: ModuleType) -> None:
    config = load_config(EXAMPLES.parent / quickstart.CONFIG)
    assert config.data.input == str(quickstart.PLACE / "text")
    assert config.tokenizer.path == str(quickstart.PLACE / "tokenizer")
    assert config.data.path == str(quickstart.PLACE / "data")


def test_corpus_is_the_library_without_tests_and_packages(
    quickstart: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "python3"
    kept = ["ast.py", "json/decoder.py"]
    for name in [*kept, "test/test_ast.py", "idlelib/idle_test/a.py", "site-packages/torch/a.py", "LICENSE.txt"]:
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n")
    monkeypatch.setattr(quickstart.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    text = tmp_path / "text"
    quickstart.collect(text)
    assert sorted(str(path.relative_to(text)) for path in text.rglob("*") if path.is_file()) == kept
    (library / "ast.py").write_text("changed\n")
    quickstart.collect(text)  # there already: left alone
    assert (text / "ast.py").read_text() == "# ast.py\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python3", "text"]
