"""What a run reads from outside its folder, its records, and the advice that it gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from jingu.chat.chat_format import find_chat_format
from jingu.chat.template_sources import NAMED_TEMPLATES
from jingu.config.compare import resume_options_for
from jingu.config.introspect import all_keys, find_field
from jingu.config.schema import RunConfig
from jingu.config.sections.base import PathText
from jingu.data.build import build
from jingu.errors import JinguError
from jingu.formats.export import write_model
from jingu.formats.models import load_adapters, open_model
from jingu.formats.run_inputs import record_model
from jingu.runtime import checksums, ranks
from jingu.tables import read_table
from jingu.text.tokenizer import Tokenizer
from jingu.training import input_checks as inputs_module
from jingu.training.commands import train
from jingu.training.run import ResumeOptions, open_run
from jingu.tune.adapter_commands import merge
from jingu.tune.prepare import prepare
from tests.conftest import MakeRun


@pytest.fixture(autouse=True)
def quick(peak: None) -> None:
    """No run here measures the machine."""


@pytest.fixture
def base(tiny_run: MakeRun, tmp_path: Path) -> Path:
    """A Hugging Face folder."""
    config = tiny_run({"train.steps": 1}, name="base")
    assert train(config) == 0
    write_model(open_model(Path(config.runs_dir) / "base"), tmp_path / "base", "fp32", False)
    return tmp_path / "base"


def scale_weights(folder: Path) -> None:
    """Change a single tensor; the size of the file stays."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    save_file({**tensors, name: tensors[name] * 1.7}, path, metadata={"format": "pt"})


LORA = {
    "tune": {"type": "lora", "rank": 2},
    "train.steps": 2,
    "schedule": {"type": "constant", "warmup": 0},
    "model": {},
}


def test_every_path_of_the_schema_is_classified() -> None:
    table = read_table(inputs_module.__file__, "inputs.toml")
    listed = [key for section in table.values() for key in section]
    assert len(listed) == len(set(listed))

    def names_a_path(key: str) -> bool:
        field = find_field(tuple(key.split(".")))
        return field is not None and str(PathText.__metadata__[-1].text) in repr((field.annotation, field.metadata))

    paths = {key for key in all_keys() if names_a_path(key)}
    assert len(paths) > 15 and paths <= set(listed), paths - set(listed)


def test_adapters_are_used_only_with_their_base(
    base: Path, tiny_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_run({**LORA, "initialize.from": "base"}, name="lora")
    assert train(config) == 0
    run = Path(config.runs_dir) / "lora"
    shutil.copytree(base, tmp_path / "copy")
    # From another folder; and after base and run have moved together.
    monkeypatch.chdir("/")
    open_model(run)
    shutil.copytree(tmp_path, tmp_path.parent / "moved", dirs_exist_ok=True)
    shutil.move(base, tmp_path / "away")
    open_model(tmp_path.parent / "moved" / "runs" / "lora")
    shutil.move(tmp_path / "away", base)
    scale_weights(base)
    with pytest.raises(JinguError, match="is not the model for which these adapters were trained") as caught:
        open_model(run)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JinguError, match=r"initialize\.from: .* its contents have changed"):
        train(tiny_run({**LORA, "initialize.from": "base", "train.steps": 3}, name="lora"))
    # What the messages offer works.
    assert f"jingu tune merge {run} --base {base}" in str(caught.value)
    merge(run, tmp_path / "merged", base)
    assert "is not the model for which the adapters" in caplog.text
    more = tiny_run({**LORA, "initialize.from": "base", "train.steps": 3}, name="lora")
    assert train(more, resume_options=ResumeOptions(("initialize.from",))) == 0
    open_model(run)
    caplog.clear()
    load_adapters(run, open_model(base))
    assert "is not the model" not in caplog.text


def test_a_copy_of_the_base_is_the_base(base: Path, tiny_run: MakeRun, tmp_path: Path) -> None:
    config = tiny_run({**LORA, "initialize.from": str(base)}, name="lora")
    assert train(config) == 0
    run = Path(config.runs_dir) / "lora"
    shutil.copytree(base, tmp_path / "new")
    shutil.rmtree(base)
    shutil.move(tmp_path / "new", base)
    open_model(run)
    (run / "inputs.json").write_text("{")
    with pytest.raises(JinguError, match="the file is damaged"):
        open_model(run)


def test_one_changed_byte_is_another_model(base: Path) -> None:
    before = checksums.digest_records(record_model(open_model(base)))
    path = base / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3000] ^= 1
    path.write_bytes(content)
    assert checksums.digest_records(record_model(open_model(base))) != before


# Templates

ROWS = [
    {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f"a {n}"}]} for n in range(30)
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture
def tuned(tiny_run: MakeRun, tmp_path: Path) -> Callable[..., RunConfig]:
    """A tuning run whose template is a file, with its data prepared."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def make(**changes: Any) -> RunConfig:
        settings = {
            "data.input": str(tmp_path / "rows.jsonl"),
            "data.path": str(tmp_path / "rows"),
            "data.objective": {"type": "supervised", "template": str(tmp_path / "t.jinja")},
            "batch.sequence_length": 48,
            "batch.global_batch_size": 2,
            "train.steps": 2,
            "checkpoint.every": 2,
            "schedule": {"type": "constant", "warmup": 0},
        }
        return tiny_run({**settings, **{key.replace("__", "."): value for key, value in changes.items()}})

    prepare(make())
    return make


def test_a_run_keeps_its_template(tuned: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = tuned()
    assert train(config) == 0
    run = Path(config.runs_dir) / config.name
    (tmp_path / "t.jinja").write_text("USER: {{ messages[0].content }}\nBOT: ")
    chat = find_chat_format(run, Tokenizer.load(run / "tokenizer"))
    assert chat is not None and chat.template.sources == (TEMPLATE,)
    (tmp_path / "t.jinja").unlink()
    step = next((run / "checkpoints").glob("step-*"))
    chat = find_chat_format(step, Tokenizer.load(run / "tokenizer"))
    assert chat is not None and chat.template.sources == (TEMPLATE,)


def test_a_run_whose_template_has_changed_resumes_with_its_copy(
    tuned: Callable[..., RunConfig], tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    config = tuned()
    assert train(config) == 0
    copy = Path(config.runs_dir) / config.name / "tokenizer" / "chat_template.jinja"
    file.write_text(TEMPLATE + " ")
    with pytest.raises(JinguError, match=rf"has changed since the data set .* \(the run has a copy, {copy}"):
        train(tuned(train__steps=3))
    with pytest.raises(JinguError, match=r"has changed since .* Restore the file; or delete the folder"):
        train(tuned(name="other"))
    file.unlink()
    with pytest.raises(JinguError, match=f"there is no chat template.* from the run's copy, {copy}"):
        train(tuned(train__steps=3))
    shutil.copy(copy, file)
    assert train(tuned(train__steps=3)) == 0


# Starts that fail, and advice


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the records of a run, without its log."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def test_a_refused_resume_leaves_the_records(tuned: Callable[..., RunConfig]) -> None:
    config = tuned()
    assert train(config) == 0
    run = Path(config.runs_dir) / config.name
    before = snapshot(run)
    other = tuned(tune={"type": "full", "freeze": ["embedding.*"]}, train__steps=4)
    with pytest.raises(JinguError, match=r"--allow tune\.freeze --fresh-optimizer"):
        train(other)
    with pytest.raises(JinguError, match="Resume with --fresh-optimizer"):
        train(other, resume_options=ResumeOptions(("tune.freeze", "train.steps")))
    assert snapshot(run) == before
    assert train(tuned(train__steps=3)) == 0
    # The remedy works.
    assert train(other, resume_options=ResumeOptions(("tune.freeze",), fresh_optimizer=True)) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"type": "lion", "lr": 1e-4}},
        {"tune": {"type": "full", "num_trainable_layers": 1}},
        {"seed": 9},
        {"optimizer.beta2": 0.9},
        {"train.max_grad_norm": 0.5},
        {"batch.global_batch_size": 4},
    ],
    ids=str,
)
def test_the_offered_options_are_accepted(changes: dict[str, Any], tiny_run: MakeRun) -> None:
    settings = {"train.steps": 1, "schedule": {"type": "constant", "warmup": 0}}
    assert train(tiny_run(settings)) == 0
    config = tiny_run({**settings, "train.steps": 2, **changes})
    with pytest.raises(JinguError) as caught:
        train(config)
    words = str(caught.value.fix).partition("resume with ")[2].rstrip(".").split()
    assert words
    allow = tuple(word for word in words if not word.startswith("--"))
    assert train(config, resume_options=ResumeOptions(allow, "--fresh-optimizer" in words)) == 0


def test_what_no_checkpoint_can_follow_is_not_offered(tiny_run: MakeRun) -> None:
    assert resume_options_for(["model.hidden_size"]) == resume_options_for(["seed", "tune.rank"]) == ""
    assert train(tiny_run({"train.steps": 1})) == 0
    with pytest.raises(JinguError) as caught:
        train(tiny_run({"train.steps": 1, "model.hidden_size": 64}))
    assert "--allow" not in str(caught.value)


# Settings without their precondition


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"evaluation.every": 1, "evaluation.patience": 1, "data.validation_fraction": 0.0}, "evaluation.patience"),
        ({"evaluation.every": 1, "checkpoint.keep_best": 1, "data.validation_fraction": 0.0}, "checkpoint.keep_best"),
        ({"evaluation.every": 0, "checkpoint.keep_best": 1}, "checkpoint.keep_best"),
        ({"evaluation.every": 0, "evaluation.patience": 2}, "evaluation.patience"),
    ],
)
def test_best_checkpoints_need_evaluations(changes: dict[str, Any], where: str, tiny_run: MakeRun) -> None:
    with pytest.raises(JinguError, match="is never measured") as caught:
        open_run(tiny_run({"data.input": [], **changes}))
    assert caught.value.where == where


def test_idle_settings_are_named(tiny_run: MakeRun, tmp_path: Path) -> None:
    idle = {"data.path": str(tmp_path / "data"), "evaluation.every": 5, "data.validation_fraction": 0.0}
    build(tiny_run(idle))
    assert "nothing is evaluated" in open_run(tiny_run(idle)).warnings[0]
    frozen = {"tune": {"type": "full", "num_trainable_layers": 1}}
    assert "tied to the embedding" in open_run(tiny_run({**frozen, "model.tie_word_embeddings": True})).warnings[0]
    assert not open_run(tiny_run({**frozen, "model.tie_word_embeddings": False})).warnings


# The environment


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, "MASTER_ADDR and MASTER_PORT are not"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE is set .* RANK, MASTER_ADDR and MASTER_PORT are not"),
        ({"RANK": "1"}, "RANK is set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not"),
        ({"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK is 5, which is no rank of 2"),
        ({"RANK": "0", "WORLD_SIZE": "many", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "'many', which is not a whole"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "'x', which is not a whole"),
    ],
)
def test_partial_rank_variables_are_named(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, tiny_run: MakeRun
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JinguError, match=words) as caught:
        train(tiny_run())
    assert "unset" in str(caught.value) and "--processes" in str(caught.value)


@pytest.mark.parametrize(
    "variables", [{}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "a"}, {"SLURM_PROCID": "3"}, {"RANK": ""}]
)
def test_leftovers_that_mean_nothing_are_ignored(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not ranks.is_launched()


def test_tasks_during_training_use_the_template_of_the_run(tiny_run: MakeRun) -> None:
    config = tiny_run({"data.objective": {"type": "supervised", "template": "chatml"}})
    tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    assert inputs_module.load_run_template(config, tokenizer).source == NAMED_TEMPLATES["chatml"]
