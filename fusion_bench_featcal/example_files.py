"""The examples in the package, copied for users to run and change."""

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Example:
    """A folder or file below `examples/`, and the commands that run its copy."""

    source: str
    summary: str
    commands: tuple[str, ...]


EXAMPLES = {
    "own-task": Example(
        "own_task",
        "images in folders and a model fine-tuned on them, beside the tasks of a bundled suite",
        ("python make_task.py my_alphabet", "fusion_bench method=featcal modelpool=my_pool"),
    ),
    "own-method": Example(
        "own_method",
        "a post-merging method of one file, compared with FeatCal",
        (
            "fusion_bench method=compare modelpool=clip-vit-mini_TA6 method.samples_per_task=16 "
            "method.upstreams=[task_arithmetic] method.alone=[] "
            "method.post_merging=[scaled,featcal] "
            "'+method.post_merging_methods.scaled={_target_: my_methods.Scaled, scale: 1.3}'",
        ),
    ),
    "folders": Example(
        "folders",
        "folders of models and data for featcal calibrate, as mergekit, PEFT and CLIP users have",
        ("python make_folders.py mergekit mergekit",),
    ),
    "own-family": Example(
        "own_family",
        "a model family of your own, chosen in YAML by _target_",
        ("fusion_bench method=last_blocks modelpool=clip-vit-mini_alphabets2",),
    ),
    "python-api": Example(
        "python_api.py",
        "calibration in Python, without FusionBench",
        ("python python_api.py",),
    ),
    "walkthrough": Example(
        "walkthrough.ipynb",
        "a notebook: drift of a merged model, block by block, and what calibration does to it",
        ("jupyter execute --inplace walkthrough.ipynb",),
    ),
    "studies": Example(
        "studies.sh",
        "sweeps for the paper's tables and figures (hours)",
        ("./studies.sh",),
    ),
}
_PACKAGE = Path(__file__).resolve().parent


def examples_folder(package: Path = _PACKAGE) -> Path:
    """Return the folder of the examples in the source tree, else in the package.

    Raises:
        FileNotFoundError: If the installation has neither.
    """
    # In an editable install the package's folder has an outdated copy.
    for folder in (package.parent / "examples", package / "examples"):
        if (folder / EXAMPLES["own-task"].source).is_dir():
            return folder
    raise FileNotFoundError(f"no examples in {package}: install fusion_bench_featcal again")


def copy_example(name: str, folder: Path) -> list[str]:
    """Copy an example's files.

    Args:
        name: A key of `EXAMPLES`.
        folder: A new or empty folder.

    Returns:
        The commands that run it. The first one changes to the folder.

    Raises:
        ValueError: If there is no such example, or the folder is not empty.
    """
    example = EXAMPLES.get(name)
    if example is None:
        raise ValueError(f"no example {name!r}; there are {', '.join(EXAMPLES)}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"example {name}: {folder} exists and is not empty; choose another folder")
    source = examples_folder() / example.source
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, folder)
    return [f"cd {shlex.quote(str(folder))}", *example.commands]
