"""Log of a calibration, block by block."""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.files.json_files import json_lines

logger = logging.getLogger(__name__)

UNLIKE_SAMPLES = (
    "no task's samples fit its expert better than the samples of other tasks, so FeatCal+ uses "
    "only the experts' task vectors. Samples that resemble your real inputs may work better"
)


@dataclass(frozen=True)
class AsMerged:
    """Modules that were not calibrated -> number of their matrices in which experts differ.

    A module is listed if nothing inside it was calibrated, and its parent is not listed. Modules
    of several blocks are listed once, with `*` in place of the block's index.

    Attributes:
        modules: Modules in blocks, in towers and between towers, such as routed experts.
        ends: Embeddings and heads, which are never calibrated.
        compared: Whether the experts' tensors were compared. Otherwise all matrices count.
    """

    modules: Mapping[str, int] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)
    compared: bool = True

    @classmethod
    def in_records(cls, records: Sequence[Mapping[str, Any]]) -> Self:
        """Return the record of a log, or an empty one if the log has none."""
        found = (record for record in records if record["kind"] == "as_merged")
        values = next(found, {})
        return cls(**{name: value for name, value in values.items() if name != "kind"})

    def without(self, tensors: Iterable[str]) -> Self:
        """Return the record without the embeddings and heads that contain some tensors."""
        names = [*tensors]
        unused = (m for m in self.ends if not any(n.startswith(f"{m}.") for n in names))
        return replace(self, ends={module: self.ends[module] for module in unused})

    @property
    def title(self) -> str:
        """The relation of the modules to the experts."""
        if self.compared:
            return "modules left unchanged although experts differ in them"
        return "modules left unchanged even if experts differ in them (only names were read)"

    @property
    def names(self) -> list[str]:
        """All modules, with their numbers of matrices."""
        counts = {**self.modules, **self.ends}.items()
        return [name if count == 1 else f"{name} ({count} matrices)" for name, count in counts]

    @property
    def text(self) -> str:
        """All modules in one sentence."""
        return f"{self.title}: {', '.join(self.names)}"


@dataclass
class CalibrationLog:
    """Records of one calibration.

    - `engine`: the library that multiplies float32 matrices, and the processor.
    - `task`: block, task and number of samples. If the rule runs experts, also `rows` (positions
    that count in the block's output), the mean L2 drift after the block (Eq. 2), and the drift
    relative to the expert's feature norm (root mean square). After the last block also the squared
    drift in units of the variance of one direction of the expert's features (`distance`).
    - `module`: block, module, relative residual of the solve, and size of the update relative to
    the weight. FeatCal+ adds the ridge of least held-out error, and for the task-vector rows their
    mean `gamma`, both errors of the step that is solved from them alone (`e`, `eo`) and their
    weight (`f`, `rules/task_vector_rows.py`).
    - `slots`: block, module, number of a mixture's routed experts, number of routed experts without
    tokens (`idle`), median number of their `rows`, medians of the values of `module`, the
    `median_update`, and the largest update with the index of its routed expert (`largest`).
    - `balance`: the tasks' `distances` after a first calibration, and the `factors` of their
    weights.
    - `trust`: task, trust in its samples (`run/trust.py`), and the task whose samples fit the
    expert better (`fits`), if samples were exchanged.
    - `agreement`: agreement of all samples with their experts, and whether it is so small that only
    task vectors change weights (`refuted`).
    - `block`: block, seconds, and modules that keep their merged weights.
    - `as_merged`: modules that were not calibrated although experts differ in them (`AsMerged`).
    - `resumed`: number of blocks that an earlier run has finished. Their records come from that
    run.

    Attributes:
        family: Name of the family that divided the model into blocks.
        records: The records, in order.
    """

    family: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, record: dict[str, object]) -> None:
        """Append one record."""
        self.records.append({"kind": kind, **record})

    def add_as_merged(self, as_merged: AsMerged) -> None:
        """Append a record of the modules that were not calibrated, if there are any, and log it."""
        if as_merged.names:
            self.add("as_merged", asdict(as_merged))
            logger.log(logging.WARNING if as_merged.modules else logging.INFO, "%s", as_merged.text)

    def select(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all blocks together."""
        return sum(record["seconds"] for record in self.select("block"))

    @property
    def final_drift(self) -> dict[str, float]:
        """Each task's drift after the last block, relative to the expert's features."""
        return final_drift(self.records)

    def plain_records(self, start: int = 0) -> list[dict[str, Any]]:
        """Return the records from index `start` on as JSON values, with null for infinity."""
        return json.loads(json.dumps(self.records[start:]), parse_constant=lambda _: None)

    def write(self, path: str | Path) -> None:
        """Write one JSON object per line, atomically.

        Args:
            path: The file to write.

        Raises:
            ReportError: If the file cannot be written.
        """
        write_atomic(Path(path), json_lines(self.plain_records()))


def final_drift(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each task's drift after the last block, relative to the expert's features.

    The result is empty for rules that do not run the experts. `records` are the log's.
    """
    last = {record["task"]: record for record in records if record["kind"] == "task"}
    drifts = {task: record.get("relative_drift") for task, record in last.items()}
    return {t: drift for t, drift in drifts.items() if drift is not None and math.isfinite(drift)}


def distances(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each task's distance from its expert after the last block, if it is known."""
    known = (r for r in records if r["kind"] == "task" and r.get("distance") is not None)
    return {record["task"]: record["distance"] for record in known}


def fit_no_task(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the samples fit no task, by the log's records."""
    return any(record["kind"] == "agreement" and record["refuted"] for record in records)


def exchanged_samples(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a sentence on each task whose samples were exchanged with those of another one.

    Args:
        records: Records of a log. Only records of kind `trust` are used.
    """
    text = "its expert fits the samples of task {} better than its own. Were they swapped?"
    return {r["task"]: text.format(r["fits"]) for r in records if r.get("fits")}
