"""The page of `featcal report --html`: its content, escaping, and its script in a browser."""

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic import LEVELS, leave_run, leave_seeds, make_report
from test_diagnosis import made

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.lab.report.diagnosis import diagnosis_grids, diagnosis_sentences
from fusion_bench_featcal.lab.report.find import find
from fusion_bench_featcal.lab.report.page import page_of_runs, page_of_study, page_text
from fusion_bench_featcal.lab.report.study import Study
from fusion_bench_featcal.lab.report.views import suite_grids
from fusion_bench_featcal.results.long_table import LINES_FILE, write_lines
from fusion_bench_featcal.results.report import summarise
from fusion_bench_featcal.results.summary import FailedCell

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "runs"
EVIL = "<script>alert('&')</script>{{ 7 * 7 }}"
VOID = {"meta", "input"}


class Reader(HTMLParser):
    """Elements of a page with their text; elements that are not closed are refused."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[dict[str, Any]] = []
        self._open: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element["text"] += data

    def texts(self, *tags: str) -> list[str]:
        return [" ".join(e["text"].split()) for e in self.elements if e["tag"] in tags]

    def table(self, caption: str) -> list[list[str]]:
        """Cells by line of the table with a caption."""
        number = [e["aria-label"] for e in self.elements if e.get("role") == "region"].index(
            caption
        )
        table = [e for e in self.elements if e["tag"] == "table"][number]
        later = self.elements[self.elements.index(table) + 1 :]
        lines: list[list[str]] = []
        for element in later:
            if element["tag"] == "tr":
                lines.append([])
            elif element["tag"] in ("th", "td"):
                lines[-1].append(element["text"])
            elif element["tag"] not in ("thead", "tbody"):
                break
        return lines


def page_from(*runs: Path, failed: list[FailedCell] | None = None) -> str:
    folders = find(runs)
    page = page_of_runs(folders, summarise(folders.runs, failed or folders.failed))
    return page_text(page, runs[0].parent.resolve())


def leave_study(folder: Path) -> Path:
    """A study of two numbers of samples, with two seeds each."""
    runs = []
    for samples in (8, 64):
        for seed in (1, 2):
            levels = {"experts": 0.9, "ties": 0.5, "featcal": 0.6 + samples / 1000 + seed / 100}
            report = make_report(levels, upstream="ties", seed=seed)
            report.labels = {"samples_per_task": samples}
            report.write(folder / "points" / f"{samples}-{seed}")
            runs.append(folder / "points" / f"{samples}-{seed}")
    Study(name="samples", suite="toy", runs=runs).write(folder)
    return folder


# ---- content


def test_a_page_has_the_tables_of_the_terminal():
    folders = find([GOLDEN / "compare42", GOLDEN / "compare43"])
    summary = summarise(folders.runs, folders.failed)
    page = Reader(page_text(page_of_runs(folders, summary), GOLDEN))
    (suite,), marked = summary.suites, []
    for title, grid in suite_grids(summary, suite).items():
        head, *lines = page.table(f"{suite}: {title}")
        marked += [cells[place] for number, (_, cells) in enumerate(grid.lines)
                   for place in range(len(cells)) if (number, place) in grid.best]  # fmt: skip
        assert head == [grid.corner, *grid.columns]
        assert [cells for _, *cells in lines] == [list(cells) for _, cells in grid.lines]
    assert marked and [e["text"] for e in page.elements if e.get("class") == "best"] == marked


@pytest.mark.parametrize("runs", [["compare42", "compare43"], ["compare42"]])
def test_a_page_has_every_number_that_report_prints(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = [str(GOLDEN / run) for run in runs]
    assert main(["report", *words, "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out.split("\naccuracy in per cent")[0]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    numbers = set(re.findall(r"[-+]?\d+\.\d+", printed))
    assert len(numbers) > 50
    assert numbers <= set(re.findall(r"[-+]?\d+\.\d+", page))


def test_rows_keep_their_merger_when_a_reader_sorts_them():
    page = Reader(page_from(GOLDEN / "compare42"))
    heads = [line[0] for line in page.table("clip-vit-mini_alphabets2: accuracy")]
    assert {"simple_average + featcal", "task_arithmetic + featcal"} <= set(heads)


def test_cards_show_gains_of_featcal_and_losses(tmp_path: Path):
    report = make_report({**LEVELS, "surgery": 0.8}, items=False)
    report.loss = {name: {"cars": 2.0, "average": x} for name, x in
                   {"task_arithmetic": 2.5, "featcal": 1.25}.items()}  # fmt: skip
    report.write(tmp_path / "run")
    page = Reader(page_from(tmp_path / "run"))
    (card,) = page.texts("article")
    assert card == (
        "featcal toy, merged by task_arithmetic +15.0 points over the merged model "
        "average accuracy: 60.0 to 75.0 % 50 % of the gap to the experts recovered "
        "worst task: cars, 50 % of its gap average loss: 2.5000 to 1.2500"
    )
    losses = page.table("toy: loss")
    assert losses[0] == ["loss", "cars", "dtd", "average"]
    assert losses[2] == ["task_arithmetic + featcal", "2.0000", "-", "1.2500"]


def test_means_over_seeds_have_their_spread(tmp_path: Path):
    page = Reader(page_from(*leave_seeds(tmp_path)))
    (card,) = page.texts("article")
    assert "average accuracy: 60.0 ± 0.0 to 75.0 ± 12.4 %" in card
    assert any("Student's t" in line for line in page.texts("li"))


def test_settings_data_and_versions_tell_where_rows_come_from(tmp_path: Path):
    runs = leave_seeds(tmp_path)
    page = Reader(page_from(*runs))
    assert page.table("settings") == [
        ["", "featcal"], ["ridge_lambda", "0.05"], ["seed", "1, 2, 3"],
    ]  # fmt: skip
    assert page.table("toy: samples and test items") == [
        ["", "cars", "dtd"], ["samples of featcal", "256 train", "256 train"],
        ["test items", "200", "200"],
    ]  # fmt: skip
    page = Reader(page_from(GOLDEN / "run"))
    assert page.table("versions")[0] == ["", "runs 1"]
    assert "torch" in [line[0] for line in page.table("versions")]


def test_long_cells_wrap(tmp_path: Path):
    paths = ", ".join(f"blocks.{number}.projection" for number in range(9))
    page = Reader(page_from(leave_run(tmp_path / "run", settings={"modules": paths})))
    assert [e["text"] for e in page.elements if e.get("class") == "long"] == [paths]


def test_failed_cells_and_notes_come_first(tmp_path: Path):
    run = leave_run(tmp_path / "run", notes=["drift is high"])
    failed = [FailedCell(upstream="task_arithmetic", name="surgery", reason="out of memory")]
    page = Reader(page_from(run, failed=failed))
    assert page.texts("li")[:2] == [
        "task_arithmetic, surgery failed: out of memory", "drift is high",
    ]  # fmt: skip
    assert page.table("toy: accuracy")[-1][:2] == ["task_arithmetic + surgery", "failed"]


def test_every_suite_has_its_tables(tmp_path: Path):
    runs = [leave_run(tmp_path / suite, suite=suite) for suite in ("images", "texts")]
    page = Reader(page_from(*runs))
    assert page.texts("h1") == ["images, texts"]
    assert page.table("images: accuracy") == page.table("texts: accuracy")


def test_figures_are_inside(tmp_path: Path):
    page = Reader(page_from(leave_run(tmp_path / "run")))
    figures = [e["id"] for e in page.elements if e["tag"] == "figure"]
    assert figures == ["accuracy", "cost"]
    assert "toy: accuracy by task" in page.texts("svg")[0]


def test_links_lead_to_the_files_of_runs(tmp_path: Path):
    run = leave_run(tmp_path / "a run #1")
    text = page_from(run)
    (tmp_path / "page.html").write_text(text)
    links = [e["href"] for e in Reader(text).elements if e["tag"] == "a"]
    assert "a%20run%20%231/report.json" in links
    assert len(links) == len([*run.iterdir()])


def test_a_run_without_evaluation_has_a_page(tmp_path: Path):
    make_report({}).write(tmp_path / "run")
    page = Reader(page_from(tmp_path / "run"))
    assert page.texts("h1") == ["toy"] and page.texts("article", "table") == []


def test_a_study_has_its_tables_curves_and_origins(tmp_path: Path):
    folder = leave_study(tmp_path / "study")
    study = Study.load(folder)
    page = Reader(page_text(page_of_study(folder, study), tmp_path))
    assert page.texts("h1") == ["toy: samples"]
    title, grid = study.grids()[0]
    lines = page.table(title)
    assert lines[0] == ["", *grid.columns] and [line[1:] for line in lines[1:]] == [
        list(cells) for _, cells in grid.lines
    ]
    (figure,) = [e for e in page.elements if e["tag"] == "figure"]
    assert "featcal" in figure["text"]
    assert page.table("settings")[1] == ["ridge_lambda", "0.05"]


def test_a_diagnosis_has_its_tables_sentences_and_figures(tmp_path: Path):
    run = leave_run(tmp_path / "run")
    lines = made()
    write_lines(run / LINES_FILE, lines)
    page = Reader(page_from(run))
    assert "Diagnosis in run" in page.texts("h2")
    for title, grid in diagnosis_grids(lines).items():
        assert page.table(title)[0] == [grid.corner, *grid.columns]
    assert set(diagnosis_sentences(lines)) <= set(page.texts("li"))
    assert "diagnosis-terms" in [e["id"] for e in page.elements if e["tag"] == "figure"]


# ---- what comes from users is text


def evil_page(folder: Path) -> str:
    settings, notes = {EVIL: EVIL}, [f"{EVIL}\x1b[31m\u202e"]
    levels = {"base": 0.3, "experts": 0.9, EVIL: 0.5, f"featcal:{EVIL}": 0.7, "featcal": 0.6}
    tasks = (EVIL, "b")
    report = make_report(levels, tasks, suite=EVIL, upstream=EVIL, settings=settings, notes=notes)
    report.versions = {EVIL: EVIL}
    report.write(folder / "run")
    (folder / "run" / f"{EVIL.replace('/', '')}.txt").write_text("")
    return page_from(folder / "run")


def test_names_of_users_are_text(tmp_path: Path):
    text = evil_page(tmp_path)
    page = Reader(text)
    assert len(page.texts("script")) == 1 and "alert(" not in page.texts("script")[0]
    assert page.texts("h1") == [EVIL]
    for tag in ("h3", "li", "th", "td", "text", "article"):
        assert any(EVIL in shown for shown in page.texts(tag)), tag
    assert "\x1b" not in text and "\u202e" not in text and r"\x1b[31m" in text
    assert " 49" not in text
    assert not [key for e in page.elements for key in e if key.startswith("on")]


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path):
    text = evil_page(tmp_path)
    page = Reader(text)
    for element in page.elements:
        for key, value in element.items():
            if key.endswith(("href", "src")):
                assert value.startswith("#") or not re.match(r"[\w+.-]*:|//", value)
    assert "url(h" not in text and "@import" not in text
    (policy,) = [e["content"] for e in page.elements if "http-equiv" in e]
    assert policy == ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'")


def test_the_same_runs_give_the_same_page(tmp_path: Path):
    run = leave_run(tmp_path / "run")
    assert page_from(run) == page_from(run)


# ---- the script


def test_a_page_brings_its_script(tmp_path: Path):
    (script,) = Reader(page_from(leave_run(tmp_path / "run"))).texts("script")
    assert "aria-sort" in script and "filter rows" in script


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)}")
HELPERS = """
const table = document.querySelector("table");
const rows = () => [...table.tBodies[0].rows].filter(row => !row.hidden).map(row => row.cells[0].textContent);
const heads = () => [...table.tHead.rows[0].cells];
const head = name => heads().find(cell => cell.textContent === name);
const show = result => {
  const out = document.createElement("pre");
  out.textContent = JSON.stringify(result);
  document.body.replaceChildren(out);
};
"""  # noqa: E501


def in_browser(text: str, script: str, folder: Path, *options: str) -> Any:
    """Open a page, run a script in it, and return the value that it shows."""
    page = folder / "tested.html"
    page.write_text(text.replace("</body>", f"<script>{{ {HELPERS} {script} }}</script></body>"))
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", "--virtual-time-budget=2000",
        f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shown = re.search("<pre>(.*?)</pre>", done.stdout, re.S)
    assert shown, done.stdout[-500:]
    return json.loads(shown[1])


@pytest.fixture
def page(tmp_path: Path) -> str:
    """A page of four methods on one merger."""
    make_report(LEVELS | {"surgery": 0.7, "ridge_surgery": 0.72}).write(tmp_path / "run")
    return page_from(tmp_path / "run")


@needs_browser
def test_a_click_on_a_head_sorts_and_a_second_one_reverses(page: str, tmp_path: Path):
    script = """
    const result = [];
    for (const name of ["average", "average", "gain over merger"]) {
      head(name).querySelector("button").click();
      result.push([head(name).getAttribute("aria-sort"), rows(),
                   heads().filter(cell => cell.hasAttribute("aria-sort")).length]);
    }
    show(result);"""
    over = "task_arithmetic + "
    order = ["experts", f"{over}featcal", f"{over}ridge_surgery", f"{over}surgery",
             "task_arithmetic", "base"]  # fmt: skip
    first, second, third = in_browser(page, script, tmp_path)
    assert first == ["descending", order, 1]
    assert second == ["ascending", order[::-1], 1]
    # Rows without a value stay at the end.
    assert third[1][:3] == order[1:4]


@needs_browser
def test_a_filter_keeps_rows_with_every_word(page: str, tmp_path: Path):
    script = """
    const field = document.querySelector("input[type=search]");
    const result = ["surgery", "RIDGE surgery", "nothing", ""].map(words => {
      field.value = words;
      field.dispatchEvent(new Event("input"));
      return rows().length;
    });
    show(result);"""
    assert in_browser(page, script, tmp_path) == [2, 1, 0, 6]


@needs_browser
@pytest.mark.parametrize(("scheme", "colour"), [(1, "255, 255, 255"), (0, "20, 23, 27")])
def test_colours_are_the_systems(page: str, tmp_path: Path, scheme: int, colour: str):
    script = "show([document.body, document.querySelector('svg')].map(e => getComputedStyle(e)));"
    script = script.replace("getComputedStyle(e)", "getComputedStyle(e).backgroundColor")
    option = f"--blink-settings=preferredColorScheme={scheme}"
    body, figure = in_browser(page, script, tmp_path, option)
    assert (body, figure) == (f"rgb({colour})", "rgba(0, 0, 0, 0)")


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_the_screen(tmp_path: Path, width: int):
    tasks = tuple(f"a_task_with_a_long_name_{number}" for number in range(12))
    run = leave_run(tmp_path / "run", tasks=tasks, suite="a_suite_with_a_name" * 4)
    # A window of a browser is never as narrow as a phone, but a frame may be.
    frame = f'<body><iframe width="{width}" srcdoc="{escape(page_from(run))}"></iframe></body>'
    script = """
    addEventListener("load", () => {
      const inside = document.querySelector("iframe").contentDocument.documentElement;
      const boxes = [...inside.querySelectorAll(".scroll")];
      const scrolls = boxes.some(box => box.scrollWidth > box.clientWidth);
      show([inside.scrollWidth - inside.clientWidth, scrolls]);
    });"""
    assert in_browser(frame, script, tmp_path) == [0, True]
