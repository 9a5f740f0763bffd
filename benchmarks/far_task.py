"""A task far from the base beside the six of the bundled Llama, by decoder positions that count.

    OMP_NUM_THREADS=1 python benchmarks/far_task.py FOLDER [--seeds 42 43] [--samples 64]

The seventh task has the texts of banking77 with each word spelled backwards, so that prompts are
long and unlike all others. Its answers are random pairs of the suite's label words, one pair for
each label. Its expert is trained until it is five times as far from the base as the suite's
experts. It is stored in FOLDER and read from there by later runs. Task arithmetic of 0.3 merges all
seven. Seeds draw the samples. Results: `benchmarks/results/far_task.md`.
"""

import argparse
import copy
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from decoder_rows import merged_of
from sides import machine
from torch import nn
from transformers import AutoModelForCausalLM

from fusion_bench_featcal import calibrate
from fusion_bench_featcal.data.text_formats import read_row
from fusion_bench_featcal.data.text_samples import pad_samples
from fusion_bench_featcal.suites import text

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "suites"))
from text_builder import Phase, TextBuilder

SUITE, TEXTS, SCALE, BATCH = "llama-mini", "banking77", 0.3, 16
FAR = text.TextTask("banking_codes", "code")
TASKS = (*text.TA6, FAR.name)
ROWS = ("all", "targets", "auto")


class FarBuilder(TextBuilder):
    """Trains the expert of the far task, and measures models on all seven."""

    RECIPES: ClassVar = {
        SUITE: replace(TextBuilder.RECIPES[SUITE], finetuning=Phase(600, 32, 1e-3, 0.01))
    }

    def rows(self, task: str, split: str) -> Any:
        """Return a task's prompts and targets."""
        if task != FAR.name:
            return super().rows(task, split)
        codes = codes_of_labels()
        rows = text.load_rows(TEXTS)[split]
        return [
            {"prompt": FAR.prompt(backwards(words)), "target": codes[label]}
            for words, label in rows
        ]

    def batches(self, task: str, samples: int, seed: int) -> list[Any]:
        """Return drawn calibration samples of a task as inputs of a model, with labels."""
        rows = list(self.rows(task, "calibration"))
        drawn = random.Random(f"{seed} {task}").sample(rows, samples)
        encoded = [self.encoder.sample(read_row(row, task)) for row in drawn]
        parts = (encoded[start : start + BATCH] for start in range(0, samples, BATCH))
        return [pad_samples(part, self.encoder) for part in parts]


def backwards(words: str) -> str:
    """Return a text with each word spelled backwards."""
    return " ".join(word[::-1] for word in words.split())


def codes_of_labels() -> dict[str, str]:
    """Return a pair of label words of the suite's tasks for each label of the texts."""
    labels = {
        task: sorted({label for rows in text.load_rows(task).values() for _, label in rows})
        for task in text.TA6
    }
    words = sorted({word for names in labels.values() for name in names for word in name.split()})
    draw = random.Random(0)
    return {label: FAR.target(" ".join(draw.sample(words, 2))) for label in labels[TEXTS]}


def loaded(folder: str | Path) -> Any:
    """Return a stored model, float32."""
    return AutoModelForCausalLM.from_pretrained(folder).float().eval()


def distance(model: nn.Module, base: nn.Module) -> float:
    """Return the norm of the difference of all parameters."""
    squares = ((p - base.get_parameter(n)).square().sum() for n, p in model.named_parameters())
    return float(sum(square.item() for square in squares) ** 0.5)


def experts_of(builder: FarBuilder, base: nn.Module, folder: Path) -> dict[str, nn.Module]:
    """Return all experts. That of the far task is trained unless the folder has it."""
    place = folder / FAR.name
    if not (place / "config.json").is_file():
        expert: Any = copy.deepcopy(base)
        builder.finetune(expert, FAR.name)
        expert.save_pretrained(place)
    return {task: loaded(text.path(SUITE, task)) for task in text.TA6} | {FAR.name: loaded(place)}


def accuracies(builder: FarBuilder, model: nn.Module) -> dict[str, float]:
    """Return a model's share of right answers on each task, in per cent."""
    return {task: 100 * builder.accuracy(model, task) for task in TASKS}


def rows_of(
    builder: FarBuilder, base: nn.Module, experts: Mapping[str, nn.Module], samples: int, seed: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each calibrated model's name, and its accuracies by task."""
    merged = merged_of(base, experts, SCALE)
    for rows in ROWS:
        batches = {task: builder.batches(task, samples, seed) for task in TASKS}
        result = calibrate(merged, base, experts, batches, decoder_rows=rows, progress=False)
        yield f"FeatCal+, {rows}", accuracies(builder, result.model)


def main() -> None:
    """Print distances, and a line for each model, with means over the draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    shipped, recipe = Path(text.path(SUITE)), FarBuilder.RECIPES[SUITE]
    builder = FarBuilder(SUITE, shipped, [FAR.name], recipe, 0, print)
    base = loaded(shipped)
    experts = experts_of(builder, base, options.folder)
    expert_scores = {task: 100 * builder.accuracy(experts[task], task) for task in TASKS}
    by_name = {
        "experts": [expert_scores],
        "merged": [accuracies(builder, merged_of(base, experts, SCALE))],
    }
    for seed in options.seeds:
        for name, values in rows_of(builder, base, experts, options.samples, seed):
            by_name.setdefault(name, []).append(values)
    apart = {task: distance(expert, base) for task, expert in experts.items()}
    far = apart.pop(FAR.name)
    near = f"{min(apart.values()):.1f} to {max(apart.values()):.1f}"
    print(f"\nFar expert {far:.1f} from the base, the suite's {near}.\n")
    heads = (
        f"{options.samples} samples per task",
        "average of seven, %",
        "far task",
        "average of six",
    )
    print(f"| {' | '.join(heads)} |")
    print("|---|--:|--:|--:|")
    for name, draws in by_name.items():
        average = mean(mean(values.values()) for values in draws)
        far = mean(values[FAR.name] for values in draws)
        six = (len(TASKS) * average - far) / len(text.TA6)
        print(f"| {name} | {average:.1f} | {far:.1f} | {six:.1f} |")
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
