"""The engine: requests in, events out, a step at a time. It knows nothing of threads or of how requests arrive.

Every rank of a model that is laid out over several makes the same calls, and takes the same steps.

Each choice is computed by itself, with a cache of its own.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jingu.errors import JinguError, refuse
from jingu.infer.cache import StaticCache
from jingu.infer.choice import Choice, Job, told
from jingu.infer.load import Loaded
from jingu.infer.request import Event, Request, Token
from jingu.infer.sampling import check_ids
from jingu.model.products import linear
from jingu.model.spec import ModelSpec
from jingu.runtime.device import eager


@dataclass(frozen=True)
class EngineSettings:
    """How much the engine does at once.

    Attributes:
        max_batch: most choices that are made at a time.
        page_tokens: tokens of a page of the key-value cache.
        cache_bytes: size of the cache; None: as the memory allows.
        prefill_chunk: most tokens of prompts in a step.
    """

    max_batch: int = 64
    page_tokens: int = 16
    cache_bytes: int | None = None
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        for name in ("max_batch", "page_tokens", "prefill_chunk"):
            refuse(getattr(self, name) < 1, name, getattr(self, name), "1 or more")


@dataclass(frozen=True)
class EngineStats:
    """What the engine does and has done.

    Attributes:
        running: choices being made.
        waiting: choices that wait to begin.
        pages_used: pages of the cache that running choices hold.
        pages_total: all of them.
        generated_tokens: since the start.
        prompt_tokens: since the start, of all requests.
        prefix_hits: tokens of these that were in the cache already.
        model_seconds: since the start, in the model's forward.
        other_seconds: since the start, in steps but outside of it.
    """

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    generated_tokens: int
    prompt_tokens: int
    prefix_hits: int
    model_seconds: float
    other_seconds: float


class Engine:
    """Generates for many requests at once."""

    def __init__(self, loaded: Loaded, settings: EngineSettings | None = None) -> None:
        self.loaded, self.settings = loaded, settings or EngineSettings()
        self._device = next(loaded.model.parameters()).device
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Choice] = deque()
        self._running: dict[Choice, StaticCache] = {}
        self._events: list[Event] = []
        self._next = 0
        self._generated = self._prompted = 0
        self._seconds = self._model_seconds = 0.0

    def submit(self, request: Request) -> int:
        """Take a request in; its number. Raises JinguError where it can never be served."""
        job = self._job(request)
        self._next += 1
        self._jobs[job.number] = job
        made = request.best_of or request.n
        job.choices = [Choice(job, number, self.loaded) for number in range(made)]
        self._waiting.extend(job.choices)
        self._prompted += job.prompt_tokens
        return job.number

    def _job(self, request: Request) -> Job:
        loaded, prompt = self.loaded, list(request.prompt) or [self.loaded.tokenizer.end_id]
        spec = loaded.spec
        check_fit(spec, prompt, request.max_tokens)
        check_ids(request.sampling, spec.vocabulary)
        loaded.adapters.number(request.adapter)
        refuse((request.logprobs or 0) > spec.vocabulary, "logprobs", request.logprobs, f"at most {spec.vocabulary}")
        for name, asked in (
            ("beams", request.beams > 1),
            ("constraint", request.constraint),
        ):
            if asked:
                raise JinguError("the engine cannot do this yet.", where=name, fix="Leave it out.")
        if request.prompt_logprobs and any(spec.prompts):
            raise JinguError("behind a trained prompt there are none.", where="prompt_logprobs", fix="Leave it out.")
        if spec.encoder_layers is None:
            return Job(self._next, request, None, spec.prompted(prompt), len(prompt), spec.prompts[0])
        source = (*request.prompt, loaded.tokenizer.end_id)
        if request.prompt_logprobs:
            raise JinguError("a prompt that an encoder reads has none.", where="prompt_logprobs", fix="Leave it out.")
        read, begun = spec.prompted(source, encoder=True), spec.prompted((loaded.start_id,))
        return Job(self._next, request, read, begun, len(source), spec.prompts[0])

    def cancel(self, number: int) -> None:
        """End a request; the next step tells it of each choice that had not ended. An unknown number is no matter."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        for choice in job.choices[: job.request.n] if job.ranks else job.choices:
            if choice.finish is None or job.ranks:
                self._events.append(job.event(choice.number, None, "cancelled"))
        for choice in job.choices:
            self._running.pop(choice, None)
        self._waiting = deque(choice for choice in self._waiting if choice.job is not job)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do, or to tell."""
        return bool(self._running or self._waiting or self._events)

    def step(self) -> list[Event]:
        """Compute a token of every choice that takes part; what there is to tell."""
        start = time.perf_counter()
        while self._waiting and len(self._running) < self.settings.max_batch:
            choice = self._waiting.popleft()
            tokens = len(choice.ids) + choice.job.request.max_tokens
            self._running[choice] = StaticCache(self.loaded.spec.layers, tokens)
        for choice, cache in list(self._running.items()):
            self._tell(choice, choice.take(self._scores(choice, cache)))
            self._generated += 1
            if choice.finish is not None:
                del self._running[choice]
        self._seconds += time.perf_counter() - start
        events, self._events = self._events, []
        return events

    def _tell(self, choice: Choice, event: Event) -> None:
        job = choice.job
        if job.ranks:
            job.held.setdefault(choice.number, []).append(event)
        else:
            self._events.append(event)
        if any(each.finish is None for each in job.choices):
            return
        del self._jobs[job.number]
        if job.ranks:
            self._events += likeliest(job)

    def _scores(self, choice: Choice, cache: StaticCache) -> Tensor:
        """Scores [V] of a choice's next token, in fp32 on the CPU."""
        job, whole = choice.job, choice.job.request.prompt_logprobs and not cache.length and choice.number == 0
        source = {}
        if job.source is not None and not cache.length:
            source = {"source_BS": torch.tensor([job.source], device=self._device)}
        tokens_BT = torch.tensor([choice.ids[cache.length :]], device=self._device)

        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            return linear(hidden_BTD[0, 0 if whole else -1 :], weight_VD)

        start = time.perf_counter()
        adapters, rows = self.loaded.adapters, tokens_BT.shape[1]
        taken = [(0, rows, adapters.number(job.request.adapter))]
        with torch.no_grad(), eager(), adapters.chosen(taken, rows, self._device):
            logits_TV: Tensor = self.loaded.model(tokens_BT, cache=cache, loss=head, **source)
            logits_TV = logits_TV.float().cpu()
        self._model_seconds += time.perf_counter() - start
        if whole:
            job.told = tuple(self._told(job, logits_TV))
        return logits_TV[-1]

    def _told(self, job: Job, logits_TV: Tensor) -> list[Token]:
        text, top = self.loaded.tokenizer.decode, job.request.logprobs or 0
        tokens = [Token(job.prompt[0], text([job.prompt[0]], special=True))]
        for place, id_ in enumerate(job.prompt[1:]):
            tokens.append(Token(id_, text([id_], special=True), *told(logits_TV[place], id_, top)))
        return tokens

    def stats(self) -> EngineStats:
        """What the engine does and has done."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            pages_used=0,
            pages_total=0,
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
            prefix_hits=0,
            model_seconds=self._model_seconds,
            other_seconds=self._seconds - self._model_seconds,
        )

    def run(self, requests: Sequence[Request]) -> list[str]:
        """Answer requests, all at once: of each the text of its first choice."""
        texts = {self.submit(request): "" for request in requests}
        while self.busy:
            for event in self.step():
                if event.request in texts and event.choice == 0 and event.token is not None:
                    texts[event.request] += event.token.text
        return list(texts.values())


def likeliest(job: Job) -> list[Event]:
    """The events of the choices that the model finds likeliest a token, best first, numbered anew."""
    order = sorted(job.choices, key=lambda choice: choice.logprob / len(choice.generated), reverse=True)
    told = [job.held[choice.number] for choice in order[: job.request.n]]
    first = next((event.prompt for events in job.held.values() for event in events if event.prompt), ())
    return [
        replace(event, choice=number, prompt=first if number == place == 0 else ())
        for number, events in enumerate(told)
        for place, event in enumerate(events)
    ]


def check_fit(spec: ModelSpec, prompt: Sequence[int], max_tokens: int) -> None:
    """Raise JinguError unless prompt and answer fit the model."""
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
        return spec.context - prompt - spec.prompts[0]
    # In the encoder the end token follows it.
    return spec.context - spec.prompts[0] if prompt + spec.prompts[1] < spec.context else 0
