"""Examples of texts: the methods of an encoder that read them, and their batches."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.encoders.library import Encoder, st
from fusion_bench_featcal.encoders.models import transformer_of
from fusion_bench_featcal.encoders.pipeline import TEXT_OPTIONS
from fusion_bench_featcal.modules.models import Modes

TextRow = str | Sequence[str] | Mapping[str, Any]

TARGET_COLUMNS = ("label", "labels", "score", "scores", "dataset_name")
"""Columns that the library's trainers do not read as inputs."""
TEXT_NAMES = {
    "query": 0, "anchor": 0, "question": 0, "premise": 0, "text": 1, "sentence": 1, "text_pair": 2,
    "document": 2, "passage": 2, "corpus": 2, "positive": 2, "answer": 2, "response": 2,
    "hypothesis": 2, "negative": 3,
}  # fmt: skip
"""Name of a column of texts -> its position among the texts. Other columns are not texts."""


def read_texts(
    merged: Encoder,
    experts: Mapping[str, object],
    texts: Mapping[str, Iterable[TextRow]],
    seed: int | None = None,
) -> dict[str, dict[str, list[Any]]]:
    """Return task -> name of a method of the merged model -> the inputs that it reads.

    A seed puts each task's examples in the random order in which `featcal calibrate` draws them.
    """
    for name, values in (("experts", experts), ("texts", texts)):
        if not isinstance(values, Mapping):
            raise TypeError(f"{name} must be a mapping of tasks, not a {type(values).__name__}")
    if not experts or {*experts} != {*texts}:
        raise ValueError(
            f"there are texts for {list(texts)}, but experts {list(experts)}: each expert needs "
            "texts"
        )
    calls = {task: dict[str, list[Any]]() for task in experts}
    for task, task_calls in calls.items():
        rows = text_rows(f"texts[{task!r}]", texts[task])
        order = range(len(rows)) if seed is None else sample_order(len(rows), task, seed)
        read = [calls_of(merged, f"texts[{task!r}][{n}]", row) for n, row in enumerate(rows)]
        for method, value in (call for index in order for call in read[index]):
            task_calls.setdefault(method, []).append(value)
        if not task_calls:
            raise ValueError(f"texts[{task!r}] is empty: each expert needs texts")
    return calls


def text_rows(label: str, rows: Any) -> list[Any]:
    """Return rows as a list. A DataFrame and a dictionary of columns are divided into rows."""
    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):
        rows = rows.to_dict("list")
    columns = rows.values() if isinstance(rows, Mapping) else ()
    if isinstance(rows, str) or any(isinstance(column, str) for column in columns):
        raise TypeError(f"{label} is a single example, but must be a list: [example]")
    if columns:
        return [dict(zip(rows, row, strict=True)) for row in zip(*columns, strict=True)]
    return list(rows)


def calls_of(model: object, label: str, row: TextRow) -> list[tuple[str, Any]]:
    """Return the names of the methods that read a row, each with its input."""
    columns = columns_of(label, row)
    (name, first), *others = columns.items()
    if isinstance(model, st.CrossEncoder):
        if not others:
            raise TypeError(f"{label} is a single text, but a CrossEncoder reads pairs of texts")
        return [("predict", (first, text)) for _, text in others]
    if not others and name in ("query", "document", "passage", "corpus"):  # names of prompts
        return [("encode_query" if name == "query" else "encode_document", first)]
    has_roles = isinstance(model, st.MultiVectorEncoder)  # reads either queries or documents
    if not others and has_roles:
        return [("encode_query", first), ("encode_document", first)]
    symmetric = not has_roles and all(str(name).startswith("sentence") for name in columns)
    if not others or symmetric:
        return [("encode", text) for text in columns.values()]
    return [("encode_query", first), *(("encode_document", text) for _, text in others)]


def columns_of(label: str, row: Any) -> dict[Any, str]:
    """Return the texts of a row in the order in which they are read, by name or number."""
    if isinstance(row, Mapping):
        names = text_names(row)
        if unknown := [name for name in row if name not in (*names, *TARGET_COLUMNS)]:
            raise ValueError(
                f"{label}[{unknown[0]!r}] is not a known name of a text ({', '.join(TEXT_NAMES)}): "
                "leave it out, or give the example as a tuple of its texts"
            )
        columns = {name: row[name] for name in names}
    else:
        row = [row] if isinstance(row, str) or not isinstance(row, Iterable) else [*row]
        columns = dict(enumerate(row))
    if not columns:
        raise TypeError(f"{label} is {row!r}, which contains no text")
    for name, value in columns.items():
        if not isinstance(value, str):
            raise TypeError(f"{label}[{name!r}] is {value!r}, not a text: leave it out")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, which no tokenizer takes
            raise ValueError(f"{label}[{name!r}]: {error}. Correct the text") from error
    return columns


def text_names(columns: Iterable[object]) -> list[Any]:
    """Return the columns whose names are those of texts: queries first, negatives last.

    A number may follow a name, as in `sentence1` and `negative_2`.
    """
    stems = {name: str(name).rstrip("0123456789").removesuffix("_") for name in columns}
    return sorted((n for n in stems if stems[n] in TEXT_NAMES), key=lambda n: TEXT_NAMES[stems[n]])


def record_batches(
    model: Encoder, calls: Mapping[str, list[Any]], batch_size: int = 16
) -> list[dict[str, Any]]:
    """Return the batches that a model receives when its methods read inputs."""
    module, modes, batches = transformer_of("merged", model), Modes.of(model), list[Any]()
    unpadded = module.unpad_inputs

    def record(_: nn.Module, arguments: tuple[dict[str, Any]], options: dict[str, Any]) -> None:
        batches.append({**arguments[0], TEXT_OPTIONS: options})

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        module.unpad_inputs = False  # otherwise a whole batch may be one row
        for method, inputs in calls.items():
            getattr(model, method)(inputs, batch_size=batch_size, show_progress_bar=False)
    finally:
        handle.remove()
        module.unpad_inputs = unpadded
        modes.restore(model)
    # Copies, because the library makes its batches in inference mode.
    return [
        {name: v.clone() if isinstance(v, Tensor) else v for name, v in batch.items()}
        for batch in batches
    ]
