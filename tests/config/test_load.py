"""Reading a run's file, overriding settings, and writing the file back."""

from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jingu.config.introspect import AcceptedType, accepted_types, fields_by_key, parse_annotation, section_types
from jingu.config.load import dump_yaml, load_config, load_stored_config
from jingu.config.schema import RunConfig
from jingu.config.sections.base import Settings
from jingu.config.sections.optimizers import AdamWSettings, LionSettings
from jingu.config.sections.schedules import WsdSettings
from jingu.errors import JinguError


def load_text(folder: Path, text: str, *overrides: str) -> RunConfig:
    file = folder / "run.yaml"
    file.write_bytes(text.encode())
    return load_config(file, overrides)


def test_reads_a_file(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        """\
name: first
seed: 0x10
optimizer: {type: lion, lr: 3e-4}
schedule:
  type: wsd
  warmup: 100
  decay: 0.5
train:
  steps: 20
  max_grad_norm: null
  compile: false
data:
  input: [a, b/c]
""",
    )
    assert (config.name, config.seed, config.train.steps, config.train.max_grad_norm) == ("first", 16, 20, None)
    assert config.optimizer == LionSettings(lr=3e-4)
    assert config.schedule == WsdSettings(warmup=100, decay=0.5)
    assert config.train.compile is False
    assert config.data.input == ["a", "b/c"]


def test_what_is_left_out_or_left_empty_is_the_default(tmp_path: Path) -> None:
    assert load_text(tmp_path, "name: run\n") == RunConfig()
    assert load_text(tmp_path, "train:\nmodel:\noptimizer:\n") == RunConfig()


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), ("3", 3.0), (".5", 0.5), ("5.", 5.0), ("+2", 2.0), ("0x10", 16.0), ("0o17", 15.0)],
)
def test_numbers_are_those_of_yaml_1_2(tmp_path: Path, written: str, value: float) -> None:
    config = load_text(tmp_path, f"optimizer: {{lr: {written}}}")
    assert config.optimizer.lr == value
    assert type(config.optimizer.lr) is float


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "True", "y", "1:30", "2026-01-01", "1_000", "0b1", "Null"])
def test_words_that_yaml_1_1_takes_for_something_else_are_text(tmp_path: Path, word: str) -> None:
    assert load_text(tmp_path, f"data: {{suffixes: [{word}]}}").data.suffixes == [word]


@pytest.mark.parametrize("word", ["007", "1e5", "1.50", "true", "0x10", "-3"])
def test_text_settings_take_numbers_as_written(tmp_path: Path, word: str) -> None:
    config = load_text(tmp_path, f"data: {{text_field: {word}, suffixes: [{word}], input: {word}}}")
    assert (config.data.text_field, config.data.suffixes, config.data.input) == (word, [word], word)
    assert load_text(tmp_path, "seed: 1", f"data.text_field={word}").data.text_field == word


def test_warmup_of_one_step_is_not_a_warmup_of_the_whole_run(tmp_path: Path) -> None:
    for written, kind in (("1", int), ("1.0", float), ("0", int), ("0.0", float)):
        config = load_text(tmp_path, f"schedule: {{warmup: {written}}}")
        assert config.schedule.warmup == float(written)
        assert type(config.schedule.warmup) is kind
        again = load_text(tmp_path, dump_yaml(config))
        assert type(again.schedule.warmup) is kind


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    assert load_text(tmp_path, "\ufeffname: x\n").name == "x"


def test_json_is_yaml(tmp_path: Path) -> None:
    config = load_text(tmp_path, '{"name": "x", "optimizer": {"lr": 1e-3, "type": "adamw"}, "train": {"steps": 5}}')
    assert (config.name, config.train.steps) == ("x", 5)


# Overrides


def test_overrides_change_single_settings_in_order(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        "train: {steps: 10, log_every: 3}\noptimizer: {lr: 1e-4}\n",
        "optimizer.lr=3e-4",
        "train.steps=20",
        "train.steps=30",
        "evaluation.sample_prompts=[def , 'a: b']",
        "data.input=[1, x]",
        "train.max_grad_norm=null",
        "train.compile=true",
        "batch.micro_batch_size=auto",
        "schedule.warmup=5",
    )
    assert config.optimizer == AdamWSettings(lr=3e-4)
    assert (config.train.steps, config.train.log_every) == (30, 3)
    assert config.evaluation.sample_prompts == ["def", "a: b"]
    assert config.data.input == ["1", "x"]
    assert config.train.max_grad_norm is None
    assert config.train.compile is True
    assert config.schedule.warmup == 5


def test_overrides_of_text_are_taken_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load_text(
        tmp_path, "seed: 1", "name=007", "data.input=~/x", "data.text_field=a: b #c", "data.path=*x", "runs_dir='a b'"
    )
    assert config.name == "007"
    assert config.data.input == "/home/me/x"
    assert config.data.text_field == "a: b #c"
    assert config.data.path == "*x"
    assert config.runs_dir == "a b"


def test_an_override_of_the_type_keeps_what_both_types_have(tmp_path: Path) -> None:
    config = load_text(tmp_path, "optimizer: {type: adamw, lr: 2e-4, beta2: 0.9}", "optimizer.type=lion")
    assert config.optimizer == LionSettings(lr=2e-4, beta2=0.9)


def test_an_override_of_a_section_replaces_it(tmp_path: Path) -> None:
    config = load_text(tmp_path, "optimizer: {eps: 1e-5}", "optimizer={type: lion, lr: 1e-5}")
    assert config.optimizer == LionSettings(lr=1e-5)
    # What stood on the replaced lines is no longer in anyone's way.
    config = load_text(tmp_path, "optimizer: {eps: x}", "optimizer.eps=1e-5")
    assert config.optimizer == AdamWSettings(eps=1e-5)


def test_overrides_reach_into_sections_that_the_file_leaves_out(tmp_path: Path) -> None:
    assert load_text(tmp_path, "name: x\ntrain:\n", "train.steps=3", "model.hidden_size=8").model.hidden_size == 8


# Writing


def _values(kind: AcceptedType) -> st.SearchStrategy[Any]:
    """Values that a setting of this kind takes, from its own description."""
    bounds = {
        name: getattr(limit, name) for limit in kind.limits for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)
    }
    bounds = {name: value for name, value in bounds.items() if value is not None}
    if get_origin(kind.type) is list:
        return st.lists(st.one_of(*map(_values, parse_annotation(get_args(kind.type)[0]))), max_size=3)
    if kind.type is int:
        most = bounds["lt"] - 1 if "lt" in bounds else bounds.get("le")
        return st.integers(bounds["ge"], most)
    if kind.type is float:
        low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
        return st.floats(
            low,
            high,
            exclude_min="gt" in bounds,
            exclude_max="lt" in bounds,
            allow_nan=False,
            allow_infinity=False,
        )
    if kind.type is str:
        for pattern in (limit.pattern for limit in kind.limits if getattr(limit, "pattern", None)):
            return st.from_regex(pattern).map(str.strip)
        return st.one_of(
            st.text(min_size=1, max_size=9),
            st.sampled_from(["no", "007", "~", "1e5", "null", "- a", "a: b", "\x85", "a\n\u2028 b"]),
        )
    if isinstance(kind.type, type) and issubclass(kind.type, Settings):
        return _sections(kind.type)
    if get_origin(kind.type) is dict:
        (value,) = parse_annotation(get_args(kind.type)[1])
        return st.dictionaries(st.text(min_size=1, max_size=9), _values(value), max_size=2)
    return {bool: st.booleans(), type(None): st.none()}.get(kind.type, st.just(kind.value))


def _sections(model: type[Settings]) -> st.SearchStrategy[dict[str, Any]]:
    found = {}
    for name, field in fields_by_key(model).items():
        inner = [_sections(variant) for variant in section_types(field).values()]
        found[name] = st.one_of(*inner) if inner else st.one_of(*map(_values, accepted_types(field)))
    if model is RunConfig:
        found["name"] = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True).map(lambda name: name[:200])
    required = {"type": found.pop("type")} if "type" in found else {}
    return st.fixed_dictionaries(required, optional=found)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(tree=_sections(RunConfig))
def test_any_configuration_comes_back_from_its_file(tmp_path: Path, tree: dict[str, Any]) -> None:
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        # Values of a section can contradict each other.
        assert {detail["type"] for detail in error.errors()} == {"value_error"}
        reject()
    text = dump_yaml(config)
    again = load_text(tmp_path, text)
    assert again == config
    assert dump_yaml(again) == text
    # Another reader, of YAML 1.1, finds the same values in it.
    assert yaml.safe_load(text) == config.model_dump()


@pytest.mark.parametrize("text", ["", "# nothing\n", "- name: run\n", "run\n", "3\n"])
def test_a_stored_file_without_settings_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(JinguError, match=r"config\.yaml: the file should hold the settings of the run"):
        load_stored_config(file)


def test_the_written_file_has_every_setting_in_the_order_of_the_tree() -> None:
    tree = yaml.safe_load(dump_yaml(RunConfig()))
    assert list(tree) == list(RunConfig.model_fields)
    assert list(tree["schedule"]) == ["type", "warmup", "min_lr"]
    assert tree["optimizer"]["eps"] == 1e-8
    assert tree["model"]["num_kv_heads"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data: {objective: {type: supervised, loss_on: all, turns: each}}",
            r"^data\.objective: turns=each trains one",
        ),
        (
            "task: {type: grpo, prompts: p, rewards: [{type: math}, {type: length, min_tokens: 9, max_tokens: 5}]}",
            r"^task\.rewards\[1\]: min_tokens 9 is more than max_tokens 5",
        ),
        (
            "task: {type: grpo, prompts: p, rewards: [{type: length, min_tokens: 9, max_tokens: 5}]}\n"
            "data: {objective: {type: supervised, loss_on: all, turns: each}}",
            r"there are 2 mistakes",
        ),
    ],
)
def test_values_that_contradict_each_other(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(JinguError, match=message):
        load_text(tmp_path, f"name: run\n{text}\n")
