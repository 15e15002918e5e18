"""Line charts: round ticks, gaps where a value is not finite, peaks kept however long the run.

chart.html draws them as inline SVG. Colours and type come from the page's style sheet, so that one drawing serves
light, dark and paper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import median
from typing import Literal

from markupsafe import Markup

from jingu.report.template import template
from jingu.words import plain

Point = tuple[int, float]  # step, value
value_of = itemgetter(1)

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 544, 14, 216  # the frame, in the drawing's units
_SIZES = {"WIDTH": WIDTH, "HEIGHT": HEIGHT, "LEFT": LEFT, "RIGHT": RIGHT, "TOP": TOP, "BOTTOM": BOTTOM}
MOST_POINTS = 1000
LARGEST = 1e100  # beyond this a value is as good as infinite, and its square root still fits a float


@dataclass(frozen=True)
class Series:
    """A named row of points, in the order of their steps."""

    label: str
    points: list[Point]
    kind: Literal["line", "dots"] = "line"
    colour: int = 0

    @property
    def last(self) -> float:
        """The last value that can be drawn."""
        return next((value for _, value in reversed(self.points) if drawable(value)), math.nan)


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
    """Values and steps to places in the drawing."""

    low: float
    high: float
    last_step: int
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """How far down a value lies."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)

    def across(self, step: float) -> float:
        """How far to the right a step lies."""
        return round(LEFT + step / self.last_step * (RIGHT - LEFT), 1)


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
    """The scale and its vertical ticks; logarithmic where that is allowed and peaks would flatten the rest."""
    last_step = max(1, *(step for series in chart.series for step, _ in series.points))
    values = [value for series in chart.series for _, value in series.points if drawable(value)]
    values += [value for _, value in chart.levels]
    low, high = min(values), max(values)
    if low > 0 and high > chart.logarithmic_beyond * median(values):
        low, high = low / 1.04, high * 1.04
        return Scale(low, high, last_step, True), _powers(low, high)
    ticks = round_ticks(min(low, 0.0) if chart.from_zero else low, max(high, 0.0) if chart.from_zero else high)
    return Scale(ticks[0], ticks[-1], last_step), ticks


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
    figure = template("chart.html")
    if all(math.isnan(series.last) for series in chart.series):
        return figure.render(chart=chart, scale=None)
    scale, ticks = scale_for(chart)
    shown = [replace(series, points=thin(series.points)) for series in chart.series]
    return figure.render(
        chart=chart,
        scale=scale,
        ticks=ticks,
        steps=[tick for tick in round_ticks(0, scale.last_step) if tick <= scale.last_step and tick == int(tick)],
        resumes=[step for step in resumes if step <= scale.last_step],
        curves=[_curve(series, scale) for series in shown],
        described=_described(chart),
        gaps=sorted({step for series in chart.series for step, value in series.points if not drawable(value)}),
        data=_for_script(shown, scale),
        **_SIZES,
    )


def _curve(series: Series, scale: Scale) -> tuple[Series, Markup, list[tuple[float, float]]]:
    """A series, its path, and its points where they are few."""
    path, dots, pen_down = [], [], False
    for step, value in series.points:
        if drawable(value):
            x, y = scale.across(step), scale.place(value)
            # "h0" makes a point that stands alone visible as a dot.
            path.append(f"L{x} {y}" if pen_down else f"M{x} {y}h0")
            dots.append((x, y))
        pen_down = drawable(value)
    few = len(dots) == 1 or (series.kind == "dots" and len(dots) <= 60)
    return series, Markup("".join(path)), dots if few else []


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


def _for_script(shown: list[Series], scale: Scale) -> str:
    """What the page's script needs to show the values under the pointer."""
    points = [
        [[step, plain(value), scale.place(value)] for step, value in series.points if drawable(value)]
        for series in shown
    ]
    frame = {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "last": scale.last_step}
    drawn = {"series": points, "colours": [series.colour for series in shown]}
    return json.dumps(frame | drawn, separators=(",", ":"))
