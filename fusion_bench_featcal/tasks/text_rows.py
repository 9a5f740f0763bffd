"""Public datasets as prompts with targets, or as chats."""

from collections.abc import Mapping
from typing import Any

from fusion_bench_featcal.data.computed_rows import ComputedRows
from fusion_bench_featcal.data.tables import load_hub_split

GLUE = "nyu-mll/glue"


def load_glue(name: str, split: str, path: str = GLUE) -> ComputedRows:
    """Load a GLUE task with FusionBench's prompts and answers.

    FusionBench's loader returns the same texts, but first tokenizes every example of every split.

    Args:
        name: The task: cola, mnli, mrpc, qnli, qqp, rte, sst2 or stsb.
        split: The split, such as `train` or `validation` (`validation_matched` for mnli).
        path: Hub id or folder of the dataset.

    Returns:
        Rows `{"prompt": text, "target": text}`. The target is empty if the label is withheld.

    Raises:
        ValueError: If there is no such task, or the folder's path is a pattern.
        CalibrationError: If it cannot be loaded.
    """
    from fusion_bench.tasks.flan_t5_text_generation.glue_preprocessors import glue_processors
    from fusion_bench.tasks.flan_t5_text_generation.glue_prompt_templates import (
        glue_prompt_templates,
    )

    if name not in glue_processors:
        raise ValueError(f"GLUE has no task {name!r}; it has {', '.join(glue_processors)}")
    processor = glue_processors[name](tokenizer=None, template=glue_prompt_templates[name])
    rows = load_hub_split(path, name, split)

    def make(index: int) -> dict[str, Any]:
        row: Mapping[str, object] = rows[index]
        prompt, target = processor.preprocess(**{k: row[k] for k in row if k != "idx"})
        return {"prompt": prompt, "target": target if row["label"] >= 0 else ""}  # -1: withheld

    return ComputedRows(len(rows), make)


def load_chats(
    path: str,
    split: str,
    messages: str = "messages",
    prompt: str | None = None,
    answer: str | None = None,
    name: str | None = None,
) -> ComputedRows:
    """Load a dataset of conversations, or of questions with answers.

    Args:
        path: Hub id or folder.
        split: The split.
        messages: Column with the turns, each with `role` and `content`.
        prompt: Column with the question, used with `answer` instead of `messages`.
        answer: Column with the answer.
        name: The dataset's configuration, if it has several.

    Returns:
        Rows `{"messages": [{"role", "content"}, ...]}`.

    Raises:
        ValueError: If only one of `prompt` and `answer` is given, a column does not exist, or the
            folder's path is a pattern.
        CalibrationError: If it cannot be loaded.
    """
    if (prompt is None) != (answer is None):
        raise ValueError("prompt and answer are the columns of one question: give both or neither")
    columns = [messages] if prompt is None or answer is None else [prompt, answer]
    rows = load_hub_split(path, name, split).select_columns(columns)

    def make(index: int) -> dict[str, Any]:
        row: Mapping[str, object] = rows[index]
        if prompt is None or answer is None:
            return {"messages": row[messages]}
        question = {"role": "user", "content": row[prompt]}
        return {"messages": [question, {"role": "assistant", "content": row[answer]}]}

    return ComputedRows(len(rows), make)
