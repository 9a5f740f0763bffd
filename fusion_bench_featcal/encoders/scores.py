"""Scores of encoders by the evaluators of sentence-transformers, with a value of each row.

An evaluator returns one figure of all rows, and intervals need a value of each row. Where the
figure is a mean over rows it is the mean's term, else (rank correlation, average precision) the
row's jackknife pseudo-value. The mean of the values is the evaluator's figure.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fusion_bench_featcal.data.embeddings import class_logits
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.encoders.figures import (
    QUIET,
    RANKS,
    EncoderTests,
    jackknifed,
    mean_score,
    primary,
    unchanged,
)
from fusion_bench_featcal.encoders.library import of_terms, of_texts, of_vectors, st
from fusion_bench_featcal.encoders.reranker_scores import reranker_tests
from fusion_bench_featcal.encoders.targets import Label, RowTargets
from fusion_bench_featcal.encoders.texts import calls_of, columns_of

MRR = "accuracy@1 % (1 - MRR@10)"


def encoder_tests(
    merged: Any, rows: Sequence[Mapping[str, Any]], label: Label
) -> EncoderTests | str:
    """Return test rows for the library's evaluator of their kind, or why there is none.

    Args:
        merged: A model of the class that will be scored.
        rows: Rows with one or more texts, and optional labels or scores.
        label: Returns the name of a row in messages, by its position.

    Raises:
        TypeError: If a text has the wrong type.
        ValueError: If rows have different columns.
    """
    if not rows:
        return "it has no rows to score (--eval)"
    columns = [columns_of(label(number), row) for number, row in enumerate(rows)]
    for number, names in enumerate(columns):
        if {*names} != {*columns[0]}:
            raise ValueError(
                f"{label(number)} has the columns {[*names]}, but {label(0)} has {[*columns[0]]}"
            )
    texts = [[row[name] for name in columns[0]] for row in columns]
    methods = [method for method, _ in calls_of(merged, label(0), rows[0])]
    targets = RowTargets.of(rows, label)
    if targets.kind == "lists":
        return f"its column {targets.name} has lists, not one value per row"
    if isinstance(merged, st.CrossEncoder):
        return reranker_tests(merged, texts, targets, label)
    return _embedder_tests(merged, texts, targets, methods[0] if len({*methods}) == 1 else None)


def name_tests(
    rows: Sequence[Mapping[str, Any]], label: Label, names_by: Any, prompt: str
) -> EncoderTests | str:
    """Return test rows in which the name of a text's label competes with those of other labels.

    Logits are cosines of embeddings over a temperature of 0.05.

    Args:
        rows: Rows with one text and a label in words.
        label: Returns the name of a row in messages, by its position.
        names_by: The model that embeds the names, once for all models.
        prompt: The text around a name, with `{}` in its place.
    """
    targets = RowTargets.of(rows, label)
    names = sorted({*map(str, targets.values)})
    if targets.kind != "words" or len(names) < 2 or all(map(str.isdecimal, names)):
        return "class names need at least two labels in words"
    if not isinstance(names_by, st.SentenceTransformer | st.SparseEncoder):
        return f"a {type(names_by).__name__} has no embeddings of class names"
    calls = [calls_of(names_by, label(number), row) for number, row in enumerate(rows)]
    if any(len(of_row) > 1 for of_row in calls):
        return "class names are for rows of one text"
    method, texts = calls[0][0][0], [text for ((_, text),) in calls]
    numbers = torch.tensor([names.index(str(value)) for value in targets.values])

    def embed(model: Any, method: str, texts: Sequence[str]) -> Any:
        embed_all = getattr(model, method)
        return embed_all(texts, convert_to_tensor=True, show_progress_bar=False).to_dense().cpu()

    with unchanged(names_by) as twin:
        embeddings = embed(twin, "encode", [prompt.replace("{}", name) for name in names])
    head = F.normalize(embeddings.float(), dim=-1)

    def evaluate(model: Any) -> Score:
        logits = class_logits(embed(model, method, texts).float(), head)
        correct = logits.argmax(dim=-1) == numbers
        losses = F.cross_entropy(logits.double(), numbers, reduction="none")
        return Score(correct.double().mean().item(), losses, correct)

    return EncoderTests("texts nearest to their class name", "accuracy % (loss)", evaluate)


class _Evaluators(NamedTuple):
    """Evaluators of a class of models, None where the library has none."""

    retrieval: Any
    triplets: Any
    similarity: Any
    pairs: Any


_OF_KIND = {
    st.SentenceTransformer: _Evaluators(
        of_texts.InformationRetrievalEvaluator,
        of_texts.TripletEvaluator,
        of_texts.EmbeddingSimilarityEvaluator,
        of_texts.BinaryClassificationEvaluator,
    ),
    st.SparseEncoder: _Evaluators(
        of_terms.SparseInformationRetrievalEvaluator,
        of_terms.SparseTripletEvaluator,
        of_terms.SparseEmbeddingSimilarityEvaluator,
        of_terms.SparseBinaryClassificationEvaluator,
    ),
    st.MultiVectorEncoder: _Evaluators(
        of_vectors.MultiVectorInformationRetrievalEvaluator,
        of_vectors.MultiVectorTripletEvaluator,
        None,
        None,
    ),
}


def _embedder_tests(
    merged: Any, texts: Sequence[Sequence[str]], targets: RowTargets, method: str | None
) -> EncoderTests | str:
    evaluators = next(of for kind, of in _OF_KIND.items() if isinstance(merged, kind))
    if len(texts[0]) == 1:
        return _label_tests(evaluators, [text for (text,) in texts], targets, method)
    if len(texts[0]) > 2:
        return _triplet_tests(evaluators, texts, method)
    if targets.all_belong:
        return _passage_tests(evaluators, texts, method)
    if targets.kind in ("words", "classes"):
        return (
            f"pairs of texts with classes ({targets.name}) have no evaluator in "
            "sentence-transformers: name the column `score` if it has degrees of similarity"
        )
    is_binary = targets.kind == "binary"
    evaluator = evaluators.pairs if is_binary else evaluators.similarity
    if evaluator is None:
        return (
            f"pairs of texts with {targets.name} have no evaluator of {type(merged).__name__} in "
            "sentence-transformers"
        )
    sides = [row[0] for row in texts], [row[1] for row in texts]

    def outputs(model: Any) -> Any:
        first, second = (of_all().embed_inputs(model, side) for side in sides)
        return model.similarity_pairwise(first, second).float().cpu().numpy()

    of_all = partial(evaluator, *sides, targets.values, **QUIET)
    return jackknifed(of_all, outputs, targets, "pairs by their similarity")


def _label_tests(
    evaluators: _Evaluators, texts: Sequence[str], targets: RowTargets, method: str | None
) -> EncoderTests | str:
    """Return tests in which each text is a query, and all other texts are the corpus."""
    if targets.kind == "none":
        return "its rows are single texts without labels (labelled rows or pairs by --eval)"
    names = [f"{number:06}" for number in range(len(texts))]
    same = defaultdict[Any, set[str]](set)
    for name, value in zip(names, targets.values, strict=True):
        same[value].add(name)
    corpus = dict(zip(names, texts, strict=True))
    relevant = {
        name: same[value] - {name} for name, value in zip(names, targets.values, strict=True)
    }
    measure = "texts whose nearest other text has the same label (accuracy@1, MRR@10)"
    return _retrieval_tests(evaluators.retrieval, corpus, corpus, relevant, measure, method)


def _passage_tests(
    evaluators: _Evaluators, texts: Sequence[Sequence[str]], method: str | None
) -> EncoderTests | str:
    """Return tests in which a row's first text is a query, and all second texts are the corpus."""
    passages = [*dict.fromkeys(row[1] for row in texts)]
    names = {passage: f"passage {number:06}" for number, passage in enumerate(passages)}
    own = defaultdict[str, set[str]](set)
    for query, passage in texts:
        own[query].add(names[passage])
    queries = {f"query {number:06}": row[0] for number, row in enumerate(texts)}
    relevant = {name: own[query] for name, query in queries.items()}
    corpus = {name: passage for passage, name in names.items()}
    measure = "queries whose nearest passage is their own (accuracy@1, MRR@10)"
    return _retrieval_tests(evaluators.retrieval, queries, corpus, relevant, measure, method)


def _retrieval_tests(
    evaluator: Any,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevant: Mapping[str, set[str]],
    measure: str,
    method: str | None,
) -> EncoderTests | str:
    """Return tests of queries by name. A query is not looked for among texts of its own name."""
    others = {query: len(corpus) - (query in corpus) for query in queries}
    asked = {q: text for q, text in queries.items() if 0 < len(relevant[q]) < others[q]}
    if len(asked) < 2:
        return (
            f"fewer than 2 of its {len(queries)} rows have both right and wrong texts to choose "
            "from (more rows by --eval)"
        )
    # One more, because a query may find itself.
    cutoffs = {f"{name}_at_k": [RANKS + 1] for name in ("mrr", "ndcg", "map", "accuracy")}
    cutoffs |= {"precision_recall_at_k": [1], "write_predictions": True}
    of_all = evaluator(asked, {**corpus}, {**relevant}, **cutoffs, **QUIET)

    def of_query(query: str, results: Sequence[Mapping[str, str]]) -> tuple[float, float]:
        found = [one["corpus_id"] for one in results if one["corpus_id"] != query][:RANKS]
        ranks = (rank for rank, name in enumerate(found, 1) if name in relevant[query])
        inverse = 1 / next(ranks, torch.inf)
        return float(inverse == 1), inverse

    def evaluate(model: Any) -> Score:
        with TemporaryDirectory() as folder:
            of_all(model, output_path=folder)
            (file,) = Path(folder).glob("*.jsonl")
            lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        return mean_score([of_query(line["query_id"], line["results"]) for line in lines])

    return EncoderTests(measure, MRR, evaluate, method)


def _triplet_tests(
    evaluators: _Evaluators, texts: Sequence[Sequence[str]], method: str | None
) -> EncoderTests:
    def of_rows(*rows: Sequence[str]) -> Any:
        triplets = [(row[0], row[1], negative) for row in rows for negative in row[2:]]
        return evaluators.triplets(*map(list, zip(*triplets, strict=True)), **QUIET)

    def evaluate(model: Any) -> Score:
        of_rows(*texts)(model)  # reads all texts in batches
        shares = [primary(of_rows(row), model) for row in texts]
        return mean_score([(share, share) for share in shares], has_flags=len(texts[0]) == 3)

    measure = "triplets whose positive is nearer than the negative"
    return EncoderTests(measure, "accuracy % (1 - accuracy)", evaluate, method)
