"""The engine: requests in, events out, a step at a time. It knows nothing of threads or of how requests arrive.

A step computes the next token of every choice that has read its prompt, and a part of the prompts of those that have
not, in one forward. Choices join and leave between steps. Their keys and values lie in pages (`jingu.infer.cache`);
where a prompt begins as an earlier one did, with the same adapter, it takes its pages. Where pages run short, the
choice that began last gives its own back and waits; later it is computed anew, to the same numbers.

Every rank of a model that is laid out over several makes the same calls, and takes the same steps.

Shapes: B 1, T tokens, S of a source, N rows of scores, K beams, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jingu.errors import JinguError, refuse
from jingu.infer.beams import extend, hypotheses
from jingu.infer.cache import SPAN, Held, Part, page_bytes
from jingu.infer.choice import Choice, Job, likeliest, told
from jingu.infer.constrain import Grammars
from jingu.infer.draft import Draft
from jingu.infer.forward import cache_of, prepare_recording, scores
from jingu.infer.graphs import Graphs
from jingu.infer.load import Loaded
from jingu.infer.pages import Pages, name_of
from jingu.infer.request import Event, Request, Token, check_fit
from jingu.infer.residency import ResidencyStats
from jingu.infer.sampling import check_ids
from jingu.model.spec import ModelSpec
from jingu.runtime.device import total_memory


@dataclass(frozen=True)
class EngineSettings:
    """How much the engine does at once.

    Attributes:
        max_batch: most choices that are made at a time.
        page_tokens: tokens of a page of the key-value cache; a divisor of 128.
        cache_bytes: size of the cache; None: what `max_batch` choices as long as the context need, or a quarter of the
            memory, whichever is less. On CPUs memory is taken as pages are first used.
        prefill_chunk: most tokens of prompts in a step.
        guesses: tokens that are guessed to follow in a step: by a smaller model where there is one, else by what
            followed the last two or three where they stood before (Saxena, 2023). Those that the model would not have
            chosen itself go, so that answers are the same, and only come sooner where guesses are right. 0: none;
            None: 4 with a smaller model, else none.
    """

    max_batch: int = 64
    page_tokens: int = 8
    cache_bytes: int | None = None
    prefill_chunk: int = 512
    guesses: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "page_tokens", "prefill_chunk"):
            refuse(getattr(self, name) < 1, name, getattr(self, name), "1 or more")
        refuse(self.guesses is not None and self.guesses < 0, "guesses", self.guesses, "0 or more")
        refuse(SPAN % self.page_tokens > 0, "page_tokens", self.page_tokens, f"a divisor of {SPAN}")


@dataclass
class EngineStats:
    """What the engine does and has done.

    Attributes:
        running: choices being made.
        waiting: choices that wait to begin.
        pages_used: pages of the cache that running choices hold.
        pages_total: all of them.
        cached_tokens: tokens in these pages; what is left of the pages is waste.
        generated_tokens: since the start.
        prompt_tokens: since the start, of all requests.
        prefix_hits: tokens of these that were in the cache already.
        guessed_tokens: since the start, tokens that were guessed to follow.
        right_guesses: of these, those that the model chose.
        steps: since the start, those that computed something.
        step_seconds: since the start, in steps.
        model_seconds: of these, in the model's forward.
        experts: where only some of the model's are in memory, what has been needed and read.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    prefix_hits: int = 0
    guessed_tokens: int = 0
    right_guesses: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    experts: ResidencyStats | None = None

    @property
    def other_seconds(self) -> float:
        """Since the start, in steps but outside of the model."""
        return self.step_seconds - self.model_seconds


@dataclass(frozen=True)
class _Work:
    """What a choice computes in a step: so many of its tokens, and those that are guessed to follow."""

    choice: Choice
    count: int
    guesses: list[int]


class Engine:
    """Generates for many requests at once.

    Args:
        draft: a smaller model that guesses the tokens to follow, `settings.guesses` in a step.
        graphs: by which steps are launched.

    Raises:
        JinguError: the draft does not fit the model, or the model's steps are nothing for graphs.
    """

    def __init__(
        self,
        loaded: Loaded,
        settings: EngineSettings | None = None,
        draft: Loaded | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.loaded, self.settings = loaded, settings or EngineSettings()
        parameter = next(each for each in loaded.model.parameters() if each.is_floating_point())
        self._device = parameter.device
        count, tokens = _pages(loaded.spec, self.settings, parameter), self.settings.page_tokens
        self._pages = Pages(count, tokens)
        self._cache, self._graphs = cache_of(loaded, count, tokens), graphs
        if graphs is not None:
            prepare_recording(loaded, self._cache)
        self._guesses = self.settings.guesses if self.settings.guesses is not None else 4 if draft else 0
        self._draft: Draft | None = None
        if draft is not None:
            self._draft = Draft(draft, loaded, count, tokens, self.settings.prefill_chunk)
        self._grammars = Grammars(loaded.tokenizer, loaded.spec.vocabulary, loaded.end_ids[0])
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Choice] = deque()
        self._running: list[Choice] = []
        self._events: list[Event] = []
        self._next = 0
        self._stats = EngineStats(pages_total=self._pages.total)

    # Requests

    def submit(self, request: Request) -> int:
        """Take a request in; its number. Raises JinguError where it can never be served."""
        job = self._job(request)
        made = 1 if job.searches else request.best_of or request.n
        grammar = None if request.constraint is None else self._grammars.open(request.constraint)
        job.choices = [Choice(job, number, self.loaded, grammar and grammar.copy()) for number in range(made)]
        self._next += 1
        self._jobs[job.number] = job
        self._waiting.extend(job.choices)
        self._stats.prompt_tokens += job.prompt_tokens
        return job.number

    def _job(self, request: Request) -> Job:
        loaded, prompt = self.loaded, list(request.prompt) or [self.loaded.tokenizer.end_id]
        spec = loaded.spec
        check_fit(spec, prompt, request.max_tokens)
        check_ids(request.sampling, spec.vocabulary)
        loaded.adapters.number(request.adapter)
        refuse((request.logprobs or 0) > spec.vocabulary, "logprobs", request.logprobs, f"at most {spec.vocabulary}")
        most = min(self.settings.max_batch, spec.vocabulary // (1 + len(loaded.end_ids)))
        refuse(request.beams > 1 and request.beams > most, "beams", request.beams, f"at most {most}")
        source = None if spec.encoder_layers is None else (*request.prompt, loaded.tokenizer.end_id)
        for none, why in (
            (any(spec.prompts), "behind a trained prompt there are none."),
            (loaded.reads_whole, "the model sees a prompt whole, and predicts none of it."),
            (source is not None, "a prompt that an encoder reads has none."),
        ):
            if request.prompt_logprobs and none:
                raise JinguError(why, where="prompt_logprobs", fix="Leave it out.")
        decoded = spec.prompted(prompt if source is None else (loaded.start_id,))
        # Beams share the pages that the prompt fills.
        shared = len(decoded) // self._pages.tokens
        own = len(decoded) - shared * self._pages.tokens + request.max_tokens
        tokens = shared * self._pages.tokens + request.beams * own
        if shared + request.beams * self._pages.needed(own) > self._pages.total:
            raise JinguError(
                f"prompt and answer have up to {tokens} tokens, and the key-value cache has room for "
                f"{self._pages.total * self._pages.tokens}.",
                where="prompt",
                fix="Ask for fewer tokens, or give the engine a larger cache.",
            )
        read = None if source is None else spec.prompted(source, encoder=True)
        trained = spec.prompts[0]
        mutual = range(trained, len(decoded)) if loaded.reads_whole else range(0)
        return Job(self._next, request, read, decoded, len(source or prompt), trained, mutual)

    def cancel(self, number: int) -> None:
        """End a request; the next step tells it of each choice that had not ended. An unknown number is no matter."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        going = [choice.number for choice in job.choices if choice.finish is None]
        for place in range(job.request.n) if job.ranks else going:
            self._events.append(job.event(place, None, "cancelled"))
        for choice in self._beams(job):
            self._stop(choice)
        self._waiting = deque(choice for choice in self._waiting if choice.job is not job)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do, or to tell."""
        return bool(self._running or self._waiting or self._events)

    # A step

    def step(self) -> list[Event]:
        """Compute a token of every choice that takes part; what there is to tell."""
        start = time.perf_counter()
        reading = self._admit()
        work = self._schedule()
        if work:
            self._compute(work, reading)
            self._stats.steps += 1
        self._stats.step_seconds += time.perf_counter() - start
        events, self._events = self._events, []
        return events

    def _admit(self) -> Choice | None:
        """Let choices begin, as long as there are pages for their prompts; the one whose source is to be read."""
        coming = {name for each in self._running for name in each.names[each.done // self._pages.tokens :]}
        later: deque[Choice] = deque()
        reading = None
        while self._waiting and self._fits(self._waiting[0]) and reading is None:
            choice = self._waiting.popleft()
            names = [] if not choice.job.shares or _tells_prompt(choice) else self._names(choice, len(choice.ids) - 1)
            pages = []
            for name in names:
                page = self._pages.share(name)
                if page is None:
                    break
                pages.append(page)
            wanted = self._pages.needed(len(choice.ids) + 1) - len(pages)
            # What another is about to compute is waited for.
            if (len(pages) < len(names) and names[len(pages)] in coming) or wanted > self._pages.free:
                for page in pages:
                    self._pages.release(page)
                later.append(choice)
                if wanted > self._pages.free:
                    break
                continue
            choice.held, choice.done, choice.found = Held(pages), len(pages) * self._pages.tokens, len(pages)
            self._running.append(choice)
            coming |= set(names[len(pages) :])
            if not choice.job.begun:
                choice.job.begun = time.perf_counter()
                choice.job.cached_tokens = max(choice.done - choice.job.trained, 0)
                self._stats.prefix_hits += choice.job.cached_tokens
            reading = choice if choice.job.source is not None else None
        self._waiting = later + self._waiting
        return reading

    def _fits(self, choice: Choice) -> bool:
        """Whether one more can be made, with as many beams as it will have."""
        running = [each.job for each in self._running]
        beams = sum(job.request.beams for job in {id(job): job for job in running if job.searches}.values())
        return sum(not job.searches for job in running) + beams + choice.job.request.beams <= self.settings.max_batch

    def _names(self, choice: Choice, tokens: int) -> list[bytes]:
        """Names of a choice's pages, of those at least that so many of its tokens fill."""
        names, size = choice.names, self._pages.tokens
        for first in range(len(names) * size, tokens // size * size, size):
            before = names[-1] if names else (choice.job.request.adapter or "").encode()
            names.append(name_of(before, choice.ids[first : first + size]))
        return names

    def _schedule(self) -> list[_Work]:
        """What the choices that take part in this step compute, those with one token first."""
        work, room, guessed = [], self.settings.prefill_chunk, self._guess()
        for choice in list(self._running):
            whole = room > 0 and choice.done < choice.job.mutual.stop
            count = choice.left if whole or choice.left == 1 else min(choice.left, room)
            if choice not in self._running or count < 1:
                continue
            guesses = guessed.get(choice, [])
            pages, last = choice.held.pages, choice.done // self._pages.tokens
            copies = last < len(pages) and self._pages.shared(pages[last])  # with another beam, which writes there too
            wanted = self._pages.needed(choice.done + count + len(guesses)) - len(pages) + copies
            if guesses and wanted > self._pages.free:
                guesses, wanted = [], self._pages.needed(choice.done + count) - len(pages)
            while wanted > self._pages.free and choice in self._running:
                self._set_back(self._running[-1])
            if choice not in self._running:
                continue
            taken = [self._pages.take() for _ in range(wanted)]
            if copies:
                self._cache.copy(pages[last], taken[0])
                self._pages.release(pages[last])
                pages[last] = taken.pop(0)
            pages += taken
            room -= count if choice.left > 1 else 0
            work.append(_Work(choice, count, guesses))
        work = [each for each in work if each.choice in self._running]
        return sorted(work, key=lambda each: each.count + len(each.guesses) > 1)

    def _guess(self) -> dict[Choice, list[int]]:
        """Tokens that are guessed to follow."""
        wanted = {}
        for choice in [each for each in self._running if each.left == 1 and not each.job.searches]:
            most = min(self._guesses, choice.job.request.max_tokens - len(choice.generated) - 1)
            if most > 0:
                wanted[choice] = most
        if self._draft is None:
            return {choice: _looked_up(choice, most) for choice, most in wanted.items()}
        start = time.perf_counter()
        guessed = self._draft.propose(wanted)
        self._stats.model_seconds += time.perf_counter() - start
        return guessed

    def _set_back(self, choice: Choice) -> None:
        """Let a choice wait, and be computed anew later; a search begins anew, with all its beams."""
        job = choice.job
        for each in self._beams(job) if job.searches else [choice]:
            self._stop(each)
        job.found.clear()
        self._waiting.appendleft(job.choices[choice.number])

    def _beams(self, job: Job) -> list[Choice]:
        return [each for each in self._running if each.job is job]

    def _stop(self, choice: Choice) -> None:
        self._running.remove(choice)
        if choice.left > 1:  # nobody has seen whether its scores are finite numbers
            self._clear(choice, choice.found)
        for page in choice.held.pages:
            self._pages.release(page)

    def _compute(self, work: list[_Work], reading: Choice | None) -> None:
        parts = []
        for each in work:
            choice, done = each.choice, each.choice.done
            ids = [*choice.ids[done : done + each.count], *each.guesses]
            parts.append(Part(choice.held, done, ids, choice.job.mutual))
        tokens_BT, positions_BT, starts = self._cache.plan(parts, reading.held if reading else None)
        rows, taken = [], []
        for each, part, start in zip(work, parts, starts, strict=True):
            choice, end = each.choice, start + len(part.ids)
            scored = 1 + len(each.guesses) if each.count == choice.left else 0
            rows.append(range(start if _tells_prompt(choice) else end - scored, end))
            taken.append((start, len(part.ids), self.loaded.adapters.number(choice.job.request.adapter)))
        with self.loaded.adapters.chosen(taken, tokens_BT.shape[1], self._device):
            source_BS = torch.tensor([reading.job.source], device=self._device) if reading else None
            begun = time.perf_counter()
            wanted = [row for each in rows for row in each]
            logits_NV = scores(self.loaded, self._cache, tokens_BT, positions_BT, wanted, source_BS, self._graphs)
            self._stats.model_seconds += time.perf_counter() - begun
        first, beams = 0, dict[int, list[Tensor]]()
        for each, own in zip(work, rows, strict=True):
            self._take(each, logits_NV[first : first + len(own)])
            if each.choice.job.searches and not each.choice.left:
                beams.setdefault(each.choice.job.number, []).append(logits_NV[first])
            first += len(own)
        for number, found in beams.items():
            self._extend(self._jobs[number], torch.stack(found))

    def _take(self, work: _Work, logits_NV: Tensor) -> None:
        """Take the tokens that follow what is computed, as far as they were guessed; name the pages that are full."""
        choice, size = work.choice, self._pages.tokens
        if _tells_prompt(choice):
            self._tell_prompt(choice.job, choice.done, logits_NV)
        before, choice.done = choice.done, choice.done + work.count
        if not choice.left and not choice.job.searches:
            self._stats.guessed_tokens += len(work.guesses)
            for guess, logits_V in zip([*work.guesses, None], logits_NV[-1 - len(work.guesses) :], strict=True):
                self._stats.generated_tokens += 1
                self._tell(choice, choice.take(logits_V))
                if choice.finish is not None or choice.ids[-1] != guess:
                    break
                choice.done += 1
                self._stats.right_guesses += 1
        if choice.finish == "error":
            self._clear(choice)
        elif choice.job.shares:
            names = self._names(choice, choice.done)
            for number in range(before // size, choice.done // size):
                self._pages.name(choice.held.pages[number], names[number])
        if choice.finish is not None:
            self._stop(choice)

    def _clear(self, choice: Choice, first: int = 0) -> None:
        """Before a choice goes whose scores were wrong, or may be: what its pages hold, from one on, is found by
        nobody."""
        own = [page for page in choice.held.pages[first:] if not self._pages.shared(page)]
        self._cache.clear(own)
        for page in own:
            self._pages.forget(page)

    def _extend(self, job: Job, logits_KV: Tensor) -> None:
        """Let the best continuations of all beams go on in their place, or tell what was found."""
        before = self._beams(job)
        place = self._running.index(before[0])
        going = extend(job, before, logits_KV)
        for beam in going or ():
            for page in beam.held.pages:
                self._pages.hold(page)
        for each in before:
            if going is None:
                self._clear(each)
            self._stop(each)
        self._running[place:place] = going or ()
        if not going:
            del self._jobs[job.number]
            events = hypotheses(job, self.loaded, going is None)
            self._stats.generated_tokens += sum(event.token is not None for event in events)
            self._events += events

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

    def _tell_prompt(self, job: Job, first: int, logits_NV: Tensor) -> None:
        """Log-probabilities of the tokens after the first so many."""
        text, top = self.loaded.tokenizer.decode, job.request.logprobs or 0
        tokens = [] if first else [Token(job.prompt[0], text([job.prompt[0]], special=True))]
        for id_, logits_V in zip(job.prompt[first + 1 :], logits_NV, strict=False):
            tokens.append(Token(id_, text([id_], special=True), *told(logits_V, id_, top)))
        job.told = (*(job.told if first else ()), *tokens)

    def stats(self) -> EngineStats:
        """What the engine does and has done."""
        size = self._pages.tokens
        held = {
            page: min(each.done - place * size, size)
            for each in self._running
            for place, page in enumerate(each.held.pages[: self._pages.needed(each.done)])
        }
        return replace(
            self._stats,
            running=len(self._running),
            waiting=len(self._waiting),
            pages_used=self._pages.total - self._pages.free,
            cached_tokens=sum(held.values()),
            experts=None if self.loaded.residency is None else self.loaded.residency.stats(),
        )

    def run(self, requests: Sequence[Request]) -> list[str]:
        """Answer requests, all at once: of each the text of its first choice."""
        texts = {self.submit(request): "" for request in requests}
        while self.busy:
            for event in self.step():
                if event.request in texts and event.choice == 0 and event.token is not None:
                    texts[event.request] += event.token.text
        return list(texts.values())


def _looked_up(choice: Choice, most: int) -> list[int]:
    """What followed the last tokens where they stood before, the latest such place."""
    ids = choice.ids
    for size in (3, 2):
        for place in range(len(ids) - size - 1, -1, -1):
            if ids[place : place + size] == ids[-size:]:
                return ids[place + size : place + size + most]
    return []


def _tells_prompt(choice: Choice) -> bool:
    """Whether the scores after every token of the prompt are wanted."""
    return choice.job.request.prompt_logprobs and choice.number == 0 and not choice.generated


def _pages(spec: ModelSpec, settings: EngineSettings, parameter: Tensor) -> int:
    """Pages of the cache, those that no sequence owns among them."""
    size, room = page_bytes(spec, settings.page_tokens, parameter.itemsize), settings.cache_bytes
    if room is None:
        wanted = settings.max_batch * -(-spec.context // settings.page_tokens) * size
        room = min(wanted, total_memory(parameter.device) // 4)
    return max(room // size, 1) + 2
