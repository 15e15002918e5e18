"""Dropout by keys: the share that is dropped, and that neither other places nor other steps have to do with it."""

from __future__ import annotations

import torch

from jingu.model.dropout import seeded_dropout, token_seeds


def test_as_much_is_dropped_as_asked_and_the_rest_makes_up_for_it() -> None:
    found = seeded_dropout(torch.ones(8, 50, 64, dtype=torch.float64), token_seeds(3, 16, 8, 50), 5, 0.3, 0)
    assert set(found.unique().tolist()) == {0.0, 1 / 0.7}
    assert abs(float((found == 0).double().mean()) - 0.3) < 0.01
    for dims in ((0, 1), (0, 2), (1, 2)):  # no row, token or input is favoured
        assert abs((found == 0).double().mean(dims) - 0.3).max() < 0.1
    other = seeded_dropout(torch.ones_like(found), token_seeds(3, 24, 8, 50), 5, 0.3, 0)
    agree = float(((found == 0) & (other == 0)).double().mean())
    assert abs(agree - 0.09) < 0.01


def test_a_part_drops_what_the_whole_drops_there() -> None:
    x, key = torch.randn(4, 10, 12), token_seeds(1, 0, 4, 10)
    whole = seeded_dropout(x, key, 7, 0.5, 0)
    assert torch.equal(seeded_dropout(x[1:3, 4:, 5:9], key[1:3, 4:], 7, 0.5, 5), whole[1:3, 4:, 5:9])
    assert not torch.equal(seeded_dropout(x, key, 8, 0.5, 0) == 0, whole == 0)
