"""Processed images that are kept: in memory for one run, in a folder for all runs to come."""

import contextlib
import hashlib
import json
import logging
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import BaseImageProcessor, ProcessorMixin

from fusion_bench_featcal.digests import digest_tensor
from fusion_bench_featcal.files import PART, remove_orphans, write_whole
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

Place = tuple[str, str, int]
"""Split, task and number of an image."""

_TENSOR = "pixel_values"
PROCESSED, MEMORY, DISK = "images_processed", "images_from_memory", "images_from_disk"
_FORGOTTEN_AFTER = 3600  # seconds: nobody writes one image for so long
_MB = 2**20
# What turns a picture into numbers, beside the processor's own settings.
_PACKAGES = ("pillow", "numpy", "torch", "transformers")
_CODE = "pictures.py"


class ImageFolder:
    """Processed images as safetensors files, one an image, named by all that they depend on.

    A file is written whole or not at all, and holds a digest: one that is damaged is made anew.
    Runs may share a folder at the same time: files of one name are equal.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open a folder; it is made if it is not there.

        Raises:
            CalibrationError: If it cannot be written.
        """
        self.folder = Path(folder).expanduser()
        self.bytes_written = 0
        self._warned = False
        self._counting = threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise CalibrationError(
                f"method.cache_dir {self.folder} cannot be written: {error.strerror or error}. "
                "Choose another folder, or null to keep no processed images"
            ) from error
        for group in self.folder.glob("??"):
            remove_orphans(group, ".")
        for partial in self.folder.glob(f"??/.*{PART}"):  # of other hosts' dead processes
            with contextlib.suppress(OSError):
                if time.time() - partial.stat().st_mtime > _FORGOTTEN_AFTER:
                    partial.unlink()

    def read(self, key: str) -> Tensor | None:
        """The image of a key; None if it is not there or its file is damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s (method.cache_dir) is not readable (%s): made anew", path, error)
            return None
        try:
            pixels = safetensors.torch.load(data)[_TENSOR]
            if _metadata(data) != _mark(key, pixels):
                raise ValueError("its content is not what was written")
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            log.warning("%s (method.cache_dir) is damaged (%s): made anew", path, error)
            return None
        return pixels

    def write(self, key: str, pixels: Tensor) -> None:
        """Keep an image; where that fails the run goes on, with one warning."""
        path = self._path(key)
        pixels = pixels.detach().cpu().contiguous()
        data = safetensors.torch.save({_TENSOR: pixels}, _mark(key, pixels))
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data, durable=False)
            with self._counting:
                self.bytes_written += len(data)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "method.cache_dir %s cannot be written (%s): some processed images are not "
                    "kept",
                    self.folder,
                    error.strerror or error,
                )

    def size(self) -> tuple[int, int]:
        """Number of images in the folder, and their bytes."""
        sizes = []
        for file in self.folder.glob("*/*.safetensors"):
            with contextlib.suppress(OSError):  # another process may have removed it
                sizes.append(file.stat().st_size)
        return len(sizes), sum(sizes)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


class ImageCache:
    """Processed images of one model pool and one processor; those beyond a limit are made again."""

    def __init__(self, limit_mb: float = 0, folder: str | None = None) -> None:
        """Start empty; with a limit of 0 none is kept in memory, without folder none on disk.

        Raises:
            CalibrationError: If the folder cannot be written.
        """
        self.limit_bytes = int(limit_mb * _MB)
        self.used_bytes = 0
        self.folder = None if folder is None else ImageFolder(folder)
        self.counts: Counter[str] = Counter()  # images by where they came from
        self._from_disk = 0
        self._kept: dict[Place, Tensor] = {}

    def kept(self, place: Place) -> Tensor | None:
        """The image of a place if it is in memory."""
        return self._kept.get(place)

    def keep(self, place: Place, pixels: Tensor) -> None:
        """Keep an image in memory if there is room."""
        if place not in self._kept and self.used_bytes + pixels.nbytes <= self.limit_bytes:
            self._kept[place] = pixels
            self.used_bytes += pixels.nbytes

    def from_folder(self, key: str, make: Callable[[], Tensor]) -> tuple[Tensor, str]:
        """The image of a key from the folder, else made and put there; and where it came from.

        Safe to call from several threads.
        """
        if self.folder is None:
            return make(), PROCESSED
        pixels = self.folder.read(key)
        if pixels is not None:
            return pixels, DISK
        pixels = make()
        self.folder.write(key, pixels)
        return pixels, PROCESSED

    def take_counts(self) -> Counter[str]:
        """The counts since this was last asked."""
        taken, self.counts = self.counts, Counter()
        self._from_disk += taken[DISK]
        return taken

    def close(self) -> None:
        """Let the images in memory go, and log what the folder gave and how much it holds."""
        self._kept.clear()
        self.used_bytes = 0
        self.take_counts()
        if self.folder is not None:
            number, size = self.folder.size()
            log.info(
                "method.cache_dir %s: %s taken from it, %.1f MiB added; it holds %s, %.1f MiB",
                self.folder.folder,
                counted(self._from_disk, "image"),
                self.folder.bytes_written / _MB,
                counted(number, "image"),
                size / _MB,
            )


def _mark(key: str, pixels: Tensor) -> dict[str, str]:
    """Metadata of a file; one entry, as safetensors keeps no order of entries."""
    return {"key and digest": f"{key} {digest_tensor(pixels)}"}


def _metadata(data: bytes) -> dict[str, str]:
    """Metadata of a safetensors file, whose header follows its length in 8 bytes."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])["__metadata__"]


def describe_processor(processor: Any) -> str | None:
    """Digest of a transformers processor's settings and software; None for a plain callable."""
    if not isinstance(processor, ProcessorMixin | BaseImageProcessor):
        return None
    images: Any = getattr(processor, "image_processor", processor)
    content = {
        "classes": [f"{type(p).__module__}.{type(p).__qualname__}" for p in (processor, images)],
        "settings": images.to_dict(),
        "software": _describe_software(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


@cache
def _describe_software() -> dict[str, str]:
    code = hashlib.sha256((Path(__file__).parent / _CODE).read_bytes()).hexdigest()
    return {package: version(package) for package in _PACKAGES} | {"code": code}
