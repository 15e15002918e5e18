"""The decoder, with an encoder or without: one forward for training, scoring and generation.

Shapes: B rows, T tokens, S tokens of an encoder, D hidden size, V vocabulary, H heads, N buckets of distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from jingu.model.adapter_layers import AdaptedEmbedding, LoraLinear, add_adapters
from jingu.model.attention import (
    AttentionMask,
    BlockContext,
    CrossAttention,
    SelfAttention,
    attention_mask,
    cross_mask,
    num_skipped_states,
)
from jingu.model.byte_weight import ByteWeight
from jingu.model.dropout import BlockDropoutSeeds, EmbeddingNoise
from jingu.model.experts import MoELayer, RoutingStats
from jingu.model.inputs import Inputs, LayerKVCache, as_inputs
from jingu.model.layers import Embedding, FeedForwardLayer, Linear, build_norm
from jingu.model.matmul_kernels import linear
from jingu.model.prompt_tuning import SoftPromptLayer, VirtualTokenEmbedding
from jingu.model.quantized_weight import PrepackedQuantizedWeight, PrepackedWeight
from jingu.model.rotary import RotaryTables, rotary_tables
from jingu.model.sharding_table import ShardingTable
from jingu.model.spec import Experts, LearnedPositions, ModelSpec, RelativeBias, RotaryPositions, SoftPrompt

# Computes a loss from hidden states and the head's weight [V, D].
LossFunction = Callable[[Tensor, Tensor], Tensor]
# Computes losses [n] from the statistics of the routers.
AuxiliaryLoss = Callable[[list[RoutingStats]], Tensor]


class Block(nn.Module):
    """A pre-norm transformer block: self-attention, attention to an encoder's states if there is one, feed-forward."""

    def __init__(self, spec: ModelSpec, *, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        hidden_size = spec.hidden_size
        self.dropout_seeds = BlockDropoutSeeds()
        self.attention_norm = build_norm(spec.norm, hidden_size)
        self.attention = SelfAttention(spec, causal=causal)
        self.cross_attention_norm = build_norm(spec.norm, hidden_size) if cross else None
        self.cross_attention = CrossAttention(spec) if cross else None
        self.feed_forward_norm = build_norm(spec.norm, hidden_size)
        self.feed_forward: MoELayer | FeedForwardLayer
        if isinstance(spec.feed_forward, Experts):
            self.feed_forward = MoELayer(spec.feed_forward, hidden_size)
        else:
            self.feed_forward = FeedForwardLayer(spec.feed_forward, hidden_size)

    def forward(
        self, x_BTD: Tensor, context: BlockContext, cache: LayerKVCache | None = None
    ) -> tuple[Tensor, RoutingStats | None]:
        """Return the hidden states after the block and, of a mixture in training, the statistics of its router."""
        # LoRA adapters look their seeds up here: they see nothing but their inputs.
        self.dropout_seeds.own = context.dropout_seeds
        self.dropout_seeds.source = context.source_dropout_seeds

        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), context, cache)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            x_BTD = x_BTD + self.cross_attention(self.cross_attention_norm(x_BTD), context, cache)

        normed_BTD = self.feed_forward_norm(x_BTD)
        if not isinstance(self.feed_forward, MoELayer):
            return x_BTD + self.feed_forward(normed_BTD), None
        # The last rows of a step with a cache may be padding, for which no expert is needed.
        rows = x_BTD.shape[1]
        tokens = rows if cache is None else cache.tokens(rows)
        if tokens == rows:
            y_BTD, routing = self.feed_forward(normed_BTD)
            return x_BTD + y_BTD, routing
        y_BTD, routing = self.feed_forward(normed_BTD[:, :tokens])
        return x_BTD + pad(y_BTD, (0, 0, 0, rows - tokens)), routing


class StageOutput(NamedTuple):
    """What one stage of a model hands to the next.

    Attributes:
        states: hidden states [B, T, D].
        routings: statistics of the routers of the blocks so far.
        encoder_states: an encoder's hidden states [B, S, D], for the decoder's blocks that follow.
    """

    states: Tensor
    routings: list[RoutingStats]
    encoder_states: Tensor | None = None


class TransformerStack(nn.Module):
    """A range of the blocks of a stack, under their numbers in the whole stack.

    The first range has what comes before the blocks, the last one the norm after them. Biases of relative positions
    are in every range, and are the same in all. An empty range has nothing.
    """

    SHARDING: ClassVar[ShardingTable] = {
        "embedding": "vocabulary",
        "positions": "tokens",
        "noise": "tokens",
        "prompt": "tokens",
    }

    def __init__(
        self, spec: ModelSpec, num_layers: int, blocks: range, *, has_embedding: bool, causal: bool, cross: bool
    ) -> None:
        """
        Args:
            num_layers: blocks of the whole stack.
            blocks: the numbers of those that are here.
            cross: whether the blocks attend to an encoder's states.
        """
        super().__init__()
        self.spec = spec
        self.block_range = blocks
        self.causal = causal
        is_first = bool(blocks) and blocks.start == 0
        self.is_last = bool(blocks) and blocks.stop == num_layers
        # Before the blocks. The embedding may be here for a tied head alone.
        embedding_class = VirtualTokenEmbedding if any(spec.prompts) else Embedding
        self.embedding = embedding_class(spec.vocab_size, spec.hidden_size) if has_embedding else None
        self.prompt = None
        if is_first and spec.prompts[not causal] and isinstance(spec.adapter, SoftPrompt):
            self.prompt = SoftPromptLayer(spec.adapter, spec)
        self.positions = None
        if is_first and isinstance(spec.position, LearnedPositions):
            self.positions = Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.noise = EmbeddingNoise(spec.hidden_size) if is_first else None
        self.relative_bias = None
        if blocks and isinstance(spec.position, RelativeBias):
            self.relative_bias = Embedding(spec.position.num_buckets, spec.attention.num_heads)
        self.embedding_norm = None
        if is_first and spec.embedding_norm:
            self.embedding_norm = build_norm(spec.norm, spec.hidden_size)
        # The blocks, and the norm after them.
        self.blocks = nn.ModuleList()
        for number in blocks:
            self.blocks.add_module(str(number), Block(spec, causal=causal, cross=cross))
        self.norm = build_norm(spec.norm, spec.hidden_size) if self.is_last else None

    def run(
        self,
        inputs: Inputs,
        received: StageOutput | None,
        embedding: Embedding | None,
        encoder_mask: Tensor | None = None,
    ) -> StageOutput:
        """Run the blocks that are here, and what comes before and after them.

        Args:
            received: from the stage before this one; the first range of a decoder receives at most an encoder's
                states.
            embedding: of the tokens; the encoder and the decoder share it.
            encoder_mask: which of an encoder's states each token attends to.
        """
        cache = inputs.cache
        if cache is not None and (inputs.documents is not None or inputs.prefix_lengths is not None):
            raise ValueError("a cache stores neither documents nor prefix lengths")
        positions_BT = inputs.positions
        if positions_BT is None:
            positions_BT = torch.arange(inputs.tokens.shape[1], device=inputs.tokens.device)

        # The hidden states: from the embedding, or from the stage before.
        routings: list[RoutingStats] = []
        encoder_states_BSD = None
        if self.block_range.start == 0:
            x_BTD = self._embed(embedding, inputs, positions_BT)
            # A decoder's first blocks receive an encoder's output: its states are what they attend to.
            if received is not None:
                encoder_states_BSD = received.states
                routings = received.routings
        else:
            assert received is not None
            x_BTD, routings, encoder_states_BSD = received

        # What all blocks share is computed once, in fp32 at least: positions and the attention mask.
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        bias_NH = None if self.relative_bias is None else self.relative_bias.weight
        mask: AttentionMask = None
        if cache is None:
            rotary = self._rotary_tables(positions_BT, dtype)
            mask = attention_mask(
                self.spec,
                positions_BT,
                inputs.documents,
                dtype,
                causal=self.causal,
                parents_BT=inputs.parents,
                bias_NH=bias_NH,
                prefix_lengths_BT=inputs.prefix_lengths,
            )
        else:
            rotary = cache.rotary(positions_BT, dtype)
            cache.begin(bias_NH)
        context = BlockContext(
            rotary=rotary,
            mask=mask,
            encoder_states=encoder_states_BSD,
            encoder_mask=encoder_mask,
            tokens=inputs.tokens if any(self.spec.prompts) else None,
            dropout_seeds=inputs.dropout_seeds,
            source_dropout_seeds=None if inputs.source is None else inputs.source.dropout_seeds,
        )

        for number, block in zip(self.block_range, self.blocks, strict=True):
            layer_cache = None if cache is None else cache.layer(number)
            x_BTD, routing = block(x_BTD, context, layer_cache)
            if routing is not None:
                routings = [*routings, routing]
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        return StageOutput(x_BTD, routings, encoder_states_BSD)

    def _embed(self, embedding: Embedding | None, inputs: Inputs, positions_BT: Tensor) -> Tensor:
        """Return the hidden states before the first block."""
        assert embedding is not None
        x_BTD: Tensor = embedding(inputs.tokens)
        if self.prompt is not None:
            x_BTD = x_BTD + self.prompt(inputs.tokens).to(x_BTD.dtype)
        if inputs.embedding_noise is not None and self.noise is not None:
            x_BTD = x_BTD + self.noise(inputs.embedding_noise).to(x_BTD.dtype)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        return x_BTD

    def _rotary_tables(self, positions: Tensor, dtype: torch.dtype) -> RotaryTables | None:
        if not isinstance(self.spec.position, RotaryPositions):
            return None
        return rotary_tables(self.spec.position, self.spec.attention.head_dim, positions, dtype)


class Decoder(TransformerStack):
    """Embedding, blocks, final norm, and a head (absent if it is tied to the embedding).

    If the spec has an encoder, it stands beside the decoder, with the same dimensions and the same embedding, and the
    decoder's blocks attend to its states. A stage of a pipeline is a decoder with a range of the blocks, those of the
    encoder first: the first stage embeds, and the last one has the norm and the head, which if it is tied has a copy of
    the embedding's weight.
    """

    SHARDING: ClassVar[ShardingTable] = {**TransformerStack.SHARDING, "head": "vocabulary"}

    def __init__(self, spec: ModelSpec, blocks: range | None = None) -> None:
        """
        Args:
            blocks: the range of a stage, counted from the encoder's first block; None: all blocks.
        """
        encoder_layers = spec.num_encoder_layers or 0
        if blocks is None:
            blocks = range(encoder_layers + spec.num_layers)
        encoder_blocks = range(min(blocks.start, encoder_layers), min(blocks.stop, encoder_layers))
        own_blocks = range(max(blocks.start - encoder_layers, 0), max(blocks.stop - encoder_layers, 0))
        # Encoder and decoder begin with the embedding, wherever their first blocks are. A tied head needs it, too.
        is_last = bool(own_blocks) and own_blocks.stop == spec.num_layers
        is_first = any(part and part.start == 0 for part in (encoder_blocks, own_blocks))
        has_embedding = is_first or (is_last and spec.tie_word_embeddings and not spec.score_head)
        super().__init__(
            spec, spec.num_layers, own_blocks, has_embedding=has_embedding, causal=True, cross=encoder_layers > 0
        )
        self.head = None
        if is_last and not spec.tie_word_embeddings and not spec.score_head:
            self.head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        # Of a reward model, in place of the head; of values, beside it.
        has_score = is_last and (spec.score_head or spec.value_head)
        self.score = Linear(spec.hidden_size, 1, bias=False) if has_score else None
        # The head's weight in the order of a CPU kernel, if the model was prepacked for inference.
        self.prepacked_head: PrepackedWeight | PrepackedQuantizedWeight | ByteWeight | None = None
        self.encoder = None
        if encoder_layers:
            self.encoder = TransformerStack(
                spec, encoder_layers, encoder_blocks, has_embedding=False, causal=False, cross=False
            )

    def forward(
        self,
        inputs: Inputs | Tensor,
        loss: LossFunction | None = None,
        auxiliary: AuxiliaryLoss | None = None,
        received: StageOutput | None = None,
    ) -> Tensor | StageOutput | None:
        """Run the model, or one stage of it.

        Args:
            inputs: a bare tensor holds token ids.
            loss: called with the hidden states and the head's weight [V, D] inside of this forward, where FSDP has
                gathered the weight.
            auxiliary: called with the statistics of the routers, in training.
            received: what the stage before this one returned; None in the first stage.

        Returns:
            Hidden states [B, T, D], from which `logits` computes logits; with a `loss`, its result (a number, or [m]),
            followed by the auxiliary losses [m + n] if there are any. From a stage that is not the last, what the next
            one needs: None from an encoder's stage that has nothing to read.
        """
        inputs = as_inputs(inputs)
        encoder_mask = None
        if self.encoder is not None:
            source = inputs.source
            if self.encoder.block_range and source is not None:
                received = self.encoder.run(source, received, self.embedding)
            if not self.block_range:
                return received
            source_documents_BS = None if source is None else source.documents
            if source_documents_BS is not None:
                source_documents_BS = source_documents_BS[:, num_skipped_states(self.spec) :]
            encoder_mask = cross_mask(inputs.documents, source_documents_BS)

        output = self.run(inputs, received, self.embedding, encoder_mask)
        if not self.is_last:
            return output
        x_BTD = output.states
        if self.spec.scale_lm_head:
            x_BTD = x_BTD * self.spec.hidden_size**-0.5
        if loss is None:
            return x_BTD
        total = loss(*self.head_operands(x_BTD))
        if auxiliary is not None and output.routings:
            return torch.cat([total.view(-1), auxiliary(output.routings)])
        return total

    @property
    def stages(self) -> list[Decoder]:
        """The stages of the model that this process holds: itself."""
        return [self]

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits [B, T, V] of the next token."""
        return linear(*self.head_operands(hidden_BTD))

    def head_operands(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states and the weight whose product are the logits; a LoRA of the head widens both."""
        weight_VD = self.head_weight()
        if not isinstance(self.head, LoraLinear):
            return hidden_BTD, weight_VD
        low_BTR = self.head.scale * linear(hidden_BTD, self.head.lora_a)
        lora_b_VR = self.head.lora_b.to(weight_VD.dtype)
        return torch.cat([hidden_BTD, low_BTR], -1), torch.cat([weight_VD, lora_b_VR], 1)

    def head_weight(self) -> Tensor:
        """Return the weight [V, D] of the head: its own, or the embedding's; of a reward model [1, D]."""
        if self.score is not None and self.spec.score_head:
            return self.score.weight
        if self.prepacked_head is not None:
            return cast(Tensor, self.prepacked_head)
        module = self.head or self.embedding
        assert module is not None
        weight = module.with_token_rows() if isinstance(module, AdaptedEmbedding) else module.weight
        if self.spec.normalize_lm_head and isinstance(weight, Tensor):
            weight = normalize(weight)
        return weight


def build_model(spec: ModelSpec, blocks: range | None = None) -> Decoder:
    """Build the model of a spec, or a stage of it, with its adapters; its weights are not filled."""
    model = Decoder(spec, blocks)
    add_adapters(model, spec)
    return model


@lru_cache(maxsize=16)
def parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Return names and shapes of the model's parameters, in its order, as if none were quantized.

    The result is cached, and must not be changed: a model of a hundred blocks takes a second to build.
    """
    with torch.device("meta"):
        model = build_model(spec.model_copy(update={"quantization": None}))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def iterate_blocks(model: Decoder) -> Iterator[tuple[int, nn.Module]]:
    """Yield the blocks with their numbers in their stack, in the order in which they compute."""
    stacks = (model,) if model.encoder is None else (model.encoder, model)
    for stack in stacks:
        yield from zip(stack.block_range, stack.blocks, strict=True)
