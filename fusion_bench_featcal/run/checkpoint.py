"""Finished blocks of a calibration: in memory, or in files from which a run resumes.

Each block is a safetensors file (`finished.py`) with the tensor names of the merged model's files,
or of the model in memory. After the last block the remaining tensors and an index are written. With
the model's config.json, the folder is then a complete checkpoint.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError, ReportError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.experts import ExpertSource, names_under
from fusion_bench_featcal.experts.conversion import ConvertedSource
from fusion_bench_featcal.experts.source import LazyTensorDict
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.files import destination
from fusion_bench_featcal.files.locks import locked_folder
from fusion_bench_featcal.files.tensors import INDEX, write_index
from fusion_bench_featcal.run.finished import FinishedBlocks, writing
from fusion_bench_featcal.run.log import CalibrationLog
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.progress import Progress

BLOCK, REST = "block-{:04d}.safetensors", "rest-{:04d}.safetensors"
CHECKPOINT_FILES = rf"(block|rest)-\d+\.safetensors|inputs\.json|{re.escape(INDEX)}"
"""Pattern of the names of all files in the folder. `folders/digests.py` writes inputs.json."""
Digests = Callable[[], Mapping[str, str]]
"""Returns the digests of a run, which are costly (`run_digest.py`)."""
PIECE = 2**28
"""Tensors outside the blocks with more bytes than this get a separate file."""


class Checkpoint:
    """Keeps finished blocks in memory, for runs without `checkpoint_dir`. Base class of the others.

    Attributes:
        is_complete: Whether an earlier run has finished all blocks.
        weights: The calibrated weights in files, or None if there are no files.
    """

    is_complete = False
    weights: FinishedBlocks | None = None

    def start(
        self, digests: Digests, blocks: Iterable[str], merged: ExpertSource, progress: Progress
    ) -> None:
        """Do nothing, because there are no earlier blocks."""

    def load_block(self, block: str, model: WorkingModel) -> dict[str, Tensor]:
        """Return no tensors, because no earlier run has finished the block."""
        return {}

    def finished_records(self, kind: str) -> list[dict[str, Any]]:
        """Return no records of a kind, because no earlier run has finished a block."""
        return []

    def save_block(
        self, block: str, model: WorkingModel, changed: Mapping[str, Tensor], log: CalibrationLog
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a calibrated block, stored on the merged model's device.

        Args:
            block: The block.
            model: The calibrated model, with the block in memory.
            changed: The block's tensors that differ from the merged model.
            log: The log.
        """
        return {name: tensor.to(model.merged_device) for name, tensor in changed.items()}

    def write_rest(self, tensors: Mapping[str, Tensor], log: CalibrationLog) -> None:
        """Do nothing."""


class NoCheckpoint(Checkpoint):
    """Finished blocks of a calibration that is only measured. They are not kept."""

    def save_block(self, *_: object, **__: object) -> Mapping[str, Tensor]:
        """Return no tensors."""
        return {}


class CheckpointFolder(Checkpoint):
    """Finished blocks in `checkpoint_dir`. Each file is complete or absent.

    Blocks after a missing file are calibrated again.
    """

    def __init__(self, folder: Path, *, resume: bool, processes: Processes) -> None:
        """Open a folder. Only the first process writes.

        Raises:
            CalibrationError: If it has blocks and `resume` is off.
        """
        self.folder, self._processes = folder, processes
        if not resume and any(folder.glob("block-*.safetensors")):
            raise CalibrationError(
                f"{option('checkpoint_dir')} {folder} has the finished blocks of a run. Use "
                f"{option('resume', 'true')} to continue it, choose another folder, or remove "
                "this one"
            )
        self._finished: list[str] = []
        self._logged = 0

    def start(
        self, digests: Digests, blocks: Iterable[str], merged: ExpertSource, progress: Progress
    ) -> None:
        """Begin with the first block, or continue after the blocks of an earlier run.

        Args:
            digests: Returns the digests of the run.
            blocks: All blocks, in order.
            merged: The merged model's weights. Blocks are written with the tensor names and layout
                of its files.
            progress: Shows how many blocks are finished.

        Raises:
            CalibrationError: If a block belongs to another run, or its file is damaged.
        """
        self._blocks = self.weights = FinishedBlocks(self.folder, digests())
        self._converted = ConvertedSource(self._blocks, merged.joined)
        self._files = {block: BLOCK.format(number) for number, block in enumerate(blocks)}
        present = [block for block, file in self._files.items() if (self.folder / file).exists()]
        for block in present:
            self._blocks.open(self._files[block])
        self._finished = [*takewhile(present.__contains__, self._files)]
        if len(set(map(tuple, self._processes.gather(self._finished)))) > 1:
            raise CalibrationError(
                f"processes see different files in {option('checkpoint_dir')} {self.folder}. "
                "Choose a folder that all machines share"
            )
        self.is_complete = len(self._finished) == len(self._files)
        if self._finished:
            progress.resumed(len(self._finished), self.folder)

    def finished_records(self, kind: str) -> list[dict[str, Any]]:
        """Return the log records of a kind in the blocks that an earlier run has finished."""
        files = map(self._files.__getitem__, self._finished)
        records = (record for file in files for record in self._blocks.records[file])
        return [dict(record) for record in records if record["kind"] == kind]

    def load_block(self, block: str, model: WorkingModel) -> dict[str, Tensor]:
        """Return the tensors of a block that an earlier run has finished, or {} for other blocks.

        Raises:
            CalibrationError: If its file is damaged.
        """
        if block not in self._finished:
            return {}
        # Each tensor gets its own memory, because the rounding of products depends on alignment.
        return dict(self._tensors(block, model))

    def save_block(
        self, block: str, model: WorkingModel, changed: Mapping[str, Tensor], log: CalibrationLog
    ) -> Mapping[str, Tensor]:
        """Write a calibrated block with new log records, and return the block's tensors.

        The tensors are read from the file when they are accessed. If an earlier run has finished
        the block, nothing is written. The log gets the records in the block's file instead of the
        new ones.

        Raises:
            CalibrationError: If it cannot be written.
        """
        file = self._files[block]
        if block in self._finished:
            log.records[self._logged :] = map(dict, self._blocks.records[file])
        elif self._processes.rank == 0:
            tensors = model.module.state_dict()
            names = names_under(model.keys, [block])
            inside = {model.keys[name]: tensors[name].to("cpu") for name in names}
            records = log.plain_records(self._logged)
            self._blocks.write(file, self._converted.split(inside), records)
        self._logged = len(log.records)
        self._processes.gather(None)  # the others read the file that the first one has written
        if self._processes.rank > 0:
            self._blocks.open(file)
        return self._tensors(block, model)

    def write_rest(self, tensors: Mapping[str, Tensor], log: CalibrationLog) -> None:
        """Write the remaining tensors and the index, which complete the model.

        Args:
            tensors: The calibrated model's tensors, tied ones once.
            log: The log, which records the number of blocks that an earlier run has finished.

        Raises:
            CalibrationError: If they cannot be written.
        """
        if self._finished:
            log.add("resumed", {"blocks": len(self._finished)})
        files = []
        if self._processes.rank == 0:
            files = self._write_pieces(tensors)
            weights, kept = self._blocks, set(self._converted.stored_names(tensors))
            names = ((name, file) for file in weights.files for name in weights.names_in(file))
            file_names = {name: file.name for name, file in names if name in kept}
            size = sum(map(weights.nbytes, file_names))
            with writing(self.folder / INDEX, size):
                write_index(self.folder, file_names, size)
        files = self._processes.gather(files)[0]
        for file in files if self._processes.rank > 0 else ():
            self._blocks.open(file)

    def _write_pieces(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Write the tensors that are in no file, and return the files."""
        piece, size, files = dict[str, Tensor](), 0, list[str]()
        written = self._converted.names()
        unwritten = [name for name in tensors if name not in written]
        for name in unwritten:
            piece[name] = tensors[name].to("cpu")
            size += piece[name].nbytes
            if size > PIECE or name == unwritten[-1]:
                files.append(REST.format(len(files)))
                self._blocks.write(files[-1], self._converted.split(piece))
                piece, size = {}, 0  # freed before the next tensor is read
        return files

    def _tensors(self, block: str, model: WorkingModel) -> LazyTensorDict:
        """Return a block's tensors. Each is read from the file when it is accessed."""
        names = {name: model.keys[name] for name in names_under(model.keys, [block])}
        return LazyTensorDict(self._converted.tensor, names)


@contextmanager
def open_checkpoint(options: Any, processes: Processes) -> Iterator[Checkpoint]:
    """Context with the folder of finished blocks, locked for this run.

    Args:
        options: `checkpoint_dir` and `resume` are used.
        processes: The processes. The first one locks and writes.

    Raises:
        CalibrationError: If it cannot be used, in every process.
    """
    if options.checkpoint_dir is None:
        yield Checkpoint()
        return
    setting = option("checkpoint_dir")
    folder, refusal = destination(options.checkpoint_dir), None
    with ExitStack() as stack:
        if processes.rank == 0:
            try:
                stack.enter_context(locked_folder(folder, setting, CHECKPOINT_FILES))
            except (CalibrationError, ReportError) as error:
                refusal = str(error)
        if refusal := processes.gather(refusal)[0]:
            raise CalibrationError(refusal)
        yield CheckpointFolder(folder, resume=options.resume, processes=processes)
