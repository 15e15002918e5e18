"""Measures of a task that change smoothly during training, unlike accuracy, which stays at chance for most of a run.

Schaeffer et al. (2023) explain this effect; Heineman et al. (2025) find that bits per byte of the right answer needs
the fewest documents to distinguish models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jingu.evaluate import statistics
from jingu.evaluate.evaluation import PreparedTask
from jingu.evaluate.prompts import EvaluationSample
from jingu.evaluate.scoring import Scorer
from jingu.evaluate.statistics import Array, Clusters
from jingu.evaluate.task_file import TaskSettings
from jingu.evaluate.task_metrics import count_bytes
from jingu.model.spec import ModelSpec
from jingu.text.tokenizer import Tokenizer

# Prefix of these measures in the metrics of a run: tasks/NAME/MEASURE.
TASKS_PREFIX = "tasks/"


def compute_smooth_measures(prepared_task: PreparedTask, scorer: Scorer) -> dict[str, float]:
    """Return measures of a model on a task, each with its standard error as `NAME_stderr`.

    `bits_per_byte` is of the right answer, or of the whole text. With choices there are three more: `margin`, the bits
    per byte of the best wrong choice minus those of the right one; `p_gold`, the probability of the right choice among
    all; `acc`, with `chance`, which guessing reaches.
    """
    # 1. Score the right answer and the other choices.
    task = prepared_task.settings
    pairs = [scored_pairs(task, sample) for sample in prepared_task.samples]
    has_choices = task.output_type == "multiple_choice"
    gold = [sample.gold[0] if has_choices else 0 for sample in prepared_task.samples]
    if task.output_type == "loglikelihood_rolling":
        answers = iter(scorer.score_texts([group[0][1] for group in pairs]))
    else:
        answers = iter(scorer.score([pair for group in pairs for pair in group]))
    logprobs = [[next(answers).logprob for _ in group] for group in pairs]
    # 2. Bits per byte: a ratio of sums over all documents.
    bits = [-np.array(values) / math.log(2) for values in logprobs]
    sizes = [np.array([max(count_bytes(text), 1) for _, text in group]) for group in pairs]
    gold_bits = np.array([values[number] for values, number in zip(bits, gold, strict=True)])
    gold_sizes = np.array([values[number] for values, number in zip(sizes, gold, strict=True)], np.float64)
    clusters = prepared_task.clusters
    measures = {
        "bits_per_byte": float(gold_bits.sum() / gold_sizes.sum()),
        "bits_per_byte_stderr": statistics.ratio_stderr(gold_bits, gold_sizes, clusters),
    }
    if not has_choices:
        return _drop_unknown(measures)
    # 3. Measures of tasks with choices.
    columns: dict[str, list[float]] = {"margin": [], "p_gold": [], "acc": []}
    for values, size, number in zip(bits, sizes, gold, strict=True):
        wrong = np.delete(values / size, number)
        columns["margin"].append(float(wrong.min(initial=math.inf) - values[number] / size[number]))
        columns["p_gold"].append(float(1 / np.exp2(values[number] - values).sum()))
        columns["acc"].append(float(values.argmin() == number))
    for name, column in columns.items():
        measures |= _mean(name, np.array(column), clusters)
    measures["acc_low"], measures["acc_high"] = statistics.mean_interval(np.array(columns["acc"]), clusters)
    measures["chance"] = float(np.mean([1 / len(values) for values in bits]))
    return _drop_unknown(measures)


def _drop_unknown(measures: Mapping[str, float]) -> dict[str, float]:
    """Return measures without unknown errors and limits, as of a single document."""
    errors = ("_stderr", "_low", "_high")
    return {name: value for name, value in measures.items() if math.isfinite(value) or not name.endswith(errors)}


def scored_pairs(task: TaskSettings, sample: EvaluationSample) -> Sequence[tuple[str, str]]:
    """Return the pairs to score of a sample: all choices, or the right text of a generation task."""
    if task.output_type == "generate_until":
        return [(sample.pairs[0][0], f"{task.target_delimiter}{sample.gold[0]}")]
    return sample.pairs[: max(len(sample.choices), 1)]


def check_answers_fit(prepared_task: PreparedTask, tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Raise JinguError if an answer of a task is longer than the model's context."""
    if prepared_task.settings.output_type == "loglikelihood_rolling":
        return
    room = spec.max_position_embeddings - spec.prompts[0]
    texts = {text for sample in prepared_task.samples for _, text in scored_pairs(prepared_task.settings, sample)}
    longest = max(len(tokenizer.encode(text)) for text in texts)
    if longest > room:
        what = f"it has an answer of {longest} tokens, and the model's context is {room}."
        raise prepared_task.settings.error(what, "Leave it out of evaluation.tasks, or use a longer context.")


def _mean(name: str, values: Array, clusters: Clusters) -> dict[str, float]:
    return {name: float(values.mean()), f"{name}_stderr": statistics.mean_stderr(values, clusters)}


def describe(measures: Mapping[str, float]) -> str:
    """Return measures in words, such as `1.234 ± 0.012 bits per byte, p(gold) 0.262, accuracy 0.31 (at chance)`."""
    stderr = measures.get("bits_per_byte_stderr")
    error = "" if stderr is None else f" ± {stderr:.3f}"
    text = f"{measures['bits_per_byte']:.3f}{error} bits per byte"
    if "acc" not in measures:
        return text
    margin = f"margin {measures['margin']:+.3f}, p(gold) {measures['p_gold']:.3f}"
    return f"{text}, {margin}, accuracy {measures['acc']:.3f} ({compare_with_chance(measures)})"


def compare_with_chance(measures: Mapping[str, float]) -> str:
    """Return in words whether accuracy differs from that of guessing by more than its 95% interval."""
    chance = measures["chance"]
    # Older runs have only the standard error.
    width = statistics.Z * measures.get("acc_stderr", math.inf)
    low, high = measures.get("acc_low", measures["acc"] - width), measures.get("acc_high", measures["acc"] + width)
    if not (chance < low or chance > high):
        return f"at chance, {chance:.3f}"
    return f"{'above' if measures['acc'] > chance else 'below'} chance, {chance:.3f}"
