"""Finished blocks of a calibration, in memory or as files from which a run resumes.

Each block is a safetensors file with its tensors under the model's names. Its metadata have the
digest of the run and the block's log records. After the last block the remaining tensors and an
index are written. With its config.json the folder is then the model.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fusion_bench_featcal.core.float32_products import products_in_force
from fusion_bench_featcal.errors import CalibrationError, ReportError
from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.experts import names_under
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import Tensors
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.files import free_space, prepare_directory
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.files.tensors import INDEX, write_index, write_tensors
from fusion_bench_featcal.run.digests import (
    InputsDigest,
    digest_tensor,
    glimpse,
    own_code,
    versions_of_software,
    without_addresses,
)
from fusion_bench_featcal.settings import FeatCalSettings

BLOCK, REST = "block-{:04d}.safetensors", "rest-{:04d}.safetensors"
PIECE = 2**28
"""Tensors outside the blocks with more bytes than this get a separate file."""


class Checkpoint:
    """Finished blocks of a run without `checkpoint_dir`, which cannot be resumed.

    Attributes:
        is_complete: Whether an earlier run has finished all blocks.
    """

    is_complete = False

    def start(self, problem: Any, settings: FeatCalSettings) -> None:
        """Begin with the first block."""

    def read(self, block: str, model: WorkingModel) -> dict[str, Tensor]:
        """Return no tensors, because no earlier run has finished the block."""
        return {}

    def write(
        self, block: str, model: WorkingModel, changed: Mapping[str, Tensor], run_log: Any
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a calibrated block, stored on the merged model's device.

        Args:
            block: The block.
            model: The calibrated model, with the block in memory.
            changed: The block's tensors that differ from the merged model.
            run_log: The log.
        """
        return {name: tensor.to(model.home) for name, tensor in changed.items()}

    def finish(self, tensors: Mapping[str, Tensor], run_log: Any) -> None:
        """Do nothing."""


class CheckpointFolder(Checkpoint):
    """Finished blocks in `checkpoint_dir`. Each file is complete or absent.

    Blocks after a missing file are calibrated again.
    """

    def __init__(self, folder: Path, *, resume: bool, processes: Any) -> None:
        """Open a folder, creating it if necessary. Only the first process writes.

        Raises:
            CalibrationError: If it cannot be written, or has blocks and `resume` is off.
        """
        self.folder, self._processes = folder, processes
        try:
            prepare_directory(folder, "method.checkpoint_dir")
        except ReportError as error:
            raise CalibrationError(str(error)) from error
        if not resume and any(folder.glob("block-*.safetensors")):
            raise CalibrationError(
                f"method.checkpoint_dir {folder} holds the finished blocks of a run. Set "
                "method.resume=true to go on with it, or choose another folder, or remove this one"
            )
        self._finished: list[str] = []
        self._logged = 0

    def start(self, problem: Any, settings: FeatCalSettings) -> None:
        """Begin with the first block, or continue after the blocks of an earlier run.

        Args:
            problem: The `Problem` before its first solve.
            settings: Settings.

        Raises:
            CalibrationError: If a block belongs to another run, or its file is damaged.
        """
        self._run = digest_of_run(problem, settings)
        self._files = {block: BLOCK.format(number) for number, block in enumerate(problem.modules)}
        is_gap = False
        for block, file in self._files.items():
            is_present = (self.folder / file).exists()
            if is_present and self._metadata(file)["run"] != self._run:
                raise CalibrationError(
                    f"method.checkpoint_dir {self.folder} belongs to another run: it had other "
                    "settings, models, samples, versions or processes. Choose another folder, or "
                    "remove this one. Nothing in it was changed"
                )
            is_gap |= not is_present
            if not is_gap:
                self._finished.append(block)
        if len(set(map(tuple, self._processes.gather(self._finished)))) > 1:
            raise CalibrationError(
                f"processes see different files in method.checkpoint_dir {self.folder}. Choose a "
                "folder that all machines share"
            )
        self.is_complete = len(self._finished) == len(self._files)
        if self._finished:
            problem.progress.resumed(len(self._finished), self.folder)

    def read(self, block: str, model: WorkingModel) -> dict[str, Tensor]:
        """Return the tensors of a block that an earlier run has finished, none for other blocks.

        Raises:
            CalibrationError: If its file is damaged.
        """
        if block not in self._finished:
            return {}
        with self._naming_damage(self._files[block]):
            source = SafetensorsExpert(self.folder / self._files[block])
            # Each is read into memory of its own, as the rounding of products depends on alignment.
            return {name: source.tensor(key) for name, key in self._names(block, model).items()}

    def write(
        self, block: str, model: WorkingModel, changed: Mapping[str, Tensor], run_log: Any
    ) -> Mapping[str, Tensor]:
        """Write a calibrated block with new log records, and return the block's tensors.

        Tensors are read from the file when they are accessed. For blocks of an earlier run, its log
        records replace the new ones.

        Raises:
            CalibrationError: If it cannot be written.
        """
        file = self._files[block]
        if block in self._finished:
            run_log.records[self._logged :] = json.loads(self._metadata(file)["records"])
        elif self._processes.rank == 0:
            tensors = model.module.state_dict()
            inside = {key: tensors[name] for name, key in self._names(block, model).items()}
            records = json.dumps(run_log.plain_records(self._logged))
            self._write(file, inside, {"run": self._run, "records": records})
        self._logged = len(run_log.records)
        self._processes.gather(None)  # the others read the file that the first one has written
        source = SafetensorsExpert(self.folder / file)
        return Tensors(source.tensor, self._names(block, model))

    def finish(self, tensors: Mapping[str, Tensor], run_log: Any) -> None:
        """Write the remaining tensors and the index, which complete the model.

        Args:
            tensors: The calibrated model's tensors, tied ones once.
            run_log: The log, which records the number of blocks that an earlier run has finished.

        Raises:
            CalibrationError: If they cannot be written.
        """
        if self._finished:
            run_log.add("resumed", {"blocks": len(self._finished)})
        if self._processes.rank > 0:
            return
        size, files = 0, dict[str, str]()
        for file in self._files.values():
            shard = SafetensorsExpert(self.folder / file)
            inside = [name for name in shard.names() if name in tensors]
            size += sum(map(shard.nbytes, inside))
            files |= dict.fromkeys(inside, file)
        size += self._write_rest(tensors, files)
        with self._naming_room(INDEX, size):
            write_index(self.folder, files, size)

    def _write_rest(self, tensors: Mapping[str, Tensor], files: dict[str, str]) -> int:
        """Write the tensors that are in no file, add them to `files`, and return their bytes."""
        piece, size, total = dict[str, Tensor](), 0, 0
        rest = [name for name in tensors if name not in files]
        for number, name in enumerate(rest):
            piece[name] = tensors[name].to("cpu")
            size += piece[name].nbytes
            if size > PIECE or name == rest[-1]:
                self._write(file := REST.format(number), piece, {})
                files |= dict.fromkeys(piece, file)
                total += size
                piece, size = {}, 0  # freed before the next tensor is read
        return total

    def _names(self, block: str, model: WorkingModel) -> dict[str, str]:
        """Return the names of a block's tensors -> their names in files."""
        return {name: model.keys[name] for name in names_under(model.keys, [block])}

    def _write(self, file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        with self._naming_room(file, sum(tensor.nbytes for tensor in tensors.values())):
            write_tensors(self.folder / file, tensors, metadata)

    def _metadata(self, file: str) -> dict[str, str]:
        with self._naming_damage(file), safe_open(self.folder / file, "pt") as opened:
            metadata = opened.metadata() or {}
            if not {"run", "records"} <= metadata.keys():
                raise CalibrationError("it is no finished block")
            return metadata

    @contextmanager
    def _naming_damage(self, file: str) -> Iterator[None]:
        """Context manager that adds the remedy to errors of reading a file."""
        try:
            yield
        except (OSError, SafetensorError, CalibrationError, ValueError, KeyError) as error:
            raise CalibrationError(
                f"{self.folder / file} (method.checkpoint_dir) cannot be used: {error}. Remove it "
                "to calibrate its block and later ones again"
            ) from error

    @contextmanager
    def _naming_room(self, file: str, size: int) -> Iterator[None]:
        """Context manager that adds the needed and the free space to errors of writing a file."""
        try:
            yield
        except OSError as error:
            raise CalibrationError(
                f"cannot write {self.folder / file}: {error.strerror or error}. It needs "
                f"{bytes_text(size)}, and {bytes_text(free_space(self.folder))} are free. Make "
                "room or change method.checkpoint_dir; with method.resume=true a run goes on after "
                "its last whole block"
            ) from error


def open_checkpoint(settings: FeatCalSettings, processes: Any) -> Checkpoint:
    """Open the folder of the settings, before any work.

    Args:
        settings: `checkpoint_dir` and `resume` are used.
        processes: The processes. The first one writes.

    Raises:
        CalibrationError: If it cannot be used.
    """
    if settings.checkpoint_dir is None:
        return Checkpoint()
    folder = Path(settings.checkpoint_dir)
    return CheckpointFolder(folder, resume=settings.resume, processes=processes)


def digest_of_run(problem: Any, settings: FeatCalSettings) -> str:
    """Return a digest of all that a finished block depends on, equal in every process.

    Of base, experts and a merged model in files, names, shapes and first rows count.

    Args:
        problem: The `Problem` before its first solve.
        settings: Settings.
    """
    streams, working, processes = problem.streams, problem.working, problem.processes
    device = working.device.type
    samples = {task: InputsDigest() for task in streams.tasks}
    for task, batches in streams.tasks.items():
        for batch in batches:
            samples[task].add(batch.inputs)
    texts = {task: digest.text() for task, digest in samples.items()}
    texts |= {f"model {n}": glimpse(model.source) for n, model in problem.models.items()}
    whole = dict(problem.merged.named_buffers()) | problem.merged.state_dict()
    with streams.autocast():
        on = torch.is_autocast_enabled(device)
        autocast = str(torch.get_autocast_dtype(device)) if on else None
    facts = [
        settings.of_the_model().replace(family="auto").as_dict(),
        [
            without_addresses(repr(value))
            for value in (problem.rule, streams.family, problem.merged)
        ],
        [list(stage) for stage in streams.stages],
        [own_code(type(value)) for value in (problem.rule, streams.family)],
        {name: digest_tensor(tensor) for name, tensor in whole.items()}
        if working.is_in_memory
        else glimpse(working.source),
        processes.size,
        [device, autocast, products_in_force(), problem.kernel],
        versions_of_software(),
        sorted(item for part in processes.gather(texts) for item in part.items()),
    ]
    return digest_json(facts)
