"""The runs that others can repeat, on a mirror of the hub, and their results as lm-eval's files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from configs import REPOSITORY
from hub_mirror import Mirror
from stock_pools.stand_ins import StandIns
from test_hub_commands import add_pool

from fusion_bench_featcal.results import read_run
from fusion_bench_featcal.results.lines import write_run
from fusion_bench_featcal.results.run import Run

SCRIPT = REPOSITORY / "examples" / "proofs.sh"


@pytest.mark.parametrize("name", ["mergebench", "clip", "tall20", "mteb"])
def test_commands_are_listed(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), "--list", name, str(tmp_path / "out")],
        text=True, capture_output=True, check=True,
    )  # fmt: skip
    commands = done.stdout.splitlines()
    assert all(line.split()[0] in ("fusion_bench", "featcal", "python") for line in commands)
    assert len(commands) == (2 if name == "mteb" else 3)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_proof_on_clip_ends_with_one_table(tmp_path: Path) -> None:
    with Mirror() as mirror:
        add_pool(mirror, StandIns(tmp_path / "made"))
        environment = mirror.environment(tmp_path / "home") | {"OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", str(SCRIPT), "clip", "out", "method.samples_per_task=4"],
            cwd=tmp_path, env=environment, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    rows = {row.name for part in ("mergers", "repairs") for row in
            read_run(tmp_path / "out" / part).rows}  # fmt: skip
    mergers = {"task_arithmetic", "ties_merging", "swudi", "regmean_plusplus"}
    assert rows == {"base", "experts", *mergers, "featcal", "featcal_plus"}
    table = (tmp_path / "out" / "table" / "report.md").read_text()
    assert all(name in table for name in rows)


def test_results_of_lm_eval_become_its_files(tmp_path: Path) -> None:
    run = Run(suite="pool", merger="task_arithmetic")
    scores = {"accuracy": {"gsm8k": 0.5}, "exact_match,strict-match": {"gsm8k": 0.25}}
    for name in ("task_arithmetic", "featcal_plus"):
        run.add_row(name, scores)
    write_run(tmp_path / "run", run)
    script = REPOSITORY / "examples" / "lm_eval_json.py"
    words = [sys.executable, str(script), str(tmp_path / "run"), str(tmp_path / "out")]
    subprocess.run(words, check=True)
    content = json.loads((tmp_path / "out" / "featcal_plus" / "results.json").read_text())
    expected = {"alias": "gsm8k", "exact_match,strict-match": 0.25}
    assert content["results"] == {"gsm8k": expected}
    assert (tmp_path / "out" / "task_arithmetic" / "results.json").is_file()
    write_run(tmp_path / "images", Run(suite="pool", merger="task_arithmetic"))
    for folder, reason in (("images", "no metrics of lm-eval"), ("empty", "no run.json")):
        words = [sys.executable, str(script), str(tmp_path / folder), str(tmp_path / "none")]
        done = subprocess.run(words, text=True, capture_output=True, check=False)
        assert done.returncode == 1 and reason in done.stderr and "Traceback" not in done.stderr
