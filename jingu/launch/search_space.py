"""The settings that a sweep varies: lists of values, and ranges."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from jingu.errors import JinguError

# Values are separated by commas, except for those within brackets.
_SEPARATOR = re.compile(r",(?![^\[{]*[\]}])")
# A range of positive numbers whose bounds differ by at least this factor is sampled on a log scale.
_LOG_RATIO = 10
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e-?\d+)?")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`: integers if both bounds are integers, on a log scale if the range is wide."""

    low: float
    high: float
    is_integer: bool

    @property
    def is_log(self) -> bool:
        return self.low > 0 and self.high >= _LOG_RATIO * self.low

    def draw(self, generator: Random) -> str:
        """Return a random number, formatted as a setting."""
        if self.is_log:
            value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = generator.uniform(self.low, self.high)
        return self.show(value)

    def show(self, value: float) -> str:
        return str(round(value)) if self.is_integer else f"{value:.4g}"


@dataclass(frozen=True)
class SearchSpace:
    """What a sweep varies: the values of each key, and the ranges of others."""

    values: Mapping[str, list[str]]
    ranges: Mapping[str, Range]

    def combine(self, count: int | None, seed: int) -> list[dict[str, str]]:
        """Return all combinations, or `count` random ones; fewer if draws from ranges of integers repeat.

        Raises:
            JinguError: there are ranges, but no count.
        """
        combinations = [dict(zip(self.values, row, strict=True)) for row in itertools.product(*self.values.values())]
        generator = Random(seed)
        if self.ranges:
            if count is None:
                fix = "Add --random N or --optuna N."
                raise JinguError("a range has no finite number of combinations.", where="--grid", fix=fix)
            draws = [generator.choice(combinations) for _ in range(count)]
            rows = [draw | {key: key_range.draw(generator) for key, key_range in self.ranges.items()} for draw in draws]
            return list({tuple(row.items()): row for row in rows}.values())
        if count is not None and count < len(combinations):
            return generator.sample(combinations, count)
        return combinations

    def corners(self) -> list[dict[str, str]]:
        """Return settings that together contain every value and every bound, to validate these."""
        columns = {
            **self.values,
            **{
                key: [key_range.show(key_range.low), key_range.show(key_range.high)]
                for key, key_range in self.ranges.items()
            },
        }
        first = {key: column[0] for key, column in columns.items()}
        return [first | {key: value} for key, column in columns.items() for value in column]

    def suggest(self, trial: Any) -> dict[str, str]:
        """Return settings that a trial of Optuna suggests."""
        settings = {key: trial.suggest_categorical(key, column) for key, column in self.values.items()}
        for key, key_range in self.ranges.items():
            suggest = trial.suggest_int if key_range.is_integer else trial.suggest_float
            bounds = (
                (int(key_range.low), int(key_range.high)) if key_range.is_integer else (key_range.low, key_range.high)
            )
            settings[key] = key_range.show(suggest(key, *bounds, log=key_range.is_log))
        return settings


def read_space(grid: Sequence[str]) -> SearchSpace:
    """Read the settings of a sweep, each `key=value,value` or `key=low:high`. Raises JinguError for a wrong form.

    Values of the same key add up, without repetitions.
    """
    values: dict[str, list[str]] = {}
    ranges: dict[str, Range] = {}
    for text in grid:
        key, _, listing = text.partition("=")
        if key in ("name", "runs_dir"):
            raise JinguError(f"{key} cannot vary: the names of the runs follow from their settings.", where="--grid")
        bounds = listing.split(":")
        if len(bounds) == 2 and all(map(_NUMBER.fullmatch, bounds)):
            low, high = map(float, bounds)
            if low >= high:
                raise JinguError(f"{text} is an empty range.", where="--grid", fix="Write the lower bound first.")
            if key in ranges:
                raise JinguError(f"{key} has two ranges.", where="--grid", fix="Use one of them.")
            ranges[key] = Range(low, high, all(re.fullmatch(r"-?\d+", bound) for bound in bounds))
            continue
        items = _SEPARATOR.split(listing)
        if "" in (key, *items):
            fix = "Write it like --grid optimizer.lr=1e-3,3e-4, without spaces."
            raise JinguError(f"{text} is not a setting with values.", where="--grid", fix=fix)
        values[key] = list(dict.fromkeys([*values.get(key, []), *items]))
    both = next((key for key in values if key in ranges), None)
    if both is not None:
        raise JinguError(f"{both} has both values and a range.", where="--grid", fix="Use one of them.")
    return SearchSpace(values, ranges)
