"""Models of transformers in one `featcal calibrate`, compared before they are loaded.

`pair_models` finds the structure that all models share, and pairs the names of every model's
tensors with it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import ExpertSource, InMemoryExpert, LazyModel
from fusion_bench_featcal.experts.model_config import text_config
from fusion_bench_featcal.experts.source import LazyTensorDict
from fusion_bench_featcal.families import Family, head_of, stages_of, text_tower
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.merger import open_merged
from fusion_bench_featcal.folders.model_folder import (
    CLASSIFIERS,
    IMAGE_ENCODER,
    ModelFolder,
    body_of,
    family_of,
    refuse_adapter,
)
from fusion_bench_featcal.folders.opened import require_base
from fusion_bench_featcal.models.configs import compare_configs
from fusion_bench_featcal.models.vocabulary import VocabularyRows
from fusion_bench_featcal.modules.block_modules import BlockModules, find_all_modules
from fusion_bench_featcal.modules.models import tensors_outside_blocks


class PairedModels(NamedTuple):
    """Weights of all models by the names of one structure. Tensors are read when they are needed.

    Attributes:
        structure_source: The model that defines class and structure of the calibrated model.
        body: The part of it that all experts share, without weights. This part is calibrated.
        family: The family of the body.
        stages: The blocks of the body.
        modules: The modules of each block.
        reference: Weights of `structure_source`.
        unused: The reference's tensors of towers that texts do not run. Other models may lack them.
        experts: Task -> weights of its expert.
        base: Weights of the base, or None.
        merged_weights: Weights of the merged model. Without MERGED they are merged on reading.
    """

    structure_source: ModelFolder
    body: nn.Module
    family: Family
    stages: list[list[str]]
    modules: Mapping[str, BlockModules]
    reference: LazyModel
    unused: LazyTensorDict
    experts: Mapping[str, LazyModel]
    base: LazyModel | None
    merged_weights: ExpertSource


def pair_models(inputs: InputModels) -> PairedModels:
    """Compare configs, names and shapes of all models.

    Raises:
        CalibrationError: If they do not fit, or one cannot be loaded.
        ValueError: If the base is missing or an adapter, experts are of another kind, or a setting
            does not fit.
    """
    request, base = inputs.request, inputs.base
    require_base(request)
    if base is not None:
        refuse_adapter(base)
    for model in inputs.by_name.values():
        if model.encoder_class:  # others are checked already
            model.check()
    source = find_structure_source(inputs)
    body, settings = body_of(source.empty, source.kind), request.settings
    family = family_of(settings.family, body, source.kind)
    stages, norm = stages_of(family, body), settings.rule_object.calibrate_norm
    modules = find_all_modules(body, stages, settings.modules, calibrate_norm=norm)
    source.folder_files.small_files()
    whole = {task: expert for task, expert in inputs.experts.items() if not expert.is_adapter}
    _compare_folders(source, base, whole)
    reference = LazyModel(source.label, source.source(base), body)
    unused = _unused_tensors(reference, stages)
    sources = {
        name: _open_weights(model, base, source, reference, unused)
        for name, model in inputs.by_name.items()
    }
    owner = "the merged model" if inputs.merged is not None else source.label
    experts = {
        task: LazyModel(f"expert {task!r}", sources[task], body, optional=unused, owner=owner)
        for task in inputs.experts
    }
    merged_weights, base_model = reference.source, None
    if base is not None:
        base_model = _pair_base(base, sources["base"], source.kind, experts, stages, unused)
    if request.merger is not None:
        assert base_model is not None  # as every merger requires a base
        merged_weights = open_merged(inputs, reference, base_model, experts, family)
    # They are loaded only after the calibration, where a mistake would be found late.
    if source.kind in CLASSIFIERS or not request.no_eval:
        for model in (source, *whole.values()):
            model.check_loading(() if model is source else unused)
    return PairedModels(
        structure_source=source,
        body=body,
        family=family,
        stages=stages,
        modules=modules,
        reference=reference,
        unused=unused,
        experts=experts,
        base=base_model,
        merged_weights=merged_weights,
    )


def find_structure_source(inputs: InputModels) -> ModelFolder:
    """Return the model that defines class and structure of the calibrated model.

    1. This is the merged model, if there is one.
    2. Otherwise it is the base. The base may have towers that the experts lack: a whole CLIP whose
       vision tower is merged, or a language model with images whose text model is merged.
    3. If the base has another head than all experts, it is the first whole expert. An example is a
       masked language model from which classifiers were trained.
    """
    if inputs.merged is not None:
        return inputs.merged
    assert inputs.base is not None  # as every merger requires a base
    whole = [expert for expert in inputs.experts.values() if not expert.is_adapter]
    named = {expert.architecture for expert in whole if expert.kind != "clip"}
    if len(named) != 1 or inputs.base.architecture in named:
        return inputs.base
    are_language_models = all(model.is_language_model for model in (inputs.base, whole[0]))
    return inputs.base if are_language_models else whole[0]


def _compare_folders(
    source: ModelFolder, base: ModelFolder | None, experts: Mapping[str, ModelFolder]
) -> None:
    """Refuse models whose configs do not fit each other, and whole experts of another kind."""
    configs = {model.label: model.config for model in (source, base) if model is not None}
    compare_configs(configs | {f"expert {task!r}": e.config for task, e in experts.items()})
    for expert in experts.values():
        if expert.kind != source.kind:
            raise ValueError(
                f"{expert.label} is of kind {expert.kind}, but {source.label} is of kind "
                f"{source.kind}: all models must be of one kind. Check its folder"
            )


def _unused_tensors(reference: LazyModel, stages: list[list[str]]) -> LazyTensorDict:
    """Return the tensors of towers that texts do not run. The head's matrix is not among them."""
    body, head = reference.structure, head_of(reference.structure)
    names = tensors_outside_blocks(body, stages) if text_tower(body) else []
    tensors = body.state_dict(keep_vars=True)
    names = [name for name in names if head is None or tensors[name] is not head.weight]
    return LazyTensorDict(reference.stored, {name: name for name in names})


def _open_weights(
    model: ModelFolder,
    base: ModelFolder | None,
    structure_source: ModelFolder,
    reference: LazyModel,
    unused: LazyTensorDict,
) -> ExpertSource:
    """Return a model's weights, with as many rows per token as the calibrated model has."""
    if model is structure_source:
        return reference.source
    whole = base if model.is_adapter and base is not None else model
    configs = (text_config(one.config) for one in (whole, structure_source))
    vocabulary, expected = (config.get("vocab_size") for config in configs)
    if vocabulary is None or expected is None or vocabulary == expected:
        return model.source(base, reference.structure, unused)
    return VocabularyRows(model.source(base), expected, reference.source)


def _pair_base(
    base: ModelFolder,
    source: ExpertSource,
    kind: str,
    experts: Mapping[str, LazyModel],
    stages: list[list[str]],
    unused: LazyTensorDict,
) -> LazyModel:
    """Return the base's weights. If it lacks a tail (a pooler), this is the experts' average."""
    body = next(iter(experts.values())).structure
    try:
        return LazyModel(base.label, source, body, optional=unused)
    except CalibrationError:
        if kind not in (*CLASSIFIERS, IMAGE_ENCODER):
            raise
    spare = {
        name: torch.stack([expert.stored(name).double() for expert in experts.values()]).mean(0)
        for name in tensors_outside_blocks(body, stages)
    }
    return LazyModel(base.label, InMemoryExpert(base.load(type(body), spare)), body)
