"""Inputs of the engine (requests) and its outputs (events, scores)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jingu.errors import JinguError, pluralize, refuse
from jingu.infer.sampling import SamplingParams
from jingu.model.spec import ModelSpec

Pooling = Literal["mean", "last", "score"]
FinishReason = Literal["end", "stop", "length", "cancelled", "error", "refused"]


@dataclass(frozen=True)
class Constraint:
    """A constraint on the output (structured output).

    Attributes:
        kind: the output is JSON that matches a schema, any JSON object, or text that a regular expression or a
            context-free grammar matches as a whole.
        value: the JSON schema, the regular expression or the grammar (Lark or GBNF); empty for any JSON object.
    """

    kind: Literal["json_schema", "json", "regex", "grammar"]
    value: str = ""


@dataclass(frozen=True)
class Request:
    """A prompt to continue. With continuations, the prompt is a context after which they are scored; with pooling, it
    is a text to embed. In both cases nothing is generated.

    Attributes:
        prompt: token ids; empty to start a new document. An encoder-decoder reads them in its encoder, and the engine
            appends the end token.
        sampling: sampling parameters. Each choice of a request has a seed of its own, derived from its index.
        max_tokens: maximum number of tokens of a choice.
        stop: stop strings: the text ends before the first one.
        logprobs: number of alternatives to report with each token; 0 reports the token's own log-probability only, and
            None nothing. They are of the model's own distribution, before penalties, temperature and truncation.
        prompt_logprobs: whether to report log-probabilities of the prompt's tokens too (decoders only).
        n: choices to return.
        num_beams: beams of beam search; 1 disables it. The `n` best hypotheses are returned at the end.
        length_penalty: in beam search, the exponent of a hypothesis's length (in tokens, including the end token), by
            which its log-probability is divided.
        constraint: constraint on the output; None: none.
        adapter: name of the LoRA adapter to use; None uses the base model.
        ignore_eos: whether to continue after an end token.
        min_tokens: minimum number of tokens of a choice before an end token.
        stop_token_ids: additional end tokens, which also end the output with `ignore_eos`.
        keep_special_tokens: whether the text contains special tokens.
        continuations: token ids to score after the prompt, one event with a `Score` for each.
        pooling: "mean" averages the hidden states of the prompt's tokens to its embedding, and "last" takes that of the
            last token. With "score", a reward model's score of the last token's state replaces the embedding.
        scaled_logprobs: whether `logprobs` are those after temperature, that is, of the distribution that is sampled
            from. Nothing else may change that distribution.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    constraint: Constraint | None = None
    adapter: str | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    keep_special_tokens: bool = False
    continuations: tuple[tuple[int, ...], ...] = ()
    pooling: Pooling | None = None
    scaled_logprobs: bool = False

    def __post_init__(self) -> None:
        refuse(self.max_tokens < 1, "max_tokens", self.max_tokens, "1 or more")
        refuse(self.min_tokens > self.max_tokens, "min_tokens", self.min_tokens, f"at most {self.max_tokens}")
        if "" in self.stop:
            raise JinguError("a stop string is empty.", where="stop", fix="Leave it out.")
        if () in self.continuations:
            raise JinguError("a continuation is empty.", where="continuations", fix="Leave it out.")
        refuse(self.logprobs is not None and self.logprobs < 0, "logprobs", self.logprobs, "0 or more")
        refuse(self.n < 1, "n", self.n, "1 or more")
        refuse(self.num_beams < 1, "num_beams", self.num_beams, "1 or more")
        if self.scaled_logprobs:
            self._check_scaled_logprobs()
        if self.num_beams > 1:
            refuse(self.num_beams < self.n, "num_beams", self.num_beams, f"at least n, {self.n}")
            self._check_beam_search()

    @property
    def generates(self) -> bool:
        """Whether tokens are generated, rather than scored or embedded."""
        return not self.continuations and self.pooling is None

    def _check_scaled_logprobs(self) -> None:
        sampling = self.sampling
        truncates = sampling.top_k is not None or sampling.top_p < 1.0 or sampling.min_p > 0.0
        if not sampling.temperature or truncates or sampling.changes_logits or self.constraint or self.min_tokens:
            raise JinguError(
                "log-probabilities after temperature are not those of sampling with top-k, top-p, min-p, penalties, a "
                "bias, a constraint or a least length, nor of greedy decoding.",
                where="scaled_logprobs",
                fix="Leave these out, and set a temperature.",
            )

    def _check_beam_search(self) -> None:
        if self.sampling.temperature > 0:
            raise JinguError("beam search does not sample.", where="num_beams", fix="Set temperature to 0.")
        if self.stop or self.constraint or self.logprobs is not None or self.prompt_logprobs:
            raise JinguError(
                "beam search does not support stop strings, constraints and log-probabilities of tokens.",
                where="num_beams",
                fix="Leave out stop, constraint, logprobs and prompt_logprobs, or num_beams.",
            )


@dataclass(frozen=True)
class Token:
    """A token of a prompt or of an output.

    Attributes:
        id: token id.
        text: the text that the token completes. It is empty for a token that ends within a character, or in a possible
            beginning of a stop string. The texts of all tokens make the output; the last one adds withheld text.
        logprob: log-probability by the model; None if it was not requested, and for the first token of a prompt.
        top: (id, log-probability) of the most likely tokens at this position, as many as requested.
    """

    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a continuation, in nats, by the model's own distribution.

    Attributes:
        logprob: sum over the tokens.
        token_logprobs: log-probability of each token.
        is_greedy: whether greedy decoding would generate exactly this continuation.
    """

    logprob: float
    token_logprobs: tuple[float, ...]
    is_greedy: bool


@dataclass(frozen=True)
class Event:
    """Output of one engine step for one choice of a request.

    Attributes:
        request_id: the id that `submit` returned.
        choice: index of the choice, 0 to n - 1, or of the continuation.
        token: the new token; None if the choice ends without one (cancelled, error, refused), for scores and for
            embeddings.
        finish_reason: why the choice ends; None before its last event.
        error: error message, for the finish reasons "error" and "refused".
        prompt_tokens: number of tokens of the prompt.
        cached_tokens: the part of `prompt_tokens` that was found in the prefix cache.
        start_time: when the engine started the request, by `time.perf_counter`; 0 if it has not started.
        prompt_logprobs: the prompt's tokens, on the first event of choice 0, if they were requested.
        cumulative_logprob: sum of the choice's log-probabilities so far; 0 if `logprobs` were not requested. In beam
            search, the hypothesis's score.
        score: score of a continuation.
        embedding: embedding of the prompt [D], of length 1; or the prompt's score [1] by a reward model.
    """

    request_id: int
    choice: int
    token: Token | None
    finish_reason: FinishReason | None
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    start_time: float = field(default=0.0, compare=False)  # the time does not count when events are compared
    prompt_logprobs: tuple[Token, ...] = ()
    cumulative_logprob: float = 0.0
    score: Score | None = None
    embedding: tuple[float, ...] | None = None


def check_request_fits(spec: ModelSpec, prompt: Sequence[int], max_tokens: int, generates: bool = True) -> None:
    """Raise JinguError unless prompt and output (or a continuation to score) fit the model's context and vocabulary."""
    room = max_new_tokens(spec, len(prompt))
    if not generates and spec.num_encoder_layers is None:
        # The last token of a continuation is only a target and takes no position; to embed generates no token at all.
        room += 1
    if max_tokens > room:
        fix = f"Ask for at most {room} tokens or shorten the prompt." if room > 0 else "Shorten the prompt."
        raise JinguError(
            f"the prompt's {pluralize(len(prompt), 'token')} and {max_tokens:,} new "
            f"{'token' if max_tokens == 1 else 'tokens'} exceed the model's context of {spec.max_position_embeddings}.",
            where="prompt",
            fix=fix,
        )
    check_token_ids(spec, prompt, "prompt")


def check_token_ids(spec: ModelSpec, ids: Collection[int], where: str) -> None:
    """Raise JinguError unless token ids are in the model's vocabulary."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < spec.vocab_size:
            raise JinguError(
                f"token {token_id} is outside the model's vocabulary of {spec.vocab_size}.",
                where=where,
                fix="Use the tokenizer that the model was trained with.",
            )


def max_new_tokens(spec: ModelSpec, prompt_tokens: int) -> int:
    """Return how many tokens can be generated after a prompt of this length."""
    context = spec.max_position_embeddings
    decoder_prompt, encoder_prompt = spec.prompts
    if spec.num_encoder_layers is None:
        return context - prompt_tokens - decoder_prompt
    # The encoder also reads the end token.
    fits_encoder = prompt_tokens + encoder_prompt < context
    return context - decoder_prompt if fits_encoder else 0
