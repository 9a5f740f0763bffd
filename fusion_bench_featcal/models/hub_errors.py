"""Errors of the Hugging Face hub, the network and the cache's disk, with causes and remedies."""

import errno
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import causes, first_line
from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.files import free_space

_TRANSPORTS = ("requests", "urllib3", "httpx", "httpcore")  # of several releases of the client
_LOG_IN = "log in (hf auth login)"
_AGAIN = "run the command again. The download resumes"


def hub_error(error: BaseException, option: str) -> CalibrationError:
    """Return an error with the cause of a failed download, and the remedy.

    Args:
        error: The error of the hub's client, or an error caused by it.
        option: The option with its value that names the file or model.
    """
    return CalibrationError(f"{option}: {hub_cause(error) or first_line(error)}")


def no_room() -> str:
    """Return a sentence on the cache's full disk."""
    cache = Path(constants.HF_HUB_CACHE)
    return (
        f"no room on the disk of {cache}, which has {bytes_text(free_space(cache))} free. Make "
        "room, or set HF_HOME to a folder on another disk"
    )


def hub_cause(error: BaseException) -> str | None:
    """Return why the hub, the network or the cache's disk failed, and the remedy.

    Returns None if they did not cause the error.
    """
    chain = list(causes(error))
    texts, kinds = " ".join(map(str, chain)), {type(link).__name__ for link in chain}
    answers = (getattr(link, "response", None) for link in chain)
    status = next((answer.status_code for answer in answers if answer is not None), 0)

    def is_any(*types: type[BaseException]) -> bool:
        return any(isinstance(link, types) for link in chain)

    # hf_xet is written in Rust and has no class for a full disk.
    full = any(getattr(link, "errno", 0) in (errno.ENOSPC, errno.EDQUOT) for link in chain)
    if full or "(os error 28)" in texts:
        return no_room()
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
        return f"the hub is busy ({status}). Wait, or {_LOG_IN}, and {_AGAIN}"
    is_network = any(type(link).__module__.startswith(_TRANSPORTS) for link in chain)
    if is_network or is_any(ConnectionError, TimeoutError):
        return f"the hub at {constants.ENDPOINT} does not answer. Check the network and {_AGAIN}"
    return None
