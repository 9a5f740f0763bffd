"""Compare the BGE models of bge_encoders.py on tasks of MTEB.

    python examples/public/mteb_tasks.py OUT [TASK...]

First run bge_encoders.py with the same OUT. Needs `pip install mteb`, which downloads its tests and
keeps the full results in OUT-mteb. Documents of NFCorpus are also samples of the repair.
"""

import sys
from pathlib import Path

import mteb  # type: ignore[import-not-found]
from sentence_transformers import SentenceTransformer

TASKS = ("Banking77Classification", "FiQA2018", "NFCorpus", "STSBenchmark")
MODELS = {
    "base": "BAAI/bge-base-en-v1.5",
    "finance": "philschmid/bge-base-financial-matryoshka",
    "medicine": "abhinand/MedEmbed-base-v0.1",
}


def main(out: str, *names: str) -> None:
    """Print the main score of each task, in per cent."""
    tasks = [mteb.get_task(name) for name in names or TASKS]
    models = MODELS | {"merged": f"{out}-merged", "repaired": out}
    print(f"{'model':10}", *(f"{task.metadata.name:>24}" for task in tasks))
    for name, folder in models.items():
        cache = mteb.ResultCache(Path(f"{out}-mteb", name))
        results = mteb.evaluate(SentenceTransformer(folder), tasks=tasks, cache=cache)
        scores = {result.task_name: 100 * result.get_score() for result in results.task_results}
        print(f"{name:10}", *(f"{scores[task.metadata.name]:24.1f}" for task in tasks), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:]) if {*sys.argv[1:]} - {"-h", "--help"} else sys.exit(__doc__)
