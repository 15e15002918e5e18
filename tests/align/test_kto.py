"""KTO: its loss, what it learns, and that the divergence is that of the global batch in every layout."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from jingu.align.preference_losses import kto_losses
from jingu.align.reference import _folder
from jingu.config.schema import RunConfig
from jingu.config.sections.pairs import AnswerLogProbs, DpoSettings
from jingu.config.sections.tasks import KtoSettings
from jingu.data.open_sources import open_sources
from jingu.data.preference_data import PreferenceDataset
from jingu.text.tokenizer import Tokenizer
from tests.align.preferences import preference_run, train_here, train_on_ranks
from tests.conftest import MakeRun
from tests.rank_pool import RankPool

LABELS = {
    "data.objective": {"type": "preference", "template": "plain", "rows": "labels"},
    "task": {"type": "kto"},
    "batch.sequence_length": 32,
}


def test_kto_learns_the_labels(tiny_run: MakeRun, base: str, tmp_path: Path, done: Any) -> None:
    changes = {**LABELS, "initialize.from": base, "train.steps": 20, "evaluation.every": 20, "optimizer.lr": 3e-3}
    config = preference_run(tiny_run, tmp_path, changes, name="kto")
    train_here(config)
    # At the start policy and reference are the same: every answer has the loss sigmoid(0).
    assert done(config).column("loss")[0] == pytest.approx(0.5, abs=1e-9)
    assert done(config).column("kl")[0] == pytest.approx(0.0, abs=1e-9)
    assert done(config).column("loss")[-1] < 0.45
    assert done(config).column("margin", "evaluation")[-1] > 0.1


def open_labels(config: RunConfig) -> PreferenceDataset:
    (dataset,) = open_sources(config, Tokenizer.load(Path(config.tokenizer.path))).sources
    assert isinstance(dataset, PreferenceDataset)
    return dataset


def read_row(dataset: PreferenceDataset, number: int) -> tuple[list[int], list[int]]:
    """Prompt and answer of a stored row."""
    (row,) = (row for row in range(len(dataset)) if dataset.row_documents(row)[0] == number)
    arrays = dataset.read(np.array([row]))
    is_answer = arrays.labels[0] >= 0
    return arrays.tokens[0, : is_answer.argmax() + 1].tolist(), arrays.labels[0, is_answer].tolist()


def test_mismatched_rows_have_the_answer_of_the_nearest_row_before_with_another_prompt(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    """Both answers of a pair are rows, so the row before often has the other answer to the same prompt."""
    dataset = open_labels(preference_run(tiny_run, tmp_path, LABELS, name="kto"))
    rows = [read_row(dataset, number) for number in range(len(dataset))]
    distances = []
    for row in range(8):
        (number,) = dataset.row_documents(row)
        prompt = rows[number][0]
        distance = next(back for back in range(1, len(rows)) if rows[number - back][0] != prompt)
        distances.append(distance)
        mismatched = dataset.read_mismatched(np.array([row]))
        assert mismatched.labels[mismatched.labels >= 0].tolist() == rows[number - distance][1]
        assert mismatched.tokens[0, : len(prompt)].tolist() == prompt
    assert set(distances) == {1, 2}


def test_rows_with_one_prompt_have_the_answer_of_the_row_before(tiny_run: MakeRun, tmp_path: Path) -> None:
    answers = [{"prompt": "Q?", "completion": f" {number}", "label": True} for number in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers), encoding="utf-8")
    dataset = open_labels(preference_run(tiny_run, tmp_path, {**LABELS, "data.validation_fraction": 0}, name="kto"))
    for row in range(len(dataset)):
        (number,) = dataset.row_documents(row)
        mismatched = dataset.read_mismatched(np.array([row]))
        expected = read_row(dataset, (number - 1) % len(dataset))[1]
        assert mismatched.labels[mismatched.labels >= 0].tolist() == expected


def test_stored_references_of_other_mismatched_answers_are_not_used(tiny_run: MakeRun, tmp_path: Path) -> None:
    dataset = open_labels(preference_run(tiny_run, tmp_path, LABELS, name="kto"))
    # The key that pairs have, and that labels had while the mismatched answer was that of the row before.
    entry = dataset.dataset.manifest.split("train")
    checksums = " ".join(shard.bin_xxh3 for shard in (*entry.shards, *entry.sidecars))
    before = f"reference-train-{xxhash.xxh3_64_hexdigest(f'model {checksums}'.encode())}"
    assert _folder(dataset, "model", has_labels=False).name == before
    assert _folder(dataset, "model", has_labels=True).name != before


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kto", "bco"])
def test_layouts_are_equal(loss: str, tiny_run: MakeRun, base: str, tmp_path: Path, done: Any, ranks: RankPool) -> None:
    reference_point = "kl" if loss == "kto" else "threshold"
    changes = {
        **LABELS,
        "task": {"type": "kto", "loss": loss},
        "initialize.from": base,
        "train.steps": 3,
        "evaluation.every": 3,
    }
    one = preference_run(tiny_run, tmp_path, changes, name="one")
    train_here(one)
    layouts = [
        {"parallel.shard": 2, "parallel.zero_stage": 3},
        {"parallel.tensor": 2},
        {"parallel.context": 2},
        {"parallel.pipeline": 2},
        {"batch.micro_batch_size": 8},
    ]
    for number, layout in enumerate(layouts):
        config = preference_run(tiny_run, tmp_path, {**changes, **layout}, name=f"many-{number}")
        assert ranks.run(train_on_ranks, 1 if "batch" in str(layout) else 2, config)[0] == 0
        for name in ("loss", "grad_norm"):
            assert done(config).column(name) == pytest.approx(done(one).column(name), rel=1e-9), (layout, name)
        for name in ("loss", reference_point):
            own, expected = (done(item).column(name, "evaluation") for item in (config, one))
            assert own == pytest.approx(expected, rel=1e-9), (layout, name)


@pytest.mark.slow
def test_experts_that_are_divided_change_nothing(
    tiny_run: MakeRun, tmp_path: Path, done: Any, train_on: Any, ranks: RankPool
) -> None:
    experts = {"model.family": "mixtral", "model.experts": {"num_experts": 4, "num_experts_per_token": 2}}
    base = tiny_run({"train.steps": 3, **experts}, name="base")
    train_on(1, base)
    changes = {**LABELS, **experts, "initialize.from": f"{base.runs_dir}/base", "train.steps": 3}
    layout = {"parallel.shard": 2, "parallel.expert": 2, "parallel.zero_stage": 2}
    one, many = (
        preference_run(tiny_run, tmp_path, {**changes, **more}, name=name)
        for name, more in (("one", {}), ("many", layout))
    )
    train_here(one)
    assert ranks.run(train_on_ranks, 2, many) == [0, 0]
    for name in ("loss", "grad_norm", "balance_loss"):
        assert done(many).column(name) == pytest.approx(done(one).column(name), rel=1e-9), name


def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy and reference of 4 answers of 3 tokens, and both of mismatched ones."""
    generator = torch.Generator().manual_seed(2)
    policy, mismatched, reference, mismatched_reference = torch.nn.functional.logsigmoid(
        torch.randn(4, 4, 3, dtype=torch.float64, generator=generator)
    )
    return policy.clone().requires_grad_(), reference, mismatched, mismatched_reference


SETTINGS = KtoSettings(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
DESIRABLE = torch.tensor([True, False, False, True])
BCO = KtoSettings(loss="bco", beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)


def test_bco_equals_the_formula_of_the_paper() -> None:
    """-log σ(r - δ) for desirable answers and -log σ(δ - r) for the others, with rewards r = β · log(π / π_ref)."""
    policy, reference, *_ = draw()
    rewards = 0.3 * (policy - reference).sum(-1)
    threshold = 0.5 * (rewards[DESIRABLE].mean() + rewards[~DESIRABLE].mean()).detach()
    desirable = 1.2 * torch.log(1 + torch.exp(threshold - rewards))
    expected = torch.where(DESIRABLE, desirable, 0.7 * torch.log(1 + torch.exp(rewards - threshold))).mean()
    answers = AnswerLogProbs(policy.sum(-1), reference.sum(-1), torch.full((4,), 3))
    loss = kto_losses(BCO, answers, DESIRABLE, threshold / 0.3).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(value, policy)[0] for value in (loss, expected)))


@pytest.mark.slow
def test_bco_of_pairs_equals_trl() -> None:
    """TRL has the loss for pairs alone, with a threshold of 0."""
    from tests.align.test_preference_losses import PAIRS, _from_dpo_trainer
    from tests.align.test_preference_losses import draw as draw_pairs

    policy, reference = draw_pairs()
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    pairs = DpoSettings(beta=0.3).model_copy(update={"loss": "bco_pair"})
    expected = _from_dpo_trainer(pairs, policy, reference, accelerator)
    answers = AnswerLogProbs(policy.sum(-1).flatten(), reference.sum(-1).flatten(), torch.full((2 * PAIRS,), 4))
    losses = kto_losses(KtoSettings(loss="bco", beta=0.3), answers, torch.arange(6) < PAIRS, torch.zeros(()))
    torch.testing.assert_close(losses.view(2, PAIRS).sum(0).mean(), expected, rtol=1e-9, atol=1e-9)


def test_bco_sets_its_threshold_between_the_means(tiny_run: MakeRun, base: str, tmp_path: Path, done: Any) -> None:
    changes = {**LABELS, "initialize.from": base, "train.steps": 4, "optimizer.lr": 3e-3, "evaluation.every": 4}
    changes |= {"task": {"type": "kto", "loss": "bco"}}
    config = preference_run(tiny_run, tmp_path, changes, name="bco")
    train_here(config)
    run = done(config)
    # At the start, policy and reference agree: log 2.
    assert run.column("loss")[0] == pytest.approx(math.log(2), abs=1e-9) and run.column("threshold")[0] == 0.0
    assert run.column("loss")[-1] < run.column("loss")[0] and run.column("threshold")[-1] != 0.0
    assert "kl" not in run.lines("train")[0]


def compute() -> tuple[torch.Tensor, torch.Tensor]:
    policy, reference, mismatched, mismatched_reference = draw()
    divergence = (mismatched - mismatched_reference).sum(-1).mean().clamp_min(0)
    answers = AnswerLogProbs(policy.sum(-1), reference.sum(-1), torch.full((4,), 3))
    loss = kto_losses(SETTINGS, answers, DESIRABLE, divergence).mean()
    return loss, torch.autograd.grad(loss, policy)[0]


def test_equals_the_formula_of_the_paper() -> None:
    policy, reference, mismatched, mismatched_reference = draw()
    z = max(0.0, float((mismatched - mismatched_reference).sum(-1).mean()))
    ratios = (policy - reference).sum(-1)
    desirable = 1.2 * (1 - 1 / (1 + torch.exp(-0.3 * (ratios - z))))
    undesirable = 0.7 * (1 - 1 / (1 + torch.exp(-0.3 * (z - ratios))))
    expected = torch.where(DESIRABLE, desirable, undesirable).mean()
    loss, gradient = compute()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, policy)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_equals_trl() -> None:
    from trl import KTOTrainer

    policy, reference, mismatched, mismatched_reference = draw()
    outputs = SimpleNamespace(log_probs=policy, entropy=policy.detach(), mean_logits=policy.detach())
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=SETTINGS.beta,
        desirable_weight=SETTINGS.desirable_weight,
        undesirable_weight=SETTINGS.undesirable_weight,
        _compute_kl_logps=lambda model, batch: mismatched.sum(-1),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids = torch.ones(4, 4, dtype=torch.long)
    mask = ids.clone()
    mask[:, 0] = 0
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": mask,
        "label": DESIRABLE,
        "ref_logps": reference.sum(-1),
        "ref_KL_logps": mismatched_reference.sum(-1),
    }
    expected = KTOTrainer._compute_loss(fake, lambda **_: outputs, inputs, False)
    loss, gradient = compute()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, policy)[0], rtol=1e-6, atol=1e-9)
