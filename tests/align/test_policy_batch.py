"""Answers that share their prompt in training: the same numbers as with a row for each answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.align.policy_batch import PolicyBatch, longest_batch, make_policy_batch, row_length
from jingu.align.rollouts import Sample
from jingu.align.step_data import StepData
from jingu.align.token_logprobs import TokenLogProbs
from jingu.config.sections.model import ModelSettings
from jingu.config.sections.policies import GrpoSettings
from jingu.data.batch import IGNORE_INDEX
from jingu.model.adapter_specs import Lora
from jingu.model.decoder import build_model
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import replace_fields
from jingu.model.weight_init import init_weights
from jingu.training.batch_transforms import model_inputs


def sample(prompt: tuple[int, ...], ids: tuple[int, ...], replies: tuple[tuple[int, int], ...] = ()) -> Sample:
    answer = Sample("", 0, 0, prompt, ids, (), "", "end", replies=replies)
    return Sample("", 0, 0, prompt, ids, tuple(-float(ids[place]) for place in answer.own), "", "end", replies=replies)


SAMPLES = [
    sample((1, 2, 3), (4, 5)),
    sample((1, 2, 3), (6,)),
    # Token 8 is the reply of an environment.
    sample((1, 2, 3), (7, 8, 9), ((1, 2),)),
    sample((5,), (1, 1)),
    sample((1, 2, 3, 4), (2, 2)),
]


def batches() -> tuple[PolicyBatch, PolicyBatch]:
    """The samples in one row, and in a row each."""
    columns = StepData.of(SAMPLES, 0).columns(slice(0, len(SAMPLES)))
    shared = make_policy_batch(SAMPLES, columns, row_length(SAMPLES), shares_prompts=True)
    return shared, make_policy_batch(SAMPLES, columns, 6, shares_prompts=False)


def test_a_row_of_answers_by_hand() -> None:
    shared, apart = batches()
    # The last token of a prompt is a part of each answer.
    assert row_length(SAMPLES) == 2 + 2 + 1 + 3 + 0 + 2 + 3 + 2
    assert shared.tokens[0, :15].tolist() == [1, 2, 3, 4, 3, 3, 7, 8, 5, 1, 1, 2, 3, 4, 2]
    assert shared.positions is not None
    assert shared.positions[0, :15].tolist() == [0, 1, 2, 3, 2, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]
    assert shared.documents is not None and shared.parents is not None
    assert shared.documents[0].tolist() == [0, 0, 1, 1, 2, 3, 3, 3, 5, 5, 6, 6, 6, 7, 7, -1]
    assert shared.parents[0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 6, 6, 6, 6, 6, -1]
    none = IGNORE_INDEX
    assert shared.labels[0].tolist() == [none, none, 4, 5, 6, 7, none, 9, 1, 1, none, none, none, 2, 2, none]
    assert apart.tokens.shape == (5, 16)
    for batch in (shared, apart):
        assert batch.mask.sum(1).tolist() == [2, 1, 2, 2, 2]
        assert batch.sampled is not None
        assert torch.equal(batch.by_answer(-batch.labels.double()), batch.sampled)


def test_the_longest_batch_has_room_for_every_batch() -> None:
    settings = GrpoSettings(max_new_tokens=4, answers_per_prompt=3)
    # Two prompts of seven tokens, with three answers and with two.
    assert row_length([sample((n,) * 7, (0,) * 4) for n in (1, 1, 1, 2, 2)]) == 2 * 6 + 5 * 4
    assert longest_batch(settings, 10, 5).tokens.shape == (1, 32)
    assert longest_batch(settings, 10, 5, shares_prompts=False).tokens.shape == (5, 16)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "lora": {},
    "gpt2": {"num_kv_heads": 4},
    "bloom": {"num_kv_heads": 4},
    "mistral": {},
    "mixtral": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_rows(family: str) -> None:
    name = "llama" if family == "lora" else family
    numbers = {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "initializer_range": 0.3}
    settings = ModelSettings(family=name, **{**numbers, **FAMILIES[family]})  # type: ignore[arg-type]
    spec = spec_from_settings(settings, 43, 32)
    if family == "lora":
        spec = replace_fields(
            spec, adapter=Lora(rank=2, alpha=4.0, target_modules=("blocks.*.attention.q", "blocks.*.feed_forward.up"))
        )
    if family == "mistral":
        # A window that ends within prompts and answers.
        spec = replace_fields(spec, attention=spec.attention.model_copy(update={"sliding_window": 3}))
    model = build_model(spec).double()
    init_weights(model, spec, 5)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    log_probs = TokenLogProbs(43)

    def compute(batch: PolicyBatch) -> tuple[Tensor, ...]:
        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            return batch.by_answer(log_probs(hidden_BTD, weight_VD, batch.labels)[0])

        values_RA = model(model_inputs(batch), loss=head)
        weights_RA = torch.arange(values_RA.numel()).view_as(values_RA).cos()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad((values_RA * weights_RA).sum(), parameters, allow_unused=True)
        return values_RA, *(gradient for gradient in gradients if gradient is not None)

    shared, apart = (compute(batch) for batch in batches())
    assert len(shared) == len(apart) > 2
    for ours, theirs in zip(shared, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
