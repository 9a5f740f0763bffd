"""Files beside a merged model that come along to the calibrated one, such as licences."""

import shutil
from collections.abc import Collection
from pathlib import Path

_WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".ot",
    ".onnx", ".onnx_data", ".xml", ".tflite", ".pkl", ".pickle", ".npz", ".distcp",
}  # fmt: skip
"""Endings of weights in any format, and of states of a training. They are not repaired."""
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
    of_processor: bool | None = None,
) -> None:
    """Copy the small files of a model's folder that another folder lacks.

    Weights, states of a training, hidden files and files above 50 MB are not copied.

    Args:
        source: The folder to copy from.
        target: The folder of the saved model. Files there are never replaced.
        skipped_folders: If there are any, subfolders are copied too, but for these.
        has_code: Whether code is copied.
        of_processor: Whether only files of tokenizers and image processors are copied, or all but
            these. None: all.
    """
    for file in sorted(source.iterdir() if skipped_folders is None else source.rglob("*")):
        name = file.relative_to(source)
        inner = len(name.parts) > 1 and name.parts[0] in {*_FOLDERS, *(skipped_folders or ())}
        is_hidden = any(part.startswith(".") for part in name.parts)
        if inner or is_hidden or (target / name).exists() or not file.is_file():
            continue
        is_unused = bool(_WEIGHTS & {*map(str.lower, file.suffixes)}) or any(
            map(file.match, _STATES)
        )
        is_unused |= file.suffix in _CODE and not has_code
        is_unused |= of_processor not in (None, any(map(file.match, _PROCESSORS)))
        if not is_unused and file.stat().st_size <= _LARGEST:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name)
