"""The example of docs/tasks.md, word for word, through FusionBench's command line."""

import json
import re
import runpy
import shutil
import subprocess
import sys
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


@pytest.mark.slow
def test_an_expert_trained_as_printed_takes_the_bundled_one_s_place(workplace, tmp_path):
    folder = shutil.copytree(workplace, tmp_path / "trained")
    shutil.rmtree(folder / "my_alphabet/expert")
    page = (REPOSITORY / "docs/tasks.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python (train_expert.py .*)$", page, re.MULTILINE)
    run = [sys.executable, *command.split()]
    trained = subprocess.run(run, cwd=folder, check=True, capture_output=True, text=True)
    line = re.compile(r"^(\w+): ([\d.]+) % of my_alphabet/test right$", re.MULTILINE)
    printed = dict(line.findall(trained.stdout))
    fusion_bench([*RUN, "method.compare_with=[base,experts]"], folder)
    rows = json.loads((folder / "run/report.json").read_text(encoding="utf-8"))["rows"]
    accuracy = {name: row["my_alphabet"] for name, row in rows.items()}
    assert accuracy["experts"] > 0.4 > accuracy["base"]
    # the script's zero-shot head is the task pool's; an image or two may differ by rounding
    one_image = 100 / 144
    assert float(printed["expert"]) == pytest.approx(100 * accuracy["experts"], abs=2 * one_image)
    assert float(printed["base"]) == pytest.approx(100 * accuracy["base"], abs=2 * one_image)
