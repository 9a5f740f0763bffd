"""The package as an index shows it: links, licences, versions and README."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import check_release
import yaml
from configs import REPOSITORY
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from reports import featcal

from fusion_bench_featcal import __version__
from fusion_bench_featcal.files import suite_paths

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CITING = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
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


def test_a_tagged_commit_with_the_placeholder_is_no_release(tmp_path: Path):
    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True)

    (tmp_path / "fusion_bench_featcal").mkdir()
    for file in ("pyproject.toml", "fusion_bench_featcal/__init__.py"):
        shutil.copy(REPOSITORY / file, tmp_path / file)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    assert check_release.refusal(tmp_path) == ""
    git("tag", f"v{__version__}")
    project = tmp_path / "pyproject.toml"
    is_placeholder = check_release.PLACEHOLDER in project.read_text()
    assert ("still the placeholder" in check_release.refusal(tmp_path)) == is_placeholder
    project.write_text(project.read_text().replace(check_release.PLACEHOLDER, "https://host/a"))
    assert check_release.refusal(tmp_path) == ""


def test_versions_agree():
    """The command, both distributions, the pin of the suites, and both citations."""
    folders = REPOSITORY, REPOSITORY / "suites"
    versions = [ProjectMetadata(str(folder), PluginManager()).version for folder in folders]
    bibtex = re.findall(r"version = \{(.+)\}", CITING)
    command = featcal("--version").out.strip().removeprefix("featcal ")
    assert [command, CITATION["version"], *versions, *bibtex] == [__version__] * 5
    extra = PROJECT["project"]["optional-dependencies"]["suites"]
    assert extra == [f"{suite_paths.PACKAGE}=={__version__}"]
