"""Which cards and cores ranks use, and what known cards need; `local.py` and `ranks.py` act on it. Without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from jingu.errors import JinguError

_NO_PEERS = re.compile(r"GeForce RTX [345]0[5-9]0")


def choose_cards(text: str, count: int) -> list[int]:
    """The cards that `--devices` names: `0,2,4` those, `^1,3` all but those.

    Args:
        count: cards of the machine.

    Raises:
        JinguError: words that name no cards, a card that is not there, or none that is left.
    """
    if not count:
        raise JinguError("--devices chooses among CUDA cards, and this machine has none.", fix="Use --processes N.")
    but = text.startswith("^")
    words = text.removeprefix("^").split(",")
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise JinguError(f"--devices takes cards, such as 0,2,4, or all but some, such as ^1,3; not {text}.")
    named = [int(word) for word in words]
    if absent := [card for card in named if card >= count]:
        raise JinguError(
            f"there is no card {absent[0]}: this machine has {count}, counted from 0.", where=f"--devices {text}"
        )
    if twice := [card for card in named if named.count(card) > 1]:
        raise JinguError(f"card {twice[0]} is named twice.", where=f"--devices {text}")
    chosen = [card for card in range(count) if card not in named] if but else named
    if not chosen:
        raise JinguError("no card is left.", where=f"--devices {text}", fix=f"Leave out fewer than all {count}.")
    return chosen


def visible_cards(chosen: Sequence[int], visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for the chosen cards, counted among those that are `visible` so far (None: all)."""
    names = visible.split(",") if visible else None
    return ",".join(names[card] if names else str(card) for card in chosen)


def nccl_settings(cards: Sequence[str]) -> tuple[dict[str, str], str]:
    """Environment variables that NCCL needs for cards of these names, and why."""
    without = next((card for card in cards if _NO_PEERS.search(card)), None)
    if without is None or len(cards) < 2:
        return {}, ""
    why = f"{without} cannot copy straight to another card: NCCL_P2P_DISABLE=1 is set (set it to 0 if yours can)."
    return {"NCCL_P2P_DISABLE": "1"}, why


def usable_cores() -> int:
    """Cores this process may run on, which in a container is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
