"""GPUs are selected as --devices says, and NCCL gets the settings that they need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jingu.errors import JinguError
from jingu.runtime.gpus import nccl_environment, select_gpus, visible_devices


@given(st.integers(1, 16), st.data())
def test_named_and_all_but_named(count: int, data: st.DataObject) -> None:
    cards = data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
    words = ",".join(map(str, cards))
    assert select_gpus(words, count) == cards
    rest = [card for card in range(count) if card not in cards]
    if rest:
        assert select_gpus(f"^{words}", count) == rest
    else:
        with pytest.raises(JinguError, match=f"no GPU is left. Exclude fewer than all {count}"):
            select_gpus(f"^{words}", count)


@pytest.mark.parametrize(
    ("text", "count", "words"),
    [
        ("0", 0, "--devices selects GPUs or NPUs, and this machine has none. Use --processes N."),
        ("0,4", 4, "--devices 0,4: there is no GPU 4: this machine has 4, counted from 0."),
        ("1,1", 4, "--devices 1,1: GPU 1 is listed twice."),
        ("0-2", 4, "--devices takes GPUs, such as 0,2,4, or all but some, such as ^1,3; not 0-2."),
        ("^", 4, "--devices takes GPUs, such as 0,2,4, or all but some, such as ^1,3; not ^."),
        ("", 4, "--devices takes GPUs, such as 0,2,4, or all but some, such as ^1,3; not ."),
    ],
)
def test_mistakes(text: str, count: int, words: str) -> None:
    with pytest.raises(JinguError) as raised:
        select_gpus(text, count)
    assert str(raised.value) == words


def test_cards_are_counted_among_the_visible_ones() -> None:
    names = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")
    assert visible_devices([0, 2], {}) == dict.fromkeys(names, "0,2")
    assert visible_devices([0, 2], {"ZE_AFFINITY_MASK": "5,6,7"})["ZE_AFFINITY_MASK"] == "5,7"
    assert visible_devices([1], {"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"})["CUDA_VISIBLE_DEVICES"] == "GPU-bb"
    assert visible_devices([1], {"HIP_VISIBLE_DEVICES": "3,4"})["HIP_VISIBLE_DEVICES"] == "4"


@pytest.mark.parametrize(
    ("cards", "needed"),
    [
        (["NVIDIA GeForce RTX 3090"] * 2, True),
        (["NVIDIA GeForce RTX 4090"] * 8, True),
        (["NVIDIA GeForce RTX 3060 Ti", "NVIDIA GeForce RTX 3060 Ti"], True),
        (["NVIDIA GeForce RTX 3090"], False),
        (["NVIDIA A100-SXM4-80GB"] * 8, False),
        (["NVIDIA H100 80GB HBM3"] * 8, False),
        (["NVIDIA RTX 6000 Ada Generation"] * 2, False),
        ([], False),
    ],
)
def test_nccl(cards: list[str], needed: bool) -> None:
    settings, why = nccl_environment(cards)
    assert settings == ({"NCCL_P2P_DISABLE": "1"} if needed else {})
    assert (f"{cards[0]} has no peer-to-peer copies" in why) if needed else why == ""
