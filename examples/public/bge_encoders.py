"""Merge and repair two embedding models that were tuned from BGE base: finance and medicine.

    python examples/public/bge_encoders.py OUT

Writes the models OUT-merged and OUT. The download has 1.3 GB. Needs the extra `encoders`. Not run
here: we estimate minutes on a CPU. The examples may be in the experts' training data, so that all
scores are optimistic.
"""

import sys
from typing import Any

from datasets import load_dataset
from sentence_transformers import SentenceTransformer

from fusion_bench_featcal.sentence_transformers import repair

BASE = "BAAI/bge-base-en-v1.5"
EXPERTS = {
    "finance": "philschmid/bge-base-financial-matryoshka",
    "medicine": "abhinand/MedEmbed-base-v0.1",
}
SAMPLES, TESTS = 64, 200


def finance() -> list[dict]:
    """Return questions on annual reports with the paragraph that answers each."""
    rows: Any = load_dataset("philschmid/finanical-rag-embedding-dataset", split="train")
    rows = rows.shuffle(seed=0).select(range(SAMPLES + TESTS))
    return [{"query": row["question"], "document": row["context"]} for row in rows]


def medicine() -> list[dict]:
    """Return titles of NFCorpus's articles with their abstracts."""
    rows: Any = load_dataset("mteb/nfcorpus", "corpus", split="corpus")
    rows = rows.shuffle(seed=0).select(range(SAMPLES + TESTS))
    return [{"query": row["title"], "document": row["text"]} for row in rows]


def main(out: str) -> None:
    """Merge, repair and score, and save both models."""
    base = SentenceTransformer(BASE)
    experts = {task: SentenceTransformer(name) for task, name in EXPERTS.items()}
    merged = SentenceTransformer.merge([*experts.values()], method="linear")
    pairs = {"finance": finance(), "medicine": medicine()}
    repaired = repair(
        merged,
        base=base,
        experts=experts,
        texts={task: rows[:SAMPLES] for task, rows in pairs.items()},
        evaluator={task: rows[SAMPLES:] for task, rows in pairs.items()},  # MRR@10
    )
    merged.save_pretrained(f"{out}-merged")
    repaired.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:]) if {*sys.argv[1:]} - {"-h", "--help"} else sys.exit(__doc__)
