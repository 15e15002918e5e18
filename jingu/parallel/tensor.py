"""Tensor, context and expert parallelism: make modules compute with a rank's share of tokens, heads and experts.

*Tensor parallelism, with sequence parallelism (Megatron).* The tokens of a row are divided over `context` and then over
`tensor`. Norms, residuals and all other operations per token see the S tokens of a rank. A module with a sharding table
(`sharding`) all-gathers the C tokens of its context rank, computes with its share of heads or intermediate dims, and
reduce-scatters the result over `tensor`.

*Context parallelism.* Between projections and attention, ranks of `context` exchange tokens for heads, so that
attention sees whole rows (DeepSpeed-Ulysses, Jacobs et al., 2023). Or each rank keeps all heads, and keys and values
travel (`jingu.parallel.tensor`).

*Expert parallelism.* Tokens travel to the ranks of `expert` that hold their experts, and back.

Shapes: B rows, T tokens of a row, C of them on a context rank, S on a rank, D hidden size, V vocabulary. Of experts:
M choices (token, expert) of this rank's tokens, N choices that this rank's experts receive, R ranks, E experts here.
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
from jingu.model.attention import (
    Attention,
    AttentionMask,
    BlockContext,
    CrossAttention,
    SelfAttention,
    pad_to_one_size,
)
from jingu.model.decoder import AuxiliaryLoss, Decoder, FurtherLoss, LossFunction, StageOutput
from jingu.model.document_mask import DocumentMask
from jingu.model.experts import MoELayer, RoutingStats
from jingu.model.grouped_matmul import GatherRows
from jingu.model.inputs import Inputs
from jingu.model.latent_attention import LatentSelfAttention
from jingu.model.layers import Embedding, RMSNorm
from jingu.model.quantized_weight import StoredWeight
from jingu.model.sharding_table import child_styles, iterate_styles
from jingu.parallel.sharding import shard_range
from jingu.parallel.token_sharding import TokenSharding, compose


@dataclass(frozen=True)
class VocabShard:
    """This rank's shard of the vocabulary.

    Attributes:
        size: entries of the whole vocabulary, V.
        start: first entry of this rank.
        count: entries of this rank.
        most: entries of the largest shard.
        group: process group of the axis `tensor`.
    """

    size: int
    start: int
    count: int
    most: int
    group: Any

    @staticmethod
    def of(mesh: DeviceMesh, size: int) -> VocabShard:
        """Return this rank's shard of a vocabulary of `size` entries."""
        ranks = mesh["tensor"].size()
        start, count = shard_range(size, ranks, mesh.get_local_rank("tensor"))
        return VocabShard(size, start, count, -(-size // ranks), mesh.get_group("tensor"))

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary [..., V], given each rank's logits [..., count]."""
        full_shard = F.pad(logits, (0, self.most - logits.shape[-1]))
        return all_gather(full_shard.movedim(-1, 0), 0, self.group).movedim(0, -1)[..., : self.size]


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, ring: bool = False) -> None:
    """Make a model compute with this rank's shards of its parameters, in place: tensor and context parallelism.

    Forward methods are wrapped rather than modules, so that parameter names stay those of the plain model.

    Args:
        model: one stage, whose parameters `shard_parameters` has already cut.
        mesh: the whole device mesh.
        ring: ranks of `context` keep all heads, and keys and values travel between them; otherwise Ulysses.
    """
    sharding = TokenSharding(mesh)
    # The encoder's tokens are divided separately.
    source_sharding = TokenSharding(mesh)
    vocab = VocabShard.of(mesh, model.spec.vocab_size)
    if sharding.tensor * sharding.context == 1:
        return
    # Embeddings: divided by vocabulary entries, or computed for this rank's tokens only.
    module: Any
    for _, module, style in iterate_styles(model):
        if style == "vocabulary" and isinstance(module, Embedding):
            if isinstance(module, AdaptedEmbedding):
                module.first_row = vocab.start
            module.forward = partial(_embed, sharding, vocab, module.forward)  # type: ignore[method-assign]
        elif style == "tokens":
            module.forward = compose(sharding.shard_tokens, module.forward)
    # Blocks: every module with a sharding table.
    for stack, own_sharding in ((model, sharding), (model.encoder, source_sharding)):
        if stack is None:
            continue
        further = [layer.block for layer in model.mtp] if stack is model else []
        for block in (*stack.blocks, *further):
            for module in block.children():
                if hasattr(module, "sharding"):
                    is_cross = isinstance(module, CrossAttention)
                    key_sharding = source_sharding if is_cross else own_sharding
                    _parallelize_module(module, own_sharding, key_sharding, ring=ring)
    model.forward = partial(_forward, sharding, source_sharding, vocab, model.forward)  # type: ignore[method-assign]


def _parallelize_module(module: Any, sharding: TokenSharding, key_sharding: TokenSharding, *, ring: bool) -> None:
    """Wrap a module of a block (attention or feed-forward).

    Args:
        sharding: how the module's tokens are divided.
        key_sharding: how the tokens of attention's keys and values are divided.
        ring: see `apply_tensor_parallel`.
    """
    has_context = sharding.context > 1
    by_heads = has_context and not ring
    # Projections: sum over `tensor` after a row-parallel matrix, exchange tokens for heads over `context`.
    for name, child, style in child_styles(module):
        if style in ("row", "from_heads") and sharding.tensor > 1:
            _compute_summand(child, sharding)
        if isinstance(child, RMSNorm) and sharding.tensor > 1:
            # A norm over all heads, of which each rank has equally many.
            child.is_whole = False
            child.mean_square = compose(  # type: ignore[method-assign]
                child.mean_square, partial(_mean_over_ranks, group=sharding.tensor_group)
            )
        # Such a norm comes after the projection and before the exchange.
        is_exchanged = f"{name}_norm" not in module.sharding and name not in ("kv", "sinks")
        if by_heads and isinstance(module, Attention) and is_exchanged:
            sizes = {"v": module.value_dim, "gate": module.value_dim // module.gate_width}
            head_dim = sizes.get(name, module.head_dim)
            _exchange_tokens_for_heads(child, style, sharding, key_sharding, head_dim)
    if isinstance(module, Attention):
        # The index of this rank's first head, for masks and caches that have all heads.
        ranks, rank = sharding.tensor, sharding.tensor_rank
        if by_heads:
            ranks = ranks * sharding.context
            rank = rank * sharding.context + sharding.context_rank
        module.first_head = rank * (module.sizes[0] // ranks)
        if ring and has_context:
            apply_ring_attention(module, sharding, key_sharding)
    if isinstance(module, LatentSelfAttention) and by_heads:
        # Every rank has the latent vectors of all tokens, and expands them to its heads.
        for projection in (module.kv_down, module.k_rotary):
            projection.forward = compose(projection.forward, sharding.gather_context)  # type: ignore[method-assign]
        module.head_part = (sharding.context_rank, sharding.context)
    # Virtual tokens of prefix tuning: each rank needs those of its tokens (ring) or of its heads (Ulysses).
    if isinstance(module, SelfAttention) and module.prompt is not None and has_context:
        prompt: Any = module.prompt
        if ring:
            prompt.forward = partial(_prompt_of_own_tokens, sharding, prompt.forward)
        else:
            prompt.own_heads = sharding.shard_heads
    if isinstance(module, MoELayer) and has_context:
        module.route = partial(_route, sharding, module.route)  # type: ignore[method-assign]
    # Gather tokens over `tensor` before the module, and scatter the sum of results after it.
    if sharding.tensor > 1:
        sources = None if key_sharding is sharding else key_sharding
        module.forward = partial(_with_all_tokens, sharding, sources, module.forward)


def _mean_over_ranks(x_BS1: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_gather(x_BS1, x_BS1.dim() - 1, group).mean(-1, keepdim=True)


def _compute_summand(child: Any, sharding: TokenSharding) -> None:
    """Make a matrix whose inputs are divided over `tensor` compute this rank's summand of the result.

    Only one rank adds the bias. For DoRA, the sums of squares of each row are summed over the ranks.
    """
    child.bias_share = float(sharding.tensor_rank == 0)
    if isinstance(child, LoraLinear):
        sum_over_ranks = partial(all_reduce, op="sum", group=sharding.tensor_group)
        child.row_squares = compose(child.row_squares, sum_over_ranks)  # type: ignore[method-assign]
        child.first_input = shard_range(child.in_features, sharding.tensor, sharding.tensor_rank)[0]


def _exchange_tokens_for_heads(
    child: nn.Module, style: str, sharding: TokenSharding, key_sharding: TokenSharding, head_dim: int
) -> None:
    """Exchange tokens for heads over `context` after the projections q, k and v, and back before the output."""
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
    further: FurtherLoss | None = None,
) -> Any:
    """Replace `Decoder.forward`.

    The loss function receives the C tokens of the context rank and this rank's shard of the head's weight. With a KV
    cache it receives all T tokens, and its logits are gathered over the vocabulary. Without a loss function, the
    output of the last stage is gathered: all T tokens, on every rank.
    """
    inputs = _shard_seeds(Inputs(inputs) if isinstance(inputs, Tensor) else inputs, sharding)
    sharding.tokens = inputs.tokens.shape[1]
    if inputs.source is not None:
        source_sharding.tokens = inputs.source.tokens.shape[1]
        inputs = replace(inputs, source=_shard_seeds(inputs.source, source_sharding))

    def loss_of_shard(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        assert loss is not None
        if inputs.cache is not None:
            return vocab.gather(loss(sharding.gather_all(hidden_BSD), weight_VD))
        return loss(sharding.gather(hidden_BSD), weight_VD)

    def further_of_shard(hidden_BSD: Tensor, weight_VD: Tensor, depth: int) -> Tensor:
        assert further is not None
        return further(sharding.gather(hidden_BSD), weight_VD, depth)

    def auxiliary_of_rank(routings: list[RoutingStats]) -> Tensor:
        # All ranks of `context` and `tensor` compute the same losses, and their gradients are summed, so each rank's
        # gradient is divided by the number of both. Values are summed over `context` only; so the part that the
        # division by `tensor` removes is added again, without gradient.
        assert auxiliary is not None
        losses = auxiliary(routings) / sharding.context
        return losses / sharding.tensor + (losses * (1 - 1 / sharding.tensor)).detach()

    result = original(
        inputs,
        loss=None if loss is None else loss_of_shard,
        auxiliary=None if auxiliary is None else auxiliary_of_rank,
        received=received,
        further=None if further is None else further_of_shard,
    )
    if loss is None and isinstance(result, Tensor):
        return sharding.gather_all(result)
    return result


def _shard_seeds(inputs: Inputs, sharding: TokenSharding) -> Inputs:
    """Return the inputs with the dropout seeds of this context rank's tokens; all other inputs stay whole rows."""
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
    """Call a module of a block with all tokens of the context rank, and reduce-scatter its result over `tensor`.

    Args:
        source_sharding: how the encoder's states are divided, which cross-attention also gathers; None otherwise.
        original: the module's forward. If it returns a tuple, only the first element is scattered.
    """
    if source_sharding is not None:
        context, *arguments_after = arguments
        assert isinstance(context, BlockContext)
        if context.encoder_states is not None:
            context = context._replace(encoder_states=source_sharding.gather(context.encoder_states))
        arguments = (context, *arguments_after)
    result = original(sharding.gather(x_BSD), *arguments)
    if isinstance(result, tuple):
        return (sharding.scatter(result[0]), *result[1:])
    return sharding.scatter(result)


def _embed(
    sharding: TokenSharding, vocab: VocabShard, original: Callable[[Tensor], Tensor], tokens_BT: Tensor
) -> Tensor:
    """Look up embeddings [B, S, D]: each rank of `tensor` has some of the vectors; the others add zeros."""
    row_BC = sharding.shard_context(tokens_BT) - vocab.start
    is_here_BC = (row_BC >= 0) & (row_BC < vocab.count)
    return sharding.scatter(original(row_BC.where(is_here_BC, 0)) * is_here_BC.unsqueeze(-1))


def _prompt_of_own_tokens(
    sharding: TokenSharding, original: Callable[..., Any], k_BCGK: Tensor, v_BCGK: Tensor, tokens_BT: Tensor
) -> Any:
    """Call a deep prompt's forward with the ids of this context rank's tokens."""
    return original(k_BCGK, v_BCGK, sharding.shard_context(tokens_BT))


def _route(
    sharding: TokenSharding,
    original: Callable[[Tensor], tuple[Tensor, Tensor, RoutingStats | None]],
    logits_BCE: Tensor,
) -> tuple[Tensor, Tensor, RoutingStats | None]:
    """Replace `MoELayer.route`: route whole rows, because capacity and load balance are defined per row.

    Every rank of `context` computes the routing of the whole row, and keeps the choices of its tokens. Padding tokens
    get weight 0.
    """
    experts_BTK, weights_BTK, routing = original(sharding.gather_context(logits_BCE))
    experts_BCK = sharding.shard_context(experts_BTK.transpose(1, 2)).transpose(1, 2)
    weights_BCK = sharding.shard_context(weights_BTK.transpose(1, 2)).transpose(1, 2)
    return experts_BCK, weights_BCK, routing


# Experts


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make all MoE layers compute with this rank's experts, in place.

    Args:
        mesh: the mesh of the axis `expert`.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.compute = partial(_compute_experts, mesh.get_group(), module.compute)  # type: ignore[method-assign]
            for part in (module.gate, module.up, module.down):
                if part is not None:
                    _divide_stored(part, mesh)


def _divide_stored(module: Any, mesh: DeviceMesh) -> None:
    """Replace the matrices of all experts by those of this rank, if they are as another tool has stored them."""
    weight = module.weight
    if not isinstance(weight, StoredWeight):
        return
    assert weight.experts is not None
    count = weight.shape[0] // mesh.size()
    begin = mesh.get_local_rank() * count
    del module.weight
    module.weight = weight.experts(range(begin, begin + count))


def _compute_experts(
    group: dist.ProcessGroup, original: Callable[[Tensor, Tensor], Tensor], x_MD: Tensor, count: Tensor
) -> Tensor:
    """Replace `MoELayer.compute`: send each choice to the rank of its expert, compute, and send the results back.

    Args:
        x_MD: inputs of this rank's choices, sorted by expert. Rank r of `expert` has the r-th block of experts, so the
            rows are also sorted by rank.
        count: choices per expert, over all experts of the layer.
    """
    # Exchange how many choices each rank sends to each expert.
    sent_RE = count.view(group.size(), -1)
    received_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(received_RE, sent_RE.contiguous(), group=group)
    send_sizes, receive_sizes = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()  # waits for the device
    # Rows arrive sorted by rank, then by expert. Sort them by expert, compute, and restore their order.
    expert_RE = torch.arange(sent_RE.shape[1], device=count.device).expand_as(received_RE)
    expert_N = expert_RE.flatten().repeat_interleave(received_RE.flatten(), output_size=sum(receive_sizes))
    order_N = expert_N.argsort(stable=True)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=count.device))
    x_ND = GatherRows.apply(all_to_all(x_MD, group, receive_sizes, send_sizes), order_N, place_N, 1)
    y_ND = GatherRows.apply(original(x_ND, received_RE.sum(0)), place_N, order_N, 1)
    return all_to_all(y_ND, group, send_sizes, receive_sizes)


# Context parallelism with `context_method: ring`: each rank has all heads for its tokens.
#
# Keys and values travel around a ring, one rank's part at a time (PyTorch's ring attention; Liu et al., 2023). They are
# all-gathered instead if attention needs a mask (documents, windows, position biases), if it is not causal, or if the
# kernel does not support the dtype.
#
# Shapes: B rows, T tokens of a row, C of them on a context rank, H heads, G key-value heads, K head dim, S keys.


def apply_ring_attention(attention: Attention, sharding: TokenSharding, key_sharding: TokenSharding) -> None:
    """Make an attention module attend from the tokens of this context rank to the keys and values of all ranks.

    Wraps the methods of `attention` in place.

    Args:
        sharding: how the tokens of the queries are divided.
        key_sharding: how the tokens of keys and values are divided: in cross-attention, those of the encoder.
    """
    module: Any = attention
    module.attend_cache = partial(_attend_cache, sharding, attention)
    if isinstance(attention, LatentSelfAttention):
        module.attend_latent = partial(_attend_latent, sharding, attention.attend_latent)
    if isinstance(attention, CrossAttention):
        for projection in filter(None, (attention.k, attention.v)):
            projection.forward = compose(projection.forward, key_sharding.gather_context)  # type: ignore[method-assign]
        attend = attention.attend
        module.attend = lambda q, k, v, mask, *, causal: attend(q, k, v, _own_rows(sharding, mask), causal=causal)
    elif isinstance(attention, SelfAttention):
        module.forward = partial(_with_own_positions, sharding, attention.forward)
        module.attend_tokens = partial(_attend_tokens, sharding, attention)


def _own_rows(sharding: TokenSharding, mask: AttentionMask) -> Tensor | None:
    """Return the rows of a mask that belong to this rank's queries.

    Rows of padding may attend to all keys: the softmax over no keys is NaN.
    """
    if isinstance(mask, DocumentMask):
        mask = mask.mask()
    if mask is None or mask.shape[-2] == 1:
        return mask
    padding = sharding.padded_length(sharding.tokens) - sharding.tokens
    padded_mask = F.pad(mask, (0, 0, 0, padding), value=mask.dtype == torch.bool)
    return padded_mask.chunk(sharding.context, -2)[sharding.context_rank]


def _with_own_positions(
    sharding: TokenSharding, original: Callable[..., Any], x_BCD: Tensor, context: BlockContext, *arguments: Any
) -> Any:
    """Call `SelfAttention.forward` with the rotary tables and query factors of this rank's tokens."""

    def share(table: Tensor) -> Tensor:
        return sharding.shard_context(table.movedim(-3, -1)).movedim(-1, -3)

    if context.rotary is not None:
        cos, sin = map(share, context.rotary)
        context = context._replace(rotary=(cos, sin))
    if context.query_factor is not None:
        context = context._replace(query_factor=share(context.query_factor))
    return original(x_BCD, context, *arguments)


def _attend_tokens(
    sharding: TokenSharding,
    attention: SelfAttention,
    q_BHCK: Tensor,
    k_BGCK: Tensor,
    v_BGCK: Tensor,
    mask: AttentionMask,
) -> Tensor:
    """Replace `SelfAttention.attend_tokens`: this rank's queries attend to the keys of all ranks."""
    has_scores = attention.softcap is not None or attention.sinks is not None
    if not has_scores and attention.causal and mask is None and _has_ring_kernel(q_BHCK):
        # PyTorch's ring attention does not support grouped-query attention, so repeat keys and values.
        groups = q_BHCK.shape[1] // k_BGCK.shape[1]
        k_BHCK = k_BGCK.repeat_interleave(groups, 1)
        v_BHCK = v_BGCK.repeat_interleave(groups, 1)
        # Imported late, because it takes longer to import than generation takes to start.
        from jingu.compat.torch_ring_attention import ring_attention

        scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
        q_BHCK, k_BHCK, v_BHCK = pad_to_one_size(q_BHCK, k_BHCK, v_BHCK)
        y_BHCK = ring_attention(q_BHCK, k_BHCK, v_BHCK, scale, sharding.context_group)
        return y_BHCK[..., : attention.value_dim].transpose(1, 2).flatten(2)
    # Otherwise, gather all keys and values, and use the mask rows of this rank's queries.
    k_BGTK, v_BGTK = (sharding.gather_context(x.transpose(1, 2)).transpose(1, 2) for x in (k_BGCK, v_BGCK))
    if mask is None and attention.causal and sharding.tokens > 1:
        mask = torch.ones(sharding.tokens, sharding.tokens, dtype=torch.bool, device=q_BHCK.device).tril()
    return attention.attend(q_BHCK, k_BGTK, v_BGTK, _own_rows(sharding, mask), causal=False)


def _attend_cache(
    sharding: TokenSharding, attention: Attention, cache_attention: Callable[..., Tensor], *x_BCHK: Tensor
) -> Tensor:
    """Replace `Attention.attend_cache`: the KV cache of every rank holds the tokens of all ranks."""
    y_BTHK = cache_attention(*(sharding.gather_context(x) for x in x_BCHK), attention.scale)
    return sharding.shard_context(y_BTHK.movedim(1, -1)).movedim(-1, 1).flatten(2)


def _attend_latent(
    sharding: TokenSharding,
    original: Callable[..., Tensor],
    cache_attention: Callable[..., Tensor],
    q_BCHL: Tensor,
    kv_BC1L: Tensor,
) -> Tensor:
    """Replace `LatentSelfAttention.attend_latent`: the KV cache of every rank holds the tokens of all ranks."""
    y_BTHL = original(cache_attention, sharding.gather_context(q_BCHL), sharding.gather_context(kv_BC1L))
    return sharding.shard_context(y_BTHL.movedim(1, -1)).movedim(-1, 1)


def _has_ring_kernel(q: Tensor) -> bool:
    """Return whether ring attention's kernel supports the dtype.

    The ring needs a kernel that also returns the log-sum-exp, with which it combines the parts.
    """
    return q.device.type == "cpu" or q.dtype in (torch.bfloat16, torch.float16)
