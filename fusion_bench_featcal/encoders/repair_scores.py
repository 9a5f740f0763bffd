"""Advice, table and card of a repair in Python, the same as those of `featcal calibrate`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_featcal.data.comparing import compare_scores
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.encoders.library import Encoder
from fusion_bench_featcal.encoders.scorer import EncoderScorer
from fusion_bench_featcal.encoders.scores import encoder_scorer
from fusion_bench_featcal.encoders.texts import TextRow, text_rows
from fusion_bench_featcal.models.cards import CardHead, card_text
from fusion_bench_featcal.results import Frame
from fusion_bench_featcal.results.advice import Comparison, advise
from fusion_bench_featcal.results.names import ACCURACY, row_of_rule
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.results.show import comparison_tables
from fusion_bench_featcal.results.tables import print_lines
from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.settings.rules import BY_NAME

MORE = "Give more test examples"


class RepairScores(NamedTuple):
    """Scores of a repair on test examples.

    Attributes:
        advice: A sentence on what to do.
        comparisons: Scores of expert, merged and repaired model for each task with an expert.
        further: The same for tasks without an expert, which the advice does not count.
    """

    advice: str
    comparisons: Sequence[Comparison]
    further: Sequence[Comparison] = ()

    @classmethod
    def from_scores(
        cls,
        experts: Mapping[str, Score],
        merged: Mapping[str, Score],
        repaired: Mapping[str, Score],
    ) -> "RepairScores":
        """Compare the models. At least one task has an expert."""
        comparisons = compare_scores(experts, merged, repaired)
        main = [c for c in comparisons if c.task in experts]
        further = [c for c in comparisons if c.task not in experts]
        return cls(advise(main, more_examples=MORE, further=further).sentence, main, further)

    def show(self) -> None:
        """Print the advice and the tables."""
        print_lines([self.advice])
        further = comparison_tables(self.further, has_experts=False)
        for table in [*comparison_tables(self.comparisons), *further]:
            table.show()


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
            raise ValueError(f"{label}: the examples cannot be scored, as {scorer}")
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
        None if base is None else _location(base),
        {task: _location(expert) for task, expert in experts.items()},
        Frame(ACCURACY),
        advice=[scores.advice],
        comparisons=scores.comparisons,
        further=scores.further,
        merger={"merged model": _location(merged)},
        head=CardHead(library, type(model).__name__),
    )


def _location(model: Any) -> str:
    """Return the folder or hub id of a model."""
    return str(model if isinstance(model, str | Path) else model.transformers_model.name_or_path)
