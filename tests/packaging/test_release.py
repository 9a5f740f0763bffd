"""The package as an index shows it: links, licences, versions and README."""

import re
import tomllib
from typing import Any

import yaml
from configs import REPOSITORY
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from fusion_bench_featcal import __version__
from fusion_bench_featcal.suites import paths

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CITATION = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_every_link_of_the_description_is_absolute_and_leads_to_a_file():
    readme: Any = ProjectMetadata(str(REPOSITORY), PluginManager()).core.readme
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


def test_versions_agree():
    assert CITATION["version"] == __version__
    extra = PROJECT["project"]["optional-dependencies"]["suites"]
    assert extra == [f"{paths.PACKAGE}=={__version__}"]
