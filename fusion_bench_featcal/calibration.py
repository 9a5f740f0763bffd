"""The public Python function `calibrate`."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Unpack

import torch
from torch import nn

from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.experts.source import refuse_unusable
from fusion_bench_featcal.families.open_clip import fused
from fusion_bench_featcal.modules.models import Modes, device_of, without_ties
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.run.balance import with_balanced_tasks
from fusion_bench_featcal.run.blocks import calibrate_blocks
from fusion_bench_featcal.run.checkpoint import open_checkpoint
from fusion_bench_featcal.run.devices import isolated_torch_state, memory_cause, return_freed_memory
from fusion_bench_featcal.run.inputs import Autocast, Inputs, Runtime
from fusion_bench_featcal.run.processes import Processes
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.run.run_digest import digests_of_run
from fusion_bench_featcal.run.state import BASE_MODEL, CalibrationState, prepare_calibration
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.options import OptionKeywords, Options
from fusion_bench_featcal.streams.samples import check_inputs


def calibrate(
    merged: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[object]],
    rule: Rule | FeatCalSettings = Plus(),  # noqa: B008 (frozen)
    family: object = "auto",
    *,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
    progress: bool = True,
    processes: Processes | None = None,
    merged_weights: ExpertSource | None = None,
    **options: Unpack[OptionKeywords],
) -> CalibrationResult:
    """Calibrate a merged model (Algorithm 1).

    Args:
        merged: The merged model. It is not changed.
        base: The model that the experts were fine-tuned from, or a source of its weights. None:
            FeatCal+ uses samples alone, and the paper's rule needs `anchor_rho` 1, which pulls
            towards the merged parameters.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, in batches of any size: mappings of keyword
            arguments, tuples of arguments, or single tensors. The batch is the first dimension.
        rule: How a block is solved: `Plus(...)` (FeatCal+), `Paper(...)` or a rule of your own.
            `FeatCalSettings`, the flat form of YAML, stand for a rule, the paper's by default, and
            for the options.
        family: How the model is cut into blocks: `auto` (the default), a family's name, a list of
            the blocks' names, or a `Family`.
        device: Device of the calculation, by default the merged model's device.
        autocast: Returns the context of forward passes (Fabric's `autocast`). Statistics are
            computed outside it.
        progress: Whether to show a progress bar.
        processes: The processes that share this calibration, each on a separate device. All call
            this function with the same arguments. If they divide the number of tasks, each has all
            samples of its tasks, and reads only their experts. Otherwise batches of every task are
            divided among them, up to one batch per process. By default there is one process.
        merged_weights: Weights of the merged model. `merged` is then its structure, on the meta
            device except for non-persistent buffers. The weights are read block by block, and the
            calibrated model is written to `checkpoint_dir`. It is never whole in memory.
        **options: Fields of `Options`, which checks them: `samples_per_task` (by default all),
            `seed` (42), `augment` and `decoder_rows` (the rule's), `modules` (patterns of the
            modules to calibrate), `expert_read_budget` (bytes, an amount such as `"800MB"` or a
            share such as `"50%"`), `activations` (`"device"` or `"host"`), `checkpoint_dir` and
            `resume`. They are settings of the same names, whose meaning and accepted values
            docs/reference/settings.md and `featcal settings` list.

    Returns:
        The calibrated model (only its structure with `merged_weights`), the log and a count of
        reads, equal in every process.

    Raises:
        CalibrationError: If the calibration cannot go on, naming the location and the argument.
        ValueError: If an option is not accepted, the family or rule is unknown, the rule needs a
            base model and there is none, or torch cannot use the device.
        TypeError: If `rule` is neither a rule nor settings.
    """
    rule, chosen = rule_and_options(rule, Options(family=family, **options))
    if not isinstance(merged, nn.Module):
        raise TypeError(f"merged must be a torch.nn.Module, not {merged!r:.80}")
    default_device = torch.device("cpu")
    if merged_weights is None:
        refuse_unusable(merged)
        default_device = device_of(merged)
    runtime = Runtime.of(default_device, device, autocast, processes, progress)
    inputs = Inputs(merged, base, experts, batches, merged_weights)
    return calibrate_inputs(inputs, rule, chosen, runtime)


def rule_and_options(rule: Rule | FeatCalSettings, options: Options) -> tuple[Rule, Options]:
    """Split `FeatCalSettings` into a rule and options. Return any other rule and options unchanged.

    Args:
        rule: The rule, or settings that contain a rule and options.
        options: The options. Only a family may be given together with settings.

    Raises:
        TypeError: If `rule` is neither a rule nor settings, or options stand beside settings.
    """
    if isinstance(rule, FeatCalSettings):
        changed = {k: v for k, v in options.by_name.items() if v != getattr(Options, k)}
        family = changed.pop("family", rule.family)
        if changed:
            raise TypeError(
                f"{', '.join(changed)}: set it in the settings, with settings.replace(...)"
            )
        options = rule if family == rule.family else rule.replace(family=family)
        rule = rule.rule_object
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be a Rule, such as Plus() or Paper(), or settings, not {rule!r}"
        )
    return rule, options


@isolated_torch_state()
@torch.no_grad()
def calibrate_inputs(
    inputs: Inputs, rule: Rule, options: Options, runtime: Runtime
) -> CalibrationResult:
    """Run the calibration, with the rule's defaults for options that are None."""
    device, processes, options = runtime.device, runtime.processes, options.with_rule(rule)
    check_inputs(inputs.base, inputs.experts, inputs.batches, rule)
    if inputs.merged_weights is not None:
        if options.checkpoint_dir is None:
            raise ValueError(
                f"merged_weights needs {option('checkpoint_dir')}, the folder for the calibrated "
                "model"
            )
        return_freed_memory()
    with (
        error_context(cause=lambda error: memory_cause(device, processes.doing, error)),
        open_checkpoint(options, processes) as output,
    ):
        state = prepare_calibration(inputs, rule, options, runtime, output)
        with state.computing():
            digests = partial(digests_of_run, state, options)
            merged = state.working.source
            state.checkpoint.start(digests, state.modules, merged, state.progress)
            if state.checkpoint.is_complete:
                for block in state.modules:
                    # Reads every tensor, and raises if one is damaged.
                    state.checkpoint.load_block(block, state.working)
                    tensors = state.checkpoint.save_block(block, state.working, {}, state.log)
                    state.working.set_finished_block(tensors)
            else:
                calibrate_blocks(with_balanced_tasks(state))
        return finish_calibration(state)


def finish_calibration(state: CalibrationState) -> CalibrationResult:
    """Complete the checkpoint, and return the model in the merged model's form, log and reads."""
    working = state.working
    model = working.structure
    if working.is_in_memory:
        model = working.materialize(device_of(model))
        Modes.of(working.structure).restore(model)
        model = fused(model)
        state.checkpoint.write_rest(without_ties(model), state.log)
    else:
        state.checkpoint.write_rest(working.tensors, state.log)
    sizes = {name: sum(model.bytes_read.values()) for name, model in state.models.items()}
    all_sizes = state.processes.gather(sizes)
    # Several processes may read one model. The largest read of one process is reported.
    names = dict.fromkeys(name for sizes in all_sizes for name in sizes)
    bytes_read = {name: max(sizes.get(name, 0) for sizes in all_sizes) for name in names}
    base = bytes_read.pop(BASE_MODEL, 0)
    reads = {"plan": state.read_plan.as_dict(), "experts": bytes_read, "base": base}
    return CalibrationResult(model, state.log, reads, state.checkpoint.weights)
