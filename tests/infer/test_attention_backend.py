"""FlashAttention-3 is used where everything that it needs is there; what is missing is named where it was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from jingu.errors import JinguError
from jingu.infer import attention_backend
from jingu.infer.attention_backend import (
    AttentionBackend,
    AttentionHeads,
    BackendName,
    FlashBackend,
    FlexBackend,
    GatherBackend,
    select_backend,
)
from jingu.infer.block_manager import SCRATCH_BLOCK, ZERO_BLOCK
from jingu.infer.kv_cache import BlockTable, PagedKVCache, SequenceChunk
from jingu.model.spec import replace_fields
from tests.dist.test_layouts import MODELS

CARD = torch.device("cuda")
CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "model", "dtype", "device", "words"),
    [
        ("flash", "llama", BF16, CPU, "needs a CUDA device"),
        ("flash", "llama", FP32, CARD, "needs bf16 or fp16"),
        ("flash", "bloom", BF16, CARD, "supports only decoders without position biases"),
        ("flash", "t5", BF16, CARD, "supports only decoders without position biases"),
        ("flash", "llama", BF16, CARD, r"needs FlashAttention-3 \(the package flash_attn_interface\)"),
        ("flex", "llama", FP32, torch.device("xpu"), "needs a CUDA device, or a CPU to try it"),
        ("flex", "t5", BF16, CARD, "supports only decoders without position biases"),
        ("flex", "llama", torch.float64, CARD, "does not compute in fp64"),
        ("flex", "llama", BF16, CARD, "needs Triton"),
    ],
)
def test_what_is_missing_is_named(
    name: BackendName, model: str, dtype: torch.dtype, device: torch.device, words: str
) -> None:
    with pytest.raises(JinguError, match=f"^attention_backend: {name} {words}. Use auto or gather"):
        select_backend(name, MODELS[model], dtype, device, 64)
    assert type(select_backend("auto", MODELS[model], dtype, device, 64)) is GatherBackend


def test_flex_is_used_where_flash_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backend, "has_triton", lambda: True)
    assert type(select_backend("auto", MODELS["llama"], BF16, CARD, 16)) is FlexBackend
    with pytest.raises(JinguError, match="flex needs a block_size of 16 or more"):
        select_backend("flex", MODELS["llama"], BF16, CARD, 8)


def read_named_blocks(
    q_NHQK: Tensor, k_1GSK: Tensor, v_1GSK: Tensor, *, block_mask: Any, scale: float, **_: Any
) -> Tensor:
    """What FlexAttention's kernels on cards compute: they only read the blocks that a mask names."""
    num_seqs, heads, queries, _ = q_NHQK.shape
    (groups, keys), device = k_1GSK.shape[1:3], q_NHQK.device
    indices_NS, count_N1 = block_mask.kv_indices[:, 0, 0].long(), block_mask.kv_num_blocks[:, 0]
    size = block_mask.BLOCK_SIZE[1]
    is_named_NS = torch.arange(indices_NS.shape[1], device=device) < count_N1
    is_named_NP = torch.zeros(num_seqs, keys // size, dtype=torch.bool, device=device)
    is_named_NP.scatter_(1, indices_NS, is_named_NS)
    seq, query, key = (torch.arange(count, device=device) for count in (num_seqs, queries, keys))
    visible_NQS = block_mask.mask_mod(seq[:, None, None], None, query[:, None], key)
    visible_NQS = visible_NQS & is_named_NP[:, None, :, None].expand(-1, -1, -1, size).flatten(2)
    k_NHSK, v_NHSK = (
        x[0, :, None].expand(-1, heads // groups, -1, -1).flatten(0, 1).expand(num_seqs, -1, -1, -1)
        for x in (k_1GSK, v_1GSK)
    )
    return F.scaled_dot_product_attention(q_NHQK, k_NHSK, v_NHSK, visible_NQS[:, None], scale=scale)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", [flex_attention, read_named_blocks])
@pytest.mark.parametrize("window", [None, 20])
def test_flex_equals_gather(window: int | None, kernel: Any) -> None:
    """Sequences of several lengths that share blocks, whose blocks lie anywhere, and a long chunk of a prompt."""
    spec = replace_fields(MODELS["llama"], **{"attention.sliding_window": window})
    generator = torch.Generator().manual_seed(1)
    blocks = (torch.randperm(60, generator=generator) + 1 + max(ZERO_BLOCK, SCRATCH_BLOCK)).tolist()
    tables = [BlockTable([part]) for part in (blocks[:3], [*blocks[:2], *blocks[36:52]], blocks[20:36])]
    chunks = [
        SequenceChunk(tables[0], 33, [1]),
        SequenceChunk(tables[1], 280, [1]),
        SequenceChunk(tables[2], 90, [1] * 150),
    ]
    heads, kv_heads, head_dim = spec.attention.num_heads, spec.attention.num_kv_heads, 16
    store = torch.randn(64, 16, 2, kv_heads, head_dim, generator=generator, dtype=torch.float64)
    store[ZERO_BLOCK] = 0.0
    q_BTHK = torch.randn(1, 152, heads, head_dim, generator=generator, dtype=torch.float64)
    flex = FlexBackend(spec, CPU)
    flex.kernel = kernel
    expected, result = (attend(backend, chunks, q_BTHK, store) for backend in (GatherBackend(spec), flex))
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


def attend(backend: GatherBackend, chunks: list[SequenceChunk], q_BTHK: Tensor, store: Tensor) -> Tensor:
    (layer,) = backend.layers
    window = layer.attention.sliding_window
    spec = replace_fields(MODELS["llama"], max_position_embeddings=300, **{"attention.sliding_window": window})
    cache = PagedKVCache(spec, [len(store)], store.shape[1], CPU, backend)
    cache.plan(chunks, None)
    groups = cache.steps[0].groups
    assert len(groups) == 4 and {group.first for group in groups} == (
        {0} if layer.attention.reach is None else {0, 128}
    )
    with torch.inference_mode():
        parts = [backend.attend(q_BTHK[:, group.rows], store, group, 0, AttentionHeads(0.25)) for group in groups]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("kind", ["flash", "flex"])
def test_prefixes_whose_tokens_see_each_other_are_gathered(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have no mask for them."""
    spec = MODELS["llama"]
    backend: AttentionBackend = FlashBackend(spec) if kind == "flash" else FlexBackend(spec, CPU)
    monkeypatch.setattr(backend, "_varlen_attn" if kind == "flash" else "kernel", None)
    generator = torch.Generator().manual_seed(2)
    heads, kv_heads = spec.attention.num_heads, spec.attention.num_kv_heads
    store = torch.randn(12, 16, 2, kv_heads, 16, generator=generator, dtype=torch.float64)
    store[ZERO_BLOCK] = 0.0
    q_BTHK = torch.randn(1, 20, heads, 16, generator=generator, dtype=torch.float64)
    results = []
    for other in (backend, GatherBackend(spec)):
        cache = PagedKVCache(spec, [len(store)], store.shape[1], CPU, other)
        cache.plan([SequenceChunk(BlockTable([[4, 5]]), 0, [1] * 20, bidirectional=range(12))], None)
        assert all(group.bidirectional for group in cache.steps[0].groups)
        with torch.inference_mode():
            parts = [
                other.attend(q_BTHK[:, group.rows], store, group, 0, AttentionHeads(0.25))
                for group in cache.steps[0].groups
            ]
        results.append(torch.cat(parts, 1))
    assert torch.equal(*results)


def test_an_old_pytorch_is_named_and_a_new_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    activated = []
    monkeypatch.setattr(attention_backend, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    assert isinstance(select_backend("auto", MODELS["llama"], BF16, CARD, 64), FlashBackend)
    assert activated == ["FA3"]

    def old_varlen_attn(query: Any, key: Any, value: Any) -> None: ...

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old_varlen_attn)
    with pytest.raises(JinguError, match=r"flash needs PyTorch 2.12 or newer, and this is 2\."):
        select_backend("flash", MODELS["llama"], BF16, CARD, 64)
    assert isinstance(select_backend("auto", MODELS["llama"], BF16, CARD, 64), GatherBackend)
