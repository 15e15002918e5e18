"""The adapters in the spec of a model."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from jingu.model.part_spec import Component, PositiveFloat, PositiveInt

# How the matrices of a LoRA adapter are initialized.
LoraInit = Literal["default", "pissa", "olora", "eva", "loftq"]


class Lora(Component):
    """LoRA: low-rank adapters beside frozen matrices (Hu et al., 2022).

    Attributes:
        alpha: the update B·A of a matrix is scaled by alpha / rank.
        target_modules: patterns (fnmatch) of the names of the adapted modules.
        use_rslora: whether to scale by alpha / √rank instead (Kalajdzievski, 2023).
        use_dora: whether the norm of each row of matrix plus update is trained separately (DoRA, Liu et al., 2024).
        dropout: dropout probability of the adapter's inputs.
        rank_pattern: pairs of a pattern of module names and the rank of these modules. The first match counts.
        alpha_pattern: the same for alpha.
        lora_bias: whether the matrix B has a bias.
        init_lora_weights: how the matrices A and B are initialized. With pissa and olora they start as a part of the
            adapted matrix, and the frozen matrix is the rest.
        modules_to_save: patterns of the names of modules whose own parameters are trained, too.
        trainable_token_indices: ids of the tokens whose rows of the embedding are trained, too.
    """

    type: Literal["lora"] = "lora"
    rank: PositiveInt
    alpha: PositiveFloat
    target_modules: tuple[str, ...]
    use_rslora: bool = False
    use_dora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rank_pattern: tuple[tuple[str, PositiveInt], ...] = ()
    alpha_pattern: tuple[tuple[str, PositiveFloat], ...] = ()
    lora_bias: bool = False
    init_lora_weights: LoraInit = "default"
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[int, ...] = ()

    @property
    def scale(self) -> float:
        """Factor of the update B·A."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def of_module(self, name: str) -> Lora:
        """Return the adapter of one module, with the rank and alpha of the first matching pattern of each."""
        rank = next((rank for pattern, rank in self.rank_pattern if fnmatchcase(name, pattern)), self.rank)
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if fnmatchcase(name, pattern)), self.alpha)
        return self.model_copy(update={"rank": rank, "alpha": alpha})


class Ia3(Component):
    """IA³ (Liu et al., 2022): trained factors of a matrix's outputs, or for a feed-forward's `down`, of its inputs.

    Attributes:
        target_modules: patterns (fnmatch) of the names of the adapted modules.
    """

    type: Literal["ia3"] = "ia3"
    target_modules: tuple[str, ...]

    def of_module(self, _name: str) -> Ia3:
        """Return the adapter of one module: the same for all."""
        return self


class SoftPrompt(Component):
    """Prompt tuning (Lester et al., 2021): virtual tokens with trained vectors in place of embeddings.

    The virtual tokens stand before the input of the encoder, or of the decoder if there is no encoder.

    Attributes:
        encoder: network that computes the vectors from trained parameters (P-tuning, Liu et al., 2021); `none`: the
            vectors are trained directly.
        encoder_hidden_size: hidden size of that network.
        after_input: whether the virtual tokens stand after the input instead.
    """

    type: Literal["soft_prompt"] = "soft_prompt"
    num_virtual_tokens: PositiveInt
    encoder: Literal["none", "mlp", "lstm"] = "none"
    encoder_hidden_size: PositiveInt = 1
    after_input: bool = False


class DeepPrompt(Component):
    """Virtual tokens with trained keys and values in each block, before the text (P-tuning v2, Liu et al., 2022).

    Attributes:
        encoder_hidden_size: hidden size of a network in each block that computes keys and values from trained vectors
            (prefix tuning, Li and Liang, 2021); None: keys and values are trained directly.
        in_encoder: whether the blocks of an encoder, if there is one, have virtual tokens, too.
    """

    type: Literal["deep_prompt"] = "deep_prompt"
    num_virtual_tokens: PositiveInt
    encoder_hidden_size: PositiveInt | None = None
    in_encoder: bool = True


Adapter = Annotated[Lora | Ia3 | SoftPrompt | DeepPrompt, Field(discriminator="type")]
