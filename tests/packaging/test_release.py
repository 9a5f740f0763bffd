"""The package as an index shows it: links, licences, versions, README and notebook."""

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import REPOSITORY

from fusion_bench_featcal import __version__

pytest.importorskip("hatchling", reason="the build backend, of the extra `test`")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CITATION = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


# --- metadata ---


@pytest.fixture(scope="module")
def metadata() -> Any:
    """The core metadata that Hatchling makes of pyproject.toml."""
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    return ProjectMetadata(str(REPOSITORY), PluginManager()).core


def test_every_link_of_the_description_is_absolute_and_leads_to_a_file(metadata):
    address = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    links = LINK.findall(metadata.readme)
    assert len(links) == len(LINK.findall(README))
    assert all(link.startswith(("https://", "#")) for link in links)
    inside = [link.removeprefix(f"{address}/") for link in links if link.startswith(address)]
    assert len(inside) > 10
    for link in inside:
        kind, tag, path = link.partition("#")[0].split("/", 2)
        assert (REPOSITORY / path).exists(), link
        assert tag == f"v{__version__}"
        assert kind == ("raw" if path.endswith((".png", ".svg")) else "blob")
    hook = runpy.run_path(str(REPOSITORY / "scripts" / "package_metadata.py"))
    text = "[![a](b.png)](c.md) [d](https://e) [f](#g) ![h](i/j.png) [[1]](k)"
    assert hook["absolute_links"](text, "https://x", "v1") == (
        "[![a](https://x/raw/v1/b.png)](https://x/blob/v1/c.md) [d](https://e) [f](#g) "
        "![h](https://x/raw/v1/i/j.png) [[1]](k)"
    )


def test_citation_file_and_bibtex_of_the_page_agree():
    assert CITATION["version"] == __version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(CITATION["date-released"]))
    page = (REPOSITORY / "docs/index.md").read_text(encoding="utf-8")
    entries = re.findall(r"^@\w+\{.*?^\}", page, re.MULTILINE | re.DOTALL)
    paper, software = (re.sub(r"[{}\\]", "", " ".join(entry.split())) for entry in entries)
    (reference,) = CITATION["references"]
    authors = [f"{a['family-names']}, {a['given-names']}" for a in reference["authors"]]
    for text in (" and ".join(authors), reference["title"], str(reference["year"])):
        assert text in paper
    assert reference["identifiers"][0]["value"] in paper
    for text in (CITATION["title"], CITATION["version"], str(CITATION["date-released"])):
        assert text in software


def test_every_licence_of_the_expression_has_its_text(metadata):
    names = set(metadata.license_expression.split(" AND "))
    texts = {file.removeprefix("LICENSES/").removesuffix(".txt") for file in metadata.license_files}
    assert texts == names | {"LICENSE"}


# --- README and notebook ---


def test_readme_is_short():
    assert len(README.encode()) < 7000
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) == 1
    (table,) = re.findall(r"(?:^\|.*\n)+", README, re.MULTILINE)
    assert len(table.splitlines()) <= 2 + 5
    assert table.splitlines()[0].count("|") - 1 <= 4


def test_python_of_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    lines = [line for line in code.splitlines() if line and "import" not in line.split("#")[0]]
    assert len(lines) <= 10
    monkeypatch.chdir(tmp_path)
    for word, fast in (
        ("samples_per_task=64", "samples_per_task=4"),
        ("images[task]", "images[task][:4]"),
    ):
        assert code.count(word) == 1
        code = code.replace(word, fast)
    exec(code, {})
    names = {path.name for path in (tmp_path / "calibrated").iterdir()}
    assert names == {"config.json", "model.safetensors"}


def test_the_notebook_was_run_in_order_and_raises_the_average():
    text = (REPOSITORY / "examples" / "walkthrough.ipynb").read_text(encoding="utf-8")
    assert len(text.encode()) < 300_000
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    printed = "".join(code[-2]["outputs"][0]["text"])
    average = {line.split()[0]: float(line.split()[-1]) for line in printed.splitlines()[1:]}
    assert average["base"] < average["merged"] < average["paper"] < average["experts"]
    assert average["merged"] < average["FeatCal+"] < average["experts"]
