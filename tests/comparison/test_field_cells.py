"""The shipped rows in a grid on bundled models, with little data and with other data."""

from pathlib import Path
from typing import Any

from comparison_parts import MERGERS, FakeProgram
from fusion_bench import BaseTaskPool
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import OmegaConf

from fusion_bench_featcal.lab.compare import ComparisonAlgorithm
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.suites import image

YAML = Path(__file__).parents[2] / "config" / "method" / "compare.yaml"
TASK = "mini_korean"
ROWS = (
    "surgery:tuned", "prob_surgery:shared", "surgery:recompute", "anchor_only",
    "anchored_regression", "distillation", "featcal:tuned",
)  # fmt: skip


class EqualTaskPool(BaseTaskPool):
    """Evaluates nothing: which cells run is compared here."""

    test_dataloaders = {TASK: None}  # noqa: RUF012

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {TASK: {"accuracy": 0.5}}


def pool(task: str, images: int) -> tuple[Any, Any]:
    """A pool of bundled models with a few images of one task, and these data."""
    data = image.load_split(task, "train")
    data.grey, data.labels = data.grey[:images].copy(), data.labels[:images].copy()
    options: dict[str, Any] = {
        "models": {"_pretrained_": image.path(), task: image.path(task)},
        "processor": {"_target_": "fusion_bench_featcal.suites.image.load_processor"},
    }
    sets: Any = {task: data}
    made: Any = CLIPVisionModelPool(train_datasets=sets, test_datasets=sets, **options)
    made.load_train_dataset = made.load_test_dataset = sets.__getitem__
    return made, data


def grid(folder: Path, samples: int, **choices: Any) -> Any:
    """The shipped rows, with few steps."""
    config: Any = OmegaConf.create({"method": OmegaConf.load(YAML)})
    config.method.merge_with({"samples_per_task": samples, "steps": 2})
    methods: Any = OmegaConf.to_container(config.method.post_merging_methods, resolve=True)
    methods["distillation"]["steps"] = 2
    keys: dict[str, Any] = {
        "upstream_mergers": {"task_arithmetic": MERGERS["task_arithmetic"]},
        "post_merging_methods": methods,
        "post_merging": list(ROWS),
        "references": [],
        "results_dir": str(folder),
    }
    made: Any = ComparisonAlgorithm(**(keys | choices))
    made._program = FakeProgram(EqualTaskPool())
    return made


def test_one_sample_is_enough_and_rows_run_again_whose_data_changed(tmp_path: Path) -> None:
    models, data = pool(TASK, 1)
    grid(tmp_path, 1).run(models)
    report = Report.load(tmp_path / "task_arithmetic")
    assert set(report.rows) == {"task_arithmetic", *ROWS}
    # With so few samples there is nothing to hold out: settings are as given.
    assert report.cost["surgery:tuned"].get("settings_tried", 1) == 1
    before = {folder.name for folder in (tmp_path / "cells").iterdir()}
    data.grey = 255 - data.grey
    few = ["anchor_only", "anchored_regression", "surgery:tuned"]
    grid(tmp_path, 1, post_merging=few).run(models)
    new = {folder.name for folder in (tmp_path / "cells").iterdir()} - before
    names = {name.split("--")[1].rpartition("-")[0] for name in new}
    assert names == {"anchored_regression", "surgery_tuned"}
