"""Pairwise judging: a model decides which of two answers is better.

It judges each pair in both orders, because judges have a position bias (Zheng et al., 2023); verdicts that disagree
count as a tie. A pair without both verdicts counts in no rate.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jingu.errors import JinguError
from jingu.evaluate import statistics
from jingu.evaluate.comparison import describe_settings, match_records, read_evaluations
from jingu.evaluate.evaluation import write_json
from jingu.evaluate.scoring import AnswerCache, Scorer, evaluation_precision, model_fingerprint, precision_name
from jingu.evaluate.task_data import fingerprint_of
from jingu.formats.models import open_model
from jingu.formatting import print_table
from jingu.infer.generate import InferenceOptions
from jingu.runtime.http import post

Verdict = Literal["A", "B"] | None
# Returns the verdict on each prompt; None if the judge gives none.
Judge = Callable[[Sequence[str]], list[Verdict]]
TEMPLATE = """Two answers to the same request are below. Judge which one is better: correct, complete and to the point.

[Request]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Reply with one letter, A or B.
The better answer is"""
_TIMEOUT_SECONDS = 120.0


def judge(
    first: Path, second: Path, by: str, inference: InferenceOptions, name: str = "", output: Path | None = None
) -> None:
    """Let a model judge the generated answers of two others; print and write the result.

    Args:
        first: folder with the results of a model, of tasks that generate.
        second: folder with those of the other one.
        by: the judge: a model, or the URL of a server with OpenAI's protocol, up to `/v1`.
        name: of the model on the server.
        output: file for all verdicts; None: `judged.json` in the second folder.

    Raises:
        JinguError: the folders have no answers in common, or the judge cannot be asked.
    """
    # 1. Collect the answers of both models to the same documents. An empty answer is an answer, too.
    pairs = []
    notes = []
    results = [read_evaluations(folder) for folder in (first, second)]
    for task in sorted(results[0].keys() & results[1].keys()):
        both = [result[task] for result in results]
        # Stored settings lack those with the default value.
        if all(
            (evaluation.settings or {}).get("output_type", "generate_until") == "generate_until" for evaluation in both
        ):
            matches = match_records(both[0].records, both[1].records)
            pairs += [(task, *match) for match in matches]
            notes += [f"{task}: {difference}" for difference in describe_settings(both[0], both[1], matches)]
    if not pairs:
        fix = "Give folders with results of the same tasks of type generate_until."
        raise JinguError("the two folders have no generated answers in common.", where=f"{first}, {second}", fix=fix)
    # 2. Ask for verdicts in both orders.
    if by.startswith(("http://", "https://")):
        ask = server_judge(by, name)
        identity = f"{by} {name}"
    else:
        ask, identity = _local_judge(Path(by), inference)
    items = [
        (one["pairs"][0][0], one["answers"][0]["text"], second_row["answers"][0]["text"])
        for _, one, second_row in pairs
    ]
    verdicts = judge_pairs(items, ask)
    # 3. Summarize them, print, and write.
    summary = summarize(verdicts)
    rows = [
        [key.replace("_", " "), f"{value:.4g}" if math.isfinite(value) else "N/A"] for key, value in summary.items()
    ]
    print_table(("of the second model", "value"), rows, right=(1,))
    records = [
        {"task": task, "index": one["index"], "verdicts": verdict}
        for (task, one, _), verdict in zip(pairs, verdicts, strict=True)
    ]
    about = {"judge": identity, "template": fingerprint_of(TEMPLATE), "first": str(first), "second": str(second)}
    target = output or second / "judged.json"
    write_json({**about, "summary": summary, "records": records}, target)
    print("".join(f"\n{note}" for note in notes))
    print(f"written to {target}")


def judge_pairs(items: Sequence[tuple[str, str, str]], ask: Judge) -> list[tuple[Verdict, Verdict]]:
    """Return two verdicts for each (prompt, first answer, second answer): in this order, and with swapped answers.

    A is the answer that comes first in the judge's prompt.
    """
    prompts = [
        TEMPLATE.format(prompt=prompt, first=one, second=second_answers)
        for prompt, first, second in items
        for one, second_answers in ((first, second), (second, first))
    ]
    verdicts = ask(prompts)
    return list(zip(verdicts[::2], verdicts[1::2], strict=True))


def summarize(verdicts: Sequence[tuple[Verdict, Verdict]]) -> dict[str, float]:
    """Return the statistics of verdicts.

    These are the win rate of the second answers (a tie is half a win) with its error and p-value, the share of pairs
    whose verdict prefers the same position in both orders, and the share of verdicts for the first position. Without
    a pair that has both verdicts, they are unknown: not a number.
    """
    outcomes: dict[tuple[Verdict, Verdict], float] = {("A", "B"): 0.0, ("B", "A"): 1.0}
    complete = [both for both in verdicts if None not in both]
    values = np.array([outcomes.get(both, 0.5) for both in complete], np.float64)
    wins = int((values == 1).sum())
    losses = int((values == 0).sum())
    low, high = statistics.mean_interval(values) if complete else statistics.UNKNOWN_INTERVAL
    valid = [verdict for both in verdicts for verdict in both if verdict is not None]
    return {
        "win_rate": float(values.mean()) if complete else math.nan,
        "stderr": statistics.mean_stderr(values) if complete else math.nan,
        "interval_low": low,
        "interval_high": high,
        "wins": wins,
        "ties": len(values) - wins - losses,
        "losses": losses,
        "p": statistics.mcnemar_p(losses, wins) if len(values) > 1 else math.nan,
        "flip_rate": sum(first == second for first, second in complete) / len(complete) if complete else math.nan,
        # 0.5 if the judge has no position bias.
        "first_position_rate": valid.count("A") / len(valid) if valid else math.nan,
        "without_verdict": 2 * len(verdicts) - len(valid),
    }


def _local_judge(model: Path, inference: InferenceOptions) -> tuple[Judge, str]:
    """Return a judge that takes the more probable letter, and the fingerprint of its model with its precision."""
    stored_model = open_model(model)
    inference = replace(inference, precision=evaluation_precision(inference.precision, stored_model))
    inference_model = inference.load(model)
    scorer = Scorer(inference.make_engine(inference_model), AnswerCache(None))
    precision = precision_name(inference.precision, inference_model.parameter.dtype)
    digest = model_fingerprint(stored_model, inference_model.tokenizer, precision)
    print(f"the judge computes in {precision}", file=sys.stderr)

    def ask(prompts: Sequence[str]) -> list[Verdict]:
        answers = scorer.score([(prompt, letter) for prompt in prompts for letter in (" A", " B")])
        return [
            "A" if first.logprob > second.logprob else "B"
            for first, second in zip(answers[::2], answers[1::2], strict=True)
        ]

    return ask, digest


def server_judge(url: str, name: str) -> Judge:
    """Return a judge behind OpenAI's protocol. Its verdict is the first lone letter A or B of a greedy answer."""

    def ask_once(prompt: str) -> Verdict:
        message = {"role": "user", "content": prompt}
        body: dict[str, Any] = {"model": name, "messages": [message], "temperature": 0, "seed": 0, "max_tokens": 64}
        headers = {"Content-Type": "application/json"}
        address = f"{url.rstrip('/')}/chat/completions"
        try:
            reply = json.loads(post(address, json.dumps(body).encode(), headers, _TIMEOUT_SECONDS))
            text = reply["choices"][0]["message"].get("content")
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            fix = "Check the address, which ends in /v1, and the model's --name."
            raise JinguError(f"the judge does not answer ({error}).", where=url, fix=fix) from None
        # A refusal, or reasoning alone, has no text.
        match = re.search(r"\b[AB]\b", text) if isinstance(text, str) else None
        if match is None:
            return None
        return "A" if match[0] == "A" else "B"

    return lambda prompts: [ask_once(prompt) for prompt in prompts]
