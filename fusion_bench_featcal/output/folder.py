"""The output folder: finished blocks as shards of the calibrated model, for resuming a run.

`blocks.json` contains the fingerprint of the run and the list of finished blocks. Each block is a
safetensors file with its tensors under the model's names. After the last block the remaining
tensors and an index are written. With its config.json the folder is then the model.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fusion_bench_featcal.experts import names_under
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import Tensors
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.files import (
    ReportError,
    free_space,
    prepare_directory,
    remove_orphans,
    write_whole,
)
from fusion_bench_featcal.json_files import digest_json, read_json, sealed_json
from fusion_bench_featcal.output.fingerprint import describe_run, differences
from fusion_bench_featcal.output.in_memory import InMemory
from fusion_bench_featcal.plurals import bytes_text
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.tensor_files import INDEX, read_tensors, write_index, write_tensors

log = logging.getLogger(__name__)

FORMAT = 3
MANIFEST, REST = "blocks.json", "rest"
PIECE = 2**28
"""Tensors outside the blocks with more bytes than this get a separate file."""


class OutputFolder(InMemory):
    """Finished blocks of one calibration, each complete or absent.

    A block's entry in the manifest is written after its file. Blocks after a missing file are
    calibrated again.
    """

    def __init__(self, folder: Path, *, resume: bool, processes: Any) -> None:
        """Open a folder, creating it if necessary. Only the first process writes.

        Raises:
            CalibrationError: If it cannot be written, its manifest is damaged, or it has blocks and
                `resume` is off.
        """
        self.folder, self._processes = folder, processes
        try:
            prepare_directory(folder, "method.checkpoint_dir")
        except ReportError as error:
            raise CalibrationError(str(error)) from error
        self._content: dict[str, Any] = {}
        if (folder / MANIFEST).exists():
            if not resume:
                raise CalibrationError(
                    f"method.checkpoint_dir {folder} holds the finished blocks of a run. Set "
                    "method.resume=true to go on with it, or choose another folder, or remove this "
                    "one"
                )
            self._content = _read_manifest(folder / MANIFEST)
        self._finished: list[str] = []
        self._files: dict[str, str] = {}
        self._logged = 0
        self._began, self._seconds = time.perf_counter(), 0.0
        self.is_complete = False

    def compare(self, run: Mapping[str, Any]) -> None:
        """Compare this run's fingerprint, or some entries, with that of the finished blocks.

        Raises:
            CalibrationError: If they differ, naming the differences.
        """
        if not self._content:
            return
        then, now = self._content["run"], dict(run)
        machine = {key: now.pop(key) for key in ("machine",) if key in now}
        texts = differences(then, now)
        if texts:
            more = [f"and {len(texts) - 5} more"] if len(texts) > 5 else []
            raise CalibrationError(
                f"method.checkpoint_dir {self.folder} holds the finished blocks of another run, "
                f"which differs in: {'; '.join([*texts[:5], *more])}. Go on with what that run "
                "had, or choose another folder, or remove this one. Nothing in it was changed"
            )
        for text in differences(then, machine):
            log.warning("resumed on another machine, which may round otherwise: %s", text)

    def start(self, problem: Any, settings: FeatCalSettings) -> None:
        """Begin with the first block, or continue after the blocks of an earlier run.

        Args:
            problem: The `Problem` before its first solve.
            settings: Settings.

        Raises:
            CalibrationError: If the existing blocks belong to another run.
        """
        gather, blocks = self._processes.gather, list(problem.modules)
        run = describe_run(problem, settings, self._processes)
        self.compare(run)
        self._files = {block: f"block-{i:04d}.safetensors" for i, block in enumerate(blocks)}
        listed = self._content.get("blocks", {})
        for block, file in self._files.items():
            if block not in listed or not (self.folder / file).exists():
                break
            self._finished.append(block)
        for rank, other in enumerate(gather((digest_json(self._content), self._finished))):
            if other != (digest_json(self._content), self._finished):
                raise CalibrationError(
                    f"process {rank} sees other files in method.checkpoint_dir {self.folder} than "
                    "this one: it must be a folder of a file system that all machines share"
                )
        self.is_complete = self._finished == blocks
        if self._processes.rank == 0:
            finished = {block: listed[block] for block in self._finished}
            if not self._content or finished != listed:
                self._write_manifest({"format": FORMAT, "run": run, "blocks": finished})
            for prefix in (".block-", f".{MANIFEST}.", f".{REST}-", f".{INDEX}."):
                remove_orphans(self.folder, prefix)

    def read(self, block: str, model: WorkingModel) -> dict[str, Tensor]:
        """Return the tensors of a block that an earlier run has finished, none for other blocks.

        Raises:
            CalibrationError: If its file is damaged.
        """
        if block not in self._finished:
            return {}
        path = self.folder / self._files[block]
        remedy = f"{path} to calibrate its block and later ones again, or the whole folder"
        with _naming_damage(path, remedy):
            tensors = read_tensors(path, self._content["blocks"][block]["digest"])
        return {name: tensors[key] for name, key in self._names(block, model).items()}

    def write(
        self, block: str, model: WorkingModel, changed: Mapping[str, Tensor], run_log: Any
    ) -> Mapping[str, Tensor]:
        """Write a calibrated block and new log records, and return the block's tensors.

        Tensors are read from the file when they are accessed. For blocks of an earlier run, its log
        records replace the new ones.

        Raises:
            CalibrationError: If it cannot be written, or another run writes to the folder.
        """
        if block in self._finished:
            run_log.records[self._logged :] = self._content["blocks"][block]["records"]
            self._seconds = time.perf_counter() - self._began
        elif self._processes.rank == 0:
            tensors = model.module.state_dict()
            inside = {key: tensors[name] for name, key in self._names(block, model).items()}
            digest = self._write(self._files[block], inside)
            entry = {"digest": digest, "records": run_log.plain_records(self._logged)}
            blocks = {**self._content["blocks"], block: entry}
            self._write_manifest({**self._content, "blocks": blocks})
        self._logged = len(run_log.records)
        self._processes.gather(None)  # the others read the file that the first one has written
        source = SafetensorsExpert(self.folder / self._files[block])
        return Tensors(source.tensor, self._names(block, model))

    def _names(self, block: str, model: WorkingModel) -> dict[str, str]:
        """Return the names of a block's tensors -> their names in files."""
        return {name: model.keys[name] for name in names_under(model.keys, [block])}

    def finish(self, tensors: Mapping[str, Tensor], run_log: Any) -> None:
        """Write the remaining tensors and the index, which complete the model.

        Args:
            tensors: The calibrated model's tensors, tied ones once.
            run_log: The log, which records the number of blocks that an earlier run has finished.

        Raises:
            CalibrationError: If they cannot be written.
        """
        if self._finished:
            record = {"blocks": len(self._finished), "seconds": self._seconds}
            run_log.add("resumed", record)
        if self._processes.rank > 0:
            return
        size, files = 0, dict[str, str]()
        for file in self._files.values():
            shard = SafetensorsExpert(self.folder / file)
            inside = [name for name in shard.names() if name in tensors]
            size += sum(map(shard.nbytes, inside))
            files |= dict.fromkeys(inside, file)
        size += self._write_rest(tensors, files)
        with _naming_room(self.folder / INDEX, size):
            write_index(self.folder, files, size)

    def _write_rest(self, tensors: Mapping[str, Tensor], files: dict[str, str]) -> int:
        """Write the tensors that are in no file, add them to `files`, and return their bytes."""
        piece, size, total = dict[str, Tensor](), 0, 0
        rest = [name for name in tensors if name not in files]
        for number, name in enumerate(rest):
            piece[name] = tensors[name].to("cpu")
            size += piece[name].nbytes
            if size > PIECE or name == rest[-1]:
                file = f"{REST}-{number:04d}.safetensors"
                self._write(file, piece)
                files |= dict.fromkeys(piece, file)
                total += size
                piece, size = {}, 0  # freed before the next tensor is read
        return total

    def _write(self, file: str, tensors: Mapping[str, Tensor]) -> str:
        path = self.folder / file
        with _naming_room(path, sum(tensor.nbytes for tensor in tensors.values())):
            return write_tensors(path, tensors)

    def _write_manifest(self, content: dict[str, Any]) -> None:
        """Replace the manifest, unless another run has changed it since this run's last access."""
        path = self.folder / MANIFEST
        on_disk = _read_manifest(path) if path.exists() else {}
        if on_disk != self._content:
            raise CalibrationError(
                f"another run has begun to use method.checkpoint_dir {self.folder}. Choose another"
            )
        data = sealed_json(content).encode()
        with _naming_room(path, len(data)):
            write_whole(path, data)
        self._content = json.loads(json.dumps(content))


def _read_manifest(path: Path) -> dict[str, Any]:
    with _naming_damage(path, "that folder"):
        content = read_json(path, sealed=True)
        if content.get("format") != FORMAT:
            raise ReportError("an earlier version wrote it")
        return content


@contextmanager
def _naming_damage(path: Path, remedy: str) -> Iterator[None]:
    """Context manager that adds the remedy to errors of reading a file."""
    try:
        yield
    except ReportError as error:
        raise CalibrationError(
            f"{path} (method.checkpoint_dir) cannot be used: {error}. Remove {remedy} to start over"
        ) from error


@contextmanager
def _naming_room(path: Path, size: int) -> Iterator[None]:
    """Context manager that adds the needed and the free space to errors of writing a file."""
    try:
        yield
    except OSError as error:
        raise CalibrationError(
            f"cannot write {path}: {error.strerror or error}. It needs {bytes_text(size)}, and "
            f"{bytes_text(free_space(path.parent))} are free. Make room or change "
            "method.checkpoint_dir; with method.resume=true a run goes on after its last whole "
            "block"
        ) from error
