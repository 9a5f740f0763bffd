"""Behaviour as it was when the golden files were made: see make.py.

Nothing here imports an inner module of the package, so that its modules can move.
"""

from pathlib import Path
from typing import Any

import golden_surface
import pytest
from golden_methods import EVALUATED, RUNS, SLOW, differences, method_sketch, reports_of
from make import GROUPS, load

METHODS = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RUNS]


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and saved parameters of the run that evaluates its models."""
    folder = tmp_path_factory.mktemp("evaluated")
    return folder, method_sketch(EVALUATED, folder)


@pytest.mark.parametrize("name", METHODS)
def test_models_that_methods_save(name: str, tmp_path: Path, request: Any) -> None:
    is_evaluated = name == EVALUATED
    run = request.getfixturevalue("evaluated_run") if is_evaluated else None
    result = method_sketch(name, tmp_path) if run is None else run[1]
    assert differences(result, load("methods")[name]) == []


def test_structure_of_reports(evaluated_run: tuple[Path, Any]) -> None:
    result, kept = reports_of(evaluated_run[0] / "log"), load("reports")
    for name, structure in kept.items():
        assert result[name] == structure, name


@pytest.mark.parametrize("group", ["names", "configs", "verbs"])
def test_names_that_users_rely_on(group: str, tmp_path: Path) -> None:
    result, kept = GROUPS[group](tmp_path), load(group)
    assert sorted(result) == sorted(kept)
    for name, content in kept.items():
        assert result[name] == content, name
    if group == "names":
        assert list(result["settings"]) == list(kept["settings"])


def test_text_of_reports(tmp_path: Path) -> None:
    result, kept = GROUPS["views"](tmp_path), load("views")
    assert list(result) == list(kept)
    for name, lines in kept.items():
        assert result[name] == lines, name


def test_paths_in_configs_still_name_something() -> None:
    """Configs of users may hold paths that ours no longer have."""
    assert golden_surface.unresolved(load("targets")) == []
    assert golden_surface.unresolved(golden_surface.targets()) == []
