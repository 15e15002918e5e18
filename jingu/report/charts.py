"""Line charts with round ticks and gaps at values that are not finite. Downsampling a long run keeps its peaks.

chart.html renders the charts as inline SVG. Colors and fonts come from the page's style sheet, so one drawing works in
light mode, in dark mode and on paper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import median
from typing import Any, Literal

from markupsafe import Markup

from jingu.formatting import format_number
from jingu.report.template import load_template

Point = tuple[int, float]  # step, value
get_value = itemgetter(1)

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 544, 14, 216  # the plot area, in SVG units
SIZES: dict[str, Any] = {"WIDTH": WIDTH, "HEIGHT": HEIGHT, "LEFT": LEFT, "RIGHT": RIGHT, "TOP": TOP, "BOTTOM": BOTTOM}
MAX_POINTS = 1000  # points per curve; longer curves are downsampled
MAX_DRAWABLE = 1e100  # larger values count as infinite


@dataclass(frozen=True)
class Series:
    """A named series of points, in the order of their steps.

    Attributes:
        label: name in the legend.
        points: step and value of each point; a value that is not finite makes a gap.
        kind: line: a line; dots: a line with dots, if these are few; points: dots without a line.
        colour: number of the color in page.css.
    """

    label: str
    points: list[Point]
    kind: Literal["line", "dots", "points"] = "line"
    colour: int = 0

    @property
    def drawable(self) -> list[Point]:
        """The points with finite values of a reasonable size."""
        return [point for point in self.points if is_drawable(point[1])]


@dataclass(frozen=True)
class Chart:
    """The content of a chart.

    Attributes:
        title: title of the chart.
        unit: unit of the values, or a note in its place.
        series: the curves.
        from_zero: whether the y axis includes 0; a log scale cannot.
        logarithmic_beyond: use a log scale if the maximum is more than this factor times the median.
        levels: label and value of each horizontal line.
        names: names of the positions 1, 2, ... on the x axis, for a chart that is not over steps.
    """

    title: str
    unit: str
    series: list[Series]
    from_zero: bool = False
    logarithmic_beyond: float = math.inf
    levels: list[tuple[str, float]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scale:
    """Maps values and steps to SVG coordinates.

    Attributes:
        low: value at the bottom of the y axis.
        high: value at the top of the y axis.
        last_step: step at the right end of the x axis, which begins at 0.
        logarithmic: whether the y axis has a log scale.
    """

    low: float
    high: float
    last_step: int
    logarithmic: bool = False

    def y_of(self, value: float) -> float:
        """Return the y coordinate of a value."""
        low = self.low
        high = self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)

    def x_of(self, step: float) -> float:
        """Return the x coordinate of a step."""
        return round(LEFT + step / self.last_step * (RIGHT - LEFT), 1)


def is_drawable(value: float) -> bool:
    return math.isfinite(value) and abs(value) < MAX_DRAWABLE


def downsample(points: list[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return about `most` points: the first, the last, and the minimum, maximum and first gap of each bucket."""
    if len(points) <= most:
        return points
    buckets = max(1, most // 3)
    points_left = [points[0]]
    for bucket in range(buckets):
        part = points[len(points) * bucket // buckets : len(points) * (bucket + 1) // buckets]
        finite = [point for point in part if is_drawable(point[1])]
        extremes = {min(finite, key=get_value), max(finite, key=get_value)} if finite else set()
        gap = next((point for point in part if not is_drawable(point[1])), None)
        points_left += sorted(extremes | {gap} if gap else extremes)
    return [*points_left, points[-1]]


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` evenly spaced ticks that enclose [low, high].

    They are multiples of 1, 2, 2.5 or 5 times a power of ten.
    """
    size = max(abs(low), abs(high))
    # Widen an empty range, so that a constant series has an axis.
    if high - low <= 1e-9 * size or size < 1e-100:
        low, high = (low - 0.1 * size, high + 0.1 * size) if size >= 1e-100 else (0.0, 1.0)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def choose_scale(chart: Chart) -> tuple[Scale, list[float]]:
    """Return the scale of a chart and the ticks of its y axis: a log scale if peaks would flatten the rest."""
    last_step = max(1, *(step for series in chart.series for step, _ in series.points)) + bool(chart.names)
    values = [value for series in chart.series for _, value in series.drawable]
    values += [value for _, value in chart.levels]
    low, high = min(values), max(values)
    if low > 0 and high > chart.logarithmic_beyond * median(values):
        low, high = low / 1.04, high * 1.04
        return Scale(low, high, last_step, True), log_ticks(low, high)
    ticks = round_ticks(min(low, 0.0) if chart.from_zero else low, max(high, 0.0) if chart.from_zero else high)
    return Scale(ticks[0], ticks[-1], last_step), ticks


def log_ticks(low: float, high: float) -> list[float]:
    """Return the ticks of a log scale: powers of ten, and round numbers between them if there are few powers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ratio = high / low
    digits = (1, 1.5, 2, 3, 4, 5, 7) if ratio < 10 else (1, 2, 5) if ratio < 1000 else (1,)
    labeled_decades = decades[:: max(1, len(decades) // 6)]
    ticks = [float(f"{digit}e{decade}") for decade in labeled_decades for digit in digits]
    return [tick for tick in ticks if low <= tick <= high]


def draw_chart(chart: Chart, resumes: Sequence[int] = (), stages: Sequence[int] = ()) -> str:
    """Return the chart as an HTML figure; a chart without any drawable value says so in words.

    Args:
        resumes: steps from which the run was resumed, to mark with dotted lines.
        stages: first steps of the stages of the data, to mark with dashed lines.
    """
    figure = load_template("chart.html")
    if not any(series.drawable for series in chart.series):
        return figure.render(chart=chart, scale=None)
    scale, ticks = choose_scale(chart)
    series_shown = [replace(series, points=downsample(series.points)) for series in chart.series]
    return figure.render(
        chart=chart,
        scale=scale,
        ticks=ticks,
        steps=[tick for tick in round_ticks(0, scale.last_step) if tick <= scale.last_step and tick == int(tick)],
        names=list(enumerate(chart.names, 1)),
        resumes=[step for step in resumes if step <= scale.last_step],
        stages=[step for step in stages if 0 < step <= scale.last_step],
        curves=[_curve(series, scale) for series in series_shown],
        gaps=sorted({step for series in chart.series for step, value in series.points if not is_drawable(value)}),
        data=_for_script(series_shown, scale, chart.names),
        **SIZES,
    )


def _curve(series: Series, scale: Scale) -> tuple[Series, Markup, list[tuple[float, float]]]:
    """Return a series, its SVG path, and its points if they are few enough to be drawn as dots."""
    path = []
    dots = []
    pen_down = False
    for step, value in series.points:
        if is_drawable(value):
            x = scale.x_of(step)
            y = scale.y_of(value)
            # "h0" makes an isolated point visible as a dot.
            path.append(f"L{x} {y}" if pen_down else f"M{x} {y}h0")
            dots.append((x, y))
        pen_down = is_drawable(value)
    few = len(dots) == 1 or series.kind == "points" or (series.kind == "dots" and len(dots) <= 60)
    return series, Markup("" if series.kind == "points" else "".join(path)), dots if few else []


def _for_script(shown: list[Series], scale: Scale, names: list[str]) -> str:
    """Return the JSON from which the page's script shows the values under the pointer."""
    points = [[[step, format_number(value), scale.y_of(value)] for step, value in series.drawable] for series in shown]
    frame = {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "last": scale.last_step}
    curves = {"series": points, "colours": [series.colour for series in shown]}
    curves |= {"names": names} if names else {}
    return json.dumps(frame | curves, separators=(",", ":"))
