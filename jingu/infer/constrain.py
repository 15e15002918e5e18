"""Text that must be JSON, or what a regular expression matches: tokens that could not lead there are never chosen.

By llguidance, which knows of a tokenizer's tokens which a grammar allows next.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.request import Constraint
from jingu.text.tokenizer import Tokenizer

_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Where any space were allowed, some models would write nothing else."""
_MOST_WORK = 100_000
"""What llguidance may spend on reading an expression, in its own unit."""


class Grammars:
    """The grammars of one tokenizer. Its entries are read with the first."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_id: int) -> None:
        self._tokenizer, self._vocabulary, self._end_id = tokenizer, vocabulary, end_id
        self._read: Any = None

    def open(self, constraint: Constraint) -> Grammar:
        """A grammar at its beginning. Raises JinguError where the library is missing or does not take it."""
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer
        except ImportError as error:
            raise JinguError(
                "answers can be held to a schema with llguidance only, which is not installed.",
                where="constraint",
                fix="pip install 'jingu[constrain]'",
            ) from error
        if self._read is None:
            self._read = LLTokenizer(self._tokenizer.content, n_vocab=self._vocabulary, eos_token=self._end_id)
        try:
            if constraint.kind == "regex":
                rules = LLMatcher.grammar_from_regex(constraint.value)
            else:
                schema = json.loads(constraint.value) if constraint.kind == "json_schema" else {"type": "object"}
                # What allows everything may also be said so.
                rules = LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=_JSON)
        except ValueError as error:
            raise _refused(str(error)) from error
        # Others wait meanwhile: what takes more than some tens of milliseconds to read is given up.
        limits = LLParserLimits(initial_lexer_fuel=_MOST_WORK, verbose_errors=False)
        grammar = Grammar(LLMatcher(self._read, rules, limits=limits, log_level=0), self._vocabulary)
        if grammar.broken is None:
            grammar.allowed(torch.zeros(self._vocabulary))  # only this tells what no text fits
        if grammar.broken is not None:
            raise _refused(grammar.broken)
        return grammar


class Grammar:
    """Where a text is in its grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._mask = torch.zeros(1, -(-vocabulary // 32), dtype=torch.int32)

    def copy(self) -> Grammar:
        """Another text at the same place: to read a grammar takes its time, and others wait meanwhile."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary)

    def allowed(self, scores_V: Tensor) -> Tensor:
        """Scores, -inf of tokens that may not follow."""
        from llguidance.torch import fill_next_token_bitmask

        if self._matcher.is_error():
            return scores_V
        fill_next_token_bitmask(self._matcher, self._mask)
        bits = self._mask[0, :, None] >> torch.arange(32, dtype=torch.int32) & 1
        return scores_V.masked_fill(bits.flatten()[: len(scores_V)] == 0, -torch.inf)

    def take(self, id_: int) -> bool:
        """Go on by a token; whether nothing can follow it."""
        self._matcher.consume_token(id_)
        return bool(self._matcher.is_stopped()) and self.broken is None

    @property
    def broken(self) -> str | None:
        """Why the library gave the grammar up, such as one that has grown too large; None: it has not."""
        return _words(self._matcher.get_error()) if self._matcher.is_error() else None


def _words(error: str) -> str:
    """What llguidance says, without what it adds for its own log."""
    return error.replace("NoExtensionBias", "no text fits it").replace("<non-verbose/>", "").strip()


def _refused(words: str) -> JinguError:
    return JinguError(f"this cannot be asked of an answer ({words.strip()}).", where="constraint")
