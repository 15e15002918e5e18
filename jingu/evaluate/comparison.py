"""Compare results document by document: of several models, or of jingu and lm-evaluation-harness."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jingu.errors import JinguError, pluralize
from jingu.evaluate import statistics
from jingu.evaluate.result_files import read_json_lines, read_results
from jingu.formatting import format_score, print_table
from jingu.runtime.files import read_json

Record = dict[str, Any]
# The harness's files: samples_TASK_TIME.jsonl.
_HARNESS_SAMPLES = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")
_HARNESS_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float64": "fp64"}
# Settings that both evaluations should have, and keys of a task that name it and change no score.
_ABOUT = ("shots", "precision")
_NAME_KEYS = ("task", "task_alias", "tag", "num_fewshot")
DIFFERENCE_COLUMNS = ("documents", "difference", "stderr", "detectable", "test")
# Log-probabilities that differ by less are equal up to fp32; by less than the second, up to another dtype.
_EQUAL = 1e-3
_ROUNDING = 0.05


def compare(first: Path, others: Sequence[Path]) -> None:
    """Print paired tests of results against those of the first folder, document by document, and in which settings the
    evaluations differ.

    Args:
        first: folder that `jingu evaluate` or the harness (with --log_samples) has written to.
        others: folders with results of the same tasks.
    """
    base = read_evaluations(first)
    rows: list[list[str]] = []
    p_values: list[float] = []
    notes = []
    for folder in others:
        evaluations = read_evaluations(folder)
        notes += [
            f"{one} has no results of {', '.join(sorted(missing))}, which {two} has"
            for one, two, missing in (
                (first, folder, evaluations.keys() - base.keys()),
                (folder, first, base.keys() - evaluations.keys()),
            )
            if missing
        ]
        for task, evaluation in evaluations.items():
            if task not in base:
                continue
            about = base[task].about, evaluation.about
            pairs = match_records(base[task].records, evaluation.records)
            precisions = list(dict.fromkeys(str(each.get("precision", "unknown")) for each in about))
            for metric in mean_metrics(pairs):
                difference = compare_metric(pairs, metric)
                name = metric.removesuffix(",none")
                size, *columns = difference.columns()
                rows.append([folder.name, task, name, size, ", ".join(precisions), *columns])
                p_values.append(difference.p)
            differences = describe_settings(base[task], evaluation, pairs)
            notes += [f"{folder.name}, {task}: {difference}" for difference in differences]
            if pairs and any(record.get("hash") is None for pair in pairs for record in pair):
                notes.append(f"{folder.name}, {task}: {explain(pairs)}")
    if not rows:
        fix = "Give folders that `jingu evaluate` has written to, of the same tasks."
        where = ", ".join(map(str, (first, *others)))
        raise JinguError("the folders have no results in common.", where=where, fix=fix)
    for row, p, adjusted_p in zip(rows, p_values, statistics.holm(p_values), strict=True):
        row += [format_p(p), format_p(adjusted_p)]
    first_column, *columns = DIFFERENCE_COLUMNS
    header = ("results", "task", "metric", first_column, "precision", *columns, "p", "p (Holm)")
    print_table(header, rows, right=(3, 5, 6, 7, 9, 10))
    print(f"\nA difference above 0 means that these results are higher than those of {first}.")
    print("".join(f"{note}\n" for note in notes), end="")


@dataclass(frozen=True)
class StoredEvaluation:
    """The results of a task, of jingu or of the harness.

    Attributes:
        about: how the task was evaluated, as far as the files tell.
        records: one per document.
        settings: keys of the task file that can change scores, without defaults; None: unknown.
    """

    about: dict[str, Any]
    records: list[Record]
    settings: dict[str, Any] | None = None


def read_evaluations(folder: Path) -> dict[str, StoredEvaluation]:
    """Return the results of all tasks in a folder, of jingu or of the harness."""
    results = {}
    for name, (result, records) in read_results(folder).items():
        settings = dict(result.get("settings", {}))
        metadata = settings.pop("metadata", {})
        about = {
            "shots": result.get("num_fewshot"),
            "precision": result.get("model", {}).get("precision"),
            "version of the task": result.get("version"),
            "version of jingu": result.get("model", {}).get("jingu"),
            "chat template": bool(metadata.get("chat")),
            "data": result.get("hashes", {}).get("data"),
        }
        results[name] = StoredEvaluation(about, records, settings)
    about_harness: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.rglob("results_*.json")):
        content = read_json(file, "Evaluate the task again.")
        for task, number in content.get("n-shot", {}).items():
            about_harness[task] = {
                "shots": number,
                "precision": _HARNESS_DTYPES.get(str(content.get("config", {}).get("model_dtype"))),
                "chat template": bool(content.get("chat_template")),
            }
    for file in sorted(folder.rglob("samples_*.jsonl")):
        if match := _HARNESS_SAMPLES.fullmatch(file.name):
            # The names end with a time, so the newest evaluation of a task comes last and wins.
            results[match[1]] = StoredEvaluation(about_harness.get(match[1], {}), _read_harness(file))
    return results


def describe_settings(
    first: StoredEvaluation, second: StoredEvaluation, pairs: Sequence[tuple[Record, Record]]
) -> list[str]:
    """Return in words in which settings two evaluations differ, so that their scores are not those of two models on
    the same questions.

    Args:
        pairs: the records of their common documents.
    """
    texts = []
    for key in dict.fromkeys([*first.about, *second.about]):
        one, two = (each.about.get(key) for each in (first, second))
        is_known = one is not None and two is not None
        if is_known and one != two:
            texts.append(f"{key} differs" if key == "data" else f"{key} differs ({one} and {two})")
        elif not is_known and one != two and key in _ABOUT:
            texts.append(f"{key} is unknown in one evaluation, {two if one is None else one} in the other")
    if first.settings is not None and second.settings is not None:
        keys = (key for key in dict.fromkeys([*first.settings, *second.settings]) if key not in _NAME_KEYS)
        texts += [f"{key} differs" for key in keys if first.settings.get(key) != second.settings.get(key)]
    sizes = [len(each.records) for each in (first, second)]
    if min(sizes) > len(pairs) or sizes[0] != sizes[1]:
        texts.append(f"only {len(pairs):,} documents are in both, of {sizes[0]:,} and {sizes[1]:,}")
    num_changes = sum(_prompts(one) != _prompts(two) for one, two in pairs)
    if num_changes:
        texts.append(f"the prompts of {pluralize(num_changes, 'document')} differ")
    return [f"not the same question: {text}" for text in texts]


def _prompts(record: Record) -> list[tuple[str, ...]]:
    return [tuple(pair) for pair in record["pairs"]]


def format_p(p: float) -> str:
    """Return a p-value as a cell of a table; N/A if it is unknown."""
    return "N/A" if math.isnan(p) else f"{p:.3g}"


def _read_harness(file: Path) -> list[Record]:
    """Return the records of the harness's samples; its files have one line per document and filter."""
    records: dict[int, Record] = {}
    for sample in read_json_lines(file, "Evaluate the task again."):
        requests = [[*arguments.values()] for arguments in sample["arguments"].values()]
        answers: list[dict[str, Any]] = []
        pairs = []
        for (response, *_), request in zip(sample["resps"], requests, strict=True):
            if isinstance(request[-1], dict):  # generation: a context and its generation settings
                pairs.append([request[0], ""])
                answers.append({"text": response})
            else:
                # Rolling likelihood has only a text.
                pairs.append(request if len(request) == 2 else ["", request[0]])
                answers.append({"logprob": float(response[0] if isinstance(response, list) else response)})
        index = sample["doc_id"]
        record = records.setdefault(
            index, {"index": index, "hash": None, "cluster": None, "pairs": pairs, "answers": answers, "metrics": {}}
        )
        record["metrics"] |= {f"{name},{sample['filter']}": sample[name] for name in sample["metrics"]}
    return list(records.values())


def match_records(first: Sequence[Record], second: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Pair the records of the same documents, by hash, or by index for the harness, whose hashes are different."""
    key = "hash" if all(record["hash"] for record in (*first, *second)) else "index"
    by_key = {record[key]: record for record in first}
    return [(by_key[record[key]], record) for record in second if record[key] in by_key]


def mean_metrics(pairs: Sequence[tuple[Record, Record]]) -> list[str]:
    """Return the metrics that are means of numbers of single documents, unlike perplexity."""
    names = dict.fromkeys(name for pair in pairs for name in pair[0]["metrics"])
    return [name for name in names if "perplexity" not in name and _have_numbers(pairs, name)]


def _have_numbers(pairs: Sequence[tuple[Record, Record]], metric: str) -> bool:
    """Return whether a metric is a number, or an unknown one, in the pairs that have it, and known in one of them."""
    values = [record["metrics"][metric] for pair in with_metric(pairs, metric) for record in pair]
    return any(value is not None for value in values) and all(isinstance(value, int | float | None) for value in values)


def with_metric(pairs: Sequence[tuple[Record, Record]], metric: str) -> list[tuple[Record, Record]]:
    """Return the pairs in which both records have a metric: a task's code may give it for some documents only."""
    return [pair for pair in pairs if metric in pair[0]["metrics"] and metric in pair[1]["metrics"]]


@dataclass(frozen=True)
class Difference:
    """A paired difference of a metric between two results of the same documents.

    Attributes:
        detectable: the smallest difference that a test of these documents finds in four of five cases.
        test: its name; `p` is its two-sided p-value.
    """

    size: int
    value: float
    stderr: float
    detectable: float
    test: str
    p: float

    def columns(self) -> list[str]:
        """Return its cells in the table, without the p-value."""
        value = f"{self.value:+.4f}" if math.isfinite(self.value) else "N/A"
        return [f"{self.size:,}", value, format_score(self.stderr), format_score(self.detectable), self.test]


def compare_metric(pairs: Sequence[tuple[Record, Record]], metric: str) -> Difference:
    """Return the difference of a metric: that of the second records minus that of the first, over those that have it.

    Errors and tests that a single document or cluster does not allow are unknown: not a number.
    """
    pairs = with_metric(pairs, metric)
    clusters = None if pairs[0][0]["cluster"] is None else [first["cluster"] for first, _ in pairs]
    values = np.array([[record["metrics"][metric] for record in pair] for pair in pairs], np.float64)
    differences = values[:, 1] - values[:, 0]
    if clusters is None and np.isin(values, (0, 1)).all():
        test = "McNemar"
        p = statistics.mcnemar_p(int((differences < 0).sum()), int((differences > 0).sum()))
        p = p if len(pairs) > 1 else math.nan
    else:
        test = "paired t"
        p = statistics.paired_p(differences, clusters)
    stderr = statistics.mean_stderr(differences, clusters)
    detectable = statistics.detectable_difference(stderr)
    return Difference(len(pairs), float(differences.mean()), stderr, detectable, test, p)


def explain(pairs: Sequence[tuple[Record, Record]]) -> str:
    """Describe the first stage in which two evaluations of one model differ: prompts, scores or metrics."""
    for first, second in pairs:
        prompts = [[tuple(pair) for pair in record["pairs"]] for record in (first, second)]
        if prompts[0] != prompts[1]:
            texts = ["\x1f".join(part for pair in prompt for part in pair) for prompt in prompts]
            same = [one == second_text for one, second_text in zip(*texts, strict=False)]
            at = [*same, False].index(False)
            excerpts = " and ".join(repr(text[max(at - 20, 0) : at + 20]) for text in texts)
            return f"the prompts differ, first in document {second['index']}: {excerpts}."
    gaps = [
        abs(one.get("logprob", 0.0) - second_text.get("logprob", 0.0))
        for first, second in pairs
        for one, second_text in zip(first["answers"], second["answers"], strict=False)
    ]
    largest = max(gaps, default=0.0)
    if largest > _EQUAL:
        cause = "the token ids (BOS, another tokenizer) or the weights"
        cause = "rounding, as of another dtype" if largest < _ROUNDING else cause
        return f"the prompts are equal, and log-probabilities differ by up to {largest:.3g}: {cause}."
    text_pairs = [[record["answers"][0].get("text") or "" for record in pair] for pair in pairs]
    if any(one != second_text for one, second_text in text_pairs):
        return "the prompts are equal, and generated texts differ: stop strings, lengths, or rounding."
    differences = [
        [
            name
            for name in mean_metrics([pair])
            if not abs((pair[0]["metrics"][name] or 0.0) - (pair[1]["metrics"][name] or 0.0)) <= _EQUAL
        ]
        for pair in pairs
    ]
    names = sorted({name for group in differences for name in group})
    if names:
        return f"prompts and scores are equal, and {', '.join(names)} differ: the metric or its filter."
    return "prompts, scores and metrics are equal."
