"""A block of a stack: attention or a mixer, and a feed-forward, with their norms.

Shapes: B rows, T tokens, D hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad

from jingu.model.attention import (
    BlockContext,
    CrossAttention,
    KeysAndValues,
    SelfAttention,
)
from jingu.model.components import LayerSpec
from jingu.model.dropout import BlockDropoutSeeds
from jingu.model.experts import MoELayer, RoutingStats
from jingu.model.feed_forward_specs import Activation, NoFeedForward
from jingu.model.inputs import LayerKVCache
from jingu.model.latent_attention import LatentSelfAttention
from jingu.model.layers import (
    FeedForwardLayer,
    Vector,
    activate,
    build_linear,
    build_norm,
)
from jingu.model.mixer_parts import Mixer
from jingu.model.mixer_specs import StateMixer
from jingu.model.part_spec import child_rows
from jingu.model.parts import block_rows, norm_places, residual_std
from jingu.model.spec import ModelSpec
from jingu.tables import import_name


class Block(nn.Module):
    """A transformer block: self-attention, cross-attention if there is an encoder, and feed-forward.

    A mixer replaces attention or stands beside it, and a block may have no feed-forward, or nothing else. Norms stand
    before these branches, behind them, or both, as the layer says; absent ones are None.
    """

    def __init__(self, spec: ModelSpec, layer: LayerSpec, *, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        hidden_size = spec.hidden_size
        self.dropout_seeds = BlockDropoutSeeds()
        self.parallel = layer.block_order != "sequential"
        self.residual_scale = layer.residual_scale
        norms = {
            f"{branch}{place}": build_norm(layer.norm, hidden_size) if has_norm else None
            for branch in ("attention", "cross_attention", "feed_forward")
            for place, has_norm in zip(("_norm", "_output_norm"), norm_places(layer, branch), strict=True)
        }
        self.attention_norm = norms["attention_norm"]
        self.attention = build_attention(spec, layer, causal=causal) if layer.has_attention else None
        self.mixer = None if layer.state_mixer is None else build_mixer(spec, layer.state_mixer)
        self.attention_output_norm = norms["attention_output_norm"]
        self.cross_attention_norm = norms["cross_attention_norm"] if cross else None
        self.cross_attention = CrossAttention(spec, layer) if cross else None
        self.cross_attention_output_norm = norms["cross_attention_output_norm"] if cross else None
        self.feed_forward_norm = norms["feed_forward_norm"]
        self.feed_forward: MoELayer | FeedForwardLayer | None = None
        part = layer.feed_forward
        if not isinstance(part, NoFeedForward):
            self.feed_forward = import_name(part.module)(part, part.rows(hidden_size))
        self.feed_forward_output_norm = norms["feed_forward_output_norm"]
        # A dense feed-forward beside the experts, inputs of the layer, and a scale.
        rows = block_rows(spec, layer, has_source=False)
        branch = part.parallel_branch()
        self.dense = None if branch is None else import_name(branch.module)(branch, child_rows(rows, "dense"))
        self.dense_output_norm, self.experts_output_norm = (
            None if branch is None else build_norm(layer.norm, hidden_size) for _ in range(2)
        )
        self.input_gate, self.input_projection = (
            build_linear(rows[name]) if name in rows else None for name in ("input_gate", "input_projection")
        )
        self.input_output_norm = None if self.input_gate is None else build_norm(layer.norm, hidden_size)
        self.activation: Activation = "silu" if isinstance(part, NoFeedForward) else part.activation
        self.scale = Vector(rows["scale"]) if "scale" in rows else None

    def forward(
        self, x_BTD: Tensor, context: BlockContext, cache: LayerKVCache | None = None
    ) -> tuple[Tensor, RoutingStats | None, KeysAndValues | None]:
        """Return the hidden states after the block; with experts in training, the statistics of the router; and, in
        models whose layers share them, the keys and values."""
        # LoRA adapters receive only hidden states, so they look up their dropout seeds in this object.
        self.dropout_seeds.own = context.dropout_seeds
        self.dropout_seeds.source = context.source_dropout_seeds

        kv = None
        if self.attention is not None or self.mixer is not None:
            normed_BTD = apply_norm(self.attention_norm, x_BTD)
            attended_BTD, kv = self._attend(normed_BTD, context, cache)
            attended_BTD = apply_norm(self.attention_output_norm, attended_BTD)
            if self.parallel:
                inputs_BTD = normed_BTD if self.feed_forward_norm is None else self.feed_forward_norm(x_BTD)
                y_BTD, routing = self._feed_forward(inputs_BTD, cache)
                return self._finish(x_BTD + self._scaled(attended_BTD + y_BTD), context), routing, kv
            x_BTD = x_BTD + self._scaled(attended_BTD)
        if self.cross_attention is not None:
            states_BTD = self.cross_attention(apply_norm(self.cross_attention_norm, x_BTD), context, cache)
            x_BTD = x_BTD + self._scaled(apply_norm(self.cross_attention_output_norm, states_BTD))
        x_BTD, routing = self._add_feed_forward(x_BTD, cache)
        return self._finish(x_BTD, context), routing, kv

    def _finish(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        """Return the hidden states with what stands behind the branches: the layer's inputs, and its scale."""
        if self.input_gate is not None and self.input_projection is not None and context.layer_inputs is not None:
            gated_BTP = activate(self.input_gate(x_BTD), self.activation) * context.layer_inputs
            x_BTD = x_BTD + apply_norm(self.input_output_norm, self.input_projection(gated_BTP))
        return x_BTD if self.scale is None else x_BTD * self.scale.weight.to(x_BTD.dtype)

    def _add_feed_forward(self, x_BTD: Tensor, cache: LayerKVCache | None) -> tuple[Tensor, RoutingStats | None]:
        """Return the hidden states after the feed-forward, if the block has one, and the statistics of the router."""
        if self.feed_forward is None:
            return x_BTD, None
        normed_BTD = apply_norm(self.feed_forward_norm, x_BTD)
        if self.dense is None:
            y_BTD, routing = self._feed_forward(normed_BTD, cache)
        else:
            # The experts have a norm of their own before them.
            y_BTD, routing = self._feed_forward(x_BTD, cache)
            y_BTD = apply_norm(self.experts_output_norm, y_BTD)
            y_BTD = y_BTD + apply_norm(self.dense_output_norm, self.dense(normed_BTD))
        return x_BTD + self._scaled(apply_norm(self.feed_forward_output_norm, y_BTD)), routing

    def _attend(
        self, x_BTD: Tensor, context: BlockContext, cache: LayerKVCache | None
    ) -> tuple[Tensor, KeysAndValues | None]:
        """Return the sum of the outputs of self-attention and of the mixer, of which the block has one or both; and
        keys and values, in models whose layers share them."""
        outputs: list[Tensor] = []
        kv = None
        if self.mixer is not None:
            outputs.append(self.mixer(x_BTD, context.starts, None, False, context.document_parents, cache)[0])
        if self.attention is not None:
            result = self.attention(x_BTD, context, cache)
            if isinstance(result, tuple):
                result, *kv = result
            outputs.append(result)
        return sum(outputs[1:], outputs[0]), None if kv is None else (kv[0], kv[1])

    def _scaled(self, branch_BTD: Tensor) -> Tensor:
        """Return the output of a branch as it is added to the hidden states."""
        return branch_BTD if self.residual_scale == 1.0 else branch_BTD * self.residual_scale

    def _feed_forward(self, x_BTD: Tensor, cache: LayerKVCache | None) -> tuple[Tensor, RoutingStats | None]:
        """Return the output of the feed-forward and, with experts in training, the statistics of the router."""
        assert self.feed_forward is not None
        if not isinstance(self.feed_forward, MoELayer):
            return self.feed_forward(x_BTD), None
        # With a cache, the last rows of a step may be padding. Do not send them to experts.
        rows = x_BTD.shape[1]
        tokens = rows if cache is None else cache.tokens(rows)
        if tokens == rows:
            output: tuple[Tensor, RoutingStats | None] = self.feed_forward(x_BTD)
            return output
        y_BTD, routing = self.feed_forward(x_BTD[:, :tokens])
        return pad(y_BTD, (0, 0, 0, rows - tokens)), routing


def build_attention(spec: ModelSpec, layer: LayerSpec, *, causal: bool) -> SelfAttention:
    """Return the self-attention of a layer."""
    if layer.attention.latent is not None:
        return LatentSelfAttention(spec, layer)
    return SelfAttention(spec, layer, causal=causal)


def build_mixer(spec: ModelSpec, part: StateMixer) -> Mixer:
    """Return the mixer of a layer."""
    mixer: Mixer = import_name(part.module)(part, part.rows(spec.hidden_size, residual_std(spec)))
    return mixer


def apply_norm(norm: nn.Module | None, x_BTD: Tensor) -> Tensor:
    """Return the normalized hidden states; without a norm, as they are."""
    return x_BTD if norm is None else norm(x_BTD)
