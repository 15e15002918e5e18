"""The gated delta rule (Yang et al., 2024): linear attention whose state forgets, and is corrected by each token.

The state S of a head maps keys to values. A token lets it decay, and then writes the part of its value that the state
does not predict from its key:

    S ← exp(g) · S;  S ← S + k ⊗ β (v − Sᵀ k);  y = Sᵀ q

Keys and queries are L2-normalized, and queries divided by √K. Kimi Delta Attention (Moonshot, 2025) has a decay per
channel of the key instead of one per head.

Two forms compute the same: chunk by chunk for training and prompts, and token by token for decoding.

Shapes: B rows, T tokens, G key heads, H value heads (each key head serves H / G adjacent ones), K key head size,
V value head size, D hidden size, N chunks, C tokens of a chunk, W tokens of a block within a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.model.chunked_scan import (
    CHUNK_SIZE,
    Chunks,
    Decays,
    decay,
    join_chunks,
    pair_sums,
    split_chunks,
    sum_to_end,
    wide_dtype,
)
from jingu.model.layers import Vector, apply_batch_invariant, build_linear
from jingu.model.mixer_parts import GatedNorm, Mixer, MixerState
from jingu.model.mixer_specs import GatedDelta
from jingu.model.part_spec import Rows, styles
from jingu.model.short_conv import Convolution, convolve

# Added to the sum of squares of a key or query before its root is taken, as in all published models.
NORM_EPSILON = 1e-6

# The fastest chunk size of decays per channel on CPU, and the tokens of a block within which they are computed pair by
# pair.
PER_CHANNEL_CHUNK_SIZE = 32
BLOCK_SIZE = 8


def chunked_delta_rule(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    starts_BT: Tensor | None = None,
    state_BHKV: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule chunk by chunk.

    Within a chunk, what each token writes depends on what the tokens before it wrote. This is a unit lower-triangular
    system of equations (Yang et al., 2024, "Parallelizing Linear Transformers with the Delta Rule").

    Args:
        log_decay_BTH: g, the logarithm of the decay, at most 0; [B, T, H, K] if each channel of a key has its own.
        beta_BTH: β, how much of its value a token writes. Between 1 and 2 the state may change its sign.
        starts_BT: whether a document starts at a token, with an empty state; None: nowhere.
        state_BHKV: the state before the first token; None: empty.

    Returns:
        The outputs [B, T, H, V] in the dtype of the values, and the state [B, H, K, V] after the last token in fp32
        (in fp64 if the inputs are fp64).
    """
    chunks = Chunks.of(starts_BT, chunk_size)
    # Split everything into chunks [N, B, H, C, …] of fp32 numbers.
    q, k = _prepare(q_BTGK, k_BTGK, v_BTHV.shape[2])
    beta_BTH1, log_decay_BTHK = _with_channels(beta_BTH), _with_channels(log_decay_BTH)
    q, k, v, beta, log_decay = (
        split_chunks(x.to(q.dtype), chunk_size).transpose(2, 3).contiguous()
        for x in (q, k, v_BTHV, beta_BTH1, log_decay_BTHK)
    )
    decays = Decays.of(log_decay, chunks)
    # Solve for what the tokens write: `writes` if the state before the chunk is empty, less `reads` times that state.
    k_beta = k * beta
    system, scores = _decayed_products((k_beta, q), k, log_decay, chunks)
    right = torch.cat((v * beta, k_beta * decays.from_state), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    writes, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    # Pass the state from chunk to chunk. (`unbind` instead of indices: the backward pass of each index would fill a
    # tensor of all chunks, and the time grow with the square of the length.)
    state = _initial_state(state_BHKV, k[0], v[0])
    states, values = [], []
    k_to_state = (k * decays.to_state).transpose(3, 4)
    for parts in zip(writes.unbind(), reads.unbind(), k_to_state.unbind(), decays.across.unbind(), strict=True):
        write, read, key, across = parts
        states.append(state)
        values.append(write - read @ state)
        state = state * across + key @ values[-1]
    # Read from the state before the chunk, and from what the tokens of the chunk wrote.
    y_NBHCV = (q * decays.from_state) @ torch.stack(states) + scores @ torch.stack(values)
    return join_chunks(y_NBHCV.transpose(2, 3), v_BTHV.shape[1]).to(v_BTHV.dtype), state


def recurrent_delta_rule(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    starts_BT: Tensor | None = None,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule token by token. Arguments and results are those of `chunked_delta_rule`."""
    q, k = _prepare(q_BTGK, k_BTGK, v_BTHV.shape[2])
    v, beta, log_decay = (x.to(q.dtype) for x in (v_BTHV, _with_channels(beta_BTH), _with_channels(log_decay_BTH)))
    decay_BTHK1 = log_decay.exp().unsqueeze(-1)
    state = _initial_state(state_BHKV, k.transpose(1, 2), v.transpose(1, 2))
    outputs = []
    for token in range(q.shape[1]):
        if starts_BT is not None:
            state = state.masked_fill(starts_BT[:, token, None, None, None], 0)
        state = state * decay_BTHK1[:, token]
        # Read for key and query at once, because reading the state takes most of the time. The query also reads what
        # the token writes.
        key, query = k[:, token], q[:, token]
        predicted, read = (torch.stack((key, query), 2) @ state).unbind(2)
        write = (v[:, token] - predicted) * beta[:, token]
        outputs.append(read + (query * key).sum(-1, keepdim=True) * write)
        state = torch.addcmul(state, key.unsqueeze(-1), write.unsqueeze(-2))
    return torch.stack(outputs, 1).to(v_BTHV.dtype), state


def _with_channels(x: Tensor) -> Tensor:
    """Return [B, T, H, K], where K is 1 for [B, T, H]."""
    return x if x.dim() == 4 else x.unsqueeze(-1)


def _prepare(q_BTGK: Tensor, k_BTGK: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return normalized queries and keys [B, T, H, K] in at least fp32, queries divided by √K."""
    wide = wide_dtype(q_BTGK)
    q, k = (x.to(wide) for x in (q_BTGK, k_BTGK))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON) for x in (q, k))
    repeats = heads // q.shape[2]
    q, k = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def _initial_state(state_BHKV: Tensor | None, k_BHTK: Tensor, v_BHTV: Tensor) -> Tensor:
    """Return the state before the first token, zeros by default, in the dtype of the computation."""
    if state_BHKV is not None:
        return state_BHKV.to(k_BHTK.dtype)
    return k_BHTK.new_zeros(*k_BHTK.shape[:2], k_BHTK.shape[-1], v_BHTV.shape[-1])


def _decayed_products(
    lefts: tuple[Tensor, ...], right_NBHCK: Tensor, log_decay_NBHCK: Tensor, chunks: Chunks
) -> list[Tensor]:
    """Return for each of `lefts` [N, B, H, C, K] its products [N, B, H, C, C] with the decayed vectors of `right`.

    The products of hidden pairs are zero.
    """
    if log_decay_NBHCK.shape[-1] > 1:
        return _products_per_channel(lefts, right_NBHCK, log_decay_NBHCK, chunks)
    pairs = decay(pair_sums(log_decay_NBHCK), chunks.hidden_pairs(right_NBHCK.device)).squeeze(-1)
    return [left @ right_NBHCK.transpose(3, 4) * pairs for left in lefts]


def _products_per_channel(
    lefts: tuple[Tensor, ...], right_NBHCK: Tensor, log_decay_NBHCK: Tensor, chunks: Chunks
) -> list[Tensor]:
    """Return `_decayed_products` for decays per channel.

    Decays from the start of the chunk cannot be divided by each other, since they may underflow. Pairs of one block of
    W tokens are therefore computed channel by channel, and pairs of different blocks by matmuls in which both sides
    decay to the border before the later block.
    """
    width = gcd(BLOCK_SIZE, chunks.size)
    blocks = (chunks.size // width, width)
    hidden = chunks.hidden_pairs(right_NBHCK.device)
    log_decay = log_decay_NBHCK.unflatten(3, blocks)  # [N, B, H, blocks, W, K]
    left = torch.stack(lefts, -1).unflatten(3, blocks)  # [N, B, H, blocks, W, K, lefts]
    # Pairs of one block.
    hidden_within = hidden.unflatten(4, blocks).unflatten(3, blocks).diagonal(0, 3, 5).movedim(-1, 3)
    right_within = decay(pair_sums(log_decay), hidden_within) * right_NBHCK.unflatten(3, blocks).unsqueeze(4)
    within = right_within @ left  # [N, B, H, blocks, W, W, lefts]
    # Decays from the last token before each block but the first, its border, to the tokens of the block.
    border = torch.arange(width, chunks.size, width, device=hidden.device) - 1
    hidden_left = hidden[..., border].unflatten(3, blocks)[:, :, :, 1:].diagonal(0, 3, 5).movedim(-1, 3)
    left = left[:, :, :, 1:] * decay(log_decay[:, :, :, 1:].cumsum(4), hidden_left).unsqueeze(-1)
    # Decays from each token to each border: to the end of the token's block, and over the blocks between.
    over_blocks = pair_sums(log_decay.sum(4))[:, :, :, :-1].unsqueeze(5)
    log_to_border = (over_blocks + sum_to_end(log_decay).unsqueeze(3)).flatten(4, 5)
    right = (right_NBHCK.unsqueeze(3) * decay(log_to_border, hidden[:, :, :, border])).transpose(4, 5)
    # Add both kinds of pairs to one matrix.
    diagonal = torch.eye(blocks[0], dtype=right.dtype, device=right.device)[:, None, :, None]
    return [
        F.pad(left_products @ right, (0, 0, 0, 0, 1, 0))
        .add((within_products.unsqueeze(5) * diagonal).flatten(5))
        .flatten(3, 4)
        for left_products, within_products in zip(left.unbind(-1), within.unbind(-1), strict=True)
    ]


class GatedDeltaMixer(Mixer):
    """A mixer around the gated delta rule: projections, convolutions, decays, and a norm with a gate.

    The numbers of heads follow from the weights: under tensor parallelism a rank holds only some of them.

    Attributes:
        chunk_size: tokens of a chunk. A sequence that is divided between chunks gets the same numbers, to the bit.
        kernel: computes many tokens in place of `chunked_delta_rule`, if it is set; see `mixer_kernels.py`.
    """

    kernel: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __init__(self, spec: GatedDelta, rows: Rows) -> None:
        super().__init__()
        self.spec = spec
        self.chunk_size = PER_CHANNEL_CHUNK_SIZE if spec.decay_per_channel else CHUNK_SIZE
        self.sharding = styles(rows)
        self.q, self.k, self.v, self.gate, self.decay, self.beta, self.output = (
            build_linear(rows[name]) for name in ("q", "k", "v", "gate", "decay", "beta", "output")
        )
        self.q_conv, self.k_conv, self.v_conv = (Convolution(rows[f"{name}_conv"]) for name in "qkv")
        self.gate_down, self.decay_down = (
            build_linear(rows[name]) if name in rows else None for name in ("gate_down", "decay_down")
        )
        self.log_rate, self.decay_bias = Vector(rows["log_rate"]), Vector(rows["decay_bias"])
        self.norm = GatedNorm(rows["norm"], spec.eps, spec.gate_activation, gate_first=False)

    def project(self, x_BTD: Tensor) -> tuple[list[Tensor], Tensor]:
        beta = apply_batch_invariant(torch.sigmoid, self.beta(x_BTD).to(wide_dtype(x_BTD)))
        beta = 2 * beta if self.spec.negative_eigenvalues else beta
        gate = self.gate(x_BTD if self.gate_down is None else self.gate_down(x_BTD))
        return [self.q(x_BTD), self.k(x_BTD), self.v(x_BTD), self.log_decays(x_BTD), beta], gate

    def mix(
        self, parts: list[Tensor], starts_BT: Tensor | None, state: MixerState | None, decode: bool
    ) -> tuple[Tensor, MixerState]:
        before = MixerState() if state is None else state
        convolutions = (self.q_conv, self.k_conv, self.v_conv)
        convolved, conv_state = convolve(parts[:3], convolutions, starts_BT, before.conv)
        sizes = (self.spec.key_head_dim, self.spec.key_head_dim, self.spec.value_head_dim)
        q, k, v = (x.unflatten(-1, (-1, size)) for x, size in zip(convolved, sizes, strict=True))
        chunked = self.kernel or partial(chunked_delta_rule, chunk_size=self.chunk_size)
        form = recurrent_delta_rule if decode else chunked
        y_BTHV, recurrent = form(q, k, v, parts[3], parts[4], starts_BT, before.recurrent)
        return y_BTHV, MixerState(conv_state, recurrent)

    def finish(self, y_BTHV: Tensor, gate: Tensor) -> Tensor:
        return self.output(self.norm(y_BTHV, gate.view(y_BTHV.shape)).flatten(2))

    def log_decays(self, x_BTD: Tensor) -> Tensor:
        """Return the logarithms of the decays, [B, T, H] or [B, T, H, K]."""
        projected = self.decay(x_BTD if self.decay_down is None else self.decay_down(x_BTD))
        dtype = wide_dtype(x_BTD)
        wide, rate = projected.to(dtype) + self.decay_bias().to(dtype), self.log_rate().to(dtype).exp()
        if self.spec.decay_per_channel:
            wide, rate = wide.unflatten(-1, (-1, self.spec.key_head_dim)), rate.unsqueeze(-1)
        if self.spec.decay_bound is not None:
            return self.spec.decay_bound * apply_batch_invariant(torch.sigmoid, rate * wide)
        return -rate * apply_batch_invariant(F.softplus, wide)
