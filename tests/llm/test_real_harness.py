"""The LM Evaluation Harness itself, on a tiny Llama and tasks made on the spot."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import llama_model, word_tokenizer

from fusion_bench_featcal.tasks import LMEvalTaskPool

pytest.importorskip("lm_eval", reason="not installed: nox -s llm")
pytestmark = pytest.mark.llm

WORDS = list("abcdefghijklmnopqrst")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
"""
KINDS = {
    "tiny_choice": f"""
output_type: multiple_choice
doc_to_choice: {WORDS}
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""",
    "tiny_writing": """
output_type: generate_until
generation_kwargs: {until: ["@"], max_gen_toks: 1, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}
RIGHT = 3  # of eight


@pytest.fixture(scope="module")
def model() -> Any:
    return llama_model().eval()


def questions_with_next_words(model: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Eight questions whose likeliest next token, by the model's logits, is one of `WORDS`."""
    pairs = []
    for words in product(WORDS[:6], repeat=2):
        ids = torch.tensor([tokenizer(" ".join(words))["input_ids"]])
        with torch.no_grad():
            word = tokenizer.decode([int(model(ids).logits[0, -1].argmax())])
        if word in WORDS:
            pairs.append((" ".join(words), word))
    assert len(pairs) >= 8 and len({word for _, word in pairs[:8]}) > 1
    return pairs[:8]


@pytest.fixture(scope="module")
def pool(tmp_path_factory, model) -> Any:
    """A pool on two tasks, in which the model is right `RIGHT` times of eight."""
    folder = tmp_path_factory.mktemp("tasks")
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    rows = [
        {"question": question, "answer": word if number < RIGHT else "a" if word != "a" else "b"}
        for number, (question, word) in enumerate(questions_with_next_words(model, tokenizer))
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, kind in KINDS.items():
        text = TASK.format(name=name, file=folder / "rows.jsonl") + kind
        (folder / f"{name}.yaml").write_text(text)
    return LMEvalTaskPool(
        {"tiny_choice": "acc,none", "tiny_writing": "exact_match,none"},
        tokenizer=str(folder / "tokenizer"),
        include_path=str(folder),
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(("limit", "rows"), [(None, 8), (4, 4)])
def test_accuracy_is_that_of_the_model(pool, model, limit, rows):
    pool.batch_size, pool.limit = 3, limit
    report = pool.evaluate(model)
    assert {task: result["accuracy"] for task, result in report.items()} == dict.fromkeys(
        ("tiny_choice", "tiny_writing"), RIGHT / rows
    )
