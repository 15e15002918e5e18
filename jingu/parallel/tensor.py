"""Tensor and context parallelism: whose tokens and heads a rank computes with.

The tokens of a row are divided over `context` and then over `tensor`: norms, residuals and everything else that treats
tokens one by one see S of them on a rank. A part of the model that has a table (`SHARDING`) gets all tokens of its
context rank, computes with its share of heads or inner dims, and what the ranks of `tensor` have computed is added up
as it is scattered again. Between projections and attention, ranks of `context` exchange tokens for heads, so that
attention itself sees whole rows (Jacobs et al., 2023); or they keep the heads and pass keys and values around
(`jingu.parallel.ring`).

Shapes: B rows, T tokens of a row, C of them on a context rank, S on a rank, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jingu.model.adapters import LoraLinear
from jingu.model.attention import Attention, CrossAttention, SelfAttention
from jingu.model.decoder import Decoder
from jingu.model.experts import ExpertsLayer, Routing
from jingu.model.layers import Embedding
from jingu.model.sharding import own_styles, styled
from jingu.model.spec import ModelSpec
from jingu.parallel.collectives import all_gather, all_reduce
from jingu.parallel.ring import share_keys
from jingu.parallel.rows import Rows, chained
from jingu.parallel.sharing import share


@dataclass(frozen=True)
class Vocabulary:
    """This rank's share of the vocabulary."""

    size: int
    """V."""
    start: int
    """First entry here."""
    count: int
    """Entries here."""
    most: int
    """Entries of the rank that has most."""
    group: Any
    """The ranks of `tensor`."""

    @staticmethod
    def of(mesh: DeviceMesh, size: int) -> Vocabulary:
        """The share of this rank."""
        ranks = mesh["tensor"].size()
        start, count = share(size, ranks, mesh.get_local_rank("tensor"))
        return Vocabulary(size, start, count, -(-size // ranks), mesh.get_group("tensor"))

    def gather(self, scores: Tensor) -> Tensor:
        """All V scores [..., V] from each rank's."""
        filled = F.pad(scores, (0, self.most - scores.shape[-1]))
        return all_gather(filled.movedim(-1, 0), 0, self.group).movedim(0, -1)[..., : self.size]


def divide_work(model: Decoder, mesh: DeviceMesh, *, ring: bool = False) -> None:
    """Let a model whose parameters are this rank's parts compute with them, in place.

    Forward methods are wrapped rather than modules, so that parameter names stay those of the plain model.

    Args:
        ring: ranks of `context` keep all heads, and pass keys and values around.
    """
    rows, source, vocabulary = Rows(mesh), Rows(mesh), Vocabulary.of(mesh, model.spec.vocabulary)
    if rows.tensor * rows.context == 1:
        return
    child: Any
    for _, child, style in styled(model):
        if style == "vocabulary" and isinstance(child, Embedding):
            child.forward = partial(_look_up, rows, vocabulary, child)  # type: ignore[method-assign]
        elif style == "tokens":
            child.forward = chained(rows.of_rank, child.forward)
    for stack, its_rows in ((model, rows), (model.encoder, source)):
        for block in () if stack is None else stack.blocks:
            for part in block.children():
                if hasattr(part, "SHARDING"):
                    keys = source if isinstance(part, CrossAttention) else its_rows
                    _divide_part(part, its_rows, keys, model.spec, ring=ring and rows.context > 1)
    model.forward = partial(_forward, rows, source, vocabulary, model.forward)  # type: ignore[method-assign]


def _divide_part(part: Any, rows: Rows, keys: Rows, spec: ModelSpec, *, ring: bool) -> None:
    """A part of a block; `keys` are the rows that attention looks at."""
    child: Any
    by_heads = rows.context > 1 and not ring
    for _, child, style in own_styles(part):
        if style in ("heads", "kv_heads") and by_heads:
            of = rows if style == "heads" else keys
            child.forward = chained(child.forward, partial(of.to_heads, head_size=spec.attention.head_size))
        elif style in ("row", "from_heads"):
            if rows.tensor > 1:
                child.bias_share = float(rows.tensor_rank == 0)
            if rows.tensor > 1 and isinstance(child, LoraLinear):
                summed = partial(all_reduce, op="sum", group=rows.tensor_group)
                child.row_squares = chained(child.row_squares, summed)  # type: ignore[method-assign]
                child.first_input = share(child.in_features, rows.tensor, rows.tensor_rank)[0]
            if by_heads and style == "from_heads":
                child.forward = chained(rows.from_heads, child.forward)
    if isinstance(part, Attention):
        ranks, rank = rows.tensor, rows.tensor_rank
        if by_heads:
            ranks, rank = ranks * rows.context, rank * rows.context + rows.context_rank
        part.first_head = rank * (spec.attention.heads // ranks)
        if ring:
            share_keys(part, rows, keys)
    if isinstance(part, SelfAttention) and part.prompt is not None and rows.context > 1:
        prompt: Any = part.prompt
        if ring:
            placed = prompt.forward
            prompt.forward = lambda k_BCGK, v_BCGK, tokens_BT: placed(k_BCGK, v_BCGK, rows.of_context(tokens_BT))
        else:
            prompt.own_heads = rows.of_heads
    if isinstance(part, ExpertsLayer) and rows.context > 1:
        part.route = partial(_route, rows, part.route)  # type: ignore[method-assign]
    if rows.tensor > 1:
        part.forward = partial(_with_all_tokens, rows, None if keys is rows else keys, part.forward)


def _forward(
    rows: Rows,
    source: Rows,
    vocabulary: Vocabulary,
    original: Callable[..., Any],
    tokens_BT: Tensor,
    *arguments: Any,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    auxiliary: Callable[[list[Routing]], Tensor] | None = None,
    **others: Any,
) -> Any:
    """`Decoder.forward`. A loss gets the C tokens of the context rank, and this rank's part of the head's weight;
    generation gets all tokens, and its scores are those of the whole vocabulary."""
    rows.tokens = tokens_BT.shape[1]
    if others.get("source_BS") is not None:
        source.tokens = others["source_BS"].shape[1]
    for name, of in (("keys_BT", rows), ("source_keys_BS", source)):
        if others.get(name) is not None:
            others[name] = of.of_context(others[name])
    generates = others.get("cache") is not None

    def head(hidden_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        assert loss is not None
        if generates:
            return vocabulary.gather(loss(rows.whole(hidden_BSD), weight_VD))
        return loss(rows.gather(hidden_BSD), weight_VD)

    def shared(routings: list[Routing]) -> Tensor:
        # Every rank that sees the row computes all of this. Each gives an equal share of the gradient; and of the
        # value those of `context`, which is summed over them.
        assert auxiliary is not None
        losses = auxiliary(routings) / rows.context
        return losses / rows.tensor + (losses * (1 - 1 / rows.tensor)).detach()

    result = original(tokens_BT, *arguments, loss=loss and head, auxiliary=auxiliary and shared, **others)
    return rows.whole(result) if loss is None and isinstance(result, Tensor) else result


def _with_all_tokens(
    rows: Rows, keys: Rows | None, original: Callable[..., Any], x_BSD: Tensor, *arguments: Any
) -> Any:
    """A part of a block with a table, from this rank's tokens to this rank's tokens.

    Args:
        keys: where the first of the arguments is states of other rows.
    """
    if keys is not None and arguments[0] is not None:
        arguments = (keys.gather(arguments[0]), *arguments[1:])
    result = original(rows.gather(x_BSD), *arguments)
    return (rows.scatter(result[0]), *result[1:]) if isinstance(result, tuple) else rows.scatter(result)


def _look_up(rows: Rows, vocabulary: Vocabulary, table: Embedding, tokens_BT: Tensor) -> Tensor:
    """The embedding: each rank has some of the vectors, the others add nothing."""
    row_BC = rows.of_context(tokens_BT) - vocabulary.start
    here_BC = (row_BC >= 0) & (row_BC < vocabulary.count)
    return rows.scatter(Embedding.forward(table, row_BC.where(here_BC, 0)) * here_BC.unsqueeze(-1))


def _route(
    rows: Rows, original: Callable[[Tensor], tuple[Tensor, Tensor, Routing | None]], logits_BCE: Tensor
) -> tuple[Tensor, Tensor, Routing | None]:
    """Routers see whole rows: capacity, even assignments and balancing losses are of a row. Every rank of `context`
    computes all of it, and takes its tokens' choices; what fills a row up has weight 0."""
    experts_BTK, weights_BTK, routing = original(rows.row(logits_BCE))
    experts_BCK, weights_BCK = (
        rows.of_context(x_BTK.transpose(1, 2)).transpose(1, 2) for x_BTK in (experts_BTK, weights_BTK)
    )
    return experts_BCK, weights_BCK, routing
