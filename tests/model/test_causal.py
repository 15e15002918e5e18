"""Attention in blocks beside torch's own, in fp64 where nothing but a mistake makes a difference."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from jingu.model.blockwise_attention import BLOCK_SIZE, BlockwiseCausalAttention
from jingu.model.document_mask import same_document

TENSORS = st.tuples(
    st.integers(1, 2),  # rows
    st.integers(1, 3),  # groups
    st.integers(1, 3),  # heads of a group
    st.sampled_from(
        [1, 2, BLOCK_SIZE // 2, BLOCK_SIZE - 1, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 3]
    ),
    st.sampled_from([1, 4, 6]),
)


def _made(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    rows, groups, repeats, tokens, size = shape
    generator = torch.Generator().manual_seed(tokens)
    heads = (groups * repeats, groups, groups)
    made = [torch.randn(rows, h, tokens, size, generator=generator, dtype=torch.float64) for h in heads]
    return [x.to(dtype).requires_grad_() for x in made]


@settings(max_examples=25, deadline=None)
@given(TENSORS, st.booleans(), st.booleans())
def test_output_and_gradients_are_those_of_torch(
    shape: tuple[int, int, int, int, int], apart: bool, has_parents: bool
) -> None:
    q, k, v = _made(shape, torch.float64)
    places = torch.arange(shape[3]).expand(shape[0], -1)
    documents = places // 70 - 1 if apart else torch.zeros_like(places)
    # Later documents continue the first one.
    parents = torch.where(documents > 0, -1, documents) if has_parents else None
    seen = same_document(documents, parents).tril().unsqueeze(1)
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    ours = BlockwiseCausalAttention.apply(q, k, v, *((documents, parents) if apart else ()))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    upstream = torch.linspace(-1, 1, theirs.numel(), dtype=torch.float64).view_as(theirs)
    expected = torch.autograd.grad(theirs, (q, k, v), upstream)
    for found, wanted in zip(torch.autograd.grad(ours, (q, k, v), upstream), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def test_in_bf16_it_is_as_near_to_exact_numbers_as_torch() -> None:
    q, k, v = _made((2, 2, 2, 3 * BLOCK_SIZE + 5, 16), torch.bfloat16)

    def results(attention: object, dtype: torch.dtype) -> list[torch.Tensor]:
        parts = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        y = attention(*parts)  # type: ignore[operator]
        return [y, *torch.autograd.grad(y, parts, torch.ones_like(y))]

    def by_torch(*parts: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)

    exact = results(by_torch, torch.float64)
    ours, theirs = results(BlockwiseCausalAttention.apply, torch.bfloat16), results(by_torch, torch.bfloat16)
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert (mine.double() - true).norm() <= 1.5 * (other.double() - true).norm()
