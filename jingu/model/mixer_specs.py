"""The specs of mixers with a state, which replace attention: fields, rows, and the shapes of their states."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from jingu.errors import JinguError
from jingu.model.part_spec import Component, ModuleRow, PositiveFloat, PositiveInt, optional
from jingu.model.sharding_table import ShardingStyle

Taps = Annotated[int, Field(ge=2)]
MixerKernels = Literal["auto", "torch", "fla"]


class MixerBase(Component):
    """What every mixer declares.

    Attributes:
        module: the class of its module, a `mixer_parts.Mixer`, which receives the spec and the rows.
    """

    module: ClassVar[str]

    def rows(self, width: int, std: float | None = None) -> dict[str, ModuleRow]:
        """Return the rows of the mixer, in the order of its modules.

        Args:
            width: the hidden size.
            std: standard deviation of the initial weights of `output`.
        """
        raise NotImplementedError

    def state_shapes(self, width: int) -> list[tuple[int, ...]]:
        """Return the shapes of the state of one sequence: the last inputs of the convolutions, that of the recurrence.

        The first is stored in the dtype of the hidden states; the second, if there is a recurrence, in fp32. It is
        [heads, rows, columns]. Their size does not depend on the number of tokens.

        Args:
            width: the hidden size.
        """
        raise NotImplementedError

    @property
    def heads(self) -> tuple[int, int]:
        """The number of heads, and of heads of keys or groups; 0 if the mixer has none and is divided by channels."""
        return 0, 0

    @property
    def norm_groups(self) -> int | None:
        """The number of groups of heads that its norm is over; None if the norm is over single heads."""
        return None


class GatedDelta(MixerBase):
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

    module = "jingu.model.gated_delta:GatedDeltaMixer"
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

    def rows(self, width: int, std: float | None = None) -> dict[str, ModuleRow]:
        keys, values = self.num_key_heads * self.key_head_dim, self.num_heads * self.value_head_dim
        decays = self.num_heads * self.key_head_dim if self.decay_per_channel else self.num_heads
        convolved: dict[str, tuple[int, ShardingStyle]] = {
            "q": (keys, "kv_heads"),
            "k": (keys, "kv_heads"),
            "v": (values, "heads"),
        }
        rank = self.gate_rank
        return {
            **{name: ModuleRow((size, width), style) for name, (size, style) in convolved.items()},
            "gate": ModuleRow((values, rank or width), "heads"),
            "decay": ModuleRow((decays, rank or width), "heads"),
            "beta": ModuleRow((self.num_heads, width), "heads"),
            "output": ModuleRow((width, values), "from_heads", std=std),
            **{
                f"{name}_conv": ModuleRow((size, self.num_taps), style, decays=False)
                for name, (size, style) in convolved.items()
            },
            **({} if rank is None else {name: ModuleRow((rank, width)) for name in ("gate_down", "decay_down")}),
            "log_rate": ModuleRow((self.num_heads,), "heads", initial="rates", is_wide=True),
            "decay_bias": ModuleRow((decays,), "heads", initial="steps", is_wide=True),
            "norm": ModuleRow((self.value_head_dim,), initial=1.0),
        }

    def state_shapes(self, width: int) -> list[tuple[int, ...]]:
        channels = 2 * self.num_key_heads * self.key_head_dim + self.num_heads * self.value_head_dim
        return [(self.num_taps - 1, channels), (self.num_heads, self.key_head_dim, self.value_head_dim)]

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_heads, self.num_key_heads


class StateSpace(MixerBase):
    """Mamba-2 (Granite 4, Nemotron-H, Falcon-H1, Bamba).

    Attributes:
        num_groups: groups of heads that share b and c.
        state_size: length of b and c.
        num_taps: kernel length of the convolutions of x, b and c.
        step_limits: smallest and largest length of a step; None: no largest one.
        norm: whether the gate is applied before the norm, behind it, or without a norm.
        eps: of the norm of each group of heads.
        bias: whether the projections of the inputs have biases.
        output_bias: whether the projection of the outputs has a bias.
        conv_bias: whether the convolutions have biases.
        input_scale: multiplies the hidden states.
        part_scales: multiply gate, x, b, c and step after their projections (Falcon-H1).
        output_scale: multiplies the results of the output projection.
    """

    module = "jingu.model.state_space:StateSpaceMixer"
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
    output_bias: bool = False
    conv_bias: bool = True
    input_scale: float = optional(1.0)
    part_scales: tuple[float, float, float, float, float] = optional((1.0, 1.0, 1.0, 1.0, 1.0))
    output_scale: float = optional(1.0)

    @model_validator(mode="after")
    def _check_heads(self) -> StateSpace:
        if self.num_heads % self.num_groups:
            raise JinguError(
                f"{self.num_heads} heads cannot be divided into {self.num_groups} groups.",
                fix="Set num_heads to a multiple of num_groups.",
            )
        return self

    def rows(self, width: int, std: float | None = None) -> dict[str, ModuleRow]:
        inner, shared = self.num_heads * self.head_dim, self.num_groups * self.state_size
        convolved: dict[str, tuple[int, ShardingStyle]] = {
            "x": (inner, "heads"),
            "b": (shared, "kv_heads"),
            "c": (shared, "kv_heads"),
        }
        rows = {
            "gate": ModuleRow((inner, width), "heads", self.bias),
            **{name: ModuleRow((size, width), style, self.bias) for name, (size, style) in convolved.items()},
            "step": ModuleRow((self.num_heads, width), "heads", self.bias),
            "output": ModuleRow((width, inner), "from_heads", self.output_bias, std=std),
            **{
                f"{name}_conv": ModuleRow((size, self.num_taps), style, self.conv_bias, decays=False)
                for name, (size, style) in convolved.items()
            },
            "step_bias": ModuleRow((self.num_heads,), "heads", initial="steps", is_wide=True),
            "log_rate": ModuleRow((self.num_heads,), "heads", initial="rates", is_wide=True),
            "skip": ModuleRow((self.num_heads,), "heads", initial=1.0, is_wide=True),
        }
        return rows if self.norm == "none" else {**rows, "norm": ModuleRow((inner,), "heads", initial=1.0)}

    def state_shapes(self, width: int) -> list[tuple[int, ...]]:
        channels = self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size
        return [(self.num_taps - 1, channels), (self.num_heads, self.state_size, self.head_dim)]

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_heads, self.num_groups

    @property
    def norm_groups(self) -> int | None:
        return None if self.norm == "none" else self.num_groups


class ShortConv(MixerBase):
    """The gated short convolution of LFM2: a convolution between two gates.

    Attributes:
        num_taps: kernel length of the convolution.
        bias: whether projections and convolution have biases.
    """

    module = "jingu.model.short_conv:ShortConvMixer"
    type: Literal["short_conv"] = "short_conv"
    num_taps: Taps = 3
    bias: bool = False

    def rows(self, width: int, std: float | None = None) -> dict[str, ModuleRow]:
        return {
            **{name: ModuleRow((width, width), "column", self.bias) for name in ("gate_in", "gate_out", "x")},
            "output": ModuleRow((width, width), "row", self.bias, std=std),
            "conv": ModuleRow((width, self.num_taps), "column", self.bias, decays=False),
        }

    def state_shapes(self, width: int) -> list[tuple[int, ...]]:
        return [(self.num_taps - 1, width)]


class NoMixer(Component):
    """No mixer, and no attention either: the layer is a feed-forward alone."""

    type: Literal["none"] = "none"


# Mixers that keep a state.
StateMixer = GatedDelta | StateSpace | ShortConv

Mixer = Annotated[StateMixer | NoMixer, Field(discriminator="type")]
