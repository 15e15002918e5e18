"""Multi-head latent attention (DeepSeek-V2, 2024).

Training expands the latent vectors to keys and values of all heads. Generation does not: the projection of keys is
applied to the queries and that of values to the results instead ("absorbed"), so that the cache holds one latent vector
and one rotated key per token, for all heads. Prompts are computed in the same way, so that a token's result does not
depend on how its sequence was divided into steps.

Shapes: B rows, T tokens, D hidden size, H heads, K head size = U unrotated + R rotated dims, V size of a head's values,
L size of the latent vector, F = H · V.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from jingu.errors import JinguError
from jingu.model.adapter_layers import LoraLinear
from jingu.model.attention import BlockContext, SelfAttention
from jingu.model.components import LayerSpec
from jingu.model.inputs import LayerKVCache
from jingu.model.layers import Linear, build_linear, build_norm
from jingu.model.matmul_kernels import matmul
from jingu.model.norm_specs import RmsNorm
from jingu.model.part_spec import Rows
from jingu.model.quantized_weight import BATCH_INVARIANT_ROWS, FrozenWeight
from jingu.model.rotary import RotaryTables, apply_rotary
from jingu.model.spec import ModelSpec


class LatentSelfAttention(SelfAttention):
    """Causal self-attention whose keys and values are projections of a latent vector.

    Attributes:
        head_part: this rank's part of the heads, and the number of parts. Ulysses parallelism sets it.
    """

    head_part = (0, 1)

    def __init__(self, model: ModelSpec, layer: LayerSpec) -> None:
        latent = layer.attention.latent
        assert latent is not None
        # `build_projections` needs these, and is called by the constructor of the base class.
        self.rank, self.rotary_dim, self.query_rank = latent.rank, latent.rotary_dim, latent.query_rank
        self.norm = RmsNorm(eps=latent.eps)
        super().__init__(model, layer)
        if self.scale is None:
            self.scale = self.head_dim**-0.5  # cached keys have another size

    def build_projections(self, rows: Rows) -> None:
        """Create the projections of queries and of latent vectors."""
        self.q_down, self.q_latent_norm = None, None
        if self.query_rank is not None:
            self.q_down = build_linear(rows["q_down"])
            self.q_latent_norm = build_norm(self.norm, self.query_rank)
        self.q = build_linear(rows["q"])
        self.kv_down = build_linear(rows["kv_down"])
        self.k_rotary = build_linear(rows["k_rotary"])
        self.kv_latent_norm = build_norm(self.norm, self.rank)
        self.kv = build_linear(rows["kv"])
        self.qkv = None

    def forward(
        self, x_BTD: Tensor, context: BlockContext, cache: LayerKVCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return [B, T, D]. With a cache, tokens attend to the latent vectors that it stores, too."""
        if cache is None:
            return super().forward(x_BTD, context)
        q_BTHK = self.project_queries(x_BTD, context)
        latent_BTL, k_BT1R = self.project_latent(x_BTD, context.rotary)
        keys_HUL, values_HVL = self.split_kv_weight(x_BTD.dtype)
        # Apply the projection of keys to the queries: their product with a latent vector is the score of its key.
        q_BTHU, q_BTHR = q_BTHK.split((self.head_dim - self.rotary_dim, self.rotary_dim), -1)
        q_BTHL = _multiply_heads(q_BTHU, keys_HUL)
        kv_BT1L = torch.cat((latent_BTL.unsqueeze(2), k_BT1R), -1)
        attend = partial(cache.attend, scale=self.scale, first_head=self.first_head, sinks_H=None)
        y_BTHL = self.attend_latent(attend, torch.cat((q_BTHL, q_BTHR), -1), kv_BT1L)
        # And the projection of values to the result.
        y_BTHV = _multiply_heads(y_BTHL, values_HVL.transpose(1, 2))
        return self.project_output(y_BTHV.flatten(2), x_BTD)

    def attend_latent(self, cache_attention: Callable[..., Tensor], q_BTHL: Tensor, kv_BT1L: Tensor) -> Tensor:
        """Return [B, T, H, L]: attention to the latent vectors of a cache."""
        return cache_attention(q_BTHL, kv_BT1L, None)[..., : self.rank]

    def project_qkv(self, x_BTD: Tensor, rotary: RotaryTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [B, T, H, K] and values [B, T, H, V], with rotary positions."""
        q_BTHK = self._rotate(self.split_heads(self._queries(x_BTD)), rotary)
        latent_BTL, k_BT1R = self.project_latent(x_BTD, rotary)
        keys = self.head_dim - self.rotary_dim
        kv_BTHX = self._own_heads_of(self.kv(latent_BTL).unflatten(-1, (-1, keys + self.value_dim)), 2)
        k_BTHU, v_BTHV = kv_BTHX.split((keys, self.value_dim), -1)
        k_BTHK = torch.cat((k_BTHU, k_BT1R.expand(-1, -1, k_BTHU.shape[2], -1)), -1)
        return q_BTHK, k_BTHK, v_BTHV

    def project_queries(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        """Return rotated and scaled queries [B, T, H, K]."""
        q_BTHK = self._rotate(self.split_heads(self._queries(x_BTD)), context.rotary)
        if context.query_factor is not None:
            q_BTHK = (q_BTHK * context.query_factor).to(q_BTHK.dtype)
        return q_BTHK

    def project_latent(self, x_BTD: Tensor, rotary: RotaryTables | None) -> tuple[Tensor, Tensor]:
        """Return the latent vectors [B, T, L] and the rotated keys [B, T, 1, R] that all heads share."""
        latent_BTL = self.kv_latent_norm(self.kv_down(x_BTD))
        k_BT1R = self.k_rotary(x_BTD).unsqueeze(2)
        if rotary is not None:
            k_BT1R = apply_rotary(k_BT1R, rotary, interleaved=self.interleaved)
        return latent_BTL, k_BT1R

    def split_kv_weight(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the projections of keys [H, U, L] and of values [H, V, L], as matrices of each head.

        Raises:
            JinguError: the projection has an adapter that is not a part of the weight.
        """
        module: nn.Module = self.kv
        weight: Any = self.kv.weight
        whole = weight.whole().to(dtype) if isinstance(weight, FrozenWeight) else weight
        if isinstance(module, LoraLinear) and module.lora_m is None:
            whole = whole + module.scale * (module.lora_b @ module.lora_a).to(whole.dtype)
        elif type(module) is not Linear:
            raise JinguError(
                "the projection of latent vectors to keys and values has an adapter that generation cannot apply.",
                where="kv_b_proj",
                fix="Merge the adapter into the model (jingu merge), or tune other matrices.",
            )
        keys = self.head_dim - self.rotary_dim
        heads = self._own_heads_of(whole.to(dtype).unflatten(0, (-1, keys + self.value_dim)), 0)
        keys_HUL, values_HVL = heads.split((keys, self.value_dim), 1)
        return keys_HUL, values_HVL

    def _own_heads_of(self, x: Tensor, dim: int) -> Tensor:
        """Return the part of a tensor that belongs to this rank's heads, among ranks that have the same weights."""
        part, parts = self.head_part
        size = x.shape[dim] // parts
        return x if parts == 1 else x.narrow(dim, part * size, size)

    def _queries(self, x_BTD: Tensor) -> Tensor:
        if self.q_down is not None and self.q_latent_norm is not None:
            x_BTD = self.q_latent_norm(self.q_down(x_BTD))
        projected: Tensor = self.q(x_BTD)
        return projected

    def _rotate(self, q_BTHK: Tensor, rotary: RotaryTables | None) -> Tensor:
        """Rotate the last dims of each head."""
        if rotary is None:
            return q_BTHK
        plain, turned = q_BTHK.split((self.head_dim - self.rotary_dim, self.rotary_dim), -1)
        return torch.cat((plain, apply_rotary(turned, rotary, interleaved=self.interleaved)), -1)


def _multiply_heads(x_BTHI: Tensor, weight_HIO: Tensor) -> Tensor:
    """Return [B, T, H, O]: the vectors of each head times the head's matrix. A row's result does not depend on other
    rows, as in `jingu.model.matmul_kernels.linear`."""
    rows_HNI = x_BTHI.flatten(0, 1).transpose(0, 1)
    number = rows_HNI.shape[1]
    spare = -number % BATCH_INVARIANT_ROWS if x_BTHI.device.type == "cpu" else 0
    y_HNO = matmul(pad(rows_HNI, (0, 0, 0, spare)), weight_HIO)[:, :number]
    return y_HNO.transpose(0, 1).unflatten(0, x_BTHI.shape[:2])
