"""Scores of the models of one `featcal calibrate`: experts, merged and calibrated model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from fusion_bench_featcal.data.comparing import compare_scores, experts_below_merged
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.errors.masking import masked
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.files.json_files import digest_json
from fusion_bench_featcal.folders.opened import Opened
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import OTHER_TEXT
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.results import EXPERTS, Run, describe_device, versions
from fusion_bench_featcal.results.advice import REJECT, task_verdicts
from fusion_bench_featcal.results.names import ACCURACY, BASE, INPUTS, LOSS, MERGED, row_of_rule
from fusion_bench_featcal.results.notes import VERDICT, WARNING, Note, notes_of
from fusion_bench_featcal.results.repair_scores import RepairScores
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.results.sentences import RARELY
from fusion_bench_featcal.run.processes import Processes

_Scores = Mapping[str, Score]
_ADVICE = "Try more samples (--set samples_per_task=N), {}, or leave out the experts of these tasks"
_NOT_EXPERTS = (
    "experts no better than the merged model on their own examples: {}. Check --tokenizer, "
    "--chat-template, the labels, and that --data and --expert belong to the same task"
)
_LOW_SCORE_WARNING = (
    "the experts answer fewer than a tenth of their own examples correctly: {}. Check --tokenizer, "
    "labels or targets, and for language models --chat-template and how prompts end"
)
_UNREADABLE = 8.0
"""Loss of the merged model on general sentences from which on it cannot read English."""
_UNENDED = (
    "{} of {} of the expert of {} are right except for the end token, which it does not generate. "
    "Train it with the end token of --tokenizer, or give the tokenizer that it was trained with"
)


class Evaluation:
    """Scores of all models of one run. Each model is added while it is in memory.

    Attributes:
        report: The scores and the notes.
        request: The request.
        opened: The models and data of the run.
        heads: Task -> its expert's classifier, with the body of the last added model. Empty if
            all tasks share the merged model's head.
        digests: Digests of models and data.
        scores: The scores with the advice, once all models are scored.
    """

    def __init__(
        self,
        request: Request,
        opened: Opened,
        processes: Processes,
        notes: Sequence[Note] = (),
        digests: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create a report with its first notes, and no scores. Processes share the tasks."""
        self.digests = digests
        self.report = Run(
            suite=request.folder.name,
            merger=request.merger.name if request.merger else MERGED,
            versions=versions() | commits(),
            device=describe_device(torch.device(request.device)),
        )
        self.report.note(*notes)
        self.heads: dict[str, nn.Module] = {}
        self.request, self.opened, self.processes = request, opened, processes
        self._scorers = {name: task.scorer for name, task in opened.tasks.items() if task.scorer}
        further = {name: task.scorer for name, task in opened.further.items() if task.scorer}
        self._all_scorers = self._scorers | further
        self._tasks_here = processes.own_tasks(self._all_scorers)
        self._scores = dict[str, _Scores]()
        self.scores: RepairScores | None = None

    @property
    def row(self) -> str:
        """Name of the model that the run makes: calibrated, or only merged."""
        is_merge = not self.request.calibrates
        return self.report.merger if is_merge else row_of_rule(self.opened.settings.rule)

    def add_experts(self) -> _Scores:
        """Add each expert on its task, and return its scores."""
        models, scores_here = self.opened.models, dict[str, Score]()
        tasks_here = [task for task in self._tasks_here if task in self._scorers]
        for task in self.request.expert if models.heads else tasks_here:
            expert = models.load_expert(task)
            if task in self._tasks_here:
                scores_here[task] = self._scorers[task].score(expert)
            if models.heads:
                self.heads[task] = models.heads.detach_body(expert)
        scores = self._gather(scores_here, EXPERTS)
        if scores:
            self._add_row(EXPERTS, scores, Facts())
        return scores

    def _add_base(self) -> None:
        """Score the base on the tasks without an expert, if there is a base."""
        here = [task for task in self._tasks_here if task not in self._scorers]
        base = self.opened.models.load_base() if here else None
        scores = {task: self._all_scorers[task].score(base.eval()) for task in here if base}
        self._gather(scores, BASE)

    def _gather(self, scores_here: _Scores, name: str) -> _Scores:
        """Store a model's scores from all processes. Return those of tasks with an expert."""
        gathered = self.processes.gather_dict(scores_here)
        scores = {task: gathered[task] for task in self._all_scorers if task in gathered}
        self._scores[name] = scores
        return {task: score for task, score in scores.items() if task in self._scorers}

    def add_references(self) -> None:
        """Add each expert on its task, and the merged model."""
        if self._scorers:
            tasks = pluralize(len(self._scorers), "task")
            print(f"evaluating the experts, the merged and the calibrated model on {tasks}")
        scores = self.add_experts()
        self._add_base()
        self.add(self.report.merger, self.opened.models.load_merged)
        self.report.note(*_warnings_on_experts(scores, self._scores[self.report.merger]))

    def add(
        self,
        name: str,
        load: Callable[[], nn.Module],
        facts: Facts | None = None,
        cost: Mapping[str, float] | None = None,
    ) -> None:
        """Evaluate a model, and add its row to the report.

        Args:
            name: Name of the row.
            load: Returns the model. It is not called if there is nothing to score.
            facts: Facts on the calibration.
            cost: Cost of the calibration.
        """
        heads, scores_here = self.opened.models.heads, dict[str, Score]()
        if self._tasks_here or heads:  # heads are stored with their body
            model = load()
            for task in self._tasks_here:
                whole = heads.attach_body(task, self.heads[task], model) if heads else model
                scores_here[task] = self._all_scorers[task].score(whole.eval())
        scores = self._gather(scores_here, name)
        if scores or facts is not None:
            self._add_row(name, scores, facts or Facts(), cost)

    def _add_row(
        self, name: str, scores: _Scores, facts: Facts, cost: Mapping[str, float] | None = None
    ) -> None:
        values: dict[str, dict[str, float]] = {}
        for task, score in scores.items():
            measured = {ACCURACY: score.accuracy, LOSS: score.loss, score.metric: score.value}
            for metric, value in measured.items():
                values.setdefault(metric, {})[task] = value
        flags = {task: score.correct for task, score in scores.items()}
        correct = flags if flags and all(f is not None for f in flags.values()) else None
        row = self.report.add_model(name, values, facts, correct=correct, cost=cost)
        row.conditions[INPUTS] = digest_json(dict(self.digests))[:8]

    def conclude(self) -> bool:
        """Compare the models, and complete the report with the advice.

        Returns:
            Whether tasks were compared, none is worse, and there are no warnings.
        """
        report, name = self.report, self.row
        compared = (self._scores[model] for model in (EXPERTS, report.merger, name, BASE))
        comparisons, averages, further = compare_scores(*compared)
        further = [c for c in further if c.task != OTHER_TEXT or c.merged < _UNREADABLE]
        has_warnings = any(note.kind == WARNING for note in report.notes)
        preset = "--preset plus" if self.opened.settings.rule == "paper" else "other samples"
        scores = RepairScores.advised(
            comparisons,
            averages,
            further,
            more_examples=self._more_examples(),
            if_worse=_ADVICE.format(preset),
        )
        report.notes = scores.without_needless(report.notes)
        first = "Check the warnings first. " * has_warnings
        sentence = masked(f"{first}{scores.advice.sentence}")
        self.scores = scores._replace(advice=scores.advice._replace(sentence=sentence))
        verdicts = task_verdicts(comparisons) | task_verdicts(further)
        changes = {
            c.task: f"{c.change_text} on {pluralize(c.examples or 0, 'test example')}"
            for c in comparisons + further
        }
        report.note(
            Note(VERDICT, sentence),
            *(Note(VERDICT, f"{task}: {text}: {verdicts[task]}", task=task)
              for task, text in changes.items()),
            *notes_of(self._notes_on_examples()),
        )  # fmt: skip
        return bool(comparisons) and scores.advice.kind != REJECT and not has_warnings

    def _more_examples(self) -> str:
        """Return how to get more test examples."""
        tasks = self.opened.tasks.values()
        most = max((task.available for task in tasks if task.scorer), default=0)
        if most > self.request.eval_rows:
            return f"Score all of them with --eval-rows {most}"
        return "Give more test examples with --eval NAME=FILE"

    def _notes_on_examples(self) -> Iterator[str]:
        """Yield sentences on test examples that cannot show everything."""
        tasks, scored = self.opened.tasks, self._scorers.keys()
        if held_out := [task for task in tasks if task in scored - self.request.eval.keys()]:
            yield (
                f"test examples of {', '.join(held_out)} were held out from --data, so they cannot "
                "show how the models do on other data (give some with --eval NAME=FILE)"
            )
        if repeating := [name for name, task in tasks.items() if task.has_repeats]:
            yield f"some test examples are also samples: {', '.join(repeating)}"
        if unscored := [name for name in tasks if name not in scored]:
            yield f"not scored: {', '.join(unscored)}"


def _warnings_on_experts(experts: _Scores, merged: _Scores) -> list[Note]:
    """Return warnings on experts whose scores on their own tasks are low."""
    unended = {t: s for t, s in experts.items() if 2 * s.unended > len(s.losses)}
    texts = [
        _UNENDED.format(score.unended, pluralize(len(score.losses), "answer"), task)
        for task, score in unended.items()
    ]
    ended = {task: score for task, score in experts.items() if task not in unended}
    if weak := experts_below_merged(ended, merged):
        texts.append(_NOT_EXPERTS.format(", ".join(weak)))
    if failing := [task for task, score in ended.items() if score.accuracy < RARELY]:
        texts.append(_LOW_SCORE_WARNING.format(", ".join(failing)))
    return notes_of(texts, WARNING)
