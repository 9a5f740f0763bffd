"""The HTML page of studies: its numbers and sentences, curves, drawn figures, and links."""

import base64
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from html_pages import Reader, page_text
from made_diagnoses import made
from made_studies import leave, point, row, study, sweep_points
from synthetic import leave_run

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.json_files import json_text
from fusion_bench_featcal.results.study import Study
from fusion_bench_featcal.results.study_figures import plot_study, source_of
from fusion_bench_featcal.results.study_files import write_study
from fusion_bench_featcal.results.study_page import study_grids

TRICKY = '<b>"it\'s" & </script><script>x()</script>'


def samples_study() -> Study:
    points = [
        point({"samples_per_task": n}, featcal=0.8 + n / 1e4, surgery=0.5 + n / 2000)
        for n in (8, 64, 512)
    ]
    return study("samples", points, versions={"torch": "2.0"})


def tips(page: Reader) -> list[str]:
    return [mark["data-tip"] for mark in page.all("use", class_="pt")]


def test_tables_are_those_of_the_terminal(tmp_path: Path) -> None:
    page = Reader(page_text(leave(samples_study(), tmp_path / "study")))
    ((title, grid),) = study_grids(samples_study())
    table = page.table(title)
    assert list(table) == [head for head, _ in grid.lines]
    for head, cells in grid.lines:
        assert [cell["text"] for cell in table[head].values()] == list(cells)
    assert table["+ featcal"]["n = 512"]["text"] == "85.1 ± 1.0 (50 %)"


def test_headline_seeds_and_device(tmp_path: Path) -> None:
    page = Reader(page_text(leave(samples_study(), tmp_path / "study")))
    assert page.texts("h1") == ["suite, samples"]
    (card,) = page.texts("article", class_="card")
    assert card.startswith("featcal suite, samples, over ta +20.1 to +25.1 points over the merged")
    assert "most: +25.1 [-10.0,\N{NO-BREAK SPACE}+30.0] at n = 512".replace("\xa0", " ") in card
    settings = page.table("suite, samples: points")
    assert settings["seeds"]["values"]["text"] == "1, 2, 3"
    assert settings["samples_per_task (of the points)"]["values"]["text"] == "8, 64, 512"
    assert page.table("Versions and device")["torch"]["suite, samples"]["text"] == "2.0"


def test_each_row_is_a_curve(tmp_path: Path) -> None:
    page = Reader(page_text(leave(samples_study(), tmp_path / "study")))
    assert page.texts("h4") == ["along samples_per_task"]
    assert "featcal, samples_per_task = 64: 80.6 ± 1.0" in tips(page)
    assert "ta, samples_per_task = 8: 60.0" in tips(page)  # a level: without an interval
    first = page.all("svg", role="img")[0]
    drawn = [
        element["data-series"]
        for element in page.elements[page.elements.index(first) :]
        if element["tag"] == "g"
    ][:4]
    assert drawn == ["experts", "merged model", "surgery", "featcal"]
    assert not page.all("img")


def test_every_axis_has_a_panel_and_zero_a_place(tmp_path: Path) -> None:
    folder = leave(study("sweep", sweep_points(), design="each"), tmp_path / "study")
    text = page_text(folder)
    page = Reader(text)
    assert page.texts("h4") == ["along ridge_lambda", "along mix_alpha"]
    marks = page.all("use", class_="pt")
    places = [
        float(mark["x"].rstrip("%"))
        for mark in marks
        if mark["data-tip"].startswith("featcal, ridge_lambda")
    ]
    assert places == sorted(places) and len(set(places)) == 3
    (missing,) = [line for line in page.texts("li") if "featcal plot" in line]
    assert missing.startswith(f"sweep-ridge_lambda-mix_alpha.svg: `featcal plot {folder}`")
    cells = page.table("accuracy over ta, % (worst gap)")["+ featcal"]
    assert "ridge_lambda = 1.0, mix_alpha = 1.0" in cells


def test_drawn_figures_are_part_of_the_page(tmp_path: Path) -> None:
    rows = [row("ta", 0.6), row("featcal", 0.8), row("featcal:x", 0.7, against="featcal")]
    folder = leave(study("ablation", [{"labels": {}, "rows": rows, "failed": []}]), tmp_path / "s")
    source = source_of(Study.load(folder))
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"><script>{source}</script></svg>'.encode()
    (folder / "ablation.svg").write_bytes(svg)
    text = page_text(folder)
    page = Reader(text)
    (image,) = page.all("img")
    kind, _, content = image["src"].partition(",")
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(content) == svg
    assert "ablation" in image["alt"] and len(page.all("script")) == 1
    assert "img-src data:" in page.all("meta")[3]["content"]
    assert not re.search(r"https?:|url\(|@import", text)
    (card,) = page.texts("article", class_="card")  # the other row's difference is not a gain
    assert card.startswith("featcal ") and card.endswith("model [-10.0, +30.0]")
    (folder / "ablation.svg").unlink()
    assert not Reader(page_text(folder)).all("img")


def test_figures_of_other_results_are_left_out_and_named(tmp_path: Path) -> None:
    points = [point({"source": name}, featcal=0.7) for name in "ab"]
    folder = write_study(study("own", points), tmp_path / "s").parent
    drawn = (folder / "own.svg").read_bytes()
    (image,) = Reader(page_text(folder)).all("img")
    assert base64.b64decode(image["src"].partition(",")[2]) == drawn
    points[1]["rows"][-1]["accuracy"]["average"] -= 0.1
    leave(study("own", points), folder)
    page = Reader(page_text(folder))
    assert not page.all("img")
    (line,) = [line for line in page.texts("li") if "featcal plot" in line]
    assert line.startswith("left out, drawn from other results: own.svg. `featcal plot")
    plot_study(folder)
    assert len(Reader(page_text(folder)).all("img")) == 1


def test_costs_have_a_panel_each(tmp_path: Path) -> None:
    rows = [row("ta", 0.6), row("featcal", 0.8, cost={"seconds": 2.0, "peak_rss_bytes": 2.0**30})]
    points = [{"labels": {"samples_per_task": n}, "rows": rows, "failed": []} for n in (8, 64)]
    page = Reader(page_text(leave(study("cost", points), tmp_path / "study")))
    assert page.texts("h4") == ["seconds", "memory, MiB"]
    assert "featcal, samples_per_task = 8: 1024.0" in tips(page)


def test_points_are_linked_with_the_settings_of_one(tmp_path: Path) -> None:
    folder = leave(samples_study(), tmp_path / "study")
    for n in (512, 8):
        leave_run(folder / "points" / f"n{n}_seed#1" / "ta", settings={"samples_per_task": n})
    page = Reader(page_text(folder))
    links = [link["href"] for link in page.all("a") if not link["href"].startswith("#")]
    targets = {(tmp_path / unquote(link)).resolve() for link in links}
    assert {folder / "points" / f"n{n}_seed#1" / "ta" / "report.md" for n in (8, 512)} <= targets
    assert folder / "study.json" in targets and all(target.is_file() for target in targets)
    settings = page.table("settings at the point n512_seed#1")
    assert settings["samples_per_task"]["featcal"]["class"] == "changed"


def test_names_are_text_and_failed_cells_are_told(tmp_path: Path) -> None:
    failed = {"upstream": "ta", "name": "x", "reason": TRICKY, "seed": 3}
    points = [point({"source": name}, featcal=0.7) for name in (TRICKY, "other")]
    points[1]["failed"] = [failed]
    content = study("own", points, notes=[TRICKY])
    content.suite = TRICKY
    page = Reader(page_text(leave(content, tmp_path / "study")))
    assert len(page.all("script")) == 1
    lines = page.texts("li")
    assert f"source = other, seed = 3: ta, x failed: {TRICKY}" in lines
    assert lines.count(TRICKY) == 1
    assert f"source = {TRICKY}" in page.table("accuracy over ta, % (worst gap)")["+ featcal"]


def test_several_studies_share_a_page(tmp_path: Path) -> None:
    leave(samples_study(), tmp_path / "all" / "samples")
    leave(study("sweep", sweep_points(), design="each"), tmp_path / "all" / "sweep")
    page = Reader(page_text(tmp_path / "all"))
    assert page.texts("h1") == ["suite, samples, suite, sweep"]
    ids = [element["id"] for element in page.elements if "id" in element]
    assert len(ids) == len(set(ids))


def test_studies_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in "ab":
        leave(samples_study(), tmp_path / "all" / name)
    page = Reader(page_text(tmp_path / "all"))
    assert page.texts("h1") == ["suite (a), samples, suite (b), samples"]
    versions = page.table("Versions and device")["torch"]
    assert list(versions) == ["suite (a), samples", "suite (b), samples"]


def error_of(words: list[Path], page: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; no page is written."""
    assert main(["report", *map(str, words), "--html", str(page)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not page.exists()
    return line.removeprefix("featcal: error: ")


def test_studies_are_not_mixed_with_anything(tmp_path: Path, capsys) -> None:
    folder = leave(samples_study(), tmp_path / "study")
    run = leave_run(tmp_path / "run")
    (tmp_path / "diagnosis").mkdir()
    made().write(tmp_path / "diagnosis")
    for other in (run, tmp_path / "diagnosis"):
        message = error_of([other, folder], tmp_path / "page.html", capsys)
        assert message.startswith(f"{folder} is a study: report it by itself, without runs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "run"}, 'is not a study (no "kind": "study")'),
        ({"schema": 99}, "has schema 99"),
        ({"versions": 5}, "versions must be a mapping, got int '5'"),
        ({"points": [{"labels": {}, "rows": []}]}, "points[0]: no failed"),
    ],
)
def test_a_damaged_study_is_refused(tmp_path: Path, capsys, change: dict, message: str) -> None:
    folder = leave(samples_study(), tmp_path / "study")
    content = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json_text({**content, **change}))
    found = error_of([folder], tmp_path / "page.html", capsys)
    assert str(folder / "study.json") in found and message in found


def test_a_figure_that_cannot_be_read_is_named(tmp_path: Path, capsys, monkeypatch) -> None:
    folder = leave(study("own", [point({"source": n}, featcal=0.7) for n in "ab"]), tmp_path / "s")
    (folder / "own.svg").write_bytes(b"")

    read = Path.read_bytes

    def locked(path: Path) -> bytes:
        if path.suffix == ".svg":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", locked)
    message = error_of([folder], tmp_path / "page.html", capsys)
    assert message == f"cannot read {folder / 'own.svg'}: Permission denied"
