"""Digests of the models and data of one `featcal calibrate`, by which changes are noticed."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert, safetensors_files
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.files.json_files import digest_json, json_text
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.folders.options import INPUTS_FILE, flag_of
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.models.hub import fetch, needed_files
from fusion_bench_featcal.run.digests import WHOLE, digest_model
from fusion_bench_featcal.settings.fields import settings_of

_VOCABULARIES = ("vocab.txt", "merges.txt")
_COMPARED, _OF_TASKS = ("merged", "base", "expert"), ("data", "eval")
_MODELS = (*_COMPARED, "text_tower", "tokenizer")


def digests_of(request: Request) -> dict[str, str]:
    """Return option (with the task's name) -> digest of its files.

    Of a model the files that are used here count, of weights as much as `digest_model` reads. Data
    of the hub have the digest of their names.

    Raises:
        CalibrationError: If a model cannot be downloaded or read.
    """
    return {
        option: _digest(location, option, is_model=field in _MODELS)
        for field, option, location in _locations(request)
    }


def write_inputs(folder: Path, digests: Mapping[str, str]) -> None:
    """Write digests to a folder.

    Raises:
        ReportError: If they cannot be written.
    """
    write_atomic(folder / INPUTS_FILE, json_text(dict(digests)), "--out")


def changed_inputs(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """Return the options whose models or data differ from those of a folder's digests.

    Raises:
        ValueError: If the file with the digests is damaged.
    """
    former = read_json(folder / INPUTS_FILE) if (folder / INPUTS_FILE).exists() else digests
    return [option for option in digests if former.get(option) != digests[option]]


def repeats(request: Request, digests: Mapping[str, str] | None = None) -> list[str]:
    """Describe models, and data, that have several names.

    Args:
        request: The request.
        digests: Digests of all files, by which copies are noticed, too. Without them only one file
            or folder with several names is.
    """
    names = dict[tuple[bool, Any], list[str]]()
    for field, option, location in _locations(request):
        if field in (*_COMPARED, *_OF_TASKS):
            shown = "the merged model" if field == "merged" else option
            digest = None if digests is None else digests[option]
            key = field in _OF_TASKS, _identity(location, digest)
            names.setdefault(key, []).append(shown)
    return [
        f"{' and '.join(options)} {'are the same data' if is_data else 'are the same model'}"
        for (is_data, _), options in names.items()
        if len(options) > 1
    ]


def _identity(location: str, digest: str | None) -> Any:
    """Return a key that is equal for one file or folder, or one digest, and one split of it."""
    path, split = _local_path(location), location.rpartition(":")[2]
    if path is None:
        return location
    status = path.stat()
    is_whole = split == path.name or path == Path(location).expanduser()
    return digest or (status.st_dev, status.st_ino), "" if is_whole else split


def _locations(request: Request) -> Iterator[tuple[str, str, str]]:
    """Yield field, option with the task's name, and location of every model and data set."""
    for field in settings_of(Request):
        value = getattr(request, field.name) if field.metadata.get("is_location") else None
        option = "MERGED" if field.name == "merged" else flag_of(field.name)
        if isinstance(value, Mapping):
            yield from ((field.name, f"{option} {task}", place) for task, place in value.items())
        elif value is not None:
            yield field.name, option, value


def _digest(location: str, option: str, *, is_model: bool) -> str:
    """Return the digest of a location, and of the names and content of its files."""
    if is_model:
        path = fetch(location, f"{option} {location}", weights=option != "--tokenizer")
    elif (path := _local_path(location)) is None:
        return digest_json(location)
    files = {file.relative_to(path).as_posix(): file for file in _files(path)}
    if is_model and path.is_dir():
        used = needed_files(files, weights=option != "--tokenizer")
        unused = _unused(path, used)
        files = {name: files[name] for name in used if name not in unused}
    is_whole = is_model or sum(file.stat().st_size for file in files.values()) < WHOLE
    return digest_json({name: _digest_file(file, is_whole) for name, file in files.items()})


def _local_path(location: str) -> Path | None:
    """Return the path of data, or of a split of a saved dataset, or None for data of a hub."""
    folder, _, split = location.rpartition(":")
    paths = (Path(location), Path(folder, split), Path(folder)) if folder else (Path(location),)
    return next(filter(Path.exists, (path.expanduser() for path in paths)), None)


def _files(path: Path) -> Iterable[Path]:
    """Return a file, or those below a folder without hidden ones and caches of `datasets`."""
    files = [path] if path.is_file() else path.rglob("*")
    return (f for f in files if f.is_file() and not f.name.startswith((".", "cache-")))


def _unused(path: Path, names: Iterable[str]) -> set[str]:
    """Return files of a model's folder that nothing reads: logs, and weights beside its shards."""
    logs = {name for name in names if name.endswith(".txt")} - {*_VOCABULARIES}
    try:
        shards = {file.name for file in safetensors_files(path)}
    except FileNotFoundError:  # an adapter, or other weights
        return logs
    # Modules of sentence-transformers have folders.
    weights = {name for name in names if name.endswith(".safetensors") and "/" not in name}
    return logs | (weights - shards)


def _digest_file(file: Path, is_whole: bool) -> str | int:
    """Return the digest of a file, or its size if images are too many to read."""
    if file.suffix == ".safetensors":
        return digest_model(SafetensorsExpert(file))
    if not is_whole:
        return file.stat().st_size
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
