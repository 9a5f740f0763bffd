"""`LMEvalTaskPool`: the LM Evaluation Harness as a task pool."""

from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench import BaseTaskPool
from fusion_bench.mixins import LightningFabricMixin
from torch import nn
from transformers import AutoTokenizer

from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint, refuse_unknown
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.words import install_advice
from fusion_bench_featcal.fusionbench.processors import load_part

_CHOICES = ("limit", "apply_chat_template", "confirm_run_unsafe_code")


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
        **unknown: object,
    ) -> None:
        """Check the settings.

        Args:
            tasks: Name of an lm-eval task -> name of the result that is its accuracy, such as
                `exact_match,none`.
            tokenizer: Folder or hub id of the tokenizer.
            include_path: Folder with YAML files of further lm-eval tasks.
            batch_size: Examples per batch, or `auto`.
            apply_chat_template: Format prompts with the tokenizer's chat template.
            limit: Examples per task, by default all.
            confirm_run_unsafe_code: Run the code that models write, as code tasks require.
            **unknown: Refused, except for keys that all FusionBench configurations have.

        Raises:
            ValueError: For unknown keys, no tasks, or a missing folder.
            CalibrationError: If lm-eval is not installed.
        """
        refuse_unknown(unknown, LMEvalTaskPool._config_mapping.values(), "taskpool.")
        if not tasks:
            raise ValueError("taskpool has no tasks: name them under taskpool.tasks")
        if include_path is not None and not Path(include_path).is_dir():
            raise ValueError(f"taskpool.include_path {include_path!r} is not a folder")
        if find_spec("lm_eval") is None:
            advice = install_advice("'.[llm]'")
            raise CalibrationError(
                f"this task pool needs lm-eval: {advice}, or skip evaluation: "
                "modelpool.default_taskpool=null"
            )
        super().__init__()
        self.tasks, self.tokenizer, self.include_path = tasks, tokenizer, include_path
        self.batch_size, self.limit = batch_size, limit
        self.apply_chat_template = apply_chat_template
        self.confirm_run_unsafe_code = confirm_run_unsafe_code

    def evaluate(self, model: nn.Module, *args: object, **kwargs: object) -> dict[str, Any]:
        """Evaluate a model on all tasks.

        Returns:
            Task -> `{"accuracy": the chosen result}` and all of lm-eval's results.

        Raises:
            CalibrationError: If lm-eval gives no such result. See also `opened`.
        """
        import lm_eval  # type: ignore[import-not-found]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

        tokenizer, index = self.opened
        model = model.to(self.fabric.device).eval()
        output = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=self.batch_size),
            tasks=list(self.tasks),
            task_manager=index,
            log_samples=False,
            **{name: getattr(self, name) for name in _CHOICES},
        )
        return {task: self._result(task, output["results"].get(task, {})) for task in self.tasks}

    @cached_property
    def opened(self) -> tuple[Any, Any]:
        """The tokenizer, and lm-eval's index of tasks. Each evaluation loads its data again.

        Raises:
            CalibrationError: If lm-eval has no such task, or cannot load its data.
        """
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

        tokenizer = load_part("taskpool.tokenizer", self.tokenizer, AutoTokenizer)
        index = TaskManager(include_path=self.include_path)
        for task in self.tasks:
            if task not in index.all_tasks:
                raise CalibrationError(
                    f"taskpool.tasks.{task}: lm-eval has no such task"
                    f"{nearest_hint(task, index.all_tasks)}. Set taskpool.include_path to a "
                    "folder with your own tasks"
                )
            # A task's object reads its first row.
            with error_context(f"taskpool.tasks.{task}", cause=unloadable):
                (getattr(index, "load", None) or index.load_task_or_group)([task])
        return tokenizer, index

    def _result(self, task: str, values: Mapping[str, Any]) -> dict[str, Any]:
        metric = self.tasks[task]
        if metric not in values:
            raise CalibrationError(
                f"taskpool.tasks.{task}: lm-eval reports no {metric!r}, only {sorted(values)}"
            )
        return {"accuracy": float(values[metric]), **values}
