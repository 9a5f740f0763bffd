"""Behaviour as it was when the golden files were made: see make.py.

Nothing here imports an inner module of the package, so that its modules can move.
"""

from pathlib import Path
from typing import Any

import golden_commands
import golden_methods
import golden_parameters
import golden_surface
import golden_views
import pytest
import torch
from golden_parameters import CASES, EXACT, FLOAT32, differences
from golden_reports import file_names, file_structures
from make import load

DTYPES = [(name, torch.float64) for name in CASES]
METHODS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in golden_methods.SLOW else [])
    for name in golden_methods.RUNS
]
DTYPES += [(name, torch.float32) for name, case in CASES.items() if case.float32]


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and saved parameters of the run that evaluates its models."""
    folder = tmp_path_factory.mktemp("evaluated")
    return folder, golden_methods.method_sketch(golden_methods.EVALUATED, folder)


@pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=str)
def test_calibrated_parameters(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kept = load("parameters")[name]
    found = golden_parameters.calibrated(name, dtype, tmp_path)
    bound = EXACT if dtype == torch.float64 else FLOAT32
    assert differences(found["parameters"], kept["parameters"], bound) == []
    assert found["drift"] == pytest.approx(kept["drift"], rel=bound)


@pytest.mark.parametrize("name", METHODS)
def test_models_that_methods_save(name: str, tmp_path: Path, request: Any) -> None:
    if name == golden_methods.EVALUATED:
        _, found = request.getfixturevalue("evaluated_run")
    else:
        found = golden_methods.method_sketch(name, tmp_path)
    bound = golden_methods.BOUND
    assert differences(found, load("methods")[name], bound) == []


def test_every_case_is_kept() -> None:
    assert list(load("parameters")) == list(CASES)
    assert list(load("methods")) == list(golden_methods.RUNS)


def test_structure_of_reports(evaluated_run: tuple[Path, Any]) -> None:
    found = file_structures(evaluated_run[0] / "log")
    kept = load("commands")["runs"]["featcal"]["structures"]
    for name in ("report.json", "lines.csv", "calibration_log.jsonl", "reads.json"):
        assert found[name] == kept[name], name


def test_exit_codes_of_featcal(evaluated_run: tuple[Path, Any], tmp_path: Path) -> None:
    found = golden_commands.verb_codes(
        golden_commands.VERBS, run=evaluated_run[0] / "log", tmp=tmp_path
    )
    kept = load("commands")["featcal"]
    assert found == {name: kept[name] for name in golden_commands.VERBS}


def test_names_of_the_python_interface() -> None:
    found, kept = golden_surface.names(), load("names")
    assert found == kept
    assert list(found["settings"]) == list(kept["settings"])


def test_configs_have_their_keys() -> None:
    found, kept = golden_surface.configs(), load("configs")
    assert sorted(found) == sorted(kept)
    for name, content in kept.items():
        assert found[name] == content, name


def test_paths_in_configs_still_name_something() -> None:
    """Configs of users may hold paths that ours no longer have."""
    assert golden_surface.unresolved(load("targets")) == []
    assert golden_surface.unresolved(golden_surface.targets()) == []


def test_verbs_of_featcal() -> None:
    assert golden_surface.verbs() == load("verbs")


def test_text_of_reports(tmp_path: Path) -> None:
    found, kept = golden_views.views(tmp_path), load("views")
    assert list(found) == list(kept)
    for name, lines in kept.items():
        assert found[name] == lines, name


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    kept = load("commands")
    assert golden_commands.run_jobs(tmp_path) == kept["fusion_bench"]
    for name, run in kept["runs"].items():
        assert file_names(tmp_path / name) == run["names"], name
        assert file_structures(tmp_path / name) == run["structures"], name
    verbs = golden_commands.SLOW_VERBS
    places = {"run": tmp_path / "featcal", "compare": tmp_path / "compare", "tmp": tmp_path}
    found = golden_commands.verb_codes(verbs, **places)
    assert found == {name: kept["featcal"][name] for name in verbs}
