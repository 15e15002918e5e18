"""`jingu plan`: print a plan as tables or JSON, or write it as an HTML page."""

from __future__ import annotations

from pathlib import Path

from jingu.training import plan_commands
from jingu.training.plan_commands import PlanQuery


def plan(query: PlanQuery, as_json: bool = False, html: Path | None = None) -> int:
    """Print the plan of a run, as `jingu/training/plan_commands.py:plan` does, and write it as a page if asked.

    Args:
        as_json: print all figures as a JSON object instead of tables.
        html: file of the page; None: no page.

    Returns:
        The exit code.

    Raises:
        JinguError: the plan cannot be made, or the file cannot be written.
    """
    if html is None:
        return plan_commands.plan(query, as_json)
    # Importing the templates takes longer than making a plan, so they are imported only for a page.
    from jingu.report.plan_page import write_plan

    return write_plan(query, html, as_json=as_json)
