"""`calibrate` as a user of plain torch calls it: four models and batches, no settings."""

import logging
from typing import Any

import pytest
import torch
from model_types import suite_named
from tiny_models import Suite, decoder_suite, residual_suite

import fusion_bench_featcal
from fusion_bench_featcal import FeatCalSettings, Paper, calibrate
from fusion_bench_featcal.families import Stack


def arguments(suite: Suite) -> tuple[Any, ...]:
    return suite.merged, suite.base, suite.experts, suite.inputs


def bert() -> Suite:
    return suite_named("bert")


@pytest.mark.parametrize("make", [bert, decoder_suite, residual_suite])
def test_models_and_batches_are_enough(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    suite = make()
    with caplog.at_level(logging.WARNING):
        result = calibrate(*arguments(suite))
    assert not caplog.records  # all samples are used, as asked
    samples = {r["task"]: r["samples"] for r in result.log.of_kind("task")}
    sizes = {task: sum(len(next(iter(b.values())) if isinstance(b, dict) else b) for b in batches)
             for task, batches in suite.inputs.items()}  # fmt: skip
    assert samples == sizes
    text = str(result)
    assert text.startswith(f"calibrated {len(result.log.of_kind('block'))} blocks in ")
    assert all(f"{task} {drift:.3g}" in text for task, drift in result.log.final_drift.items())
    assert list(result.log.final_drift) == list(suite.inputs)
    settings = FeatCalSettings.plus(samples_per_task=max(sizes.values()))
    expected = calibrate(*arguments(suite), settings, progress=False).model
    for name, parameter in expected.named_parameters():
        assert torch.equal(result.model.get_parameter(name), parameter)


def test_options_are_keywords_and_settings_are_not_needed() -> None:
    suite = residual_suite(sizes=(9, 6))
    few = calibrate(*arguments(suite), Paper(), samples_per_task=7, progress=False)
    assert {record["samples"] for record in few.log.of_kind("task")} == {7}
    named = calibrate(*arguments(suite), Paper(), family=suite.blocks, progress=False)
    whole = calibrate(*arguments(suite), Paper(), progress=False)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(named.model.get_parameter(name), parameter)
    with pytest.raises(ValueError, match=r"samples_per_task must be .* >= 1, got 0"):
        calibrate(*arguments(suite), samples_per_task=0)
    with pytest.raises(Exception, match=r"no module named \['layers.7'\]"):
        calibrate(*arguments(suite), family=["layers.0", "layers.7"])


def test_an_error_in_a_familys_code_is_not_blamed_on_token_ids() -> None:
    class Broken(Stack):
        def begin(self, *args: Any, **kwargs: Any) -> Any:
            return [][0]

    suite = residual_suite()
    family = Broken("|".join(suite.blocks), compared=False)
    with pytest.raises(IndexError, match="list index out of range"):
        calibrate(*arguments(suite), family=family, progress=False)


def test_folders_are_calibrated_by_a_name_of_the_package() -> None:
    from fusion_bench_featcal.folders import calibrate_folder

    assert fusion_bench_featcal.calibrate_folder is calibrate_folder
