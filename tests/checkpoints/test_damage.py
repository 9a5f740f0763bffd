"""A damaged checkpoint is refused with a message that names it, or does no harm."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from calibrations import assert_identical, run_fast
from fuzzing import NAMES_A_SETTING, damage
from tiny_models import Suite, clip_suite, t5_suite
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.digests import digest_file
from fusion_bench_featcal.json_files import read_json, sealed_json


@pytest.fixture(scope="module")
def kept(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Suite, Path, Path, nn.Module]]:
    """Finished runs of two kinds of models, and another run of each."""
    folder = tmp_path_factory.mktemp("kept")
    found = {}
    for name, make in {"clip": clip_suite, "t5": t5_suite}.items():
        suite = make(tasks=1)
        model = run_fast(suite, checkpoint_dir=str(folder / name)).model
        run_fast(make(tasks=1, seed=1), checkpoint_dir=str(folder / f"other-{name}"))
        found[name] = (suite, folder / name, folder / f"other-{name}", model)
    return found


@pytest.mark.parametrize("seed", range(24))
def test_damage_is_refused_or_harmless(kept, seed: int, tmp_path: Path):
    suite, folder, other, wanted = kept["t5" if seed % 3 == 0 else "clip"]
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    what = damage(damaged, other, seed)
    try:
        found = run_fast(suite, checkpoint_dir=str(damaged), resume=True)
    except CalibrationError as error:
        assert NAMES_A_SETTING.search(str(error)) and str(damaged) in str(error), (what, error)
    else:
        assert_identical(found.model, wanted)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", b"", r"run\.json.*not valid JSON.*Remove that folder"),
        ("run.json", b"[]", r"run\.json.*no digest"),
        (
            "run.json",
            b'{"checksum": "of an earlier version"}',
            r"run\.json.*earlier version.*Remove",
        ),
        ("run.json", None, r"run\.json.*No such file"),
        ("run.json", b"\xff\xfe", r"run\.json.*not valid JSON"),
        ("block-0001.json", b"{}", r"block-0001\.json.*digest.*Remove .*block-0001\.json"),
        ("block-0000.safetensors", b"", r"block-0000\.safetensors.*digest.*Remove .*0000\.json"),
        ("block-0000.safetensors", None, r"block-0000\.safetensors.*No such file.*0000\.json"),
    ],
)
def test_message_names_the_file_and_the_remedy(kept, name, content, message, tmp_path: Path):
    suite, folder, _, wanted = kept["clip"]
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / name).unlink() if content is None else (damaged / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        run_fast(suite, checkpoint_dir=str(damaged), resume=True)
    if name.startswith("block-"):
        (damaged / name).with_suffix(".json").unlink()
        found = run_fast(suite, checkpoint_dir=str(damaged), resume=True)
        assert_identical(found.model, wanted)


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


HOSTILE: dict[str, Any] = {
    "null": None,
    "number": 7,
    "text": "../../etc/passwd",
    "list": [[], {}],
    "paths": {"../../x": "../y", "/etc/passwd": "/dev/zero"},
    "deep": _deep(300),
    "surrogates": {"\ud800": "\udfff" * 1000},
    "many": {f"key{n}" * 50: "x" * 1000 for n in range(300)},
    "huge": 10**400,
}


def _rewritten(file: Path, change: Any) -> None:
    content = read_json(file, sealed=True)
    change(content)
    file.write_text(sealed_json(content))


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("name", ["run.json", "block-0001.json"])
def test_hostile_manifest_with_a_right_checksum_is_refused(kept, name, case, tmp_path: Path):
    suite, folder, _, wanted = kept["clip"]
    keys = [key for key in json.loads((folder / name).read_text()) if key != "digest"]
    before = {path: path.read_bytes() for path in tmp_path.parent.glob("*") if path.is_file()}
    for key in keys:
        damaged = tmp_path / key
        shutil.copytree(folder, damaged)
        _rewritten(damaged / name, lambda content, key=key: content.update({key: HOSTILE[case]}))
        try:
            found = run_fast(suite, checkpoint_dir=str(damaged), resume=True)
        except CalibrationError as error:
            assert str(damaged) in str(error) and len(str(error)) < 3000
        else:  # of what is compared only where it is known: the machine
            assert_identical(found.model, wanted)
    assert {p: p.read_bytes() for p in tmp_path.parent.glob("*") if p.is_file()} == before


def test_manifest_that_nests_too_deep_or_is_too_large_is_refused(kept, tmp_path, monkeypatch):
    suite, folder, _, _ = kept["clip"]
    shutil.copytree(folder, tmp_path / "deep")
    (tmp_path / "deep" / "run.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CalibrationError, match=r"run\.json .*not valid JSON"):
        run_fast(suite, checkpoint_dir=str(tmp_path / "deep"), resume=True)
    monkeypatch.setattr("fusion_bench_featcal.json_files._LARGEST", 10)
    with pytest.raises(CalibrationError, match=r"run\.json .*larger than"):
        run_fast(suite, checkpoint_dir=str(folder), resume=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no tensors", "holds no tensors"),
        (safetensors.torch.save({"../x": torch.ones(1)}), "does not fit the model"),
        (safetensors.torch.save({"a.b": torch.ones(1)}), "does not fit the model"),
    ],
)
def test_hostile_tensors_with_a_right_digest_are_refused(kept, data, message, tmp_path: Path):
    suite, folder, _, _ = kept["clip"]
    shutil.copytree(folder, tmp_path / "x")
    file = tmp_path / "x" / "block-0000.safetensors"
    file.write_bytes(data)
    change = {"parameters": digest_file(file)}
    _rewritten(file.with_suffix(".json"), lambda content: content.update(change))
    with pytest.raises(CalibrationError, match=rf"block-0000\.safetensors .*{message}"):
        run_fast(suite, checkpoint_dir=str(tmp_path / "x"), resume=True)
