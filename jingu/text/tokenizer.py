"""The tokenizer: text to ids and back, stored so that jingu and transformers read the same folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jingu.errors import JinguError

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where merges stop: words take the one character before them, digits go by threes, indentation is one run.

It is the pattern of Llama 3, which readers of other formats know by name.
"""
PART = 1 << 20
"""Texts longer than this many characters are encoded in parts, to bound memory."""
_SAFE_CUT = re.compile(r"\n(?=\w)")
"""No piece of a splitting pattern reaches over a newline into a word."""
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_LETTERS = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))
}
"""The byte alphabet of GPT-2: letters that stand for bytes; those that cannot be seen are moved beyond 255."""


class Tokenizer:
    """A fast tokenizer (the `tokenizers` library) with the few things that jingu needs of it."""

    def __init__(self, content: str, config: dict[str, Any]) -> None:
        """`content` is the text of tokenizer.json, `config` the object in tokenizer_config.json.

        Raises ValueError, or the library's own exceptions, for content that is not a tokenizer's.
        """
        self._content = content
        self._config = config
        self._spec: dict[str, Any] = json.loads(content)
        self._inner: Any = tokenizers.Tokenizer.from_str(content)
        self._inner.no_truncation()
        self._inner.no_padding()
        # Text is data: "<|endoftext|>" written in a document must not end it.
        self._inner.encode_special_tokens = True
        added = self._spec.get("added_tokens") or []
        self._special = {token["content"]: token["id"] for token in added if token.get("special")}
        self._end_id = self._find_end()
        self.kind = _kind(self._spec)
        self._cuts = _splits_words(self._spec)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, and what there is beside it, in `folder`; JinguError where that cannot be."""
        fix = "Run `jingu tokenizer train`, or set tokenizer.path to a folder that holds a tokenizer."
        if not folder.is_dir():
            raise JinguError("there is no tokenizer folder here.", where=folder, fix=fix)
        if not (folder / "tokenizer.json").is_file():
            raise JinguError("the tokenizer's folder has no tokenizer.json.", where=folder, fix=fix)
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        try:
            content = (folder / "tokenizer.json").read_text(encoding="utf-8")
            # Older releases of transformers kept special tokens in the first of these.
            for name in ("special_tokens_map.json", "tokenizer_config.json"):
                if (folder / name).is_file():
                    found = json.loads((folder / name).read_text(encoding="utf-8"))
                    if not isinstance(found, dict):
                        raise ValueError(f"{name} is not a JSON object")
                    older = name != "tokenizer_config.json"
                    found = {key: _content(value) if older else value for key, value in found.items()}
                    config |= {key: value for key, value in found.items() if value is not None}
            return cls(content, config)
        except Exception as error:  # the library raises bare Exception for bad content
            raise JinguError(f"the tokenizer is damaged ({error}).", where=folder, fix=fix) from error

    def save(self, folder: Path) -> None:
        """Write the two files into `folder`, as they were read; transformers' AutoTokenizer loads them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._content, encoding="utf-8")
        config = json.dumps(self._config, ensure_ascii=False, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """Ids of the text: no special token is added, and none is recognised in it."""
        ids: list[int] = []
        for part in self._parts(text):
            # A batch of one: the call that does not track offsets exists for batches only.
            ids += self._inner.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; special tokens are left out."""
        text: str = self._inner.decode(ids, skip_special_tokens=True)
        return text

    @property
    def vocabulary(self) -> int:
        """Number of ids: the largest and one."""
        return int(max(self._inner.get_vocab(with_added_tokens=True).values())) + 1

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens and their ids, by id."""
        return dict(sorted(self._special.items(), key=lambda item: item[1]))

    @property
    def end_id(self) -> int:
        """The token that ends every document: `eos_token` of the configuration, else one with a usual name, else the
        first special token."""
        return self._end_id

    @property
    def start_id(self) -> int:
        """The token before the first of a decoder with an encoder: `pad_token` of the configuration (as T5 has it),
        or else the end token."""
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return vocabulary.get(_content(self._config.get("pad_token")), self._end_id)

    def _find_end(self) -> int:
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        for name in (_content(self._config.get("eos_token")), *_ENDS):
            if name in vocabulary:
                return vocabulary[name]
        if not self._special:
            raise ValueError("it has no special token to end documents with")
        return int(min(self._special.values()))

    def byte_lengths(self) -> npt.NDArray[np.int32]:
        """[vocabulary] bytes of UTF-8 that each id stands for; 0 for special tokens.

        Exact for byte-level BPE; sentencepiece-like ones count the space that they put before a text.
        """
        lengths = np.zeros(self.vocabulary, dtype=np.int32)
        for token, id_ in self._inner.get_vocab(with_added_tokens=False).items():
            lengths[id_] = _byte_length(token, self.kind)
        for added in self._spec.get("added_tokens", []):
            lengths[added["id"]] = 0 if added.get("special") else len(added["content"].encode())
        return lengths

    def pieces(self) -> dict[str, int]:
        """Every entry as the vocabulary spells it, and its id."""
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return vocabulary

    def parts_of(self, piece: str) -> list[int]:
        """Ids of the entries that an unknown one, spelled as the vocabulary would, is made of."""
        unknown = self._spec["model"].get("unk_token")
        return [token.id for token in self._inner.model.tokenize(piece) if token.value != unknown]

    def text_of(self, piece: str) -> str:
        """The text that an entry stands for, as far as it is whole characters."""
        if self.kind == "bytes":
            return bytes(_LETTERS[letter] for letter in piece).decode("utf-8", "ignore")
        if self.kind == "metaspace":
            return "" if _BYTE.fullmatch(piece) else piece.replace("▁", " ")
        return piece.removeprefix("##")

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


def train_tokenizer(texts: Iterator[str], vocabulary: int, special_tokens: list[str]) -> Tokenizer:
    """Train a byte-level BPE of at most `vocabulary` entries; the special tokens get the first ids.

    The same texts give the same tokenizer. Fewer entries come out where the texts have no more to merge.
    """
    if not special_tokens or len(set(special_tokens)) != len(special_tokens) or "" in special_tokens:
        raise JinguError(
            "there must be at least one, each once and none of them empty.",
            where="tokenizer.special_tokens",
            fix='The first one ends every document; "<|endoftext|>" is the usual name.',
        )
    least = 256 + len(special_tokens)
    if vocabulary < least:
        raise JinguError(
            f"{vocabulary} is too small: 256 bytes and {len(special_tokens)} special tokens need {least}.",
            where="tokenizer.vocabulary",
        )
    inner: Any = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special_tokens[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    return Tokenizer(inner.to_str(pretty=True), config)


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


def _splits_words(spec: dict[str, Any]) -> bool:
    """Whether a long text may be cut at a line: text is split by a pattern first, and nothing is put before it."""
    first = spec.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    splits = any(step.get("type") == "Split" for step in steps) or any(step.get("use_regex") for step in levels)
    return bool(levels) and splits and not any(step.get("add_prefix_space") for step in levels)


def _byte_length(token: str, kind: Kind) -> int:
    """Bytes of UTF-8 that one entry of the vocabulary stands for."""
    if kind == "bytes":
        return len(token)  # a letter a byte
    if kind == "metaspace":
        return 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())
    return len(token.removeprefix("##").encode())
