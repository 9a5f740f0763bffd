"""The work of one `featcal calibrate`: evaluation, calibration, and the folder that it leaves."""

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.agreement import Agreement, outcome_of
from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.data.text_samples import tokens_allowed
from fusion_bench_featcal.folders.adapter import Adapter, check_base
from fusion_bench_featcal.folders.expert_checks import weak_experts
from fusion_bench_featcal.folders.model_folder import (
    IMAGE_CLASSIFIER,
    TEXT_CLASSIFIER,
    body_of,
)
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.folders.open_tasks import open_tasks
from fusion_bench_featcal.folders.options import in_words_of_the_command
from fusion_bench_featcal.folders.request import MAX_LENGTH, Request
from fusion_bench_featcal.folders.saving import HEADS, save
from fusion_bench_featcal.folders.scorers import Scorer, all_scores, comparison, scorers_of
from fusion_bench_featcal.folders.screen import show_scores, show_start
from fusion_bench_featcal.folders.tasks import Score, Task
from fusion_bench_featcal.folders.verdict import NotImproved, Verdict
from fusion_bench_featcal.hub_files import commits
from fusion_bench_featcal.plurals import counted
from fusion_bench_featcal.problem import CalibrationResult
from fusion_bench_featcal.results import (
    EXPERTS,
    FEATCAL,
    Report,
    describe_device,
    measure,
    versions,
)
from fusion_bench_featcal.results.long_table import GIVEN
from fusion_bench_featcal.results.remarks import notes_of_log
from fusion_bench_featcal.saved_model import CardFacts


@dataclass
class Job:
    """Everything that is needed once all checks have passed.

    Attributes:
        models: The models.
        request: The request, with settings as this kind of models takes them.
        processor: Tokenizer or image processor.
        tasks: Task -> its data.
        report: The report.
        scorers: Scores beside accuracy and loss.
        heads: Task -> its expert's classifier; empty where models have no heads of their own.
        scores: Row -> task -> its score.
        own_scores: Row -> its scores by the scorers.
        planned_notes: Number of the report's notes that the plan has shown.
    """

    models: Models
    request: Request
    processor: Any
    tasks: Mapping[str, Task]
    report: Report
    scorers: Mapping[str, Scorer]
    heads: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Mapping[str, Score]] = field(default_factory=dict)
    own_scores: dict[str, Mapping[str, float]] = field(default_factory=dict)
    planned_notes: int = 0

    @classmethod
    def of(cls, models: Models) -> "Job":
        """Open and read the data of every task."""
        request, kind = models.request, models.home.kind
        scorers = scorers_of(request.evaluate, kind, request.settings.batch_size)
        if request.as_lora is not None:
            check_base(models.base, models.home)
        most = request.settings.max_length
        if kind in ("clip", IMAGE_CLASSIFIER):
            processor, most = models.image_processor(), None
        else:
            processor = models.tokenizer()
            if most == MAX_LENGTH:
                most = min(MAX_LENGTH, tokens_allowed(processor))
        request = dataclasses.replace(request, set={**request.set, "max_length": most})
        tasks = open_tasks(models, request, processor)
        report = Report(
            suite=request.folder.name,
            upstream=request.merger[0] or GIVEN,
            versions=versions() | commits(),
            device=describe_device(torch.device(request.device)),
        )
        report.notes += [note for task in tasks.values() for note in task.notes]
        report.notes += [*request.notes, *models.notes]
        return cls(models, request, processor, tasks, report, scorers)

    @property
    def has_heads(self) -> bool:
        """Return whether every expert has a head of its own."""
        return self.models.home.kind in (TEXT_CLASSIFIER, IMAGE_CLASSIFIER)

    @property
    def tested(self) -> list[str]:
        """Tasks with test samples."""
        return [name for name, task in self.tasks.items() if task.tests is not None]

    def show_start(self) -> None:
        """Print what will be done, and what it takes."""
        models = self.models
        show_start(models.home, models.empty_body, self.request, self.tasks, self.report)
        self.planned_notes = len(self.report.notes)

    def run(self) -> Path:
        """Load, evaluate, calibrate, evaluate again, and save."""
        model = self.models.load().to(self.request.device)
        self.evaluate_references(model)
        with measure() as cost:
            print(f"calibrating; finished blocks are kept in {self.request.checkpoints}")
            result = self.calibrate(model)
        calibrated = self.with_body(model, result.model)
        self.evaluate(FEATCAL, calibrated, **self._origin(result, cost.as_dict()))
        adapter = self.make_adapter(calibrated)
        return self.finish(calibrated, result, adapter, self.conclude(result))

    def evaluate_references(self, model: nn.Module) -> None:
        """Evaluate the merged model, and each expert on its own task.

        Raises:
            ValueError: If an expert is no better than guessing there, or worse than the base.
        """
        scores: dict[str, Score] = {}
        if self.tested:
            tasks = counted(len(self.tested), "task")
            print(f"evaluating the experts and the merged model on {tasks}")
        for task in self.tested:
            expert: Any = self.models.load_expert(task).to(self.request.device)
            scores[task] = self._score(task, expert)
            if self.has_heads:
                self.heads[task] = self.with_body(expert, body_of(model, self.models.home.kind))
            del expert
        self._check_experts(scores)
        self._add_row(EXPERTS, scores)
        self.evaluate(str(self.report.upstream), model)

    def _check_experts(self, scores: Mapping[str, Score]) -> None:
        """Refuse experts that cannot do what they were trained for."""
        base, home, on_base = self.models.base, self.models.home, {}
        if base and not self.has_heads and base.calibrated_class is home.calibrated_class:
            print("evaluating the base on all tasks")
            model = base.load().to(self.request.device)
            on_base = {task: self._score(task, model) for task in scores}
        weak = weak_experts(scores, on_base)
        if not weak:
            return
        line = f"experts no better than guessing or the base on their own rows: {', '.join(weak)}"
        if not self.request.force:
            raise ValueError(
                f"{line}. Check --tokenizer, --chat-template, the labels, and that --data and "
                "--expert are of the same task. To calibrate all the same, give --force"
            )
        self.report.notes.append(line)

    def evaluate(self, name: str, model: nn.Module, **made: Any) -> None:
        """Evaluate a model, and add its row with what it was made with."""
        scores = {}
        for task in self.tested:
            whole = model
            if self.has_heads:
                body = body_of(model, self.models.home.kind)
                whole = self.heads[task] = self.with_body(self.heads[task], body)
            scores[task] = self._score(task, whole)
        self.scores[name] = scores
        self.own_scores[name] = all_scores(self.scorers, model, self.processor)
        self._add_row(name, scores, **made)

    def _origin(self, result: CalibrationResult, cost: Mapping[str, Any]) -> dict[str, Any]:
        records = result.log.of_kind("task")
        samples = {r["task"]: {"samples": r["samples"], "split": "data"} for r in records}
        return {"settings": self.request.settings.as_dict(), "cost": cost, "samples": samples}

    def make_adapter(self, calibrated: nn.Module) -> Adapter | None:
        """Make the adapter that was asked for, and evaluate the base with it."""
        rank, base = self.request.as_lora, self.models.base
        if rank is None or base is None:
            return None
        model = base.load().to(self.request.device)
        adapter = Adapter.of(model, calibrated, rank)
        self.report.notes.append(adapter.note())
        self.evaluate(f"{FEATCAL}:lora {rank}", model)
        return adapter

    def conclude(self, result: CalibrationResult) -> Verdict:
        """Compare the calibrated model with the merged one, and add all notes to the report."""
        report, settings = self.report, self.request.settings
        merged, calibrated = self.scores[str(report.upstream)], self.scores[FEATCAL]
        verdict = Verdict.of(merged, calibrated, Agreement.of(result.log), settings)
        notes = [*notes_of_log(FEATCAL, result.log.records), *outcome_of(result.log)]
        notes += [*comparison(self.own_scores), *verdict.gains]
        notes += [verdict.sentence] if verdict.sentence else []
        report.notes = [in_words_of_the_command(note) for note in [*report.notes, *notes]]
        return verdict

    def _score(self, task: str, model: nn.Module) -> Score:
        tests = self.tasks[task].tests
        assert tests is not None
        return tests.score(model.eval())

    def _add_row(self, name: str, scores: Mapping[str, Score], **made: Any) -> None:
        if not scores:
            for kept, value in made.items():
                getattr(self.report, kept)[name] = dict(value)
            return
        correct = {task: score.correct for task, score in scores.items()}
        self.report.add_row(
            name,
            {task: score.accuracy for task, score in scores.items()},
            loss={task: score.loss for task, score in scores.items()},
            correct=correct if all(flags is not None for flags in correct.values()) else None,
            **made,
        )

    def calibrate(self, model: nn.Module) -> CalibrationResult:
        """Calibrate the part that experts share."""
        models, request = self.models, self.request
        return calibrate(
            body_of(model, models.home.kind),
            models.base_source,
            models.sources,
            {name: task.batches for name, task in self.tasks.items()},
            request.settings.replace(strict=False),  # the verdict decides
            device=request.device,
            hashed=True,
        )

    def with_body(self, model: Any, body: nn.Module) -> nn.Module:
        """Return a model with another body; for models without heads the body itself."""
        if not self.has_heads:
            return body
        setattr(model, model.base_model_prefix, body)
        return model

    def finish(
        self,
        model: nn.Module,
        result: CalibrationResult,
        adapter: Adapter | None,
        verdict: Verdict,
    ) -> Path:
        """Save the model and the report, print table and verdict, and remove the finished blocks.

        Raises:
            NotImproved: If a task ends no closer to its expert, with --strict.
        """
        request, report = self.request, self.report
        is_strict = request.strict or request.settings.strict
        if verdict.is_good or not is_strict:
            self._save(model, result, adapter)
        shutil.rmtree(request.checkpoints, ignore_errors=True)
        # The files have all notes. The screen has had those of the plan, and the verdict is last.
        report.notes = report.notes[self.planned_notes :]
        last = report.notes.pop() if verdict.sentence else "verdict: none without held-out samples"
        if report.rows:
            show_scores(report, verbose=request.verbose)
        print(last)
        if is_strict and not verdict.is_good:
            raise NotImproved(
                "--strict: nothing was saved, and the merged model is as it was. Without --strict "
                f"the calibrated model goes to {request.folder}"
            )
        return request.folder

    def _save(self, model: nn.Module, result: CalibrationResult, adapter: Adapter | None) -> None:
        request = self.request
        merger: dict[str, Any] = {"merged model": request.merged}
        if request.merge is not None:
            merger = dict(zip(("method", "scaling_factor"), request.merger, strict=True))
        counts = {name: task.samples for name, task in self.tasks.items()}
        own = request.settings.of_the_model().as_dict()
        facts = CardFacts(FEATCAL, merger, own, counts, result.reads)
        heads = self.heads
        if self.has_heads and not heads:
            heads = {task: self.models.load_expert(task) for task in self.tasks}
        report, log = self.report, result.log
        save(self.models, model.cpu(), self.processor, facts, report, log, heads, adapter)
        if heads:
            print(
                f"heads: {request.folder / HEADS}/NAME (that of the model itself: "
                f"{self.models.home.name}'s)"
            )
