"""Every option and setting that a message of `featcal calibrate` names is one that it takes."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from reports import featcal

import fusion_bench_featcal
from fusion_bench_featcal.data import speech
from fusion_bench_featcal.errors import words
from fusion_bench_featcal.folders import images, options, request, text_classes, texts
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.tasks import load_images

PACKAGE = fusion_bench_featcal.__name__
ROOT = Path(fusion_bench_featcal.__file__).parent
FLAGS = {*re.findall(r"--[a-z][a-z-]*", featcal("calibrate", "--help").out)}
OTHERS = {*request._SET_BY_OPTIONS, *request._POOL_OPTION}
SETTINGS = {*FeatCalSettings.names()} - OTHERS
# Encoders take any name, `score` as a target.
COLUMNS = {
    *texts._PROMPT_COLUMNS,
    *text_classes._COLUMNS,
    *images._COLUMNS,
    *speech.COLUMNS,
    "score",
}
# Keywords of functions and keys of YAML, which are no words of the command.
ONLY_FUSION_BENCH = ("remarks.py", "words.py")  # remarks: of several rows, which FusionBench has
FOREIGN = {*OTHERS, *inspect.signature(load_images).parameters} - {"path", "resume"}


def source_of(module: str) -> Path | None:
    path = ROOT.parent.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def reachable() -> dict[Path, ast.Module]:
    """All files that the door imports, anywhere in them, but for other doors."""
    waiting, trees = [*(ROOT / "folders").glob("*.py")], dict[Path, ast.Module]()
    while waiting:
        file = waiting.pop()
        if file in trees:
            continue
        trees[file] = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(trees[file]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names.append(str(node.module))
                waiting += [file for file in map(source_of, names) if file is not None]
    return trees


def text_of(node: ast.AST) -> str | None:
    """A text, with ... for values that are filled in, and the words of the command."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.FormattedValue) and isinstance(call := node.value, ast.Call):
        name, values = ast.unparse(call.func), [text_of(value) or "..." for value in call.args]
        with words.using_vocabulary(options.WORDS):
            return getattr(words, name)(*values) if name in ("option", "word") else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "..." for part in node.values)
    return None


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts of more than one word that are no docstrings, nor parts of other texts."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        text = text_of(node)
        if text is not None:
            if " " in text:
                yield node.lineno, text  # type: ignore[attr-defined]
            continue
        yield from sentences(node)


def refused_hints(text: str) -> list[str]:
    """Hints of a message that the command does not take."""
    shown = re.sub(r"fusion_bench method[^,;]*|torchrun --nproc-per-node", "", text)
    shown = shown.replace("--set '", "--set ")  # quoted for the shell
    wrong = [flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", shown) if flag not in FLAGS]
    wrong += [n for n in re.findall(r"--set ([a-z_]+)", shown) if n not in SETTINGS]
    wrong += re.findall(r"(?<!docs/)\b(?:method|modelpool|taskpool|fabric)\.[a-z_]+", shown)
    words = {*re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", shown)}
    words |= {*re.findall(r"\b[Ss]et ([a-z_]+)\b", shown)}
    wrong += sorted(words & FOREIGN)
    # a setting is shown as the command takes it
    wrong += [f"{n} without --set" for n in words & SETTINGS if f"--set {n}" not in shown]
    for word in re.findall(r"--columns ((?:\[NAME:\]|\.\.\.:)?[a-z_]+=\S+)", shown):
        parts = options.columns(word.replace("[NAME:]", "").rstrip("),.;:"))
        wrong += [part for part in parts if part.rpartition(":")[2] not in COLUMNS]
    return wrong


def test_every_hint_of_the_door_is_accepted():
    found = [
        (f"{file.relative_to(ROOT)}:{line}", hints, text)
        for file, tree in reachable().items()
        if file.name not in ONLY_FUSION_BENCH
        for line, text in sentences(tree)
        if (hints := refused_hints(text))
    ]
    assert found == []


def test_the_search_finds_hints():
    texts = [text for tree in reachable().values() for _, text in sentences(tree)]
    assert sum("--" in text for text in texts) > 50 and len(texts) > 500


@pytest.mark.parametrize(
    "hint",
    ["choose another calibration_split", "set checkpoint_dirs, or --sett x=1", "Check image_column",
     "set split to a", "fabric.precision=32-true", "--columns labels=NAME", "--set max_lenght=1"],
)  # fmt: skip
def test_hints_of_other_doors_are_noticed(hint):
    assert refused_hints(hint)
