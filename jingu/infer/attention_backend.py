"""Attention backends: attention of a step's tokens over the blocks of the paged KV cache.

`gather` copies each sequence's blocks into one tensor and calls PyTorch's scaled dot-product attention. It runs on
every device, for every model. `flash` and `flex` read the blocks in place: `flash` with FlashAttention-3, through
PyTorch's `varlen_attn`, and `flex` with FlexAttention, which needs only Triton.

All backends are batch-invariant: a token's result does not depend on the other tokens of a step, to the last bit.
`gather` pads operands to fixed sizes: keys and values to the next multiple of KV_SPAN positions, and queries to a
multiple of QUERY_ROW_MULTIPLE rows, with which a row's result does not depend on the number of rows. `flash` does not
split keys (`num_splits=1`), which is PyTorch's condition for the same guarantee. `flex` uses tiles of a fixed size.

Shapes: T tokens of a step, H query heads in G groups of R (one for each KV head), K head dim, P blocks, S keys; in an
attention group N sequences with Q tokens each, M = Q·R rows, padded.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from jingu.compat.torch import has_triton
from jingu.errors import JinguError
from jingu.model.attention import attention_bias, has_biases, scored_attention
from jingu.model.components import LayerSpec
from jingu.model.matmul_kernels import dot_product_attention
from jingu.model.spec import ModelSpec

BackendName = Literal["auto", "gather", "flash", "flex"]
KV_SPAN = 128
QUERY_ROW_MULTIPLE = 4
# Default tokens of a block. They are larger on GPUs, whose kernels read whole blocks at a time.
DEFAULT_BLOCK_SIZES = {"cpu": 8, "other": 64}
# Triton's matmuls need tiles of at least this many rows.
MIN_TILE = 16


@dataclass(eq=False)
class AttentionGroup:
    """Neighbouring rows of a step whose attention is computed together: N sequences with Q tokens each.

    Attributes:
        num_seqs: N.
        num_tokens: Q.
        rows: the rows of the step that belong to the group.
        blocks: block table [N · S / block size], padded with the zero block to whole spans, which stands for freed
            blocks as well.
        contiguous: the same blocks as a slice if the group is one sequence whose blocks are contiguous in memory.
        positions: positions of the tokens [N, Q].
        first: position of the first key. Windowed layers do not read the spans behind the window.
        bidirectional: positions that attend to each other, in a prefix LM.
        masks: by kind of layer, the backend's attention mask, which the first layer of the kind creates and the others
            reuse. For `gather` it is a bias that is added to the scores [N, G or 1, M, S].
    """

    num_seqs: int
    num_tokens: int
    rows: slice
    blocks: Tensor
    contiguous: slice | None
    positions: Tensor
    bidirectional: range
    first: int = 0
    masks: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AttentionHeads:
    """What a rank's heads of a layer are.

    Attributes:
        scale: multiplies the scores.
        first: index of the first head on this rank among all heads.
        sinks: scores [H] of the heads that join the softmax without a value; None: there are none.
    """

    scale: float
    first: int = 0
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """Computes attention over the KV blocks of one layer.

    Attributes:
        relative_bias: relative position biases [buckets, H] (T5); None if the model has none.
    """

    relative_bias: Tensor | None = None

    def attend(self, q_BXHK: Tensor, store: Tensor, group: AttentionGroup, kind: int, heads: AttentionHeads) -> Tensor:
        """Return the attention output of a group's tokens [1, X, H, K].

        Args:
            q_BXHK: queries of the group, X = N·Q.
            store: keys and values of all blocks [P, block size, 2, G, K], or, if the values are the keys, [P, block
                size, 1, G, K].
            kind: index of the layer among `ModelSpec.kinds`.
            heads: what the heads are.
        """


class GatherBackend(AttentionBackend):
    """Gathers the blocks of sequences and calls scaled dot-product attention with an additive mask."""

    def __init__(self, spec: ModelSpec) -> None:
        self.layers = spec.kinds

    def attend(self, q_BXHK: Tensor, store: Tensor, group: AttentionGroup, kind: int, heads: AttentionHeads) -> Tensor:
        """Return the attention output of a group's tokens; see `AttentionBackend`."""
        if kind not in group.masks:
            numbers = range(heads.first, heads.first + q_BXHK.shape[2])
            num_keys = group.blocks.numel() // group.num_seqs * store.shape[1]
            group.masks[kind] = self.bias(group, self.layers[kind], numbers, num_keys, store.shape[3], q_BXHK.dtype)
        # Contiguous blocks need no copy.
        blocks = store.index_select(0, group.blocks) if group.contiguous is None else store[group.contiguous]
        kv_NS2GK = blocks.view(group.num_seqs, -1, *blocks.shape[2:])
        k_NGSK, *values = kv_NS2GK.permute(2, 0, 3, 1, 4)
        v_NGSK = values[0] if values else k_NGSK
        softcap = self.layers[kind].attention.softcap
        return attend_padded(q_BXHK, k_NGSK, v_NGSK, group.masks[kind], heads, softcap)

    def bias(
        self, group: AttentionGroup, layer: LayerSpec, heads: range, num_keys: int, kv_heads: int, dtype: torch.dtype
    ) -> Tensor:
        """Return the additive mask of the scores [N, G or 1, M, S]: position biases, and -inf for masked keys."""
        keys_S = torch.arange(group.first, group.first + num_keys, device=group.positions.device)
        positions_NQ1 = group.positions[:, :, None]
        visible = positions_NQ1 >= keys_S
        prefix = group.bidirectional
        if prefix:
            visible |= (positions_NQ1 >= prefix.start) & (positions_NQ1 < prefix.stop) & (keys_S < prefix.stop)
        wide = torch.promote_types(dtype, torch.float32)
        bias = attention_bias(layer, positions_NQ1, keys_S, visible, wide, self.relative_bias)
        if bias.dim() == 4:  # one bias for each head of the whole model, of which this rank may have a part
            bias = bias.narrow(1, heads.start, len(heads)).unflatten(1, (kv_heads, -1)).transpose(2, 3)
        else:
            bias = bias[:, None, :, None].expand(-1, -1, -1, len(heads) // kv_heads, -1)
        return pad_rows(bias.flatten(2, 3))


class FlashBackend(GatherBackend):
    """FlashAttention-3 over the block table, through PyTorch's `varlen_attn`: nothing is copied or padded.

    Bidirectional prefixes, chunks, soft caps, sinks and latent attention fall back to `gather`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        # A late import, because it loads the compiler, which takes seconds.
        from torch.nn.attention.varlen import varlen_attn

        self._varlen_attn = varlen_attn

    def attend(self, q_BXHK: Tensor, store: Tensor, group: AttentionGroup, kind: int, heads: AttentionHeads) -> Tensor:
        """Return the attention output of a group's tokens; see `AttentionBackend`."""
        if group.bidirectional or _needs_gather(self.layers[kind]):
            return super().attend(q_BXHK, store, group, kind, heads)
        size = self.layers[kind].attention.sliding_window
        window = (-1 if size is None else size - 1, 0)
        block_table = group.blocks.view(group.num_seqs, -1).int()
        tokens = group.num_seqs * group.num_tokens
        y_THK = self._varlen_attn(
            q_BXHK[0],
            store[:, :, 0],
            store[:, :, 1],
            torch.arange(0, tokens + 1, group.num_tokens, dtype=torch.int32, device=store.device),
            None,
            group.num_tokens,
            block_table.shape[1] * store.shape[1],
            scale=heads.scale,
            window_size=window,  # aligned to the last key, so that a chunk of a prompt is causal
            enable_gqa=True,
            seqused_k=(group.positions[:, -1] + 1 - group.first).int(),
            block_table=block_table,
            num_splits=1,
        )
        assert isinstance(y_THK, Tensor)
        return y_THK.unsqueeze(0)


class FlexBackend(GatherBackend):
    """FlexAttention over the block table: nothing is copied or padded.

    As in PyTorch's experimental `PagedAttention`, block masks list the physical blocks of a sequence. Bidirectional
    prefixes, chunks, soft caps, sinks and latent attention fall back to `gather`.

    Attributes:
        kernel: `flex_attention`, compiled except on CPUs.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__(spec)
        # A late import, because it loads the compiler, which takes seconds.
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        self._block_mask = BlockMask.from_kv_blocks
        self._is_compiled = device.type != "cpu"
        self.kernel: Any = torch.compile(flex_attention, dynamic=True) if self._is_compiled else flex_attention

    def attend(self, q_BXHK: Tensor, store: Tensor, group: AttentionGroup, kind: int, heads: AttentionHeads) -> Tensor:
        """Return the attention output of a group's tokens; see `AttentionBackend`."""
        if group.bidirectional or _needs_gather(self.layers[kind]):
            return super().attend(q_BXHK, store, group, kind, heads)
        if kind not in group.masks:
            window = self.layers[kind].attention.sliding_window
            group.masks[kind] = self._mask(group, window, len(store), store.shape[1])
        q_NHQK = q_BXHK.unflatten(1, (group.num_seqs, -1))[0].transpose(1, 2)
        # All blocks as one row of keys and values [1, G, P · block size, K].
        k_BGSK, v_BGSK = store.flatten(0, 1).permute(1, 2, 0, 3).unsqueeze(1).unbind()
        mask = group.masks[kind]
        # Fixed tile sizes without a split of the keys keep a token's result independent of other sequences.
        options = {"BACKEND": "TRITON", "BLOCK_M": MIN_TILE, "BLOCK_N": min(store.shape[1], 64)}
        # The model runner may force the rest of the model to run eagerly; this kernel must still be compiled.
        with torch.compiler.set_stance("default") if self._is_compiled else nullcontext():
            y_NHQK: Tensor = self.kernel(
                q_NHQK, k_BGSK, v_BGSK, block_mask=mask, scale=heads.scale, enable_gqa=True, kernel_options=options
            )
        return y_NHQK.transpose(1, 2).flatten(0, 1).unsqueeze(0)

    def _mask(self, group: AttentionGroup, window: int | None, num_blocks: int, block_size: int) -> Any:
        """Return the block mask of a group: causal attention within each sequence and the sliding window."""
        positions_NQ = group.positions
        table_NS = group.blocks.view(group.num_seqs, -1)
        # Position at which each physical block begins in the sequence; -1 for blocks of other sequences.
        begins_S = group.first + torch.arange(0, table_NS.shape[1] * block_size, block_size, device=table_NS.device)
        begins_NP = table_NS.new_full((group.num_seqs, num_blocks), -1)
        begins_NP.scatter_(1, table_NS, begins_S.expand_as(table_NS))

        def is_visible(sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            begin = begins_NP[sequence, key // block_size]
            distance = positions_NQ[sequence, query] - begin - key % block_size
            visible = (begin >= 0) & (distance >= 0)
            return visible if window is None else visible & (distance < window)

        return self._block_mask(
            ((positions_NQ[:, -1:, None] - group.first) // block_size + 1).int(),
            table_NS[:, None, None].int(),
            BLOCK_SIZE=(KV_SPAN, block_size),
            mask_mod=is_visible,
            seq_lengths=(group.num_tokens, num_blocks * block_size),
            compute_q_blocks=False,
        )


def _needs_gather(layer: LayerSpec) -> bool:
    """Return whether a layer's attention has no kernel that reads blocks in place."""
    part = layer.attention
    return part.softcap is not None or part.chunk_size is not None or part.sinks or part.latent is not None


def select_backend(
    name: BackendName, spec: ModelSpec, dtype: torch.dtype, device: torch.device, block_size: int
) -> AttentionBackend:
    """Return an attention backend. On CUDA, auto is the first of flash, flex and gather that can be used, else gather.

    Raises:
        JinguError: flash or flex was requested, and cannot be used.
    """
    if name == "gather" or (name == "auto" and device.type != "cuda"):
        return GatherBackend(spec)
    obstacles = {"flash": _flash_obstacle(spec, dtype, device), "flex": _flex_obstacle(spec, dtype, device, block_size)}
    usable = [kind for kind, obstacle in obstacles.items() if obstacle is None and name in ("auto", kind)]
    if not usable and name == "auto":
        return GatherBackend(spec)
    if not usable:
        raise JinguError(f"{name} {obstacles[name]}.", where="attention_backend", fix="Use auto or gather.")
    if usable[0] == "flex":
        return FlexBackend(spec, device)
    torch.nn.attention.activate_flash_attention_impl("FA3")
    return FlashBackend(spec)


def _flex_obstacle(spec: ModelSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> str | None:
    """Return why flex cannot be used with this model, device and installation; None if it can."""
    if device.type not in ("cuda", "cpu"):
        return "needs a CUDA device, or a CPU to try it"
    if has_biases(spec) or spec.num_encoder_layers is not None:
        return "supports only decoders without position biases"
    if device.type == "cpu":
        return None
    if dtype == torch.float64:
        return "does not compute in fp64"
    if block_size < MIN_TILE:
        return f"needs a block_size of {MIN_TILE} or more"
    return None if has_triton() else "needs Triton"


def _flash_obstacle(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why flash cannot be used with this model, device and installation; None if it can."""
    # The cheap conditions come first, because the import for the last one takes seconds.
    if device.type != "cuda":
        return "needs a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return "needs bf16 or fp16"
    if has_biases(spec) or spec.num_encoder_layers is not None:
        return "supports only decoders without position biases"
    if find_spec("flash_attn_interface") is None:
        return "needs FlashAttention-3 (the package flash_attn_interface)"
    from torch.nn.attention.varlen import varlen_attn

    if "num_splits" not in inspect.signature(varlen_attn).parameters:
        return f"needs PyTorch 2.12 or newer, and this is {torch.__version__}"
    return None


def attend_padded(
    q_BXHK: Tensor,
    k_NGSK: Tensor,
    v_NGSK: Tensor,
    bias: Tensor | None,
    heads: AttentionHeads,
    softcap: float | None = None,
) -> Tensor:
    """Return the attention output of N sequences [1, N·Q, H, K], computed with queries padded by `pad_rows`."""
    num_seqs, kv_heads, _, head_dim = k_NGSK.shape
    queries, repeats = q_BXHK.shape[1] // num_seqs, q_BXHK.shape[2] // kv_heads
    if queries == 1:
        q_NGMK = q_BXHK.view(num_seqs, kv_heads, repeats, head_dim)
    else:
        q_NGMK = q_BXHK.view(num_seqs, queries, kv_heads, repeats, head_dim).transpose(1, 2).flatten(2, 3)
    q_NGMK = pad_rows(q_NGMK)
    if num_seqs * kv_heads == 1 and q_NGMK.device.type == "cpu" and torch.get_num_threads() > 1:
        # With a single sequence and head the kernel splits sums over threads, which changes their order. Compute twice.
        q_NGMK, k_NGSK, v_NGSK = (x.expand(2, -1, -1, -1) for x in (q_NGMK, k_NGSK, v_NGSK))
    if softcap is None and heads.sinks is None:
        y_NGMK = dot_product_attention(q_NGMK, k_NGSK, v_NGSK, bias, causal=False, scale=heads.scale)
    else:
        sinks_GM1 = None
        if heads.sinks is not None:
            sinks_GQR = heads.sinks.view(kv_heads, 1, repeats).expand(-1, queries, -1)
            sinks_GM1 = pad_rows(sinks_GQR.flatten(1).unsqueeze(-1))
        y_NGMK = scored_attention(q_NGMK, k_NGSK, v_NGSK, bias, heads.scale, softcap, sinks_GM1)
    y_NGMK = y_NGMK[:num_seqs, :, : queries * repeats]
    if queries > 1:
        y_NGMK = y_NGMK.unflatten(2, (queries, repeats)).transpose(1, 2)
    return y_NGMK.reshape(q_BXHK.shape)


def pad_rows(rows: Tensor) -> Tensor:
    """Pad [..., M, x] to a multiple of QUERY_ROW_MULTIPLE rows."""
    padding = -rows.shape[-2] % QUERY_ROW_MULTIPLE
    if not padding:
        return rows
    # Twice as fast as `torch.nn.functional.pad`.
    return torch.cat((rows, rows.new_zeros(*rows.shape[:-2], padding, rows.shape[-1])), -2)
