"""What goes into the engine (requests) and what comes out of it (events, scores)."""

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
        kind: JSON that matches a schema, any JSON object, or text that a regular expression or a context-free grammar
            matches as a whole.
        value: the JSON schema, the regular expression or the grammar (Lark or GBNF); empty for any JSON object.
    """

    kind: Literal["json_schema", "json", "regex", "grammar"]
    value: str = ""


@dataclass(frozen=True)
class Request:
    """A prompt to continue. With continuations, a context after which these are scored; with pooling, a text to embed:
    then nothing is generated.

    Attributes:
        prompt: token ids; empty to start a new document. An encoder-decoder reads them in its encoder, and the engine
            appends the end token.
        sampling: sampling parameters. The choices of one request differ by their index, which changes the seed.
        max_tokens: the most tokens of a choice.
        stop: the text ends before the first of these strings.
        logprobs: alternatives to report with each token; 0: the token's own log-probability only; None: nothing. All
            are of the model's own distribution, before penalties, temperature and truncation.
        prompt_logprobs: whether to report log-probabilities of the prompt's tokens too (decoders only).
        n: choices to return.
        num_beams: beams of beam search; 1: no beam search. The `n` best hypotheses are returned at the end.
        length_penalty: in beam search, a hypothesis's log-probability is divided by its length (in tokens, with the
            end token) to this power.
        constraint: constraint on the output.
        adapter: name of the LoRA adapter to use; None: the base model.
        ignore_eos: whether to continue after an end token.
        min_tokens: the fewest tokens of a choice before an end token.
        stop_token_ids: further end tokens, which also count with `ignore_eos`.
        keep_special_tokens: whether the text contains special tokens.
        continuations: token ids to score after the prompt, one event with a `Score` for each.
        pooling: which hidden states the prompt's embedding is made of: their mean, or the last token's. With score, a
            reward model's score head reads the last token's, and its score takes the place of the embedding.
        scaled_logprobs: whether `logprobs` are those after temperature instead: of the distribution that is sampled
            from, where nothing else changes it.
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
        """Whether its sequences are continued, rather than scored or embedded."""
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
        text: the text that the token completes: often none (part of a character, or of a possible stop string). The
            texts of a choice's tokens make its output; the last token brings what was withheld.
        logprob: log-probability by the model, where requested; None for the first token of a prompt.
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
        token_logprobs: of each token.
        is_greedy: whether greedy decoding would generate exactly this continuation.
    """

    logprob: float
    token_logprobs: tuple[float, ...]
    is_greedy: bool


@dataclass(frozen=True)
class Event:
    """What one step of the engine yields for one choice of a request.

    Attributes:
        request_id: the number that `submit` returned.
        choice: index of the choice, 0 to n - 1, or of the continuation.
        token: None where the choice ends without one (cancelled, error, refused), and for scores.
        finish_reason: why the choice ends; None before its last event.
        error: what went wrong, for the finish reasons "error" and "refused".
        prompt_tokens: number of tokens of the prompt.
        cached_tokens: how many of these were found in the prefix cache.
        start_time: when the engine started the request, by `time.perf_counter`; 0: it has not.
        prompt_logprobs: on the first event of choice 0, where requested, the prompt's tokens.
        cumulative_logprob: sum over the choice's tokens so far; in beam search, the hypothesis's score.
        score: of a continuation.
        embedding: of a prompt [D], of length 1; or its score [1].
    """

    request_id: int
    choice: int
    token: Token | None
    finish_reason: FinishReason | None
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    start_time: float = field(default=0.0, compare=False)  # events are equal whenever they come
    prompt_logprobs: tuple[Token, ...] = ()
    cumulative_logprob: float = 0.0
    score: Score | None = None
    embedding: tuple[float, ...] | None = None


def check_request_fits(spec: ModelSpec, prompt: Sequence[int], max_tokens: int, generates: bool = True) -> None:
    """Raise JinguError unless prompt and output (or a continuation to score) fit the model's context and vocabulary."""
    room = max_new_tokens(spec, len(prompt))
    if not generates and spec.num_encoder_layers is None:
        # The last token of a continuation is a target only, and takes no position; a prompt to embed has none.
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
