"""The first sentence of a report: the best model, its lead, and the tasks on which it is worse."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fusion_bench_featcal.errors.plurals import pluralize

from .columns import AVERAGE
from .frame import Frame, FrameLine, paired, share_tests
from .names import ACCURACY, REFERENCES, label_texts
from .statistics import Difference, difference
from .tables import Unit


def leaders(frame: Frame) -> dict[str, list[str]]:
    """Return suite -> a sentence on its best model, in a sweep one for each point.

    If only some models need the task of each input, there is a sentence on the best of each kind.
    Base and experts do not take part. Suites with a single repair and its merged model are left
    out.
    """
    suites, texts = frame.by_suite(), dict[str, list[str]]()
    for suite, suite_frame in suites.items():
        for point, lines in _points(suite_frame):
            subject = ", ".join([suite] * (len(suites) > 1) + label_texts(point))
            subject = f" ({subject})" if subject else ""
            one_model = [line for line in lines if not line.needs_task_id]
            with_task_id = [line for line in lines if line.needs_task_id]
            if one_model and with_task_id:
                lead = _Lead.of(one_model, suite_frame)
                second = _Lead(with_task_id[0], lead.line, suite_frame)
                sentences = [
                    f"Best single model{subject}: {lead.text}",
                    f"Best model that needs the task id{subject}: {second.text}",
                ]
            elif len(lines) > 2 or (len(lines) == 2 and not any(line.gain for line in lines)):
                sentences = [f"Best model{subject}: {_Lead.of(lines, suite_frame).text}"]
            else:
                continue
            texts.setdefault(suite, []).extend(sentences)
    return texts


def _points(frame: Frame) -> Iterator[tuple[Mapping[str, object], list[FrameLine]]]:
    """Yield the labels of each point, and its models of equal tests from the best to the worst."""
    lines = [line for line in frame.lines if line.values and line.first.name not in REFERENCES]
    points = list[Mapping[str, object]]()
    for line in sorted(lines, key=lambda line: -len(line.first.labels)):
        # A model without a setting belongs to all values of the setting.
        if not any(line.first.labels.items() <= point.items() for point in points):
            points.append(line.first.labels)
    lines.sort(key=lambda line: -frame.sign * line.values[AVERAGE])
    for point in points:
        labels = [line.first.labels.items() for line in lines]
        matching = [line for line, items in zip(lines, labels, strict=True)
                    if all(point.get(key, value) == value for key, value in items)]  # fmt: skip
        alike = [line for line in matching if share_tests(line, matching[0])]
        repairs = [(line.first.name, line.values) for line in alike if not line.is_merged]
        # An upstream merger may be the repair of another one.
        models = [
            line
            for line in alike
            if not (line.is_merged and (line.first.name, line.values) in repairs)
        ]
        yield point, models


class _Lead(NamedTuple):
    """A model compared with another one."""

    line: FrameLine
    other: FrameLine | None
    frame: Frame

    @classmethod
    def of(cls, lines: Sequence[FrameLine], frame: Frame) -> "_Lead":
        """Compare the first two models: the better one over their common seeds with the other."""
        lead = cls(lines[0], lines[1] if len(lines) > 1 else None, frame)
        if lead.other and lead.gain and frame.sign * lead.gain.value < 0:
            return cls(lead.other, lead.line, frame)
        return lead

    @property
    def gain(self) -> Difference | None:
        """The difference, or None without another model or a common seed."""
        return difference(*paired(self.line, self.other)) if self.other else None

    @property
    def text(self) -> str:
        """Names of both models, difference with interval, and tasks on which the first is worse."""
        name, gain = self._name(self.line), self.gain
        if self.other is None:
            return name
        other = self._name(self.other)
        if gain is None:
            return f"{name} (no seed in common with {other})"
        points = "points" if self.frame.metric == ACCURACY else f"in {self.frame.metric}"
        points = f"{Unit.of(self.frame.metric).difference(gain)} {points}"
        if gain.half is not None and abs(gain.value) <= gain.half:
            text = f"{name}, tied with {other} (difference {points})"
        else:
            text = f"{name}, {points} compared with {other}"
            needed = ", which needs a third seed" * (gain.seeds == 2)
            lacks = f" ({pluralize(gain.seeds, 'seed')}, no interval{needed})"
            text += lacks * (gain.half is None)
        return f"{text}. It is {self._worse(self.line, self.other)}"

    def _worse(self, line: FrameLine, other: FrameLine) -> str:
        """Write on how many tasks a model is worse in the table's digits, and on which most."""
        unit, sign, pair = Unit.of(self.frame.metric), self.frame.sign, paired(line, other)
        tasks = [task for task in line.values if task != AVERAGE]
        gains = {
            task: difference(*({seed: {task: v[task]} for seed, v in s.items()} for s in pair))
            for task in tasks
        }
        worse = {
            task: gain
            for task, gain in gains.items()
            if gain and sign * round(unit.factor * gain.value, unit.digits) < 0
        }
        if not worse:
            return "worse on no task"
        task = min(worse, key=lambda task: sign * worse[task].value)
        text = f"{task} ({unit.difference(worse[task])})"
        if len(worse) == 1:
            return f"worse on {text}"
        return f"worse on {len(worse)} of {len(gains)} tasks, most on {text}"

    def _name(self, line: FrameLine) -> str:
        """Return a model's name, with its merger if several mergers have a model of this name."""
        rows = [other.first for other in self.frame.lines if other.first.name == line.first.name]
        return line.first.title if len({row.merger for row in rows}) > 1 else line.first.name
