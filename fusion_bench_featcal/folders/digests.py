"""Digests of the models and data of one `featcal calibrate`, by which changes are noticed."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from fusion_bench_featcal.experts.source import WHOLE
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.files.json_files import digest_json, json_text
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.folders.options import INPUTS_FILE
from fusion_bench_featcal.folders.request import labelled
from fusion_bench_featcal.models.hub import fetch, needed_files
from fusion_bench_featcal.results.notes import WARNING, Note, notes_of


def digests_of(models: InputModels) -> dict[str, str]:
    """Return option (with the task's name) -> digest of its files.

    Of a model the files that are used here count, of weights as much as their `digest` reads. Data
    of the hub have the digest of their names.

    Raises:
        CalibrationError: If a model cannot be downloaded or read.
    """
    request, opened = models.request, filter(None, (*models.by_name.values(), models.text_tower))
    digests = {model.option: _digest_model(model) for model in opened}
    if (location := request.tokenizer) is not None:
        folder = fetch(location, labelled("--tokenizer", location), weights=False)
        digests["--tokenizer"] = _digest_files(_used_files(folder, weights=False))
    data = dict(request.data_options)
    if request.chat_template is not None:
        data["--chat-template"] = request.chat_template
    return digests | {option: _digest_data(location) for option, location in data.items()}


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


def repeats(models: InputModels, digests: Mapping[str, str]) -> list[Note]:
    """Warn of models, and data, that are given twice, as one folder or as copies."""
    request, texts = models.request, list[str]()
    groups = {
        "are the same model": request.model_options,
        "are the same data": request.data_options,
    }
    for text, options in groups.items():
        by_digest = dict[str, list[str]]()
        for option in options:
            name = "the merged model" if option == "MERGED" else option
            by_digest.setdefault(digests[option], []).append(name)
        texts += [f"{' and '.join(names)} {text}" for names in by_digest.values() if names[1:]]
    return notes_of(texts, WARNING)


def _digest_model(model: ModelFolder) -> str:
    """Return the digest of the files of a model that are used here."""
    files, opened = _used_files(model.folder), dict[str, str]()
    if (weights := model.weights) is not None:
        opened = {"config.json": digest_json(model.config), "weights": weights.digest}
        # Modules of sentence-transformers are in folders.
        read = [name for name in files if name.endswith(".safetensors") and "/" not in name]
        files = {name: file for name, file in files.items() if name not in (*read, "config.json")}
    return _digest_files(files, opened)


def _digest_data(location: str) -> str:
    """Return the digest of data: of files or a folder here, with the split if one is named."""
    folder, _, split = location.rpartition(":")
    places = [(location, ""), (f"{folder}/{split}", ""), (folder, split)][: 3 if folder else 1]
    paths = ((Path(place).expanduser(), split) for place, split in places)
    path, split = next(((path, split) for path, split in paths if path.exists()), (None, ""))
    if path is None:
        return digest_json(location)
    files = {file.relative_to(path).as_posix(): file for file in _visible(path)}
    is_whole = sum(file.stat().st_size for file in files.values()) < WHOLE
    return _digest_files(files, {"split": split}, is_whole=is_whole)


def _digest_files(
    files: Mapping[str, Path], opened: Mapping[str, str] | None = None, *, is_whole: bool = True
) -> str:
    """Return the digest of files and of what was opened before.

    Args:
        files: Name -> file.
        opened: Name -> digest of what is not read here.
        is_whole: Whether the content counts, not just the size, as of images too many to read.
    """
    digests = dict[str, str | int](opened or {})
    for name, file in files.items():
        digests[name] = file.stat().st_size
        if is_whole:
            with file.open("rb") as stream:
                digests[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digest_json(digests)


def _used_files(folder: Path, *, weights: bool = True) -> dict[str, Path]:
    """Return name -> file, of those in a model's folder that are used here."""
    files = {file.relative_to(folder).as_posix(): file for file in _visible(folder)}
    return {name: files[name] for name in needed_files(files, weights=weights)}


def _visible(path: Path) -> Iterator[Path]:
    """Yield a file, or those below a folder without hidden ones and caches of `datasets`."""
    files = [path] if path.is_file() else path.rglob("*")
    return (f for f in files if f.is_file() and not f.name.startswith((".", "cache-")))
