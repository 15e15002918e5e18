"""Variants of learning from rewards: exact ratios of every family, rewards with KL by hand, and layouts."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml

from jingu.align import advantages as advantage_functions
from jingu.align import policy_learning
from jingu.cli import main
from jingu.config.schema import RunConfig
from jingu.errors import JinguError
from jingu.formats.models import open_model
from jingu.formats.stored_model import load_model
from jingu.infer.engine import Engine
from jingu.infer.kv_cache import PagedKVCache
from jingu.training.commands import train
from tests.align.policies import LAYOUTS, rollout, train_here
from tests.align.test_asynchronous import own_logprobs
from tests.conftest import Done, MakeRun
from tests.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("peak")

LORA = {"tune": {"type": "lora", "rank": 4}}
FAMILIES = ("baichuan2", "bloom", "chatglm3", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
# Families whose keys and values have as many heads as their queries.
ALL_HEADS = ("baichuan2", "bloom", "gpt2")


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("mixtral", {}),
        *(pytest.param(name, {}, marks=pytest.mark.slow, id=name) for name in FAMILIES if name != "mixtral"),
        *(
            pytest.param(name, LORA, marks=pytest.mark.slow, id=f"{name}-lora")
            for name in ("bloom", "llama", "mixtral")
        ),
    ],
)
def test_exact_ratios_are_1_at_learning_rate_0(
    family: str,
    adapter: dict[str, Any],
    make: MakeRun,
    done: Callable[[RunConfig], Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = {"model.family": family, "model.num_kv_heads": 4 if family in ALL_HEADS else 2}
    changes: dict[str, Any] = {**model, "precision": {"type": "fp32"}, "task.exact": True, "task.updates_per_step": 2}
    if adapter:
        start = make({**model, "train.steps": 1}, name="start")
        assert train(start) == 0
        changes |= {**adapter, "initialize": {"from": str(done(start).folder)}}
    differences: list[float] = []
    compute_loss = policy_learning.batch_loss

    def record(batch: Any, logprob_RA: Any, settings: Any) -> Any:
        differences.append(float((logprob_RA.detach() - batch.old).where(batch.mask, 0.0).abs().max()))
        return compute_loss(batch, logprob_RA, settings)

    monkeypatch.setattr(policy_learning, "batch_loss", record)
    config = make({**changes, "optimizer.lr": 1e-300, "train.steps": 2}, name="exact")
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
    estimate = advantage_functions.generalized_advantages

    def record(reward_RT: Any, *arguments: Any) -> Any:
        token_rewards.append(reward_RT.clone())
        return estimate(reward_RT, *arguments)

    monkeypatch.setattr(advantage_functions, "generalized_advantages", record)
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


VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo", "clip_high": 0.2},
    "dr_grpo": {"loss": "dr_grpo", "scale": "none"},
    "gspo": {"loss": "grpo", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0, "importance_cap": 2.0},
    "reinforce++": {"advantage": "reinforce++", "kl": {"type": "kl", "estimator": "k1", "beta": 0.1}},
    "gmpo": {"loss": "grpo", "objective": "gmpo", "clip_low": 0.01, "clip_high": 0.01},
    "gdpo": {"advantage": "gdpo", "kl": {"type": "kl", "estimator": "k2_sequence", "beta": 0.1}, "overlong_tokens": 2},
    "remax": {"advantage": "remax", "overlong_tokens": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts_agree_on_variants(
    variant: str, make: MakeRun, ranks: RankPool, done: Callable[[RunConfig], Done]
) -> None:
    task = {f"task.{key}": value for key, value in VARIANTS[variant].items()}
    task |= {"task.updates_per_step": 2, "train.steps": 2, "optimizer.lr": 3e-2}
    for family, layouts in (("llama", ("zero3", "tensor", "pipeline", "context")), ("mixtral", ("expert",))):
        start = make({"model.family": family, "train.steps": 1}, name=f"start-{family}")
        assert train(start) == 0
        base = {**task, "model.family": family, "initialize": {"from": str(done(start).folder)}}
        single = make(base, name=f"single-{family}")
        assert train(single) == 0
        configs = [make({**base, "batch.micro_batch_size": 2, **LAYOUTS[name][1]}, name=name) for name in layouts]
        assert ranks.run(train_here, 2, configs) == [[0] * len(layouts)] * 2
        for config in configs:
            for name in ("loss", "grad_norm", "reward", "entropy"):
                expected = done(single).column(name)
                assert done(config).column(name) == pytest.approx(expected, rel=1e-9, abs=1e-12), (config.name, name)


def test_the_cache_is_given_back_before_training(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_loss = policy_learning.batch_loss
    # Other tests of this process may have left some.
    others = {id(one) for one in gc.get_objects() if isinstance(one, Engine | PagedKVCache)}

    def check(*arguments: Any) -> Any:
        engines = [one for one in gc.get_objects() if isinstance(one, Engine | PagedKVCache)]
        assert not [one for one in engines if id(one) not in others]
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


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_dropout_is_refused_before_a_model_is_built(
    method: str, make: MakeRun, make_ppo: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    ppo = make_ppo({"tune": {"type": "lora", "dropout": 0.1}})
    grpo = make({"initialize.from": ppo.initialize.from_, "tune": {"type": "lora", "dropout": 0.1}})
    monkeypatch.setattr(policy_learning.PolicyLearning, "__init__", lambda *_: pytest.fail("a task was made"))
    with pytest.raises(
        JinguError, match=r"^tune\.dropout: with dropout, training would compute other probabilities than generation"
    ):
        train(ppo if method == "ppo" else grpo)
