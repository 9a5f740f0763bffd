"""MAGIC (arXiv 2512.19320), feature space: modules' steps rescaled to the experts' magnitudes."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.samples import naming_task, to_device
from fusion_bench_featcal.families.base import call_model
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.processors import text_kind
from fusion_bench_featcal.methods.interface import SAMPLE_SETTINGS, MethodInputs, WeightsOnly
from fusion_bench_featcal.settings import FeatCalSettings


class Magic(WeightsOnly):
    """Multiplies every module's merged step so that it moves features as far as the experts' do.

    A module receives x in the merged model. With f_0, f_i and f the outputs that base, expert i and
    merged model give for x, the factor is the mean over rows and tasks of
    `|f_i(x) - f_0(x)|_1 / |f(x) - f_0(x)|_1`, and the module gets `W_0 + factor (W - W_0)`.

    The authors' code keeps a factor for each token position and runs the base beside the merged
    model at inference; ours is one number a module, which goes into its weights. Theirs bounds the
    factor of modules that are sensitive, found by accuracy on labelled images; no labels are used
    here. Theirs looks at one image of a task's test split, ours at the calibration samples.
    """

    name: ClassVar = "magic"
    older_names: ClassVar = ()
    _config_mapping: ClassVar = {name: name for name in SAMPLE_SETTINGS}

    def __init__(self, **settings: Any) -> None:
        """Check the settings, fields of `FeatCalSettings`: `SAMPLE_SETTINGS`.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        self._settings: FeatCalSettings = checked_settings(
            settings, names=SAMPLE_SETTINGS, owner=self.name
        )
        self._drawn: dict[str, int] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        values = self._settings.as_dict()
        return {name: values[name] for name in SAMPLE_SETTINGS}

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base, and open the data."""
        inputs.require_base("MAGIC needs")
        inputs.batches(self._settings)

    @torch.no_grad()
    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Change the merged model in place, with the base and one expert in memory."""
        device = inputs.fabric.device
        merged = merged.to(device).eval()
        base = load_pool_model(inputs.modelpool, BASE_MODEL).to(device).eval()
        settings = self._settings
        if text_kind(inputs.modelpool) is not None:  # one text a batch has no padding
            settings = settings.replace(batch_size=1)
        means: dict[str, list[Tensor]] = {name: [] for name, _ in _modules(merged)}
        for task, batches in inputs.batches(settings).items():
            expert = load_pool_model(inputs.modelpool, task).to(device).eval()
            ratios: dict[str, list[Tensor]] = {name: [] for name in means}
            with naming_task(task), ExitStack() as hooks:
                for name, module in _modules(merged):
                    sides = base.get_submodule(name), expert.get_submodule(name)
                    hook = partial(_note, ratios[name], *sides)
                    hooks.callback(module.register_forward_hook(hook).remove)
                for batch in batches:
                    call_model(merged, to_device(batch, device))
            self._drawn[task] = batches.samples
            for name, found in ratios.items():
                if found and len(rows := torch.cat(found)):
                    means[name].append(rows.mean())
            del expert
        for name, found in means.items():
            factor = torch.stack(found).mean() if found else 1.0
            for own, start in zip(
                merged.get_submodule(name).parameters(recurse=False),
                base.get_submodule(name).parameters(recurse=False),
                strict=True,
            ):
                own.data.copy_(start + factor * (own - start))
        return merged


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters that are linear in them, each parameter once."""
    kinds = ("Linear", "Conv1D", "Conv2d", "LayerNorm")
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        norm = type(module).__name__.endswith("RMSNorm")
        if own and not own & seen and (type(module).__name__ in kinds or norm):
            yield name, module
        seen |= own


def _note(
    ratios: list[Tensor],
    base: nn.Module,
    expert: nn.Module,
    module: nn.Module,
    args: tuple[Any, ...],
    output: Tensor,
) -> None:
    """Note each row's ratio; rows that the merged step does not move have none."""
    start, wanted = base(*args), expert(*args)
    dim = 1 if isinstance(module, nn.Conv2d) else -1
    far, moved = ((side - start).abs().sum(dim).float() for side in (wanted, output))
    ratios.append((far[moved > 0] / moved[moved > 0]).flatten())
