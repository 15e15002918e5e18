"""`jingu report RUN`: write a page about a run, two runs, or evaluation results."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from jingu.config.introspect import format_value
from jingu.errors import JinguError, pluralize
from jingu.evaluate.result_files import read_results
from jingu.formatting import MISSING, format_duration, format_number, format_rounded, memory_unit
from jingu.report.charts import Chart, Series, draw_chart
from jingu.report.evaluations import render_evaluations
from jingu.report.page import last_row, render_page, run_charts, run_figures
from jingu.report.record import RunRecord, get_number, read_run
from jingu.report.template import render_document
from jingu.runtime.files import write_text_atomically
from jingu.tables import flatten


def write_report(run: Path, to: Path | None = None, against: Path | None = None) -> None:
    """Write the report of a run, of two runs, or of evaluation results, as one self-contained HTML file.

    Prints the path of the file. For a run with results in `evaluations`, a page of them is written there too.

    Args:
        run: folder of a run, which may still be training; or a folder with the results of `jingu evaluate`.
        to: file to write; None: `report.html` in the folder, or `comparison.html` for two runs.
        against: another run to compare with; or a folder with other evaluation results, to mark the answers that
            changed.

    Raises:
        JinguError: there is no such run, it has no metrics, or the file cannot be written.
    """
    is_pair = against is not None and (run / "metrics.jsonl").is_file() and not read_results(against)
    target = to if to is not None else run / ("comparison.html" if is_pair else "report.html")
    if target.is_dir():
        raise JinguError("is a folder, not a file to write.", where=target, fix="Name the file, such as report.html.")
    if is_pair and against is not None:
        write_page(target, render_comparison(read_run(run), read_run(against)))
        return
    text = render_evaluations(run, against)
    if text is None:
        evaluations = render_evaluations(run / "evaluations", against)
        if evaluations is not None:
            write_page(run / "evaluations" / "report.html", evaluations)
        text = render_page(read_run(run))
    write_page(target, text)


def write_page(target: Path, text: str) -> None:
    """Write a page, and print its path. Raises JinguError if it cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(target, text)
    except OSError as error:
        raise JinguError(
            f"the page cannot be written ({error.strerror}).", where=target, fix="Name another place."
        ) from error
    print(f"Wrote {target} ({len(text.encode()) / 1000:,.0f} kB); open it in a browser.")


# A page that compares two runs: results, curves in shared charts, and differences in settings.


def render_comparison(first: RunRecord, second: RunRecord) -> str:
    """Return the HTML page of two runs. Changes are those from the first to the second run."""
    # Unknown memory is NaN. max() ignores it only after a number, so the 0.0 comes first.
    unit = memory_unit(max(0.0, run_figures(first)[2], run_figures(second)[2]))
    # Two runs with the same name get their order as a suffix.
    names = [first.name, second.name] if first.name != second.name else [f"{first.name} (1)", f"{second.name} (2)"]
    charts = _pair_charts(names, run_charts(first, *unit), run_charts(second, *unit))
    return render_document(
        "comparison.html",
        names=names,
        notes=[f"{name}: {note}" for name, run in zip(names, (first, second), strict=True) for note in run.notes],
        results=_results(first, second, *unit),
        charts=Markup("".join(map(draw_chart, charts))),
        differences=[
            ("Configuration", "config.yaml", _differences(first.config, second.config)),
            ("Model", "model.json", _differences(first.model, second.model)),
        ],
    )


def _results(first: RunRecord, second: RunRecord, size: float, unit: str) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table of results: name, its value in each run, and the relative change.

    Args:
        size: number of bytes in a unit of memory.
        unit: name of this unit.
    """
    rows = [("ranks", _describe_ranks(first), _describe_ranks(second), "")]
    values = [_values(first, size, unit), _values(second, size, unit)]
    for key, (before, show) in values[0].items():
        after = values[1][key][0]
        change = f"{after / before - 1:+.1%}" if before and math.isfinite(after / before) else ""
        rows.append((key, show(before), show(after), change))
    return rows


def _values(run: RunRecord, size: float, unit: str) -> dict[str, tuple[float, Any]]:
    """Return the results of a run by name, each with the function that formats it."""
    last, evaluation = last_row(run.train), last_row(run.evaluations)
    rate, share, memory = run_figures(run)
    return {
        "steps": (float(max(run.train, default=0)), format_rounded),
        "tokens": (get_number(last, "tokens"), format_rounded),
        "training time": (get_number(last, "seconds"), format_duration),
        "final loss": (get_number(last, "loss"), format_number),
        "validation loss": (get_number(evaluation, "loss"), format_number),
        "bits per byte": (get_number(evaluation, "bits_per_byte"), format_number),
        "tokens per second, median": (rate, format_rounded),
        "share of peak, %": (100 * share, format_number),
        f"peak memory per rank, {unit}": (memory / size, format_number),
    }


def _describe_ranks(run: RunRecord) -> str:
    start = run.starts[-1] if run.starts else {}
    ranks = get_number(start, "ranks")
    count = pluralize(int(ranks), "rank") if math.isfinite(ranks) else MISSING
    return f"{count} ({start.get('device', '?')}, {start.get('precision', '?')})"


def _pair_charts(names: list[str], first: list[Chart], second: list[Chart]) -> list[Chart]:
    """Return a chart for each curve that either run has, with the curves of both."""
    curves: dict[tuple[str, str], list[Series]] = {}
    for number, charts in enumerate((first, second)):
        for chart in charts:
            for series in chart.series:
                curve = replace(series, label=names[number], colour=number)
                curves.setdefault((chart.title, series.label), []).append(curve)
    by_title = {chart.title: chart for chart in first + second}
    divided_titles = {chart.title for chart in first + second if len(chart.series) > 1}
    return [
        replace(
            by_title[title], title=f"{title}, {label}" if title in divided_titles else title, series=pair, levels=[]
        )
        for (title, label), pair in curves.items()
    ]


def _differences(first: str, second: str) -> list[tuple[str, str, str]]:
    """Return the keys whose values differ between two YAML or JSON texts, each with both values; except the name."""
    before, after = _flat_values(first), _flat_values(second)
    keys = [key for key in {**before, **after} if key != "name" and before.get(key) != after.get(key)]
    return [(key, _show(before, key), _show(after, key)) for key in keys]


def _flat_values(text: str) -> dict[str, Any]:
    """Return the values of a YAML or JSON text by dotted key; none if the text is not valid."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return flatten(tree) if isinstance(tree, dict) else {}


def _show(values: dict[str, Any], key: str) -> str:
    return format_value(values[key]) if key in values else MISSING
