"""Write an example of a custom task: images in folders, and a model fine-tuned on them.

The images are an alphabet of the bundled suite that is not one of its six default tasks:

    python examples/own_task/make_task.py my_alphabet

writes `my_alphabet/train` and `my_alphabet/test` (a folder of images per class each) and
`my_alphabet/expert` (a CLIP vision model), as docs/howto/own-pool.md uses them.
"""

import shutil
import sys
from pathlib import Path

from fusion_bench_featcal.suites import image

TASK = "mini_balinese"


def write_task(folder: Path) -> None:
    """Write the task to a new folder."""
    classnames = image.load_arrays(TASK).classnames
    for split in ("train", "test"):
        for number, item in enumerate(image.load_split(TASK, split)):
            class_folder = folder / split / classnames[item["label"]]
            class_folder.mkdir(parents=True, exist_ok=True)
            item["image"].save(class_folder / f"{number:04d}.png")
    shutil.copytree(image.path(TASK), folder / "expert")


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit("usage: make_task.py FOLDER (a folder that does not exist yet)")
    write_task(Path(sys.argv[1]))
    print(f"wrote {sys.argv[1]}")
