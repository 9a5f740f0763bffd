"""The page's script in a real browser, without a network; skipped where there is no Chromium."""

import json
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest
from html_pages import Reader, leave_log, page_text
from synthetic import LEVELS, leave_run, make_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)}")

REPORT = """
const report = result => {
  const out = document.createElement("pre");
  out.id = "result";
  out.textContent = JSON.stringify(result);
  document.body.append(out);
};
"""
HELPERS = """
const table = document.querySelector("table");
const rows = () => [...table.tBodies[0].rows].filter(row => !row.hidden).map(row => row.cells[0].textContent);
const heads = () => [...table.tHead.rows[0].cells];
const head = name => heads().find(cell => cell.textContent === name);
const press = (target, key) => target.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true}));
const search = document.querySelector("input[type=search]");
const type = text => { search.value = text; search.dispatchEvent(new Event("input")); };
const tipText = () => document.getElementById("tip").hidden ? null : document.getElementById("tip").textContent;
"""  # noqa: E501


def in_browser(text: str, script: str, folder: Path, *options: str) -> Any:
    """Open a page, run a script in it, and return the value of the script's `result`."""
    page = folder / "tested.html"
    if "report(" not in script:
        script = f"{HELPERS} {script}; report(result)"
    test = f"<script>{REPORT} {{ {script} }}</script></body>"
    page.write_text(text.replace("</body>", test))
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", "--virtual-time-budget=2000",
        f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    # Chromium writes the page as it stands, not as XML: the last element with this id.
    (result,) = Reader(done.stdout.replace("<!DOCTYPE html>", "")).texts("pre", id="result")
    return json.loads(result)


@pytest.fixture
def page(tmp_path: Path) -> str:
    """A page of four methods on one merger."""
    levels = LEVELS | {"surgery": 0.7, "ridge_surgery": 0.72}
    make_report(levels).write(tmp_path / "run")
    leave_log(tmp_path / "run", ("cars", "dtd"))
    return page_text(tmp_path / "run")


def test_a_click_on_a_head_sorts_and_says_so(page: str, tmp_path: Path):
    script = """
    const result = [];
    for (const name of ["average", "average", "row", "gain over merger"]) {
      head(name).querySelector("button").click();
      result.push([head(name).getAttribute("aria-sort"), rows(),
                   heads().filter(cell => cell.hasAttribute("aria-sort")).length]);
    }"""
    first, second, third, fourth = in_browser(page, script, tmp_path)
    order = ["experts", "featcal", "ridge_surgery", "surgery", "task_arithmetic", "base"]
    assert first == ["descending", order, 1]
    assert second == ["ascending", order[::-1], 1]
    assert third == ["ascending", sorted(order), 1]
    # Rows without a value stay at the end.
    assert fourth[1][:3] == ["featcal", "ridge_surgery", "surgery"]


def test_a_filter_keeps_rows_with_every_word(page: str, tmp_path: Path):
    script = """
    type("surgery"); const one = [rows(), document.querySelector("output").textContent];
    type("RIDGE surgery"); const two = rows();
    type("nothing"); const three = rows();
    type(""); const result = [one, two, three, rows().length];"""
    assert in_browser(page, script, tmp_path) == [
        [["surgery", "ridge_surgery"], "2 of 6 rows"], ["ridge_surgery"], [], 6,
    ]  # fmt: skip


def test_columns_can_be_hidden(page: str, tmp_path: Path):
    script = """
    const box = [...document.querySelectorAll("[data-column]")].find(
      one => one.parentElement.textContent.trim() === "cars");
    box.click();
    const cells = [...table.rows].map(row => [...row.cells].filter(cell => cell.hidden).length);
    const result = [head("cars").hidden, cells];"""
    assert in_browser(page, script, tmp_path) == [True, [1] * 7]


def test_only_settings_that_differ_can_be_shown(tmp_path: Path):
    values = {"samples_per_task": 8, "batch_size": 16, "modules": None}
    script = """
    const box = document.querySelector(".only"); box.click();
    const settings = box.closest(".table").querySelector("tbody").rows;
    const result = [...settings].filter(row => !row.hidden).map(row => row.cells[0].textContent);"""
    page = page_text(leave_run(tmp_path / "run", settings=values))
    assert in_browser(page, script, tmp_path) == ["samples_per_task"]


def test_marks_answer_to_the_keyboard_and_the_pointer(page: str, tmp_path: Path):
    script = """
    const plot = document.querySelector(".plot");
    press(plot, "ArrowRight"); const first = tipText();
    press(plot, "ArrowLeft"); const last = tipText();
    press(plot, "Escape"); const none = tipText();
    const mark = [...plot.querySelectorAll(".pt")].find(one => one.dataset.tip.startsWith("featcal, dtd"));
    const at = mark.getBoundingClientRect();
    plot.dispatchEvent(new PointerEvent("pointermove",
      {clientX: at.left + at.width / 2 + 2, clientY: at.top + at.height / 2}));
    const result = [first, last, none, tipText() === mark.dataset.tip];"""  # noqa: E501
    first, last, none, pointed = in_browser(page, script, tmp_path)
    # The base lies far below the others and is left out.
    assert first.startswith("experts, cars: 90.0 %")
    assert last.startswith("ridge_surgery, average: 72.0 %")
    assert none is None and pointed


def test_the_legend_hides_a_row_from_a_figure(page: str, tmp_path: Path):
    script = """
    const figure = document.querySelector("figure");
    const button = [...figure.querySelectorAll(".legend button")].find(one => one.textContent === "surgery");
    const away = () => [...figure.querySelectorAll(".away")].map(one => one.dataset.series);
    button.click(); const result = [button.getAttribute("aria-pressed"), away()];
    button.click(); result.push(button.getAttribute("aria-pressed"), away());"""  # noqa: E501
    assert in_browser(page, script, tmp_path) == ["false", ["surgery"], "true", []]


def test_the_theme_is_the_systems_until_it_is_chosen(page: str, tmp_path: Path):
    script = """
    const button = document.getElementById("theme");
    const colour = () => getComputedStyle(document.body).backgroundColor;
    const result = [[button.textContent, colour()]];
    const turn = () => { button.click(); result.push([button.textContent, colour()]); };
    turn(); turn(); turn();"""
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 27)"
    for option, system in (("preferredColorScheme=1", light), ("preferredColorScheme=0", dark)):
        assert in_browser(page, script, tmp_path, f"--blink-settings={option}") == [
            ["Theme: system", system], ["Theme: light", light], ["Theme: dark", dark],
            ["Theme: system", system],
        ]  # fmt: skip


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_overflows_the_screen(tmp_path: Path, width: int):
    tasks = tuple(f"a_task_with_a_long_name_{number}" for number in range(12))
    run = leave_run(tmp_path / "run", tasks=tasks, suite="a_suite_with_a_name" * 4)
    leave_log(run, tasks)
    # A window of a browser is never as narrow as a phone; a frame may be.
    frame = f'<body><iframe width="{width}" srcdoc="{escape(page_text(run))}"></iframe></body>'
    script = """
    const inside = document.querySelector("iframe").contentDocument.documentElement;
    const links = inside.querySelector("nav"), table = inside.querySelector(".scroll");
    const shadow = getComputedStyle(table).backgroundImage.includes("gradient");
    const result = [inside.clientWidth, inside.scrollWidth, links.scrollWidth <= links.clientWidth,
                    table.scrollWidth > table.clientWidth, shadow];"""
    loaded = f"addEventListener('load', () => {{ {script} report(result); }})"
    found = in_browser(frame, loaded, tmp_path, "--hide-scrollbars")
    # All links are seen, and a shadow tells that the table goes on.
    assert found == [width, width, True, True, True]
