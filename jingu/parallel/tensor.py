"""Tensor and context parallelism: whose tokens and heads a rank computes with.

The tokens of a row are divided over `context` and then over `tensor`: norms, residuals and everything else that treats
tokens one by one see S of them on a rank. A part of the model that has a table (`SHARDING`) gets all tokens of its
context rank, computes with its share of heads or inner dims, and what the ranks of `tensor` have computed is added up
as it is scattered again. Between projections and attention, ranks of `context` exchange tokens for heads, so that
attention itself sees whole rows (Jacobs et al., 2023).

Shapes: B rows, T tokens of a row, C of them on a context rank, S on a rank, D width, H heads here, K head size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jingu.model.attention import Attention, CrossAttention
from jingu.model.decoder import Decoder
from jingu.model.experts import ExpertsLayer, Routing
from jingu.model.layers import Embedding
from jingu.model.products import linear
from jingu.model.sharding import styled
from jingu.model.spec import ModelSpec
from jingu.parallel.collectives import all_gather, all_to_all, reduce_scatter
from jingu.parallel.sharing import share


class Rows:
    """The rows at hand, divided over the ranks of `context` and `tensor`.

    Rows are filled up so that T divides, and cut again before attention and routers see them.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.tokens = 0  # T; set when a forward pass begins
        self.context, self.tensor = mesh["context"].size(), mesh["tensor"].size()
        self.context_group, self.tensor_group = mesh.get_group("context"), mesh.get_group("tensor")
        self.context_rank, self.tensor_rank = mesh.get_local_rank("context"), mesh.get_local_rank("tensor")

    def filled(self, tokens: int) -> int:
        """T, filled up."""
        ranks = self.context * self.tensor
        return -(-tokens // ranks) * ranks

    def of_context(self, x: Tensor, filler: int = 0) -> Tensor:
        """From [..., T] the C tokens of this context rank; where that is alone, all T."""
        return self._filled_up(x, filler).chunk(self.context, -1)[self.context_rank] if self.context > 1 else x

    def of_rank(self, x: Tensor) -> Tensor:
        """From [..., T] the S tokens of this rank."""
        ranks, rank = self.context * self.tensor, self.context_rank * self.tensor + self.tensor_rank
        return self._filled_up(x, 0).chunk(ranks, -1)[rank]

    def _filled_up(self, x: Tensor, filler: int) -> Tensor:
        return F.pad(x, (0, self.filled(x.shape[-1]) - x.shape[-1]), value=filler)

    def gather(self, x_BSD: Tensor) -> Tensor:
        """The C tokens of this context rank; where that is alone, cut to the row's T."""
        x_BCD = all_gather(x_BSD, 1, self.tensor_group) if self.tensor > 1 else x_BSD
        return x_BCD if self.context > 1 else x_BCD[:, : self.tokens]

    def scatter(self, y_BCD: Tensor) -> Tensor:
        """The sum over `tensor` of what its ranks have computed, for this rank's S tokens."""
        y_BCD = F.pad(y_BCD, (0, 0, 0, -y_BCD.shape[1] % self.tensor))
        return reduce_scatter(y_BCD, 1, self.tensor_group) if self.tensor > 1 else y_BCD

    def whole(self, x_BSD: Tensor) -> Tensor:
        """All T tokens, on every rank."""
        x_BCD = all_gather(x_BSD, 1, self.tensor_group) if self.tensor > 1 else x_BSD
        return self.row(x_BCD)

    def row(self, x_BCD: Tensor) -> Tensor:
        """All T tokens, from those of each context rank."""
        return (all_gather(x_BCD, 1, self.context_group) if self.context > 1 else x_BCD)[:, : self.tokens]

    def to_heads(self, x_BCF: Tensor, head_size: int) -> Tensor:
        """All T tokens of some of the heads, for the C tokens of all of them. Heads that are too few are repeated."""
        x_BCHK = x_BCF.unflatten(-1, (-1, head_size))
        if x_BCHK.shape[2] < self.context:
            x_BCHK = x_BCHK.repeat_interleave(self.context // x_BCHK.shape[2], 2)
        batch, tokens, heads, _ = x_BCHK.shape
        parts = x_BCHK.unflatten(2, (self.context, -1)).permute(2, 0, 1, 3, 4)
        parts = all_to_all(parts.flatten(0, 1), self.context_group).unflatten(0, (self.context, batch))
        x_BTF = parts.permute(1, 0, 2, 3, 4).reshape(batch, self.context * tokens, heads // self.context * head_size)
        return x_BTF[:, : self.tokens]

    def from_heads(self, y_BTF: Tensor) -> Tensor:
        """The way back: the C tokens of all heads."""
        y_BTF = F.pad(y_BTF, (0, 0, 0, self.filled(y_BTF.shape[1]) - y_BTF.shape[1]))
        parts = y_BTF.unflatten(1, (self.context, -1)).permute(1, 0, 2, 3)
        parts = all_to_all(parts.flatten(0, 1), self.context_group).unflatten(0, (self.context, -1))
        return parts.permute(1, 2, 0, 3).flatten(2)


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


def divide_work(model: Decoder, mesh: DeviceMesh) -> None:
    """Let a model whose parameters are this rank's parts compute with them, in place.

    Forward methods are wrapped rather than modules, so that parameter names stay those of the plain model.
    """
    rows, source, vocabulary = Rows(mesh), Rows(mesh), Vocabulary.of(mesh, model.spec.vocabulary)
    if rows.tensor * rows.context == 1:
        return
    child: Any
    for _, _, child, style in styled(model):
        if style == "vocabulary" and isinstance(child, Embedding):
            child.forward = partial(_look_up, rows, vocabulary, child)  # type: ignore[method-assign]
        elif style == "tokens":
            child.forward = partial(_look_up_tokens, rows, child.forward)
    for stack, its_rows in ((model, rows), (getattr(model, "encoder", None), source)):
        for block in () if stack is None else stack.blocks:
            for part in block.children():
                if hasattr(part, "SHARDING"):
                    _divide_part(part, its_rows, source if isinstance(part, CrossAttention) else its_rows, model.spec)
    model.forward = partial(_forward, rows, source, vocabulary, model.forward)  # type: ignore[method-assign]


def _divide_part(part: Any, rows: Rows, keys: Rows, spec: ModelSpec) -> None:
    """A part of a block; `keys` are the rows that attention looks at."""
    child: Any
    for _, _, child, style in styled(part):
        if style in ("heads", "kv_heads") and rows.context > 1:
            of = rows if style == "heads" else keys
            child.forward = partial(_to_heads, of, child.forward, spec.attention.head_size)
        elif style in ("row", "from_heads"):
            if rows.tensor > 1 and getattr(child, "bias", None) is not None:
                child.forward = partial(_with_bias_once, rows, child)
            if rows.context > 1 and style == "from_heads":
                child.forward = partial(_from_heads, rows, child.forward)
    if isinstance(part, Attention):
        heads = spec.attention.heads // (rows.tensor * rows.context)
        part.first_head = (rows.tensor_rank * rows.context + rows.context_rank) * heads
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


def _with_bias_once(rows: Rows, child: nn.Linear, x: Tensor) -> Tensor:
    """A linear map of which each rank has some inputs: the sum over ranks has the bias once."""
    return linear(x, child.weight, child.bias * (rows.tensor_rank == 0))


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
