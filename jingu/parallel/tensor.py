"""Tensor, context and expert parallelism: whose tokens, heads and experts a rank computes with.

The tokens of a row are divided over `context` and then over `tensor`. Norms, residuals and everything else that treats
tokens one by one see the S tokens of a rank. A module with a table (`SHARDING`) gets all tokens of its context rank,
computes with its share of heads or intermediate dims, and the results of the ranks of `tensor` are summed as they are
scattered again. Between projections and attention, ranks of `context` exchange tokens for heads, so that attention
sees whole rows (DeepSpeed-Ulysses, Jacobs et al., 2023); or they keep the heads, and keys and values travel
(`jingu.parallel.ring`).

With expert parallelism, tokens travel to the ranks of `expert` that have their experts, and back.

Shapes: B rows, T tokens of a row, C of them on a context rank, S on a rank, D hidden size, V vocabulary. Of experts:
M choices of this rank's tokens, N choices that this rank's experts get, R ranks, E experts here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jingu.compat.torch_distributed import all_gather, all_reduce, all_to_all
from jingu.model.adapter_layers import AdaptedEmbedding, LoraLinear
from jingu.model.attention import Attention, BlockContext, CrossAttention, SelfAttention
from jingu.model.decoder import AuxiliaryLoss, Decoder, LossFunction, StageOutput
from jingu.model.experts import MoELayer, RoutingStats
from jingu.model.grouped_matmul import GatherRows
from jingu.model.inputs import Inputs, as_inputs
from jingu.model.layers import Embedding
from jingu.model.sharding_table import child_styles, iterate_styles
from jingu.model.spec import ModelSpec
from jingu.parallel.sharding import shard_range
from jingu.parallel.token_sharding import TokenSharding, compose


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the vocabulary.

    Attributes:
        size: V.
        start: the first entry here.
        count: entries here.
        most: entries of the rank that has most.
        group: the ranks of `tensor`.
    """

    size: int
    start: int
    count: int
    most: int
    group: Any

    @staticmethod
    def of(mesh: DeviceMesh, size: int) -> VocabShard:
        """Return the shard of this rank."""
        ranks = mesh["tensor"].size()
        start, count = shard_range(size, ranks, mesh.get_local_rank("tensor"))
        return VocabShard(size, start, count, -(-size // ranks), mesh.get_group("tensor"))

    def gather(self, logits: Tensor) -> Tensor:
        """Return all V logits [..., V] from each rank's."""
        padded = F.pad(logits, (0, self.most - logits.shape[-1]))
        return all_gather(padded.movedim(-1, 0), 0, self.group).movedim(0, -1)[..., : self.size]


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, ring: bool = False) -> None:
    """Let a model whose parameters are this rank's shards compute with them, in place.

    Forward methods are wrapped rather than modules, so that parameter names stay those of the plain model.

    Args:
        ring: ranks of `context` keep all heads, and keys and values travel between them.
    """
    sharding = TokenSharding(mesh)
    # The tokens that an encoder reads are divided by themselves.
    source_sharding = TokenSharding(mesh)
    vocab = VocabShard.of(mesh, model.spec.vocab_size)
    if sharding.tensor * sharding.context == 1:
        return
    # Embeddings: of this rank's entries, or of its tokens.
    module: Any
    for _, module, style in iterate_styles(model):
        if style == "vocabulary" and isinstance(module, Embedding):
            if isinstance(module, AdaptedEmbedding):
                module.first_row = vocab.start
            module.forward = partial(_embed, sharding, vocab, module.forward)  # type: ignore[method-assign]
        elif style == "tokens":
            module.forward = compose(sharding.shard_tokens, module.forward)
    # The blocks: every module with a table.
    for stack, own_sharding in ((model, sharding), (model.encoder, source_sharding)):
        if stack is None:
            continue
        for block in stack.blocks:
            for module in block.children():
                if hasattr(module, "SHARDING"):
                    is_cross = isinstance(module, CrossAttention)
                    key_sharding = source_sharding if is_cross else own_sharding
                    _parallelize_module(module, own_sharding, key_sharding, model.spec, ring=ring)
    model.forward = partial(_forward, sharding, source_sharding, vocab, model.forward)  # type: ignore[method-assign]


def _parallelize_module(
    module: Any, sharding: TokenSharding, key_sharding: TokenSharding, spec: ModelSpec, *, ring: bool
) -> None:
    """Wrap a part of a block; `key_sharding` divides the tokens that attention looks at."""
    has_context = sharding.context > 1
    by_heads = has_context and not ring
    for _, child, style in child_styles(module):
        if style in ("row", "from_heads") and sharding.tensor > 1:
            _compute_summand(child, sharding)
        if by_heads:
            _exchange_tokens_for_heads(child, style, sharding, key_sharding, spec.attention.head_dim)
    if isinstance(module, Attention):
        # The number of the first head here, for masks and caches that have all heads.
        ranks, rank = sharding.tensor, sharding.tensor_rank
        if by_heads:
            ranks = ranks * sharding.context
            rank = rank * sharding.context + sharding.context_rank
        module.first_head = rank * (spec.attention.num_heads // ranks)
        if ring and has_context:
            # PyTorch's ring attention is slow to import.
            from jingu.parallel.ring import apply_ring_attention

            apply_ring_attention(module, sharding, key_sharding)
    if isinstance(module, SelfAttention) and module.prompt is not None and has_context:
        prompt: Any = module.prompt
        if ring:
            prompt.forward = partial(_prompt_of_own_tokens, sharding, prompt.forward)
        else:
            prompt.own_heads = sharding.shard_heads
    if isinstance(module, MoELayer) and has_context:
        module.route = partial(_route, sharding, module.route)  # type: ignore[method-assign]
    if sharding.tensor > 1:
        sources = None if key_sharding is sharding else key_sharding
        module.forward = partial(_with_all_tokens, sharding, sources, module.forward)


def _compute_summand(child: Any, sharding: TokenSharding) -> None:
    """Let a map whose inputs are divided over `tensor` compute this rank's summand of the result."""
    child.bias_share = float(sharding.tensor_rank == 0)
    if isinstance(child, LoraLinear):
        sum_over_ranks = partial(all_reduce, op="sum", group=sharding.tensor_group)
        child.row_squares = compose(child.row_squares, sum_over_ranks)  # type: ignore[method-assign]
        child.first_input = shard_range(child.in_features, sharding.tensor, sharding.tensor_rank)[0]


def _exchange_tokens_for_heads(
    child: nn.Module, style: str, sharding: TokenSharding, key_sharding: TokenSharding, head_dim: int
) -> None:
    """Let ranks of `context` exchange tokens for heads after q, k and v, and heads for tokens before the output."""
    module: Any = child
    if style == "heads":
        module.forward = compose(module.forward, partial(sharding.tokens_to_heads, head_dim=head_dim))
    elif style == "kv_heads":
        module.forward = compose(module.forward, partial(key_sharding.tokens_to_heads, head_dim=head_dim))
    elif style == "from_heads":
        module.forward = compose(sharding.heads_to_tokens, module.forward)


def _forward(
    sharding: TokenSharding,
    source_sharding: TokenSharding,
    vocab: VocabShard,
    original: Callable[..., Any],
    inputs: Inputs | Tensor,
    loss: LossFunction | None = None,
    auxiliary: AuxiliaryLoss | None = None,
    received: StageOutput | None = None,
) -> Any:
    """Replace `Decoder.forward`.

    A loss gets the C tokens of the context rank and this rank's shard of the head's weight. Generation gets all
    tokens, and the logits of the whole vocabulary.
    """
    inputs = _shard_seeds(as_inputs(inputs), sharding)
    sharding.tokens = inputs.tokens.shape[1]
    if inputs.source is not None:
        source_sharding.tokens = inputs.source.tokens.shape[1]
        inputs = replace(inputs, source=_shard_seeds(inputs.source, source_sharding))

    def loss_of_shard(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        assert loss is not None
        if inputs.cache is not None:
            return vocab.gather(loss(sharding.gather_all(hidden_BSD), weight_VD))
        return loss(sharding.gather(hidden_BSD), weight_VD)

    def auxiliary_of_rank(routings: list[RoutingStats]) -> Tensor:
        # Every rank that sees the row computes all of this. Each contributes an equal share of the gradient; and of
        # the value those of `context`, which is summed over them.
        assert auxiliary is not None
        losses = auxiliary(routings) / sharding.context
        return losses / sharding.tensor + (losses * (1 - 1 / sharding.tensor)).detach()

    result = original(
        inputs,
        loss=None if loss is None else loss_of_shard,
        auxiliary=None if auxiliary is None else auxiliary_of_rank,
        received=received,
    )
    if loss is None and isinstance(result, Tensor):
        return sharding.gather_all(result)
    return result


def _shard_seeds(inputs: Inputs, sharding: TokenSharding) -> Inputs:
    """Leave the dropout seeds of this context rank's tokens. All else is needed of whole rows."""
    if inputs.dropout_seeds is None:
        return inputs
    return replace(inputs, dropout_seeds=sharding.shard_context(inputs.dropout_seeds))


def _with_all_tokens(
    sharding: TokenSharding,
    source_sharding: TokenSharding | None,
    original: Callable[..., Any],
    x_BSD: Tensor,
    *arguments: Any,
) -> Any:
    """Call a part of a block with all tokens of the context rank; return this rank's tokens of the sum of results.

    Args:
        source_sharding: of an encoder's states, which cross-attention gathers, too.
    """
    if source_sharding is not None:
        context, *others = arguments
        assert isinstance(context, BlockContext)
        if context.encoder_states is not None:
            context = context._replace(encoder_states=source_sharding.gather(context.encoder_states))
        arguments = (context, *others)
    result = original(sharding.gather(x_BSD), *arguments)
    if isinstance(result, tuple):
        return (sharding.scatter(result[0]), *result[1:])
    return sharding.scatter(result)


def _embed(
    sharding: TokenSharding, vocab: VocabShard, original: Callable[[Tensor], Tensor], tokens_BT: Tensor
) -> Tensor:
    """Look tokens up: each rank has some of the vectors, and the others contribute zeros."""
    row_BC = sharding.shard_context(tokens_BT) - vocab.start
    is_here_BC = (row_BC >= 0) & (row_BC < vocab.count)
    return sharding.scatter(original(row_BC.where(is_here_BC, 0)) * is_here_BC.unsqueeze(-1))


def _prompt_of_own_tokens(
    sharding: TokenSharding, original: Callable[..., Any], k_BCGK: Tensor, v_BCGK: Tensor, tokens_BT: Tensor
) -> Any:
    return original(k_BCGK, v_BCGK, sharding.shard_context(tokens_BT))


def _route(
    sharding: TokenSharding,
    original: Callable[[Tensor], tuple[Tensor, Tensor, RoutingStats | None]],
    logits_BCE: Tensor,
) -> tuple[Tensor, Tensor, RoutingStats | None]:
    """Replace `MoELayer.route`: routers see whole rows, because capacity and balance are those of a row.

    Every rank of `context` computes all of it and takes its tokens' choices. Padding has weight 0.
    """
    experts_BTK, weights_BTK, routing = original(sharding.gather_context(logits_BCE))
    experts_BCK = sharding.shard_context(experts_BTK.transpose(1, 2)).transpose(1, 2)
    weights_BCK = sharding.shard_context(weights_BTK.transpose(1, 2)).transpose(1, 2)
    return experts_BCK, weights_BCK, routing


# Experts


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the mixtures of a model compute with this rank's experts, in place; `mesh` is the axis `expert`."""
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.compute = partial(_compute_experts, mesh.get_group(), module.compute)  # type: ignore[method-assign]


def _compute_experts(
    group: dist.ProcessGroup, original: Callable[[Tensor, Tensor], Tensor], x_MD: Tensor, count: Tensor
) -> Tensor:
    """`MoELayer.compute`; experts lie on the ranks in their order, and so do the rows, sorted by expert."""
    sent_RE = count.view(group.size(), -1)
    received_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(received_RE, sent_RE.contiguous(), group=group)
    sent, received = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()  # waits for the device
    # They come by rank, and then by expert; the experts want them by expert.
    expert_RE = torch.arange(sent_RE.shape[1], device=count.device).expand_as(received_RE)
    expert_N = expert_RE.flatten().repeat_interleave(received_RE.flatten(), output_size=sum(received))
    order_N = expert_N.argsort(stable=True)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=count.device))
    x_ND = GatherRows.apply(all_to_all(x_MD, group, received, sent), order_N, place_N, 1)
    y_ND = GatherRows.apply(original(x_ND, received_RE.sum(0)), place_N, order_N, 1)
    return all_to_all(y_ND, group, sent, received)
