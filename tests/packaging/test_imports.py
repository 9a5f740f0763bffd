"""Imports go one way, and importing the package loads next to nothing."""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

PACKAGE = "fusion_bench_featcal"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE
FRAMEWORKS = {"fusion_bench", "hydra", "omegaconf", "lightning"}


def imports_of(path: Path) -> set[str]:
    """Parts of the package (with a dot) and other packages that a file imports anywhere."""
    package, names = [PACKAGE, *path.relative_to(ROOT).parts[:-1]], set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    pairs = (name.partition(".") for name in names)
    return {f".{rest.split('.')[0]}" if top == PACKAGE and rest else top for top, _, rest in pairs}


GRAPH: dict[str, set[str]] = {}
for file in ROOT.rglob("*.py"):
    name = file.relative_to(ROOT).with_suffix("").parts[0]
    GRAPH[name] = (GRAPH.get(name, set()) | imports_of(file)) - {f".{name}"}
OURS = {
    part: {name[1:] for name in targets if name.startswith(".")} & GRAPH.keys()
    for part, targets in GRAPH.items()
}
LOOP = {  # what packages of the calibration may import of one another
    "core": set(),
    "experts": {"core", "families"},
    "modules": {"core", "experts", "families"},
    "rules": {"core", "modules"},
    "streams": {"core", "experts", "families", "modules", "rules"},
    "run": {"core", "experts", "families", "modules", "rules", "streams"},
}


def reachable(name: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Names that `name` imports, directly or through others of the graph."""
    reached, waiting = set[str](), [name]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def test_imports_go_one_way():
    for part, allowed in LOOP.items():
        assert OURS[part] & {*LOOP, "families", "calibration"} <= allowed, part
    assert [part for part in OURS if part in reachable(part, OURS)] == []
    assert not OURS["fusionbench"] & {"folders"} and not OURS["folders"] & {"fusionbench"}
    assert {part for part in GRAPH if "lab" in OURS[part]} == {"cli"}


def test_shared_rooms_name_settings_as_python_does():
    """Only doors add a prefix of YAML or of a command line."""
    doors = {"_hydra_plugin", "algorithm", "cli", "folders", "fusionbench", "lab", "pools", "tasks"}
    prefixed, texts = re.compile(r"(?<!docs/)\b(method|modelpool)\.[a-z_{]"), 0
    for file in ROOT.rglob("*.py"):
        if file.relative_to(ROOT).with_suffix("").parts[0] in doors:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts += 1
                assert not prefixed.search(node.value) or file.name == "remarks.py", node.value
    assert texts > 1000


def test_core_is_tensors_only_and_the_python_api_needs_no_framework():
    outside = {name for name in GRAPH["core"] if name not in sys.stdlib_module_names}
    assert outside <= {"torch", "jaxtyping"} and not OURS["core"]
    for part in {"results"} | reachable("__init__", OURS):
        assert not GRAPH[part] & FRAMEWORKS, part


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import fusion_bench_featcal", FRAMEWORKS | {"torch", "transformers"}),
        ("import fusion_bench_featcal.lab.rivals", FRAMEWORKS | {"torch"}),
        ("from hydra.core.plugins import Plugins; Plugins.instance()",
         {PACKAGE, "fusion_bench", "torch", "transformers"}),
    ],
)  # fmt: skip
def test_import_loads_none_of(statement, unwanted):
    code = f"import sys; {statement}; print(*(set({sorted(unwanted)}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.split() == []
