"""Growing: outputs that equal the original's where the rule promises it, and models that are what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jingu.config.sections.model import ModelSettings
from jingu.errors import JinguError
from jingu.model.decoder import build_model
from jingu.model.expand import LazyModel, expand_depth, expand_width, replace_vocab, upcycle_to_experts
from jingu.model.feed_forward_specs import Experts
from jingu.model.inputs import Inputs
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import ModelSpec

TOKENS = torch.randint(0, 53, (2, 11), generator=torch.Generator().manual_seed(1))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_kv_heads": 1},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "mistral": {"family": "mistral", "num_heads": 6, "num_kv_heads": 3},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "num_kv_heads": 1},
    "gpt2": {"family": "gpt2"},
    "bloom": {"family": "bloom"},
    "baichuan2": {"family": "baichuan2"},
    "chatglm3": {"family": "chatglm3", "num_heads": 6, "num_kv_heads": 2, "head_dim": 8},
    "t5": {"family": "t5"},
    "mt5": {"family": "mt5", "num_encoder_layers": 2},
    "cpm2": {"family": "cpm2"},
    "mixtral": {
        "family": "mixtral",
        "experts": {"num_experts": 5, "shared_intermediate_size": 7, "shared_expert_gate": True},
    },
}
for name, experts in {
    "gpt_oss": {},
    "afmoe": {"shared_intermediate_size": 7},
    "glm4_moe": {},
    "llama4_text": {},
}.items():
    FAMILIES[name] = {"family": name, "experts": {"num_experts": 6, "num_experts_per_token": 2, **experts}}
EACH = pytest.mark.parametrize("family", FAMILIES)


def model_of(family: str) -> LazyModel:
    """A small one in fp64, every parameter random, biases and norms too."""
    settings = {"hidden_size": 24, "num_heads": 3, "num_layers": 3, "intermediate_size": 19, **FAMILIES[family]}
    spec = spec_from_settings(ModelSettings(**settings), 53, 16)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm" in name)
        for name, tensor in build_model(spec).state_dict().items()
    }
    return LazyModel(spec, state.__getitem__)


def logits(model: LazyModel, dtype: torch.dtype = torch.float64) -> Tensor:
    decoder = build_model(model.spec).to(dtype).eval()
    decoder.load_state_dict({name: model.read(name).to(dtype) for name in decoder.state_dict()})
    with torch.no_grad():
        source = Inputs(TOKENS.flip(1)) if model.spec.num_encoder_layers else None
        return decoder.logits(decoder(Inputs(TOKENS, source=source)))


def equal(new: Tensor, old: Tensor, tolerance: float = 1e-12) -> bool:
    return bool((new - old).norm() <= tolerance * old.norm())


def dimensions(spec: ModelSpec) -> list[int]:
    return [
        spec.num_layers,
        spec.hidden_size,
        spec.attention.num_heads,
        spec.attention.num_kv_heads,
        spec.feed_forward.intermediate_size,
    ]


@EACH
@pytest.mark.parametrize("layers", [4, 5, 6, 7])
def test_deeper_models_say_the_same(family: str, layers: int) -> None:
    old = model_of(family)
    for rule in ("interleaved", "stacked"):
        grown = expand_depth(old, layers, rule)
        assert grown.spec.num_layers == layers
        assert equal(logits(grown), logits(old))
        assert not equal(logits(expand_depth(old, layers, rule, zeroed=False)), logits(old), 1e-3)


def test_where_copies_of_blocks_stand() -> None:
    old = model_of("llama")
    norms = [old.read(f"blocks.{block}.attention_norm.weight") for block in range(3)]
    for rule, sources in (("interleaved", [0, 0, 1, 1, 2]), ("stacked", [0, 1, 2, 0, 1])):
        grown = expand_depth(old, 5, rule)
        found = [grown.read(f"blocks.{block}.attention_norm.weight") for block in range(5)]
        assert [next(n for n in range(3) if torch.equal(norm, norms[n])) for norm in found] == sources
        silent = [not grown.read(f"blocks.{block}.attention.output.weight").any() for block in range(5)]
        assert silent == [block in sources[:place] for place, block in enumerate(sources)]


@EACH
@pytest.mark.parametrize(("times", "noise"), [(2, 0.0), (3, 0.3)])
def test_wider_models_say_the_same(family: str, times: int, noise: float) -> None:
    old = model_of(family)
    if family == "bloom":
        with pytest.raises(JinguError, match="with ALiBi a head's slope depends on its number"):
            expand_width(old, 24 * times)
        return
    grown = expand_width(old, 24 * times, noise)
    assert dimensions(grown.spec) == [3, *(times * size for size in dimensions(old.spec)[1:])]
    assert grown.spec.attention.head_dim == old.spec.attention.head_dim
    # Epsilon counts the same in each: norms of repeated numbers are the same.
    assert equal(logits(grown), logits(old))


def test_latent_vectors_do_not_grow() -> None:
    settings = {"family": "deepseek_v3", "hidden_size": 24, "num_heads": 3, "num_layers": 2, "intermediate_size": 19}
    spec = spec_from_settings(ModelSettings(**settings), 53, 16)
    with pytest.raises(JinguError, match="the latent vectors of attention"):
        expand_width(LazyModel(spec, lambda name: torch.empty(0)), 48)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_layers_with_a_state_grow_in_number_only(family: str) -> None:
    FAMILIES[family] = {"family": family, "num_layers": 4, "head_dim": 8}
    old = model_of(family)
    del FAMILIES[family]
    for rule in ("interleaved", "stacked"):
        grown = expand_depth(old, 7, rule)
        assert equal(logits(grown), logits(old))
    with pytest.raises(JinguError, match="layers with a state"):
        expand_width(old, 48)


def test_noise_sets_copies_apart() -> None:
    """Without it copies get equal gradients and stay copies; with it they do not."""
    for noise, apart in ((0.0, False), (0.1, True)):
        grown = expand_width(model_of("llama"), 48, noise)
        decoder = build_model(grown.spec).double()
        decoder.load_state_dict({name: grown.read(name) for name in decoder.state_dict()})
        decoder.logits(decoder(TOKENS)).square().sum().backward()
        first, second = decoder.blocks[1].feed_forward.up.weight.grad.chunk(2)  # type: ignore[union-attr]
        assert equal(first, second, 1e-9) is not apart


@pytest.mark.parametrize("family", ["llama", "llama-tied", "mistral", "qwen3"])
@pytest.mark.parametrize(("number", "active"), [(4, 2), (5, 1), (3, 3)])
def test_experts_say_what_the_dense_model_says(family: str, number: int, active: int) -> None:
    old = model_of(family)
    grown = upcycle_to_experts(old, number, active)
    part = grown.spec.feed_forward
    assert isinstance(part, Experts)
    assert (part.num_experts, part.num_experts_per_token, part.intermediate_size) == (number, active, 19)
    assert equal(logits(grown), logits(old))
    assert equal(logits(grown, torch.float32), logits(old, torch.float32), 1e-6)


def test_cpm2_grows_the_mixture_that_it_was_published_with() -> None:
    old = model_of("cpm2")
    grown = upcycle_to_experts(old, 5, 1)
    assert grown.spec.family == "cpm2" and isinstance(grown.spec.feed_forward, Experts)
    assert grown.spec.feed_forward.router.type == "random_projection"
    assert equal(logits(grown), logits(old))


def test_noise_of_experts_is_as_large_as_asked_for_and_depends_on_the_seed() -> None:
    old = model_of("llama")
    name = "blocks.1.feed_forward.down.weight"
    noise = upcycle_to_experts(old, 40, 2, 0.05).read(name) - old.read(name)
    assert abs(float(noise.std() / old.read(name).std()) - 0.05) < 0.002
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(
        upcycle_to_experts(old, 40, 2, 0.05).read(name), upcycle_to_experts(old, 40, 2, 0.05, seed=0).read(name)
    )
    assert not torch.equal(upcycle_to_experts(old, 40, 2, 0.05, seed=1).read(name), noise + old.read(name))
    untouched = "blocks.1.attention.output.weight"
    assert torch.equal(upcycle_to_experts(old, 40, 2, 0.05).read(untouched), old.read(untouched))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
def test_rows_of_a_vocabulary(family: str) -> None:
    old = model_of(family)
    rows = [[row] for row in reversed(range(53))] + [[3, 4, 7], []]
    grown = replace_vocab(old, rows)
    assert grown.spec.vocab_size == 55
    tables = ["embedding.weight"] if old.spec.tie_word_embeddings else ["embedding.weight", "head.weight"]
    for table in tables:
        before, after = old.read(table), grown.read(table)
        assert torch.equal(after[:53], before.flip(0))
        assert torch.allclose(after[53], before[[3, 4, 7]].mean(0), rtol=1e-12)
        assert torch.allclose(after[54], before.mean(0), rtol=1e-12)
    decoder = build_model(grown.spec).double().eval()
    decoder.load_state_dict({name: grown.read(name) for name in decoder.state_dict()})
    with torch.no_grad():
        assert equal(decoder.logits(decoder(52 - TOKENS))[..., :53], logits(old).flip(-1))


def test_rules_follow_one_another() -> None:
    old = model_of("qwen3")
    grown = upcycle_to_experts(expand_width(expand_depth(old, 5), 48, 0.1), 3, 2)
    assert dimensions(grown.spec) == [5, 48, 6, 2, 38]
    assert equal(logits(grown), logits(old))


MISTAKES: list[tuple[Callable[[], LazyModel], str]] = [
    (lambda: upcycle_to_experts(model_of("gpt2"), 4, 2), "and this one is a gpt2. Use a model of a family that has"),
    (lambda: upcycle_to_experts(model_of("mixtral"), 4, 2), "and this one is a mixtral"),
    (lambda: upcycle_to_experts(model_of("llama"), 2, 3), "cannot use 3 of 2 experts"),
    (lambda: expand_depth(model_of("llama"), 3), "--num-layers: the model has 3 blocks already. Give more than 3."),
    (
        lambda: expand_width(model_of("llama"), 36),
        "--hidden-size: the hidden size 24 grows by repetition, and 36 is not a multiple of it. Giv",
    ),
    (lambda: expand_width(model_of("llama"), 24), "24 is not a multiple of it. Give 48, 72 or so on."),
]


@pytest.mark.parametrize(("make", "words"), MISTAKES, ids=[words[:30] for _, words in MISTAKES])
def test_what_cannot_grow_is_told(make: Callable[[], LazyModel], words: str) -> None:
    with pytest.raises(JinguError) as caught:
        make()
    assert words in str(caught.value)
