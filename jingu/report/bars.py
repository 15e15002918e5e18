"""Draw stacked horizontal bars, one row per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from jingu.report.charts import round_ticks
from jingu.report.template import load_template

# Left and right end of the bars, and the height of a row, in SVG units.
BAR_LEFT, BAR_RIGHT, ROW = 90, 1000, 26


def draw_bars(
    title: str,
    unit: str,
    colours: Mapping[str, int],
    rows: Sequence[tuple[str, dict[str, float]]],
    limit: float | None = None,
) -> Markup:
    """Return a figure with a stacked bar for each row.

    Args:
        unit: unit of the values.
        colours: for each part, the number of its color in page.css.
        rows: label of each bar, and the values of its parts by name.
        limit: value at which to draw a dashed line; None: no line.
    """
    totals = [sum(parts.values()) for _, parts in rows]
    ticks = round_ticks(0, max([*totals, limit or 0.0]), 8)
    scale = (BAR_RIGHT - BAR_LEFT) / ticks[-1]
    bars = []
    for (label, parts), total in zip(rows, totals, strict=True):
        x = float(BAR_LEFT)
        drawn_bars = []
        for name, value in parts.items():
            drawn_bars.append((name, round(x, 1), round(value * scale, 1), value))
            x += value * scale
        bars.append((label, total, drawn_bars))
    present = {name for _, parts in rows for name in parts}
    figure = load_template("bars.html").render(
        title=title,
        unit=unit,
        names={name: colour for name, colour in colours.items() if name in present},
        rows=bars,
        limit=None if limit is None else round(BAR_LEFT + limit * scale, 1),
        ticks=[(round(BAR_LEFT + tick * scale, 1), tick) for tick in ticks],
        BAR_LEFT=BAR_LEFT,
        BAR_RIGHT=BAR_RIGHT,
        ROW=ROW,
    )
    return Markup(figure)
