"""Attacks on `featcal calibrate`: recipes, bases, targets, labels and experts that do not fit."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from made_folders import ROWS, classifier_folders, llama_folders, t5_folders, write_rows
from test_calibrate_command import words
from tiny_models import scatter
from tiny_texts import sentences, word_tokenizer, write

from attacks.judging import REFUSED, RIGHT, RawTraceback, ShownRefusal, case, expect
from fusion_bench_featcal.cli import main

# --- models that a recipe names ---


def calibrated(arguments: list[str]) -> str:
    """Run the command and return all that it prints.

    Raises:
        ShownRefusal: If it refuses, with its message.
        RawTraceback: If it fails otherwise.
    """
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        code = main([*arguments, "--preset", "paper", "--set", "samples_per_task=2"])
    shown = screen.getvalue()
    if code == 0:
        return shown
    message = shown.partition("featcal: error: ")[2]
    raise (RawTraceback if not message or message.startswith("unexpected") else ShownRefusal)(
        message
    )


def merged_by(folder: Path, method: str, base: str, *models: str) -> list[str]:
    """Models merged by mergekit; the command without their names."""
    llama_folders(folder)
    content = {"merge_method": method, "base_model": base, "models": [{"model": m} for m in models]}
    (folder / "merged" / "mergekit_config.yml").write_text(json.dumps(content))
    data = ["--data", "one=one.jsonl", "--data", "two=two.jsonl", "--force"]
    return ["calibrate", "merged", "--out", "out", *data]


@case("recipes: two experts in folders of one name", must=RIGHT)
def _(folder: Path) -> None:
    arguments = merged_by(folder, "ties", "base", "./one/final", "./two/final")
    for task in ("one", "two"):
        (folder / task).rename(folder / "moved")
        (folder / task).mkdir()
        (folder / "moved").rename(folder / task / "final")
    shown = calibrated(arguments)
    expect("one-final=./one/final, two-final=./two/final" in shown, shown)


@case("recipes: the base of a slerp", "--base is missing", "anchor_rho=1", must=REFUSED)
def _(folder: Path) -> None:
    calibrated(merged_by(folder, "slerp", "one", "one", "two"))


@case("recipes: stacked layers", "passthrough", must=REFUSED, never=("--base",))
def _(folder: Path) -> None:
    calibrated(merged_by(folder, "passthrough", "base", "one", "two"))


@case("recipes: a sibling in place of the base", must=RIGHT)
def _(folder: Path) -> None:
    models = llama_folders(folder)
    write(scatter(models["base"], 99, 0.03), folder / "sibling", word_tokenizer())
    shown = calibrated([*words(folder), "--base", str(folder / "sibling")])
    expect("have a cosine of 0." in shown, shown)


# --- targets, labels, and experts that cannot do their task ---


for _name in ("completion", "response", "output", "answer"):

    @case(f"recipes: targets named {_name}", must=RIGHT)
    def _(folder: Path, name: str = _name) -> None:
        llama_folders(folder)
        rows = [{"prompt": r["prompt"], name: r["target"]} for r in sentences("one", ROWS)]
        write_rows(folder / "one.jsonl", rows)
        shown = calibrated(words(folder))
        expect("its expert writes" not in shown, shown)


_LABELS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "-100": ([-100], {}),
    "2 of two classes": ([2], {}),
    "1 and 2 as texts": (["1", "2"], {}),
    "and two names of one number": ([0, 1], {"label2id": {"no": 0, "yes": 0}}),
    "and swapped numbers": ([0, 1], {"label2id": {"no": 1, "yes": 0}}),
}
for _name, (_labels, _changes) in _LABELS.items():

    @case(f"recipes: labels {_name}", "--(data|expert) one", "label", must=REFUSED)
    def _(folder: Path, labels: Any = _labels, changes: Any = _changes) -> None:
        classifier_folders(folder)
        file = folder / "one" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        texts = [row["prompt"] for row in sentences("one", ROWS)]
        rows = [{"text": t, "label": labels[n % len(labels)]} for n, t in enumerate(texts)]
        write_rows(folder / "one.jsonl", rows)
        calibrated(words(folder))


@case("recipes: an expert worse than guessing", r"one \(loss 6\.51", r"guessing 3\.14", "--force",
      must=REFUSED)  # fmt: skip
def _(folder: Path) -> None:
    t5_folders(folder)
    calibrated([word for word in words(folder) if word != "--force"])
