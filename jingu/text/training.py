"""Training a tokenizer: pieces of bytes, so that every text can be written and comes back as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from jingu.errors import JinguError
from jingu.text.formats import LETTERS, SPLIT, byte_level
from jingu.text.tokenizer import Tokenizer

Algorithm = Literal["bpe", "unigram", "wordpiece"]
_ALPHABET = sorted(LETTERS.values())
_INSIDE = "▁"
"""Before pieces of WordPiece that do not begin a word. It is no letter of the byte alphabet."""
_LONGEST = 400
"""Letters of a word for WordPiece, whose time grows with their cube; longer ones are cut."""


def train_tokenizer(
    texts: Iterator[str], vocabulary: int, special_tokens: list[str], algorithm: Algorithm = "bpe"
) -> Tokenizer:
    """Train a byte-level tokenizer of at most `vocabulary` entries; the special tokens get the first ids.

    The same texts give the same tokenizer, but for unigram, which chooses by chance among pieces that are as likely.
    Fewer entries come out where the texts have no more to merge.

    Args:
        algorithm: bpe merges the most frequent pair again and again (Sennrich et al., 2016); unigram prunes pieces
            that the likelihood misses least (Kudo, 2018); wordpiece merges as bpe does, and splits a word by taking
            the longest piece each time (Wu et al., 2016).
    """
    if not special_tokens or len(set(special_tokens)) != len(special_tokens) or "" in special_tokens:
        raise JinguError(
            "there must be at least one, each once and none of them empty.",
            where="tokenizer.special_tokens",
            fix='The first one ends every document; "<|endoftext|>" is the usual name.',
        )
    letters = 512 if algorithm == "wordpiece" else 256
    least = letters + len(special_tokens)
    if vocabulary < least:
        bytes_ = "256 bytes" if letters == 256 else "256 bytes at the beginning and inside of words"
        raise JinguError(
            f"{vocabulary} is too small: {bytes_} and {len(special_tokens)} special tokens need {least}.",
            where="tokenizer.vocabulary",
        )
    train = {"bpe": _bpe, "unigram": _unigram, "wordpiece": _wordpiece}[algorithm]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special_tokens[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    options = {"vocab_size": vocabulary, "special_tokens": special_tokens, "initial_alphabet": _ALPHABET}
    tokenizer = Tokenizer(train(texts, options | {"show_progress": False}), config)
    found = [token for token, id_ in tokenizer.special_tokens.items() if id_ in tokenizer.encode(token)]
    if found:
        raise JinguError(
            f"{', '.join(found)} would be found in text, because {algorithm} takes a whole word that it knows.",
            where="tokenizer.special_tokens",
            fix="Use names that are no words, such as <|end|>.",
        )
    return tokenizer


def _bpe(texts: Iterator[str], options: dict[str, Any]) -> str:
    inner = byte_level({}, [], SPLIT)
    inner.train_from_iterator(texts, trainers.BpeTrainer(**options))
    return str(inner.to_str(pretty=True))


def _unigram(texts: Iterator[str], options: dict[str, Any]) -> str:
    inner = byte_level({}, [], SPLIT)
    inner.model = models.Unigram()
    inner.train_from_iterator(texts, trainers.UnigramTrainer(**options))
    spec = json.loads(inner.to_str())
    never = 100 * min(score for _, score in spec["model"]["vocab"])
    for place in range(len(options["special_tokens"])):  # Else they would be found in text, as likely as can be.
        spec["model"]["vocab"][place][1] = never
    return json.dumps(spec, ensure_ascii=False, indent=2)


def _wordpiece(texts: Iterator[str], options: dict[str, Any]) -> str:
    special = options["special_tokens"]
    inner = byte_level({}, [], SPLIT)
    cut = pre_tokenizers.Split(Regex(f".{{1,{_LONGEST}}}"), behavior="isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([inner.pre_tokenizer, cut])
    inner.model = models.WordPiece(
        {}, unk_token=special[0], continuing_subword_prefix=_INSIDE, max_input_chars_per_word=_LONGEST
    )
    inner.decoder = decoders.Sequence([decoders.Replace(_INSIDE, ""), decoders.ByteLevel()])
    # Given as special tokens, letters inside of words are all there, and in an order that does not change.
    inside = {"special_tokens": [*special, *(_INSIDE + letter for letter in _ALPHABET)]}
    trainer = trainers.WordPieceTrainer(**(options | inside), continuing_subword_prefix=_INSIDE)
    inner.train_from_iterator(texts, trainer)
    spec: dict[str, Any] = json.loads(inner.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
    return str(tokenizers.Tokenizer.from_str(json.dumps(spec)).to_str(pretty=True))
