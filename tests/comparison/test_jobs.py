"""Cells in other processes give equal tables, and dead processes lose no finished cell."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Deadly, Scale, finished_cells, method
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf
from process_group import in_forks

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.results import Report

METHODS = {"double": method(Scale)}


def run(folder: Path, methods: Any = METHODS, **choices: Any) -> int:
    """Run a comparison. Return the number of models that were evaluated in this process."""
    chosen = {
        "_target_": "fusion_bench_featcal.lab.compare.ComparisonAlgorithm",
        "upstream_mergers": {"simple_average": MERGERS["simple_average"]},
        "post_merging_methods": methods,
        "results_dir": str(folder),
        "references": [],
        **choices,
    }
    pools = {"modelpool": "model_pool", "taskpool": "SignTaskPool"}
    config = {pool: {"_target_": f"comparison_parts.{name}"} for pool, name in pools.items()}
    target = {"_target_": "comparison_parts.ConfiguredProgram", "_recursive_": False}
    program = instantiate(OmegaConf.create({**target, "method": chosen, **config}))
    program.run()
    return program.taskpool.evaluated


def table(folder: Path) -> Any:
    """All results of the reports."""
    report = Report.load(folder / "simple_average")
    items = {row: {t: v.tolist() for t, v in flags.items()} for row, flags in report.items.items()}
    return report.rows, report.samples, report.seeds, items


CLUSTER = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of distributed
@pytest.mark.parametrize(
    ("backend", "library", "options"), [("loky", "joblib", None), ("dask", "distributed", CLUSTER)]
)
def test_other_processes_give_the_same_table(
    backend: str, library: str, options: Any, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    # A single cell: each has its process, which imports torch.
    choices = {"post_merging": ["none"], "backend": backend, "backend_options": options}
    assert run(tmp_path / "there", **choices) == 0
    run(tmp_path / "here", post_merging=["none"])
    assert table(tmp_path / "there") == table(tmp_path / "here")
    assert finished_cells(tmp_path / "there").keys() == finished_cells(tmp_path / "here").keys()
    assert not list((tmp_path / "there" / "claims").iterdir())


@pytest.mark.slow
def test_a_cell_that_dies_is_run_once_more_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    methods = {
        "once": method(Deadly, folder=str(tmp_path), deaths=1),
        "ever": method(Deadly, folder=str(tmp_path), deaths=9),
        **METHODS,
    }
    message = r"1 of 4 cells failed.*simple_average, ever: its process died 2 times"
    with pytest.raises(CalibrationError, match=message):
        run(tmp_path / "cells", methods, jobs=2)
    report = Report.load(tmp_path / "cells" / "simple_average")
    assert list(report.rows) == ["simple_average", "once", "double"]
    deaths = [caplog.text.count(f"the process of cell simple_average--{n} died") for n in methods]
    assert deaths == [1, 2, 0] and not list((tmp_path / "cells" / "claims").iterdir())


def test_a_killed_comparison_resumes(tmp_path: Path) -> None:
    """Finished cells are not touched, the others are made."""
    methods = {**METHODS, "deadly": method(Deadly, folder=str(tmp_path), deaths=1)}
    assert in_forks(1, lambda _: run(tmp_path / "cells", methods)) == [-signal.SIGKILL]
    before = finished_cells(tmp_path / "cells")
    titles = sorted(name.rpartition("-")[0] for name in before)
    assert titles == ["simple_average--double", "simple_average--none"]
    assert run(tmp_path / "cells", methods) == 1
    assert before.items() < finished_cells(tmp_path / "cells").items()
    run(tmp_path / "fresh", methods)
    assert table(tmp_path / "cells") == table(tmp_path / "fresh")


def test_workers_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r"backend_options needs method\.backend=dask or ray"
    with pytest.raises(CalibrationError, match=message):
        run(tmp_path, backend_options={"address": "x"})
    monkeypatch.setitem(sys.modules, "ray", None)
    install = r"backend=ray needs pip install 'fusion_bench_featcal\[ray\]'"
    with pytest.raises(CalibrationError, match=install):
        run(tmp_path, backend="ray")
