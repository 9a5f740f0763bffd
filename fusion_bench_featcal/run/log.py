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


@dataclass(frozen=True)
class AsMerged:
    """Modules that stay as merged -> number of their matrices in which experts differ.

    Each is the outermost one that nothing calibrated is in. Modules of several blocks are one, with
    `*` for the block's number.

    Attributes:
        modules: Modules of blocks, towers and between towers, such as routed experts.
        ends: Embeddings and heads, which stay in every model.
        compared: Whether experts were compared. Otherwise all matrices count.
    """

    modules: Mapping[str, int] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)
    compared: bool = True

    @classmethod
    def in_records(cls, records: Sequence[Mapping[str, Any]]) -> Self:
        """Return the one in the records of a log. Without such a record nothing stays."""
        found = (record for record in records if record["kind"] == "as_merged")
        values = next(found, {})
        return cls(**{name: value for name, value in values.items() if name != "kind"})

    def without(self, tensors: Iterable[str]) -> Self:
        """Return it without the embeddings and heads that some tensors belong to."""
        names = [*tensors]
        ends = {
            module: count
            for module, count in self.ends.items()
            if not any(name.startswith(f"{module}.") for name in names)
        }
        return replace(self, ends=ends)

    @property
    def title(self) -> str:
        """The relation of the modules to the experts."""
        if self.compared:
            return "modules that stay as merged although experts differ in them"
        return "modules that stay as merged even if experts differ in them (names alone were read)"

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

    - `engine`: library that multiplies float32 matrices, and the processor.
    - `task`: block, task, number of samples, and if the rule runs experts also rows (positions that
    count in its output), the mean L2 drift behind the block (Eq. 2), and the drift relative to the
    expert's feature norm (root mean square). Behind the last block also the squared drift in units
    of the variance of one direction of the expert's features (`distance`).
    - `module`: block, module, relative residual of the solve, size of the update relative to the
    weight. FeatCal+ adds the ridge of least held-out error, the mean `gamma` of rows from weights,
    both errors of the step that they alone ask for (`e`, `eo`), and how far they count (`f`,
    `rules/weight_rows.py`).
    - `slots`: block, module, number of a mixture's routed experts, of those without tokens
    (`idle`), median number of their `rows`, medians of the figures of `module` and of
    `median_update`, and the largest update with the number of its routed expert (`largest`).
    - `balance`: `distances` of tasks behind a first calibration, and `factors` of their weights.
    - `trust`: task, trust in its samples (`trust.py`), and the task whose samples its expert fits
    better (`fits`), if samples were exchanged.
    - `block`: block, seconds, modules that keep their merged weights.
    - `as_merged`: modules that were not calibrated although experts differ in them (`AsMerged`).
    - `resumed`: number of blocks that an earlier run has finished, whose records come from it.

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
        """Append a record of modules that stay as merged, if there are any, and log them."""
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
        """Each task's drift behind the last block, relative to the expert's features."""
        return final_drift(self.records)

    def plain_records(self, start: int = 0) -> list[dict[str, Any]]:
        """Return the records from index `start` on, in the form for files.

        An infinite condition estimate becomes null, since JSON has no infinity.
        """
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
    """Return each task's drift behind the last block relative to the expert's features.

    `records` are those of a log. Rules that do not run the experts have none.
    """
    last = {record["task"]: record for record in records if record["kind"] == "task"}
    drifts = {task: record.get("relative_drift") for task, record in last.items()}
    return {t: drift for t, drift in drifts.items() if drift is not None and math.isfinite(drift)}


def distances(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each task's distance from its expert behind the last block, if it is known."""
    return {
        record["task"]: record["distance"]
        for record in records
        if record["kind"] == "task" and record.get("distance") is not None
    }


def exchanged_samples(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a sentence on each task whose samples were exchanged with those of another one.

    Args:
        records: Records of a log, of which those of kind `trust` count.
    """
    return {
        record["task"]: f"its expert fits the samples of task {record['fits']}. Were the samples "
        "exchanged?"
        for record in records
        if record.get("fits")
    }
