"""The example of docs/tasks.md, word for word, through FusionBench's command line."""

import json
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from cli_runs import fusion_bench

from fusion_bench_featcal.example_files import copy_example
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.tasks.definition import TaskDefinition, parse_tasks

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = [
    "method=featcal",
    "modelpool=my_pool",
    "method.samples_per_task=4",
    "method.presets={}",
    "fast_dev_run=true",  # one batch per task: the task's 144 test images
    "path.log_dir=run",
]
EXAMPLE = re.compile(r"```yaml\n(# config/modelpool/my_pool\.yaml\n.*?)```", re.DOTALL)
MEASURED = json.loads(Path(image.path("MEASURED.json")).read_text(encoding="utf-8"))


def example() -> str:
    (config,) = EXAMPLE.findall((REPOSITORY / "docs/tasks.md").read_text(encoding="utf-8"))
    return config


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the images and the expert of the example, and its YAML."""
    folder = tmp_path_factory.mktemp("own_task")
    copy_example("own-task", folder)
    script = runpy.run_path(str(folder / "make_task.py"))
    script["write_task"](folder / "my_alphabet")
    return folder


def test_the_pages_example_is_the_file_and_takes_fewer_than_twenty_lines():
    file = REPOSITORY / "examples/own_task/config/modelpool/my_pool.yaml"
    assert file.read_text(encoding="utf-8") == example()
    assert len(example().splitlines()) < 20


def test_template_names_every_key_of_a_task():
    template = (REPOSITORY / "config/taskpool/clip-vit-own-tasks.yaml").read_text(encoding="utf-8")
    lines = re.findall(r"^# ( *(?:tasks:|  [a-z_]+:.*))$", template, re.MULTILINE)
    tasks = yaml.safe_load("\n".join(lines))["tasks"]
    assert set(tasks["my_task"]) == {field.name for field in fields(TaskDefinition)}
    assert set(parse_tasks(tasks)) == {"my_task"}


@pytest.mark.slow
def test_runs_as_it_stands(workplace):
    fusion_bench([*RUN, "method.compare_with=[experts,merged]"], workplace)
    rows = json.loads((workplace / "run/report.json").read_text(encoding="utf-8"))["rows"]
    for row in rows.values():
        assert list(row) == [*image.TA6, "my_alphabet", "average"]
    expert = MEASURED["accuracies"]["all8"]["experts"]["mini_balinese"]
    # the files hold the suite's images and weights
    assert rows["experts"]["my_alphabet"] == pytest.approx(expert, abs=1.5 / 144)
