"""The package as an index shows it: links, licences, versions and README."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import check_release
import pytest
import yaml
from configs import REPOSITORY
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from package_metadata import absolute_links
from reports import featcal

from fusion_bench_featcal import __version__
from fusion_bench_featcal.files import suite_paths

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CITING = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
CITATION = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
ZENODO = json.loads((REPOSITORY / ".zenodo.json").read_text(encoding="utf-8"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("address", ["", "https://host/a"])
def test_links_of_the_description_lead_to_files_of_the_release(address: str):
    tag = f"v{__version__}"
    description = absolute_links(README, address, tag)
    links = LINK.findall(description)
    assert all(link.startswith(("https://", "#")) for link in links)
    inside = [link.removeprefix(f"{address}/") for link in links if link.startswith("https://host")]
    assert len(inside) > 10 if address else not inside
    for link in inside:
        kind, release, path = link.partition("#")[0].split("/", 2)
        assert (REPOSITORY / path).exists(), link
        assert release == tag
        assert kind == ("raw" if path.endswith((".png", ".svg")) else "blob")


def test_the_metadata_has_no_address_that_does_not_exist():
    metadata: Any = ProjectMetadata(str(REPOSITORY), PluginManager()).core
    address = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    assert metadata.readme == absolute_links(README, address, f"v{__version__}")
    assert bool(address) == ("Homepage" in metadata.urls)
    assert not any("example." in url for url in metadata.urls.values())


def test_a_tagged_commit_without_an_address_is_no_release(tmp_path: Path):
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
    text = re.sub(r'^repository = ".*"', 'repository = ""', project.read_text(), flags=re.MULTILINE)
    project.write_text(text)
    assert "repository is empty" in check_release.refusal(tmp_path)
    project.write_text(text.replace('repository = ""', 'repository = "https://host/a"'))
    assert check_release.refusal(tmp_path) == ""


def test_versions_agree():
    """The command, both distributions, the pin of the suites, and all citations."""
    folders = REPOSITORY, REPOSITORY / "suites"
    versions = [ProjectMetadata(str(folder), PluginManager()).version for folder in folders]
    bibtex = re.findall(r"version = \{(.+)\}", CITING)
    command = featcal("--version").out.strip().removeprefix("featcal ")
    archived = [ZENODO["version"], CITATION["version"]]
    assert [command, *archived, *versions, *bibtex] == [__version__] * 6
    extra = PROJECT["project"]["optional-dependencies"]["suites"]
    assert extra == [f"{suite_paths.PACKAGE}=={__version__}"]


def test_citations_have_one_title_and_licence():
    (paper,) = CITATION["references"]
    assert ZENODO["title"] == CITATION["title"]
    assert ZENODO["license"] == CITATION["license"] == PROJECT["project"]["license"]
    assert [work["identifier"] for work in ZENODO["related_identifiers"]] == [
        paper["identifiers"][0]["value"]
    ]


def test_the_dockerfile_installs_extras_and_files_that_exist():
    """No image can be built in the tests."""
    lines = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if not line.startswith("#")]
    assert {word for word, _ in instructions} <= {"FROM", "RUN", "COPY", "WORKDIR", "ENTRYPOINT"}
    assert len(lines) == 8
    (install,) = (words for _, words in instructions if "pip install" in words)
    words = shlex.split(install.partition("pip install")[2])
    assert (REPOSITORY / words[words.index("-c") + 1]).is_file()
    package, suites = (word for word in words if word.startswith("."))
    extras = package.removeprefix(".[").removesuffix("]").split(",")
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    assert (REPOSITORY / suites / "pyproject.toml").is_file()
    (entry,) = (json.loads(words) for word, words in instructions if word == "ENTRYPOINT")
    assert entry[0] in PROJECT["project"]["scripts"]
