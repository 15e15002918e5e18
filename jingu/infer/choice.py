"""One choice of a request as it grows: which token comes next, the text so far, and why it ends.

Shapes: V vocabulary.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from jingu.infer.cache import Held
from jingu.infer.constrain import Grammar
from jingu.infer.load import Loaded
from jingu.infer.request import Event, Finish, Request, Token
from jingu.infer.sampling import choose, penalised
from jingu.infer.text import TextStream

# Seeds of neighbouring requests and of a request's choices should not meet.
_STRIDE = 0x9E3779B1
NOT_FINITE = "the model's scores are not finite numbers"


@dataclass(eq=False)
class Job:
    """A request in the engine.

    Attributes:
        source: what the encoder reads; None: there is no encoder.
        prompt: what the decoder begins with.
        trained: tokens of a trained prompt that it begins with, which are no text.
        mutual: places of the prompt that see each other, where the model was trained to read so; they are computed in
            one step, and nobody shares their pages.
        begun: when its first choice began, by `time.perf_counter`.
        held: where choices are told only when all are made: their events so far, by choice.
        told: tokens of the prompt with their log-probabilities, for the first event.
        found: of a beam search, the best hypotheses that have ended, with their scores, best first.
    """

    number: int
    request: Request
    source: tuple[int, ...] | None
    prompt: tuple[int, ...]
    prompt_tokens: int
    trained: int = 0
    mutual: range = range(0)
    begun: float = 0.0
    cached_tokens: int = 0
    choices: list[Choice] = field(default_factory=list)
    held: dict[int, list[Event]] = field(default_factory=dict)
    told: tuple[Token, ...] = ()
    found: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def searches(self) -> bool:
        """Whether its choices are the beams of a search."""
        return self.request.beams > 1

    @property
    def shares(self) -> bool:
        """Whether others that begin alike may take its pages: they hold nothing but what was read up to there."""
        return self.source is None and not self.mutual

    @property
    def ranks(self) -> bool:
        """Whether choices are told only when all are made."""
        return self.searches or (self.request.best_of is not None and self.request.best_of > self.request.n)

    def event(self, choice: int, token: Token | None, finish: Finish | None, logprob: float = 0.0) -> Event:
        """A step of a choice; the first one of choice 0 tells of the prompt."""
        told, self.told = (self.told, ()) if choice == 0 else ((), self.told)
        counts = self.prompt_tokens, self.cached_tokens
        return Event(self.number, choice, token, finish, None, *counts, self.begun, told, logprob)


class Choice:
    """A choice that is being made.

    Attributes:
        ids: of prompt and text so far.
        held: its pages of the cache, while it is computed.
        done: tokens that are in them.
        found: of its pages, the first so many that others had left.
        names: of its full pages, and of those to come that the prompt fills.
        logprob: sum of the log-probabilities of the tokens made.
        finish: why it has ended; None: it goes on.
        ends: tokens that end it.
    """

    def __init__(self, job: Job, number: int, loaded: Loaded, grammar: Grammar | None = None) -> None:
        self.job, self.number = job, number
        self.ids = list(job.prompt)
        self.held, self.done, self.found, self.names = Held(), 0, 0, list[bytes]()
        self.logprob = 0.0
        self.finish: Finish | None = None
        request = job.request
        self._grammar = grammar
        special = job.source is not None
        self._stream = TextStream(partial(loaded.tokenizer.decode, special=special), request.stop)
        self.ends = () if request.ignore_end else loaded.end_ids
        seed = request.sampling.seed + number * _STRIDE
        self._generator = torch.Generator().manual_seed(seed & 0xFFFF_FFFF_FFFF_FFFF)

    @property
    def generated(self) -> list[int]:
        """Ids of the text so far."""
        return self.ids[len(self.job.prompt) :]

    @property
    def left(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.ids) - self.done

    def take(self, logits_V: Tensor) -> Event:
        """Choose the next token by the model's scores [V] in fp32 on the CPU; the event that tells it."""
        request = self.job.request
        scores_V = penalised(logits_V, self.job.prompt[self.job.trained :], self.generated, request.sampling)
        if self._grammar is not None:
            scores_V = self._grammar.allowed(scores_V)
            if self._grammar.broken is not None:
                return self._break("refused", f"what the answer must be was given up here ({self._grammar.broken})")
        if not scores_V.max().isfinite():
            return self._break("error", NOT_FINITE)
        id_ = choose(scores_V, request.sampling, self._generator)
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if request.logprobs is not None or self.job.ranks:
            logprob, top = told(logits_V, id_, request.logprobs or 0)
            self.logprob += logprob
        text = self.grow(id_)
        token = Token(id_, text, logprob if request.logprobs is not None else None, top)
        return self.job.event(self.number, token, self.finish, self.logprob)

    def _break(self, finish: Finish, words: str) -> Event:
        self.finish = finish
        return replace(self.job.event(self.number, None, finish, self.logprob), error=words)

    def lookahead(self) -> torch.Generator:
        """The random numbers that the next tokens will take."""
        return torch.Generator().set_state(self._generator.get_state())

    def foresee(self, logits_V: Tensor, ahead: list[int], generator: torch.Generator) -> int | None:
        """The token after those ahead, were these the model's scores; None where they are not finite numbers."""
        sampling, prompt = self.job.request.sampling, self.job.prompt[self.job.trained :]
        scores_V = penalised(logits_V, prompt, [*self.generated, *ahead], sampling)
        return choose(scores_V, sampling, generator) if scores_V.max().isfinite() else None

    def fork(self, id_: int, logprob: float) -> Choice:
        """A beam that goes on with a token."""
        other = copy(self)
        other.ids, other.logprob, other.names = [*self.ids, id_], logprob, list(self.names)
        other.held = Held(list(self.held.pages), self.held.source)
        return other

    def grow(self, id_: int) -> str:
        """Take a token; the text that it settles. Sets `finish` where it is the last."""
        self.ids.append(id_)
        finish: Finish | None = "end" if id_ in self.ends else None
        text = "" if finish else self._stream.push(id_)
        if self._grammar is not None and self._grammar.take(id_):
            finish = "end"
        if finish is None and self._stream.stopped:
            finish = "stop"
        if finish is None and len(self.generated) == self.job.request.max_tokens:
            finish = "length"
        if finish is not None:
            text += self._stream.finish()
            # What was held back may, now that no more follows, hold a stop string in full.
            finish = "stop" if self._stream.stopped else finish
        self.finish = finish
        return text


def told(logits_V: Tensor, id_: int, alternatives: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of a token, and the likeliest ones with theirs."""
    logprobs_V = logits_V.log_softmax(0)
    top = logprobs_V.topk(min(alternatives, len(logprobs_V)))
    return float(logprobs_V[id_]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def likeliest(job: Job) -> list[Event]:
    """The events of the choices that the model finds likeliest a token, best first, numbered anew; last those that
    broke off."""

    def order(choice: Choice) -> tuple[bool, float]:
        return choice.finish in ("error", "refused"), -choice.logprob / max(len(choice.generated), 1)

    told = [job.held[choice.number] for choice in sorted(job.choices, key=order)[: job.request.n]]
    first = next((event.prompt for events in job.held.values() for event in events if event.prompt), ())
    return [
        replace(event, choice=number, prompt=first if number == place == 0 else ())
        for number, events in enumerate(told)
        for place, event in enumerate(events)
    ]
