"""`LMEvalTaskPool`: the LM Evaluation Harness as a task pool whose results can be compared."""

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseTaskPool
from fusion_bench.mixins import LightningFabricMixin
from transformers import AutoTokenizer

from fusion_bench_featcal.hub_files import fetch
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.pool_settings import refuse_unknown_pool_keys


class LMEvalTaskPool(LightningFabricMixin, BaseTaskPool):
    """Evaluates language models on tasks of lm-eval, by one metric each.

    FusionBench's own `LMEvalHarnessTaskPool` returns no results and needs a release of lm-eval
    whose command line it can drive; this calls `lm_eval.simple_evaluate`.
    """

    _config_mapping = BaseTaskPool._config_mapping | {
        name: name
        for name in (
            "tasks", "tokenizer", "batch_size", "apply_chat_template", "limit",
            "confirm_run_unsafe_code", "include_path",
        )
    }  # fmt: skip

    def __init__(
        self,
        tasks: Mapping[str, str],
        *,
        tokenizer: str,
        batch_size: int | str = 1,
        apply_chat_template: bool = False,
        limit: int | None = None,
        confirm_run_unsafe_code: bool = False,
        include_path: str | None = None,
        **unknown: Any,
    ) -> None:
        """Check the settings.

        Args:
            tasks: lm-eval's task name -> the result that counts as accuracy, as lm-eval writes it
                (`exact_match,none`).
            tokenizer: Folder or hub id of the tokenizer.
            batch_size: Rows at once, or `auto`.
            apply_chat_template: Put prompts into the tokenizer's chat template.
            limit: Rows of each task; None: all.
            confirm_run_unsafe_code: Run the code that models write, which code tasks need.
            include_path: Folder with YAML files of further lm-eval tasks; None: lm-eval's alone.
            **unknown: Refused, but for keys that all of FusionBench's configurations have.

        Raises:
            ValueError: For unknown keys, no tasks, or a folder that is not there.
            CalibrationError: If lm-eval is not installed.
        """
        refuse_unknown_pool_keys(LMEvalTaskPool, unknown)
        if not tasks:
            raise ValueError("taskpool has no tasks: name them under taskpool.tasks")
        if include_path is not None and not Path(include_path).is_dir():
            raise ValueError(f"taskpool.include_path {include_path!r} is no folder")
        if find_spec("lm_eval") is None:
            raise CalibrationError(
                "this task pool needs lm-eval: pip install 'fusion_bench_featcal[llm]'; or go "
                "without evaluation: modelpool.default_taskpool=null"
            )
        super().__init__()
        self.tasks = tasks
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.apply_chat_template = apply_chat_template
        self.limit = limit
        self.confirm_run_unsafe_code = confirm_run_unsafe_code
        self.include_path = include_path

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate a model on all tasks.

        Returns:
            Task -> {"accuracy": the chosen result, and all of lm-eval's results for it}.

        Raises:
            CalibrationError: If lm-eval has no such task, or gives no such result for it.
        """
        import lm_eval  # type: ignore[import-not-found]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

        manager = self._task_manager
        for task in self.tasks:
            if task not in manager.all_tasks:
                hint = nearest_hint(task, manager.all_tasks)
                raise CalibrationError(
                    f"taskpool.tasks.{task}: lm-eval has no such task{hint}; tasks of your own are "
                    "found in the folder taskpool.include_path"
                )
        model = model.to(self.fabric.device).eval()
        folder = fetch(self.tokenizer, f"taskpool.tokenizer={self.tokenizer}", weights=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        done: Any = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=self.batch_size),
            tasks=list(self.tasks),
            task_manager=manager,
            limit=self.limit,
            apply_chat_template=self.apply_chat_template,
            confirm_run_unsafe_code=self.confirm_run_unsafe_code,
            log_samples=False,
        )
        return {task: self._result(task, done["results"].get(task, {})) for task in self.tasks}

    @cached_property
    def _task_manager(self) -> Any:
        """Index of lm-eval's tasks, which takes seconds to make."""
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

        return TaskManager(include_path=self.include_path)

    def _result(self, task: str, values: Mapping[str, Any]) -> dict[str, Any]:
        metric = self.tasks[task]
        if metric not in values:
            raise CalibrationError(
                f"taskpool.tasks.{task}: lm-eval gives no {metric!r} but {sorted(values)}"
            )
        return {"accuracy": float(values[metric]), **values}
