"""Models of sentence-transformers in one `featcal calibrate`: opening, calibrating, saving them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fusion_bench_featcal.encoders.models import transformer_of
from fusion_bench_featcal.encoders.naming import module_folders
from fusion_bench_featcal.encoders.opening import (
    merged_by_library,
    open_like,
    open_model,
    with_adapter,
    with_weights,
)
from fusion_bench_featcal.encoders.texts import read_texts
from fusion_bench_featcal.experts import InMemoryExpert, LazyModel
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.files.tensors import stored_bytes
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.merger import open_merged, warnings_on_merger
from fusion_bench_featcal.folders.model_folder import ModelFolder, refuse_adapter
from fusion_bench_featcal.folders.opened import Models
from fusion_bench_featcal.folders.request import SWUDI
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.models.bases import read_local
from fusion_bench_featcal.models.cards import CARD, CardHead, card_tags
from fusion_bench_featcal.models.structure import fill
from fusion_bench_featcal.results.notes import Note
from fusion_bench_featcal.run.inputs import Runtime
from fusion_bench_featcal.run.log import AsMerged, CalibrationLog
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.sentence_transformers import calibrate_encoder, write_encoder
from fusion_bench_featcal.settings import FeatCalSettings


class EncoderModels(Models):
    """The models of one request: whole in memory, with equal modules and vocabularies.

    Attributes:
        inputs: Their folders.
        module_donor: The model whose other modules are given to models that are only a
            transformer, as mergekit and transformers write it. This is the first model that names
            the class, else the first one.
        merged: The merged model, from its folder or merged now.
        base: The base, or None.
        experts: Task -> expert.
        merger_warnings: Warnings about experts that the merging method may harm.
    """

    def __init__(self, inputs: InputModels, class_name: str) -> None:
        """Open all models with a class of the library.

        Raises:
            CalibrationError: If one cannot be opened.
            ValueError: If they do not fit each other.
        """
        self.inputs, whole = inputs, inputs.whole
        self.merger_warnings = list[Note]()
        named = (model for model in whole if model.encoder_class == class_name)
        self.module_donor = next(named, whole[0])
        for model in (self.module_donor, inputs.merged or self.module_donor):
            model.folder_files.small_files(())
        folder, device = self.module_donor.folder, inputs.request.device
        module_donor = open_model(class_name, folder, self.module_donor.label, device)
        if inputs.merged is None:
            self._merge(module_donor)
        else:
            self.merged = self._complete(module_donor, inputs.merged)
            self.base = self._open_base(module_donor)
            self.experts = self._open_experts(module_donor)
        whole_class, transformer_class = type(self.merged), type(self.merged.transformers_model)
        self.title = f"{whole_class.__name__}: {transformer_class.__name__}"
        self.merged_bytes = stored_bytes(self.merged.state_dict().values())
        tensors = (expert.state_dict().values() for expert in self.experts.values())
        self.expert_bytes = sum(map(stored_bytes, tensors))

    def load_merged(self) -> nn.Module:
        """Return the merged model."""
        return self.merged

    def load_base(self) -> nn.Module | None:
        """Return the base, or None without one."""
        return self.base

    def load_expert(self, task: str) -> nn.Module:
        """Return a task's expert."""
        return self.experts[task]

    def left_as_merged(self, tasks: Mapping[str, Task]) -> AsMerged:
        """Return nothing. Only a run finds the modules after the blocks that are calibrated."""
        return AsMerged()

    def calibrate(
        self, settings: FeatCalSettings, batches: Mapping[str, Any], processes: Processes
    ) -> CalibrationResult:
        """Calibrate the merged model with each task's examples."""
        # `samples_per_task` counts texts, of which an example has several. The samples are chosen.
        options, rule = replace(settings.options, samples_per_task=None), settings.rule_object
        models, size = (self.merged, self.base, self.experts), settings.batch_size
        runtime = Runtime(self.merged.device, processes=processes)
        calls = read_texts(self.merged, self.experts, batches)
        return calibrate_encoder(*models, calls, rule, options, size, runtime)

    def merge(self) -> CalibrationResult:
        """Return the merged model, which is in memory."""
        return CalibrationResult(self.merged, CalibrationLog())

    def load_calibrated(self, result: CalibrationResult) -> nn.Module:
        """Return the calibrated model."""
        return result.model

    def write_calibrated(
        self, result: CalibrationResult, folder: Path, heads: Mapping[str, nn.Module]
    ) -> CardHead:
        """Save by the library, with small files of the merged model that it does not write."""
        write_encoder(result.model, folder)
        written, tags = read_local(str(folder), CARD), list[str]()
        if (merged := self.inputs.merged) is not None:
            skipped = module_folders(merged.folder)
            merged.folder_files.copy_small_files(folder, skipped_folders=skipped)
            tags = card_tags(merged.folder)
        library = {key: written[key] for key in ("library_name", "pipeline_tag") if key in written}
        kind = type(result.model).__name__
        return CardHead(library, kind, [*tags, *written.get("tags", ())])

    def _open_base(self, reference: Any) -> Any:
        if (base := self.inputs.base) is None:
            return None
        refuse_adapter(base)
        return self._open(base, reference)

    def _open_experts(self, reference: Any) -> dict[str, Any]:
        experts = {}
        for task, model in self.inputs.experts.items():
            if not model.is_adapter:
                experts[task] = self._open(model, reference)
            elif self.base is None:
                raise ValueError(f"{model.label} is an adapter: name its base with --base DIR")
            else:
                experts[task] = with_adapter(self.base, model.label, model.folder)
        return experts

    def _open(self, model: ModelFolder, reference: Any) -> Any:
        if model is self.module_donor:
            return reference
        return open_like(reference, model.label, model.folder)

    def _complete(self, module_donor: Any, merged: ModelFolder) -> Any:
        """Return the merged model, with the modules of another one if it is a transformer alone."""
        if merged is self.module_donor:
            return module_donor
        inside = {id(tensor) for tensor in transformer_of(merged.label, module_donor).parameters()}
        if outside := [name for name, t in module_donor.named_parameters() if id(t) not in inside]:
            raise ValueError(
                f"{merged.label} has no modules.json and lacks {outside[0]} of "
                f"{self.module_donor.folder}, which mergekit does not merge: merge with "
                f"sentence-transformers' {type(module_donor).__name__}.merge, or give --merge HOW"
            )
        return with_weights(module_donor, merged)

    def _merge(self, module_donor: Any) -> None:
        """Open and merge the experts. What the base lacks, such as a head, is their average."""
        merger = self.inputs.request.merger
        assert merger is not None  # as there is no merged model
        if len(self.inputs.experts) < 2:
            raise ValueError("--merge needs at least two experts")
        has_adapters = any(model.is_adapter for model in self.inputs.experts.values())
        self.base = self._open_base(module_donor) if has_adapters else None
        self.experts = self._open_experts(module_donor)
        self.merged = average = merged_by_library([*self.experts.values()], None)
        self.base = self.base or self._open_base(average)
        if merger.scale is not None:
            self.merged = merged_by_library([*self.experts.values()], merger.scale, self.base)
        if merger.name == SWUDI:
            self._merge_matrices(average)

    def _merge_matrices(self, average: Any) -> None:
        """Merge the matrices of the transformers by SWUDI. Other tensors keep their average."""
        structure = average.transformers_model
        experts = {task: as_lazy(f"expert {task}", model) for task, model in self.experts.items()}
        models = as_lazy("the average", average), as_lazy("the base", self.base), experts
        family = resolve_family(self.inputs.request.settings.family, structure)
        merged = open_merged(self.inputs, *models, family)
        self.merger_warnings = warnings_on_merger(merged, experts)
        fill(structure, merged)


def as_lazy(label: str, model: Any) -> LazyModel:
    """Return the transformer of a model as a lazy model."""
    return LazyModel(label, InMemoryExpert(model.transformers_model), model.transformers_model)
