"""Sentences on the frame of results: verdicts, the meaning of columns, and notes."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .advice import REJECT, WEAK, Averages, Comparison
from .columns import AVERAGE
from .frame import LEAST_GAP, Frame, FrameLine, find_partner, paired
from .joining import grouped
from .leaders import leaders
from .names import (
    ACCURACY,
    BASE,
    DRIFT,
    EXPERTS,
    INPUTS,
    NO_EXPERT,
    REFERENCES,
    label_texts,
)
from .notes import WARNING, Note, sentences_of
from .repair_scores import RepairScores
from .statistics import LEAST_SEEDS, Difference, difference
from .tables import Unit

_SHOWN = 0.0005
"""Smallest difference of accuracy that tables with tenths of a per cent show."""
_MIB = 2**20
COSTS = {
    "seconds": ("seconds", 1, ".1f"),
    "MiB": ("peak_rss_bytes", _MIB, ".0f"),
    "GPU MiB": ("peak_accelerator_bytes", _MIB, ".0f"),
    "GPU Wh": ("gpu_energy_wh", 1, ".3g"),
}
"""Unit -> cost, divisor and format."""
RARELY = 0.1
"""Accuracy on its own task below which an expert was probably tuned on something else."""


def verdicts(frame: Frame) -> list[str]:
    """Return the advice of the runs, or of each suite, and each suite's best model.

    No model is called best if the experts are hardly better than the base.
    """
    run_notes = [note for note in frame.notes if note.is_conclusion]
    best, texts = leaders(frame), sentences_of(run_notes)
    for suite, suite_frame in frame.by_suite().items():
        line = None if run_notes else _best_single_model(suite_frame)
        advice = compare_repair(line, suite_frame).advice if line else None
        start = f"{suite}: " if len(frame.by_suite()) > 1 else ""
        texts += [f"{start}{advice.sentence}"] if advice else []
        is_weak = advice is not None and advice.kind == WEAK
        texts += [] if is_weak else best.get(suite, [])
        if not (run_notes or advice):
            texts += [f"{start}{text}" for text in _ranges(suite_frame)]
    return texts


def _best_single_model(frame: Frame) -> FrameLine | None:
    """Return the best repaired model that needs no task id, if any, or None in a sweep."""
    lines = [line for line in frame.lines if line.gain and line.values]
    if not lines or len({line.first.title for line in lines}) < len(lines):
        return None
    one_model = [line for line in lines if not line.needs_task_id] or lines
    return max(one_model, key=lambda line: frame.sign * line.values[AVERAGE])


def compare_repair(line: FrameLine, frame: Frame) -> RepairScores:
    """Return the scores of a repaired model beside its merged model and the experts."""
    merged, experts, base = (
        find_partner(line, frame.lines, name) for name in (line.first.merger, EXPERTS, BASE)
    )
    pairs = (line, merged), (experts, merged), (experts, line)
    other = replace(frame, metric=f"{frame.metric}{NO_EXPERT}")
    repaired, before, origin = (
        side and replace(side, metric=other.metric) for side in (line, merged, base)
    )
    is_single = single_repair(frame) is line  # then the table's heads have no names
    names = {} if is_single else {"name": line.first.name, "merged": line.first.merger}
    return RepairScores.advised(
        _compare_tasks(line, merged, experts, frame),
        Averages(*(_compare(*pair, frame) for pair in pairs)),
        _compare_tasks(repaired, before, origin, other),
        lead=_compare(experts, base, frame),
        more_examples="Evaluate on more test examples, or repeat the run with other seeds",
        if_worse="Keep the merged model, or give each task more samples that resemble its inputs",
        **names,
    )


def _compare_tasks(
    line: FrameLine | None, merged: FrameLine | None, experts: FrameLine | None, frame: Frame
) -> list[Comparison]:
    """Compare a repaired model with its merged model and the experts, or the base, by task."""
    comparisons, pairs = list[Comparison](), ((line, merged), (experts, merged), (experts, line))
    if line is None or merged is None:
        return comparisons
    for task in (task for task in line.values if task != AVERAGE):
        gain, gap, rest = (_compare(*pair, frame, task) for pair in pairs)
        if gain is not None:
            flags = (line.first.correct or {}).get(task)
            comparison = Comparison(
                task=task,
                metric=frame.metric.removesuffix(NO_EXPERT),
                examples=None if flags is None else len(flags),
                expert=experts.values.get(task) if experts else None,
                merged=merged.values[task],
                repaired=line.values[task],
                gain=gain,
                gap=gap,
                rest=rest,
            )
            comparisons.append(comparison)
    return comparisons


def single_repair(frame: Frame) -> FrameLine | None:
    """Return the repaired model of a suite that has only this one and its merged model, or None."""
    lines = [line for line in frame.lines if line.first.name not in REFERENCES]
    repairs = [line for line in lines if line.gain]
    return repairs[0] if len(lines) == 2 and len(repairs) == 1 else None


def cost_texts(line: FrameLine) -> dict[str, str]:
    """Return unit -> the number that a model's calibration took, of the units that are known."""
    return {
        text: format(line.cost[name] / unit, form)
        for text, (name, unit, form) in COSTS.items()
        if name in line.cost
    }


def _compare(
    one: FrameLine | None, other: FrameLine | None, frame: Frame, task: str | None = None
) -> Difference | None:
    """Return the difference of two lines, positive if the first is better, on average or a task."""
    if one is None or other is None or one.values.keys() != other.values.keys():
        return None
    sides = [
        {seed: values if task is None else {task: values[task]} for seed, values in side.items()}
        for side in paired(one, other)
    ]
    found = difference(*sides)
    return found.negated if found and frame.sign < 0 else found


def _ranges(frame: Frame) -> Iterator[str]:
    """Yield how each repair of a sweep differs from its merged model, from least to most."""
    lines = [line for line in frame.lines if line.gain]
    unit, points = Unit.of(frame.metric), "points" if frame.metric == ACCURACY else frame.metric
    for group in grouped(lines, lambda line: (line.first.merger, line.first.name)).values():
        ordered = sorted(group, key=lambda line: frame.sign * line.gain.value if line.gain else 0.0)
        texts = [
            f"{unit.difference(line.gain)} ({', '.join(label_texts(line.first.labels))})"
            for line in (ordered[0], ordered[-1])
            if line.gain
        ]
        row = group[0].first
        yield f"{row.name} differs from {row.merger} by {' to '.join(texts)} {points}"


def legend(frame: Frame) -> list[str]:
    """Return a few lines that explain the columns of the table."""
    lines, repair = frame.lines, single_repair(frame)
    samples = _join_by_text((line, line.samples) for line in lines)
    steps = _join_by_text((line, str(line.first.settings.get("steps") or "")) for line in lines)
    shares = [(line.share, line.worst and line.worst.share) for line in lines]
    has_shares = any(share is not None for pair in shares for share in pair)
    costs = cost_texts(repair) if repair else {}
    has_seeds = any(line.gain and line.gain.seeds >= LEAST_SEEDS for line in lines)
    varied = f"test examples{' and seeds' * has_seeds}"
    has_worst = any(line.worst for line in lines) and not repair
    meanings = {
        "n: samples per task": "samples_per_task" in frame.labels,
        "inputs: digest of models and data": INPUTS in frame.labels,
        f"{DRIFT}: distance after the last block from the expert's features, relative to them":
            frame.metric == DRIFT,
        f"gain: over the merged model, ± half of its 95 % interval over {varied}":
            any(line.gain for line in lines),
        "gap closed: 0 % is the merged model, 100 % the experts": has_shares and not repair,
        f"worst task: the one with the smallest {'gap closed' if has_shares else 'gain'}":
            has_worst,
        f"cost: {', '.join(f'{value} {unit}' for unit, value in costs.items())}": costs,
        "task id: inference needs the task of each input":
            any(line.needs_task_id for line in lines),
        f"samples per task: {samples}": samples and "samples_per_task" not in frame.labels,
        f"steps: {steps}": steps and "steps" not in frame.labels,
    }  # fmt: skip
    return [text for text, applies in meanings.items() if applies]


def _join_by_text(texts: Iterable[tuple[FrameLine, str]]) -> str:
    """Write each text once, after the names of its models. Models with "" are left out."""
    models: dict[str, dict[str, None]] = {}
    for line, text in texts:
        models.setdefault(text, {})[line.first.name] = None
    return "; ".join(f"{', '.join(names)} {text}" for text, names in models.items() if text)


def sentences(frame: Frame) -> list[str]:
    """Return the number of seeds, the legend, and all notes except for verdicts."""
    lines = [line for line in frame.lines if line.first.name not in REFERENCES]
    # Merged models count only if there are no repairs.
    lines = [line for line in lines if not line.is_merged] or lines or frame.lines
    counts = sorted({len(line.rows) for line in lines})
    ends = " to ".join(str(count) for count in dict.fromkeys(counts[:1] + counts[-1:]))
    means = [f"means over {ends} seeds"] if counts[-1:] > [1] else []
    chosen = [note for note in frame.notes if not note.is_conclusion]
    repair = single_repair(frame)
    scores = compare_repair(repair, frame) if repair else None
    chosen = scores.without_needless(chosen) if scores else chosen
    chosen += weak_experts(frame)
    if scores is None or scores.advice.kind != REJECT:  # that advice names them
        chosen += tasks_below_merged(frame)
    warnings = [note for note in chosen if note.kind == WARNING]
    others = [note for note in chosen if note.kind != WARNING]
    return [
        *means,
        *legend(frame),
        *(f"warning: {text}" for text in sentences_of(warnings)),
        *(f"note: {text}" for text in sentences_of(others)),
    ]


def weak_experts(frame: Frame) -> list[Note]:
    """Return a note on each expert that is rarely right, or worse than a merger, on its task."""
    lines = frame.lines if frame.metric == ACCURACY and not frame.labels else ()
    merged = [line.values for line in lines if line.is_merged]
    notes = dict[str, Note]()
    for line in (line for line in lines if line.first.name == EXPERTS):
        for task in line.first.tasks:
            value, most = line.values[task], max((m.get(task, 0.0) for m in merged), default=0.0)
            if value < max(RARELY, most - LEAST_GAP):
                text = (
                    f"the expert of {task} has only {100 * value:.1f} % on its own task (merged "
                    f"models: up to {100 * most:.1f} %). Check its tokenizer, prompts and labels"
                )
                notes[task] = Note(WARNING, text, task=task)
    return [*notes.values()]


def tasks_below_merged(frame: Frame) -> list[Note]:
    """Return a note on each merger and task for which a repair is below the merged model.

    If settings differ there are no notes, because the table names the worst task of each repair.
    """
    losses: dict[tuple[str, str], list[str]] = {}
    for line in frame.lines if frame.metric == ACCURACY and not frame.labels else ():
        for task, gain in line.gains.items():
            if gain <= -_SHOWN:
                text = f"{line.first.name} {100 * gain:+z.1f}"
                losses.setdefault((line.first.merger, task), []).append(text)
    return [
        Note(
            WARNING,
            f"below the merged model on {task}: {', '.join(texts)} points",
            task=task,
            merger=merger,
        )
        for (merger, task), texts in losses.items()
    ]
