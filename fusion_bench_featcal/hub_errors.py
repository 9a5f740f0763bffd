"""Errors of the Hugging Face hub, the network and the cache's disk, with causes and remedies."""

import errno
import re
from pathlib import Path
from socket import gaierror
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled

from fusion_bench_featcal.error_block import causes, first_line
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files import free_space
from fusion_bench_featcal.plurals import bytes_text

# Packages that versions of the hub's client use for requests.
_TRANSPORTS = {"requests", "urllib3", "httpx", "httpcore"}
_AGAIN = ". A second run goes on where this one stopped"


def hub_error(error: BaseException, option: str) -> CalibrationError:
    """Return an error with the reason for a failed download, and a remedy.

    Args:
        error: The error of the hub's client, or an error caused by it.
        option: The option with its value that names the requested file or model.
    """
    cause = _cause(error) or f"the hub did not give it: {first_line(error).rstrip('.')}"
    return CalibrationError(f"{option}: {cause}")


def is_of_hub(error: BaseException) -> bool:
    """Return whether the hub, the network or the disk of the cache caused an error."""
    return _cause(error) is not None


def _cause(error: BaseException) -> str | None:
    """Return the cause with its remedy, or None if hub, network and disk are not the cause."""
    links, cache = list(causes(error)), Path(constants.HF_HUB_CACHE)
    answers = (getattr(link, "response", None) for link in links)
    answer = next((answer for answer in answers if answer is not None), None)
    status = answer.status_code if answer is not None else 0
    # `datasets` hides the cause of these errors, so their text is searched.
    of_data = [str(link) for link in links if type(link).__name__ == "DatasetNotFoundError"]
    words = first_line(error).rstrip(".")

    def is_any(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in links)

    if any(map(_is_full_disk, links)):
        return (
            f"no room left in {cache} ({bytes_text(free_space(cache))} free). Make room, or set "
            f"HF_HOME to a folder on another disk{_AGAIN}"
        )
    if any(_is_refused(link, cache) for link in links):
        return f"the cache {cache} cannot be written. Set HF_HOME to a folder that can be written"
    if is_any(GatedRepoError) or any("is a gated dataset" in text for text in of_data):
        return "access is restricted. Ask for it on the hub's page and log in (hf auth login)"
    if is_any(HFValidationError) or status in (401, 403, 404) or of_data:
        return (
            "there is no such file or folder here, and the hub gives nothing of that name. Correct "
            f"it, or log in if it is private (hf auth login). The hub's client: {words}"
        )
    if is_any(OfflineModeIsEnabled) or (constants.HF_HUB_OFFLINE and is_any(ConnectionError)):
        return (
            "there is no such file or folder here. HF_HUB_OFFLINE is set, and the cache "
            f"{cache} lacks it. Correct it, or go online"
        )
    if status == 429 or status >= 500:
        wait = f"Wait{_seconds_to_wait(answer)}, or log in (hf auth login)"
        return f"the hub is busy ({status}). {wait}{_AGAIN}"
    # The release is in the module's name: httpx2.
    packages = {type(link).__module__.partition(".")[0].rstrip("0123456789") for link in links}
    if _TRANSPORTS & packages or is_any(ConnectionError, TimeoutError, gaierror):
        return f"the hub at {constants.ENDPOINT} does not answer. Check the network{_AGAIN}"
    return None


def _seconds_to_wait(answer: Any) -> str:
    """Return the time after which a busy hub allows requests, or an empty text."""
    limit = re.search(r"\bt=(\d+)", answer.headers.get("ratelimit") or "")
    seconds = limit.group(1) if limit else answer.headers.get("Retry-After") or "0"
    return f" {seconds} s" if seconds.isdecimal() and int(seconds) else ""


def _is_refused(error: BaseException, cache: Path) -> bool:
    """Return whether a file or folder of the cache, or one above it, cannot be written."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EROFS):
        return False
    home, path = Path(constants.HF_HOME), Path(str(error.filename))
    return path in (home, cache, *home.parents, *cache.parents) or home in path.parents


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "(os error 28)" in str(error)  # hf_xet is written in Rust and has no error class for it
