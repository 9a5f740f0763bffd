"""Digests of pictures as data sets hold them: what a processed image is kept under."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.tasks.colours import WHITE, Colour
from fusion_bench_featcal.tasks.images import to_rgb


def fixed_content(
    value: Any, place: str, root: Path | None = None, background: Colour = WHITE
) -> tuple[Any, str]:
    """A picture whose content can no longer change, and the content's digest.

    Nothing is decoded where the data set holds a file or its bytes.

    Args:
        value: Anything `to_rgb` takes.
        place: The item, for messages.
        root: Folder that relative paths start from (None: the current one).
        background: Colour that transparent pictures are composited on; part of the digest.

    Returns:
        Something that `to_rgb` turns into the same picture as the value, and the digest.

    Raises:
        CalibrationError: As `to_rgb`.
    """
    data, path = None, None
    if isinstance(value, bytes):
        data = value
    elif isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        data, path = value.get("bytes"), value.get("path")
    elif isinstance(value, str | Path):
        path = value
    if not data and path is not None:
        try:
            data = ((root or Path()) / Path(path).expanduser()).read_bytes()
        except OSError:
            data = None  # `to_rgb` says what is wrong with the file
    if data:
        return {"bytes": data, "path": path}, hashlib.sha256(
            f"file on {background}\n".encode() + data
        ).hexdigest()
    picture = to_rgb(value, place, root, background)
    found = hashlib.sha256(f"picture {picture.size}\n".encode())
    found.update(picture.tobytes())
    return picture, found.hexdigest()
