"""What do threads and kept images save when calibration images are read?

    python benchmarks/decoding.py [--images 256] [--threads 2] [--out FILE]

JPEG files of 500 x 400 pixels, made on the spot, are read, decoded and brought to 224 x 224 by a
CLIP processor: in the main thread, in forked processes, in threads, from a folder and from the
memory of the run. All must give the same bits. Turns alternate; the fastest of each counts. Rise of
memory is the largest growth of the resident set meanwhile; batches are let go as they come.
"""

import argparse
import io
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# A process that is forked from one with OpenMP threads hangs at its first parallel operation.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import psutil
import torch
import transformers
from PIL import Image
from transformers import CLIPImageProcessor

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.data.image_cache import ImageCache
from fusion_bench_featcal.data.pictures import to_pixels

TASK, MB = "task", 2**20
PROCESSOR = CLIPImageProcessor()


def write_images(folder: Path, count: int) -> list[str]:
    """Write pictures that compress like photographs; their paths."""
    generator = np.random.default_rng(0)
    paths = []
    for number in range(count):
        coarse = generator.integers(0, 256, (20, 25, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((500, 400), Image.Resampling.BICUBIC))
        noisy = smooth + generator.integers(-12, 13, smooth.shape)
        stream = io.BytesIO()
        picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        picture.save(stream, "JPEG", quality=90)
        path = folder / f"{number:05d}.jpg"
        path.write_bytes(stream.getvalue())
        paths.append(str(path))
    return paths


def process(path: str) -> torch.Tensor:
    """One image in a process of its own."""
    return to_pixels(path, PROCESSOR, path)


def batches(paths: list[str], images: ImageCache | None, workers: int) -> Iterable[Any]:
    """Calibration batches as the method draws them."""
    rows = [{"image": path} for path in paths]
    pool = SimpleNamespace(train_dataset_names=[TASK], load_train_dataset=lambda task: rows)
    settings = FeatCalSettings(samples_per_task=len(paths), decode_workers=workers)
    return calibration_batches(pool, [TASK], settings, PROCESSOR, images=images)[TASK]


class MemoryPeak:
    """Largest resident set of this process while it runs."""

    def __enter__(self) -> "MemoryPeak":
        """Begin to look, every 5 ms."""
        self._process, self._over = psutil.Process(), threading.Event()
        self.before = self.peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()


def ways(paths: list[str], threads: int, folder: Path) -> dict[str, Callable[[], Iterable[Any]]]:
    """Name -> how all images are read once."""
    memory = ImageCache(limit_mb=len(paths))  # 0.6 MiB an image

    def in_processes() -> Iterable[Any]:
        with ProcessPoolExecutor(threads, mp_context=get_context("fork")) as executor:
            yield from executor.map(process, paths, chunksize=8)

    def in_folder(name: str) -> Callable[[], Iterable[Any]]:
        return lambda: batches(paths, ImageCache(folder=str(folder / name)), threads)

    for kept in (memory, ImageCache(folder=str(folder / "full"))):
        list(batches(paths, kept, threads))
    fresh = iter(range(1000))
    return {
        "main thread": lambda: batches(paths, None, 0),
        f"{threads} processes, their start included": in_processes,
        f"{threads} threads": lambda: batches(paths, None, threads),
        f"{threads} threads, filling a folder": lambda: in_folder(f"new{next(fresh)}")(),
        "from a folder": in_folder("full"),
        "from memory": lambda: batches(paths, memory, threads),
    }


def digest(read: Iterable[Any]) -> torch.Tensor:
    """Sums of every image's bits, sorted: processes take the images in another order."""
    parts = [item["pixel_values"] if isinstance(item, dict) else item[None] for item in read]
    sums = [part.contiguous().view(torch.int32).long().sum((1, 2, 3)) for part in parts]
    return torch.cat(sums).sort().values


def measured(paths: list[str], threads: int, folder: Path, turns: int) -> list[str]:
    """Rows of the table."""
    found = ways(paths, threads, folder)
    sums = {name: digest(read()) for name, read in found.items()}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    rises: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(turns):
        for name, read in found.items():
            start = time.perf_counter()
            with MemoryPeak() as memory:
                for _batch in read():
                    pass
            seconds[name].append(time.perf_counter() - start)
            rises[name].append((memory.peak - memory.before) / MB)
    plain = min(seconds["main thread"])
    same = {name: torch.equal(value, sums["main thread"]) for name, value in sums.items()}
    return [
        f"| {name} | {min(seconds[name]):.2f} | {1000 * min(seconds[name]) / len(paths):.2f} "
        f"| {plain / min(seconds[name]):.2f} | {max(rises[name]):.0f} "
        f"| {'yes' if same[name] else 'NO'} |"
        for name in found
    ]


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"images": 256, "threads": 2, "turns": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "images").mkdir()
        paths = write_images(folder / "images", options.images)
        size = sum(Path(path).stat().st_size for path in paths) / len(paths)
        rows = measured(paths, options.threads, folder, options.turns)
    own = options.images * 3 * 224 * 224 * 4 / MB
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{type(PROCESSOR).__name__}, {psutil.cpu_count()} cores, {platform.machine()}; "
        f"`python {' '.join(sys.argv)}`",
        "",
        f"{options.images} JPEG files of 500 x 400 pixels ({size / 1000:.0f} kB each) to 224 x 224 "
        f"({own:.0f} MiB in all); fastest of {options.turns} turns",
        "",
        "| | s | ms / image | times as fast | rise of memory, MiB | same bits |",
        "|---|--:|--:|--:|--:|---|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
