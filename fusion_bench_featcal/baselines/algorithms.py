"""Surgery, ProbSurgery and ridge surgery as FusionBench methods over any upstream merger."""

import logging
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin

from fusion_bench_featcal.baselines.post_merging import Corrected, check_post_merging, post_merge
from fusion_bench_featcal.baselines.settings import (
    ProbSurgerySettings,
    RidgeSurgerySettings,
    SurgerySettings,
    setting_names,
    settings_from,
)
from fusion_bench_featcal.fusionbench.ending import ends_cleanly
from fusion_bench_featcal.fusionbench.options import check_merger, plain, take_fusion_bench_keys
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.fusionbench.program import check_upstream, prepare_run
from fusion_bench_featcal.fusionbench.run_results import method_name
from fusion_bench_featcal.fusionbench.saving import CompleteSaver
from fusion_bench_featcal.fusionbench.standalone import Row, run_post_merging
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

OWN_KEYS = {
    "base_method": "Config of the upstream merger (method@method.base_method=task_arithmetic); "
    "None takes the pool's `_merged_` model.",
    "clip_model": "Folder or hub id of the CLIP model with the visual projection; None: the "
    "pool's base model.",
    "final_norm": "Name of the module behind which a language model is corrected; None: found.",
}
"""Keys beside the settings -> their meaning; the default of each is None."""


class SurgeryAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Representation Surgery (arXiv 2402.02705) over any merged CLIP vision or language model.

    Keys: `base_method` (config of the upstream merger; None takes the pool's `_merged_`),
    `clip_model` (checkpoint with the visual projection; None: the pool's base model), `final_norm`
    (the module that a language model is corrected behind; None: found) and the fields of
    `SurgerySettings`.
    """

    base_method: Any
    clip_model: str | None
    final_norm: str | None
    settings: SurgerySettings
    _config_mapping = BaseAlgorithm._config_mapping | {
        name: name for name in (*setting_names(SurgerySettings), *OWN_KEYS)
    }

    def __init__(self, **keys: Any) -> None:
        """Check everything that can be checked before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        super().__init__(**_take_keys(self, SurgerySettings, keys))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> Corrected:  # type: ignore[override]
        """Merge and correct; see `run_correction`."""
        return run_correction(self, modelpool)


class ProbSurgeryAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """ProbSurgery (ICML 2025) over any merged CLIP vision model or language model.

    Keys: those of `SurgeryAlgorithm`, with the fields of `ProbSurgerySettings`.
    """

    base_method: Any
    clip_model: str | None
    final_norm: str | None
    settings: ProbSurgerySettings
    _config_mapping = BaseAlgorithm._config_mapping | {
        name: name for name in (*setting_names(ProbSurgerySettings), *OWN_KEYS)
    }

    def __init__(self, **keys: Any) -> None:
        """Check everything that can be checked before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        super().__init__(**_take_keys(self, ProbSurgerySettings, keys))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> Corrected:  # type: ignore[override]
        """Merge and correct; see `run_correction`."""
        return run_correction(self, modelpool)


class RidgeSurgeryAlgorithm(LightningFabricMixin, BaseAlgorithm):
    """Ridge surgery, an affine correction in closed form, over merged CLIP or language models.

    Keys: those of `SurgeryAlgorithm`, with the fields of `RidgeSurgerySettings`.
    """

    base_method: Any
    clip_model: str | None
    final_norm: str | None
    settings: RidgeSurgerySettings
    _config_mapping = BaseAlgorithm._config_mapping | {
        name: name for name in (*setting_names(RidgeSurgerySettings), *OWN_KEYS)
    }

    def __init__(self, **keys: Any) -> None:
        """Check everything that can be checked before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        super().__init__(**_take_keys(self, RidgeSurgerySettings, keys))

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    def run(self, modelpool: BaseModelPool) -> Corrected:  # type: ignore[override]
        """Merge and correct; see `run_correction`."""
        return run_correction(self, modelpool)


CorrectionAlgorithm = SurgeryAlgorithm | ProbSurgeryAlgorithm | RidgeSurgeryAlgorithm


@ends_cleanly
def run_correction(algorithm: CorrectionAlgorithm, modelpool: BaseModelPool) -> Corrected:
    """Merge with the upstream merger, then correct the final features task by task.

    Args:
        algorithm: The method, with its settings.
        modelpool: Base, experts and data.

    Returns:
        The corrected model; FusionBench's CLIP task pools and `TextTaskPool` tell it the task.

    Raises:
        CalibrationError: If the run cannot go on; most reasons are found before anything is merged.
    """
    if algorithm.fabric.world_size > 1:
        raise CalibrationError("surgery methods run on one device: set fabric.devices=1")
    check_upstream(algorithm.base_method, modelpool)
    check_pool_models(modelpool, algorithm.fabric)
    processor = load_input_processor(modelpool)
    site = algorithm.clip_model, algorithm.final_norm
    check_post_merging(modelpool, algorithm.settings, processor, *site)
    model = run_post_merging(
        algorithm,
        modelpool,
        _row(algorithm),
        lambda merged: post_merge(
            merged,
            modelpool,
            algorithm.settings,
            processor,
            *site,
            device=algorithm.fabric.device,
        ),
    )
    if algorithm.settings.stream == "test_tta":
        log.warning("corrections were fitted on samples of the test split (method.stream=test_tta)")
    modelpool.save_model = CompleteSaver(modelpool, processor)  # type: ignore[method-assign]
    return model


def _row(algorithm: CorrectionAlgorithm) -> Row:
    name, settings = method_name({"_target_": type(algorithm).__name__}), algorithm.settings
    values = {key: getattr(settings, key) for key in setting_names(type(settings))}
    return Row(
        name=name,
        settings={
            "method": name,
            "clip_model": algorithm.clip_model,
            "final_norm": algorithm.final_norm,
            **values,
        },
        seed=settings.seed,
        samples=lambda model: model.samples,
    )


def _take_keys(algorithm: CorrectionAlgorithm, kind: Any, keys: dict[str, Any]) -> dict[str, Any]:
    """Check an algorithm's keys and set them as its attributes; return FusionBench's own keys."""
    meta = take_fusion_bench_keys(keys)
    own = {key: keys.pop(key, None) for key in OWN_KEYS}
    settings = settings_from(
        kind, {key: plain(value) for key, value in keys.items()}, list(OWN_KEYS)
    )
    check_merger(own["base_method"])
    for key, what in (
        ("clip_model", "a folder or hub id of a CLIP model"),
        ("final_norm", "a name"),
    ):
        if own[key] is not None and not isinstance(own[key], str):
            raise ValueError(f"method.{key} must be {what}, got {own[key]!r}")
    for key, value in own.items():
        setattr(algorithm, key, value)
    algorithm.settings = settings
    for name in setting_names(kind):
        setattr(algorithm, name, getattr(settings, name))
    return meta
