"""A family's steps, compared with the model's own forward pass on the first samples."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import all_finite
from fusion_bench_featcal.engine.problem import Modes, device_of
from fusion_bench_featcal.engine.processes import Processes
from fusion_bench_featcal.engine.samples import batch_size, naming_task, part_of, to_device
from fusion_bench_featcal.families import Family, ReplayFamily, StackFamily
from fusion_bench_featcal.families.base import call_model, hidden_output, stop_forward, stoppable
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

_SAMPLES = 2
_ROUNDING = 1e-5  # relative; of a narrow dtype a few times its epsilon


def checked_family(
    family: Family,
    asked: Any,
    model: nn.Module,
    batches: Mapping[str, Iterable[Any]],
    tasks: Iterable[str],
    processes: Processes,
    *,
    needs_closing: bool = False,
) -> tuple[Family, Mapping[str, Iterable[Any]]]:
    """Compare a family's steps with the model's own forward pass, where the family asks for it.

    Args:
        family: The family.
        asked: The setting; `auto` takes `replay` in place of steps that differ.
        model: The model, with weights.
        batches: Each task's batches; of the first task one is taken.
        tasks: The tasks that this process works on.
        processes: All processes take the same family.
        needs_closing: Whether the rows that the model reads behind its last block are asked for.

    Returns:
        The family to use, and the batches again, none of them used up.

    Raises:
        CalibrationError: If the steps differ and the family was named, or the model does not run
            its blocks once each, in order.
    """
    if not family.compared:
        return family, batches
    task = next(iter(tasks))
    peeked = Peeked(batches[task])
    inputs = None if peeked.empty else _few(peeked.first, task, device_of(model))
    reason = None if inputs is None else _difference(family, model, task, inputs)
    reason = next(filter(None, processes.gather(reason)), None)
    batches = {**batches, task: peeked}
    if reason is None:
        if needs_closing and isinstance(family, StackFamily):
            first = inputs is None or reads_first(model, family.stages(model)[-1][-1], inputs)
            family = replace(family, reads_first=all(processes.gather(first)))
        return family, batches
    blocks = [block for stage in family.stages(model) for block in stage]
    instead = f"{{name: replay, blocks: [{blocks[0].rpartition('.')[0]}.*]}}"
    text = f"the blocks of {type(model).__name__} cannot be run one by one: {reason}"
    if asked != "auto":
        raise CalibrationError(f"method.family={family.name}: {text}. Set method.family={instead}")
    if processes.rank == 0:
        log.warning(
            "method.family=auto: %s. Each block is replayed inside the model's own forward pass "
            "instead (method.family=%s): about %.0f times as many block passes, and whole experts "
            "in memory",
            text,
            instead,
            max(1, len(blocks) / 2),
        )
    return ReplayFamily(blocks=blocks, has_tables=family.has_tables), batches


class Peeked:
    """Batches of which the first has been looked at; every batch is still read once only."""

    def __init__(self, batches: Iterable[Any]) -> None:
        """Read the first batch.

        Args:
            batches: The batches.
        """
        self._batches = batches
        self._begun: Iterator[Any] | None = iter(batches)
        self._first = list(_head(self._begun))

    @property
    def empty(self) -> bool:
        """Return whether there is no batch."""
        return not self._first

    @property
    def first(self) -> Any:
        """The first batch."""
        return self._first[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield all batches; further iterations begin anew, if the batches can."""
        if self._begun is None:
            yield from self._batches
            return
        begun, self._begun = self._begun, None
        first, self._first = self._first, []
        yield from first
        yield from begun

    def __getattr__(self, name: str) -> Any:
        """Whatever else the batches offer, such as their number of samples."""
        if name.startswith("__"):  # asked for by copy and pickle, before there are any batches
            raise AttributeError(name)
        return getattr(self._batches, name)


def _head(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield batch
        return


def _few(batch: Any, task: str, device: torch.device) -> Any:
    """The first samples of a batch, on a device, without labels."""
    inputs = tuple(batch) if isinstance(batch, list) else batch
    inputs = to_device(part_of(inputs, batch_size(task, inputs), slice(_SAMPLES)), device)
    if isinstance(inputs, Mapping):  # labels are for the head
        return {name: value for name, value in inputs.items() if name != "labels"}
    return inputs


@torch.no_grad()
def reads_first(model: nn.Module, block: str, inputs: Any) -> bool:
    """Return whether a model's logits depend on the first position of a block's output alone.

    Args:
        model: The model.
        block: Its last block.
        inputs: Inputs of the model.
    """

    def change(_: nn.Module, __: Any, output: Any) -> Any:
        hidden = hidden_output(output).clone()
        hidden[:, 1:] *= -1
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    modes = Modes.of(model)
    try:
        model.eval()
        logits = getattr(call_model(model, inputs), "logits", None)
        handle = model.get_submodule(block).register_forward_hook(change)
        try:
            changed = getattr(call_model(model, inputs), "logits", None)
        finally:
            handle.remove()
    finally:
        modes.restore(model)
    if not isinstance(logits, Tensor) or not isinstance(changed, Tensor):
        return False
    return torch.equal(logits, changed)


@torch.no_grad()
def _difference(family: Family, model: nn.Module, task: str, inputs: Any) -> str | None:
    """Tell how the blocks' outputs differ from those of the model's own pass; None: they do not."""
    model = family.view.shown(model)
    blocks = [block for stage in family.stages(model) for block in stage]
    modes = Modes.of(model)
    try:
        model.eval()
        with naming_task(task):
            expected = _own_outputs(model, blocks, inputs)
        with _counting_failures(family):
            found = _steps(family, model, inputs)
    except _NotAlike as error:
        return str(error)
    finally:
        modes.restore(model)
    for block, wanted, hidden in zip(blocks, expected, found, strict=True):
        if not all_finite(wanted):
            return None  # calibration says more about it
        if wanted.shape != hidden.shape:
            return f"{block} gives {tuple(hidden.shape)} alone and {tuple(wanted.shape)} in place"
        gap = float((hidden - wanted).double().norm() / wanted.double().norm().clamp_min(1e-30))
        if not gap <= max(_ROUNDING, 4 * torch.finfo(wanted.dtype).eps):
            return (
                f"alone, {block} gives features {gap:.1e} (relative) away from those in the "
                "model's own forward pass, so that it depends on more than its input"
            )
    return None


class _NotAlike(Exception):
    """The blocks cannot be run one by one."""


@contextmanager
def _counting_failures(family: Family) -> Iterator[None]:
    """Context in which a failure counts as a difference: the model's own pass did not fail."""
    try:
        yield
    except Exception as error:
        raise _NotAlike(f"a step of the family {family.name} fails ({error})") from error


def _own_outputs(model: nn.Module, blocks: list[str], inputs: Any) -> list[Tensor]:
    """Outputs of the blocks in one forward pass of the model, up to its last block.

    Raises:
        CalibrationError: If they do not run once each, in order: no family fits then.
    """
    outputs: list[tuple[str, Tensor]] = []

    def leave(name: str) -> Any:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            outputs.append((name, hidden_output(output).clone()))
            if len(outputs) == len(blocks):
                raise stop_forward()

        return keep

    handles = [model.get_submodule(name).register_forward_hook(leave(name)) for name in blocks]
    try:
        with stoppable():
            call_model(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if [name for name, _ in outputs] != blocks:
        raise CalibrationError(
            f"{type(model).__name__} runs the blocks {[name for name, _ in outputs]}, but has "
            f"{blocks}: each must run once, in this order. Name others by "
            "method.family={name: replay, blocks: [...]}"
        )
    return [output for _, output in outputs]


def _steps(family: Family, model: nn.Module, inputs: Any) -> list[Tensor]:
    """Outputs of the blocks, run one by one."""
    outputs: list[Tensor] = []
    for blocks in family.stages(model):
        call = family.begin(model, inputs, blocks[0])
        for block in blocks:
            hidden, call = family.step(model, block, call)
            outputs.append(hidden)
    return outputs
