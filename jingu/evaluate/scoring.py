"""Scoring: tokenize the requests of samples, run them on the engine, and cache the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from jingu.errors import JinguError
from jingu.evaluate.task_file import TaskSettings
from jingu.evaluate.task_metrics import Answer
from jingu.formats.stored_model import StoredModel
from jingu.infer.engine import Engine
from jingu.infer.inference_model import Precision
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import parameter_shapes
from jingu.model.spec import ModelSpec
from jingu.runtime.device import DTYPES
from jingu.runtime.ranks import RankInfo, gather_from_all
from jingu.text.tokenizer import Tokenizer

Ids = tuple[int, ...]
Item = TypeVar("Item")
# Number of requests that the engine receives at once: enough for full batches.
CHUNK_SIZE = 256
_DEFAULT_MAX_TOKENS = 256


def model_fingerprint(model: StoredModel, tokenizer: Tokenizer, computes: str) -> str:
    """Return a hash (32 hex digits) of a model's weights, spec and tokenizer, and of its dtype and device."""
    parts = [model.spec.to_json(), tokenizer.fingerprint(), computes, model.is_prefix_lm, model.eos_token_ids]
    hasher = xxhash.xxh3_128(json.dumps(parts).encode())
    for name in sorted(parameter_shapes(model.spec)):
        hasher.update(name.encode())
        hasher.update(model.read(name).contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class AnswerCache:
    """Answers by request, and a file that they are appended to.

    Args:
        path: of the file; None: nothing is stored.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.answers: dict[str, Answer] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path and path.exists() else ():
            try:
                key, *values = json.loads(line)
                self.answers[key] = Answer(*values)
            except ValueError:
                continue  # the last line of a process that was killed

    def add(self, answers: Mapping[str, Answer], *, stores: bool = True) -> None:
        """Add answers.

        Args:
            stores: whether to append them to the file; only one rank does.
        """
        self.answers |= answers
        if self._path is not None and stores:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                # The first newline ends a line that was cut off.
                file.write("\n" + "".join(f"{json.dumps([key, *astuple(answers[key])])}\n" for key in answers))


def generation_request(task: TaskSettings) -> Request:
    """Return how a task's answers are generated, as a request without a prompt.

    Raises:
        JinguError: `generation_kwargs` has keys that jingu does not read.
    """
    settings = task.generation_kwargs
    # One beam means no beam search. The harness stops a beam search when a beam in the first rows of its batch reaches
    # a stop text, so its answers depend on the batch and cannot be reproduced.
    if settings.num_beams not in (None, 1):
        what = (
            f"its generation_kwargs have num_beams {settings.num_beams}, and tasks are evaluated without beam search."
        )
        raise task.error(what, "Leave num_beams out, which generates greedily, or set it to 1.")
    unread = [*(settings.model_extra or {})]
    if unread:
        raise task.error(f"generation_kwargs has {', '.join(unread)}, which jingu does not read.", "Leave it out.")
    is_greedy = not (settings.temperature > 0 if settings.do_sample is None else settings.do_sample)
    top_p = 1.0 if settings.top_p is None else settings.top_p
    sampling = SamplingParams(0.0 if is_greedy else settings.temperature, settings.top_k or None, top_p)
    lengths = (settings.max_gen_toks, settings.max_new_tokens, settings.max_tokens, settings.max_completion_tokens)
    until = settings.until if "until" in settings.model_fields_set else task.fewshot_delimiter
    stop = tuple(text for text in ([until] if isinstance(until, str) else until or ()) if text)
    return Request((), sampling, next(filter(None, lengths), _DEFAULT_MAX_TOKENS), stop)


def check_generation_fits(task: TaskSettings, spec: ModelSpec) -> None:
    """Raise JinguError if the model's context has no room for a task's prompts beside the answers."""
    max_tokens = generation_request(task).max_tokens
    room = spec.max_position_embeddings - spec.prompts[0]
    if max_tokens >= room + (spec.num_encoder_layers is not None):
        what = f"its answers of up to {max_tokens} tokens leave no room for prompts in the model's context of {room}."
        raise task.error(what, "Set generation_kwargs.max_gen_toks to less.")


def check_continuations_fit(
    task: TaskSettings, pairs: Iterable[tuple[str, str]], tokenizer: Tokenizer, spec: ModelSpec
) -> None:
    """Raise JinguError if a continuation of a task is longer than the model's context."""
    room = spec.max_position_embeddings - spec.prompts[0]
    for context, continuation in pairs:
        # Almost all are too short for this: a token has at least a byte.
        if len(continuation.encode("utf-8", "surrogatepass")) < room:
            continue
        stripped_context = context.rstrip()
        ids = [
            tokenizer.encode(text, parse_special_tokens=True)
            for text in (stripped_context, stripped_context + context[len(stripped_context) :] + continuation)
        ]
        length = len(ids[1]) - len(ids[0])
        if length > room:
            what = f"it has an answer of {length} tokens, and the model's context is {room}."
            raise task.error(what, "Leave that document out, or use a model with a longer context.")


def evaluation_precision(precision: Precision, model: StoredModel) -> Precision:
    """Return the precision of an evaluation: by default the type in which most weights are stored, so that a score
    does not depend on the machine. Types other than bf16 are computed in fp32, which contains them; so are runs, whose
    master weights are in fp32."""
    if precision != "auto":
        return precision
    return "bf16" if model.dtype == torch.bfloat16 else "fp32"


def precision_name(precision: Precision, dtype: torch.dtype) -> str:
    """Return the precision of a score, such as fp32, or `int8 (bf16)` for quantized matrices beside a type.

    Args:
        precision: the option.
        dtype: type of the other parameters.
    """
    name = next(name for name, value in DTYPES.items() if value == dtype)
    return name if precision in ("auto", *DTYPES) else f"{precision} ({name})"


class Scorer:
    """Answers requests with a model, as lm-evaluation-harness does with transformers.

    Args:
        ranks: this process's part of the requests and the number of parts; processes that share a replica of the model
            have the same part. None: every process computes all requests.

    Attributes:
        counts: number of contexts that were too long and lost tokens at their start (`truncated`), and of continuations
            without a token, whose log-probability is 0 (`empty`).
    """

    def __init__(self, engine: Engine, cache: AnswerCache, ranks: RankInfo | None = None) -> None:
        self._engine = engine
        self._ranks = ranks
        self._cache = cache
        self._tokenizer = engine.model.tokenizer
        self._prefix_ids = engine.model.prompt_prefix_ids
        spec = engine.model.spec
        self._is_encoder_decoder = spec.num_encoder_layers is not None
        # Maximum tokens of the decoder, and of the encoder without its end token.
        self._room = spec.max_position_embeddings - spec.prompts[0]
        self._encoder_room = spec.max_position_embeddings - spec.prompts[1] - 1
        # An empty context becomes this token.
        names = self._tokenizer.special_names
        self._start_token = names["bos_token"] or names["eos_token"]
        self._start_id = self._tokenizer.vocab().get(self._start_token, self._tokenizer.eos_token_id)
        # A cache of one entry suffices: continuations of one context follow each other.
        self._encode_context = lru_cache(maxsize=1)(self._encode)
        self.counts = {"truncated": 0, "empty": 0}

    # Text to ids

    def _encode(self, text: str, *, with_prefix: bool = True) -> Ids:
        """Return the ids of a text. As in transformers, the text of a special token becomes that token."""
        ids = self._tokenizer.encode(text, parse_special_tokens=True)
        prefix = () if not with_prefix or text.startswith(self._start_token) else self._prefix_ids
        return (*prefix, *ids)

    def encode_pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """Return the ids of a context and of its continuation. Spaces between them belong to the continuation."""
        stripped_context = context.rstrip()
        continuation = context[len(stripped_context) :] + continuation
        if self._is_encoder_decoder:
            # The engine appends the end token to the context.
            return self._encode_context(stripped_context), self._encode(continuation, with_prefix=False)
        if not context:
            ids = self._encode(continuation, with_prefix=False)
            return (self._start_id,), ids[1:] if ids[:1] == (self._start_id,) else ids
        context_ids = self._encode_context(stripped_context)
        return context_ids, self._encode(stripped_context + continuation)[len(context_ids) :]

    def _truncate(self, context: Ids, room: int) -> Ids:
        """Return the last `room` tokens of a context, and count a truncation."""
        self.counts["truncated"] += len(context) > room
        return context[-room:]

    def _fit(self, context: Ids, continuation: Ids) -> tuple[Ids, Ids]:
        """Return a context that fits, and its continuation."""
        if len(continuation) > self._room:
            what = f"a continuation has {len(continuation)} tokens, and the model's context is {self._room}."
            raise JinguError(what, where=self._engine.model.name, fix="Use a model with a longer context.")
        # The last token of a continuation is only predicted, never an input, so it needs no room.
        room = self._encoder_room if self._is_encoder_decoder else self._room + 1 - len(continuation)
        return self._truncate(context, room), continuation

    def windows(self, text: str) -> list[tuple[Ids, Ids]]:
        """Divide a text into windows of the model's context, as pairs of context and tokens to predict.

        Each token is predicted once; the context of the last window is as long as possible.
        """
        ids = self._encode(text)
        length = self._room
        if self._is_encoder_decoder:
            # The encoder reads only the end token, which the engine appends.
            ids = (*ids, self._tokenizer.eos_token_id)
            return [((), ids[start : start + length]) for start in range(0, len(ids), length)]
        windows: list[tuple[Ids, Ids]] = [((self._start_id,), ids[:length])]
        for start in range(length, len(ids), length):
            end = min(start + length, len(ids))
            windows.append((ids[end - length - 1 : start], ids[start:end]))
        return windows

    # Requests

    def _score_ids(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Answer]:
        """Return the answers for contexts and continuations.

        A context is computed once for all of its continuations, even if they are not neighbors in the list.
        """
        keys = [_key(*pair) for pair in pairs]
        missing: dict[Ids, dict[Ids, str]] = {}
        for key, (context, continuation) in zip(keys, pairs, strict=True):
            if not continuation:
                self.counts["empty"] += 1
                self._cache.answers[key] = Answer(is_greedy=True)
            elif key not in self._cache.answers:
                missing.setdefault(context, {})[continuation] = key

        def score_chunk(contexts: Sequence[Ids]) -> dict[str, Answer]:
            requests = [(context, list(missing[context])) for context in contexts]
            return {
                missing[context][ids]: Answer(score.logprob, score.is_greedy, len(ids))
                for (context, _), scores in zip(requests, self._engine.score_many(requests), strict=True)
                for ids, score in zip(missing[context], scores, strict=True)
            }

        # Sort contexts so that those with a common prefix are neighbors, and share it in the prefix cache.
        self._compute(sorted(missing), score_chunk)
        return [self._cache.answers[key] for key in keys]

    def _compute(self, requests: Sequence[Item], compute: Callable[[Sequence[Item]], dict[str, Answer]]) -> None:
        """Compute requests in chunks and add their answers to the cache. Ranks divide a chunk and share the answers."""
        ranks = self._ranks
        size = CHUNK_SIZE * (1 if ranks is None else ranks.world)
        for first in range(0, len(requests), size):
            chunk = requests[first : first + size]
            if ranks is None:
                answers = compute(chunk)
            else:
                own_results = compute(chunk[ranks.rank :: ranks.world])
                parts = gather_from_all({key: astuple(answer) for key, answer in own_results.items()})
                answers = {key: Answer(*values) for part in parts for key, values in part.items()}
            self._cache.add(answers, stores=ranks is None or ranks.is_first)

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Answer]:
        """Return the log-probabilities of continuations after their contexts."""
        return self._score_ids([self._fit(*self.encode_pair(*pair)) for pair in pairs])

    def score_texts(self, texts: Sequence[str]) -> list[Answer]:
        """Return the log-probabilities of whole texts, of any length."""
        windows = [self.windows(text) for text in texts]
        answers = iter(self._score_ids([window for group in windows for window in group]))
        results = []
        for group in windows:
            parts = [next(answers) for _ in group]
            num_tokens = sum(part.num_tokens for part in parts)
            results.append(
                Answer(sum(part.logprob for part in parts), all(part.is_greedy for part in parts), num_tokens)
            )
        return results

    def generate(self, contexts: Sequence[str], settings: Request, repeats: int = 1) -> list[list[Answer]]:
        """Return `repeats` generated texts for each context, with different seeds.

        Args:
            settings: a request without a prompt.
        """
        room = self._encoder_room if self._is_encoder_decoder else self._room - settings.max_tokens
        stop = (*settings.stop, self._tokenizer.special_names["eos_token"])
        requests: dict[str, Request] = {}
        keys = []
        for context in contexts:
            ids = self._truncate(self._encode(context), room)
            max_tokens = settings.max_tokens
            if self._is_encoder_decoder:
                # As in the harness, the limit is above the length of the source.
                max_tokens = min(len(ids) + max_tokens, self._room)
            for seed in range(repeats):
                sampling = replace(settings.sampling, seed=seed if settings.sampling.temperature else 0)
                request = replace(settings, prompt=ids, stop=stop, sampling=sampling, max_tokens=max_tokens)
                keys.append(_key(ids, max_tokens, stop, repr(sampling)))
                requests[keys[-1]] = request

        def generate_chunk(chunk: Sequence[str]) -> dict[str, Answer]:
            texts = self._engine.generate([requests[key] for key in chunk])
            return {key: Answer(text=self._remove_special_tokens(text)) for key, text in zip(chunk, texts, strict=True)}

        missing = [key for key in requests if key not in self._cache.answers]
        self._compute(sorted(missing, key=lambda key: requests[key].prompt), generate_chunk)
        answers = [self._cache.answers[key] for key in keys]
        return [answers[first : first + repeats] for first in range(0, len(answers), repeats)]

    def _remove_special_tokens(self, text: str) -> str:
        """Return a generated text without the special tokens that the output of an encoder-decoder keeps."""
        for token in self._tokenizer.special_tokens if self._is_encoder_decoder else ():
            text = text.replace(token, "")
        return text


def _key(*parts: Any) -> str:
    """Return a short name of a request."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()
