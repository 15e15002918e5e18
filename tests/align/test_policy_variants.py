"""Learning from rewards: exact ratios, rewards with KL by hand, memory, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml

from jingu.align import policy_learning
from jingu.align.commands import train
from jingu.cli import main
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.infer.engine import Engine
from jingu.infer.kv_cache import PagedKVCache
from tests.align.test_asynchronous import own_logprobs
from tests.align.test_policy_learning import make, make_ppo, prompts, rollout
from tests.conftest import Done, MakeRun

pytestmark = pytest.mark.usefixtures("peak")
__all__ = ["make", "make_ppo", "prompts"]


def test_exact_ratios_are_1_at_learning_rate_0(
    make: MakeRun, done: Callable[[RunConfig], Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model.family": "mixtral", "precision": {"type": "fp32"}, "task.exact": True, "task.updates_per_step": 2}
    differences: list[float] = []
    compute_loss = policy_learning.batch_loss

    def record(batch: Any, logprob_RA: Any, settings: Any) -> Any:
        differences.append(float((logprob_RA.detach() - batch.old).where(batch.mask, 0.0).abs().max()))
        return compute_loss(batch, logprob_RA, settings)

    monkeypatch.setattr(policy_learning, "batch_loss", record)
    config = make({**changes, "optimizer.lr": 1e-300, "train.steps": 2})
    assert train(config) == 0
    assert len(differences) >= 8 and set(differences) == {0.0}
    assert done(config).column("mismatch_max") == [0.0, 0.0]


@pytest.mark.parametrize("method", ["rloo", "reinforce++", "ppo"])
def test_kl_in_the_reward_by_hand(
    method: str,
    make: MakeRun,
    make_ppo: MakeRun,
    done: Callable[[RunConfig], Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reward of a token is -β log π/π_ref, and the last one has that of the answer, too."""
    start = make({"train.steps": 1}, name="start")
    assert train(start) == 0
    changes = {
        "task.kl": {"type": "kl", "estimator": "k1", "beta": 0.5},
        "initialize": {"from": str(done(start).folder)},
    }
    changes |= {"optimizer.lr": 3e-2, "train.steps": 2}
    token_rewards: list[Any] = []
    estimate = policy_learning.generalized_advantages

    def record(reward_RT: Any, *arguments: Any) -> Any:
        token_rewards.append(reward_RT.clone())
        return estimate(reward_RT, *arguments)

    monkeypatch.setattr(policy_learning, "generalized_advantages", record)
    config = make_ppo(changes) if method == "ppo" else make({**changes, "task.advantage": method})
    assert train(config) == 0
    reference = load_model(open_model(done(start).folder), torch.float64, torch.device("cpu"))
    samples = rollout(done(config), 2)
    assert len({sample["reference"] for sample in samples}) == 1 and len(samples[0]["reference"]) == 32
    expected = []
    for sample in samples:
        k1 = torch.tensor(sample["logprobs"], dtype=torch.float64) - own_logprobs(reference, sample)
        assert k1.abs().max() > 1e-3  # the model has left its reference
        rewards = -0.5 * k1
        rewards[-1] += sample["rewards"]["regex"]
        expected.append(rewards)
    if method == "ppo":
        for own, values in zip(token_rewards[1], expected, strict=True):
            torch.testing.assert_close(own[: len(values)], values, rtol=1e-9, atol=1e-12)
        return
    advantages = [torch.tensor(sample["advantages"], dtype=torch.float64) for sample in samples]
    if method == "rloo":
        groups = torch.stack([values.sum() for values in expected]).view(-1, 4)
        others = (groups.sum(1, keepdim=True) - groups) / 3
        assert [sample["reward"] for sample in samples] == pytest.approx(groups.flatten().tolist(), rel=1e-9)
        for own, value in zip(advantages, (groups - others).flatten(), strict=True):
            torch.testing.assert_close(own, value.expand(len(own)), rtol=1e-9, atol=1e-12)
        return
    returns = torch.cat([values.flip(0).cumsum(0).flip(0) for values in expected])
    white = (returns - returns.mean()) / (returns.std() + 1e-8)
    torch.testing.assert_close(torch.cat(advantages), white, rtol=1e-9, atol=1e-12)


def test_the_cache_is_given_back_before_training(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_loss = policy_learning.batch_loss

    def check(*arguments: Any) -> Any:
        assert not [one for one in gc.get_objects() if isinstance(one, Engine | PagedKVCache)]
        return compute_loss(*arguments)

    monkeypatch.setattr(policy_learning, "batch_loss", check)
    gc.collect()
    gc.disable()
    try:
        assert train(make({"train.steps": 2})) == 0
    finally:
        gc.enable()


def test_a_mismatch_beyond_its_bound_ends_the_run(make: MakeRun) -> None:
    config = make({"precision": {"type": "fp32"}, "task.max_mismatch": 1e-12})
    with pytest.raises(JinguError, match=r"in generation and in training differ by .*, more than 1e-12"):
        train(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answers_per_prompt": 1}, "task.answers_per_prompt takes a whole number (2 or more), not 1"),
        ({"top_k": 5}, "task.top_k is not a setting"),
        ({"top_p": 0.9}, "task.top_p is not a setting"),
        ({"kl": {"type": "kl", "estimator": "k3"}}, "k1 in the loss has no gradient on average, and k3"),
        ({"kl": {"type": "kl", "placement": "loss"}}, "task.kl.placement is not a setting"),
        ({"temperature": 0.0}, "task.temperature takes a number (above 0), not 0.0"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    changes: dict[str, Any], words: str, make: MakeRun, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = make().model_dump(mode="json", by_alias=True)
    tree["task"] |= changes
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
