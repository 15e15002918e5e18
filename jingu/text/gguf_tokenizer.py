"""Convert the tokenizer in a GGUF file to a folder that jingu and transformers read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jingu.errors import JinguError
from jingu.runtime.log import log_warning
from jingu.tables import read_table
from jingu.text.sentencepiece import SentencePieceModel, build_sentencepiece, prepend_token
from jingu.text.tokenizer_formats import GPT2_SPLIT_PATTERN, build_byte_level_bpe

_PRE_TOKENIZERS = read_table(__file__, "gguf_pre_tokenizers.toml")["pre_tokenizers"]
# llama.cpp's name for files that name no pre-tokenizer.
_DEFAULT = "default"
# The key in which jingu says how a tokenizer normalizes text: NFC or none.
NORMALIZER = "tokenizer.jingu.normalizer"
# Patterns in files, and those of the table that match the same words: alternatives in another order, of which at most
# one matches, and possessive quantifiers where greedy ones match the same.
_EQUAL_PATTERNS = (
    (r"'(?i:[sdmt]|ll|ve|re)", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
    (r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
    (r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
    (r" ?[^\s\p{L}\p{N}]++", r" ?[^\s\p{L}\p{N}]+"),
    (r"|\s*[\r\n]|", r"|\s*[\r\n]+|"),
    (r"\p{N}{1}|", r"\p{N}|"),
    (r"(\s|[.,!?…。，、।۔،])", r"(\s|.,!?…。，、।۔،)"),
)
_SPACE = "▁"
# Types of tokens, as in sentencepiece.
_CONTROL, _USER = 3, 4
_TOKENS = ("bos", "eos", "unknown", "padding")
_HF_NAMES = {"unknown": "unk", "padding": "pad"}


def write_gguf_tokenizer(metadata: Mapping[str, Any], max_length: int, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) from the metadata of a GGUF file.

    Args:
        max_length: `model_max_length`, the maximum number of tokens of the model.
        folder: the folder to write to.

    Raises:
        JinguError: the file has no tokenizer, or one that is unsupported or damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "t5", "gemma4"):
        raise JinguError(
            f"the file's tokenizer is of the kind {kind}; jingu supports byte-level BPE (gpt2) and sentencepiece "
            "(llama, t5, gemma4) in GGUF."
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    try:
        if not isinstance(tokens, list):
            raise ValueError("it has no tokens")
        read = {"gpt2": _byte_level, "gemma4": _merged_pieces}.get(kind, _sentencepiece)
        inner = read(metadata, tokens)
    except JinguError:
        raise
    except Exception as error:  # the library raises bare Exception for bad content
        raise JinguError(f"the file's tokenizer is damaged ({error}).") from error
    special_names = {}
    for name in _TOKENS:
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            special_names[f"{_HF_NAMES.get(name, name)}_token"] = tokens[number]
    entry = find_pre_tokenizer(str(metadata.get("tokenizer.ggml.pre"))) or {}
    has_bos = kind == "llama" or (kind == "gpt2" and entry.get("adds_bos", False))
    if metadata.get("tokenizer.ggml.add_bos_token", has_bos) and "bos_token" in special_names:
        prepend_token(inner, special_names["bos_token"])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special_names,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    (folder / "tokenizer.json").write_text(inner.to_str(), encoding="utf-8")
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Build a byte-level BPE tokenizer (of the `tokenizers` library) from tokens and merges."""
    pre = str(metadata.get("tokenizer.ggml.pre") or _DEFAULT)
    if "tokenizer.ggml.pre" not in metadata:
        log_warning(
            "The GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre). jingu uses llama.cpp's "
            "default, and the ids can differ from those that the model was trained on."
        )
    entry = find_pre_tokenizer(pre)
    if entry is None:
        raise JinguError(f"the file's pre-tokenizer (tokenizer.ggml.pre) is {pre!r}, which jingu does not support.")
    vocab = {token: number for number, token in enumerate(tokens)}
    inner = build_byte_level_bpe(vocab, _merges(metadata), "", whole_words=entry.get("whole_words", False))
    *splits, last = entry["splits"]
    if last == GPT2_SPLIT_PATTERN:
        steps = [_split(pattern) for pattern in splits] + [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        steps = [_split(pattern) for pattern in entry["splits"]] + [pre_tokenizers.ByteLevel(False, use_regex=False)]
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if metadata.get(NORMALIZER, entry.get("normalizer")) == "NFC":
        inner.normalizer = normalizers.NFC()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    _add_tokens(inner, metadata, tokens)
    return inner


def find_pre_tokenizer(name: str) -> dict[str, Any] | None:
    """Return the table's entry of a pre-tokenizer, by its name in llama.cpp; None: jingu does not know it."""
    return next((entry for entry in _PRE_TOKENIZERS if name in entry["names"]), None)


def equal_pre_tokenizers(splits: list[str]) -> list[dict[str, Any]]:
    """Return the entries of pre-tokenizers that split text as these patterns do, one after the other."""
    patterns = [_plain_pattern(pattern) for pattern in splits]
    return [entry for entry in _PRE_TOKENIZERS if [_plain_pattern(pattern) for pattern in entry["splits"]] == patterns]


def _plain_pattern(pattern: str) -> str:
    """Return one of several patterns that match the same words."""
    for other, plain in _EQUAL_PATTERNS:
        pattern = pattern.replace(other, plain)
    return pattern


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that are merged. The first piece may begin with a space, which does not separate."""
    merges = metadata["tokenizer.ggml.merges"]
    return [(merge[: merge.index(" ", 1)], merge[merge.index(" ", 1) + 1 :]) for merge in merges]


def _add_tokens(inner: Any, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """Add control tokens as special tokens, and user-defined ones as tokens that no word contains."""
    for token, type_ in zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False):
        if type_ in (_CONTROL, _USER):
            inner.add_tokens([AddedToken(token, special=type_ == _CONTROL, normalized=False)])


def _merged_pieces(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Build a tokenizer from pieces of sentencepiece with merges (Gemma 4). Bytes stand for what no piece spells."""
    vocab = {token: number for number, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    options = {} if unknown is None else {"unk_token": tokens[unknown]}
    model = models.BPE(vocab, _merges(metadata), byte_fallback="<0x0A>" in vocab, fuse_unk=True, **options)
    inner: Any = Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", _SPACE)
    inner.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(inner, metadata, tokens)
    return inner


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    """Build a tokenizer from pieces with scores. The kind `llama` is BPE, and `t5` is Unigram."""
    return build_sentencepiece(
        SentencePieceModel(
            tokens,
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            unigram=metadata["tokenizer.ggml.model"] == "t5",
            byte_fallback="<0x0A>" in tokens,
            charsmap=bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", [])),
            prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
            collapse=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        )
    )
