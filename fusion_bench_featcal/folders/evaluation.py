"""Scores of the models of one `featcal calibrate`: experts, merged and calibrated model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.folders.opened import Opened
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.folders.verdict import Verdict, compare, experts_below_merged
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.results import EXPERTS, Run, describe_device, versions
from fusion_bench_featcal.results.notes import NOTE, VERDICT, WARNING, Note
from fusion_bench_featcal.results.run import INPUTS, MERGED, Facts, row_of_rule
from fusion_bench_featcal.results.sentences import RARELY
from fusion_bench_featcal.settings import FeatCalSettings

_MORE = "Try more samples (--set samples_per_task=N), {}, or leaving their experts out"
_NOT_EXPERTS = (
    "experts no better than the merged model on their own rows: {}. Check --tokenizer, "
    "--chat-template, the labels, and that --data and --expert are of the same task"
)
_HARDLY = (
    "fewer than a tenth of their own rows are right for the experts of {}: check --tokenizer, "
    "labels or targets, and for language models --chat-template and how prompts end"
)
_UNENDED = (
    "{} of {} of the expert of {} are right but for the end token, which it does not write: train "
    "it with the end token of --tokenizer, or name the tokenizer of its training"
)


class Evaluation:
    """Report of one run. Each model is added while it is in memory.

    Attributes:
        report: Scores of all models.
        heads: Task -> its expert's classifier, with the body of the last added model. Models
            without separate heads have none.
        digests: Digests of models and data.
    """

    def __init__(
        self,
        opened: Opened,
        tasks: Mapping[str, Task],
        notes: Sequence[str],
        digests: Mapping[str, str],
        doubts: Sequence[str],
    ) -> None:
        """Create a report with its first notes, reasons for doubt, and no scores."""
        self.digests = digests
        request = opened.request
        self.report = Run(
            suite=request.folder.name,
            merger=request.merger[0] or MERGED,
            versions=versions() | commits(),
            device=describe_device(torch.device(request.device)),
        )
        self.report.note(*(Note(NOTE, text) for text in notes))
        self.heads: dict[str, Any] = {}
        self._opened = opened
        self._tests = {name: task.tests for name, task in tasks.items() if task.tests}
        self._repeating = [name for name, task in tasks.items() if task.has_repeats]
        self._scores: dict[str, Mapping[str, Score]] = {}
        self._doubts = [*doubts]

    def add_references(self, merged: Any) -> None:
        """Add each expert on its task, and the merged model, given its weights."""
        opened, scores = self._opened, {}
        if self._tests:
            tasks = counted(len(self._tests), "task")
            print(f"evaluating the experts, the merged and the calibrated model on {tasks}")
        for task in opened.experts if opened.has_heads else self._tests:
            expert = opened.load_expert(task)
            if task in self._tests:
                scores[task] = self._tests[task].score(expert)
            if opened.has_heads:
                self.heads[task] = opened.head_of(expert)
        if scores:
            self._add_row(EXPERTS, scores, Facts())
        self.add(self.report.merger, merged)
        unended = {t: s for t, s in scores.items() if 2 * s.unended > len(s.losses)}
        for task, score in unended.items():
            answers = counted(len(score.losses), "answer")
            self._doubts.append(_UNENDED.format(score.unended, answers, task))
        scores = {task: score for task, score in scores.items() if task not in unended}
        if weak := experts_below_merged(scores, self._scores[self.report.merger]):
            self._doubts.append(_NOT_EXPERTS.format(", ".join(weak)))
        if failing := [task for task, score in scores.items() if score.accuracy < RARELY]:
            self._doubts.append(_HARDLY.format(", ".join(failing)))

    def add(
        self,
        name: str,
        weights: Any,
        facts: Facts | None = None,
        cost: Mapping[str, float] | None = None,
    ) -> None:
        """Evaluate the merged model with the given weights, and add its row."""
        opened, scores = self._opened, {}
        if self._tests or opened.has_heads:  # heads are stored with their body
            model = opened.load(weights)
            for task, tests in self._tests.items():
                whole = opened.with_head(task, model, self.heads.get(task))
                scores[task] = tests.score(whole.eval())
        self._scores[name] = scores
        if scores or facts is not None:
            self._add_row(name, scores, facts or Facts(), cost)

    def _add_row(
        self,
        name: str,
        scores: Mapping[str, Score],
        facts: Facts,
        cost: Mapping[str, float] | None = None,
    ) -> None:
        values = {
            metric: {task: getattr(score, metric) for task, score in scores.items()}
            for metric in ("accuracy", "loss")
        }
        flags = {task: score.correct for task, score in scores.items()}
        correct = flags if flags and all(f is not None for f in flags.values()) else None
        row = self.report.add_model(name, values, facts, correct=correct, cost=cost)
        row.conditions[INPUTS] = digest_json(dict(self.digests))[:8]

    def conclude(self, settings: FeatCalSettings) -> Verdict:
        """Compare the calibrated model with the merged one, and complete the report."""
        report, name = self.report, row_of_rule(settings.rule)
        advice = _MORE.format("--preset plus" if settings.rule == "paper" else "other samples")
        warnings = [n.text for n in report.notes if n.kind == WARNING and n.row == name]
        verdict = compare(
            self._scores[report.merger],
            self._scores[name],
            advice,
            held_back=self._tests.keys() - self._opened.request.eval.keys(),
            repeating=self._repeating,
            unscored=[task for task in self._opened.experts if task not in self._tests],
            doubts=[*self._doubts, *warnings],
        )
        report.note(
            Note(VERDICT, verdict.sentence),
            *(Note(VERDICT, text, task=task) for task, text in verdict.gains.items()),
        )
        return verdict
