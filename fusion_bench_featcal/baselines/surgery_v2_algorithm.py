"""SurgeryV2 over any merged model of a pool, and as a FusionBench method."""

import logging
from collections.abc import Iterable
from typing import Any

import torch

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from torch import Tensor, nn

from fusion_bench_featcal.baselines.features import open_stream, stream_split
from fusion_bench_featcal.baselines.layer_corrected import LayerCorrectedModel, clip_blocks
from fusion_bench_featcal.baselines.post_merging import check_post_merging
from fusion_bench_featcal.baselines.projection import load_projection, pooled_output, project
from fusion_bench_featcal.baselines.settings import (
    TEXT_SETTINGS,
    SurgerySettings,
    setting_names,
    settings_from,
)
from fusion_bench_featcal.baselines.surgery_v2 import LayerSurgery, train_surgery_v2
from fusion_bench_featcal.baselines.training import Curve, Losses
from fusion_bench_featcal.fusionbench.ending import ends_cleanly
from fusion_bench_featcal.fusionbench.options import check_merger, plain, take_fusion_bench_keys
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models
from fusion_bench_featcal.fusionbench.pool_models import load_pool_model
from fusion_bench_featcal.fusionbench.processors import load_input_processor, text_kind
from fusion_bench_featcal.fusionbench.program import check_upstream, prepare_run
from fusion_bench_featcal.fusionbench.saving import CompleteSaver
from fusion_bench_featcal.fusionbench.standalone import Row, run_post_merging
from fusion_bench_featcal.image_cache import ImageCache
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

SURGERY_V2_SETTINGS = tuple(
    name for name in setting_names(SurgerySettings) if name not in ("normalize", *TEXT_SETTINGS)
)
"""Fields of `SurgerySettings` that SurgeryV2 has too; it always corrects images' features as they
are."""


def check_surgery_v2(
    modelpool: BaseModelPool,
    settings: SurgerySettings,
    processor: Any,
    clip_model: nn.Module | str | None = None,
) -> None:
    """Refuse what cannot work, before a model is loaded.

    Args:
        modelpool: As for `surgery_v2_post_merge`, like the others.
        settings: The method's settings.
        processor: The pool's processor.
        clip_model: Whose visual projection is used.

    Raises:
        CalibrationError: If the models are no CLIP vision models, or a task lacks images.
    """
    if text_kind(modelpool) is not None:
        raise CalibrationError(
            f"SurgeryV2 corrects CLIP vision models, and {type(modelpool).__name__} holds language "
            "models: leave it out, or use surgery, prob_surgery or ridge_surgery"
        )
    check_post_merging(modelpool, settings, processor, clip_model)


def refuse_other_settings(names: Iterable[str]) -> None:
    """Refuse settings of Surgery that SurgeryV2 has not.

    Raises:
        ValueError: Naming the first of them.
    """
    for name in names:
        if name in ("normalize", *TEXT_SETTINGS):
            raise ValueError(f"method.{name} is no setting of SurgeryV2; leave it out")


def surgery_v2_post_merge(
    merged: nn.Module,
    modelpool: BaseModelPool,
    settings: SurgerySettings,
    processor: Any,
    clip_model: nn.Module | str | None = None,
    *,
    device: torch.device | None = None,
    images: ImageCache | None = None,
) -> LayerCorrectedModel:
    """Correct a merged model's features behind every block, task by task.

    Args:
        merged: A merged CLIP vision model, which the result holds (not a copy); it is frozen.
        modelpool: Experts and images, by task.
        settings: `SURGERY_V2_SETTINGS` are used.
        processor: Turns an image into a tensor.
        clip_model: CLIP model, or its checkpoint, whose visual projection is used; None: the
            checkpoint of the pool's base model.
        device: Where to compute; None: where the merged model is.
        images: Keeps processed images for other methods on the same pool; None: none are kept.

    Returns:
        The merged model with its corrections.

    Raises:
        CalibrationError: If there are no projected features, a task lacks images, or a training
            diverges.
    """
    device = device or next(merged.parameters()).device
    batches = open_stream(modelpool, settings, processor, images=images)
    projection = load_projection(modelpool, clip_model).to(device)
    merged = merged.to(device)

    def final_features(output: Any) -> Tensor:
        return project(pooled_output(output, merged), projection)

    corrections: dict[str, LayerSurgery] = {}
    curves: dict[str, Curve] = {}
    for task in modelpool.model_names:
        pixels = [batch["pixel_values"] for batch in batches[task]]
        expert = load_pool_model(modelpool, task).to(device)
        log.info("training the modules of %s", task)
        losses = Losses()
        corrections[task] = train_surgery_v2(
            merged,
            expert,
            clip_blocks(merged),
            final_features,
            pixels,
            settings,
            task=task,
            on_step=losses,
        )
        curves[task] = losses.curve()
    split = stream_split(settings)
    drawn = {t: {"samples": len(part.indices), "split": split} for t, part in batches.items()}
    return LayerCorrectedModel(merged, projection, corrections, samples=drawn, curves=curves)


class SurgeryV2Algorithm(LightningFabricMixin, BaseAlgorithm):
    """SurgeryV2 (arXiv 2410.14389) over any merged CLIP vision model.

    Keys: `base_method` (config of the upstream merger; None takes the pool's `_merged_`),
    `clip_model` (checkpoint with the visual projection; None: the pool's base model) and
    `SURGERY_V2_SETTINGS`.
    """

    settings: SurgerySettings
    _config_mapping = BaseAlgorithm._config_mapping | {
        name: name for name in (*SURGERY_V2_SETTINGS, "base_method", "clip_model")
    }

    def __init__(self, *, base_method: Any = None, clip_model: Any = None, **keys: Any) -> None:
        """Check everything that can be checked before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        meta = take_fusion_bench_keys(keys)
        refuse_other_settings(keys)
        values, own = {k: plain(v) for k, v in keys.items()}, ("base_method", "clip_model")
        self.settings = settings_from(SurgerySettings, values, own, SURGERY_V2_SETTINGS)
        check_merger(base_method)
        self.base_method, self.clip_model = base_method, clip_model
        for name in SURGERY_V2_SETTINGS:
            setattr(self, name, getattr(self.settings, name))
        super().__init__(**meta)

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    @ends_cleanly
    def run(self, modelpool: BaseModelPool) -> LayerCorrectedModel:  # type: ignore[override]
        """Merge with the upstream merger, then correct task by task.

        Args:
            modelpool: Base, experts and images.

        Returns:
            The corrected model; FusionBench's CLIP task pools evaluate it by task name.

        Raises:
            CalibrationError: If the run cannot go on; most reasons are found before anything is
                merged.
        """
        if self.fabric.world_size > 1:
            raise CalibrationError("surgery methods run on one device: set fabric.devices=1")
        check_upstream(self.base_method, modelpool)
        check_pool_models(modelpool, self.fabric)
        processor = load_input_processor(modelpool)
        check_surgery_v2(modelpool, self.settings, processor, self.clip_model)
        values = {name: getattr(self.settings, name) for name in SURGERY_V2_SETTINGS}
        row = Row(
            name="surgery_v2",
            settings={"method": "surgery_v2", "clip_model": self.clip_model, **values},
            seed=self.settings.seed,
            samples=lambda model: model.samples,
        )
        model = run_post_merging(
            self,
            modelpool,
            row,
            lambda merged: surgery_v2_post_merge(
                merged,
                modelpool,
                self.settings,
                processor,
                self.clip_model,
                device=self.fabric.device,
            ),
        )
        if self.settings.stream == "test_tta":
            log.warning("corrections were fitted on images of the test split (test_tta)")
        modelpool.save_model = CompleteSaver(modelpool, processor)  # type: ignore[method-assign]
        return model
