"""What mixers with a state share: the state, the order of computations, and norms with a gate.

Shapes: B rows, T tokens, D hidden size, E channels, L taps (the kernel length), H heads or groups of heads, V channels
of each, P pieces of a row, M pieces that are computed together, Q tokens of such a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from jingu.model.chunked_scan import wide_dtype
from jingu.model.inputs import LayerKVCache
from jingu.model.layers import apply_batch_invariant
from jingu.model.part_spec import ModuleRow


class MixerState(NamedTuple):
    """What a mixer remembers of the tokens before. It can be copied, stored, and continued from at any token.

    Attributes:
        conv: [B, L − 1, E] the last inputs of the convolutions, in the dtype of the hidden states; None: zeros.
        recurrent: [B, H, …] the state of the recurrence, at least in fp32; None: zeros, or the mixer has none.
    """

    conv: Tensor | None = None
    recurrent: Tensor | None = None


class Mixer(nn.Module):
    """A mixer with a state. Only `mix` combines tokens; the other methods compute every token by itself."""

    def project(self, x_BTD: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the tensors [B, T, …] that are mixed, and the gate of the outputs."""
        raise NotImplementedError

    def mix(
        self, parts: list[Tensor], starts_BT: Tensor | None, state: MixerState | None, decode: bool
    ) -> tuple[Tensor, MixerState]:
        """Return the outputs [B, T, …], and the state after the last token. Arguments are those of `forward`."""
        raise NotImplementedError

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the hidden states [B, T, D] of gated outputs."""
        raise NotImplementedError

    def forward(
        self,
        x_BTD: Tensor,
        starts_BT: Tensor | None = None,
        state: MixerState | None = None,
        decode: bool = False,
        document_parents: tuple[Tensor, Tensor] | None = None,
        cache: LayerKVCache | None = None,
    ) -> tuple[Tensor, MixerState]:
        """Return the mixed hidden states [B, T, D], and the state after the last token.

        Args:
            starts_BT: whether a document starts at a token; None: nowhere.
            state: the state before the first token; None: empty.
            decode: whether to compute token by token instead of chunk by chunk.
            document_parents: [B, T] the document of each token, and the document that it continues, if some continue
                others. Then no state is returned.
            cache: has the states of the sequences of a step of generation, and stores the new ones.
        """
        if cache is not None:
            return cache.mix(self, x_BTD), MixerState()
        parts, gate = self.project(x_BTD)
        if document_parents is not None:
            return self.finish(mix_with_parents(self, parts, *document_parents), gate), MixerState()
        y, state = self.mix(parts, starts_BT, state, decode)
        return self.finish(y, gate), state


class RowPiece(NamedTuple):
    """Adjacent tokens of one sequence in a row of several sequences.

    Attributes:
        length: number of tokens.
        decode: whether they are computed token by token, as generated tokens are.
    """

    length: int
    decode: bool


def mix_pieces(
    mixer: Mixer, parts: list[Tensor], pieces: Sequence[RowPiece], state: MixerState
) -> tuple[Tensor, MixerState]:
    """Return the outputs [1, T, …] and states of the pieces that together form a row, each with a state of its own.

    Pieces that are alike are computed together.

    Args:
        parts: [1, T, …] tensors of the row.
        state: the state before each piece: all tensors are [P, …].
    """
    device = parts[0].device
    numbers: dict[RowPiece, list[int]] = {}
    for number, piece in enumerate(pieces):
        numbers.setdefault(piece, []).append(number)
    first_P = torch.tensor([0, *(piece.length for piece in pieces)], device=device).cumsum(0)
    outputs, places, states, order = [], [], [], []
    for piece, alike in numbers.items():
        number_M = torch.tensor(alike, device=device)
        place_MQ = first_P[number_M].unsqueeze(1) + torch.arange(piece.length, device=device)
        before = MixerState(*(None if part is None else part[number_M] for part in state))
        y_MQ, after = mixer.mix([part[0, place_MQ] for part in parts], None, before, piece.decode)
        outputs.append(y_MQ.flatten(0, 1))
        places.append(place_MQ.flatten())
        states.append(after)
        order.append(number_M)
    # Bring tokens and states back into their order.
    y_T = torch.cat(outputs)[torch.cat(places).argsort()]
    number_P = torch.cat(order).argsort()
    tensors = [None if part[0] is None else torch.cat(part)[number_P] for part in zip(*states, strict=True)]
    return y_T.unsqueeze(0), MixerState(*tensors)


def mix_with_parents(mixer: Mixer, parts: list[Tensor], documents_BT: Tensor, parents_BT: Tensor) -> Tensor:
    """Return the outputs [B, T, …] of documents that may continue another one of their row, as described in `Inputs`.

    All documents that continue a parent start from its state. They are computed together, padded to the longest one.
    Parents must be in the row, unless they have no tokens: then those that continue them start from an empty state.
    """
    rows = []
    for row, (document_T, parent_T) in enumerate(zip(documents_BT, parents_BT, strict=True)):
        # Where each document stands, and those that continue each parent.
        numbers, counts = torch.unique_consecutive(document_T, return_counts=True)
        lasts = counts.cumsum(0).tolist()
        places = [slice(last - count, last) for last, count in zip(lasts, counts.tolist(), strict=True)]
        parents = [int(parent_T[place.start]) for place in places]
        documents = list(zip(numbers.tolist(), parents, places, strict=True))
        # Outputs by the place of their first token.
        outputs: dict[int, Tensor] = {}
        for number, parent, place in documents:
            if parent != number and parent in numbers:
                continue
            y, state = mixer.mix([part[row : row + 1, place] for part in parts], None, None, False)
            outputs[place.start] = y[0]
            # Documents that continue this one.
            children = [place for child, parent, place in documents if parent == number and child != number]
            if not children:
                continue
            padded = [pad_sequence([part[row, child] for child in children], batch_first=True) for part in parts]
            before = MixerState(*(None if x is None else x.expand(len(children), *x.shape[1:]) for x in state))
            y, _ = mixer.mix(padded, None, before, False)
            outputs |= {child.start: x[: child.stop - child.start] for child, x in zip(children, y, strict=True)}
        rows.append(torch.cat([outputs[start] for start in sorted(outputs)]))
    return torch.stack(rows)


class GatedNorm(nn.Module):
    """RMSNorm of each head or group of heads, multiplied by an activated gate before or behind the norm.

    All heads share a weight of V elements, or each has one of its own.
    """

    def __init__(self, row: ModuleRow, eps: float, activation: Literal["silu", "sigmoid"], *, gate_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(row.shape))
        self.eps, self.gate_first = eps, gate_first
        self.activation: Callable[[Tensor], Tensor] = F.silu if activation == "silu" else torch.sigmoid

    def forward(self, x_BTHV: Tensor, gate_BTHV: Tensor) -> Tensor:
        wide = wide_dtype(x_BTHV)
        gate = apply_batch_invariant(self.activation, gate_BTHV.to(wide))
        y = x_BTHV.to(wide)
        y = y * gate if self.gate_first else y
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        y = y * self.weight.to(wide).view(-1, y.shape[-1])
        return (y if self.gate_first else y * gate).to(gate_BTHV.dtype)
