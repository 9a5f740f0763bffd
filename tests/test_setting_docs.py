"""`featcal settings` and the YAML files have what a method's settings declare."""

import json
import runpy
from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.families import _BY_NAME
from fusion_bench_featcal.fusionbench.options import FUSION_BENCH_KEYS
from fusion_bench_featcal.setting_docs import algorithm_class, method_names
from fusion_bench_featcal.setting_fields import settings_of
from fusion_bench_featcal.settings import FeatCalSettings

CONFIG = Path(__file__).resolve().parents[1] / "config" / "method"
METHODS = method_names()
CONFIGS = runpy.run_path(str(CONFIG.parents[1] / "scripts" / "write_configs.py"))


def listed(method: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    assert main(["settings", method, "--json"]) == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("method", METHODS)
def test_every_key_of_a_method_is_listed_with_default_values_and_meaning(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = listed(method, capsys)
    yaml = OmegaConf.load(CONFIG / f"{method}.yaml")
    algorithm = get_class(yaml._target_)
    assert algorithm is algorithm_class(method)
    assert set(settings) == set(algorithm._config_mapping) - set(FUSION_BENCH_KEYS)
    for name, setting in settings.items():
        assert setting["meaning"] and setting["values"], name


def test_configs_are_as_the_script_writes_them() -> None:
    for path, text in CONFIGS["files"]().items():
        assert path.read_text(encoding="utf-8") == text, "python scripts/write_configs.py"


def test_families_are_named_in_the_yaml() -> None:
    (family,) = (f for f in settings_of(FeatCalSettings) if f.name == "family")
    names = family.metadata["help"].partition("blocks: ")[2].partition(", {")[0].split(", ")
    assert names == ["auto", *sorted(_BY_NAME)]


@pytest.mark.parametrize("method", METHODS)
def test_settings_fit_eighty_columns(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", method]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("typing." in line or "**" in line for line in lines)


def test_settings_of_featcal_are_the_default_and_say_what_their_checks_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["settings"]) == 0
    text = capsys.readouterr().out
    assert "mix_alpha = 0.3\n    values: a finite number >= 0 and at most 1\n    Share of" in text
    assert "token_weights = uniform\n    values: one of uniform, demo_last_block\n" in text
    assert "expert_read_budget = null\n" in text
    assert "base_method = null\n" in text


def test_a_short_name_does_and_an_unknown_one_gets_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert listed("regmean", capsys).keys() == listed("featcal_baselines/regmean", capsys).keys()
    assert main(["settings", "surgry"]) == 2
    assert "no method 'surgry' (nearest: 'surgery')" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "key", "nearest"),
    [
        ("featcal", "ridge_lamda", "ridge_lambda"),
        ("compare", "stepps", "steps"),
        ("compare", "upstream", "upstreams"),
        ("surgery", "train_steps", "steps"),
        ("featcal_baselines/surgery_v2", "stepss", "steps"),
        ("featcal_baselines/regmean", "sed", "seed"),
    ],
)
def test_a_misspelt_setting_of_any_method_gets_the_nearest(
    method: str, key: str, nearest: str
) -> None:
    yaml = OmegaConf.load(CONFIG / f"{method}.yaml")
    with pytest.raises(ValueError, match=rf"method\.{key} is no setting .*nearest: '{nearest}'"):
        get_class(yaml._target_)(**{key: 1})
