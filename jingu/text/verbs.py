"""`jingu tokenizer train | extend | inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, SpanCorruptionSettings
from jingu.errors import JinguError
from jingu.runtime.files import new_folder, unreadable
from jingu.text.corpus import describe_files, find_files, sample_texts
from jingu.text.extend import extend_tokenizer
from jingu.text.record import read_record, refuse_changes, write_record
from jingu.text.storage import CorpusFile
from jingu.text.tokenizer import Tokenizer, sentinels
from jingu.text.training import train_tokenizer

RECORD = "training.json"
"""Beside the tokenizer's two files: what it was trained on, so that the same command need not train again."""
LINE = "    def grow(self, 年: int = 2026) -> str:  # 种子发芽了"
"""Shown split when the user gives no text of their own."""


def train(config: RunConfig) -> None:
    """Train the tokenizer of the run on a sample of the corpus, and put it in `tokenizer.path`."""
    settings = config.tokenizer
    if settings.base is not None:
        raise JinguError(
            "a tokenizer with a base is not trained anew.",
            where="tokenizer.base",
            fix="Use `jingu tokenizer extend`, or leave it out.",
        )
    _make(config, lambda texts: train_tokenizer(texts, settings.vocabulary, special_tokens(config), settings.type))


def extend(config: RunConfig) -> None:
    """Add entries learned from a sample of the corpus to `tokenizer.base`, put the tokenizer in `tokenizer.path`, and
    tell what it gains on each input."""
    if config.tokenizer.base is None:
        raise JinguError(
            "there is nothing to extend.",
            where="tokenizer.base",
            fix="Set it to the folder of a tokenizer; a new one is made by `jingu tokenizer train`.",
        )
    base = Tokenizer.load(Path(config.tokenizer.base))
    _make(config, lambda texts: extend_tokenizer(base, texts, config.tokenizer.vocabulary))
    extended = Tokenizer.load(Path(config.tokenizer.path))
    print(f"  Of them {base.vocabulary:,} are those of {config.tokenizer.base}; bytes per token before and after:")
    for source in config.data.corpora:
        for name in [source.input] if isinstance(source.input, str) else source.input:
            alone = config.data.of(source.model_copy(update={"input": name}))
            texts = [text for text, _ in sample_texts(find_files(alone), alone, 1 << 20)]
            before, after = (_bytes_per_token(tokenizer, texts)[0] for tokenizer in (base, extended))
            print(f"  {before:.2f} → {after:.2f}  {name}")


def _make(config: RunConfig, made: Callable[[Iterator[str]], Tokenizer]) -> None:
    """Put the tokenizer that `made` makes of a sample into `tokenizer.path`, unless it is there already."""
    path = Path(config.tokenizer.path)
    files = find_files(config.data)
    record = _settings(config, files)
    old = read_record(path, RECORD, "jingu tokenizer train")
    if old is not None:
        fix = "Delete the folder to train anew (data sets built with it must be built anew too), or set tokenizer.path"
        refuse_changes(old, record, "the tokenizer here was trained", path, f"{fix} to another folder.")
        print(f"tokenizer: already trained in {path} ({Tokenizer.load(path).vocabulary:,} entries).")
        return
    sample = _with_bar(files, config.data, config.tokenizer.sample_bytes)
    first = next(filter(None, sample), None)
    if first is None:
        what = "the corpus is empty: its files hold no text" + (
            ", or none that is UTF-8." if config.data.invalid_utf8 == "skip" else "."
        )
        raise JinguError(what, where="data.input", fix="Name files with text in them.")
    tokenizer = made(chain([first], sample))
    with new_folder(path) as folder:
        tokenizer.save(folder)
        write_record(folder / RECORD, record)
    print(f"tokenizer: {tokenizer.vocabulary:,} entries in {path}.")
    if tokenizer.vocabulary < config.tokenizer.vocabulary:
        print(f"  The sample has no more to merge; {config.tokenizer.vocabulary:,} were asked for.")
    texts = [text for text, _ in sample_texts(files, config.data, 1 << 20)]
    print(f"  {_bytes_per_token(tokenizer, texts)[1]}")


def inspect(folder: Path, text: str | None = None, file: Path | None = None) -> None:
    """Show a tokenizer: its size and special tokens, bytes per token on a text or file, and how a line splits."""
    tokenizer = Tokenizer.load(folder)
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise unreadable(file, error) from error
    sample = LINE if text is None else text
    special = ", ".join(f"{token} = {id_}" for token, id_ in tokenizer.special_tokens.items())
    print(f"tokenizer: {tokenizer.vocabulary:,} entries in {folder}.")
    print(f"  special tokens: {special}; documents end with {tokenizer.end_id}")
    print(f"  fingerprint: {tokenizer.fingerprint()}")
    print(f"  {_bytes_per_token(tokenizer, [sample])[1]}")
    line = next((line for line in sample.splitlines() if line.strip()), sample)[:400]
    print(f"  {line}\n  {split_line(tokenizer, line)}")


def split_line(tokenizer: Tokenizer, line: str) -> str:
    """The line with │ between its tokens and · for spaces; ids that share one character stay together."""
    pieces: list[str] = []
    waiting: list[int] = []
    for id_ in tokenizer.encode(line):
        waiting.append(id_)
        piece = tokenizer.decode(waiting)
        if not piece.endswith("\ufffd"):
            pieces.append(piece + (f"({len(waiting)})" if len(waiting) > 1 else ""))
            waiting = []
    if waiting:
        pieces.append(tokenizer.decode(waiting))
    return "│".join(pieces).replace(" ", "·").replace("\t", "→")


def special_tokens(config: RunConfig) -> list[str]:
    """Those of the settings, and the sentinels that the objective needs."""
    objective = config.data.objective
    added = sentinels(objective.sentinels) if isinstance(objective, SpanCorruptionSettings) else []
    return [*config.tokenizer.special_tokens, *added]


def _settings(config: RunConfig, files: list[CorpusFile]) -> dict[str, Any]:
    """All that the trained tokenizer depends on."""
    tokenizer = config.tokenizer
    return {
        "type": tokenizer.type,
        "base": None if tokenizer.base is None else Tokenizer.load(Path(tokenizer.base)).fingerprint(),
        "vocabulary": tokenizer.vocabulary,
        "special_tokens": special_tokens(config),
        "sample_bytes": tokenizer.sample_bytes,
        "text_field": config.data.text_field,
        "invalid_utf8": config.data.invalid_utf8,
        "corpus": describe_files(files),
    }


def _with_bar(files: list[CorpusFile], settings: DataSettings, sample_bytes: int) -> Iterator[str]:
    """The sampled texts, with a progress bar over the corpus."""
    total = sum(file.size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizer", disable=None) as bar:
        for text, seen in sample_texts(files, settings, sample_bytes):
            yield text
            bar.update(seen - bar.n)


def _bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> tuple[float, str]:
    """Bytes of text that a token stands for, and that in words."""
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    found = size / max(tokens, 1)
    return found, f"{found:.2f} bytes per token ({size:,} bytes, {tokens:,} tokens)"
