"""Speculative decoding (Leviathan et al., 2023): a smaller model proposes the tokens that follow, and the model
computes them in one forward. A proposal stays only where the model itself chooses it, so answers are the same, greedy
or drawn.

Proposals are drawn with the random numbers that the model's own choice will take: where the two models agree about the
probabilities, they draw the same token (Daliri et al., 2025).

Shapes: N rows of scores, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.cache import Held, Part
from jingu.infer.choice import Choice
from jingu.infer.forward import cache_of, scores
from jingu.infer.load import Loaded
from jingu.infer.pages import Pages


@dataclass(eq=False)
class _Reading:
    """What the draft has read of a choice: `done` tokens of it, then tokens that it proposed itself."""

    held: Held = field(default_factory=Held)
    done: int = 0
    proposed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Turn:
    """Tokens of a choice that the draft reads next; what it has proposed in this step, how much it is asked for."""

    choice: Choice
    part: Part
    found: list[int]
    most: int
    generator: torch.Generator
    whole: bool = True  # else more of the prompt is to be read


class Draft:
    """A smaller decoder beside a model, with a cache of its own.

    Args:
        loaded: the smaller model.
        of: the model that it stands beside.
        pages: of its cache.
        chunk: most tokens that it reads in a step, beside those that it proposes.

    Raises:
        JinguError: they do not fit together.
    """

    def __init__(self, loaded: Loaded, of: Loaded, pages: int, page_tokens: int, chunk: int) -> None:
        _check(loaded, of)
        self._loaded, self._vocabulary, self._chunk = loaded, of.spec.vocabulary, chunk
        self._pages = Pages(pages, page_tokens)
        self._cache = cache_of(loaded, pages, page_tokens)
        self._readings: dict[Choice, _Reading] = {}

    def propose(self, wanted: Mapping[Choice, int]) -> dict[Choice, list[int]]:
        """Tokens to follow each of these choices, at most as many as are asked for. Others are forgotten."""
        for choice in [each for each in self._readings if each not in wanted]:
            self._forget(choice)
        turns, room = [], self._chunk
        for choice, most in wanted.items():
            turn = self._begin(choice, most, room)
            if turn is not None:
                room -= len(turn.part.ids) - 1
                turns.append(turn)
        proposed = {}
        while turns:
            turns.sort(key=lambda turn: len(turn.part.ids) > 1)
            going = []
            for turn, logits_V in zip(turns, self._scores([turn.part for turn in turns]), strict=True):
                id_ = turn.choice.foresee(logits_V, turn.found, turn.generator) if turn.whole else None
                if id_ is None:
                    continue
                turn.found.append(id_)
                proposed[turn.choice] = turn.found
                if len(turn.found) < turn.most:
                    part = Part(turn.part.held, turn.part.first + len(turn.part.ids), [id_])
                    self._readings[turn.choice].proposed.append(id_)
                    going.append(_Turn(turn.choice, part, turn.found, turn.most, turn.generator))
            turns = going
        return proposed

    def _begin(self, choice: Choice, most: int, room: int) -> _Turn | None:
        """What is to be read of a choice; None where it has no room."""
        spec, reading = self._loaded.spec, self._readings.setdefault(choice, _Reading())
        trained = choice.job.trained
        last = len(choice.ids) - trained - 1
        if reading.done > last:  # it was set back, before it took a token
            reading.done, reading.proposed = last, []
        fresh = choice.ids[trained + reading.done :]
        same = 0  # of what was proposed, what has come; the last token is read again, as its scores are wanted
        while same < min(len(fresh) - 1, len(reading.proposed)) and fresh[same] == reading.proposed[same]:
            same += 1
        reading.done, reading.proposed = reading.done + same, []
        part = fresh[same : same + room + 1]
        end = reading.done + len(part)
        missing = self._pages.needed(end + most) - len(reading.held.pages)
        if end + most > spec.context or max(part) >= spec.vocabulary or missing > self._pages.free:
            self._forget(choice)
            return None
        reading.held.pages += [self._pages.take() for _ in range(missing)]
        begun = Part(reading.held, reading.done, part)
        reading.done = end
        return _Turn(choice, begun, [], most, choice.lookahead(), whole=same + len(part) == len(fresh))

    def _scores(self, parts: list[Part]) -> Tensor:
        """Of the tokens after the parts [N, V], as many as the model has."""
        tokens_BT, positions_BT, starts = self._cache.plan(parts, None)
        rows = [start + len(part.ids) - 1 for start, part in zip(starts, parts, strict=True)]
        logits_NV = scores(self._loaded, self._cache, tokens_BT, positions_BT, rows)
        return F.pad(logits_NV, (0, self._vocabulary - logits_NV.shape[1]), value=-torch.inf)

    def _forget(self, choice: Choice) -> None:
        for page in self._readings.pop(choice).held.pages:
            self._pages.release(page)


def _check(draft: Loaded, of: Loaded) -> None:
    encoders = {draft.spec.encoder_layers, of.spec.encoder_layers} != {None}
    for wrong, what, fix in (
        (encoders, "a model with an encoder has no draft and is none.", "Leave it out."),
        (of.ranks > 1, "a model that processes share has no draft.", "Leave it out."),
        (draft.spec.prompts[0], "a draft has no trained prompt.", "Use the model that the prompt was trained for."),
    ):
        if wrong:
            raise JinguError(what, where="--draft", fix=fix)
    ours, theirs = of.tokenizer.pieces(), draft.tokenizer.pieces()
    if ours != theirs:
        other = sum(theirs.get(token) != id_ for token, id_ in ours.items())
        differ = f", of which {other:,} are not the draft's or have another id there" if other else ""
        raise JinguError(
            f"the draft has {len(theirs):,} tokens and the model {len(ours):,}{differ}.",
            where="--draft",
            fix="Use a smaller model with the same tokenizer.",
        )
