"""Sentences on the frame of results: verdicts, the meaning of columns, and notes."""

from collections.abc import Iterable, Sequence
from itertools import chain

from fusion_bench_featcal.errors.plurals import pluralize

from .frame import LEAST_GAP, Frame, FrameLine
from .joining import grouped
from .leaders import leaders
from .names import ACCURACY, DRIFT, EXPERTS, INPUTS, REFERENCES, label_texts
from .notes import WARNING, Note, sentences_of
from .tables import ABSENT, Unit, share_text

_SHOWN = 0.0005
"""Smallest difference of accuracy that tables with tenths of a per cent show."""
RARELY = 0.1
"""Accuracy on its own task below which an expert was probably tuned on something else."""


def verdicts(frame: Frame) -> list[str]:
    """Return the verdicts of the runs, and the best model of each suite with several models.

    If the runs have no verdicts, the single repair of a suite is compared with its merged model.
    """
    run_notes = [note for note in frame.notes if note.is_conclusion]
    best = leaders(frame)
    if run_notes:
        return [*sentences_of(run_notes), *chain(*best.values())]
    texts = list[str]()
    for suite, suite_frame in frame.by_suite().items():
        compared = [line for line in suite_frame.lines if line.gain]
        repairs = grouped(compared, lambda line: (line.first.merger, line.first.name)).values()
        start = f"verdict on {suite}" if len(frame.by_suite()) > 1 else "verdict"
        texts += best.get(suite) or [f"{start}: {_verdict(lines, frame)}" for lines in repairs]
    return texts


def _verdict(lines: Sequence[FrameLine], frame: Frame) -> str:
    """Write how a repair compares with its merged model, at one point or over all points."""
    unit, row = Unit.of(frame.metric), lines[0].first
    points = "points" if frame.metric == ACCURACY else f"in {frame.metric}"
    ordered = sorted((frame.sign * line.gain.value, n, line.gain, line)
                     for n, line in enumerate(lines) if line.gain)  # fmt: skip
    ends = [(unit.difference(gain), line) for *_, gain, line in (ordered[0], ordered[-1])]
    if len(lines) > 1:
        texts = [f"{text} ({', '.join(label_texts(line.first.labels))})" for text, line in ends]
        return f"{row.name} differs from {row.merger} by {' to '.join(texts)} {points}"
    value, _, gain, line = ordered[0]
    if gain.half is None:
        kind = f"differs, without an interval ({pluralize(gain.seeds, 'seed')}), from"
    elif abs(value) <= gain.half:
        kind = "is within the interval of"
    else:
        kind = f"is {'better' if value > 0 else 'worse'} than"
    text = f"{row.name} {kind} {row.merger}: {unit.difference(gain)} {points}"
    if line.share is not None:
        text += f", {share_text(line.share)} of the gap to the experts"
    if line.worst and len(frame.tasks) > 1:
        texts = [line.worst.task, share_text(line.worst.share)]
        text += f"; worst task {', '.join(text for text in texts if text != ABSENT)}"
    return text


def legend(frame: Frame) -> list[str]:
    """Return a few lines that explain the columns of the table."""
    lines = frame.lines
    samples = _join_by_text((line, line.samples) for line in lines)
    steps = _join_by_text((line, str(line.first.settings.get("steps") or "")) for line in lines)
    has_shares = any(line.share is not None for line in lines)
    has_worst = any(line.worst for line in lines) and not has_shares
    meanings = {
        "n: samples per task": "samples_per_task" in frame.labels,
        "inputs: digest of models and data": INPUTS in frame.labels,
        f"{DRIFT}: distance after the last block from the expert's features, relative to them":
            frame.metric == DRIFT,
        "gain: over the merged model, ± half of its 95 % interval (items; seeds, if 3)":
            any(line.gain for line in lines),
        "share: of the gap from merged to experts; worst task: least share, its value": has_shares,
        "worst task: least gain, its value": has_worst,
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
    frame_notes = [*weak_experts(frame), *tasks_below_merged(frame)]
    texts = [f"note: {text}" for text in sentences_of([*chosen, *frame_notes])]
    return [*means, *legend(frame), *texts]


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
                    f"the expert of {task} has {100 * value:.1f} % on its own task, merged models "
                    f"up to {100 * most:.1f} %. Check its tokenizer, prompts and labels"
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
            f"{task} ends below the merged model: {', '.join(texts)} points",
            task=task,
            merger=merger,
        )
        for (merger, task), texts in losses.items()
    ]
