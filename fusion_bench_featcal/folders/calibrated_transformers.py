"""A calibrated model of transformers: loading and writing it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.folders.opened import CardHead
from fusion_bench_featcal.folders.transformers_models import TransformersModels
from fusion_bench_featcal.models.other_files import copy_other_files
from fusion_bench_featcal.models.saving import (
    TRANSFORMERS,
    card_tags,
    correct_configs,
    corrected_config,
    write_config,
    write_shards,
)
from fusion_bench_featcal.run.finished import FinishedBlocks
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings

CONFIG = "config.json"


@dataclass(frozen=True)
class CalibratedTransformers:
    """See `Calibrated`. Its weights are the files of finished blocks.

    Attributes:
        result: The calibration's log and reads.
        models: The models of the run.
        blocks: The calibrated weights.
    """

    result: CalibrationResult
    models: TransformersModels
    blocks: FinishedBlocks
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls, models: TransformersModels, settings: FeatCalSettings, batches: Mapping[str, Any]
    ) -> "CalibratedTransformers":
        """Calibrate the merged model with each task's batches."""
        result = models.calibrate(settings, batches)
        assert result.weights is not None  # as the merged model is in files
        return cls(result, models, result.weights)

    def load(self) -> nn.Module:
        """Return the model on the device."""
        return self.models.load(self.blocks)

    def write(self, folder: Path, heads: Mapping[str, nn.Module]) -> CardHead:
        """Write weights, heads, tokenizer or image processor, and files beside them."""
        models = self.models
        config = self._write_weights(folder)
        if models.heads is not None:
            models.heads.write(heads, folder)
        models.processor.write(folder)
        if models.merged is not None:
            copy_other_files(models.merged.folder, folder, of_processor=False)
        correct_configs(models.like.whole, folder, skipped=config)
        tags = [] if models.merged is None else card_tags(models.merged.folder)
        return CardHead(TRANSFORMERS, tags)

    def _write_weights(self, folder: Path) -> str:
        """Write config and weights, in one file up to 5 GB, else one for each block.

        Returns the name of the config if it is correct, as it is not if transformers writes it.
        """
        models, like, stored = self.models, self.models.like, self.models.stored
        if not isinstance(stored, SafetensorsExpert):  # transformers uses other names in files
            self.load().save_pretrained(folder)  # type: ignore[operator]
            return ""
        write_config(folder / CONFIG, corrected_config(like.config or {}, like.whole))
        if like.generation_config is not None:
            write_config(folder / "generation_config.json", like.generation_config)
        keys, calibrated = pair_names(like.label, stored, like.whole).values(), self.blocks.names()
        outside_blocks = {key: stored.tensor(key) for key in keys if key not in calibrated}
        # A classifier's head comes with its own tail, such as a pooler.
        if models.heads is not None and like.name in models.experts:
            of_body = pair_names(like.label, stored, models.empty_body)
            outside_blocks |= {of_body[n]: t for n, t in models.tail(like.name).items()}
        write_shards(folder, self.blocks, outside_blocks)
        return CONFIG
