"""`jingu report RUN`."""

from __future__ import annotations

from pathlib import Path

from jingu.errors import JinguError
from jingu.report.page import page
from jingu.report.read import read_run
from jingu.runtime.files import replace_text


def report(run: Path, to: Path | None = None) -> None:
    """Write the run's report, one HTML file that needs nothing else, and say where it went.

    Args:
        run: folder of a run; it may still be training.
        to: file to write; None: `report.html` in the run's folder.

    Raises:
        JinguError: there is no such run, it has no metrics, or the file cannot be written.
    """
    target = to if to is not None else run / "report.html"
    if target.is_dir():
        raise JinguError("is a folder, not a file to write.", where=target, fix="Name the file, such as report.html.")
    text = page(read_run(run))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_text(target, text)
    except OSError as error:
        raise JinguError(
            f"the report cannot be written ({error.strerror}).", where=target, fix="Name another place with --to."
        ) from error
    print(f"Wrote {target} ({len(text.encode()) / 1000:,.0f} kB); open it in a browser.")
