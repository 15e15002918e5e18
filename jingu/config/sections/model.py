"""Settings of the model and of its initial weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jingu.config.sections.base import PathText, Positive, Settings


class ExpertsSettings(Settings):
    """Mixture of experts, for families that have one. null stands for the family's default.

    Attributes:
        num_experts: Experts per block; `intermediate_size` is the size of one expert.
        num_experts_per_token: Experts that process each token.
        router: How tokens are assigned to experts: top_k: to the most probable experts; balanced: evenly during
            training (BASE); random_projection: by a frozen random projection; sparse_mixer: two, one after the other,
            each weighted among those that are close to it (SparseMixer).
        shared_intermediate_size: Intermediate size of a shared expert that processes every token.
        shared_expert_gate: Whether a learned gate weights the shared expert.
        capacity_factor: Maximum tokens per expert from a training sequence, as a multiple of an even share; further
            tokens are dropped.
        aux_loss_coef: Weight of the load-balancing loss.
        aux_loss_scope: Whether to balance each layer by itself, or the mean over all layers (as transformers does).
        z_loss_coef: Weight of the router's z-loss.
        scores: With the router top_k: scores are the softmax over all experts, or the sigmoid of each logit.
        correction: Whether a bias without gradient is added to the scores for the selection, which balances the loads
            (DeepSeek-V3).
        correction_rate: How much that bias moves in a step, towards experts with fewer tokens than the mean.
    """

    num_experts: Positive | None = None
    num_experts_per_token: Positive | None = None
    router: Literal["top_k", "balanced", "random_projection", "sparse_mixer"] | None = None
    shared_intermediate_size: Positive | None = None
    shared_expert_gate: bool | None = None
    capacity_factor: Annotated[float, Field(gt=0)] | None = None
    aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    aux_loss_scope: Literal["layer", "model"] | None = None
    z_loss_coef: Annotated[float, Field(ge=0)] | None = None
    scores: Literal["softmax", "sigmoid"] | None = None
    correction: bool | None = None
    correction_rate: Annotated[float, Field(ge=0)] | None = None


class MixerSettings(Settings):
    """Mixer with a state, for families that have one. null stands for the family's default.

    Without a number of heads, all heads together follow `hidden_size`, rounded to whole heads.

    Attributes:
        num_heads: Heads; of the gated delta rule, those of the values.
        num_key_heads: Heads of queries and keys (gated delta rule).
        num_groups: Groups of heads that share b and c (Mamba-2).
        head_dim: Size of a head (Mamba-2).
        key_head_dim: Size of a head of queries and keys (gated delta rule).
        value_head_dim: Size of a head of values (gated delta rule).
        state_size: Length of b and c (Mamba-2).
        num_taps: Kernel length of the convolutions.
    """

    num_heads: Positive | None = None
    num_key_heads: Positive | None = None
    num_groups: Positive | None = None
    head_dim: Positive | None = None
    key_head_dim: Positive | None = None
    value_head_dim: Positive | None = None
    state_size: Positive | None = None
    num_taps: Annotated[int, Field(ge=2)] | None = None


class ModelSettings(Settings):
    """The model to train from scratch: a family or a preset, and dimensions that override it.

    Attributes:
        family: Model family (`jingu model list` lists them); null: the preset's, or llama.
        preset: A published model, such as `llama-2-7b`. Other settings of this section override its values. If the run
            starts from a model (`initialize.from`), that model must have these dimensions; all other values come from
            it.
        num_layers: Number of blocks; null: the preset's, or 6.
        layer_pattern: Kinds of the layers in order, such as `[linear_attention, linear_attention, full_attention]`, for
            families whose layers differ; repeated until `num_layers`. null: the preset's, or the family's.
        num_encoder_layers: Number of encoder blocks, for families with an encoder; null: the preset's, or `num_layers`.
        hidden_size: Size of the hidden states; null: the preset's, or 384.
        num_heads: Attention (query) heads; null: the preset's, or 6.
        num_kv_heads: Key and value heads; null: the preset's, or `num_heads`.
        head_dim: Size of a head; null: the preset's, or hidden_size / num_heads.
        intermediate_size: Intermediate size of the feed-forward layer; null: the preset's, or the family's rule.
        vocab_size: Rows of the embedding; auto: the preset's or the size of the tokenizer, whichever is larger.
        max_position_embeddings: Maximum sequence length (context length); null: the preset's, or batch.sequence_length.
        tie_word_embeddings: Whether the LM head shares the embedding's weights; null: the preset's, or the family's
            default.
        rope_theta: Base of the rotary frequencies; null: the preset's, or the family's.
        norm_eps: Epsilon added to the variance in norms; null: the preset's, or the family's.
        initializer_range: Standard deviation of the initial weights.
        mtp_layers: Layers of multi-token prediction (DeepSeek-V3), each of which predicts one token further; null: the
            initial model's, or none.
        mtp_loss_weight: Weight of their mean loss beside that of the next token. With 0, the layers of an initial model
            are kept as they are.
    """

    family: str | None = None
    preset: str | None = None
    num_layers: Positive | None = None
    layer_pattern: list[str] | None = None
    num_encoder_layers: Positive | None = None
    hidden_size: Positive | None = None
    num_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    intermediate_size: Positive | None = None
    experts: ExpertsSettings = ExpertsSettings()
    mixer: MixerSettings = MixerSettings()
    vocab_size: Positive | Literal["auto"] = "auto"
    max_position_embeddings: Positive | None = None
    tie_word_embeddings: bool | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    norm_eps: Annotated[float, Field(gt=0)] | None = None
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    mtp_layers: Positive | None = None
    mtp_loss_weight: Annotated[float, Field(ge=0)] = 0.0


class InitializeSettings(Settings):
    """Where the initial weights come from.

    Attributes:
        from_: Model whose weights a new run starts from. Its dimensions apply wherever `model` sets none. null: random
            weights.
    """

    from_: Annotated[PathText | None, Field(alias="from")] = None
