import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fusion_bench_featcal.methods import (
    ProbSurgerySettings,
    RidgeSurgerySettings,
    Surgery,
    SurgerySettings,
)
from fusion_bench_featcal.methods.standalone import (
    AnchorOnlyAlgorithm,
    LotAlgorithm,
    ProbSurgeryAlgorithm,
    RegMeanAlgorithm,
    RegMeanPlusPlusAlgorithm,
    RidgeSurgeryAlgorithm,
    SurgeryAlgorithm,
    SurgeryV2Algorithm,
)

KINDS = {
    "surgery": SurgerySettings,
    "prob_surgery": ProbSurgerySettings,
    "ridge_surgery": RidgeSurgerySettings,
}
CONFIG = Path(__file__).resolve().parents[2] / "config" / "method"


@pytest.mark.parametrize("name", KINDS)
def test_yaml_holds_every_setting_with_its_default(name):
    values = OmegaConf.to_container(OmegaConf.load(CONFIG / f"{name}.yaml"))
    assert isinstance(values, dict)
    others = {"defaults", "_target_", "_recursive_", "clip_model", "final_norm"}
    assert {key: values[key] for key in values.keys() - others} == dataclasses.asdict(KINDS[name]())


@pytest.mark.parametrize(
    ("kind", "key", "value", "wanted"),
    [
        (SurgerySettings, "rank", 0, "an integer >= 1, got 0"),
        (SurgerySettings, "rank", True, "an integer >= 1, got True"),
        (SurgerySettings, "learning_rate", 0, "a finite number > 0, got 0"),
        (SurgerySettings, "learning_rate", float("inf"), "a finite number > 0, got inf"),
        (SurgerySettings, "steps", 1.5, r"an integer >= 1, got 1\.5"),
        (SurgerySettings, "batch_size", -1, "an integer >= 1, got -1"),
        (SurgerySettings, "normalize", "post", "one of none, pre, got 'post'"),
        (SurgerySettings, "normalize", None, "one of none, pre, got None"),
        (SurgerySettings, "samples_per_task", None, "an integer >= 1, got None"),
        (SurgerySettings, "seed", -1, "an integer >= 0, got -1"),
        (SurgerySettings, "stream", "train", "one of test_tta, calibration, got 'train'"),
        (SurgerySettings, "calibration_split", "test", "one of train, val, got 'test'"),
        (ProbSurgerySettings, "hidden", "x", "an integer >= 1, got 'x'"),
        (ProbSurgerySettings, "kl_weight", -1, "a finite number >= 0, or scaled, got -1"),
        (ProbSurgerySettings, "kl_weight", "auto", "a finite number >= 0, or scaled, got 'auto'"),
        (RidgeSurgerySettings, "ridge_lambda", -0.1, r"a finite number >= 0, or auto, got -0\.1"),
    ],
)
def test_value_out_of_range_names_key_and_value(kind, key, value, wanted):
    with pytest.raises(ValueError, match=rf"^method\.{key} must be {wanted}$"):
        kind(**{key: value})


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match=r"method\.rank .*; method\.steps "):
        SurgerySettings(rank=0, steps=0)


def test_auto_needs_a_sample_to_leave_out():
    with pytest.raises(ValueError, match=r"method\.ridge_lambda=auto.*method\.samples_per_task"):
        RidgeSurgerySettings(samples_per_task=1)
    assert RidgeSurgerySettings(samples_per_task=1, ridge_lambda=0.1).ridge_lambda == 0.1


def test_older_name_of_the_steps_is_accepted(caplog):
    with caplog.at_level("INFO"):
        assert SurgeryAlgorithm(training_steps=7).method.settings["steps"] == 7
    assert "training_steps is an older name of method.steps" in caplog.text
    with pytest.raises(ValueError, match=r"method\.steps is 8 and method\.training_steps"):
        Surgery(training_steps=7, steps=8)
    with pytest.raises(ValueError, match=r"method\.training_steps is no setting"):
        RidgeSurgeryAlgorithm(training_steps=7)


@pytest.mark.parametrize(
    ("algorithm", "key", "nearest"),
    [
        (SurgeryAlgorithm, "base_metod", "base_method"),
        (ProbSurgeryAlgorithm, "clip_modle", "clip_model"),
        (RidgeSurgeryAlgorithm, "final_nrom", "final_norm"),
        (RidgeSurgeryAlgorithm, "ridge_lamda", "ridge_lambda"),
        (SurgeryV2Algorithm, "stpes", "steps"),
        (RegMeanAlgorithm, "task_weight", "task_weights"),
        (RegMeanPlusPlusAlgorithm, "off_diagonals", "off_diagonal"),
        (LotAlgorithm, "modlues", "modules"),
        (AnchorOnlyAlgorithm, "base_metod", "base_method"),
        (Surgery, "sample_per_task", "samples_per_task"),
    ],
)
def test_every_method_offers_the_nearest_of_all_its_keys(algorithm, key, nearest):
    with pytest.raises(ValueError, match=rf"method\.{key} .* nearest is '{nearest}'"):
        algorithm(**{key: 1})
