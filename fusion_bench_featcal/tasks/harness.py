"""`LMEvalTaskPool`: the LM Evaluation Harness as a task pool."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench import BaseTaskPool
from fusion_bench.mixins import LightningFabricMixin
from transformers import AutoTokenizer

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.tasks.item_pool import refuse_unknown_pool_keys
from fusion_bench_featcal.tasks.lm_eval_tasks import (
    check_tasks,
    is_installed,
    run_tasks,
    task_index,
)


class LMEvalTaskPool(LightningFabricMixin, BaseTaskPool):
    """Evaluates language models on lm-eval's tasks, with one metric per task.

    FusionBench's `LMEvalHarnessTaskPool` drives lm-eval's command line and returns no results.
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
        include_path: str | None = None,
        batch_size: int | str = 1,
        apply_chat_template: bool = False,
        limit: int | None = None,
        confirm_run_unsafe_code: bool = False,
        **unknown: Any,
    ) -> None:
        """Check the settings.

        Args:
            tasks: Name of an lm-eval task -> name of the result that is its accuracy, such as
                `exact_match,none`.
            tokenizer: Folder or hub id of the tokenizer.
            include_path: Folder with YAML files of further lm-eval tasks.
            batch_size: Rows per batch, or `auto`.
            apply_chat_template: Format prompts with the tokenizer's chat template.
            limit: Rows per task, by default all.
            confirm_run_unsafe_code: Run the code that models write, as code tasks require.
            **unknown: Refused, except for keys that all FusionBench configurations have.

        Raises:
            ValueError: For unknown keys, no tasks, or a missing folder.
            CalibrationError: If lm-eval is not installed.
        """
        refuse_unknown_pool_keys(LMEvalTaskPool, unknown)
        if not tasks:
            raise ValueError("taskpool has no tasks: name them under taskpool.tasks")
        if include_path is not None and not Path(include_path).is_dir():
            raise ValueError(f"taskpool.include_path {include_path!r} is no folder")
        if not is_installed():
            raise CalibrationError(
                "this task pool needs lm-eval: pip install 'fusion_bench_featcal[llm]', or skip "
                "evaluation: modelpool.default_taskpool=null"
            )
        super().__init__()
        self.tasks, self.tokenizer, self.include_path = tasks, tokenizer, include_path
        self.batch_size, self.limit = batch_size, limit
        self.apply_chat_template = apply_chat_template
        self.confirm_run_unsafe_code = confirm_run_unsafe_code

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate a model on all tasks.

        Returns:
            Task -> `{"accuracy": the chosen result}` and all of lm-eval's results.

        Raises:
            CalibrationError: If lm-eval has no such task or result.
        """
        hint = ". Set taskpool.include_path to a folder with your own tasks"
        check_tasks(self.tasks, self._index, "taskpool.tasks.", hint)
        folder = fetch(self.tokenizer, f"taskpool.tokenizer={self.tokenizer}", weights=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        results = run_tasks(
            model.to(self.fabric.device),
            tokenizer,
            self.tasks,
            self._index,
            self.batch_size,
            limit=self.limit,
            apply_chat_template=self.apply_chat_template,
            confirm_run_unsafe_code=self.confirm_run_unsafe_code,
        )
        return {task: self._result(task, results.get(task, {})) for task in self.tasks}

    @cached_property
    def _index(self) -> Any:
        return task_index(self.include_path)

    def _result(self, task: str, values: Mapping[str, Any]) -> dict[str, Any]:
        metric = self.tasks[task]
        if metric not in values:
            raise CalibrationError(
                f"taskpool.tasks.{task}: lm-eval gives no {metric!r} but {sorted(values)}"
            )
        return {"accuracy": float(values[metric]), **values}
