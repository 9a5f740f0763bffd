"""Additional scores for `--evaluate`: tasks of lm-eval, or a user's function."""

import copy
import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.tasks import lm_eval_tasks

Scorer = Callable[[nn.Module, Any], Mapping[str, float]]
"""Takes a model and its tokenizer or processor, and returns scores by name."""
_LM_EVAL = "lm-eval"


def scorers_of(named: Mapping[str, Any], kind: str, batch_size: int) -> dict[str, Scorer]:
    """Return a scorer for each entry of `--evaluate`, by its name.

    Args:
        named: `lm-eval` -> its tasks, or a module -> its functions, listed or separated by commas.
        kind: Kind of the models.
        batch_size: Rows per batch in lm-eval.
    """
    scorers: dict[str, Scorer] = {}
    for module, listed in named.items():
        names = listed.split(",") if isinstance(listed, str) else [str(name) for name in listed]
        if module == _LM_EVAL:
            scorers[module] = _lm_eval(names, kind, batch_size)
        else:
            scorers |= {f"{module}:{name}": _function(module, name) for name in names}
    return scorers


def _lm_eval(tasks: list[str], kind: str, batch_size: int) -> Scorer:
    if kind not in ("causal", "seq2seq"):
        raise ValueError(f"--evaluate {_LM_EVAL}:... is for language models, these are {kind}s")
    if not lm_eval_tasks.is_installed():
        raise ValueError(
            f"--evaluate {_LM_EVAL}:... needs lm-eval: pip install 'fusion_bench_featcal[llm]'"
        )
    index = lm_eval_tasks.task_index()
    lm_eval_tasks.check_tasks(tasks, index, f"--evaluate {_LM_EVAL}:")

    def score(model: nn.Module, tokenizer: Any) -> dict[str, float]:
        results = lm_eval_tasks.run_tasks(model, tokenizer, tasks, index, batch_size)
        return {
            f"{task} {metric.removesuffix(',none')}": value
            for task in tasks
            for metric, value in results.get(task, {}).items()
            if isinstance(value, int | float) and "," in metric and "_stderr" not in metric
        }

    return score


def _function(module: str, name: str) -> Scorer:
    """Return a scorer that calls a user's function."""
    word = f"--evaluate {module}:{name}"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        several = f". Several functions: {module}:ONE,OTHER" if ":" in name else ""
        raise ValueError(f"{word} cannot be imported: {first_line(error)}{several}") from error

    def score(model: nn.Module, processor: Any) -> dict[str, float]:
        try:
            result = function(model, processor)
        except Exception as error:  # the user's function may raise anything
            raise ValueError(
                f"{word} raised {type(error).__name__}: {first_line(error)}"
            ) from error
        try:
            values = result if isinstance(result, Mapping) else {"": result}
            return {str(key): float(value) for key, value in values.items()}
        except (TypeError, ValueError) as error:
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"{word} gives no number or numbers by name ({cause})") from error

    return score


def all_scores(scorers: Mapping[str, Scorer], model: nn.Module, processor: Any) -> dict[str, float]:
    """Return a model's scores by scorer and score name."""
    return {
        f"{word} {key}".strip(): value
        for word, scorer in scorers.items()
        for key, value in scorer(model.eval(), copy.deepcopy(processor)).items()
    }


def comparison(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a sentence for each score with its value in every row."""
    names = next(iter(rows.values()), {})
    return [
        f"evaluated by {name}: "
        + ", ".join(f"{row} {scores.get(name, math.nan):.4g}" for row, scores in rows.items())
        for name in names
    ]
