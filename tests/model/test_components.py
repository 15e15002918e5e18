"""Chunks, documents and growth of stacks whose layers differ, and soft caps in every loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.align.token_logprobs import TokenLogProbs
from jingu.errors import JinguError
from jingu.model.decoder import Decoder, build_model, cap_logits
from jingu.model.expand import LazyModel, expand_depth, expand_width
from jingu.model.families import FAMILIES
from jingu.model.inputs import Inputs
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.weight_init import init_weights

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_layers": 3,
    "max_position_embeddings": 64,
    "attention.num_heads": 3,
    "attention.num_kv_heads": 1,
    "attention.head_dim": 8,
    "feed_forward.intermediate_size": 19,
}
CHUNK = {"attention.chunk_size": 4}
AROUND: dict[str, Any] = {
    "norm": {"type": "rms", "offset": True},
    "norm_placement": "around",
    "embedding_scale": "sqrt_hidden_size",
    "tie_word_embeddings": True,
    "logit_softcap": 2.0,
    "layer_kinds": {"window": {"attention.sliding_window": 5}, "chunk": {**CHUNK, "attention.softcap": 1.5}},
    "layer_pattern": ("window", "chunk", "window"),
}
BEHIND: dict[str, Any] = {
    "attention.qk_norm": True,
    "attention.qk_norm_width": "all_heads",
    "attention.query_scaling": {"beta": 0.3, "length": 3},
    "feed_forward": {"type": "plain", "intermediate_size": 19, "activation": "xielu"},
    "norm_placement": "behind",
    "residual_scale": 0.7,
}
WEIGHTLESS: dict[str, Any] = {"norm": {"type": "rms", "has_weight": False}, "block_order": "parallel"}


def spec(**changes: Any) -> ModelSpec:
    return replace_fields(FAMILIES["llama"].template, **{**SIZES, **changes})


def random_model(changes: dict[str, Any]) -> Decoder:
    """Return a model in fp64 with random parameters, norms too."""
    torch.manual_seed(3)
    model = build_model(spec(**changes)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_("norm" in name)
    return model


def ids(*shape: int) -> Tensor:
    return torch.randint(53, shape, generator=torch.Generator().manual_seed(4))


def logits(model: Decoder, *inputs: Any, **others: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.logits(model(Inputs(*inputs, **others)))
    return result


def test_a_row_of_chunks_is_a_batch_of_them() -> None:
    model = random_model(CHUNK)
    tokens = ids(1, 12)
    places = torch.arange(12).view(3, 4)
    apart = logits(model, tokens.view(3, 4), places)
    torch.testing.assert_close(logits(model, tokens).view(3, 4, 53), apart, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [CHUNK, AROUND, BEHIND, WEIGHTLESS])
def test_documents_of_a_row_are_as_alone(changes: dict[str, Any]) -> None:
    model = random_model(changes)
    tokens = ids(1, 17)
    places = torch.cat([torch.arange(10), torch.arange(7)])[None]
    documents = torch.tensor([[0] * 10 + [1] * 7])
    together = logits(model, tokens, places, documents)
    alone = torch.cat([logits(model, tokens[:, :10]), logits(model, tokens[:, 10:])], 1)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [AROUND, BEHIND, WEIGHTLESS])
def test_grown_models_say_the_same(changes: dict[str, Any]) -> None:
    small = random_model(changes)
    old = LazyModel(small.spec, small.state_dict().__getitem__)
    for new in (expand_width(old, 48), expand_depth(old, 5, "stacked")):
        large = build_model(new.spec).double().eval()
        large.load_state_dict({name: new.read(name) for name in large.state_dict()})
        torch.testing.assert_close(logits(large, ids(2, 11)), logits(small, ids(2, 11)), rtol=1e-6, atol=1e-6)
    assert new.spec.layer_pattern == (*small.spec.layer_pattern, *small.spec.layer_pattern[:2])


def test_log_probabilities_of_tokens_know_the_soft_cap() -> None:
    model = random_model(AROUND)
    tokens, labels = ids(2, 11), ids(2, 11).flip(1)
    log_probs = TokenLogProbs(53, softcap=2.0)
    grads = []
    for function in (
        lambda states, head: log_probs(states, head, labels, 0.7)[0],
        lambda states, head: (
            torch.log_softmax(cap_logits(model.spec, states @ head.t()) / 0.7, -1)
            .gather(-1, labels.unsqueeze(-1))
            .squeeze(-1)
        ),
    ):
        model.zero_grad()
        values = model(tokens, loss=function)
        (values * torch.arange(22).view(2, 11).cos()).sum().backward()
        grads.append([values.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


def test_norms_with_an_offset_start_at_zero() -> None:
    model = build_model(spec(**AROUND))
    init_weights(model, model.spec, seed=1)
    for name, parameter in model.named_parameters():
        assert ("norm" in name) == bool((parameter == 0).all()), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_order": "parallel", "norm_placement": "around"}, "parallel"),
        ({**BEHIND, "attention.qk_norm_after_rotary": True}, "for all heads"),
        ({"feed_forward.activation": "xielu"}, "xielu"),
        (
            {
                "position.scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0] * 3,
                    "original_max_position_embeddings": 8,
                    "attention_factor": 1.0,
                }
            },
            "4 short and 3 long factors, for 4 rotated pairs",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JinguError, match=message):
        spec(**changes)
