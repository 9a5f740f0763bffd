"""Texts of repairs of encoders: rows as the library reads them, and careless inputs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertTokenizer

st = pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
pytest.importorskip("mergekit", reason="extra `encoders`")
pytest.importorskip("fusion_bench_featcal.sentence_transformers")

from sentence_models import (  # noqa: E402
    TASKS,
    TEXTS,
    WIDTH,
    backbone,
    equal,
    repaired_by,
    sentence_model,
    texts_of,
    tuned,
)
from sentence_transformers.base.modules import (  # noqa: E402
    Router,
    Transformer,
)
from sentence_transformers.sentence_transformer.modules import (  # noqa: E402
    Pooling,
    StaticEmbedding,
    WordWeights,
)

from fusion_bench_featcal import Plus  # noqa: E402
from fusion_bench_featcal.encoders.texts import calls_of, read_texts, record_batches  # noqa: E402
from fusion_bench_featcal.errors import CalibrationError  # noqa: E402
from fusion_bench_featcal.sentence_transformers import (  # noqa: E402
    calibrate_encoder,
)
from fusion_bench_featcal.settings import Options  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ci]  # see conftest.py


# --- texts ---


def test_rows_are_read_as_the_library_reads_them(encoders: Any) -> None:
    """In all forms of a pair, the first text gets the prompt of queries, the other of documents."""
    pairs = [*zip(texts_of(5, 12), texts_of(6, 12), strict=True)]
    columns = {"anchor": [a for a, _ in pairs], "positive": [b for _, b in pairs]}
    forms: list[Any] = [
        pairs,
        [[*pair] for pair in pairs],
        [{"question": a, "label": 1, "answer": b, "score": 0.5} for a, b in pairs],
        {**columns, "label": [0] * len(pairs)},
    ]
    models = [repaired_by(encoders, texts=dict.fromkeys(TASKS, rows)) for rows in forms]
    assert all(equal(models[0], model) for model in models[1:])
    model = encoders[2]
    written = {"encode": [f"query : {a}" for a, _ in pairs] + [f"passage : {b}" for _, b in pairs]}
    with_prompts = read_texts(model, dict.fromkeys(TASKS), dict.fromkeys(TASKS, pairs))["math"]
    tokens = [
        [ids for batch in record_batches(model, calls) for ids in batch["input_ids"].tolist()]
        for calls in (with_prompts, written)
    ]
    assert {tuple(i for i in ids if i) for ids in tokens[0]} == {
        tuple(i for i in ids if i) for ids in tokens[1]
    }


@pytest.mark.parametrize(
    ("row", "calls"),
    [
        ("a", [("encode", "a")]),
        ({"text": "a", "labels": [1, 2]}, [("encode", "a")]),
        (["a", "b"], [("encode_query", "a"), ("encode_document", "b")]),
        (
            {"anchor": "a", "positive": "b", "negative": "c"},
            [("encode_query", "a"), ("encode_document", "b"), ("encode_document", "c")],
        ),
        ({"sentence1": "a", "sentence2": "b", "score": 0.5}, [("encode", "a"), ("encode", "b")]),
    ],
)  # fmt: skip
def test_methods_of_rows(encoders: Any, row: Any, calls: Any) -> None:
    assert calls_of(encoders[2], "texts['math'][0]", row) == calls


def test_one_column_named_as_a_prompt_gets_it(encoders: Any) -> None:
    for name, prompt in (("query", "query : "), ("passage", "passage : ")):
        named = {task: [{name: text} for text in TEXTS[task]] for task in TASKS}
        written = {task: [prompt + text for text in TEXTS[task]] for task in TASKS}
        assert equal(repaired_by(encoders, texts=named), repaired_by(encoders, texts=written))


def test_triplets_of_a_reranker_are_pairs(plain: str) -> None:
    torch.manual_seed(0)
    base = st.CrossEncoder(plain, num_labels=1, device="cpu")
    models = base, {task: tuned(base, n) for n, task in enumerate(TASKS)}, tuned(base, 3)
    triplets = [*zip(texts_of(1, 12), texts_of(2, 12), texts_of(3, 12), strict=True)]
    pairs = [pair for a, b, c in triplets for pair in ((a, b), (a, c))]
    read = [read_texts(base, models[1], dict.fromkeys(TASKS, rows)) for rows in (triplets, pairs)]
    assert read[0] == read[1]
    with pytest.raises(TypeError, match=r"^texts\['math'\]\[0\] is a single text, but a CrossEnc"):
        repaired_by(models)


def test_lower_casing_is_the_librarys(plain: str) -> None:
    models = []
    for lower, change in ((True, str.upper), (False, str.lower)):
        base = sentence_model(plain, lower=lower)
        experts = {task: tuned(base, seed) for seed, task in enumerate(TASKS, 1)}
        texts = {task: [*map(change, TEXTS[task])] for task in TASKS}
        models.append(repaired_by((base, experts, tuned(base, 3)), texts=texts))
    assert equal(*models)


def test_word_weights_stay(plain: str) -> None:
    vocabulary = list(BertTokenizer.from_pretrained(plain).get_vocab())
    weights = WordWeights(vocabulary, {"lamp": 0.5})
    base = st.SentenceTransformer(
        modules=[Transformer(plain), weights, Pooling(WIDTH)], device="cpu"
    )
    experts = {task: tuned(base, seed) for seed, task in enumerate(TASKS, 1)}
    merged = st.SentenceTransformer.merge([*experts.values()], "linear")
    model = repaired_by((base, experts, merged))
    assert equal(model[1], merged[1]) and model[1].word_weights == {"lamp": 0.5}


def test_the_log_is_there_and_options_are_those_of_calibrate(encoders: Any) -> None:
    base, experts, merged = encoders
    calls = read_texts(merged, experts, TEXTS, seed=7)
    result = calibrate_encoder(merged, base, experts, calls, Plus(), Options(seed=7))
    assert set(result.log.final_drift) == {*TASKS}
    assert not equal(result.model, repaired_by(encoders))
    assert equal(result.model, repaired_by(encoders, seed=7))


# --- careless inputs ---


def changed_row(row: Any) -> dict[str, Any]:
    return {**TEXTS, "math": [*TEXTS["math"][:3], row]}


@pytest.mark.parametrize(("texts", "message"), [
    ({**TEXTS, "math": "a text"},
     r"texts\['math'\] is a single example, but must be a list: \[example"),
    ({**TEXTS, "math": {"query": "a", "answer": "b"}}, r"texts\['math'\] is a single example"),
    ({**TEXTS, "math": []}, r"texts\['math'\] is empty: each expert needs texts"),
    ({"math": ["a"]}, r"there are texts for \['math'\], but experts \['math', 'code'\]: each"),
    (changed_row(None), r"texts\['math'\]\[3\]\[0\] is None, not a text: leave it out"),
    (changed_row(7), r"texts\['math'\]\[3\]\[0\] is 7, not a text: leave it out"),
    (changed_row(("a", "b \ud800")), r"texts\['math'\]\[3\]\[1\]: .*surrogates not allowed. Corr"),
    (changed_row([]), r"texts\['math'\]\[3\] is \[\], which contains no text"),
    (changed_row({"label": 1}), r"texts\['math'\]\[3\] is \{'label': 1\}, which contains no text"),
    (changed_row(("a", 0.5)), r"texts\['math'\]\[3\]\[1\] is 0.5, not a text: leave it out"),
    (changed_row({"query": "a", "pos": ["b"]}),
     r"texts\['math'\]\[3\]\['pos'\] is not a known name"),
    (changed_row({"text": "a", "rank": 2}), r"texts\['math'\]\[3\]\['rank'\] is not a known na"),
    (changed_row({"query_id": "q7"}), r"texts\['math'\]\[3\]\['query_id'\] is not a known na"),
    (changed_row({"query": "a", "document": "b", "lang": "en"}),
     r"texts\['math'\]\[3\]\['lang'\] is not a known name of a text \(query, .*a tuple of its"),
    ([TEXTS["math"]] * 2, "texts must be a mapping of tasks, not a list"),
])  # fmt: skip
def test_careless_texts(encoders: Any, texts: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        repaired_by(encoders, texts=texts)


def test_careless_models(encoders: Any, plain: str, tmp_path: Path) -> None:
    base, experts, _ = encoders
    reranker = st.CrossEncoder(plain, num_labels=1, device="cpu")
    reranker.save_pretrained(str(tmp_path / "reranker"))
    narrow = backbone(tmp_path / "narrow", width=16)
    modules = [Transformer(narrow), Pooling(16)]
    other_words = copy.deepcopy(base)
    other_words.tokenizer.add_tokens(["dragon"])
    routes = Router.for_query_document([Transformer(plain)], [Transformer(plain)])
    static = StaticEmbedding(base.tokenizer, embedding_dim=8)

    def model(*modules: nn.Module) -> Any:
        return st.SentenceTransformer(modules=[*modules], device="cpu")

    code = experts["code"]
    careless: list[tuple[dict[str, Any], str]] = [
        ({"merged": "merged"}, r"merged is 'merged', not a model: \['SentenceTransformer'"),
        ({"experts": {}}, r"there are texts for \['math', 'code'\], but experts \[\]"),
        ({"experts": [*experts.values()]}, "experts must be a mapping of tasks, not a list"),
        ({"device": "cuda:99"}, "device=cuda:99"),
        ({"experts": {"math": reranker, "code": code}},
         r"experts\['math'\] is a CrossEncoder, but merged is a SentenceTransformer"),
        ({"experts": {"math": tmp_path / "reranker", "code": code}},
         r"experts\['math'\] is a CrossEncoder, but merged is a SentenceTransformer"),
        ({"experts": {"math": model(*modules), "code": code}},
         r"experts\['math'\]: tensor .* has shape \(\d+, 16\), but the merged model's has"),
        ({"base": model(*modules)}, r"base: tensor .* has shape \(\d+, 16\)"),
        ({"base": other_words},
         r"base has a different vocabulary .*: '.+' is token \w+, but in merged"),
        ({"experts": {"math": model(Transformer(plain), Pooling(WIDTH, "cls")), "code": code}},
         r"experts\['math'\] has the modules \['Transformer', 'Pooling cls'\], but merged has"),
        ({"merged": model(routes, Pooling(WIDTH))}, "merged has a Router: only models with one"),
        ({"merged": model(static)}, r"merged has 0 transformers in \['StaticEmbedding'\], but"),
        ({"wrong": 1}, r"Options.__init__\(\) got an unexpected keyword argument 'wrong'"),
    ]  # fmt: skip
    for changes, message in careless:
        with pytest.raises((TypeError, ValueError, CalibrationError), match=f"^{message}"):
            repaired_by(encoders, **changes)
