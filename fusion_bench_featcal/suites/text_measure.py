"""What the saved checkpoints of a text suite reach on the test split, before any calibration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fusion_bench_featcal.suites.plain_merges import (
    Accuracies,
    Weights,
    plain_merges,
    versions,
    with_average,
)
from fusion_bench_featcal.suites.text import load_text_split
from fusion_bench_featcal.tasks.text_generation import answer_texts
from fusion_bench_featcal.tasks.text_metrics import exact_matches
from fusion_bench_featcal.text_samples import TextEncoder, TextKind

BATCH_SIZE = 128


class TestBench:
    """The test split of some tasks, tokenised once, and one model to load weights into."""

    __test__ = False  # pytest takes the name for a test class

    def __init__(self, folder: Path, kind: TextKind, tasks: Sequence[str]) -> None:
        self.loader: Any = AutoModelForSeq2SeqLM if kind == "seq2seq" else AutoModelForCausalLM
        self.folder = folder
        self.model = self.loader.from_pretrained(folder / "pretrained").eval()
        self.model.requires_grad_(False)
        self.base = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.encoder = TextEncoder(AutoTokenizer.from_pretrained(folder / "pretrained"), kind)
        self.rows: dict[str, list[Any]] = {
            task: list(load_text_split(task, "test")) for task in tasks
        }

    def expert(self, task: str) -> Weights:
        """Read a task's expert."""
        return self.loader.from_pretrained(self.folder / task).state_dict()

    def accuracy(self, weights: Weights, task: str) -> float:
        """Return the share (0..1) of the task's test prompts that are answered exactly."""
        self.model.load_state_dict(weights)
        rows = self.rows[task]
        prompts = [self.encoder.prompt(row, task, reserved=0) for row in rows]
        targets = [row["target"] for row in rows]
        longest = max(
            len(self.encoder.tokenizer(target, add_special_tokens=False)["input_ids"])
            for target in targets
        )
        answers = answer_texts(
            self.model, self.encoder, prompts, batch_size=BATCH_SIZE, most=longest + 1
        )
        right = exact_matches(answers, targets)
        return sum(right) / len(right)

    def row(self, weights: Weights) -> Accuracies:
        """Return the accuracy on every task, and their average."""
        return with_average({task: self.accuracy(weights, task) for task in self.rows})


def measure(folder: Path, kind: TextKind, tasks: Sequence[str]) -> dict[str, object]:
    """Measure the base, the experts and two plain merges.

    Args:
        folder: where the builder saved `pretrained` and one folder a task.
        kind: `seq2seq` or `causal`.
        tasks: the tasks to merge and to measure on.

    Returns:
        `accuracies` (`base`, `experts`, `simple_average` and `task_arithmetic` with scale 0.3,
        each task -> share of exact matches in 0..1 and their `average`) and `versions`.
    """
    bench = TestBench(folder, kind, tasks)
    experts = {task: bench.expert(task) for task in tasks}
    merges = plain_merges(bench.base, experts.values())
    return {
        "accuracies": {
            "base": bench.row(bench.base),
            "experts": with_average({task: bench.accuracy(experts[task], task) for task in tasks}),
            **{name: bench.row(merged) for name, merged in merges.items()},
        },
        "versions": versions(),
    }
