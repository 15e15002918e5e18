"""Multi-token prediction (DeepSeek-V3, 2024): layers that predict tokens beyond the next one.

Shapes: B rows, T tokens, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jingu.model.attention import BlockContext
from jingu.model.inputs import LayerKVCache
from jingu.model.layers import build_linear, build_norm
from jingu.model.parts import prediction_rows
from jingu.model.spec import ModelSpec


class PredictionLayer(nn.Module):
    """Predicts one token further than the hidden states that it receives.

    Position t receives the hidden state of token t and the embedding of token t + 1. Embedding and head are those of
    the model.
    """

    def __init__(self, spec: ModelSpec, block: nn.Module) -> None:
        super().__init__()
        width = spec.hidden_size
        self.embedding_norm = build_norm(spec.norm, width)
        self.hidden_norm = build_norm(spec.norm, width)
        self.projection = build_linear(prediction_rows(spec)["projection"])
        self.block = block
        self.norm = build_norm(spec.norm, width)

    def forward(
        self, x_BTD: Tensor, embedded_BTD: Tensor, context: BlockContext, cache: LayerKVCache | None = None
    ) -> Tensor:
        """Return the hidden states [B, T, D], whose logits are those of the token after the embedded one.

        Args:
            x_BTD: hidden states of the model behind its final norm, or of the layer before.
            embedded_BTD: embedding of the token that follows each position.
        """
        joined = torch.cat((self.embedding_norm(embedded_BTD), self.hidden_norm(x_BTD)), -1)
        hidden_BTD = self.block(self.projection(joined), context, cache)[0]
        result: Tensor = self.norm(hidden_BTD)
        return result


def shift_left(x_BT: Tensor, places: int, fill: int) -> Tensor:
    """Return rows whose elements moved to the left, with `fill` in the last places."""
    return torch.nn.functional.pad(x_BT[:, places:], (0, places), value=fill)


def shift_labels(labels_BT: Tensor, documents_BT: Tensor | None, places: int, ignored: int) -> Tensor:
    """Return the labels of tokens that are `places` further, in the same document; others are `ignored`."""
    shifted_BT = shift_left(labels_BT, places, ignored)
    if documents_BT is None:
        return shifted_BT
    return shifted_BT.masked_fill(shift_left(documents_BT, places, -1) != documents_BT, ignored)
