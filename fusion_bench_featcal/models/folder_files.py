"""The files of a model's folder: checks, and small files that a saved model gets too."""

import shutil
from collections.abc import Collection
from pathlib import Path

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.safetensors_files import refuse_code, shards_of
from fusion_bench_featcal.files.untrusted import pointer_text
from fusion_bench_featcal.models.hub import needed_files

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


class FolderFiles:
    """The files of a model's folder, listed once at any depth.

    Attributes:
        folder: The folder.
        paths: Its files and subfolders.
        by_name: Name -> file, without those of subfolders.
    """

    def __init__(self, folder: Path) -> None:
        """List the files, and check those that are used. A missing folder has none.

        Raises:
            CalibrationError: If a file is a pointer of git-lfs, an index names a shard outside the
                folder, of which transformers would read any file, or there is code that
                transformers runs.
        """
        refuse_code(folder)
        self.folder, self.paths = folder, sorted(folder.rglob("*"))
        files = (path for path in self.paths if path.parent == folder and path.is_file())
        self.by_name = {file.name: file for file in files}
        for name in needed_files(self.by_name):
            if problem := pointer_text(self.by_name[name]):
                raise CalibrationError(problem)
        for index in self.matching("*.index.json"):
            shards_of(self.by_name[index])

    def matching(self, *patterns: str) -> list[str]:
        """Return the names of files that match a pattern, without those of subfolders."""
        return [name for name in self.by_name if any(map(Path(name).match, patterns))]

    def small_files(self, skipped_folders: Collection[str] | None = None) -> list[Path]:
        """Return the files whose content may come along to a saved model.

        These are all but weights, states of a training, hidden files and files above 50 MB.

        Args:
            skipped_folders: If there are any, files of subfolders are returned too, but for these.

        Raises:
            ValueError: If a file or folder at any depth is a link out of the folder, because a
                saved model is meant to be uploaded, and the link may have come with a download.
        """
        small, root = list[Path](), self.folder.resolve()
        roots, blobs = {root}, root.parent.parent / "blobs"
        if root.parent.name == "snapshots" and blobs.is_dir():  # the hub's cache, of links to blobs
            roots.add(blobs.resolve())
        for file in self.paths:
            name = file.relative_to(self.folder)
            is_hidden = any(part.startswith(".") for part in name.parts)
            if is_hidden or _has_weights(file) or any(map(file.match, _STATES)):
                continue
            if file.exists() and roots.isdisjoint(file.resolve().parents):
                raise ValueError(
                    f"{file} links to {file.resolve()}, outside its folder, and would become part "
                    "of the saved model: replace it with a copy, or remove it"
                )
            is_skipped = skipped_folders is None or name.parts[0] in {*_FOLDERS, *skipped_folders}
            is_skipped &= len(name.parts) > 1
            if not is_skipped and file.is_file() and file.stat().st_size <= _LARGEST:
                small.append(file)
        return small

    def copy_small_files(
        self,
        target: Path,
        *,
        skipped_folders: Collection[str] | None = None,
        has_code: bool = False,
        for_processor: bool | None = None,
    ) -> None:
        """Copy the files of `small_files` that another folder lacks.

        Args:
            target: The folder of the saved model. Files there are never replaced.
            skipped_folders: As for `small_files`.
            has_code: Whether code is copied.
            for_processor: Whether only files of tokenizers and image processors are copied, or all
                but these. None: all.

        Raises:
            ValueError: As `small_files`.
        """
        for file in self.small_files(skipped_folders):
            copy = target / file.relative_to(self.folder)
            is_unused = file.suffix in _CODE and not has_code
            is_unused |= for_processor not in (None, any(map(file.match, _PROCESSORS)))
            if not is_unused and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)

    @property
    def weights_note(self) -> list[str]:
        """A sentence on weights beside the model, such as heads in files of their own, if any."""
        names = (path.relative_to(self.folder) for path in self.paths)
        beside = [
            str(name)
            for name in names
            if _has_weights(name) and name.parts[0] not in _FOLDERS and len(name.parts) < 3
            if not any(map(name.match, (*_STATES, *_OWN)))
        ]
        text = f"other weights in {self.folder} are neither repaired nor copied: "
        return [f"{text}{', '.join(beside):.200}"] if beside else []


def _has_weights(file: Path) -> bool:
    return bool(_WEIGHTS & {*map(str.lower, file.suffixes)})
