"""Structured output: JSON, or text that matches a regular expression or a grammar. Other tokens are masked.

llguidance knows which tokens of a tokenizer a grammar allows next.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jingu.errors import JinguError
from jingu.infer.request import Constraint
from jingu.text.tokenizer import Tokenizer

# Fixed whitespace: where any were allowed, some models would write nothing else.
_JSON_FORMAT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What llguidance may spend on compiling a grammar, in its own unit: some tens of milliseconds, as other requests wait.
_LEXER_FUEL = 100_000


class GrammarCompiler:
    """Compiles constraints for one tokenizer, whose vocabulary is read with the first of them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._llguidance_tokenizer: Any = None

    def compile(self, constraint: Constraint) -> Grammar:
        """Return a grammar in its initial state. Raise JinguError where llguidance is missing or refuses it."""
        try:
            from llguidance import LLMatcher, LLParserLimits, LLTokenizer
        except ImportError as error:
            raise JinguError(
                "structured output needs llguidance, which is not installed.",
                where="constraint",
                fix="pip install 'jingu[constrain]'",
            ) from error
        if self._llguidance_tokenizer is None:
            content = self._tokenizer.content
            self._llguidance_tokenizer = LLTokenizer(content, n_vocab=self._vocab_size, eos_token=self._eos_token_id)
        try:
            if constraint.kind == "regex":
                rules = LLMatcher.grammar_from_regex(constraint.value)
            elif constraint.kind == "grammar":
                rules = LLMatcher.grammar_from_lark(_convert_to_lark(constraint.value))
            else:
                schema = json.loads(constraint.value) if constraint.kind == "json_schema" else {"type": "object"}
                # JSON Schema also writes the schema that allows everything as `true`.
                rules = LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=_JSON_FORMAT)
        except ValueError as error:
            raise _invalid_constraint(str(error)) from error
        limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._llguidance_tokenizer, rules, limits=limits, log_level=0)
        grammar = Grammar(matcher, self._vocab_size)
        if grammar.error is None:
            grammar.bitmasks([])  # only this notices that no text matches
        if grammar.error is not None:
            raise _invalid_constraint(grammar.error)
        return grammar


class Grammar:
    """The state of a grammar after the tokens accepted so far."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> Grammar:
        """Return an independent copy of the state: much faster than compiling the grammar again."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size)

    def bitmasks(self, draft_tokens: Sequence[int]) -> list[Tensor]:
        """Return a bit for each token that may follow [1, V / 32]: now, and after each draft token up to the first that
        is not allowed or ends the output."""
        bitmasks = [self._next_bitmask(self._matcher)]
        if not draft_tokens:
            return bitmasks
        # A copy: where it runs into the limits of llguidance, only the draft ends.
        matcher = self._matcher.deep_copy()
        for token_id in draft_tokens:
            is_allowed = not matcher.is_error() and matcher.validate_tokens([token_id]) == 1
            if not is_allowed or not matcher.consume_token(token_id) or matcher.is_stopped():
                break
            bitmask = self._next_bitmask(matcher)
            if not matcher.is_error():
                bitmasks.append(bitmask)
        return bitmasks

    def _next_bitmask(self, matcher: Any) -> Tensor:
        from llguidance.torch import fill_next_token_bitmask

        # All ones: without an answer from llguidance, every token is allowed.
        bitmask = torch.full((1, -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, bitmask)
        return bitmask

    def accept(self, token_id: int) -> bool:
        """Advance by a token; return whether nothing can follow it."""
        self._matcher.consume_token(token_id)
        return bool(self._matcher.is_stopped()) and self.error is None

    @property
    def error(self) -> str | None:
        """Why llguidance gave the grammar up (it may have grown too large); None: it did not."""
        return _clean_message(self._matcher.get_error()) if self._matcher.is_error() else None


def _convert_to_lark(grammar: str) -> str:
    """Return a grammar in Lark, which llguidance reads; llama.cpp's GBNF is converted. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:
        # The converter has no common class for its errors.
        raise ValueError(str(error)) from error


def _clean_message(error: str) -> str:
    """Return llguidance's message without what it adds for its own log."""
    return error.replace("NoExtensionBias", "no text matches it").replace("<non-verbose/>", "").strip()


def _invalid_constraint(message: str) -> JinguError:
    return JinguError(f"the output cannot be constrained like this ({message.strip()}).", where="constraint")
