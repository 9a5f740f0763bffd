"""The HTML page of runs: its numbers, its structure, and what names may hold."""

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from html_pages import Reader, leave_log, page_text
from synthetic import LEVELS, SIX, leave_run, leave_seeds, make_report

from fusion_bench_featcal.results import Report, ReportError
from fusion_bench_featcal.results.find import FailedCell, find
from fusion_bench_featcal.results.html import write_page
from fusion_bench_featcal.results.html.figures import accuracy_figure, cost_figure
from fusion_bench_featcal.results.html.groups import groups_of
from fusion_bench_featcal.results.summary import summarise
from fusion_bench_featcal.results.views import write_side_by_side

TRICKY = '<b>"it\'s" & </script><script>x()</script>'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run like those of a bundled suite."""
    folder = leave_run(tmp_path / "run", tasks=SIX)
    leave_log(folder)
    return folder


def test_every_accuracy_is_that_of_the_report(run: Path):
    content = json.loads((run / "report.json").read_text())
    table = Reader(page_text(run)).table("accuracy in per cent")
    assert list(table) == list(content["rows"])
    for name, row in content["rows"].items():
        for task, value in row.items():
            cell = table[name][task.removeprefix("mini_")]
            assert float(cell["data-value"]) == value
            assert cell["text"] == f"{100 * value:.1f}"
        share = content["recovered_gap"][name]
        assert float(table[name]["recovered gap"]["data-value"]) == share


def test_a_page_is_valid_and_accessible(run: Path):
    page = Reader(page_text(run))
    ids = [element["id"] for element in page.elements if "id" in element]
    assert len(ids) == len(set(ids))
    assert [element["lang"] for element in page.all("html")] == ["en"]
    assert all("scope" in cell for cell in page.all("th"))
    targets = [link["href"] for link in page.all("a") if link["href"].startswith("#")]
    assert len(targets) > 6 and {target[1:] for target in targets} <= set(ids)
    assert all(e.get("aria-labelledby", ids[0]) in ids for e in page.elements)
    plots = page.all("svg", role="img")
    assert len(plots) == 2 + 2 * (1 + len(SIX))
    assert all(len(plot["aria-label"]) > 30 for plot in plots)
    assert all(use["href"][1:] in ids for use in page.all("use"))


def test_a_page_needs_nothing_from_elsewhere(run: Path):
    text = page_text(run)
    page = Reader(text)
    assert {"link", "img", "iframe", "image", "base"} & {e["tag"] for e in page.elements} == set()
    assert not any("src" in element for element in page.elements)
    assert "default-src 'none'" in page.all("meta")[3]["content"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", text)
    assert len(text.encode()) < 500_000


def test_links_lead_to_the_runs_files(tmp_path: Path):
    folder = leave_run(tmp_path / "a run#1" / "x")
    (folder / "a?b&c.txt").write_text("")
    (tmp_path / "pages").mkdir()
    page = tmp_path / "pages" / "page.html"
    write_page(page, find([folder]), {})
    found = Reader(page.read_text())
    links = [link["href"] for link in found.all("a") if not link["href"].startswith("#")]
    assert {(page.parent / unquote(link)).resolve() for link in links} == set(folder.iterdir())
    assert all(not re.search("[?#]", link) for link in links)


def test_names_are_text(tmp_path: Path):
    report = make_report(LEVELS | {f"featcal:{TRICKY}": 0.8}, (TRICKY, "dtd"), suite=TRICKY)
    report.notes.append(TRICKY)
    report.settings["featcal"]["modules"] = TRICKY
    report.write(tmp_path / "run")
    leave_log(tmp_path / "run", (TRICKY, "dtd"))
    page = Reader(page_text(tmp_path / "run"))
    assert len(page.all("script")) == 1
    assert page.texts("h1") == [TRICKY]
    assert TRICKY in page.texts("li")
    table = page.table("accuracy in per cent")
    assert TRICKY in table[f"featcal:{TRICKY}"]
    assert page.table("settings")["modules"]["featcal"]["text"] == TRICKY
    assert any(TRICKY in plot["aria-label"] for plot in page.all("svg", role="img"))


def test_only_warnings_have_the_colour_of_warnings(tmp_path: Path):
    report, kept = make_report(), "featcal: of 2 calibrations the first was kept, with the settings"
    report.notes += [kept, "dtd ends below the merged model: featcal -1.0 points"]
    report.write(tmp_path / "run")
    page = Reader(page_text(tmp_path / "run"))
    assert page.texts("div", class_="notes") == [kept]
    (warnings,) = page.texts("div", class_="warnings")
    assert report.notes[-1] in warnings and kept not in warnings


def test_the_headline_is_what_was_gained(run: Path):
    (card,) = Reader(page_text(run)).texts("article", class_="card")
    assert card.startswith("featcal toy, merged by task_arithmetic +15.0 points")
    assert "average accuracy: 60.0 to 75.0 %" in card
    assert "50 % [" in card and "worst task: mnist, 50 % of its gap" in card


def test_seeds_are_averaged_with_half_of_their_interval(tmp_path: Path):
    page = Reader(page_text(*leave_seeds(tmp_path)))
    cell = page.table("mean over 3 runs ± half of its 95 % interval")["featcal"]["average"]
    assert cell["text"] == "75.0 ± 12.4"
    assert page.table("settings")["seed"]["featcal"]["text"] == "1, 2, 3"
    assert any("± 12.4 over seeds" in mark["data-tip"] for mark in page.all("use", class_="pt"))


def test_settings_that_are_not_the_default_are_marked(tmp_path: Path):
    leave_run(tmp_path / "run", settings={"samples_per_task": 8, "nested": {"ridge_lambda": None}})
    settings = Reader(page_text(tmp_path / "run")).table("settings")
    marked = {key for key, row in settings.items() if row["featcal"].get("class") == "changed"}
    assert marked == {"samples_per_task"}
    assert settings["samples_per_task"]["FeatCal's default"]["text"] == "256"
    assert settings["nested.ridge_lambda"]["featcal"]["text"] == "null"


def test_runs_with_other_samples_are_apart_and_give_a_curve(tmp_path: Path):
    for samples, level in ((8, 0.65), (64, 0.7), (256, 0.8)):
        for seed in (1, 2):
            name = f"n{samples}-{seed}"
            settings = {"samples_per_task": samples}
            leave_run(tmp_path / name, level + 0.01 * seed, seed=seed, settings=settings)
    page = Reader(page_text(*sorted(tmp_path.iterdir())))
    assert len([h for h in page.texts("h3") if "accuracy in per cent" in h]) == 3
    tips = [mark["data-tip"] for mark in page.all("use", class_="pt")]
    assert [tip for tip in tips if "samples per task" in tip and tip.startswith("featcal")] == [
        "featcal, 8 samples per task: 66.5 ± 6.4 %",
        "featcal, 64 samples per task: 71.5 ± 6.4 %",
        "featcal, 256 samples per task: 81.5 ± 6.4 %",
    ]


def test_runs_that_do_not_differ_in_samples_share_a_table(tmp_path: Path):
    leave_run(tmp_path / "a", settings={"samples_per_task": 64})
    other = make_report({"task_arithmetic": 0.6, "surgery": 0.7})
    other.write(tmp_path / "b")  # its row has no such setting
    leave_run(tmp_path / "c", suite="other", settings={"samples_per_task": 8})
    page = Reader(page_text(*(tmp_path / name for name in "abc")))
    captions = [text for text in page.texts("h3") if "accuracy in per cent" in text]
    assert captions == ["toy: accuracy in per cent", "other: accuracy in per cent"]
    rows = ["base", "experts", "task_arithmetic", "featcal", "surgery"]
    assert list(page.table("toy: accuracy in per cent")) == rows


def test_a_comparison_with_a_failed_cell(tmp_path: Path):
    folder = tmp_path / "compare"
    leave_run(folder / "task_arithmetic")
    make_report({"base": 0.3, "experts": 0.9, "ties": 0.5, "surgery": 0.7}, upstream="ties").write(
        folder / "ties"
    )
    failed = FailedCell(upstream="ties", name="featcal", reason="out of <memory>", seed=3)
    runs = [folder / "task_arithmetic", folder / "ties"]
    write_side_by_side(summarise(runs, [failed]), folder)
    page = Reader(page_text(folder))
    table = page.table("accuracy in per cent")
    rows = ["base", "experts", "task_arithmetic", "task_arithmetic/featcal", "ties", "ties/surgery"]
    assert list(table) == [*rows, "ties/featcal"]
    assert table["ties/featcal"]["average"]["text"] == "failed"
    assert "ties, featcal failed (seed 3): out of <memory>" in page.texts("li")
    # Each merger has a panel and a card; a merger without FeatCal's rows shows another method's.
    assert page.texts("h4")[:2] == ["merged by task_arithmetic", "merged by ties"]
    assert [h.split()[0] for h in page.texts("article")] == ["featcal", "surgery"]
    assert any(link["href"].endswith("differences.csv") for link in page.all("a"))


def test_twenty_tasks_and_one(tmp_path: Path):
    tasks = tuple(f"a_task_with_a_long_name_{number}" for number in range(20))
    leave_log(leave_run(tmp_path / "many", tasks=tasks), tasks, blocks=32)
    page = Reader(text := page_text(tmp_path / "many"))
    assert len(page.all("svg", role="img")) == 2 + 2 * 21
    assert len(text.encode()) < 2_000_000
    leave_log(leave_run(tmp_path / "one", tasks=("cars",)), ("cars",), blocks=1)
    page = Reader(page_text(tmp_path / "one"))
    assert list(page.table("samples and test items by task")["test items"]) == ["cars"]
    # The mean over one task is that task.
    assert len(page.all("svg", role="img")) == 2 + 2


def test_what_a_run_lacks_is_left_out(tmp_path: Path):
    report = make_report({"featcal": 0.7}, items=False)
    report.cost = {"featcal": {"seconds": "unavailable"}}
    report.settings, report.samples = {}, {}
    report.write(tmp_path / "run")
    page = Reader(page_text(tmp_path / "run"))
    sections = [element["id"] for element in page.all("section")]
    assert sections[:3] == ["what-was-gained", "notes-and-warnings", "accuracy"]
    assert "settings" not in sections and "loss" not in sections
    assert "Cost against accuracy" not in " ".join(page.texts("h3"))
    assert "no merged model to compare with" in page.texts("article")[0]
    assert list(page.table("accuracy in per cent")["featcal"]) == ["average", "cars", "dtd"]


def test_a_method_looks_the_same_in_panels_that_lack_others(tmp_path: Path):
    ends, of_one = {"base": 0.3, "experts": 0.9}, {"task_arithmetic": 0.6, "featcal:a": 0.75}
    own = {"featcal:c": 0.7}  # chooses the colour of `featcal:a`, which the other merger lacks
    make_report(ends | of_one | own).write(tmp_path / "one")
    make_report(ends | {"ties": 0.6} | own, upstream="ties").write(tmp_path / "two")
    (group,) = groups_of(find([tmp_path]))
    for figure in (accuracy_figure(group), cost_figure(group)):
        assert len(figure.panels) == 2
        looks = {
            (series.name, series.look["color"], series.look["marker"])
            for panel in figure.panels
            for series in panel.series
            if series.name.startswith("featcal")
        }
        assert len(looks) == len({color for _, color, _ in looks}) == 2


def test_rows_without_seconds_are_not_drawn_at_zero(tmp_path: Path):
    report = make_report(LEVELS | {"surgery": 0.7, "instant": 0.65})
    report.cost["instant"] = {"seconds": 0.0}
    report.write(tmp_path / "run")
    page = Reader(page_text(tmp_path / "run"))
    tips = [mark["data-tip"] for mark in page.all("use", class_="pt") if " s" in mark["data-tip"]]
    assert [tip for tip in tips if tip.endswith(" s")] == [
        next(tip for tip in tips if tip.startswith("featcal: +15.0 ["))
    ]


def test_runs_that_contradict_one_another_write_no_page(tmp_path: Path):
    page = tmp_path / "page.html"
    page.write_text("old")
    runs = [leave_run(tmp_path / "a", 0.7), leave_run(tmp_path / "b", 0.8)]
    with pytest.raises(ReportError, match="differs between two runs with the same seeds"):
        write_page(page, find(runs), {})
    assert page.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "page.html"]


def test_the_same_runs_give_the_same_bytes(run: Path):
    assert page_text(run) == page_text(run)


def test_a_report_reads_back_as_it_was_shown(run: Path):
    before = Report.load(run).to_dict()
    page_text(run)
    assert Report.load(run).to_dict() == before
