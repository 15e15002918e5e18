"""The decoder: one forward for training, scoring and generation.

Shapes: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from jingu.model.attention import Cache, LayerCache, SelfAttention, attention_mask
from jingu.model.experts import ExpertsLayer, Routing
from jingu.model.layers import Embedding, FeedForwardLayer, Linear, make_norm
from jingu.model.products import linear
from jingu.model.rotary import Rotary, rotary_tables
from jingu.model.spec import Experts, LearnedPositions, ModelSpec, RotaryPositions

Head = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    """norm → attention → add; norm → feed-forward → add."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = make_norm(spec.norm, spec.width)
        self.attention = SelfAttention(spec)
        self.feed_forward_norm = make_norm(spec.norm, spec.width)
        part = spec.feed_forward
        self.feed_forward = (
            ExpertsLayer(part, spec.width) if isinstance(part, Experts) else FeedForwardLayer(part, spec.width)
        )

    def forward(
        self, x_BTD: Tensor, rotary: Rotary | None, mask: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Routing | None]:
        """The states after the block; and, of a mixture of experts in training, what its router did."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, mask, cache)
        y_BTD, routing = self.feed_forward(self.feed_forward_norm(x_BTD)), None
        if isinstance(y_BTD, tuple):
            y_BTD, routing = y_BTD
        return x_BTD + y_BTD, routing


class Passed(NamedTuple):
    """What one part of a model hands to the next."""

    states: Tensor
    """Hidden states [B, T, D]."""
    routings: list[Routing]
    """What the routers of the blocks so far did."""


class Decoder(nn.Module):
    """Embedding, blocks, final norm, and a head (absent when tied to the embedding); or a part of these.

    A part is a range of the blocks, under their numbers in the whole. The first part embeds; the last one has norm
    and head, and where that is tied a weight of the embedding of its own.
    """

    def __init__(self, spec: ModelSpec, part: range | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.part = range(spec.layers) if part is None else part
        begins, self.ends = self.part.start == 0, self.part.stop == spec.layers
        embeds = begins or (self.ends and spec.tied_embeddings)
        learned = begins and isinstance(spec.position, LearnedPositions)
        self.embedding = Embedding(spec.vocabulary, spec.width) if embeds else None
        self.positions = Embedding(spec.context, spec.width) if learned else None
        self.embedding_norm = make_norm(spec.norm, spec.width) if begins and spec.embedding_norm else None
        self.blocks = nn.ModuleList()
        for number in self.part:
            self.blocks.add_module(str(number), Block(spec))
        self.norm = make_norm(spec.norm, spec.width) if self.ends else None
        headed = self.ends and not spec.tied_embeddings
        self.head = Linear(spec.width, spec.vocabulary, bias=False) if headed else None

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
        loss: Head | None = None,
        auxiliary: Callable[[list[Routing]], Tensor] | None = None,
        passed: Passed | None = None,
    ) -> Tensor | Passed:
        """Hidden states [B, T, D] after the final norm, or what `loss` makes of them; or what the next part needs.

        Args:
            tokens_BT: token ids, int64.
            positions_BT: position of each token; None: counted on from what the cache holds.
            documents_BT: document of each token; a token sees only its own document. None: one document.
            cache: keys and values of earlier tokens, extended by these. Not together with documents.
            loss: called with the hidden states and the head's weight [V, D] inside this forward, where an engine
                that shards parameters has gathered the weight.
            auxiliary: called with what the routers did, in training; its results [n] follow the loss in [1 + n].
            passed: to a part that is not the first, what the one before it handed on.
        """
        past = 0 if cache is None else cache.length
        tokens = tokens_BT.shape[1]
        if positions_BT is None:
            positions_BT = torch.arange(past, past + tokens, device=tokens_BT.device)
        x_BTD, routings = passed or Passed(self._embed(tokens_BT, positions_BT), [])
        if documents_BT is not None and past:
            raise ValueError("documents are not kept in a cache")
        # In fp32 at least: tables and biases are made once a forward and shared by the blocks.
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        rotary = self._rotary(positions_BT, wide)
        mask = attention_mask(self.spec, tokens, past, documents_BT, tokens_BT.device, wide)
        for number, block in zip(self.part, self.blocks, strict=True):
            x_BTD, routing = block(x_BTD, rotary, mask, None if cache is None else cache.layer(number))
            routings = routings if routing is None else [*routings, routing]
        if self.norm is None:
            return Passed(x_BTD, routings)
        if cache is not None:
            cache.advance(tokens)
        x_BTD = self.norm(x_BTD)
        if loss is None:
            return x_BTD
        total = loss(x_BTD, self.head_weight())
        return torch.cat([total.view(1), auxiliary(routings)]) if auxiliary and routings else total

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Scores [B, T, V] of the next token."""
        return linear(hidden_BTD, self.head_weight())

    def head_weight(self) -> Tensor:
        """Weight [V, D] of the head: its own, or the embedding's."""
        module = self.head or self.embedding
        assert module is not None
        weight = module.weight
        return normalize(weight) if self.spec.normalised_head else weight

    def _embed(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        assert self.embedding is not None
        x_BTD: Tensor = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT)
        return x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary | None:
        position = self.spec.position
        if not isinstance(position, RotaryPositions):
            return None
        return rotary_tables(position, self.spec.attention.head_size, positions, dtype)
