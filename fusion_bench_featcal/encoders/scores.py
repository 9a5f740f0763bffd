"""Scores of encoders by the evaluators of sentence-transformers, with a value of each row.

An evaluator returns one figure of all rows, and intervals need a value of each row. Where the
figure is a mean over rows it is the mean's term, else (rank correlation, average precision) the
row's jackknife pseudo-value. The mean of the values is the evaluator's figure.
"""

import copy
import json
import logging
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score
from torch.nn import functional as F

from fusion_bench_featcal.data.draws import spread
from fusion_bench_featcal.data.embeddings import class_logits
from fusion_bench_featcal.data.labels import class_numbers
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.encoders.library import of_pairs, of_terms, of_texts, of_vectors, st
from fusion_bench_featcal.encoders.texts import TARGETS, calls_of, columns_of
from fusion_bench_featcal.modules.models import Modes

Label = Callable[[int], str]
QUIET: dict[str, Any] = {"write_csv": False, "show_progress_bar": False}
NEGATIVES = 9
RANKS = 10
MRR = "accuracy@1 % (1 - MRR@10)"


@dataclass(frozen=True)
class EncoderTests:
    """Test rows of an encoder.

    Attributes:
        measure: What is measured on them.
        columns: Title of the columns with accuracy and loss.
        evaluate: Returns the score of a model.
        method: The method that reads all texts, if queries and documents are read alike.
    """

    measure: str
    columns: str
    evaluate: Callable[[Any], Score]
    method: str | None = None

    def score(self, model: Any) -> Score:
        """Score a model. Each text is embedded once."""
        with _unchanged(model) as twin, _quiet():
            name = "predict" if isinstance(model, st.CrossEncoder) else "encode"
            setattr(twin, name, _Memory(getattr(model, name)))
            if self.method:
                twin.encode_query = twin.encode_document = getattr(twin, self.method)
            return self.evaluate(twin)


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
    targets = _Targets.of(rows, label)
    if targets.kind == "lists":
        return f"its column {targets.name} has lists, not one value per row"
    if isinstance(merged, st.CrossEncoder):
        return _reranker_tests(merged, texts, targets, label)
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
    targets = _Targets.of(rows, label)
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

    with _unchanged(names_by) as twin:
        embeddings = embed(twin, "encode", [prompt.replace("{}", name) for name in names])
    head = F.normalize(embeddings.float(), dim=-1)

    def evaluate(model: Any) -> Score:
        logits = class_logits(embed(model, method, texts).float(), head)
        correct = logits.argmax(dim=-1) == numbers
        losses = F.cross_entropy(logits.double(), numbers, reduction="none")
        return Score(correct.double().mean().item(), losses, correct)

    return EncoderTests("texts nearest to their class name", "accuracy % (loss)", evaluate)


def primary_figure(evaluator: Any, model: Any) -> tuple[str, float]:
    """Return the name and value of a library evaluator's main figure, and leave the model as is."""
    with _unchanged(model) as twin:
        figures = evaluator(twin)
    if not isinstance(figures, dict):
        return "score", float(figures)
    name, own = evaluator.primary_metric, f"{getattr(evaluator, 'name', '')}_"
    return name.removeprefix(own), float(figures[name])


# --- targets ---


class _Targets(NamedTuple):
    """Labels or scores of rows.

    Attributes:
        name: Their column.
        values: One for each row, or none.
        kind: `none`, `binary` (0 and 1), `scores`, `classes` (whole numbers), `words` or `lists`.
    """

    name: str
    values: Sequence[Any]
    kind: str

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], label: Label) -> "_Targets":
        """Return the first column of targets that has values."""
        for name in TARGETS[:-1]:
            values = [_plain(row.get(name)) for row in rows]
            if all(value is None for value in values):
                continue
            if None in values:
                raise ValueError(
                    f"{label(values.index(None))} has no {name}, but other rows have one: give it, "
                    "leave the row out, or evaluate nothing (--no-eval)"
                )
            kind = _kind(name, values)
            return cls(name, [*map(int, values)] if kind == "binary" else values, kind)
        return cls("", [], "none")

    @property
    def are_classes(self) -> bool:
        """Whether each value is a word or a whole number, as a float or not."""
        return all(value == value // 1 for value in self.values if isinstance(value, float))

    @property
    def all_belong(self) -> bool:
        """Whether the texts of each row belong together."""
        return self.kind == "none" or (self.kind == "binary" and all(self.values))


def _plain(value: Any) -> Any:
    """Return a value as Python has it, and None for NaN, which tables have in empty cells."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and value != value else value


def _kind(name: str, values: Sequence[Any]) -> str:
    if not all(isinstance(value, Hashable) for value in values):
        return "lists"
    if not all(isinstance(value, int | float) for value in values):
        return "words"
    if {*values} <= {0, 1}:
        return "binary"
    has_floats = any(isinstance(value, float) for value in values)
    return "scores" if has_floats or name.startswith("score") else "classes"


def _too_few(targets: _Targets) -> str:
    """Return why targets are too alike for a figure without any one row, or an empty text."""
    rows, alike = len(targets.values), max(Counter(targets.values).values())
    if rows >= 4 and rows - alike >= 2:
        return ""
    return f"too few of its {rows} rows differ in {targets.name} (more by --eval)"


# --- embedding models ---


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
    merged: Any, texts: Sequence[Sequence[str]], targets: _Targets, method: str | None
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
    return _jackknifed(of_all, outputs, targets, "pairs by their similarity")


def _label_tests(
    evaluators: _Evaluators, texts: Sequence[str], targets: _Targets, method: str | None
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
        return _mean([of_query(line["query_id"], line["results"]) for line in lines])

    return EncoderTests(measure, MRR, evaluate, method)


def _triplet_tests(
    evaluators: _Evaluators, texts: Sequence[Sequence[str]], method: str | None
) -> EncoderTests:
    def of_rows(*rows: Sequence[str]) -> Any:
        triplets = [(row[0], row[1], negative) for row in rows for negative in row[2:]]
        return evaluators.triplets(*map(list, zip(*triplets, strict=True)), **QUIET)

    def evaluate(model: Any) -> Score:
        of_rows(*texts)(model)  # reads all texts in batches
        shares = [_primary(of_rows(row), model) for row in texts]
        return _mean([(share, share) for share in shares], has_flags=len(texts[0]) == 3)

    measure = "triplets whose positive is nearer than the negative"
    return EncoderTests(measure, "accuracy % (1 - accuracy)", evaluate, method)


# --- rerankers ---


def _reranker_tests(
    merged: Any, texts: Sequence[Sequence[str]], targets: _Targets, label: Label
) -> EncoderTests | str:
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

    return _jackknifed(of_all, outputs, targets, "pairs by their score")


def _pair_class_tests(
    merged: Any, texts: Sequence[Sequence[str]], targets: _Targets, label: Label
) -> EncoderTests | str:
    """Return tests of a reranker that chooses a class for each pair."""
    classes = [name for _, name in sorted(merged.transformers_model.config.id2label.items())]
    if targets.kind == "words" and all(name.startswith("LABEL_") for name in classes):
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
        return _mean([(float(value == 1), value) for value in values])

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


# --- figures ---


def _primary(evaluator: Any, model: Any) -> float:
    """Return an evaluator's figure, 0 where it is undefined because all similarities are equal."""
    figures = evaluator(model)
    return float(np.nan_to_num(figures[evaluator.primary_metric]))


def _mean(values: Sequence[tuple[float, float]], *, has_flags: bool = True) -> Score:
    """Return the score of rows, each with a share of right answers and a second figure."""
    right, second = torch.tensor(values, dtype=torch.float64).T
    return Score(right.mean().item(), 1 - second, right == 1 if has_flags else None)


def _jackknifed(
    of_all: Callable[[], Any], outputs: Callable[[Any], Any], targets: _Targets, measure: str
) -> EncoderTests | str:
    """Return tests by a figure that is no mean over rows.

    Args:
        of_all: Returns the library's evaluator of all rows, which keeps a model's similarity.
        outputs: Returns what the figure compares with the targets.
        targets: Labels of 0 and 1, or scores.
        measure: What is compared.
    """
    if reason := _too_few(targets):
        return reason
    name, title, figure = "average precision", "AP", average_precision_score
    if targets.kind != "binary":
        name, title, figure = "Spearman's correlation", "Spearman", _correlation
    values = np.array(targets.values)

    def evaluate(model: Any) -> Score:
        whole, found, rows = _primary(of_all(), model), outputs(model), np.arange(len(values))
        without = [figure(values[rows != row], found[rows != row]) for row in rows]
        shares = -(len(rows) - 1) * torch.tensor(without, dtype=torch.float64).nan_to_num()
        shares += whole - shares.mean()  # without the jackknife's correction of the figure
        return Score(max(whole, 0.0), 1 - shares, None)

    return EncoderTests(f"{measure} ({name})", f"{title} % (1 - {title})", evaluate)


def _correlation(values: Any, found: Any) -> float:
    return float(spearmanr(values, found).statistic)  # type: ignore[attr-defined]


# --- models ---


class _NoCard:
    """A model card that takes no figures."""

    def set_evaluation_metrics(self, *_: Any, **__: Any) -> None:
        """Leave the card as it is."""


@contextmanager
def _unchanged(model: Any) -> Iterator[Any]:
    """Yield a shallow copy of a model, whose evaluation leaves no trace in the model."""
    modes, twin = Modes.of(model), copy.copy(model)
    twin.model_card_data = _NoCard()
    try:
        yield twin
    finally:
        modes.restore(model)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of evaluators, which would be as long for each row, and their warnings."""
    logger = logging.getLogger("sentence_transformers")
    level = logger.level
    logger.setLevel(max(logging.WARNING, logger.getEffectiveLevel()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of figures that are undefined for some rows
            yield
    finally:
        logger.setLevel(level)


class _Memory:
    """Results of a method of a model, by the arguments that have an effect and by input."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read
        self._results = defaultdict[str, dict[Any, Any]](dict)

    def __call__(self, inputs: Sequence[Any], **arguments: Any) -> Any:
        used = [
            (name, value)
            for name, value in sorted(arguments.items())
            if name != "batch_size" and value is not None and value is not False
        ]
        results = self._results[repr(used)]
        keys = [text if isinstance(text, str) else tuple(text) for text in inputs]
        if new := sorted({*keys} - results.keys()):  # in an order that no process changes
            values = self._read(new, **{"show_progress_bar": False} | arguments)
            results.update(zip(new, values, strict=True))
        values = [results[key] for key in keys]
        if values[0].ndim > 1:  # a vector for each token
            return values
        return (torch if isinstance(values[0], torch.Tensor) else np).stack(values)
