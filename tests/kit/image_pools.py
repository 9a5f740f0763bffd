"""Two tasks of the bundled suite of images as a pool."""

from typing import Any

from fusion_bench.modelpool import CLIPVisionModelPool

from fusion_bench_featcal.suites import image

AVERAGE = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}
ARITHMETIC = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}


def suite_pool(**changes: Any) -> Any:
    """Two of the bundled suite's tasks, as FusionBench's pool, without any YAML."""
    tasks = ["mini_greek", "mini_latin"]
    options = {
        "models": {"_pretrained_": image.path(), **{task: image.path(task) for task in tasks}},
        "train_datasets": {task: image.load_split(task, "train") for task in tasks},
        "processor": {"_target_": "fusion_bench_featcal.suites.image.load_processor"},
    }
    pool: Any = CLIPVisionModelPool(**(options | changes))
    pool.load_train_dataset = lambda task: options["train_datasets"][task]
    return pool
