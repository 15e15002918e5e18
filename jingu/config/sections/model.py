"""Settings of the model, and of its initial weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jingu.config.sections.base import PathText, Positive, Settings


class ExpertsSettings(Settings):
    """Mixture of experts, for families that have one. null: the family's default."""

    num_experts: Positive | None = None
    """Experts in a block; `intermediate_size` is the size of one."""
    num_experts_per_token: Positive | None = None
    """Experts that process a token."""
    router: Literal["top_k", "balanced", "random_projection"] | None = None
    """How tokens are assigned: to the most probable experts, evenly while training (BASE), or by a frozen random
    projection."""
    shared_intermediate_size: Positive | None = None
    """Inner size of a shared expert that processes every token."""
    shared_expert_gate: bool | None = None
    """Whether a learned gate weights the shared expert."""
    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    """Tokens that an expert accepts from a training sequence, as a multiple of an even share; others are dropped."""
    aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the load-balancing loss."""
    aux_loss_scope: Literal["layer", "model"] | None = None
    """Whether to balance each layer, or the mean over all layers (as transformers does)."""
    z_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the router's z-loss."""


class ModelSettings(Settings):
    """The model to train from scratch: a family or a preset, and the dimensions that differ from it."""

    family: str | None = None
    """Model family (`jingu model list` lists them); null: the preset's, or llama."""
    preset: str | None = None
    """A published model, such as `llama-2-7b`. Other settings of this section override its values. If the run starts
    from a model (`initialize.from`), that model must have these dimensions, and its own values count for the rest."""
    num_layers: Positive | None = None
    """Number of blocks; null: the preset's, or 6."""
    num_encoder_layers: Positive | None = None
    """Number of encoder blocks, for families with an encoder; null: the preset's, or `num_layers`."""
    hidden_size: Positive | None = None
    """Size of the hidden states; null: the preset's, or 384."""
    num_heads: Positive | None = None
    """Attention (query) heads; null: the preset's, or 6."""
    num_kv_heads: Positive | None = None
    """Key and value heads; null: the preset's, or `num_heads`."""
    head_dim: Positive | None = None
    """Size of a head; null: the preset's, or hidden_size / num_heads."""
    intermediate_size: Positive | None = None
    """Inner size of the feed-forward layer; null: the preset's, or the family's rule."""
    experts: ExpertsSettings = ExpertsSettings()
    vocab_size: Positive | Literal["auto"] = "auto"
    """Rows of the embedding; auto: the preset's or the size of the tokenizer, whichever is larger."""
    max_position_embeddings: Positive | None = None
    """Maximum sequence length (context length); null: the preset's, or batch.sequence_length."""
    tie_word_embeddings: bool | None = None
    """Whether the LM head shares the embedding's weights; null: the preset's, or the family's default."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary frequencies; null: the preset's, or the family's."""
    norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon added to the variance in norms; null: the preset's, or the family's."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""


class InitializeSettings(Settings):
    """Where the initial weights come from."""

    from_: PathText | None = Field(default=None, alias="from")
    """Model whose weights a new run starts with, and whose dimensions hold where `model` sets none; null: random
    weights."""
