import pytest

from fusion_bench_featcal.lab import rivals as methods
from fusion_bench_featcal.lab.rivals import ProbSurgery, RidgeSurgery, Surgery


@pytest.mark.parametrize(
    ("kind", "key", "value", "wanted"),
    [
        (Surgery, "rank", 0, "an integer >= 1, got 0"),
        (Surgery, "rank", True, "an integer >= 1, got True"),
        (Surgery, "learning_rate", 0, "a finite number > 0, got 0"),
        (Surgery, "learning_rate", float("inf"), "a finite number > 0, got inf"),
        (Surgery, "steps", 1.5, r"an integer >= 1, got 1\.5"),
        (Surgery, "normalize", None, "one of none, pre, got None"),
        (Surgery, "seed", -1, "an integer >= 0, got -1"),
        (Surgery, "stream", "train", "one of test_tta, calibration, got 'train'"),
        (Surgery, "calibration_split", "test", "one of train, val, got 'test'"),
        (Surgery, "calibration_targets", "answers", "one of labels, generated, got 'answers'"),
        (Surgery, "final_norm", 3, "null or a name, got 3"),
        (ProbSurgery, "hidden", "x", "an integer >= 1, got 'x'"),
        (ProbSurgery, "kl_weight", -1, "scaled or a finite number >= 0, got -1"),
        (ProbSurgery, "kl_weight", "auto", "scaled or a finite number >= 0, got 'auto'"),
        (RidgeSurgery, "ridge_lambda", -0.1, r"auto or a finite number >= 0, got -0\.1"),
    ],
)
def test_value_out_of_range_names_key_and_value(kind, key, value, wanted):
    with pytest.raises(ValueError, match=rf"^method\.{key} must be {wanted}$"):
        kind(**{key: value})


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match=r"method\.rank .*; method\.steps "):
        Surgery(rank=0, steps=0)


def test_auto_needs_a_sample_to_leave_out():
    with pytest.raises(ValueError, match=r"method\.ridge_lambda=auto.*method\.samples_per_task"):
        RidgeSurgery(samples_per_task=1)
    assert RidgeSurgery(samples_per_task=1, ridge_lambda=0.1).ridge_lambda == 0.1


@pytest.mark.parametrize(
    ("algorithm", "key", "nearest"),
    [
        ("SurgeryAlgorithm", "base_metod", "base_method"),
        ("ProbSurgeryAlgorithm", "clip_modle", "clip_model"),
        ("RidgeSurgeryAlgorithm", "final_nrom", "final_norm"),
        ("SurgeryV2Algorithm", "stpes", "steps"),
        ("RegMeanAlgorithm", "task_weight", "task_weights"),
        ("RegMeanPlusPlusAlgorithm", "off_diagonals", "off_diagonal"),
        ("LotAlgorithm", "modlues", "modules"),
        ("AnchorOnlyAlgorithm", "base_metod", "base_method"),
        ("Surgery", "sample_per_task", "samples_per_task"),
    ],
)
def test_every_method_offers_the_nearest_of_all_its_keys(algorithm, key, nearest):
    with pytest.raises(ValueError, match=rf"method\.{key} .*nearest: '{nearest}'"):
        getattr(methods, algorithm)(**{key: 1})
