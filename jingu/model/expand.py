"""Growing a model: initializing a larger model with the weights of a smaller one.

Each function takes a model and returns a larger one: its spec, and a function that computes each parameter from those
of the old model. A parameter is computed only when it is read. So the functions can be chained, and only one parameter
of a large model is in memory at a time.

Shapes: V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.model.components import AlibiPositions, LayerSpec
from jingu.model.families import FAMILIES
from jingu.model.feed_forward_specs import Experts
from jingu.model.norm_specs import RmsNorm
from jingu.model.spec import ModelSpec, replace_fields
from jingu.model.weight_init import generator_for_name, initial_tensor

DepthRule = Literal["interleaved", "stacked"]
# Families of dense models, and their counterparts with experts.
_MIXTURES = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe", "cpm2": "cpm2"}
_EXPERT_PARTS = (".feed_forward.gate.weight", ".feed_forward.up.weight", ".feed_forward.down.weight")
# Vectors with an element per expert, entry of the vocabulary, or number of an activation, which stay as they are.
_NOT_REPEATED = (".alpha_p.weight", ".alpha_n.weight", ".correction.weight", ".router.bias", "head.bias")
# Parameters whose outputs are added to the hidden states.
_INTO_STREAM = (
    *(".attention.output.", ".cross_attention.output.", ".mixer.output."),
    *(".feed_forward.down.", ".feed_forward.shared.down."),
)


@dataclass(frozen=True)
class LazyModel:
    """A model whose parameters are computed when they are read.

    Attributes:
        read: returns one whole parameter by name, on CPU.
    """

    spec: ModelSpec
    read: Callable[[str], Tensor]


def upcycle_to_experts(model: LazyModel, number: int, active: int, noise: float = 0.0, seed: int = 0) -> LazyModel:
    """Return a model in which every expert is a copy of the dense feed-forward (Komatsuzaki et al., 2023).

    The router is initialized from the seed. The weights of a token's experts sum to one, so without noise the outputs
    equal the dense model's.

    Args:
        number: number of experts.
        active: experts per token.
        noise: standard deviation of the noise on each expert's matrices, relative to that of the matrix.

    Raises:
        JinguError: the model has experts already, its family has no counterpart with experts, or `active` is too many.
    """
    spec = model.spec
    if (
        spec.experts is not None
        or len({layer.feed_forward for layer in spec.layers}) > 1
        or spec.family not in _MIXTURES
    ):
        raise JinguError(
            f"experts are copies of the feed-forward of a dense model, and this one is a {spec.family}.",
            where="--experts",
            fix=f"Use a model of a family that has a counterpart with experts: {', '.join(_MIXTURES)}.",
        )
    # The new spec: the experts of the counterpart family, with the dimensions of the dense feed-forward.
    family = FAMILIES[_MIXTURES[spec.family]]
    dense = {key: getattr(spec.feed_forward, key) for key in ("intermediate_size", "activation", "bias")}
    assert family.experts is not None
    experts = Experts.model_validate(
        {**family.experts.model_dump(), **dense, "num_experts": number, "num_experts_per_token": active}
    )
    grown = replace_fields(spec, family=family.name, feed_forward=experts)

    def read(name: str) -> Tensor:
        if name.endswith(".router.weight"):
            return initial_tensor(name, torch.Size((number, spec.hidden_size)), grown, seed)
        old = model.read(name)
        if not name.endswith(_EXPERT_PARTS):
            return old
        if not noise:
            # A view: all experts share the memory of the old matrix.
            return old.expand(number, *old.shape)
        copies = old.repeat(number, 1, 1)
        generator = generator_for_name(name, seed)
        std = noise * float(old.float().std())
        for copy in copies:
            copy += torch.empty(old.shape).normal_(0.0, std, generator=generator).to(old.dtype)
        return copies

    return LazyModel(grown, read)


def replace_vocab(model: LazyModel, rows: Sequence[Sequence[int]]) -> LazyModel:
    """Return a model with another vocabulary: row i of embedding and head is the mean of the old rows `rows[i]`.

    A single old row is copied. If `rows[i]` is empty, the new row is the mean of all old rows (Hewitt, 2021), which
    changes the probabilities of the other tokens least.
    """

    def read(name: str) -> Tensor:
        old_VD = model.read(name)
        if name not in ("embedding.weight", "head.weight", "head.bias"):
            return old_VD
        mean_D = old_VD.mean(0, dtype=torch.promote_types(old_VD.dtype, torch.float32))
        new_VD = old_VD[torch.tensor([ids[0] if ids else 0 for ids in rows])]
        for row, ids in enumerate(rows):
            if len(ids) != 1:
                new_VD[row] = old_VD[list(ids)].to(mean_D.dtype).mean(0) if ids else mean_D
        return new_VD

    return LazyModel(replace_fields(model.spec, vocab_size=len(rows)), read)


def expand_depth(model: LazyModel, layers: int, rule: DepthRule = "interleaved", *, zeroed: bool = True) -> LazyModel:
    """Return a model with `layers` blocks, of which the new ones are copies of old blocks.

    Args:
        rule: interleaved: the copies of a block follow it (LLaMA Pro, Wu et al., 2024). stacked: copies of all blocks
            follow the last block (Gong et al., 2019).
        zeroed: whether the attention output and down projections of the copies are zero, so that the model's outputs
            equal the original's. Otherwise the copies are complete, and the outputs differ.

    Raises:
        JinguError: the model already has as many blocks.
    """
    old = model.spec.num_layers
    if layers <= old:
        raise JinguError(f"the model has {old} blocks already.", where="--num-layers", fix=f"Give more than {old}.")
    sources = [block * old // layers if rule == "interleaved" else block % old for block in range(layers)]

    def read(name: str) -> Tensor:
        if not name.startswith("blocks."):
            return model.read(name)
        _, number, part = name.split(".", 2)
        source = sources[int(number)]
        value = model.read(f"blocks.{source}.{part}")
        is_copy = source in sources[: int(number)]
        return torch.zeros_like(value) if zeroed and is_copy and f".{part}".startswith(_INTO_STREAM) else value

    return LazyModel(model.spec.select_layers(sources), read)


def expand_width(model: LazyModel, width: int, noise: float = 0.0, seed: int = 0) -> LazyModel:
    """Return a model with k times the hidden size, heads and intermediate size.

    This is Net2Net (Chen et al., 2016) as in bert2BERT (Chen et al., 2022). Every dim of the hidden states, every head
    and every intermediate dim is repeated k times. A matrix that reads repeated inputs is divided by k; instead of the
    head, the final norm is. Repetition changes neither mean nor RMS of the hidden states, so the outputs equal the
    original's. Without noise, however, all copies get equal gradients and stay equal.

    Args:
        width: the new hidden size, k times the old one.
        noise: standard deviation of the noise on the matrices that read copies, relative to that of the matrix. The
            noise sums to zero over the copies. So the copies learn different features, and the outputs still equal the
            original's.

    Raises:
        JinguError: the width is not a multiple of the hidden size, or the model has ALiBi, whose slopes depend on the
            number of the head, or latent attention, whose latent vectors do not grow, or layers with a state.
    """
    spec = model.spec
    times, rest = divmod(width, spec.hidden_size)
    if rest or times < 2:
        raise JinguError(
            f"the hidden size {spec.hidden_size} grows by repetition, and {width} is not a multiple of it.",
            where="--hidden-size",
            fix=f"Give {2 * spec.hidden_size}, {3 * spec.hidden_size} or so on.",
        )
    _check_repeatable(spec)
    kinds = {name: {**changes, **_wider(spec.kind(name), times)} for name, changes in spec.layer_kinds.items()}
    sizes = {"hidden_size": width, **_wider(spec.default_layer, times), "layer_kinds": kinds}
    # The head reads k copies, so its inputs are divided by k; a normalized or scaled head needs only √k. The normalized
    # head divides by the norm of its rows, which grows by √k, and the scaled head by √(k · hidden size).
    final = times**0.5 if spec.normalize_lm_head or spec.scale_lm_head else times
    offset = float(isinstance(spec.norm, RmsNorm) and spec.norm.offset)
    # An embedding whose factor grows by √k is divided by it, and so is a head that is tied to it.
    growth = times**0.5 if spec.embedding_scale == "sqrt_hidden_size" else 1.0
    final /= growth if spec.tie_word_embeddings else 1.0
    if isinstance(spec.norm, RmsNorm) and not spec.norm.has_weight:
        sizes["logit_scale"] = spec.logit_scale / final

    def read(name: str) -> Tensor:
        old = model.read(name)
        if name.endswith(_NOT_REPEATED):
            return old
        if name.endswith(".bias") and old.ndim == 2:
            return old.repeat(1, times)
        # The norms of a head are the same for all heads.
        if ".q_norm." in name or ".k_norm." in name:
            return old if spec.layer_of(name).attention.qk_norm_width == "head" else old.repeat(times)
        # Biases and norms are repeated. The final norm also divides for the head.
        if name.startswith("norm."):
            return (old + offset).repeat(times) / final - offset
        if old.ndim == 1:
            return old.repeat(times)
        if name == "embedding.weight":
            return old.repeat(1, times) / growth
        # In tables and the head, only the dim of the hidden states (or of the heads) is repeated.
        if name.endswith(("positions.weight", "relative_bias.weight")) or name == "head.weight":
            return old.repeat(1, times)
        # Other matrices read repeated inputs; except for scores per expert, their outputs are repeated, too.
        only_inputs = name.endswith((".router.weight", ".shared_gate.weight"))
        rows = old if only_inputs else old.repeat(*[1] * (old.ndim - 2), times, 1)
        return _read_copies(rows, times, noise * float(old.float().std()) if noise else 0.0, name, seed)

    return LazyModel(replace_fields(spec, **sizes), read)


def _check_repeatable(spec: ModelSpec) -> None:
    """Raise JinguError if the model has parts that do not grow by repetition."""
    if any(isinstance(layer.position, AlibiPositions) for layer in spec.kinds):
        raise JinguError(
            "with ALiBi a head's slope depends on its number, so that repeated heads would not be copies.",
            where="--hidden-size",
            fix="Grow the depth or the vocabulary, or use a model with rotary or learned positions.",
        )
    if spec.has_state:
        raise JinguError(
            "layers with a state have heads, convolutions and norms of their own, which do not grow by repetition.",
            where="--hidden-size",
            fix="Grow the depth or the vocabulary.",
        )
    if any(layer.attention.latent is not None for layer in spec.kinds):
        raise JinguError(
            "the latent vectors of attention have norms and sizes of their own, which do not grow by repetition.",
            where="--hidden-size",
            fix="Grow the depth or the vocabulary.",
        )


def _wider(layer: LayerSpec, times: int) -> dict[str, int]:
    """Return the sizes of a layer that is `times` as wide, by their paths."""
    sizes = {
        "attention.num_heads": layer.attention.num_heads,
        "attention.num_kv_heads": layer.attention.num_kv_heads,
    }
    if layer.intermediate_size:
        sizes["feed_forward.intermediate_size"] = layer.intermediate_size
    if isinstance(layer.feed_forward, Experts) and layer.feed_forward.shared_intermediate_size:
        sizes["feed_forward.shared_intermediate_size"] = layer.feed_forward.shared_intermediate_size
    return {path: times * size for path, size in sizes.items()}


def _read_copies(matrix: Tensor, times: int, std: float, name: str, seed: int) -> Tensor:
    """Return a matrix for inputs that are repeated `times` times, with the same result as `matrix` for single ones.

    With `std`, the copies get noise that sums to zero.
    """
    whole = matrix.repeat(*[1] * (matrix.ndim - 1), times).div_(times)
    if std:
        shape = (*matrix.shape[:-1], times, matrix.shape[-1])
        deviations = torch.empty(shape).normal_(0.0, std, generator=generator_for_name(name, seed))
        deviations = deviations.to(torch.promote_types(whole.dtype, torch.float32))
        whole += (deviations - deviations.mean(-2, keepdim=True)).flatten(-2).to(whole.dtype)
    return whole
