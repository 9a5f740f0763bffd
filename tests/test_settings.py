"""Defaults, ranges and messages of the settings."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from fusion_bench_featcal import FeatCalSettings, ReplayFamily
from fusion_bench_featcal.rules import rule_of
from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.settings import PLUS

METHOD = Path(__file__).parents[1] / "config" / "method"
# lambda, rho, alpha, norms: what the paper and its demo state for their suites
PUBLISHED = {
    "paper_clip": (0.05, 2.0, 0.3, True, "uniform"),
    "paper_flan_t5": (1e-5, 2.0, 0.6, False, "uniform"),
    "paper_llama_3b": (1e-5, 0.5, 0.15, False, "uniform"),
    "paper_llama_8b": (3.0, 0.5, 0.15, False, "uniform"),
    "demo": (0.05, 2.2, 0.25, True, "demo_last_block"),
}


def read_yaml(path: Path) -> dict[str, Any]:
    values = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_settings(name: str):
    preset = read_yaml(METHOD / "featcal" / f"{name}.yaml")
    preset.pop("defaults")
    settings = FeatCalSettings(**preset)
    found = (settings.ridge_lambda, settings.anchor_rho, settings.mix_alpha)
    assert (*found, settings.calibrate_norm, settings.token_weights) == PUBLISHED[name]
    assert settings.samples_per_task == 256
    assert settings.calibrate_bias


@pytest.mark.parametrize(
    ("pool", "preset"),
    [
        ("flan-t5-base_glue", "paper_flan_t5"),
        ("flan-t5-large_glue_lora", "paper_flan_t5"),
        ("mergebench_llama-3.2-3b-instruct", "paper_llama_3b"),
        ("mergebench_llama-3.1-8b-instruct", "paper_llama_8b"),
    ],
)
def test_pools_bring_the_papers_settings(pool: str, preset: str):
    config = METHOD.parent
    assert {"/featcal_suite@featcal": preset} in read_yaml(config / f"modelpool/{pool}.yaml")[
        "defaults"
    ]
    method = read_yaml(METHOD / "featcal" / f"{preset}.yaml")
    brought = read_yaml(config / "featcal_suite" / f"{preset}.yaml")["presets"][preset]
    assert {key: method[key] for key in brought} == brought


NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("ridge_lambda", -0.05, ">= 0"),
    ("ridge_lambda", NAN, ">= 0"),
    ("ridge_lambda", INF, "finite"),
    ("ridge_lambda", "0.05", "number"),
    ("ridge_lambda", True, "number"),
    ("ridge_lambda", None, "number"),
    ("ridge_lambda", 1e300, "at most 1e12"),
    ("eps", 1e300, "at most 1e12"),
    ("mix_alpha", 1.01, ">= 0 and at most 1"),
    ("mix_alpha", -1e-9, ">= 0 and at most 1"),
    ("mix_alpha", NAN, ">= 0 and at most 1"),
    ("anchor_rho", NAN, "finite number"),
    ("anchor_rho", -INF, "finite number"),
    ("anchor_rho", None, "number"),
    ("anchor_rho", 1e30, ">= -1000 and at most 1000"),
    ("ignore_config", "hidden_act", "a list of config keys"),
    ("ignore_config", None, "a list of config keys"),
    ("eps", -1e-8, ">= 0"),
    *(
        ("rule", value, "paper, plus, a mapping with `_target_` and the rule's settings")
        for value in ("kfold", None, 3, {}, {"gamma": 2.0})
    ),
    *(
        ("task_weights", value, "null, drift, or a mapping of tasks to numbers above 0")
        for value in ("equal", 2.0, {"a": 0}, {"a": "1"})
    ),
    *(
        ("augment", value, "null, auto, jitter, or a mapping with `_target_`")
        for value in (
            "flip",
            True,
            3,
            {},
            {"copies": 2},
            {"_target_": 3},
            {"_target_": "x", "copies": 0},
            {"_target_": "x", "copies": 1.5},
            ["jitter"],
        )
    ),
    ("samples_per_task", 0, ">= 1"),
    ("samples_per_task", 2.0, "integer"),
    ("samples_per_task", True, "integer"),
    ("batch_size", 0, ">= 1"),
    ("batch_size", -16, ">= 1"),
    ("seed", -1, ">= 0"),
    ("seed", 1.5, "integer"),
    ("calibrate_bias", 1, "true or false"),
    ("calibrate_norm", "yes", "true or false"),
    ("batch_norm", "frozen", "reestimate, merged"),
    ("log_drift", None, "true or false"),
    ("linear_kernel", "mkl", "one of auto, torch, onednn"),
    ("sums_precision", "float16", "one of auto, float32, float64, tf32, bfloat16"),
    ("activations", "gpu", "auto, device, host, disk"),
    ("activations", None, "auto, device, host, disk"),
    ("activations_dir", "", "folder"),
    ("activations_dir", 7, "folder"),
    ("checkpoint_dir", "", "folder"),
    ("checkpoint_dir", 3, "folder"),
    ("resume", "yes", "true or false"),
    ("decode_workers", -1, "auto or an integer >= 0"),
    ("decode_workers", "four", "auto or an integer"),
    ("decode_workers", True, "auto or an integer"),
    ("modules", "mlp.fc1", "list of patterns"),
    ("modules", [], "list of patterns"),
    ("modules", [""], "list of patterns"),
    ("modules", [3], "list of patterns"),
    ("token_weights", "demo", "uniform, demo_last_block"),
    ("decoder_rows", "target", "all, targets"),
    ("calibration_split", "training", "train, val, test"),
    ("calibration_data", ["a.jsonl"], "a mapping of tasks to paths, hub ids or configs"),
    ("calibration_data", {"math": 3}, "a mapping of tasks to paths"),
    ("calibration_targets", "label", "labels, generated"),
    ("generated_tokens", 0, ">= 1"),
    ("max_length", 1, "null or an integer >= 2"),
    ("max_length", "512", "integer"),
    ("stream_experts", "yes", "auto, true, false"),
    ("stream_experts", 1, "auto, true, false"),
    ("expert_read_budget", 0, "null or a whole number of bytes >= 1"),
    ("expert_read_budget", -5, ">= 1"),
    ("expert_read_budget", 1.5, "whole number"),
    ("expert_read_budget", True, "whole number"),
    ("expert_read_budget", INF, "whole number"),
    ("expert_read_budget", "0MB", "800MB or 1.5GiB"),
    ("expert_read_budget", "800", "units B, KB to TB, KiB to TiB"),
    ("expert_read_budget", "800mb", "800MB"),
    ("expert_read_budget", "half", "50%"),
    ("expert_read_budget", "101%", "up to 100%"),
    ("expert_read_budget", "-50%", "50%"),
    ("family", None, "family"),
    ("family", "", "family"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), OUT_OF_RANGE, ids=str)
def test_value_out_of_range_is_named_with_its_range(name: str, value: Any, wanted: str):
    with pytest.raises(
        ValueError, match=rf"method\.{name} must be .*{wanted}.*got {re.escape(repr(value))}"
    ):
        FeatCalSettings(**{name: value})


AT_THE_EDGE: list[tuple[str, Any]] = [
    ("ridge_lambda", 0.0),
    ("ridge_lambda", 1e12),
    ("ignore_config", ["hidden_act"]),
    ("mix_alpha", 0.0),
    ("mix_alpha", 1.0),
    ("mix_alpha", 1),
    ("anchor_rho", -1000.0),
    ("anchor_rho", 0),
    ("eps", 0.0),
    ("rule", {"_target_": "some.Rule", "gamma": 2.0}),
    ("augment", {"_target_": "some.thing", "copies": 1}),
    ("samples_per_task", 1),
    ("batch_size", 1),
    ("seed", 0),
    ("modules", ["*.fc1", "!0.*"]),
    ("token_weights", "demo_last_block"),
    ("decoder_rows", "targets"),
    ("decode_workers", 0),
    ("calibration_split", "val"),
    ("calibration_data", {"math": "math.jsonl", "code": {"_target_": "datasets.load_dataset"}}),
    ("stream_experts", True),
    ("stream_experts", False),
    ("activations", "disk"),
    ("family", {"name": "replay", "blocks": ["h.*"]}),
]


@pytest.mark.parametrize(("name", "value"), AT_THE_EDGE, ids=str)
def test_value_at_the_edge_of_its_range_is_kept(name: str, value: Any):
    settings = FeatCalSettings(**{name: value})
    assert settings.as_dict()[name] == value
    assert json.loads(json.dumps(settings.as_dict()))[name] == value
    assert FeatCalSettings(**settings.as_dict()) == settings


def test_all_problems_are_told_at_once():
    with pytest.raises(ValueError, match=r"method\.ridge_lambda.*method\.mix_alpha.*method\.seed"):
        FeatCalSettings(seed=-1, mix_alpha=2.0, ridge_lambda=-1.0)


def test_resuming_needs_a_folder(tmp_path: Path):
    with pytest.raises(ValueError, match=r"method\.resume needs method\.checkpoint_dir"):
        FeatCalSettings(resume=True)
    kept: Any = tmp_path
    assert FeatCalSettings(resume=True, checkpoint_dir=kept).checkpoint_dir == str(tmp_path)


def test_misspelt_setting_is_refused():
    misspelt: dict[str, Any] = {"ridge_lamda": 0.05}
    with pytest.raises(TypeError, match="ridge_lamda"):
        FeatCalSettings(**misspelt)
    with pytest.raises(TypeError, match="alpha"):
        FeatCalSettings().replace(alpha=0.3)


def test_settings_cannot_be_changed_in_place():
    settings = FeatCalSettings(modules=["*.fc1"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.__setattr__("seed", 1)
    assert isinstance(settings.modules, tuple)
    changed = settings.replace(seed=7)
    assert (settings.seed, changed.seed, changed.modules) == (42, 7, settings.modules)
    with pytest.raises(ValueError, match=r"method\.mix_alpha"):
        settings.replace(mix_alpha=-1.0)


def test_family_object_is_described_for_the_log():
    described = FeatCalSettings(family=ReplayFamily(blocks=["h.*"])).as_dict()
    assert "h.*" in json.dumps(described)


def test_plus_takes_changes():
    assert FeatCalSettings.plus() == FeatCalSettings(**PLUS)
    assert FeatCalSettings.plus(seed=3).replace(seed=42) == FeatCalSettings.plus()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(
            ({**PLUS, name: value}, rf"{name}={value} has no part in method\.rule=plus: leave")
            for name, value in (
                ("ridge_lambda", 0.1), ("mix_alpha", 0.5), ("anchor_rho", 1.0), ("eps", 0.5),
            )
        ),
        ({"rule": "plus"}, r"rule=plus needs method\.calibrate_norm=false"),
        ({"task_weights": {"a": 2.0}}, r"task_weights has no part in method\.rule=paper: set "),
        (
            {"rule": Paper(), "mix_alpha": 0.5},
            r"mix_alpha=0\.5 is no setting of a rule .* set it there, Paper\(mix_alpha=\.\.\.\)",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_settings_without_a_part_in_the_rule_say_so(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        FeatCalSettings(**values)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"_target_": "no.such.Rule"}, r"_target_ 'no\.such\.Rule' cannot be imported"),
        (
            {"_target_": "pathlib.Path"},
            r"pathlib\.Path is no rule: a dataclass with turns and sums",
        ),
        ({"_target_": "plus", "gama": 1.0}, r"plus: .*'gama'"),
    ],
)
def test_rules_that_cannot_be_made_say_so(rule: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=rf"method\.rule: {message}"):
        rule_of(FeatCalSettings(rule=rule))


def test_a_rule_takes_the_settings_that_are_its_fields():
    assert rule_of(FeatCalSettings(mix_alpha=0.5)) == Paper(mix_alpha=0.5)
    weighted = FeatCalSettings.plus(task_weights={"a": 2.0}, calibrate_bias=False)
    assert rule_of(weighted) == Plus(task_weights={"a": 2.0}, calibrate_bias=False)
    own = FeatCalSettings(rule={"_target_": "plus", "gamma": 3.0}, calibrate_bias=False)
    assert rule_of(own) == Plus(gamma=3.0, calibrate_bias=False)
    given: Any = Plus(gamma=3.0)
    assert rule_of(FeatCalSettings(rule=given)) is given
