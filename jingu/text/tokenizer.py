"""The tokenizer: text to ids and back, stored so that jingu and transformers read the same folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers

from jingu.errors import JinguError
from jingu.text.formats import BYTES, GPT2_SPLIT, read_tokenizer, tokenizer_file
from jingu.text.words import PATTERNS, Words

PART = 1 << 20
"""Texts longer than this many characters are encoded in parts, to bound memory."""
_SAFE_CUT = re.compile(r"\n(?=\w)")
"""No piece of a splitting pattern reaches over a newline into a word."""
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """A fast tokenizer (the `tokenizers` library) with the few things that jingu needs of it."""

    def __init__(self, content: str, config: dict[str, Any]) -> None:
        """`content` is the text of tokenizer.json, `config` the object in tokenizer_config.json.

        Raises ValueError, or the library's own exceptions, for content that is not a tokenizer's.
        """
        self.content = content
        self._config = config
        self._spec: dict[str, Any] = json.loads(content)
        self._inner = _library(content)
        # Text is data: "<|endoftext|>" written in a document must not end it.
        self._inner.encode_special_tokens = True
        self._added: list[dict[str, Any]] = self._spec.get("added_tokens") or []
        self._written = {token["content"] for token in self._added}
        self._special = {token["content"]: token["id"] for token in self._added if token.get("special")}
        self.end_id = self._find_end()
        self.kind = _kind(self._spec)
        self._prefix = self._spec["model"].get("continuing_subword_prefix") or ""
        self._cuts = _splits_words(self._spec)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, or else a tokenizer of another format, and what there is beside it, in `folder`; it may
        also be the file itself. Raises JinguError where that cannot be."""
        fix = "Run `jingu tokenizer train` (or `jingu import` a model to begin with), or set tokenizer.path to one."
        if not folder.exists():
            raise JinguError("there is no tokenizer folder here.", where=folder, fix=fix)
        file = tokenizer_file(folder)
        if file is None:
            raise JinguError("the tokenizer's folder has no tokenizer.json.", where=folder, fix=fix)
        given, folder = folder, file.parent
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        try:
            # Older releases of transformers kept special tokens in the first of these.
            for name, read in (("special_tokens_map.json", _content), ("tokenizer_config.json", lambda value: value)):
                if (folder / name).is_file():
                    found = json.loads((folder / name).read_text(encoding="utf-8"))
                    if not isinstance(found, dict):
                        raise ValueError(f"{name} is not a JSON object")
                    config |= {key: read(value) for key, value in found.items() if value is not None}
            if (folder / "chat_template.jinja").is_file():
                config["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
            content, named = read_tokenizer(file, config, _ENDS)
            if file.suffix != ".json":
                config = {**named, **config, "tokenizer_class": "PreTrainedTokenizerFast"}
                config.pop("added_tokens_decoder", None)
            return cls(content, config)
        except Exception as error:  # the library raises bare Exception for bad content
            raise JinguError(f"the tokenizer is damaged ({error}).", where=given, fix=fix) from error

    def save(self, folder: Path) -> None:
        """Write the two files into `folder`, as they were read; transformers' AutoTokenizer loads them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.content, encoding="utf-8")
        config = json.dumps(self._config, ensure_ascii=False, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of the text: no special token is added, and none is recognised in it unless `special` says so."""
        if special:
            return list(self._recognising.encode(text, add_special_tokens=False).ids)
        return [id_ for part in self._parts(text) for id_ in self._ids(part)]

    def encode_parts(self, text: str, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]]:
        """`encode` for many texts, and for long ones: parts of the ids, one after another."""
        if self._words is not None and (found := self._words.encode(text, dtype)) is not None:
            yield from found
        else:
            for part in self._parts(text):
                yield np.array(self._ids(part), dtype)

    def _ids(self, text: str) -> list[int]:
        # A batch of one: the call that does not track offsets exists for batches only.
        return list(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    @cached_property
    def _words(self) -> Words | None:
        """Where a text's ids are those of its words, and the words are split off in a known way."""
        split = _split(self._spec)
        plain = self._spec.get("normalizer") is None and len(self._added) == len(self._special)
        known = split in PATTERNS and plain and not self._spec["model"].get("dropout")
        return Words(split, self._inner.model, self._ids) if known else None

    def encode_places(self, text: str, *, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the text, and which of its characters each is of: together all, also where a piece leaves out the
        space before it. Pieces of one character have the same."""
        inner = self._recognising if special else self._inner
        found, end = inner.encode(text, add_special_tokens=False), 0
        places = []
        for first, last in found.offsets:
            places.append((min(first, end), last))
            end = max(end, last)
        return list(found.ids), places

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]], *, special: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the text; and for each span of its characters the first id that has one of them, and the first after
        it that has none. A space that pieces leave out belongs to the piece after it."""
        found = (self._recognising if special else self._inner).encode(text, add_special_tokens=False)
        ids = list(found.ids)

        def first_at(place: int) -> int:
            while place < len(text):
                if (number := found.char_to_token(place)) is not None:
                    return int(number)
                place += 1
            return len(ids)

        places = []
        for start, end in spans:
            last = first_at(end)
            # A piece that begins in the span, or after a space in it, is the span's.
            if start < end and last < len(ids):
                last += found.token_to_chars(last)[0] < end or found.char_to_token(end - 1) is None
            places.append((first_at(start), last))
        return ids, places

    @cached_property
    def _recognising(self) -> Any:
        return _library(self.content)

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Text of the ids; special tokens are left out unless `special` says so."""
        text: str = self._inner.decode(ids, skip_special_tokens=not special)
        return text

    @property
    def vocabulary(self) -> int:
        """Number of ids: the largest and one."""
        return max(self.pieces().values()) + 1

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens and their ids, by id."""
        return dict(sorted(self._special.items(), key=lambda item: item[1]))

    @property
    def special_names(self) -> dict[str, str]:
        """Special tokens by their part in the configuration, such as `bos_token`; `eos_token` is always there."""
        named = {key: _content(value) for key, value in self._config.items() if key.endswith("_token")}
        end = {"eos_token": self._inner.id_to_token(self.end_id), "bos_token": ""}
        return end | {key: value for key, value in named.items() if isinstance(value, str)}

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's own template for conversations; of several, the one called default."""
        found = self._config.get("chat_template")
        if isinstance(found, list):
            found = next((each["template"] for each in found if each.get("name") == "default"), None)
        return found if isinstance(found, str) else None

    @property
    def start_id(self) -> int:
        """The token before the first of a decoder with an encoder: `pad_token` of the configuration (as T5 has it),
        or else the end token."""
        return self.pieces().get(_content(self._config.get("pad_token")), self.end_id)

    def _find_end(self) -> int:
        """The token that ends every document: `eos_token` of the configuration, else one with a usual name, else the
        first special token."""
        vocabulary = self.pieces()
        for name in (_content(self._config.get("eos_token")), *_ENDS):
            if name in vocabulary:
                return vocabulary[name]
        if not self._special:
            raise ValueError("it has no special token to end documents with")
        return int(min(self._special.values()))

    def bytes_of(self, token: int) -> bytes:
        """What one token adds to a text, also where that is part of a character; nothing for an unknown id."""
        piece = self._inner.id_to_token(token) or ""
        return piece.encode() if piece in self._written else self.spelled(piece)

    def spelled(self, piece: str) -> bytes:
        """The bytes that an entry of the vocabulary stands for."""
        piece = piece.removeprefix(self._prefix)
        if self.kind == "bytes" and BYTES.keys() >= set(piece):
            return bytes(BYTES[letter] for letter in piece)
        if self.kind == "metaspace" and _BYTE.fullmatch(piece):
            return bytes([int(piece[1:5], 16)])
        return (piece.replace("▁", " ") if self.kind == "metaspace" else piece).encode()

    def byte_lengths(self) -> npt.NDArray[np.int32]:
        """[vocabulary] bytes of UTF-8 that each id stands for; 0 for special tokens.

        Exact for byte-level BPE; sentencepiece-like ones count the space that they put before a text.
        """
        lengths = np.zeros(self.vocabulary, dtype=np.int32)
        for piece, id_ in self._inner.get_vocab(with_added_tokens=False).items():
            lengths[id_] = len(self.spelled(piece))
        for added in self._added:
            lengths[added["id"]] = 0 if added.get("special") else len(added["content"].encode())
        return lengths

    @property
    def beginning(self) -> list[int]:
        """What it would have a prompt begin with: `<s>` of Llama, say; nothing with most."""
        plain, whole = (self._inner.encode("a", add_special_tokens=added).ids for added in (False, True))
        places = [place for place in range(len(whole)) if whole[place : place + len(plain)] == plain]
        return list(whole[: places[0]]) if places else []

    def pieces(self) -> dict[str, int]:
        """Every entry as the vocabulary spells it, and its id."""
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return vocabulary

    def parts_of(self, piece: str) -> list[int]:
        """Ids of the entries that an unknown one, spelled as the vocabulary would, is made of."""
        unknown = self._spec["model"].get("unk_token")
        return [token.id for token in self._inner.model.tokenize(piece) if token.value != unknown]

    @property
    def algorithm(self) -> str:
        """How pieces are found: BPE, Unigram or WordPiece."""
        return str(self._spec["model"].get("type", "BPE"))

    def words(self, text: str) -> Iterator[tuple[str, ...]]:
        """The text as words, each as its pieces, within which new pieces may be made.

        What is split before merging is a word; where only spaces split, a word's letters are, and any other piece by
        itself. A character that has no piece stands for itself in place of its bytes.
        """
        found = self._inner.encode(text, add_special_tokens=False)
        unknown, last = self._spec["model"].get("unk_token"), (0, 0, 0)
        word: list[str] = []
        for piece, offsets, number in zip(found.tokens, found.offsets, found.word_ids, strict=True):
            here = (number or 0, *offsets)
            spelled = self.kind == "metaspace" and (piece == unknown or _BYTE.fullmatch(piece) is not None)
            if spelled and here == last:
                continue  # another byte of the same character
            symbols = text[slice(*offsets)] if spelled else (piece,)
            joined = here[0] == last[0] and (self.kind == "bytes" or (not piece.startswith("▁")))
            last = here
            for symbol in symbols:
                letters = self.kind == "bytes" or symbol.lstrip("▁").isalpha()
                if word and not (joined and letters):
                    yield tuple(word)
                    word = []
                word.append(symbol)
                if not letters:
                    yield tuple(word)
                    word = []
        if word:
            yield tuple(word)

    def with_entries(self, characters: list[str], merges: list[tuple[str, str]], vocabulary: int) -> Tokenizer:
        """A BPE with further entries, numbered on, and further merges after its own; at most `vocabulary` in all."""
        spec = json.loads(self._inner.to_str())
        pieces: dict[str, int] = spec["model"]["vocab"]
        # Added tokens are numbered after the vocabulary, unless they are in it.
        pieces |= {token["content"]: token["id"] for token in spec["added_tokens"]}
        room = vocabulary - self.vocabulary
        for piece, merge in [*((each, None) for each in characters), *((a + b, (a, b)) for a, b in merges)]:
            if piece not in pieces:
                if room == 0:
                    break
                pieces[piece] = vocabulary - room
                room -= 1
            if merge:
                spec["model"]["merges"].append(merge)
        return Tokenizer(json.dumps(spec, ensure_ascii=False, indent=2), self._config)

    def fingerprint(self) -> str:
        """32 hex digits: equal where the same text gives the same ids. It does not depend on library versions."""
        spec = {key: value for key, value in self._spec.items() if key not in ("truncation", "padding", "version")}
        canonical = json.dumps([spec, self.end_id], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def _parts(self, text: str) -> list[str]:
        """Cut a long text where no token can reach over."""
        if len(text) <= PART or not self._cuts:
            return [text]
        parts, start = [], 0
        while found := _SAFE_CUT.search(text, start + PART):
            parts.append(text[start : found.end()])
            start = found.end()
        return [*parts, text[start:]]


def _library(content: str) -> Any:
    """The library's tokenizer, which gives a text the ids that it has, no fewer and no more."""
    inner: Any = tokenizers.Tokenizer.from_str(content)
    inner.no_truncation()
    inner.no_padding()
    return inner


def sentinels(number: int) -> list[str]:
    """Names of the special tokens that stand for removed spans, as T5's."""
    return [f"<extra_id_{n}>" for n in range(number)]


Kind = Literal["bytes", "metaspace", "plain"]


def _kind(spec: dict[str, Any]) -> Kind:
    """How tokens spell text: in the byte alphabet, with ▁ for spaces (and <0x0A> for bytes), or as it is."""
    parts = json.dumps([spec.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False)
    if '"type": "ByteLevel"' in parts:
        return "bytes"
    return "metaspace" if "▁" in parts else "plain"


def _content(token: Any) -> Any:
    """The text of a token that transformers wrote with its properties; anything else as it is."""
    return token["content"] if isinstance(token, dict) and "content" in token else token


def _split(spec: dict[str, Any]) -> str:
    """The pattern by which text is split, where bytes are merged within what it splits off and nothing is put before
    it; empty where that is not so."""
    first = spec.get("pre_tokenizer") or {}
    *splits, last = first.get("pretokenizers", [first])
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(splits) > 1:
        return ""
    if not splits:
        return GPT2_SPLIT if last.get("use_regex") else ""
    [split] = splits
    plain = split.get("type") == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    return str(split["pattern"].get("Regex", "")) if plain and not last.get("use_regex") else ""


def _splits_words(spec: dict[str, Any]) -> bool:
    """Whether a long text may be cut at a line: text is split by a pattern first, and nothing is put before it."""
    first = spec.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    splits = any(step.get("type") == "Split" for step in steps) or any(step.get("use_regex") for step in levels)
    return bool(levels) and splits and not any(step.get("add_prefix_space") for step in levels)
