"""`jingu tokenizer train | extend | inspect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from jingu.config.schema import RunConfig
from jingu.config.sections.data import DataSettings, SpanCorruptionSettings
from jingu.errors import JinguError
from jingu.runtime.checksums import parse_records
from jingu.runtime.files import create_folder_atomically, read_text
from jingu.text.build_record import read_record, write_record
from jingu.text.corpus import find_files, sample_texts
from jingu.text.corpus_file import CorpusFile
from jingu.text.identity import identify_tokenizer
from jingu.text.tokenizer import Tokenizer, sentinel_tokens
from jingu.text.tokenizer_extension import extend_tokenizer
from jingu.text.tokenizer_training import train_tokenizer

# File with the settings and the corpus of the training, so that the same command does not train again.
RECORD_NAME = "training.json"
# The key of the records of the corpus files in it.
_INPUTS_KEY = "inputs"
# The text of `jingu tokenizer inspect` if the user gives none.
SAMPLE_LINE = "    def grow(self, 年: int = 2026) -> str:  # 种子发芽了"


def train(config: RunConfig) -> None:
    """Train the tokenizer of the run on a sample of the corpus, and store it in `tokenizer.path`."""
    settings = config.tokenizer
    if settings.base is not None:
        what = "a tokenizer with a base is extended, not trained."
        raise JinguError(what, where="tokenizer.base", fix="Run `jingu tokenizer extend`, or remove the base.")
    _store_tokenizer(
        config, lambda texts: train_tokenizer(texts, settings.vocab_size, special_tokens(config), settings.type)
    )


def extend(config: RunConfig) -> None:
    """Add entries learned from a sample of the corpus to `tokenizer.base`, and store the result in `tokenizer.path`.

    Also print the bytes per token of each input, before and after.
    """
    if config.tokenizer.base is None:
        fix = "Set it to the folder of a tokenizer; `jingu tokenizer train` trains a new one."
        raise JinguError("there is nothing to extend.", where="tokenizer.base", fix=fix)
    base = Tokenizer.load(Path(config.tokenizer.base))
    _store_tokenizer(config, lambda texts: extend_tokenizer(base, texts, config.tokenizer.vocab_size))
    new_tokenizer = Tokenizer.load(Path(config.tokenizer.path))
    print(f"  The first {base.vocab_size:,} are those of {config.tokenizer.base}; bytes per token before and after:")
    for source in config.data.all_sources:
        for name in [source.input] if isinstance(source.input, str) else source.input:
            alone = config.data.for_source(source.model_copy(update={"input": name}))
            texts = [text for text, _ in sample_texts(find_files(alone), alone, 1 << 20)]
            before, after = (_bytes_per_token(tokenizer, texts)[0] for tokenizer in (base, new_tokenizer))
            print(f"  {before:.2f} → {after:.2f}  {name}")


def _store_tokenizer(config: RunConfig, make_tokenizer: Callable[[Iterator[str]], Tokenizer]) -> None:
    """Make a tokenizer from a sample of the corpus, and store it in `tokenizer.path`, unless it is there already.

    Args:
        make_tokenizer: returns the tokenizer, given the texts of the sample.

    Raises:
        JinguError: the folder contains a tokenizer with other settings or something else, or the corpus is empty.
    """
    path = Path(config.tokenizer.path)
    files = find_files(config.data)
    settings = config.tokenizer
    base = None if settings.base is None else Tokenizer.load(Path(settings.base))
    old = read_record(path, RECORD_NAME, "jingu tokenizer train")
    known_records = parse_records((old or {}).pop(_INPUTS_KEY, None))
    identity = identify_tokenizer(settings, special_tokens(config), base, config.data, files, known_records)
    if old is not None:
        fix = "Delete the folder to train it again (then data sets must be built again too), or set tokenizer.path"
        what = "the tokenizer here was trained"
        identity.refuse_changes(old, what, path, f"{fix} to another folder.")
        print(f"tokenizer: already trained in {path} ({Tokenizer.load(path).vocab_size:,} entries).")
        return
    sample = _with_bar(files, config.data, config.tokenizer.sample_bytes)
    first = next(filter(None, sample), None)
    if first is None:
        what = "the corpus is empty: its files contain no text."
        if config.data.invalid_utf8 == "skip":
            what = "the corpus is empty: its files contain no text, or none that is UTF-8."
        raise JinguError(what, where="data.input", fix="Name files that contain text.")
    tokenizer = make_tokenizer(chain([first], sample))
    with create_folder_atomically(path) as folder:
        tokenizer.save(folder)
        identity.check_inputs()
        records = [record.to_json() for record in identity.inputs]
        write_record(folder / RECORD_NAME, {**identity.settings, _INPUTS_KEY: records})
    print(f"tokenizer: {tokenizer.vocab_size:,} entries in {path}.")
    if tokenizer.vocab_size < config.tokenizer.vocab_size:
        print(f"  The sample has no more pairs to merge; tokenizer.vocab_size is {config.tokenizer.vocab_size:,}.")
    texts = [text for text, _ in sample_texts(files, config.data, 1 << 20)]
    print(f"  {_bytes_per_token(tokenizer, texts)[1]}")


def inspect(folder: Path, text: str | None = None, file: Path | None = None) -> None:
    """Print a tokenizer's size and special tokens, its bytes per token on a text, and the tokens of a line of it.

    Args:
        text: the text; None: `SAMPLE_LINE`.
        file: file with the text, which takes precedence over `text`.
    """
    tokenizer = Tokenizer.load(folder)
    if file is not None:
        text = read_text(file, errors="replace")
    sample = SAMPLE_LINE if text is None else text
    special = ", ".join(f"{token} = {id_}" for token, id_ in tokenizer.special_tokens.items())
    print(f"tokenizer: {tokenizer.vocab_size:,} entries in {folder}.")
    print(f"  special tokens: {special}; documents end with {tokenizer.eos_token_id}")
    print(f"  fingerprint: {tokenizer.fingerprint()}")
    print(f"  {_bytes_per_token(tokenizer, [sample])[1]}")
    line = next((line for line in sample.splitlines() if line.strip()), sample)[:400]
    print(f"  {line}\n  {split_line(tokenizer, line)}")


def split_line(tokenizer: Tokenizer, line: str) -> str:
    """Return the line with │ between its tokens, · for spaces and → for tabs.

    Several ids that together form a character are shown as one token, followed by their number in parentheses.
    """
    pieces: list[str] = []
    pending: list[int] = []
    for id_ in tokenizer.encode(line):
        pending.append(id_)
        piece = tokenizer.decode(pending)
        # An incomplete character is decoded as U+FFFD.
        if not piece.endswith("\ufffd"):
            pieces.append(piece if len(pending) == 1 else f"{piece}({len(pending)})")
            pending = []
    if pending:
        pieces.append(tokenizer.decode(pending))
    return "│".join(pieces).replace(" ", "·").replace("\t", "→")


def special_tokens(config: RunConfig) -> list[str]:
    """Return the special tokens in `tokenizer.special_tokens`, and the sentinels that span corruption needs."""
    objective = config.data.objective
    sentinels = sentinel_tokens(objective.num_sentinels) if isinstance(objective, SpanCorruptionSettings) else []
    return [*config.tokenizer.special_tokens, *sentinels]


def _with_bar(files: list[CorpusFile], settings: DataSettings, sample_bytes: int) -> Iterator[str]:
    """Yield the texts of the sample, and show a progress bar over the corpus."""
    total = sum(file.size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizer", disable=None) as bar:
        for text, bytes_read in sample_texts(files, settings, sample_bytes):
            yield text
            bar.update(bytes_read - bar.n)


def _bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> tuple[float, str]:
    """Return the bytes of text per token, and a line of text about them for the user."""
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    ratio = size / max(tokens, 1)
    return ratio, f"{ratio:.2f} bytes per token ({size:,} bytes, {tokens:,} tokens)"
