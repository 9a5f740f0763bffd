"""Rows of the field and tuned rows in a grid: interrupted, resumed, on other data, on little."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import FakeProgram
from fusion_bench import BaseTaskPool
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import OmegaConf

from fusion_bench_featcal.lab.compare import ComparisonAlgorithm, algorithm
from fusion_bench_featcal.lab.rivals import AnchorOnly
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.suites import image

YAML = Path(__file__).parents[2] / "config" / "method" / "compare.yaml"
ROWS = (
    "surgery:tuned", "prob_surgery:shared", "surgery:recompute", "anchor_only",
    "anchored_regression", "distillation", "featcal:tuned",
)  # fmt: skip
DATA_FREE = {"anchor_only"}


class EqualTaskPool(BaseTaskPool):
    """Evaluates nothing: what is compared here is which cells run."""

    def __init__(self, tasks: list[str]) -> None:
        super().__init__()
        self.test_dataloaders = dict.fromkeys(tasks)

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {task: {"accuracy": 0.5} for task in self.test_dataloaders}


def pool(tasks: list[str], images: int) -> tuple[Any, dict[str, Any]]:
    """A pool of bundled models with a few images a task, and these data."""
    data = {task: image.load_split(task, "train") for task in tasks}
    for split in data.values():
        split.grey, split.labels = split.grey[:images].copy(), split.labels[:images].copy()
    made: Any = CLIPVisionModelPool(
        models={"_pretrained_": image.path(), **{task: image.path(task) for task in tasks}},  # type: ignore[arg-type]
        train_datasets=data,
        test_datasets=data,
        processor={"_target_": "fusion_bench_featcal.suites.image.load_processor"},  # type: ignore[arg-type]
    )
    made.load_train_dataset = made.load_test_dataset = data.__getitem__
    return made, data


def grid(folder: Path, tasks: list[str], samples: int, **choices: Any) -> ComparisonAlgorithm:
    """The shipped rows, with few steps."""
    config: Any = OmegaConf.create({"method": OmegaConf.load(YAML)})
    config.method.merge_with({"samples_per_task": samples, "steps": 2})
    methods: Any = OmegaConf.to_container(config.method.post_merging_methods, resolve=True)
    methods["distillation"]["steps"] = 2
    arithmetic = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
    keys: dict[str, Any] = {
        "upstream_mergers": {"task_arithmetic": arithmetic},
        "post_merging_methods": methods,
        "post_merging": list(ROWS),
        "references": [],
        "results_dir": str(folder),
    }
    made = ComparisonAlgorithm(**(keys | choices))
    program: Any = FakeProgram(EqualTaskPool(tasks))
    made._program = program
    return made


def finished(folder: Path) -> dict[str, int]:
    """Folder of each finished cell -> when it was written."""
    files = folder.glob("cells/*/result.json")
    return {file.parent.name: file.stat().st_mtime_ns for file in files}


def rows_of(names: Any) -> set[str]:
    """Rows of cells' folders, `task_arithmetic--surgery_tuned-<key>`."""
    known = {row.replace(":", "_"): row for row in ROWS}
    return {known[name.split("--")[1].rpartition("-")[0]] for name in names} - {"none"}


@pytest.mark.slow
def test_only_what_is_missing_or_depends_on_what_changed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = ["mini_balinese", "mini_korean"]
    models, data = pool(tasks, 20)

    def interrupted(self: Any, *arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AnchorOnly, "post_merge", interrupted)
        patch.setattr(algorithm, "ending_cleanly", lambda *_: nullcontext())
        grid(tmp_path, tasks, 16).run(models)
    before = {name: at for name, at in finished(tmp_path).items() if "none" not in name}
    assert rows_of(before) == set(ROWS[: ROWS.index("anchor_only")])
    grid(tmp_path, tasks, 16).run(models)
    whole = {name: at for name, at in finished(tmp_path).items() if "none" not in name}
    assert rows_of(whole) == set(ROWS)
    assert before.items() <= whole.items()  # finished cells are not written again

    drawn = data["mini_korean"]
    drawn.grey = 255 - drawn.grey
    grid(tmp_path, tasks, 16).run(models)
    changed = {name: at for name, at in finished(tmp_path).items() if "none" not in name}
    assert rows_of(set(changed) - set(whole)) == set(ROWS) - DATA_FREE
    assert whole.items() <= changed.items()

    other = grid(tmp_path, tasks, 16, post_merging=["surgery:tuned", "featcal:tuned"])
    other.choices.post_merging_methods["surgery:tuned"]["candidates"] = [{"rank": 4}]
    other.run(models)
    again = {name: at for name, at in finished(tmp_path).items() if "none" not in name}
    assert rows_of(set(again) - set(changed)) == {"surgery:tuned"}


def test_one_sample_of_one_task_is_enough(tmp_path: Path) -> None:
    models, _ = pool(["mini_korean"], 1)
    grid(tmp_path, ["mini_korean"], 1).run(models)
    report = Report.load(tmp_path / "task_arithmetic")
    assert set(report.rows) == {"task_arithmetic", *ROWS}
    # With so few samples there is nothing to hold out: settings are as given.
    assert report.cost["surgery:tuned"].get("settings_tried", 1) == 1
