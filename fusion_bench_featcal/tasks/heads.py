"""Class names and prompts in FusionBench's tables, and its stored classification heads."""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion_bench.tasks.clip_classification import CLIPTemplateFactory
from fusion_bench.utils import cache_utils

log = logging.getLogger(__name__)

Templates = Sequence[Callable[[str], str]]

DEFAULT_TEMPLATE = "a photo of a {}."
_OWNER_KEY = "registered_by"
_OWNER = "fusion_bench_featcal.tasks"


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with `{}` for the class name, called with the class name."""

    text: str

    def __call__(self, classname: str) -> str:
        """Return the prompt for one class."""
        return self.text.replace("{}", classname)


def known_names(task: str) -> tuple[list[str], Templates] | None:
    """Return class names and prompts that FusionBench or another plugin has for a task, if any."""
    entry = CLIPTemplateFactory._dataset_mapping.get(task)
    if entry is None or (isinstance(entry, dict) and entry.get(_OWNER_KEY) == _OWNER):
        return None
    return names_of(task)


def names_of(task: str) -> tuple[list[str], Templates]:
    """Return class names by label and prompts of a task that is known."""
    classnames, templates = CLIPTemplateFactory.get_classnames_and_templates(task)
    return list(classnames), list(templates)


def register_names(
    task: str, classnames: Sequence[str], templates: Sequence[PromptTemplate] | None
) -> None:
    """Register a task's class names and prompts with FusionBench, for all of its CLIP classes.

    FusionBench's `register_dataset` fails in release 0.2.33, so its table is written directly.

    Raises:
        ValueError: If FusionBench has other class names or prompts for that name.
    """
    registered = known_names(task)
    if registered is not None:
        names, prompts = registered
        same_prompts = [t(names[0]) for t in templates or prompts] == [t(names[0]) for t in prompts]
        if list(classnames) != names or not same_prompts:
            key = "classnames" if list(classnames) != names else "templates"
            raise ValueError(
                f"taskpool.tasks.{task}.{key}: FusionBench has other {key} for {task!r}. Leave "
                "them out to use FusionBench's, or rename the task (its expert and its data too), "
                f"say to 'my_{task}'."
            )
        return
    chosen = list(templates or [PromptTemplate(DEFAULT_TEMPLATE)])
    entry = {"classnames": list(classnames), "templates": chosen, _OWNER_KEY: _OWNER}
    table: dict = CLIPTemplateFactory._dataset_mapping
    if task in table and table[task] != entry:
        log.warning(
            "Task %r: its class names or prompts differ from those of an earlier pool.", task
        )
    table[task] = entry


def forget_stored_heads(tasks: Iterable[str], folder: Path | None = None) -> int:
    """Delete the zero-shot heads that FusionBench stored on disk for these tasks.

    FusionBench stores them by task name and model path only. A task with changed class names or
    another model would get the old head. Heads whose note cannot be read are deleted too.

    Returns:
        The number of deleted heads.
    """
    trusted = [repr(task) for task in set(CLIPTemplateFactory._dataset_mapping) - set(tasks)]
    deleted = 0
    root = folder or cache_utils.DEFAULT_CACHE_DIR
    for note in root.rglob("construct_classification_head/*/metadata.json"):
        try:
            task = json.loads(note.read_text(encoding="utf-8"))["input_args"]["task"]
        except (OSError, ValueError, KeyError, TypeError):
            task = None
        if task not in trusted:
            shutil.rmtree(note.parent, ignore_errors=True)  # another process may delete it as well
            deleted += 1
    return deleted
