"""The report's page: everything in one HTML file that fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable
from importlib.resources import files
from statistics import median
from typing import TypeVar

from jingu import __version__
from jingu.report.charts import Chart, Point, Series, draw, drawable
from jingu.report.read import Record, Row, number
from jingu.report.words import ABSENT, duration, memory_unit, plain, rounded, safe

Item = TypeVar("Item")

TABLE_ROWS = 20
SAMPLES_OF_A_PROMPT = 6
PROMPTS = 12
LONGEST_SAMPLE = 4000  # characters


def page(record: Record) -> str:
    """The whole file. All text of the run is escaped: what a model writes is not to be trusted."""
    script = files("jingu.report").joinpath("page.js").read_text(encoding="utf-8")
    style = files("jingu.report").joinpath("page.css").read_text(encoding="utf-8")
    # Only this very script may run, whatever should slip through the escaping.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    sections = [_header(record), _tiles(record), _notes(record), _charts(record), _comparison(record)]
    sections += [_samples(record), _table(record), _settings(record)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{safe(record.name)} · jingu report</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<footer>Written by jingu {safe(__version__)} from the run's metrics.jsonl: "
        f"{len(record.train):,} logged steps, {len(record.evaluations):,} evaluations.</footer>\n</main>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _points(rows: dict[int, Row], key: str) -> list[Point]:
    return [(step, number(row, key)) for step, row in sorted(rows.items())]


def _finite(rows: Iterable[Row], key: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := number(row, key))]


def _last(rows: dict[int, Row]) -> Row:
    return rows[max(rows)] if rows else {}


def _count(value: int, noun: str) -> str:
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


def _header(record: Record) -> str:
    started = safe(str(record.starts[0].get("time", ""))[:16].replace("T", " ")) if record.starts else ""
    when = f'<span class="when">started {started} UTC</span>' if started else ""
    return (
        f'<header><p class="eyebrow"><span>jingu report</span>{when}</p>'
        f'<h1>{safe(record.name)}</h1>\n<p class="lede">{safe(summary(record))}</p></header>'
    )


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
    sentence = f"{model}, {_count(max(record.train), 'step')}"
    if number(last, "tokens") > 0:
        sentence += f", {rounded(number(last, 'tokens'))} tokens"
    if number(last, "seconds") > 0:
        sentence += f" in {duration(number(last, 'seconds'))}"
    if 0 < ranks < math.inf:
        sentence += f" on {_count(int(ranks), 'rank')} ({start.get('device', '?')}, {start.get('precision', '?')})"
    bits = number(_last(record.evaluations), "bits_per_byte")
    return sentence + (f": {plain(bits)} bits per byte on held-out text." if math.isfinite(bits) else ".")


def _tiles(record: Record) -> str:
    last, evaluation = _last(record.train), _last(record.evaluations)
    start = record.starts[-1] if record.starts else {}
    rates, shares = _finite(record.train.values(), "tokens_per_second"), _finite(record.train.values(), "peak_share")
    memory = max(_finite(record.train.values(), "memory_bytes"), default=math.nan)
    size, unit = memory_unit(memory)
    peak = number(start, "peak_flops")
    held_out, seconds = number(evaluation, "loss"), number(last, "seconds")
    beside = f"held-out {plain(held_out)}" if evaluation else "on training text"
    share = f"{median(shares):.0%}" if shares else ABSENT
    tiles = [
        ("Final loss", plain(number(last, "loss")), beside),
        *[("Bits per byte", plain(number(evaluation, "bits_per_byte")), _best(record))] * _counts_bytes(record),
        ("Tokens a second", rounded(median(rates)) if rates else ABSENT, "median"),
        ("Share of peak", share, f"of {_flops(peak)}" if peak > 0 else "of the machine's arithmetic"),
        ("Peak memory", f"{plain(memory / size)} {unit}" if math.isfinite(memory) else ABSENT, "of one rank"),
        ("Training time", duration(seconds), _count(max(record.train, default=0), "step")),
    ]
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{name}</dt><dd>{value}</dd><dd>{safe(note)}</dd></div>" for name, value, note in tiles)
        + "</dl>"
    )


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


def _notes(record: Record) -> str:
    notes = "".join(f"<li>{safe(note)}</li>" for note in record.notes)
    return f'<aside class="notes" aria-label="Notes"><ul>{notes}</ul></aside>' if notes else ""


def _charts(record: Record) -> str:
    if not record.train and not record.evaluations:
        return ""
    train = record.train
    size, unit = memory_unit(max(_finite(train.values(), "memory_bytes"), default=0.0))
    memory = [(step, value / size) for step, value in _points(train, "memory_bytes")]
    levels = [(name, number(row, "bits_per_byte")) for name, row in record.baselines.items()]
    levels = [(name, value) for name, value in levels if drawable(value)]
    losses = [Series("training", _points(train, "loss")), *_held_out(record, "loss")]
    rate = [Series("rate", _points(train, "lr"))]
    norm = [Series("norm", _points(train, "grad_norm"))]
    speed = [Series("rate", _points(train, "tokens_per_second"))]
    charts = [
        Chart("Loss", "nats a token", losses, logarithmic_beyond=3),
        *[Chart("Bits per byte", "held-out text", _held_out(record, "bits_per_byte"), levels=levels)]
        * _counts_bytes(record),
        Chart("Learning rate", "", rate, from_zero=True),
        Chart("Gradient norm", "before clipping", norm, from_zero=True, logarithmic_beyond=10),
        Chart("Throughput", "tokens a second", speed, from_zero=True),
        Chart("Memory", f"{unit}, peak of one rank", [Series("memory", memory)], from_zero=True),
    ]
    at = ", ".join(f"{step:,}" for step in _spread(record.resumes, 12))
    hint = f"<p>Thin dotted lines: the run was resumed from step {at}.</p>" if at else ""
    if len(record.alike) > 1:
        hint += "<p>Not all evaluations read the same amount of held-out text; only those that did compare.</p>"
    drawings = "".join(draw(chart, record.resumes) for chart in charts)
    return _section("learning", "How it learned", f'{hint}<div class="charts">{drawings}</div>')


def _section(name: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>{body}</section>'


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


def _comparison(record: Record) -> str:
    rows = [(name, number(row, "bits_per_byte"), "") for name, row in record.baselines.items()]
    own = number(_last(record.evaluations), "bits_per_byte")
    rows = [row for row in [*rows, ("this model", own, ' class="own"')] if math.isfinite(row[1]) and row[1] >= 0]
    if not record.baselines or not rows:
        return ""
    most = max(value for _, value, _ in rows) or 1.0
    body = "".join(
        f'<tr{own}><th scope="row">{safe(name)}</th><td>{plain(value)}</td><td>{value / 8:.1%}</td>'
        f'<td class="bar" aria-hidden="true"><svg viewBox="0 0 100 8" preserveAspectRatio="none">'
        f'<rect width="{value / most * 100:.1f}" height="8"/></svg></td></tr>'
        for name, value, own in sorted(rows, key=lambda row: -row[1])
    )
    return _section(
        "compared",
        "Beside compressors",
        "<p>A model that predicts well compresses well: what the held-out text would take, were it stored with "
        "the help of each.</p>"
        '<table class="compared"><thead><tr><th scope="col">Coder</th><th scope="col">bits per byte</th>'
        f'<th scope="col">of its size</th><td class="bar"></td></tr></thead><tbody>{body}</tbody></table>',
    )


def _spread(items: list[Item], most: int) -> list[Item]:
    """At most `most` of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _samples(record: Record) -> str:
    steps_by_prompt: dict[str, list[int]] = {}
    for step, prompt in sorted(record.samples, key=lambda key: key[0]):
        steps_by_prompt.setdefault(prompt, []).append(step)
    if not steps_by_prompt:
        return ""
    blocks = []
    for prompt, steps in list(steps_by_prompt.items())[:PROMPTS]:
        chosen = _spread(steps, SAMPLES_OF_A_PROMPT)
        items = "".join(_sample(step, prompt, str(record.samples[step, prompt].get("text", ""))) for step in chosen)
        blocks.append(f'<ol class="samples">{items}</ol>')
        if len(chosen) < len(steps):
            blocks.append(f'<p class="gap">{len(chosen)} of {len(steps):,} evaluations shown.</p>')
    more = len(steps_by_prompt) - PROMPTS
    rest = f'<p class="gap">{_count(more, "further prompt")} not shown.</p>' if more > 0 else ""
    lead = "<p>Text written at evaluations: <span class='prompt'>the prompt</span>, then the model's continuation.</p>"
    return _section("writing", "How its writing changed", lead + "".join(blocks) + rest)


def _sample(step: int, prompt: str, text: str) -> str:
    prompt, text = (part if len(part) <= LONGEST_SAMPLE else part[:LONGEST_SAMPLE] + " …" for part in (prompt, text))
    return (
        f'<li><span class="step">step {step:,}</span>'
        f'<pre><span class="prompt">{safe(prompt)}</span><span>{safe(text)}</span></pre></li>'
    )


def _table(record: Record) -> str:
    """The charts' figures as text, at steps spread over the run (those of evaluations, where there are enough)."""
    if not record.train and not record.evaluations:
        return ""
    every = sorted(record.train.keys() | record.evaluations.keys())
    measured = sorted(record.evaluations)
    steps = _spread(measured if len(measured) >= 5 else every, TABLE_ROWS)
    size, unit = memory_unit(max(_finite(record.train.values(), "memory_bytes"), default=0.0))
    heads = ["step", "tokens", "time", "loss", "held-out tokens", "held-out loss", "bits per byte", "learning rate"]
    heads += ["gradient norm", "tokens/s", f"memory, {unit}"]
    body = []
    for step in sorted({every[0], *steps, every[-1]}):
        train, held_out = record.train.get(step), record.evaluations.get(step)
        cells = [rounded(number(train, "tokens")), duration(number(train, "seconds")), plain(number(train, "loss"))]
        cells.append(rounded(number(held_out, "tokens")))
        cells += [plain(number(held_out, key)) for key in ("loss", "bits_per_byte")]
        cells += [plain(number(train, key)) for key in ("lr", "grad_norm", "tokens_per_second")]
        cells.append(plain(number(train, "memory_bytes") / size))
        body.append(f'<tr><th scope="row">{step:,}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return _section(
        "figures",
        "Figures",
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="figures"><table class="figures">'
        f"<thead><tr>{columns}</tr></thead><tbody>{''.join(body)}</tbody></table></div>",
    )


def _settings(record: Record) -> str:
    parts = [("Configuration", "config.yaml", record.config), ("Model", "model.json", record.model)]
    return "".join(
        f'<details><summary><span class="h2">{title}</span> <span class="unit">{name}</span></summary>'
        f"<pre>{safe(text)}</pre></details>\n"
        for title, name, text in parts
        if text
    )
