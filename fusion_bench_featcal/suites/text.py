"""The bundled text tasks, with prompts and label words, and the folders of their checkpoints.

Each task has the texts as published in one `.parquet`. Prompts and targets are made on loading.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any

from fusion_bench_featcal.suites.paths import pick, suite_path

SUITES = ("flan-t5-mini", "llama-mini")
SPLITS = ("train", "calibration", "test")


@dataclass(frozen=True)
class TextTask:
    """One task of the suites: its name and the first words of its prompts."""

    name: str
    lead: str

    def prompt(self, text: str) -> str:
        """Return a prompt: the task's lead, a colon, the text's words."""
        return f"{self.lead} : {plain_words(text)}"

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
    ascii_only = unicodedata.normalize("NFKD", text.translate(_TYPOGRAPHIC)).encode(
        "ascii", "ignore"
    )
    return " ".join(re.findall(r"\w+|[^\w\s]", ascii_only.decode("ascii").lower()))


def find_task(name: str) -> TextTask:
    """Return the task of a name. A ValueError lists the names."""
    return pick(TASKS, name, "text task")


@cache
def load_rows(name: str) -> dict[str, list[tuple[str, str]]]:
    """Read a task's file: split -> pairs of text and label as published, in file order.

    Raises:
        ValueError: If there is no such task.
    """
    from pyarrow import parquet

    table = parquet.read_table(suite_path(f"text-mini/{find_task(name).name}.parquet"))
    rows: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    columns = (table.column(column).to_pylist() for column in ("text", "label", "split"))
    for text, label, split in zip(*columns, strict=True):
        rows[split].append((text, label))
    return rows


def load_text_split(name: str, split: str) -> Any:
    """Load a split of a task as a `datasets.Dataset` of rows `{"prompt": str, "target": str}`.

    Splits are `train` (the experts' training data), `calibration` (unseen by them) and `test`.

    Raises:
        ValueError: If there is no such task or split.
    """
    from datasets import Dataset

    task = find_task(name)
    rows = pick(load_rows(name), split, f"{name} split")
    return Dataset.from_dict(
        {
            "prompt": [task.prompt(text) for text, _ in rows],
            "target": [task.target(label) for _, label in rows],
        }
    )


def path(suite: str, name: str = "pretrained") -> str:
    """Return the folder of a checkpoint: `pretrained` (with the tokenizer) or a task's expert."""
    return suite_path(f"{suite}/{name}")
