"""Who imports what in the package, read from the source without importing anything."""

import ast
from collections.abc import Mapping
from pathlib import Path

PACKAGE = "fusion_bench_featcal"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE


def part_of(path: Path) -> str:
    """The module or room that a source file belongs to; rooms of the lab count one by one."""
    return _part(".".join(path.relative_to(ROOT).with_suffix("").parts))


def _part(name: str) -> str:
    """First word of a dotted name, or `lab` and the second one."""
    words = name.split(".")
    return ".".join(words[: 2 if words[0] == "lab" else 1])


def imported_names(path: Path) -> set[str]:
    """Full dotted names a file imports anywhere, also inside functions."""
    package = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def import_graph() -> dict[str, set[str]]:
    """Part of the package -> parts of the package (their names) and other top-level packages."""
    graph: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        targets = graph.setdefault(part_of(path), set())
        for name in imported_names(path):
            top, _, rest = name.partition(".")
            targets.add(f".{_part(rest)}" if top == PACKAGE and rest else top)
        targets.discard(f".{part_of(path)}")
    return graph


def module_graph() -> dict[str, set[str]]:
    """Module of the package -> modules of the package that it imports."""
    modules = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts])
        modules[name.removesuffix(".__init__")] = imported_names(path)
    return {
        module: {name if name in modules else name.rpartition(".")[0] for name in names}
        & modules.keys() - {module}
        for module, names in modules.items()
    }


def in_a_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Names that import themselves, directly or through others of the graph."""
    return sorted(name for name in graph if name in reachable(name, graph))


def reachable(name: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Names that `name` imports, directly or through others of the graph."""
    seen, waiting = set[str](), [name]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen
