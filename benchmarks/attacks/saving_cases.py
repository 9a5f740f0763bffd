"""Attacks on finished work: where and how it is saved."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from transformers import CLIPVisionModel, PreTrainedModel

from attacks.judging import (
    REFUSED,
    RIGHT,
    RawTraceback,
    ShownRefusal,
    WrongResult,
    case,
    expect,
)
from attacks.worlds import World, calibrated
from fusion_bench_featcal import __version__

_CALIBRATES = ("calibrating", "FeatCal inputs", "calibrated")


def _is_whole(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of a saved model that plain transformers loads."""
    expect(folder.is_dir(), f"no model is in {folder.name}")
    try:
        CLIPVisionModel.from_pretrained(folder)
        return load_file(folder / "model.safetensors")
    except Exception as error:
        raise WrongResult(f"the model in {folder.name} does not load: {error}") from error


def _equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


# --- where to save is checked before anything is loaded ---


def _file(folder: Path) -> str:
    (folder / "file").write_text("precious")
    return str(folder / "file")


_TARGETS: Mapping[str, Callable[[Path], str]] = {
    "the present folder": lambda folder: ".",
    "an existing file": _file,
    "below a file": lambda folder: f"{_file(folder)}/model",
    "a folder that cannot be written": lambda folder: "/proc/model",
    "a name that is too long": lambda folder: str(folder / ("x" * 300)),
    "an empty name": lambda folder: "''",
    "the base's own folder": lambda folder: str(folder / "models" / "pretrained"),
}
for _name, _target in _TARGETS.items():

    @case(f"saving: to {_name}", "merged_model_save_path", must=REFUSED)
    def _(folder: Path, target: Callable[[Path], str] = _target) -> None:
        world = World(folder)
        screen = world.command(f"merged_model_save_path={target(folder)}")
        expect(not any(word in screen.text for word in _CALIBRATES), "found out after calibrating")
        screen.succeeded()


@case("saving: no room on the disk, known beforehand", "merged_model_save_path|space|room",
      must=REFUSED)  # fmt: skip
def _(folder: Path) -> None:
    usage = shutil.disk_usage(folder)
    full = type(usage)(usage.total, usage.total, 100)
    statvfs = os.statvfs(folder)
    none = os.statvfs_result((*statvfs[:3], 0, 0, *statvfs[5:]))

    def prepare() -> None:
        shutil.disk_usage = lambda path: full  # type: ignore[assignment]
        os.statvfs = lambda path: none  # type: ignore[assignment]

    screen = World(folder).command(f"merged_model_save_path={folder}/saved", prepare=prepare)
    expect(not any(word in screen.text for word in _CALIBRATES), "found out after calibrating")
    screen.succeeded()


_PATHS = {
    "path.log_dir": "path.log_dir={file}/x",
    "method.activations_dir": "method.activations=disk method.activations_dir={file}",
    "method.checkpoint_dir": "method.checkpoint_dir={file}",
    "method.cache_dir": "method.cache_dir={file}",
    "report_save_path": "report_save_path={file}/report.json",
}
for _setting, _words in _PATHS.items():

    @case(f"saving: {_setting} below a file", _setting.split(".")[-1], must=REFUSED)
    def _(folder: Path, words: str = _words) -> None:
        world = World(folder)
        screen = world.command(*words.format(file=_file(folder)).split())
        expect(not any(word in screen.text for word in _CALIBRATES), "found out after calibrating")
        screen.succeeded()

# --- an existing folder is replaced whole, or stays ---


def _saver(folder: Path) -> tuple[Any, CLIPVisionModel, dict[str, torch.Tensor]]:
    """A pool whose run has ended, a new model, and what an older one left in `saved`."""
    world = World(folder)
    pool = world.pool()
    model = calibrated(pool)
    CLIPVisionModel.from_pretrained(world.model("_pretrained_")).save_pretrained(folder / "saved")
    return pool, model, _is_whole(folder / "saved")


def _expect_nothing_else(folder: Path) -> None:
    left = {path.name for path in folder.iterdir()} - {"models", "data", "saved", "settings"}
    left = {name for name in left if not name.startswith("screen-")}
    expect(not left, f"left behind: {sorted(left)}")


@case("saving: into the folder of an older model", must=RIGHT)
def _(folder: Path) -> None:
    pool, model, before = _saver(folder)
    after = _saved_elsewhere(pool, model, folder)
    pool.save_model(model, str(folder / "saved"))
    expect(not _equal(before, after), "the two models are one: the case proves nothing")
    expect(_equal(_is_whole(folder / "saved"), after), "another model is there")
    _expect_nothing_else(folder)


for _number in (1, 2, 3, 4):

    @case(f"saving: moving the model into place fails at step {_number}", "saved")
    def _(folder: Path, number: int = _number) -> None:
        pool, model, before = _saver(folder)
        after = _saved_elsewhere(pool, model, folder)
        calls = [0]

        def failing(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                calls[0] += 1
                if calls[0] == number:
                    raise OSError(errno.EIO, "Input/output error")
                return real(*arguments, **options)

            return call

        try:
            with (
                mock.patch.object(os, "replace", failing(os.replace)),
                mock.patch.object(os, "rename", failing(os.rename)),
            ):
                pool.save_model(model, str(folder / "saved"))
        finally:
            found = _is_whole(folder / "saved")
            expect(_equal(found, before) or _equal(found, after), "a mixture of two models")
            _expect_nothing_else(folder)


def _saved_elsewhere(pool: Any, model: Any, folder: Path) -> dict[str, torch.Tensor]:
    pool.save_model(model, str(folder / "data" / "other"))
    return _is_whole(folder / "data" / "other")


@case("saving: the disk is full meanwhile", "saved", "space", must=REFUSED)
def _(folder: Path) -> None:
    pool, model, before = _saver(folder)

    def full(self: Any, path: str, **options: Any) -> None:
        (Path(path)).mkdir(parents=True, exist_ok=True)
        (Path(path) / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        with mock.patch.object(PreTrainedModel, "save_pretrained", full):
            pool.save_model(model, str(folder / "saved"))
    finally:
        expect(_equal(_is_whole(folder / "saved"), before), "the older model is gone")
        _expect_nothing_else(folder)


@case("saving: two processes at once", must=RIGHT)
def _(folder: Path) -> None:
    pool, model, _ = _saver(folder)
    after = _saved_elsewhere(pool, model, folder)
    real = PreTrainedModel.save_pretrained

    def slow(self: Any, path: str, **options: Any) -> None:
        real(self, path, **options)
        time.sleep(0.5)

    children = []
    for _number in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with mock.patch.object(PreTrainedModel, "save_pretrained", slow):
                    pool.save_model(model, str(folder / "saved"))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
        time.sleep(0.2)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    expect(_equal(_is_whole(folder / "saved"), after), "no whole model is there")
    expect(codes == [0, 0], f"exit codes {codes}")
    _expect_nothing_else(folder)


@case("saving: before evaluating, which fails", "one", r"\.png")
def _(folder: Path) -> None:
    world = World(folder)
    next(world.data("one", "test").rglob("*.png")).write_bytes(b"no picture")
    words = (f"merged_model_save_path={folder}/saved", "method.compare_with=[]")
    screen = world.command(*words)
    _is_whole(folder / "saved")
    screen.succeeded()


@case("saving: push_to_hub offline keeps the model", "push|hub|upload")
def _(folder: Path) -> None:
    words = (f"merged_model_save_path={folder}/saved",
             "+merged_model_save_kwargs.push_to_hub=true")  # fmt: skip
    world = World(folder)
    screen = world.command(*(word.replace("+merged", "++merged") for word in words))
    _is_whole(folder / "saved")
    expect(".part" not in screen.block(), "the temporary folder's name is on the screen")
    try:
        screen.succeeded()
    except (RawTraceback, ShownRefusal) as error:
        expect("push" in screen.text or "hub" in screen.text.lower(), f"does not say why: {error}")
        raise


@case("saving: push_to_hub goes under the real name", must=RIGHT)
def _(folder: Path) -> None:
    record = folder / "pushed"

    def prepare() -> None:
        """Let nothing reach the network, and write down under which names it was to be pushed."""

        def note(*arguments: Any, **options: Any) -> Any:
            name = options.get("repo_id") or next(a for a in arguments if isinstance(a, str))
            with record.open("a") as file:
                file.write(f"{name}\n")
            return mock.MagicMock(repo_id=name)

        for place in ("huggingface_hub.HfApi.create_repo", "huggingface_hub.HfApi.upload_folder",
                      "huggingface_hub.HfApi.create_commit", "transformers.utils.hub.create_repo",
                      "transformers.utils.hub.create_commit"):  # fmt: skip
            mock.patch(place, note, create=True).start()

    words = (f"merged_model_save_path={folder}/saved",
             "++merged_model_save_kwargs.push_to_hub=true")  # fmt: skip
    World(folder).command(*words, prepare=prepare).succeeded()
    _is_whole(folder / "saved")
    pushed = record.read_text().split() if record.is_file() else []
    expect(pushed, "nothing was pushed")
    wrong = [name for name in pushed if name.rsplit("/", 1)[-1] != "saved"]
    expect(not wrong, f"pushed as {wrong}")


@case("saving: a model card is written", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    world.command(f"merged_model_save_path={folder}/saved").succeeded()
    card = folder / "saved" / "README.md"
    expect(card.is_file(), "no README.md beside the model")
    text = card.read_text()
    words = ("task_arithmetic", "one", "two", "ridge_lambda", "average", __version__)
    missing = [word for word in words if word not in text]
    expect(not missing, f"the card lacks {missing}")


@case("saving: method.save chooses the row", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    preset = "method.presets={strong: {ridge_lambda: 1000.0}}"
    world.command(preset, "method.save=featcal:strong",
                  f"merged_model_save_path={folder}/saved").succeeded()  # fmt: skip
    world.command("method.ridge_lambda=1000.0", f"merged_model_save_path={folder}/wanted"
                  ).succeeded()  # fmt: skip
    saved, wanted = _is_whole(folder / "saved"), _is_whole(folder / "wanted")
    expect(_equal(saved, wanted), "another row's model was saved")


@case("saving: method.save names a row that is not there", r"method\.save", "strong", must=REFUSED)
def _(folder: Path) -> None:
    world = World(folder)
    screen = world.command("method.save=featcal:stronk", "method.presets={strong: {eps: 1.0e-6}}")
    expect(not any(word in screen.text for word in _CALIBRATES), "found out after calibrating")
    screen.succeeded()
