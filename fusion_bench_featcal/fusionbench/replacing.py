"""Replace a folder or a file by a new one as a whole."""

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from fusion_bench_featcal.leftovers import OLD, PART, orphans, remove, temporary_neighbour

log = logging.getLogger(__name__)

# Weights that would be loaded in place of, or together with, those of a new model.
_WEIGHTS = (
    "model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", "tf_model*",
    "flax_model*", "adapter_*", "open_clip_*", "*_corrections.safetensors", "*_corrections.json",
)  # fmt: skip


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a new path beside `target`, and put what is made there in the target's place.

    The new content is brought to the disk, then swapped in by two renames. A process that is
    killed leaves the old content or the new one whole; `clear_leftovers` repairs the rest. Files in
    an existing folder that are no weights and that the new one lacks are carried over.

    Args:
        target: The folder or file; it may be missing.

    Raises:
        OSError: If something cannot be written or moved; the old content is as it was then.
    """
    clear_leftovers(target)
    new = temporary_neighbour(target)
    try:
        yield new
        _sync(new)
        _swap(new, target)
    finally:
        remove(new)


def clear_leftovers(target: Path) -> None:
    """Finish or undo replacements of `target` that dead processes of this host had begun."""
    for left in orphans(target.parent, f".{target.name}."):
        if left.suffix == OLD:  # it was moved away when the new folder was complete
            new = left.with_suffix(PART)
            if not target.exists():
                os.rename(new if new.exists() else left, target)
                log.warning("%s was being replaced when a process ended: it is whole again", target)
            if left.is_dir():
                _carry_over(left, target)
    for left in orphans(target.parent, f".{target.name}."):
        remove(left)


def _swap(new: Path, target: Path) -> None:
    if not (new.is_dir() and target.is_dir()):
        os.replace(new, target)
        return
    shutil.copymode(target, new)
    _carry_over(target, new)
    old = new.with_suffix(OLD)
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    _carry_over(old, target)  # what was written meanwhile, such as a log
    remove(old)


def _carry_over(source: Path, destination: Path) -> None:
    """Give a folder what another holds besides and what is no weights, by hard links."""
    for entry in source.iterdir():
        if not any(fnmatch(entry.name, pattern) for pattern in _WEIGHTS):
            _link(entry, destination / entry.name)


def _link(source: Path, destination: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        destination.mkdir(exist_ok=True)
        for entry in source.iterdir():
            _link(entry, destination / entry.name)
    elif not os.path.lexists(destination):
        try:
            # A hard link: a log file that is open stays the same file.
            os.link(source, destination, follow_symlinks=False)
        except FileNotFoundError:  # somebody removed it meanwhile
            return
        except OSError:  # a file system without them
            shutil.copy2(source, destination, follow_symlinks=False)


def _sync(path: Path) -> None:
    """Bring a file, or a folder with all in it, to the disk, where the system can."""
    inside = [*path.rglob("*"), path] if path.is_dir() else [path]
    for entry in inside:
        with contextlib.suppress(OSError):
            descriptor = os.open(entry, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
