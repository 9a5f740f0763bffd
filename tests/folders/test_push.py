"""`--push` and `push_to_hub`: the real client of the hub uploads to a mirror."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_mirror import Mirror
from made_folders import words
from reports import error_of, featcal

from fusion_bench_featcal import CalibrationError, push_to_hub

QUICK = ("--preset", "paper", "--no-eval")
NAME = "my-name/repaired"


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    with Mirror() as served:
        served.connect(monkeypatch, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", served.token)
        yield served


def test_a_repaired_model_is_uploaded_without_its_report_and_paths(mirror: Mirror, folder: Path):
    done = featcal(*words(folder, *QUICK), "--push", NAME)
    assert done.code == 0, done.err
    assert f"\nuploaded: {mirror.url}/{NAME}\n" in done.out
    repository, out = mirror.repositories[NAME], folder / "out"
    assert repository.private
    written = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    sent = {name: content for name, content in repository.files.items() if name[0] != "."}
    assert sent == written and {"recipe.yaml", "README.md", "model.safetensors"} <= sent.keys()
    assert not any(str(folder).encode() in content for content in repository.files.values())
    assert "push" not in (out / "recipe.yaml").read_text()
    # An existing repository keeps its visibility. Paths far away have names of users.
    (out / "recipe.yaml").write_text("base: ../../../home/me/base\n")
    mirror.add("me/public", {})
    assert push_to_hub(out, "me/public") == f"{mirror.url}/me/public"
    assert not mirror.repositories["me/public"].private
    assert written.keys() - mirror.repositories["me/public"].files.keys() == {"recipe.yaml"}


REFUSALS = {
    "none": "not logged in to the hub. Log in with `hf auth login`, or set HF_TOKEN to a token",
    "wrong": "Log in with `hf auth login`, or set HF_TOKEN to a token that can write",
    "read": "your token can only read. Log in",
    "owner": "you are logged in as me, who can upload only to me and my-name. Log in",
    "form": "must be null or OWNER/NAME, a model on the hub, got 'repaired'",
}


@pytest.mark.parametrize("cause", REFUSALS)
def test_an_upload_that_cannot_succeed_is_refused_before_the_run(
    cause: str, mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    if cause == "none":
        monkeypatch.delenv("HF_TOKEN")
    if cause == "wrong":
        monkeypatch.setenv("HF_TOKEN", "hf_another")
    mirror.role = "read" if cause == "read" else "write"
    name = {"owner": "someone/repaired", "form": "repaired"}.get(cause, NAME)
    message = error_of(*words(folder, *QUICK), "--push", name)
    place = "featcal calibrate: push must" if cause == "form" else f"--push {name}: "
    assert message.startswith(place) and REFUSALS[cause] in message
    assert not (folder / "out").exists() and not mirror.repositories


def test_a_failed_upload_names_the_saved_model_and_a_command(mirror: Mirror, folder: Path):
    mirror.add(NAME, {}, "full")
    out = folder / "out"
    message = error_of(*words(folder, *QUICK), "--push", NAME)
    assert message.startswith(f"the model is saved in {out}, but its upload to {NAME} failed: ")
    assert message.endswith(f"Repeat the upload with: hf upload {NAME} {out} --exclude 'featcal/*'")
    assert (out / "model.safetensors").is_file()
    with pytest.raises(ValueError, match="name the folder of a model"):
        push_to_hub(folder, NAME)
    with pytest.raises(CalibrationError, match=r"Repeat the upload with: hf upload"):
        push_to_hub(out, NAME)


def test_nothing_is_pushed_if_strict_refuses_the_result(mirror: Mirror, folder: Path):
    strict = words(folder, "--preset", "paper", "--strict")
    done = featcal(*strict, "--push", NAME)
    assert done.code == 1 and "--strict: nothing was saved" in done.err, done.err
    assert not mirror.repositories and not (folder / "out").exists()
