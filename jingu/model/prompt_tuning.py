"""Trained prompts: virtual tokens with trained vectors, or with trained keys and values in each block.

The ids of virtual tokens follow those of the vocabulary. Like other tokens, they have places in a row, positions, and
entries of the KV cache. Masks, layouts and generation therefore need no special case.

Shapes: B rows, T tokens, N virtual tokens, D hidden size, F hidden size of the encoder, G key-value heads, K head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jingu.model.adapter_specs import DeepPrompt, SoftPrompt
from jingu.model.components import LayerSpec
from jingu.model.layers import Embedding, Linear
from jingu.model.sharding_table import ShardingTable
from jingu.model.spec import ModelSpec


class VirtualTokenEmbedding(Embedding):
    """An embedding that returns zeros for virtual tokens."""

    def forward(self, input: Tensor) -> Tensor:
        in_vocabulary_BT = input < self.num_embeddings
        return super().forward(input.where(in_vocabulary_BT, 0)) * in_vocabulary_BT.unsqueeze(-1)


class SoftPromptLayer(nn.Module):
    """The vectors of virtual tokens: trained directly, or computed by a network (`encoder`) from trained vectors."""

    def __init__(self, adapter: SoftPrompt, spec: ModelSpec) -> None:
        super().__init__()
        width, hidden = spec.hidden_size, adapter.encoder_hidden_size
        self.first = spec.vocab_size
        self.embedding = Embedding(adapter.num_virtual_tokens, width)
        self.lstm = Lstm(width, hidden) if adapter.encoder == "lstm" else None
        sizes = {"none": [], "mlp": [width, hidden, hidden, width], "lstm": [2 * hidden, 2 * hidden, width]}
        of_layers = sizes[adapter.encoder]
        self.layers = nn.ModuleList(Linear(a, b) for a, b in pairwise(of_layers))

    def vectors(self) -> Tensor:
        """Return the vectors [N, D] of all virtual tokens."""
        x_ND = self.embedding.weight
        if self.lstm is not None:
            x_ND = self.lstm(x_ND)
        for number, layer in enumerate(self.layers):
            x_ND = layer(F.relu(x_ND) if number else x_ND)
        return x_ND

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return [B, T, D]: the vectors of virtual tokens, and zeros for all other tokens."""
        place_BT = tokens_BT - self.first
        return F.embedding(place_BT.clamp_min(0), self.vectors()) * (place_BT >= 0).unsqueeze(-1)


class Lstm(nn.Module):
    """A bidirectional LSTM of two layers. It replaces `nn.LSTM`, whose flat list of weights FSDP cannot shard."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        for layer, inputs in enumerate((width, 2 * hidden)):
            for way in ("", "_reverse"):
                shapes = {"weight_ih": (4 * hidden, inputs), "weight_hh": (4 * hidden, hidden)}
                for name, shape in {**shapes, "bias_ih": (4 * hidden,), "bias_hh": (4 * hidden,)}.items():
                    self.register_parameter(f"{name}_l{layer}{way}", nn.Parameter(torch.empty(shape)))

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return hidden states [N, 2F]."""
        # One state per layer and direction. The flags: biases, 2 layers, no dropout, not in training, bidirectional,
        # batch first.
        start = x_ND.new_zeros(4, 1, self.hidden)
        weights: list[Tensor] = list(self.parameters())
        y_1NF: Tensor = torch.lstm(x_ND.unsqueeze(0), (start, start), weights, True, 2, 0.0, False, True, True)[0]
        return y_1NF.squeeze(0)


class DeepPromptLayer(nn.Module):
    """Keys and values of virtual tokens in one block: trained directly, or computed by a network in the block."""

    sharding: ShardingTable

    def __init__(self, adapter: DeepPrompt, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        self.sharding = {"k": "kv_heads", "v": "kv_heads"}
        self.first, self.head_size = spec.vocab_size, layer.attention.head_dim
        outputs = layer.attention.num_kv_heads * self.head_size
        has_encoder = adapter.encoder_hidden_size is not None
        self.embedding = Embedding(adapter.num_virtual_tokens, spec.hidden_size) if has_encoder else None
        self.up = (
            Linear(spec.hidden_size, adapter.encoder_hidden_size) if adapter.encoder_hidden_size is not None else None
        )
        # Keys and values that are trained directly are the columns of these matrices.
        self.k, self.v = (
            Linear(adapter.encoder_hidden_size or adapter.num_virtual_tokens, outputs, bias=has_encoder)
            for _ in range(2)
        )

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, G, K] of this rank's heads."""
        if self.up is None or self.embedding is None:
            keys_and_values = self.k.weight.t(), self.v.weight.t()
        else:
            x_NF = self.up(self.embedding.weight).tanh()
            keys_and_values = self.k(x_NF), self.v(x_NF)
        k_NGK, v_NGK = (self.own_heads(x.unflatten(-1, (-1, self.head_size))) for x in keys_and_values)
        return k_NGK, v_NGK

    def own_heads(self, x_NGK: Tensor) -> Tensor:
        """Return the heads that attention computes on this rank. Ulysses context parallelism replaces this method."""
        return x_NGK

    def forward(self, k_BTGK: Tensor, v_BTGK: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values in which those of virtual tokens are replaced by trained ones."""
        place_BT = tokens_BT - self.first
        is_virtual = (place_BT >= 0)[:, :, None, None]
        k, v = (
            torch.where(is_virtual, own_NGK.to(x.dtype)[place_BT.clamp_min(0)], x)
            for own_NGK, x in zip(self.keys_and_values(), (k_BTGK, v_BTGK), strict=True)
        )
        return k, v
