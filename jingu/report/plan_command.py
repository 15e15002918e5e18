"""`jingu plan`: a plan as tables, as an object, or as a page."""

from __future__ import annotations

from pathlib import Path

from jingu.training import plan_commands
from jingu.training.plan_commands import PlanQuery


def plan(query: PlanQuery, as_json: bool = False, html: Path | None = None) -> int:
    """Say what a run will take, as `jingu/training/plan_commands.py:plan` does, or write it as a page, too.

    Args:
        as_json: print all figures as an object instead of tables.
        html: the file of the page.

    Raises:
        JinguError: as there; or the file cannot be written.
    """
    if html is None:
        return plan_commands.plan(query, as_json)
    # Templates take longer to import than a plan to make.
    from jingu.report.plan_page import write_plan

    return write_plan(query, html, as_json=as_json)
