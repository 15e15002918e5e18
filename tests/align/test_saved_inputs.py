"""References, prompts and rewards that change between two starts of a run, and settings that contradict each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jingu.align.policy_checks import check_policy_run
from jingu.align.rollout_commands import score
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.formats.export import write_model
from jingu.formats.models import open_model
from jingu.training.commands import train
from jingu.training.run import ResumeOptions, open_run
from tests.align.policies import rollout
from tests.conftest import Done, MakeRun

pytestmark = pytest.mark.usefixtures("peak")
MORE = {"schedule": {"type": "constant", "warmup": 0}, "checkpoint.every": 1}


def flip_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [-1, -3001])
def test_one_changed_byte_of_a_reference_is_refused(place: int, base: str, make: MakeRun, tmp_path: Path) -> None:
    write_model(open_model(Path(base)), tmp_path / "reference", "fp32", False)
    kl = {**MORE, "task.kl": {"type": "kl", "reference": str(tmp_path / "reference")}}
    assert train(make({**kl, "train.steps": 1})) == 0
    flip_byte(tmp_path / "reference" / "model.safetensors", place)
    with pytest.raises(JinguError, match="is not the model with which the run started"):
        train(make({**kl, "train.steps": 2}))


@pytest.mark.parametrize("kind", ["reward", "environment"])
def test_changed_code_is_refused(kind: str, make: MakeRun, tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    body = "def reward(completions): return [float(len(set(text))) for text in completions]\n"
    body += "class Game:\n    def begin(self, row): self.n = 0\n    def step(self, answer): return None\n"
    code.write_text(f"{body}    def score(self): return 1.0\n")
    settings: dict[str, Any] = {**MORE, "task.rewards": [{"type": "python", "function": f"{code}:reward"}]}
    if kind == "environment":
        settings |= {"task.rewards": [], "task.environment": {"path": f"{code}:Game"}}
    assert train(make({**settings, "train.steps": 1})) == 0
    code.write_text(f"{body}    def score(self): return 2.0\n")
    with pytest.raises(JinguError, match="is not what the run was started with") as caught:
        train(make({**settings, "train.steps": 2}))
    allowed = str(caught.value).partition("--allow ")[2].rstrip(".")
    assert train(make({**settings, "train.steps": 2}), resume_options=ResumeOptions((allowed,))) == 0


def test_answers_are_joined_only_with_their_prompts(
    make: MakeRun, prompts: Path, done: Callable[[RunConfig], Done], tmp_path: Path
) -> None:
    config = make({"train.steps": 1})
    assert train(config) == 0
    assert score(config) == 0
    original = prompts.read_text()
    others = [{"prompt": f"class f{number}", "answer": "("} for number in range(5)]
    shuffled = original.splitlines(keepends=True)[::-1]
    for text in ("".join(json.dumps(row) + "\n" for row in others), original.splitlines()[0]):
        prompts.write_text(text)
        with pytest.raises(JinguError, match=r"prompts\.jsonl no longer has its prompt"):
            score(config, to=tmp_path / "scored.jsonl", best=True)
        assert not (tmp_path / "scored.jsonl").exists()
    # The order of the rows does not matter.
    prompts.write_text("".join(shuffled))
    assert score(config) == 0
    prompts.write_text(original)
    assert score(config) == 0
    assert rollout(done(config), 1)


def test_another_file_of_prompts_is_named(make: MakeRun, prompts: Path) -> None:
    settings = {**MORE, "train.steps": 1}
    assert train(make(settings)) == 0
    prompts.write_text(prompts.read_text().replace("def", "sub"))
    with pytest.raises(JinguError) as caught:
        open_run(make({**settings, "train.steps": 2}))
    assert f"on other prompts than those in {prompts}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"task.overlong_tokens": 20}, "task.overlong_tokens"),
        ({"task.advantage": "rloo", "task.scale": "none"}, "task.scale"),
        ({"task.advantage": "best", "task.scale": "none"}, "task.scale"),
        ({"task.advantage": "reinforce++", "task.scale": "none"}, "task.scale"),
    ],
)
def test_contradicting_settings_are_refused(changes: dict[str, Any], where: str, make: MakeRun) -> None:
    with pytest.raises(JinguError) as caught:
        check_policy_run(open_run(make(changes)))
    assert caught.value.where == where


def test_a_lower_clip_has_a_bound(make: MakeRun) -> None:
    with pytest.raises(JinguError, match="clip_low"):
        check_policy_run(open_run(make({"task.clip_low": 3.0})))
    check_policy_run(open_run(make({"task.clip_low": 0.99, "task.overlong_tokens": 6})))


def test_a_tokenizer_that_changes_is_refused(make: MakeRun, library: Any, tmp_path: Path) -> None:
    """Prompts are no data set, which would know its tokenizer."""
    shutil.copytree(library.tokenizer, tmp_path / "tokenizer")
    settings = {**MORE, "tokenizer.path": str(tmp_path / "tokenizer")}
    assert train(make({**settings, "train.steps": 1})) == 0
    path = tmp_path / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<s>"}))
    with pytest.raises(JinguError, match=r"^tokenizer\.path: .* is not what the run was started with"):
        train(make({**settings, "train.steps": 2}))
