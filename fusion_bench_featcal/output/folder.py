"""The output folder: finished blocks as shards of the calibrated model, from which a run goes on.

`blocks.json` says what the run depends on and lists the finished blocks. Each is a safetensors
file with the tensors of that block by the model's own names. When the last one is written, the
remaining tensors and an index are: with its config.json the folder is the model.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.experts import names_under
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.files import (
    ReportError,
    free_space,
    prepare_directory,
    remove_orphans,
    write_whole,
)
from fusion_bench_featcal.json_files import digest_json, read_json, sealed_json
from fusion_bench_featcal.output.fingerprint import describe_run, differences
from fusion_bench_featcal.output.no_output import NoOutput
from fusion_bench_featcal.plurals import bytes_text
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.tensor_files import read_tensors, write_tensors

log = logging.getLogger(__name__)

FORMAT = 3
MANIFEST, REST, INDEX = "blocks.json", "rest.safetensors", "model.safetensors.index.json"


class OutputFolder(NoOutput):
    """Finished blocks of one calibration, whole or absent.

    A block's entry in the manifest is written after its file. Blocks that follow one whose file is
    missing are calibrated anew.
    """

    def __init__(self, folder: Path, *, resume: bool, processes: Any) -> None:
        """Open a folder, made if need be. Of several processes the first one writes.

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
        """Compare what this run depends on, or some of it, with what the finished blocks do.

        Raises:
            CalibrationError: If it differs, saying in what.
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
        """Begin with the first block, or go on after those that an earlier run has finished.

        Args:
            problem: The `Problem`, of which nothing has been solved.
            settings: Settings.

        Raises:
            CalibrationError: If the blocks that are there are another run's.
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
            for prefix in (".block-", f".{MANIFEST}.", f".{REST}.", f".{INDEX}."):
                remove_orphans(self.folder, prefix)

    def read(self, block: str, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a finished block that are not the model's; none of another block.

        Raises:
            CalibrationError: If its file is damaged.
        """
        if block not in self._finished:
            return {}
        path, unfinished = self.folder / self._files[block], model.state_dict()
        remedy = f"{path} to calibrate its block and later ones anew, or the whole folder"
        with _naming_damage(path, remedy):
            tensors = read_tensors(path, self._content["blocks"][block]["digest"])
        new = {name: tensor.to(unfinished[name].device) for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in new.items() if not tensor.equal(unfinished[name])}

    def write(self, block: str, model: nn.Module, run_log: Any) -> None:
        """Write a calibrated block, and what was logged since the last one.

        What was logged for a block of an earlier run is replaced by what was logged then.

        Raises:
            CalibrationError: If it cannot be written, or another run writes to the folder.
        """
        if block in self._finished:
            run_log.records[self._logged :] = self._content["blocks"][block]["records"]
            self._seconds = time.perf_counter() - self._began
        elif self._processes.rank == 0:
            tensors = model.state_dict()
            inside = {name: tensors[name] for name in names_under(tensors, [block])}
            digest = self._write(self._files[block], inside)
            entry = {"digest": digest, "records": run_log.plain_records(self._logged)}
            blocks = {**self._content["blocks"], block: entry}
            self._write_manifest({**self._content, "blocks": blocks})
        self._logged = len(run_log.records)

    def finish(self, model: nn.Module, run_log: Any) -> None:
        """Write the remaining tensors and the index, with which the folder is the model.

        Args:
            model: The calibrated model.
            run_log: The log, which is to say how many blocks an earlier run has finished.

        Raises:
            CalibrationError: If they cannot be written.
        """
        if self._finished:
            record = {"blocks": len(self._finished), "seconds": self._seconds}
            run_log.add("resumed", record)
        if self._processes.rank > 0:
            return
        stored = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(stored.items())}
        tensors = {name: stored[name].detach() for name in reversed(first.values())}  # ties once
        files = dict.fromkeys(tensors, REST)
        for file in self._files.values():
            inside = SafetensorsExpert(self.folder / file).names()
            files |= {name: file for name in tensors if name in inside}
        self._write(REST, {n: tensor for n, tensor in tensors.items() if files[n] == REST})
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": files}
        with _naming_room(self.folder / INDEX, size):
            write_whole(self.folder / INDEX, json.dumps(index, indent=2).encode())

    def _write(self, file: str, tensors: Mapping[str, Tensor]) -> str:
        path = self.folder / file
        with _naming_room(path, sum(tensor.nbytes for tensor in tensors.values())):
            return write_tensors(path, tensors)

    def _write_manifest(self, content: dict[str, Any]) -> None:
        """Replace the manifest, if it is still the one that this run read or wrote last."""
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
    """Context whose errors of reading a file say how to go on without it."""
    try:
        yield
    except ReportError as error:
        raise CalibrationError(
            f"{path} (method.checkpoint_dir) cannot be used: {error}. Remove {remedy} to begin anew"
        ) from error


@contextmanager
def _naming_room(path: Path, size: int) -> Iterator[None]:
    """Context whose errors of writing a file say what it needs and what is free."""
    try:
        yield
    except OSError as error:
        raise CalibrationError(
            f"cannot write {path}: {error.strerror or error}. It needs {bytes_text(size)}, and "
            f"{bytes_text(free_space(path.parent))} are free. Make room or change "
            "method.checkpoint_dir; with method.resume=true a run goes on after its last whole "
            "block"
        ) from error
