"""Settings of what trains: all of a model, a part of it, or adapters beside it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import Place, Positive, Settings, type_or


class FullSettings(Settings):
    """The model's own weights are trained: all of them, or a part; all of them are saved."""

    type: Literal["full"] = "full"
    freeze: list[str] = []
    """Patterns of names of weights that stay as they are, such as `embedding.*` or `blocks.0.*`."""
    last: Positive | None = None
    """Train only so many last blocks, and the norm and head after them; null: all blocks."""


class AdapterBase(Settings):
    """What every kind of adapters has: these alone are trained, and saved."""

    type: str
    start: Place | None = None
    """A run, or a folder of peft, with whose adapters these begin: those of another task, say."""
    base: Literal["int8", "int4", "nf4"] | None = None
    """What the matrices of the blocks, which are not trained, are rounded to (QLoRA; nf4 needs the bitsandbytes
    package); null: to what is computed in."""


class LoraSettings(AdapterBase):
    """Adapters of low rank beside chosen matrices (Hu et al., 2022)."""

    type: Literal["lora"] = "lora"
    rank: Positive = 8
    """Inner size of an adapter."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """What an adapter gives is multiplied by alpha / rank."""
    rank_stabilised: bool = False
    """Multiply by alpha / √rank instead (Kalajdzievski, 2023)."""
    dora: bool = False
    """Also train the length of each row of the sum of matrix and adapter (Liu et al., 2024)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is zero, others in each step."""
    targets: list[str] = ["*attention.*", "*.feed_forward.*"]
    """Patterns of names of the matrices that get one, such as `blocks.*.attention.q`."""


class Ia3Settings(AdapterBase):
    """Factors of what chosen matrices give; of a feed-forward's `down`, of what it gets (Liu et al., 2022)."""

    type: Literal["ia3"] = "ia3"
    targets: list[str] = ["*attention.k", "*attention.v", "*.feed_forward.down"]
    """Patterns of names of the matrices."""


class SoftPromptBase(AdapterBase):
    """Vectors in the place of tokens."""

    length: Positive = 20
    """Tokens of the prompt."""
    initial_text: str | None = None
    """Text whose tokens' vectors they (or what a network makes them of) begin with, repeated or cut to the length;
    null: tokens drawn by the seed."""
    position: Literal["front", "back"] = "front"
    """Before what is read, or (an encoder's) behind it."""


class PromptSettings(SoftPromptBase):
    """Prompt tuning: vectors in the place of tokens, before the text or what an encoder reads (Lester et al., 2021)."""

    type: Literal["prompt"] = "prompt"


class PTuningSettings(SoftPromptBase):
    """P-tuning: a prompt whose vectors a small network makes while it is trained (Liu et al., 2021)."""

    type: Literal["p_tuning"] = "p_tuning"
    encoder: Literal["mlp", "lstm"] = "mlp"
    """The network: three layers, or two of an LSTM in both directions and two after them."""
    hidden: Positive | None = None
    """Its width; null: the model's."""


class DeepPromptBase(AdapterBase):
    """Keys and values before the text in each block."""

    length: Positive = 20
    """Tokens of the prompt."""
    in_encoder: bool = True
    """Whether the blocks of an encoder have them, too."""


class PrefixTuningSettings(DeepPromptBase):
    """Prefix tuning: keys and values before the text in each block, made by a small network (Li and Liang, 2021)."""

    type: Literal["prefix"] = "prefix"
    hidden: Positive = 512
    """Inner width of the network, of which each block has its own."""


class PTuningV2Settings(DeepPromptBase):
    """P-tuning v2: keys and values before the text in each block, trained themselves (Liu et al., 2022)."""

    type: Literal["p_tuning_v2"] = "p_tuning_v2"


Tune = Annotated[
    FullSettings
    | LoraSettings
    | Ia3Settings
    | PromptSettings
    | PTuningSettings
    | PrefixTuningSettings
    | PTuningV2Settings,
    Discriminator("type"),
    type_or("full"),
]
