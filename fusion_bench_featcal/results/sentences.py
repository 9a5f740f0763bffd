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
"""Differences of accuracy below this are invisible in tables with tenths of a per cent."""
RARELY = 0.1
"""Accuracy below which an expert's own task is probably not what it was tuned on."""


def verdicts(frame: Frame) -> list[str]:
    """Return the verdicts of the runs, and the best row of each suite with several.

    Without verdicts of runs, a single repair of a suite is compared with its merged model.
    """
    run_notes = [note for note in frame.notes if note.is_conclusion]
    best = leaders(frame)
    if run_notes:
        return [*sentences_of(run_notes), *chain(*best.values())]
    texts = list[str]()
    for suite, part in frame.by_suite().items():
        compared = [line for line in part.lines if line.gain]
        by_row = grouped(compared, lambda line: (line.first.merger, line.first.name))
        on = f" on {suite}" if len(frame.by_suite()) > 1 else ""
        texts += best.get(suite) or [
            f"verdict{on}: {_verdict(lines, frame)}" for lines in by_row.values()
        ]
    return texts


def _verdict(lines: Sequence[FrameLine], frame: Frame) -> str:
    """Write how a row compares with its merged model, at one point or over all."""
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
    """Return a few lines on the meaning of the table."""
    line_notes = frame.lines
    samples = _rows_of_texts((line, line.samples) for line in line_notes)
    steps = _rows_of_texts(
        (line, str(line.first.settings.get("steps") or "")) for line in line_notes
    )
    has_shares = any(line.share is not None for line in line_notes)
    has_worst = any(line.worst for line in line_notes) and not has_shares
    meanings = {
        "n: samples per task": "samples_per_task" in frame.labels,
        "inputs: digest of models and data": INPUTS in frame.labels,
        f"{DRIFT}: distance behind the last block from the expert's features, relative to them":
            frame.metric == DRIFT,
        "gain: over the merged model, ± half of its 95 % interval (items; seeds, if 3)":
            any(line.gain for line in line_notes),
        "share: of the gap from merged to experts; worst task: least share, its value": has_shares,
        "worst task: least gain, its value": has_worst,
        "task id: inference needs the task of each input":
            any(line.needs_task_id for line in line_notes),
        f"samples per task: {samples}": samples and "samples_per_task" not in frame.labels,
        f"steps: {steps}": steps and "steps" not in frame.labels,
    }  # fmt: skip
    return [text for text, applies in meanings.items() if applies]


def _rows_of_texts(texts: Iterable[tuple[FrameLine, str]]) -> str:
    """Write each text once, behind the names of its rows. Lines without a text have no part."""
    used: dict[str, dict[str, None]] = {}
    for line, text in texts:
        used.setdefault(text, {})[line.first.name] = None
    return "; ".join(f"{', '.join(rows)} {text}" for text, rows in used.items() if text)


def sentences(frame: Frame) -> list[str]:
    """Return the legend of a frame, the notes but for verdicts, and tasks that are made worse."""
    chosen = [note for note in frame.notes if not note.is_conclusion]
    frame_notes = [*weak_experts(frame), *tasks_below_merged(frame)]
    texts = [f"note: {text}" for text in sentences_of([*chosen, *frame_notes])]
    return [*means_text(frame), *legend(frame), *texts]


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
    """Return a note on each merger and task for which a row is below the merged model.

    Where settings differ there is none: the table has the worst task of each row.
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


def means_text(frame: Frame) -> list[str]:
    """Return a sentence on the number of seeds of repairs, or of mergers alone, if several."""
    lines = [line for line in frame.lines if line.first.name not in REFERENCES]
    repairs = [line for line in lines if not line.is_merged] or lines or frame.lines
    counts = sorted({len(line.rows) for line in repairs})
    ends = " to ".join(str(count) for count in dict.fromkeys(counts[:1] + counts[-1:]))
    return [f"means over {ends} seeds"] if counts[-1:] > [1] else []
