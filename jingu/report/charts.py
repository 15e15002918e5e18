"""Line charts as inline SVG: round ticks, gaps where a value is not finite, peaks kept however long the run.

Colours and type come from the page's style sheet, so that one drawing serves light, dark and paper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import median
from typing import Literal

from jingu.report.words import plain, safe, short

Point = tuple[int, float]  # step, value
value_of = itemgetter(1)

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 544, 14, 216  # the frame, in the drawing's units
MOST_POINTS = 1000
LARGEST = 1e100  # beyond this a value is as good as infinite, and its square root still fits a float


@dataclass(frozen=True)
class Series:
    """A named row of points, in the order of their steps."""

    label: str
    points: list[Point]
    kind: Literal["line", "dots"] = "line"
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """What one chart shows. `levels` are labelled horizontal lines.

    The vertical scale turns logarithmic where the highest value exceeds the median `logarithmic_beyond` times.
    """

    title: str
    unit: str
    series: list[Series]
    from_zero: bool = False
    logarithmic_beyond: float = math.inf
    levels: list[tuple[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Scale:
    """Values to the drawing's vertical position."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)


def drawable(value: float) -> bool:
    return math.isfinite(value) and abs(value) < LARGEST


def thin(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points: of each bucket the lowest, the highest and one that cannot be drawn."""
    if len(points) <= most:
        return points
    buckets = max(1, most // 3)
    kept = [points[0]]
    for bucket in range(buckets):
        part = points[len(points) * bucket // buckets : len(points) * (bucket + 1) // buckets]
        finite = [point for point in part if drawable(point[1])]
        chosen = {min(finite, key=value_of), max(finite, key=value_of)} if finite else set()
        gap = next((point for point in part if not drawable(point[1])), None)
        kept += sorted(chosen | {gap} if gap else chosen)
    return [*kept, points[-1]]


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten that enclose [low, high]; about `about` of them."""
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size or size < 1e-100:
        low, high = (low - 0.1 * size, high + 0.1 * size) if size >= 1e-100 else (0.0, 1.0)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def scale_for(chart: Chart) -> tuple[Scale, list[float]]:
    """The vertical scale and its ticks; logarithmic where that is allowed and peaks would flatten the rest."""
    values = [value for series in chart.series for _, value in series.points if drawable(value)]
    values += [value for _, value in chart.levels]
    low, high = min(values), max(values)
    if low > 0 and high > chart.logarithmic_beyond * median(values):
        low, high = low / 1.04, high * 1.04
        return Scale(low, high, True), _powers(low, high)
    ticks = round_ticks(min(low, 0.0) if chart.from_zero else low, max(high, 0.0) if chart.from_zero else high)
    return Scale(ticks[0], ticks[-1]), ticks


def _powers(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic scale: powers of ten, and round numbers between where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ratio = high / low
    digits = (1, 1.5, 2, 3, 4, 5, 7) if ratio < 10 else (1, 2, 5) if ratio < 1000 else (1,)
    chosen = decades[:: max(1, len(decades) // 6)]
    ticks = [float(f"{digit}e{decade}") for decade in chosen for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


def draw(chart: Chart, resumes: Sequence[int] = ()) -> str:
    """The chart as an HTML figure, with thin lines at the resumes' steps.

    Without a single value that can be drawn, a sentence takes its place.
    """
    if not any(drawable(value) for series in chart.series for _, value in series.points):
        return f'<figure><figcaption><b>{safe(chart.title)}</b></figcaption><p class="none">No values yet.</p></figure>'
    scale, ticks = scale_for(chart)
    last_step = max(1, *(step for series in chart.series for step, _ in series.points))
    parts = [_grid(scale, ticks, last_step)]
    parts += [
        f'<path class="resume" d="M{_across(step, last_step)} {TOP}V{BOTTOM}">'
        f"<title>resumed from step {step:,}</title></path>"
        for step in resumes
        if step <= last_step
    ]
    shown = [replace(series, points=thin(series.points)) for series in chart.series]
    parts += [_curve(series, scale, last_step) for series in shown]
    parts.append(_levels(chart, scale))
    name = safe(chart.title.lower().replace(" ", "-"))
    note = " · log scale" if scale.logarithmic else ""
    return (
        f'<figure data-chart="{safe(_for_script(shown, scale, last_step))}"><figcaption>'
        f'<span><b>{safe(chart.title)}</b> <span class="unit">{safe(chart.unit + note)}</span></span>'
        f'<span class="keys">{_keys(chart)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-desc" tabindex="0">'
        f'<title id="{name}-title">{safe(chart.title)} by step</title>'
        f'<desc id="{name}-desc">{safe(_described(chart))}</desc>{"".join(parts)}</svg>{_gaps(chart)}</figure>'
    )


def _across(step: int, last_step: int) -> float:
    return round(LEFT + step / last_step * (RIGHT - LEFT), 1)


def _grid(scale: Scale, ticks: list[float], last_step: int) -> str:
    marks = []
    for tick in ticks:
        y = round(scale.place(tick), 1)
        zero = ' class="base"' if tick == ticks[0] and not scale.logarithmic else ""
        marks.append(f'<line{zero} x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text x="{LEFT - 8}" y="{y}" dy=".32em" text-anchor="end">{short(tick)}</text>')
    for tick in round_ticks(0, last_step):
        if tick <= last_step and tick == int(tick):
            x = _across(int(tick), last_step)
            anchor = "end" if x > RIGHT - 16 else "middle"
            marks.append(f'<text x="{x}" y="{BOTTOM + 22}" text-anchor="{anchor}">{short(tick)}</text>')
    marks.append(f'<text x="{LEFT - 16}" y="{BOTTOM + 22}" text-anchor="end">step</text>')
    return f'<g class="grid">{"".join(marks)}</g>'


def _curve(series: Series, scale: Scale, last_step: int) -> str:
    path, pen_down, dots = [], False, []
    for step, value in series.points:
        if not drawable(value):
            pen_down = False
            continue
        x, y = _across(step, last_step), round(scale.place(value), 1)
        # "h0" makes a point that stands alone visible as a dot.
        path.append(f"L{x} {y}" if pen_down else f"M{x} {y}h0")
        dots.append(f'<circle cx="{x}" cy="{y}" r="2.6"/>')
        pen_down = True
    marks = "".join(dots) if len(dots) == 1 or (series.kind == "dots" and len(dots) <= 60) else ""
    return f'<g class="series {series.kind} s{series.colour}"><path d="{"".join(path)}"/>{marks}</g>'


def _levels(chart: Chart, scale: Scale) -> str:
    marks = []
    for index, (label, value) in enumerate(sorted(chart.levels, key=value_of, reverse=True)):
        y = round(scale.place(value), 1)
        # The highest is named above its line, the others below theirs and apart, so that close ones do not collide;
        # one that lies low is named above its line, too, so that its name does not stand on the axis.
        x, dy = RIGHT - 2 - 130 * max(0, index - 1), -5 if index == 0 or y + 18 > BOTTOM else 14
        marks.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text x="{x}" y="{y + dy}" text-anchor="end">{safe(label)} {plain(value)}</text>')
    return f'<g class="levels">{"".join(marks)}</g>' if marks else ""


def _keys(chart: Chart) -> str:
    """Each series' last value, named and coloured where there are several: the legend, and where hovering writes."""
    keys = []
    for series in chart.series:
        last = next((value for _, value in reversed(series.points) if drawable(value)), math.nan)
        name = f'<i class="s{series.colour}"></i>{safe(series.label)} ' if len(chart.series) > 1 else ""
        keys.append(f'<span>{name}<b class="value">{plain(last)}</b></span>')
    return "".join(keys)


def _described(chart: Chart) -> str:
    sentences = []
    for series in chart.series:
        points = [point for point in series.points if drawable(point[1])]
        if points:
            (first, start), (last, end) = points[0], points[-1]
            low, high = min(map(value_of, points)), max(map(value_of, points))
            sentences.append(
                f"{series.label}: {plain(start)} at step {first:,}, {plain(end)} at step {last:,}, "
                f"between {plain(low)} and {plain(high)} ({chart.unit})."
            )
    sentences += [f"{label}: {plain(value)}." for label, value in chart.levels]
    return " ".join(sentences)


def _gaps(chart: Chart) -> str:
    steps = sorted({step for series in chart.series for step, value in series.points if not drawable(value)})
    if not steps:
        return ""
    which = ", ".join(f"{step:,}" for step in steps[:4]) + (" …" if len(steps) > 4 else "")
    values = "1 value is" if len(steps) == 1 else f"{len(steps):,} values are"
    return f'<p class="gap">{values} not finite (step {which}): a gap in the line.</p>'


def _for_script(shown: list[Series], scale: Scale, last_step: int) -> str:
    """What the page's script needs to show the values under the pointer."""
    points = [
        [[step, plain(value), round(scale.place(value), 1)] for step, value in series.points if drawable(value)]
        for series in shown
    ]
    frame = {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "last": last_step}
    drawn = {"series": points, "colours": [series.colour for series in shown]}
    return json.dumps(frame | drawn, separators=(",", ":"))
