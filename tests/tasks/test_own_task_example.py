"""The example of docs/howto/own-pool.md, word for word, through FusionBench's command line."""

import json
import re
import runpy
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from cli_runs import fusion_bench

from fusion_bench_featcal.suites import image
from fusion_bench_featcal.tasks.definition import TaskDefinition, parse_tasks

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = ["method=featcal", "modelpool=my_pool", "method.samples_per_task=4", "method.presets={}"]
# one batch per task: the task's 144 test images
RUN += ["method.compare_with=[experts]", "fast_dev_run=true", "path.log_dir=run"]


def test_template_names_every_key_of_a_task():
    template = (REPOSITORY / "config/taskpool/clip-vit-own-tasks.yaml").read_text(encoding="utf-8")
    lines = re.findall(r"^# ( *[a-z_]+:.*)$", template, re.MULTILINE)
    tasks = yaml.safe_load("\n".join(lines))
    assert set(tasks["my_task"]) == {field.name for field in fields(TaskDefinition)}
    assert set(parse_tasks(tasks)) == {"my_task"}


@pytest.mark.slow
@pytest.mark.ci
def test_template_runs_as_it_is(tmp_path):
    (tmp_path / "config/taskpool").mkdir(parents=True)
    copied = tmp_path / "config/taskpool/mine.yaml"
    shutil.copy(REPOSITORY / "config/taskpool/clip-vit-own-tasks.yaml", copied)
    words = ["modelpool=clip-vit-mini_TA6", "modelpool.tasks=[mini_greek,mini_latin]"]
    fusion_bench([RUN[0], *words, "taskpool=mine", *RUN[2:4], *RUN[5:]], tmp_path)
    report = json.loads((tmp_path / "run/report.json").read_text(encoding="utf-8"))
    for row in report["rows"].values():
        assert list(row) == ["mini_greek", "mini_latin", "average"]


@pytest.mark.slow
def test_runs_as_it_stands(tmp_path):
    shutil.copytree(REPOSITORY / "examples/own_task", tmp_path / "work")
    pool = (tmp_path / "work/config/modelpool/my_pool.yaml").read_text(encoding="utf-8")
    assert f"```yaml\n{pool}```" in (REPOSITORY / "docs/howto/own-pool.md").read_text(
        encoding="utf-8"
    )
    script = runpy.run_path(str(tmp_path / "work" / "make_task.py"))
    script["write_task"](tmp_path / "work" / "my_alphabet")
    fusion_bench(RUN, tmp_path / "work")
    report = json.loads((tmp_path / "work/run/report.json").read_text(encoding="utf-8"))
    for row in report["rows"].values():
        assert list(row) == [*image.TA6, "my_alphabet", "average"]
    measured = json.loads(Path(image.path("MEASURED.json")).read_text(encoding="utf-8"))
    expert = measured["accuracies"]["all8"]["experts"]["mini_balinese"]
    # the files hold the suite's images and weights
    assert report["rows"]["experts"]["my_alphabet"] == pytest.approx(expert, abs=1.5 / 144)
