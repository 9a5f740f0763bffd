"""Models of the Hugging Face hub, downloaded into its client's cache, and causes of failures."""

import errno
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import causes, first_line
from fusion_bench_featcal.errors.nearest_names import nearest_hint
from fusion_bench_featcal.errors.plurals import bytes_text, pluralize
from fusion_bench_featcal.files import free_space

log = logging.getLogger(__name__)
T = TypeVar("T")

MODULES = "modules.json"
"""File of sentence-transformers that lists an encoder and its modules, with their folders."""
_NOTICES = ["LICENSE*", "LICENCE*", "NOTICE*"]
_VOCABULARIES = ["vocab.txt", "merges.txt", "dict.txt"]
MERGEKIT_CONFIG = "mergekit_config.yml"
_CONFIGS = ["*.json", *_VOCABULARIES, "*.model", "*.jinja", MERGEKIT_CONFIG]
# Folders of an encoder's modules, such as 1_Pooling.
_ENDINGS = ("json", "txt", "model", "safetensors", "bin")
_MODULES = [f"[1-9]_*/*.{ending}" for ending in _ENDINGS]
_INNER = [f"0_*/*.{ending}" for ending in _ENDINGS]
"""The transformer of an early encoder, which has none in the folder itself."""
# Subfolders, files of training, and second copies of the weights.
_UNUSED = ["*/*", "trainer_state.json", "*_results.json", "params.json", "consolidated*"]
_WEIGHTS = (
    ["model.safetensors", "adapter_model.safetensors"],
    ["*.safetensors"],
    ["pytorch_model.bin", "adapter_model.bin"],
    ["pytorch_model-*.bin"],
)
"""Files of weights, whole or in shards. The first entry that matches any file is used."""


@dataclass
class HubModel:
    """A model of the hub.

    Attributes:
        location: Hub id with or without a revision (`org/model@v1`).
        option: The option with its value that names it, for messages.
        folder: Its folder in the cache, whose name is the commit.
        files: Needed files -> bytes. Empty if the hub failed and the cached version is used.
        hashes: Files -> hashes that the hub names: sha256 of large files, git's sha1 of others.
    """

    location: str
    option: str
    folder: Path
    files: Mapping[str, int]
    hashes: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def missing(self) -> dict[str, int]:
        """Needed files that the cache lacks -> bytes."""
        files, folder = self.files, self.folder
        return {name: size for name, size in files.items() if not (folder / name).exists()}


_TRANSPORTS = ("requests", "urllib3", "httpx", "httpcore")  # of several releases of the client
_TRANSIENT = (429, 500, 502, 503, 504)
_WAITS = (1, 2, 4, 8, 8)  # seconds, as the client
_LOG_IN = "log in (hf auth login)"
_AGAIN, _RESUMES = "run the command again", ". The download resumes"

_MODELS: dict[tuple[str, bool], HubModel] = {}
"""Location and whether weights are needed -> model, for all models of this process."""
_DATA_SETS: dict[str, str] = {}


def fetch(location: str, option: str, *, weights: bool = True) -> Path:
    """Return the path of a local file or folder, or the folder of a downloaded hub model.

    Args:
        location: Path, or hub id with or without a revision (`org/model@v1`).
        option: The option with its value that names it, such as `--base org/model`.
        weights: Whether weights are needed, or only configs and files of processors.

    Raises:
        CalibrationError: As `fetch_all`.
    """
    return fetch_all({option: location}, weights=weights)[option]


def fetch_all(locations: Mapping[str, str], *, weights: bool = True) -> dict[str, Path]:
    """Return the paths of models, after downloading the files that the cache lacks.

    Args:
        locations: The option that names a model -> path or hub id.
        weights: As `fetch`.

    Raises:
        CalibrationError: If a model cannot be downloaded, or the disk has too little space for
            all. The message names the option, the cause and the remedy.
    """
    models = hub_models(locations, weights=weights)
    if lacking := [model for model in models.values() if model.missing]:
        sizes = [size for model in lacking for size in model.missing.values()]
        names = lacking[0].location if len(lacking) == 1 else pluralize(len(lacking), "model")
        text = f"{names}: {pluralize(len(sizes), 'file')}, {bytes_text(sum(sizes))}"
        if sum(sizes) > free_space(Path(constants.HF_HUB_CACHE)):
            raise CalibrationError(f"{text}: {_no_room()}")
        print(f"downloading {text}, to {constants.HF_HUB_CACHE}", file=sys.stderr)
        if not sys.stderr.isatty():
            disable_progress_bars()
    for model in lacking:
        (repo_id, revision), new = _parts(model.location), [*model.missing]
        try:
            download = partial(snapshot_download, repo_id, revision=revision)
            patiently(partial(download, allow_patterns=[*model.files]))
        except Exception as error:  # the client, the network and the disk raise many types
            raise hub_error(error, model.option) from error
        for name in new:
            _check_bytes(model, name)
    paths = {location: Path(location).expanduser() for location in locations.values()}
    paths |= {location: model.folder for location, model in models.items()}
    return {option: paths[location] for option, location in locations.items()}


def _check_bytes(model: HubModel, name: str) -> None:
    """Refuse and remove a downloaded file whose size or hash is not the hub's."""
    file, expected = (model.folder / name).resolve(), model.hashes.get(name)
    with file.open("rb") as stream:
        is_large = len(expected or "") == 64
        digest = sha_fileobj(stream).hex() if is_large else git_hash(stream.read())
    if file.stat().st_size != model.files[name] or digest != (expected or digest):
        file.unlink()
        raise CalibrationError(
            f"{model.option}: the downloaded {name} differs from the file on the hub and was "
            f"removed. Check the network, and {_AGAIN}"
        )


def hub_models(locations: Mapping[str, str], *, weights: bool = True) -> dict[str, HubModel]:
    """Return the models that are not local files or folders, by location.

    The hub is queried once for each. If it fails, the cached version is used.

    Raises:
        CalibrationError: If the hub fails for a model that the cache lacks.
    """
    models: dict[str, HubModel] = {}
    for option, location in locations.items():
        if not os.path.exists(os.path.expanduser(location)):
            key = (location, weights or (location, True) in _MODELS)
            if key not in _MODELS:
                _MODELS[key] = _query(location, option, weights=weights)
            models[location] = _MODELS[key]
    return models


def commits() -> dict[str, str]:
    """Return the commits of hub models and datasets that this process has used, by id."""
    models = {location: model.folder.name for (location, _), model in _MODELS.items()}
    return models | _DATA_SETS


def note_data_set(rows: object) -> None:
    """Record the commit of a hub dataset, which is part of the paths of its files."""
    for file in getattr(getattr(rows, "_rows", rows), "cache_files", None) or ():
        path = Path(file["filename"]).as_posix()
        if match := re.search(r"([^/]+)/[^/]+/[^/]+/([0-9a-f]{40})/[^/]+$", path):
            _DATA_SETS[f"datasets/{match[1].replace('___', '/')}"] = match[2]


def needed_files(names: Iterable[str], *, weights: bool = True, notices: bool = False) -> list[str]:
    """Return the files of a repository that are needed here.

    These are configs, files of tokenizers and processors, modules of sentence-transformers, and
    weights in safetensors files, or in `.bin` files if there are no safetensors files. With
    `notices` these are also licences, which no result depends on.
    """
    names = sorted(names)
    used = list(filter_repo_objects(names, ignore_patterns=_UNUSED))

    def matching(patterns: list[str]) -> list[str]:
        return list(filter_repo_objects(used, allow_patterns=patterns))

    weight_files = next(filter(None, map(matching, _WEIGHTS)), []) if weights else []
    patterns = _MODULES if weight_files else [*_MODULES, *_INNER]
    modules = list(filter_repo_objects(names, allow_patterns=patterns)) if weights else []
    return matching(_CONFIGS + _NOTICES * notices) + modules + weight_files


def _query(location: str, option: str, *, weights: bool) -> HubModel:
    """Query the hub for a model's commit and files, or use the cache if the hub fails."""
    repo_id, revision = _parts(location)
    folder, timeout = _cached(location, weights=weights), constants.HF_HUB_ETAG_TIMEOUT
    query = partial(HfApi().model_info, repo_id, files_metadata=True, timeout=timeout)
    query = partial(query, revision=revision)
    try:
        info = patiently(query) if folder is None else query()
    except Exception as error:  # the client and the network raise many types
        path = Path(location).expanduser()  # a hub id may be a mistyped path
        names = os.listdir(path.parent) if path.parent.is_dir() else ()
        hint = nearest_hint(path.name, names)
        explained = hub_error(error, f"{option}{hint}", is_lookup=True)
        if folder is None:
            raise explained from error
        log.info("%s. The cached version is used", explained)
        return HubModel(location, option, folder, {})
    repository = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo_id, repo_type="model"))
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = {name: sizes[name] for name in needed_files(sizes, weights=weights, notices=weights)}
    hashes = {f.rfilename: f.lfs.sha256 if f.lfs else f.blob_id for f in info.siblings or ()}
    return HubModel(location, option, repository / "snapshots" / str(info.sha), files, hashes)


def _cached(location: str, *, weights: bool) -> Path | None:
    """Return a model's folder in the hub's cache, or None if it is absent or lacks weights."""
    repo_id, revision = _parts(location)
    try:
        # Without patterns the client would refuse a folder that lacks any file of the repository.
        folder = snapshot_download(
            repo_id, revision=revision, local_files_only=True, allow_patterns=[]
        )
    except (OSError, HFValidationError):
        return None
    suffixes = {file.suffix for file in Path(folder).iterdir()}
    return Path(folder) if not weights or suffixes & {".safetensors", ".bin"} else None


def _parts(location: str) -> tuple[str, str | None]:
    """Return the id of a repository, and the revision if there is one."""
    repo_id, _, revision = location.partition("@")
    return repo_id, revision or None


def patiently(call: Callable[[], T]) -> T:
    """Call the hub's client, which repeats only some of its requests, until the hub is not busy."""
    for wait in _WAITS:
        try:
            return call()
        except Exception as error:  # the client, the network and the disk raise many types
            if (status := status_of(error)) not in _TRANSIENT:
                raise
            log.info("the hub is busy (%d). The next try is in %d s", status, wait)
            time.sleep(wait)
    return call()


def hub_error(error: BaseException, option: str, *, is_lookup: bool = False) -> CalibrationError:
    """Return an error with the cause of a failed download, and the remedy.

    Args:
        error: The error of the hub's client, or an error caused by it.
        option: The option with its value that names the file or model.
        is_lookup: Whether nothing was downloaded yet.
    """
    cause = hub_cause(error, is_lookup=is_lookup) or first_line(error)
    return CalibrationError(f"{option}: {cause}")


def hub_cause(error: BaseException, *, is_lookup: bool = False) -> str | None:
    """Return why the hub, the network or the cache's disk failed, and the remedy.

    Returns None if they did not cause the error.
    """
    retry = _AGAIN if is_lookup else _AGAIN + _RESUMES
    chain = list(causes(error))
    texts, kinds = " ".join(map(str, chain)), {type(link).__name__ for link in chain}
    status = status_of(error)

    def is_any(*types: type[BaseException]) -> bool:
        return any(isinstance(link, types) for link in chain)

    # hf_xet is written in Rust and has no class for a full disk.
    full = any(getattr(link, "errno", 0) in (errno.ENOSPC, errno.EDQUOT) for link in chain)
    if full or "(os error 28)" in texts:
        return _no_room()
    if is_any(GatedRepoError) or "is a gated dataset" in texts:
        return f"access is restricted. Ask for it on the hub's page and {_LOG_IN}"
    # `datasets` hides the cause of its error.
    if is_any(HFValidationError) or status in (401, 403, 404) or "DatasetNotFoundError" in kinds:
        return (
            "there is no such file or folder here, and nothing of that name on the hub. Correct "
            f"it, or {_LOG_IN} if it is private"
        )
    if is_any(OfflineModeIsEnabled) or (constants.HF_HUB_OFFLINE and is_any(ConnectionError)):
        return (
            "there is no such file or folder here. HF_HUB_OFFLINE is set, and the cache "
            f"{constants.HF_HUB_CACHE} lacks it. Correct it, or unset HF_HUB_OFFLINE"
        )
    if status == 429 or status >= 500:
        return f"the hub is busy ({status}). Wait, or {_LOG_IN}, and {retry}"
    is_network = any(type(link).__module__.startswith(_TRANSPORTS) for link in chain)
    if is_network or is_any(ConnectionError, TimeoutError):
        return (
            "there is no such file or folder here, and the hub at "
            f"{constants.ENDPOINT} does not answer. Check the network and {retry}"
        )
    return None


def status_of(error: BaseException) -> int:
    """Return the status of the hub's answer that caused an error, or 0 without an answer."""
    answers = (getattr(link, "response", None) for link in causes(error))
    return next((answer.status_code for answer in answers if answer is not None), 0)


def _no_room() -> str:
    """Return a sentence on the cache's full disk."""
    cache = Path(constants.HF_HUB_CACHE)
    return (
        f"no room on the disk of {cache}, which has {bytes_text(free_space(cache))} free. Make "
        "room, or set HF_HOME to a folder on another disk"
    )
