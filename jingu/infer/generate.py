"""Generation: one forward for the prompt, then one a token, with a key-value cache.

Shapes: B rows (one here), T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.cache import StaticCache
from jingu.infer.sampling import Sampling, choose
from jingu.infer.text import TextStream
from jingu.model.products import linear
from jingu.model.spec import ModelSpec
from jingu.parallel.pipeline import Model
from jingu.text.tokenizer import Tokenizer

Finish = Literal["end", "stop", "length"]


@dataclass(frozen=True)
class Piece:
    """One generated token, and the text it settles (often none: half a character, the start of a stop string).

    Attributes:
        id: the token.
        text: what can be shown; the texts of all pieces make the answer.
        finish: on the last piece: the end token, a stop string, or the length asked for.
    """

    id: int
    text: str
    finish: Finish | None = None


def generate(
    model: Model,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    stop: Sequence[str],
    tokenizer: Tokenizer,
    end_ids: Collection[int] | None = None,
    start_id: int | None = None,
) -> Iterator[Piece]:
    """Continue a prompt (with an encoder: answer it), a piece a token. The same arguments give the same text.

    Also for a model laid out over ranks: every rank calls it with the same arguments and takes the same steps.

    Args:
        prompt_ids: empty to begin a new document (the end token is what came before); where there is an encoder, what
            it reads, and the end token after it.
        max_tokens: most tokens to generate.
        stop: the text ends before the first of these.
        end_ids: tokens that end the text; None: the tokenizer's end token.
        start_id: what stands before the first token of a decoder with an encoder; None: as the tokenizer says.

    Raises:
        JinguError: prompt and answer do not fit the model's context, or the prompt has ids the model has not.
    """
    prompt = list(prompt_ids) or [tokenizer.end_id]
    check_fit(model, prompt, max_tokens)
    source: list[int] | None = None
    if model.spec.encoder_layers is not None:
        source, prompt = [*prompt_ids, tokenizer.end_id], [tokenizer.start_id if start_id is None else start_id]
    stream = TextStream(partial(tokenizer.decode, special=source is not None), stop)
    ends = {tokenizer.end_id} if end_ids is None else set(end_ids)
    return _pieces(model, prompt, source, sampling, max_tokens, stream, ends)


def encode_prompt(spec: ModelSpec, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt. To an encoder, the names of sentinels in it stand for them, as they do in the answer."""
    return tokenizer.encode(prompt, special=spec.encoder_layers is not None)


def check_fit(model: Model, prompt: Sequence[int], max_tokens: int) -> None:
    """Raise JinguError unless prompt and answer fit the model."""
    spec = model.spec
    if max_tokens < 1:
        raise JinguError(f"{max_tokens} tokens were asked for.", where="max_tokens", fix="Ask for 1 or more.")
    room = room_after(spec, len(prompt))
    if max_tokens > room:
        fix = f"Ask for at most {room} tokens" if room > 0 else "Shorten the prompt"
        raise JinguError(
            f"the prompt has {len(prompt)} tokens and {max_tokens} more were asked for, but the model's context is "
            f"{spec.context} tokens.",
            where="prompt",
            fix=f"{fix}{' or shorten the prompt' if room > 0 else ''}.",
        )
    if max(prompt) >= spec.vocabulary or min(prompt) < 0:
        raise JinguError(
            f"the prompt has token ids beyond the model's vocabulary of {spec.vocabulary}.",
            where="prompt",
            fix="Use the tokenizer that the model was trained with.",
        )


def room_after(spec: ModelSpec, prompt: int) -> int:
    """Tokens that can be generated after a prompt of so many."""
    if spec.encoder_layers is None:
        return spec.context - prompt
    return spec.context if prompt < spec.context else 0  # in the encoder the end token follows it


def _pieces(
    model: Model,
    prompt: list[int],
    source: list[int] | None,
    sampling: Sampling,
    max_tokens: int,
    stream: TextStream,
    ends: set[int],
) -> Iterator[Piece]:
    device = next(model.parameters()).device
    cache = StaticCache(model.spec.layers, len(prompt) + max_tokens)
    generator = torch.Generator().manual_seed(sampling.seed)
    ids, fresh = list(prompt), list(prompt)
    source_BS = None if source is None else torch.tensor([source], device=device)
    for count in range(1, max_tokens + 1):
        logits_V = next_logits(model, torch.tensor([fresh], device=device), cache, source_BS)[0]
        source_BS = None  # the cache has what the blocks need of it
        token = choose(logits_V, ids, sampling, generator)
        ids.append(token)
        fresh = [token]
        finish: Finish | None = "end" if token in ends else None
        text = "" if finish else stream.push(token)
        if finish is None and stream.stopped:
            finish = "stop"
        if finish is None and count == max_tokens:
            finish = "length"
        if finish is not None:
            text += stream.finish()
            # What was held back may, now that no more follows, hold a stop string in full.
            finish = "stop" if stream.stopped else finish
        yield Piece(token, text, finish)
        if finish is not None:
            return


@torch.no_grad()
def next_logits(model: Model, tokens_BT: Tensor, cache: StaticCache, source_BS: Tensor | None = None) -> Tensor:
    """Scores [B, V] of the token after these; only the last position goes through the head. A model with an encoder
    needs the source with the first tokens.

    The head is applied inside the model's forward, where an engine that shards parameters has gathered its weight.
    """

    def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        return linear(hidden_BTD[:, -1], weight_VD)

    source = {} if source_BS is None else {"source_BS": source_BS}
    with eager():
        scores: Tensor = model(tokens_BT, cache=cache, loss=head, **source)
    return scores


def eager() -> AbstractContextManager[object]:
    """Run a block that was compiled for training as it is written; it would be compiled again at every length.

    The compiler takes seconds to import, so it is not asked where nothing has brought it in.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
