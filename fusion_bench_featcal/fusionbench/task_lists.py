"""Pools that list their tasks once: the entry `*` of a mapping stands for an entry of every task.

tasks: [mini_mnist, mini_greek]
models:
  _pretrained_: models/base
  "*": models/* # models/mini_mnist, models/mini_greek
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

EACH = "*"
_POOLS = ("modelpool", "taskpool")
_TASKS = "modelpool.tasks"
_hydra_applies = ConfigLoaderImpl._apply_overrides_to_config


def expand_when_composing() -> None:
    """Let Hydra expand the task lists of every config that it composes."""
    ConfigLoaderImpl._apply_overrides_to_config = staticmethod(_apply_overrides)  # type: ignore[method-assign]


def _apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Apply a choice of tasks, expand the lists, then apply all other overrides.

    A resolver cannot do this: an override of one task's entry would replace all entries.
    """
    choices = [override for override in overrides if override.key_or_group == _TASKS]
    _hydra_applies(choices, config)
    if not expand_task_lists(config) and any(choice.is_add() for choice in choices):
        raise ConfigCompositionException(
            f"{_TASKS}: this pool has no list of tasks to choose from. Remove a task by "
            "~modelpool.models.NAME"
        )
    for override in (override for override in overrides if override not in choices):
        _copy_references(config, override.key_or_group)
        _hydra_applies([override], config)


def _copy_references(config: DictConfig, key: str) -> None:
    """Replace references to mappings on the way to a key of a pool by copies.

    OmegaConf would replace them by empty mappings, and a task would lose its data.
    """
    node = config
    for part in key.split(".")[:-1] if key.startswith(_POOLS) else ():
        if not isinstance(node, DictConfig) or part not in node:
            return
        target = OmegaConf.select(node, part, throw_on_resolution_failure=False)
        if OmegaConf.is_interpolation(node, part) and isinstance(target, DictConfig):
            node[part] = OmegaConf.to_container(target, resolve=False)
            target = node[part]
        node = target


def expand_task_lists(config: DictConfig) -> bool:
    """Expand model pool and task pool, and remove the key `tasks` of the model pool.

    A model pool without the key has the tasks of its experts. An entry with a task's own name
    replaces the task's part of `*`.

    Returns:
        Whether the model pool has an entry `*`.

    Raises:
        ConfigCompositionException: If `tasks` is no list of different names.
    """
    pools = {key: config.get(key) for key in _POOLS}
    contents: dict[str, Any] = {
        key: OmegaConf.to_container(pool, resolve=False)
        for key, pool in pools.items()
        if OmegaConf.is_dict(pool)
    }
    with_lists = {key for key, content in contents.items() if _has_lists(content)}
    if not with_lists:
        return False
    modelpool = contents.get("modelpool", {})
    tasks = [name for name in modelpool.get("models") or () if not name.startswith("_")]
    if "modelpool" in with_lists:
        tasks = _checked(modelpool.pop("tasks", tasks))
    for key in with_lists:
        config[key] = filled(contents[key], tasks)
    return "modelpool" in with_lists


def filled(node: object, tasks: Iterable[str]) -> Any:
    """Return a part of a config with an entry per task in place of each entry `*`."""
    if isinstance(node, list):
        return [filled(item, tasks) for item in node]
    if not isinstance(node, Mapping):
        return node
    entries: dict[object, object] = {}
    for key, value in node.items():
        if key == EACH:
            entries |= {task: _for_task(value, task) for task in tasks if task not in node}
        else:
            entries[key] = filled(value, tasks)
    return entries


def _for_task(node: object, task: str) -> object:
    """Return a part of a config with the task's name in place of each `*`."""
    if isinstance(node, Mapping):
        return {key: _for_task(value, task) for key, value in node.items()}
    if isinstance(node, list):
        return [_for_task(item, task) for item in node]
    return node.replace(EACH, task) if isinstance(node, str) else node


def _has_lists(node: object) -> bool:
    if isinstance(node, list):
        return any(map(_has_lists, node))
    return isinstance(node, Mapping) and (EACH in node or any(map(_has_lists, node.values())))


def _checked(tasks: Any) -> list[str]:
    is_list = isinstance(tasks, list) and all(isinstance(task, str) and task for task in tasks)
    if not is_list or not tasks or len(set(tasks)) < len(tasks):
        raise ConfigCompositionException(
            f"{_TASKS} must be a list of different names, got {tasks!r}"
        )
    return tasks
