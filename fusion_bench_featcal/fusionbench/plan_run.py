"""Plans of FusionBench runs, from command-line overrides. For `method=featcal` without torch."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_featcal.fusionbench.config_checks import check_config, choices_of_config
from fusion_bench_featcal.fusionbench.console import explained, make_importable
from fusion_bench_featcal.models.plan import Plan, data_sets_to_fetch, models_of
from fusion_bench_featcal.settings.budgets import budget_in_bytes

_LOCATIONS = ("pretrained_model_name_or_path", "base_model_path", "base_model_name",
              "peft_model_path", "peft_name")  # fmt: skip
_GLUE = "nyu-mll/glue"


def plan_run(overrides: Sequence[str]) -> Plan:
    """Return the plan of a run, or of a sweep, with these command-line overrides.

    Only configs and the hub's metadata are read. Nothing is downloaded.

    Args:
        overrides: Overrides such as `modelpool=clip-vit-base-patch32_TA8`. Without `method=` the
            method is featcal.

    Raises:
        ValueError: If the overrides do not compose, or a name, value or path is wrong.
        CalibrationError: If the hub has no such model.
    """
    make_importable(os.getcwd())  # as in the run: `_target_` may name a class in this folder
    words, jobs = _first_job(overrides)
    config = _composed(words)
    check_config(config)
    method, pool = _plain(config.method), _plain(config.modelpool)
    models = dict(_locations(pool.get("models") or {}))
    downloads, sizes = models_of(models)
    downloads += data_sets_to_fetch(_data_sets(method, pool, _plain(config.taskpool)))
    of_experts = [size for key, size in sizes.items() if ".models._" not in key]
    read = None if None in of_experts else sum(size or 0 for size in of_experts)
    if read is not None and method.get("expert_read_budget") is not None:
        read = min(read, budget_in_bytes(method["expert_read_budget"], read))
    rows, strengths = _rows(method, pool.get("featcal") or {})
    rows = {row: jobs * times for row, times in rows.items()}
    first = next(iter(sizes.values()), None)
    folders = (method.get("checkpoint_dir"), config.merged_model_save_path)
    writes = {str(folder): first for folder in folders if folder}
    return Plan(tuple(downloads), read, first, writes, rows, strengths, jobs)


def _first_job(overrides: Sequence[str]) -> tuple[list[str], int]:
    """Return the words of a sweep's first job, and the number of its jobs."""
    words, jobs = [], 1
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        word = str(override.input_line)
        if override.is_sweep_override():
            values = list(override.sweep_string_iterator())
            word, jobs = f"{word.partition('=')[0]}={values[0]}", jobs * len(values)
        words.append(word)
    if not any(word.startswith("method=") for word in words):
        words.append("method=featcal")
    return words, jobs


def _composed(words: list[str]) -> Any:
    try:
        with initialize_config_dir(str(get_default_config_path()), version_base=None):
            return compose("fabric_model_fusion", overrides=words)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error


def _plain(config: Any) -> dict[str, Any]:
    return OmegaConf.to_container(config, resolve=True) or {}  # type: ignore[return-value]


def _locations(models: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the setting of each model of a pool, and its folder or hub id."""
    for name, entry in models.items():
        entries = entry if isinstance(entry, Mapping) else {"": entry}
        for key, value in entries.items():
            if isinstance(value, str) and key in ("", *_LOCATIONS):
                yield ".".join(filter(None, ("modelpool.models", name, key))), value


def _data_sets(
    method: Mapping[str, Any], pool: Mapping[str, Any], taskpool: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the hub ids of data that a run draws samples from, and is evaluated on."""
    samples = dict(pool.get(f"{method.get('calibration_split', 'train')}_datasets") or {})
    samples |= method.get("calibration_data") or {}
    if str(taskpool.get("_target_")).endswith(".DummyTaskPool"):
        taskpool = pool.get("default_taskpool") or {}
    entries = [*samples.values(), *(taskpool.get("test_datasets") or {}).values()]
    for task in (taskpool.get("tasks") or {}).values():
        entries.append(task.get("data") if isinstance(task, Mapping) else None)
    for entry in entries:
        name = entry
        if isinstance(entry, Mapping):
            is_glue = str(entry.get("_target_")).endswith(".load_glue")
            name = next(iter(entry.get("_args_") or ()), entry.get("path", _GLUE * is_glue))
        if isinstance(name, str) and name:
            yield name


def _rows(
    method: Mapping[str, Any], suite: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
    """Return the rows that a method makes -> how many times, and FeatCal's rows -> strengths."""
    target = str(method.get("_target_", ""))
    if target.endswith(".FeatCalAlgorithm"):
        settings, choices = choices_of_config(method, suite)
        rows = choices.rows(settings)
        return dict.fromkeys(rows, 1), {row: of.strengths for row, of in rows.items()}
    row = method.get("name") or target.rpartition(".")[2]
    if target.startswith("fusion_bench_featcal."):
        keys = {key: value for key, value in method.items() if key != "_target_"}
        algorithm: Any = get_class(target)(**keys)  # checks them
        if hasattr(algorithm, "planned_rows"):
            return algorithm.planned_rows(suite), {}
        row = algorithm.method.name if hasattr(algorithm, "method") else row
    return {str(row): 1}, {}
