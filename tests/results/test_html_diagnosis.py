"""Sections of the HTML page on a diagnosis, beside a run's report and alone."""

from pathlib import Path

import pytest
from html_pages import Reader, page_text
from made_diagnoses import SIZES, TASKS, made
from synthetic import leave_run

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.results.diagnosis import Diagnosis
from fusion_bench_featcal.results.diagnosis_page import SECTIONS, help_sentences
from fusion_bench_featcal.results.html.diagnoses import diagnosis_sections
from fusion_bench_featcal.results.html.parts import Figure, Table
from fusion_bench_featcal.results.tables import Grid


def leave(folder: Path, diagnosis: Diagnosis | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (diagnosis or made()).write(folder)
    return folder


def test_a_page_has_everything_that_the_text_has(tmp_path: Path) -> None:
    page = Reader(page_text(leave(tmp_path / "alone")))
    assert page.texts("h1") == ["toy"]
    assert page.texts("p")[0] == "merged by merger; 1 diagnosis"
    lines = page.texts("li")
    assert {f"toy, {line}" for line in help_sentences(made())} <= set(lines)
    for title in SECTIONS:
        grids = [part for part in SECTIONS[title](made()) if isinstance(part, Grid)]
        for grid in grids:
            end = f"toy: {title[0].lower()}{title[1:]}"
            table = page.table(end if len(grids) == 1 else f"{end}, {grid.corner}")
            texts = {head: [cell["text"] for cell in of.values()] for head, of in table.items()}
            assert texts == {head: list(cells) for head, cells in grid.lines}


def test_drift_is_drawn_by_block_and_task(tmp_path: Path) -> None:
    page = Reader(page_text(leave(tmp_path / "alone")))
    mean = made().mean("featcal", "relative")
    heads = page.texts("h4")
    assert heads[: 1 + len(TASKS)] == [
        "drift, mean over tasks", "drift, one", "drift, two", "drift, three",
    ]  # fmt: skip
    tips = [mark["data-tip"] for mark in page.all("use", class_="pt")]
    assert f"featcal, layers.1.block: {mean[1]:.3f}" in tips
    terms = {key: made().mean("merger", key)[2] for key in ("drift", "mismatch", "propagation")}
    for value, name in zip(
        terms.values(), ("drift", "local mismatch", "upstream propagation"), strict=True
    ):
        assert f"{name}, layers.2.block: {value:.3f}" in tips


def test_panels_of_both_terms_share_their_axes() -> None:
    figures = {
        part.title: part
        for section in diagnosis_sections([made()])
        for part in section.parts
        if isinstance(part, Figure)
    }
    panels = figures["toy: both terms of drift, mean over tasks"].panels
    assert [panel.title for panel in panels] == ["merger", "featcal", "featcal:plus"]
    assert len({(panel.y.low, panel.y.high) for panel in panels}) == 1


def test_cosines_by_task_and_class(tmp_path: Path) -> None:
    found = made()
    page = Reader(page_text(leave(tmp_path / "alone")))
    tips = [mark["data-tip"] for mark in page.all("use", class_="pt")]
    assert f"featcal, two: {found.cosine('featcal', 'toy_two'):.3f}" in tips
    assert f"featcal:plus, average: {found.cosine('featcal:plus'):.3f}" in tips
    table = page.table("cosine of final features to the expert's by class")
    assert list(table) == [
        f"{task}: {c}" for task in ("one", "two", "three") for c in ("early", "late")
    ]
    values = {row: found.classes[row]["toy_one"]["late"]["cosine"] for row in SIZES}
    late = table["one: late"]
    assert late["items"]["text"] == "6"
    assert {row: float(late[row]["data-value"]) for row in SIZES} == pytest.approx(values)
    gain = float(late["gain of featcal"]["data-value"])
    assert gain == pytest.approx(values["featcal"] - values["merger"])


def test_accuracy_by_class(tmp_path: Path) -> None:
    page = Reader(page_text(leave(tmp_path / "alone")))
    table = page.table("toy: accuracy by class in per cent")
    assert list(table) == [
        f"{task}: {c}" for task in ("one", "two", "three") for c in ("early", "late")
    ]
    late = table["two: late"]
    assert late["test items"]["text"] == "20"
    shown = {row: late[row]["text"] for row in (*SIZES, "experts")}
    assert shown == {
        "base": "20.0", "merger": "45.0", "featcal": "70.0", "featcal:plus": "95.0",
        "experts": "100.0",
    }  # fmt: skip
    assert late["gain of featcal:plus"]["text"] == "+50.0"


def test_without_accuracies_by_class_there_is_no_table(tmp_path: Path) -> None:
    found = made()
    found.class_accuracy, found.class_flips = {}, {}
    page = page_text(leave(tmp_path / "alone", found))
    assert "accuracy by class" not in page


def test_a_runs_page_has_its_diagnosis(tmp_path: Path) -> None:
    run = leave(leave_run(tmp_path / "run"))
    page = Reader(page_text(run))
    sections = [element["id"] for element in page.all("section")]
    assert sections.index("figures") < sections.index("drift-along-the-depth")
    assert sections.index("final-features") < sections.index("settings")
    assert page.table("accuracy in per cent")["featcal"]["average"]["text"] == "75.0"
    ids = [element["id"] for element in page.elements if "id" in element]
    assert len(ids) == len(set(ids))
    assert any(link["href"].endswith("run/diagnosis.json") for link in page.all("a"))


def test_without_a_merged_model_there_are_figures_all_the_same() -> None:
    found = made({"mine": 2.0})
    found.accuracy, found.task_vectors = {}, {}
    sections = {section.title: section.parts for section in diagnosis_sections([found])}
    assert not any(isinstance(part, Table) for part in sections["Where calibration helps"])
    drawn = [p for parts in sections.values() for p in parts if isinstance(p, Figure)]
    assert len(drawn) == 3 and all(figure.panels for figure in drawn)
    (table,) = [
        p for p in sections["Final features"] if isinstance(p, Table) and "acc" in p.caption
    ]
    assert table.columns == ["test items", "mine", "experts"]  # and no gain


def test_gains_over_a_merged_model_that_was_not_evaluated_are_left_out() -> None:
    found = made()
    del found.class_accuracy["merger"]
    found.class_flips = {}
    sections = {section.title: section.parts for section in diagnosis_sections([found])}
    tables = [part for part in sections["Final features"] if isinstance(part, Table)]
    (table,) = [table for table in tables if "accuracy by class" in table.caption]
    assert table.columns == ["test items", "base", "featcal", "featcal:plus", "experts"]


def test_several_diagnoses_are_told_apart(tmp_path: Path) -> None:
    other = made()
    other.suite = "<other>"
    leave(tmp_path / "all" / "a")
    leave(tmp_path / "all" / "b", other)
    page = Reader(page_text(tmp_path / "all"))
    assert page.texts("h1") == ["toy, <other>"]
    assert page.table("toy: accuracy") and page.table("<other>: accuracy")
    leave(tmp_path / "all" / "c")
    page = Reader(page_text(tmp_path / "all"))
    assert page.texts("h1") == ["toy (a), <other>, toy (c)"]
    assert page.table("toy (a): accuracy") and page.table("toy (c): accuracy")


def test_a_damaged_diagnosis_is_refused(tmp_path: Path, capsys) -> None:
    folder = leave(tmp_path / "alone")
    file = folder / "diagnosis.json"
    file.write_text(file.read_text()[:-9])
    page = tmp_path / "page.html"
    assert main(["report", str(file), "--html", str(page)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line and not page.exists()


def test_a_diagnosis_alone_is_no_run_for_the_terminal(tmp_path: Path, capsys) -> None:
    folder = leave(tmp_path / "alone")
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"featcal: error: no run in or below {folder}")
