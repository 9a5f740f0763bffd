"""Finished blocks of a run in files, for resuming, evaluation and saving."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert, file_state
from fusion_bench_featcal.files import free_space, unwritten
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.files.tensors import write_tensors
from fusion_bench_featcal.run.digests import digest_tensor

Records = Sequence[Mapping[str, Any]]


class FinishedBlocks(SafetensorsExpert):
    """Calibrated tensors of one run, in a file for each block.

    Metadata of a file are the digests of its run, its log records, a digest of each tensor, and a
    digest of all these and the file's name. The metadata are checked when a file is opened, and a
    tensor when it is read first. Size and time of the file are checked at every later read. A file
    of another run, or a damaged one, is thus never used.

    Attributes:
        records: File -> the log records in it.
    """

    def __init__(self, folder: Path, run: Mapping[str, str]) -> None:
        """Start without files.

        Args:
            folder: The folder of the files.
            run: Digests of the run (`digests_of_run`).
        """
        self._folder, self._run = folder, run
        self._stored, self._states = {}, {}
        self._digests, self._verified = dict[str, str](), set[str]()
        self.records = dict[str, Records]()

    def write(self, file: str, tensors: Mapping[str, Tensor], records: Records = ()) -> None:
        """Write a file atomically, and open it.

        Raises:
            CalibrationError: If it cannot be written.
        """
        tensors = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
        digests = {name: digest_tensor(tensor) for name, tensor in tensors.items()}
        facts = {"run": self._run, "records": records, "digests": digests}
        metadata = {name: json.dumps(fact) for name, fact in facts.items()}
        with writing(self._folder / file, sum(tensor.nbytes for tensor in tensors.values())):
            # The seal contains the name, since files may be exchanged.
            seal = {"seal": digest_json([file, metadata])}
            write_tensors(self._folder / file, tensors, metadata | seal)
        self.open(file)

    def open(self, file: str) -> None:
        """Open a file of this run, and check all but the content of its tensors.

        Raises:
            CalibrationError: If it belongs to another run, or is damaged.
        """
        with self._reading(file):
            metadata = self._open(self._folder / file)
            seal = metadata.pop("seal", "")
            metadata.pop("format", None)
            if seal != digest_json([file, metadata]):
                raise CalibrationError("its header was changed, or it is not a finished block")
            run, digests = json.loads(metadata["run"]), json.loads(metadata["digests"])
            if digests.keys() != {*self.names_in(self._folder / file)}:
                raise CalibrationError("its tensors are not those that were written")
        if others := [name for name, digest in self._run.items() if run.get(name) != digest]:
            raise CalibrationError(
                f"{option('checkpoint_dir')} {self._folder} belongs to another run: it differs in "
                f"its {' and '.join(others)}. Choose another folder, or remove this one. Nothing "
                "in it was changed"
            )
        self._digests |= digests
        self._verified -= digests.keys()
        self.records[file] = json.loads(metadata["records"])

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            CalibrationError: If it is damaged, or its file is gone or was replaced.
        """
        with self._reading(self._stored[name].file.name):
            return self._verify(name, super().tensor(name))

    # Part of a tensor has no digest.
    rows = ExpertSource.rows

    def memory_mapped(self) -> dict[str, Tensor]:
        """Return all tensors memory-mapped, for a model that may be as large as the memory.

        Raises:
            CalibrationError: As `tensor`.
        """
        mapped = dict[str, Tensor]()
        for file in self.files:
            with self._reading(file.name), file.open("rb") as stream:
                if file_state(stream) != self._states[file]:
                    raise CalibrationError("it has changed since it was opened")
                mapped |= {name: self._verify(name, t) for name, t in load_file(file).items()}
        return mapped

    def _verify(self, name: str, tensor: Tensor) -> Tensor:
        """Compare a tensor that is read for the first time with its digest, and return it."""
        if name not in self._verified and digest_tensor(tensor) != self._digests[name]:
            raise CalibrationError(f"its tensor {name!r} has changed since it was written")
        self._verified.add(name)
        return tensor

    def _reading(self, file: str) -> AbstractContextManager[None]:
        """Return a context that adds a file to errors of reading it, and the remedy."""
        resuming = option("resume", "true")
        remedy = f"Remove it to calibrate its block and later ones again ({resuming})"
        return error_context(self._folder / file, cause=_damage, remedy=remedy)


def _damage(error: Exception) -> str | None:
    is_known = isinstance(error, OSError | SafetensorError | ValueError | KeyError)
    return f"it cannot be used: {error}" if is_known else None


def writing(path: Path, size: int) -> AbstractContextManager[None]:
    """Return a context that adds the needed and the free space to errors of writing a file.

    Args:
        path: The file in `checkpoint_dir`.
        size: Its bytes.
    """
    remedy = (
        f"It needs {bytes_text(size)}, but {bytes_text(free_space(path.parent))} are free. Make "
        f"room or change {option('checkpoint_dir')}. With {option('resume', 'true')}, a run "
        "continues after its last finished block"
    )
    return error_context(path, cause=unwritten, remedy=remedy)
