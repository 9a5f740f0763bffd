"""Files of a model: safetensors, and the config.json that transformers reads as it is meant."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.source import ExpertSource
from fusion_bench_featcal.files.untrusted import read_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class _Stored:
    """Location of one tensor: its file, first byte, size, shape, and the dtype in the header."""

    file: Path
    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


class SafetensorsExpert(ExpertSource):
    """Weights read from safetensors files, tensor by tensor (sharded or not).

    Tensors are read rather than memory-mapped. The process would be killed if another program
    truncated a mapped file, and pages of a mapping stay resident.
    """

    reads_in_threads = True

    def __init__(self, path: str | Path) -> None:
        """Open a checkpoint.

        Args:
            path: A `.safetensors` file, or a folder with `model.safetensors` or
                `model.safetensors.index.json` and its shards.

        Raises:
            FileNotFoundError: If there is no such file.
            CalibrationError: If a file is damaged or cannot be read, or a tensor has a dtype
                without real numbers.
        """
        self._folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self._stored: dict[str, _Stored] = {}
        self._states: dict[Path, tuple[int, int]] = {}
        for file in safetensors_files(Path(path)):
            self._open(file)

    def _open(self, file: Path) -> dict[str, str]:
        """Add the tensors of one file, and return its metadata."""
        try:
            with file.open("rb") as stream:  # safe_open reports any failure as a missing file
                state = file_state(stream)
                with safe_open(file, framework="pt"):  # checks the header
                    tensors, metadata = _header(file, stream)
        except OSError as error:
            raise CalibrationError(f"{file} cannot be read: {error.strerror}") from error
        except Exception as error:  # safetensors raises its own class, not a built-in one
            raise CalibrationError(f"{file} is not a readable safetensors file: {error}") from error
        for name, stored in tensors.items():
            is_code = stored.dtype == "U8" and name.endswith(".weight")  # else a mask, as in GPT-2
            if is_code or stored.dtype not in DTYPES:
                raise CalibrationError(
                    f"tensor {name!r} of {file} is stored as {stored.dtype}, which cannot be "
                    "calibrated: load the model in the library that made it, and save it in "
                    "bfloat16, float16 or float32"
                )
        self._states[file] = state
        self._stored |= tensors
        return metadata

    @cached_property
    def config(self) -> dict[str, Any] | None:  # type: ignore[override]
        """Return the content of the config.json next to the weights, or None.

        Raises:
            CalibrationError: As `open_config`.
        """
        return open_config(self._folder)

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """Digest of the model, calculated once: reads refuse a file that has changed."""
        return super().digest

    @property
    def files(self) -> list[Path]:
        """Return the files, sorted by name."""
        return sorted({stored.file for stored in self._stored.values()})

    def names_in(self, file: Path) -> list[str]:
        """Return the names of the tensors in one of the files."""
        return [name for name, stored in self._stored.items() if stored.file == file]

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, from the file's header."""
        return self._stored[name].shape

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of one tensor as written in the header: `F32`, `BF16`."""
        return self._stored[name].dtype

    def nbytes(self, name: str) -> int:
        """Return the size of one tensor in the file, from its header."""
        return self._stored[name].nbytes

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            CalibrationError: If the file is gone or was replaced.
        """
        return self._read(name, 0, None)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read some rows of one tensor. A scalar is read whole. Raises as `tensor`."""
        return self._read(name, start, stop)

    def _read(self, name: str, start: int, stop: int | None) -> Tensor:
        stored = self._stored[name]
        length, *row = stored.shape or (1,)
        start, stop, _ = slice(start, stop).indices(length) if stored.shape else (0, 1, 1)
        rows, row_bytes = max(0, stop - start), stored.nbytes // max(1, length)
        content = torch.empty(rows * row_bytes, dtype=torch.uint8)
        try:
            with stored.file.open("rb") as stream:
                is_same = file_state(stream) == self._states[stored.file]
                stream.seek(stored.start + start * row_bytes)
                is_same &= stream.readinto(content.numpy().data) == len(content)
        except OSError as error:
            raise CalibrationError(
                f"{stored.file} could be read at the start of the run, but no longer can be read: "
                f"{error.strerror or error}"
            ) from error
        if not is_same:
            raise CalibrationError(f"{stored.file} has changed since the start of the run")
        return content.view(DTYPES[stored.dtype]).reshape((rows, *row) if stored.shape else ())


def file_state(stream: BinaryIO) -> tuple[int, int]:
    """Return size and time of the last change of an open file."""
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


def _header(file: Path, stream: BinaryIO) -> tuple[dict[str, _Stored], dict[str, str]]:
    """Return the tensors of a file with a checked header, by name, and its metadata."""
    size = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(size))
    metadata, tensors = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        tensors[name] = _Stored(file, 8 + size + begin, end - begin, shape, dtype)
    return tensors, metadata


def safetensors_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    Raises:
        FileNotFoundError: If there is none, naming the files that were expected.
        CalibrationError: If the index is damaged, or lists files that do not exist or are outside
            its folder.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if path.is_file() or single.is_file():
        return [path if path.is_file() else single]
    if not index.is_file():
        raise FileNotFoundError(f"{path} has neither model.safetensors nor an index of shards")
    shards = shards_of(index)
    if missing := [shard for shard in shards if not (path / shard).is_file()]:
        raise CalibrationError(f"{path} lacks the shards {missing} that {index.name} names")
    return [path / shard for shard in shards]


def shards_of(index: Path) -> list[str]:
    """Return the names of the files that an index lists, of safetensors or other shards.

    Raises:
        CalibrationError: If it is damaged, or a file is outside its folder. Files may be links,
            as in the hub's cache.
    """
    try:
        shards = sorted(set(map(str, read_json(index)["weight_map"].values())))
    except (ValueError, KeyError, AttributeError) as error:
        raise CalibrationError(f"{index} is damaged: {error!r}") from error
    for path in map(Path, shards):
        if path.is_absolute() or ".." in path.parts:
            raise CalibrationError(
                f"{index} names {path}, which is outside its folder. Move the file into the folder "
                "and name it without a path"
            )
    return shards


RELEASE = version("transformers")
IS_RELEASE_4 = RELEASE.startswith("4.")
_GENERATE = "custom_generate/generate.py"


def refuse_code(folder: Path) -> None:
    """Refuse a folder with code that transformers 4 runs without asking.

    Raises:
        CalibrationError: Naming the file.
    """
    if (folder / _GENERATE).is_file():
        raise CalibrationError(
            f"{folder} has {_GENERATE}: code in a model's folder is not run. Remove the file"
        )


def open_config(folder: Path) -> dict[str, object] | None:
    """Return the config.json of a model to calibrate, or None if it has none.

    Raises:
        CalibrationError: If the file is damaged, the model is quantized or has code, or another
            release of transformers wrote its rotary embedding or its types of layers.
    """
    from transformers import CONFIG_MAPPING

    refuse_code(folder)
    file = folder / "config.json"
    try:
        config = _without_kernels(read_json(file))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CalibrationError(str(error)) from error
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise CalibrationError(
            f"{file} has a quantization_config ({method}), and quantized weights cannot be "
            "calibrated: save the model in bfloat16 (transformers' model.dequantize()), or "
            "remove the key if the tensors in its files are not quantized"
        )
    if IS_RELEASE_4 and config.get("rope_parameters"):
        raise CalibrationError(
            f"{file} has rope_parameters, which were written by transformers 5 and which "
            f"{RELEASE} does not read. Install transformers 5, or write rope_theta and "
            "rope_scaling instead"
        )
    types, kind = str(config.get("layer_types") or ""), str(config.get("model_type"))
    names = {*re.findall(r"\w+", types)} - {"full_attention"}
    if names and kind in CONFIG_MAPPING and "layer_types" not in CONFIG_MAPPING[kind]().to_dict():
        raise CalibrationError(
            f"{file} has layer_types ({', '.join(sorted(names))}), which transformers "
            f"{RELEASE} does not read for {kind}: install the release that wrote it"
        )
    return config


def _without_kernels(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without kernels of the hub, which transformers would download and run."""
    return {
        key: _without_kernels(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not ("attn_implementation" in key and "/" in str(value))
    }
