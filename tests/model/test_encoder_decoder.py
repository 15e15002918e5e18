"""An encoder-decoder of any components: who sees whom, a cache, documents, what its layouts and counts rest on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.model.components import RelativeBias
from jingu.model.decoder import Decoder, build_model, iterate_blocks
from jingu.model.experts import RoutingStats
from jingu.model.feed_forward_specs import Experts
from jingu.model.inputs import Inputs
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.weight_init import init_weights

SMALL = {
    "hidden_size": 24,
    "num_heads": 4,
    "head_dim": 6,
    "num_layers": 2,
    "intermediate_size": 19,
    "initializer_range": 0.3,
}
FAMILIES = {"t5": 4, "llama": 2, "gpt2": 4, "bloom": 4, "mistral": 1, "qwen3": 2}
EACH = pytest.mark.parametrize("family", FAMILIES)


def spec_of(family: str, **settings: Any) -> ModelSpec:
    spec = spec_from_settings(
        ModelSettings(family=family, num_kv_heads=FAMILIES.get(family), **{**SMALL, **settings}), 43, 32
    )
    if family == "mistral":
        spec = replace_fields(spec, attention=spec.attention.model_copy(update={"sliding_window": 3}))
    return replace_fields(spec, num_encoder_layers=3)


def model_of(spec: ModelSpec) -> Decoder:
    model = build_model(spec).double()
    init_weights(model, spec, 5)
    return model


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(43, (rows, tokens), generator=torch.Generator().manual_seed(rows * 100 + tokens))


@EACH
def test_who_sees_whom(family: str) -> None:
    """The encoder sees what follows, as far as its window reaches; the decoder sees all of the source, and of itself
    only what came before."""
    model, source, tokens = model_of(spec_of(family)), ids(1, 13), ids(1, 11)
    later, other = tokens.clone(), source.clone()
    later[0, 7:] = (later[0, 7:] + 1) % 43
    other[0, -1] = (other[0, -1] + 1) % 43
    states = model(Inputs(tokens, source=Inputs(source)))
    changed = model(Inputs(later, source=Inputs(source)))
    assert torch.equal(states[:, :7], changed[:, :7]) and bool((states[:, 7:] != changed[:, 7:]).any(-1).all())
    assert bool((states != model(Inputs(tokens, source=Inputs(other)))).any(-1).all())
    assert model.encoder is not None
    encoded = [model.encoder.run(Inputs(each), None, model.embedding).states for each in (source, other)]
    differ = (encoded[0] != encoded[1]).any(-1)[0].tolist()
    reach = 1 + 3 * 2 if family == "mistral" else 13  # a window of 3 sees 2 to either side, in each of 3 blocks
    assert differ == [place >= 13 - reach for place in range(13)]


@EACH
def test_cached_equals_uncached(family: str, in_steps: Callable[..., Tensor]) -> None:
    model, source, tokens = model_of(spec_of(family)), ids(1, 13), ids(1, 11)
    with torch.no_grad():
        whole = model.logits(model(Inputs(tokens, source=Inputs(source))))
        scores = in_steps(model, tokens[0], [3, 1, 1, 6], source)
    torch.testing.assert_close(scores, whole[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", ["t5", "llama", "mistral"])
def test_documents_equal_separate_runs(family: str) -> None:
    model, source, tokens = model_of(spec_of(family)), ids(1, 13), ids(1, 11)
    sources, targets = [5, 8], [7, 4]
    packed = model(
        Inputs(
            tokens,
            positions=torch.cat([torch.arange(n) for n in targets])[None],
            documents=torch.tensor([[0] * 7 + [1] * 4]),
            source=Inputs(source, documents=torch.tensor([[0] * 5 + [1] * 8])),
        )
    )
    pairs = zip(tokens.split(targets, 1), source.split(sources, 1), strict=True)
    separate = torch.cat([model(Inputs(target, source=Inputs(part))) for target, part in pairs], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-10, atol=1e-10)


def test_a_decoder_alone_may_have_relative_biases(in_steps: Callable[..., Tensor]) -> None:
    spec = replace_fields(
        spec_of("llama"), num_encoder_layers=None, position=RelativeBias(num_buckets=8, max_distance=9)
    )
    model, tokens = build_model(spec).double(), ids(1, 14)
    init_weights(model, spec, 5)
    assert model.encoder is None and model.relative_bias is not None
    with torch.no_grad():
        whole, scores = model.logits(model(tokens)), in_steps(model, tokens[0], [9, 5])
    torch.testing.assert_close(scores, whole[0], rtol=1e-10, atol=1e-12)


def test_routers_of_both_sides_are_heard() -> None:
    spec = spec_of("cpm2", experts={"num_experts": 5, "router": "top_k"})
    assert isinstance(spec.feed_forward, Experts) and spec.feed_forward.intermediate_size == 19
    heard: list[list[RoutingStats]] = []

    def auxiliary(routings: list[RoutingStats]) -> Tensor:
        heard.append(routings)
        return torch.zeros(1, dtype=torch.float64)

    model = model_of(spec)
    found = model(Inputs(ids(2, 11), source=Inputs(ids(2, 13))), loss=lambda x, w: x.sum(), auxiliary=auxiliary)
    assert found.shape == (2,)
    assert len(heard[0]) == 3 + 2 == len(list(iterate_blocks(model)))
    assert [number for number, _ in iterate_blocks(model)] == [0, 1, 2, 0, 1]
    for routing in heard[0]:
        torch.testing.assert_close(routing.load.sum(-1), torch.ones(2, dtype=torch.float64))


def test_compiled_blocks_give_the_same() -> None:
    model = model_of(spec_of("t5"))
    source, tokens = ids(2, 13), ids(2, 11)
    expected = model(Inputs(tokens, source=Inputs(source)))
    for number, block in iterate_blocks(model):
        if number == 0:  # the others are like these
            block.forward = torch.compile(block.forward, backend="aot_eager", dynamic=False)  # type: ignore[method-assign]
    torch.testing.assert_close(model(Inputs(tokens, source=Inputs(source))), expected, rtol=1e-10, atol=1e-12)


def test_first_weights_make_logits_of_unit_size() -> None:
    """A tied head is scaled for an embedding of unit variance, and scores that are not scaled have smaller queries."""
    spec = spec_from_settings(ModelSettings(family="t5", hidden_size=256, num_heads=4, num_layers=2), 997, 64)
    model = build_model(spec)
    init_weights(model, spec, 5)
    with torch.no_grad():
        logits = model.logits(model(Inputs(torch.arange(64)[None], source=Inputs(torch.arange(100, 164)[None]))))
    assert 0.5 < float(logits.std()) < 2
    scaled = replace_fields(spec, attention=spec.attention.model_copy(update={"scale_scores": True}))
    same = build_model(scaled)
    init_weights(same, scaled, 5)
    query = "blocks.0.cross_attention.q.weight"
    torch.testing.assert_close(model.get_parameter(query) * 8, same.get_parameter(query))


def test_mistakes_are_told_in_words() -> None:
    with pytest.raises(JinguError) as error:
        spec_from_settings(ModelSettings(family="llama", num_encoder_layers=2), 43, 32)
    assert str(error.value) == (
        "model.num_encoder_layers: the family 'llama' has no encoder. Leave it out, or choose a family that has one "
        "(t5)."
    )
    with pytest.raises(JinguError, match="with 8 buckets, the largest distance must exceed 4; it is 4"):
        replace_fields(spec_of("t5"), position=RelativeBias(num_buckets=8, max_distance=4))
    with pytest.raises(ValueError, match="needs an encoder's states, or a cache"):
        model_of(spec_of("t5"))(ids(1, 3))
