"""Tables of image files, with labels if there are any, from folders and tables of images."""

from collections.abc import Sequence
from glob import glob
from pathlib import Path

import datasets

from fusion_bench_featcal.data.labels import sort_names
from fusion_bench_featcal.data.tables import is_saved, load_saved, read_table
from fusion_bench_featcal.errors.nearest_names import nearest_hint
from fusion_bench_featcal.errors.words import user_term

IMAGE_SUFFIXES = (
    ".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png",
    ".ppm", ".tga", ".tif", ".tiff", ".webp",
)  # fmt: skip
_FILE_NAME = "file_name"  # column of `imagefolder` with the paths of images
SPLIT_FOLDERS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


def with_files(table: datasets.Dataset, root: Path, column: str) -> datasets.Dataset:
    """Return a table whose image paths, if it has paths, start at the folder `root`."""
    if table.features.get(column) != datasets.Value("string"):
        return table
    paths = [path and str(root / Path(path).expanduser()) for path in table[column]]
    return table.remove_columns(column).add_column(column, paths)  # type: ignore[call-arg]


def read_folder(
    root: Path, split: str | None, usual_split: str | None, image_column: str, label: str | None
) -> tuple[datasets.Dataset, str | None]:
    """Return a table of the images in a folder, and the split or None."""
    if is_saved(root):
        return load_saved(root, split, usual_split), split
    files = map(Path, glob("**", root_dir=root, recursive=True))  # without hidden ones
    images = sorted(f for f in files if f.suffix.lower() in IMAGE_SUFFIXES and (root / f).is_file())
    folders = sort_names({image.parts[0] for image in images if len(image.parts) > 1})
    if split is None and folders and {*folders} <= SPLIT_FOLDERS:
        if usual_split is None:
            names = " or ".join(folders)
            raise ValueError(
                f"data {str(root)!r} has splits: choose one with {user_term('split')}, {names}"
            )
        split = usual_split
    if split is not None and not (root / split).is_dir():
        raise ValueError(
            f"data {str(root)!r} has no folder for split {split!r}{nearest_hint(split, folders)}. "
            f"Folders: {', '.join(folders) or 'none'}"
        )
    folder = root
    if split is not None:
        folder, images = root / split, [Path(*i.parts[1:]) for i in images if i.parts[0] == split]
    table = _read_metadata(folder, images, image_column, label)
    return (_list_classes(folder, images) if table is None else table), split


def _read_metadata(
    folder: Path, images: Sequence[Path], column: str, label: str | None
) -> datasets.Dataset | None:
    """Return the table of a folder's images in the format of `imagefolder`, or None.

    Beside class folders, a table without labels is not read. It may have captions, for example.
    """
    files = [folder / f"metadata.{ending}" for ending in ("csv", "jsonl", "parquet")]
    files = [file for file in files if file.is_file()]
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise ValueError(f"data {str(folder)!r} has {names}: keep only one of them")
    if not files:
        return None
    table = read_table(files[0], None, label)
    if column == "image" and _FILE_NAME in table.column_names and "image" not in table.column_names:
        table = table.rename_column(_FILE_NAME, "image")
    has_labels = {column, label or "label"} <= {*table.column_names}
    has_classes = any(len(image.parts) > 1 for image in images)
    return with_files(table, folder, column) if has_labels or not has_classes else None


def _list_classes(folder: Path, images: Sequence[Path]) -> datasets.Dataset:
    """Return a table of the images in class folders, or of unlabeled images."""
    examples = {len(image.parts): str(image) for image in images}
    if not examples or len(examples) > 1 or max(examples) > 2:
        raise ValueError(
            f"data {str(folder)!r} has {' and '.join(examples.values()) or 'no images'}: images "
            f"({', '.join(IMAGE_SUFFIXES)}) must all be in class folders, or all in the folder "
            "itself. Move them, or give the folder that contains the class folders"
        )
    order = {name: n for n, name in enumerate(sort_names({image.parts[0] for image in images}))}
    images = sorted(images, key=lambda image: order[image.parts[0]])
    columns = {"image": [str(folder / image) for image in images]}
    if 2 in examples:
        columns["label"] = [image.parts[0] for image in images]
    return datasets.Dataset.from_dict(columns)
