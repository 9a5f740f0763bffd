"""Write calibration texts that are unlike a task's own: words in random order, exchanged tasks.

    python scripts/unlike_texts.py FOLDER

FOLDER/shuffled has a file for each task, FOLDER/exchanged one for each of two tasks, with the
texts of the other.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from fusion_bench_featcal.suites.text import TASKS, load_rows

EXCHANGED = ("banking77", "clinc_work")


def write(file: Path, texts: Iterable[str]) -> None:
    """Write texts as a table of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")


def shuffled(text: str, generator: random.Random) -> str:
    """Return a text with its words in random order."""
    words = text.split()
    generator.shuffle(words)
    return " ".join(words)


def main(folder: Path) -> None:
    """Write all files."""
    texts = {task: [text for text, _ in load_rows(task)["calibration"]] for task in TASKS}
    for task in TASKS:
        generator = random.Random(task)
        write(folder / "shuffled" / f"{task}.jsonl", (shuffled(t, generator) for t in texts[task]))
    for task, other in zip(EXCHANGED, reversed(EXCHANGED), strict=True):
        write(folder / "exchanged" / f"{task}.jsonl", texts[other])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
