"""What the engine is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jingu.errors import JinguError, counted, refuse
from jingu.infer.sampling import Sampling
from jingu.model.spec import ModelSpec

Finish = Literal["end", "stop", "length", "cancelled", "error", "refused"]


@dataclass(frozen=True)
class Constraint:
    """What the text must be.

    Attributes:
        kind: a JSON value that a schema allows, any JSON object, or what a regular expression matches in whole.
        value: the schema as JSON, or the expression; of any JSON object, nothing.
    """

    kind: Literal["json_schema", "json", "regex"]
    value: str = ""


@dataclass(frozen=True)
class Request:
    """A prompt to continue, or, of a model with an encoder, to answer.

    Attributes:
        prompt: ids; empty to begin a new document. With an encoder, what it reads: the engine adds the end token.
        sampling: how tokens are chosen. Choices of one request differ by their number, which changes the seed.
        max_tokens: most tokens of a choice.
        stop: the text ends before the first of these.
        logprobs: alternatives to tell beside each token; 0 tells the token's own log-probability; None: nothing.
            All are of the model's own distribution, before penalties, temperature and the like.
        prompt_logprobs: whether to tell log-probabilities of the prompt's tokens, too (of a decoder's).
        n: choices to answer with.
        best_of: choices to make; the `n` that the model finds likeliest a token are told, when all are made.
        beams: hypotheses of a beam search; 1: none. The `n` best are told at the end.
        length_penalty: of a beam search, the power of the length (in tokens, the end's too) that divides a
            hypothesis's log-probability.
        constraint: what the text must be.
        adapter: name of the adapter to compute with; None: none.
        ignore_end: whether to go on after an end token.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    n: int = 1
    best_of: int | None = None
    beams: int = 1
    length_penalty: float = 1.0
    constraint: Constraint | None = None
    adapter: str | None = None
    ignore_end: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise JinguError(f"{self.max_tokens} tokens were asked for.", where="max_tokens", fix="Ask for 1 or more.")
        if "" in self.stop:
            raise JinguError("a stop string is empty.", where="stop", fix="Leave it out.")
        refuse(self.logprobs is not None and self.logprobs < 0, "logprobs", self.logprobs, "0 or more")
        refuse(self.n < 1, "n", self.n, "1 or more")
        refuse(self.beams < 1, "beams", self.beams, "1 or more")
        made = self.best_of if self.beams == 1 else self.beams
        name = "best_of" if self.beams == 1 else "beams"
        refuse(made is not None and made < self.n, name, made, f"at least as many as n, {self.n}")
        if self.beams > 1 and (self.sampling.temperature > 0 or self.best_of is not None):
            raise JinguError(
                "a beam search takes the likeliest, and draws nothing.",
                where="beams",
                fix="Leave temperature at 0 and best_of out.",
            )
        if self.beams > 1 and (self.stop or self.constraint or self.logprobs is not None or self.prompt_logprobs):
            raise JinguError(
                "a beam search tells whole hypotheses with a score of each, and has no stop strings, constraints or "
                "log-probabilities of tokens.",
                where="beams",
                fix="Leave stop, constraint, logprobs and prompt_logprobs out, or beams.",
            )


@dataclass(frozen=True)
class Token:
    """A token of a prompt or an answer.

    Attributes:
        id: its id.
        text: the text that it settles: often none (half a character, what may begin a stop string), and with the last
            token all that was held back. The texts of a choice's tokens make the answer.
        logprob: its log-probability by the model, where asked for; None for the first token of a prompt.
        top: the likeliest tokens in its place with theirs, as many as were asked for.
    """

    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """A step of one choice of a request.

    Attributes:
        request: number that `submit` gave.
        choice: 0 to n - 1.
        token: None where a request ends without one (cancelled, error, refused).
        finish: on the last event of a choice, why it ends.
        error: of finish "error", what went wrong; of "refused", why what was asked cannot be gone on with.
        prompt_tokens: tokens of the prompt.
        cached_tokens: of these, those whose keys and values another request had left.
        begun: when the engine began to compute it, by `time.perf_counter`; 0: it has not.
        prompt: on the first event of choice 0, where asked for, the prompt's tokens with their log-probabilities.
        logprob: of the choice so far, the sum over its tokens; of a beam search, the hypothesis's score.
    """

    request: int
    choice: int
    token: Token | None
    finish: Finish | None
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    begun: float = field(default=0.0, compare=False)  # the same is said, whenever it is
    prompt: tuple[Token, ...] = ()
    logprob: float = 0.0


def check_fit(spec: ModelSpec, prompt: Sequence[int], max_tokens: int) -> None:
    """Raise JinguError unless prompt and answer fit the model."""
    room = room_after(spec, len(prompt))
    if max_tokens > room:
        fix = f"Ask for at most {room} tokens" if room > 0 else "Shorten the prompt"
        more = f"{max_tokens:,} more {'was' if max_tokens == 1 else 'were'}"
        raise JinguError(
            f"the prompt has {counted(len(prompt), 'token')} and {more} asked for, but the model's "
            f"context is {spec.context} tokens.",
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
