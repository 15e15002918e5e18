"""Dropout by keys: the share that is dropped, and that neither other places nor other steps have to do with it."""

from __future__ import annotations

import torch

from jingu.model.noise import dropped, keys


def test_as_much_is_dropped_as_asked_and_the_rest_makes_up_for_it() -> None:
    found = dropped(torch.ones(8, 50, 64, dtype=torch.float64), keys(3, 16, 8, 50), 5, 0.3, 0)
    assert set(found.unique().tolist()) == {0.0, 1 / 0.7}
    assert abs(float((found == 0).double().mean()) - 0.3) < 0.01
    for dims in ((0, 1), (0, 2), (1, 2)):  # no row, token or input is favoured
        assert abs((found == 0).double().mean(dims) - 0.3).max() < 0.1
    other = dropped(torch.ones_like(found), keys(3, 24, 8, 50), 5, 0.3, 0)
    agree = float(((found == 0) & (other == 0)).double().mean())
    assert abs(agree - 0.09) < 0.01


def test_a_part_drops_what_the_whole_drops_there() -> None:
    x, key = torch.randn(4, 10, 12), keys(1, 0, 4, 10)
    whole = dropped(x, key, 7, 0.5, 0)
    assert torch.equal(dropped(x[1:3, 4:, 5:9], key[1:3, 4:], 7, 0.5, 5), whole[1:3, 4:, 5:9])
    assert not torch.equal(dropped(x, key, 8, 0.5, 0) == 0, whole == 0)
