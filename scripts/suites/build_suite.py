"""Train a bundled suite again: seeded, from the data in the package alone.

`python scripts/suites/build_suite.py --out FOLDER` runs this.
"""

import argparse
import copy
import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import clip_builder
import resnet_builder
import text_builder
import torch
import transformers
from safetensors.torch import load_file, save_file
from suite_training import Builder, Weights, write_json

from fusion_bench_featcal.files.suite_paths import pick, suite_path

BUILDERS: dict[str, type[Builder]] = {
    "clip-vit-mini": clip_builder.ClipBuilder,
    "flan-t5-mini": text_builder.TextBuilder,
    "llama-mini": text_builder.TextBuilder,
    "qwen3moe-mini": text_builder.MixtureBuilder,
    "resnet-mini": resnet_builder.ResNetBuilder,
}
TASK_ARITHMETIC_SCALE = 0.3

Accuracies = dict[str, float]


def build(
    out_dir: str | Path,
    suite: str = "clip-vit-mini",
    seed: int = 0,
    *,
    tasks: Sequence[str] | None = None,
    recipe: Any = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Train the base and one expert per task, save them in 16 bits, and measure the saved models.

    Takes 10 to 15 minutes on one core. The same seed, versions and machine give the same files.
    Another machine agrees within about 2 points of accuracy on average. The tokenizer or processor
    is copied from the package.

    Args:
        out_dir: A new or empty folder to write to.
        suite: A name in `BUILDERS`.
        seed: Seed of the initial weights and of every training stage.
        tasks: The tasks to train on, by default all, as in the shipped suite.
        recipe: The training recipe, by default that of the shipped suite.
        log: Called with each line of progress.

    Returns:
        `out_dir`, with `pretrained/` (base and processor or tokenizer), one folder per expert,
        `MEASURED.json` and `SHA256SUMS`.

    Raises:
        ValueError: For an unknown suite or task.
        FileExistsError: If `out_dir` is not empty.
    """
    kind = pick(BUILDERS, suite, "suite")
    named = {name: name for name in kind.TASKS}
    chosen = [pick(named, name, f"task of {suite}") for name in tasks or kind.TASKS]
    recipe = recipe or kind.RECIPES[suite]
    out = Path(out_dir)
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: give --out a new folder")
    copy_processor(suite, out / "pretrained")
    builder = kind(suite, out / "pretrained", chosen, recipe, seed, log)

    base = builder.new_model()
    log(f"{suite}: pretrained, {recipe.pretraining.steps} steps")
    builder.pretrain(base)
    whole = (builder.stored(base), base.config, type(base).__name__)
    save_half(*whole, builder, out / "pretrained")
    for task in chosen:
        model = copy.deepcopy(base)
        log(f"{suite}: {task}, {recipe.finetuning.steps} steps")
        builder.finetune(model, task)
        save_half(*builder.expert_part(model), builder, out / task)
    record = {
        "seed": seed,
        "recipe": asdict(recipe),
        "accuracies": measure(builder, base, out, chosen),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    write_json(out / "MEASURED.json", record)
    write_checksums(out)
    return out


def write_checksums(root: Path) -> None:
    """Write the checksum of every other file below `root`, in the format of `sha256sum`."""
    target = root / "SHA256SUMS"
    files = sorted(path for path in root.rglob("*") if path.is_file() and path != target)
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    names = [file.relative_to(root).as_posix() for file in files]
    lines = [f"{digest}  {name}\n" for digest, name in zip(digests, names, strict=True)]
    target.write_text("".join(lines), encoding="utf-8")


def copy_processor(suite: str, folder: Path) -> None:
    """Copy all files of the shipped base but its model and configuration into a new folder."""
    folder.mkdir(parents=True)
    for file in Path(suite_path(f"{suite}/pretrained")).iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)


def save_half(
    tensors: Weights, config: Any, architecture: str, builder: Builder, folder: Path
) -> None:
    """Save float32 tensors in 16 bits.

    transformers 5 loads in the dtype of the config, 4.57 always in float32, so the config has
    float32.
    """
    folder.mkdir(exist_ok=True)
    half = {
        name: (tensor.to(builder.STORED_IN) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    for part in (written, written.get("text_config"), written.get("vision_config")):
        if part is not None:
            part.pop("torch_dtype", None)
            part["dtype"] = "float32"
    if rope := written.pop("rope_parameters", None):  # which 4.57 does not read
        written["rope_theta"] = rope["rope_theta"]
    written |= {name: getattr(config, name) for name in builder.SPELLED_OUT}
    written["architectures"] = [architecture]
    path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def measure(builder: Builder, model: Any, folder: Path, tasks: Sequence[str]) -> dict[str, Any]:
    """Measure the saved base, experts and two plain merges on the test split.

    Args:
        builder: Measures a model.
        model: Any model of the build, whose weights are overwritten.
        folder: The build, with `pretrained` and one folder per task.
        tasks: The tasks that were built.

    Returns:
        `base`, `experts`, `simple_average` and `task_arithmetic` (scale 0.3), each task -> accuracy
        in 0..1 and their `average`. If the suite has sets of tasks, such rows for each set whose
        tasks were built.
    """
    model.eval().requires_grad_(False)
    builder.load(model, _read(folder / "pretrained"))
    if not builder.SETS:
        return _rows(builder, model, folder, tasks)
    built = {name: names for name, names in builder.SETS.items() if set(names) <= set(tasks)}
    return {name: _rows(builder, model, folder, names) for name, names in built.items()}


def _rows(
    builder: Builder, model: Any, folder: Path, tasks: Sequence[str]
) -> dict[str, Accuracies]:
    def accuracies(weights: Weights, names: Sequence[str]) -> Accuracies:
        builder.load(model, weights)
        return {task: builder.accuracy(model, task) for task in names}

    experts = {task: _read(folder / task) for task in tasks}
    base = {name: value for name, value in _read(folder / "pretrained").items()
            if name in experts[tasks[0]]}  # fmt: skip
    rows = {
        "base": accuracies(base, tasks),
        "experts": {task: accuracies(experts[task], [task])[task] for task in tasks},
    }
    for name, scale in (
        ("simple_average", 1 / len(tasks)),
        ("task_arithmetic", TASK_ARITHMETIC_SCALE),
    ):
        rows[name] = accuracies(merge(base, list(experts.values()), scale), tasks)
    return {name: {**row, "average": fmean(row.values())} for name, row in rows.items()}


def merge(base: Weights, experts: Sequence[Weights], scale: float) -> Weights:
    """Add the experts' summed changes to the base, times `scale`."""
    # Sums in float64, so that the order of the tasks does not matter.
    merged = {}
    for name, value in base.items():
        change = sum(expert[name].double() - value.double() for expert in experts)
        merged[name] = (value.double() + scale * change).to(value.dtype)
    return merged


def _read(folder: Path) -> Weights:
    return {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}


def main(words: Sequence[str] | None = None) -> None:
    """Build a suite by the arguments of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", metavar="DIR", required=True, help="a new folder")
    parser.add_argument("--suite", choices=tuple(BUILDERS), default="clip-vit-mini")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training")
    parser.add_argument("--task", action="append", metavar="NAME", help="only this, repeatable")
    options = parser.parse_args(words)
    print(f"built: {build(options.out, options.suite, options.seed, tasks=options.task)}")


if __name__ == "__main__":
    main()
