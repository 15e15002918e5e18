"""The model: a decoder, or an encoder-decoder. The same forward trains, scores and generates.

Shapes: B rows, T tokens, S tokens of an encoder, D hidden size, V vocabulary, R rank of a LoRA, H heads, N buckets of
distances.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from jingu.model.adapter_layers import AdaptedEmbedding, LoraLinear, add_adapters
from jingu.model.adapter_specs import SoftPrompt
from jingu.model.attention import (
    AttentionMask,
    BlockContext,
    KeysAndValues,
    attention_mask,
    cross_mask,
    mask_key,
    num_skipped_states,
)
from jingu.model.block import Block, apply_norm
from jingu.model.byte_weight import ByteWeight
from jingu.model.chunked_scan import document_starts
from jingu.model.components import LayerSpec, LearnedPositions, Position
from jingu.model.dropout import EmbeddingNoise
from jingu.model.experts import RoutingStats
from jingu.model.inputs import Inputs
from jingu.model.layers import (
    Embedding,
    build_embedding,
    build_linear,
    build_norm,
    soft_cap,
)
from jingu.model.matmul_kernels import additive_mask, linear
from jingu.model.part_spec import styles
from jingu.model.parts import end_rows, stack_rows
from jingu.model.prediction import PredictionLayer, shift_left
from jingu.model.prompt_tuning import SoftPromptLayer, VirtualTokenEmbedding
from jingu.model.quantized_weight import PrepackedQuantizedWeight, PrepackedWeight
from jingu.model.rotary import RotaryTables, layer_rotary, query_factors
from jingu.model.spec import ModelSpec

# Computes a loss from the hidden states [B, T, D] and the head's weight [V, D].
LossFunction = Callable[[Tensor, Tensor], Tensor]
# Computes a loss from the hidden states of a layer of multi-token prediction, the head's weight, and the number of
# tokens that the layer predicts beyond the next one.
FurtherLoss = Callable[[Tensor, Tensor, int], Tensor]
# Computes losses [n] from the statistics of all routers.
AuxiliaryLoss = Callable[[list[RoutingStats]], Tensor]


class StageOutput(NamedTuple):
    """The data that one stage of a model sends to the next.

    Attributes:
        states: hidden states [B, T, D]; from a stage of the encoder, the encoder's.
        routings: router statistics of all blocks so far.
        encoder_states: final hidden states [B, S, D] of the encoder, for the remaining blocks of the decoder.
    """

    states: Tensor
    routings: list[RoutingStats]
    encoder_states: Tensor | None = None


class ContextKeys(NamedTuple):
    """What the context of a kind of block depends on. Kinds with equal keys share tables and masks.

    Attributes:
        has_attention, has_state: whether the blocks have attention, and a mixer with a state.
        rotary: the positions and the number of dims of a head that they may turn.
        mask: see `mask_key`.
    """

    has_attention: bool
    has_state: bool
    rotary: tuple[Position, int]
    mask: Hashable

    @staticmethod
    def of(layer: LayerSpec) -> ContextKeys:
        """Return the keys of a kind of block."""
        rotary = layer.position, layer.attention.rotary_size
        return ContextKeys(layer.has_attention, layer.state_mixer is not None, rotary, mask_key(layer))


class TransformerStack(nn.Module):
    """A range of blocks of a stack (decoder or encoder), named by their numbers in the whole stack.

    The range with the first block also has the modules before the blocks, and the range with the last block has the
    final norm. Every range has a copy of the relative position biases. An empty range has no modules, except perhaps
    an embedding.
    """

    def __init__(
        self, spec: ModelSpec, num_layers: int, blocks: range, *, has_embedding: bool, causal: bool, cross: bool
    ) -> None:
        """
        Args:
            num_layers: number of blocks of the whole stack.
            blocks: numbers of the blocks in this range.
            has_embedding: whether to build the token embedding here.
            causal: whether tokens attend to earlier tokens only: true for a decoder, false for an encoder.
            cross: whether the blocks attend to an encoder's hidden states.
        """
        super().__init__()
        self.spec = spec
        rows = stack_rows(spec)
        self.sharding = {**styles({**end_rows(spec), **rows}), "noise": "tokens", "prompt": "tokens"}
        # The layers of the range, and for each the number of its kind among the distinct ones.
        layers = [spec.layer(number) if causal else spec.default_layer for number in blocks]
        self.kinds = list(dict.fromkeys(layers))
        self.kind_numbers = [self.kinds.index(layer) for layer in layers]
        self.context_keys = [ContextKeys.of(layer) for layer in self.kinds]
        self.embedding_factor = spec.embedding_factor
        self.has_prompts = any(spec.prompts)
        self.block_range = blocks
        self.causal = causal
        is_first = bool(blocks) and blocks.start == 0
        self.is_last = bool(blocks) and blocks.stop == num_layers
        # The modules before the blocks. The last stage may have an embedding only because the head is tied to it.
        embedding_class = VirtualTokenEmbedding if self.has_prompts else Embedding
        self.embedding = embedding_class(spec.vocab_size, spec.hidden_size) if has_embedding else None
        self.prompt = None
        if is_first and spec.prompts[not causal] and isinstance(spec.adapter, SoftPrompt):
            self.prompt = SoftPromptLayer(spec.adapter, spec)
        self.positions = None
        self.first_position = spec.position.offset if isinstance(spec.position, LearnedPositions) else 0
        if is_first and "positions" in rows:
            self.positions = build_embedding(rows["positions"])
        self.noise = EmbeddingNoise(spec.hidden_size) if is_first else None
        self.relative_bias = None
        if blocks and "relative_bias" in rows:
            self.relative_bias = build_embedding(rows["relative_bias"])
        self.embedding_norm = None
        if is_first and spec.embedding_norm:
            self.embedding_norm = build_norm(spec.norm, spec.hidden_size)
        self.per_layer_embedding, self.per_layer_projection, self.per_layer_norm = None, None, None
        if is_first and spec.per_layer_inputs is not None:
            self.per_layer_embedding = build_embedding(rows["per_layer_embedding"])
            self.per_layer_projection = build_linear(rows["per_layer_projection"])
            self.per_layer_norm = build_norm(spec.norm, spec.per_layer_inputs)
        # For layers that share keys and values, the layer that has them.
        sources = {number: spec.kv_source(number) for number in blocks if causal}
        self.kv_sources = {number: source for number, source in sources.items() if source not in (number, None)}
        # The blocks, and the final norm.
        self.blocks = nn.ModuleList()
        for number, layer in zip(blocks, layers, strict=True):
            self.blocks.add_module(str(number), Block(spec, layer, causal=causal, cross=cross))
        self.norm = build_norm(spec.norm, spec.hidden_size) if self.is_last else None

    def run(
        self,
        inputs: Inputs,
        received: StageOutput | None,
        embedding: Embedding | None,
        encoder_mask: Tensor | None = None,
    ) -> StageOutput:
        """Run the blocks of this range, and the modules before and after them.

        Args:
            received: output of the previous stage. The first range of a decoder receives the encoder's output, or None.
            embedding: the token embedding, which encoder and decoder share; needed by the first range only.
            encoder_mask: which of the encoder's states each token attends to; see `cross_mask`.

        Raises:
            ValueError: the inputs combine a cache with documents or prefix lengths.
        """
        cache = inputs.cache
        if cache is not None and (inputs.documents is not None or inputs.prefix_lengths is not None):
            raise ValueError("a cache stores neither documents nor prefix lengths")
        positions_BT = inputs.positions
        if positions_BT is None:
            positions_BT = torch.arange(inputs.tokens.shape[1], device=inputs.tokens.device)

        # The hidden states come from the embedding, or from the previous stage.
        routings: list[RoutingStats] = []
        encoder_states_BSD = None
        if self.block_range.start == 0:
            x_BTD = self._embed(embedding, inputs, positions_BT)
            # The decoder's first blocks receive the encoder's output, and attend to its states.
            if received is not None:
                encoder_states_BSD = received.states
                routings = received.routings
        else:
            assert received is not None
            x_BTD, routings, encoder_states_BSD = received

        # What the blocks of all kinds share, and for each kind its rotary tables and its attention mask.
        shared = BlockContext(
            encoder_states=encoder_states_BSD,
            encoder_mask=encoder_mask,
            tokens=inputs.tokens if self.has_prompts else None,
            dropout_seeds=inputs.dropout_seeds,
            source_dropout_seeds=None if inputs.source is None else inputs.source.dropout_seeds,
        )
        kinds = zip(self.kinds, self.context_keys, strict=True)
        contexts = self._contexts(kinds, inputs, positions_BT, x_BTD, shared)
        layer_inputs = self._layer_inputs(inputs.tokens, x_BTD)
        # Keys and values that later layers share, by the number of their layer.
        layer_kv: dict[int, KeysAndValues] = {}

        for number, kind, block in zip(self.block_range, self.kind_numbers, self.blocks, strict=True):
            layer_cache = None if cache is None else cache.layer(number)
            context = contexts[kind]
            if layer_inputs is not None:
                context = context._replace(layer_inputs=layer_inputs[number])
            if number in self.kv_sources:
                context = context._replace(shared_kv=layer_kv[self.kv_sources[number]])
            x_BTD, routing, kv = block(x_BTD, context, layer_cache)
            if number in self.kv_sources.values():
                layer_kv[number] = kv
            if routing is not None:
                routings = [*routings, routing]
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        return StageOutput(x_BTD, routings, encoder_states_BSD)

    def _embed(self, embedding: Embedding | None, inputs: Inputs, positions_BT: Tensor) -> Tensor:
        """Return the hidden states before the first block."""
        assert embedding is not None
        x_BTD = self.embed_tokens(embedding, inputs.tokens)
        if self.prompt is not None:
            x_BTD = x_BTD + self.prompt(inputs.tokens).to(x_BTD.dtype)
        if inputs.embedding_noise is not None and self.noise is not None:
            x_BTD = x_BTD + self.noise(inputs.embedding_noise).to(x_BTD.dtype)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions(positions_BT + self.first_position)
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        return x_BTD

    def _layer_inputs(self, tokens_BT: Tensor, x_BTD: Tensor) -> tuple[Tensor, ...] | None:
        """Return the inputs [B, T, P] of each layer, given the hidden states before the first one; None if there are
        none."""
        size = self.spec.per_layer_inputs
        if self.per_layer_embedding is None or self.per_layer_projection is None or size is None:
            return None
        vectors = self._scale(self.per_layer_embedding(tokens_BT), size**0.5)
        inputs = self.per_layer_projection(x_BTD) * self.spec.hidden_size**-0.5
        vectors, inputs = (x.unflatten(-1, (-1, size)) for x in (vectors, inputs))
        return ((apply_norm(self.per_layer_norm, inputs) + vectors) * 2.0**-0.5).unbind(2)

    def embed_tokens(self, embedding: Embedding, tokens_BT: Tensor) -> Tensor:
        """Return the scaled embeddings of tokens."""
        x_BTD: Tensor = embedding(tokens_BT)
        scale = self.embedding_factor
        return x_BTD if scale == 1.0 else self._scale(x_BTD, scale)

    def _scale(self, x_BTD: Tensor, scale: float) -> Tensor:
        """Return embeddings multiplied by a scale, which is rounded first if the spec says so."""
        return x_BTD * (torch.tensor(scale, dtype=x_BTD.dtype).item() if self.spec.round_embedding_scale else scale)

    def _contexts(
        self,
        kinds: Iterable[tuple[LayerSpec, ContextKeys]],
        inputs: Inputs,
        positions_BT: Tensor,
        x_BTD: Tensor,
        shared: BlockContext,
    ) -> list[BlockContext]:
        """Return the context of each kind of block. Kinds with equal positions or equal masks share them.

        Args:
            kinds: the kinds with their keys.
            x_BTD: the hidden states.
            shared: what all contexts have in common.
        """
        cache = inputs.cache
        # Rotary tables and position biases are computed in at least fp32.
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        bias_NH = None if self.relative_bias is None else self.relative_bias.weight
        if cache is not None:
            cache.begin(bias_NH)
        rotary: dict[Hashable, RotaryTables | None] = {}
        factors: dict[Hashable, Tensor | None] = {None: None}
        masks: dict[Hashable, AttentionMask] = {}
        contexts = []
        for layer, keys in kinds:
            context = _add_documents(shared, inputs) if keys.has_state else shared
            if not keys.has_attention:
                contexts.append(context)
                continue
            if keys.rotary not in rotary:
                rotary[keys.rotary] = (
                    cache.rotary(*keys.rotary, positions_BT, dtype)
                    if cache is not None
                    else layer_rotary(*keys.rotary, positions_BT, dtype, inputs.documents, inputs.parents)
                )
            if keys.mask not in masks:
                masks[keys.mask] = None
                if cache is None:
                    mask = attention_mask(
                        layer,
                        positions_BT,
                        inputs.documents,
                        dtype,
                        causal=self.causal,
                        parents_BT=inputs.parents,
                        bias_NH=bias_NH,
                        prefix_lengths_BT=inputs.prefix_lengths,
                    )
                    # Convert it once for all layers. Trained biases stay, because their gradients would be summed
                    # over layers in the dtype of the mask.
                    if isinstance(mask, Tensor) and not mask.requires_grad:
                        mask = additive_mask(mask, x_BTD)
                    masks[keys.mask] = mask
            scaling = layer.attention.query_scaling
            if scaling is not None and scaling not in factors:
                factors[scaling] = query_factors(scaling, positions_BT, dtype)
            context = context._replace(rotary=rotary[keys.rotary], query_factor=factors[scaling])
            contexts.append(context._replace(mask=masks[keys.mask]))
        return contexts


def _add_documents(shared: BlockContext, inputs: Inputs) -> BlockContext:
    """Return a context with what mixers with a state need of the documents of a row."""
    if inputs.prefix_lengths is not None:
        raise ValueError("layers with a state cannot attend in both directions; runs refuse prefix language models")
    if inputs.documents is None:
        return shared
    if inputs.parents is not None and not torch.equal(inputs.parents, inputs.documents):
        return shared._replace(document_parents=(inputs.documents, inputs.parents))
    return shared._replace(starts=document_starts(inputs.documents))


class Decoder(TransformerStack):
    """A whole model, or one pipeline stage of it: embedding, blocks, final norm, and a head unless that is tied.

    If the spec has an encoder, it is the module `encoder`, with the same dimensions and the same embedding, and the
    decoder's blocks attend to its output. A pipeline stage has a range of all blocks, counted from the encoder's first
    block to the decoder's last. The stages with a stack's first block have the embedding. The last stage has the final
    norm and the head; if the head is tied, it has a copy of the embedding instead.
    """

    def __init__(self, spec: ModelSpec, blocks: range | None = None) -> None:
        """
        Args:
            blocks: blocks of a pipeline stage, counted from the encoder's first block; None: all blocks.
        """
        # Divide the blocks between encoder and decoder.
        encoder_layers = spec.num_encoder_layers or 0
        if blocks is None:
            blocks = range(encoder_layers + spec.num_layers)
        encoder_blocks = range(min(blocks.start, encoder_layers), min(blocks.stop, encoder_layers))
        own_blocks = range(max(blocks.start - encoder_layers, 0), max(blocks.stop - encoder_layers, 0))
        # The first blocks of encoder and decoder need the embedding, in whichever stage they are. So does a tied head.
        is_last = bool(own_blocks) and own_blocks.stop == spec.num_layers
        is_first = any(part and part.start == 0 for part in (encoder_blocks, own_blocks))
        has_embedding = is_first or (is_last and spec.tie_word_embeddings and not spec.score_head)
        super().__init__(
            spec, spec.num_layers, own_blocks, has_embedding=has_embedding, causal=True, cross=encoder_layers > 0
        )
        self.head = None
        if is_last and not spec.tie_word_embeddings and not spec.score_head:
            self.head = build_linear(end_rows(spec)["head"])
        # A score head replaces the head (reward model); a value head is beside it.
        has_score = is_last and (spec.score_head or spec.value_head)
        self.score = build_linear(end_rows(spec)["score"]) if has_score else None
        # The head's weight in the layout of a kernel, if the model was prepacked for inference.
        self.prepacked_head: PrepackedWeight | PrepackedQuantizedWeight | ByteWeight | None = None
        self.mtp = nn.ModuleList()
        for _ in range(spec.mtp_layers if is_last else 0):
            self.mtp.append(PredictionLayer(spec, Block(spec, spec.prediction_layer)))
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
        further: FurtherLoss | None = None,
    ) -> Tensor | StageOutput | None:
        """Run the model, or one stage of it.

        Args:
            inputs: the inputs; a bare tensor holds token ids.
            loss: computes the result from the hidden states and the head's weight [V, D]. It is called inside this
                forward, because only here FSDP has gathered the weight.
            auxiliary: computes auxiliary losses from the router statistics, in training.
            received: output of the previous stage; None in the first stage.
            further: computes the loss of multi-token prediction, in training.

        Returns:
            From the last stage: the final hidden states [B, T, D], from which `logits` computes logits. With `loss`,
            its result instead (a number or [m]); with the loss of multi-token prediction and auxiliary losses [n], all
            as one tensor [m + 1 + n].
            From other stages: the input of the next stage. It is None if the stage is of an encoder and the inputs have
            no `source`, as when generation reads the encoder's keys and values from a cache.
        """
        if isinstance(inputs, Tensor):
            inputs = Inputs(inputs)
        # Run the encoder's blocks of this stage. A stage without decoder blocks ends here.
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

        # Run the decoder's blocks, and in the last stage the head's scaling and the loss.
        output = self.run(inputs, received, self.embedding, encoder_mask)
        if not self.is_last:
            return output
        x_BTD = output.states
        if self.spec.scale_lm_head:
            x_BTD = x_BTD * self.spec.hidden_size**-0.5
        if self.spec.logit_scale != 1.0 and not self.spec.score_head:
            x_BTD = x_BTD * self.spec.logit_scale
        if loss is None:
            return x_BTD
        total = loss(*self.head_operands(x_BTD))
        if further is not None and self.training and self.spec.mtp_loss_weight:
            total = torch.cat([total.view(-1), self._predict_further(inputs, x_BTD, further).view(1)])
        if auxiliary is not None and output.routings:
            return torch.cat([total.view(-1), auxiliary(output.routings)])
        return total

    def _predict_further(self, inputs: Inputs, x_BTD: Tensor, further: FurtherLoss) -> Tensor:
        """Return the mean loss of the layers of multi-token prediction."""
        assert self.embedding is not None
        context = self.prediction_context(inputs, x_BTD)
        losses = []
        for depth, layer in enumerate(self.mtp, 1):
            # Attention knows only differences of positions, so those of the tokens before do as well.
            embedded_BTD = self.embed_tokens(self.embedding, shift_left(inputs.tokens, depth, 0))
            x_BTD = layer(x_BTD, embedded_BTD, context)
            losses.append(further(*self.head_operands(x_BTD), depth))
        return torch.stack(losses).mean()

    def prediction_context(self, inputs: Inputs, x_BTD: Tensor) -> BlockContext:
        """Return the context of the layers of multi-token prediction."""
        layer = self.spec.prediction_layer
        positions_BT = inputs.positions
        if positions_BT is None:
            positions_BT = torch.arange(inputs.tokens.shape[1], device=inputs.tokens.device)
        return self._contexts([(layer, ContextKeys.of(layer))], inputs, positions_BT, x_BTD, BlockContext())[0]

    @property
    def stages(self) -> list[Decoder]:
        """The stages of the model that this process holds: itself."""
        return [self]

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits [B, T, V] of the next token."""
        return cap_logits(self.spec, linear(*self.head_operands(hidden_BTD)))

    def head_operands(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states [B, T, D] and a weight [V, D] that multiply to the logits, before their soft cap.

        A LoRA adapter and the bias of the head are appended to both, so they have D + R + 1 dims.
        """
        weight_VD = self.head_weight()
        inputs = [hidden_BTD]
        columns: list[Tensor] = []
        if isinstance(self.head, LoraLinear):
            inputs.append(self.head.scale * linear(hidden_BTD, self.head.lora_a))
            columns.append(self.head.lora_b)
        if self.head is not None and self.head.bias is not None:
            inputs.append(torch.ones_like(hidden_BTD[..., :1]))
            columns.append(self.head.bias.unsqueeze(1))
        if not columns:
            return hidden_BTD, weight_VD
        columns = [column.to(weight_VD.dtype) for column in columns]
        return torch.cat(inputs, -1), torch.cat([weight_VD, *columns], 1)

    def head_weight(self) -> Tensor:
        """Return the head's weight [V, D], which is the embedding's if the head is tied; of a reward model [1, D]."""
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


def cap_logits(spec: ModelSpec, logits: Tensor) -> Tensor:
    """Return the logits with the soft cap of the model, if it has one."""
    return logits if spec.logit_softcap is None or spec.score_head else soft_cap(logits, spec.logit_softcap)


def build_model(spec: ModelSpec, blocks: range | None = None) -> Decoder:
    """Build the model of a spec with its adapters, or a pipeline stage of it. Its weights are not initialized."""
    model = Decoder(spec, blocks)
    add_adapters(model, spec)
    return model


@lru_cache(maxsize=16)
def parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Return names and shapes of the model's parameters in module order, as if none were quantized.

    The result is cached, because a model of a hundred blocks takes a second to build. Do not modify it.
    """
    with torch.device("meta"):
        model = build_model(spec.model_copy(update={"quantization": None}))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def iterate_blocks(model: Decoder) -> Iterator[tuple[int, nn.Module]]:
    """Yield each block with its number in its stack, in the order of the forward pass; then those of multi-token
    prediction, whose numbers go on."""
    stacks = (model,) if model.encoder is None else (model.encoder, model)
    for stack in stacks:
        yield from zip(stack.block_range, stack.blocks, strict=True)
    for number, layer in enumerate(model.mtp, model.spec.num_layers):
        assert isinstance(layer, PredictionLayer)
        yield number, layer.block
