"""Settings that choose which weights are trained: the whole model, a part of it, or adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field

from jingu.config.sections.base import PathText, Positive, Settings, default_type


def _as_list(value: Any) -> Any:
    """Return a single text, such as peft's `all-linear` or a regular expression, as a list of one."""
    return [value] if isinstance(value, str) else value


# Names or patterns of modules; a single one may be written as a text.
ModuleNames = Annotated[list[str], BeforeValidator(_as_list)]


class FullSettings(Settings):
    """Train the model's own weights, all or some of them. The whole model is saved.

    Attributes:
        freeze: Patterns for names of weights that are not trained, such as `embedding.*` or `blocks.0.*`.
        num_trainable_layers: Train only the last n blocks, and the norm and the head after them; null: all blocks.
    """

    type: Literal["full"] = "full"
    freeze: list[str] = []
    num_trainable_layers: Positive | None = None


class AdapterBase(Settings):
    """Settings of every adapter. Only the adapter is trained and saved.

    Attributes:
        initial_adapter: A run or a peft folder whose adapter the new adapter starts from.
        quantization: Format to which the frozen matrices of the blocks are quantized (QLoRA; nf4 needs the bitsandbytes
            package). stored: matrices that other tools have quantized keep their form. null: none.
    """

    type: str
    initial_adapter: PathText | None = None
    quantization: Literal["int8", "int4", "nf4", "stored"] | None = None


class LoraSettings(AdapterBase):
    """Low-rank adapters of selected matrices (Hu et al., 2022).

    Attributes:
        rank: Rank of the adapters.
        alpha: The adapter's output is scaled by alpha / rank.
        use_rslora: Scale by alpha / √rank instead (rank-stabilized LoRA, Kalajdzievski, 2023).
        use_dora: Also train the norm of each row of the adapted matrix (DoRA, Liu et al., 2024).
        dropout: Dropout probability of the adapter's input.
        target_modules: Patterns for names of the adapted matrices, such as `blocks.*.attention.q`; or names of modules
            in Hugging Face's model, such as `q_proj`, or a regular expression for them; or `all-linear`, for all
            matrices of the blocks. `embedding` and `head` are allowed too.
        rank_pattern: Ranks of some of these matrices, by name or pattern: `{"*.feed_forward.*": 32}`. The first pattern
            that matches applies.
        alpha_pattern: Alphas of some of these matrices, in the same form.
        lora_bias: Also train a bias for the second matrix of each adapter.
        init_lora_weights: How adapters are initialized. `default`: so that they change nothing at first. `pissa`: to
            the principal part of the matrix (Meng et al., 2024). `olora`: to its first orthogonal directions
            (Büyükakyüz, 2024). With both, the frozen matrix keeps the rest. `eva`: with the principal directions of the
            matrix's inputs in the data (Paischer et al., 2024). `loftq`: to the error of `quantization` (Li et al.,
            2023).
        lora_plus_ratio: Learning rate of the adapters' second matrices, relative to that of the first (LoRA+, Hayou et
            al., 2024).
        modules_to_save: Names of modules that are trained in full beside the adapters, such as `head` or `lm_head`.
        trainable_token_indices: Ids of tokens whose rows of the embedding are trained, such as new tokens.
    """

    type: Literal["lora"] = "lora"
    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    use_rslora: bool = False
    use_dora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: ModuleNames = ["*attention.*", "*.feed_forward.*"]
    rank_pattern: dict[str, Positive] = {}
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = {}
    lora_bias: bool = False
    init_lora_weights: Literal["default", "pissa", "olora", "eva", "loftq"] = "default"
    lora_plus_ratio: Annotated[float, Field(gt=0)] = 1.0
    modules_to_save: ModuleNames = []
    trainable_token_indices: list[Annotated[int, Field(ge=0)]] = []


class Ia3Settings(AdapterBase):
    """IA³ (Liu et al., 2022): trained factors that scale the outputs of selected matrices, or the inputs of
    feed-forward `down`.

    Attributes:
        target_modules: Patterns for names of the adapted matrices, or names of modules in Hugging Face's model.
    """

    type: Literal["ia3"] = "ia3"
    target_modules: ModuleNames = ["*attention.k", "*attention.v", "*.feed_forward.down"]


class SoftPromptBase(AdapterBase):
    """Settings of trained vectors that take the place of tokens.

    Attributes:
        num_virtual_tokens: Length of the prompt in virtual tokens.
        init_text: Text whose token embeddings initialize the prompt (or the input of its network), repeated or cut to
            the prompt's length; null: random tokens.
        position: front: the prompt stands before the input; back: after it (only for an encoder).
    """

    num_virtual_tokens: Positive = 20
    init_text: str | None = None
    position: Literal["front", "back"] = "front"


class PromptSettings(SoftPromptBase):
    """Prompt tuning: trained vectors before the input of the decoder or encoder (Lester et al., 2021)."""

    type: Literal["prompt"] = "prompt"


class PTuningSettings(SoftPromptBase):
    """P-tuning: a prompt whose vectors a small network computes during training (Liu et al., 2021).

    Attributes:
        encoder: Network that computes the vectors: an MLP of three layers, or a bidirectional LSTM of two layers
            followed by two linear layers.
        encoder_hidden_size: Hidden size of the network; null: the model's.
    """

    type: Literal["p_tuning"] = "p_tuning"
    encoder: Literal["mlp", "lstm"] = "mlp"
    encoder_hidden_size: Positive | None = None


class DeepPromptBase(AdapterBase):
    """Settings of trained keys and values before the text in each block.

    Attributes:
        num_virtual_tokens: Length of the prompt in virtual tokens.
        in_encoder: Whether the encoder's blocks get them too.
    """

    num_virtual_tokens: Positive = 20
    in_encoder: bool = True


class PrefixTuningSettings(DeepPromptBase):
    """Prefix tuning: keys and values in each block, computed by a small network (Li and Liang, 2021).

    Attributes:
        encoder_hidden_size: Hidden size of the network. Each block has a network of its own.
    """

    type: Literal["prefix"] = "prefix"
    encoder_hidden_size: Positive = 512


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
