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
from fusion_bench_featcal.models.other_files import refuse_links


class EncoderModels:
    """The models of one request: whole in memory, with equal modules and vocabularies.

    Attributes:
        inputs: Their folders.
        home: The model whose modules those get that are a transformer alone, as mergekit and
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
        self.home = next(named, whole[0])
        for model in (self.home, inputs.merged or self.home):
            refuse_links(model.folder, ())
        folder, device = self.home.folder, inputs.request.device
        home = open_model(inputs.class_of_encoders, folder, self.home.label, device)
        if inputs.merged is None:
            self._merge(home)
        else:
            self.merged = self._completed(home, inputs.merged)
            self.base = self._open_base(home)
            self.experts = self._open_experts(home)

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
        return reference if model is self.home else open_like(reference, model.label, model.folder)

    def _completed(self, home: Any, merged: ModelFolder) -> Any:
        """Return the merged model, with the modules of another one if it is a transformer alone."""
        if merged is self.home:
            return home
        inside = {id(tensor) for tensor in transformer_of(merged.label, home).parameters()}
        if outside := [name for name, t in home.named_parameters() if id(t) not in inside]:
            raise ValueError(
                f"{merged.label} has no modules.json, and lacks {outside[0]} of "
                f"{self.home.folder}, which mergekit does not merge: merge by "
                f"{type(home).__name__}.merge of sentence-transformers, or give --merge HOW"
            )
        return with_weights(home, merged)

    def _merge(self, home: Any) -> None:
        """Open and merge the experts. What the base lacks, such as a head, is their average."""
        name, scale = self.inputs.request.merger
        if len(self.inputs.experts) < 2:
            raise ValueError("--merge needs at least two experts")
        has_adapters = any(model.is_adapter for model in self.inputs.experts.values())
        self.base = self._open_base(home) if has_adapters else None
        self.experts = self._open_experts(home)
        self.merged = average = merged_by_library([*self.experts.values()], None)
        self.base = self.base or self._open_base(average)
        if name != "simple_average":
            self.merged = merged_by_library([*self.experts.values()], scale, self.base)
