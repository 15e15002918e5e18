"""The diagnosis of a hang: which rank the others wait for, and what it does instead, from the reports of all ranks."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jingu.errors import join_words
from jingu.runtime.exit_codes import exit_code_of, killing_signal
from jingu.watch.links import Link, describe_slow_link
from jingu.watch.slot import PHASES
from jingu.watch.stacks import describe_place

# Collectives whose inputs have the same shape on every rank of the group.
_SAME_SHAPES = ("all_reduce", "all_gather", "allgather", "reduce_scatter", "broadcast")
_BROKEN = ("dead", "stopped", "unreachable")
# The exit code of a rank that a library has aborted.
_ABORTED = exit_code_of(-signal.SIGABRT)
# At most this many ranks are described.
_MAX_NAMED_RANKS = 3


@dataclass(frozen=True)
class RankReport:
    """What one rank was doing when training hung.

    Attributes:
        state: running; stopped (by a signal); disk (uninterruptible wait for I/O); silent (a call holds the GIL); dead
            (it has exited); unreachable (its node has no connection to that of rank 0).
        peer: the rank with which it exchanges hidden states; -1 for none.
        seconds: seconds since its last activity began.
        groups: its process groups by name: axis, ranks, and calls (number, operation, shapes, whether it is done).
        stack: stack of its main thread, or of the thread that this one waits for, the innermost function first.
        links: traffic from its node to others; only in the report of the first rank of a node.
        exit_code: how it has ended; None if it has not, or nobody knows.
    """

    rank: int
    host: str
    state: str
    phase: str = ""
    step: int = 0
    micro_batch: int = -1
    peer: int = -1
    seconds: float = 0.0
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    exit_code: int | None = None

    @staticmethod
    def from_dict(values: dict[str, Any]) -> RankReport:
        return RankReport(**{**values, "links": [Link(**link) for link in values["links"]]})


@dataclass(frozen=True)
class Wait:
    """A rank waits in a collective until the absent ranks join it, or in a point-to-point exchange for one rank."""

    rank: int
    call: str
    axis: str
    absent: tuple[int, ...]
    is_exchange: bool = False


def judge(reports: Sequence[RankReport], world: int, seconds: float) -> str:
    """Return sentences that name the ranks for which the others wait.

    The suspects are, in this order: ranks whose call differs from that of the rest of their group; ranks that are dead,
    stopped or unreachable; the ranks at the end of all chains of waits; and in a cycle of waits, the rank for which
    most ranks wait. A slow link is also named; it is the cause if all ranks have joined their collectives.

    Args:
        reports: reports of the ranks that could be asked.
        world: number of ranks.
        seconds: how long training has made no progress; 0 if all ranks have exited.
    """
    by_rank = {report.rank: report for report in reports}
    waits = list(_find_waits(by_rank))
    missing = tuple(rank for rank in range(world) if rank not in by_rank)
    broken = tuple(rank for rank, report in by_rank.items() if report.state in _BROKEN)
    # Ranks that have printed an error of their own explain nothing here.
    silent = [rank for rank in broken if by_rank[rank].phase != "failed"]
    aborted = silent if not missing and all(is_aborted(by_rank[rank]) for rank in silent) else []
    reasons = find_difference(reports)
    if reasons:
        suspects = tuple(reasons)
    elif aborted:
        # A library aborts if what another rank sends does not match, and its calls are lost: nobody knows who is right.
        reasons = _describe_abort(by_rank, aborted)
        suspects = tuple(reasons)
    elif broken or missing:
        suspects = (*broken, *missing)
    else:
        suspects = _follow(waits, by_rank)
    step = max((report.step for report in reports), default=0)
    duration = f"made no progress for {seconds:.0f} s" if seconds else "ended"
    lines = [f"Training has {duration} in step {step + 1:,}."]
    slow_link = None
    if not (reasons or broken or missing):
        slow_link = describe_slow_link([link for report in reports for link in report.links])
    if slow_link is not None:
        lines.append(f"  Data is still under way: {slow_link}")
        suspects = suspects if waits else ()
    for rank in suspects[:_MAX_NAMED_RANKS]:
        lines.append(_describe(rank, by_rank.get(rank), waits, reasons.get(rank, "")))
    if len(suspects) > _MAX_NAMED_RANKS:
        lines.append(f"  So are {len(suspects) - _MAX_NAMED_RANKS} other ranks.")
    return "\n".join(lines)


def _find_waits(by_rank: dict[int, RankReport]) -> Iterator[Wait]:
    """Yield each call in which a rank waits for others that have not started it."""
    for rank, report in by_rank.items():
        if report.state == "dead":
            continue
        is_in_collective = False
        for name, group in report.groups.items():
            for number, operation, _, is_done in group["calls"]:
                absent = tuple(
                    peer
                    for peer in group["ranks"]
                    if peer != rank and peer in by_rank and _last_call(by_rank[peer], name) < number
                )
                if absent and not is_done:
                    yield Wait(rank, f"{operation.replace('_', '-')} {number:,}", group["axis"], absent)
                    is_in_collective = True
        if report.peer in by_rank and not is_in_collective:
            call = f"{PHASES[report.phase]} of micro-batch {report.micro_batch + 1}"
            yield Wait(rank, call, "pipeline", (report.peer,), is_exchange=True)


def _last_call(report: RankReport, group: str) -> int:
    calls = report.groups.get(group, {}).get("calls")
    return calls[-1][0] if calls else 0


def find_difference(reports: Sequence[RankReport]) -> dict[int, str]:
    """Find the first call whose operation or shapes differ between the ranks of its group.

    Returns:
        A description for each rank at fault: the ranks that differ from most ranks; or, if there is no majority, the
        first rank of each side. Empty if all calls agree.
    """
    # 1. Gather what each rank called, by group and number.
    calls: dict[tuple[str, int], dict[int, tuple[str, str]]] = {}
    axes = {}
    for report in reports:
        for name, group in report.groups.items():
            axes[name] = group["axis"]
            for number, operation, shapes, _ in group["calls"]:
                shape = str(shapes) if operation.lstrip("_").startswith(_SAME_SHAPES) else ""
                calls.setdefault((name, number), {})[report.rank] = (operation, shape)
    # 2. Find the first call of a group in which they differ.
    differing = [key for key, by_member in calls.items() if len(set(by_member.values())) > 1]
    if not differing:
        return {}
    name, number = min(differing, key=lambda key: (key[1], key[0]))
    by_member = calls[name, number]
    usual = _majority(by_member)
    if usual is None:
        # The other groups of the axis make the same call.
        others = {
            (group, rank): call
            for (group, call_number), members in calls.items()
            if call_number == number and group != name and axes[group] == axes[name]
            for rank, call in members.items()
        }
        usual = _majority(others)
        usual = usual if usual in by_member.values() else None
    sides: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(by_member.items()):
        sides.setdefault(call, []).append(rank)
    place = f"as number {number:,} of {_format_axis(axes[name])}"
    if usual is not None:
        where = f"where the other ranks called {_describe_call(usual)}"
        return {
            rank: f"called {_describe_call(call)} {place}, {where}"
            for rank, call in sorted(by_member.items())
            if call != usual
        }
    # 3. Nobody knows which side is right: say what each does.
    reasons = {}
    for call, members in sides.items():
        peers = [
            f"{_format_ranks(ranks)} called {_describe_call(other)}" for other, ranks in sides.items() if other != call
        ]
        also = f" (as {_format_ranks(members[1:])} did)" if members[1:] else ""
        reasons[members[0]] = f"called {_describe_call(call)}{also} {place}, where {join_words(peers, 'and')}"
    return reasons


def is_aborted(report: RankReport) -> bool:
    """Return whether a library has aborted the rank."""
    return report.exit_code == _ABORTED


def _describe_abort(by_rank: Mapping[int, RankReport], aborted: Sequence[int]) -> dict[int, str]:
    """Return what the ranks did when a library aborted some of them, if these are not many."""
    reasons = dict.fromkeys(
        aborted, "was aborted by a library; one reason is a call that does not match another rank's"
    )
    for rank, report in by_rank.items():
        calls = [(group, call) for group in report.groups.values() for call in group["calls"][-1:]]
        if rank in aborted or not calls:
            continue
        group, (number, operation, shapes, _) = calls[-1]
        call_text = _describe_call((operation, str(shapes)))
        reasons[rank] = f"called {call_text} as number {number:,} of {_format_axis(group['axis'])} last"
    return reasons


def _majority(calls: Mapping[Any, tuple[str, str]]) -> tuple[str, str] | None:
    """Return the call of more than half of the ranks; None if there is none."""
    counts = Counter(calls.values()).most_common(1)
    return counts[0][0] if counts and 2 * counts[0][1] > len(calls) else None


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {join_words([str(rank) for rank in ranks], 'and')}"


def _describe_call(call: tuple[str, str]) -> str:
    operation, shapes = call
    return operation.strip("_").replace("_", "-") + (f" of {shapes}" if shapes else "")


def _follow(waits: Sequence[Wait], by_rank: dict[int, RankReport]) -> tuple[int, ...]:
    """Return the awaited ranks that do not wait themselves; in a cycle of waits, the rank for which most wait."""
    waiting = {wait.rank for wait in waits}
    wait_counts = Counter(rank for wait in waits for rank in set(wait.absent))
    roots = tuple(rank for rank in sorted(wait_counts) if rank not in waiting)
    if roots:
        return roots
    # Prefer exchanges: a rank that has left the pipeline schedule is at fault, not its neighbor that still waits there.
    wait_counts = Counter(rank for wait in waits if wait.is_exchange for rank in wait.absent) or wait_counts
    if wait_counts:
        return (wait_counts.most_common(1)[0][0],)
    # Nobody waits for another rank: suspect the one that has been idle for the longest time.
    return (max(by_rank.values(), key=lambda report: report.seconds).rank,)


def _describe(rank: int, report: RankReport | None, waits: Sequence[Wait], reason: str) -> str:
    """Return the lines about a rank: what the others wait for, and what it does instead."""
    other_waits = [wait for wait in waits if rank in wait.absent]
    if report is None:
        place = f"rank {rank}, whose node does not report,"
    else:
        place = f"rank {rank} ({report.host})"
    if reason:
        text = f"  {place} {reason}"
    elif other_waits:
        call, axis = Counter((wait.call, wait.axis) for wait in other_waits).most_common(1)[0][0]
        text = f"  {place} has not joined {call} of {_format_axis(axis)}"
    else:
        text = f"  {place} is the cause"
    names = [str(number) for number in sorted({wait.rank for wait in other_waits})]
    if names:
        noun = "rank" if len(names) == 1 else "ranks"
        text += f"; {noun} {join_words(names, 'and')} {'waits' if len(names) == 1 else 'wait'} for it"
    return f"{text}.\n  {_describe_state(report, waits)}" if report is not None else f"{text}."


def _describe_state(report: RankReport, waits: Sequence[Wait]) -> str:
    if report.state == "dead":
        return _describe_end(report)
    if report.state == "stopped":
        return "It is stopped: something sent it SIGSTOP, or a debugger holds it."
    if report.state == "unreachable":
        return "The network between its node and that of rank 0 is down."
    place = describe_place(report.stack)
    since = f" since {report.seconds:.0f} s"
    if report.state == "silent":
        return f"A call{place} holds the interpreter's lock{since}."
    if report.state == "disk":
        return f"It waits for a disk{place}{since}."
    own_wait = next((wait for wait in waits if wait.rank == report.rank), None)
    if own_wait is not None:
        peers = "rank" if len(own_wait.absent) == 1 else "ranks"
        names = join_words([str(rank) for rank in own_wait.absent], "and")
        return f"It waits for {peers} {names} in {own_wait.call} of {_format_axis(own_wait.axis)}{place}{since}."
    part = f", micro-batch {report.micro_batch + 1}" if report.micro_batch >= 0 else ""
    return f"It is{place}{since} ({PHASES[report.phase]}{part})."


def _describe_end(report: RankReport) -> str:
    """Say how a rank has ended, as far as it is known."""
    if report.phase == "failed":
        return "It has ended with an error."
    if report.exit_code is None:
        return "It has ended, without an error message."
    number = killing_signal(report.exit_code)
    if number is None:
        return f"It exited with code {report.exit_code}, without an error message."
    why = ", most likely because memory ran out" if number == signal.SIGKILL else ""
    return f"It was killed by {number.name}{describe_place(report.stack)}{why}."


def _format_axis(axis: str) -> str:
    return axis if axis == "all ranks" else f"axis `{axis}`"
