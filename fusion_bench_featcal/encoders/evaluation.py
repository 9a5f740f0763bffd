"""Scores and card of a repair in Python, the same as those of `featcal calibrate`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusion_bench_featcal.data.comparing import compare_scores
from fusion_bench_featcal.encoders.library import Encoder
from fusion_bench_featcal.encoders.scorer import EncoderScorer
from fusion_bench_featcal.encoders.scores import encoder_scorer
from fusion_bench_featcal.encoders.texts import TextRow, text_rows
from fusion_bench_featcal.models.cards import CardHead, card_text
from fusion_bench_featcal.results import Frame
from fusion_bench_featcal.results.names import ACCURACY, row_of_rule
from fusion_bench_featcal.results.repair_scores import RepairScores
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.settings.rules import BY_NAME


def score_models(
    scorers: Mapping[str, EncoderScorer], models: tuple[Any, Any, Any], experts: Mapping[str, Any]
) -> RepairScores:
    """Return the scores of all models on the tasks' test examples.

    Args:
        scorers: Task -> scorer of its test examples.
        models: The merged model, the repaired model, and the base or None.
        experts: Task -> its expert. A scored task may have none.
    """
    merged, repaired, base = models
    tuned = {
        task: scorer.score(experts[task]) for task, scorer in scorers.items() if task in experts
    }
    others = {} if base is None else {
        task: scorer.score(base) for task, scorer in scorers.items() if task not in experts
    }  # fmt: skip
    before, after = (
        {task: scorer.score(model) for task, scorer in scorers.items()}
        for model in (merged, repaired)
    )
    compared = compare_scores(tuned, before, after, others)
    return RepairScores.advised(*compared, more_examples="Give more test examples")


def open_scorers(
    merged: Encoder, examples: Mapping[str, Sequence[TextRow]]
) -> dict[str, EncoderScorer]:
    """Return task -> the scorer of its test examples.

    Raises:
        TypeError: If the model does not read such examples, or an example is no mapping.
        ValueError: If examples cannot be scored.
    """
    scorers = dict[str, EncoderScorer]()
    for task, task_examples in examples.items():
        label = f"evaluator[{task!r}]"
        rows = text_rows(label, task_examples)
        if unnamed := [row for row in rows if not isinstance(row, Mapping)]:
            raise TypeError(f"{label}: name the texts of {unnamed[0]!r:.80}: {{'query': ...}}")
        scorer = encoder_scorer(merged, rows, lambda n, label=label: f"{label}[{n}]")  # type: ignore[misc]
        if isinstance(scorer, str):
            raise ValueError(f"{label}: the examples cannot be scored, because {scorer}")
        scorers[task] = scorer
    return scorers


def repair_card(
    scores: RepairScores,
    model: Any,
    models: tuple[object, object, Mapping[str, object]],
    counts: Mapping[str, int],
    rule: Rule,
) -> str:
    """Return the card of a repaired model.

    Args:
        scores: Its scores.
        model: The repaired model.
        models: Base or None, merged model, and task -> its expert. They are models or locations.
        counts: Task -> number of samples.
        rule: The rule of the calibration.
    """
    base, merged, experts = models
    name = next((name for name, kind in BY_NAME.items() if type(rule) is kind), repr(rule))
    facts = Facts(
        settings={
            "rule": name,
            **{k: v for k, v in vars(rule).items() if v != getattr(type(rule), k, v)},
        },
        samples={task: {"samples": count, "split": "texts"} for task, count in counts.items()},
    )
    library = {"library_name": "sentence-transformers"}
    if pipeline := getattr(model.model_card_data, "pipeline_tag", None):
        library["pipeline_tag"] = pipeline
    return card_text(
        row_of_rule(name),
        facts,
        None if base is None else location_of(base),
        {task: location_of(expert) for task, expert in experts.items()},
        Frame(ACCURACY),
        scores=scores,
        merger={"merged model": location_of(merged)},
        head=CardHead(library, type(model).__name__),
    )


def location_of(model: Any) -> str:
    """Return the folder or hub id of a model."""
    return str(model if isinstance(model, str | Path) else model.transformers_model.name_or_path)
