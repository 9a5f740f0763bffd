"""Scores of encoders are figures of the library's evaluators, with values of rows."""

import copy
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from transformers import BertForMaskedLM

st = pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
pytest.importorskip("mergekit", reason="extra `encoders`")

import sentence_models as tiny  # noqa: E402
from sentence_models import figure  # noqa: E402
from sentence_transformers.cross_encoder import evaluation as of_pairs  # noqa: E402
from sentence_transformers.multi_vector_encoder import evaluation as of_vectors  # noqa: E402
from sentence_transformers.sentence_transformer import evaluation as of_texts  # noqa: E402
from sentence_transformers.sparse_encoder import evaluation as of_terms  # noqa: E402
from sklearn.metrics import average_precision_score  # noqa: E402

from fusion_bench_featcal.encoders.scores import class_name_scorer, encoder_scorer  # noqa: E402
from fusion_bench_featcal.errors import CalibrationError  # noqa: E402
from fusion_bench_featcal.results.statistics import NORMAL  # noqa: E402

BETA = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
pytestmark = [pytest.mark.slow, pytest.mark.ci, BETA]  # see conftest.py

EMBEDDERS = ("SentenceTransformer", "SparseEncoder", "MultiVectorEncoder")
COUNT = 32
FIRST, SECOND, THIRD = (tiny.texts_of(seed, COUNT) for seed in range(3))
PAIR = {"query": FIRST, "answer": SECOND}
RANDOM = random.Random(0)
LABELS = [RANDOM.choice(tiny.NOUNS[:5]) for _ in range(COUNT)]
BINARY = [RANDOM.randrange(2) for _ in range(COUNT)]
SCORES = [RANDOM.choice([0.0, 0.5, 2.5, 4.0, 5.0]) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One model of each class, a reranker that chooses a class, and one in bfloat16."""
    plain = tiny.backbone(tmp_path_factory.mktemp("bert"))
    mlm = tiny.backbone(tmp_path_factory.mktemp("mlm"), BertForMaskedLM)
    torch.manual_seed(1)
    models = {name: make(plain, mlm) for name, (make, _) in tiny.MAKERS.items()}
    models["classes"] = st.CrossEncoder(plain, num_labels=3, device="cpu")
    models["cosine"] = tiny.sentence_model(plain)
    models["bf16"] = tiny.sentence_model(plain).to(torch.bfloat16)
    return models


def rows(**columns: Any) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def row_name(number: int) -> str:
    return f"line {number + 1}"


def score(model: Any, data: Any) -> Any:
    tests = encoder_scorer(model, data, row_name)
    assert not isinstance(tests, str), tests
    return tests.score(model)


def reason(model: Any, data: list[dict[str, Any]]) -> str:
    tests = encoder_scorer(model, data, row_name)
    assert isinstance(tests, str)
    return tests


DENSE = ("SentenceTransformer", "cosine", "bf16")
RETRIEVAL: dict[str, Any] = {
    **dict.fromkeys(DENSE, of_texts.InformationRetrievalEvaluator),
    "SparseEncoder": of_terms.SparseInformationRetrievalEvaluator,
    "MultiVectorEncoder": of_vectors.MultiVectorInformationRetrievalEvaluator,
}
TRIPLETS: dict[str, Any] = {
    "SentenceTransformer": of_texts.TripletEvaluator,
    "SparseEncoder": of_terms.SparseTripletEvaluator,
    "MultiVectorEncoder": of_vectors.MultiVectorTripletEvaluator,
}


@pytest.mark.parametrize("name", ["cosine", "bf16", "SparseEncoder", "MultiVectorEncoder"])
def test_a_labelled_text_looks_for_its_label_among_all_other_texts(models, name) -> None:
    """One evaluator for each text, with the other texts as its corpus. One label occurs once."""
    model, labels = models[name], ["alone", *LABELS[1:]]
    result = score(model, rows(text=FIRST, label=labels))
    right, inverse = [], []
    for query in range(1, COUNT):
        corpus = {f"{n:03}": text for n, text in enumerate(FIRST) if n != query}
        relevant = {n for n in corpus if labels[int(n)] == labels[query]}
        one = RETRIEVAL[name]({"q": FIRST[query]}, corpus, {"q": relevant}, write_csv=False)
        figures = one(model)
        right += [value for name, value in figures.items() if name.endswith("_accuracy@1")]
        inverse += [value for name, value in figures.items() if name.endswith("_mrr@10")]
    assert result.correct.tolist() == right and result.accuracy == np.mean(right)
    assert result.losses.tolist() == pytest.approx([1 - value for value in inverse], abs=1e-12)
    assert 0 < result.accuracy < 1 and len({*inverse}) > 3


@pytest.mark.parametrize("kind", [int, float, lambda n: f"id-{n}", lambda n: n % 2 == 0])
def test_labels_are_of_any_kind(models: dict[str, Any], kind: Callable[[int], Any]) -> None:
    numbers = [tiny.NOUNS.index(word) for word in LABELS]
    labels = [kind(number) for number in numbers]
    result = score(models["cosine"], rows(text=FIRST, label=labels))
    in_words = score(models["cosine"], rows(text=FIRST, labels=[f"a {one}" for one in labels]))
    assert torch.equal(result.losses, in_words.losses) and len(result.losses) == COUNT


def test_equal_texts_are_neighbours(models: dict[str, Any]) -> None:
    """A text does not find itself, but its copy, and ties go to the earlier row."""
    texts, labels = [*FIRST[:6], *FIRST[:6]], [*"aabbcc", *"aabbcc"]
    result = score(models["cosine"], rows(text=texts, label=labels))
    assert result.accuracy == 1 and result.loss == 0
    labels = [*"abcdef", *"gbcdef"]  # rows 0 and 6 alone have other labels: no queries
    assert len(score(models["cosine"], rows(text=texts, label=labels)).losses) == 10
    texts, labels = [FIRST[0]] * 4 + FIRST[1:3], [*"abbaxx"]
    found = score(models["cosine"], rows(text=texts, label=labels))
    assert found.correct.tolist()[:4] == [False, False, False, True]
    assert found.losses.tolist()[:4] == pytest.approx([2 / 3, 1 / 2, 1 / 2, 0])


@pytest.mark.parametrize("name", EMBEDDERS)
def test_pairs_look_for_their_passage(models: dict[str, Any], name: str) -> None:
    model = models[name]
    queries, passages = [*FIRST[:24], *FIRST[:8]], [*SECOND[:20], *SECOND[:4], *SECOND[10:18]]
    data = rows(query=queries, answer=passages)
    corpus = {f"{n:02}": text for n, text in enumerate(dict.fromkeys(passages))}
    pairs = {*zip(queries, passages, strict=True)}
    relevant = {
        str(n): {key for key, text in corpus.items() if (query, text) in pairs}
        for n, query in enumerate(queries)
    }
    asked = {str(n): query for n, query in enumerate(queries)}
    evaluator = RETRIEVAL[name](asked, corpus, relevant, write_csv=False)
    for more in ({}, {"label": 1}, {"label": 1.0}):
        result = score(model, [row | more for row in data])
        assert result.accuracy == pytest.approx(figure(evaluator, model, "_accuracy@1"), abs=1e-12)
        assert 1 - result.loss == pytest.approx(figure(evaluator, model, "_mrr@10"), abs=1e-12)
        assert len(result.losses) == COUNT and result.correct.double().mean() == result.accuracy


@pytest.mark.parametrize("name", EMBEDDERS)
def test_triplets(models: dict[str, Any], name: str) -> None:
    model, columns = models[name], [FIRST, SECOND, THIRD]
    result = score(model, rows(anchor=FIRST, positive=SECOND, negative=THIRD))
    expected = figure(TRIPLETS[name](*columns), model, "_accuracy")
    assert result.accuracy == pytest.approx(expected, abs=1e-7) and 0 < expected < 1
    assert torch.equal(1 - result.losses, result.correct.double())
    assert result.correct.double().mean() == result.accuracy
    more = rows(anchor=FIRST, positive=SECOND, negative_1=THIRD, negative_2=THIRD[::-1])
    twice = [*FIRST, *FIRST], [*SECOND, *SECOND], [*THIRD, *THIRD[::-1]]
    result, expected = score(model, more), figure(TRIPLETS[name](*twice), model, "_accuracy")
    assert result.accuracy == pytest.approx(expected, abs=1e-7) and result.correct is None


def jackknife(score_rows: Callable[[list[int]], float]) -> np.ndarray:
    """Pseudo-values by their definition."""
    every = [*range(COUNT)]
    whole = score_rows(every)
    without = [score_rows([n for n in every if n != row]) for row in every]
    return np.array([COUNT * whole - (COUNT - 1) * one for one in without])


JACKKNIFED: list[tuple[str, str, list[Any], Any, str]] = [
    ("SentenceTransformer", "score", SCORES, of_texts.EmbeddingSimilarityEvaluator, "spearman_dot"),
    ("bf16", "label", SCORES, of_texts.EmbeddingSimilarityEvaluator, "spearman_cosine"),
    ("cosine", "label", BINARY, of_texts.BinaryClassificationEvaluator, "_ap"),
    ("SparseEncoder", "score", SCORES, of_terms.SparseEmbeddingSimilarityEvaluator, "spearman_dot"),
    ("SparseEncoder", "label", BINARY, of_terms.SparseBinaryClassificationEvaluator, "_ap"),
    ("CrossEncoder", "label", SCORES, of_pairs.CrossEncoderCorrelationEvaluator, "spearman"),
    ("CrossEncoder", "label", BINARY, of_pairs.CrossEncoderClassificationEvaluator, "precision"),
]


@pytest.mark.parametrize(("name", "column", "values", "evaluator", "ending"), JACKKNIFED)
def test_correlations_have_jackknife_values(models, name, column, values, evaluator, ending):
    model, pairs = models[name], [*zip(FIRST, SECOND, strict=True)]
    ending = "average_precision" if ending == "precision" else ending

    def score_rows(chosen: list[int]) -> float:
        some, targets = [pairs[n] for n in chosen], [values[n] for n in chosen]
        sides = [some] if name == "CrossEncoder" else [*map(list, zip(*some, strict=True))]
        return figure(evaluator(*sides, targets, show_progress_bar=False), model, ending)

    expected, pseudo = score_rows([*range(COUNT)]), jackknife(score_rows)
    result = score(model, rows(sentence1=FIRST, sentence2=SECOND, **{column: values}))
    assert result.accuracy == pytest.approx(max(expected, 0), abs=1e-12)
    assert 1 - result.loss == pytest.approx(expected, abs=1e-12)
    # Embeddings in bfloat16 depend on the other texts of their batch.
    tolerance = 0.01 if name == "bf16" else 1e-6
    assert result.losses.std().item() == pytest.approx(pseudo.std(ddof=1), rel=tolerance)
    assert np.corrcoef(-result.losses, pseudo)[0, 1] == pytest.approx(1, abs=tolerance)
    half = NORMAL * result.losses.std().item() / math.sqrt(COUNT)
    assert 0.05 < half < 0.6 and result.correct is None
    equal = rows(sentence1=FIRST[:1] * 8, sentence2=SECOND[:1] * 8, **{column: values[:8]})
    result = score(model, equal)  # equal similarities are no correlation


@pytest.mark.parametrize("name", ["SentenceTransformer", "MultiVectorEncoder"])
def test_similarity_of_queries_and_documents(models: dict[str, Any], name: str) -> None:
    """The library's evaluators read both by `encode`, which a MultiVectorEncoder does not have."""
    model = models[name]
    methods = ("encode", "encode") if name[0] == "S" else ("encode_query", "encode_document")
    sides = [getattr(model, m)(t) for m, t in zip(methods, (FIRST, SECOND), strict=True)]
    similar = model.similarity_pairwise(*sides).numpy()
    correlation: Any = spearmanr(SCORES, similar)
    for column, values, expected in (
        ("score", SCORES, correlation.statistic),
        ("label", BINARY, average_precision_score(BINARY, similar)),
    ):
        result = score(model, rows(**PAIR, **{column: values}))
        assert 1 - result.loss == pytest.approx(expected, abs=1e-12) and result.loss != 1
        assert result.accuracy == pytest.approx(max(expected, 0), abs=1e-12)


def test_equal_similarities_are_no_correlation(models: dict[str, Any]) -> None:
    data = rows(sentence1=FIRST[:1] * 8, sentence2=SECOND[:1] * 8, score=SCORES[:8])
    result = score(models["cosine"], data)
    assert result.accuracy == 0 and result.losses.tolist() == [1] * 8


def test_classes_of_a_reranker(models: dict[str, Any]) -> None:
    model, labels = models["classes"], [n % 3 for n in range(COUNT)]
    pairs = [[*pair] for pair in zip(FIRST, SECOND, strict=True)]
    result = score(model, rows(premise=FIRST, hypothesis=SECOND, label=labels))
    evaluator = of_pairs.CrossEncoderClassificationEvaluator(pairs, labels)
    assert result.accuracy == pytest.approx(figure(evaluator, model, "f1_micro"), abs=1e-12)
    assert result.correct.tolist() == (model.predict(pairs).argmax(1) == labels).tolist()
    assert torch.equal(result.losses, 1 - result.correct.double())
    floats = rows(premise=FIRST, hypothesis=SECOND, label=[*map(float, labels)])
    assert torch.equal(score(model, floats).correct, result.correct)
    named, names = copy.deepcopy(model), ("no", "maybe", "yes")
    named.transformers_model.config.id2label = dict(enumerate(names))
    words = rows(premise=FIRST, hypothesis=SECOND, label=[names[n].upper() for n in labels])
    assert torch.equal(score(named, words).correct, result.correct)
    assert "has words, but the model's classes have no names" in reason(model, words)
    words[3]["label"] = "never"
    with pytest.raises(
        CalibrationError, match=r"^line 4: label 'never' is not one of the 3 classes"
    ):
        encoder_scorer(named, words, row_name)
    for more in ({}, {"score": SCORES}):
        assert "among 3 classes, but its examples" in reason(model, rows(**PAIR, **more))


def test_reranking(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A passage competes with nine that are not paired with its query, the same in each run."""
    model = models["CrossEncoder"]
    queries, passages = [*FIRST[:12], *FIRST[:6], *FIRST[12:26]], [*SECOND[:18], *SECOND[4:18]]
    own = {*zip(queries, passages, strict=True)}
    predict, read = model.predict, dict[tuple[str, str], float]()

    def recording(pairs: list[tuple[str, str]], **options: Any) -> Any:
        assert read.keys().isdisjoint(pairs)  # each pair is read once
        found = predict(pairs, **options)
        read.update(zip(pairs, found.tolist(), strict=True))
        return found

    monkeypatch.setattr(model, "predict", recording)
    tests = encoder_scorer(model, rows(query=queries, passage=passages), row_name)
    assert not isinstance(tests, str)
    result: Any = tests.score(model)
    for number, (query, passage) in enumerate(zip(queries, passages, strict=True)):
        mine = {other: value for (first, other), value in read.items() if first == query}
        if queries.count(query) == 1:
            assert len(mine) == 10 and [p for p in mine if (query, p) in own] == [passage]
            rank = sum(value >= mine[passage] for value in mine.values())
            assert result.losses[number].item() == pytest.approx(1 - 1 / rank)
    assert torch.equal(result.correct, result.losses == 0) and 0 < result.accuracy < 1
    assert len({other for _, other in read}) == 18  # spread over all passages
    read.clear()
    assert torch.equal(result.losses, tests.score(model).losses)


def test_triplets_of_a_reranker(models: dict[str, Any]) -> None:
    samples = rows(query=FIRST, positive=SECOND, negative=[[text] for text in THIRD])
    evaluator = of_pairs.CrossEncoderRerankingEvaluator(samples, at_k=10)
    expected = figure(evaluator, models["CrossEncoder"], "mrr@10")
    triplets = rows(query=FIRST, positive=SECOND, negative=THIRD)
    result = score(models["CrossEncoder"], triplets)
    assert 1 - result.loss == pytest.approx(expected, abs=1e-12)


def test_queries_and_documents_are_read_as_for_the_repair(models, monkeypatch) -> None:
    """Texts alone and pairs of sentences have no roles. Each text is read once."""
    model, read = copy.deepcopy(models["SentenceTransformer"]), list[tuple[Any, str]]()
    encode = model.encode

    def recording(inputs: list[str], **options: Any) -> Any:
        read.extend((options.get("prompt_name"), text) for text in inputs)
        return encode(inputs, **options)

    monkeypatch.setattr(model, "encode", recording)
    first, second = {*FIRST}, {*SECOND}
    sentences, alike = {"sentence1": FIRST, "sentence2": SECOND}, first | second
    cases: list[tuple[list[dict[str, Any]], dict[str | None, set[str]]]] = [
        (rows(text=FIRST, label=LABELS), {None: first}),
        (rows(query=FIRST, label=LABELS), {"query": first}),
        (rows(passage=FIRST, label=LABELS), {"document": first}),
        (rows(**sentences), {None: alike}),
        (rows(**sentences, score=SCORES), {None: alike}),
        (rows(question=FIRST, answer=SECOND), {"query": first, "document": second}),
        (rows(**PAIR, score=SCORES), {None: alike}),
    ]
    for data, expected in cases:
        read.clear()
        score(model, data)
        assert sorted(read, key=str) == sorted(
            ((prompt, text) for prompt, texts in expected.items() for text in texts), key=str
        )
    assert model.prompts == tiny.PROMPTS


@pytest.mark.parametrize("name", [*EMBEDDERS, "CrossEncoder"])
def test_a_model_is_left_as_it_was(models: dict[str, Any], name: str, caplog: Any) -> None:
    model = copy.deepcopy(models[name]).train()
    attributes, modes = {*vars(model)}, [module.training for module in model.modules()]
    card, logger = model.model_card_data, logging.getLogger("sentence_transformers")
    card.eval_results_dict.clear()  # of other tests
    card.training_logs.clear()
    with caplog.at_level(logging.INFO):
        for data in (rows(**PAIR), rows(**PAIR, negative=THIRD)):
            assert len(score(model, data).losses) == COUNT
    assert not [one for one in caplog.records if one.name.startswith("sentence_transformers")]
    assert not card.eval_results_dict and not card.training_logs
    assert model.model_card_data is card and {*vars(model)} == attributes and all(modes)
    assert [module.training for module in model.modules()] == modes
    assert logger.level == logging.NOTSET


# --- rows that are not scored ---

SAME = ["same"] * COUNT
NOT_SCORED: list[tuple[str, list[dict[str, Any]], str]] = [
    ("cosine", [], "it has no examples to score (give some with --eval)"),
    ("cosine", rows(text=FIRST),
     "single texts without labels (give labelled examples or pairs with --eval)"),
    ("cosine", rows(text=FIRST, label=range(COUNT)),
     "fewer than 2 of its 32 examples have both right"),
    ("cosine", rows(text=FIRST, label=SAME), "to choose from (give more with --eval)"),
    ("cosine", rows(text=FIRST[:2], label=[[1], [2]]), "its column label has lists, not one"),
    ("cosine", rows(query=FIRST, answer=SAME), "fewer than 2 of its 32 examples have both right"),
    ("cosine", rows(**PAIR, label=LABELS), "of texts with classes (label) have no"),
    ("cosine", rows(query=FIRST[:3], answer=SECOND[:3], label=[0, 1, 2]),
     "name the column `score` if"),
    ("cosine", rows(**PAIR, label=[0] * COUNT), "too few of its 32 examples differ in lab"),
    ("cosine", rows(**PAIR, label=[1] + [0] * 31), "too few of its 32 examples differ in"),
    ("cosine", rows(**PAIR, score=[2.5] * COUNT), "differ in score (give more with --eval)"),
    ("CrossEncoder", rows(**PAIR, score=[2.5] * COUNT), "differ in score"),
    ("CrossEncoder", rows(**PAIR, label=LABELS), "has words, but the model has one"),
    ("CrossEncoder", rows(query=FIRST, answer=SAME), "have passages of other queries to compete"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "text"), NOT_SCORED)
def test_rows_without_a_score(models: dict[str, Any], name: str, data: Any, text: str) -> None:
    assert text in reason(models[name], data)


def test_careless_rows(models: dict[str, Any]) -> None:
    data = rows(text=FIRST, label=[*LABELS[:3], math.nan, *LABELS[4:]])
    with pytest.raises(
        ValueError, match=r"^line 4 has no label, but other examples have one: add it"
    ):
        encoder_scorer(models["cosine"], data, row_name)
    with pytest.raises(TypeError, match=r"^line 1 is a single text, but a CrossEncoder reads"):
        encoder_scorer(models["CrossEncoder"], rows(text=FIRST, label=LABELS), row_name)


# --- class names ---


@pytest.mark.parametrize("name", ["SentenceTransformer", "SparseEncoder"])
def test_names_of_labels(models: dict[str, Any], name: str) -> None:
    model, other = models[name], tiny.tuned(models[name], 5)
    tests = class_name_scorer(rows(text=FIRST, label=LABELS), row_name, other, "of {} and")
    assert not isinstance(tests, str)
    result: Any = tests.score(model)
    names = sorted({*LABELS})
    head = other.encode([f"of {one} and" for one in names], convert_to_tensor=True).to_dense()
    texts = model.encode(FIRST, convert_to_tensor=True).to_dense()
    cosines = torch.nn.functional.cosine_similarity(texts[:, None], head[None], dim=-1).double()
    targets = torch.tensor([names.index(one) for one in LABELS])
    losses = torch.nn.functional.cross_entropy(cosines / 0.05, targets, reduction="none")
    torch.testing.assert_close(result.losses, losses, rtol=1e-4, atol=1e-4)
    assert torch.equal(result.correct, cosines.argmax(1) == targets)
    assert result.accuracy == result.correct.double().mean()


def test_labels_without_names(models: dict[str, Any]) -> None:
    def of(data: Any, model: Any = "cosine") -> Any:
        return class_name_scorer(data, row_name, models[model], "{}")

    for labels in ([*range(COUNT)], ["a"] * COUNT, [f"{n}" for n in range(COUNT)], [None] * COUNT):
        assert (
            of(rows(text=FIRST, label=labels))
            == "scoring by class names needs at least two labels in words"
        )
    assert "examples with one text" in of(rows(**PAIR, label=LABELS))
    text = of(rows(text=FIRST, label=LABELS), "MultiVectorEncoder")
    assert text == "a MultiVectorEncoder cannot embed class names"
