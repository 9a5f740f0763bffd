"""Cells in other processes: the same table, deaths, and several drivers on one store."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Deadly, Scale, Waiting, method
from omegaconf import OmegaConf

from fusion_bench_featcal.lab.compare import jobs
from fusion_bench_featcal.lab.compare.jobs import Workers
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.settings import CalibrationError

TESTS = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(
        [str(TESTS / "kit"), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    )
}
METHODS = {"double": method(Scale)}


def program(folder: Path, methods: Any = METHODS, **choices: Any) -> Any:
    """A program whose pools are named by its config, as the command makes it."""
    chosen = {
        "_target_": "fusion_bench_featcal.lab.compare.ComparisonAlgorithm",
        "upstream_mergers": {"simple_average": MERGERS["simple_average"]},
        "post_merging_methods": methods,
        "results_dir": str(folder),
        **choices,
    }
    config = {
        "_target_": "comparison_parts.ConfiguredProgram",
        "method": chosen,
        "modelpool": {"_target_": "comparison_parts.model_pool"},
        "taskpool": {"_target_": "comparison_parts.SignTaskPool"},
    }
    from hydra.utils import instantiate

    return instantiate(OmegaConf.create(config), _recursive_=False)


def table(folder: Path) -> Any:
    """All that the reports have of results."""
    report = Report.load(folder / "simple_average")
    items = {row: {t: v.tolist() for t, v in flags.items()} for row, flags in report.items.items()}
    return report.rows, report.samples, report.seeds, items


def run(folder: Path, methods: Any = METHODS, **choices: Any) -> None:
    program(folder, methods, **choices).run()


def test_two_jobs_give_the_table_of_one(tmp_path: Path) -> None:
    two: dict[str, Any] = {"upstream_mergers": MERGERS, "post_merging": ["none"], "references": []}
    run(tmp_path / "one", **two)
    made = program(tmp_path / "two", jobs=2, **two)
    made.run()
    assert made.taskpool.evaluated == 0  # here
    assert table(tmp_path / "two") == table(tmp_path / "one")
    cells = {path.name for path in (tmp_path / "one" / "cells").iterdir()}
    assert cells == {path.name for path in (tmp_path / "two" / "cells").iterdir()}
    assert not list((tmp_path / "two" / "claims").iterdir())


@pytest.mark.slow
def test_a_cell_that_dies_is_run_once_more_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    methods = {
        "once": method(Deadly, folder=str(tmp_path), deaths=1),
        "ever": method(Deadly, folder=str(tmp_path), deaths=9),
        **METHODS,
    }
    message = r"1 of 6 cells failed.*simple_average, ever: its process died 2 times"
    with pytest.raises(CalibrationError, match=message):
        run(tmp_path / "cells", methods, jobs=2, references=["base", "experts"])
    report = Report.load(tmp_path / "cells" / "simple_average")
    assert list(report.rows) == ["base", "experts", "simple_average", "once", "double"]
    assert caplog.text.count("the process of cell simple_average--ever died") == 2
    assert caplog.text.count("the process of cell simple_average--once died") == 1
    assert not list((tmp_path / "cells" / "claims").iterdir())


_DRIVER = """
import sys
from pathlib import Path
from comparison_parts import Counting, method
from test_jobs import run
folder = Path(sys.argv[1])
methods = {f"m{n}": method(Counting, folder=str(folder), factor=n) for n in range(2, 8)}
run(folder / "cells", methods, references=[])
"""


@pytest.mark.slow
def test_several_drivers_do_no_cell_twice(tmp_path: Path) -> None:
    paths = ENVIRONMENT | {"PYTHONPATH": f"{Path(__file__).parent}:{ENVIRONMENT['PYTHONPATH']}"}
    drivers = [
        subprocess.Popen([sys.executable, "-c", _DRIVER, str(tmp_path)], env=paths)
        for _ in range(3)
    ]
    assert [driver.wait(600) for driver in drivers] == [0, 0, 0]
    assert sorted(path.name[:2] for path in tmp_path.glob("*.ran")) == [
        "m2",
        "m3",
        "m4",
        "m5",
        "m6",
        "m7",
    ]


@contextmanager
def dask_cluster(folder: Path, workers: int) -> Iterator[tuple[str, list[Any]]]:
    """A scheduler and workers as processes; yields the scheduler's file and the workers."""
    file = folder / "scheduler.json"
    python, where = [sys.executable, "-m"], ["--scheduler-file", str(file)]
    options: Any = {"env": ENVIRONMENT, "cwd": folder, "stdout": subprocess.DEVNULL}
    options["stderr"] = subprocess.DEVNULL
    command = [*python, "distributed.cli.dask_scheduler", *where, "--port", "0", "--no-dashboard"]
    started = [subprocess.Popen(command, **options)]
    try:
        while not file.exists():
            assert started[0].poll() is None
            time.sleep(0.1)
        command = [*python, "distributed.cli.dask_worker", *where, "--nthreads", "1", "--no-nanny"]
        command.append("--no-dashboard")
        started += [
            subprocess.Popen([*command, "--no-dashboard"], **options) for _ in range(workers)
        ]
        yield str(file), started[1:]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of distributed
def test_dask_gives_the_same_table_though_a_worker_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    methods = {"waiting": method(Waiting, folder=str(tmp_path)), **METHODS}
    with dask_cluster(tmp_path, workers=2) as (file, workers):
        made = program(
            tmp_path / "dask", methods, backend="dask", backend_options={"scheduler_file": file}
        )
        driver = kill_in_mid_cell(tmp_path, workers)
        made.run()
        driver.join()
    assert made.taskpool.evaluated == 0
    run(tmp_path / "here", methods)
    assert table(tmp_path / "dask") == table(tmp_path / "here")
    assert not list((tmp_path / "dask" / "claims").iterdir())


def kill_in_mid_cell(folder: Path, workers: list[Any]) -> Any:
    """Kill the worker that has begun to wait, then let the cell go on where it runs again."""
    import threading

    def kill() -> None:
        while not (folder / "begun").exists():
            time.sleep(0.05)
        (claim,) = (folder / "dask" / "claims").glob("*waiting*")
        pid = json.loads(claim.read_text())["pid"]
        assert pid in [worker.pid for worker in workers]
        os.kill(pid, signal.SIGKILL)
        (folder / "go_on").touch()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((1, "loky", {"address": "x"}), "backend_options needs method.backend=dask or ray"),
        ((2, "ray", None), r"method.backend=ray needs pip install 'fusion_bench_featcal\[ray\]'"),
    ],
)
def test_workers_that_cannot_be_are_refused(
    settings: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CalibrationError, match=message):
        Workers(*settings)


@pytest.mark.slow
def test_a_worker_of_another_kind_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"software": {}, "device": "cuda", "precision": "32-true"}
    monkeypatch.setattr(jobs, "describe_machine", lambda fabric: other)
    with pytest.raises(CalibrationError, match=r"the worker has .*, the driver .*cuda"):
        run(tmp_path / "two", backend="loky", references=[])


def test_pools_made_in_python_stay_in_this_process(tmp_path: Path) -> None:
    made = program(tmp_path, jobs=2)
    made.config = None
    with pytest.raises(CalibrationError, match=r"cannot be sent to other processes"):
        made.run()
