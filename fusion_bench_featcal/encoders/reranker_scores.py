"""Scores of rerankers by the evaluators of sentence-transformers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fusion_bench_featcal.data.draws import spread
from fusion_bench_featcal.data.labels import are_unnamed, class_numbers
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.encoders.figures import QUIET, RANKS, EncoderTests, jackknifed, mean_score
from fusion_bench_featcal.encoders.library import of_pairs
from fusion_bench_featcal.encoders.targets import Label, RowTargets

NEGATIVES = 9


def reranker_tests(
    merged: Any, texts: Sequence[Sequence[str]], targets: RowTargets, label: Label
) -> EncoderTests | str:
    """Return test rows of a reranker, or why there are none.

    Args:
        merged: A model of the class that will be scored.
        texts: The texts of each row.
        targets: Labels or scores of the rows.
        label: Returns the name of a row in messages.
    """
    are_pairs, classes = len(texts[0]) == 2, merged.num_labels
    if classes > 1:
        if not are_pairs or targets.kind == "none" or not targets.are_classes:
            return f"the model chooses among {classes} classes, and its rows have none"
        return _pair_class_tests(merged, texts, targets, label)
    if not are_pairs or targets.all_belong:
        return _reranking_tests(texts)
    if targets.kind == "words":
        return f"its column {targets.name} has words, and the model has one output, not classes"
    evaluator = of_pairs.CrossEncoderCorrelationEvaluator
    if targets.kind == "binary":
        evaluator = of_pairs.CrossEncoderClassificationEvaluator
    of_all = partial(evaluator, texts, targets.values, **QUIET)

    def outputs(model: Any) -> Any:
        return model.predict(texts, convert_to_numpy=True)

    return jackknifed(of_all, outputs, targets, "pairs by their score")


def _pair_class_tests(
    merged: Any, texts: Sequence[Sequence[str]], targets: RowTargets, label: Label
) -> EncoderTests | str:
    """Return tests of a reranker that chooses a class for each pair."""
    classes = [name for _, name in sorted(merged.transformers_model.config.id2label.items())]
    if targets.kind == "words" and are_unnamed(classes):
        return f"its column {targets.name} has words, and the model's classes have no names"
    numbers = class_numbers(targets.values, classes, label, owner=" of the model", advice="")
    of_all = of_pairs.CrossEncoderClassificationEvaluator([*map(list, texts)], numbers, **QUIET)

    def evaluate(model: Any) -> Score:
        chosen = model.predict(texts, convert_to_numpy=True).argmax(axis=1)
        correct = torch.from_numpy(chosen == np.array(numbers))
        return Score(of_all(model)["f1_micro"], 1 - correct.double(), correct)

    measure = "pairs whose class is right"
    return EncoderTests(measure, "accuracy % (1 - accuracy)", evaluate)


def _reranking_tests(texts: Sequence[Sequence[str]]) -> EncoderTests | str:
    """Return tests in which a passage competes with others: those of its row, or of other rows."""
    are_pairs = len(texts[0]) == 2
    samples = [sample for sample in _samples(texts) if sample["negative"]]
    if len(samples) < 2:
        return (
            f"fewer than 2 of its {len(texts)} rows have passages of other queries to compete with "
            "(more rows by --eval)"
        )

    def inverse_rank(model: Any, *some: dict[str, Any]) -> float:
        evaluator = of_pairs.CrossEncoderRerankingEvaluator([*some], at_k=RANKS, **QUIET)
        return evaluator(model)[f"mrr@{RANKS}"]

    def evaluate(model: Any) -> Score:
        inverse_rank(model, *samples)  # reads all pairs in batches
        values = [inverse_rank(model, sample) for sample in samples]
        return mean_score([(float(value == 1), value) for value in values])

    others = f"up to {NEGATIVES} of other rows" if are_pairs else "the row's negatives"
    measure = f"passages ranked before {others} (MRR@10)"
    return EncoderTests(measure, "ranked first % (1 - MRR@10)", evaluate)


def _samples(texts: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
    passages = [*dict.fromkeys(row[1] for row in texts)]
    own = defaultdict[str, set[str]](set)
    for query, passage, *_ in texts:
        own[query].add(passage)
    for query, passage, *negatives in texts:
        if not negatives:
            at = passages.index(passage)  # each row has others, spread over all
            others = [other for other in passages[at:] + passages[:at] if other not in own[query]]
            negatives = [others[n] for n in spread(len(others), NEGATIVES)] if others else []
        yield {"query": query, "positive": [passage], "negative": negatives}
