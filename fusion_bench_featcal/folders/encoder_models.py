"""Base, experts and merged model of sentence-transformers, opened for one request."""

from typing import Any

from fusion_bench_featcal.encoders.models import transformer_of
from fusion_bench_featcal.encoders.opening import (
    merged_by_library,
    open_like,
    open_model,
    with_adapter,
    with_weights,
)
from fusion_bench_featcal.files.tensors import stored_bytes
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.model_folder import ModelFolder, refuse_adapter
from fusion_bench_featcal.folders.opened import Models


class EncoderModels:
    """The models of one request: whole in memory, with equal modules and vocabularies.

    Attributes:
        inputs: Their folders.
        module_donor: The model whose other modules are given to models that are only a
            transformer, as mergekit and
            transformers write it: the first one that names the class, else the first one.
        merged: The merged model, from its folder or merged now.
        base: The base, or None.
        experts: Task -> expert.
    """

    def __init__(self, inputs: InputModels) -> None:
        """Open all models.

        Raises:
            CalibrationError: If one cannot be opened.
            ValueError: If they do not fit each other.
        """
        self.inputs, whole = inputs, inputs.whole
        named = (model for model in whole if model.encoder_class == inputs.class_of_encoders)
        self.module_donor = next(named, whole[0])
        for model in (self.module_donor, inputs.merged or self.module_donor):
            model.folder_files.small_files(())
        folder, device = self.module_donor.folder, inputs.request.device
        module_donor = open_model(inputs.class_of_encoders, folder, self.module_donor.label, device)
        if inputs.merged is None:
            self._merge(module_donor)
        else:
            self.merged = self._completed(module_donor, inputs.merged)
            self.base = self._open_base(module_donor)
            self.experts = self._open_experts(module_donor)

    def loaders(self) -> Models:
        """Return what a run does with them."""
        merged, experts = self.merged, self.experts
        return Models(
            f"{type(merged).__name__}: {type(merged.transformers_model).__name__}",
            stored_bytes(merged.state_dict().values()),
            sum(stored_bytes(expert.state_dict().values()) for expert in experts.values()),
            lambda: merged,
            experts.__getitem__,
        )

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
                raise ValueError(f"{model.label} is an adapter: name its base by --base DIR")
            else:
                experts[task] = with_adapter(self.base, model.label, model.folder)
        return experts

    def _open(self, model: ModelFolder, reference: Any) -> Any:
        return (
            reference
            if model is self.module_donor
            else open_like(reference, model.label, model.folder)
        )

    def _completed(self, module_donor: Any, merged: ModelFolder) -> Any:
        """Return the merged model, with the modules of another one if it is a transformer alone."""
        if merged is self.module_donor:
            return module_donor
        inside = {id(tensor) for tensor in transformer_of(merged.label, module_donor).parameters()}
        if outside := [name for name, t in module_donor.named_parameters() if id(t) not in inside]:
            raise ValueError(
                f"{merged.label} has no modules.json, and lacks {outside[0]} of "
                f"{self.module_donor.folder}, which mergekit does not merge: merge by "
                f"{type(module_donor).__name__}.merge of sentence-transformers, or give --merge HOW"
            )
        return with_weights(module_donor, merged)

    def _merge(self, module_donor: Any) -> None:
        """Open and merge the experts. What the base lacks, such as a head, is their average."""
        name, scale = self.inputs.request.merger
        if len(self.inputs.experts) < 2:
            raise ValueError("--merge needs at least two experts")
        has_adapters = any(model.is_adapter for model in self.inputs.experts.values())
        self.base = self._open_base(module_donor) if has_adapters else None
        self.experts = self._open_experts(module_donor)
        self.merged = average = merged_by_library([*self.experts.values()], None)
        self.base = self.base or self._open_base(average)
        if name != "simple_average":
            self.merged = merged_by_library([*self.experts.values()], scale, self.base)
