"""Scores of rerankers: metrics of sentence-transformers' evaluators, with a value per example."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fusion_bench_featcal.data.draws import evenly_spaced
from fusion_bench_featcal.data.labels import are_unnamed, class_indices
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.encoders.library import st
from fusion_bench_featcal.encoders.scorer import (
    RANKS,
    EncoderScorer,
    jackknife_scorer,
    mean_score,
    read_once,
)
from fusion_bench_featcal.encoders.targets import RowName, Targets
from fusion_bench_featcal.results.names import MRR

NEGATIVES = 9


def reranker_scorer(
    merged: st.CrossEncoder, texts: Sequence[tuple[str, ...]], targets: Targets, row_name: RowName
) -> EncoderScorer | str:
    """Return the scorer of a reranker's test examples, or why they are not scored.

    Args:
        merged: A model of the class that will be scored.
        texts: The texts of each example.
        targets: Labels or scores of the examples.
        row_name: Returns the name of an example in messages.
    """
    are_pairs, classes = len(texts[0]) == 2, merged.num_labels
    if classes > 1:
        if not are_pairs or targets.kind == "none" or not targets.are_classes:
            return f"the model chooses among {classes} classes, but its examples have none"
        return _pair_class_scorer(merged, texts, targets, row_name)
    if not are_pairs or targets.all_belong:
        return _reranking_scorer(texts)
    if targets.kind == "words":
        return f"its column {targets.name} has words, but the model has one output and no classes"
    return jackknife_scorer(lambda model: _outputs(model, texts), targets, "pairs by their score")


def _outputs(model: st.CrossEncoder, pairs: Iterable[tuple[str, ...]]) -> Any:
    """Return the outputs for pairs of texts, `[pairs]` or `[pairs, classes]`."""
    pairs = [*pairs]
    outputs = read_once(model.predict, pairs, convert_to_numpy=True)
    return np.stack([outputs[pair] for pair in pairs])


def _pair_class_scorer(
    merged: Any, texts: Sequence[tuple[str, ...]], targets: Targets, row_name: RowName
) -> EncoderScorer | str:
    """Return the scorer of a reranker that chooses a class for each pair."""
    classes = [name for _, name in sorted(merged.transformers_model.config.id2label.items())]
    if targets.kind == "words" and are_unnamed(classes):
        return f"its column {targets.name} has words, but the model's classes have no names"
    numbers = class_indices(targets.values, classes, row_name, owner=" of the model", advice="")

    def evaluate(model: st.CrossEncoder) -> Score:
        return mean_score(torch.from_numpy(_outputs(model, texts).argmax(1) == np.array(numbers)))

    return EncoderScorer("pairs whose class is right", evaluate)


def _reranking_scorer(texts: Sequence[tuple[str, ...]]) -> EncoderScorer | str:
    """Return a scorer in which a passage competes with those of its own or of other examples."""
    samples = [sample for sample in _samples(texts) if len(sample) > 1]
    if len(samples) < 2:
        return (
            f"fewer than 2 of its {len(texts)} examples have passages of other queries to compete "
            "with (give more with --eval)"
        )

    def evaluate(model: st.CrossEncoder) -> Score:
        outputs = iter(_outputs(model, (pair for sample in samples for pair in sample)))
        scores = [[next(outputs) for _ in sample] for sample in samples]
        # As in the library, a passage stands after those of the same score, and NaN is last.
        ranks = torch.tensor([sum(not s < one for s in (one, *others)) for one, *others in scores])
        return mean_score((1 / ranks.double()) * (ranks <= RANKS), MRR)

    others = "the example's negatives"
    if len(texts[0]) == 2:
        others = f"up to {NEGATIVES} passages of other examples"
    measure = f"passages ranked before {others} (MRR@10)"
    return EncoderScorer(measure, evaluate)


def _samples(texts: Sequence[tuple[str, ...]]) -> Iterator[list[tuple[str, str]]]:
    """Yield each example's query with its passage, then with the passages that compete."""
    passages, pairs = [*dict.fromkeys(row[1] for row in texts)], {row[:2] for row in texts}
    for query, passage, *negatives in texts:
        if not negatives:
            start = passages.index(passage)  # examples get different ones, spread over all
            others = [p for p in passages[start:] + passages[:start] if (query, p) not in pairs]
            negatives = [others[n] for n in evenly_spaced(len(others), NEGATIVES)]
        yield [(query, text) for text in (passage, *negatives)]
