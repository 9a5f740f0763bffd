"""The page of `featcal report --html`: its numbers, escaping, and its script in a browser."""

import json
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
from pages import Page
from reports import LEVELS, error_of, featcal, leave_run

from fusion_bench_featcal.results import Report

EVIL = "<script>alert('&')</script>{{ 7 * 7 }}"


def page_of(*runs: Path, folder: Path) -> str:
    """Text of a page that is written into a folder."""
    tables = featcal("report", *runs)
    file = folder / "new" / "page.html"
    done = featcal("report", "--html", file, *runs)
    assert (done.code, done.out) == (0, f"{tables.out}written: {file}\n"), done.err
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page on which whatever users name is hostile."""
    folder = tmp_path_factory.mktemp("evil")
    levels = {"base": 0.3, "experts": 0.9, EVIL: 0.5, f"featcal:{EVIL}": 0.7, "featcal": 0.6}
    names = {"suite": EVIL, "upstream": EVIL, "settings": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
    notes = [{"text": f"{EVIL}\x1b[31m\u202e"}]
    run = leave_run(folder / "a run #1", levels, (EVIL, "b"), notes=notes, **names)
    (run / f"{EVIL.replace('/', '')}.txt").write_text("")
    return page_of(run, folder=folder)


def test_names_of_users_are_text(evil: str):
    page = Page(evil)
    (script,) = page.texts("script")
    assert "alert(" not in script and "aria-sort" in script and "filter rows" in script
    assert page.texts("h1") == [EVIL]
    for tag in ("h3", "li", "th", "td", "text", "article"):
        assert any(EVIL in shown for shown in page.texts(tag)), tag
    assert "\x1b" not in evil and "\u202e" not in evil and r"\x1b[31m" in evil
    assert " 49" not in evil
    assert not [key for e in page.elements for key in e if key.startswith("on")]


def test_nothing_is_loaded_from_elsewhere_and_links_lead_to_files(evil: str):
    page = Page(evil)
    for element in page.elements:
        for key, value in element.items():
            if key.endswith(("href", "src")):
                assert value.startswith("#") or not re.match(r"[\w+.-]*:|//", value)
    assert "url(h" not in evil and "@import" not in evil
    (policy,) = [e["content"] for e in page.elements if "http-equiv" in e]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    links = [e["href"] for e in page.elements if e["tag"] == "a"]
    assert "../a%20run%20%231/report.json" in links
    assert [e["id"] for e in page.elements if e["tag"] == "figure"] == ["accuracy", "cost"]


@pytest.mark.parametrize("runs", [1, 2])
def test_names_of_users_are_text_on_the_terminal_and_in_markdown(runs: int, tmp_path: Path):
    name = "[/x]<script>a</script>\x1b[31m![b](http://c)"
    for seed in range(runs):
        levels = {f"featcal:{name}": 0.8, **LEVELS}
        folder, notes = tmp_path / str(seed), [{"text": name}]
        leave_run(folder, levels, (name, "b"), suite=name, seed=seed, notes=notes)
    shown = featcal("report", tmp_path, "--out", tmp_path / "out").out
    assert "\x1b" not in shown and "[/x]" in shown
    for file in tmp_path.glob("*/report.md"):
        text = file.read_text()
        assert "<script" not in text and "\x1b" not in text and "](" not in text
        assert r"[/x]&lt;script>a&lt;/script>\x1b[31m![b]\(http://c)" in text
    assert r"\x1b[31m" in error_of("report", tmp_path / "\x1b[31m")
    report = Report()
    report.add_row("a|b", {"x|y": 0.5}, cost={"x_bytes": "unavailable"})
    text = (report.write(tmp_path / "bars").parent / "report.md").read_text()
    assert "| a\\|b | 50.0 | 50.0 |" in text and "| x_bytes | unavailable |" in text


def test_a_page_is_a_file_that_ends_in_html(tmp_path: Path):
    run = leave_run(tmp_path / "run")
    names = {"page": "page.html", "page.json": "page.json.html", ".": "report.html"}
    for name, near in names.items():
        message = error_of("report", run, "--html", tmp_path / name)
        assert message.startswith("--html names a file that ends in .html, such as ")
        assert f"{tmp_path / near}, not " in message
    (tmp_path / "empty").mkdir()
    message = error_of("report", tmp_path / "empty", "--html", tmp_path / "page.html")
    assert message.startswith(f"no run in or below {tmp_path}")
    assert not (tmp_path / "page.html").exists()


def test_a_report_loads_no_model_and_no_framework(tmp_path: Path):
    words = ["report", str(leave_run(tmp_path / "run")), "--html", str(tmp_path / "page.html")]
    code = (
        f"import sys; from fusion_bench_featcal.cli import main; main({words!r}); "
        "print({'torch', 'transformers', 'fusion_bench', 'hydra'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


# ---- the script

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


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of four methods on one merger."""
    folder = tmp_path_factory.mktemp("page")
    run = leave_run(folder / "run", LEVELS | {"surgery": 0.7, "ridge_surgery": 0.72})
    return page_of(run, folder=folder)


@needs_browser
def test_heads_sort_and_a_filter_keeps_rows_with_every_word(page: str, tmp_path: Path):
    script = """
    const result = [];
    for (const name of ["average", "average", "gain over merger"]) {
      head(name).querySelector("button").click();
      result.push([head(name).getAttribute("aria-sort"), rows(),
                   heads().filter(cell => cell.hasAttribute("aria-sort")).length]);
    }
    const field = document.querySelector("input[type=search]");
    result.push(["surgery", "RIDGE surgery", "nothing", ""].map(words => {
      field.value = words;
      field.dispatchEvent(new Event("input"));
      return rows().length;
    }));
    show(result);"""
    over = "task_arithmetic + "
    order = ["experts", f"{over}featcal", f"{over}ridge_surgery", f"{over}surgery",
             "task_arithmetic", "base"]  # fmt: skip
    first, second, third, filtered = in_browser(page, script, tmp_path)
    assert first == ["descending", order, 1]
    assert second == ["ascending", order[::-1], 1]
    assert third[1][:3] == order[1:4]  # rows without a value stay at the end
    assert filtered == [2, 1, 0, 6]


@needs_browser
@pytest.mark.parametrize(("scheme", "colour"), [(1, "255, 255, 255"), (0, "20, 23, 27")])
def test_colours_are_the_systems(page: str, tmp_path: Path, scheme: int, colour: str):
    script = "show([document.body, document.querySelector('svg')].map(e => getComputedStyle(e)));"
    script = script.replace("getComputedStyle(e)", "getComputedStyle(e).backgroundColor")
    option = f"--blink-settings=preferredColorScheme={scheme}"
    assert in_browser(page, script, tmp_path, option) == [f"rgb({colour})", "rgba(0, 0, 0, 0)"]


@needs_browser
def test_nothing_overflows_a_phone_or_a_screen(tmp_path: Path):
    tasks = tuple(f"a_task_with_a_long_name_{number}" for number in range(12))
    run = leave_run(tmp_path / "run", LEVELS, tasks, suite="a_suite_with_a_name" * 4)
    # A window of a browser is never as narrow as a phone, but a frame may be.
    text = escape(page_of(run, folder=tmp_path))
    frames = [f'<iframe width="{width}" srcdoc="{text}"></iframe>' for width in (390, 1280)]
    script = """
    addEventListener("load", () => show([...document.querySelectorAll("iframe")].map(frame => {
      const inside = frame.contentDocument.documentElement;
      const boxes = [...inside.querySelectorAll(".scroll")];
      const scrolls = boxes.some(box => box.scrollWidth > box.clientWidth);
      return [inside.scrollWidth - inside.clientWidth, scrolls];
    })));"""
    page = f"<body>{''.join(frames)}</body>"
    assert in_browser(page, script, tmp_path) == [[0, True]] * 2
