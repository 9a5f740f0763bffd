"""The frame of results as text: tables, sentences on them, and the files of a report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.files import prepare_directory, write_atomic

from .against import against
from .columns import AVERAGE
from .frame import Frame, FrameLine, frame_of
from .joining import Results, join
from .lines import LINES_FILE, RUN_FILE, csv_of, csv_text
from .notes import Note, sentences_of
from .run import (
    ACCURACY,
    DRIFT,
    FEATCAL,
    FEATCAL_PLUS,
    INPUTS,
    REFERENCES,
    Run,
    label_texts,
    short_label,
)
from .statistics import Difference
from .tables import ABSENT, Table, console, page, print_lines

TASK_ID = "task_id_at_inference"
_MIB = 2**20
_LETTERS = 14  # of a task where the table is wider than the terminal


# ---- numbers


class Unit(NamedTuple):
    """Factor and number of digits of a metric in tables: per cent, or plain with three digits."""

    factor: float
    digits: int

    @classmethod
    def of(cls, metric: str) -> "Unit":
        """Return the unit: per cent for accuracies, plain for others, which have no bounds."""
        return cls(100, 1) if metric == ACCURACY else cls(1, 3)

    def value(self, number: float | None) -> str:
        """Write a value."""
        return ABSENT if number is None else f"{self.factor * number:.{self.digits}f}"

    def difference(self, gain: Difference) -> str:
        """Write a difference ± half of its interval, if it has one."""
        half = "" if gain.half is None else f" ± {self.value(gain.half)}"
        return f"{self.factor * gain.value:+z.{self.digits}f}{half}"

    def gain(self, gain: Difference | None, seeds: int = 1) -> str:
        """Write a difference ± half of its interval, or with the number of seeds without one.

        `seeds` is the number of the row's seeds, which is named where the difference has fewer.
        """
        if gain is None:
            return ABSENT
        text = self.difference(gain)
        is_plain = gain.seeds >= seeds and (gain.half is not None or gain.seeds == 1)
        return text if is_plain else f"{text}, {gain.seeds} seeds"


def share_text(share: float | None) -> str:
    """Write a share as whole per cent, and nothing as a dash."""
    return ABSENT if share is None or share != share else f"{100 * share:.0f} %"


def cut(names: Iterable[str], letters: int) -> dict[str, str]:
    """Cut names to some letters, the last of them an ellipsis, unless two would be equal."""
    short = {
        name: name if len(name) <= letters else f"{name[: letters - 1].rstrip('_- ')}…"
        for name in names
    }
    return {n: c if [*short.values()].count(c) == 1 else n for n, c in short.items()}


# ---- the table


def tables_of(frame: Frame, width: int | None = None) -> list[Table]:
    """Return a table for each suite.

    Its columns are the settings that differ, average, gain, share, worst task, costs, and tasks.

    Args:
        frame: The frame.
        width: Width in which names of tasks are cut, or None to leave them.
    """
    return [_table(suite, part, width) for suite, part in frame.by_suite().items()]


def _table(suite: str, frame: Frame, width: int | None) -> Table:
    table = _with_names(suite, frame, {task: task for task in frame.tasks})
    if width is None or table.width() <= width:
        return table
    return _with_names(suite, frame, cut(frame.tasks, _LETTERS))


def _with_names(suite: str, frame: Frame, names: Mapping[str, str]) -> Table:
    unit = Unit.of(frame.metric)
    columns: list[tuple[str, Callable[[FrameLine], str]]] = [
        (AVERAGE, lambda of: unit.value(of.values.get(AVERAGE))),
        ("gain", lambda of: unit.gain(of.gain, len(of.rows))),
        ("share", lambda of: share_text(of.share)),
        ("worst task", lambda of: worst_text(of, names, unit)),
        ("seconds", lambda of: _cost(of, "seconds", 1, ".1f")),
        ("MiB", lambda of: _cost(of, "peak_rss_bytes", _MIB, ".0f")),
        ("GPU\nMiB", lambda of: _cost(of, "peak_accelerator_bytes", _MIB, ".0f")),
        ("GPU\nWh", lambda of: _cost(of, "gpu_energy_wh", 1, ".3g")),
        ("task\nid", lambda of: _yes(of.cost.get(TASK_ID))),
    ]
    columns += [(names[t], lambda of, t=t: unit.value(of.values.get(t))) for t in frame.tasks]
    cells = [(head, [cell(line) for line in frame.lines]) for head, cell in columns]
    settings = [
        (short_label(key).replace(".", ".\n"),
         [str(line.first.labels.get(key, ABSENT)) for line in frame.lines])
        for key in frame.labels
    ]  # fmt: skip
    cells = [*settings, *((head, of) for head, of in cells if {*of} - {ABSENT, _yes(0)})]
    title = f"{suite}: {frame.metric}{', %' if unit.factor == 100 else ''}"
    lines = [(head_of(of), [texts[n] for _, texts in cells]) for n, of in enumerate(frame.lines)]
    heads = [head for head, _ in cells]
    return Table(title if frame.tasks else suite, heads, lines, fixed=len(settings))


def head_of(line: FrameLine) -> str:
    """Return a row's name, below its merger as `+ name`."""
    row = line.first
    return f"+ {row.name}" if row.is_repair and row.merger else row.name


def worst_text(line: FrameLine, names: Mapping[str, str], unit: Unit) -> str:
    """Write the worst task with its share of the gap and its value, such as `dtd 45 % 61.2`."""
    if line.worst is None:
        return ABSENT
    task, share, value = line.worst
    texts = [names.get(task, task), share_text(share), unit.value(value)]
    return " ".join(text for text in texts if text != ABSENT)


def _yes(value: float | None) -> str:
    return ABSENT if value is None else "yes" if value else "no"


def _cost(line: FrameLine, what: str, unit: float, form: str) -> str:
    value = line.cost.get(what)
    return ABSENT if value is None else format(value / unit, form)


# ---- sentences


def verdicts(frame: Frame, notes: Iterable[Note]) -> list[str]:
    """Return the verdicts of the runs, or else a sentence on each FeatCal row and merger.

    Without such a row, it is on every row made from a merged model.
    """
    of_runs = [note for note in notes if note.is_conclusion]
    if of_runs:
        return sentences_of(of_runs)
    compared = [line for line in frame.lines if line.gain]
    product = [line for line in compared if line.first.name in (FEATCAL, FEATCAL_PLUS)]
    alike: dict[tuple[str, ...], list[FrameLine]] = {}
    for line in product or compared:
        row = line.first
        alike.setdefault((row.suite, row.merger, row.name), []).append(line)
    several = len(frame.by_suite()) > 1
    return [
        f"verdict{f' on {suite}' * several}: {_verdict(lines, frame)}"
        for (suite, *_), lines in alike.items()
    ]


def _verdict(lines: Sequence[FrameLine], frame: Frame) -> str:
    """Write how a row compares with its merged model, at one point or over all."""
    unit, row, sign = Unit.of(frame.metric), lines[0].first, -1 if frame.lower_is_better else 1
    points = "points" if frame.metric == ACCURACY else f"in {frame.metric}"
    ordered = sorted(
        (sign * of.gain.value, n, of.gain, of) for n, of in enumerate(lines) if of.gain
    )
    ends = [(unit.difference(gain), of) for *_, gain, of in (ordered[0], ordered[-1])]
    if len(lines) > 1:
        texts = [f"{text} ({', '.join(label_texts(of.first.labels))})" for text, of in ends]
        return f"{row.name} differs from {row.merger} by {' to '.join(texts)} {points}"
    value, _, gain, line = ordered[0]
    if gain.half is None:
        kind = f"differs, without an interval ({counted(gain.seeds, 'seed')}), from"
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
    of_lines, used = frame.lines, dict[str, dict[str, None]]()
    for line in of_lines if "samples_per_task" not in frame.labels else ():
        used.setdefault(line.samples, {})[line.first.name] = None
    samples = "; ".join(f"{', '.join(rows)} {text}" for text, rows in used.items() if text)
    has_shares = any(line.share is not None for line in of_lines)
    has_worst = any(line.worst for line in of_lines) and not has_shares
    meanings = {
        "n: samples per task": "samples_per_task" in frame.labels,
        "inputs: digest of models and data": INPUTS in frame.labels,
        f"{DRIFT}: distance behind the last block from the expert's features, relative to them":
            frame.metric == DRIFT,
        "gain: over the merged model, ± half of its 95 % interval (items; seeds, if 3)":
            any(line.gain for line in of_lines),
        "share: of the gap from merged to experts; worst task: least share, its value": has_shares,
        "worst task: least gain, its value": has_worst,
        "task id: inference needs the task of each input":
            any(line.cost.get(TASK_ID) for line in of_lines),
        f"samples per task: {samples}": samples,
    }  # fmt: skip
    return [text for text, applies in meanings.items() if applies]


def sentences(frame: Frame, notes: Iterable[Note]) -> list[str]:
    """Return the legend of a frame, and the notes but for verdicts.

    Where settings differ, notes on a task of all rows are left out: the table has the worst task of
    each row.
    """
    chosen = [
        note
        for note in notes
        if not note.is_conclusion and not (frame.labels and note.task and not note.row)
    ]
    texts = [f"note: {text}" for text in sentences_of(chosen)]
    return [*means_text(frame), *legend(frame), *texts]


def means_text(frame: Frame) -> list[str]:
    """Return a sentence on the number of seeds of repairs, or of mergers alone, if several."""
    lines = [line for line in frame.lines if line.first.name not in REFERENCES]
    repairs = [line for line in lines if not line.is_merged] or lines or frame.lines
    counts = sorted({len(line.rows) for line in repairs})
    ends = " to ".join(str(count) for count in dict.fromkeys(counts[:1] + counts[-1:]))
    return [f"means over {ends} seeds"] if counts[-1:] > [1] else []


# ---- all of it


def show(frame: Frame, notes: Iterable[Note]) -> None:
    """Print the verdicts, the tables of a frame, their legend and the notes."""
    notes = list(notes)
    print_lines(verdicts(frame, notes))
    for number, table in enumerate(tables_of(frame, console().width)):
        print("\n" * bool(number), end="")
        table.show()
    print_lines(sentences(frame, notes))


def show_run(run: Run) -> None:
    """Print the table of one run, if its models were evaluated."""
    if run.tasks:
        results = join({Path(): run})
        show(frame_of(results), results.notes)


def show_against(results: Results, name: str, metric: str | None = None) -> None:
    """Print every row's difference from one row."""
    frame = against(results, name, metric)
    unit = Unit.of(metric := frame.attrs["metric"])
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    for suite in frame.suite.unique():
        lines = [
            (of["row"], [unit.gain(_difference(of)), _p(of)])
            for of in records if of["suite"] == suite
        ]  # fmt: skip
        Table(f"{suite}: average {metric} minus that of {name}", ["points", "p"], lines).show()
    print_lines(
        ["± half of the 95 % interval over test items and, from three seeds on, over seeds; "
         "p-values with Holm's correction over these rows"]
    )  # fmt: skip


def _difference(row: Mapping[str, Any]) -> Difference:
    return Difference(row["difference"], row["half"], row["seeds"], row["p"])


def _p(row: Mapping[str, Any]) -> str:
    return ABSENT if row["adjusted"] is None else f"{row['adjusted']:.2g}"


def markdown(frame: Frame, notes: Iterable[Note]) -> str:
    """Return verdicts, tables, legend and notes as a Markdown page."""
    notes = list(notes)
    paragraphs: list[Any] = ["# Report", verdicts(frame, notes)]
    for table in tables_of(frame):
        paragraphs += [f"## {table.title}", table.markdown()]
    return page(*paragraphs, "## Notes", sentences(frame, notes))


def write(frame: Frame, results: Results, folder: str | Path, setting: str = "--out") -> Path:
    """Write `report.csv`, `report.md` and the joined `lines.csv`. Return the folder.

    Raises:
        ReportError: If the folder is that of a run, or cannot be written.
    """
    if (Path(folder) / RUN_FILE).exists():
        raise ReportError(
            f"{folder} has the files of a run, which would be overwritten. Change {setting} to "
            "another folder."
        )
    folder = prepare_directory(folder, setting)
    write_atomic(folder / "report.csv", csv_of(frame.columns, frame.records()), setting)
    write_atomic(folder / "report.md", markdown(frame, results.notes), setting)
    write_atomic(folder / LINES_FILE, csv_text(results.lines()), setting)
    return folder
