"""`jingu evaluate contamination`: find evaluation rows that occur in training data, and their effect on scores.

A table has the n-grams of all rows. One pass over the data, divided into units for parallel processes, marks the
n-grams that occur in it, and the rows that have a near copy. A row is dirty if one of its n-grams occurs. Finished
units are recorded, so that an interrupted pass can resume.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from jingu.config.sections.data import DataSettings
from jingu.data.dataset import UNKNOWN_TOKENIZER, TokenDataset, check_tokenizer, open_dataset
from jingu.data.dataset_manifest import MANIFEST_NAME
from jingu.data.permutation import Int64Array
from jingu.data.task_pool import map_tasks
from jingu.errors import JinguError, pluralize
from jingu.evaluate.evaluation import aggregate_records
from jingu.evaluate.near_copies import NearCopyTable
from jingu.evaluate.ngrams import DEFAULT_NGRAM, MIN_WORDS, NgramTable, chunk_words, hash_words, text_ngrams
from jingu.evaluate.prompts import PromptRenderer
from jingu.evaluate.result_files import read_json_lines, read_results
from jingu.evaluate.task_data import Row, collect_texts, fingerprint_of, load_data
from jingu.evaluate.task_file import TaskIndex, TaskSettings
from jingu.evaluate.task_metrics import format_result
from jingu.formatting import print_table
from jingu.runtime.checksums import record_file
from jingu.runtime.files import read_json, write_text_atomically
from jingu.runtime.gpus import num_usable_cores
from jingu.text.corpus import describe_records, find_files, plan_units, record_files
from jingu.text.document_reader import ReadCounts, Span, read_documents
from jingu.text.tokenizer import Tokenizer

PROGRESS_NAME = "progress.jsonl"
TABLE_NAMES = ("hashes.npy", "filter.npy")
NEAR_NAMES = tuple(f"near-{field.name}.npy" for field in fields(NearCopyTable))
SUMMARY_NAME = "contamination.json"
DIRTY_NAME = "dirty.jsonl"
# Approximate number of tokens of a unit, for data sets of token ids.
_UNIT_TOKENS = 1 << 20
_FIX = "Run `jingu evaluate contamination` again."


# Documents of a data set of token ids: (data set, tokenizer, index of the shard, start, end).
DatasetUnit = tuple[Path, Path, int, int, int]
Unit = DatasetUnit | tuple[Span, ...]
Tables = tuple[NgramTable, NearCopyTable]


def read_task_texts(task: TaskSettings) -> tuple[list[Row], list[list[str]]]:
    """Return the documents of a task's evaluation split, and the texts to search for.

    The texts are the task's decontamination query if it has one, or else all texts in the columns.
    """
    data = load_data(task, needs_shots=False)
    query = task.doc_to_decontamination_query
    if not query:
        return data.rows, [list(collect_texts(row)) for row in data.rows]
    renderer = PromptRenderer(task, data, 0)
    return data.rows, [[str(renderer.render("doc_to_decontamination_query", row, query))] for row in data.rows]


def contamination(
    tasks: Sequence[str],
    data: Sequence[str],
    tokenizer: Path | None = None,
    text_field: str = "text",
    ngram: int = DEFAULT_NGRAM,
    processes: int | None = None,
    output: Path = Path("contamination"),
    include: Sequence[str] | None = None,
) -> None:
    """Search data for the documents of tasks, print how many are dirty, and write them to a file.

    Args:
        tasks: names of tasks, groups or tags, or task files.
        data: files and folders of a corpus, or data sets of token ids.
        tokenizer: tokenizer of the data sets of token ids.
        text_field: field of the text in JSON Lines and tables.
        ngram: number of words of an n-gram.
        processes: number of processes; None: one for each core.
        output: folder for the progress and the results.
        include: folders with additional tasks.

    Raises:
        JinguError: a task or the data cannot be read, or no document is long enough to search for.
    """
    # 1. Read the tasks and plan the pass over the data.
    index = TaskIndex([Path(folder) for folder in include or ()])
    names = dict.fromkeys(name for task in tasks for name in index.load(task))
    rows_and_texts = {name: read_task_texts(index.tasks[name]) for name in names}
    text_rows = [row for _, texts in rows_and_texts.values() for row in texts]
    all_texts = [text for row in text_rows for text in row]
    settings = DataSettings(text_field=text_field, on_error="skip", invalid_utf8="replace")
    units, sources = plan_scan(data, settings, tokenizer)
    table = NgramTable.build(all_texts, ngram)
    if not len(table.hashes):
        what = f"no document of these tasks has a text of {min(ngram, MIN_WORDS)} words to search for."
        raise JinguError(what, fix="Set --ngram to less.")
    reader = None if tokenizer is None else Tokenizer.load(tokenizer).fingerprint()
    key = fingerprint_of([ngram, sources, len(units), all_texts, settings.model_dump(mode="json"), reader, "similar"])
    workers = max(1, min(processes or num_usable_cores(), len(units)))
    near_table = NearCopyTable.build(text_rows)
    matches, similar_rows = scan((table, near_table), units, settings, (output, key), workers)
    # 2. Look up every row again, among the n-grams that occur in the data.
    matching = NgramTable(table.hashes[matches], table.lengths)
    summary: dict[str, Any] = {"data": sources, "tasks": {}}
    lines: list[str] = []
    cells: list[list[str]] = []
    first_row = 0
    for name, (rows, texts) in rows_and_texts.items():
        records = [_describe_row(matching, row_texts, ngram) for row_texts in texts]
        dirty = [number for number, record in enumerate(records) if record["longest"]]
        for number in dirty:
            place = {"task": name, "index": number, "hash": fingerprint_of([number, rows[number]])}
            lines.append(json.dumps({**place, **records[number]}, ensure_ascii=False) + "\n")
        too_short = sum(record["words"] == 0 for record in records)
        similar = (similar_rows & set(range(first_row, first_row + len(rows)))) - {first_row + row for row in dirty}
        first_row += len(rows)
        counts = {"rows": len(rows), "dirty": len(dirty), "similar": len(similar), "too_short": too_short}
        summary["tasks"][name] = {"data": fingerprint_of(rows), "ngram": ngram, **counts}
        longest = max(record["longest"] for record in records)
        cells.append([name, *(f"{count:,}" for count in (*counts.values(), longest))])
    write_text_atomically(output / DIRTY_NAME, "".join(lines))
    write_text_atomically(output / SUMMARY_NAME, json.dumps(summary, ensure_ascii=False, indent=2) + "\n")
    # 3. Record in each data set that jingu built which tasks it was searched for.
    for source in sources:
        if "checksums" in source and Path(source["path"]).is_dir():
            searches = read_searches(Path(source["path"]))
            earlier_tasks = searches["tasks"] if searches["checksums"] == source["checksums"] else {}
            tasks_searched = {entry["data"]: {"task": name, **entry} for name, entry in summary["tasks"].items()}
            content = {"checksums": source["checksums"], "tasks": earlier_tasks | tasks_searched}
            write_text_atomically(Path(source["path"]) / SUMMARY_NAME, json.dumps(content, indent=2) + "\n")
    header = ("task", "rows", "dirty", "similar", "too short", "longest match (words)")
    print_table(header, cells, right=(1, 2, 3, 4, 5))
    print(f"\nwritten to {output}")


def read_searches(dataset: Path) -> dict[str, Any]:
    """Return the record of searches of a data set: its checksums at that time, and results by the hash of the tasks'
    rows."""
    file = dataset / SUMMARY_NAME
    content: dict[str, Any] = {"checksums": None, "tasks": {}}
    return read_json(file, _FIX) if file.is_file() else content


# The pass over the data


def plan_scan(
    data: Sequence[str], settings: DataSettings, tokenizer: Path | None
) -> tuple[list[Unit], list[dict[str, Any]]]:
    """Divide data into units, and describe the contents of each source.

    Raises:
        JinguError: there are no data, or the tokenizer of a data set is missing or a different one.
    """
    units: list[Unit] = []
    sources: list[dict[str, Any]] = []
    for name in data:
        path = Path(name).expanduser()
        # 1. Files of text.
        if not (path / MANIFEST_NAME).is_file() and not path.with_name(f"{path.name}.idx").is_file():
            files = find_files(settings.model_copy(update={"input": name}))
            units += plan_units(files)
            sources.append({"path": name, **describe_records(record_files(files))})
            continue
        if tokenizer is None:
            fix = "Give the tokenizer that it was built with: --tokenizer FOLDER."
            raise JinguError("this is a data set of token ids, which are searched as text.", where=path, fix=fix)
        # 2. Shards of token ids, cut between documents into units of about _UNIT_TOKENS.
        dataset, _ = _open_dataset(path, tokenizer)
        for shard, reader in enumerate(dataset.readers):
            ends = np.cumsum(reader.lengths, dtype=np.int64)
            cuts = np.searchsorted(ends, np.arange(_UNIT_TOKENS, int(ends[-1]), _UNIT_TOKENS)) + 1
            bounds = np.unique([0, *cuts, len(ends)]).tolist()
            units += [(path, tokenizer, shard, *pair) for pair in pairwise(bounds)]
        checksums = [shard.bin_xxh3 for shard in dataset.manifest.train.shards]
        if dataset.manifest.tokenizer == UNKNOWN_TOKENIZER:
            # Another tool wrote it, without checksums.
            checksums = [record_file(shard_reader.path.with_suffix(".bin")).xxh3 for shard_reader in dataset.readers]
        sources.append({"path": name, "checksums": checksums})
    return units, sources


@lru_cache(maxsize=2)
def _open_dataset(path: Path, folder: Path) -> tuple[TokenDataset, Tokenizer]:
    tokenizer = Tokenizer.load(folder)
    dataset = open_dataset(path, "train", eos_token_id=tokenizer.eos_token_id)
    check_tokenizer(dataset, tokenizer)
    return dataset, tokenizer


def scan(
    tables: Tables, units: Sequence[Unit], settings: DataSettings, progress: tuple[Path, str], workers: int
) -> tuple[Int64Array, set[int]]:
    """Return the indices of the table's n-grams that occur in the units, and the rows that have a near copy.

    Args:
        progress: folder of the progress file, and a key of the search. Units that a search with the same key has
            finished are not read again.
    """
    # 1. Read the results of finished units.
    folder, key = progress
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / PROGRESS_NAME
    records = _read_progress(file, key)
    if not records:
        file.write_text(json.dumps({"key": key}) + "\n", encoding="utf-8")
    matches = np.zeros(len(tables[0].hashes), np.bool_)
    similar: set[int] = set()
    num_skipped = 0
    for record in records.values():
        matches[record["matches"]] = True
        similar.update(record["similar"])
        num_skipped += record["skipped"]
    missing = [number for number in range(len(units)) if number not in records]
    if records:
        print(f"resuming after {len(records):,} of {pluralize(len(units), 'unit')} of work", file=sys.stderr)
    # 2. Scan the other units in parallel, and record each result at once.
    function = partial(_scan_unit, (lambda: tables) if workers == 1 else _store_tables(tables, folder), settings)
    results = map_tasks(function, [units[number] for number in missing], workers)
    bar = tqdm(missing, total=len(units), initial=len(records), desc="data", disable=None)
    with file.open("a", encoding="utf-8") as stream, closing(results):
        for number, (unit_matches, unit_similar, unit_skipped) in zip(bar, results, strict=True):
            matches[unit_matches] = True
            similar.update(unit_similar)
            num_skipped += unit_skipped
            record = {"unit": number, "matches": unit_matches, "similar": unit_similar, "skipped": unit_skipped}
            stream.write(json.dumps(record) + "\n")
            stream.flush()
    # 3. The search is complete: remove the progress and the shared table.
    file.unlink()
    for name in (*TABLE_NAMES, *NEAR_NAMES):
        (folder / name).unlink(missing_ok=True)
    if num_skipped:
        print(f"{pluralize(num_skipped, 'document')} could not be read, and were left out", file=sys.stderr)
    return np.flatnonzero(matches), similar


def _read_progress(file: Path, key: str) -> dict[int, dict[str, Any]]:
    """Return the records of finished units by index; none if the file belongs to a search with another key."""
    if not file.is_file():
        return {}
    # A killed process may have left an incomplete last line.
    content = file.read_text(encoding="utf-8")
    content = content[: content.rfind("\n") + 1]
    first, *lines = content.splitlines() or ["{}"]
    if json.loads(first).get("key") != key:
        return {}
    write_text_atomically(file, content)
    return {record["unit"]: record for record in map(json.loads, lines)}


def _store_tables(tables: Tables, folder: Path) -> Callable[[], Tables]:
    """Write tables to files, and return a function that opens them in other processes."""
    table, near_table = tables
    arrays = [table.hashes, table.filter, *(getattr(near_table, field.name) for field in fields(NearCopyTable))]
    for name, array in zip((*TABLE_NAMES, *NEAR_NAMES), arrays, strict=True):
        np.save(folder / name, array, allow_pickle=False)
    return partial(_open_tables, folder, table.lengths, time.time_ns())


@lru_cache(maxsize=1)
def _open_tables(folder: Path, lengths: tuple[int, ...], _written_ns: int) -> Tables:
    # Memory-mapped files are shared between processes; an empty file cannot be mapped.
    arrays = []
    for name in (*TABLE_NAMES, *NEAR_NAMES):
        array = np.load(folder / name)
        arrays.append(np.load(folder / name, mmap_mode="r").view(np.ndarray) if array.size else array)
    hashes, words, *near = arrays
    return NgramTable(hashes, lengths, words), NearCopyTable(*near)


def _scan_unit(
    open_tables: Callable[[], Tables], settings: DataSettings, unit: Unit
) -> tuple[list[int], list[int], int]:
    """Return the indices of the n-grams that occur in a unit, the rows that have a near copy, and the number of
    documents that could not be read."""
    counts = ReadCounts()
    if isinstance(unit[0], Path):
        path, tokenizer_path, shard, start, end = unit
        dataset, tokenizer = _open_dataset(path, tokenizer_path)
        texts = (tokenizer.decode(dataset.readers[shard][number].tolist()) for number in range(start, end))
    else:
        texts = (document.text for document in read_documents(unit, settings, counts))
    table, near_table = open_tables()
    matches = [np.zeros(0, np.int64)]
    similar: set[int] = set()
    for chunk, is_last in chunk_words(texts, max(*table.lengths, near_table.longest)):
        matches.append(table.match_chunk(chunk, is_last=is_last))
        similar |= near_table.match_chunk(chunk)
    num_skipped = len(counts.skipped) + counts.invalid
    return np.unique(np.concatenate(matches)).tolist(), sorted(similar), num_skipped


# Results


def _describe_row(matching: NgramTable, texts: Sequence[str], n: int) -> dict[str, Any]:
    """Return the number of words that were searched for, and the longest match and its length: 0 for a clean row.

    A match is a part of a text all of whose n-grams occur in the data.
    """
    num_words = 0
    longest = 0
    match = ""
    for text in texts:
        words = hash_words(text)
        hashes, length = text_ngrams(words, n)
        num_words += len(words) if length else 0
        # Find the runs of n-grams that occur: they begin and end where `occurs` changes.
        occurs = np.zeros(len(hashes) + 2, np.int8)
        occurs[matching.find(hashes)[0] + 1] = 1
        changes = np.diff(occurs)
        starts = np.flatnonzero(changes == 1)
        sizes = np.flatnonzero(changes == -1) - starts + length - 1
        if len(sizes) and sizes.max() > longest:
            first = int(starts[sizes.argmax()])
            longest = int(sizes.max())
            positions = [*words.starts.tolist(), len(words.text)]
            match = words.text[positions[first] : positions[first + longest]].strip()
    return {"words": num_words, "longest": longest, "match": match}


def compare_clean(results: Path, contamination: Path) -> None:
    """Print the scores of an evaluation on all, clean and dirty documents.

    Args:
        results: the folder of an evaluation.
        contamination: the folder of a search for its tasks.

    Raises:
        JinguError: a folder lacks a file or has a damaged one, or they have no tasks in common.
    """
    tasks = read_json(contamination / SUMMARY_NAME, _FIX)["tasks"]
    dirty = {record["hash"] for record in read_json_lines(contamination / DIRTY_NAME, _FIX)}
    rows = []
    for task, (result, records) in read_results(results).items():
        parts = {
            "all": records,
            "clean": [record for record in records if record["hash"] not in dirty],
            "dirty": [record for record in records if record["hash"] in dirty],
        }
        metric_list = result["settings"].get("metric_list", [])
        columns = {part: aggregate_records(members, metric_list) for part, members in parts.items()}
        for key in result["results"] if task in tasks else ():
            for part, members in parts.items():
                cells = format_result(columns[part][key]) if key in columns[part] else ["", "", ""]
                precision = result.get("model", {}).get("precision", "")
                rows.append([task, key.removesuffix(",none"), part, f"{len(members):,}", *cells, precision])
    if not rows:
        fix = "Search for the tasks that were evaluated."
        raise JinguError("the two folders have no tasks in common.", where=f"{results}, {contamination}", fix=fix)
    header = ("task", "metric", "part", "documents", "value", "stderr", "95% interval", "precision")
    print_table(header, rows, right=(3, 4, 5))
