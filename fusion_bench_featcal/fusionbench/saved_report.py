"""The report of a method that FusionBench runs, with the model that it saves and returns."""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.fusionbench.evaluation import PoolEvaluation
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.report import Report
from fusion_bench_featcal.fusionbench.saved_model import (
    SAVE_PATH,
    path_option,
    save_model,
    write_card,
)
from fusion_bench_featcal.results import Cost
from fusion_bench_featcal.results.remarks import closing_lines
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.results.show import show

log = logging.getLogger(__name__)


class SavedReport(Report):
    """The report of a method that FusionBench runs, which saves and returns one of its models.

    FusionBench would save the model only after all evaluations.

    Attributes:
        row: Name of the model that is saved and returned.
        model: This model, available after `save_if_selected`.
    """

    model: nn.Module

    def __init__(self, inputs: MethodInputs, folder: str | None, row: str, **options: Any) -> None:
        """Start a report.

        Args:
            inputs: The pools, the device and the program.
            folder: The run's log directory, or None to write nothing.
            row: Name of the model to save. `check_save_target` has checked the target before.
            **options: Arguments of `Report`.
        """
        super().__init__(inputs, **options)
        self.row, self._folder = row, None if folder is None else Path(folder)
        self._saved: Path | None = None
        self._facts = Facts()

    def add(
        self, name: str, model: nn.Module, facts: Facts | None = None, cost: Cost | None = None
    ) -> PoolEvaluation | None:
        """Evaluate a model. Write its method's files, and FusionBench's report if it is saved."""
        if facts is not None and self._folder is not None:
            for file, text in facts.files.items():
                write_atomic(self._folder / file, text)
        evaluation = super().add(name, model, facts, cost)
        file = path_option(self._inputs.program, "report_save_path")
        if evaluation is not None and file is not None and name == self.row:
            write_atomic(file, json.dumps(evaluation.raw), "report_save_path")
        return evaluation

    def save_if_selected(self, name: str, model: nn.Module, facts: Facts) -> None:
        """Save a model if it is the one to save. Call this before its evaluation, which may fail.

        Raises:
            CalibrationError: If it cannot be written, naming path, free space and setting.
        """
        if name != self.row:
            return
        self._facts = facts
        self.model, inputs, processor = model, self._inputs, None
        if (target := path_option(inputs.program, SAVE_PATH)) is not None:
            with suppress(CalibrationError):  # some methods need no processor
                processor = inputs.processor
            save_model(inputs.modelpool, model, target, processor)
            self._saved = target
        if inputs.program is not None:  # FusionBench would save the model again
            inputs.program.save_merged_model = lambda merged_model: None

    def finish(self) -> nn.Module:
        """Write and print the report, and return the saved model.

        Raises:
            CalibrationError: If a model failed, after everything else is written and printed.
        """
        program, saved = self._inputs.program, self._saved
        frame = self.close(self._folder)
        if self._inputs.taskpool is None:
            log.info("no task pool: the model is not evaluated")
        if saved is not None and saved.is_dir():
            pool, merger = self._inputs.modelpool, self._base_method
            write_card(saved, pool, self.row, self._facts, frame, merger=merger)
        if program is not None:
            program.taskpool = None  # FusionBench would evaluate the returned model again
            if frame.lines:
                show(frame)
            unsaved = [row.name for row in self.run.rows if row.is_repair and row.name != self.row]
            print(*closing_lines(self.row, saved, self._folder, unsaved), sep="\n")
        if self._failed:
            rows = "; ".join(f"{row} ({first_line(error)})" for row, error in self._failed.items())
            raise CalibrationError(f"failed: {rows}. The other models are finished")
        return self.model
