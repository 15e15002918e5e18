"""The decoder, with an encoder or without: one forward for training, scoring and generation.

Shapes: B rows, T tokens, S tokens of an encoder, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from jingu.model.adapters import prepare_training
from jingu.model.attention import (
    Cache,
    CrossAttention,
    LayerCache,
    Mask,
    SelfAttention,
    attention_mask,
    cross_mask,
    skipped_states,
)
from jingu.model.experts import ExpertsLayer, Routing
from jingu.model.layers import Embedding, FeedForwardLayer, Linear, make_norm
from jingu.model.noise import Draw, EmbeddingNoise
from jingu.model.packed import Arranged, Reordered
from jingu.model.products import linear
from jingu.model.prompts import PromptedEmbedding, SoftPromptLayer
from jingu.model.rotary import Rotary, rotary_tables
from jingu.model.sharding import Table
from jingu.model.spec import Experts, LearnedPositions, ModelSpec, RelativeBias, RotaryPositions, SoftPrompt

Head = Callable[[Tensor, Tensor], Tensor]
Auxiliary = Callable[[list[Routing]], Tensor]


class Block(nn.Module):
    """norm → attention → add; norm → attention to an encoder's states → add, where there is one; norm → feed-forward →
    add."""

    def __init__(self, spec: ModelSpec, *, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        self.draw = Draw()
        self.attention_norm = make_norm(spec.norm, spec.width)
        self.attention = SelfAttention(spec, causal=causal)
        self.cross_attention_norm = make_norm(spec.norm, spec.width) if cross else None
        self.cross_attention = CrossAttention(spec) if cross else None
        self.feed_forward_norm = make_norm(spec.norm, spec.width)
        part = spec.feed_forward
        self.feed_forward = (
            ExpertsLayer(part, spec.width) if isinstance(part, Experts) else FeedForwardLayer(part, spec.width)
        )

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotary | None,
        mask: Mask,
        cache: LayerCache | None,
        states_BSD: Tensor | None = None,
        states_mask: Tensor | None = None,
        tokens_BT: Tensor | None = None,
        keys: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> tuple[Tensor, Routing | None]:
        """The states after the block; and, of a mixture of experts in training, what its router did.

        Args:
            tokens_BT: for what begins with a prompt.
            keys: of its tokens and of an encoder's, for what drops some of its inputs.
        """
        self.draw.own, self.draw.source = keys
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary, mask, cache, tokens_BT)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            x_BTD = x_BTD + self.cross_attention(self.cross_attention_norm(x_BTD), states_BSD, states_mask, cache)
        normed_BTD = self.feed_forward_norm(x_BTD)
        if not isinstance(self.feed_forward, ExpertsLayer):
            return x_BTD + self.feed_forward(normed_BTD), None
        # What only fills up a step has no need of experts.
        rows = x_BTD.shape[1]
        tokens = rows if cache is None else cache.tokens(rows)
        y_BTD, routing = self.feed_forward(normed_BTD[:, :tokens] if tokens < rows else normed_BTD)
        return x_BTD + (pad(y_BTD, (0, 0, 0, rows - tokens)) if tokens < rows else y_BTD), routing


class Passed(NamedTuple):
    """What one part of a model hands to the next."""

    states: Tensor
    """Hidden states [B, T, D]."""
    routings: list[Routing]
    """What the routers of the blocks so far did."""
    encoded: Tensor | None = None
    """An encoder's states [B, S, D], for the blocks of a decoder that follow."""


class Stack(nn.Module):
    """A range of a stack's blocks, under their numbers in the whole. The first part has what comes before the blocks,
    the last one the norm after them; biases of relative positions are in each, and are the same in all. A part
    without blocks has nothing."""

    SHARDING: ClassVar[Table] = {
        "embedding": "vocabulary",
        "positions": "tokens",
        "noise": "tokens",
        "prompt": "tokens",
    }

    def __init__(self, spec: ModelSpec, layers: int, part: range, *, embeds: bool, causal: bool, cross: bool) -> None:
        super().__init__()
        self.spec, self.part, self.causal = spec, part, causal
        begins, self.ends = bool(part) and part.start == 0, bool(part) and part.stop == layers
        learned, bias = begins and isinstance(spec.position, LearnedPositions), spec.position
        table = PromptedEmbedding if any(spec.prompts) else Embedding
        self.embedding = table(spec.vocabulary, spec.width) if embeds else None
        soft = spec.adapter if begins and spec.prompts[not causal] else None
        self.prompt = SoftPromptLayer(soft, spec) if isinstance(soft, SoftPrompt) else None
        self.positions = Embedding(spec.context, spec.width) if learned else None
        self.noise = EmbeddingNoise(spec.width) if begins else None
        heads = spec.attention.heads
        self.relative_bias = Embedding(bias.buckets, heads) if part and isinstance(bias, RelativeBias) else None
        self.embedding_norm = make_norm(spec.norm, spec.width) if begins and spec.embedding_norm else None
        self.blocks = nn.ModuleList()
        for number in part:
            self.blocks.add_module(str(number), Block(spec, causal=causal, cross=cross))
        self.norm = make_norm(spec.norm, spec.width) if self.ends else None

    def run(
        self,
        passed: Passed | None,
        table: Embedding | None,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        keys: tuple[Tensor | None, Tensor | None] = (None, None),
        noise_2BT: Tensor | None = None,
        cache: Cache | None = None,
        encoded_mask: Tensor | None = None,
        reach_BT: Tensor | None = None,
    ) -> Passed:
        """Through the blocks that are here, and what comes before and after them. See `Decoder.forward`.

        Args:
            passed: by the part before this one; to a first part, at most by an encoder.
            table: embeds the tokens.
            keys: of the tokens, and of those that an encoder reads.
            encoded_mask: which of an encoder's states each token sees.
        """
        if cache is not None and not (documents_BT is None and reach_BT is None):
            raise ValueError("documents and reach are not kept in a cache")
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        if self.part.start == 0:
            encoded_BSD, routings = (None, []) if passed is None else passed[:2]
            x_BTD = self._embedded(table, tokens_BT, positions_BT, noise_2BT)
        else:
            assert passed is not None
            x_BTD, routings, encoded_BSD = passed
        # In fp32 at least: tables and biases are made once a forward and shared by the blocks.
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        bias_NH = None if self.relative_bias is None else self.relative_bias.weight
        mask = None
        if cache is None:
            rotary, of_row = self._rotary(positions_BT, wide), (positions_BT, documents_BT, wide)
            mask = attention_mask(self.spec, *of_row, causal=self.causal, bias_NH=bias_NH, reach_BT=reach_BT)
        else:
            rotary = cache.rotary(positions_BT, wide)
            cache.begin(bias_NH)
        asked_BT = tokens_BT if any(self.spec.prompts) else None
        for number, block in zip(self.part, self.blocks, strict=True):
            held = None if cache is None else cache.layer(number)
            x_BTD, routing = block(x_BTD, rotary, mask, held, encoded_BSD, encoded_mask, asked_BT, keys)
            routings = routings if routing is None else [*routings, routing]
        return Passed(x_BTD if self.norm is None else self.norm(x_BTD), routings, encoded_BSD)

    def _embedded(
        self, table: Embedding | None, tokens_BT: Tensor, positions_BT: Tensor, noise_2BT: Tensor | None
    ) -> Tensor:
        """What the first block is given."""
        assert table is not None
        x_BTD: Tensor = table(tokens_BT)
        if self.prompt is not None:
            x_BTD = x_BTD + self.prompt(tokens_BT).to(x_BTD.dtype)
        if noise_2BT is not None and self.noise is not None:
            x_BTD = x_BTD + self.noise(noise_2BT).to(x_BTD.dtype)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT)
        return x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary | None:
        position = self.spec.position
        if not isinstance(position, RotaryPositions):
            return None
        return rotary_tables(position, self.spec.attention.head_size, positions, dtype)


class Decoder(Stack):
    """Embedding, blocks, final norm, and a head (absent when tied to the embedding). Where the spec has an encoder, it
    stands beside the decoder, of the same dimensions and over the same embedding, and the blocks attend to its states.

    Or a part of these: a range of the blocks, those of the encoder first, under their numbers in their stack. The
    first part embeds; the last one has norm and head, and where that is tied a weight of the embedding of its own.
    """

    SHARDING: ClassVar[Table] = {**Stack.SHARDING, "head": "vocabulary"}

    def __init__(self, spec: ModelSpec, part: range | None = None) -> None:
        """`part` are the blocks; None: all."""
        read = spec.encoder_layers or 0
        part = range(read + spec.layers) if part is None else part
        own = range(max(part.start - read, 0), max(part.stop - read, 0))
        ends = bool(own) and own.stop == spec.layers
        begins = any(blocks and blocks.start == 0 for blocks in (part, own))
        embeds = begins or (ends and spec.tied_embeddings)
        super().__init__(spec, spec.layers, own, embeds=embeds, causal=True, cross=bool(read))
        headed = ends and not spec.tied_embeddings
        self.head = Linear(spec.width, spec.vocabulary, bias=False) if headed else None
        # The head's weight as `linear` takes it, where a model is arranged for inference.
        self.arranged_head: Reordered | Arranged | None = None
        here = range(min(part.start, read), min(part.stop, read))
        self.encoder = Stack(spec, read, here, embeds=False, causal=False, cross=False) if read else None

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: Cache | None = None,
        loss: Head | None = None,
        auxiliary: Auxiliary | None = None,
        passed: Passed | None = None,
        noise_2BT: Tensor | None = None,
        reach_BT: Tensor | None = None,
        keys_BT: Tensor | None = None,
        source_BS: Tensor | None = None,
        source_documents_BS: Tensor | None = None,
        source_keys_BS: Tensor | None = None,
    ) -> Tensor | Passed | None:
        """Hidden states [B, T, D] for the head, or what `loss` makes of them; or what the next part needs: None from a
        part of the encoder that has no source to read.

        Args:
            tokens_BT: token ids, int64.
            positions_BT: position of each token; None: counted from 0, without a cache.
            documents_BT: document of each token; a token sees only its own document. None: one document.
            cache: keys and values of earlier tokens, extended by these: one row of tokens of many sequences, as the
                cache knows. Not together with documents.
            loss: called with the hidden states and the head's weight [V, D] inside this forward, where an engine
                that shards parameters has gathered the weight.
            auxiliary: called with what the routers did, in training; its results [n] follow the loss in [1 + n].
            passed: to a part that is not the first, what the one before it handed on.
            noise_2BT: keys and scales of noise on the embedded tokens (`EmbeddingNoise`).
            reach_BT: tokens of the row, from its first on, that a token sees besides those before it. Not together
                with a cache.
            keys_BT: of each token, by which adapters drop some of their inputs; None: they drop nothing.
            source_BS: token ids that the encoder reads; with a cache needed with its first tokens only, since it
                keeps the keys and values of the encoder's states.
            source_documents_BS: document of each; a token of either side sees its own document. -1: padding, which
                none sees. Where a row is padded, they are needed with every token.
            source_keys_BS: as `keys_BT`, of what the encoder reads.
        """
        encoded_mask, table = None, self.embedding
        if self.encoder is not None:
            if self.encoder.part and source_BS is not None:
                source = source_BS, None, source_documents_BS
                passed = self.encoder.run(passed, table, *source, keys=(source_keys_BS, None))
            if not self.part:
                return passed
            if source_documents_BS is not None:
                source_documents_BS = source_documents_BS[:, skipped_states(self.spec) :]
            encoded_mask = cross_mask(documents_BT, source_documents_BS)
        own, keys = (tokens_BT, positions_BT, documents_BT), (keys_BT, source_keys_BS)
        passed = self.run(passed, table, *own, keys, noise_2BT, cache, encoded_mask, reach_BT)
        if not self.ends:
            return passed
        x_BTD, routings, _ = passed
        if self.spec.scaled_head:
            x_BTD = x_BTD * self.spec.width**-0.5
        if loss is None:
            return x_BTD
        total = loss(x_BTD, self.head_weight())
        return torch.cat([total.view(1), auxiliary(routings)]) if auxiliary and routings else total

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Scores [B, T, V] of the next token."""
        return linear(hidden_BTD, self.head_weight())

    def head_weight(self) -> Tensor:
        """Weight [V, D] of the head: its own, or the embedding's."""
        if self.arranged_head is not None:
            return cast(Tensor, self.arranged_head)
        module = self.head or self.embedding
        assert module is not None
        weight = module.weight
        return normalize(weight) if self.spec.normalised_head and isinstance(weight, Tensor) else weight


def make_model(spec: ModelSpec, part: range | None = None) -> Decoder:
    """The model of a spec, or a part of its blocks, with adapters; its weights are not filled."""
    model = Decoder(spec, part)
    prepare_training(model, spec)
    return model


def parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Names and shapes of the model's parameters, in its order, as if none were packed."""
    with torch.device("meta"):
        model = make_model(spec.model_copy(update={"base": None}))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def all_blocks(model: Decoder) -> Iterator[tuple[int, nn.Module]]:
    """The blocks with their numbers in their stack, in the order in which they compute."""
    for stack in (model,) if model.encoder is None else (model.encoder, model):
        yield from zip(stack.part, stack.blocks, strict=True)
