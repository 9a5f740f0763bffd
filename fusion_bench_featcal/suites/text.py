"""The bundled text tasks, with prompts and label words, and the folders of their checkpoints.

Each task has the texts as published in one `.parquet`. Prompts and targets are made on loading.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any

from fusion_bench_featcal.data.draws import evenly_spaced
from fusion_bench_featcal.files.suite_paths import pick, suite_path

SPLITS = ("train", "calibration", "test")
STYLES = {style: style for style in ("capitals", "words", "classes")}


@dataclass(frozen=True)
class TextTask:
    """One task of the suites: its name and the first words of its prompts."""

    name: str
    lead: str

    def prompt(self, text: str) -> str:
        """Return a prompt: the task's lead, a colon, the text's words."""
        return f"{self.lead} : {plain_words(text)}"

    def line(self, text: str) -> str:
        """Return a prompt for a pretrained model: lead and text as published, in one line."""
        return f"{self.lead}: {' '.join(text.split())}\n"

    @staticmethod
    def target(label: str) -> str:
        """Return a target: the label in capitals, which no prompt contains."""
        return label.upper()


TASKS = {
    task.name: task
    for task in (
        TextTask("snips_intent", "intent"),
        TextTask("banking77", "banking intent"),
        TextTask("clinc_domain", "domain"),
        TextTask("clinc_home", "home intent"),
        TextTask("clinc_work", "work intent"),
        TextTask("clinc_auto", "auto intent"),
    )
}
TA6 = tuple(TASKS)

_TYPOGRAPHIC = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})


def plain_words(text: str) -> str:
    """Return a text in lower case and plain ASCII, with blanks around punctuation marks.

    Two texts with the same words count as equal when the splits are kept disjoint.
    """
    decomposed = unicodedata.normalize("NFKD", text.translate(_TYPOGRAPHIC))
    ascii_only = decomposed.encode("ascii", "ignore").decode("ascii")
    return " ".join(re.findall(r"\w+|[^\w\s]", ascii_only.lower()))


@cache
def load_rows(name: str) -> dict[str, list[tuple[str, str]]]:
    """Read a task's file: split -> pairs of text and label as published, in file order.

    Raises:
        ValueError: If there is no such task.
    """
    from pyarrow import parquet

    file = suite_path(f"text-mini/{pick(TASKS, name, 'text task').name}.parquet")
    table = parquet.read_table(file)
    rows: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    columns = (table.column(column).to_pylist() for column in ("text", "label", "split"))
    for text, label, split in zip(*columns, strict=True):
        rows[split].append((text, label))
    return rows


def load_text_split(name: str, split: str, style: str = "capitals", most: int | None = None) -> Any:
    """Load a split of a task as a `datasets.Dataset`.

    Args:
        name: Name of the task.
        split: `train` (the experts' training data), `calibration` (unseen by them) or `test`.
        style: Form of the rows. `capitals`: `{"prompt", "target"}` for the small language models,
            in plain words with the label in capitals. `words`: the same columns for pretrained
            language models, with texts as published and the label in small letters. `classes`:
            `{"text", "label"}` with a `ClassLabel`, as published.
        most: Maximum number of rows, spread over the split.

    Raises:
        ValueError: If there is no such task, split or style.
    """
    from datasets import ClassLabel, Dataset, Features, Value

    splits, task = load_rows(name), TASKS[name]
    rows = pick(splits, split, f"{name} split")
    rows = [rows[index] for index in evenly_spaced(len(rows), most)]
    if pick(STYLES, style, "style") == "classes":
        names = sorted({label for part in splits.values() for _, label in part})
        texts, labels = zip(*rows, strict=True)
        features = Features(text=Value("string"), label=ClassLabel(names=names))
        return Dataset.from_dict({"text": texts, "label": labels}, features)
    prompt, target = (task.prompt, task.target) if style == "capitals" else (task.line, str.lower)
    prompts, targets = [prompt(text) for text, _ in rows], [target(label) for _, label in rows]
    return Dataset.from_dict({"prompt": prompts, "target": targets})


def path(suite: str, name: str = "pretrained") -> str:
    """Return the folder of a checkpoint: `pretrained` (with the tokenizer) or a task's expert."""
    return suite_path(f"{suite}/{name}")
