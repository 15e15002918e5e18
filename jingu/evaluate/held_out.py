"""Held-out tasks: what a mixture must not contain, and whether the record of a model proves that it did not.

Two tasks are related if they are in the same or in related task clusters, or share a source, a row (all of its words,
a text of 8 words, or 13 consecutive words), or a template (up to one word). A mixture must not contain a task that is
related to a held-out task, directly or through other tasks. Rows that only resemble rows of the mixture do not relate
tasks, but there is no proof for them, nor for rows that are too short to compare. The result of this check is written
into the record of the data set, and from there into that of every model trained on it (`jingu.formats.provenance`).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jingu.errors import JinguError, pluralize
from jingu.evaluate.contamination import read_searches
from jingu.evaluate.near_copies import NearCopyTable
from jingu.evaluate.ngrams import DEFAULT_NGRAM, MIN_WORDS, Uint64Array, hash_words
from jingu.evaluate.task_data import Row, collect_texts, fingerprint_of, load_data, read_training_rows
from jingu.evaluate.task_file import TaskIndex, TaskSettings
from jingu.formats.provenance import Record

# Shorter rows may be equal by chance, and many tasks have the same shorter templates.
MIN_ROW_WORDS = 5
MIN_TEMPLATE_WORDS = 5
_SLOT = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)


@dataclass(frozen=True)
class TaskProfile:
    """The properties of a task that decide whether it is related to another one.

    Attributes:
        templates: the words of its templates, without their slots.
        rows: the training rows; for a held-out task, also the evaluated rows.
        data: hash of the evaluated or trained rows in their order; empty without rows.
        num_evaluated: number of the first rows that `data` is of.
    """

    task: str
    cluster: str | None
    related: frozenset[str]
    sources: frozenset[str]
    templates: tuple[tuple[str, ...], ...]
    rows: Sequence[Row]
    data: str
    num_evaluated: int

    @cached_property
    def texts(self) -> list[list[str]]:
        """All texts of each row: in its columns, and in nested lists and objects."""
        return [list(collect_texts(row)) for row in self.rows]

    @cached_property
    def hashes(self) -> Uint64Array:
        """Sorted hashes of its rows, of their longer texts, and of their n-grams."""
        parts = [np.zeros(0, np.uint64)]
        whole_texts = Counter[int]()
        for texts in self.texts:
            words = hash_words("\n".join(texts))
            parts.append(words.ngrams(DEFAULT_NGRAM))
            if len(words) >= MIN_ROW_WORDS:
                # The sum over words does not depend on the order of the columns.
                parts.append(words.ngrams(1).sum(keepdims=True))
            text_hashes = (hash_words(text) for text in texts)
            whole_texts.update({int(each.ngrams(1).sum()) for each in text_hashes if len(each) >= MIN_WORDS})
        # A text that many rows have is an instruction or a usual choice.
        most = max(2, len(self.rows) // 50)
        rare = [value for value, count in whole_texts.items() if count <= most]
        return np.unique(np.concatenate([*parts, np.array(rare, np.uint64)]))

    @cached_property
    def near_copies(self) -> NearCopyTable:
        """The texts of the evaluated rows, to find near copies of them."""
        return NearCopyTable.build(self.texts[: self.num_evaluated])


def profile_task(task: TaskSettings, rows: Sequence[Row], more_rows: Sequence[Row] = ()) -> TaskProfile:
    """Return the profile of a task.

    Args:
        rows: rows for the hash and the comparison with other tasks.
        more_rows: further rows for the comparison only.
    """
    metadata = task.metadata
    variants = [task.model_dump(include={"doc_to_text", "description"}), *metadata.get("templates", {}).values()]
    templates = [
        tuple(re.findall(r"\w+", _SLOT.sub(" ", text).casefold()))
        for variant in variants
        for text in (variant.get("doc_to_text"), variant.get("description"))
        if isinstance(text, str)
    ]
    return TaskProfile(
        task.task,
        metadata.get("task_cluster"),
        frozenset(metadata.get("related_clusters", ())),
        frozenset(metadata.get("sources", ())),
        tuple(dict.fromkeys(words for words in templates if len(words) >= MIN_TEMPLATE_WORDS)),
        [*rows, *more_rows],
        fingerprint_of(rows) if rows else "",
        len(rows),
    )


def describe_overlap(first: TaskProfile, second: TaskProfile) -> str:
    """Describe what two tasks share; empty if they share nothing."""
    if first.task.partition("@")[0] == second.task.partition("@")[0]:
        return "they are the same task"
    if first.cluster is not None and first.cluster == second.cluster:
        return f"both are in the task cluster {first.cluster}"
    if first.cluster in second.related or second.cluster in first.related:
        return f"the task clusters {first.cluster} and {second.cluster} are related"
    if sources := first.sources & second.sources:
        return f"both come from {', '.join(sorted(sources))}"
    if count := len(np.intersect1d(first.hashes, second.hashes, assume_unique=True)):
        return f"they share rows, or {DEFAULT_NGRAM} words of rows, {count:,} in all"
    for one in first.templates:
        for other_template in second.templates:
            if _differ_by_one_word(one, other_template):
                return f"both have the template “{' '.join(one)}”, up to one word"
    return ""


def _differ_by_one_word(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether two texts differ by at most one added, removed or replaced word."""
    start = 0
    while start < min(len(first), len(second)) and first[start] == second[start]:
        start += 1
    tails = (first[start:], second[start:])
    if tails[0] == tails[1]:
        return True
    return tails[0][1:] in tails or tails[1][1:] == tails[0] or tails[0][1:] == tails[1][1:]


def check_held_out(
    training: Sequence[TaskProfile], index: TaskIndex, names: Sequence[str], where: Path
) -> list[dict[str, Any]]:
    """Return the record of the tasks that a mixture holds out.

    Args:
        names: names of tasks, groups, tags or task clusters to hold out.

    Raises:
        JinguError: the mixture contains tasks that are related to one of them.
    """
    held_out = [profile_task(*item) for name in names for item in _read_held_out(index, name)]
    # Compute the closure: a training task that is related to a held-out one also leaks what it is related to itself.
    remaining = list(training)
    leaks = []
    closure = list(held_out)
    for member in closure:  # which grows
        for profile in list(remaining):
            if reason := describe_overlap(member, profile):
                leaks.append(f"{profile.task} with {member.task} ({reason})")
                remaining.remove(profile)
                closure.append(profile)
    if leaks:
        what = f"the mixture contains tasks that are related to held-out ones: {'; '.join(leaks)}."
        raise JinguError(what, where=where, fix="Remove these tasks from the mixture, or from held_out.")
    return [_compare_rows(item, training) for item in held_out if item.data]


def _compare_rows(item: TaskProfile, training: Sequence[TaskProfile]) -> dict[str, Any]:
    """Return the record of a held-out task, with the number of its rows for which there is no proof: those that
    resemble rows of the mixture, and those that are too short to compare."""
    table = item.near_copies
    similar: set[int] = set()
    for profile in training:
        rows = table.find(text for texts in profile.texts for text in texts)
        if rows:
            count = pluralize(len(rows), "row")
            example = " ".join(item.texts[min(rows)])[:80]
            print(f"near copies in {profile.task}: {count} of {item.task}, such as “{example}”", file=sys.stderr)
        similar |= rows
    too_short = item.num_evaluated - len(table.searched_rows)
    templates = [*map(list, item.templates)]
    counts = {"similar": len(similar), "too_short": too_short}
    return {"task": item.task, "data": item.data, "templates": templates, **counts}


def _read_held_out(index: TaskIndex, name: str) -> Iterator[tuple[TaskSettings, list[Row], list[Row]]]:
    """Yield tasks with their documents and their training rows, by the name of a task, group, tag or task cluster."""
    members = [] if name in index.files else index.task_clusters.get(name, [])
    for task in (task for member in members or [name] for task in index.load(member)):
        settings = index.tasks[task]
        try:
            rows = load_data(settings, needs_shots=False).rows
        except JinguError:
            if not members:
                raise
            # A member of a cluster whose data is not available is compared only by cluster, sources and templates.
            yield settings, [], []
        else:
            yield settings, rows, _read_training_rows(settings)


def _read_training_rows(task: TaskSettings) -> list[Row]:
    """Return the training rows of a task; none if they cannot be read."""
    try:
        return read_training_rows(task)
    except JinguError:
        return []


def training_tasks(record: Record | None) -> set[str]:
    """Return the names of the tasks in the mixtures of a record, without template names and without ancestors."""
    mixtures = [data["mixture"] for data in (record or {"data": []})["data"] if data["mixture"] is not None]
    return {task["task"].partition("@")[0] for mixture in mixtures for task in mixture["tasks"]}


def describe_evidence(record: Record | None, task: TaskSettings, rows: Sequence[Row]) -> str:
    """Return "held out" if the records of a model and of all its ancestors prove it, and otherwise why not.

    Args:
        record: of the model, by `jingu.formats.provenance`.
        rows: documents of the task that are evaluated.
    """
    profile = profile_task(task, rows)
    name = "the model"
    while record is not None:
        for data in record["data"]:
            check = _check_text if data["mixture"] is None else _check_mixture
            if problem := check(data, profile):
                return problem.format(model=name)
        if record["initial"] is None:
            return "held out"
        name = record["initial"]["model"]
        record = record["initial"]["record"]
    return f"not proved: there is no record of what {name} was trained on"


def _check_mixture(data: Record, profile: TaskProfile) -> str:
    """Return why a mixture does not prove that a task is held out; empty if it does."""
    mixture = data["mixture"]
    task_name = profile.task.partition("@")[0]
    for other_task in mixture["tasks"]:
        if other_task["task"].partition("@")[0] == task_name:
            return f"not held out: {{model}} was trained on {other_task['task']}"
        # Older records do not have the hash of the rows.
        if other_task.get("data") == profile.data:
            return f"not held out: {{model}} was trained on the same rows as {other_task['task']}"
        if profile.cluster is not None and other_task["cluster"] == profile.cluster:
            return f"not held out: {{model}} was trained on {other_task['task']}, of the same task cluster"
    matches = [task for task in mixture["held_out"] if task["data"] == profile.data]
    if not matches:
        return f"not proved: {{model}} was trained on the mixture {mixture['name']}, which does not hold it out"
    if not {tuple(words) for task in matches for words in task["templates"]} >= set(profile.templates):
        return f"not proved: the mixture {mixture['name']} was not compared with this template"
    if any("similar" not in task for task in matches):
        return f"not proved: an older version compared the rows of the mixture {mixture['name']}; build it again"
    similar, too_short = (max(task[key] for task in matches) for key in ("similar", "too_short"))
    if similar:
        return f"not proved: {similar:,} of its rows resemble rows of the mixture {mixture['name']}"
    if too_short:
        return f"not proved: {too_short:,} of its rows are too short to compare with the mixture {mixture['name']}"
    return ""


def _check_text(data: Record, profile: TaskProfile) -> str:
    """Return why a text corpus does not prove that a task is held out; empty if it does."""
    where = f"{data['path']}, which {{model}} was trained on"
    searches = read_searches(Path(data["path"]))
    search = searches["tasks"].get(profile.data) if searches["checksums"] == data["checksums"] else None
    if search is None or search["ngram"] > DEFAULT_NGRAM:
        return f"not proved: {where}, was not searched for it (jingu evaluate contamination)"
    if search["dirty"]:
        return f"not held out: {search['dirty']:,} of its rows occur in {where}"
    if "similar" not in search:
        return f"not proved: {where}, was searched by an older version (jingu evaluate contamination)"
    if search["similar"]:
        return f"not proved: {search['similar']:,} of its rows resemble texts in {where}"
    if search["too_short"]:
        return f"not proved: {search['too_short']:,} of its rows are too short to search for in {where}"
    return ""
