"""Mergers that work block by block on the experts' features of samples."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from fusion_bench_featcal.calibration import finish_calibration
from fusion_bench_featcal.experts import ExpertSource, LazyModel, source_of
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.fusionbench.method import MethodResult, SampleSettings
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.program import convert_batch_counts
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.run.blocks import calibrate_blocks
from fusion_bench_featcal.run.checkpoint import Checkpoint
from fusion_bench_featcal.run.devices import isolated_torch_state
from fusion_bench_featcal.run.inputs import Autocast, Inputs, Runtime
from fusion_bench_featcal.run.state import CalibrationState, prepare_calibration
from fusion_bench_featcal.settings import Blocks
from fusion_bench_featcal.streams.samples import check_inputs


class Merger(Rule, SampleSettings, Blocks):
    """A merger for any model family.

    A merger is a rule of Algorithm 1 that sums the inputs of the experts' modules. The initial
    model is the experts' mean, and parameters that the rule does not solve keep the mean.
    """

    features = "expert"
    estimates_statistics = False

    @property
    def runs_experts(self) -> bool:
        """Return True, because the inputs of experts' modules are summed."""
        return True

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base."""
        inputs.require_base("is needed for its structure")

    def merge(self, inputs: MethodInputs) -> MethodResult:
        """Merge a pool's experts. Raises as `merge_models`."""
        batches, base = self.take_batches(inputs), load_base(inputs)
        runtime = Runtime(inputs.fabric.device, inputs.fabric.autocast)
        return self._merge(Inputs(base, base, inputs.experts(), batches), runtime)

    def merge_models(
        self,
        base: nn.Module,
        experts: Mapping[str, nn.Module | ExpertSource],
        batches: Mapping[str, Iterable[object]],
        *,
        device: torch.device | str | None = None,
        autocast: Autocast | None = None,
    ) -> nn.Module:
        """Merge experts block by block in forward order.

        Takes and raises the same as `calibrate`. The result has the structure, dtype and
        device of the base, which is not changed.
        """
        runtime = Runtime(torch.device(device or device_of(base)), autocast or nullcontext)
        return self._merge(Inputs(base, base, experts, batches), runtime).model

    @isolated_torch_state()
    @torch.no_grad()
    def _merge(self, inputs: Inputs, runtime: Runtime) -> MethodResult:
        """Merge experts. In `inputs`, the base stands in place of the merged model."""
        base, experts = inputs.merged, inputs.experts
        settings = self.calibration_settings.replace(rule=self)
        check_inputs(base, experts, inputs.batches, self)
        start = copied_module(base).to(runtime.device)
        load_expert_means(start, experts, self.start_scale(len(experts)))
        inputs, options = replace(inputs, merged=start), settings.with_rule_defaults.options
        state = prepare_calibration(inputs, self, options, runtime, Checkpoint())
        # Routed experts of mixtures are the experts' mean.
        modules = {block: replace(part, mixtures=()) for block, part in state.modules.items()}
        with state.computing():
            calibrate_blocks(replace(state, modules=modules))
            self.complete(state)
        counts = {task: state.streams.num_samples(task) for task in state.streams.tasks}
        return MethodResult(finish_calibration(state).model.to(device_of(base)), counts)

    def complete(self, state: CalibrationState) -> None:
        """Change the model after all blocks are merged. By default nothing is changed."""

    def start_scale(self, tasks: int) -> float:
        """Return the factor of the experts' mean step from the base in the initial model."""
        return 1.0


def load_base(inputs: MethodInputs) -> nn.Module:
    """Load the pool's base. Batch counts of its BatchNorms are integers, as in experts' files."""
    return convert_batch_counts(torch.int64, load_pool_model(inputs.modelpool, BASE_MODEL))


def load_expert_means(
    model: nn.Module, experts: Mapping[str, nn.Module | ExpertSource], scale: float
) -> list[LazyModel]:
    """Set every floating-point tensor of a copy of the base to the experts' mean, in place.

    `scale` is the factor of each parameter's step from the base. Buffers, such as running
    variances, become plain means. Returns the experts as sources of the model's tensors.
    """
    tensors = model.state_dict(keep_vars=True)
    weights = [LazyModel(f"expert {t!r}", source_of(e), model) for t, e in experts.items()]
    for tensor, name in {id(t): (t.data, name) for name, t in tensors.items()}.values():
        if tensor.is_floating_point():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            mean = sum(e.tensor(name).to(wide) for e in weights) / len(weights)
            is_scaled = scale != 1 and isinstance(tensors[name], nn.Parameter)
            tensor.copy_(tensor + scale * (mean - tensor) if is_scaled else mean)
    return weights
