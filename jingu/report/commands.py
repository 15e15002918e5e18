"""`jingu report RUN`: write a page about a run, two runs, or evaluation results."""

from __future__ import annotations

from pathlib import Path

from jingu.errors import JinguError
from jingu.evaluate.result_files import read_results
from jingu.report.evaluations import render_evaluations
from jingu.report.page import render_page
from jingu.report.record import read_run
from jingu.report.run_comparison import render_comparison
from jingu.runtime.files import write_text_atomically


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
