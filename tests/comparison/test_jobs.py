"""Cells in other processes give equal tables, and dead processes lose no finished cell."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Deadly, Scale, Waiting, method
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.settings import CalibrationError

METHODS = {"double": method(Scale)}
MERGER = {"simple_average": MERGERS["simple_average"]}
PATHS = os.pathsep.join(map(str, [Path(__file__).parent, Path(__file__).parents[1] / "kit"]))
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([PATHS, *sys.path])}
QUIET: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": ENVIRONMENT}


def program(folder: Path, methods: Any = METHODS, **choices: Any) -> Any:
    """A program whose pools are named by its config, as the command makes it."""
    chosen = {
        "_target_": "fusion_bench_featcal.lab.compare.ComparisonAlgorithm",
        "upstream_mergers": MERGER,
        "post_merging_methods": methods,
        "results_dir": str(folder),
        "references": [],
        **choices,
    }
    pools = {"modelpool": "model_pool", "taskpool": "SignTaskPool"}
    config = {pool: {"_target_": f"comparison_parts.{name}"} for pool, name in pools.items()}
    target = {"_target_": "comparison_parts.ConfiguredProgram", "_recursive_": False}
    return instantiate(OmegaConf.create({**target, "method": chosen, **config}))


def run(folder: Path, methods: Any = METHODS, **choices: Any) -> Any:
    driver = program(folder, methods, **choices)
    driver.run()
    return driver


def start(folder: Path, methods: Any) -> subprocess.Popen[str]:
    """A comparison in another process, which a test may kill."""
    code = "import json, sys; from pathlib import Path; from test_jobs import run; "
    code += "run(Path(sys.argv[1]), json.loads(sys.argv[2]))"
    return subprocess.Popen([sys.executable, "-c", code, folder, json.dumps(methods)], **QUIET)


def table(folder: Path) -> Any:
    """All results of the reports."""
    report = Report.load(folder / "simple_average")
    items = {row: {t: v.tolist() for t, v in flags.items()} for row, flags in report.items.items()}
    return report.rows, report.samples, report.seeds, items


def finished(folder: Path) -> dict[str, int]:
    files = folder.glob("cells/*/result.json")
    return {file.parent.name: file.stat().st_mtime_ns for file in files}


@pytest.mark.slow
def test_another_process_gives_the_same_table(tmp_path: Path) -> None:
    # A single cell: each has its process, which imports torch.
    driver = run(tmp_path / "worker", backend="loky", post_merging=["none"])
    run(tmp_path / "here", post_merging=["none"])
    assert driver.taskpool.evaluated == 0  # here
    assert table(tmp_path / "worker") == table(tmp_path / "here")
    assert finished(tmp_path / "here").keys() == finished(tmp_path / "worker").keys()
    assert not list((tmp_path / "worker" / "claims").iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of distributed
def test_a_dask_cluster_gives_the_same_table(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    options: Any = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        address = {"address": cluster.scheduler_address}
        driver = run(tmp_path / "dask", backend="dask", backend_options=address)
    run(tmp_path / "here")
    assert driver.taskpool.evaluated == 0  # here
    assert table(tmp_path / "dask") == table(tmp_path / "here")
    assert not list((tmp_path / "dask" / "claims").iterdir())


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


@pytest.mark.slow
def test_a_killed_comparison_resumes(tmp_path: Path) -> None:
    """Finished cells are not touched, the others are made."""
    methods = {**METHODS, "waiting": method(Waiting, folder=str(tmp_path))}
    driver = start(tmp_path / "cells", methods)
    try:
        while not (tmp_path / "begun").exists():
            assert driver.poll() is None, "it ended before"
            time.sleep(0.05)
    finally:
        driver.kill()
        driver.wait()
    before = finished(tmp_path / "cells")
    titles = sorted(name.rpartition("-")[0] for name in before)
    assert titles == ["simple_average--double", "simple_average--none"]
    (tmp_path / "go_on").touch()
    assert run(tmp_path / "cells", methods).taskpool.evaluated == 1
    assert before.items() < finished(tmp_path / "cells").items()
    run(tmp_path / "fresh", methods)
    assert table(tmp_path / "cells") == table(tmp_path / "fresh")


def test_workers_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        CalibrationError, match=r"backend_options needs method\.backend=dask or ray"
    ):
        run(tmp_path, backend_options={"address": "x"})
    monkeypatch.setitem(sys.modules, "ray", None)
    install = r"backend=ray needs pip install 'fusion_bench_featcal\[ray\]'"
    with pytest.raises(CalibrationError, match=install):
        run(tmp_path, backend="ray")
    driver = program(tmp_path, jobs=2)
    driver.config = None  # pools made in Python
    with pytest.raises(CalibrationError, match=r"cannot be sent to other processes"):
        driver.run()
