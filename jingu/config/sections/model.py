"""Settings of the model, and of what it begins with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jingu.config.sections.base import Place, Positive, Settings


class ExpertsSettings(Settings):
    """A mixture of experts, for families that have one; null: the family's habit."""

    number: Positive | None = None
    """Experts a block; the feed-forward's size is that of one."""
    active: Positive | None = None
    """Experts a token passes."""
    router: Literal["top_k", "balanced", "random_projection"] | None = None
    """Who chooses: the most probable, an even assignment while training (BASE), or a frozen random projection."""
    shared: Positive | None = None
    """Inner size of a further feed-forward that every token passes."""
    shared_gated: bool | None = None
    """Whether the shared feed-forward is weighted by a gate of its own."""
    capacity: Annotated[float, Field(gt=0)] | None = None
    """Choices an expert takes of a training sequence, as a multiple of an even share; the rest is dropped."""
    balance: Annotated[float, Field(ge=0)] | None = None
    """Weight of the load-balancing loss."""
    balance_over: Literal["layer", "model"] | None = None
    """Whether each layer is to be balanced, or the mean of all (as transformers does)."""
    z: Annotated[float, Field(ge=0)] | None = None
    """Weight of the router's z loss."""


class ModelSettings(Settings):
    """A model to train from scratch: a family or a preset, and the dimensions in which it differs from it."""

    family: str | None = None
    """Model family; `jingu model list` shows them; null: the preset's, or llama."""
    preset: str | None = None
    """A published model, such as `llama-2-7b`; every setting that is given besides takes its value's place. Where the
    run begins with a model (`initialize.from`), that must have these dimensions, and what else it says counts."""
    layers: Positive | None = None
    """Number of blocks; null: the preset's, or 6."""
    encoder_layers: Positive | None = None
    """Number of blocks of the encoder, for families that have one; null: the preset's, or as many as layers."""
    width: Positive | None = None
    """Size of the hidden state; null: the preset's, or 384."""
    heads: Positive | None = None
    """Attention (query) heads; null: the preset's, or 6."""
    kv_heads: Positive | None = None
    """Key and value heads; null: the preset's, or as many as heads."""
    head_size: Positive | None = None
    """Size of a head; null: the preset's, or width / heads."""
    feed_forward: Positive | None = None
    """Inner size of the feed-forward; null: the preset's, or the family's rule."""
    experts: ExpertsSettings = ExpertsSettings()
    vocabulary: Positive | Literal["auto"] = "auto"
    """Rows of the embedding; auto: the preset's, or the tokenizer's size where that is larger or there is none."""
    context: Positive | None = None
    """Longest sequence the model is made for; null: the preset's, or the batch's sequence length."""
    tied_embeddings: bool | None = None
    """Whether the head shares the embedding's weights; null: the preset's, or the family's habit."""
    rope_base: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary frequencies; null: the preset's, or the family's."""
    norm_epsilon: Annotated[float, Field(gt=0)] | None = None
    """Added to the variance in norms; null: the preset's, or the family's."""
    initial_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""


class InitializeSettings(Settings):
    """Where the first weights come from."""

    from_: Place | None = Field(default=None, alias="from")
    """A model whose weights a new run begins with, and whose dimensions hold where `model` gives none; null: random."""
