"""`LMEvalTaskPool`: the LM Evaluation Harness as a task pool whose results can be compared."""

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseTaskPool
from fusion_bench.mixins import LightningFabricMixin
from torch import nn
from transformers import AutoTokenizer

from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tasks.names import refuse_unknown_keys


class LMEvalTaskPool(LightningFabricMixin, BaseTaskPool):
    """Evaluates language models on tasks of lm-eval, by one metric each.

    FusionBench's own `LMEvalHarnessTaskPool` returns no results and needs a release of lm-eval
    whose command line it can drive; this calls `lm_eval.simple_evaluate`.
    """

    _config_mapping = BaseTaskPool._config_mapping | {
        name: name
        for name in (
            "tasks", "tokenizer", "batch_size", "apply_chat_template", "limit",
            "confirm_run_unsafe_code",
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
        _usage_: str | None = None,
        _version_: str | None = None,
        **unknown: Any,
    ) -> None:
        """Check the settings.

        Args:
            tasks: lm-eval's task name -> the result that counts as accuracy, as lm-eval writes it
                (`exact_match,none`).
            tokenizer: Folder or hub id of the tokenizer.
            batch_size: Rows at once, or `auto`.
            apply_chat_template: Whether prompts are put into the tokenizer's chat template.
            limit: Rows of each task; None: all.
            confirm_run_unsafe_code: Whether code that models write is run, which code tasks need.
            _usage_: Free text that FusionBench's configurations carry.
            _version_: The FusionBench release a configuration was written for.
            **unknown: Refused.

        Raises:
            ValueError: For unknown keys or no tasks.
            CalibrationError: If lm-eval is not installed.
        """
        valid = [name for name in inspect.signature(LMEvalTaskPool).parameters if name != "unknown"]
        refuse_unknown_keys([key for key in unknown if key != "_recursive_"], valid, "taskpool")
        if not tasks:
            raise ValueError("taskpool has no tasks: name them under taskpool.tasks")
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

    def evaluate(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate a model on all tasks.

        Args:
            model: A causal or an encoder-decoder language model of transformers.
            *args: Ignored, as FusionBench's pools do.
            **kwargs: Likewise.

        Returns:
            Task -> {"accuracy": the chosen result, and all of lm-eval's results for it}.

        Raises:
            CalibrationError: If lm-eval gives no such result, naming those it gives.
        """
        import lm_eval  # type: ignore[import-not-found]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

        model = self._on_device(model)
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        done: Any = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=self.batch_size),
            tasks=list(self.tasks),
            limit=self.limit,
            apply_chat_template=self.apply_chat_template,
            confirm_run_unsafe_code=self.confirm_run_unsafe_code,
            log_samples=False,
        )
        return {task: self._result(task, done["results"].get(task, {})) for task in self.tasks}

    def _on_device(self, model: nn.Module) -> nn.Module:
        return model.to(self.fabric.device).eval()

    def _result(self, task: str, values: Mapping[str, Any]) -> dict[str, Any]:
        metric = self.tasks[task]
        if metric not in values:
            raise CalibrationError(
                f"taskpool.tasks.{task}: lm-eval gives no {metric!r} but {sorted(values)}"
            )
        return {"accuracy": float(values[metric]), **values}
