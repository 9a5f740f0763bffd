"""A calibrated model of transformers: loading and writing it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import nn

from fusion_bench_featcal.experts.conversion import ConvertedSource
from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.folders.opened import CalibratedModel, CardHead
from fusion_bench_featcal.folders.transformers_models import TransformersModels
from fusion_bench_featcal.models.cards import TRANSFORMERS, card_tags
from fusion_bench_featcal.models.saving import (
    correct_configs,
    corrected_config,
    write_config,
    write_shards,
)
from fusion_bench_featcal.run.finished import FinishedBlocks
from fusion_bench_featcal.settings import FeatCalSettings

CONFIG = "config.json"


def calibrate_transformers(
    models: TransformersModels, settings: FeatCalSettings, batches: Mapping[str, object]
) -> CalibratedModel:
    """Calibrate the merged model with each task's batches. Weights are files of finished blocks."""
    result = models.calibrate(settings, batches)
    assert result.weights is not None  # as the merged model is in files
    blocks = result.weights
    return CalibratedModel(result, partial(models.load, blocks), partial(_write, models, blocks))


def _write(
    models: TransformersModels, blocks: FinishedBlocks, folder: Path, heads: Mapping[str, nn.Module]
) -> CardHead:
    """Write weights, heads, tokenizer or image processor, and files beside them."""
    _write_weights(models, blocks, folder)
    if models.unshared_ends:  # let it stop where answers ended in the run
        file, whole = folder / "generation_config.json", models.like.whole
        content = read_json(file) if file.is_file() else whole.generation_config.to_diff_dict()  # type: ignore[operator]
        # transformers 4 would replace one with `_from_model_config` by that of config.json.
        content.pop("_from_model_config", None)
        write_config(file, content | {"eos_token_id": sorted(models.ends)})
    if models.heads is not None:
        models.heads.write(heads, folder)
    models.processor.write(folder)
    correct_configs(models.like.whole, folder, skipped=CONFIG)
    if models.merged is None:
        return CardHead(TRANSFORMERS, [])
    models.merged.folder_files.copy_small_files(folder, for_processor=False)
    return CardHead(TRANSFORMERS, card_tags(models.merged.folder))


def _write_weights(models: TransformersModels, blocks: FinishedBlocks, folder: Path) -> None:
    """Write a correct config, and weights in one file up to 5 GB, else one for each block."""
    model, stored = models.like, models.stored
    if not isinstance(stored, SafetensorsExpert | ConvertedSource):  # transformers writes its files
        models.load(blocks).save_pretrained(folder)  # type: ignore[operator]
        correct_configs(model.whole, folder)
        return
    write_config(folder / CONFIG, corrected_config(model.config or {}, model.whole))
    if model.generation_config is not None:
        write_config(folder / "generation_config.json", model.generation_config)
    calibrated = ConvertedSource(blocks, stored.joined)
    keys, written = pair_names(model.label, stored, model.whole).values(), calibrated.names()
    outside = {key: stored.tensor(key) for key in keys if key not in written}
    outside_blocks = calibrated.split(outside)
    # A classifier's head comes with its own tail, such as a pooler.
    if models.heads is not None and model.name in models.experts:
        body_names = pair_names(model.label, stored, models.empty_body)
        outside_blocks |= {body_names[n]: t for n, t in models.tail(model.name).items()}
    write_shards(folder, blocks, outside_blocks)
