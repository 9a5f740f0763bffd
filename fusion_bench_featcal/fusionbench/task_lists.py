"""Expands pools that list their tasks once: a key `*` stands for an entry of each task.

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
    """Let Hydra expand the task lists of every config that it composes.

    Hydra has no hook between composing a config and applying its overrides, so its function that
    applies them is replaced.
    """
    ConfigLoaderImpl._apply_overrides_to_config = staticmethod(_apply_overrides)  # type: ignore[method-assign]


def _apply_overrides(overrides: Sequence[Override], config: DictConfig) -> None:
    """Apply an override of the task list, expand the list, then apply all other overrides.

    With a resolver, an override of one task's entry would replace the entries of all tasks.
    """
    choices = [override for override in overrides if override.key_or_group == _TASKS]
    _hydra_applies(choices, config)
    if not expand_task_lists(config) and any(choice.is_add() for choice in choices):
        raise ConfigCompositionException(
            f"{_TASKS}: this pool has no list of tasks to choose from. Remove a task with "
            "~modelpool.models.NAME"
        )
    for override in (override for override in overrides if override not in choices):
        _copy_references(config, override.key_or_group)
        _hydra_applies([override], config)


def _copy_references(config: DictConfig, key: str) -> None:
    """Replace references by copies of their mappings, along the path to a key of a pool.

    OmegaConf would replace a reference by an empty mapping, and a task would lose its data.
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

    A model pool without this key has the tasks of its experts. If a task has an entry besides
    `*`, that entry is used for the task.

    Returns:
        Whether the model pool has a key `*`.

    Raises:
        ConfigCompositionException: If `tasks` is not a list of different names.
    """
    pools = {key: config.get(key) for key in _POOLS if OmegaConf.is_dict(config.get(key))}
    contents: dict[str, Any] = {k: OmegaConf.to_container(pools[k], resolve=False) for k in pools}
    with_lists = {
        key for key, content in contents.items() if expand_entries(content, ()) != content
    }
    if not with_lists:
        return False
    modelpool = contents.get("modelpool", {})
    tasks = [name for name in modelpool.get("models") or () if not name.startswith("_")]
    if "modelpool" in with_lists:
        tasks = modelpool.pop("tasks", tasks)
        are_names = isinstance(tasks, list) and all(isinstance(t, str) and t for t in tasks)
        if not are_names or not tasks or len(set(tasks)) < len(tasks):
            raise ConfigCompositionException(
                f"{_TASKS} must be a list of different names, got {tasks!r}"
            )
    for key in with_lists:
        config[key] = expand_entries(contents[key], tasks)
    return "modelpool" in with_lists


def expand_entries(node: object, tasks: Iterable[str]) -> Any:
    """Return a node of a config in which each key `*` is replaced by one key per task."""
    if isinstance(node, list):
        return [expand_entries(item, tasks) for item in node]
    if not isinstance(node, Mapping):
        return node
    entries: dict[object, object] = {}
    for key, value in node.items():
        if key == EACH:
            entries |= {task: _with_task_name(value, task) for task in tasks if task not in node}
        else:
            entries[key] = expand_entries(value, tasks)
    return entries


def _with_task_name(node: object, task: str) -> object:
    """Return a node of a config in which each `*` of a text is replaced by the task's name."""
    if isinstance(node, Mapping):
        return {key: _with_task_name(value, task) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_task_name(item, task) for item in node]
    return node.replace(EACH, task) if isinstance(node, str) else node
