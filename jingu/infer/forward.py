"""A model's forward over the tokens of a step.

Shapes: T tokens, N rows of scores, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.cache import Held, PagedCache, Part
from jingu.infer.graphs import Graphs
from jingu.infer.load import Loaded
from jingu.infer.pages import SCRAP
from jingu.model.decoder import Decoder
from jingu.model.packed import REORDERED_ROWS, Arranged, Packed, Reordered
from jingu.model.products import linear
from jingu.model.spec import AlibiPositions, Experts, RelativeBias
from jingu.runtime.device import eager


def cache_of(loaded: Loaded, pages: int, page_tokens: int) -> PagedCache:
    """An empty cache for a model."""
    cache = PagedCache(loaded.spec, pages, page_tokens, next(loaded.model.parameters()).device)
    head = cast(object, loaded.model.head_weight()) if isinstance(loaded.model, Decoder) else None
    if isinstance(head, Packed | Arranged):
        cache.multiple = 1  # products with packed matrices take each row by itself, and cost by the row
    elif isinstance(head, Reordered):
        cache.multiple = REORDERED_ROWS
    return cache


def prepare_recording(loaded: Loaded, cache: PagedCache) -> None:
    """Let steps of a model depend on nothing but tensors of its device. JinguError where they cannot."""
    _check_plain(loaded, "--cuda-graphs")
    cache.in_place = False


def compiled(loaded: Loaded) -> Loaded:
    """A model whose blocks are compiled, for any number of tokens, but for attention to what a cache holds. That is
    done here and now, so that all steps go by the same code. JinguError where steps differ in more than tensors."""
    _check_plain(loaded, "--compile")
    made = replace(loaded, compiled=True)
    for block in cast(Decoder, made.model).blocks:
        attention = cast(Any, block.attention)
        attention.recalled = torch.compiler.disable(attention.recalled)
        block.compile(dynamic=True)
    cache = cache_of(made, SCRAP + 2, 16)
    held = Held([SCRAP + 1])
    for part in (Part(held, 0, [0] * 9), Part(held, 9, [0])):
        tokens_BT, positions_BT, _ = cache.plan([part], None)
        scores(made, cache, tokens_BT, positions_BT, [0])
    return made


def _check_plain(loaded: Loaded, where: str) -> None:
    spec = loaded.spec
    plain = isinstance(loaded.model, Decoder) and spec.encoder_layers is None and not any(spec.prompts)
    moves = isinstance(spec.feed_forward, Experts) or isinstance(spec.position, AlibiPositions | RelativeBias)
    if not plain or moves or loaded.adapters.names or loaded.ranks > 1:
        raise JinguError(
            "this is for decoders alone that one process has, without experts, adapters, trained prompts or biases of "
            "positions.",
            where=where,
            fix="Leave it out.",
        )


def scores(
    loaded: Loaded,
    cache: PagedCache,
    tokens_BT: Tensor,
    positions_BT: Tensor,
    rows: Sequence[int],
    source_BS: Tensor | None = None,
    graphs: Graphs | None = None,
) -> Tensor:
    """Scores [N, V] of the tokens after those in these rows, in fp32 at least, on the CPU.

    Args:
        graphs: by which steps of one token a sequence are launched.
    """
    places = torch.tensor(rows or [0], device=cache.device)
    places = F.pad(places, (0, -len(places) % cache.multiple))
    source = {} if source_BS is None else {"source_BS": source_BS}

    def step(inputs: Sequence[Tensor]) -> Tensor:
        tokens_BT, positions_BT, places, *planned = inputs
        cache.take(planned)

        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            return linear(hidden_BTD[0, places], weight_VD)

        logits_NV: Tensor = loaded.model(tokens_BT, positions_BT=positions_BT, cache=cache, loss=head, **source)
        return logits_NV

    # Ranks that share a model have engines that inference mode is nothing for.
    with (
        torch.inference_mode() if loaded.ranks == 1 else torch.no_grad(),
        nullcontext() if loaded.compiled else eager(),
    ):
        inputs, shape = [tokens_BT, positions_BT, places, *cache.tensors], cache.shape
        if graphs is None or shape is None:
            logits_NV = step(inputs)
        else:
            logits_NV = graphs.run((len(places), shape), inputs, step)
        return logits_NV[: len(rows)].to(torch.promote_types(logits_NV.dtype, torch.float32)).cpu()
