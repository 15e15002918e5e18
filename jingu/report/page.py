"""The report's page: everything in one HTML file that fetches nothing. What it looks like is in page.html."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable
from statistics import median
from typing import TypeVar

from markupsafe import Markup

from jingu import __version__
from jingu.errors import counted
from jingu.report.charts import Chart, Point, Series, draw, drawable
from jingu.report.read import Record, Row, number
from jingu.report.template import content, template
from jingu.words import ABSENT, duration, memory_unit, plain, rounded

Item = TypeVar("Item")

TABLE_ROWS = 20
SAMPLES_OF_A_PROMPT = 6
PROMPTS = 12
LONGEST_SAMPLE = 4000  # characters


def page(record: Record) -> str:
    """The whole file. All text of the run is escaped: what a model writes is not to be trusted."""
    script = content("page.js")
    return template("page.html").render(
        record=record,
        version=__version__,
        style=Markup(content("page.css")),
        script=Markup(script),
        # Only this very script may run, whatever should slip through the escaping.
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        started=str(record.starts[0].get("time", ""))[:16].replace("T", " ") if record.starts else "",
        summary=summary(record),
        tiles=_tiles(record),
        resumes=", ".join(f"{step:,}" for step in _spread(record.resumes, 12)),
        charts=Markup("".join(draw(chart, record.resumes) for chart in _charts(record))),
        compared=_compared(record),
        samples=_samples(record),
        most_prompts=PROMPTS,
        count=counted,
        figures=_figures(record),
    )


def _points(rows: dict[int, Row], key: str) -> list[Point]:
    return [(step, number(row, key)) for step, row in sorted(rows.items())]


def _finite(rows: Iterable[Row], key: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := number(row, key))]


def _last(rows: dict[int, Row]) -> Row:
    return rows[max(rows)] if rows else {}


def summary(record: Record) -> str:
    """The run in one sentence."""
    start = record.starts[-1] if record.starts else {}
    parameters, ranks = number(start, "parameters"), number(start, "ranks")
    model = record.family or "A model"
    if parameters > 0:
        model = f"{rounded(parameters)}-parameter {record.family or 'model'}"
    if not record.train:
        return f"{model}: no step has been logged yet."
    last = _last(record.train)
    sentence = f"{model}, {counted(max(record.train), 'step')}"
    if number(last, "tokens") > 0:
        sentence += f", {rounded(number(last, 'tokens'))} tokens"
    if number(last, "seconds") > 0:
        sentence += f" in {duration(number(last, 'seconds'))}"
    if 0 < ranks < math.inf:
        sentence += f" on {counted(int(ranks), 'rank')} ({start.get('device', '?')}, {start.get('precision', '?')})"
    bits = number(_last(record.evaluations), "bits_per_byte")
    return sentence + (f": {plain(bits)} bits per byte on held-out text." if math.isfinite(bits) else ".")


def _tiles(record: Record) -> list[tuple[str, str, str]]:
    """Name, value, and a note below it."""
    last, evaluation = _last(record.train), _last(record.evaluations)
    rates, shares = _finite(record.train.values(), "tokens_per_second"), _finite(record.train.values(), "peak_share")
    memory = max(_finite(record.train.values(), "memory_bytes"), default=math.nan)
    size, unit = memory_unit(memory)
    peak = number(record.starts[-1] if record.starts else None, "peak_flops")
    beside = f"held-out {plain(number(evaluation, 'loss'))}" if evaluation else "on training text"
    share = f"{median(shares):.0%}" if shares else ABSENT
    return [
        ("Final loss", plain(number(last, "loss")), beside),
        *[("Bits per byte", plain(number(evaluation, "bits_per_byte")), _best(record))] * _counts_bytes(record),
        ("Tokens a second", rounded(median(rates)) if rates else ABSENT, "median"),
        ("Share of peak", share, f"of {_flops(peak)}" if peak > 0 else "of the machine's arithmetic"),
        ("Peak memory", f"{plain(memory / size)} {unit}" if math.isfinite(memory) else ABSENT, "of one rank"),
        ("Training time", duration(number(last, "seconds")), counted(max(record.train, default=0), "step")),
    ]


def _counts_bytes(record: Record) -> bool:
    """Whether evaluations predict all of a text; of removed spans, they tell no bytes."""
    return any(row.get("bytes", 0) is not None for row in record.evaluations.values() or [{}])


def _best(record: Record) -> str:
    """The last evaluation among those that compare with it."""
    groups = record.alike or [{}]
    values = [(value, step) for step, value in _points(groups[-1], "bits_per_byte") if math.isfinite(value)]
    if not values:
        return "no evaluation yet"
    if len(groups) > 1 and len(groups[-1]) == 1:
        return f"of {_read(groups[-1])} held out"
    best, step = min(values)
    return "held-out, its best" if step == max(groups[-1]) else f"best {plain(best)}, step {step:,}"


def _flops(value: float) -> str:
    size, name = next((pair for pair in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if value >= pair[0]), (1e6, "M"))
    return f"{value / size:.3g} {name}FLOP/s"


def _charts(record: Record) -> list[Chart]:
    train = record.train
    size, unit = memory_unit(max(_finite(train.values(), "memory_bytes"), default=0.0))
    memory = [(step, value / size) for step, value in _points(train, "memory_bytes")]
    levels = [(name, number(row, "bits_per_byte")) for name, row in record.baselines.items()]
    levels = [(name, value) for name, value in levels if drawable(value)]

    def one(label: str, key: str) -> list[Series]:
        return [Series(label, _points(train, key))]

    return [
        Chart("Loss", "nats a token", [*one("training", "loss"), *_held_out(record, "loss")], logarithmic_beyond=3),
        *[Chart("Bits per byte", "held-out text", _held_out(record, "bits_per_byte"), levels=levels)]
        * _counts_bytes(record),
        Chart("Learning rate", "", one("rate", "lr"), from_zero=True),
        Chart("Gradient norm", "before clipping", one("norm", "grad_norm"), from_zero=True, logarithmic_beyond=10),
        Chart("Throughput", "tokens a second", one("rate", "tokens_per_second"), from_zero=True),
        Chart("Memory", f"{unit}, peak of one rank", [Series("memory", memory)], from_zero=True),
    ]


def _held_out(record: Record, key: str) -> list[Series]:
    """A series for each group of evaluations that compare."""
    groups = record.alike
    names = [f"held-out, {_read(rows)}" if len(groups) > 1 else "held-out" for rows in groups]
    return [
        Series(name, _points(rows, key), "dots", min(colour, 2))
        for colour, (name, rows) in enumerate(zip(names, groups, strict=True), 1)
    ]


def _read(rows: dict[int, Row]) -> str:
    """How much the evaluations of a group read."""
    return f"{rounded(number(_last(rows), 'tokens'))} tokens"


def _compared(record: Record) -> list[tuple[str, str, str, str, bool]]:
    """Of each coder its name, bits per byte, share of a byte and of the longest bar, and whether it is this model."""
    values = [(number(row, "bits_per_byte"), name, False) for name, row in record.baselines.items()]
    values.append((number(_last(record.evaluations), "bits_per_byte"), "this model", True))
    values = [value for value in values if math.isfinite(value[0]) and value[0] >= 0]
    if not record.baselines or not values:
        return []
    most = max(values)[0] or 1.0
    return [
        (name, plain(bits), f"{bits / 8:.1%}", f"{bits / most * 100:.1f}", own)
        for bits, name, own in sorted(values, key=lambda value: -value[0])
    ]


def _spread(items: list[Item], most: int) -> list[Item]:
    """At most `most` of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _samples(record: Record) -> list[tuple[str, list[tuple[str, str]], int]]:
    """Each prompt, step and text of samples spread over the run, and how many there are."""
    steps_by_prompt: dict[str, list[int]] = {}
    for step, prompt in sorted(record.samples, key=lambda key: key[0]):
        steps_by_prompt.setdefault(prompt, []).append(step)

    def texts(prompt: str, steps: list[int]) -> list[tuple[str, str]]:
        chosen = _spread(steps, SAMPLES_OF_A_PROMPT)
        return [(f"{step:,}", _cut(str(record.samples[step, prompt].get("text", "")))) for step in chosen]

    return [(_cut(prompt), texts(prompt, steps), len(steps)) for prompt, steps in steps_by_prompt.items()]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_SAMPLE else text[:LONGEST_SAMPLE] + " …"


def _figures(record: Record) -> list[list[str]]:
    """The charts' figures as text, at steps spread over the run (those of evaluations, where there are enough)."""
    every = sorted(record.train.keys() | record.evaluations.keys())
    if not every:
        return []
    measured = sorted(record.evaluations)
    steps = _spread(measured if len(measured) >= 5 else every, TABLE_ROWS)
    size, unit = memory_unit(max(_finite(record.train.values(), "memory_bytes"), default=0.0))

    def cells(step: int) -> dict[str, str]:
        train, held_out = record.train.get(step), record.evaluations.get(step)
        return {
            "step": f"{step:,}",
            "tokens": rounded(number(train, "tokens")),
            "time": duration(number(train, "seconds")),
            "loss": plain(number(train, "loss")),
            "held-out tokens": rounded(number(held_out, "tokens")),
            "held-out loss": plain(number(held_out, "loss")),
            "bits per byte": plain(number(held_out, "bits_per_byte")),
            "learning rate": plain(number(train, "lr")),
            "gradient norm": plain(number(train, "grad_norm")),
            "tokens/s": plain(number(train, "tokens_per_second")),
            f"memory, {unit}": plain(number(train, "memory_bytes") / size),
        }

    rows = [cells(step) for step in sorted({every[0], *steps, every[-1]})]
    return [list(rows[0]), *(list(row.values()) for row in rows)]
