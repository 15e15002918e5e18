"""Structured output: JSON, or text that matches a regular expression or a grammar. Other tokens are masked.

llguidance determines the tokens that a grammar allows next.

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

# Whitespace is fixed: some models would write endless whitespace if it were flexible.
_JSON_FORMAT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Limit of llguidance for compiling a grammar, in a unit of its own. It amounts to some tens of milliseconds: other
# requests wait meanwhile.
_LEXER_FUEL = 100_000


class GrammarCompiler:
    """Compiles constraints for one tokenizer. Its vocabulary is read with the first constraint."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._llguidance_tokenizer: Any = None

    def compile(self, constraint: Constraint) -> Grammar:
        """Return a grammar in its initial state. Raise JinguError if llguidance is missing or refuses the grammar."""
        # 1. Load llguidance and the vocabulary.
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
        # 2. Convert the constraint to rules.
        try:
            if constraint.kind == "regex":
                rules = LLMatcher.grammar_from_regex(constraint.value)
            elif constraint.kind == "grammar":
                rules = LLMatcher.grammar_from_lark(_convert_to_lark(constraint.value))
            else:
                schema = json.loads(constraint.value) if constraint.kind == "json_schema" else {"type": "object"}
                # In JSON Schema, `true` also is a schema that allows everything.
                rules = LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=_JSON_FORMAT)
        except (ValueError, RecursionError) as error:
            raise _invalid_constraint(str(error)) from error
        # 3. Compile the rules.
        limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._llguidance_tokenizer, rules, limits=limits, log_level=0)
        grammar = Grammar(matcher, self._vocab_size)
        if grammar.error is None:
            grammar.bitmasks([])  # llguidance notices only here that no text matches
        if grammar.error is not None:
            raise _invalid_constraint(grammar.error)
        return grammar


class Grammar:
    """The state of a grammar after the tokens accepted so far."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> Grammar:
        """Return an independent copy of the state, which is much faster than compiling the grammar again."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size)

    def bitmasks(self, draft_tokens: Sequence[int]) -> list[Tensor]:
        """Return bitmasks of the allowed tokens [1, V / 32], one bit for each token: those of the next token, and of
        the token after each draft token, up to the first draft token that is not allowed or ends the output."""
        bitmasks = [self._next_bitmask(self._matcher)]
        if not draft_tokens:
            return bitmasks
        # Use a copy: if it runs into the limits of llguidance, only the draft ends.
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

        # All ones: after an error of llguidance, every token is allowed.
        bitmask = torch.full((1, -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, bitmask)
        return bitmask

    def accept(self, token_id: int) -> bool:
        """Advance by a token; return whether the output is complete, as no token can follow."""
        self._matcher.consume_token(token_id)
        return bool(self._matcher.is_stopped()) and self.error is None

    @property
    def error(self) -> str | None:
        """The error with which llguidance stopped (the grammar may have grown too large); None: there was none."""
        return _clean_message(self._matcher.get_error()) if self._matcher.is_error() else None


def _convert_to_lark(grammar: str) -> str:
    """Return a grammar in the syntax of Lark, which llguidance reads; llama.cpp's GBNF is converted.

    Raises:
        ValueError: the grammar cannot be converted.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except Exception as error:
        # The errors of the converter have no common base class.
        raise ValueError(str(error)) from error


def _clean_message(error: str) -> str:
    """Return llguidance's message without its internal markers."""
    if "coerce_one_of" in error:
        return "oneOf is not supported where its schemas may overlap; write anyOf"
    return error.replace("NoExtensionBias", "no text matches it").replace("<non-verbose/>", "").strip()


def _invalid_constraint(message: str) -> JinguError:
    return JinguError(f"the output cannot be constrained like this ({message.strip()}).", where="constraint")
