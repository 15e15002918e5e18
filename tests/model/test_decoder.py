"""The decoder's own promises: documents, positions, meta, compile, the loss inside forward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jingu.config.sections.model import ModelSettings
from jingu.infer.attention_backend import GatherBackend
from jingu.infer.kv_cache import PagedKVCache
from jingu.model.decoder import Decoder
from jingu.model.inputs import Inputs
from jingu.model.resolve import spec_from_settings
from jingu.model.spec import replace_fields
from jingu.model.weight_init import init_weights


def tiny_decoder(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: object) -> Decoder:
    grouped = family not in ("gpt2", "bloom")
    size = 8 if family == "chatglm3" else 6
    numbers = {
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2 if grouped else 4,
        "head_dim": size,
        "initializer_range": 0.3,
    }
    settings = ModelSettings(family=family, **{"num_layers": 2, **numbers, **changes})  # type: ignore[arg-type]
    spec = spec_from_settings(settings, 43, 32)
    if family == "mistral":
        spec = replace_fields(spec, attention=spec.attention.model_copy(update={"sliding_window": 3}))
    model = Decoder(spec).to(dtype)
    init_weights(model, spec, 5)
    return model


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(43, (rows, tokens), generator=torch.Generator().manual_seed(rows * 100 + tokens))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mistral"])
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_documents_equal_separate_runs(family: str, lengths: list[int]) -> None:
    model = tiny_decoder(family)
    total = sum(lengths)
    tokens = ids(2, total)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, total)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).expand(2, total)
    packed = model(Inputs(tokens, positions, documents))
    separate = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, separate, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_later_tokens_do_not_reach_earlier_ones(family: str) -> None:
    model, tokens = tiny_decoder(family), ids(1, 12)
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 43
    a, b = model(tokens), model(changed)
    assert torch.equal(a[:, :7], b[:, :7])
    assert bool((a[:, 7:] != b[:, 7:]).any(-1).all())


def test_rotary_positions_are_relative_and_learned_ones_are_not() -> None:
    tokens, shifted = ids(1, 9), torch.arange(9)[None] + 11
    rope, learned = tiny_decoder("llama"), tiny_decoder("gpt2")
    torch.testing.assert_close(rope(tokens), rope(Inputs(tokens, shifted)), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(learned(tokens), learned(Inputs(tokens, shifted)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loss_sees_hidden_states_and_head_weight(family: str) -> None:
    model, tokens = tiny_decoder(family), ids(2, 6)
    value = model(tokens, loss=lambda hidden, weight: (hidden @ weight.T).sum())
    torch.testing.assert_close(value, model.logits(model(tokens)).sum())
    assert model.head_weight().shape == (43, 24)
    assert (model.head is None) == (family == "gpt2")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_meta_forward_gives_shape_and_dtype(dtype: torch.dtype) -> None:
    model = tiny_decoder().to(device="meta", dtype=dtype)
    hidden = model(torch.zeros(3, 7, dtype=torch.int64, device="meta"))
    assert (hidden.shape, hidden.dtype) == ((3, 7, 24), dtype)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.bfloat16), ("gpt2", torch.float32), ("bloom", torch.bfloat16), ("chatglm3", torch.float32)],
    ids=["llama-bf16", "gpt2-fp32", "bloom-bf16", "chatglm3-fp32"],
)
def test_blocks_compile_without_a_graph_break(family: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()  # what other tests compiled counts towards its limit
    model, tokens = tiny_decoder(family, dtype, num_layers=1, tie_word_embeddings=True), ids(2, 8)
    documents = torch.arange(8).div(3, rounding_mode="floor").expand(2, 8)
    eager = [model(tokens), model(Inputs(tokens, documents=documents))]
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    limit = 1e-5 if dtype == torch.float32 else 0.05
    for expected, documents_BT in zip(eager, (None, documents), strict=True):
        hidden = model(Inputs(tokens, documents=documents_BT))
        hidden.float().square().sum().backward()
        torch.testing.assert_close(hidden, expected, rtol=limit, atol=limit)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bf16_stays_near_fp32() -> None:
    narrow, wide = tiny_decoder(dtype=torch.bfloat16), tiny_decoder(dtype=torch.float32)
    hidden = narrow(ids(2, 16))
    assert hidden.dtype == torch.bfloat16
    expected = wide(ids(2, 16)).detach()
    assert float((hidden.detach().float() - expected).norm() / expected.norm()) < 0.05


def test_a_window_hides_what_is_further_back() -> None:
    model, tokens = tiny_decoder("mistral", num_layers=1), ids(1, 9)
    changed = tokens.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 43
    differs = (model(tokens) != model(changed)).any(-1)[0]
    assert differs.tolist() == [2 <= number < 5 for number in range(9)]


def test_documents_and_a_cache_are_refused() -> None:
    model = tiny_decoder()
    cache = PagedKVCache(model.spec, [4], 16, torch.device("cpu"), GatherBackend(model.spec))
    with pytest.raises(ValueError, match="documents"):
        model(Inputs(ids(1, 2), documents=torch.zeros(1, 2, dtype=torch.int64), cache=cache))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mixtral"])
@pytest.mark.parametrize("cuts", [[3], [1, 2, 4]])
def test_parts_one_after_another_are_the_whole(family: str, cuts: list[int]) -> None:
    """Under the whole's names; a tied head's part has the embedding's weight, too."""
    whole, tokens = tiny_decoder(family, num_layers=5), ids(2, 7)
    weights, left, passed = whole.state_dict(), set(dict(whole.named_parameters())), None
    for first, end in pairwise([0, *cuts, 5]):
        part = Decoder(whole.spec, range(first, end)).double()
        assert list(part.state_dict()) == [name for name in weights if name in part.state_dict()]
        left -= set(part.state_dict())
        part.load_state_dict({name: weights[name] for name in part.state_dict()})
        passed = part(
            tokens, loss=lambda x, w: (x @ w.T).sum(), auxiliary=lambda r: torch.tensor([len(r)]), received=passed
        )
    assert not left
    expected = whole(tokens, loss=lambda x, w: (x @ w.T).sum(), auxiliary=lambda r: torch.tensor([len(r)]))
    assert isinstance(passed, Tensor)
    assert passed.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "bloom", "mistral"])
def test_a_beginning_that_is_seen_whole(family: str) -> None:
    """The states of a beginning depend on all of it and on nothing else; later ones on what came before them."""
    model, tokens = tiny_decoder(family), ids(2, 12)
    reach = torch.tensor([[5] * 5 + [0] * 7, [0] * 12])
    before = model(Inputs(tokens, prefix_lengths=reach))
    torch.testing.assert_close(before[1], model(tokens)[1], rtol=1e-12, atol=1e-12)
    for place in range(12):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 43
        differ = (model(Inputs(changed, prefix_lengths=reach)) != before).any(-1)
        if family != "mistral":  # whose window is shorter
            assert differ[0].tolist() == [at >= place or place < 5 for at in range(12)]
        assert not differ[0, :5].any() or place < 5
        assert differ[1, :place].sum() == 0
