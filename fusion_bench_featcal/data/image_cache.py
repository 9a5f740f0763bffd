"""Cache of processed images: in memory for one run, in a folder for several runs."""

import hashlib
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import BaseImageProcessor, ProcessorMixin

from fusion_bench_featcal.digests import describe_software, digest_tensor
from fusion_bench_featcal.files import remove_orphans, write_whole
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

ImageKey = tuple[str, str, int]
"""Split, task and position of an image."""

PROCESSED, MEMORY, DISK = "images_processed", "images_from_memory", "images_from_disk"
_PACKAGES = ("pillow", "numpy", "torch", "transformers")
_CODE = "data/pictures.py"


class ImageCache:
    """Processed images of one model pool and one processor.

    The folder has one safetensors file per image, named by a digest of all that the image depends
    on, so several runs can share it. A file is written whole and has a digest of its content.

    Attributes:
        folder: The folder; None: images are kept in memory only.
        used_bytes: Bytes of the images in memory.
        counts: Number of images by origin since the last `take_counts`.
    """

    def __init__(self, limit_mb: float = 0, folder: str | None = None) -> None:
        """Start with an empty memory.

        Args:
            limit_mb: Limit of the images in memory, in MiB.
            folder: The folder, which is made if it is missing.

        Raises:
            CalibrationError: If the folder cannot be written.
        """
        self.folder = None if folder is None else _writable(Path(folder).expanduser())
        self.used_bytes = 0
        self.counts: Counter[str] = Counter()
        self._limit_bytes = int(limit_mb * 2**20)
        self._in_memory: dict[ImageKey, Tensor] = {}
        self._has_warned = False

    def get(self, key: ImageKey) -> Tensor | None:
        """Return an image that is in memory."""
        return self._in_memory.get(key)

    def put(self, key: ImageKey, pixels: Tensor) -> None:
        """Keep an image in memory if there is room."""
        if key not in self._in_memory and self.used_bytes + pixels.nbytes <= self._limit_bytes:
            self._in_memory[key] = pixels
            self.used_bytes += pixels.nbytes

    def load_or_make(self, name: str, make: Callable[[], Tensor]) -> tuple[Tensor, str]:
        """Load an image from the folder, or make and store it. Return it and its origin.

        Several threads may call this. If the image cannot be stored, the run goes on with a
        warning.
        """
        if self.folder is None:
            return make(), PROCESSED
        file = self.folder / name[:2] / f"{name}.safetensors"
        pixels = _load(file, name)
        if pixels is not None:
            return pixels, DISK
        pixels = make().detach().cpu().contiguous()
        try:
            file.parent.mkdir(exist_ok=True)
            tensors = {"pixel_values": pixels, "digest": _seal(name, pixels)}
            write_whole(file, safetensors.torch.save(tensors), durable=False)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                reason = error.strerror or error
                log.warning(
                    "method.cache_dir %s: some images cannot be stored (%s)", self.folder, reason
                )
        return pixels, PROCESSED

    def take_counts(self) -> Counter[str]:
        """Return `counts` and start from zero."""
        counts, self.counts = self.counts, Counter()
        return counts

    def close(self) -> None:
        """Release the images in memory."""
        self._in_memory.clear()
        self.used_bytes = 0


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CalibrationError(
            f"method.cache_dir {folder} cannot be written: {error.strerror or error}. Choose "
            "another folder, or null to store no processed images"
        ) from error
    for group in folder.glob("??"):
        remove_orphans(group, ".")
    return folder


def _load(file: Path, name: str) -> Tensor | None:
    """Load an image; None if it is missing or damaged."""
    try:
        tensors = safetensors.torch.load(file.read_bytes())
        pixels = tensors["pixel_values"]
        if torch.equal(tensors["digest"], _seal(name, pixels)):
            return pixels
        reason: object = "its content has another digest"
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        reason = error
    log.warning("%s (method.cache_dir) cannot be used (%s): processed again", file, reason)
    return None


def _seal(name: str, pixels: Tensor) -> Tensor:
    """Digest of a file's name and its image, uint8."""
    return torch.tensor(list(f"{name} {digest_tensor(pixels)}".encode()), dtype=torch.uint8)


def describe_processor(processor: Any) -> str | None:
    """Return a digest of a transformers processor and its software; None for a plain callable."""
    if not isinstance(processor, ProcessorMixin | BaseImageProcessor):
        return None
    images: Any = getattr(processor, "image_processor", processor)
    content = {
        "classes": [f"{type(p).__module__}.{type(p).__qualname__}" for p in (processor, images)],
        "settings": images.to_dict(),
        "software": describe_software(_PACKAGES, (_CODE,)),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
