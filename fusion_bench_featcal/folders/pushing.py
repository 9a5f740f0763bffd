"""Upload of a repaired model to the Hugging Face hub."""

import shlex
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.folders.options import RECIPE
from fusion_bench_featcal.models.hub import patiently, status_of

_REPORT = "featcal/*"
_LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN to a token that can write"


def push_to_hub(folder: str | Path, repo_id: str, private: bool = True) -> str:
    """Upload a repaired model's folder to the hub. The report in `featcal/` is not uploaded.

    A recipe with paths outside the folder's parent is not uploaded either, because such paths can
    have names of users.

    Args:
        folder: The folder.
        repo_id: `OWNER/NAME`. The repository is created if there is none.
        private: Whether a new repository is private. An existing one is as private as before.

    Returns:
        The repository's address.

    Raises:
        CalibrationError: If the upload fails. The message has a command that repeats it.
        ValueError: If the folder has no config.
    """
    path, ignored = Path(folder).expanduser(), [_REPORT]
    if not (path / "config.json").is_file() and not (path / "modules.json").is_file():
        raise ValueError(f"{folder} has no config.json: name the folder of a model")
    recipe = path / RECIPE
    if recipe.is_file() and any(mark in recipe.read_text("utf-8") for mark in ("../../", ": /")):
        ignored.append(RECIPE)
    try:
        address = HfApi().create_repo(repo_id, private=private, exist_ok=True)
        patiently(lambda: HfApi().upload_folder(
            repo_id=address.repo_id, folder_path=path, ignore_patterns=[*ignored],
            commit_message="Upload a model repaired with FeatCal",
        ))  # fmt: skip
    except Exception as error:  # the client and the network raise many types
        excluded = [word for pattern in ignored for word in ("--exclude", pattern)]
        again = shlex.join(["hf", "upload", repo_id, str(path), *excluded])
        remedy = "" if status_of(error) not in (401, 403) else f"{_LOG_IN}. "
        raise CalibrationError(
            f"the model is saved in {folder}, but its upload to {repo_id} failed: "
            f"{first_line(error).rstrip('.')}. {remedy}Repeat the upload with: {again}"
        ) from error
    return str(address)


def check_push(repo_id: str) -> None:
    """Refuse an upload that cannot succeed, before a run that takes hours.

    Raises:
        CalibrationError: If the user is not logged in, or cannot write there.
    """
    option, owner = f"--push {repo_id}", repo_id.partition("/")[0]
    try:
        user = patiently(HfApi().whoami)
    except LocalTokenNotFoundError as error:
        raise CalibrationError(f"{option}: not logged in to the hub. {_LOG_IN}") from error
    except Exception as error:  # the client and the network raise many types
        remedy = f". {_LOG_IN}" if status_of(error) in (401, 403) else ""
        raise CalibrationError(f"{option}: {first_line(error).rstrip('.')}{remedy}") from error
    owners = [user["name"], *(organization["name"] for organization in user.get("orgs", ()))]
    if owner not in owners:
        raise CalibrationError(
            f"{option}: you are logged in as {user['name']}, who can upload only to "
            f"{' and '.join(owners)}. {_LOG_IN}"
        )
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise CalibrationError(f"{option}: your token can only read. {_LOG_IN}")
