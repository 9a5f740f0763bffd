"""The page of `featcal report --html`: its numbers, escaping, and its script in a browser."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reports import LEVELS, Page, error_of, featcal, leave_run

EVIL = "<script>alert('&')</script>{{ 7 * 7 }}"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


def page_of(run: Path, folder: Path) -> str:
    """Text of a page that is written into a folder."""
    tables = featcal("report", run)
    file = folder / "new" / "page.html"
    done = featcal("report", "--html", file, run)
    assert (done.code, done.out) == (0, f"{tables.out}written: {file}\n"), done.err
    return file.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page on which every name that users choose is hostile."""
    folder = tmp_path_factory.mktemp("evil")
    levels = {"base": 0.3, "experts": 0.9, EVIL: 0.5, f"featcal_{EVIL}": 0.7, "featcal": 0.6}
    names = {"suite": EVIL, "upstream": EVIL, "settings": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
    notes = [{"text": f"{EVIL}\x1b[31m\u202e"}]
    run = leave_run(folder / "a run #1", levels, (EVIL, "b"), notes=notes, **names)
    (run / f"{EVIL.replace('/', '')}.txt").write_text("")
    return page_of(run, folder)


def test_names_of_users_are_text(evil: str):
    page = Page(evil)
    (script,) = page.texts("script")
    assert "alert(" not in script and "aria-sort" in script and "filter rows" in script
    assert page.texts("h1") == [EVIL]
    for tag in ("h3", "li", "th", "td", "text", "article"):
        assert any(EVIL in text for text in page.texts(tag)), tag
    assert "\x1b" not in evil and "\u202e" not in evil and r"\x1b[31m" in evil
    assert " 49" not in evil
    assert not [key for e in page.elements for key in e if key.startswith("on")]


def test_nothing_is_loaded_from_elsewhere_and_links_lead_to_files(evil: str):
    page = Page(evil)
    links = [v for e in page.elements for key, v in e.items() if key.endswith(("href", "src"))]
    assert not [link for link in links if re.match(r"[\w+.-]*:|//", link)]
    assert "../a%20run%20%231/report.json" in links
    assert "url(h" not in evil and "@import" not in evil
    (policy,) = [e["content"] for e in page.elements if "http-equiv" in e]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def test_names_of_users_are_text_on_the_terminal_and_in_markdown(tmp_path: Path):
    name = "[/x]<script>a</script>\x1b[31m![b](http://c)|d"
    notes = [{"text": name}]
    run = leave_run(
        tmp_path, {f"featcal_{name}": 0.8, **LEVELS}, (name, "b"), suite=name, notes=notes
    )
    screen, text = featcal("report", run).out, (run / "report.md").read_text()
    assert "\x1b" not in screen and "[/x]" in screen
    assert "<script" not in text and "\x1b" not in text and "](" not in text
    assert r"[/x]&lt;script>a&lt;/script>\x1b[31m![b]\(http://c)\|d" in text
    assert r"\x1b[31m" in error_of("report", tmp_path / "\x1b[31m")
    message = error_of("report", run, "--html", tmp_path / "page.json")
    assert message.startswith("--html names a file that ends in .html, such as ")


def test_a_report_loads_no_model_and_no_framework(tmp_path: Path):
    words = ["report", str(leave_run(tmp_path / "run")), "--html", str(tmp_path / "page.html")]
    code = (
        f"import sys; from fusion_bench_featcal.cli import main; main({words!r}); "
        "print({'torch', 'transformers', 'fusion_bench', 'hydra'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


SCRIPT = """
const table = document.querySelector("table");
const rows = () => [...table.tBodies[0].rows].filter(row => !row.hidden);
const result = [];
for (const name of ["average", "average", "gain over merger"]) {
  [...table.tHead.rows[0].cells].find(cell => cell.textContent === name)
    .querySelector("button").click();
  result.push([table.querySelector("[aria-sort]").getAttribute("aria-sort"),
               ...rows().map(row => row.cells[0].textContent)]);
}
const field = document.querySelector("input[type=search]");
result.push(["surgery", "RIDGE surgery", "nothing", ""].map(words => {
  field.value = words;
  field.dispatchEvent(new Event("input"));
  return rows().length;
}));
const out = document.createElement("pre");
out.textContent = JSON.stringify(result);
document.body.replaceChildren(out);
"""


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)}")
def test_heads_sort_and_a_filter_keeps_rows_with_all_words(tmp_path: Path):
    run = leave_run(tmp_path / "run", LEVELS | {"surgery": 0.7, "ridge_surgery": 0.72})
    page = tmp_path / "tested.html"
    page.write_text(page_of(run, tmp_path).replace("</body>", f"<script>{SCRIPT}</script></body>"))
    words = "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage "
    words += "--virtual-time-budget=2000 --dump-dom"
    command = [BROWSER, *words.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    output: Any = re.search("<pre>(.*?)</pre>", done.stdout, re.S)
    assert output, done.stdout[-500:]
    falling, rising, by_gain, filtered = json.loads(output[1])
    over = "task_arithmetic + "
    order = ["experts", f"{over}featcal", f"{over}ridge_surgery", f"{over}surgery"]
    order += ["task_arithmetic", "base"]
    assert falling == ["descending", *order]
    assert rising == ["ascending", *reversed(order)]
    assert by_gain[1:4] == order[1:4]  # rows without a value stay at the end
    assert filtered == [2, 1, 0, 6]
