"""Charts: round ticks, thinning that keeps peaks, gaps."""

from __future__ import annotations

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from jingu.formatting import format_duration, format_number, format_rounded, format_short
from jingu.report.charts import BOTTOM, Chart, Series, downsample, draw_chart, round_ticks

finite = st.floats(min_value=-1e99, max_value=1e99, allow_nan=False)


@given(finite, finite)
def test_ticks_enclose_the_values_and_are_few(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = round_ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), ticks[-1] - ticks[0])
    assert ticks[0] <= low + slack and high - slack <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


def test_ticks_are_round() -> None:
    assert round_ticks(0, 1200) == [0, 250, 500, 750, 1000, 1250]
    assert round_ticks(1.53, 8.9) == [0, 2, 4, 6, 8, 10]
    assert round_ticks(0, 0.003) == [0, 0.001, 0.002, 0.003]


def test_thinning_keeps_peaks_ends_and_gaps() -> None:
    points = [(step, math.sin(step / 9000)) for step in range(100_000)]
    points[31_415] = (31_415, 40.0)
    points[27_182] = (27_182, -40.0)
    points[16_180] = (16_180, math.nan)
    kept = downsample(points)
    assert len(kept) <= 1002
    assert {(31_415, 40.0), (27_182, -40.0)} <= set(kept)
    assert 16_180 in [step for step, _ in kept]
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    steps = [step for step, _ in kept]
    assert steps == sorted(steps)


@given(st.lists(st.floats(), max_size=80), st.integers(3, 60))
def test_thinning_never_moves_a_value(values: list[float], most: int) -> None:
    points = list(enumerate(values))
    kept = downsample(points, most)
    assert len(kept) <= most + 2
    assert all(point in points for point in kept)
    drawable = [value for value in values if math.isfinite(value) and abs(value) < 1e100]
    shown = [value for _, value in kept if math.isfinite(value) and abs(value) < 1e100]
    if drawable:
        assert (min(shown), max(shown)) == (min(drawable), max(drawable))


def test_a_value_that_is_not_finite_breaks_the_line_and_is_said() -> None:
    points = [(10, 3.0), (20, math.nan), (30, 2.0), (40, math.inf), (50, 1.0)]
    drawing = draw_chart(Chart("Loss", "nats", [Series("training", points)]))
    path = re.search(r'<path d="([^"]*)"', drawing)
    assert path is not None and path[1].count("M") == 3 and "L" not in path[1]
    assert "2 values are not finite (step 20, 40)" in drawing
    assert "nan" not in drawing.lower() and ">inf" not in drawing


def test_a_single_point_is_a_dot() -> None:
    drawing = draw_chart(Chart("Loss", "nats", [Series("training", [(10, 3.0)])]))
    assert drawing.count("<circle") == 1
    assert "training: 3 at step 10" in drawing


def test_points_lie_where_the_ticks_say() -> None:
    drawing = draw_chart(Chart("Rate", "", [Series("rate", [(0, 0.0), (50, 5.0), (100, 10.0)])], from_zero=True))
    height = {label: float(y) for y, label in re.findall(r'y="([\d.]+)" dy=[^>]*>([^<]+)<', drawing)}
    (_, start), (_, middle), (_, end) = re.findall(r"[ML]([\d.]+) ([\d.]+)", drawing)
    assert (float(start), float(end)) == (height["0"], height["10"])
    assert abs(float(middle) - (height["0"] + height["10"]) / 2) <= 0.1


def test_peaks_turn_the_scale_logarithmic() -> None:
    values = [0.4] * 50 + [400.0]
    series = [Series("norm", list(enumerate(values)))]
    assert "log scale" in draw_chart(Chart("Norm", "", series, from_zero=True, logarithmic_beyond=10))
    assert "log scale" not in draw_chart(Chart("Norm", "", series, from_zero=True))


@given(st.lists(st.floats(0.5, 8), min_size=1, max_size=4), st.lists(st.floats(0.5, 8), min_size=1, max_size=4))
def test_names_of_levels_stay_off_the_axis(values: list[float], levels: list[float]) -> None:
    chart = Chart(
        "Bits", "", [Series("validation", list(enumerate(values)))], levels=[("gzip", value) for value in levels]
    )
    names = re.findall(r'y="([\d.]+)" text-anchor="end">gzip', draw_chart(chart))
    assert len(names) == len(levels)
    assert all(float(y) <= BOTTOM - 4 for y in names)


def test_numbers_as_people_read_them() -> None:
    assert [format_number(value) for value in (1.71234, 12345.6, 0.0003, 0.00002, math.nan)] == [
        "1.712", "12,346", "0.0003", "2e-5", "–",
    ]  # fmt: skip
    assert [format_short(value) for value in (0, 800, 1200, 12500, 4.2e6)] == ["0", "800", "1,200", "12.5k", "4.2M"]
    assert [format_rounded(value) for value in (4_213_760, 9_830_400, 940)] == ["4.21M", "9.83M", "940"]
    assert [format_duration(value) for value in (3.21, 58, 59.7, 238, 3600 * 2 + 300, 86400 * 3 + 4 * 3600)] == [
        "3.2 s", "58 s", "1 min 00 s", "3 min 58 s", "2 h 05 min", "3 d 4 h",
    ]  # fmt: skip


def safe(text: str) -> str:
    """A title as the page shows it."""
    return draw_chart(Chart(text, "", [])).removeprefix("<figure><figcaption><b>").partition("</b>")[0]


@given(st.text(alphabet=st.characters()))
def test_any_text_becomes_writable_and_markup_free(text: str) -> None:
    shown = safe(text)
    shown.encode("utf-8")
    assert not set(shown) & set("<>\"'\0\r\x1b")


def test_half_surrogates_and_controls_are_made_visible() -> None:
    assert safe("\ud800a\x00\x1b[31m\n\tb") == "\ufffda␀␛[31m\n\tb"
