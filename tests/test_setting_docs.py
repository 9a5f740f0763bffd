"""`featcal settings` and the YAML files of every method agree with its declared settings."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf
from reports import error_of, featcal

from fusion_bench_featcal.families import _BY_NAME
from fusion_bench_featcal.fusionbench.options import FUSION_BENCH_KEYS
from fusion_bench_featcal.setting_docs import algorithm_class, method_names
from fusion_bench_featcal.setting_fields import settings_of
from fusion_bench_featcal.settings import FeatCalSettings

CONFIG = Path(__file__).resolve().parents[1] / "config" / "method"
CONFIGS = runpy.run_path(str(CONFIG.parents[1] / "scripts" / "write_configs.py"))
MISSPELT = [
    ("featcal", "ridge_lamda", "ridge_lambda"),
    ("compare", "stepps", "steps"),
    ("compare", "upstream", "upstreams"),
    ("surgery", "train_steps", "steps"),
    ("featcal_baselines/surgery_v2", "stepss", "steps"),
    ("featcal_baselines/regmean", "sed", "seed"),
]


def class_of(method: str) -> Any:
    return get_class(OmegaConf.load(CONFIG / f"{method}.yaml")._target_)


def listed(method: str) -> dict[str, dict[str, Any]]:
    entries = json.loads(featcal("settings", method, "--json").out)
    return {entry["name"]: entry for entry in entries}


@pytest.mark.parametrize("method", method_names())
def test_every_key_of_a_method_is_listed_in_eighty_columns(method: str):
    settings, algorithm = listed(method), class_of(method)
    assert algorithm is algorithm_class(method)
    assert set(settings) == set(algorithm._config_mapping) - set(FUSION_BENCH_KEYS)
    assert all(entry["meaning"] and entry["values"] for entry in settings.values())
    text = featcal("settings", method).out
    assert max(map(len, text.splitlines())) <= 80
    assert not any(word in text for word in ("typing.", "**"))


def test_configs_are_as_the_script_writes_them():
    for path, text in CONFIGS["files"]().items():
        assert path.read_text(encoding="utf-8") == text, "python scripts/write_configs.py"
    (family,) = (f for f in settings_of(FeatCalSettings) if f.name == "family")
    names = family.metadata["help"].partition("blocks: ")[2].partition(", {")[0].split(", ")
    assert names == ["auto", *sorted(_BY_NAME)]


def test_featcal_is_the_default_and_a_short_name_does():
    text = featcal("settings").out
    for entry in (
        "mix_alpha = 0.3\n    values: a finite number >= 0 and at most 1\n    Share of",
        "token_weights = uniform\n    values: one of uniform, demo_last_block\n",
        "expert_read_budget = null\n", "base_method = null\n",
    ):  # fmt: skip
        assert entry in text
    assert listed("regmean") == listed("featcal_baselines/regmean")
    assert "no method 'surgry' (nearest: 'surgery')" in error_of("settings", "surgry")


@pytest.mark.parametrize(("method", "key", "nearest"), MISSPELT)
def test_a_misspelt_setting_gets_the_nearest(method: str, key: str, nearest: str):
    with pytest.raises(ValueError, match=rf"method\.{key} is no setting .*nearest: '{nearest}'"):
        class_of(method)(**{key: 1})
