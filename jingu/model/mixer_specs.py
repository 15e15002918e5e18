"""Mixers that are not attention: their fields in a spec, and the rows of their parameters, without PyTorch.

A mixer combines the tokens of a sequence. These keep a state of fixed size instead of keys and values of all tokens.

Shapes in comments: D hidden size, L taps (the kernel length of a convolution).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jingu.errors import JinguError
from jingu.model.components import Component, PositiveFloat, PositiveInt, optional
from jingu.model.parts import ModuleRow
from jingu.model.sharding_table import ShardingStyle

Taps = Annotated[int, Field(ge=2)]


class GatedDelta(Component):
    """The gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid), and Kimi Delta Attention.

    Attributes:
        num_heads: heads of the values.
        num_key_heads: heads of queries and keys; each serves as many adjacent heads of the values.
        num_taps: kernel length of the convolutions of queries, keys and values.
        decay_per_channel: whether each channel of a key has a decay (Kimi) instead of each head.
        decay_bound: the smallest logarithm of a decay, which then follows a sigmoid (Ling, GLM 5); None: a softplus
            without a bound.
        negative_eigenvalues: whether the share of its value that a token writes is up to 2 instead of 1.
        gate_rank: rank of the projections of gate and decay, if they are products of two matrices (Kimi).
        gate_activation: activation of the gate of the normalized outputs.
        eps: of the norm of the outputs.
    """

    type: Literal["gated_delta"] = "gated_delta"
    num_heads: PositiveInt
    num_key_heads: PositiveInt
    key_head_dim: PositiveInt
    value_head_dim: PositiveInt
    num_taps: Taps = 4
    decay_per_channel: bool = optional(False)
    decay_bound: Annotated[float, Field(lt=0)] | None = optional(None)
    negative_eigenvalues: bool = optional(False)
    gate_rank: PositiveInt | None = optional(None)
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    eps: PositiveFloat = 1e-6

    @model_validator(mode="after")
    def _check_heads(self) -> GatedDelta:
        if self.num_heads % self.num_key_heads:
            raise JinguError(
                f"{self.num_heads} heads of values cannot share {self.num_key_heads} heads of keys.",
                fix="Set num_heads to a multiple of num_key_heads.",
            )
        return self


class StateSpace(Component):
    """Mamba-2 (Granite 4, Nemotron-H, Falcon-H1, Bamba).

    Attributes:
        num_groups: groups of heads that share b and c.
        state_size: length of b and c.
        num_taps: kernel length of the convolutions of x, b and c.
        step_limits: smallest and largest length of a step; None: no largest one.
        norm: whether the gate is applied before the norm, behind it, or without a norm.
        eps: of the norm of each group of heads.
        bias: whether the projections have biases.
        conv_bias: whether the convolutions have biases.
        input_scale: multiplies the hidden states.
        part_scales: multiply gate, x, b, c and step after their projections (Falcon-H1).
    """

    type: Literal["state_space"] = "state_space"
    num_heads: PositiveInt
    num_groups: PositiveInt = 1
    head_dim: PositiveInt
    state_size: PositiveInt
    num_taps: Taps = 4
    step_limits: tuple[Annotated[float, Field(ge=0)], PositiveFloat | None] = (0.0, None)
    norm: Literal["behind_gate", "before_gate", "none"] = "behind_gate"
    eps: PositiveFloat = 1e-5
    bias: bool = False
    conv_bias: bool = True
    input_scale: float = optional(1.0)
    part_scales: tuple[float, float, float, float, float] = optional((1.0, 1.0, 1.0, 1.0, 1.0))

    @model_validator(mode="after")
    def _check_heads(self) -> StateSpace:
        if self.num_heads % self.num_groups:
            raise JinguError(
                f"{self.num_heads} heads cannot be divided into {self.num_groups} groups.",
                fix="Set num_heads to a multiple of num_groups.",
            )
        return self


class ShortConv(Component):
    """The gated short convolution of LFM2: a convolution between two gates.

    Attributes:
        num_taps: kernel length of the convolution.
        bias: whether projections and convolution have biases.
    """

    type: Literal["short_conv"] = "short_conv"
    num_taps: Taps = 3
    bias: bool = False


def state_shapes(part: GatedDelta | StateSpace | ShortConv, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of the state of one sequence: the last inputs of the convolutions, and that of the recurrence.

    The first is stored in the dtype of the hidden states, the second in fp32. Their size does not depend on the number
    of tokens.

    Args:
        width: the hidden size.
    """
    before = part.num_taps - 1
    if isinstance(part, ShortConv):
        return [(before, width)]
    if isinstance(part, StateSpace):
        channels = part.num_heads * part.head_dim + 2 * part.num_groups * part.state_size
        return [(before, channels), (part.num_heads, part.state_size, part.head_dim)]
    channels = 2 * part.num_key_heads * part.key_head_dim + part.num_heads * part.value_head_dim
    return [(before, channels), (part.num_heads, part.key_head_dim, part.value_head_dim)]


def gated_delta_rows(part: GatedDelta, width: int, std: float | None = None) -> dict[str, ModuleRow]:
    """Return the rows of a gated delta rule.

    Args:
        width: the hidden size.
        std: standard deviation of the initial weights of `output`.
    """
    heads, keys = part.num_heads, part.num_key_heads * part.key_head_dim
    values = heads * part.value_head_dim
    decays = heads * part.key_head_dim if part.decay_per_channel else heads
    outputs: dict[str, tuple[int, ShardingStyle]] = {
        "q": (keys, "kv_heads"),
        "k": (keys, "kv_heads"),
        "v": (values, "heads"),
    }
    rows = {name: ModuleRow((size, width), style) for name, (size, style) in outputs.items()}
    rows |= {f"{name}_conv": ModuleRow((size, part.num_taps), style) for name, (size, style) in outputs.items()}
    for name, size in (("gate", values), ("decay", decays)):
        if part.gate_rank is not None:
            rows[f"{name}_down"] = ModuleRow((part.gate_rank, width))
        rows[name] = ModuleRow((size, part.gate_rank or width), "heads")
    return rows | {
        "beta": ModuleRow((heads, width), "heads"),
        "log_rate": ModuleRow((heads,), "heads", initial=0.0),
        "decay_bias": ModuleRow((decays,), "heads", initial=0.0),
        "norm": ModuleRow((part.value_head_dim,), initial=1.0),
        "output": ModuleRow((width, values), "from_heads", std=std),
    }


def state_space_rows(part: StateSpace, width: int, std: float | None = None) -> dict[str, ModuleRow]:
    """Return the rows of a Mamba-2 mixer. Arguments are those of `gated_delta_rows`."""
    inner, shared = part.num_heads * part.head_dim, part.num_groups * part.state_size
    rows = {"gate": ModuleRow((inner, width), "heads", part.bias)}
    outputs: dict[str, tuple[int, ShardingStyle]] = {
        "x": (inner, "heads"),
        "b": (shared, "kv_heads"),
        "c": (shared, "kv_heads"),
    }
    rows |= {name: ModuleRow((size, width), style, part.bias) for name, (size, style) in outputs.items()}
    rows |= {
        f"{name}_conv": ModuleRow((size, part.num_taps), style, part.conv_bias)
        for name, (size, style) in outputs.items()
    }
    rows |= {
        "step": ModuleRow((part.num_heads, width), "heads", part.bias),
        "step_bias": ModuleRow((part.num_heads,), "heads", initial=0.0),
        "log_rate": ModuleRow((part.num_heads,), "heads", initial=0.0),
        "skip": ModuleRow((part.num_heads,), "heads", initial=1.0),
    }
    if part.norm != "none":
        rows["norm"] = ModuleRow((inner,), "heads", initial=1.0)
    return rows | {"output": ModuleRow((width, inner), "from_heads", part.bias, std=std)}


def short_conv_rows(part: ShortConv, width: int, std: float | None = None) -> dict[str, ModuleRow]:
    """Return the rows of a gated short convolution. Arguments are those of `gated_delta_rows`."""
    return {
        **{name: ModuleRow((width, width), "column", part.bias) for name in ("gate_in", "gate_out", "x")},
        "conv": ModuleRow((width, part.num_taps), "column", part.bias),
        "output": ModuleRow((width, width), "row", part.bias, std=std),
    }
