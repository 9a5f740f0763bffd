"""`featcal settings` lists what every method takes, from its own docstrings and checks."""

import json
from pathlib import Path

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.families import _BY_NAME
from fusion_bench_featcal.fusionbench.options import FUSION_BENCH_KEYS
from fusion_bench_featcal.setting_docs import METHODS, documented

CONFIG = Path(__file__).resolve().parents[1] / "config" / "method"
# Handed to the methods by YAML alone.
NOT_KEPT = {"samples_per_task", "calibration_split", "steps"}


def listed(method: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    assert main(["settings", method, "--json"]) == 0
    return {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("method", METHODS)
def test_every_key_of_a_method_is_listed_with_default_values_and_meaning(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = listed(method, capsys)
    yaml = OmegaConf.load(CONFIG / f"{method}.yaml")
    keys = set(get_class(yaml._target_)._config_mapping) - set(FUSION_BENCH_KEYS)
    keys |= NOT_KEPT if method == "compare" else set()
    assert set(settings) == keys
    for name, setting in settings.items():
        assert setting["meaning"] and setting["values"], name
        if OmegaConf.is_interpolation(yaml, name):
            continue
        given = OmegaConf.select(yaml, name)
        if given is not None and not OmegaConf.is_config(given):
            assert setting["default"] == given, name


def test_families_are_named_in_the_yaml() -> None:
    (line,) = (x for x in (CONFIG / "featcal.yaml").read_text().splitlines() if "family:" in x)
    names = line.partition("blocks: ")[2].partition(", {")[0].split(", ")
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
    assert "mix_alpha = 0.3\n    values: a number in [0, 1]\n    Share of the expert's" in text
    assert "token_weights = uniform\n    values: one of uniform, demo_last_block\n" in text
    assert "expert_read_budget = null\n" in text
    assert "base_method = null\n" in text


def test_a_short_name_does_and_an_unknown_one_gets_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert listed("regmean", capsys).keys() == listed("featcal_baselines/regmean", capsys).keys()
    assert main(["settings", "surgry"]) == 2
    assert "no method 'surgry' (nearest: 'surgery')" in capsys.readouterr().err


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "featcal settings" in " ".join(capsys.readouterr().out.split())


def test_entries_of_a_docstring_end_where_its_section_ends() -> None:
    text = """Do it.

    Args:
        one: First line
            goes on: here.
        two: Second.
        **more: Others,
            not listed.

    Returns:
        three: No argument.
    """
    assert documented(text, "Args") == {"one": "First line goes on: here.", "two": "Second."}
    assert documented(text, "Attributes") == {}


@pytest.mark.parametrize(
    ("method", "key", "nearest"),
    [
        ("featcal", "ridge_lamda", "ridge_lambda"),
        ("featcal", "samples", "samples_per_task"),
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
    with pytest.raises(ValueError, match=rf"method\.{key} is no setting .* nearest is '{nearest}'"):
        get_class(yaml._target_)(**{key: 1})
