"""Imports go one way, and importing the package loads next to nothing."""

import subprocess
import sys

import pytest
from imports import import_graph, in_a_circle, module_graph, reachable

GRAPH = import_graph()
FRAMEWORKS = {"fusion_bench", "hydra", "omegaconf", "lightning"}


def ours(part: str) -> set[str]:
    """Parts of the package that `part` imports."""
    return {name[1:] for name in GRAPH[part] if name.startswith(".")} & GRAPH.keys()


OURS = {part: ours(part) for part in GRAPH}


@pytest.mark.parametrize("part", ["core", "files", "plurals", "setting_fields"])
def test_needs_nothing_of_ours(part):
    assert ours(part) == set()


def test_settings_know_only_their_declarations():
    assert ours("settings") == {"declared_settings", "setting_fields"}
    assert ours("declared_settings") == {"read_budgets", "setting_fields"}


def test_results_know_only_files_and_plurals():
    assert ours("results") == {"files", "json_files", "plurals"}


def test_core_is_tensors_only():
    assert {name for name in GRAPH["core"] if name not in sys.stdlib_module_names} <= {
        "torch",
        "jaxtyping",
    }


def test_families_know_only_the_settings():
    assert ours("families") <= {"settings"}


@pytest.mark.parametrize(
    ("room", "others"),
    [
        ("experts", {"core"}),
        ("modules", {"core", "experts", "families"}),
        ("rules", {"core", "modules"}),
        ("streams", {"core", "experts", "families", "modules", "rules"}),
        ("output", {"core", "experts", "streams"}),
    ],
)
def test_rooms_of_the_loop_know_only_those_before_them(room, others):
    rooms = {"core", "experts", "families", "modules", "output", "rules", "streams"}
    assert ours(room) & (rooms | {"calibration", "problem", "team"}) <= others


def test_python_api_needs_no_framework():
    for part in {"results"} | reachable("__init__", OURS):
        assert not GRAPH[part] & FRAMEWORKS, part


def test_no_part_imports_the_algorithm_but_its_diagnosis():
    users = {part for part in GRAPH if "algorithm" in ours(part)}
    assert users == {"lab.diagnosis"}


def test_only_the_command_line_and_the_lab_import_the_lab():
    users = {part for part in GRAPH if any(name.startswith("lab") for name in ours(part))}
    assert {part for part in users if not part.startswith("lab")} == {"cli", "setting_docs"}


def test_no_import_cycles():
    assert in_a_circle(OURS) == []
    modules = module_graph()
    results = "fusion_bench_featcal.results"
    assert f"{results}.run_rows" in modules[f"{results}.report"]  # a relative import
    assert in_a_circle(modules) == []


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import fusion_bench_featcal", FRAMEWORKS | {"torch", "transformers"}),
        ("import fusion_bench_featcal.core", FRAMEWORKS | {"transformers"}),
        ("from fusion_bench_featcal import calibrate", FRAMEWORKS | {"transformers"}),
        ("import fusion_bench_featcal.lab.rivals", FRAMEWORKS | {"torch"}),
        ("import fusion_bench_featcal.lab.rivals.registry", FRAMEWORKS | {"transformers"}),
        ("import fusion_bench_featcal.setting_docs", FRAMEWORKS | {"torch"}),
        (
            "from hydra.core.plugins import Plugins; Plugins.instance()",
            {"fusion_bench_featcal", "fusion_bench", "torch", "transformers"},
        ),
    ],
)
def test_import_loads_none_of(statement, unwanted):
    code = f"import sys; {statement}; print(*(set({sorted(unwanted)}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.split() == []
