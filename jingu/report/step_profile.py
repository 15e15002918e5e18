"""Read the profile of a run (`train.profile`): the time of operators in a step on each rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from jingu.report.bars import draw_bars
from jingu.report.record import Row, get_number, parse_line
from jingu.report.template import spread

# Kinds of operators: the number of their color in page.css, and a pattern for their names in lower case. The first
# pattern that matches applies.
_KINDS = {
    "optimizer": (5, r"adam|optimizer|_foreach|muon|lion"),
    "attention": (1, r"attention|sdpa|flash|fmha"),
    "matmuls": (0, r"(^|::|_)(add|b|baddb|grouped_)?mm$|gemm|matmul|linear|cutlass|mkldnn|onednn"),
    "communication": (
        3,
        r"gloo|nccl|c10d|fsdp|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send|recv",
    ),
    "copies": (4, r"copy|memcpy|memset|clone|::cat|_to_copy|contiguous|index|gather|scatter|fill|zero"),
    "elementwise": (
        2,
        r"(add|sub|mul|div|neg|exp|log|silu|gelu|relu|sigmoid|softmax|pow|r?sqrt|sum|mean|norm|where)_?$",
    ),
    "other": (9, ""),
}
# The number of the color of each kind, in the order of the bars' parts.
_COLOURS = {kind: colour for colour, kind in sorted((colour, kind) for kind, (colour, _) in _KINDS.items())}
_NUM_OPERATORS = 10
_MAX_RANKS = 16


@dataclass(frozen=True)
class StepProfile:
    """The last profile of a run.

    Attributes:
        step: step after which the profile begins.
        steps: number of profiled steps.
        bars: figure with a bar per rank: milliseconds of self time per step, by kind of operator.
        slowest: the rank with the most self time.
        operators: the slowest operators of this rank: name, milliseconds per step, share of the self time, and calls
            per step.
    """

    step: int
    steps: int
    bars: Markup
    slowest: int
    operators: list[tuple[str, float, float, float]]


def read_profile(folder: Path) -> StepProfile | None:
    """Return the last profile in the folder of a run; None if there is none."""
    summaries: dict[int, dict[int, Row]] = {}
    for file in folder.glob("profile/step-*-rank-*.summary.json"):
        numbers = re.fullmatch(r"step-(\d+)-rank-(\d+)\.summary\.json", file.name)
        summary = parse_line(file.read_text(encoding="utf-8", errors="replace"))
        if numbers and summary and get_number(summary, "steps") >= 1:
            summaries.setdefault(int(numbers[1]), {})[int(numbers[2])] = summary
    if not summaries:
        return None
    step, by_rank = max(summaries.items())
    times = {rank: _operators(summary) for rank, summary in sorted(by_rank.items())}
    slowest = max(times, key=lambda rank: sum(milliseconds for _, milliseconds, _ in times[rank]))
    total = sum(milliseconds for _, milliseconds, _ in times[slowest]) or 1.0
    rows = [(f"rank {rank}", _sum_by_kind(times[rank])) for rank in spread(list(times), _MAX_RANKS)]
    return StepProfile(
        step,
        int(get_number(by_rank[slowest], "steps")),
        draw_bars("Time of operators by rank", "ms per step", _COLOURS, rows),
        slowest,
        [(name, time, time / total, calls) for name, time, calls in times[slowest][:_NUM_OPERATORS]],
    )


def _operators(summary: Row) -> list[tuple[str, float, float]]:
    """Return name, milliseconds per step and calls per step of each operator in the summary of a rank."""
    steps = get_number(summary, "steps")
    rows = [row for row in summary.get("operators", []) if isinstance(row, dict)]
    return [
        (str(row.get("name", "")), 1000 * get_number(row, "seconds") / steps, get_number(row, "calls") / steps)
        for row in rows
    ]


def _sum_by_kind(operators: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return the milliseconds per step of each kind of operator, without kinds that take no time."""
    sums = dict.fromkeys(_COLOURS, 0.0)
    for name, milliseconds, _ in operators:
        kind = next(kind for kind, (_, pattern) in _KINDS.items() if re.search(pattern, name.lower()))
        sums[kind] += milliseconds
    return {kind: milliseconds for kind, milliseconds in sums.items() if milliseconds > 0}
