"""Scoring: the requests of samples as token ids, computed by the engine, with a cache of what is complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import xxhash

from jingu.errors import JinguError
from jingu.evaluate.task_file import TaskSettings
from jingu.evaluate.task_metrics import Answer
from jingu.formats.stored_model import StoredModel
from jingu.infer.engine import Engine
from jingu.infer.inference_model import InferenceModel
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.model.decoder import parameter_shapes
from jingu.model.spec import ModelSpec
from jingu.text.tokenizer import Tokenizer

Ids = tuple[int, ...]
# Contexts, or texts to generate, that the engine receives at once: enough for full batches.
CHUNK_SIZE = 256
DEFAULT_MAX_TOKENS = 256


def fingerprint(stored: StoredModel, tokenizer: Tokenizer, precision: str) -> str:
    """Return 32 hex digits of a model: its weights, its spec, its tokenizer, and how it computes."""
    hasher = xxhash.xxh3_128(json.dumps([stored.spec.to_json(), tokenizer.fingerprint(), precision]).encode())
    hasher.update(json.dumps([stored.is_prefix_lm, stored.eos_token_ids]).encode())
    for name in sorted(parameter_shapes(stored.spec)):
        hasher.update(name.encode())
        hasher.update(stored.read(name).contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class AnswerCache:
    """Answers by request, in a file that grows while they are computed.

    Args:
        path: of the file; None: nothing is stored.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None
        self.answers: dict[str, Answer] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path and path.exists() else ():
            try:
                key, *values = json.loads(line)
                self.answers[key] = Answer(*values)
            except ValueError:
                continue  # the last line of a process that was killed

    @contextmanager
    def open(self) -> Iterator[AnswerCache]:
        """Open the file for the answers of the block."""
        if self._path is None:
            yield self
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as self._file:
            self._file.write("\n")  # ends a line that was cut off
            yield self
        self._file = None

    def add(self, key: str, answer: Answer) -> None:
        """Add an answer."""
        self.answers[key] = answer
        if self._file is not None:
            values = [answer.logprob, answer.is_greedy, answer.num_tokens, answer.text]
            self._file.write(json.dumps([key, *values]) + "\n")

    def flush(self) -> None:
        """Write what was added: it survives the process."""
        if self._file is not None:
            self._file.flush()


@dataclass(frozen=True)
class GenerationSettings:
    """How answers are generated, from a task's `generation_kwargs`."""

    max_tokens: int
    stop: tuple[str, ...]
    temperature: float
    top_p: float
    top_k: int | None


def generation_settings(task: TaskSettings) -> GenerationSettings:
    """Return how a task's answers are generated. Raises JinguError for keys that jingu does not have."""
    kwargs = dict(task.generation_kwargs or {})
    until = kwargs.pop("until", [task.fewshot_delimiter])
    aliases = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    lengths = [kwargs.pop(key, None) for key in aliases]
    max_tokens = next((length for length in lengths if length is not None), DEFAULT_MAX_TOKENS)
    temperature = float(kwargs.pop("temperature", 0.0))
    if not kwargs.pop("do_sample", temperature > 0):
        temperature = 0.0
    top_p = float(kwargs.pop("top_p", 1.0))
    top_k = kwargs.pop("top_k", None)
    if kwargs:
        what = f"generation_kwargs has {', '.join(kwargs)}, which jingu does not read."
        raise JinguError(what, where=f"{task.task} ({task.file})", fix="Leave it out.")
    stop = tuple(text for text in ([until] if isinstance(until, str) else until or []) if text)
    return GenerationSettings(int(max_tokens), stop, temperature, top_p, top_k)


def check_generation_fits(task: TaskSettings, spec: ModelSpec) -> None:
    """Raise JinguError if the model's context has no room for a task's prompts beside the answers."""
    settings = generation_settings(task)
    room = spec.max_position_embeddings - spec.prompts[0]
    if settings.max_tokens >= room + (spec.num_encoder_layers is not None):
        what = f"its answers of up to {settings.max_tokens} tokens leave no room in the model's context of {room}."
        fix = f"Set generation_kwargs.max_gen_toks in {task.file} to less."
        raise JinguError(what, where=task.task, fix=fix)


class Scorer:
    """Answers requests with a model, as lm-evaluation-harness does with transformers.

    Attributes:
        num_truncated: contexts that lost tokens at their start, as they were too long.
        num_empty: continuations without a token, whose log-probability is 0.
    """

    def __init__(self, engine: Engine, cache: AnswerCache) -> None:
        self._engine = engine
        self._model: InferenceModel = engine.model
        self._cache = cache
        self._is_encoder_decoder = self._model.spec.num_encoder_layers is not None
        tokenizer = self._model.tokenizer
        bos = tokenizer.special_names["bos_token"]
        self._prefix_token = bos or tokenizer.special_names["eos_token"]
        self._prefix_id = tokenizer.vocab().get(bos, tokenizer.eos_token_id)
        self.num_truncated = 0
        self.num_empty = 0

    # Text to ids

    @property
    def _room(self) -> int:
        """Tokens that the decoder takes, without virtual ones."""
        return self._model.spec.max_position_embeddings - self._model.spec.prompts[0]

    def _encode(self, text: str, *, with_prefix: bool = True) -> Ids:
        """Return the ids of a text. Special tokens in it count as such, as they do in transformers."""
        ids = tuple(self._model.tokenizer.encode(text, parse_special_tokens=True))
        if not with_prefix or text.startswith(self._prefix_token):
            return ids
        return (*self._model.prompt_prefix_ids, *ids)

    def encode_pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """Return the ids of a context and of its continuation. Spaces between them belong to the continuation."""
        if self._is_encoder_decoder:
            stripped = context.rstrip()
            continuation = context[len(stripped) :] + continuation
            # The engine appends the end token.
            return self._encode(stripped), self._encode(continuation, with_prefix=False)
        if not context:
            ids = self._encode(continuation, with_prefix=False)
            starts_anyway = ids[:1] == (self._prefix_id,)
            return ((self._prefix_id,), ids[1:] if starts_anyway else ids)
        stripped = context.rstrip()
        whole = self._encode(context + continuation)
        context_ids = self._encode(stripped)
        return context_ids, whole[len(context_ids) :]

    def _fit(self, context: Ids, continuation: Ids) -> Ids:
        """Return the context without the tokens at its start that there is no room for."""
        if self._is_encoder_decoder:
            room = self._model.spec.max_position_embeddings - self._model.spec.prompts[1] - 1
            limit = self._room
        else:
            room = self._room + 1 - len(continuation)
            limit = self._room
        if len(continuation) > limit:
            what = f"a continuation has {len(continuation)} tokens, and the model's context is {limit}."
            raise JinguError(what, where=self._model.name, fix="Use a model with a longer context.")
        self.num_truncated += len(context) > room
        return context[-room:]

    # Requests

    def _key(self, *parts: Any) -> str:
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    def _score_ids(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Answer]:
        """Return the answers for contexts and continuations. A context is computed once for all of its continuations,
        wherever these are in the list."""
        keys = [self._key(context, continuation) for context, continuation in pairs]
        missing: dict[Ids, dict[Ids, str]] = {}
        for key, (context, continuation) in zip(keys, pairs, strict=True):
            if not continuation:
                self.num_empty += 1
                self._cache.answers[key] = Answer(is_greedy=True)
            elif key not in self._cache.answers:
                missing.setdefault(context, {})[continuation] = key
        requests = [(context, list(continuations)) for context, continuations in missing.items()]
        for first in range(0, len(requests), CHUNK_SIZE):
            chunk = requests[first : first + CHUNK_SIZE]
            for (context, continuations), scores in zip(chunk, self._engine.score_many(chunk), strict=True):
                for ids, score in zip(continuations, scores, strict=True):
                    self._cache.add(missing[context][ids], Answer(score.logprob, score.is_greedy, len(ids)))
            self._cache.flush()
        return [self._cache.answers[key] for key in keys]

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Answer]:
        """Return the log-probabilities of continuations after their contexts."""
        encoded = [self.encode_pair(context, continuation) for context, continuation in pairs]
        return self._score_ids([(self._fit(*pair), pair[1]) for pair in encoded])

    def windows(self, text: str) -> list[tuple[Ids, Ids]]:
        """Divide a text into windows of the model's context: what is read, and what is predicted after it.

        Each token is predicted once; the last window is filled up with the tokens before it.
        """
        ids = self._encode(text)
        if self._is_encoder_decoder:
            ids = (*ids, self._model.tokenizer.eos_token_id)
        length = self._room
        windows: list[tuple[Ids, Ids]] = [((self._prefix_id,), ids[:length])] if ids else []
        for start in range(length, len(ids), length):
            end = min(start + length, len(ids))
            windows.append((ids[end - length - 1 : start], ids[start:end]))
        if self._is_encoder_decoder:
            # The encoder reads nothing but the end token, which the engine appends.
            windows = [((), predicted) for _, predicted in windows]
        return windows

    def score_texts(self, texts: Sequence[str]) -> list[Answer]:
        """Return the log-probabilities of whole texts, of any length."""
        windows = [self.windows(text) for text in texts]
        answers = iter(self._score_ids([window for group in windows for window in group]))
        results = []
        for group in windows:
            parts = [next(answers) for _ in group]
            logprob = sum(part.logprob for part in parts)
            results.append(
                Answer(logprob, all(part.is_greedy for part in parts), sum(part.num_tokens for part in parts))
            )
        return results

    def generate(self, contexts: Sequence[str], settings: GenerationSettings, repeats: int = 1) -> list[list[Answer]]:
        """Return the texts that follow contexts; several to each with different seeds."""
        model = self._model
        eos = model.tokenizer.special_names["eos_token"]
        room = model.spec.max_position_embeddings - model.spec.prompts[1] - 1
        if not self._is_encoder_decoder:
            room = self._room - settings.max_tokens
        requests: dict[str, Request] = {}
        keys = []
        for context in contexts:
            ids = self._encode(context)
            self.num_truncated += len(ids) > room
            for seed in range(repeats):
                sampling = SamplingParams(
                    settings.temperature, settings.top_k, settings.top_p, seed=seed if settings.temperature else 0
                )
                stop = (*settings.stop, eos)
                key = self._key(ids[-room:], settings.max_tokens, stop, repr(sampling))
                keys.append(key)
                requests[key] = Request(ids[-room:], sampling, settings.max_tokens, stop)
        missing = [key for key in requests if key not in self._cache.answers]
        for first in range(0, len(missing), CHUNK_SIZE):
            chunk = missing[first : first + CHUNK_SIZE]
            texts = self._engine.generate([requests[key] for key in chunk])
            for key, text in zip(chunk, texts, strict=True):
                self._cache.add(key, Answer(text=self._without_special_tokens(text)))
            self._cache.flush()
        answers = [self._cache.answers[key] for key in keys]
        return [answers[first : first + repeats] for first in range(0, len(answers), repeats)]

    def _without_special_tokens(self, text: str) -> str:
        """Return a generated text without the special tokens that the output of an encoder-decoder keeps."""
        for token in self._model.tokenizer.special_tokens if self._is_encoder_decoder else ():
            text = text.replace(token, "")
        return text
