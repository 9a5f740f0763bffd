"""Log of a calibration, block by block, and how far it is."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.json_files import sealed_lines


@dataclass
class CalibrationLog:
    """Records of one calibration.

    The record of kind `plan`, the first, has the hash of the plan of reads, its limit, the bytes of
    a full read and of the planned one, and the number of modules left out by expert. The record of
    kind `engine` says what multiplied matrices. One of kind `rows`, with another update than the
    paper's, says what rows were weighted by. One of kind `inputs` has task, stage and
    expert_bytes: what reading the expert up to its first block took. One of kind `task` has block,
    task, samples, rows (positions that count), the mean L2 drift of the block's output before and
    after its update (Eq. 2) and the same relative to the expert's feature norm (root mean square;
    None where drift is not logged), seconds and expert_bytes. One of kind `module` has block,
    module, the solve's relative residual, the condition estimate and the task weights; or, with
    another update than the paper's, whether the module writes to the hidden features and, chosen by
    held-out error, the lambdas of both stages (None: infinite); in an expert of a mixture also
    `rows`, the counted rows of each task. One of kind `routed` has block, module and `rows` of a
    module that stays as merged, as too few reach it. One of kind `block` has block, seconds and the
    modules left as merged. One of kind `resumed`, in a run that went on from checkpoints, has the
    number of restored blocks and the seconds until the last of them was there; the records of these
    blocks are those of the run that calibrated them.

    Attributes:
        family: Name of the family that cut the model.
        records: The records, in order.
    """

    family: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, record: dict[str, Any]) -> None:
        """Append one record."""
        self.records.append({"kind": kind, **record})

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all blocks together."""
        return sum(record["seconds"] for record in self.of_kind("block"))

    @property
    def expert_bytes(self) -> int:
        """Bytes of expert weights that were read."""
        kinds = ("inputs", "task")
        return sum(r["expert_bytes"] for kind in kinds for r in self.of_kind(kind))

    def plain_records(self, start: int = 0) -> list[dict[str, Any]]:
        """The records from one on, as files hold them.

        A condition estimate may be infinite, which JSON cannot hold: there it is null.
        """
        return json.loads(json.dumps(self.records[start:]), parse_constant=lambda _: None)

    def write(self, path: str | Path) -> None:
        """Write one JSON object a line, atomically, with a digest of them all.

        Args:
            path: The file to write.

        Raises:
            ReportError: The file cannot be written.
        """
        write_atomic(Path(path), sealed_lines(self.plain_records()))


@dataclass
class Reporter:
    """Tells how far a calibration is.

    Attributes:
        log: The log.
        progress: A progress bar.
        processes: The processes, which say what they wait for.
        place: What is worked on, for messages.
        name: Name of the work.
    """

    log: CalibrationLog
    progress: Any
    processes: Any
    name: str = "FeatCal"
    place: str = "the start"

    def at(self, place: str) -> None:
        """Say what is worked on now."""
        self.place = self.processes.doing = place
        self.progress.set_description(f"{self.name} {place}")
