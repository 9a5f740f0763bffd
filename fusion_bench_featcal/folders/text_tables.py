"""Tables of texts: opening them, optionally with renamed columns, and notes on their examples."""

from collections.abc import Mapping, Sequence

from fusion_bench_featcal.data.labels import LABEL
from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_formats import IMAGES
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.folders.tasks import TaskData


def open_texts(
    location: str,
    split: str,
    option: str,
    *,
    columns: Mapping[str, str],
    names: Sequence[str],
    usual: Sequence[str],
    reads_images: bool = False,
) -> TextRows:
    """Open a table of texts, optionally with renamed columns.

    Args:
        location: A table, a saved dataset or a hub dataset, as for `load_texts`.
        split: The split, if there are several.
        option: The option that names it, for messages.
        columns: Standard name of a column -> its name in the table. If there are any, only these
            columns are read. Standard columns are also read if `names` equals `usual`. The label
            may be missing, because only scores need it.
        names: Standard names that are allowed.
        usual: Standard columns, one of which is needed if `columns` is empty.
        reads_images: Whether the models read images, whose columns are then allowed and read.
    """
    images = IMAGES if reads_images else ()
    refuse_unknown(columns, (*names, *images), f"{option}: --columns ")
    with error_context(option, cause=unloadable):
        table = load_texts(location, split)
    available = {*table.column_names}
    if not len(table):
        raise ValueError(f"{option} has no examples")
    chosen = {name: column for name, column in columns.items() if name != LABEL}
    absent = [f"{name}={column}" for name, column in chosen.items() if column not in available]
    if absent or not (chosen or available & {*usual} - {LABEL}):
        needed = names[:2] if names != usual else ("text", LABEL)
        reason = f", so {', '.join(absent)} is wrong" if absent else ""
        raise ValueError(
            f"{option} has the columns {', '.join(table.column_names)}{reason}: name them with "
            f"--columns [NAME:]{','.join(f'{name}=COLUMN' for name in needed)}"
        )
    always_read = usual if names == usual else images
    if columns:
        columns = {name: name for name in always_read if name in available} | dict(columns)
    with error_context(option, cause=unloadable):
        return TextRows(table, option, columns, reads_images=reads_images)


def notes_on_examples(data: TaskData, unread: Sequence[str], *batches: TextBatches) -> list[str]:
    """Describe columns that are not read, examples that are left out, and texts that are cut.

    Args:
        data: The task's data.
        unread: The columns that are not read.
        *batches: Texts of the samples and of the test examples.
    """
    notes = [f"columns that are not read: {', '.join(unread)}"] if unread else []
    if left_out := data.samples.dataset.left_out:
        notes.append(f"left out {pluralize(left_out, 'example')} with weight 0 or label false")
    for name, texts in zip(("samples", "test examples"), batches, strict=False):
        if cut := texts.truncation_note(texts.inputs):
            notes.append(f"among the {name}, {cut}")
    return notes
