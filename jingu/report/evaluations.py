"""A page of evaluation results: metrics with errors, calibration, and searchable answers, with the worst ones first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jingu.errors import JinguError
from jingu.evaluate.comparison import describe_settings, match_records, read_evaluations
from jingu.evaluate.result_files import read_results, read_spreads
from jingu.formatting import format_number
from jingu.report.template import render_document

Record = dict[str, Any]
# Maximum number of documents per task, so that the page stays small; and bins of the calibration curve.
MAX_DOCUMENTS = 500
NUM_BINS = 10


@dataclass(frozen=True)
class DocumentView:
    """A document on the page.

    Attributes:
        index: number of the document in its task.
        loss: sort key, the highest first: 1 minus the probability of the right choices; for generated or scored text,
            the negative log-probability per token, or else 1 minus the metric.
        state: `right` or `wrong`; empty if the metric is neither 1 nor 0.
        change: `better` or `worse` than in the other results; empty if there is no change.
        prompt: text of the prompt.
        gold: right answers, for a task without choices.
        choices: text of each choice, its log-probability, its probability among the choices, and whether it is right.
        texts: generated texts, for a task without choices.
    """

    index: int
    loss: float
    state: str
    change: str
    prompt: str
    gold: list[str]
    choices: list[tuple[str, float, float, bool]]
    texts: list[str]


@dataclass(frozen=True)
class TaskView:
    """A task on the page.

    Attributes:
        result: the results file of the task.
        documents: the documents with the highest losses, at most `MAX_DOCUMENTS`.
        num_documents: number of all documents.
        bins: bins of the calibration curve: mean confidence, accuracy, and share of the documents.
        notes: in which settings the other results differ.
    """

    result: Record
    documents: list[DocumentView]
    num_documents: int
    bins: list[tuple[float, float, float]]
    notes: list[str]


def render_evaluations(folder: Path, against: Path | None = None) -> str | None:
    """Return the HTML page of the results in a folder; None if it has no results.

    Args:
        against: folder with other results of the same tasks. Documents whose metric differs are marked.

    Raises:
        JinguError: `against` has no results.
    """
    results = read_results(folder)
    if not results:
        return None
    other_results = {} if against is None else read_results(against)
    if against is not None and not other_results:
        fix = "Give a folder that `jingu evaluate` has written to."
        raise JinguError("it has no evaluation results to compare with.", where=against, fix=fix)
    notes = {} if against is None else _describe_differences(against, folder)
    tasks = [
        _make_task_view(result, records, other_results.get(name, ({}, []))[1], notes.get(name, []))
        for name, (result, records) in results.items()
    ]
    name = folder.resolve().name
    return render_document(
        "evaluations.html",
        "evaluations.js",
        tasks=tasks,
        spreads=read_spreads(folder),
        title=name,
        against=against,
        number=_format_known,
    )


def _format_known(value: float | None) -> str:
    """Return a number as a cell; null in the files is an unknown one."""
    return "N/A" if value is None or not math.isfinite(value) else format_number(value)


def _describe_differences(first: Path, second: Path) -> dict[str, list[str]]:
    """Return by task in which settings the evaluations of two folders differ."""
    one, two = map(read_evaluations, (first, second))
    pairs = {task: match_records(one[task].records, two[task].records) for task in one.keys() & two.keys()}
    return {task: describe_settings(one[task], two[task], pairs[task]) for task in pairs}


def _make_task_view(result: Record, records: list[Record], others: list[Record], notes: list[str]) -> TaskView:
    """Return the view of a task.

    Args:
        result: the results file of the task.
        records: the record of each document.
        others: the records of the results to compare with; documents are matched by their hash.
        notes: in which settings they differ.
    """
    by_hash = {record["hash"]: record for record in others}
    has_choices = result["settings"].get("output_type") == "multiple_choice"
    documents = [_make_document_view(record, by_hash.get(record["hash"]), has_choices) for record in records]
    # Confidence is the probability of the most probable choice, which is the model's answer.
    confidence = np.array([max(choice[2] for choice in view.choices) for view in documents if view.choices])
    best = [max(view.choices, key=lambda choice: choice[2]) for view in documents if view.choices]
    is_right = np.array([is_gold for _, _, _, is_gold in best], np.float64)
    numbers = np.minimum(confidence * NUM_BINS, NUM_BINS - 1).astype(int)
    bins = [
        (float(confidence[numbers == number].mean()), float(is_right[numbers == number].mean()), float(share))
        for number in range(NUM_BINS)
        if len(confidence) and (share := (numbers == number).mean())
    ]
    worst = sorted(documents, key=lambda view: -view.loss)[:MAX_DOCUMENTS]
    return TaskView(result, worst, len(documents), bins, notes)


def _make_document_view(record: Record, other: Record | None, has_choices: bool) -> DocumentView:
    """Return the view of a document.

    Args:
        other: record of the same document in the results to compare with.
        has_choices: whether the task is multiple choice.
    """
    # 1. Leave out the choices that are scored without a context, which only acc_mutual_info needs.
    pairs = [pair for pair in record["pairs"] if pair[0] or not record["pairs"][0][0]]
    answers = record["answers"]
    gold = record["gold"]
    # 2. Right or wrong: the first metric that has a number for each document decides.
    values = {key: value for key, value in record["metrics"].items() if isinstance(value, int | float)}
    key = next(iter(values), None)
    value = float(values[key]) if key is not None else 0.0
    state = {1.0: "right", 0.0: "wrong"}.get(value, "") if key is not None else ""
    change = ""
    before = None if key is None or other is None else other["metrics"].get(key)
    if before is not None and before != value:
        change = "better" if value > before else "worse"
    # 3. A document without choices has generated texts, or the log-probability of its only text.
    if not has_choices:
        logprobs = [answer["logprob"] for answer in answers if answer["logprob"]]
        loss = -logprobs[0] / max(answers[0]["num_tokens"], 1) if logprobs else 1 - value
        texts = [answer["text"] for answer in answers if answer["text"]]
        prompt = "".join(pairs[0])
        return DocumentView(record["index"], loss, state, change, prompt, list(map(str, gold)), [], texts)
    # 4. Choices. Usually they are continuations of one context; in tasks such as WinoGrande, they are contexts of one
    # continuation.
    shares_context = pairs[0][0] == pairs[-1][0] or pairs[0][1] != pairs[-1][1]
    scores = np.array([answer["logprob"] for answer in answers[: len(pairs)]])
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    choices = [
        (pair[1] if shares_context else pair[0], float(logprob), float(probability), number in gold)
        for number, (pair, logprob, probability) in enumerate(zip(pairs, scores, probabilities, strict=True))
    ]
    loss = 1 - sum(probability for _, _, probability, is_gold in choices if is_gold)
    prompt = pairs[0][0] if shares_context else pairs[0][1]
    return DocumentView(record["index"], loss, state, change, prompt, [], choices, [])
