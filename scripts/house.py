"""Print the size of the package by room, its imports that run back, and the path of a calibration.

python scripts/house.py

A room is a sub-package or a module of the package's root. `DRAWN` has the lines the
package shall have. No check fails on a size.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

import fusion_bench_featcal as package
from fusion_bench_featcal import FeatCalSettings, calibrate

ROOT = Path(package.__file__).parent
DRAWN = {
    "core": 270, "rules": 450, "families": 620, "modules": 305, "experts": 625, "streams": 615,
    "run": 395,
    "models": 410, "data": 700, "tasks": 610, "suites": 150, "fusionbench": 830, "folders": 1470,
    "results": 1290, "lab": 1520, "_hydra_plugin": 70,
}  # fmt: skip
# Imports go from a level to levels before it. Rooms of a level do not import one another.
LEVELS = (
    "errors", "files", "settings", "core", "families", "experts", "modules", "rules", "streams",
    "run", "calibration", "results", "models", "data", "tasks", "fusionbench folders suites", "lab",
    "algorithm pools cli",
)  # fmt: skip
LEVEL = {room: number for number, level in enumerate(LEVELS) for room in level.split()}


def room(path: Path) -> str:
    """Return the room of a file of the package."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Yield the rooms from which a file imports, also inside functions."""
    prefix = f"{package.__name__}."
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            yield str(node.module).split(".")[1]


def entered() -> set[tuple[str, int]]:
    """Return file and first line of each function that the simplest calibration enters."""
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1,
        image_size=16, patch_size=8,
    )  # fmt: skip
    base, merged, first, second = (CLIPVisionModel(config).eval() for _ in range(4))
    experts = {"a": first, "b": second}
    batches = {task: [{"pixel_values": torch.randn(4, 3, 16, 16)}] for task in experts}
    functions = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code  # "<": lambdas and comprehensions
        if event == "call" and code.co_filename.startswith(f"{ROOT}/") and code.co_name[0] != "<":
            functions.add((code.co_filename, code.co_firstlineno))

    settings = FeatCalSettings(samples_per_task=4, batch_size=4)
    sys.setprofile(note)
    try:
        calibrate(merged, base, experts, batches, settings)
    finally:
        sys.setprofile(None)
    return functions


def main() -> None:
    """Print the three tables."""
    lines, files, backward = Counter(), Counter(), defaultdict(set)
    for path in sorted(ROOT.rglob("*.py")):
        here = room(path) if path.parent != ROOT else "(root)"
        lines[here] += len(path.read_text(encoding="utf-8").splitlines())
        files[here] += 1
        for other in imported(path):
            pair = room(path), other
            if other != pair[0] and set(pair) <= set(LEVEL) and LEVEL[other] >= LEVEL[pair[0]]:
                backward[pair].add(path.relative_to(ROOT).as_posix())
    print(f"{'room':<16}{'files':>6}{'lines':>8}{'drawn':>8}")
    for name, count in sorted(lines.items()):
        print(f"{name:<16}{files[name]:>6}{count:>8}{DRAWN.get(name, '-'):>8}")
    print(f"{'all':<16}{files.total():>6}{lines.total():>8}{13500:>8}\n")
    print(f"Modules in the root: {files['(root)']} (drawn: 8)")
    functions = entered()
    count = len({file for file, _ in functions})
    print(f"The simplest calibration enters {len(functions)} functions in {count} files\n")
    print("Imports that run back:" if backward else "No import runs back")
    for (start, end), paths in sorted(backward.items()):
        print(f"  {start} -> {end}: {', '.join(sorted(paths))}")


if __name__ == "__main__":
    main()
