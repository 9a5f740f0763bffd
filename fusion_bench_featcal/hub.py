"""Models of the Hugging Face hub: their local folders, and errors that say what to do."""

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.files import write_whole
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRIES = 3
PROCESSOR_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Files of tokenizers and processors."""
_MODEL_FILES = (*PROCESSOR_FILES, "*.safetensors")
_LONGEST_WAIT = 30.0  # seconds, whatever the hub asks for
# Packages by which the versions of the hub's client send requests, and their errors of a connection
# that breaks off in the middle of an answer.
_TRANSPORTS = {"requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2"}
_CUTS = {"ChunkedEncodingError", "ProtocolError", "RemoteProtocolError", "ReadError"}
_AGAIN = ". A second run goes on where this one stopped"
_TEXTS = {
    "disk": "no room left in {cache} ({free} MB free). Make room, or set HF_HOME to a folder on "
    "another disk",
    "gated": "access to it is restricted. Ask for access and log in (hf auth login). {why}",
    "unknown": "there is no such file or folder here, and the hub gives nothing of that name. "
    "Correct it, or log in if it is private (hf auth login). {why}",
    "offline": "there is no such file or folder here. HF_HUB_OFFLINE is set, and the cache {cache} "
    "lacks it. Correct it, or go online. {why}",
    "limited": "the hub limits requests (429). Wait, or log in (hf auth login)",
    "busy": "the hub is out of order ({status}). Try again later",
    "denied": "the hub denies access ({status}). Log in anew (hf auth login). {why}",
    "cut": "the connection to the hub broke off. Check the network",
    "silent": "the hub at {endpoint} does not answer. Check the network, and HF_ENDPOINT if set",
    "other": "the hub did not give it. {why}",
}
_GO_ON = ("disk", "limited", "busy", "cut", "silent")


def local(location: str, option: str, patterns: Sequence[str] | None = None) -> Path:
    """Return the path of a file or folder that is here, else the folder of a model of the hub.

    Args:
        location: Path or hub id.
        option: The option with its value that names it, such as `--base org/model`.
        patterns: Patterns of the files that are needed of the hub; None: all.

    Raises:
        CalibrationError: As `fetch`.
    """
    path = Path(location).expanduser()
    return path if os.path.exists(path) else fetch(location, option, patterns)


def fetch(repo_id: str, option: str, patterns: Sequence[str] | None = None) -> Path:
    """Return the local folder of a model of the hub. What the cache lacks is downloaded.

    A model that was fetched whole is not asked for again. One that another program has put into
    the cache may lack files: it is compared with the hub's list, or taken as it is if that fails.
    So is one whose weights in safetensors files are there, but not all files that are needed.

    Args:
        repo_id: Id of the repository.
        option: The option with its value that names it, such as `--base org/model`.
        patterns: Patterns of the files that are needed; None: all.

    Raises:
        CalibrationError: If it cannot be had, naming the option, the cause and the remedy.
    """
    folder = files = None
    try:
        folder = _cached(repo_id, patterns)
        files = None if folder is None else _listed(folder)
        if folder is not None and _is_whole(folder, patterns):
            return folder
        retries = 0 if folder is not None and files is None else RETRIES
        return _with_retries(lambda: _download(repo_id, patterns), option, retries)
    except Exception as error:  # whatever the hub's client, the network and the disk raise
        explained = hub_error(error, option)
        if folder is None or files is not None:
            folder = _cached(repo_id, _MODEL_FILES)
            if folder is None or not _has_weights(folder):
                raise explained from error
        log.info("%s. It is taken from the cache as it is", explained)
        return folder


def fetched(location: str, patterns: Sequence[str] | None = None) -> str:
    """Return the folder of a model that `fetch` has brought whole, else the location itself."""
    folder = None if os.path.exists(location) else _cached(location, patterns)
    return str(folder) if folder is not None and _is_whole(folder, patterns) else location


def is_here(location: str) -> bool:
    """Tell whether a path exists or the hub's cache has weights of a model of that name."""
    if os.path.exists(Path(location).expanduser()):
        return True
    folder = _cached(location, None)
    return folder is not None and any(folder.glob("*.safetensors"))


def _with_retries(call: Callable[[], T], option: str, retries: int = RETRIES) -> T:
    """Call a function, and again where the hub is busy or the connection breaks off.

    Args:
        call: What fetches something from the hub.
        option: The option with its value that names it, for the log.
        retries: Number of further calls.
    """
    for retry in range(retries):
        try:
            return call()
        except Exception as error:
            wait = _wait(error, retry)
            if wait is None:
                raise
            cause = str(hub_error(error, option)).partition(". ")[0]
            log.warning("%s. Trying again in %.0f s", cause, wait)
            time.sleep(wait)
    return call()


def hub_error(error: BaseException, option: str) -> CalibrationError:
    """Return an error that says why the hub did not give something, and what to do.

    Args:
        error: What the hub's client raised, or what somebody else made of that.
        option: The option with its value that names what was to be fetched.
    """
    kind, words = _kind(error), first_line(error)
    if kind == "gated":  # the advice stands in the last line
        links = (str(link) for link in _chain(error) if isinstance(link, GatedRepoError))
        words = next(links, words).strip().splitlines()[-1]
    text = _TEXTS[kind].format(
        cache=constants.HF_HUB_CACHE,
        endpoint=constants.ENDPOINT,
        free=_free_megabytes(),
        status=_status(error),
        why=f"The hub's client: {words.rstrip('.')}",
    )
    return CalibrationError(f"{option}: {text}{_AGAIN if kind in _GO_ON else ''}")


def is_of_hub(error: BaseException) -> bool:
    """Tell whether the hub, the network or the disk of the cache is behind an error."""
    return _kind(error) != "other"


def _kind(error: BaseException) -> str:
    """Key of an error's text."""
    links, status = list(_chain(error)), _status(error) or 0
    names = {type(link).__name__ for link in links}
    of_network = any(type(link).__module__.partition(".")[0] in _TRANSPORTS for link in links)

    def is_any(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in links)

    # `datasets` hides the cause of these: the words are all that there is.
    of_data = [str(link) for link in links if type(link).__name__ == "DatasetNotFoundError"]
    is_offline = constants.HF_HUB_OFFLINE and is_any(ConnectionError)
    kinds = {
        "disk": any(map(_is_full_disk, links)),
        "gated": is_any(GatedRepoError) or any("is a gated dataset" in text for text in of_data),
        "unknown": is_any(RepositoryNotFoundError, HFValidationError) or status == 404 or of_data,
        "offline": is_any(OfflineModeIsEnabled) or is_offline,
        "limited": status == 429,
        "busy": status >= 500,
        "denied": status in (401, 403),
        "cut": bool(_CUTS & names),
        "silent": of_network or is_any(ConnectionError, TimeoutError),
    }
    return next((kind for kind, is_it in kinds.items() if is_it), "other")


def _wait(error: BaseException, retry: int) -> float | None:
    """Seconds before the next try; None: there is no point in one."""
    kind = _kind(error)
    if kind == "cut":
        return retry / 2
    if kind not in ("limited", "busy"):
        return None
    retry_after = _response(error).headers.get("Retry-After", "")
    return min(float(retry_after) if retry_after.isdigit() else 2.0 ** (retry + 1), _LONGEST_WAIT)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause's cause and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _response(error: BaseException) -> Any:
    """The hub's answer that an error is of; None: there was none."""
    answers = (getattr(link, "response", None) for link in _chain(error))
    return next((answer for answer in answers if answer is not None), None)


def _status(error: BaseException) -> int | None:
    return getattr(_response(error), "status_code", None)


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "(os error 28)" in str(error)  # hf_xet, which is written in Rust, has no type for it


def _free_megabytes() -> str:
    """Free room on the disk of the cache."""
    folder = Path(constants.HF_HUB_CACHE).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return f"{shutil.disk_usage(existing).free / 1e6:,.0f}"


def _cached(repo_id: str, patterns: Sequence[str] | None) -> Path | None:
    """Folder of a model in the cache; None: there is none, or the client knows that files lack."""
    with suppress(FileNotFoundError, HFValidationError):
        files = None if patterns is None else [*patterns]
        return Path(snapshot_download(repo_id, allow_patterns=files, local_files_only=True))
    return None


def _download(repo_id: str, patterns: Sequence[str] | None) -> Path:
    """Download what the cache lacks of a model, and note the hub's list of its files first."""
    # The client's own question for the list waits for an answer without end.
    info = HfApi().model_info(repo_id, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    files = [file.rfilename for file in info.siblings or ()]
    repository = Path(constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
    note = _list_of(repository / "snapshots" / str(info.sha))
    note.parent.mkdir(parents=True, exist_ok=True)
    write_whole(note, json.dumps(files).encode())
    allowed = None if patterns is None else [*patterns]
    folder = Path(snapshot_download(repo_id, allow_patterns=allowed))
    if not _is_whole(folder, patterns):  # the client takes what the cache has if the hub fails now
        raise ConnectionError(f"the hub did not send all files of {repo_id}")
    return folder


def _list_of(folder: Path) -> Path:
    """File with the list of all files that a cached model's commit has on the hub."""
    return folder.parents[1] / "featcal" / f"{folder.name}.json"


def _listed(folder: Path) -> list[str] | None:
    """Files that a cached model has on the hub; None: that is not known."""
    try:
        files = json.loads(_list_of(folder).read_text())
    except (OSError, ValueError):
        return None
    return files if isinstance(files, list) and all(isinstance(f, str) for f in files) else None


def _has_weights(folder: Path) -> bool:
    """Tell whether a cached model has its weights in safetensors files, and all configs."""
    files = _listed(folder) or []
    return any(f.endswith(".safetensors") for f in files) and _is_whole(folder, _MODEL_FILES)


def _is_whole(folder: Path, patterns: Sequence[str] | None) -> bool:
    """Tell whether a cached model has all files that it has on the hub and that are needed."""
    files = _listed(folder)
    if files is None:
        return False
    needed = filter_repo_objects(files, allow_patterns=None if patterns is None else [*patterns])
    return all((folder / file).exists() for file in needed)
