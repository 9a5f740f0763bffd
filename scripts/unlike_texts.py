"""Write each task's calibration texts with their words in random order: FOLDER/TASK.jsonl.

python scripts/unlike_texts.py FOLDER
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from fusion_bench_featcal.suites.text import TASKS, load_rows


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
    """Write a file for each task."""
    for task in TASKS:
        generator, texts = random.Random(task), load_rows(task)["calibration"]
        write(folder / f"{task}.jsonl", (shuffled(text, generator) for text, _ in texts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
