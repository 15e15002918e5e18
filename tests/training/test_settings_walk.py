"""Every setting of a run, for every task: training reads it, or refuses another value, or says that it has no effect.

The quick walk trains each task once and records which settings code reads. The slow one trains with another value of
each setting, one at a time, and compares what the run computes, writes and says.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jingu.align.commands import TASKS, build_data, train
from jingu.config.introspect import accepted_types
from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings
from jingu.errors import JinguError
from jingu.runtime.checksums import hash_file
from jingu.training.run import open_run
from tests.align.preferences import write_pairs
from tests.conftest import MakeRun, peak_unmeasured

QUICK = ["pretraining", "supervised", "dpo", "grpo"]
OTHERS = ["lora", "reward", "kto", "simpo", "orpo", "cpo", "ppo", "distill"]
# Code that looks at settings without acting on them.
LOOKS_ONLY = (
    "jingu.config.compare",
    "jingu.config.load",
    "jingu.config.introspect",
    "jingu.training.idle_settings",
    "jingu.plan",
    "pydantic",
    "tests",
)
# These are read only while something happens that does not happen here.
ON_OCCASION = {
    "checkpoint.when_busy": "a save is due while another one is written",
    "checkpoint.grace_seconds": "the run is asked to stop",
}
# `jingu tokenizer train` reads these, also for a task that reads prompts.
OF_THE_TOKENIZER = {"data.input", "data.suffixes"}
# A run of a single rank that ends after two steps without a fault is the same with another value of these, and why.
WITHOUT_DIFFERENCE = {
    **ON_OCCASION,
    **dict.fromkeys(
        ("tokenizer.base", "tokenizer.vocab_size", "tokenizer.special_tokens", "tokenizer.sample_bytes"),
        "the tokenizer exists already",
    ),
    **dict.fromkeys(
        ("data.text_field", "data.invalid_utf8", "data.documents", "data.escaped_newlines", "data.max_document_bytes"),
        "the tokenizer may be trained on the corpus",
    ),
    **dict.fromkeys(OF_THE_TOKENIZER, "the tokenizer may be trained on the corpus"),
    "data.add_bos_token": "the tokenizer adds none",
    "data.on_error": "the corpus has no errors",
    "data.num_workers": "processes and their number change no byte",
    "data.reader": "all ways to read give the same bytes",
    "data.local_cache": "copies give the same bytes",
    "data.duplicates": "no data set is built",
    "data.shard_tokens": "no data set is built",
    "data.validation_fraction": "no data set is built",
    "train.on_divergence": "the loss does not diverge",
    "train.hang_timeout": "nothing hangs",
    "train.log_every": "two steps",
    "precision.reduce": "one rank",
    **dict.fromkeys(("zero_stage", "tensor", "context", "pipeline", "expert", "shard", "replicate"), "one rank"),
    "device.threads": "sums in another order may be equal",
    "evaluation.patience": "it evaluates twice",
    "checkpoint.every_minutes": "it takes seconds",
    "checkpoint.resume": "there is no checkpoint",
}
_TIMED = re.compile(r"second|time|tokens_per|flops|utiliz|peak|memory|wait|speed|date")
_FIGURES = re.compile(r"[\d.,]+k? ?(?:tokens/s|s\b|% of peak)|/[\w/.-]+")


def make_config(task: str, tiny_run: MakeRun, folder: Path) -> RunConfig:
    """Return a tiny run of a task, in which most settings have something to act on."""
    changes: dict[str, Any] = {
        "train.steps": 2,
        "evaluation.every": 1,
        "checkpoint.every": 1,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_best": 1,
        "schedule.warmup": 0,
        "batch.sequence_length": 48,
        "data.path": str(folder / "data"),
    }
    if task in ("dpo", "kto", "ppo", "distill", "lora"):
        base = tiny_run({"train.steps": 1, "batch.sequence_length": 48}, name="base")
        with peak_unmeasured():
            assert train(base) == 0
        changes["initialize.from"] = f"{base.runs_dir}/base"
    if task in ("dpo", "simpo", "orpo", "cpo", "reward", "kto"):
        objective = {"type": "preference", "template": "plain", "rows": "labels" if task == "kto" else "pairs"}
        changes |= {"task": {"type": task}, "data.objective": objective}
        changes |= {"data.input": str(write_pairs(folder / "pairs.jsonl")), "data.suffixes": [".jsonl"]}
    elif task in ("supervised", "lora"):
        file = folder / "rows.jsonl"
        file.write_text("".join(f'{{"prompt": "{n} is", "completion": " {n + 1}"}}\n' for n in range(40)))
        changes |= {"data.input": str(file), "data.suffixes": [".jsonl"]}
        changes |= {"data.objective": {"type": "supervised", "template": "plain"}}
        changes |= {"tune": {"type": "lora", "rank": 2}} if task == "lora" else {}
    elif task in ("grpo", "ppo", "distill"):
        file = folder / "prompts.jsonl"
        file.write_text("".join(f'{{"prompt": "def f{n}", "answer": "("}}\n' for n in range(5)))
        settings = {"type": task, "prompts": str(file), "max_new_tokens": 6}
        settings |= {"prompts_per_step": 4, "answers_per_prompt": 2}
        settings |= {"teacher": changes.get("initialize.from")} if task == "distill" else {}
        settings |= {"rewards": [{"type": "length", "max_tokens": 3}]} if task != "distill" else {}
        settings |= {"critic": {"type": "separate"}} if task == "ppo" else {}
        changes |= {"task": settings, "batch.global_batch_size": 8, "evaluation.every": 0, "checkpoint.keep_best": 0}
    return tiny_run(changes, name=task)


def leaves(section: Settings, prefix: str = "") -> Iterator[tuple[str, Settings, str]]:
    """Yield the key of each setting, its section and its name there. Other types of a section are other tasks' here."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{prefix}{field.alias or name}"
        if isinstance(value, Settings):
            yield from leaves(value, f"{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Settings):
            yield from leaves(value[0], f"{key}[0].")
        elif name != "type":
            yield key, section, name


def other_values(section: Settings, name: str) -> list[Any]:
    """Return values that a setting may accept, without the one that it has."""
    value = getattr(section, name)
    values: list[Any] = [not value] if isinstance(value, bool) else []
    if isinstance(value, int | float) and not isinstance(value, bool):
        values += [value * 2, value + 1, value / 2]
    for accepted in accepted_types(type(section).model_fields[name]):
        examples = {bool: [True, False], int: [1, 3], float: [0.5, 0.1], str: ["other"]}
        if accepted.value is not None:
            values.append(accepted.value)
        elif getattr(accepted.type, "__origin__", None) is list:
            values += [["other"], [0.1], [1]]
        else:
            values += examples.get(accepted.type, [])
    return [other for other in values if other != value]


def change(config: RunConfig, key: str, value: Any) -> RunConfig:
    """Return a configuration with another value of a setting. Raises ValueError if it is not valid."""
    settings = config.model_dump(mode="json", by_alias=True)
    place: Any = settings
    *sections, last = key.replace("[0]", ".0").split(".")
    for part in sections:
        place = place[int(part)] if part.isdigit() else place[part]
    place[last] = value
    return RunConfig.model_validate(settings)


def ask(config: RunConfig, key: str, value: Any) -> str | None:
    """Return what a run says of another value: why it is refused, or a warning that names it; None if nothing."""
    try:
        changed = change(config, key, value)
        run = open_run(changed)
        TASKS[changed.task.type].check(run)
    except (ValueError, JinguError) as error:
        return f"refused: {error}"
    section = key.rpartition(".")[0]
    return next((warning for warning in run.warnings if re.search(rf"\b({key}|{section})\b[ ,]", warning)), None)


@contextmanager
def record_reads() -> Iterator[set[tuple[str, str]]]:
    """Record which fields of which sections code reads, except for code that only looks at them."""
    reads: set[tuple[str, str]] = set()

    def read(self: Settings, name: str) -> Any:
        if not name.startswith("_"):
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            if not caller.startswith(LOOKS_ONLY):
                reads.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    Settings.__getattribute__ = read  # type: ignore[assignment]
    try:
        yield reads
    finally:
        del Settings.__getattribute__


@pytest.mark.parametrize("task", [*QUICK, *(pytest.param(task, marks=pytest.mark.slow) for task in OTHERS)])
def test_every_setting_is_read_or_refused_or_named(task: str, tiny_run: MakeRun, tmp_path: Path, peak: None) -> None:
    config = make_config(task, tiny_run, tmp_path)
    with record_reads() as reads:
        build_data(config)
        assert train(config) == 0
    settings = list(leaves(config))
    unread = [(key, section, name) for key, section, name in settings if (type(section).__name__, name) not in reads]
    assert len(settings) > 100 and len(unread) < 60
    silent = set()
    for key, section, name in unread:
        # Of defaults, nothing is said.
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        values = [value for value in other_values(section, name) if value != default]
        said = [ask(config, key, value) for value in values] or ["no plain value"]
        if None in said:
            silent.add(key)
    expected = {*ON_OCCASION} | (OF_THE_TOKENIZER if task in ("grpo", "ppo", "distill") else set())
    assert silent <= expected


def observe(config: RunConfig) -> dict[str, Any]:
    """Train a run, and return what it computes, writes and says, without times."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jingu").addHandler(handler)
    run = Path(config.runs_dir) / config.name
    try:
        build_data(config)
        assert train(config) == 0
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        files = {str(file.relative_to(run)): file for file in run.rglob("*") if file.is_file()}
        return {
            "metrics": _without_times(metrics),
            "files": sorted(files),
            "weights": {name: hash_file(file) for name, file in files.items() if file.suffix == ".safetensors"},
            "words": [_FIGURES.sub("", line) for line in lines if not line.startswith("step ")],
        }
    finally:
        logging.getLogger("jingu").removeHandler(handler)
        shutil.rmtree(run, ignore_errors=True)


def _without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if not _TIMED.search(key)}
    return value


@pytest.mark.slow
@pytest.mark.parametrize("task", QUICK)
def test_another_value_changes_the_run(task: str, tiny_run: MakeRun, tmp_path: Path, peak: None) -> None:
    config = make_config(task, tiny_run, tmp_path)
    expected = observe(config)
    assert observe(config) == expected
    without_difference = set()
    for key, section, name in leaves(config):
        if key in WITHOUT_DIFFERENCE or key.removeprefix("parallel.") in WITHOUT_DIFFERENCE:
            continue
        has_effect = True
        for value in other_values(section, name)[:4]:
            has_effect = ask(config, key, value) is not None
            if not has_effect:
                try:
                    has_effect = observe(change(config, key, value)) != expected
                except JinguError:
                    has_effect = True
            if has_effect:
                break
        if not has_effect:
            without_difference.add(key)
    assert without_difference == set()
