"""The bundled image tasks: pictures, class names, and the processor of the small CLIP.

Each task has grey glyphs in one `.npz`, which are painted in the task's two colours, so that tasks
differ in domain like tasks of real suites.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from fusion_bench_featcal.data.computed_rows import ComputedRows
from fusion_bench_featcal.data.draws import evenly_spaced
from fusion_bench_featcal.files.suite_paths import pick, suite_path

SUITE = "clip-vit-mini"
SPLITS = {"train": 0, "test": 1}

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class ImageTask:
    """One task of the suite: its name and its colours (red, green, blue)."""

    name: str
    paper: Colour
    ink: Colour

    def paint(self, grey: np.ndarray) -> np.ndarray:
        """Colour uint8 pictures `[..., h, w]`: `paper * (1 - x) + ink * x` with x = grey / 255."""
        ink_share = np.arange(256)[:, None] / 255
        palette = np.array(self.paper) * (1 - ink_share) + np.array(self.ink) * ink_share
        return np.rint(palette).astype(np.uint8)[grey]


TASKS = {
    task.name: task
    for task in (
        ImageTask("mini_mnist", paper=(20, 20, 60), ink=(240, 240, 120)),
        ImageTask("mini_fashion_mnist", paper=(110, 70, 40), ink=(235, 235, 220)),
        ImageTask("mini_notmnist", paper=(10, 90, 30), ink=(230, 250, 230)),
        ImageTask("mini_optdigits", paper=(120, 120, 120), ink=(255, 255, 255)),
        ImageTask("mini_latin", paper=(20, 30, 120), ink=(250, 160, 110)),
        ImageTask("mini_greek", paper=(90, 20, 90), ink=(250, 200, 230)),
        ImageTask("mini_balinese", paper=(60, 20, 0), ink=(220, 180, 110)),
        ImageTask("mini_korean", paper=(30, 120, 160), ink=(255, 255, 255)),
    )
}
ALL8 = tuple(TASKS)
TA6 = ALL8[:6]
RESNET3 = ALL8[:3]
ALPHABETS2 = ALL8[6:]


@dataclass(frozen=True, eq=False)
class ImageArrays:
    """Content of one `.npz`: grey pictures of both splits, labels and prompt words."""

    images: np.ndarray  # uint8 [n, 28, 28], 255 is ink
    labels: np.ndarray  # int16 [n]
    split: np.ndarray  # uint8 [n], 0 train, 1 test
    classnames: tuple[str, ...]
    template: str  # with one {} for the class name

    def rows(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the grey pictures and int64 labels of one split, in file order."""
        chosen = self.split == SPLITS[split]
        return self.images[chosen], self.labels[chosen].astype(np.int64)

    def prompts(self) -> list[str]:
        """Return one prompt per class, in label order."""
        return [self.template.format(name) for name in self.classnames]


@cache
def load_arrays(name: str) -> ImageArrays:
    """Read one task's file. It stays in memory (at most 15 MB for all eight tasks).

    Raises:
        ValueError: If there is no such task.
    """
    file = suite_path(f"images/{pick(TASKS, name, 'image task').name}.npz")
    with np.load(file, allow_pickle=False) as stored:
        return ImageArrays(
            images=stored["images"],
            labels=stored["labels"],
            split=stored["split"],
            classnames=tuple(str(word) for word in stored["classnames"]),
            template=str(stored["template"]),
        )


def load_split(task: str, split: str, most: int | None = None) -> ComputedRows:
    """Load a split (`train` or `test`) of a task in file order, for the suite's YAML files.

    With `most` it has at most that many pictures, spread over the split.

    Raises:
        ValueError: If there is no such task or split.
    """
    pick(SPLITS, split, f"{task} split")
    arrays = load_arrays(task)
    register_class_names()
    grey, labels = arrays.rows(split)
    chosen = evenly_spaced(len(labels), most)
    paint = TASKS[task].paint

    def item(index: int) -> dict[str, Any]:
        position = chosen[index]
        return {"image": Image.fromarray(paint(grey[position])), "label": int(labels[position])}

    return ComputedRows(len(chosen), item)


def path(name: str = "pretrained") -> str:
    """Return the folder of a checkpoint: `pretrained` or a task's expert."""
    return suite_path(f"{SUITE}/{name}")


def load_processor() -> Any:
    """Load the suite's `CLIPProcessor`, and register its class names with FusionBench."""
    from transformers import CLIPProcessor

    # AdaMerging builds its classification heads after the processor, but before it loads data.
    register_class_names()
    return CLIPProcessor.from_pretrained(path(), trust_remote_code=False)


def register_class_names() -> None:
    """Register class names and prompts of all tasks with FusionBench."""
    from fusion_bench.tasks.clip_classification import CLIPTemplateFactory

    table: dict[str, object] = CLIPTemplateFactory._dataset_mapping
    for name in TASKS:
        if name not in table:
            arrays = load_arrays(name)
            names = list(arrays.classnames)
            table[name] = {"classnames": names, "templates": [arrays.template.format]}
