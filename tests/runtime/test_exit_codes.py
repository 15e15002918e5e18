"""Exit codes: one meaning for each, the cause before its consequences, and the guide's table."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import jingu
from jingu.runtime.exit_codes import (
    EXIT_CODES,
    WATCHDOG_SIGNAL,
    Restart,
    combine_exit_codes,
    exit_code_of,
    find_restart,
    killing_signal,
)

GUIDE = Path(jingu.__file__).parents[1] / "docs" / "guides" / "clusters.md"


def test_the_guide_has_the_table():
    rows = [f"| {row.code} | {row.meaning} | {row.restart.value} |" for row in EXIT_CODES]
    assert "\n".join(rows) in GUIDE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("codes", "is_node_lost", "code"),
    [
        ([0, 0], False, 0),
        # A person's error, and a person's wish, count before all that follows from them.
        ([137, 69, 2], False, 2),
        ([69, 2], True, 2),
        ([1, 130, 75], False, 130),
        # Ranks that lose a connection, abort, or are ended by the watchdog are not the cause.
        ([69, 69, 137], False, 137),
        ([134, 139, 69], False, 139),
        ([70, 70, 137], False, 137),
        ([1, 70], False, 70),
        ([69, 1], False, 1),
        ([69, 134], False, 134),
        ([75, 75], False, 75),
        # A lost node has no code; the others end because of it, in whatever way.
        ([69, 70, 1], True, 69),
        ([75, 75], True, 69),
        # A rank that has left without a word is no lost node.
        ([0, 69, 69], False, 1),
    ],
)
def test_the_code_of_the_cause(codes, is_node_lost, code):
    assert combine_exit_codes(codes, is_node_lost) == code
    assert combine_exit_codes(codes[::-1], is_node_lost) == code


def test_a_node_whose_peers_are_gone_says_so():
    assert combine_exit_codes([69, 0], is_whole=False) == 69


def test_signals_are_codes():
    assert exit_code_of(-signal.SIGKILL) == 137 and exit_code_of(3) == 3
    # The watchdog's kills are not those of others, such as the kernel's when memory runs out.
    assert exit_code_of(-WATCHDOG_SIGNAL) == 70
    assert killing_signal(139) == signal.SIGSEGV
    assert all(killing_signal(code) is None for code in (0, 1, 2, 69, 70, 75, 130, 255))


def test_what_starts_again():
    assert {code for code in range(256) if find_restart(code) == Restart.NEVER} == {0, 2, 130}
    assert {code for code in range(256) if find_restart(code) == Restart.ALWAYS} == {69, 75}
    assert find_restart(137) == find_restart(1) == find_restart(70) == Restart.COUNTED
