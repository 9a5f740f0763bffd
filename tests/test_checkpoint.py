"""A calibration that stops resumes from the shards of its model, or says why not."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, settings_of, with_rule
from fuzzing import NAMES_A_SETTING, damage
from oracle import Knobs
from tiny_models import Suite, clip_suite, t5_suite
from tiny_open_clip import tower_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, Paper, Plus, SafetensorsExpert, calibrate


class Interrupted(BaseException):
    """Stands for an error that ends a process."""


def run(suite: Suite, folder: Path | None = None, *, resume: bool = False, rule: Any = None,
        autocast: Any = None, **more: Any) -> Any:  # fmt: skip
    path = None if folder is None else str(folder)
    settings = settings_of(
        Knobs(), suite, family=suite.family, checkpoint_dir=path, resume=resume, **more
    )
    settings = with_rule(settings, Paper() if rule is None else rule)
    models = (suite.merged, suite.base, suite.experts)
    return calibrate(*models, suite.inputs, settings, autocast=autocast)


def interrupt(suite: Suite, folder: Path, blocks: int, **more: Any) -> None:
    """Run until some blocks are written, and raise as the next one is."""
    replace, remaining = os.replace, [blocks]

    def counted(source: Any, target: Any) -> None:
        remaining[0] -= Path(target).name.startswith("block-")
        if remaining[0] < 0:
            raise Interrupted
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("os.replace", counted)
        run(suite, folder, **more)


def records(result: Any) -> list[dict[str, Any]]:
    """The log without records of resuming and times."""
    return [
        {key: value for key, value in record.items() if key != "seconds"}
        for record in result.log.plain_records()
        if record["kind"] != "resumed"
    ]


def restored(result: Any) -> list[int]:
    return [record["blocks"] for record in result.log.of_kind("resumed")]


def blocks_in(folder: Path) -> int:
    return len(list(folder.glob("block-*.safetensors")))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.iterdir()}


# --- resuming ---


def bfloat16_clip() -> Suite:
    return clip_suite().to(torch.bfloat16)


def small_t5() -> Suite:
    return t5_suite(depths=(1, 1))


SUITES: dict[str, tuple[Callable[[], Suite], dict[str, Any]]] = {
    "clip": (clip_suite, {"expert_read_budget": "60%"}),
    "weights alone, bfloat16": (bfloat16_clip, {"rule": Paper(mix_alpha=0.0)}),
    "open_clip": (tower_suite, {}),
    "plus, t5": (small_t5, {"rule": Plus()}),
}


@pytest.mark.parametrize("name", SUITES)
def test_resumed_model_and_log_are_those_of_an_uninterrupted_run(name: str, tmp_path, monkeypatch):
    make, more = SUITES[name]
    suite = make()
    expected = run(suite, tmp_path / "whole", **more)
    interrupt(suite, tmp_path / "interrupted", 1, **more)
    for folder, blocks in (("interrupted", 1), ("whole", 2)):
        if folder == "whole":  # no block is calibrated
            monkeypatch.setattr("fusion_bench_featcal.calibration.calibrate_blocks", None)
        assert blocks_in(tmp_path / folder) == blocks
        result = run(suite, tmp_path / folder, resume=True, **more)
        assert_identical(result.model, expected.model)
        assert records(result) == records(expected)
        assert restored(result) == [blocks]
        assert result.reads["plan"] == expected.reads["plan"]


def test_a_run_may_be_interrupted_again_and_again_and_lose_a_file(tmp_path: Path):
    suite = t5_suite(depths=(1, 2), tasks=1)
    interrupt(suite, tmp_path, 0)
    for _ in range(2):
        interrupt(suite, tmp_path, 1, resume=True)
    assert blocks_in(tmp_path) == 2
    expected = run(suite).model
    assert_identical(run(suite, tmp_path, resume=True).model, expected)
    (tmp_path / "block-0001.safetensors").unlink()
    result = run(suite, tmp_path, resume=True)
    assert_identical(result.model, expected)
    assert restored(result) == [1]


def test_a_finished_folder_is_the_model(tmp_path: Path):
    model: Any = run(small_t5(), tmp_path).model  # with tied tensors
    source = SafetensorsExpert(tmp_path)
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): key for key, tensor in reversed(state.items())}
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(first.values())
    assert all(torch.equal(source.tensor(key), state[key]) for key in weight_map)
    model.config.dtype = model.dtype
    model.config.save_pretrained(tmp_path)
    assert_identical(type(model).from_pretrained(tmp_path, dtype=model.dtype), model)


# --- refusals ---


def small_clip(seed: int = 0) -> Suite:
    return clip_suite(tasks=2, sizes=(2, 2), seed=seed).to(torch.float32)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Suite, Path, Path, nn.Module]:
    """A finished run, the folder of another one, and the model."""
    folder, suite = tmp_path_factory.mktemp("finished"), small_clip()
    run(small_clip(seed=1), folder / "other")
    return suite, folder / "clip", folder / "other", run(suite, folder / "clip").model


def refuse(suite: Suite, folder: Path, message: str, **more: Any) -> None:
    """Expect that a run is refused and changes no file."""
    before = contents(folder)
    with pytest.raises(CalibrationError, match=message):
        run(suite, folder, **more)
    assert contents(folder) == before


def nudge(model: Any, inside: str) -> None:
    """Change the first number of the last parameter whose name has some text."""
    name = [name for name, _ in model.named_parameters() if inside in name][-1]
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1e-6


CHANGES: dict[str, tuple[Callable[[Suite], Any], dict[str, Any]]] = {
    "expert": (lambda s: nudge(s.experts["task_1"], "layers.1."), {}),
    "base": (lambda s: nudge(s.base, "layers.0."), {}),
    "merged model": (lambda s: nudge(s.merged, "layers.1."), {}),
    "samples": (lambda s: s.inputs["task_1"][1]["pixel_values"][0].add_(1e-9), {}),
    "tasks": (lambda s: (s.experts.pop("task_0"), s.inputs.pop("task_0")), {}),
    "seed": (lambda _: None, {"seed": 1}),
    "rule": (lambda _: None, {"rule": Plus()}),
    "precision": (lambda _: None, {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_blocks_of_another_run_are_refused(finished, name: str):
    suite, (change, more) = small_clip(), CHANGES[name]
    change(suite)
    message = r"method\.checkpoint_dir .*belongs to another run: .*remove this one"
    refuse(suite, finished[1], message, resume=True, **more)


def test_finished_blocks_are_not_overwritten(finished):
    refuse(finished[0], finished[1], r"checkpoint_dir .*method\.resume=true.*another")


def test_a_folder_that_cannot_be_written_is_named_before_any_work(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"file.*: Not a dir.*method\.checkpoint_dir"):
        run(small_clip(), tmp_path / "file" / "inner")


# --- files ---


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_refused_or_harmless(finished, seed: int, tmp_path: Path):
    suite, folder, other, expected = finished
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    kind = damage(damaged, other, seed)
    try:
        result = run(suite, damaged, resume=True)
    except CalibrationError as error:
        assert NAMES_A_SETTING.search(str(error)) and str(damaged) in str(error), (kind, error)
    else:
        assert_identical(result.model, expected)
