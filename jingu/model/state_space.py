"""The state space of Mamba-2 (Dao and Gu, 2024): a recurrence that is linear in its state, with a decay per token.

The state S of a head maps the S channels of b and c to the P channels of x:

    S ← exp(Δ · A) · S + b ⊗ Δ x;  y = Sᵀ c + D x

Two forms compute the same: chunk by chunk for training and prompts, and token by token for decoding.

Shapes: B rows, T tokens, H heads in G groups (the R = H / G heads of a group share b and c), P head size, S state size,
D hidden size, E channels, N chunks, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.model.chunked_scan import CHUNK_SIZE, Chunks, Decays, decay, join_chunks, pair_sums, split_chunks, wide_dtype
from jingu.model.layers import Vector, apply_batch_invariant, build_linear
from jingu.model.mixer_parts import GatedNorm, Mixer, MixerState
from jingu.model.mixer_specs import StateSpace
from jingu.model.part_spec import Rows, styles
from jingu.model.short_conv import Convolution, convolve


class StateSpaceInputs(NamedTuple):
    """The inputs of the recurrence.

    Attributes:
        x: [B, T, H, P] what is written to the state.
        step: [B, T, H] Δ, the length of each step, at least 0; see `step_lengths`.
        b: [B, T, G, S] how x is written.
        c: [B, T, G, S] how the state is read.
        rate: [H] A, the rate of the decay, below 0.
        skip: [H] D, the factor of x in the output; None: zero.
    """

    x: Tensor
    step: Tensor
    b: Tensor
    c: Tensor
    rate: Tensor
    skip: Tensor | None = None


def step_lengths(projected_BTH: Tensor, bias_H: Tensor, limits: tuple[float, float] = (0.0, float("inf"))) -> Tensor:
    """Return Δ = softplus(projected + bias) within `limits`, in at least fp32."""
    wide = wide_dtype(projected_BTH)
    return apply_batch_invariant(F.softplus, projected_BTH.to(wide) + bias_H.to(wide)).clamp(*limits)


def chunked_state_space(
    inputs: StateSpaceInputs,
    starts_BT: Tensor | None = None,
    state_BHSP: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence chunk by chunk ("state space duality": within a chunk it is attention without softmax).

    Args:
        starts_BT: whether a document starts at a token, with an empty state; None: nowhere.
        state_BHSP: the state before the first token; None: empty.

    Returns:
        The outputs [B, T, H, P] in the dtype of x, and the state [B, H, S, P] after the last token in fp32 (in fp64 if
        the inputs are fp64).
    """
    wide = wide_dtype(inputs.x)
    step_BTH1 = inputs.step.to(wide).unsqueeze(-1)
    log_decay_BTH1 = step_BTH1 * inputs.rate.to(wide).unsqueeze(-1)
    x_BTHP = inputs.x.to(wide)
    # Split everything into chunks. Heads stay within their group [G, R].
    groups = (inputs.b.shape[2], -1)
    chunks = Chunks.of(starts_BT, chunk_size)
    log_decay_NBHC1 = split_chunks(log_decay_BTH1, chunk_size).transpose(2, 3)
    decays = Decays.of(log_decay_NBHC1, chunks)
    x_NBGRCP = split_chunks(x_BTHP * step_BTH1, chunk_size).transpose(2, 3).unflatten(2, groups)
    b_NBGCS, c_NBGCS = (split_chunks(x.to(wide), chunk_size).transpose(2, 3) for x in (inputs.b, inputs.c))
    # Pairs of tokens of a chunk.
    pairs_NBHCC = decay(pair_sums(log_decay_NBHC1), chunks.hidden_pairs(x_BTHP.device)).squeeze(-1)
    scores_NBGCC = c_NBGCS @ b_NBGCS.transpose(3, 4)
    y_NBGRCP = (scores_NBGCC.unsqueeze(3) * pairs_NBHCC.unflatten(2, groups)) @ x_NBGRCP
    # What each chunk adds to the state, for all heads of a group in one matmul; then the states before the chunks.
    to_end_NBGCRP = (x_NBGRCP * decays.to_state.unflatten(2, groups)).transpose(3, 4)
    added_NBGSRP = (b_NBGCS.transpose(3, 4) @ to_end_NBGCRP.flatten(4)).unflatten(4, to_end_NBGCRP.shape[4:])
    across_NBG1R1 = decays.across.squeeze(-1).unflatten(2, groups).unsqueeze(3)
    if state_BHSP is None:
        state_BGSRP = torch.zeros_like(added_NBGSRP[0])
    else:
        state_BGSRP = state_BHSP.to(wide).unflatten(1, groups).transpose(2, 3)
    states = []
    for added, across in zip(added_NBGSRP.unbind(), across_NBG1R1.unbind(), strict=True):
        states.append(state_BGSRP)
        state_BGSRP = state_BGSRP * across + added
    # Read the state before the chunk.
    read_NBGCRP = (c_NBGCS @ torch.stack(states).flatten(4)).unflatten(4, to_end_NBGCRP.shape[4:])
    y_NBGRCP = y_NBGRCP + read_NBGCRP.transpose(3, 4) * decays.from_state.unflatten(2, groups)
    y_BTHP = join_chunks(y_NBGRCP.flatten(2, 3).transpose(2, 3), x_BTHP.shape[1])
    return add_skip(y_BTHP, x_BTHP, inputs), state_BGSRP.transpose(2, 3).flatten(1, 2)


def recurrent_state_space(
    inputs: StateSpaceInputs, starts_BT: Tensor | None = None, state_BHSP: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token. Arguments and results are those of `chunked_state_space`."""
    wide = wide_dtype(inputs.x)
    step_BTH1, x_BTHP = inputs.step.to(wide).unsqueeze(-1), inputs.x.to(wide)
    decay_BTH1 = (step_BTH1 * inputs.rate.to(wide).unsqueeze(-1)).exp()
    repeats = x_BTHP.shape[2] // inputs.b.shape[2]
    b_BTHS, c_BTHS = (x.to(wide).repeat_interleave(repeats, 2) for x in (inputs.b, inputs.c))
    written_BTHP = x_BTHP * step_BTH1
    if state_BHSP is None:
        state_BHSP = x_BTHP.new_zeros(len(x_BTHP), x_BTHP.shape[2], b_BTHS.shape[-1], x_BTHP.shape[-1])
    state = state_BHSP.to(wide)
    outputs = []
    for token in range(x_BTHP.shape[1]):
        if starts_BT is not None:
            state = state.masked_fill(starts_BT[:, token, None, None, None], 0)
        state = state * decay_BTH1[:, token].unsqueeze(-1)
        state = torch.addcmul(state, b_BTHS[:, token].unsqueeze(-1), written_BTHP[:, token].unsqueeze(-2))
        outputs.append((c_BTHS[:, token].unsqueeze(-2) @ state).squeeze(-2))
    return add_skip(torch.stack(outputs, 1), x_BTHP, inputs), state


def add_skip(y_BTHP: Tensor, x_BTHP: Tensor, inputs: StateSpaceInputs) -> Tensor:
    """Return y + D x in the dtype of the inputs."""
    if inputs.skip is not None:
        y_BTHP = torch.addcmul(y_BTHP, x_BTHP, inputs.skip.to(x_BTHP.dtype).unsqueeze(-1))
    return y_BTHP.to(inputs.x.dtype)


class StateSpaceMixer(Mixer):
    """A Mamba-2 mixer: projections, convolutions, the recurrence, and a norm with a gate.

    The numbers of heads and groups follow from the weights: under tensor parallelism a rank holds only some of them.

    Attributes:
        chunk_size: tokens of a chunk. A sequence that is divided between chunks gets the same numbers, to the bit.
        kernel: computes many tokens in place of `chunked_state_space`, if it is set; see `mixer_kernels.py`.
    """

    kernel: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __init__(self, spec: StateSpace, rows: Rows) -> None:
        super().__init__()
        self.spec, self.chunk_size = spec, CHUNK_SIZE
        self.sharding = styles(rows)
        self.gate, self.x, self.b, self.c, self.step, self.output = (
            build_linear(rows[name]) for name in ("gate", "x", "b", "c", "step", "output")
        )
        self.x_conv, self.b_conv, self.c_conv = (Convolution(rows[f"{name}_conv"]) for name in "xbc")
        self.step_bias, self.log_rate, self.skip = (Vector(rows[name]) for name in ("step_bias", "log_rate", "skip"))
        gate_first = spec.norm == "behind_gate"
        self.norm = GatedNorm(rows["norm"], spec.eps, "silu", gate_first=gate_first) if "norm" in rows else None

    def project(self, x_BTD: Tensor) -> tuple[list[Tensor], Tensor]:
        x_BTD = _scale(x_BTD, self.spec.input_scale)
        projections = zip((self.gate, self.x, self.b, self.c, self.step), self.spec.part_scales, strict=True)
        gate, *parts = (_scale(projection(x_BTD), scale) for projection, scale in projections)
        return parts, gate

    def mix(
        self, parts: list[Tensor], starts_BT: Tensor | None, state: MixerState | None, decode: bool
    ) -> tuple[Tensor, MixerState]:
        spec, before = self.spec, MixerState() if state is None else state
        (x, b, c), conv_state = convolve(parts[:3], (self.x_conv, self.b_conv, self.c_conv), starts_BT, before.conv)
        low, high = spec.step_limits
        inputs = StateSpaceInputs(
            x.unflatten(-1, (-1, spec.head_dim)),
            step_lengths(parts[3], self.step_bias(), (low, float("inf") if high is None else high)),
            b.unflatten(-1, (-1, spec.state_size)),
            c.unflatten(-1, (-1, spec.state_size)),
            -self.log_rate().to(wide_dtype(x)).exp(),
            self.skip(),
        )
        chunked = self.kernel or partial(chunked_state_space, chunk_size=self.chunk_size)
        form = recurrent_state_space if decode else chunked
        y_BTHP, recurrent = form(inputs, starts_BT, before.recurrent)
        return y_BTHP, MixerState(conv_state, recurrent)

    def finish(self, y_BTHP: Tensor, gate: Tensor) -> Tensor:
        y_BTE = y_BTHP.flatten(2)
        if self.norm is None:
            y_BTE = y_BTE * apply_batch_invariant(F.silu, gate)
        else:
            # Each group of heads has a norm of its own.
            groups = (-1, self.spec.head_dim * self.spec.num_heads // self.spec.num_groups)
            y_BTE = self.norm(y_BTE.unflatten(-1, groups), gate.unflatten(-1, groups)).flatten(2)
        return _scale(self.output(y_BTE), self.spec.output_scale)


def _scale(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
