"""Models of the Hugging Face hub, downloaded into its cache without unneeded files."""

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars

from fusion_bench_featcal.bin_files import INDEX, convert
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files import free_space
from fusion_bench_featcal.hub_errors import hub_error
from fusion_bench_featcal.plurals import bytes_text, counted

log = logging.getLogger(__name__)

_CONFIGS = ("*.json", "*.txt", "*.model", "*.jinja", "mergekit_config.yml")
# Files of training and of other frameworks, and second copies of the weights.
_UNUSED = ("*.index.json", "trainer_state.json", "*_results.json", "params.json", "consolidated*")
_WEIGHTS = (
    (("model.safetensors", "adapter_model.safetensors"), "*.safetensors"),
    (("pytorch_model.bin", "adapter_model.bin"), "pytorch_model-*.bin"),
)
"""Files of weights in order of preference, for models and adapters, whole or in shards."""
_DATA_SETS: dict[str, str] = {}
_ASKED: dict[tuple[str, bool], "HubModel"] = {}


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
    """Return the paths of models, after downloading files that the cache lacks.

    If the hub fails, the cached version of a model is used.

    Args:
        locations: The option that names a model -> path or hub id.
        weights: As `fetch`.

    Raises:
        CalibrationError: If a model cannot be downloaded or read, or the disk has too little space
            for all. The message names the option, the cause and the remedy.
    """
    models = hub_models(locations, weights=weights)
    lacking = [model for model in models.values() if model.missing]
    _announce(lacking)
    on_terminal = sys.stderr.isatty()
    if not on_terminal:
        disable_progress_bars()
    for number, model in enumerate(lacking, 1):
        if len(lacking) > 1 and not on_terminal:
            size = bytes_text(sum(model.missing.values()))
            _say(f"{number} of {len(lacking)}: {model.location}, {size}")
        model.download()
    return {
        option: models[location].folder() if location in models else Path(location).expanduser()
        for option, location in locations.items()
    }


def hub_models(locations: Mapping[str, str], *, weights: bool = True) -> dict[str, "HubModel"]:
    """Return the models that are not local files or folders, by location.

    A completely downloaded model is taken from the cache, at its cached revision. For others the
    hub is queried once per run.

    Raises:
        CalibrationError: If the hub fails for a model that the cache lacks.
    """
    models: dict[str, HubModel] = {}
    for option, location in locations.items():
        if not _is_path(location) and location not in models:
            if location.startswith((".", "/", "~")) or os.path.islink(location):
                raise CalibrationError(f"{option}: there is no such file or folder here")
            model = _ASKED.get((location, weights))
            if model is None or model.missing:
                model = _whole(location, option) or _hub_model(location, option, weights=weights)
            models[location] = _ASKED[location, weights] = model
    return models


def is_here(location: str) -> bool:
    """Return whether a path exists or the hub's cache has weights of a model of that name."""
    snapshot = None if _is_path(location) else _cached(location)
    return _is_path(location) or (snapshot is not None and any(snapshot.glob("*.safetensors")))


def commits() -> dict[str, str]:
    """Return the commits of hub models and datasets that this process has used, by id."""
    models = {location: model.snapshot.name for (location, _), model in _ASKED.items()}
    return models | _DATA_SETS


def note_data_set(rows: Any) -> None:
    """Record the commit of a hub dataset, which is part of the paths of its files."""
    for file in getattr(getattr(rows, "_rows", rows), "cache_files", None) or ():
        *_, name, _, _, commit, _ = ("", "", "", "", *Path(file["filename"]).parts)
        if re.fullmatch("[0-9a-f]{40}", commit):
            _DATA_SETS[f"datasets/{name.replace('___', '/')}"] = commit


def needed_files(names: Iterable[str], *, weights: bool = True) -> list[str]:
    """Return the files of a repository that are needed here, sorted.

    These are configs, files of tokenizers and processors, and weights in safetensors files, or in
    `.bin` files if there are no safetensors files.
    """
    top = sorted(name for name in names if "/" not in name)  # not original/, onnx/
    used = [name for name in top if not any(fnmatch(name, pattern) for pattern in _UNUSED)]
    files = [name for name in used if any(fnmatch(name, pattern) for pattern in _CONFIGS)]
    for single, shards in _WEIGHTS if weights else ():
        weights_files = [n for n in used if n in single] or [n for n in used if fnmatch(n, shards)]
        if weights_files:
            index = [INDEX] if INDEX in top and weights_files[0].endswith(".safetensors") else []
            return files + weights_files + index
    return files


@dataclass
class HubModel:
    """A model of the hub at a revision.

    Attributes:
        location: Hub id with or without a revision.
        option: The option with its value that names it, for messages.
        snapshot: Its folder in the hub's cache.
        files: Needed files -> bytes.
    """

    location: str
    option: str
    snapshot: Path
    files: Mapping[str, int]

    @property
    def missing(self) -> dict[str, int]:
        """Needed files that the cache lacks -> bytes."""
        if self._converted.is_dir():
            return {}
        files, folder = self.files, self.snapshot
        return {name: size for name, size in files.items() if not (folder / name).exists()}

    @property
    def bins(self) -> dict[str, int]:
        """Needed `.bin` files, which are converted after the download -> bytes."""
        return {name: size for name, size in self.files.items() if name.endswith(".bin")}

    def download(self) -> None:
        """Download the missing files.

        Raises:
            CalibrationError: If the hub fails.
        """
        repo_id, _, revision = self.location.partition("@")
        names = list(self.files)
        try:
            folder = snapshot_download(repo_id, revision=revision or None, allow_patterns=names)
            self.snapshot = Path(folder)
        except Exception as error:  # the client, the network and the disk raise many types
            raise hub_error(error, self.option) from error
        self.mark()

    def mark(self) -> None:
        """Record next to the snapshots that all files of the model are in the cache."""
        if any(name.endswith((".safetensors", ".bin")) for name in self.files):
            with suppress(OSError):  # a cache may be read-only
                _marker(self.snapshot).parent.mkdir(exist_ok=True)
                _marker(self.snapshot).write_text("\n".join(self.files))

    def folder(self) -> Path:
        """Return the folder in the cache, after converting `.bin` files.

        Raises:
            CalibrationError: If they have content other than tensors.
        """
        converted = self._converted
        if self.bins and not converted.is_dir():
            _say(f"converting {', '.join(self.bins)} of {self.location} to safetensors, once")
            try:
                converted.parent.mkdir(exist_ok=True)
                convert(self.snapshot, self.files, converted)
            except CalibrationError as error:
                raise CalibrationError(f"{self.option}: {error}") from error
            except OSError as error:
                raise hub_error(error, self.option) from error
        return converted if converted.is_dir() else self.snapshot

    @property
    def _converted(self) -> Path:
        """Return a folder with the model's files and `.bin` files converted to safetensors."""
        return self.snapshot.parents[1] / "featcal" / self.snapshot.name


def _marker(snapshot: Path) -> Path:
    """Return the file next to the snapshots that lists a model's needed files."""
    return snapshot.parents[1] / "featcal" / f"{snapshot.name}.whole"


def _whole(location: str, option: str) -> HubModel | None:
    """Return a completely downloaded model, or None if the hub must be queried."""
    snapshot = _cached(location)
    if snapshot is None or not _marker(snapshot).exists():
        return None
    files = dict.fromkeys(_marker(snapshot).read_text().splitlines(), 0)
    model = HubModel(location, option, snapshot, files)
    return None if model.missing else model


def _hub_model(location: str, option: str, *, weights: bool) -> HubModel:
    """Query the hub for a model's commit and files, or use the cache if the hub fails.

    Raises:
        CalibrationError: If the hub fails, and the cache lacks the model.
    """
    repo_id, _, revision = location.partition("@")
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    options = {"revision": revision or None, "files_metadata": True, "timeout": timeout}
    try:
        info = HfApi().model_info(repo_id, **options)
    except Exception as error:  # the client and the network raise many types
        explained, snapshot = hub_error(error, option), _cached(location)
        if snapshot is None:
            raise explained from error
        model = HubModel(location, option, snapshot, {})
        sizes = {file.name: 0 for file in model.folder().iterdir()}
        log.info("%s. It is taken from the cache as it is", explained)
    else:
        folder = repo_folder_name(repo_id=repo_id, repo_type="model")
        snapshot = Path(constants.HF_HUB_CACHE, folder, "snapshots", str(info.sha))
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = {name: sizes[name] for name in needed_files(sizes, weights=weights)}
    return HubModel(location, option, snapshot, files)


def _cached(location: str) -> Path | None:
    """Return a model's folder in the hub's cache, or None."""
    repo_id, _, revision = location.partition("@")
    try:
        # No patterns: newer versions refuse a cached model that lacks any file that matches.
        folder = snapshot_download(
            repo_id, revision=revision or None, local_files_only=True, allow_patterns=[]
        )
        return Path(folder)
    except (OSError, HFValidationError):
        return None


def _is_path(location: str) -> bool:
    return os.path.exists(os.path.expanduser(location))


def _announce(models: Sequence[HubModel]) -> None:
    """Print the size of all downloads first, and refuse them if the disk lacks space."""
    if not models:
        return
    cache = Path(constants.HF_HUB_CACHE)
    free = free_space(cache)
    converted = sum(sum(model.bins.values()) for model in models)
    fetched = sum(sum(model.missing.values()) for model in models)
    names = [model.location for model in models]
    sizes = bytes_text(fetched)
    if converted:
        sizes += f" and {bytes_text(converted)} of .bin files converted"
    if fetched + converted > free:
        raise CalibrationError(
            f"{', '.join(names)}: no room for {sizes} on the disk of {cache}, which has "
            f"{bytes_text(free)} free. Make room, or set HF_HOME to a folder on another disk"
        )
    what = names[0] if len(names) == 1 else counted(len(names), "model")
    _say(f"fetching {what}, {sizes}, to {cache} ({bytes_text(free)} free)")


def _say(text: str) -> None:
    """Log a line or, if logging is not configured, print it with the results."""
    if log.isEnabledFor(logging.INFO):
        log.info(text)
    else:
        print(text, file=sys.stderr)
