"""The package as an index shows it: links, licences, versions and README."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import REPOSITORY
from packaging.requirements import Requirement
from packaging.version import Version

from fusion_bench_featcal import __version__
from fusion_bench_featcal.suites import paths

pytest.importorskip("hatchling", reason="the build backend, of the extra `test`")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CITATION = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
SUITES = REPOSITORY / "suites" / paths.PACKAGE / "__init__.py"
LINK = re.compile(r"\]\(([^)\s]+)\)")


# --- metadata ---


def metadata(folder: Path) -> Any:
    """The core metadata that Hatchling makes of a folder's pyproject.toml."""
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    return ProjectMetadata(str(folder), PluginManager()).core


def test_every_link_of_the_description_is_absolute_and_leads_to_a_file():
    readme = metadata(REPOSITORY).readme
    address = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    links = LINK.findall(readme)
    assert len(links) == len(LINK.findall(README))
    assert all(link.startswith(("https://", "#")) for link in links)
    inside = [link.removeprefix(f"{address}/") for link in links if link.startswith(address)]
    assert len(inside) > 10
    for link in inside:
        kind, tag, path = link.partition("#")[0].split("/", 2)
        assert (REPOSITORY / path).exists(), link
        assert tag == f"v{__version__}"
        assert kind == ("raw" if path.endswith((".png", ".svg")) else "blob")


def test_transformers_is_bounded_by_the_newest_minor_release_tested():
    pins = (REPOSITORY / "constraints/default.txt").read_text(encoding="utf-8")
    (newest,) = (Version(v) for v in re.findall(r"^transformers==(.*)$", pins, re.MULTILINE))
    requirements = map(Requirement, PROJECT["project"]["dependencies"])
    (bounds,) = (str(r.specifier) for r in requirements if r.name == "transformers")
    assert f"<{newest.major}.{newest.minor + 1}" in bounds.split(",")


def test_citation_file_and_bibtex_of_the_page_agree():
    assert CITATION["version"] == __version__
    page = (REPOSITORY / "docs/index.md").read_text(encoding="utf-8")
    page = " ".join(re.sub(r"[{}\\]", "", page).split())
    (reference,) = CITATION["references"]
    authors = [f"{a['family-names']}, {a['given-names']}" for a in reference["authors"]]
    paper = [" and ".join(authors), reference["title"], reference["identifiers"][0]["value"]]
    for text in (*paper, CITATION["title"], CITATION["version"], CITATION["date-released"]):
        assert str(text) in page


def test_both_distributions_have_one_version_and_the_texts_of_their_licences():
    plugin, suites = metadata(REPOSITORY), metadata(REPOSITORY / "suites")
    assert plugin.license_expression == "MIT" and plugin.license_files == ["LICENSE"]
    names = {f"LICENSES/{name}.txt" for name in suites.license_expression.split(" AND ")}
    assert set(suites.license_files) == names | {"LICENSE"}
    licence = (REPOSITORY / "LICENSE").read_bytes()
    assert (REPOSITORY / "suites" / "LICENSE").read_bytes() == licence
    extra = PROJECT["project"]["optional-dependencies"]["suites"]
    assert extra == [f"{paths.PACKAGE}=={__version__}"]
    text = SUITES.read_text(encoding="utf-8")
    assert f'__version__ = "{__version__}"\n' in text
