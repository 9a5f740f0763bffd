"""Files beside a merged model that come along to the calibrated one, such as licences."""

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".ot",
    ".onnx", ".onnx_data", ".xml", ".tflite", ".pkl", ".pickle", ".npz", ".distcp",
}  # fmt: skip
"""Endings of weights in any format, and of states of a training. They are not repaired."""
_OWN = ("model*.safetensors", "pytorch_model*.bin", "training_args.bin", "rng_state*")
"""A model's own weights, in modules' folders too, and more states of a training."""
_CODE = {".py", ".pyc", ".so"}
_STATES = ("*.index.json", "trainer_state.json", "optimizer*", "scheduler*")
_PROCESSORS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "*.model", "*.spm", "*.tiktoken", "tekken.json", "chat_template*", "*processor_config.json",
)  # fmt: skip
_FOLDERS = {"featcal", "onnx", "openvino"}  # the report of another run, and weights
_LARGEST = 50 * 10**6  # bytes


def copy_other_files(
    source: Path,
    target: Path,
    *,
    skipped_folders: Collection[str] | None = None,
    has_code: bool = False,
    for_processor: bool | None = None,
) -> None:
    """Copy the small files of a model's folder that another folder lacks (see `small_files`).

    Args:
        source: The folder to copy from.
        target: The folder of the saved model. Files there are never replaced.
        skipped_folders: If there are any, subfolders are copied too, but for these.
        has_code: Whether code is copied.
        for_processor: Whether only files of tokenizers and image processors are copied, or all but
            these. None: all.

    Raises:
        ValueError: If a file is a link out of the folder.
    """
    for file in small_files(source, skipped_folders):
        name = file.relative_to(source)
        is_unused = file.suffix in _CODE and not has_code
        is_unused |= for_processor not in (None, any(map(file.match, _PROCESSORS)))
        if not is_unused and not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name)


def refuse_links(folder: Path, skipped_folders: Collection[str] | None = None) -> None:
    """Refuse a model's folder with links out of it, before anything runs (see `small_files`)."""
    for _ in small_files(folder, skipped_folders) if folder.is_dir() else ():
        pass


def small_files(folder: Path, skipped_folders: Collection[str] | None = None) -> Iterator[Path]:
    """Yield the files of a model's folder whose content may come along to a saved model.

    These are all but weights, states of a training, hidden files and files above 50 MB.

    Args:
        folder: The folder.
        skipped_folders: If there are any, files of subfolders are yielded too, but for these.

    Raises:
        ValueError: If a file or folder at any depth is a link out of the folder, because a saved
            model is meant to be uploaded, and the link may have come with a download.
    """
    root = folder.resolve()
    roots, blobs = {root}, root.parent.parent / "blobs"
    if root.parent.name == "snapshots" and blobs.is_dir():  # the hub's cache, of links to blobs
        roots.add(blobs.resolve())
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if is_hidden or _has_weights(file) or any(map(file.match, _STATES)) or not file.exists():
            continue
        if roots.isdisjoint(file.resolve().parents):
            raise ValueError(
                f"{file} is a link out of its folder, to {file.resolve()}, and would become part "
                "of the saved model: put a copy in its place, or remove it"
            )
        is_skipped = skipped_folders is None or name.parts[0] in {*_FOLDERS, *skipped_folders}
        is_skipped &= len(name.parts) > 1
        if not is_skipped and file.is_file() and file.stat().st_size <= _LARGEST:
            yield file


def _has_weights(file: Path) -> bool:
    return bool(_WEIGHTS & {*map(str.lower, file.suffixes)})


def note_on_weights(folder: Path) -> list[str]:
    """Return a sentence on weights beside a model, such as heads in files of their own, if any."""
    names = [file.relative_to(folder) for file in (*folder.glob("*"), *folder.glob("*/*"))]
    beside = [
        str(name)
        for name in sorted(names)
        if _has_weights(name) and name.parts[0] not in _FOLDERS
        if not any(map(name.match, (*_STATES, *_OWN)))
    ]
    text = f"weights beside the model are neither repaired nor copied: {', '.join(beside):.200}"
    return [f"{text} of {folder}"] if beside else []
