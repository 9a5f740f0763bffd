"""Axes that change calibration data: corrupted images, and the data of other tasks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fusion_bench_featcal.data.corruptions import CORRUPTIONS, check_corruption
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.lab.compare.points import Axis, Changes, Option, unresolved
from fusion_bench_featcal.nearest_names import nearest_hint, refuse_unknown_keys

CLEAN = "clean"
OWN, OTHERS, MIXED, EACH = "own", "others", "mixed", "each"
NOISE, SOURCES = "noise", "sources"
_NOISE = {"_target_": "fusion_bench_featcal.tasks.NoiseImages"}
PUBLISHED_SEVERITY = 3


def corruption_axis(name: str, values: Any, config: DictConfig) -> Axis:
    """Return an axis of corruptions of the model pool's calibration and test images.

    The model pool's test images are the training data of Surgery and other test-time methods. The
    task pool for evaluation has separate datasets, which stay clean.

    Args:
        name: Name of the axis.
        values: Corruptions, or `{kinds: corruptions, severities: numbers from 1 to 5}`. `clean` has
            severity 0.
        config: The program's config.

    Raises:
        ValueError: If a corruption or severity does not exist, or a task has no data.
    """
    setting = f"method.axes.{name}"
    kinds, severities = _kinds_and_severities(values, setting)
    splits = dict.fromkeys([str(config.method.get("calibration_split", "train")), "test"])
    data = {split: _data(config, split) for split in splits}
    _require_data(data, config, setting)
    options = []
    for kind in kinds:
        for severity in severities if kind != CLEAN else [0]:
            changes: Changes = {
                f"modelpool.{split}_datasets": {
                    task: _corrupted(entry, kind, severity, task)
                    for task, entry in split_data.items()
                }
                for split, split_data in data.items()
                if split_data and kind != CLEAN
            }
            options.append(Option({name: kind, "severity": severity}, changes))
    return Axis(name, options, Option({name: CLEAN, "severity": 0}, {}))


def _kinds_and_severities(values: Any, setting: str) -> tuple[list[Any], list[Any]]:
    """Return corruptions, including `clean`, and severities of an axis, checked."""
    options = values if isinstance(values, Mapping) else {"kinds": values}
    refuse_unknown_keys(options, ["kinds", "severities"], setting)
    kinds = options.get("kinds") or [CLEAN, *CORRUPTIONS]
    severities = options.get("severities") or [PUBLISHED_SEVERITY]
    for key, value in (("kinds", kinds), ("severities", severities)):
        if not isinstance(value, list):
            raise ValueError(f"{setting}.{key} must be a list, got {value!r}")
    for kind in kinds:
        for severity in severities if kind != CLEAN else ():
            settings = f"{setting}: a corruption other than {CLEAN}", f"{setting}.severities"
            check_corruption(kind, severity, settings)
    return kinds, severities


def source_axis(name: str, values: Any, config: DictConfig) -> Axis:
    """Return an axis of datasets for calibrating every task.

    Args:
        name: Name of the axis.
        values: Sources: `own`, `others` (the data of all other tasks in equal numbers), `mixed`
            (the data of all tasks), `each` (one point for every task, whose data calibrate all
            tasks), a task, `noise` (independent pixels), a name in the pool's key `featcal.sources`
            (label -> a dataset's config), or `sources` (all of these).
        config: The program's config.

    Raises:
        ValueError: If a source does not exist, or a task has no data.
    """
    setting, split = f"method.axes.{name}", str(config.method.get("calibration_split", "train"))
    if not isinstance(values, list):
        raise ValueError(f"{setting} must be a list of sources, got {values!r}")
    data = _data(config, split)
    _require_data({split: data}, config, setting)
    pools = {NOISE: _NOISE, **(plain(OmegaConf.select(config, "modelpool.featcal.sources")) or {})}
    several = {EACH: list(data), SOURCES: list(pools)}
    options = []
    for source in (one for value in values for one in several.get(str(value), [value])):
        sets = {task: _source(source, task, data, pools, setting) for task in data}
        changes: Changes = {} if source == OWN else {f"modelpool.{split}_datasets": sets}
        options.append(Option({name: str(source)}, changes))
    return Axis(name, options, Option({name: OWN}, {}))


def _source(
    source: Any, task: str, data: Mapping[str, Any], pools: Mapping[str, Any], setting: str
) -> Any:
    """Return the config of a task's calibration data."""
    valid = (OWN, OTHERS, MIXED, EACH, SOURCES, *pools, *data)
    if source not in valid:
        raise ValueError(
            f"{setting} must name sources out of {', '.join(valid)} (others: as "
            f"modelpool.featcal.sources.NAME), got {source!r}{nearest_hint(source, valid)}"
        )
    if source in pools:
        return pools[source]
    if source not in (MIXED, OTHERS):
        return data[task if source == OWN else source]
    names = [other for other in data if source == MIXED or other != task]
    if not names:
        raise ValueError(f"{setting}: {OTHERS} needs a second task, and there is {task} alone")
    sets = [data[other] for other in names]
    return {"_target_": "fusion_bench_featcal.tasks.mixed", "data": sets}


def _data(config: DictConfig, split: str) -> dict[str, Any]:
    """Return configs of a split's data by task, in a form that may be nested in other configs."""
    models = [str(name) for name in config.modelpool.get("models") or {}]
    entries = config.modelpool.get(f"{split}_datasets")
    split_entries = unresolved(entries) if isinstance(entries, DictConfig) else {}
    return {
        task: _as_config(entry, split) for task, entry in split_entries.items() if task in models
    }


def _as_config(entry: Any, split: str) -> Any:
    """Return a dataset's config. FusionBench also accepts a hub id."""
    if not isinstance(entry, str):
        return entry
    if Path(entry).expanduser().exists():
        return {"_target_": "fusion_bench_featcal.tasks.load_images", "path": entry}
    return {"_target_": "datasets.load_dataset", "path": entry, "split": split}


def _require_data(data: Mapping[str, Any], config: DictConfig, setting: str) -> None:
    """Refuse a pool without data for a task, which would silently stay unchanged."""
    tasks = [str(name) for name in config.modelpool.get("models") or {}]
    for position, (split, split_data) in enumerate(data.items()):
        missing = [task for task in tasks if task not in split_data and not task.startswith("_")]
        if position and not split_data:  # a pool without a test split
            continue
        if missing or not split_data:
            raise ValueError(
                f"{setting} changes calibration data, and the pool has none for "
                f"{', '.join(missing) or 'any task'}: set modelpool.{split}_datasets."
                f"{missing[0] if missing else 'TASK'} or method.calibration_split"
            )


def _corrupted(entry: Any, corruption: str, severity: int, task: str) -> dict[str, Any]:
    return {
        "_target_": "fusion_bench_featcal.tasks.corrupted",
        "data": entry,
        "corruption": corruption,
        "severity": severity,
        "task": task,
    }
