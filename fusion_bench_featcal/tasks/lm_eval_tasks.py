"""Tasks of the LM Evaluation Harness, run on a model in memory."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint


def is_installed() -> bool:
    """Return whether lm-eval can be imported."""
    return find_spec("lm_eval") is not None


def task_index(include_path: str | None = None) -> Any:
    """Return lm-eval's index of tasks, with tasks of a folder. It takes seconds to build."""
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    return TaskManager(include_path=include_path)


def check_tasks(tasks: Iterable[str], index: Any, setting: str, hint: str = "") -> None:
    """Refuse tasks that lm-eval does not have.

    Raises:
        CalibrationError: With the setting, the first unknown task, the nearest one and the hint.
    """
    for task in tasks:
        if task not in index.all_tasks:
            nearest = nearest_hint(task, index.all_tasks)
            raise CalibrationError(f"{setting}{task}: lm-eval has no such task{nearest}{hint}")


def run_tasks(
    model: Any, tokenizer: Any, tasks: Iterable[str], index: Any, batch_size: int | str, **more: Any
) -> Mapping[str, Mapping[str, Any]]:
    """Evaluate a model of transformers, on its device. Return task -> lm-eval's results by metric.

    `more` are further arguments of `lm_eval.simple_evaluate`.
    """
    import lm_eval  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    done: Any = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=batch_size),
        tasks=list(tasks),
        task_manager=index,
        log_samples=False,
        **more,
    )
    return done["results"]
