"""The checkpoints of one calibration, in a folder of its own."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.checkpoints.dependencies import differences
from fusion_bench_featcal.checkpoints.manifests import naming_damage, naming_room, read_manifest
from fusion_bench_featcal.checkpoints.sources import (
    WatchedSources,
    changed_models,
    joined_reads,
    take_recent,
)
from fusion_bench_featcal.digests import InputsDigest
from fusion_bench_featcal.files import ReportError, prepare_directory, remove_orphans, write_whole
from fusion_bench_featcal.json_files import digest_json, sealed_json
from fusion_bench_featcal.setting_checks import LINEAR_KERNELS
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tensor_files import read_tensors, write_tensors

log = logging.getLogger(__name__)

_FORMAT = 2
_RUN = "run.json"


class Checkpoints(WatchedSources):
    """Finished blocks of one calibration: new parameters, log records, and what they came from.

    `run.json` tells what the run depends on; `block-0000.json` and `block-0000.safetensors` are the
    first block's. A block's manifest is written last and stands for the whole. It lists a digest of
    every tensor of the base and the experts that was read for the block, so that nothing is read
    twice for a fingerprint.
    """

    def __init__(self, folder: Path, *, resume: bool, processes: Any) -> None:
        """Open a folder, made if need be; of several processes the first one writes.

        Raises:
            CalibrationError: If it cannot be written, its `run.json` is missing or damaged, or it
                holds checkpoints and `resume` is off.
        """
        super().__init__()
        self.folder = folder
        try:
            prepare_directory(folder, "method.checkpoint_dir")
        except ReportError as error:
            raise CalibrationError(str(error)) from error
        kept = sorted(folder.glob("block-*.json"))
        if not resume and (kept or (folder / _RUN).exists()):
            raise CalibrationError(
                f"method.checkpoint_dir {folder} holds the checkpoints of a run. Set "
                "method.resume=true to go on with it, or choose another folder, or remove this one"
            )
        self._processes, self._gather = processes, processes.gather
        self._then: dict[str, Any] = {}
        self._key = ""
        if kept or (folder / _RUN).exists():
            self._then = read_manifest(folder / _RUN)
            self._key = digest_json(self._then)
        self._now: dict[str, Any] = {}
        self._samples: dict[str, InputsDigest] = {}
        self._places: dict[str, int] = {}
        self._manifests: dict[str, dict[str, Any]] = {}
        self._logged = 0
        self._began = time.perf_counter()
        self._restored = 0
        self._restore_seconds = 0.0

    def watched_samples(self, task: str, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches, of which it is known what was in them."""
        self._samples[task] = InputsDigest()
        for batch in batches:
            self._samples[task].add(batch.inputs)
            yield batch

    def kernel(self) -> str | None:
        """Kernel of the run that is resumed; None where none has begun."""
        precision = self._then.get("precision")
        kernel = precision.get("linear_kernel") if isinstance(precision, dict) else None
        return kernel if kernel in LINEAR_KERNELS else None

    def compare(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Compare what this run depends on, or a part of it, with what the kept blocks do.

        Raises:
            CalibrationError: If it differs, with the differences, or a manifest is damaged.
        """
        self._now = {"format": _FORMAT, "processes": self._processes.size, **describe()}
        if self._then:
            machine = self._now.pop("machine", None)
            self._refuse(differences(self._then, self._now))
            for difference in differences(self._then, {"machine": machine} if machine else {}):
                log.warning("resumed on another machine, which may round otherwise: %s", difference)
        blocks = [block for stage in self._now.get("blocks", []) for block in stage]
        self._places = {block: place for place, block in enumerate(blocks)}
        self._manifests = self._find_blocks() if self._then else {}
        for rank, seen in enumerate(self._gather((self._key, list(self._manifests)))):
            if seen != (self._key, list(self._manifests)):
                raise CalibrationError(
                    f"process {rank} sees other checkpoints in method.checkpoint_dir {self.folder} "
                    "than this one: it must be a folder of a file system that all machines share"
                )

    def _find_blocks(self) -> dict[str, dict[str, Any]]:
        """The manifests of the finished blocks, up to the first that is missing."""
        manifests: dict[str, dict[str, Any]] = {}
        for block in self._places:
            path = self._path(block, "json")
            if not path.exists():
                break
            manifests[block] = read_manifest(path)
            if (manifests[block]["run"], manifests[block]["block"]) != (self._key, block):
                with naming_damage(path):
                    raise ReportError("it belongs to another run")
        return manifests

    def start(self) -> None:
        """Begin, when all samples are known: compare them; write what is not there yet.

        Raises:
            CalibrationError: If the samples differ, or another run has come between.
        """
        if "samples" in self._now:
            return
        own = {task: digest.text() for task, digest in self._samples.items()}
        digests = {task: text for part in self._gather(own) for task, text in part.items()}
        models = self._now.get("models", list(digests))
        self._now["samples"] = {task: digests[task] for task in models if task in digests}
        if self._then:
            self._refuse(differences(self._then, {"samples": self._now["samples"]}))
        if self._processes.rank == 0:
            self._begin_to_write()

    def _begin_to_write(self) -> None:
        if not self._then:
            if (self.folder / _RUN).exists():
                raise CalibrationError(
                    f"another run has begun to use method.checkpoint_dir {self.folder}; choose "
                    "another"
                )
            self._write_manifest(self.folder / _RUN, self._now)
            self._key = digest_json(self._now)
        for block in self._places:  # a block after one that is missing is calibrated anew
            if not self.has(block):
                self._path(block, "json").unlink(missing_ok=True)
        for prefix in (".block-", ".run.json."):
            remove_orphans(self.folder, prefix)

    def has(self, block: str) -> bool:
        """Return whether a block is kept, and all before it."""
        return block in self._manifests

    def restore(self, block: str, model: nn.Module, run_log: Any) -> None:
        """Load a block's parameters into the calibrated model.

        What was logged since the last block is replaced by what was logged then.

        Raises:
            CalibrationError: If its file is missing, damaged or does not fit the model.
        """
        manifest = self._manifests[block]
        path = self._path(block, "safetensors")
        parameters = model.state_dict()  # and statistics
        with naming_damage(path):
            tensors = read_tensors(path, manifest["parameters"])
            for name, tensor in tensors.items():
                known = parameters.get(name)
                if known is None or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                    raise ReportError(f"{name[:100]!r} does not fit the model")
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)
        run_log.records[self._logged :] = manifest["records"]
        self._logged = len(run_log.records)
        self._restored += 1
        self._restore_seconds = time.perf_counter() - self._began

    def confirm(self, block: str) -> None:
        """See that a restored block was made from the weights that the base and experts have now.

        Raises:
            CalibrationError: If not, naming them.
        """
        self._refuse([*changed_models(self._sources, self._manifests[block]["reads"])])
        take_recent(self._sources)

    def keep(self, block: str, model: nn.Module, names: Iterable[str], run_log: Any) -> None:
        """Keep a calibrated block: its new parameters by their names, and what was logged.

        Raises:
            CalibrationError: If it cannot be written.
        """
        reads = self._gather(take_recent(self._sources))
        if self._processes.rank == 0:
            stored = model.state_dict()  # statistics are no parameters
            tensors = {name: stored[name] for name in names}
            path = self._path(block, "safetensors")
            with naming_room(path, sum(tensor.nbytes for tensor in tensors.values())):
                digest = write_tensors(path, tensors)
            content = {
                "run": self._key,
                "block": block,
                "parameters": digest,
                "reads": joined_reads(reads, self._now["models"]),
                "records": run_log.plain_records(self._logged),
            }
            self._write_manifest(self._path(block, "json"), content)
        self._logged = len(run_log.records)

    def finish(self, run_log: Any) -> None:
        """Tell in the log how many blocks were restored."""
        if self._restored:
            record = {"blocks": self._restored, "seconds": self._restore_seconds}
            run_log.add("resumed", record)

    @staticmethod
    def _write_manifest(path: Path, content: Mapping[str, Any]) -> None:
        data = sealed_json(content).encode()
        with naming_room(path, len(data)):
            write_whole(path, data)

    def _path(self, block: str, kind: str) -> Path:
        return self.folder / f"block-{self._places[block]:04d}.{kind}"

    def _refuse(self, texts: list[str]) -> None:
        if texts:
            more = [f"and {len(texts) - 5} more"] if len(texts) > 5 else []
            texts = [
                text[:300].encode("utf-8", "backslashreplace").decode() for text in texts[:5]
            ] + more
            raise CalibrationError(
                f"method.checkpoint_dir {self.folder} holds the checkpoints of another run, which "
                f"differs in: {'; '.join(texts)}. Go on with what that run had, or choose another "
                "folder, or remove this one; nothing in it was changed"
            )
