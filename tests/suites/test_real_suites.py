"""The suites of real pretrained weights, from the command to the table."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import fusion_bench
from reports import featcal

from fusion_bench_featcal.results import join_folders

pytestmark = [pytest.mark.real, pytest.mark.slow]
SUITES = {
    "minilm_TA6": "minilm",
    "mpnet_TA6": "mpnet",
    "dinov2_small_TA4": "dinov2-small",
    "smollm2_TA4": "smollm2",
    "whisper_TA4": "whisper-5s",
}
RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("suite", SUITES)
def test_featcal_plus_repairs_task_arithmetic(suite: str, tmp_path: Path):
    """Base and experts score as recorded, and FeatCal+ as in docs/results."""
    words = ["method=featcal/plus", f"modelpool={suite}", "method.samples_per_task=64"]
    fusion_bench([*words, f"path.log_dir={tmp_path / 'run'}"], tmp_path)
    (run,) = join_folders([tmp_path / "run"]).runs.values()
    scores = {name: averages["average"] for name, averages in run.accuracy.items()}
    file = featcal("suite", "path", f"{SUITES[suite]}/MEASURED.json").out.strip()
    measured: Any = json.loads(Path(file).read_text())
    for name in ("base", "experts", "task_arithmetic"):
        # other test rows, and near-ties that another processor decides otherwise
        assert scores[name] == pytest.approx(measured["accuracies"][name]["average"], abs=0.04)
    (published,) = join_folders([RESULTS / suite / "seed-42"]).runs.values()
    expected = published.accuracy["task_arithmetic/featcal_plus"]["average"]
    # another processor decides a few near-ties otherwise
    assert scores["featcal_plus"] == pytest.approx(expected, abs=0.01)
