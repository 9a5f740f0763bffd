"""A damaged checkpoint is refused with a message that names it, or does no harm."""

import shutil
from pathlib import Path

import pytest
from calibrations import assert_identical, run_fast
from fuzzing import NAMES_A_SETTING, damage
from tiny_models import Suite, clip_suite
from tiny_t5 import t5_suite
from torch import nn

from fusion_bench_featcal import CalibrationError


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


@pytest.mark.parametrize("seed", range(45))
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
        ("run.json", b"", r"run\.json.*no JSON.*Remove that folder"),
        ("run.json", b"[]", r"run\.json.*no manifest"),
        ("run.json", None, r"run\.json.*missing"),
        ("run.json", b"\xff\xfe", r"run\.json.*no JSON"),
        ("block-0001.json", b"{}", r"block-0001\.json.*checksum.*Remove .*block-0001\.json"),
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
