"""Scores of encoders: metrics of sentence-transformers' evaluators, with a value per example.

They are computed from embeddings. The library's evaluators return only one value for all examples,
with which the tests compare these scores.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusion_bench_featcal.data.embeddings import class_logits
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.encoders.evaluators import evaluation_copy
from fusion_bench_featcal.encoders.library import Encoder, st
from fusion_bench_featcal.encoders.reranker_scores import reranker_scorer
from fusion_bench_featcal.encoders.scorer import (
    RANKS,
    EncoderScorer,
    jackknife_scorer,
    mean_score,
    read_once,
)
from fusion_bench_featcal.encoders.targets import RowName, Targets
from fusion_bench_featcal.encoders.texts import calls_of, text_names
from fusion_bench_featcal.results.names import MRR

Calls = Sequence[tuple[str, Sequence[str]]]
"""Columns of texts, each with the name of the method that reads it."""


def encoder_scorer(
    merged: Encoder, rows: Sequence[Mapping[str, Any]], row_name: RowName
) -> EncoderScorer | str:
    """Return the scorer that fits the columns of the examples, or why they are not scored.

    Args:
        merged: A model of the class that will be scored.
        rows: Examples with equal columns: one or more texts, and optional labels or scores.
        row_name: Returns the name of an example in messages, by its index.

    Raises:
        TypeError: If the model does not read such examples.
        ValueError: If an example has no label, but others have one.
    """
    if not rows:
        return "it has no examples to score (give some with --eval)"
    texts = [tuple(row[name] for name in text_names(rows[0])) for row in rows]
    targets = Targets.of(rows, row_name)
    if targets.kind == "lists":
        return f"its column {targets.name} has lists, not one value per example"
    methods = [method for method, _ in calls_of(merged, row_name(0), rows[0])]
    if isinstance(merged, st.CrossEncoder):
        return reranker_scorer(merged, texts, targets, row_name)
    # A MultiVectorEncoder reads a text that is alone both as a query and as a document.
    calls = [*zip(methods, cycle(zip(*texts, strict=True)), strict=False)]
    if len(texts[0]) == 1:
        return _label_scorer(calls, targets)
    return _pair_scorer(calls, targets) if len(texts[0]) == 2 else _triplet_scorer(calls)


def class_name_scorer(
    rows: Sequence[Mapping[str, Any]], row_name: RowName, names_by: Encoder, prompt: str
) -> EncoderScorer | str:
    """Return a scorer in which the name of a text's label competes with the other labels' names.

    Logits are cosines of embeddings over a temperature of 0.05.

    Args:
        rows: Examples with one text and a label in words.
        row_name: Returns the name of an example in messages, by its index.
        names_by: The model that embeds the names, once for all models.
        prompt: The text around a name, with `{}` in its place.
    """
    targets = Targets.of(rows, row_name)
    names = sorted({*map(str, targets.values)})
    if targets.kind != "words" or len(names) < 2 or all(map(str.isdecimal, names)):
        return "scoring by class names needs at least two labels in words"
    if not isinstance(names_by, st.SentenceTransformer | st.SparseEncoder):
        return f"a {type(names_by).__name__} cannot embed class names"
    name, *more = text_names(rows[0])
    if more:
        return "scoring by class names needs examples with one text"
    ((method, _),), texts = calls_of(names_by, row_name(0), rows[0]), [row[name] for row in rows]
    numbers = torch.tensor([names.index(str(value)) for value in targets.values])

    def embed(model: Encoder, method: str, texts: Sequence[str]) -> Tensor:
        return _embeddings(model, [(method, texts)])[0].to_dense().cpu().float()

    with evaluation_copy(names_by) as twin:
        embeddings = embed(twin, "encode", [prompt.replace("{}", name) for name in names])
    head = F.normalize(embeddings, dim=-1)

    def evaluate(model: Encoder) -> Score:
        logits = class_logits(embed(model, method, texts), head)
        correct = logits.argmax(dim=-1) == numbers
        losses = F.cross_entropy(logits.double(), numbers, reduction="none")
        return Score(correct.double().mean().item(), losses, correct)

    return EncoderScorer("texts nearest to their class name", evaluate)


def _embeddings(model: Encoder, calls: Calls) -> list[Any]:
    """Return the embeddings of columns of texts."""
    # A MultiVectorEncoder returns a list, of a vector for each token.
    options = {} if isinstance(model, st.MultiVectorEncoder) else {"convert_to_tensor": True}
    texts = defaultdict[str, list[str]](list)
    for method, column in calls:
        texts[method] += column
    read = {m: read_once(getattr(model, m), column, **options) for m, column in texts.items()}
    columns = [[read[method][text] for text in column] for method, column in calls]
    return [column if column[0].ndim > 1 else torch.stack(column) for column in columns]


def _similarities(model: Any, first: object, second: object) -> Tensor:
    """Return the similarity of embeddings in pairs, in float32 as in the library's evaluators."""
    sides = (side.float() if isinstance(side, Tensor) else side for side in (first, second))
    return model.similarity_pairwise(*sides).float().cpu()


def _label_scorer(calls: Calls, targets: Targets) -> EncoderScorer | str:
    """Return a scorer in which each text is a query, and all other texts are the corpus."""
    if targets.kind == "none":
        return (
            "its examples are single texts without labels (give labelled examples or pairs with "
            "--eval)"
        )
    measure = "texts whose nearest other text has the same label (accuracy@1, MRR@10)"
    belongs = _belongs(targets.values, range(len(targets.values)))
    itself = torch.eye(len(belongs), dtype=torch.bool)
    return _retrieval_scorer([calls[0], calls[-1]], belongs, itself, measure)


def _pair_scorer(calls: Calls, targets: Targets) -> EncoderScorer | str:
    """Return a scorer of similarity or, if the texts of each pair belong together, of a search.

    In a search the first text of a pair is a query, and all second texts are the corpus.
    """
    if targets.all_belong:
        (method, queries), (other, passages) = calls
        sides = [(method, queries), (other, [*dict.fromkeys(passages)])]
        belongs = _belongs(queries, passages)
        measure = "queries whose nearest passage is their own (accuracy@1, MRR@10)"
        return _retrieval_scorer(sides, belongs, torch.zeros_like(belongs), measure)
    if targets.kind in ("words", "classes"):
        return (
            f"pairs of texts with classes ({targets.name}) have no evaluator in "
            "sentence-transformers: name the column `score` if it has degrees of similarity"
        )

    def outputs(model: Encoder) -> Any:
        # The library's evaluators of similarity read all texts by `encode`, which not all have.
        by_encode = [("encode", column) for _, column in calls]
        alike = calls if isinstance(model, st.MultiVectorEncoder) else by_encode
        return _similarities(model, *_embeddings(model, alike)).numpy()

    return jackknife_scorer(outputs, targets, "pairs by their similarity")


def _belongs(owners: Sequence[Hashable], items: Sequence[Hashable]) -> Tensor:
    """Return which of the different items are paired with an owner, bool `[owners, items]`."""
    numbers = [{key: n for n, key in enumerate(dict.fromkeys(side))} for side in (owners, items)]
    rows, places = [numbers[0][owner] for owner in owners], [numbers[1][item] for item in items]
    table = torch.zeros(len(numbers[0]), len(numbers[1]), dtype=torch.bool)
    table[rows, places] = True
    return table[rows]


def _retrieval_scorer(
    calls: Calls, belongs: Tensor, itself: Tensor, measure: str
) -> EncoderScorer | str:
    """Return a scorer in which queries search a corpus for the texts that belong to them.

    Args:
        calls: Queries and corpus.
        belongs: Bool `[queries, corpus]`.
        itself: Whether a text is the query itself, which is left out, bool `[queries, corpus]`.
        measure: Description of the metric.
    """
    belongs = belongs & ~itself
    usable = belongs.any(1) & ~(belongs | itself).all(1)
    if usable.sum() < 2:
        return (
            f"fewer than 2 of its {len(usable)} examples have both right and wrong texts to choose "
            "from (give more with --eval)"
        )

    def evaluate(model: Any) -> Score:
        similar = model.similarity(*_embeddings(model, calls)).float().cpu()
        similar = similar.masked_fill(itself, -torch.inf)[usable]
        nearest = similar.argsort(dim=1, descending=True, stable=True)[:, :RANKS]
        hits = belongs[usable].gather(1, nearest).double()
        return mean_score((hits / torch.arange(1, hits.shape[1] + 1)).amax(1), MRR)

    return EncoderScorer(measure, evaluate)


def _triplet_scorer(calls: Calls) -> EncoderScorer:
    def evaluate(model: Encoder) -> Score:
        anchor, *others = _embeddings(model, calls)
        positive, *negatives = (_similarities(model, anchor, other) for other in others)
        shares = torch.stack([positive > negative for negative in negatives]).double().mean(0)
        if len(negatives) == 1:
            return mean_score(shares)
        return Score(shares.mean().item(), 1 - shares, None, terms=shares)

    measure = "triplets whose positive is nearer than the negative"
    return EncoderScorer(measure, evaluate)
