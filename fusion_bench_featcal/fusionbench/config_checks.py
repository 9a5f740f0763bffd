"""Checks of a composed config before torch is imported: names, values and paths."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import causes
from fusion_bench_featcal.errors.nearest_names import nearest_hint, refuse_unknown
from fusion_bench_featcal.files import PATH_STARTS, is_missing
from fusion_bench_featcal.fusionbench.run_settings import (
    FUSION_BENCH_KEYS,
    RunSettings,
    read_settings,
    select_models,
)
from fusion_bench_featcal.settings import RULE_SETTINGS, FeatCalSettings, remedy_of

_BY_TASK = ("calibration_data", "task_weights")
_TEST_SETTINGS = ("taskpool.tasks", "taskpool.test_datasets")
_DATA = ("train_datasets", "val_datasets", "test_datasets")
ROOT_KEYS = (
    "hydra", "fabric", "path", "modelpool", "method", "taskpool", "seed", "fast_dev_run", "dry_run",
    "print_config", "print_function_call", "merged_model_save_path", "merged_model_save_kwargs",
    "report_save_path", "_target_", "_recursive_",
)  # fmt: skip
"""Keys of FusionBench's program at the root of a config."""


def check_config(config: DictConfig) -> None:
    """Check the settings of `method=featcal`, names of tasks and keys, and paths.

    Args:
        config: FusionBench's composed config, with its interpolations.

    Raises:
        ValueError: If a value is wrong, a name unknown or a path missing. Names the setting, and
            the nearest name if there is one.
        CalibrationError: If a task has no calibration data.
    """
    check_root_keys(map(str, config), config)
    if not isinstance(config.get("seed"), int | None):
        raise ValueError(f"seed must be null or an integer, got {config.seed!r}")
    try:
        method: Any = OmegaConf.to_container(config.method, resolve=True) or {}
        data = f"modelpool.{method.get('calibration_split', 'train')}_datasets"
        groups = ("modelpool.models", data, "method.calibration_data", *_TEST_SETTINGS)
        entries: dict[str, Any] = {group: {} for group in groups}
        for group in groups:
            if OmegaConf.is_dict(node := OmegaConf.select(config, group)):
                entries[group] = OmegaConf.to_container(node, resolve=True)
    except (OmegaConfBaseException, AttributeError) as error:
        # A resolver raises it if a suite or weights are missing.
        missing = next((link for link in causes(error) if isinstance(link, OSError)), None)
        if missing is not None:
            raise ValueError(f"{getattr(error, 'full_key', 'config')}: {missing}") from error
        raise ValueError(f"the config cannot be resolved: {error}") from error
    pool: Any = OmegaConf.to_container(config.modelpool, resolve=False)
    refuse_unknown((k for k in pool if k.endswith(("dataset", "datasets"))), _DATA, "modelpool.")
    tasks = [name for name in entries["modelpool.models"] if not str(name).startswith("_")]
    for key in _BY_TASK:
        if isinstance(names := method.get(key), Mapping):  # RegMean's task_weights is a text
            refuse_unknown(names, tasks, f"method.{key}.")
    if str(method.get("_target_")).endswith(".FeatCalAlgorithm"):
        keys = {k: v for k, v in method.items() if k not in ("_target_", *FUSION_BENCH_KEYS)}
        settings, run_settings = read_settings(keys, (FeatCalSettings, RunSettings))
        select_models(settings, run_settings, pool.get("featcal") or {})
        if entries[data]:  # else the pool's class may have data
            available = entries[data] | (settings.calibration_data or {})
            check_tasks_have_data(tasks, available, settings.calibration_split)
    taskpool: Any = pool.get("default_taskpool")
    names = (taskpool.get("tasks") or ()) if isinstance(taskpool, Mapping) else ()
    without_tests = [expert for expert in tasks if expert not in names]
    for name in names:  # an expert without a task may have a similar name
        if name not in tasks and (hint := nearest_hint(name, without_tests)):
            raise ValueError(f"default_taskpool.tasks.{name}: no expert has this name{hint}")
    refuse_missing_paths(entries)


def check_root_keys(names: Iterable[str], config: DictConfig) -> None:
    """Refuse keys at the root of a config that nothing reads.

    Args:
        names: The keys.
        config: The config, with its interpolations. It may use a key that a user has added.

    Raises:
        ValueError: With the nearest name, or for a setting of the method with its full name.
    """
    content: Any = OmegaConf.to_container(config, resolve=False)
    method = content.get("method") or {}
    for name in names:
        if name in ROOT_KEYS or re.search(rf"\$\{{{re.escape(name)}\b", str(content)):
            continue
        if name in method:
            raise ValueError(f"{name} is a setting of the method: write method.{name}=...")
        keys = (*ROOT_KEYS, *(f"method.{key}" for key in method))
        raise ValueError(f"{name} is unknown and has no effect{nearest_hint(name, keys)}")


def refuse_settings_of_other_rules(words: Iterable[str], method: Mapping[str, object]) -> None:
    """Refuse overrides of settings that a method's config leaves out, because its rule lacks them.

    Args:
        words: Overrides such as `method.ridge_lambda=0.1`.
        method: The method's config.

    Raises:
        ValueError: Naming the override and the rule.
    """
    for word in words:
        name = word.removeprefix("method.").partition("=")[0]
        if name in RULE_SETTINGS and name not in method and "rule" in method:
            raise ValueError(
                f"{word} has no effect with the rule {method['rule']}: {remedy_of(name)}"
            )


def check_tasks_have_data(tasks: Iterable[str], available: Iterable[str], split: str) -> None:
    """Refuse tasks without data of a split.

    Args:
        tasks: The tasks.
        available: Tasks that have data of the split.
        split: The split.

    Raises:
        CalibrationError: If a task has none. The message lists the tasks that have data.
    """
    available = list(available)
    for task in tasks:
        if task not in available:
            raise CalibrationError(
                f"task {task!r} has no calibration data{nearest_hint(task, available)}: set "
                f"modelpool.{split}_datasets.{task} or method.calibration_split (now {split}), or "
                f"with method=featcal +method.calibration_data.{task} (a path, a hub id or the "
                f"config of a dataset). The pool's {split}_datasets are: "
                f"{', '.join(available) or 'none'}."
            )


def refuse_missing_paths(groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse paths that do not exist.

    Args:
        groups: Prefix of settings -> name -> path, hub id, config of a loader, or object.

    Raises:
        ValueError: Naming the setting.
    """
    for group, entries in groups.items():
        for name, entry in entries.items():
            for key, value in (entry if isinstance(entry, Mapping) else {"": entry}).items():
                # In a mapping, a table may be a file of a hub dataset.
                is_path = isinstance(value, str) and (key == "" or value.startswith(PATH_STARTS))
                if is_path and is_missing(value):
                    setting = ".".join(filter(None, (group, name, key)))
                    raise ValueError(f"{setting}={value}: there is no such file or folder")
