"""Settings: values, presets, rules and clashes. `featcal settings` and YAML agree with them."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from configs import composed
from fusion_bench import BaseAlgorithm
from hydra.utils import get_class
from omegaconf import OmegaConf
from reports import error_of, featcal

from fusion_bench_featcal import FeatCalSettings, Paper, Plus, calibrate, calibrate_folder, folders
from fusion_bench_featcal.families import LLAMA
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.settings import Options
from fusion_bench_featcal.settings.fields import settings_of

BY_HAND = {"base_method", "upstream_mergers", "post_merging_methods", "default_rows", "notes",
           "reads_test"}  # fmt: skip
"""Settings of which YAML has more than the default."""
CONFIG = Path(__file__).resolve().parents[1] / "config"
NAN, INF = float("nan"), float("inf")
BUDGET = (
    "null or a whole number of bytes >= 1, an amount such as 800MB or 1.5GiB (units B, KB to TB, "
    "KiB to TiB), or a share of a full read up to 100%, such as 50%"
)
# One setting of each kind: values in the words of `featcal settings`, accepted, refused.
SETTINGS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "ridge_lambda": ("a finite number >= 0 and at most 1e12", [0.0, 1e12],
                     [-0.05, NAN, INF, 1e300, "0.05", True, None]),
    "rule": ("paper, plus, a name that an installed package registers, a mapping with `_target_` "
             "and the rule's settings, or a rule",
             ["paper", {"_target_": "some.Rule", "gamma": 2.0}],
             ["kfold", None, 3, {}, {"gamma": 2.0}]),
    "task_weights": ("null or a mapping of tasks to numbers above 0", [None],
                     ["equal", 2.0, {"a": 0}, {"a": "1"}]),
    "augment": ("null or one of none, auto, jitter", ["jitter", None],
                ["flip", True, 3, ["jitter"]]),
    "calibrate_norm": ("null or true or false", [None, True, False], [0, "true"]),
    "batch_size": ("auto or an integer >= 1", ["auto", 3], [0, "many", 1.5, True]),
    "samples_per_task": ("an integer >= 1", [1], [0, 2.0, True]),
    "modules": ("null or a non-empty list of patterns", [["*.fc1", "!0.*"]],
                ["mlp.fc1", [], [""], [3]]),
    "expert_read_budget": (BUDGET, [None, 1, "1.5GiB", "100%"],
                           [0, -5, 1.5, True, INF, "0MB", "800", "800mb", "half", "101%", "-50%"]),
}  # fmt: skip
PUBLISHED = {  # lambda, rho, alpha, norms
    "paper_clip": (0.05, 2.0, 0.3, True),
    "paper_flan_t5": (1e-5, 2.0, 0.6, False),
    "paper_llama_3b": (1e-5, 0.5, 0.15, False),
    "paper_llama_8b": (3.0, 0.5, 0.15, False),
}
CLASHES: list[tuple[dict[str, Any], str]] = [
    ({"rule": "plus", "mix_alpha": 0.5},
     r"mix_alpha=0\.5 has no effect with the rule plus: leave .*, or choose rule=paper$"),
    ({"task_weights": {"a": 2}}, r"has no effect with the rule paper: .* choose rule=plus$"),
    ({"task_vectors_only": False}, r"has no effect with the rule paper: .* choose rule=plus$"),
    ({"rule": "plus", "calibrate_norm": True},
     r"calibrate_norm=True has no effect with the rule plus: leave"),
    ({"rule": Paper(calibrate_norm=False), "calibrate_norm": True},
     r"calibrate_norm=True has no effect with the rule Paper: set it there"),
    ({"rule": Paper(), "mix_alpha": 0.5},
     r"mix_alpha=0\.5 has no effect with the rule Paper: set it there, Paper\(\.\.\.\)"),
    ({"resume": True}, r"resume needs checkpoint_dir"),
    ({"seed": -1, "mix_alpha": 2.0, "ridge_lambda": -1.0},
     r"ridge_lambda.*; mix_alpha.*; seed"),
    ({"rule": {"_target_": "no.such.Rule"}}, r"rule: .*'no\.such\.Rule' cannot be impor"),
    ({"rule": {"_target_": "pathlib.Path"}}, r"rule: pathlib\.Path is not a rule, a data"),
    ({"rule": {"_target_": "plus", "gama": 1.0}}, r"plus: option gama is unknown .*'gamma'"),
]  # fmt: skip


def read_yaml(path: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(CONFIG / path))


def read_method(name: str) -> Any:
    return OmegaConf.to_container(composed(f"method={name}").method, resolve=False)


def method_names() -> list[str]:
    """Methods with settings, as `featcal settings` names them."""
    return featcal("settings").out.rpartition("one of ")[2].replace(",", " ").split()


def listed(method: str) -> dict[str, dict[str, Any]]:
    entries = json.loads(featcal("settings", method, "--json").out)
    return {entry["name"]: entry for entry in entries}


@pytest.mark.parametrize("name", SETTINGS)
def test_values_are_accepted_or_refused_in_the_words_of_the_list(name: str):
    words, accepted, refused = SETTINGS[name]
    assert listed("featcal")[name]["values"] == words
    for value in accepted:
        settings = FeatCalSettings(**{name: value})
        assert json.loads(json.dumps(settings.as_dict()))[name] == value
        assert FeatCalSettings(**settings.as_dict()) == settings
    for value in refused:
        message = re.escape(f"{name} must be {words}, got {value!r}")
        with pytest.raises(ValueError, match=f"^{message}"):
            FeatCalSettings(**{name: value})


@pytest.mark.parametrize(("values", "message"), CLASHES)
def test_settings_that_clash_and_rules_that_cannot_be_made_are_named(values, message) -> None:
    with pytest.raises(ValueError, match=message):
        _ = FeatCalSettings(**values).rule_object


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_settings(name: str):
    preset = read_yaml(f"method/featcal/{name}.yaml")
    preset.pop("defaults")
    chosen = FeatCalSettings(**preset)
    numbers = (chosen.ridge_lambda, chosen.anchor_rho, chosen.mix_alpha)
    assert (*numbers, chosen.calibrate_norm) == PUBLISHED[name]
    assert (chosen.samples_per_task, chosen.calibrate_bias) == (256, True)


def test_pools_bring_presets_as_they_are():
    for file in CONFIG.glob("modelpool/*.yaml"):
        presets = read_yaml(f"modelpool/{file.name}").get("featcal", {}).get("presets", {})
        for name, brought in presets.items():
            preset = read_yaml(f"method/featcal/{name.removesuffix('-targets')}.yaml")
            assert brought.items() - {("decoder_rows", "targets")} <= preset.items(), (file, name)


def test_featcal_plus_is_one_method_by_any_name_and_its_rule_has_its_values(tmp_path, monkeypatch):
    config = read_method("featcal/plus")
    missing = set(FeatCalSettings.names()) - set(config)
    assert missing == {"ridge_lambda", "mix_alpha", "anchor_rho"}  # no part in the rule
    by_method = FeatCalSettings(
        **{n: config[n] for n in FeatCalSettings.names() if n not in missing}
    )
    here, requests = str(tmp_path), list[Any]()
    monkeypatch.setattr(folders, "calibrate_request", requests.append)
    named: Any = {"base": here, "expert": {"a": here}, "data": {"a": here}, "out": f"{here}/out"}
    calibrate_folder(here, **named, preset="plus")
    by_command = requests.pop().settings
    expected = FeatCalSettings(rule="plus").with_rule_defaults
    samples = {"augment": "auto", "decoder_rows": "auto", "calibrate_norm": False}
    assert samples.items() <= expected.as_dict().items()
    for settings in (by_method, FeatCalSettings.plus(), FeatCalSettings.plus(**samples)):
        assert settings.with_rule_defaults == expected
    run_settings = {"max_length": None, "checkpoint_dir": None}
    assert by_command.replace(**run_settings).with_rule_defaults == expected
    by_object = FeatCalSettings(rule=Plus()).with_rule_defaults
    assert (
        by_object.rule_object == expected.rule_object and by_object.replace(rule="plus") == expected
    )
    table = (CONFIG.parent / "docs/reference/formulas.md").read_text()
    for name, value in samples.items():
        paper = getattr(FeatCalSettings().with_rule_defaults, name)
        words = [str(word).lower() for word in (paper, value)]
        assert re.search(rf"\| `{name}` \| `?{words[0]}`? \| `?{words[1]}`? \|", table)


def test_settings_are_copied_with_changes_and_never_changed():
    settings = FeatCalSettings(modules=["*.fc1"], family=LLAMA)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.__setattr__("seed", 1)
    changed = settings.replace(seed=7)
    assert (settings.seed, changed.seed, changed.modules) == (42, 7, ("*.fc1",))
    with pytest.raises(TypeError, match="alpha"):
        settings.replace(alpha=0.3)
    assert "layers" in json.dumps(settings.as_dict())


def test_a_rule_takes_the_settings_that_are_its_fields():
    assert FeatCalSettings(mix_alpha=0.5).rule_object == Paper(mix_alpha=0.5)
    weighted = FeatCalSettings.plus(task_weights={"a": 2.0}, calibrate_bias=False)
    assert weighted.rule_object == Plus(task_weights={"a": 2.0}, calibrate_bias=False)
    assert FeatCalSettings.plus().rule_object == Plus(task_vectors_only=None)
    kept = FeatCalSettings.plus(task_vectors_only=False)
    assert kept.rule_object == Plus(task_vectors_only=False)
    target = FeatCalSettings(rule={"_target_": "plus", "gamma": 3.0}, calibrate_bias=False)
    assert target.rule_object == Plus(gamma=3.0, calibrate_bias=False)
    rule: Any = Plus(gamma=3.0)
    assert FeatCalSettings(rule=rule).rule_object is rule


def test_keywords_of_calibrate_are_the_options_with_their_types_and_defaults():
    (declared,) = get_args(get_type_hints(calibrate)["options"])
    keywords, options = get_type_hints(declared), Options().by_name
    assert keywords | {"family": Any} == {f.name: f.type for f in dataclasses.fields(Options)}
    assert all(f"`{name}`" in str(calibrate.__doc__) for name in keywords)
    flat = FeatCalSettings(samples_per_task=1).by_name | {"samples_per_task": None}
    assert flat.items() >= options.items()


def test_keywords_of_calibrate_folder_are_the_options_of_the_command():
    (declared,) = get_args(get_type_hints(calibrate_folder)["options"])
    types = {name: str(hint) for name, hint in get_type_hints(declared).items()}
    options = {field.name: str(field.type) for field in settings_of(Request)}
    assert options.pop("merged") == "str | None"
    paths = str(str | Path)
    assert {name: hint.replace(paths, "str") for name, hint in types.items()} == options


@pytest.mark.parametrize("method", method_names())
def test_list_yaml_and_class_of_a_method_have_the_same_settings(method: str):
    config = read_method(method)
    algorithm: Any = get_class(config["_target_"])
    settings, rival = listed(method), getattr(algorithm, "kind", None)
    assert rival is None or rival.option == method
    assert set(settings) == set(algorithm._config_mapping) - set(BaseAlgorithm._config_mapping)
    assert all(entry["meaning"] and entry["values"] for entry in settings.values())
    assert max(map(len, featcal("settings", method).out.splitlines())) <= 80
    inherited = {*listed("featcal")} if method == "diagnose" else set()
    for name in settings.keys() - BY_HAND - inherited:
        assert config[name] == settings[name]["default"], name


def test_featcal_is_the_default_and_a_short_name_does():
    text = featcal("settings").out
    assert "mix_alpha = 0.3\n    values: a finite number >= 0 and at most 1\n    Share of" in text
    assert listed("regmean") == listed("featcal_baselines/regmean")
    assert "no method 'surgry' (nearest: 'surgery')" in error_of("settings", "surgry")
