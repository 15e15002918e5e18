"""Adapters of matrices: LoRA (Hu et al., 2022), DoRA (Liu et al., 2024), IA³ (Liu et al., 2022).

Shapes: B rows, T tokens, R rank, I inputs, O outputs, E experts, M token-expert pairs, V vocabulary, D hidden size,
N tokens whose embeddings are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jingu.errors import JinguError
from jingu.model.adapter_specs import Adapter, Ia3, Lora, LoraInit
from jingu.model.dropout import BlockDropoutSeeds, seeded_dropout
from jingu.model.experts import GroupedLinear
from jingu.model.grouped_matmul import grouped_matmul
from jingu.model.layers import Embedding, Linear
from jingu.model.matmul_kernels import linear
from jingu.model.part_spec import ModuleRow
from jingu.model.quantize import quantize_blocks
from jingu.model.quantized_weight import FrozenWeight
from jingu.model.spec import ModelSpec
from jingu.model.trainable import ADAPTER_PARAMETERS, is_adapter, is_trained, matches_any

# Initializations that move a part of the frozen matrix into the adapter (residual initialization).
RESIDUAL_INITS = ("pissa", "olora")


class LoraLinear(Linear):
    """A linear layer with a LoRA or DoRA adapter.

    Attributes:
        first_input: index of this rank's first input in the whole layer; above 0 only under tensor parallelism.
    """

    first_input = 0

    def __init__(self, plain: Linear, adapter: Lora, name: str, seeds: BlockDropoutSeeds) -> None:
        """
        Args:
            plain: the layer without the adapter.
            name: name of the layer in the model. Dropout depends on it, so that layers drop different inputs.
            seeds: dropout seeds of the current tokens, which the block sets in each forward pass.
        """
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        self.weight, self.bias = plain.weight, plain.bias
        self.scale = adapter.scale
        self.dropout = adapter.dropout
        self.seeds = seeds
        self.reads_source = name.endswith(("cross_attention.k", "cross_attention.v"))
        self.salt = int.from_bytes(sha256(name.encode()).digest()[:6], "little")
        self.lora_a = nn.Parameter(torch.empty(adapter.rank, plain.in_features))
        self.lora_b = nn.Parameter(torch.empty(plain.out_features, adapter.rank))
        self.lora_bias = nn.Parameter(torch.empty(plain.out_features)) if adapter.lora_bias else None
        self.lora_m = nn.Parameter(torch.empty(plain.out_features)) if adapter.use_dora else None

    def forward(self, input: Tensor) -> Tensor:
        dropped = self._drop(input)
        bias = None if self.lora_bias is None else self.bias_share * self.lora_bias
        update = self.scale * linear(linear(dropped, self.lora_a), self.lora_b, bias)
        if self.lora_m is None:
            return super().forward(input) + update
        # DoRA: the norms of the rows are constants in the backward pass (section 4.3 of the paper).
        factor_O = (self.lora_m / self.row_squares().sqrt()).to(input.dtype)
        return super().forward(input) + (factor_O - 1) * linear(dropped, self.weight) + factor_O * update

    def _drop(self, x_BTI: Tensor) -> Tensor:
        """Return the inputs of the adapter after dropout."""
        seeds_BT = self.seeds.source if self.reads_source else self.seeds.own
        if not self.dropout or seeds_BT is None:
            return x_BTI
        return seeded_dropout(x_BTI, seeds_BT, self.salt, self.dropout, self.first_input)

    @torch.no_grad()
    def row_squares(self) -> Tensor:
        """Return the squared norms [O] of the rows of matrix plus update, in at least fp32.

        If the inputs are divided over ranks, tensor parallelism replaces this method by one that sums over the ranks.
        """
        weight: Tensor | FrozenWeight = self.weight
        whole = weight.whole() if isinstance(weight, FrozenWeight) else weight
        wide = torch.promote_types(torch.promote_types(whole.dtype, self.lora_b.dtype), torch.float32)
        return (whole.to(wide) + self.scale * (self.lora_b.to(wide) @ self.lora_a.to(wide))).square().sum(1)


class LoraGrouped(GroupedLinear):
    """The matrices of all experts, with a LoRA adapter per expert."""

    def __init__(self, plain: GroupedLinear, adapter: Lora) -> None:
        number, outputs, inputs = plain.weight.shape
        super().__init__(ModuleRow((number, outputs, inputs)))
        self.weight, self.bias = plain.weight, plain.bias
        self.scale = adapter.scale
        self.lora_a = nn.Parameter(torch.empty(number, adapter.rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(number, outputs, adapter.rank))

    def all(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """Like `GroupedLinear.all`, with the adapters."""
        x_MR = grouped_matmul(x_MI, self.lora_a.to(x_MI.dtype), ends_E)
        return super().all(x_MI, ends_E) + self.scale * grouped_matmul(x_MR, self.lora_b.to(x_MI.dtype), ends_E)

    def one(self, number: int, x_MI: Tensor) -> Tensor:
        """Like `GroupedLinear.one`, with the adapter."""
        x_MR = linear(x_MI, self.lora_a[number])
        return super().one(number, x_MI) + self.scale * linear(x_MR, self.lora_b[number])


class AdaptedEmbedding(Embedding):
    """An embedding with either a LoRA adapter or separately trained rows of some tokens.

    Attributes:
        first_row: token id of this rank's first row; above 0 only if the vocabulary is sharded.
    """

    first_row = 0

    def __init__(self, plain: Embedding, adapter: Lora) -> None:
        vocab_size, hidden_size = plain.weight.shape
        super().__init__(vocab_size, hidden_size)
        self.weight = plain.weight
        self.scale = adapter.scale
        self.token_ids = adapter.trainable_token_indices
        has_lora = not self.token_ids
        self.lora_a = nn.Parameter(torch.empty(adapter.rank, hidden_size)) if has_lora else None
        self.lora_b = nn.Parameter(torch.empty(vocab_size, adapter.rank)) if has_lora else None
        self.token_rows = None if has_lora else nn.Parameter(torch.empty(len(self.token_ids), hidden_size))

    def forward(self, input: Tensor) -> Tensor:
        x_BTD = super().forward(input)
        if self.lora_a is not None and self.lora_b is not None:
            low_BTR = F.embedding(input, self.lora_b).to(x_BTD.dtype)
            return x_BTD + self.scale * linear(low_BTR, self.lora_a.t())
        assert self.token_rows is not None
        # Replace the vectors of the trained tokens. `input` counts rows from `first_row`, too.
        ids_N = _ids_tensor(self.token_ids, input.device) - self.first_row
        match_BTN = input.unsqueeze(-1) == ids_N
        rows_BTD = linear(match_BTN.to(x_BTD.dtype), self.token_rows.t())
        return torch.where(match_BTN.any(-1, keepdim=True), rows_BTD, x_BTD)

    def with_token_rows(self) -> Tensor:
        """Return the weight [V, D] with the trained rows in place, for a tied head. A LoRA adapter is not included."""
        if self.token_rows is None:
            return self.weight
        ids_N = _ids_tensor(self.token_ids, self.weight.device) - self.first_row
        # The rows of tokens of other ranks go to an extra last row, which is cut off.
        is_here_N = (ids_N >= 0) & (ids_N < self.weight.shape[0])
        rows_N = ids_N.where(is_here_N, self.weight.shape[0])
        padded_VD = F.pad(self.weight, (0, 0, 0, 1))
        return padded_VD.index_copy(0, rows_N, self.token_rows.to(padded_VD.dtype))[:-1]


@lru_cache
def _ids_tensor(ids: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(ids, device=device)


class Ia3Linear(Linear):
    """A linear layer with a trained factor per input or per output (IA³)."""

    def __init__(self, plain: Linear, *, of_inputs: bool) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        self.weight, self.bias = plain.weight, plain.bias
        self.ia3_in = nn.Parameter(torch.empty(plain.in_features)) if of_inputs else None
        self.ia3_out = None if of_inputs else nn.Parameter(torch.empty(plain.out_features))

    def forward(self, input: Tensor) -> Tensor:
        if self.ia3_in is not None:
            return super().forward(input * self.ia3_in.to(input.dtype))
        assert self.ia3_out is not None
        return super().forward(input) * self.ia3_out.to(input.dtype)


def add_adapters(model: nn.Module, spec: ModelSpec) -> None:
    """Add the adapters of the spec in place, quantize the blocks if it says so, and freeze all other parameters."""
    adapter = spec.adapter
    if isinstance(adapter, Lora | Ia3):
        _add_beside(model, adapter)
        _add_outside(model, spec, adapter)
    if spec.quantization is not None and spec.quantization != "stored":
        quantize_blocks(model, spec.quantization)
    for name, parameter in model.named_parameters():
        if not is_trained(name, spec):
            parameter.requires_grad_(False)


def _add_beside(model: nn.Module, adapter: Lora | Ia3) -> None:
    """Add adapters to the matching matrices of the blocks."""
    seeds = BlockDropoutSeeds()
    for prefix, parent in list(model.named_modules()):
        # Modules follow their block in this order, so these are the seeds of the block that contains `parent`.
        seeds = getattr(parent, "dropout_seeds", seeds)
        for leaf, child in list(parent.named_children()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            # Routers take no adapters: `MoELayer` reads their weight directly, and never calls the module.
            if "blocks." not in prefix or leaf == "router" or not matches_any(name, adapter.target_modules):
                continue
            if isinstance(child, Linear | GroupedLinear):
                setattr(parent, leaf, _adapted(name, child, adapter.of_module(name), seeds))


def _add_outside(model: nn.Module, spec: ModelSpec, adapter: Lora | Ia3) -> None:
    """Add adapters to the embedding and the head. These need their exact names: wildcards do not match them."""
    tokens = adapter.trainable_token_indices if isinstance(adapter, Lora) else ()
    targets = [name for name in ("embedding", "head") if name in adapter.target_modules]
    if not targets and not tokens:
        return
    # Refuse combinations that are not supported.
    is_plain = isinstance(adapter, Lora) and not adapter.use_dora and not adapter.lora_bias
    problem = None
    if not isinstance(adapter, Lora) or (targets and not is_plain):
        problem = "embedding and head support only LoRA, without DoRA's magnitudes and biases"
    elif spec.num_encoder_layers is not None:
        problem = "the embedding of a model with an encoder takes no adapters"
    elif tokens and ("embedding" in targets or max(tokens) >= spec.vocab_size or len(set(tokens)) < len(tokens)):
        problem = f"trained tokens must be distinct ids below {spec.vocab_size:,}, of an embedding without LoRA"
    elif "head" in targets and spec.normalize_lm_head:
        problem = "a head whose rows are normalized takes no LoRA"
    elif "head" in targets and spec.tie_word_embeddings:
        problem = "the head is tied to the embedding and has no matrix of its own"
    if problem is not None:
        fix = "Leave them out, or train the modules themselves (tune.modules_to_save)."
        if spec.tie_word_embeddings and "head" in targets:
            fix = "Leave it out, or train the matrix of both (tune.modules_to_save=[embedding])."
        raise JinguError(f"{problem}.", where="tune.target_modules", fix=fix)
    assert isinstance(adapter, Lora)
    own: Any = model
    # The last pipeline stage may have a copy of the embedding for a tied head. A LoRA adapter of the embedding does not
    # change the head, so that copy gets none; trained rows it does get.
    if own.embedding is not None and (tokens or ("embedding" in targets and own.block_range.start == 0)):
        own.embedding = AdaptedEmbedding(own.embedding, adapter.of_module("embedding"))
    if own.head is not None and "head" in targets:
        own.head = LoraLinear(own.head, adapter.of_module("head"), "head", BlockDropoutSeeds())


def _adapted(
    name: str, child: Linear | GroupedLinear, adapter: Lora | Ia3, seeds: BlockDropoutSeeds
) -> Linear | GroupedLinear:
    """Return the layer `child` with an adapter. Raises JinguError if the adapter does not support experts."""
    if isinstance(child, GroupedLinear):
        if not isinstance(adapter, Lora) or adapter.use_dora or adapter.dropout or adapter.lora_bias:
            raise JinguError(
                f"{name} holds the matrices of experts, which support only LoRA, without dropout, DoRA's magnitudes "
                "and biases.",
                where="tune.target_modules",
                fix="Leave it out, or set tune.type=lora, tune.dropout=0, tune.use_dora=false and "
                "tune.lora_bias=false.",
            )
        return LoraGrouped(child, adapter)
    if isinstance(adapter, Lora):
        return LoraLinear(child, adapter, name, seeds)
    return Ia3Linear(child, of_inputs=name.endswith("feed_forward.down"))


def check_targets(names: Collection[str], adapter: Adapter) -> None:
    """Raise JinguError for a pattern that matches no module with an adapter.

    Args:
        names: names of all parameters of the model, with those of the adapters.
    """
    modules = {name.rpartition(".")[0] for name in names if name.endswith(ADAPTER_PARAMETERS)}
    patterns = {"target_modules": adapter.target_modules if isinstance(adapter, Lora | Ia3) else ()}
    if isinstance(adapter, Lora):
        patterns["rank_pattern"] = tuple(pattern for pattern, _ in adapter.rank_pattern)
        patterns["alpha_pattern"] = tuple(pattern for pattern, _ in adapter.alpha_pattern)
    for setting, pattern in ((setting, pattern) for setting, own in patterns.items() for pattern in own):
        if not any(fnmatchcase(module, pattern) for module in modules):
            raise JinguError(
                f"no matrix {'of the model' if setting == 'target_modules' else 'with an adapter'} has a name like "
                f"{pattern}.",
                where=f"tune.{setting}",
                fix="Use names such as blocks.0.attention.q and blocks.*.feed_forward.up, or Hugging Face's, such as "
                "q_proj.",
            )


def check_saved_modules(names: Collection[str], adapter: Lora, *, is_quantized: bool) -> None:
    """Raise JinguError for a pattern of `modules_to_save` that matches no module, or a module that cannot be trained.

    Args:
        names: names of all parameters of the model, with those of the adapters.
        is_quantized: whether the blocks are quantized, and therefore cannot be trained.
    """
    adapted = {name.rpartition(".")[0] for name in names if is_adapter(name)}
    modules = {name.rpartition(".")[0] for name in names if not is_adapter(name)}
    for pattern in adapter.modules_to_save:
        matches = {module for module in modules if fnmatchcase(module, pattern)}
        problem = None if matches else "matches no module of the model"
        fix = "Use names such as embedding, head and norm, or Hugging Face's, such as lm_head."
        if not matches and fnmatchcase("head", pattern) and "score" not in modules:
            problem = "has no module: the head is tied to the embedding, whose matrix both use"
            fix = "Leave it out: embed_tokens (embedding) trains this matrix."
        if matches & adapted:
            problem = "matches modules that have an adapter"
        elif is_quantized and any("blocks." in module for module in matches):
            problem = "matches modules of the blocks, which are quantized"
        if problem is not None:
            raise JinguError(
                f"{pattern} {problem}.",
                where="tune.modules_to_save",
                fix=fix,
            )


def merge_parameter(
    adapter: Lora | Ia3, names: Collection[str], name: str, value: Tensor, read: Callable[[str], Tensor]
) -> Tensor:
    """Return the parameter `name` of a model, merged with its adapter if it has one.

    Args:
        names: names of the adapters' parameters; others are ignored.
        value: the parameter before merging.
        read: reads a parameter of an adapter by name.
    """
    module, _, leaf = name.rpartition(".")
    parts = {kind: read(f"{module}.{kind}") for kind in ADAPTER_PARAMETERS if f"{module}.{kind}" in names}
    return merge_adapter(value, leaf, parts, adapter.of_module(module)) if parts else value


def merge_adapter(value: Tensor, leaf: str, parts: Mapping[str, Tensor], adapter: Lora | Ia3) -> Tensor:
    """Return a weight or bias merged with its adapter, in at least fp32.

    A layer with the merged parameters computes the same as the layer with its adapter.

    Args:
        value: the layer's weight or bias; of experts [E, O, I].
        leaf: which of the two it is: "weight" or "bias".
        parts: the adapter's parameters by their own names, such as "lora_a".
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    total, parts = value.to(wide), {kind: part.to(wide) for kind, part in parts.items()}
    if isinstance(adapter, Lora):
        if leaf == "bias" and "lora_bias" in parts:
            return total + adapter.scale * parts["lora_bias"]
        if leaf != "weight":
            return total
        if "token_rows" in parts:
            return total.index_copy(0, torch.tensor(adapter.trainable_token_indices), parts["token_rows"])
        total = total + adapter.scale * (parts["lora_b"] @ parts["lora_a"])
        if "lora_m" in parts:
            total = total * (parts["lora_m"] / total.square().sum(1).sqrt()).unsqueeze(1)
    elif "ia3_out" in parts:
        total = total * (parts["ia3_out"].unsqueeze(1) if leaf == "weight" else parts["ia3_out"])
    elif "ia3_in" in parts and leaf == "weight":
        total = total * parts["ia3_in"]
    return total


def initial_factors(init: LoraInit | str, weight: Tensor, adapter: Lora) -> tuple[Tensor, Tensor]:
    """Return the initial matrices A [..., R, I] and B [..., O, R] of PiSSA or OLoRA for a weight [..., O, I].

    PiSSA (Meng et al., 2024, arXiv:2404.02948) takes the largest singular values; scale · B·A is their part of the
    weight. OLoRA (Büyükakyüz, 2024, arXiv:2406.01775) takes the first columns of Q and rows of R of a QR decomposition.
    """
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    rank = adapter.rank
    if init == "olora":
        q, r = torch.linalg.qr(weight)
        a, b = r[..., :rank, :], q[..., :rank]
    else:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        roots = (s[..., :rank] / adapter.scale).sqrt()
        a, b = roots.unsqueeze(-1) * vh[..., :rank, :], u[..., :rank] * roots.unsqueeze(-2)
    # The matrix may have fewer dims than the rank: fill up with zeros.
    missing = rank - a.shape[-2]
    return F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))


def unmerge_adapter(
    value: Tensor, leaf: str, parts: Mapping[str, Tensor], adapter: Lora | Ia3, dtype: torch.dtype
) -> Tensor | None:
    """Undo `merge_adapter`: return the original parameter in `dtype`, or None if it cannot be recovered exactly.

    The original is accepted only if merging it gives `value` again, and merging the neighboring numbers of `dtype` does
    not.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    if isinstance(adapter, Lora):
        original = value.to(wide)
        if leaf == "weight":
            original = original - adapter.scale * (parts["lora_b"].to(wide) @ parts["lora_a"].to(wide))
    else:
        original = value.to(wide) / merge_adapter(torch.ones_like(value, dtype=wide), leaf, parts, adapter)
    original = original.to(dtype)
    if not torch.equal(merge_adapter(original, leaf, parts, adapter).to(value.dtype), value):
        return None
    # The original is ambiguous if the next smaller or larger number would have given the same result.
    for end in (-torch.inf, torch.inf):
        neighbour = torch.nextafter(original, torch.full_like(original, end))
        if bool((merge_adapter(neighbour, leaf, parts, adapter).to(value.dtype) == value).any()):
            return None
    return original
