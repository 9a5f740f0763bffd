"""Linear modules of a block that are solved together, in the order in which they run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.finished_parts import Tail, tails_of
from fusion_bench_featcal.engine.modules import Site
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.recording import Recorder, Recording
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.engine.stream_writers import find_writers
from fusion_bench_featcal.engine.task_sums import counted_in
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class Group:
    """Linear modules that receive the same input, or one that writes to the hidden features.

    Attributes:
        sites: The modules.
        calls: How often each is called in a pass.
        biased: Whether their biases are calibrated.
        writes: Whether its output is added to the block's hidden features.
        behind: Modules of earlier groups whose outputs are added before.
        closes: Whether the hidden features behind the module are the block's output.
        closing: Whether only those rows count that the model reads behind its last block.
        tail: The part of the block whose output is that of the only module, if there is one.
        whole: Where it closes and nothing else is in the block's output: the block.
        part: Of a convolution with several groups: the number of one of them.
    """

    sites: tuple[Site, ...]
    calls: int
    biased: bool
    writes: bool = False
    behind: tuple[str, ...] = ()
    closes: bool = False
    closing: bool = False
    tail: Tail | None = None
    whole: Tail | None = None
    part: int = 0

    @property
    def parts(self) -> int:
        """Number of linear maps, each of its own inputs, that the modules are made of."""
        return self.sites[0].groups

    def own(self, values: Tensor, dim: int = 0) -> Tensor:
        """The part's share of what all parts have, one after the other."""
        return values if self.parts == 1 else values.chunk(self.parts, dim)[self.part]

    @property
    def first(self) -> str:
        """Name of the first module."""
        return self.sites[0].name

    @property
    def mark(self) -> str:
        """Name under which a batch keeps the expert's features that the group needs."""
        return f"expert at {self.first}"


def find_groups(problem: Problem, block: str, batch: Batch) -> list[Group]:
    """Find the groups of a block's linear modules by running a batch through it.

    Args:
        problem: The problem.
        block: The block.
        batch: A batch of any task.

    Returns:
        The groups in the order in which the block calls them.

    Raises:
        CalibrationError: If a module does not run, or receives a table of relative positions.
    """
    model, settings = problem.model, problem.settings
    sites = {site.name: site for site in problem.modules[block].sites}

    def run() -> Any:
        return problem.step(model, block, batch.cal)

    outputs = dict.fromkeys(sites, Tensor.clone)
    with tails_of(model, block, list(sites)) as tails:
        recording = Recorder().record(model, [block, *sites], run, outputs=outputs, copied=[block])
    for name in sites:
        if name not in recording.calls:
            raise CalibrationError(
                f"block {block}: module {name} does not run. Exclude it: method.modules=['!{name}']"
            )
        _refuse_tables(block, name, recording.of(name), batch)
    residual = settings.target == "residual"
    writers = find_writers(model, block, list(sites), run) if residual else set[str]()
    writers = {name for name in writers if len(recording.calls[name]) == 1}
    closing = find_closing(problem, block, batch, list(sites))
    grouped: dict[Any, list[Site]] = {}
    for name in sorted(sites, key=list(recording.calls).index):  # as they were called
        site, keys = sites[name], recording.calls[name]
        biased = site.has_bias and settings.calibrate_bias
        mask = id(counted_in(site, batch.valid, batch.other))
        own = name if name in writers else None
        form = site.patches if site.groups == 1 else name
        key = tuple(keys), biased, mask, name in closing, own, form
        grouped.setdefault(key, []).append(site)
    groups: list[Group] = []
    behind: tuple[str, ...] = ()
    for (calls, biased, _, ends, writer, _), members in grouped.items():
        writes = writer is not None
        group = Group(tuple(members), len(calls), biased, writes, behind if writes else ())
        tail = tails.get(writer) if settings.order == "module" else None
        groups.append(replace(group, closing=ends, tail=tail))
        behind += (writer,) if writes else ()
    if behind and recording.hidden is not None:  # on the meta device nothing can be compared
        last = max(n for n, group in enumerate(groups) if group.writes)
        features = hidden_behind(block, groups[last], recording)
        same = features.is_meta or torch.equal(features, recording.hidden)
        groups[last] = replace(groups[last], closes=same, whole=tails.get(block) if same else None)
    return groups


def _refuse_tables(block: str, name: str, inputs: Sequence[Tensor], batch: Batch) -> None:
    """Refuse inputs that are of no sample, which cannot be dealt out to folds."""
    counted = batch.valid
    if any(len(x) < batch.samples or (counted is not None and counted.is_table(x)) for x in inputs):
        raise CalibrationError(
            f"block {block}: module {name} receives a table of relative positions, which "
            "method=featcal/plus does not support. Use method.order=block with "
            "method.target=module and method.ridge=fixed, or exclude it: "
            f"method.modules=['!{name.removeprefix(f'{block}.')}']"
        )


def hidden_before(block: str, group: Group, recording: Recording) -> Tensor:
    """The hidden features to which a module that writes to them adds its output.

    Args:
        block: The block.
        group: The module.
        recording: A pass in which the block's input was noted, and the outputs of the modules that
            write before.
    """
    hidden = recording.of(block)[0]
    for name in group.behind:
        hidden = hidden + recording.outputs[name][0]
    return hidden


def hidden_behind(block: str, group: Group, recording: Recording) -> Tensor:
    """The same with the module's own output, which has been noted, too."""
    return hidden_before(block, group, recording) + recording.outputs[group.first][0]


def find_closing(problem: Problem, block: str, batch: Batch, modules: Sequence[str]) -> set[str]:
    """Find the modules of the last block of which only the rows count that the model reads on.

    A row that no output of the block is read through does not count. The block's own gradients
    tell which rows these are, for each module.

    Args:
        problem: The problem.
        block: The block; for any but the last one nothing is found.
        batch: A batch of any task.
        modules: Names of the block's linear modules.
    """
    if not modules or block != problem.stages[-1][-1]:
        return set()
    hidden, _ = problem.step(problem.model, block, batch.cal)
    if hidden.is_meta:  # in a plan, where no value can be looked at
        return set()
    mask = problem.family.closing_rows(problem.model, hidden)
    if mask is None:
        return set()
    gradients = _gradients(problem, block, batch, modules, mask)
    return {
        name
        for name, gradient in gradients.items()
        if gradient.shape[:-1] == mask.shape and not bool(gradient[mask == 0].any())
    }


def _gradients(
    problem: Problem, block: str, batch: Batch, modules: Sequence[str], mask: Tensor
) -> dict[str, Tensor]:
    """Gradients at the modules' outputs of a random combination of the rows that are read."""
    model, outputs = problem.model, dict[str, Tensor]()

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = args[0].detach().requires_grad_()
        return (hidden, *args[1:]), kwargs

    def leave(name: str) -> Callable[..., None]:
        def keep(_: nn.Module, __: Any, output: Tensor) -> None:
            outputs[name] = output

        return keep

    handles = [model.get_submodule(block).register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [model.get_submodule(n).register_forward_hook(leave(n)) for n in modules]
    try:
        with torch.enable_grad():
            hidden, _ = problem.step(model, block, batch.cal)
            generator = torch.Generator().manual_seed(0)
            probe = torch.randn(hidden.shape, generator=generator).to(hidden) * mask[..., None]
            found = torch.autograd.grad(
                hidden, list(outputs.values()), probe, allow_unused=True, materialize_grads=True
            )
    finally:
        for handle in handles:
            handle.remove()
    return dict(zip(outputs, found, strict=True))
