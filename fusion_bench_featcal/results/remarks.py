"""Sentences about a run: notable tasks, and the last lines of its output."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from fusion_bench_featcal.errors.words import option, user_term
from fusion_bench_featcal.run.log import (
    UNLIKE_SAMPLES,
    AsMerged,
    distances,
    exchanged_samples,
    final_drift,
    fit_no_task,
)
from fusion_bench_featcal.settings import SETTINGS_OF_THE_RUN, FeatCalSettings
from fusion_bench_featcal.settings.rules import BY_NAME

from .names import DISTANCE, IDLE, ROWS_ENERGY, ROWS_ERROR, ROWS_SHARE, SLOTS, WEIGHT
from .notes import NOTE, WARNING, Note
from .rows import Line
from .run import Facts

LARGE_UPDATE = 10.0
"""Smallest norm of a module's update, relative to the largest of the experts' weights, that causes
a note. On the bundled suites the norm is at most 4. The experts' steps are not used for comparison,
because healthy updates are up to 30 times larger."""

FARTHEST = 1.5
"""Smallest distance of a task from its expert, relative to the geometric mean, that causes a note.
On the bundled suites on which `balance` helps, the largest distance is 1.8 to 2.7, on the others
1.3."""

HARDLY = 0.5
"""Median energy of the rows from weights, relative to the samples, below which a note says that
these rows hardly counted. The energy is 0.2 to 0.5 on DINOv2, whose adapters share a start, and 2
or more on MiniLM."""

FULL_RANK = 0.5
"""Median weight of the task-vector rows from which experts count as fine-tuned whole. With samples
that fit no task it is at least 0.92 on the bundled CLIP, T5 and Llama, and at most 0.10 on MiniLM
and DINOv2, whose experts are LoRA adapters."""

_SAMPLES_ALONE = (
    "FeatCal+ relied mostly on the samples, because the experts' weights reveal little about their "
    "data. This is common for LoRA adapters with the same initial weights"
)


def calibration_facts(
    name: str,
    settings: FeatCalSettings,
    records: Sequence[Mapping[str, object]],
    samples: Mapping[str, Mapping[str, object]],
) -> Facts:
    """Return the facts of a calibrated model for its report.

    Args:
        name: The model's name.
        settings: Settings of the calibration.
        records: Records of its log.
        samples: Task -> {"samples", "split"} used.
    """
    values, numbers = settings.with_rule_defaults.as_dict(), log_numbers(records)
    warnings, is_unlike = exchanged_samples(records).items(), fit_no_task(records)
    notes = [Note(WARNING, f"{task}: {warning}", name, task) for task, warning in warnings]
    if is_unlike:
        notes.append(Note(WARNING, unlike_samples(numbers), name))
    notes += large_update(name, records)
    if not (isinstance(settings.rule, str) and settings.rule in BY_NAME):
        notes.insert(0, Note(NOTE, f"solved by the rule {settings.rule_object!r}", name))
    as_merged = AsMerged.in_records(records)
    if as_merged.modules:
        notes.append(Note(NOTE, as_merged.text, name))
    if idle := numbers.get(IDLE):
        text = (
            f"{idle} of {numbers[SLOTS]} routed experts are left unchanged, because they receive "
            "no token of the samples. More samples reach more of them"
        )
        notes.append(Note(NOTE, text, name))
    notes += far_task(name, settings, distances(records))
    if numbers.get(ROWS_ENERGY, HARDLY) < HARDLY and not is_unlike:
        notes.append(Note(NOTE, _SAMPLES_ALONE, name))
    return Facts(
        settings={key: values[key] for key in values if key not in SETTINGS_OF_THE_RUN},
        seed=settings.seed,
        samples=samples,
        numbers=numbers,
        drift=final_drift(records),
        distances=distances(records),
        lines=weight_row_lines(name, records),
        notes=notes,
        as_merged=as_merged,
    )


def log_numbers(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers in a log on rows from weights, routed experts and tasks, if it has any.

    Medians over modules: the share `f` of the rows from weights that counts, and the energy of this
    share relative to the samples. Sums over mixtures: all routed experts, and routed experts
    without tokens. For each task: the distance from its expert, and the factor of its weight that
    `balance` derives from the distance.
    """
    # Experts may differ from the base in a few modules only. Other modules have no rows.
    shares = [(r["f"], r["f"] * r["gamma"]) for r in records if r.get("gamma", 0) > 0]
    numbers = dict[str, float]()
    if shares:
        medians = map(median, zip(*shares, strict=True))
        numbers |= zip((ROWS_SHARE, ROWS_ENERGY), medians, strict=True)
    counts = {  # both matrices of a mixture have equal counts
        str(record["module"]).rpartition(".")[0]: (record["slots"], record["idle"])
        for record in records
        if record["kind"] == "slots"
    }
    if counts:
        numbers |= zip((SLOTS, IDLE), map(sum, zip(*counts.values(), strict=True)), strict=True)
    numbers |= {f"{DISTANCE}.{task}": value for task, value in distances(records).items()}
    for record in records:
        if record["kind"] == "balance":
            numbers |= {f"{WEIGHT}.{task}": v for task, v in record["factors"].items()}
    return numbers


def weight_row_lines(name: str, records: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return the weight of rows from weights, and their error, as lines of the long table.

    The values are medians over each block's modules: `rows_share` of `f`, `rows_error` of `e`
    (`run/log.py`). `records` come from the calibration log of the model `name`.
    """
    modules = [record for record in records if record.get("gamma", 0) > 0]
    return [
        {"row": name, "block": block, "metric": metric, "value": median(r[key] for r in group)}
        for block, entries in groupby(modules, lambda record: record["block"])
        for group in [list(entries)]
        for metric, key in ((ROWS_SHARE, "f"), (ROWS_ERROR, "e"))
    ]


def unlike_samples(numbers: Mapping[str, float]) -> str:
    """Return the warning that samples fit no task, with the alternative for experts of full rank.

    The task-vector rows of such experts keep a weight near 1, those of LoRA experts lose it.

    Args:
        numbers: The result of `log_numbers`.
    """
    if numbers.get(ROWS_SHARE, 0.0) < FULL_RANK:
        return UNLIKE_SAMPLES
    return f"{UNLIKE_SAMPLES}, and so may SWUDI, which needs no samples: {user_term('swudi')}"


def far_task(name: str, settings: FeatCalSettings, measured: Mapping[str, float]) -> list[Note]:
    """Return a note on the task that ends farthest from its expert, if `balance` could help it."""
    positive = [distance for distance in measured.values() if distance > 0]
    if settings.rule != "plus" or settings.balance or len(positive) < 2:
        return []
    task = max(measured, key=measured.__getitem__)
    times = measured[task] / geometric_mean(positive)
    if times < FARTHEST:
        return []
    text = (
        f"{task} is farthest from its expert after the repair ({times:.1f} times the average "
        f"distance). {option('balance', 1)} may help it, but takes twice the time"
    )
    return [Note(NOTE, text, name, task)]


def large_update(name: str, records: Sequence[Mapping[str, Any]]) -> list[Note]:
    """Return a note on the module with the largest update, if it is `LARGE_UPDATE` or more.

    `records` come from the calibration log of the model `name`.
    """
    modules = [record for record in records if "relative_update" in record]
    worst = max(modules, key=lambda record: record["relative_update"], default=None)
    if worst is None or worst["relative_update"] < LARGE_UPDATE:
        return []
    text = (
        f"module {worst['module']}: the update is {worst['relative_update']:.3g} times as large as "
        "the merged weights. Check the scale of weights and calibration samples"
    )
    return [Note(WARNING, text, name)]


def closing_lines(
    saved_row: str, saved_path: Path | None, folder: Path | None = None, unsaved: Sequence[str] = ()
) -> list[str]:
    """Return the last lines of a run: the saved model, the files, the next command.

    `saved_row` is the name of the returned model, which was saved at `saved_path` unless this is
    None. `unsaved` are the other models that could be saved.
    """
    saved = f"saved {saved_row}: {saved_path}"
    if saved_path is None:
        saved = f"not saved: to save {saved_row}, set merged_model_save_path=DIR"
    another = [f"to save another model, set method.save={' or '.join(unsaved)}"] if unsaved else []
    if folder is None:
        return [*another, saved]
    return [*another, saved, f"reports: {folder}", f"next: featcal report {typed_path(folder)}"]


def typed_path(path: Path) -> str:
    """Return a path for a shell, relative to the current folder if it is below it."""
    current = Path.cwd()
    text = str(path.relative_to(current) if path.is_relative_to(current) else path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def closing_lines_of_a_comparison(folder: Path, cells: Path) -> list[str]:
    """Return the last lines of `method=compare`, which saves no model."""
    return [
        "compare saves no model. To save one, run its method on its own:",
        "  method=featcal merged_model_save_path=DIR",
        f"reports: {folder}",
        "next, with the finished runs of other jobs and earlier commands:",
        f"  featcal report {typed_path(cells)}",
    ]
