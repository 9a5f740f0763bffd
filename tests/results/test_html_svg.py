"""Axes, marks and panels of the HTML page's figures."""

import math
import re
from itertools import pairwise

import pytest
from html_pages import Reader

from fusion_bench_featcal.results.drawing import INK, MERGED, marks
from fusion_bench_featcal.results.html.svg import Axis, Panel, Point, Series, draw, mark, shapes

NAMES = ["base", "experts", "merger", "featcal", "featcal:plus", "featcal+ridge_surgery", "surgery",
         "prob_surgery", "surgery:calibration", "surgery_v2", "anchor_only", "distillation",
         *(f"other{n}" for n in range(12))]  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [[0.0, 1.0], [99.1, 99.2], [-3.0, 40.0], [5.0, 5.0], [0.0], [1e-9, 3e-9], [-7.0], [1e6, 3e6]],
)
def test_a_linear_axis_spans_its_values_with_a_few_round_ticks(values: list[float]):
    axis = Axis.linear(values)
    assert all(0 <= axis.share(value) <= 1 for value in values)
    assert 1 <= len(axis.ticks) <= 6
    assert all(axis.low <= value <= axis.high for value, _ in axis.ticks)
    assert all(float(text) == pytest.approx(value, abs=1e-12) for value, text in axis.ticks)


def test_zero_is_the_end_of_an_axis_of_distances():
    assert Axis.linear([0.2, 0.4], zero=True).low == 0
    axis = Axis.linear([-2.0, 4.0], zero=True)
    assert axis.low < -2 and "0" in [text for _, text in axis.ticks]


@pytest.mark.parametrize("values", [[8, 64, 256], [0.05, 20], [7.0], [3, 12], [0.001, 9000]])
def test_a_logarithmic_axis_has_equal_ratios_at_equal_distances(values: list[float]):
    axis = Axis.logarithmic(values)
    assert all(0 < axis.share(value) < 1 for value in values)
    assert 1 <= len(axis.ticks) <= 9
    places = [axis.share(value) for value, _ in axis.ticks]
    assert len(set(places)) == len(places)
    step = axis.share(2 * axis.low)
    assert axis.share(4 * axis.low) == pytest.approx(2 * step)


def test_settings_of_several_magnitudes_are_logarithmic_with_a_place_for_zero():
    axis = Axis.settings([10, 0, 0.01, 0.1, 1])
    shares = [axis.share(value) for value in (0, 0.01, 0.1, 1, 10)]
    steps = [two - one for one, two in pairwise(shares)]
    assert shares[0] > 0 and shares[-1] < 1 and steps == pytest.approx([steps[0]] * 4)
    assert [text for _, text in axis.ticks] == ["0", "0.01", "0.1", "1", "10"]
    assert not Axis.settings([0, 0.3, 1]).log and not Axis.settings([-1, 0, 50]).log
    assert Axis.settings([0, 0]).ticks == [(0, "0")]


def test_settings_without_room_have_no_name():
    ticks = Axis.settings([float(value) for value in range(100, 130)]).ticks
    assert ticks[0] == (100.0, "100") and 3 < len(ticks) < 9


def test_names_of_places_are_thinned_where_they_would_overlap():
    axis = Axis.names([f"encoder.{n}" for n in range(32)])
    assert 1 < len(axis.ticks) < 8
    assert [text for _, text in Axis.names(list("0123")).ticks] == list("0123")


def test_marks_differ_in_shape_or_colour_and_all_have_a_shape():
    drawn = [str(mark(look, "0", "0")) for look in marks(NAMES, "merger").values()]
    assert len(set(drawn)) == len(NAMES)
    defined = {path["id"] for path in Reader(str(shapes())).all("path")}
    assert {re.findall("#(mark[0-9]+)", text)[0] for text in drawn} <= defined


def test_ink_is_the_colour_of_text():
    assert 'fill="currentColor"' in mark({"color": INK, "marker": "s"}, "0", "0")
    assert f'fill="{MERGED}"' in mark({"color": MERGED, "marker": "s"}, "0", "0")


def panel(points: list[Point], upright: bool = True) -> Panel:
    axis = Axis.linear([0.0, 10.0])
    series = Series("a<b", {"color": MERGED, "marker": "o"}, points, joined=True)
    return Panel("title", axis, axis, [series], 'says "this"', upright=upright)


def test_a_panel_draws_points_lines_and_bars_at_their_places():
    points = [Point(0.0, 0.0, "first"), Point(10.0, 10.0, "last", (8.0, 10.0))]
    page = Reader(str(draw(panel(points))))
    first, last = page.all("use")
    assert float(first["x"][:-1]) < float(last["x"][:-1])
    assert float(first["y"]) > float(last["y"])
    (line,) = page.all("line", class_="join")
    assert (line["x1"], line["y1"], line["x2"], line["y2"]) == (
        first["x"], first["y"], last["x"], last["y"],
    )  # fmt: skip
    (bar,) = page.all("line", class_="bar")
    assert bar["x1"] == bar["x2"] == last["x"] and bar["y2"] == last["y"]
    across = Reader(str(draw(panel(points, upright=False)))).all("line", class_="bar")[0]
    assert across["y1"] == across["y2"] == last["y"] and across["x2"] == last["x"]


def test_a_panel_tells_what_it_shows_as_text():
    page = Reader(str(draw(panel([Point(1.0, 2.0, '<tip> "x"')]))))
    assert page.all("svg")[0]["aria-label"] == 'says "this"'
    assert page.all("use")[0]["data-tip"] == '<tip> "x"'
    assert page.all("g")[0]["data-series"] == "a<b"


def test_long_names_of_lines_are_cut_but_not_short_ones():
    heights = {"short": 0.0, "a_name_of_very_many_letters_in_all": 1.0}
    axis = Axis.lines(heights)
    assert axis.share(0.0) > axis.share(1.0)
    long = Panel("", Axis.linear([0.0, 1.0]), axis, [], "", left=31)
    texts = Reader(str(draw(long))).texts("text")
    assert "short" in texts and any(text.endswith("…") for text in texts)


def test_no_place_is_a_number_that_is_none():
    text = str(draw(panel([Point(math.pi, math.e, "")])))
    assert "nan" not in text and "inf" not in text


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        ("mnist", ["mnist"]),
        ("mini_fashion_mnist", ["mini_fashion_", "mnist"]),
        ("withoutanyplacetobreak", ["withoutanyplace", "tobreak"]),
        ("a_task_with_a_very_long_name_indeed", ["a_task_with_a_", "very_long_name…"]),
    ],
)
def test_a_long_label_has_two_lines(label: str, lines: list[str]):
    series = [Series("a", {"color": "#123456", "marker": "o"}, [Point(1.0, 0.0, "tip")])]
    x, y = Axis.linear([0.0, 1.0]), Axis.lines({label: 0.0, "b": 1.0})
    page = Reader(str(draw(Panel("t", x, y, series, "d", left=31, upright=False))))
    texts = [text for text in page.all("text") if text["text-anchor"] == "end" and text["text"]]
    shown = texts[: len(lines)]
    assert [text["text"] for text in shown] == lines
    heights = [float(text["y"]) for text in texts]
    assert heights == sorted(heights) and len(set(heights)) == len(heights)
