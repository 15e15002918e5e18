"""The page of a sweep: losses by the values of each setting, curves of the best runs, and a table of all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from jingu.report.charts import Chart, Point, Series, draw_chart
from jingu.report.record import RunRecord, get_number
from jingu.report.template import render_document

# Maximum number of curves: the number of colors in page.css.
MAX_CURVES = 6


def render_sweep(name: str, results: Sequence[Mapping[str, Any]], records: Sequence[RunRecord]) -> str:
    """Return the HTML page of a sweep.

    Args:
        name: name of the sweep.
        results: the results of each run, the best first: name, settings, state, step and validation loss (None: no
            evaluation yet).
        records: the runs to draw curves of, at most `MAX_CURVES`.
    """
    keys = list(results[0]["settings"])
    charts = [chart for key in keys if (chart := _chart_of_setting(key, results)) is not None]
    curves = [
        Series(record.name, [(step, get_number(row, "loss")) for step, row in sorted(rows.items())], colour=number)
        for number, record in enumerate(records)
        if (rows := record.evaluations)
    ]
    if curves:
        charts.append(Chart("Validation loss of the best runs", "nats per token", curves, logarithmic_beyond=3))
    return render_document(
        "sweep.html", title=name, keys=keys, results=results, charts=Markup("".join(map(draw_chart, charts)))
    )


def _chart_of_setting(key: str, results: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Return a chart of the losses at each value of a setting; None if fewer than two values have losses."""
    losses: dict[str, list[float]] = {}
    for row in results:
        if row["validation_loss"] is not None:
            losses.setdefault(row["settings"][key], []).append(row["validation_loss"])
    if len(losses) < 2:
        return None
    names = sorted(losses, key=_sort_key)
    runs: list[Point] = [(index, loss) for index, name in enumerate(names, 1) for loss in losses[name]]
    best: list[Point] = [(index, min(losses[name])) for index, name in enumerate(names, 1)]
    series = [Series("best", best, "dots"), Series("all runs", runs, "points", 1)]
    return Chart(key, "validation loss", series, logarithmic_beyond=3, names=names)


def _sort_key(value: str) -> tuple[float, str]:
    """Return a sort key: numbers in ascending order, then words."""
    try:
        return float(value), value
    except ValueError:
        return float("inf"), value
