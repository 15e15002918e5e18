"""The tokenizer: encodes text as ids and decodes ids. jingu and transformers read the same folder."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers

from jingu.errors import JinguError
from jingu.runtime.hub import TOKENIZER_FILES, local_path
from jingu.text.tokenizer_formats import (
    GPT2_SPLIT_PATTERN,
    LETTER_TO_BYTE,
    find_tokenizer_file,
    read_tokenizer,
)
from jingu.text.word_cache import SUPPORTED_PATTERNS, CachedWordEncoder

# Longer texts are encoded in chunks of about this many characters, to bound memory.
MAX_CHUNK_CHARS = 1 << 20
# No token of a split pattern extends from a word to the newline after it. (The newline itself can begin a token: "\n\n"
# is one, and with some patterns also "\n" and the spaces before it or after it.)
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=\r?\n)")
# Common names of the EOS token.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")

# How the vocabulary spells text. bytes: in GPT-2's byte alphabet; metaspace: with ▁ for spaces (and <0x0A> for bytes),
# as in sentencepiece; plain: as it is.
VocabSpelling = Literal["bytes", "metaspace", "plain"]


class Tokenizer:
    """A tokenizer of the `tokenizers` library ("the library" below), with the methods that jingu needs.

    Attributes:
        content: the text of tokenizer.json.
        eos_token_id: id of the token that ends documents.
        spelling: how the vocabulary spells text.
    """

    def __init__(self, content: str, config: dict[str, Any]) -> None:
        """Create a tokenizer from the text of tokenizer.json and the object in tokenizer_config.json.

        Raises:
            Exception: the content is not a tokenizer's (ValueError, or the library's own bare exceptions).
        """
        self.content = content
        self._config = config
        self._spec: dict[str, Any] = json.loads(content)
        self._inner = _load_library_tokenizer(content)
        # Text is data: a document that mentions "<|endoftext|>" must not end there.
        self._inner.encode_special_tokens = True
        self._added: list[dict[str, Any]] = self._spec.get("added_tokens") or []
        self._added_texts = {token["content"] for token in self._added}
        self._special = {token["content"]: token["id"] for token in self._added if token.get("special")}
        self.eos_token_id = self._find_eos()
        self.spelling = _detect_spelling(self._spec)
        self._subword_prefix = self._spec["model"].get("continuing_subword_prefix") or ""
        self._is_divisible = _can_divide_text(self._spec)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json (or a tokenizer in another format) and its configuration from `folder`.

        `folder` may also be the tokenizer's file, or the name of a model on a hub, whose tokenizer is meant. Raises
        JinguError if the tokenizer is missing or damaged.
        """
        folder = local_path(folder, TOKENIZER_FILES)
        fix = "Run `jingu tokenizer train` (or `jingu import` a model to start from), or set tokenizer.path to one."
        if not folder.exists():
            raise JinguError("there is no tokenizer folder here.", where=folder, fix=fix)
        file = find_tokenizer_file(folder)
        if file is None:
            raise JinguError("the tokenizer's folder has no tokenizer.json.", where=folder, fix=fix)
        try:
            config = _read_config(file.parent)
            content, special_names = read_tokenizer(file, config, _EOS_NAMES)
            if file.suffix != ".json":
                config = {**special_names, **config, "tokenizer_class": "PreTrainedTokenizerFast"}
                config.pop("added_tokens_decoder", None)
            return cls(content, config)
        except Exception as error:  # the library raises bare Exception for bad content
            raise JinguError(f"the tokenizer is damaged ({error}).", where=folder, fix=fix) from error

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.content, encoding="utf-8")
        config = json.dumps(self._config, ensure_ascii=False, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")

    def encode(self, text: str, *, parse_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text. Special tokens in it are encoded as plain text unless `parse_special_tokens`."""
        if parse_special_tokens:
            return list(self._parsing.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return [id_ for chunk in self._divide_text(text) for id_ in self._encode_chunk(chunk)]

    def encode_parts(self, text: str, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]]:
        """Yield the ids that `encode` returns, in parts. Faster for many texts; needs less memory for long texts."""
        parts = None if self._word_encoder is None else self._word_encoder.encode(text, dtype)
        if parts is not None:
            yield from parts
        else:
            for chunk in self._divide_text(text):
                yield np.array(self._encode_chunk(chunk), dtype)

    def _encode_chunk(self, text: str) -> list[int]:
        # Encode a batch of one: only batches have a call that does not track offsets. Unlike `encode`, it also lets
        # other threads run in the meantime.
        return list(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    @cached_property
    def _word_encoder(self) -> CachedWordEncoder | None:
        """An encoder with a word cache; None unless the split pattern is known and words are encoded independently."""
        pattern = _split_pattern(self._spec)
        is_plain = self._spec.get("normalizer") is None and len(self._added) == len(self._special)
        if pattern in SUPPORTED_PATTERNS and is_plain and not self._spec["model"].get("dropout"):
            return CachedWordEncoder(pattern, self._inner.model, self._encode_chunk)
        return None

    def encode_with_offsets(
        self, text: str, *, parse_special_tokens: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and the range of characters that each id stands for.

        The ranges cover the text without gaps: spaces that no piece covers are added to the next one. Pieces of the
        same character have the same end.
        """
        encoding = self._encode_text(text, parse_special_tokens)
        offsets = []
        end = 0
        for first, last in encoding.offsets:
            offsets.append((min(first, end), last))
            end = max(end, last)
        return list(encoding.ids), offsets

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]], *, parse_special_tokens: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text; and for each span of characters the index of its first id, and of the first after.

        A space that no piece covers belongs to the piece after it. A piece that crosses the end of a span belongs to
        the span.
        """
        if not spans:
            return self.encode(text, parse_special_tokens=parse_special_tokens), []
        if self._keeps_bytes(text):
            ids = self.encode(text, parse_special_tokens=parse_special_tokens)
            token_spans = self._spans_by_bytes(text, ids, spans)
            if token_spans is not None:
                return ids, token_spans
        encoding = self._encode_text(text, parse_special_tokens)
        ids = list(encoding.ids)

        def first_token_from(position: int) -> int:
            for character in range(position, len(text)):
                token = encoding.char_to_token(character)
                if token is not None:
                    return int(token)
            return len(ids)

        token_spans = []
        for start, end in spans:
            last = first_token_from(end)
            # Include a piece that begins in the span and ends after it, or whose leading space ends the span.
            if start < end and last < len(ids):
                begins_inside = encoding.token_to_chars(last)[0] < end
                # A combining mark is not covered either, but belongs to the piece before it.
                is_space = text[end - 1].isspace() and encoding.char_to_token(end - 1) is None
                last += begins_inside or is_space
            token_spans.append((first_token_from(start), last))
        return ids, token_spans

    def _keeps_bytes(self, text: str) -> bool:
        """Return whether the ids of a text stand for exactly its bytes."""
        normalizer = (self._spec.get("normalizer") or {}).get("type")
        return self.spelling == "bytes" and (
            normalizer is None or (normalizer == "NFC" and unicodedata.is_normalized("NFC", text))
        )

    def _spans_by_bytes(
        self, text: str, ids: list[int], spans: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]] | None:
        """Return the spans of `encode_spans` from the bytes of each id; None if these are not the bytes of the text.

        This is faster than offsets, which the library tracks through every merge.
        """
        ends_T = self._num_bytes[ids].cumsum() if ids else np.zeros(0, np.int64)
        num_bytes = len(text.encode(errors="replace"))
        if num_bytes != (ends_T[-1] if ids else 0):
            return None
        borders = [border for span in spans for border in span]
        if num_bytes != len(text):
            borders = [len(text[:border].encode(errors="replace")) for border in borders]
        # The token of a border is the first that ends after it. It belongs to the span that ends there if it begins
        # inside.
        tokens = ends_T.searchsorted(borders, side="right").tolist()
        token_spans = []
        for index in range(0, len(borders), 2):
            start, end = borders[index : index + 2]
            first, last = tokens[index : index + 2]
            if start < end and last < len(ids):
                last += bool((ends_T[last - 1] if last else 0) < end)
            token_spans.append((first, last))
        return token_spans

    @cached_property
    def _num_bytes(self) -> npt.NDArray[np.int64]:
        """The number of bytes of each id in a vocabulary that spells bytes; 0 for an unknown id."""
        lengths = np.zeros(self.vocab_size, np.int64)
        for piece, token in self.vocab().items():
            lengths[token] = len(piece.encode()) if piece in self._added_texts else len(piece)
        return lengths

    def _encode_text(self, text: str, parse_special_tokens: bool) -> Any:
        inner = self._parsing if parse_special_tokens else self._inner
        # A batch of one lets other threads run in the meantime, which `encode` does not.
        return inner.encode_batch([text], add_special_tokens=False)[0]

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the number of ids of a text, with or without special tokens in it; 0 if unknown.

        Much cheaper than `encode`: the size of the text divided by that of the longest token.
        """
        return len(text.encode(errors="replace")) // self._max_token_bytes if self._max_token_bytes else 0

    @cached_property
    def _max_token_bytes(self) -> int:
        """The most bytes of a text that one token can stand for; 0 if there is no such limit."""
        normalizer = self._spec.get("normalizer") or {}
        if (
            normalizer.get("type", "NFC") != "NFC"
            or self.spelling != "bytes"
            or not LETTER_TO_BYTE.keys() <= set(self.vocab())
        ):
            # Without all bytes, or with other normalizers, tokens can stand for text of any length.
            return 0
        if any(token.get("lstrip") or token.get("rstrip") for token in self._added):
            return 0  # such a token includes all the white space around it
        longest = max(len(self.token_bytes(token)) for token in self.vocab().values())
        # NFC shortens a text at most to a third, such as three letters of Hangul to one.
        return 3 * longest if normalizer else longest

    @cached_property
    def _parsing(self) -> Any:
        """A tokenizer of the library that recognizes special tokens in text."""
        return _load_library_tokenizer(self.content)

    def decode(self, ids: list[int], *, keep_special_tokens: bool = False) -> str:
        """Return the text of ids, without special tokens unless `keep_special_tokens`."""
        text: str = self._inner.decode(ids, skip_special_tokens=not keep_special_tokens)
        return text

    @property
    def vocab_size(self) -> int:
        """The largest id plus one. The model's embedding may have more rows."""
        return max(self.vocab().values()) + 1

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens and their ids, in the order of the ids."""
        return dict(sorted(self._special.items(), key=lambda item: item[1]))

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens outside of the algorithm's own vocabulary, special or not, and their ids."""
        return {token["content"]: token["id"] for token in self._added}

    @property
    def special_names(self) -> dict[str, str]:
        """Special tokens by their key in the configuration, such as `pad_token`.

        `eos_token` and `bos_token` always exist; the latter is empty if the tokenizer has none.
        """
        names = {"eos_token": self._inner.id_to_token(self.eos_token_id), "bos_token": ""}
        for key, value in self._config.items():
            if key.endswith("_token") and isinstance(_token_text(value), str):
                names[key] = _token_text(value)
        return names

    @property
    def chat_templates(self) -> dict[str, str]:
        """The tokenizer's own chat templates by name; most have a single one, called default."""
        templates = self._config.get("chat_template") or []
        if isinstance(templates, str):
            return {"default": templates}
        return {item["name"]: item["template"] for item in templates}

    @property
    def chat_template(self) -> str | None:
        """The chat template called default; None if there is none."""
        return self.chat_templates.get("default")

    def replace_chat_templates(self, templates: Mapping[str, str]) -> Tokenizer:
        """Return the tokenizer with other chat templates, given by name."""
        named_templates = [{"name": name, "template": template} for name, template in templates.items()]
        return Tokenizer(self.content, {**self._config, "chat_template": named_templates})

    @property
    def decoder_start_token_id(self) -> int:
        """The first token that the decoder of an encoder-decoder reads: the `pad_token` (as for T5), or else EOS."""
        return self.vocab().get(_token_text(self._config.get("pad_token")), self.eos_token_id)

    def _find_eos(self) -> int:
        """Return the configured `eos_token`, else a token with a usual name, else the first special token."""
        vocab = self.vocab()
        for name in (_token_text(self._config.get("eos_token")), *_EOS_NAMES):
            if name in vocab:
                return vocab[name]
        if not self._special:
            raise ValueError("it has no special token to end documents with")
        return int(min(self._special.values()))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, which can be a part of a character; empty for an unknown id."""
        piece = self._inner.id_to_token(token) or ""
        return piece.encode() if piece in self._added_texts else self.piece_bytes(piece)

    def piece_bytes(self, piece: str) -> bytes:
        """Return the bytes that an entry of the vocabulary represents."""
        piece = piece.removeprefix(self._subword_prefix)
        if self.spelling == "bytes" and LETTER_TO_BYTE.keys() >= set(piece):
            return bytes(LETTER_TO_BYTE[letter] for letter in piece)
        if self.spelling == "metaspace":
            if _BYTE_PIECE.fullmatch(piece):
                return bytes([int(piece[1:5], 16)])
            piece = piece.replace("▁", " ")
        return piece.encode()

    def byte_lengths(self) -> npt.NDArray[np.int32]:
        """Return the number of UTF-8 bytes of each id, [vocab_size]; 0 for special tokens.

        The numbers are exact for byte-level BPE. With sentencepiece-like tokenizers, the first token of a text also
        counts the space that they add before it.
        """
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for piece, id_ in self._inner.get_vocab(with_added_tokens=False).items():
            lengths[id_] = len(self.piece_bytes(piece))
        for token in self._added:
            lengths[token["id"]] = 0 if token.get("special") else len(token["content"].encode())
        return lengths

    def mentions_special(self, text: str) -> bool:
        """Return whether a special token stands in a text."""
        return self._special_pattern.search(text) is not None

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._special)) or "(?!)")

    @cached_property
    def prompt_prefix_ids(self) -> list[int]:
        """Ids that the tokenizer adds before a prompt, such as Llama's `<s>`. Empty for most tokenizers."""
        plain = self._inner.encode("a", add_special_tokens=False).ids
        framed_ids = self._inner.encode("a", add_special_tokens=True).ids
        for start in range(len(framed_ids)):
            if framed_ids[start : start + len(plain)] == plain:
                return list(framed_ids[:start])
        return []

    def vocab(self) -> dict[str, int]:
        """Return every entry, including added tokens, as the vocabulary spells it, and its id."""
        vocab: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return vocab

    def split_piece(self, piece: str) -> list[int]:
        """Return the ids into which a piece is divided that is not in the vocabulary, but is spelled like its entries.

        Parts without an entry are left out.
        """
        unknown = self._spec["model"].get("unk_token")
        return [token.id for token in self._inner.model.tokenize(piece) if token.value != unknown]

    @property
    def algorithm(self) -> str:
        """The algorithm of the library's model: BPE, Unigram, WordPiece or WordLevel."""
        return str(self._spec["model"].get("type", "BPE"))

    def split_words(self, text: str) -> Iterator[tuple[str, ...]]:
        """Yield each word of a text as its pieces. New merges can be learned from pairs of pieces within words.

        A word is a word of the pre-tokenizer if the vocabulary spells bytes. Otherwise (sentencepiece) it begins at a
        space and consists of pieces of letters; any other piece is a word by itself. A character without an entry is
        a piece here, in place of the tokens for its bytes.
        """
        encoding = self._inner.encode(text, add_special_tokens=False)
        unknown = self._spec["model"].get("unk_token")
        previous = (0, 0, 0)
        word: list[str] = []
        for piece, offsets, word_id in zip(encoding.tokens, encoding.offsets, encoding.word_ids, strict=True):
            current = (word_id or 0, *offsets)
            is_byte = piece == unknown or _BYTE_PIECE.fullmatch(piece) is not None
            is_spelled_out = self.spelling == "metaspace" and is_byte
            if is_spelled_out and current == previous:
                # Another byte of the same character.
                continue
            symbols = text[slice(*offsets)] if is_spelled_out else (piece,)
            same_word = current[0] == previous[0] and (self.spelling == "bytes" or not piece.startswith("▁"))
            previous = current
            for symbol in symbols:
                is_letters = self.spelling == "bytes" or symbol.lstrip("▁").isalpha()
                if word and not (same_word and is_letters):
                    yield tuple(word)
                    word = []
                word.append(symbol)
                if not is_letters:
                    yield tuple(word)
                    word = []
        if word:
            yield tuple(word)

    def add_entries(self, characters: list[str], merges: list[tuple[str, str]], vocab_size: int) -> Tokenizer:
        """Return a BPE tokenizer with additional entries and merges after the existing ones.

        Args:
            characters: entries to add before those of merges.
            merges: pairs of entries to merge, in order. Each adds an entry, unless it exists.
            vocab_size: maximum number of entries; the remaining characters and merges are left out.
        """
        spec = json.loads(self._inner.to_str())
        vocab: dict[str, int] = spec["model"]["vocab"]
        # Move added tokens into the vocabulary: their ids come after its own, where new entries would get theirs.
        vocab |= {token["content"]: token["id"] for token in spec["added_tokens"]}
        next_id = self.vocab_size
        for character in characters:
            if character not in vocab and next_id < vocab_size:
                vocab[character] = next_id
                next_id += 1
        for first, second in merges:
            if first + second not in vocab:
                if next_id == vocab_size:
                    break
                vocab[first + second] = next_id
                next_id += 1
            spec["model"]["merges"].append((first, second))
        return Tokenizer(json.dumps(spec, ensure_ascii=False, indent=2), self._config)

    def fingerprint(self) -> str:
        """Return a hash of all settings that determine ids, as 32 hex digits.

        Tokenizers with the same hash encode every text alike. The hash does not depend on the version of the library.
        """
        spec = {key: value for key, value in self._spec.items() if key not in ("truncation", "padding", "version")}
        canonical = json.dumps([spec, self.eos_token_id], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def identity(self) -> str:
        """Return a hash of all that `save` writes, also of what does not determine ids: names, chat templates."""
        content = json.dumps([self._spec, self._config], sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def _divide_text(self, text: str) -> list[str]:
        """Divide a long text into chunks, at places that no token crosses."""
        if len(text) <= MAX_CHUNK_CHARS or not self._is_divisible:
            return [text]
        chunks = []
        start = 0
        while cut := _SAFE_CUT.search(text, start + MAX_CHUNK_CHARS):
            chunks.append(text[start : cut.start()])
            start = cut.start()
        return [*chunks, text[start:]]


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the tokenizer's configuration, with the special tokens and chat templates that have files of their own."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    # Older releases of transformers stored special tokens in special_tokens_map.json. The other file takes precedence.
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{name} is not a JSON object")
        for key, value in values.items():
            if value is not None:
                config[key] = _token_text(value) if name == "special_tokens_map.json" else value
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    templates = config.get("chat_template") or []
    named_texts = [] if isinstance(templates, str) else templates
    if not isinstance(named_texts, list) or not all(map(_is_named_template, named_texts)):
        raise ValueError("chat_template in tokenizer_config.json is neither text nor a list of {name, template}")
    # Add further templates by name, such as tool_use.
    template_files = sorted(folder.glob("additional_chat_templates/*.jinja"))
    if template_files:
        if isinstance(templates, str):
            templates = [{"name": "default", "template": templates}]
        further = [{"name": file.stem, "template": file.read_text(encoding="utf-8")} for file in template_files]
        config["chat_template"] = [*templates, *further]
    return config


def _is_named_template(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "template"))


def _load_library_tokenizer(content: str) -> Any:
    """Return the library's tokenizer, with truncation and padding turned off."""
    inner: Any = tokenizers.Tokenizer.from_str(content)
    inner.no_truncation()
    inner.no_padding()
    return inner


def sentinel_tokens(number: int) -> list[str]:
    """Return the names of T5's sentinels, special tokens that replace removed spans."""
    return [f"<extra_id_{n}>" for n in range(number)]


def _detect_spelling(spec: dict[str, Any]) -> VocabSpelling:
    """Return how the vocabulary of a tokenizer.json spells text."""
    parts = json.dumps([spec.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    if '"type": "ByteLevel"' in parts:
        return "bytes"
    return "metaspace" if "▁" in parts else "plain"


def _token_text(token: Any) -> Any:
    """Return the text of a token that transformers stored as an object; return anything else unchanged."""
    return token["content"] if isinstance(token, dict) and "content" in token else token


def _pre_tokenizer_steps(spec: dict[str, Any]) -> list[dict[str, Any]]:
    pre_tokenizer = spec.get("pre_tokenizer") or {}
    steps: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return steps


def _split_pattern(spec: dict[str, Any]) -> str:
    """Return the pattern by which a byte-level tokenizer splits text into words.

    Empty if the pre-tokenizer does more than split by one pattern and spell bytes.
    """
    *splits, last = _pre_tokenizer_steps(spec)
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(splits) > 1:
        return ""
    if not splits:
        return GPT2_SPLIT_PATTERN if last.get("use_regex") else ""
    [split] = splits
    is_plain = split.get("type") == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    if is_plain and not last.get("use_regex"):
        return str(split["pattern"].get("Regex", ""))
    return ""


def _can_divide_text(spec: dict[str, Any]) -> bool:
    """Return whether dividing a text between a word and the end of its line keeps its ids.

    It does if a pattern splits the text, so that no token crosses that place, and no space is added before each part.
    """
    steps = _pre_tokenizer_steps(spec)
    byte_levels = [step for step in steps if step.get("type") == "ByteLevel"]
    splits = any(step.get("type") == "Split" for step in steps) or any(step.get("use_regex") for step in byte_levels)
    return bool(byte_levels) and splits and not any(step.get("add_prefix_space") for step in byte_levels)
