"""Models of the Hugging Face hub, fetched into its cache without the files that nobody reads."""

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from fusion_bench_featcal.bin_files import INDEX, convert
from fusion_bench_featcal.files import free_space, write_whole
from fusion_bench_featcal.hub_errors import RETRIES, hub_error, with_retries
from fusion_bench_featcal.plurals import bytes_text, counted
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

_CONFIGS = ("*.json", "*.txt", "*.model", "*.jinja", "mergekit_config.yml")
# Of training, of other frameworks, and second copies of the weights.
_UNUSED = ("*.index.json", "trainer_state.json", "*_results.json", "params.json", "consolidated*")
_WEIGHTS = (
    (("model.safetensors", "adapter_model.safetensors"), "*.safetensors"),
    (("pytorch_model.bin", "adapter_model.bin"), "pytorch_model-*.bin"),
)
"""Weights in the order of preference: of models and adapters in one file, or in shards."""
_THREADS = 8
_COMMITS: dict[str, str] = {}


def fetch(location: str, option: str, *, weights: bool = True) -> Path:
    """Return the path of a file or folder that is here, else the folder of a model of the hub.

    Args:
        location: Path, or hub id with or without a revision (`org/model@v1`).
        option: The option with its value that names it, such as `--base org/model`.
        weights: Whether the weights are needed, or only configs and the files of processors.

    Raises:
        CalibrationError: As `fetch_all`.
    """
    return fetch_all({option: location}, weights=weights)[option]


def fetch_all(locations: Mapping[str, str], *, weights: bool = True) -> dict[str, Path]:
    """Return the paths of models, after what the cache lacks of all of them was downloaded.

    A model that is whole in the cache is not asked for. One that another program has put there is
    compared with the hub's list, or taken as it is if the hub fails.

    Args:
        locations: The option that names a model -> path or hub id.
        weights: As `fetch`.

    Raises:
        CalibrationError: If a model cannot be had, or all have no room on the disk: it names the
            option, the cause and the remedy.
    """
    models = {option: HubModel(location, option) for option, location in locations.items()}
    lacking = lacking_models(models.values(), weights=weights)
    _announce(lacking)
    on_terminal = sys.stderr.isatty()
    if not on_terminal:
        disable_progress_bars()
    for number, model in enumerate(lacking, 1):
        if len(lacking) > 1 and not on_terminal:
            size = bytes_text(sum(model.missing.values()))
            _say(f"{number} of {len(lacking)}: {model.location}, {size}")
        with _or_as_it_is(model):
            with_retries(model.download, model.option, model.retries)
    return {option: model.folder() for option, model in models.items()}


def lacking_models(models: Iterable["HubModel"], *, weights: bool = True) -> list["HubModel"]:
    """Ask the hub for models that are not whole in the cache; return those with missing files.

    Raises:
        CalibrationError: If the hub fails for a model that no other program has fetched.
    """
    asked: dict[str, HubModel] = {}
    for model in models:
        if model.location not in asked and not model.is_whole(weights=weights):
            with _or_as_it_is(model):
                with_retries(partial(model.ask, weights), model.option, model.retries)
            asked[model.location] = model
    return [model for model in asked.values() if model.missing]


def is_here(location: str) -> bool:
    """Return whether a path exists or the hub's cache has weights of a model of that name."""
    model = HubModel(location)
    snapshot = model.snapshot
    return model.is_whole() or (snapshot is not None and any(snapshot.glob("*.safetensors")))


def commits() -> dict[str, str]:
    """Return the commits of the hub's models and data sets that this process has used, by id."""
    return dict(_COMMITS)


def note_data_set(rows: Any) -> None:
    """Note the commit of a data set of the hub, which `datasets` has in the paths of its files."""
    for file in getattr(getattr(rows, "_rows", rows), "cache_files", None) or ():
        *_, name, _, _, commit, _ = ("", "", "", "", *Path(file["filename"]).parts)
        if re.fullmatch("[0-9a-f]{40}", commit):
            _COMMITS[f"datasets/{name.replace('___', '/')}"] = commit


def needed_files(names: Iterable[str], *, weights: bool = True) -> list[str]:
    """Return the files of a repository that are read here, sorted.

    They are configs, files of tokenizers and processors, and weights in safetensors files, or in
    `.bin` files where there are no others.
    """
    top = sorted(name for name in names if "/" not in name)  # original/, checkpoints, onnx/
    used = [name for name in top if not any(fnmatch(name, pattern) for pattern in _UNUSED)]
    files = [name for name in used if any(fnmatch(name, pattern) for pattern in _CONFIGS)]
    for single, shards in _WEIGHTS if weights else ():
        found = [n for n in used if n in single] or [n for n in used if fnmatch(n, shards)]
        if found:
            index = [INDEX] if INDEX in top and found[0].endswith(".safetensors") else []
            return files + found + index
    return files


class HubModel:
    """A model of the hub at a revision, and what the hub's cache has of it.

    Attributes:
        location: Path, or hub id with or without a revision.
        option: The option with its value that names it, for messages.
        is_path: Whether it is a file or folder that is here, with @ in its name or not.
        repo_id: Its id.
        revision: Branch, tag or commit.
        retries: Further tries where the hub fails; none where another program's copy can be taken.
        missing: Files that the cache lacks -> bytes, once the hub was asked.
        bins: Bytes of its `.bin` files, which are converted afterwards.
    """

    _as_they_are: dict[Path, dict[str, int]] = {}  # noqa: RUF012 (files by snapshot, of all models)

    def __init__(self, location: str, option: str = "") -> None:
        """Look for the path, else into the cache."""
        self.location = location
        self.option = option
        self.is_path = _is_path(location)
        self.repo_id, _, revision = location.partition("@")
        self.revision = revision or constants.DEFAULT_REVISION
        name = self.repo_id.replace("/", "--")
        self._cache = Path(constants.HF_HUB_CACHE) / f"models--{name}"
        self.retries = RETRIES if self.snapshot is None or self._listed() is not None else 0
        self.missing: dict[str, int] = {}
        self.bins = 0

    @property
    def snapshot(self) -> Path | None:
        """The revision's folder in the cache; None: there is none."""
        ref = self._cache / "refs" / self.revision
        try:
            commit = ref.read_text().strip()
        except OSError:
            commit = self.revision
        folder = self._cache / "snapshots" / commit
        return folder if os.path.isdir(folder) else None

    def is_whole(self, *, weights: bool = True) -> bool:
        """Return whether it is here with all files that it has on the hub and that are needed."""
        snapshot, files = self.snapshot, self._listed()
        if self.is_path or snapshot is None or files is None:
            return self.is_path
        if self._converted(snapshot).is_dir():
            return True
        return all((snapshot / name).exists() for name in needed_files(files, weights=weights))

    def folder(self) -> Path:
        """Return the path, or the folder in the cache, in which `.bin` files are converted first.

        Raises:
            CalibrationError: If they hold more than tensors.
        """
        snapshot = self.snapshot
        if self.is_path or snapshot is None:
            return Path(self.location).expanduser()
        _COMMITS[self.location] = snapshot.name
        converted = self._converted(snapshot)
        names = [n for n in needed_files(self._listed() or {}) if (snapshot / n).exists()]
        bins = [name for name in names if name.endswith(".bin")]
        if bins and not converted.is_dir():
            _say(f"converting {', '.join(bins)} of {self.location} to safetensors, once")
            try:
                convert(snapshot, names, converted)
            except CalibrationError as error:
                raise CalibrationError(f"{self.option}: {error}") from error
            except OSError as error:
                raise hub_error(error, self.option) from error
        return converted if converted.is_dir() else snapshot

    def ask(self, weights: bool) -> None:
        """Ask the hub for the revision's commit and files; the list is noted in the cache."""
        validate_repo_id(self.repo_id)
        info = HfApi().model_info(
            self.repo_id,
            revision=None if self.revision == constants.DEFAULT_REVISION else self.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        commit = str(info.sha)
        files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        notes = {self._cache / "featcal" / f"{commit}.json": json.dumps(files)}
        if commit != self.revision:
            notes[self._cache / "refs" / self.revision] = commit
        for file, text in notes.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text.encode())
        snapshot = self._cache / "snapshots" / commit
        snapshot.mkdir(parents=True, exist_ok=True)
        names = needed_files(files, weights=weights)
        self.bins = sum(files[name] for name in names if name.endswith(".bin"))
        self.missing = {name: files[name] for name in names if not (snapshot / name).exists()}

    def download(self) -> None:
        """Download the missing files."""
        snapshot = self.snapshot
        assert snapshot is not None  # `ask` has made it
        get = partial(hf_hub_download, self.repo_id, revision=snapshot.name)
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(get, self.missing))

    def take_as_it_is(self) -> bool:
        """Take what another program has put into the cache; return whether there is something."""
        snapshot = self.snapshot
        if self.retries or snapshot is None:
            return False
        self._as_they_are[snapshot] = {file.name: 0 for file in snapshot.iterdir()}
        return True

    def _listed(self) -> dict[str, int] | None:
        """Files that the revision has on the hub, with their sizes; None: that is not known."""
        snapshot = self.snapshot
        if snapshot is None or snapshot in self._as_they_are:
            return self._as_they_are.get(snapshot) if snapshot else None
        try:
            files = json.loads((self._cache / "featcal" / f"{snapshot.name}.json").read_text())
        except (OSError, ValueError):
            return None
        return files if isinstance(files, dict) else None

    def _converted(self, snapshot: Path) -> Path:
        """Folder with the model's files in which `.bin` files have become safetensors files."""
        return self._cache / "featcal" / snapshot.name


def _is_path(location: str) -> bool:
    try:
        os.stat(Path(location).expanduser())
    except PermissionError:  # it is there, and its reader says that it cannot be read
        return True
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _or_as_it_is(model: HubModel) -> Iterator[None]:
    """Raise the hub's failures as what they mean, unless another program has fetched the model."""
    try:
        yield
    except Exception as error:  # whatever the hub's client, the network and the disk raise
        explained = hub_error(error, model.option)
        if not model.take_as_it_is():
            raise explained from error
        log.info("%s. It is taken from the cache as it is", explained)


def _announce(models: Sequence[HubModel]) -> None:
    """Say what will be fetched, before anything is; refuse what has no room on the disk."""
    if not models:
        return
    cache = Path(constants.HF_HUB_CACHE)
    free, converted = free_space(cache), sum(model.bins for model in models)
    fetched = sum(sum(model.missing.values()) for model in models)
    names = [model.location for model in models]
    what = names[0] if len(names) == 1 else counted(len(names), "model")
    what += f", {bytes_text(fetched)}"
    if converted:
        what += f" and {bytes_text(converted)} of .bin files converted"
    if fetched + converted > free:
        raise CalibrationError(
            f"{', '.join(names)}: {what}, do not fit on the disk of {cache}, which has "
            f"{bytes_text(free)} free. Make room, or set HF_HOME to a folder on another disk"
        )
    _say(f"fetching {what}, to {cache} ({bytes_text(free)} free)")


def _say(text: str) -> None:
    """Log a line or, where nobody configured logging, print it beside the results."""
    if log.isEnabledFor(logging.INFO):
        log.info(text)
    else:
        print(text, file=sys.stderr)
