"""Settings of what is trained: the whole model, a part of it, or adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field

from jingu.config.sections.base import PathText, Positive, Settings, default_type


class FullSettings(Settings):
    """Train the model's own weights, all of them or a part. The whole model is saved."""

    type: Literal["full"] = "full"
    freeze: list[str] = []
    """Patterns of names of weights that are not trained, such as `embedding.*` or `blocks.0.*`."""
    num_trainable_layers: Positive | None = None
    """Train only the last n blocks, and the norm and the head after them; null: all blocks."""


class AdapterBase(Settings):
    """Settings of every adapter. Only the adapter is trained and saved."""

    type: str
    initial_adapter: PathText | None = None
    """A run, or a peft folder, whose adapter the new one starts from."""
    quantization: Literal["int8", "int4", "nf4"] | None = None
    """Format to which the frozen matrices of the blocks are quantized (QLoRA; nf4 needs the bitsandbytes package);
    null: none."""


class LoraSettings(AdapterBase):
    """Low-rank adapters of selected matrices (Hu et al., 2022)."""

    type: Literal["lora"] = "lora"
    rank: Positive = 8
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The adapter's output is scaled by alpha / rank."""
    use_rslora: bool = False
    """Scale by alpha / √rank instead (rank-stabilized LoRA, Kalajdzievski, 2023)."""
    use_dora: bool = False
    """Also train the norm of each row of the adapted matrix (DoRA, Liu et al., 2024)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of the adapter's input."""
    target_modules: list[str] = ["*attention.*", "*.feed_forward.*"]
    """Patterns of names of the adapted matrices, such as `blocks.*.attention.q`."""


class Ia3Settings(AdapterBase):
    """IA³ (Liu et al., 2022): trained factors for the outputs of selected matrices, or for the inputs of feed-forward
    `down`."""

    type: Literal["ia3"] = "ia3"
    target_modules: list[str] = ["*attention.k", "*attention.v", "*.feed_forward.down"]
    """Patterns of names of the matrices."""


class SoftPromptBase(AdapterBase):
    """Settings of trained vectors in place of tokens."""

    num_virtual_tokens: Positive = 20
    """Length of the prompt in virtual tokens."""
    init_text: str | None = None
    """Text whose token embeddings initialize the prompt (or its network's input), repeated or cut to its length; null:
    random tokens."""
    position: Literal["front", "back"] = "front"
    """Whether the prompt stands before the input, or behind it (an encoder's only)."""


class PromptSettings(SoftPromptBase):
    """Prompt tuning: trained vectors before the input of the decoder or encoder (Lester et al., 2021)."""

    type: Literal["prompt"] = "prompt"


class PTuningSettings(SoftPromptBase):
    """P-tuning: a prompt whose vectors a small network computes during training (Liu et al., 2021)."""

    type: Literal["p_tuning"] = "p_tuning"
    encoder: Literal["mlp", "lstm"] = "mlp"
    """The network: an MLP of three layers, or a bidirectional LSTM of two layers followed by two linear ones."""
    encoder_hidden_size: Positive | None = None
    """Its hidden size; null: the model's."""


class DeepPromptBase(AdapterBase):
    """Settings of trained keys and values before the text in each block."""

    num_virtual_tokens: Positive = 20
    """Length of the prompt in virtual tokens."""
    in_encoder: bool = True
    """Whether the encoder's blocks have them, too."""


class PrefixTuningSettings(DeepPromptBase):
    """Prefix tuning: keys and values in each block, computed by a small network (Li and Liang, 2021)."""

    type: Literal["prefix"] = "prefix"
    encoder_hidden_size: Positive = 512
    """Hidden size of the network, of which each block has its own."""


class PTuningV2Settings(DeepPromptBase):
    """P-tuning v2: keys and values in each block, trained directly (Liu et al., 2022)."""

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
    default_type("full"),
]
