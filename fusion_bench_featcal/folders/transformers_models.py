"""Models of transformers in one `featcal calibrate`: loading, calibrating and writing them."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.data.image_texts import ImageTextBatches
from fusion_bench_featcal.data.text_limits import end_tokens
from fusion_bench_featcal.experts import ExpertSource, LazyModel
from fusion_bench_featcal.experts.conversion import ConvertedSource
from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.similarity import notes_on_experts
from fusion_bench_featcal.experts.source import total_bytes
from fusion_bench_featcal.experts.working_model import offloaded
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.folders.heads import ClassifierHeads
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.model_folder import CLASSIFIERS, LANGUAGE_MODELS, SPEECH, body_of
from fusion_bench_featcal.folders.opened import Models, notes_on_inputs
from fusion_bench_featcal.folders.paired_models import pair_models
from fusion_bench_featcal.folders.shared_processor import SharedProcessor
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.models.cards import CardHead
from fusion_bench_featcal.models.saving import (
    correct_configs,
    corrected_config,
    write_config,
    write_shards,
)
from fusion_bench_featcal.models.structure import fill
from fusion_bench_featcal.modules.models import tensors_outside_blocks
from fusion_bench_featcal.run.as_merged import left_as_merged, left_by_names
from fusion_bench_featcal.run.devices import free_bytes
from fusion_bench_featcal.run.finished import FinishedBlocks
from fusion_bench_featcal.run.log import AsMerged
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.run.storing import store_model
from fusion_bench_featcal.settings import FeatCalSettings

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


class TransformersModels(Models):
    """The models of one request, whose weights stay in files until they are needed.

    Attributes:
        inputs: The models' folders.
        paired: Their weights.
        structure_source: The model that defines class and structure of the calibrated model.
        processor: The tokenizer or image processor of all inputs.
        ends: End tokens that any of the models declares.
    """

    def __init__(self, inputs: InputModels) -> None:
        """Compare the models and their processors.

        Raises:
            CalibrationError: As `pair_models` and `SharedProcessor`.
            ValueError: As these.
        """
        self.inputs, self.paired = inputs, pair_models(inputs)
        self.structure_source = source = self.paired.structure_source
        self.processor = SharedProcessor(inputs, source)
        self.ends = end_tokens(*inputs.by_name.values())
        self.title = f"{source.kind}: {source.calibrated_class.__name__}"
        self.merged_bytes = source.size
        self.expert_bytes = sum(total_bytes(e.source) for e in self.paired.experts.values())
        if source.kind in CLASSIFIERS:
            self.heads = ClassifierHeads(source.name, self.paired.body, self.head_tensors)

    # --- heads ---

    @cached_property
    def _head_names(self) -> list[str]:
        """Names of the body's tensors after the blocks that differ between experts."""
        first, *more = self.paired.experts.values()
        return [
            name
            for name in tensors_outside_blocks(self.paired.body, self.paired.stages)
            if not all(torch.equal(first.stored(name), expert.stored(name)) for expert in more)
        ]

    def head_tensors(self, task: str) -> dict[str, Tensor]:
        """Return an expert's tensors of the body that belong to its head, such as a pooler."""
        return {name: self.paired.experts[task].stored(name) for name in self._head_names}

    # --- loading ---

    def load_merged(self) -> nn.Module:
        """Return the merged model on the device."""
        return self._load_body(self.paired.merged_weights)

    def load_calibrated(self, result: CalibrationResult) -> nn.Module:
        """Return the calibrated model on the device."""
        assert result.weights is not None  # as the merged model is in files
        return self._load_body(result.weights)

    def _load_body(self, body: ExpertSource) -> nn.Module:
        """Return the merged model with the given weights of its body, on the device."""

        def load() -> nn.Module:
            model = self.structure_source.load()
            if self.inputs.merged is None or body is not self.paired.merged_weights:
                fill(body_of(model, self.structure_source.kind), body, self.paired.unused)
            return model

        return self._on_device(body, load)

    def load_base(self) -> nn.Module | None:
        """Return the base on the device, or None without one."""
        return self.paired.base and self._load_body(self.paired.base.source)

    def load_expert(self, task: str) -> nn.Module:
        """Return an expert on the device."""
        expert, base, unused = self.inputs.experts[task], self.inputs.base, self.paired.unused
        body = self.paired.experts[task].source
        return self._on_device(body, lambda: expert.loaded_with(base, unused))

    def _on_device(self, body: ExpertSource, load: Callable[[], nn.Module]) -> nn.Module:
        """Return a model in memory, or offloaded if it is a language model too large for that."""
        device = torch.device(self.inputs.request.device)
        free, paired = free_bytes(device), self.paired
        is_large = free is not None and 2 * self.merged_bytes >= free
        if is_large and self.structure_source.kind in LANGUAGE_MODELS:
            options: Any = {"device": device, "optional": paired.unused}
            return offloaded(LazyModel("the model", body, paired.body, **options), device)
        return load().to(device)

    # --- calibration ---

    def calibrate(
        self, settings: FeatCalSettings, batches: Mapping[str, Any], processes: Processes
    ) -> CalibrationResult:
        """Calibrate the merged model with each task's batches. Weights go to finished blocks."""
        paired = self.paired
        return calibrate(
            paired.body,
            None if paired.base is None else paired.base.source,
            {task: expert.source for task, expert in paired.experts.items()},
            batches,
            settings,
            paired.family,
            device=self.inputs.request.device,
            processes=processes,
            merged_weights=paired.merged_weights,
        )

    def merge(self) -> CalibrationResult:
        """Write the merged model to finished blocks, without a calibration."""
        paired, settings = self.paired, self.inputs.request.settings
        blocks = [block for stage in paired.stages for block in stage]
        return store_model(paired.body, paired.merged_weights, blocks, settings)

    def left_as_merged(self, tasks: Mapping[str, Task]) -> AsMerged:
        """Return the modules that a calibration leaves unchanged although experts differ in them.

        Nothing is returned for tasks with images, because only a run shows which parts of towers
        the images need. With a read budget experts are not compared.
        """
        if any(isinstance(task.batches, ImageTextBatches) for task in tasks.values()):
            return AsMerged()
        paired, merged = self.paired, self.paired.reference
        blocks = paired.stages, paired.modules
        if self.inputs.request.settings.expert_read_budget is not None:
            return left_by_names(paired.body, *blocks)
        if self.inputs.merged is None:
            merged = LazyModel("the merged model", paired.merged_weights, paired.body)
        as_merged = left_as_merged(merged, paired.experts.values(), *blocks)
        return as_merged if self.heads is None else as_merged.without(self._head_names)

    # --- writing ---

    def write_calibrated(
        self, result: CalibrationResult, folder: Path, heads: Mapping[str, nn.Module]
    ) -> CardHead:
        """Write weights, heads, tokenizer or image processor, and files beside them."""
        assert result.weights is not None  # as the merged model is in files
        whole, stored = self.structure_source.whole, self.paired.reference.source
        if isinstance(stored, SafetensorsExpert | ConvertedSource):
            self._write_blocks(result.weights, folder)
        else:  # transformers writes the files of other formats
            self.load_calibrated(result).save_pretrained(folder)  # type: ignore[operator]
            correct_configs(whole, folder)
        if self._note_on_ends is not None:  # let it stop where answers ended in the run
            file = folder / GENERATION_CONFIG
            content = read_json(file) if file.is_file() else whole.generation_config.to_diff_dict()  # type: ignore[operator]
            # transformers 4 would replace one with `_from_model_config` by that of config.json.
            content.pop("_from_model_config", None)
            write_config(file, content | {"eos_token_id": sorted(self.ends)})
        if self.heads is not None:
            self.heads.write(heads, folder)
        self.processor.write(folder)
        correct_configs(whole, folder, skipped=CONFIG)
        kind = type(whole).__name__
        if (merged := self.inputs.merged) is None:
            return CardHead(model_class=kind)
        merged.folder_files.copy_small_files(folder, for_processor=False)
        return CardHead.from_merged(merged.folder, kind)

    def _write_blocks(self, blocks: FinishedBlocks, folder: Path) -> None:
        """Write a correct config, and weights in one file up to 5 GB, else one for each block."""
        model, stored = self.structure_source, self.paired.reference.source
        write_config(folder / CONFIG, corrected_config(model.config or {}, model.whole))
        if model.generation_config is not None:
            write_config(folder / GENERATION_CONFIG, model.generation_config)
        calibrated = ConvertedSource(blocks, stored.joined)
        keys, written = pair_names(model.label, stored, model.whole).values(), calibrated.names()
        outside = {key: stored.tensor(key) for key in keys if key not in written}
        outside_blocks = calibrated.split(outside)
        # An expert's head needs its own tensors of the body, such as a pooler.
        if self.heads is not None and model.name in self.inputs.experts:
            body_keys = self.paired.reference.keys
            outside_blocks |= {body_keys[n]: t for n, t in self.head_tensors(model.name).items()}
        write_shards(folder, blocks, outside_blocks)

    # --- notes ---

    @property
    def _note_on_ends(self) -> str | None:
        """A sentence on end tokens that the saved model gets from other models, if there are any.

        transformers reads those of config.json only where there is no generation_config.json.
        """
        source = self.structure_source
        generation = source.generation_config
        own = end_tokens(source if generation is None else SimpleNamespace(config=generation))
        if source.kind not in (*LANGUAGE_MODELS, SPEECH) or self.ends <= own:
            return None
        every, alone = (", ".join(map(str, sorted(ends))) for ends in (self.ends, own))
        return (
            f"the saved model stops at the end tokens of all models ({every}), as in this run; "
            f"{source.label} declares {alone or 'none'}"
        )

    def notes(self) -> list[str]:
        """Return sentences on the models, and on experts that may not belong together."""
        sentences = self.processor.note, self._note_on_ends
        notes = [*notes_on_inputs(self.inputs), *filter(None, sentences)]
        if self.paired.base is None:
            return notes
        labelled = {f"expert {task}": expert for task, expert in self.paired.experts.items()}
        if self.inputs.merged is not None:
            labelled["the merged model"] = self.paired.reference
        return notes + notes_on_experts(labelled, self.paired.base)
