"""Attention inside documents: every way gives what a mask gives, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jingu.model.document_mask import DocumentMask, create_document_block_mask, flex_attend
from jingu.model.matmul_kernels import dot_product_attention
from jingu.model.rotary import last_positions


def tensors(tokens: int, heads: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    made = torch.Generator().manual_seed(tokens)
    shapes = [(2, heads, tokens, 16), (2, groups, tokens, 16), (2, groups, tokens, 16)]
    return [torch.randn(shape, generator=made, dtype=dtype).requires_grad_() for shape in shapes]


def numbered(lengths: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.full((n,), 3 - i) for i, n in enumerate(row)]) for row in lengths])


def parents_of(numbers: Tensor) -> Tensor:
    """Let the first document of each row, which has number 3, be the parent of the last ones and of itself."""
    return torch.where((numbers < 2) | (numbers == 3), 3, numbers)


@pytest.mark.parametrize("causal", [True, False])
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.lists(st.integers(0, 40), max_size=3), st.sampled_from([(2, 2), (4, 2)]), st.booleans())
def test_document_by_document_is_what_a_mask_gives(
    causal: bool, tokens: int, cuts: list[int], heads: tuple[int, int], has_parents: bool
) -> None:
    places = sorted({0, *(cut % tokens for cut in cuts)})
    lengths = [[b - a for a, b in zip(places, [*places[1:], tokens], strict=True)], [tokens]]
    numbers = numbered(lengths)
    parents = parents_of(numbers) if has_parents else None
    documents = DocumentMask.of(numbers, 16, torch.float64, causal=causal, parents_BT=parents)
    results = []
    for way in (
        lambda q, k, v: documents.attend(q, k, v, 0.3),
        lambda q, k, v: dot_product_attention(q, k, v, documents.mask(), causal=False, scale=0.3),
    ):
        inputs = tensors(tokens, *heads, torch.float64)
        y = way(*inputs)
        (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
        results.append([y, *(x.grad for x in inputs)])
    for ours, masked in zip(*results, strict=True):
        torch.testing.assert_close(ours, masked, rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("has_parents", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_the_blocks_of_the_kernel_say_the_same(causal: bool, has_parents: bool) -> None:
    """On CPU the kernel is for results alone; what a document is, it is told there as on CUDA."""
    numbers = numbered([[100, 1, 49, 50], [200]])
    parents = parents_of(numbers) if has_parents else None
    blocks = create_document_block_mask(numbers, parents, causal=causal)
    documents = DocumentMask(numbers, causal, blocks, parents)
    with torch.no_grad():
        q, k, v = (x.detach() for x in tensors(200, 4, 2, torch.float32))
        found = flex_attend(q, k, v, documents.blocks, 0.3)
        assert torch.equal(found, documents.attend(q, k, v, 0.3))
        expected = dot_product_attention(q, k, v, documents.mask(), causal=False, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_answers_attend_to_their_prompt_and_to_themselves() -> None:
    """By hand: a prompt of two tokens with answers of two and one, then a prompt with one answer."""
    numbers, parents = torch.tensor([[0, 0, 1, 1, 2, 3, 4]]), torch.tensor([[0, 0, 0, 0, 0, 3, 3]])
    seen = DocumentMask.of(numbers, 16, torch.float64, causal=True, parents_BT=parents).mask()
    expected = ["1......", "11.....", "111....", "1111...", "11..1..", ".....1.", ".....11"]
    assert ["".join(".1"[int(value)] for value in row) for row in seen[0, 0]] == expected


def test_compiled_code_is_for_any_documents() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor, documents: DocumentMask) -> Tensor:
        return 2 * documents.attend(q, k, v, None)

    compiled = torch.compile(twice, backend="eager", fullgraph=True, dynamic=False)
    q, k, v = tensors(30, 2, 2, torch.float64)
    with torch.compiler.set_stance("fail_on_recompile"):
        for number, lengths in enumerate(([[10, 20], [30]], [[1, 2, 27], [15, 15]])):
            numbers = numbered(lengths)
            documents = DocumentMask.of(numbers, 16, torch.float64, causal=True, parents_BT=parents_of(numbers))
            if number == 0:
                with torch.compiler.set_stance("default"):
                    compiled(q, k, v, documents)
            torch.testing.assert_close(compiled(q, k, v, documents), twice(q, k, v, documents), rtol=1e-11, atol=1e-12)


def test_the_last_position_of_each_document() -> None:
    """By hand: ids in any order, padding, and a document in two pieces; without documents, of each row."""
    documents = torch.tensor([[7, 7, 7, 2, 2, -1, -1], [0, 5, 5, 0, 0, 5, 9]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2, 0]])
    expected = [[2, 2, 2, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 0]]
    assert last_positions(positions, documents).tolist() == expected
    assert last_positions(torch.arange(7), documents).tolist() == [[2, 2, 2, 4, 4, 6, 6], [4, 5, 5, 4, 4, 5, 6]]
    assert last_positions(positions, None).tolist() == [[2], [2]]
