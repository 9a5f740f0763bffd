"""Errors of the Hugging Face hub, the network and the cache's disk, with causes and remedies."""

import errno
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.files import free_space
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRIES = 3
_LONGEST_WAIT = 30.0  # seconds, whatever the hub asks for
# Packages by which the versions of the hub's client send requests, and their errors of a connection
# that breaks off in the middle of an answer.
_TRANSPORTS = {"requests", "urllib3", "httpx", "httpx2", "httpcore", "httpcore2"}
_CUTS = {"ChunkedEncodingError", "ProtocolError", "RemoteProtocolError", "ReadError"}
_AGAIN = ". A second run goes on where this one stopped"
_TEXTS = {
    "disk": "no room left in {cache} ({free} MB free). Make room, or set HF_HOME to a folder on "
    "another disk" + _AGAIN,
    "gated": "access to it is restricted. Ask for access and log in (hf auth login). {why}",
    "unknown": "there is no such file or folder here, and the hub gives nothing of that name. "
    "Correct it, or log in if it is private (hf auth login). {why}",
    "offline": "there is no such file or folder here. HF_HUB_OFFLINE is set, and the cache {cache} "
    "lacks it. Correct it, or go online. {why}",
    "limited": "the hub limits requests (429). Wait, or log in (hf auth login)" + _AGAIN,
    "busy": "the hub is out of order ({status}). Try again later" + _AGAIN,
    "denied": "the hub denies access ({status}). Log in anew (hf auth login). {why}",
    "cut": "the connection to the hub broke off. Check the network" + _AGAIN,
    "silent": "the hub at {endpoint} does not answer. Check the network, and HF_ENDPOINT if set"
    + _AGAIN,
    "other": "the hub did not give it. {why}",
}


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
        free=f"{free_space(Path(constants.HF_HUB_CACHE)) / 1e6:,.0f}",
        status=_status(error),
        why=f"The hub's client: {words.rstrip('.')}",
    )
    return CalibrationError(f"{option}: {text}")


def is_of_hub(error: BaseException) -> bool:
    """Return whether the hub, the network or the disk of the cache is behind an error."""
    return _kind(error) != "other"


def with_retries(call: Callable[[], T], option: str, retries: int = RETRIES) -> T:
    """Call a function, and again where the hub is busy or the connection breaks off.

    Args:
        call: Fetches something from the hub.
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


def _kind(error: BaseException) -> str:
    """Key of an error's text."""
    links, status = list(_chain(error)), _status(error) or 0
    names = {type(link).__name__ for link in links}
    packages = {type(link).__module__.partition(".")[0] for link in links}

    def is_any(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in links)

    # `datasets` hides the cause of these: the words are all that there is.
    of_data = [str(link) for link in links if type(link).__name__ == "DatasetNotFoundError"]
    kinds = {
        "disk": any(map(_is_full_disk, links)),
        "gated": is_any(GatedRepoError) or any("is a gated dataset" in text for text in of_data),
        "unknown": is_any(RepositoryNotFoundError, HFValidationError) or status == 404 or of_data,
        "offline": is_any(OfflineModeIsEnabled)
        or (constants.HF_HUB_OFFLINE and is_any(ConnectionError)),
        "limited": status == 429,
        "busy": status >= 500,
        "denied": status in (401, 403),
        "cut": bool(_CUTS & names),
        "silent": bool(_TRANSPORTS & packages) or is_any(ConnectionError, TimeoutError),
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
