"""Weights of a model that lie in safetensors files."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fusion_bench_featcal.experts.model_config import read_config
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.untrusted import read_json

# Complex, or codes that need a scale. Bytes without a sign are a mask in old checkpoints of GPT-2.
_UNUSABLE_DTYPES = ("C", "F4", "F6_", "F8", "I8")
_UNUSABLE_WEIGHTS = ("U8",)


class SafetensorsExpert:
    """Weights read from safetensors files, tensor by tensor (memory-mapped, sharded or not)."""

    def __init__(self, path: str | Path) -> None:
        """Open a checkpoint.

        Args:
            path: A `.safetensors` file, or a folder with `model.safetensors` or
                `model.safetensors.index.json` and its shards.

        Raises:
            FileNotFoundError: If there is no such file.
            CalibrationError: If a file is damaged or cannot be read, or a tensor is stored in a
                dtype that holds no real numbers.
        """
        self._folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for file in safetensors_files(Path(path)):
            try:
                file.open("rb").close()  # safe_open takes any failure for a missing file
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                        self._files[name] = file
                        header = handle.get_slice(name)
                        self._shapes[name] = tuple(header.get_shape())
                        self._dtypes[name] = str(header.get_dtype())
            except OSError as error:
                raise CalibrationError(f"{file} cannot be read: {error.strerror}") from error
            except Exception as error:  # safetensors raises its own class, not a built-in one
                raise CalibrationError(
                    f"{file} is no readable safetensors file: {error}"
                ) from error
        self._refuse_unusable_dtypes()

    def _refuse_unusable_dtypes(self) -> None:
        for name, dtype in self._dtypes.items():
            unusable = dtype.startswith(_UNUSABLE_DTYPES)
            if unusable or (name.endswith(".weight") and dtype in _UNUSABLE_WEIGHTS):
                raise CalibrationError(
                    f"tensor {name!r} of {self._files[name]} is stored as {dtype}, which cannot be "
                    "calibrated: load the model in the library that made it, and save it in "
                    "bfloat16, float16 or float32"
                )

    @property
    def config(self) -> dict[str, Any] | None:
        """Content of the config.json beside the weights, None if there is none.

        Raises:
            CalibrationError: If it is damaged.
        """
        return read_config(self._folder)

    @property
    def files(self) -> list[Path]:
        """The files, in the order of their names."""
        return sorted(set(self._files.values()))

    def names_in(self, file: Path) -> list[str]:
        """Return the names of the tensors in one of the files."""
        return [name for name, of_tensor in self._files.items() if of_tensor == file]

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, from the file's header."""
        return self._shapes[name]

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of one tensor as the file's header has it: `F32`, `BF16`."""
        return self._dtypes[name]

    def nbytes(self, name: str) -> int:
        """Return the size of one tensor in the file, from its header."""
        bits = re.search(r"\d+", self._dtypes[name])  # BOOL has none and takes a byte
        return math.prod(self._shapes[name]) * int(bits[0] if bits else 8) // 8

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        The file is opened anew: pages that were read stay resident as long as their mapping, so one
        that is kept would grow to the whole expert, block by block.

        Raises:
            CalibrationError: If the file is gone, or another than it was.
        """
        with self._opened(name) as handle:
            tensor = handle.get_tensor(name)
        if tuple(tensor.shape) != self._shapes[name]:
            raise CalibrationError(f"{self._files[name]} has changed since the start of the run")
        return tensor

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read some rows of one tensor, a scalar whole. Raises as `tensor`."""
        with self._opened(name) as handle:
            rows = handle.get_slice(name)
            return rows[start:stop] if self._shapes[name] else handle.get_tensor(name)

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as handle:
                yield handle
        except (OSError, SafetensorError) as error:
            raise CalibrationError(
                f"{file} could be read at the start of the run and no longer can: {error}"
            ) from error


def safetensors_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    Raises:
        FileNotFoundError: If there is none, naming what was looked for.
        CalibrationError: If the index is damaged, or names files that are not there.
    """
    if path.is_file():
        return [path]
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = _shards(index)
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing:
            raise CalibrationError(f"{path} lacks the shards {missing} that {index.name} names")
        return [path / shard for shard in shards]
    raise FileNotFoundError(f"{path} holds neither model.safetensors nor an index of shards")


def _shards(index: Path) -> list[str]:
    """Return the names of the files that an index of shards lists."""
    try:
        files = read_json(index).get("weight_map")
    except ValueError as error:
        raise CalibrationError(str(error)) from error
    if not isinstance(files, Mapping) or not files:
        raise CalibrationError(f"{index} is damaged: its weight_map is {files!r}")
    return sorted(set(map(str, files.values())))
