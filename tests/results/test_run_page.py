import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import LEVELS, SIX, make_report

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.summary import summarise_reports
from fusion_bench_featcal.results.tables import (
    TEXT_WIDTH,
    Grid,
    _broken,
    percent,
    short_names,
    titled,
)
from fusion_bench_featcal.results.views import run_grid, run_markdown

TWENTY = tuple(f"some_data_set_{number}" for number in range(20))
REAL = (
    "kmnist", "fashion_mnist", "emnist_letters", "stanford_cars", "oxford_flowers102",
    "rendered_sst2", "sun397", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd",
    "oxford-iiit-pet", "stl10", "cifar100", "cifar10", "food101", "pcam", "fer2013",
)  # fmt: skip
PRESETS = {f"featcal:preset_{number}": 0.7 for number in range(8)}


def grid_of(report: Report) -> Grid:
    return run_grid(report, summarise_reports({Path(): report}))


def printed(report: Report, width: int = TEXT_WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in titled("run", grid_of(report).fitting(width)):
        console.print(table)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def distinct_report(rows: Sequence[str], tasks: Sequence[str]) -> Report:
    """Every cell has a value of its own, with experts above and base below the merged model."""
    report = Report(suite="toy", upstream="task_arithmetic")
    for number, name in enumerate(rows):
        level = {"base": 0.1, "experts": 0.9}.get(name, 0.3 + 0.03 * number)
        report.add_row(name, {task: level + 0.001 * at for at, task in enumerate(tasks)})
    return report


def test_titles_are_as_wide_as_the_terminal():
    title = "clip-vit-mini_TA6: accuracy per task"
    console = Console(file=io.StringIO(), width=TEXT_WIDTH)
    console.print(*titled(title, [Grid("", ["a"], [("b", ["1"])])] * 2))
    output = console.file
    assert isinstance(output, io.StringIO)
    lines = output.getvalue().splitlines()
    assert [line for line in lines if "TA6" in line] == [title, f"{title} (continued)"]


def test_a_sign_is_not_alone_in_a_line_of_a_head():
    heads = ["+ featcal:plus", "severity = 3", "corruption = gaussian_noise, severity = 3"]
    lines = [line.strip() for head in heads for line in _broken(head).splitlines()]
    assert "featcal:" not in lines and not {"+", "="} & {*lines}


@pytest.mark.parametrize("tasks", [REAL[:6], REAL[:8], REAL[:14], REAL])
@pytest.mark.parametrize("presets", [1, 9])
def test_tables_fit_eighty_columns_with_every_number(tasks: tuple[str, ...], presets: int):
    rows = [*LEVELS, *(f"featcal:preset_{number}" for number in range(presets))]
    report = distinct_report(rows, tasks)
    text = printed(report, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    numbers = Counter(text.replace("\n", " ").split())
    expected = Counter(percent(value) for row in report.rows.values() for value in row.values())
    assert numbers >= expected
    for row in rows[4:]:
        task, gap = report.worst(row) or ("", None)
        assert task in text.split() and f"{100 * (gap or 0):.0f} %" in text


@pytest.mark.parametrize("tasks", [6, 20])
def test_reports_fit_eighty_columns_where_stdout_is_no_terminal(
    tasks: int, capsys: pytest.CaptureFixture[str]
):
    report = distinct_report([*LEVELS, "featcal:mini"], REAL[:tasks])
    report.show()
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for task in report.tasks:
        assert percent(report.rows["featcal:mini"][task]) in text


def test_a_wide_terminal_has_one_table_with_tasks_and_worst_task():
    report = distinct_report([*LEVELS], REAL[:6])
    task, _ = report.worst("featcal") or ("", None)
    text = printed(report, 160)
    line = next(line for line in text.splitlines() if line.strip().startswith("featcal"))
    cells = [f"{39 + number / 10:.1f}" for number in range(6)]
    assert line.split() == ["featcal", *cells, "39.2", "+3.0", "6", "%", task, "6", "%"]


def test_an_endless_name_is_folded_and_numbers_stay_whole():
    name = "featcal:" + "x" * 90
    text = printed(make_report({**LEVELS, name: 0.8}), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert name in "".join(line.split()[0] for line in text.splitlines() if line.strip())


def test_worst_task_is_that_with_the_least_share_of_a_gap_worth_the_name():
    report = Report(upstream="merged")
    report.add_row("merged", {"far": 0.1, "near": 0.8, "level": 0.899})
    report.add_row("featcal", {"far": 0.3, "near": 0.85, "level": 0.89})
    assert report.worst("featcal") == ("level", None)  # the smallest gain, without experts
    report.add_row("experts", {"far": 0.9, "near": 0.9, "level": 0.9})
    assert report.worst("featcal") == ("far", pytest.approx(0.25))
    assert report.worst("merged") is None


def test_losses_have_a_table_of_their_own_in_markdown():
    report = Report(upstream="merged")
    report.add_row("merged", {"a": 0.5, "b": 0.25}, loss={"a": 1.25, "b": 0.75})
    report.add_row("featcal", {"a": 0.5, "b": 0.25}, loss={"a": 0.5, "b": None})
    text = run_markdown(report)
    assert "| merged | 1.2500 | 0.7500 | 1.0000 |" in text
    assert "| featcal | 0.5000 | - | - |" in text
    assert "## Loss" not in run_markdown(make_report())


@pytest.mark.parametrize("tasks", [("cars",), ("cars", "dtd"), SIX, TWENTY])
@pytest.mark.parametrize("rows", [LEVELS, {**LEVELS, **PRESETS}])
def test_the_width_that_is_planned_is_the_width_that_is_printed(tasks: tuple[str, ...], rows: dict):
    grid = grid_of(make_report(rows, tasks))
    for form in (grid, grid.transposed()):
        assert Console(width=500).measure(form.rich()).maximum == form.width()


def test_what_made_the_numbers_is_printed_literally(capsys: pytest.CaptureFixture[str]):
    report = make_report(notes=["calibrated on the [bold]test[/bold] split"])
    report.device = {"device": "cuda:0", "cpu": "abacus"}
    report.show()
    text = capsys.readouterr().out
    assert "featcal: 256 samples per task from the train split" in text
    assert "seeds calibration 42, on cuda:0, abacus" in text
    assert "[bold]test[/bold]" in text


def test_markdown_has_table_settings_cost_and_versions():
    report = make_report(versions={"torch": "2.13.0"})
    text = run_markdown(report)
    assert "| featcal | **75.0** | **75.0** | **75.0** | +15.0 | [" in text
    assert "| ridge_lambda | 0.05 |" in text
    assert "| peak_rss_bytes | 1024.0 MiB |" in text
    assert "- torch: 2.13.0" in text


def test_markdown_of_many_tasks_lists_them_downwards():
    assert "| data_set_19 | 30.0 | 90.0 | 60.0 | **75.0** |" in run_markdown(
        make_report(tasks=TWENTY)
    )


def test_cells_that_would_break_markdown_are_escaped():
    report = Report()
    report.add_row("a|b", {"x|y": 0.5}, cost={"x_bytes": "unavailable"})
    assert "| a\\|b | 50.0 | 50.0 |" in run_markdown(report)
    assert "| x_bytes | unavailable |" in run_markdown(report)


def test_the_best_of_a_column_is_bold_with_ties_and_without_references():
    report = Report(upstream="merged")
    for name, level in {"experts": 0.9, "merged": 0.5, "featcal": 0.5, "surgery": 0.4}.items():
        report.add_row(name, {"a": level})
    lines = run_markdown(report).splitlines()
    bold = [line.split("|")[1].strip() for line in lines if "**" in line]
    assert bold == ["merged", "featcal"]


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (["mini_a", "mini_b"], ["a", "b"]),
        (["mini_a", "mini"], ["mini_a", "mini"]),
        (["mini_", "mini_b"], ["mini_", "mini_b"]),
        (["mini_a", "mini_average"], ["mini_a", "mini_average"]),
        (["mini_a"], ["mini_a"]),
        (["a", "b"], ["a", "b"]),
        ([], []),
    ],
)
def test_a_shared_prefix_is_dropped_only_where_names_remain(tasks: list[str], expected: list[str]):
    assert list(short_names(tasks).values()) == expected
