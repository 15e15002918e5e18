"""Render the report as one HTML file that loads nothing else. Its layout is in page.html."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable
from statistics import median
from typing import TypeVar

from markupsafe import Markup

from jingu import __version__
from jingu.errors import pluralize
from jingu.formatting import MISSING, format_duration, format_number, format_rounded, memory_unit
from jingu.report.charts import Chart, Point, Series, draw_chart, is_drawable
from jingu.report.record import Row, RunRecord, get_number
from jingu.report.template import load_template, read_resource

Item = TypeVar("Item")

MAX_TABLE_ROWS = 20
MAX_SAMPLES_PER_PROMPT = 6
MAX_PROMPTS = 12
MAX_SAMPLE_CHARS = 4000  # characters


def render_page(record: RunRecord) -> str:
    """Return the HTML file. All text of the run is escaped, because a model's output is not trusted."""
    script = read_resource("page.js")
    return load_template("page.html").render(
        record=record,
        version=__version__,
        style=Markup(read_resource("page.css")),
        script=Markup(script),
        # The content security policy allows only this script, whatever slips through the escaping.
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        started=str(record.starts[0].get("time", ""))[:16].replace("T", " ") if record.starts else "",
        summary=summarize(record),
        tiles=_tiles(record),
        resumes=", ".join(f"{step:,}" for step in _spread(record.resumes, 12)),
        charts=Markup("".join(draw_chart(chart, record.resumes) for chart in _charts(record))),
        compared=_compared(record),
        samples=_samples(record),
        most_prompts=MAX_PROMPTS,
        count=pluralize,
        figures=_figures(record),
    )


def _points(rows: dict[int, Row], key: str) -> list[Point]:
    return [(step, get_number(row, key)) for step, row in sorted(rows.items())]


def _finite(rows: Iterable[Row], key: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := get_number(row, key))]


def _last(rows: dict[int, Row]) -> Row:
    return rows[max(rows)] if rows else {}


def summarize(record: RunRecord) -> str:
    """Return the run in one sentence."""
    start = record.starts[-1] if record.starts else {}
    parameters, ranks = get_number(start, "parameters"), get_number(start, "ranks")
    model = record.family or "A model"
    if parameters > 0:
        model = f"{format_rounded(parameters)}-parameter {record.family or 'model'}"
    if not record.train:
        return f"{model}: no step has been logged yet."
    last = _last(record.train)
    sentence = f"{model}, {pluralize(max(record.train), 'step')}"
    if get_number(last, "tokens") > 0:
        sentence += f", {format_rounded(get_number(last, 'tokens'))} tokens"
    if get_number(last, "seconds") > 0:
        sentence += f" in {format_duration(get_number(last, 'seconds'))}"
    if 0 < ranks < math.inf:
        sentence += f" on {pluralize(int(ranks), 'rank')} ({start.get('device', '?')}, {start.get('precision', '?')})"
    bits = get_number(_last(record.evaluations), "bits_per_byte")
    return sentence + (f": {format_number(bits)} bits per byte on validation text." if math.isfinite(bits) else ".")


def _tiles(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return name, value and note of each tile."""
    last, evaluation = _last(record.train), _last(record.evaluations)
    rates, shares = _finite(record.train.values(), "tokens_per_second"), _finite(record.train.values(), "peak_share")
    memory = max(_finite(record.train.values(), "memory_bytes"), default=math.nan)
    size, unit = memory_unit(memory)
    peak = get_number(record.starts[-1] if record.starts else None, "peak_flops")
    beside = f"validation {format_number(get_number(evaluation, 'loss'))}" if evaluation else "on training text"
    share = f"{median(shares):.0%}" if shares else MISSING
    return [
        ("Final loss", format_number(get_number(last, "loss")), beside),
        *[("Bits per byte", format_number(get_number(evaluation, "bits_per_byte")), _best(record))]
        * _counts_bytes(record),
        ("Tokens a second", format_rounded(median(rates)) if rates else MISSING, "median"),
        ("Share of peak", share, f"of {_flops(peak)}" if peak > 0 else "of the machine's arithmetic"),
        ("Peak memory", f"{format_number(memory / size)} {unit}" if math.isfinite(memory) else MISSING, "of one rank"),
        (
            "Training time",
            format_duration(get_number(last, "seconds")),
            pluralize(max(record.train, default=0), "step"),
        ),
    ]


def _counts_bytes(record: RunRecord) -> bool:
    """Return whether evaluations predict whole texts. With span corruption they count no bytes."""
    return any(row.get("bytes", 0) is not None for row in record.evaluations.values() or [{}])


def _best(record: RunRecord) -> str:
    """Return how the last evaluation compares with earlier ones."""
    groups = record.alike or [{}]
    values = [(value, step) for step, value in _points(groups[-1], "bits_per_byte") if math.isfinite(value)]
    if not values:
        return "no evaluation yet"
    if len(groups) > 1 and len(groups[-1]) == 1:
        return f"of {_tokens_read(groups[-1])}"
    best, step = min(values)
    return "validation, the best" if step == max(groups[-1]) else f"best {format_number(best)}, step {step:,}"


def _flops(value: float) -> str:
    size, name = next((pair for pair in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if value >= pair[0]), (1e6, "M"))
    return f"{value / size:.3g} {name}FLOP/s"


def _charts(record: RunRecord) -> list[Chart]:
    train = record.train
    size, unit = memory_unit(max(_finite(train.values(), "memory_bytes"), default=0.0))
    memory = [(step, value / size) for step, value in _points(train, "memory_bytes")]
    levels = [(name, get_number(row, "bits_per_byte")) for name, row in record.baselines.items()]
    levels = [(name, value) for name, value in levels if is_drawable(value)]

    def one(label: str, key: str) -> list[Series]:
        return [Series(label, _points(train, key))]

    return [
        Chart(
            "Loss",
            "nats a token",
            [*one("training", "loss"), *_validation_series(record, "loss")],
            logarithmic_beyond=3,
        ),
        *[Chart("Bits per byte", "validation split", _validation_series(record, "bits_per_byte"), levels=levels)]
        * _counts_bytes(record),
        Chart("Learning rate", "", one("rate", "lr"), from_zero=True),
        Chart("Gradient norm", "before clipping", one("norm", "grad_norm"), from_zero=True, logarithmic_beyond=10),
        Chart("Throughput", "tokens a second", one("rate", "tokens_per_second"), from_zero=True),
        Chart("Memory", f"{unit}, peak of one rank", [Series("memory", memory)], from_zero=True),
    ]


def _validation_series(record: RunRecord, key: str) -> list[Series]:
    """Return a series for each group of comparable evaluations."""
    groups = record.alike
    names = [f"validation, {_tokens_read(rows)}" if len(groups) > 1 else "validation" for rows in groups]
    return [
        Series(name, _points(rows, key), "dots", min(colour, 2))
        for colour, (name, rows) in enumerate(zip(names, groups, strict=True), 1)
    ]


def _tokens_read(rows: dict[int, Row]) -> str:
    """Return how many tokens the evaluations of a group read."""
    return f"{format_rounded(get_number(_last(rows), 'tokens'))} tokens"


def _compared(record: RunRecord) -> list[tuple[str, str, str, str, bool]]:
    """Return name, bits per byte, share of a byte, width of the bar, and whether it is this model, of each coder."""
    values = [(get_number(row, "bits_per_byte"), name, False) for name, row in record.baselines.items()]
    values.append((get_number(_last(record.evaluations), "bits_per_byte"), "this model", True))
    values = [value for value in values if math.isfinite(value[0]) and value[0] >= 0]
    if not record.baselines or not values:
        return []
    most = max(values)[0] or 1.0
    return [
        (name, format_number(bits), f"{bits / 8:.1%}", f"{bits / most * 100:.1f}", own)
        for bits, name, own in sorted(values, key=lambda value: -value[0])
    ]


def _spread(items: list[Item], most: int) -> list[Item]:
    """Return at most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _samples(record: RunRecord) -> list[tuple[str, list[tuple[str, str]], int]]:
    """Return each prompt, steps and texts of some of its samples, and the number of all."""
    steps_by_prompt: dict[str, list[int]] = {}
    for step, prompt in sorted(record.samples, key=lambda key: key[0]):
        steps_by_prompt.setdefault(prompt, []).append(step)

    def texts(prompt: str, steps: list[int]) -> list[tuple[str, str]]:
        shown_steps = _spread(steps, MAX_SAMPLES_PER_PROMPT)
        return [(f"{step:,}", _cut(str(record.samples[step, prompt].get("text", "")))) for step in shown_steps]

    return [(_cut(prompt), texts(prompt, steps), len(steps)) for prompt, steps in steps_by_prompt.items()]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else text[:MAX_SAMPLE_CHARS] + " …"


def _figures(record: RunRecord) -> list[list[str]]:
    """Return the numbers of the charts as a table, at steps spread over the run (those of evaluations, if enough)."""
    every = sorted(record.train.keys() | record.evaluations.keys())
    if not every:
        return []
    measured = sorted(record.evaluations)
    steps = _spread(measured if len(measured) >= 5 else every, MAX_TABLE_ROWS)
    size, unit = memory_unit(max(_finite(record.train.values(), "memory_bytes"), default=0.0))

    def cells(step: int) -> dict[str, str]:
        train = record.train.get(step)
        evaluation = record.evaluations.get(step)
        return {
            "step": f"{step:,}",
            "tokens": format_rounded(get_number(train, "tokens")),
            "time": format_duration(get_number(train, "seconds")),
            "loss": format_number(get_number(train, "loss")),
            "validation tokens": format_rounded(get_number(evaluation, "tokens")),
            "validation loss": format_number(get_number(evaluation, "loss")),
            "bits per byte": format_number(get_number(evaluation, "bits_per_byte")),
            "learning rate": format_number(get_number(train, "lr")),
            "gradient norm": format_number(get_number(train, "grad_norm")),
            "tokens/s": format_number(get_number(train, "tokens_per_second")),
            f"memory, {unit}": format_number(get_number(train, "memory_bytes") / size),
        }

    rows = [cells(step) for step in sorted({every[0], *steps, every[-1]})]
    return [list(rows[0]), *(list(row.values()) for row in rows)]
