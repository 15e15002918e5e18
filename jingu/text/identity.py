"""The identity of what jingu prepares from a corpus: all that can change a byte of it (`identity.toml`).

It is stored beside the result, and every command that would use the result compares it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from jingu.config.sections.data import DataSettings, RowSettings, TokenizerSettings
from jingu.errors import JinguError
from jingu.runtime.checksums import ContentRecord, Records, parse_records, record_file
from jingu.runtime.files import write_text_atomically
from jingu.tables import read_table
from jingu.text.build_record import refuse_changes
from jingu.text.corpus import describe_listing, describe_records, record_files
from jingu.text.corpus_file import CorpusFile, is_url
from jingu.text.tokenizer import Tokenizer

Product = Literal["documents", "rows", "tokenizer"]

TABLE = read_table(__file__, "identity.toml")
# The files of the corpus, with their checksums.
INPUTS_NAME = "inputs.json"
# Raise it when rows are read, rendered or weighted in another way: data sets of rows are then prepared anew.
ROWS_VERSION = 2
# Settings of the objective that do not change the content of a data set.
BATCHING_SETTINGS = {"packing"}


@dataclass(frozen=True)
class Identity:
    """All that went into a result.

    Attributes:
        settings: settings, and hashes of contents, by the names in `identity.toml` without their section.
        inputs: records of the files of the corpus.
        is_partial: whether other settings are unknown.
    """

    settings: dict[str, Any]
    inputs: tuple[ContentRecord, ...] = ()
    is_partial: bool = False

    def save_inputs(self, folder: Path) -> None:
        """Write the records of the files into a folder, so that unchanged files need not be read again."""
        records = [record.to_json() for record in self.inputs]
        write_text_atomically(folder / INPUTS_NAME, json.dumps(records) + "\n")

    def check_inputs(self) -> None:
        """Raise JinguError if a local file has changed since its content was recorded."""
        known_records = {record.path: record for record in self.inputs}
        for record in self.inputs:
            if not is_url(record.path) and record_file(record.path, known_records).xxh3 != record.xxh3:
                what = "the file changed while the corpus was read."
                raise JinguError(what, where=record.path, fix="Run the command again.")

    def only(self, names: set[str]) -> Identity:
        """Return the identity with only some of its settings, which are compared."""
        return Identity({key: value for key, value in self.settings.items() if key in names}, is_partial=True)

    def unknown(self, stored: Mapping[str, Any]) -> set[str]:
        """Return the stored settings that are unknown here."""
        return set(stored.keys() - self.settings.keys()) if self.is_partial else {"corpus"} - self.settings.keys()

    def refuse_changes(self, stored: Mapping[str, Any], what: str, where: Path, fix: str) -> None:
        """Raise JinguError if the stored settings are not these.

        Args:
            what: beginning of the message, before "with other settings".
        """
        ignored_keys = self.unknown(stored)
        # What contents show need not be compared; if there are none, the settings are.
        for key, content in TABLE["shown"].items():
            if content in self.settings and name_of(key) != content:
                ignored_keys.add(name_of(key))
        new = self.settings
        if "listing" in (stored.get("corpus") or {}):
            # Older versions recorded of a corpus only names and sizes, and fewer settings.
            new = {**new, "corpus": describe_listing(self.inputs)}
            ignored_keys |= new.keys() - stored.keys() - {"version", "mixture"} | {"base"}
        stored, new = ({**each, "input": as_list(each.get("input"))} for each in (stored, new))
        old, new = ({key: value for key, value in each.items() if key not in ignored_keys} for each in (stored, new))
        refuse_changes(old, new, what, where, fix)


def as_list(value: Any) -> list[Any]:
    """Return a list, or the list of one other value."""
    return value if isinstance(value, list) else [value]


def name_of(key: str) -> str:
    """Return the name of a setting in a stored identity."""
    return key.partition(".")[2]


def settings_for(product: Product, section: str) -> set[str]:
    """Return the names of the settings of a section that a product depends on, directly or by their contents."""
    keys = {key for key, products in TABLE["settings"].items() if product in products} | TABLE["shown"].keys()
    return {name_of(key) for key in keys if key.startswith(f"{section}.")}


def identify_documents(
    data: DataSettings, tokenizer: Tokenizer, files: list[CorpusFile] | None, known: Records, mixture: object = None
) -> Identity:
    """Return the identity of a data set of documents.

    Args:
        files: the files of the corpus; None if they cannot be read here.
        known: records of files that need not be read while they are unchanged.
        mixture: provenance of the mixture of tasks that the texts come from; None if there is none.
    """
    settings = data.model_dump(mode="json", include=settings_for("documents", "data") - {"add_bos_token"})
    settings["tokenizer"] = tokenizer.fingerprint()
    inputs: tuple[ContentRecord, ...] = ()
    if files is not None:
        inputs = tuple(record_files(files, known))
        settings["corpus"] = describe_records(inputs)
    if mixture is not None:
        settings["mixture"] = mixture
    if data.add_bos_token and tokenizer.prompt_prefix_ids:
        settings["bos_ids"] = tokenizer.prompt_prefix_ids
    return Identity(settings, inputs)


def identify_rows(
    data: DataSettings,
    tokenizer: Tokenizer,
    files: list[CorpusFile] | None,
    known: Records,
    template: tuple[str, ...],
    sequence_length: int,
    mixture: object = None,
) -> Identity:
    """Return the identity of a data set of rows.

    Args:
        files, known, mixture: as for `identify_documents`.
        template: the texts of the chat template.
    """
    assert isinstance(data.objective, RowSettings)
    identity = identify_documents(data, tokenizer, files, known, mixture)
    settings = {key: value for key, value in identity.settings.items() if key != "bos_ids"}
    settings |= {
        "objective": content_settings(data.objective),
        "sequence_length": sequence_length,
        "template_text": hash_value(template),
        "special_names": hash_value(tokenizer.special_names),
        "version": ROWS_VERSION,
    }
    return Identity(settings, identity.inputs)


def identify_tokenizer(
    settings: TokenizerSettings,
    special_tokens: list[str],
    base: Tokenizer | None,
    data: DataSettings,
    files: list[CorpusFile],
    known: Records,
) -> Identity:
    """Return the identity of a trained or extended tokenizer.

    Args:
        special_tokens: the special tokens of the settings, and those that the objective adds.
        base: the tokenizer that is extended; None if a new one is trained.
        known: as for `identify_documents`.
    """
    inputs = tuple(record_files(files, known))
    values = settings.model_dump(mode="json", include=settings_for("tokenizer", "tokenizer") - {"path"})
    values |= data.model_dump(mode="json", include=settings_for("tokenizer", "data") - {"add_bos_token"})
    values |= {
        "special_tokens": special_tokens,
        "base": None if base is None else base.identity(),
        "corpus": describe_records(inputs),
    }
    return Identity(values, inputs)


def content_settings(objective: RowSettings) -> dict[str, Any]:
    """Return the settings of the objective that change the content of a data set."""
    settings = objective.model_dump(mode="json", exclude=BATCHING_SETTINGS)
    # Data sets of older versions do not have these keys.
    for key in ("columns", "turns", "train_empty_reasoning"):
        if key in settings and settings[key] == type(objective).model_fields[key].default:
            del settings[key]
    return settings


def hash_value(value: object) -> str:
    """Return a hash of a JSON value, in hex."""
    content = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(content.encode("utf-8", "surrogatepass"))


def load_inputs(*folders: Path) -> dict[str, ContentRecord]:
    """Return the records of files that `Identity.save_inputs` wrote into folders; those that cannot be read are left
    out, and their files are read again."""
    records: dict[str, ContentRecord] = {}
    for folder in folders:
        try:
            records |= parse_records(json.loads((folder / INPUTS_NAME).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return records
