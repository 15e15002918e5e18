"""What a newcomer does wrong in a run's file or on the command line, and the exact words of the answer."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jingu.config.explain import KEY_ALIASES, VALUE_ALIASES, closest_match
from jingu.config.introspect import all_keys
from jingu.config.load import load_config
from jingu.config.schema import RunConfig
from jingu.config.strict_yaml import dump
from jingu.errors import JinguError

MISTAKES = Path(__file__).with_name("mistakes.txt")


def mistakes() -> list[tuple[str, list[str], str]]:
    """The text of run.yaml, overrides, and what is said."""
    blocks = [block.split("\n") for block in MISTAKES.read_text(encoding="utf-8").split("\n\n")]

    def lines(block: list[str], mark: str) -> list[str]:
        return [line[2:] for line in block if line[:2].rstrip() == mark]

    return [
        ("".join(f"{line}\n" for line in lines(block, "|")), lines(block, "$"), "\n".join(lines(block, ">")))
        for block in blocks
        if lines(block, ">")
    ]


def mistake_in(*overrides: str, file: str = "run.yaml") -> str:
    with pytest.raises(JinguError) as raised:
        load_config(Path(file), overrides)
    return str(raised.value)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("text", "overrides", "words"), mistakes())
def test_the_words(text: str, overrides: list[str], words: str) -> None:
    Path("run.yaml").write_bytes(text.encode())
    said = mistake_in(*overrides)
    assert said == words
    # Nothing of the libraries behind it shows.
    for word in ("pydantic", "Input should", "http", "Error", "Traceback", "None", "yaml.org", "scalar", "union"):
        assert word not in said.replace('"None"', "")


def test_a_file_of_another_kind_does_not_flood_the_terminal() -> None:
    Path("run.yaml").write_text("".join(f"key{n}: {n}\n" for n in range(30)))
    lines = mistake_in().split("\n")
    assert len(lines) == 14
    assert lines[0] == "there are 30 mistakes in the settings:"
    assert lines[-1] == "- and 18 more"


def test_monstrous_values() -> None:
    Path("run.yaml").write_text("name: a\x01")
    assert mistake_in() == "run.yaml:1: this line contains a control character (code 1); remove it."
    Path("run.yaml").write_text("[" * 3000)
    assert mistake_in() == "run.yaml: the settings are nested too deeply to be read."
    Path("run.yaml").write_text("seed: " + "9" * 5000)
    assert mistake_in() == (
        f"run.yaml:1: {'9' * 40} cannot be read as a number. Write plain digits, and at most 4,000."
    )
    Path("run.yaml").write_text(f"train: {{steps: {'x' * 500}}}")
    assert f'not the text "{"x" * 57}...".' in mistake_in()
    Path("run.yaml").write_text(f"{'x' * 500}: 1")
    assert mistake_in().startswith(f"run.yaml:1: {'x' * 57}... is not a setting. The top level has: name, runs_dir,")


# The file itself


def test_the_file_is_missing() -> None:
    assert mistake_in(file="run.yaml") == f"run.yaml: there is no such file. The path is {Path('run.yaml').absolute()}."
    for name in ("small.yaml", "large.yml", "notes.txt"):
        Path(name).touch()
    assert mistake_in(file="smal.yaml") == "smal.yaml: there is no such file. Did you mean small.yaml?"
    assert mistake_in(file="zzz") == f"zzz: there is no such file. The path is {Path('zzz').absolute()}."
    assert mistake_in(file="runs/x.yaml").startswith("runs/x.yaml: there is no such file. The path is /")
    assert mistake_in(file="small.yaml/x").startswith("small.yaml/x: there is no such file. The path is /")


def test_the_file_is_a_folder() -> None:
    Path("runs/first").mkdir(parents=True)
    assert mistake_in(file="runs/first") == (
        "runs/first: this is a folder, and a run is a YAML file. Give the file in it: runs/first/config.yaml."
    )


def test_the_file_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert mistake_in() == "run.yaml: the file cannot be read: permission denied."


def test_the_file_is_not_utf_8() -> None:
    Path("run.yaml").write_bytes(b"name: x\nruns_dir: caf\xe9\n")
    assert mistake_in() == (
        "run.yaml:2: the file is not UTF-8 text: the byte 0xe9 on this line is not part of a character. "
        "Save it again as UTF-8."
    )
    Path("run.yaml").write_bytes("name: x\n".encode("utf-16"))
    assert mistake_in() == "run.yaml: the file is in UTF-16, not UTF-8. Save it again as UTF-8."


# The names of others


@pytest.mark.parametrize("name", KEY_ALIASES)
def test_names_of_other_tools_lead_to_settings_of_ours(name: str) -> None:
    assert KEY_ALIASES[name] in all_keys()
    assert name not in {key.rsplit(".", 1)[-1] for key in all_keys()}


def test_values_of_other_tools_lead_to_values_of_ours() -> None:
    Path("run.yaml").write_text("device: {type: gpu}\nprecision: {type: bfloat16}\nschedule: {type: noam}\n")
    said = mistake_in()
    for value in ("cuda", "bf16", "inverse_sqrt"):
        assert f"Did you mean {value}?" in said
        assert value in VALUE_ALIASES.values()


def test_no_guess_where_two_are_as_near() -> None:
    assert closest_match("fp16", ["fp64", "bf16"]) is None
    assert closest_match("bf-16", ["auto", "fp32", "bf16", "fp64"]) == "bf16"
    assert closest_match("x", []) is None


# Whatever is written

KEYS = st.one_of(st.sampled_from(sorted({part for key in all_keys() for part in key.split(".")})), st.text(max_size=4))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["adamw", "lion", "auto", "none", "yes", "100", "1_0", "steps:3", ".txt", "bf16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
OVERRIDE = st.builds("{}={}".format, st.sampled_from(all_keys()) | st.text(max_size=6), VALUES | st.text())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=st.dictionaries(KEYS, VALUES, min_size=1, max_size=5), overrides=st.lists(OVERRIDE, max_size=3))
def test_any_tree_is_a_configuration_or_a_mistake(tree: dict[str, Any], overrides: list[str]) -> None:
    Path("run.yaml").write_text(dump(tree), encoding="utf-8")
    try:
        load_config(Path("run.yaml"), overrides)
    except JinguError as mistake:
        assert "Input should" not in str(mistake)
        assert "pydantic" not in str(mistake)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=st.binary(max_size=40) | st.text(alphabet=":-[]{}#&*!|>'\"%@`,?~<\n\t aé0", max_size=40).map(str.encode))
def test_any_bytes_are_a_configuration_or_a_mistake(raw: bytes) -> None:
    Path("run.yaml").write_bytes(raw)
    try:
        assert load_config(Path("run.yaml")) == RunConfig()  # {} is a file of defaults.
    except JinguError as mistake:
        assert str(mistake).startswith(("run.yaml:", "there are "))
