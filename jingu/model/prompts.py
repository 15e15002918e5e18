"""Trained prompts: tokens whose ids follow those of the vocabulary, and that have vectors, or keys and values, of
their own.

As tokens they have places in a row, positions, and entries of a cache like any other: masks, layouts and generation
need not know of them.

Shapes: B rows, T tokens, N prompt tokens, D width, F hidden, G key-value heads, K head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jingu.model.layers import Embedding, Linear
from jingu.model.sharding import Table
from jingu.model.spec import DeepPrompt, ModelSpec, SoftPrompt


class PromptedEmbedding(Embedding):
    """A table of vectors; of prompt tokens it gives zeros."""

    def forward(self, input: Tensor) -> Tensor:
        known = input < self.num_embeddings
        return super().forward(input.where(known, 0)) * known.unsqueeze(-1)


class SoftPromptLayer(nn.Module):
    """Vectors of prompt tokens: trained ones, or what a network makes of them."""

    def __init__(self, adapter: SoftPrompt, spec: ModelSpec) -> None:
        super().__init__()
        width, hidden = spec.width, adapter.hidden
        self.first = spec.vocabulary
        self.embedding = Embedding(adapter.tokens, width)
        self.lstm = Lstm(width, hidden) if adapter.encoder == "lstm" else None
        sizes = {"none": [], "mlp": [width, hidden, hidden, width], "lstm": [2 * hidden, 2 * hidden, width]}
        of_layers = sizes[adapter.encoder]
        self.layers = nn.ModuleList(Linear(a, b) for a, b in pairwise(of_layers))

    def vectors(self) -> Tensor:
        """[N, D]."""
        x_ND = self.embedding.weight
        if self.lstm is not None:
            x_ND = self.lstm(x_ND)
        for number, layer in enumerate(self.layers):
            x_ND = layer(F.relu(x_ND) if number else x_ND)
        return x_ND

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """[B, T, D]: the vectors of prompt tokens, and zeros for text."""
        place_BT = tokens_BT - self.first
        return F.embedding(place_BT.clamp_min(0), self.vectors()) * (place_BT >= 0).unsqueeze(-1)


class Lstm(nn.Module):
    """Two layers in both directions (torch's own, which keeps its weights where engines that shard do not look)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        for layer, inputs in enumerate((width, 2 * hidden)):
            for way in ("", "_reverse"):
                shapes = {"weight_ih": (4 * hidden, inputs), "weight_hh": (4 * hidden, hidden)}
                for name, shape in {**shapes, "bias_ih": (4 * hidden,), "bias_hh": (4 * hidden,)}.items():
                    self.register_parameter(f"{name}_l{layer}{way}", nn.Parameter(torch.empty(shape)))

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, 2F]."""
        start = x_ND.new_zeros(4, 1, self.hidden)
        weights: list[Tensor] = list(self.parameters())
        y_1NF: Tensor = torch.lstm(x_ND.unsqueeze(0), (start, start), weights, True, 2, 0.0, False, True, True)[0]
        return y_1NF.squeeze(0)


class DeepPromptLayer(nn.Module):
    """Keys and values of prompt tokens in one block: trained ones, or what a network of the block's own makes of
    trained vectors."""

    SHARDING: ClassVar[Table] = {"k": "kv_heads", "v": "kv_heads"}

    def __init__(self, adapter: DeepPrompt, spec: ModelSpec) -> None:
        super().__init__()
        self.first, self.head_size = spec.vocabulary, spec.attention.head_size
        outputs = spec.attention.kv_heads * self.head_size
        made = adapter.hidden is not None
        self.embedding = Embedding(adapter.tokens, spec.width) if made else None
        self.up = Linear(spec.width, adapter.hidden) if adapter.hidden is not None else None
        # Trained themselves, they are the matrices' columns.
        self.k, self.v = (Linear(adapter.hidden or adapter.tokens, outputs, bias=made) for _ in range(2))

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """[N, G, K] each, of this rank's heads."""
        if self.up is None or self.embedding is None:
            found = self.k.weight.t(), self.v.weight.t()
        else:
            x_NF = self.up(self.embedding.weight).tanh()
            found = self.k(x_NF), self.v(x_NF)
        k_NGK, v_NGK = (self.own_heads(x.unflatten(-1, (-1, self.head_size))) for x in found)
        return k_NGK, v_NGK

    def own_heads(self, x_NGK: Tensor) -> Tensor:
        """Those of the heads at hand that attention computes with."""
        return x_NGK

    def forward(self, k_BTGK: Tensor, v_BTGK: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, those of prompt tokens replaced."""
        place_BT = tokens_BT - self.first
        here = (place_BT >= 0)[:, :, None, None]
        k, v = (
            torch.where(here, own_NGK.to(x.dtype)[place_BT.clamp_min(0)], x)
            for own_NGK, x in zip(self.keys_and_values(), (k_BTGK, v_BTGK), strict=True)
        )
        return k, v
