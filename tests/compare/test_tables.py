import io

import pytest
from rich.console import Console
from synthetic import LEVELS, SIX, make_report

from fusion_bench_featcal.compare import Report
from fusion_bench_featcal.compare.tables import (
    TEXT_WIDTH,
    best_cells,
    broken,
    provenance,
    report_grid,
    report_markdown,
    rich_grid,
    short_names,
)

TWENTY = tuple(f"some_data_set_{number}" for number in range(20))
PRESETS = {f"featcal:preset_{number}": 0.7 for number in range(8)}


def printed(report: Report, width: int = TEXT_WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report.table(width))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_six_tasks_fit_the_page_with_every_number():
    text = printed(make_report({**LEVELS, "featcal:suite": 0.8}, SIX))
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH
    assert "…" not in text
    line = next(line for line in text.splitlines() if line.strip().startswith("featcal:suite"))
    assert line.split() == ["featcal:suite", *["80.0"] * 7, "67", "%"]


def test_twenty_tasks_are_listed_downwards():
    text = printed(make_report(tasks=TWENTY))
    assert max(map(len, text.splitlines())) <= TEXT_WIDTH
    lines = [line.split() for line in text.splitlines()]
    for task in TWENTY:
        assert [task.removeprefix("some_"), "30.0", "90.0", "60.0", "75.0"] in lines
    assert ["recovered", "gap", "-", "100", "%", "0", "%", "50", "%"] in lines


def test_twenty_tasks_and_many_rows_are_summed_up():
    text = printed(make_report({**LEVELS, **PRESETS}, TWENTY))
    lines = [line.split() for line in text.splitlines()]
    assert ["featcal", "75.0", "50", "%"] in lines
    assert "data_set_3" not in text


@pytest.mark.parametrize("tasks", [("cars",), ("cars", "dtd"), SIX, TWENTY])
@pytest.mark.parametrize("rows", [LEVELS, {**LEVELS, **PRESETS}])
def test_the_width_that_is_planned_is_the_width_that_is_printed(tasks: tuple[str, ...], rows: dict):
    grid = report_grid(make_report(rows, tasks))
    for form in (grid, grid.transposed()):
        assert Console(width=500).measure(rich_grid(form)).maximum == form.width()


def test_what_made_the_numbers_is_printed_literally(capsys: pytest.CaptureFixture[str]):
    report = make_report(notes=["calibrated on the [bold]test[/bold] split"])
    report.device = {"device": "cuda:0", "cpu": "abacus"}
    report.show()
    text = capsys.readouterr().out
    assert "featcal: 256 samples per task from the train split" in text
    assert "calibration time: featcal 10.0 s" in text
    assert "seeds: calibration 42; cuda:0, abacus" in text
    assert "[bold]test[/bold]" in text


def test_markdown_has_table_settings_cost_and_versions():
    report = make_report(versions={"torch": "2.13.0"})
    text = report_markdown(report)
    assert "| featcal | **75.0** | **75.0** | **75.0** | 50 % |" in text
    assert "| ridge_lambda | 0.05 |" in text
    assert "| peak_rss_bytes | 1024.0 MiB |" in text
    assert "- torch: 2.13.0" in text


def test_markdown_of_many_tasks_lists_them_downwards():
    assert "| data_set_19 | 30.0 | 90.0 | 60.0 | **75.0** |" in report_markdown(
        make_report(tasks=TWENTY)
    )


def test_cells_that_would_break_markdown_are_escaped():
    report = Report()
    report.add_row("a|b", {"x|y": 0.5})
    assert "| a\\|b | 50.0 | 50.0 | - |" in report_markdown(report)


def test_unmeasured_cost_is_shown_as_such():
    report = Report()
    report.add_row("featcal", {"a": 0.5}, cost={"seconds": "unavailable", "x_bytes": "unavailable"})
    assert "| x_bytes | unavailable |" in report_markdown(report)
    assert not any("calibration time" in line for line in provenance(report))


def test_best_cells_mark_ties_and_pass_over_references_and_gaps():
    values = [[0.9, 0.9], [0.5, None], [0.5, 0.4]]
    assert best_cells(values, [False, True, True]) == {(1, 0), (2, 0), (2, 1)}


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (["mini_a", "mini_b"], ["a", "b"]),
        (["mini_a", "mini"], ["mini_a", "mini"]),
        (["mini_", "mini_b"], ["mini_", "mini_b"]),
        (["mini_a"], ["mini_a"]),
        (["a", "b"], ["a", "b"]),
        ([], []),
    ],
)
def test_a_shared_prefix_is_dropped_only_where_names_remain(tasks: list[str], expected: list[str]):
    assert list(short_names(tasks).values()) == expected


def test_long_heads_break_at_joints_and_lose_nothing():
    assert broken("fashion_mnist") == "fashion_\nmnist"
    assert broken("recovered gap") == "recovered\ngap"
    assert broken("unbreakable_") == "unbreakable_"
    assert broken("dtd") == "dtd"
