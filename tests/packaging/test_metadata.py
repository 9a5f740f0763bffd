"""The package as an index shows it: versions, links and licences."""

import re
import runpy
import tomllib

import pytest
import yaml
from composing import REPOSITORY

from fusion_bench_featcal import __version__

pytest.importorskip("hatchling", reason="the build backend, of the extra `test`")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def metadata():
    """The core metadata that Hatchling makes of pyproject.toml."""
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    return ProjectMetadata(str(REPOSITORY), PluginManager()).core


def test_every_link_of_the_description_is_absolute_and_leads_to_a_file(metadata):
    address = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    links = LINK.findall(metadata.readme)
    assert len(links) == len(LINK.findall((REPOSITORY / "README.md").read_text(encoding="utf-8")))
    relative = [link for link in links if not link.startswith(("https://", "#"))]
    assert not relative
    inside = [link.removeprefix(f"{address}/") for link in links if link.startswith(address)]
    assert len(inside) > 10
    for link in inside:
        kind, tag, path = link.partition("#")[0].split("/", 2)
        assert (REPOSITORY / path).exists(), link
        assert tag == f"v{__version__}"
        assert kind == ("raw" if path.endswith((".png", ".svg")) else "blob")


def test_links_around_images_and_absolute_ones():
    hook = runpy.run_path(str(REPOSITORY / "scripts" / "package_metadata.py"))
    text = "[![a](b.png)](c.md) [d](https://e) [f](#g) ![h](i/j.png) [[1]](k)"
    assert hook["absolute_links"](text, "https://x", "v1") == (
        "[![a](https://x/raw/v1/b.png)](https://x/blob/v1/c.md) [d](https://e) [f](#g) "
        "![h](https://x/raw/v1/i/j.png) [[1]](k)"
    )


def test_citation_has_the_version_of_the_package():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(citation["date-released"]))


def test_bibtex_of_the_page_says_what_the_citation_file_says():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    page = (REPOSITORY / "docs/index.md").read_text(encoding="utf-8")
    paper, software = re.findall(r"^@\w+\{.*?^\}", page, re.MULTILINE | re.DOTALL)
    (reference,) = citation["references"]
    authors = [f"{a['family-names']}, {a['given-names']}" for a in reference["authors"]]
    plain = [re.sub(r"[{}\\]", "", " ".join(entry.split())) for entry in (paper, software)]
    for said in (" and ".join(authors), reference["title"], str(reference["year"])):
        assert said in plain[0]
    assert reference["identifiers"][0]["value"] in plain[0]
    for said in (citation["title"], citation["version"], str(citation["date-released"])):
        assert said in plain[1]


def test_every_licence_of_the_expression_has_its_text(metadata):
    names = set(metadata.license_expression.split(" AND "))
    texts = {file.removeprefix("LICENSES/").removesuffix(".txt") for file in metadata.license_files}
    assert texts == names | {"LICENSE"}
    origins = REPOSITORY / "fusion_bench_featcal" / "suites" / "data" / "ORIGINS.md"
    named = set(re.findall(r"CC BY(?:-SA)? \d\.0", origins.read_text(encoding="utf-8")))
    assert {name.replace(" ", "-") for name in named} <= names


def test_types_are_announced():
    assert (REPOSITORY / "fusion_bench_featcal" / "py.typed").is_file()


def test_the_wheel_has_the_template_of_pages():
    from hatchling.builders.wheel import WheelBuilder

    packed = {
        file.distribution_path for file in WheelBuilder(str(REPOSITORY)).recurse_included_files()
    }
    assert "fusion_bench_featcal/lab/report/page.html" in packed
