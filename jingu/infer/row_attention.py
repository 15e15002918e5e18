"""Attention over whole rows with gradients, bitwise equal to the engine's attention during generation.

The order in which kernels sum depends on the sizes of their operands. This module calls the engine's kernels on
operands of the same sizes (see `jingu.infer.attention_backend`). A training forward pass that uses it in place of a KV
cache therefore returns exactly the numbers that the engine computed token by token.

Shapes: B rows, T tokens, H query heads, G KV heads, K head dim, N = B sequences, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.infer.attention_backend import KV_SPAN, AttentionGroup, AttentionHeads, GatherBackend, attend_padded
from jingu.infer.kv_cache import PagedKVCache, first_key, pad_heads
from jingu.model.components import LayerSpec
from jingu.model.decoder import Decoder
from jingu.model.inputs import LayerKVCache
from jingu.model.mixer_parts import Mixer
from jingu.model.spec import ModelSpec


class RowAttention(PagedKVCache):
    """Implements `KVCache` without storing anything: each token attends to the tokens of its row up to itself."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self.rows = GatherBackend(spec)
        super().__init__(spec, (), KV_SPAN, device, self.rows)

    def layer(self, number: int) -> LayerKVCache:  # type: ignore[override]
        return _LayerRowAttention(self.rows, self.spec.layer(number), self.reaches[self.layers[number].pool])


class _LayerRowAttention(LayerKVCache):
    def __init__(self, backend: GatherBackend, layer: LayerSpec, reach: int | None) -> None:
        self._reach = reach
        self._backend = backend
        self._layer = layer

    def attend(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGV: Tensor | None,
        scale: float | None,
        first_head: int,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        rows, tokens, heads, head_dim = q_BTHK.shape
        value_dim = k_BTGK.shape[3] if v_BTGV is None else v_BTGV.shape[3]
        parameters = AttentionHeads(head_dim**-0.5 if scale is None else scale, first_head, sinks_H)
        q_BTHK, k_BTGK, v_BTGK = pad_heads(q_BTHK, k_BTGK, k_BTGK if v_BTGV is None else v_BTGV)
        spans = []
        # Split queries at multiples of KV_SPAN positions, as the engine does, so that operands have the same sizes.
        for begin in range(0, tokens, KV_SPAN):
            end = min(begin + KV_SPAN, tokens)
            # Pad the keys to a whole span with zeros, as the engine does with the zero block.
            padding = (0, 0, 0, 0, 0, begin + KV_SPAN - end)
            # Layers with a window read only the spans that it touches.
            first = first_key(self._reach, begin)
            k_NGSK = F.pad(k_BTGK[:, first:end], padding).transpose(1, 2)
            v_NGSK = F.pad(v_BTGK[:, first:end], padding).transpose(1, 2)
            positions_NQ = torch.arange(begin, end, device=q_BTHK.device).expand(rows, -1)
            group = AttentionGroup(rows, end - begin, slice(0), torch.empty(0), None, positions_NQ, range(0), first)
            head_range = range(first_head, first_head + heads)
            bias = self._backend.bias(group, self._layer, head_range, k_NGSK.shape[2], k_NGSK.shape[1], q_BTHK.dtype)
            q_BXHK = q_BTHK[:, begin:end].reshape(1, rows * (end - begin), heads, -1)
            y_BXHK = attend_padded(q_BXHK, k_NGSK, v_NGSK, bias, parameters, self._layer.attention.softcap)
            spans.append(y_BXHK.view(rows, end - begin, heads, -1))
        return torch.cat(spans, 1)[..., :value_dim]

    def mix(self, mixer: Mixer, x_BTD: Tensor) -> Tensor:
        raise NotImplementedError("runs refuse task.exact for layers with a state")

    def tokens(self, rows: int) -> int:
        return rows

    def read(self, k_BSGK: Tensor, v_BSGK: Tensor) -> None:
        raise NotImplementedError("there is no encoder")

    def attend_source(self, q_BTHK: Tensor, scale: float | None) -> Tensor:
        raise NotImplementedError("there is no encoder")


class _WithValue(torch.autograd.Function):
    """Returns the second tensor in the forward pass, and passes its gradient to the first one."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


def compute_as_in_generation(model: Decoder) -> None:
    """Make the blocks and the norms of a model return, in training, the values that they compute without gradients.

    Some operations round differently with gradients enabled. The gradients are those of training. Blocks are computed
    twice.
    """
    for module in (*model.blocks, model.embedding_norm, model.norm):
        if module is not None:
            module.forward = _with_value(module.forward)


def _with_value(forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward_twice(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        with torch.no_grad():
            value = forward(*arguments)
        result = forward(*arguments)
        if isinstance(result, tuple):  # a block's output and its router statistics
            return _WithValue.apply(result[0], value[0]), *result[1:]
        return _WithValue.apply(result, value)

    return forward_twice
