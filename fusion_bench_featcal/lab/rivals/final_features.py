"""Features that a model's head receives, and their counted positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.families import Family
from fusion_bench_featcal.families.base import call_model, stop_forward, stoppable
from fusion_bench_featcal.families.rows import causal_rows, labelled_rows
from fusion_bench_featcal.families.transformers_names import FINAL_NORMS
from fusion_bench_featcal.fusionbench.pool_models import PoolModels
from fusion_bench_featcal.modules.models import head_of
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.streams.rows import CountedRows
from fusion_bench_featcal.streams.samples import rows_named

_MOST_NESTED = 8
_AUTO = FeatCalSettings(decoder_rows="auto")


def final_features(model: nn.Module, inputs: Any) -> Tensor:
    """Return the features that a model's head receives, or its output if it has no head.

    Args:
        model: The model.
        inputs: A batch of its inputs.

    Returns:
        The input of a language model's output embeddings, `[batch, positions, d]`, or else the
        pooled output, `[batch, d]`, or else the first tensor of the output.
    """
    if (head := head_of(model)) is not None:
        return _run_until(model, head, inputs)
    output = call_model(model, inputs)
    pooled = getattr(output, "pooler_output", None)
    return _first_tensor(output) if pooled is None else pooled


def final_rows(model: nn.Module, family: Family, inputs: Any) -> CountedRows | None:
    """Return the positions of the final features that predict a target, or None for all.

    Without labels this is the last position of a model that generates text. For other models, it
    is all positions except padding.

    Args:
        model: The model.
        family: The family that cuts it into blocks.
        inputs: A batch of the model's inputs.
    """
    rows = rows_named(_AUTO, inputs)
    mask = family.row_weights(inputs, len(family.stages(model)) - 1, rows)
    config = getattr(model, "config", None)
    writes_on = head_of(model) and not getattr(config, "is_encoder_decoder", False)
    if rows == "all" and writes_on:
        mask = _all_positions(inputs) if mask is None else mask
        positions = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask > 0, positions, -1).max(1, keepdim=True).values
        mask = (positions == last).long()
    return None if mask is None else CountedRows.of_mask(mask)


@dataclass(frozen=True)
class FinalStates:
    """The corrected feature of language models: states after the last norm, before the head.

    Attributes:
        final_norm: Name of the last norm.
    """

    final_norm: str

    def features(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return states of a teacher-forced pass that predict a target, `[target tokens, d]`.

        Raises:
            CalibrationError: If there are no labels.
        """
        rows = target_rows(model, batch)
        return self.states(model, batch)[rows]

    def states(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return states at all positions, `[batch, positions, d]`. The head does not run."""
        return _run_until(model, norm_of(model, self.final_norm), dict(batch), behind=True)


def target_rows(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the decoder's positions that predict a target token: bool, `[batch, positions]`.

    Prompts, padding and labels of -100 predict none.

    Raises:
        CalibrationError: If there are no labels.
    """
    if batch.get("labels") is None:
        raise CalibrationError(
            "texts have no targets, and surgery methods correct the positions that predict one: "
            "give the rows targets, or set method.calibration_targets=generated"
        )
    config: Any = model.config
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    rows = labelled_rows(batch) if encoder_decoder else causal_rows(batch, "targets")
    assert rows is not None  # there are labels
    return rows > 0


def norm_of(model: nn.Module, name: str) -> nn.Module:
    """Return a language model's last norm. Raises a CalibrationError if there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise _no_final_norm(type(model).__name__, name) from None


def find_final_norm(models: PoolModels, final_norm: str | None) -> str:
    """Return the name of a pool's last norm, from the names of the base's weights.

    Args:
        models: The pool's models.
        final_norm: The setting: a module's name, or None to search for it.

    Raises:
        CalibrationError: If there is none.
    """
    model = models.base or next(iter(models.experts.values()))
    source = model.source("auto")
    weights = source.state_dict() if isinstance(source, nn.Module) else source.names()
    modules = {weight.rpartition(".")[0] for weight in weights}
    names = FINAL_NORMS if final_norm is None else (final_norm,)
    for name in names:
        if name in modules:
            return name
    raise _no_final_norm(f"model {model.name!r}", " or ".join(names))


def _no_final_norm(model: str, name: str) -> CalibrationError:
    return CalibrationError(
        f"{model} has no {name}: surgery methods correct a language model behind its last "
        "norm, before the head. Set method.final_norm to that module's name"
    )


def _run_until(model: nn.Module, module: nn.Module, inputs: Any, *, behind: bool = False) -> Tensor:
    """Run a model up to one of its modules. Return that module's input, or output if `behind`."""
    captured: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...], *output: Tensor) -> None:
        captured.append(output[0] if behind else args[0])
        raise stop_forward()

    register: Any = module.register_forward_hook if behind else module.register_forward_pre_hook
    with stoppable(register(stop)):
        call_model(model, inputs)
    return captured[0]


def _all_positions(inputs: Any) -> Tensor:
    """Return ones for the positions of a language model's inputs, `[batch, positions]`."""
    if isinstance(inputs, Mapping):
        names = (name for name in ("input_ids", "inputs_embeds") if name in inputs)
        inputs = inputs[next(names, next(iter(inputs)))]
    first = _first_tensor(inputs)
    return torch.ones(first.shape[:2], dtype=torch.long, device=first.device)


def _first_tensor(output: Any) -> Tensor:
    for _ in range(_MOST_NESTED):
        if isinstance(output, Tensor):
            return output
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    raise TypeError(f"there is no tensor in the first {_MOST_NESTED} levels of a model's output")
