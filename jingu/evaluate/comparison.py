"""Compare results document by document: of several models, or of jingu and lm-evaluation-harness."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jingu.errors import JinguError
from jingu.evaluate import statistics
from jingu.evaluate.evaluation import read_json_lines, read_results
from jingu.formatting import print_table

Record = dict[str, Any]
# The harness's files: samples_TASK_TIME.jsonl.
_HARNESS_SAMPLES = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")
# Log-probabilities that differ by less are equal up to fp32; by less than the second, up to another dtype.
_EQUAL = 1e-3
_ROUNDING = 0.05


def compare(first: Path, others: Sequence[Path]) -> None:
    """Print paired tests of results against those of the first folder, document by document.

    Args:
        first: folder that `jingu evaluate` or the harness (with --log_samples) has written to.
        others: folders with results of the same tasks.
    """
    base = read_records(first)
    rows: list[list[str]] = []
    p_values: list[float] = []
    reasons = []
    for folder in others:
        for task, records in read_records(folder).items():
            pairs = match_records(base.get(task, []), records)
            for metric in mean_metrics(pairs):
                difference = compare_metric(pairs, metric)
                rows.append([folder.name, task, metric.removesuffix(",none"), *difference.columns()])
                p_values.append(difference.p)
            if pairs and any(record.get("hash") is None for pair in pairs for record in pair):
                reasons.append(f"{folder.name}, {task}: {explain(pairs)}")
    if not rows:
        fix = "Give folders that `jingu evaluate` has written to, of the same tasks."
        where = ", ".join(map(str, (first, *others)))
        raise JinguError("the folders have no results in common.", where=where, fix=fix)
    for row, p, adjusted in zip(rows, p_values, statistics.holm(p_values), strict=True):
        row += [f"{p:.3g}", f"{adjusted:.3g}"]
    header = ("results", "task", "metric", "documents", "difference", "stderr", "detectable", "test", "p", "p (Holm)")
    print_table(header, rows, right=(3, 4, 5, 6, 8, 9))
    print(f"\nA difference above 0 means that these results are higher than those of {first}.")
    print("".join(f"{reason}\n" for reason in reasons), end="")


def read_records(folder: Path) -> dict[str, list[Record]]:
    """Return the records of all tasks in a folder, of jingu or of the harness."""
    results = {name: records for name, (_, records) in read_results(folder).items()}
    for file in sorted(folder.rglob("samples_*.jsonl")):
        if match := _HARNESS_SAMPLES.fullmatch(file.name):
            # The names end with a time, so the newest evaluation of a task comes last and wins.
            results[match[1]] = _read_harness(file)
    return results


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
    if not pairs:
        return []
    first, second = (record["metrics"] for record in pairs[0])
    names = [name for name in first if name in second and "perplexity" not in name]
    return [name for name in names if all(isinstance(metrics[name], int | float) for metrics in (first, second))]


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
        return [f"{self.size:,}", f"{self.value:+.4f}", f"{self.stderr:.4f}", f"{self.detectable:.4f}", self.test]


def compare_metric(pairs: Sequence[tuple[Record, Record]], metric: str) -> Difference:
    """Return the difference of a metric: that of the second records minus that of the first."""
    clusters = None if pairs[0][0]["cluster"] is None else [first["cluster"] for first, _ in pairs]
    values = np.array([[record["metrics"][metric] for record in pair] for pair in pairs], np.float64)
    differences = values[:, 1] - values[:, 0]
    if clusters is None and np.isin(values, (0, 1)).all():
        test = "McNemar"
        p = statistics.mcnemar_p(int((differences < 0).sum()), int((differences > 0).sum()))
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
            same = [one == other for one, other in zip(*texts, strict=False)]
            at = [*same, False].index(False)
            shown = " and ".join(repr(text[max(at - 20, 0) : at + 20]) for text in texts)
            return f"the prompts differ, first in document {second['index']}: {shown}."
    gaps = [
        abs(one.get("logprob", 0.0) - other.get("logprob", 0.0))
        for first, second in pairs
        for one, other in zip(first["answers"], second["answers"], strict=False)
    ]
    largest = max(gaps, default=0.0)
    if largest > _EQUAL:
        cause = "the token ids (BOS, another tokenizer) or the weights"
        cause = "rounding, as of another dtype" if largest < _ROUNDING else cause
        return f"the prompts are equal, and log-probabilities differ by up to {largest:.3g}: {cause}."
    generated = [[record["answers"][0].get("text") or "" for record in pair] for pair in pairs]
    if any(one != other for one, other in generated):
        return "the prompts are equal, and generated texts differ: stop strings, lengths, or rounding."
    differences = [
        [name for name in mean_metrics([pair]) if abs(pair[0]["metrics"][name] - pair[1]["metrics"][name]) > _EQUAL]
        for pair in pairs
    ]
    names = sorted({name for group in differences for name in group})
    if names:
        return f"prompts and scores are equal, and {', '.join(names)} differ: the metric or its filter."
    return "prompts, scores and metrics are equal."
