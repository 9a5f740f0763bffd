"""Cells as independent jobs, in processes of this machine or workers of a Dask or Ray cluster."""

import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from fusion_bench.utils import instantiate
from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import BrokenProcessPool
from omegaconf import OmegaConf

from fusion_bench_featcal.lab.compare.cells import CellMaker, Failure, Outcome
from fusion_bench_featcal.lab.compare.keys import Cell, describe_machine
from fusion_bench_featcal.lab.compare.store import ResultStore
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

LOKY, DASK, RAY = BACKENDS = ("loky", "dask", "ray")
_TRIES = 3  # the claim reports a cell whose process has died twice
# A cell seeds and measures its whole process.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A cell with all the inputs that a process needs to run it."""

    cell: Cell
    config: str  # JSON of the program's resolved config
    run: str  # name of the driver's run
    folders: tuple[Path, Path | None]  # of finished results, and of FusionBench's reports
    machine: Mapping[str, Any]  # as recorded in the fingerprint
    threads: int  # of torch. Their number affects the last bits of results
    directory: str  # the working directory for relative paths
    modules: Sequence[str]  # Python's module search path

    @classmethod
    def of(cls, cell: Cell, maker: CellMaker, config: str, run: str) -> "Job":
        """Return the job for a cell that `maker` would run in this process."""
        folders = maker.store.folder.resolve(), maker.log_dir and maker.log_dir.resolve()
        machine = describe_machine(maker.inputs.fabric)
        here = torch.get_num_threads(), os.getcwd(), tuple(sys.path)
        return cls(cell, config, run, folders, machine, *here)

    def work(self) -> Outcome:
        """Run the cell in this process, which is a worker."""
        with _ONE_AT_A_TIME:
            try:
                os.chdir(self.directory)
                sys.path += [path for path in self.modules if path not in sys.path]
                torch.set_num_threads(self.threads)
                maker = _maker(self.config, *self.folders)
                machine = describe_machine(maker.inputs.fabric)
                if machine != self.machine:
                    raise CalibrationError(
                        f"the worker has {machine}, the driver {dict(self.machine)}: "
                        "set fabric.accelerator, or install the same versions"
                    )
            except Exception as error:
                return Failure.of(error)
            return maker.run(self.cell, self.run)


@lru_cache(maxsize=1)
def _maker(config: str, store: Path, log_dir: Path | None) -> CellMaker:
    """Create a program with its pools, as the command does, and its maker of cells."""
    content: Any = OmegaConf.create(json.loads(config))
    program: Any = instantiate(content)
    pools = [
        program._instantiate_and_setup(
            content[pool], f"fusion_bench.compat.{pool}.load_{pool}_from_config"
        )
        for pool in ("modelpool", "taskpool")
    ]
    method = program._instantiate_and_setup(content.method)
    grid, inputs = method.grid(content.modelpool), method.inputs(*pools)
    seed = method.settings.seed
    return CellMaker(grid.cells, inputs, ResultStore(store), seed, program, log_dir)


class Workers:
    """Processes for running cells, chosen by `jobs`, `backend` and `backend_options`.

    Attributes:
        run: Name of this run. A cell whose process dies is tried twice per run.
        are_apart: False if cells run in this process.
    """

    def __init__(self, jobs: int, backend: str | None, options: Mapping[str, Any] | None) -> None:
        """Choose the workers. Nothing is started.

        Raises:
            CalibrationError: If the backend's library is missing or the options do not fit.
        """
        self.run = uuid.uuid4().hex
        self._jobs, self._backend = jobs, backend or (LOKY if jobs > 1 else None)
        self._options = dict(options or {})
        self.are_apart = self._backend is not None
        self._alive: set[ProcessPoolExecutor] = set()
        if self._options and self._backend not in (DASK, RAY):
            raise CalibrationError("method.backend_options needs method.backend=dask or ray")
        if self._backend in (DASK, RAY):
            _cluster_library(self._backend)

    def outcomes(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run jobs and return their outcomes in order.

        A job whose process dies runs once more. The workers end with an exception, such as an
        interruption.
        """
        if not jobs:
            return []
        if self._backend == LOKY:
            with parallel_config(backend="threading", n_jobs=self._jobs), self._ended():
                return _parallel(self._in_its_process, jobs)
        with _cluster(str(self._backend), self._options):
            return _parallel(Job.work, jobs)

    def _in_its_process(self, job: Job) -> Outcome:
        """Run a job in a separate process, so that its costs are measured alone."""
        log.info("cell %s", job.cell.title)
        for _ in range(_TRIES):
            pool = ProcessPoolExecutor(max_workers=1, initializer=_silence)
            self._alive.add(pool)
            try:
                return pool.submit(job.work).result()
            except BrokenProcessPool as error:
                log.warning("the process of cell %s died: %s", job.cell.title, error)
            finally:
                self._alive.discard(pool)
                pool.shutdown(kill_workers=True)
        return Failure(f"its process died {_TRIES} times")

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for pool in list(self._alive):
                pool.shutdown(kill_workers=True)


def _silence() -> None:
    """Discard this process's output, because output of several cells would be mixed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _parallel(work: Callable[[Job], Outcome], jobs: Sequence[Job]) -> list[Outcome]:
    parallel: Any = Parallel
    return parallel(batch_size=1, pre_dispatch="all")(delayed(work)(job) for job in jobs)


def _cluster_library(backend: str) -> Any:
    try:
        if backend == DASK:
            import distributed as library  # type: ignore[import-not-found]
        else:
            import ray as library  # type: ignore[import-not-found]
    except ImportError as error:
        raise CalibrationError(
            f"method.backend={backend} needs pip install 'fusion_bench_featcal[{backend}]'"
        ) from error
    return library


@contextmanager
def _cluster(backend: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Context in which joblib's jobs run on all workers of a cluster."""
    library = _cluster_library(backend)
    if backend == DASK:
        with (
            library.Client(**options) as client,
            parallel_config(backend=DASK, n_jobs=-1, client=client),
        ):
            yield
        return
    import ray.util.joblib  # type: ignore[import-not-found]

    library.init(**options)
    ray.util.joblib.register_ray()
    try:
        with parallel_config(backend=RAY, n_jobs=-1):
            yield
    finally:
        library.shutdown()
