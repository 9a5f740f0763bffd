"""Plan of a run: files and bytes to download, to read and to write, before anything is loaded."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.masking import masked
from fusion_bench_featcal.errors.plurals import bytes_text, pluralize
from fusion_bench_featcal.files import existing, free_space
from fusion_bench_featcal.files.budgets import budget_in_bytes
from fusion_bench_featcal.models.hub import hub_error, hub_models, patiently
from fusion_bench_featcal.results.tables import Table
from fusion_bench_featcal.run.log import AsMerged

_NO_DATA = (".md", ".py", ".gitattributes")


@dataclass(frozen=True)
class Download:
    """A model or data set to fetch. Files and bytes are None if the hub cannot be asked."""

    name: str
    files: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """Amounts of a run, in bytes. None stands for an unknown one.

    Attributes:
        downloads: Models and data sets that the hub's cache lacks.
        read: To read from experts, at most.
        output: The calibrated model.
        writes: Folder -> bytes that the run writes there: the model, finished blocks.
        rows: Row of the results -> number of times that it is made.
        strengths: Row of the results -> its strengths by name, if it has any.
        jobs: Number of jobs. The amounts are of a sweep's first job, and rows of all jobs.
        as_merged: Modules that a calibration leaves unchanged.
    """

    downloads: tuple[Download, ...] = ()
    read: int | None = None
    output: int | None = None
    writes: Mapping[str, int | None] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    strengths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    jobs: int = 1
    as_merged: AsMerged = field(default_factory=AsMerged)

    @property
    def free(self) -> dict[str, int]:
        """Folder -> free space of its disk, for the hub's cache and the output."""
        folders = ([constants.HF_HUB_CACHE] if self.downloads else []) + [*self.writes]
        return {folder: free_space(Path(folder)) for folder in folders}

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {**asdict(self), "free": self.free}


def model_downloads(locations: Mapping[str, str]) -> tuple[list[Download], dict[str, int | None]]:
    """Return the models to fetch, and the bytes of every model's weights by option.

    Args:
        locations: The option that names a model -> path or hub id.

    Raises:
        CalibrationError: If the hub has no such model.
    """
    downloads, sizes = dict[str, Download](), dict[str, int | None]()
    for option, location in locations.items():
        try:
            model = hub_models({f"{option}={location}": location}).get(location)
        except CalibrationError as error:
            if isinstance(error.__cause__, RepositoryNotFoundError):
                raise
            downloads[location], sizes[option] = Download(location), None
            continue
        if model is not None and (missing := model.missing):
            downloads[location] = Download(location, len(missing), sum(missing.values()))
        folder = Path(location).expanduser() if model is None else model.folder
        paths = [folder] if folder.is_file() else folder.glob("*")
        files = model.files if model is not None else {}
        files = files or {file.name: file.stat().st_size for file in paths}
        weights = [size for name, size in files.items() if name.endswith((".safetensors", ".bin"))]
        sizes[option] = sum(weights) or None
    return list(downloads.values()), sizes


def data_sets_to_fetch(ids: Iterable[str]) -> list[Download]:
    """Return the data sets of the hub that its cache lacks, each with all of its files.

    Raises:
        CalibrationError: If the hub has no such data set. A name without / may be a file format.
    """
    downloads = []
    cache = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")
    for name in dict.fromkeys(ids):
        if os.path.exists(name) or Path(cache, name.replace("/", "___")).exists():
            continue
        try:
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            query = partial(HfApi().dataset_info, name, files_metadata=True, timeout=timeout)
            info = patiently(query)
        except Exception as error:  # the client and the network raise many types
            if isinstance(error, RepositoryNotFoundError) and "/" in name:
                raise hub_error(error, f"data {name}", is_lookup=True) from error
            downloads.append(Download(name))
            continue
        files = [f for f in info.siblings or () if not f.rfilename.endswith(_NO_DATA)]
        downloads.append(Download(name, len(files), sum(file.size or 0 for file in files)))
    return downloads


def read_within(read: int | None, budget: float | str | None) -> int | None:
    """Return the bytes to read from experts, at most, under `expert_read_budget`."""
    return read if read is None or budget is None else min(read, budget_in_bytes(budget, read))


def check_room(writes: Mapping[str, int | None]) -> None:
    """Refuse a run whose model and finished blocks have no room on their disks together.

    Args:
        writes: Folder -> bytes that are written there, None if unknown. Blocks that an
            interrupted run has finished are there already.

    Raises:
        CalibrationError: Naming the folders.
    """
    disks: dict[int, dict[str, int]] = {}
    for folder, size in writes.items():
        disk = existing(Path(folder)).stat().st_dev
        finished = sum(file.stat().st_size for file in Path(folder).glob("block-*.safetensors"))
        disks.setdefault(disk, {})[folder] = max(0, (size or 0) - finished)
    for sizes in disks.values():
        needed, free = sum(sizes.values()), free_space(Path(next(iter(sizes))))
        if free < needed:
            raise CalibrationError(
                f"nothing was calibrated: the run needs {bytes_text(needed)} of disk space in "
                f"{' and '.join(sizes)}, but {bytes_text(free)} are free. Name a folder on another "
                "disk"
            )


def show_plan(plan: Plan) -> None:
    """Print a plan's table."""
    sizes: list[tuple[str, int | None]] = [
        (f"to fetch: {masked(download.name)}", download.bytes) for download in plan.downloads
    ]
    if any(size is not None for _, size in sizes):
        sizes.append(("to fetch, without unknown sizes", sum(size or 0 for _, size in sizes)))
    sizes += [("read from experts, at most", plan.read), ("the calibrated model", plan.output)]
    sizes += [(f"free in {folder}", size) for folder, size in plan.free.items()]
    lines = [(label, ["unknown" if size is None else bytes_text(size)]) for label, size in sizes]
    for row, times in plan.rows.items():
        strengths = (f"{name}={value:g}" for name, value in plan.strengths.get(row, {}).items())
        amount = "once" if times == 1 else pluralize(times, "time")
        lines.append((", ".join([f"model {row}", *strengths]), [amount]))
    if plan.jobs > 1:
        lines.append(("jobs of the sweep (sizes and settings of the first job)", [str(plan.jobs)]))
    if not plan.downloads:
        lines.append(("to fetch", ["nothing"]))
    Table("plan", ["amount"], lines).show()
    if plan.as_merged.names:
        print(plan.as_merged.text)
    if any(download.files is None for download in plan.downloads):
        print("unknown: nothing of that name is here, and the hub does not describe it")
