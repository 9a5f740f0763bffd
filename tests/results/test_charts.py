"""The four charts: what is drawn of numbers, rows' looks, and the text of figures."""

import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex

from fusion_bench_featcal.lab.report import charts
from fusion_bench_featcal.results import ReportError
from fusion_bench_featcal.results.intervals import ITEMS, SEEDS, Interval

EVIL = "<script>alert('&')</script> --> $x$"
KEY_FIGURES = {"cars": Interval(60.0, 55.0, 66.0, ITEMS), "dtd": Interval.of(40.0)}


def marked(axes: Any) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Points of an axes by colour and mark."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line in axes.lines:
        if line.get_marker() != "None":
            look = (to_hex(line.get_color()), str(line.get_marker()))
            points.setdefault(look, []).extend(map(tuple, line.get_xydata()))
    return points


def bars(axes: Any) -> list[list[tuple[float, float]]]:
    """Ends of the bars of an axes."""
    segments = (s for collection in axes.collections for s in collection.get_segments())
    return [[(float(x), float(y)) for x, y in segment] for segment in segments]


def look_of(name: str) -> tuple[str, str]:
    look = charts.marks([name])[name]
    return look["color"], look["marker"]


def test_dots_stand_on_their_category_with_their_interval():
    rows = {"merged": {"cars": Interval.of(50.0)}, "featcal": KEY_FIGURES}
    figure = charts.dots({"ties": rows, "other": {"featcal": KEY_FIGURES}}, "accuracy, %")
    first, second = figure.axes
    assert [text.get_text() for text in first.get_yticklabels()] == ["cars", "dtd"]
    assert first.get_title(loc="left") == "ties" and first.get_xlabel() == "accuracy, %"
    (merged,) = marked(first)[look_of("merged")]
    cars, dtd = marked(first)[look_of("featcal")]
    assert (merged[0], cars[0], dtd) == (50.0, 60.0, (40.0, 1.0))
    # Rows of one category stand one below the other, and one row alone on the category's line.
    assert merged[1] < 0 < cars[1] and merged[1] == -cars[1]
    assert bars(first) == [[(55.0, cars[1]), (66.0, cars[1])]]
    assert marked(second)[look_of("featcal")] == [(60.0, 0.0), (40.0, 1.0)]
    assert first.get_ylim() == (1.5, -0.5) == second.get_ylim()
    assert first.get_xlim() == second.get_xlim()


def test_rows_that_are_categories_need_no_legend():
    estimates = {
        "featcal": {"featcal": Interval.of(1.0)},
        "surgery": {"surgery": Interval(2, 1, 3, ITEMS)},
    }
    assert charts.dots({"ties": estimates}, "gain").legends == []
    (legend,) = charts.dots({"ties": {"a": KEY_FIGURES, "b": KEY_FIGURES}}, "gain").legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]


def test_curves_have_bands_and_single_points_bars():
    lines = {
        "featcal": {8: Interval(0.5, 0.4, 0.6, SEEDS), 99: Interval(0.7, 0.6, 0.8, SEEDS)},
        "merged": {8: Interval(0.2, 0.1, 0.4, SEEDS)},
    }
    figure = charts.curves({"": lines}, "samples", "accuracy")
    (axes,) = figure.axes
    assert marked(axes)[look_of("featcal")] == [(8, 0.5), (99, 0.7)]
    collections: Any = axes.collections
    band, bar = collections
    corners = {tuple(map(float, point)) for point in band.get_paths()[0].vertices}
    assert corners == {(8.0, 0.4), (8.0, 0.6), (99.0, 0.6), (99.0, 0.8)}
    assert [tuple(point) for point in bar.get_segments()[0]] == [(8, 0.1), (8, 0.4)]
    assert axes.get_xscale() == "log" and list(axes.get_xticks()) == [8, 99]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["8", "99"]
    assert figure.get_supylabel() == "accuracy"


def test_a_point_without_interval_leaves_the_band_of_the_others():
    line = {1: Interval(0.5, 0.4, 0.6, SEEDS), 2: Interval(0.7, 0.6, 0.8, SEEDS)}
    (axes,) = charts.curves({"": {"featcal": line | {3: Interval.of(0.9)}}}, "n", "accuracy").axes
    collections: Any = axes.collections
    (band,) = collections
    corners = {tuple(map(float, point)) for point in band.get_paths()[0].vertices}
    assert corners == {(1.0, 0.4), (1.0, 0.6), (2.0, 0.6), (2.0, 0.8)}


def test_long_names_leave_room_for_their_panel():
    name = "corruption = gaussian_noise, severity = 3"
    value = Interval(1, 0, 2, ITEMS)
    figure = charts.dots({"": {"featcal": {name: value}}}, "average accuracy, %")
    charts.svg(figure)  # lays it out
    (axes,) = figure.axes
    label, panel = axes.xaxis.label.get_window_extent(), axes.get_window_extent()
    assert panel.width / figure.dpi > 2 and label.x1 < figure.bbox.x1


def test_a_curve_that_reaches_zero_has_a_linear_axis():
    line = {"featcal": {0: Interval.of(1.0), 5: Interval.of(2.0)}}
    (axes,) = charts.curves({"": line}, "ridge", "accuracy").axes
    assert axes.get_xscale() == "linear" and len(axes.collections) == 0


def test_lines_over_blocks_begin_at_zero_and_leave_gaps():
    drift = {"before": {"0": 0.1, "1": 0.2, "2": 0.3}, "after": {"0": 0.1, "2": 0.2}}
    (axes,) = charts.blocks({"featcal": drift}, "drift").axes
    after = marked(axes)[look_of("after")]
    assert after[0] == (0.0, 0.1) and math.isnan(after[1][1]) and after[2] == (2.0, 0.2)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1", "2"]
    assert axes.get_ylim()[0] == 0


def test_cells_of_a_heat_map_show_their_numbers():
    table = {"cars": {"0": -20.0, "1": 5.0}, "dtd": {"1": 40.0}}
    (axes,) = charts.heat({"featcal": table}, "change, %", "+.0f").axes
    cells = {text.get_text(): text.get_position() for text in axes.texts}
    assert cells == {"-20": (0.5, 0.5), "+5": (1.5, 0.5), "+40": (1.5, 1.5)}
    assert [text.get_color() for text in axes.texts] == ["black", "black", "white"]
    (mesh,) = axes.collections
    assert mesh.get_clim() == (-40.0, 40.0)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["cars", "dtd"]
    (positive,) = charts.heat({"": {"a": {"x": 1.0, "y": 3.0}}}, "accuracy").axes
    assert positive.collections[0].get_clim() == (1.0, 3.0)


def test_a_row_has_one_look_and_no_other_row_has_it():
    names = [f"method_{number}" for number in range(20)] + ["featcal", "merged", "base", "experts"]
    looks = charts.marks(names)
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == len(names)
    assert looks["featcal"] == charts.marks(["featcal"])["featcal"]
    assert looks["method_0"] == charts.marks(["method_0", "method_1"])["method_0"]


def figure_of(name: str = "featcal"):
    one, two = Interval(1, 0.5, 2, ITEMS), Interval(2, 1, 3, ITEMS)
    return charts.dots({name: {name: {name: one}, "b": {name: two}}}, name)


def test_names_are_text_and_nothing_else():
    text = charts.svg(figure_of(f"{EVIL}\x1b[31m"))
    root = ElementTree.fromstring(text)
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    # Panel, category, row in the legend, and label.
    assert words.count(f"{EVIL}\\x1b[31m") == 4
    assert "<!--" not in text and "\x1b" not in text


def test_an_svg_is_deterministic_and_loads_nothing():
    text = charts.svg(figure_of())
    assert text == charts.svg(figure_of())
    assert text.startswith("<svg ") and "<image" not in text
    links = [value for e in ElementTree.fromstring(text).iter() for key, value in e.items()
             if key.endswith("href")]  # fmt: skip
    assert links and all(link.startswith("#") for link in links)


def test_ink_is_the_colour_of_text_and_the_background_is_transparent():
    text = charts.svg(figure_of())
    assert "currentColor" in text and "prefers-color-scheme:dark" in text
    assert "#ffffff" not in text


def test_figures_are_files_of_their_names(tmp_path: Path):
    (path,) = charts.save({"accuracy": figure_of()}, tmp_path / "new", "--figures")
    assert path == tmp_path / "new" / "accuracy.svg"
    assert path.read_text() == charts.svg(figure_of())


def test_nothing_to_draw_and_no_matplotlib_are_one_line(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ReportError, match="nothing to draw"):
        charts.blocks({}, "drift")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"figures need matplotlib: pip install '.*\[lab\]'"):
        figure_of()
