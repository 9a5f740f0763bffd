"""`featcal report`: the table of runs with known numbers, in each form."""

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from reports import (
    LEVELS,
    Done,
    drawn_points,
    error_of,
    featcal,
    leave_cells,
    leave_rows,
    leave_run,
    leave_seeds,
    make_run,
    rows_of,
)

from fusion_bench_featcal.results import (
    Note,
    ReportError,
    Run,
    frame_of,
    join_folders,
    summary,
    write_run,
)
from fusion_bench_featcal.results.figures import figures_of
from fusion_bench_featcal.results.tables import p_text

EVIL = "<script>alert('&')</script>{{ 7 * 7 }}"

# Featcal's seeds have 70, 75 and 80 %: half of Student's interval is 12.4, that of examples 3.2,
# and the added examples change the mean by 0.1.
TABLE = """\
Use the repaired model: it is better than the merged model on average (+15.0 ± 12.9 points), \
and 15.0 ± 12.9 points below the experts
toy: accuracy, %
             test                                                 
         examples  expert  merged  repaired          gain  verdict
──────────────────────────────────────────────────────────────────
cars          200    90.0    60.0      75.0  +15.0 ± 13.4  unclear
dtd           200    90.0    60.0      75.0  +15.0 ± 13.4  unclear
average         -    90.0    60.0      75.0  +15.0 ± 12.9         
means over 3 seeds
gain: over the merged model, ± half of its 95 % interval over test examples and seeds
cost: 10.0 seconds, 1024 MiB
samples per task: featcal 256 train
"""
LINE = "| dtd | 200 | 90.0 | 60.0 | 75.0 | +15.0 ± 13.4 | unclear |"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder with runs of three seeds and all that the command writes of them."""
    folder = tmp_path_factory.mktemp("written")
    files = ("--out", folder / "out", "--html", folder / "a.html", "--figures", folder / "svg")
    return folder, featcal("report", leave_seeds(folder / "runs"), *files)


def test_the_printed_table(written: Any) -> None:
    folder, done = written
    names = ("out", "svg/accuracy.svg", "a.html")
    assert done.out == TABLE + "".join(f"written: {folder / name}\n" for name in names)


def test_the_table_as_latex(tmp_path: Path) -> None:
    tasks = ("cars_&_50%", "dtd")
    levels = LEVELS | {"featcal_plus": 0.7, "experts": 0.95}
    done = featcal("report", leave_run(tmp_path / "a", levels, tasks), "--latex")
    lines = done.out.splitlines()
    shown = [line for line in lines if not line.startswith("% ")]
    text = "\n".join(shown)
    assert done.code == 0 and len(lines) > len(shown) and r"\usepackage{booktabs}" in done.out
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", text) for word in ("begin", "end"))
    assert begun == ended[::-1] == ["table", "tabular"]
    bare = re.sub(r"\\[&%_#${}]", "", text)
    assert bare.count("{") == bare.count("}") and not re.search("[%_#±]", bare)
    rules = [line for line in shown if line.endswith("rule")]
    assert rules == [r"\toprule", r"\midrule", r"\bottomrule"]
    head, *rows = [line for line in shown if line.endswith(r" \\")]
    assert r"cars\_\&\_50\%" in head and r"\caption{toy: accuracy, \%}" in text
    cells = {c[0]: c for c in (row.removesuffix(r" \\").split(" & ") for row in rows)}
    columns = shown[shown.index(r"\toprule") - 1].partition("{l")[2].count("r")
    assert {len(row) for row in cells.values()} == {columns + 1}
    assert "" not in cells["base"] + cells["experts"] and "--" in cells["base"]
    bold = {name: [cell for cell in row if "textbf" in cell] for name, row in cells.items()}
    assert bold.pop("+ featcal") == [r"\textbf{75.0}"] * 3
    assert not any(bold.values()) and r"$\pm$" in cells["+ featcal"][2]


def test_latex_has_the_lowest_loss_in_bold_and_true_minus_signs(tmp_path: Path) -> None:
    run = make_run({"base": 0.9, "task_arithmetic": 0.6, "featcal": 0.5, "featcal_plus": 0.7})
    for row in run.rows:
        row.scores["loss"] = row.scores["accuracy"]
    done = featcal("report", write_run(tmp_path / "a", run), "--latex", "--metric", "loss")
    assert re.findall(r"textbf{([\d.]+)}", done.out) == ["0.500"] * 3
    gains = re.findall(r"\+ featcal\S* & [^&]+ & (\S+)", done.out)
    assert gains == ["$-$0.100", "+0.100"]


def test_figures_as_pdf(tmp_path: Path) -> None:
    words = (leave_run(tmp_path / "a"), "--figures", tmp_path / "f", "--figure-format", "pdf")
    assert featcal("report", *words).code == 0
    (file,) = (tmp_path / "f").iterdir()
    content = file.read_bytes()
    assert file.name == "accuracy.pdf" and content.startswith(b"%PDF")
    assert featcal("report", *words).code == 0 and file.read_bytes() == content


def test_small_p_values_are_bounds() -> None:
    assert [p_text(p) for p in (None, 0.0, 0.00099, 0.001, 0.0312)] == [
        "-", "< 0.001", "< 0.001", "0.001", "0.031",
    ]  # fmt: skip


def test_the_table_as_markdown_and_csv(written: Any) -> None:
    folder, _ = written
    text = (folder / "out" / "report.md").read_text()
    assert LINE in text and text == featcal("report", folder / "runs", "--markdown").out
    with (folder / "out" / "report.csv").open() as file:
        row = [*csv.DictReader(file)][-1]
    numbers = {name: float(row[name]) for name in ("accuracy.dtd", "gain", "share", "seeds")}
    expected = {"accuracy.dtd": 0.75, "gain": 0.15, "share": 0.5, "seeds": 3}
    assert numbers == pytest.approx(expected)
    head = (folder / "out" / "lines.csv").read_text().splitlines()[0]
    assert head == "suite,merger,row,task,block,seed,metric,value"


def test_the_page_has_the_table_a_figure_and_links(written: Any) -> None:
    text = (written[0] / "a.html").read_text()
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", text)
    start = cells.index("dtd")
    assert cells[start + 1 : start + 6] == ["200", "90.0", "60.0", "75.0", "+15.0 ± 13.4"]
    assert text.index("Use the repaired model: it is better than the merged") < text.index("<table")
    assert text.count("<svg") == 2  # of a wide page and of a phone
    assert 'href="runs/seed1/run.json"' in text and ">A dash (-) means that" in text


def test_the_page_has_the_best_methods_in_bold_and_the_number_of_test_examples(tmp_path) -> None:
    levels = LEVELS | {"featcal_plus": 0.7, "experts": 0.95}
    assert (
        featcal("report", leave_run(tmp_path / "a", levels), "--html", tmp_path / "a.html").code
        == 0
    )
    text = (tmp_path / "a.html").read_text()
    summary_part, task_part = re.findall(r"<table>.*?</table>", text, re.DOTALL)
    assert re.findall('class="best">([^<]*)<', summary_part) == ["75.0"]
    assert re.findall('class="best">([^<]*)<', task_part) == ["75.0"] * 3  # average, cars, dtd
    references, methods = re.findall(r"<tbody>.*?</tbody>", task_part, re.DOTALL)
    assert ">95.0<" in references and "best" not in references and ">75.0<" in methods
    foot = re.search("<tfoot>.*</tfoot>", task_part, re.DOTALL)
    assert foot and re.findall(r"<td>([^<]*)</td>", foot.group()) == ["", "200", "200"]
    assert "<li>Bold numbers are the best" in text and "<b>MiB</b>: peak memory" in text


def test_figures_have_the_tables_numbers(written: Any, tmp_path: Path) -> None:
    figures = figures_of(frame_of(join_folders([written[0] / "runs"])))
    points = drawn_points(figures["accuracy"])
    assert list(points) == ["experts", "merged", "featcal"]
    assert points["featcal"][:, 0] == pytest.approx([75.0] * 3)  # cars, dtd and their average
    figures = figures_of(frame_of(join_folders([leave_cells(tmp_path)])))
    points = drawn_points(figures["accuracy-samples_per_task"])
    assert points["featcal"].ravel() == pytest.approx([8, 62.8, 64, 68.4])
    assert points["experts"].ravel() == pytest.approx([8, 90, 64, 90])


def test_marks_of_all_rows_weigh_the_same_and_the_axis_begins_below_the_least(tmp_path) -> None:
    """Mergers without repairs are rows of the panel, and the base is left out."""
    cost = {"task_id_at_inference": 1.0}
    leave_rows(tmp_path / "a", {"base": 0.1, "experts": 0.9, "ties": 0.62, "featcal": 0.8})
    leave_rows(tmp_path / "b", {"surgery": 0.7}, cost=cost)
    leave_run(tmp_path / "c", {"regmean": 0.65}, merger="regmean", suite="toy", items=False)
    figure = figures_of(frame_of(join_folders([tmp_path])))["accuracy"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["ties"]
    assert list(drawn_points(figure)) == [
        "experts", "merged", "featcal", "surgery (task id)", "regmean"
    ]  # fmt: skip
    axes: Any = figure.axes[0]
    assert axes.get_xlim()[0] == 62.0
    assert axes.get_xlabel() == "accuracy, %\naxis begins at 62"
    marks = [bars.lines[0] for bars in axes.containers]
    assert {mark.get_markerfacecolor() for mark in marks} == {"white"}
    assert {(mark.get_markeredgewidth(), mark.get_alpha()) for mark in marks} == {(1.1, None)}
    assert all(5 < mark.get_markersize() <= 7 for mark in marks)


def test_names_of_users_are_text(tmp_path: Path) -> None:
    levels = {"base": 0.3, "experts": 0.9, EVIL: 0.5, f"featcal_{EVIL}": 0.7}
    run = leave_run(tmp_path / "run", levels, (EVIL, "b"), suite=EVIL, merger=EVIL)
    page = tmp_path / "page.html"
    assert featcal("report", run, "--html", page, "--figures", tmp_path).code == 0
    for text in (page.read_text(), (tmp_path / "accuracy.svg").read_text()):
        assert EVIL not in text and "&lt;script&gt;alert(" in text and "{{ 7 * 7 }}" in text
    assert page.read_text().count("<script>") == 1


def test_rows_of_other_settings_are_points_of_one_table(tmp_path: Path) -> None:
    done = featcal("report", leave_cells(tmp_path / "cells"), "--out", tmp_path / "out")
    lines = [line.split() for line in done.out.splitlines()]
    assert ["n", "average", "gain", "closed", "worst", "task", "closed", "cars", "dtd"] in lines
    line_8, line_64 = (line for line in lines if line[:2] == ["+", "featcal"])
    assert line_8[2:4] == ["8", "62.8"] and line_8[7:9] == ["32", "%"]
    assert line_64[2:4] == ["64", "68.4"] and line_64[7:9] == ["46", "%"]
    assert sum(line[:1] in (["ties"], ["experts"]) for line in lines) == 2
    assert "means over 1 to 3 seeds" not in done.out
    assert "means over 3 seeds\nn: samples per task\n" in done.out
    assert (tmp_path / "out" / "lines.csv").read_text().startswith("samples_per_task,")
    shutil.rmtree(tmp_path / "cells" / "featcal-64-3")
    assert "means over 2 to 3 seeds" in featcal("report", tmp_path / "cells").out


def test_a_rows_merger_is_the_one_with_its_settings(tmp_path: Path) -> None:
    for scale, merged, repaired in ((0.3, 0.5, 0.6), (1.0, 0.3, 0.7)):
        leave_rows(tmp_path / f"m{scale}", {"ties": merged}, settings={"scaling_factor": scale})
        merger_facts: Any = {"settings": {"a": 1}, "conditions": {"scaling_factor": scale}}
        leave_rows(tmp_path / f"f{scale}", {"featcal": repaired}, **merger_facts)
    leave_rows(tmp_path / "x", {"x": 0.6})  # may be of either merged model
    rows = summary(join_folders([tmp_path])).to_dict("records")
    gains = {row["scaling_factor"]: row["gain"] for row in rows if row["row"] == "featcal"}
    assert gains == pytest.approx({0.3: 0.1, 1.0: 0.4})
    assert all(row["gain"] != row["gain"] for row in rows if row["row"] == "x")  # not a number


def test_the_worst_task_is_that_of_the_means_among_gaps_of_a_point(tmp_path: Path) -> None:
    tasks = ("far", "near", "level")
    for seed, far in ((1, 0.2), (2, 0.4)):
        rows = {"experts": (0.9, 0.9, 0.9), "ties": (0.1, 0.8, 0.899), "featcal": (far, 0.85, 0.89)}
        named = {name: dict(zip(tasks, values, strict=True)) for name, values in rows.items()}
        leave_rows(tmp_path / str(seed), named, seed=seed, cost={"seconds": float(seed)})
    row = rows_of(tmp_path)["ties/featcal"]
    worst = row["worst_task"], row["worst_share"], row["worst_value"]
    assert worst == ("far", pytest.approx(0.25), pytest.approx(0.3))
    assert row["share"] == pytest.approx((0.68 - 0.5996667) / (0.9 - 0.5996667), abs=1e-6)
    assert row["cost.seconds"] == 1.5 and row["seeds"] == 2


def test_experts_below_the_merged_model_or_hardly_right_are_noted(tmp_path: Path) -> None:
    tasks = ("good", "near", "worse", "rare")
    rows = {"experts": (0.9, 0.795, 0.5, 0.02), "ties": (0.5, 0.8, 0.6, 0.01)}
    leave_rows(tmp_path, {name: dict(zip(tasks, v, strict=True)) for name, v in rows.items()})
    out = " ".join(featcal("report", tmp_path).out.split())
    assert (
        "warning: the expert of worse has only 50.0 % on its own task (merged models: up to 60.0 %)"
        in out
    )
    assert "warning: the expert of rare has only 2.0 %" in out and out.count("the expert of") == 2


def test_any_metric_has_a_table_and_lower_losses_recover_the_gap(tmp_path: Path) -> None:
    run = Run(suite="toy", merger="ties")
    for name, loss in {"experts": 0.5, "ties": 1.5, "featcal": 0.75}.items():
        run.add_row(name, {"accuracy": {"a": 0.5}, "loss": {"a": loss}, "f1": {"a": 1 - loss / 2}})
    row = rows_of(write_run(tmp_path, run), metric="loss")["ties/featcal"]
    assert (row["gain"], row["share"], row["worst_share"]) == pytest.approx((-0.75, 0.75, 0.75))
    out = featcal("report", tmp_path, "--metric", "f1", "--markdown").out
    assert "| a | - | 0.750 | 0.250 | 0.625 | +0.375 | unclear |" in out


def test_of_equal_rows_the_newest_counts_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    for number, level in enumerate((0.75, 0.75, 0.8)):
        leave_run(tmp_path / str(number), LEVELS | {"featcal": level})
        if number == 1:
            join_folders([tmp_path])
            assert not caplog.records
    assert rows_of(tmp_path)["task_arithmetic/featcal"]["accuracy.average"] == pytest.approx(0.8)
    assert "left out 1 result" in caplog.text and "task_arithmetic/featcal" in caplog.text


def test_runs_are_found_once_and_unfinished_ones_are_not_read(tmp_path: Path) -> None:
    runs = leave_seeds(tmp_path / "runs")
    (runs / ".part").mkdir()
    (runs / ".part" / "run.json").write_text("half a file")
    assert featcal("report", runs / "seed2", runs, runs / "seed1").out == TABLE


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("absent",), "no such run"),
    (("empty",), "no run in or below empty"),
    (("seed1", "other"), "models of toy have different tasks"),
    (("seed1", "--out", "seed1"), "has the files of a run.*--out"),
    (("seed1", "--html", "page.md"), r"--html names a file that ends in \.html"),
    *((("seed1", "--against", "featcal", *form),
      f"--against prints only differences: leave.*{form[0]}") for form in (("--out", "o"),
      ("--html", "a.html"), ("--figures", "f"), ("--markdown",), ("--latex",))),
    (("seed1", "--figure-format", "pdf"), "--figure-format needs --figures DIR"),
    (("seed1", "--metric", "los"), "--metric: no model has 'los'; there are accuracy"),
    (("seed1", "--against", "featcl"), "name one model, got 'featcl'.*task_arithmetic/featcal"),
    (("cells", "--against", "featcal"), "with equal settings, but they differ in samples_per_task"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=str)
def test_mistakes_are_named(words, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    leave_seeds(tmp_path)
    (tmp_path / "empty").mkdir()
    leave_run(tmp_path / "other", tasks=("cars", "sun"))
    if "cells" in words:
        leave_cells(tmp_path / "cells")
    text = error_of("report", *words)
    assert re.search(message, text), text


def test_a_setting_that_only_one_row_has_is_a_difference(tmp_path: Path) -> None:
    """Rows of a run and of a comparison with other tasks and precision are not averaged."""
    settings = {"ridge_lambda": 0.05}
    cell_facts: Any = {"settings": settings | {"tasks": 2, "resume": True}}
    cell_facts |= {"conditions": {"precision": "bf16-true"}}
    leave_rows(tmp_path / "run", {"ties": 0.5, "featcal": 0.67}, settings=settings)
    leave_rows(tmp_path / "merged", {"ties": 0.6}, **cell_facts)
    leave_rows(tmp_path / "cell", {"featcal": 0.75}, **cell_facts)
    leave_rows(tmp_path / "more", {"other": 0.7}, settings=settings)
    rows = summary(join_folders([tmp_path])).to_dict("records")
    found = {(r["row"], r["tasks"], r["precision"]): (r["accuracy.average"], r["gain"])
             for r in rows if r["row"] == "featcal"}  # fmt: skip
    expected = {"unset": (0.67, 0.17), 2: (0.75, 0.15)}
    for tasks, precision in (("unset", "unset"), (2, "bf16-true")):
        assert found["featcal", tasks, precision] == pytest.approx(expected[tasks], abs=0.01)
    assert [r["gain"] != r["gain"] for r in rows if r["row"] == "other"] == [True]  # of either
    out = featcal("report", tmp_path).out
    lines = [line.split()[:5] for line in out.splitlines()]
    assert ["+", "featcal", "bf16-true", "2", "75.0"] in lines and "resume" not in out
    assert ["+", "featcal", "unset", "unset", "67.0"] in lines


def test_notes_keep_the_point_of_their_rows(tmp_path: Path) -> None:
    for samples in (8, 64):
        run = Run(suite="toy", merger="ties")
        settings = {"samples_per_task": samples}
        for name in ("ties", "featcal", "other"):
            row_settings = settings if name != "ties" else {}
            run.add_row(name, {"accuracy": {"cars": samples / 100}}, settings=row_settings)
        run.note(Note("warning", "is large", "featcal"), Note("note", "is slow"))
        run.note(Note("failed", "is broken", "surgery"))
        write_run(tmp_path / str(samples), run)
    out = featcal("report", tmp_path).out
    for samples in (8, 64):
        for text in (f"warning: featcal (n = {samples}): is large", f"note: n = {samples}: is slow",
                     f"note: surgery (n = {samples}) failed: is broken"):  # fmt: skip
            assert f"{text}\n" in out
    alone = featcal("report", tmp_path / "8").out
    assert "warning: featcal: is large\n" in alone and "note: is slow\n" in alone


COLUMNS = ("gain", "share", "worst task", "seconds", "MiB", "seeds", "half", "samples", "suite")


def test_tasks_called_like_columns_keep_their_accuracies(tmp_path: Path) -> None:
    accuracies = {task: 0.3 + number / 20 for number, task in enumerate(COLUMNS)}
    rows = {"ties": dict.fromkeys(COLUMNS, 0.2), "x": dict.fromkeys(COLUMNS, 0.2)}
    rows |= {"featcal": accuracies}
    run = leave_rows(tmp_path / "run", rows, cost={"seconds": 10.0, "peak_rss_bytes": 2**30})
    done = featcal("report", run, "--markdown", "--out", tmp_path / "out", "--html",
                   tmp_path / "a.html")  # fmt: skip
    values = [f"{100 * value:.1f}" for value in accuracies.values()]
    cells = ["50.0", "+30.0", "gain", "10.0", "1024", *values]
    assert f"| + featcal | {' | '.join(cells)} |" in done.out
    tables = (tmp_path / "a.html").read_text().split("</table>")
    parts = (cells[:-9], cells[:1] + cells[-9:])  # both have the average
    for table, part in zip(tables, parts, strict=False):
        assert re.findall(r"<td[^>]*>([^<]*)</td>", table)[-len(part) :] == part
    with (tmp_path / "out" / "report.csv").open() as file:
        row = [*csv.DictReader(file)][-1]
    assert {task: float(row[f"accuracy.{task}"]) for task in COLUMNS} == pytest.approx(accuracies)
    for name in (*COLUMNS, "average"):
        line = error_of("calibrate", tmp_path, "--expert", f"{name}=./a", "--out", tmp_path / "b")
        is_taken = "--expert: 'average' cannot be a file name, or is already used" in line
        assert is_taken == (name == "average")
    with pytest.raises(ReportError, match="'featcal': 'average' is the mean over tasks"):
        leave_rows(tmp_path / "other", {"featcal": {"average": 0.5}})
    with pytest.raises(ReportError, match="metric 'cost' is reserved for costs"):
        Run().add_row("featcal", {"cost": {"seconds": 0.5}})


def test_settings_called_like_columns_have_a_column_of_their_own(tmp_path: Path) -> None:
    names = ("gain", "row", "task", "value", "seed.x", "cost.seconds", "accuracy.cars", "setting.a")
    for number in (1, 2):
        settings = dict.fromkeys(names, number)
        leave_rows(tmp_path / str(number), {"featcal": number / 4}, settings=settings)
    done = featcal("report", tmp_path, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    for file, key, tasks in (("report.csv", "accuracy.cars", 1), ("lines.csv", "value", 3)):
        with (tmp_path / "out" / file).open() as opened:
            rows = [row for row in csv.DictReader(opened)]
        assert len(rows) == 2 * tasks and {row["row"] for row in rows} == {"featcal"}
        assert all(float(row[key]) == int(row["setting.gain"]) / 4 for row in rows)
        assert all(row["setting.row"] == row["seed.x"] == row["setting.setting.a"] for row in rows)


TERMS = ("drift", "mismatch", "propagation")


def leave_unscored(folder: Path, drift: dict[str, float], *, row: bool = True) -> Path:
    """Write a run without scores: a calibrated model's samples and drift, or a diagnosis alone."""
    run = Run(suite="toy", merger="ties")
    samples = {task: {"samples": 8, "split": "data"} for task in ("cars", "dtd")}
    if row:
        scores = {"relative_drift": drift}
        run.add_row("featcal", scores, samples=samples, cost={"seconds": 10.0})
    run.lines += [{"row": "ties", "task": task, "block": "0", "metric": metric, "value": 0.5}
                  for task in samples for metric in ("relative", "share", *TERMS)]  # fmt: skip
    run.lines += [{"row": "ties", "task": task, "metric": "final_cosine", "value": 0.5}
                  for task in samples]  # fmt: skip
    return write_run(folder, run)


def test_steps_stand_below_the_table(tmp_path: Path) -> None:
    leave_rows(tmp_path / "merged", {"ties": 0.5})
    leave_rows(tmp_path / "surgery", {"surgery": 0.6}, settings={"steps": 100})
    out = featcal("report", tmp_path).out
    assert "\nsteps: surgery 100\n" in out


@pytest.mark.parametrize("drift", [{"cars": 0.1, "dtd": 0.3}, {}], ids=["drift", "none"])
@pytest.mark.parametrize("row", [True, False], ids=["row", "diagnosis"])
def test_a_run_without_scores_is_reported(drift: Any, row: bool, tmp_path: Path) -> None:
    run, out = leave_unscored(tmp_path / "run", drift, row=row), tmp_path / "out"
    files = ("--html", tmp_path / "a.html", "--figures", tmp_path)
    done = featcal("report", run, "--out", out, *files)
    assert done.code == 0 and "relative drift by block" in done.out, done.err
    assert ("samples per task: featcal 8 data" in done.out) == row
    table = featcal("report", run, "--markdown").out
    assert ("| + featcal | 0.200 | 10.0 | 0.100 | 0.300 |" in table) == bool(drift and row)
    assert ("toy: relative_drift" in table) == bool(drift and row) and "accuracy" not in table
    assert "--metric: no model has 'loss'" in error_of("report", run, "--metric", "loss")
    if not (drift and row):
        assert "--against: nothing was scored" in error_of("report", run, "--against", "featcal")


def test_a_metric_of_some_rows_has_a_table_of_them(tmp_path: Path) -> None:
    run = make_run()
    run.row("featcal").scores["relative_drift"] = {"cars": 0.1, "dtd": 0.3}
    out = featcal("report", write_run(tmp_path, run), "--metric", "relative_drift").out
    assert "0.200" in out and "experts" not in out
    assert "toy: accuracy, %" in featcal("report", tmp_path).out
