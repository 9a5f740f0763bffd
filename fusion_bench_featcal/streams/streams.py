"""The features of all tasks' batches, advanced through the calibrated model and the experts."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.experts import LazyModel
from fusion_bench_featcal.experts.expert import lacks_values
from fusion_bench_featcal.experts.working_model import WorkingModel
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.families.base import stoppable
from fusion_bench_featcal.modules.groups import Group, Recorded, record
from fusion_bench_featcal.modules.models import in_float32, tensors_before_stage, tensors_under
from fusion_bench_featcal.modules.sites import Site, exclusion
from fusion_bench_featcal.streams.batch import Batch, CountedPositions, Positions
from fusion_bench_featcal.streams.inputs import check_finite_inputs, to_device
from fusion_bench_featcal.streams.routed import RoutedRows
from fusion_bench_featcal.streams.samples import resolved_decoder_rows
from fusion_bench_featcal.streams.storage import DeviceStorage, tree_map
from fusion_bench_featcal.streams.task_sums import DriftLog


@dataclass(frozen=True)
class Streams:
    """The batches of each task of this process, advanced stage by stage and block by block.

    Attributes:
        tasks: The batches of each task.
        family: How models are cut into blocks and run.
        stages: Names of the blocks in forward order, one list per stage.
        working: The calibrated model, with one block at a time in memory.
        experts: The expert of each task.
        sum_counts: Adds up counts over all processes, which may have samples of the same tasks.
        features: Module inputs that the rule sums, as in `Rule.features`.
        records_experts: Whether the rule uses the experts' inputs.
        autocast: Returns the context for forward passes.
        decoder_rows: Counted positions of a decoder: a value of the setting. With `auto` the last
            block counts only positions that predict a target, if there are labels.
        head_reads_first: Whether the head uses only the first position of the last block's output.
        drift: Compares the features of model and experts, or None.
        storage: Storage of features: the device or the host.
        active_tasks: Those of `tasks` with samples that run the stage, in this or another process.
    """

    tasks: Mapping[str, list[Batch]]
    family: Family
    stages: Sequence[Sequence[str]]
    working: WorkingModel
    experts: Mapping[str, LazyModel]
    sum_counts: Callable[[Mapping[Any, int]], dict[Any, int]] = dict
    features: str = "calibrated"
    records_experts: bool = True
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    decoder_rows: str = "all"
    head_reads_first: bool = False
    drift: DriftLog | None = None
    storage: DeviceStorage = field(default_factory=DeviceStorage)
    active_tasks: list[str] = field(default_factory=list)
    _mixing: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """Return the model that is being calibrated, with only some tensors in memory."""
        return self.working.module

    @property
    def last_block(self) -> str:
        """Return the last block before the tail."""
        return self.stages[-1 - len(self.family.tail)][-1]

    def next_block(self, block: str) -> str | None:
        """Return the block after a block, or None after the last one."""
        return dict(pairwise(chain.from_iterable(self.stages))).get(block)

    def restarted(self) -> "Streams":
        """Return the same samples before the first block. `inputs` must not have been freed."""
        tasks = {t: [batch.restarted() for batch in batches] for t, batches in self.tasks.items()}
        return replace(self, tasks=tasks)

    def loaded(self, block: str) -> AbstractContextManager[nn.Module]:
        """Context with a block of the calibrated model in memory, with merged weights at first."""
        return self.working.loaded(self.tensors_of(block))

    @property
    def runs_experts(self) -> bool:
        """Return whether experts run, for the rule or for a comparison."""
        return self.records_experts or self.drift is not None

    def enter_stage(self, index: int) -> None:
        """Advance all batches to the first block of a stage. Earlier stages must be calibrated."""
        names = tensors_before_stage(self.model, self.stages, index)
        with self.working.loaded(names):
            for task, batches in self.tasks.items():
                with error_context(task=task):
                    for batch in self.storage.iter_batches(batches):
                        inputs = to_device(batch.inputs, self.working.device)
                        counted = "all" if self.decoder_rows == "auto" else self.decoder_rows
                        masks = self.family.masks(self.model, inputs, index, counted)
                        positions = CountedPositions.from_masks(masks)
                        if index == 0 and positions.valid is None:  # padding may be arbitrary
                            check_finite_inputs(inputs, batch.start)
                        call = self._begun(self.model, inputs, index, batch.calibrated_call)
                        batch.skips_stage = call is None
                        if batch.skips_stage:
                            continue
                        batch.calibrated_call, hidden = call, call.hidden
                        read = self._read(inputs, index, hidden)
                        batch.positions = replace(positions, read=read)
                        valid = positions.valid or Positions(hidden.shape[:-1])
                        batch.later_positions = valid.count - batch.samples
        self._count_positions()
        for task in self.active_tasks if self.runs_experts else ():
            with self.experts[task].loaded(names) as expert, error_context(task=task):
                for batch in self.iter_batches(task):
                    inputs = to_device(batch.inputs, self.working.device)
                    batch.expert_call = self._begun(expert, inputs, index, batch.expert_call)
        if index == len(self.stages) - 1:
            for batch in (batch for batches in self.tasks.values() for batch in batches):
                batch.inputs = None

    def _read(self, inputs: Any, index: int, hidden: Tensor) -> Positions | None:
        """Return the positions that are read after the last block, or None outside its stage."""
        if self.last_block not in self.stages[index]:
            return None
        if self.head_reads_first:
            return Positions.first_of(hidden)
        if self.decoder_rows == "auto" and resolved_decoder_rows("auto", inputs) == "targets":
            targets = self.family.masks(self.model, inputs, index, "targets")
            return CountedPositions.from_masks(targets).valid
        return None

    def _count_positions(self) -> None:
        """Set the active tasks, and the weights of targets, from the samples of all processes.

        A task's targets get the same total weight as its other positions, if they are fewer.
        """
        counts, batches = Counter[tuple[str, str]](), self.active_batches
        for task, batch in batches:
            counts[task, "batches"] += 1
            if batch.positions.read is not None and not self.head_reads_first:
                counts[task, "targets"] += batch.positions.read.count
                counts[task, "positions"] += batch.later_positions + batch.samples
        totals = Counter(self.sum_counts(counts))
        self.active_tasks[:] = [task for task in self.tasks if totals[task, "batches"]]
        for task, batch in batches:
            targets = totals[task, "targets"]
            if (others := totals[task, "positions"] - targets) > targets:
                batch.positions = replace(batch.positions, target_weight=others / targets)

    def _begun(self, model: nn.Module, inputs: Any, index: int, call: Any) -> Any:
        """Return the input of a stage's first block, from the call after the previous stage."""
        ended, block = (call,) if index else (), self.stages[index][0]
        remedy = (
            "It cannot use weights of blocks, nor of towers beside the text decoder if the family "
            f"lists only blocks: use {option('family', 'auto')}"
        )
        with self._running("begin", block, remedy):
            return self.family.begin(model, inputs, block, *ended)

    def step(self, model: nn.Module, block: str, call: Any) -> Any:
        """Run one block and return the input of the next block.

        Raises:
            CalibrationError: If the family's step needs weights of another module.
        """
        remedy = (
            "It can use only weights of its block: compute everything else in begin and pass it on "
            "in the call (docs/reference/models.md)"
        )
        with self._running("step", block, remedy):
            return self.family.step(model, block, call)

    @contextmanager
    def _running(self, member: str, block: str, remedy: str) -> Iterator[None]:
        """Context of a pass by the family, which refuses one that needs weights not in memory."""
        try:
            with self.autocast():
                yield
        except (RuntimeError, NotImplementedError) as error:
            if not lacks_values(error):
                raise
            raise CalibrationError(
                f"{option('family', self.family.name)}: the {member} of {block} needs weights that "
                f"are not in memory ({error}). {remedy}"
            ) from error

    def tensors_of(self, block: str) -> list[str]:
        """Return the names of an expert's tensors for running a block."""
        return list(tensors_under(self.model, block))

    def iter_batches(self, task: str) -> Iterator[Batch]:
        """Yield a task's batches that run the stage, each with its features on the device."""
        batches = self.tasks.get(task, ())
        return self.storage.iter_batches(batch for batch in batches if not batch.skips_stage)

    @property
    def active_batches(self) -> list[tuple[str, Batch]]:
        """Return the batches of this process that run the stage, with their tasks."""
        pairs = ((task, batch) for task, batches in self.tasks.items() for batch in batches)
        return [(task, batch) for task, batch in pairs if not batch.skips_stage]

    def num_samples(self, task: str) -> int:
        """Return the number of a task's samples, without copies, for the log."""
        return sum(batch.samples for batch in self.tasks[task] if not batch.copy)

    def record_largest(
        self, block: str, names: Sequence[str]
    ) -> tuple[Recorded, CountedPositions, tuple[int, str, int]]:
        """Run the batch with most counted positions through a block, and record inputs of modules.

        First positions are ignored here: a sample of one position cannot show which modules mix
        positions.

        Returns:
            The inputs, the batch's positions, and its priority in `Processes.value_of_min`.
        """
        batches = {
            (-batch.later_positions, task, number): batch
            for task, batches in self.tasks.items()
            for number, batch in enumerate(batches)
            if not batch.skips_stage
        }
        priority, batch = min(batches.items())
        with self.storage.loaded(batch):
            run = partial(self.step, self.model, block, batch.calibrated_call)
            recorded = record(self.model, names, run)
            _refuse_unknown_readers(block, recorded, batch)
            return recorded, batch.positions, priority

    def modules_mixing_positions(self, block: str, sites: Sequence[Site]) -> list[str]:
        """Return the modules that mix positions, such as keys and values.

        The model itself is tested, independently of labels: the signs of a module's outputs are
        flipped at all positions except the first one of each sample (in a decoder, the last one),
        and the block's output at that position either changes or not. Each task with positions
        that are read is tested with its largest batch, in the first of all blocks whose modules
        have the same names.
        """
        batches = [batch for task_batches in self.tasks.values() for batch in task_batches]
        if block != self.last_block and all(b.positions.target_weight == 1 for b in batches):
            return []
        ends = tuple(site.name.removeprefix(block) for site in sites)
        if ends not in self._mixing:
            names, found = [site.name for site in sites], list[str]()
            for task_batches in self.tasks.values():
                read = [batch for batch in task_batches if batch.positions.read]
                if read:
                    largest = max(read, key=lambda batch: batch.later_positions)
                    found += self._mixing_in(largest, block, names)
            self._mixing[ends] = [name.removeprefix(block) for name in found]
        return [f"{block}{end}" for end in self._mixing[ends]]

    def _mixing_in(self, batch: Batch, block: str, names: Iterable[str]) -> list[str]:
        # In bfloat16 the change could vanish beside a residual stream that is much larger.
        with self.storage.loaded(batch), in_float32(self.model.get_submodule(block)) as widened:
            call = tree_map(batch.calibrated_call, Tensor, widened)
            counted = batch.positions.valid or Positions(call.hidden.shape[:-1])
            reads_first = self.head_reads_first
            read = Positions.first_of(call.hidden) if reads_first else counted.last_of_each()
            result = read.of(self.step(self.model, block, call).hidden)
            # Changed positions may be routed to other experts. The number of rows of a routed
            # expert's product then changes, and with it the rounding of every row.
            bound = torch.finfo(result.dtype).eps ** 0.75 * result.abs().max()
            changed = partial(self._read_with_changes, block, call, read=read)
            return [n for n in names if not (result - changed(n)).abs().max() <= bound]

    def restrict_positions(self, block: str, mixing: Iterable[str]) -> None:
        """Weigh positions that the head reads more, and in the last block count only them.

        Modules that mix positions still count all positions equally.
        """
        modules = frozenset(mixing)
        for batch in (batch for batches in self.tasks.values() for batch in batches):
            is_last_block = block == self.last_block
            batch.positions = replace(batch.positions, mixing=modules, is_last_block=is_last_block)

    def _read_with_changes(self, block: str, call: Any, name: str, read: Positions) -> Tensor:
        """Return a block's read outputs after flipping the signs of a module's other outputs."""
        positions = Positions(call.hidden.shape[:-1])
        signs = read.marked(1.0, -1.0, call.hidden)

        def change(_: nn.Module, __: Any, output: Any) -> Any:
            if not isinstance(output, Tensor):  # a router's, which concern their own positions
                return output
            if not positions.are_those_of(output):
                return -output  # of other positions than the block's
            return output * signs.view(*output.shape[:-1], 1).to(output.dtype)

        with stoppable(self.model.get_submodule(name).register_forward_hook(change)):
            return read.of(self.step(self.model, block, call).hidden)

    def run_expert_block(
        self, batch: Batch, block: str, expert: nn.Module, modules: Collection[str]
    ) -> None:
        """Run a batch through the expert's block, and record inputs that are used."""
        names = modules if self.records_experts else ()
        call = batch.calibrated_call if self.features == "merged" else batch.expert_call
        recorded = record(expert, names, partial(self.step, expert, block, call))
        batch.expert_call, batch.expert_inputs = recorded.result, recorded.inputs

    def routed(self, task: str, block: str, mixture: str) -> RoutedRows | None:
        """Return the rows of a task that enter a mixture of the calibrated block.

        The rows are stored where features are. The expert's inputs are freed. The result is None if
        this process has no samples of the task.
        """
        batch_rows = list[RoutedRows]()
        for batch in self.iter_batches(task):
            run = partial(self.step, self.model, block, batch.calibrated_call)
            recorded = record(self.model, [mixture], run, to_end=False)
            if mixture not in recorded.arguments:
                raise CalibrationError(
                    f"module {mixture} does not run in some batches. Exclude it: "
                    f"{exclusion([f'{mixture}.*'], block)}"
                )
            x, slots = recorded.arguments[mixture][:2]
            expert_x = batch.expert_inputs.pop(mixture) if self.records_experts else None
            rows = RoutedRows.from_batch(batch, mixture, x, slots, expert_x)
            batch_rows.append(tree_map(rows, Tensor, self.storage.kept))
        return RoutedRows.joined(batch_rows) if batch_rows else None

    def inputs_of(
        self, task: str, batch: Batch, block: str, groups: Sequence[Group]
    ) -> Mapping[str, Tensor]:
        """Run a batch through the calibrated block up to the last of some groups.

        A rule that sums the expert's rows gets those that `run_expert_block` recorded. They are
        then freed.

        Args:
            task: The task.
            batch: The batch.
            block: The block.
            groups: The groups.

        Returns:
            Each group's input, by the name of its first module.

        Raises:
            CalibrationError: If modules of a group receive different tensors.
        """
        if self.features != "calibrated":
            inputs, batch.expert_inputs = batch.expert_inputs, {}
            return inputs
        run = partial(self.step, self.model, block, batch.calibrated_call)
        names = [site.name for group in groups for site in group.sites]
        recorded = record(self.model, names, run, to_end=False)
        for group in groups:
            if len({id(recorded.inputs.get(site.name)) for site in group.sites}) > 1:
                names = [site.name for site in group.sites]
                raise CalibrationError(
                    f"task {task}, block {block}: modules {', '.join(names)} share their input "
                    f"only in some batches. Exclude them: {exclusion(names)}"
                )
        return recorded.inputs

    def advance(self, block: str) -> None:
        """Run all batches through a calibrated block."""
        if block == self.stages[-1][-1] and self.drift is None:
            return
        for task in self.active_tasks:
            for batch in self.iter_batches(task):
                batch.calibrated_call = self.step(self.model, block, batch.calibrated_call)
                if self.drift is not None:
                    features = batch.calibrated_call.hidden, batch.expert_call.hidden
                    self.drift.add(task, batch, *features, is_last=block == self.last_block)


def _refuse_unknown_readers(block: str, recorded: Recorded, batch: Batch) -> None:
    """Refuse decoder modules that receive the encoder's output under an unknown name.

    If the texts of encoder and decoder had the same length, the decoder's padding mask would be
    used for the encoder's positions.
    """
    if len(batch.positions.by_end) == 1:
        return
    tensors = list[Tensor]()
    tree_map(replace(batch.calibrated_call, hidden=None), Tensor, tensors.append)
    encoded = {(x.data_ptr(), x.shape) for x in tensors}
    for name, x in recorded.inputs.items():
        if (x.data_ptr(), x.shape) in encoded and not batch.positions.has_own(name):
            raise CalibrationError(
                f"block {block}: {name} receives the encoder's output, but its name does not show "
                f"which positions count there. Exclude it: {exclusion([name], block)}"
            )
