"""Train a byte-level tokenizer, which encodes and decodes every text without loss."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Literal

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from jingu.errors import JinguError
from jingu.runtime.files import temporary_folder
from jingu.runtime.gpus import num_usable_cores
from jingu.text.tokenizer import Tokenizer
from jingu.text.tokenizer_formats import BYTE_TO_LETTER, SPLIT_PATTERN, build_byte_level_bpe

Algorithm = Literal["bpe", "unigram", "wordpiece"]
_ALPHABET = sorted(BYTE_TO_LETTER.values())
# The prefix of WordPiece pieces inside words. It must not be a letter of the byte alphabet.
_SUBWORD_PREFIX = "▁"
# Longer words are divided, because the time of WordPiece grows with the cube of a word's length.
_MAX_WORD_CHARS = 400
# Unigram starts with at least this many pieces, or ten times the size of the vocabulary if that is more, and prunes.
_MIN_SEED_PIECES = 100_000


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, special_tokens: list[str], algorithm: Algorithm = "bpe"
) -> Tokenizer:
    """Train a byte-level tokenizer of at most `vocab_size` entries. The special tokens get the first ids.

    It has fewer entries if the texts have no more pairs to merge. The same texts give the same tokenizer, except that
    the number of threads affects the rounding of unigram's scores.

    Args:
        algorithm: bpe repeatedly merges the most frequent pair (Sennrich et al., 2016); unigram prunes the pieces whose
            removal reduces the likelihood least (Kudo, 2018); wordpiece learns merges like bpe, and encodes a word
            greedily as its longest pieces (Wu et al., 2016).

    Raises:
        JinguError: there is no special token, special tokens are empty, duplicate or would be recognized in text, the
            vocabulary is too small, or sentencepiece failed.
    """
    if not special_tokens or len(set(special_tokens)) != len(special_tokens) or "" in special_tokens:
        what = "there must be at least one special token, each once and none of them empty."
        fix = 'The first one ends every document; "<|endoftext|>" is the usual name.'
        raise JinguError(what, where="tokenizer.special_tokens", fix=fix)
    letters = 512 if algorithm == "wordpiece" else 256
    min_size = letters + len(special_tokens)
    if vocab_size < min_size:
        bytes_ = "256 bytes" if letters == 256 else "256 bytes at the beginning and inside of words"
        what = f"{vocab_size} is too small: {bytes_} and {len(special_tokens)} special tokens need {min_size}."
        raise JinguError(what, where="tokenizer.vocab_size")
    train = {"bpe": _bpe, "unigram": _unigram, "wordpiece": _wordpiece}[algorithm]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special_tokens[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    options = {"vocab_size": vocab_size, "special_tokens": special_tokens, "initial_alphabet": _ALPHABET}
    tokenizer = Tokenizer(train(texts, options | {"show_progress": False}), config)
    # WordPiece and unigram encode a word that is in the vocabulary as one token, even if it is a special token. Text
    # could then end a document.
    matching_tokens = [token for token, id_ in tokenizer.special_tokens.items() if id_ in tokenizer.encode(token)]
    if matching_tokens:
        what = (
            f"{', '.join(matching_tokens)} would be recognized in text, because {algorithm} takes a known word whole."
        )
        raise JinguError(what, where="tokenizer.special_tokens", fix="Use names that are not words, such as <|end|>.")
    return tokenizer


def _bpe(texts: Iterator[str], options: dict[str, Any]) -> str:
    inner = build_byte_level_bpe({}, [], SPLIT_PATTERN)
    inner.train_from_iterator(texts, trainers.BpeTrainer(**options))
    return str(inner.to_str(pretty=True))


def _unigram(texts: Iterator[str], options: dict[str, Any]) -> str:
    """Train with sentencepiece on word counts, because the library's own trainer takes hours for Chinese."""
    inner = build_byte_level_bpe({}, [], SPLIT_PATTERN)
    words: Counter[str] = Counter()
    for text in texts:
        for word, _ in inner.pre_tokenizer.pre_tokenize_str(text):
            words.update(word[start : start + _MAX_WORD_CHARS] for start in range(0, len(word), _MAX_WORD_CHARS))
    special = options["special_tokens"]
    with temporary_folder("jingu-unigram-") as folder:
        corpus = folder / "words.tsv"
        corpus.write_text("".join(f"{word}\t{count}\n" for word, count in words.items()), encoding="utf-8")
        unseen = set(_ALPHABET).difference(*words)
        # One more entry, for sentencepiece's unknown piece, which is removed afterwards.
        scores = _run_sentencepiece(corpus, options["vocab_size"] - len(special) - len(unseen) + 1)
    least = min(scores.values())
    # Give special tokens a very low score: with a score of 0 they would be the most likely pieces of a text.
    scores = dict.fromkeys(special, 100 * least) | scores | dict.fromkeys(sorted(unseen), least)
    inner.model = models.Unigram(list(scores.items()))
    inner.add_special_tokens(special)
    return str(inner.to_str(pretty=True))


def _run_sentencepiece(corpus: Path, vocab_size: int) -> dict[str, float]:
    """Train Unigram with sentencepiece; return the score of each piece.

    It runs in a separate process, so that Ctrl-C ends it and its log is available for the progress bar.

    Args:
        corpus: file of words and their counts, separated by tabs.

    Raises:
        JinguError: sentencepiece failed.
    """
    options = {
        "input": str(corpus),
        "input_format": "tsv",
        "model_prefix": str(corpus.with_suffix("")),
        "model_type": "unigram",
        "vocab_size": vocab_size,
        "character_coverage": 1.0,
        "hard_vocab_limit": False,
        "seed_sentencepiece_size": max(_MIN_SEED_PIECES, 10 * vocab_size),
        "normalization_rule_name": "identity",
        "num_threads": num_usable_cores(),
        **dict.fromkeys(("bos_id", "eos_id"), -1),
        **dict.fromkeys(("add_dummy_prefix", "remove_extra_whitespaces"), False),
        **dict.fromkeys(("split_by_whitespace", "split_by_unicode_script", "split_by_number"), False),
    }
    code = "import json, sys, sentencepiece; sentencepiece.SentencePieceTrainer.train(**json.loads(sys.argv[1]))"
    if sys.platform == "linux":
        # Let the system kill the child process if this process is killed (PR_SET_PDEATHSIG).
        code = f"import ctypes; ctypes.CDLL(None).prctl(1, 9); {code}"
    line = ""
    with Popen([sys.executable, "-c", code, json.dumps(options)], stderr=PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        try:
            with tqdm(desc="pieces before pruning", disable=None, bar_format="{desc}: {n_fmt} [{elapsed}]") as bar:
                for line in process.stderr:
                    if match := re.search(r"EM sub_iter=\d+ size=(\d+)", line):
                        bar.update(int(match[1]) - bar.n)
        finally:
            # Has no effect on a process that has ended.
            process.kill()
    if process.returncode:
        raise JinguError(f"sentencepiece could not train ({line.strip()}).", where="tokenizer.vocab_size")
    lines = corpus.with_suffix(".vocab").read_text(encoding="utf-8").splitlines()
    pieces = [line.split("\t") for line in lines]
    return {piece: float(score) for piece, score in pieces if piece != "<unk>"}


def _wordpiece(texts: Iterator[str], options: dict[str, Any]) -> str:
    special = options["special_tokens"]
    inner = build_byte_level_bpe({}, [], SPLIT_PATTERN)
    cut = pre_tokenizers.Split(Regex(f".{{1,{_MAX_WORD_CHARS}}}"), behavior="isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([inner.pre_tokenizer, cut])
    inner.model = models.WordPiece(
        {}, unk_token=special[0], continuing_subword_prefix=_SUBWORD_PREFIX, max_input_chars_per_word=_MAX_WORD_CHARS
    )
    inner.decoder = decoders.Sequence([decoders.Replace(_SUBWORD_PREFIX, ""), decoders.ByteLevel()])
    # Pass all letters inside words as special tokens to the trainer, so that each gets an entry, in a fixed order.
    with_letters = {"special_tokens": [*special, *(_SUBWORD_PREFIX + letter for letter in _ALPHABET)]}
    trainer = trainers.WordPieceTrainer(**(options | with_letters), continuing_subword_prefix=_SUBWORD_PREFIX)
    inner.train_from_iterator(texts, trainer)
    spec: dict[str, Any] = json.loads(inner.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in special]
    return str(tokenizers.Tokenizer.from_str(json.dumps(spec)).to_str(pretty=True))
