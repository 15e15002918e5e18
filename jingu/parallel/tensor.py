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
from jingu.parallel.rows import Rows
from jingu.parallel.sharing import share


@dataclass(frozen=True)
class Vocabulary:
    """This rank's share of the vocabulary."""

    size: int
    """V."""
    start: int
    """First entry here."""
    most: int
    """Entries of the rank that has most."""
    group: Any
    """The ranks of `tensor`."""

    @staticmethod
    def of(mesh: DeviceMesh, size: int) -> Vocabulary:
        """The share of this rank."""
        ranks = mesh["tensor"].size()
        start, _ = share(size, ranks, mesh.get_local_rank("tensor"))
        return Vocabulary(size, start, -(-size // ranks), mesh.get_group("tensor"))

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
            child.forward = partial(_look_up_tokens, rows, child.forward)
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
            child.forward = partial(_to_heads, of, child.forward, spec.attention.head_size)
        elif style in ("row", "from_heads"):
            if rows.tensor > 1:
                child.bias_share = float(rows.tensor_rank == 0)
            if rows.tensor > 1 and isinstance(child, LoraLinear):
                child.row_squares = partial(_whole_rows, rows, child.row_squares)  # type: ignore[method-assign]
                child.first_input = share(child.in_features, rows.tensor, rows.tensor_rank)[0]
            if by_heads and style == "from_heads":
                child.forward = partial(_from_heads, rows, child.forward)
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
            prompt.forward = partial(_prompt_of_context, rows, prompt.forward)
        else:
            prompt.own_heads = partial(_heads_of_context, rows)
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
    here_BC = (row_BC >= 0) & (row_BC < table.weight.shape[0])
    vectors_BCD = F.embedding(row_BC.where(here_BC, 0), table.weight) * here_BC.unsqueeze(-1)
    return rows.scatter(vectors_BCD.to(table.compute))


def _look_up_tokens(rows: Rows, original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return original(rows.of_rank(x))


def _to_heads(rows: Rows, original: Callable[[Tensor], Tensor], head_size: int, x_BCD: Tensor) -> Tensor:
    return rows.to_heads(original(x_BCD), head_size)


def _from_heads(rows: Rows, original: Callable[[Tensor], Tensor], y_BTF: Tensor) -> Tensor:
    return original(rows.from_heads(y_BTF))


def _whole_rows(rows: Rows, original: Callable[[], Tensor]) -> Tensor:
    """Squared lengths of a matrix's rows, of which each rank has some inputs."""
    return all_reduce(original(), "sum", rows.tensor_group)


def _prompt_of_context(
    rows: Rows, original: Callable[..., tuple[Tensor, Tensor]], k_BCGK: Tensor, v_BCGK: Tensor, tokens_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """A prompt's keys and values among those of this context rank's tokens."""
    return original(k_BCGK, v_BCGK, rows.of_context(tokens_BT))


def _heads_of_context(rows: Rows, x_NGK: Tensor) -> Tensor:
    """Of a prompt's heads those that `Rows.to_heads` leaves on this rank."""
    if x_NGK.shape[1] < rows.context:
        x_NGK = x_NGK.repeat_interleave(rows.context // x_NGK.shape[1], 1)
    return x_NGK.chunk(rows.context, 1)[rows.context_rank]


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
