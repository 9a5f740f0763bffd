"""Figures of a comparison show what its report holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.results import ReportError
from fusion_bench_featcal.results.comparison_figures import (
    comparison_figure,
    cost_figure,
    plot_comparison,
)
from fusion_bench_featcal.results.drawing import MERGED, marks

METHODS = ["featcal", "surgery", "surgery:calibration"]


def row(name: str, average: float, upstream: str | None = "ties", **values: Any) -> dict[str, Any]:
    gain = None if upstream is None else average - 0.8
    interval = {"estimate": gain, "low": (gain or 0) - 0.02, "high": (gain or 0) + 0.01}
    entry = {"upstream": upstream, "name": name, "accuracy": {"average": average}, "gain": gain}
    return {**entry, "gain_interval": interval if gain else None, "cost": {}, **values}


def rows() -> list[dict[str, Any]]:
    seconds: dict[str, Any] = {
        name: {"cost": {"seconds": 2.0 + number}} for number, name in enumerate(METHODS)
    }
    return [
        row("base", 0.1, "ties", gain=-0.7),
        row("experts", 0.93, "ties", gain=0.13),
        *(row("ties", 0.8), row("featcal", 0.9, **seconds["featcal"])),
        row("surgery", 0.88, **seconds["surgery"]),
        *(row("wudi", 0.8, "wudi"), row("featcal", 0.85, "wudi", **seconds["featcal"])),
        row("surgery:calibration", 0.87, "wudi", cost={"seconds": "unavailable"}),
        row("lot", 0.82, "lot"),
    ]


def leave_report(folder: Path, **changes: Any) -> Path:
    content = {"kind": "comparison", "schema": 1, "suite": "toy", "rows": rows(), "failed": []}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(content | changes))
    return folder


def points(axes: Any) -> list[tuple[float, float]]:
    return [
        (round(float(line.get_xdata()[0]), 6), round(float(line.get_ydata()[0]), 6))
        for line in axes.lines
        if line.get_linestyle() == "None"
    ]


def bars(axes: Any) -> list[tuple[float, float]]:
    ends = [(line.get_xdata(), line.get_ydata()) for line in axes.lines]
    flat = [x for x, y in ends if len(x) == 2 and y[0] == y[1]]
    return [(round(float(low), 6), round(float(high), 6)) for low, high in flat]


def test_figures_of_one_merger_cut_nothing_off() -> None:
    few = [
        row("experts", 0.92, "ties", gain=0.12),
        row("ties", 0.81),
        row("surgery", 0.879, cost={"seconds": 3.1}),
        row("surgery:calibration", 0.87, cost={"seconds": 3.9}),
    ]
    accuracy, cost = comparison_figure(few, "toy"), cost_figure(few, "toy")
    assert points(accuracy.axes[0]) == [(81, 0), (87.9, -1), (87, -2)]
    assert [text.get_text() for text in accuracy.legends[0].texts] == [
        "the merger",
        "experts (92.0)",
    ]
    for figure in (accuracy, cost):
        figure.canvas.draw()  # type: ignore[attr-defined]
        box = figure.legends[0].get_title().get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    ticks = [tick.get_text() for tick in cost.axes[0].get_xticklabels()]
    assert ticks and all(float(tick) for tick in ticks)  # no powers of ten


def test_a_panel_for_each_merger_and_one_for_those_by_themselves() -> None:
    figure = comparison_figure(rows(), "toy")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["ties", "wudi", "by themselves"]
    ties, wudi, alone = figure.axes
    assert points(ties) == [(80, 0), (90, -1), (88, -2)]
    assert points(wudi) == [(80, 0), (85, -1), (87, -3)]
    assert points(alone) == [(82, 0)]
    assert bars(ties) == [(88, 91), (86, 89)]
    labels = [text.get_text() for text in ties.get_yticklabels()]
    assert labels == ["none", "featcal", "surgery", "surgery:calibration"]
    assert [text.get_text() for text in alone.get_yticklabels()] == ["lot"]


def test_a_reference_far_away_is_told_and_not_drawn() -> None:
    figure = comparison_figure(rows())
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["the merger", "base (10.0, outside)", "experts (93.0)"]
    assert figure.axes[0].get_xlim()[0] > 70


def test_gain_stands_against_seconds_where_both_are_known() -> None:
    ties, wudi = cost_figure(rows()).axes
    assert points(ties) == [(2, 10), (3, 8)]
    assert points(wudi) == [(2, 5)]
    assert ties.get_xscale() == "log"


def test_a_method_looks_the_same_everywhere_and_like_no_other() -> None:
    names = [
        "base",
        "experts",
        "ties",
        *METHODS,
        "featcal:a",
        "featcal:b",
        "own",
        "own:calibration",
    ]
    looks = marks(names, "ties")
    shown = {
        (look["color"], look["marker"], look.get("markerfacecolor")) for look in looks.values()
    }
    assert len(shown) == len(names)
    assert marks(["featcal", "wudi"], "wudi")["featcal"] == looks["featcal"]
    # of its name, not of its place
    for name in ("featcal:plus", "surgery", "featcal:b", "own"):
        alone = marks([name], None)[name]
        assert marks(["ties", name, "featcal"], "ties")[name] == alone
    assert looks["own"]["color"] == looks["own:calibration"]["color"]


def test_a_method_looks_the_same_in_panels_that_lack_others() -> None:
    names = ("featcal:a", "featcal:c")  # of which both choose one colour
    assert len({marks([name], None)[name]["color"] for name in names}) == 1
    cells = [row(name, 0.9, gain=0.1, cost={"seconds": 3.1}) for name in names]
    cells.append(row("featcal:c", 0.9, "wudi", gain=0.1, cost={"seconds": 3.1}))
    cells += [row(merger, 0.8, merger) for merger in ("ties", "wudi")]
    for figure in (comparison_figure(cells), cost_figure(cells)):
        looks = [
            {
                (line.get_color(), line.get_marker())
                for line in axes.lines
                if len(line.get_xdata()) == 1
            }
            for axes in list[Any](figure.axes)
        ]
        both, alone = (own - {(MERGED, "s")} for own in looks)
        assert len(both) == 2 and len(alone) == 1 and alone < both


def test_figures_are_reproducible_and_drawn_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = leave_report(tmp_path / "grid")
    first = {path.name: path.read_bytes() for path in plot_comparison(folder)}
    assert list(first) == ["comparison.png", "comparison.svg", "cost.png", "cost.svg"]
    assert main(["plot", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "out" / "comparison.png")


def test_without_seconds_there_is_no_cost_figure(tmp_path: Path) -> None:
    few = [entry for entry in rows() if entry["name"] in ("ties", "experts")]
    paths = plot_comparison(leave_report(tmp_path, rows=few))
    assert [path.name for path in paths] == ["comparison.png", "comparison.svg"]
    with pytest.raises(ReportError, match="no row to draw"):
        cost_figure(few)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "run"}, "is not a comparison"),
        ({"schema": 0}, "has schema 0"),
        ({"rows": [{"name": "ties"}]}, r"rows\[0\]: no upstream"),
        ({"rows": []}, "no row to draw"),
    ],
)
def test_other_reports_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        plot_comparison(leave_report(tmp_path, **changes))
