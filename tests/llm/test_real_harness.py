"""The LM Evaluation Harness itself, on a tiny Llama and a task made on the spot."""

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
TASK = f"""
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: rows.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
output_type: multiple_choice
doc_to_choice: {WORDS}
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
RIGHT = 3  # of eight


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


@pytest.mark.parametrize(("limit", "rows"), [(None, 8), (4, 4)])
def test_accuracy_is_that_of_the_model(limit, rows, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    model: Any = llama_model().eval()
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained("tokenizer")
    lines = [
        {"question": question, "answer": word if number < RIGHT else "a" if word != "a" else "b"}
        for number, (question, word) in enumerate(questions_with_next_words(model, tokenizer))
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    Path("tiny_choice.yaml").write_text(TASK)
    pool = LMEvalTaskPool(
        {"tiny_choice": "acc,none"}, tokenizer="tokenizer", include_path=str(tmp_path)
    )
    pool.batch_size, pool.limit = 3, limit
    assert pool.evaluate(model)["tiny_choice"]["accuracy"] == RIGHT / rows
