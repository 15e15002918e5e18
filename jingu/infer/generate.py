"""The scores of a next token, a row at a time or several.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jingu.infer.cache import StaticCache
from jingu.model.products import linear
from jingu.parallel.pipeline import Model
from jingu.runtime.device import eager


@torch.no_grad()
def next_logits(model: Model, tokens_BT: Tensor, cache: StaticCache, source_BS: Tensor | None = None) -> Tensor:
    """Scores [B, V] of the token after these; only the last position goes through the head. A model with an encoder
    needs the source with the first tokens.

    The head is applied inside the model's forward, where an engine that shards parameters has gathered its weight.
    """

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        return linear(hidden_BTD[:, -1], weight_VD)

    source = {} if source_BS is None else {"source_BS": source_BS}
    with eager():
        scores: Tensor = model(tokens_BT, cache=cache, loss=head, **source)
    return scores
