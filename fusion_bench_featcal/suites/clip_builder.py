"""Builds the weights of the bundled image suite: seeded, from the data in the package alone."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion_bench_featcal.suites.checksums import write_checksums
from fusion_bench_featcal.suites.half_files import empty_folder, save_half
from fusion_bench_featcal.suites.image import ALL8, find_task, load_arrays

if TYPE_CHECKING:
    from transformers import CLIPModel

    from fusion_bench_featcal.suites.clip_training import Recipe


def build(
    out_dir: str | Path,
    seed: int = 0,
    *,
    tasks: Sequence[str] = ALL8,
    recipe: "Recipe | None" = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Train the base and one expert a task, save them in float16, and measure what was saved.

    Takes about a quarter of an hour on one core. The same seed, versions and machine give the same
    files; another machine agrees within about 2 points of accuracy on average.

    Args:
        out_dir: folder to write to; it must not hold a build already.
        seed: seed of the initial weights and of every training stage.
        tasks: the tasks to train on (all eight in the shipped suite).
        recipe: the training recipe, by default the one the shipped suite was built with.
        log: called with each line of progress.

    Returns:
        `out_dir`, with `pretrained/` (a CLIPModel and its processor), one CLIPVisionModel folder a
        task, `MEASURED.json` and `SHA256SUMS`.

    Raises:
        ValueError: for an unknown task.
        FileExistsError: when `out_dir` holds files already.
    """
    from transformers import CLIPProcessor

    from fusion_bench_featcal.suites import clip_training, clip_vocabulary
    from fusion_bench_featcal.suites.clip_measure import measure_suites

    chosen = {name: find_task(name) for name in tasks}
    recipe = recipe or clip_training.Recipe()
    out = empty_folder(Path(out_dir))
    pretrained = out / "pretrained"
    pretrained.mkdir()
    # the vocabulary covers all tasks, so that the model's shape does not depend on the choice
    prompts = [prompt for name in ALL8 for prompt in load_arrays(name).prompts()]
    vocabulary = clip_vocabulary.write_processor(pretrained, prompts)
    processor: Any = CLIPProcessor.from_pretrained(pretrained)
    sets = {name: clip_training.TrainingSet.load(name, processor) for name in chosen}

    log(f"pretraining on {len(sets)} tasks, {recipe.pretraining.steps} steps")
    base = clip_training.new_model(vocabulary, seed)
    clip_training.pretrain(base, sets, recipe, seed, log)
    save_base(base, pretrained)
    for name, task in chosen.items():
        log(f"expert {name}, {recipe.finetuning.steps} steps")
        model = copy.deepcopy(base)
        clip_training.finetune(model, task, sets[name], recipe, seed, log)
        save_expert(model, out / name)
    record = {"seed": seed, "recipe": asdict(recipe), **measure_suites(out, tasks)}
    (out / "MEASURED.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_checksums(out)
    return out


def save_base(model: "CLIPModel", folder: Path) -> None:
    """Save a whole CLIP in float16."""
    save_half(model.state_dict(), model.config, "CLIPModel", folder)


def save_expert(model: "CLIPModel", folder: Path) -> None:
    """Save the vision tower of a CLIP in float16, as a `CLIPVisionModel`."""
    # Tensors are named as all versions of transformers read them. From 5.6 on, a tower's own
    # `save_pretrained` leaves out the prefix, and older versions would then load nothing.
    tower = model.vision_model.state_dict()
    named = {f"vision_model.{name}": tensor for name, tensor in tower.items()}
    save_half(named, model.config.vision_config, "CLIPVisionModel", folder)
