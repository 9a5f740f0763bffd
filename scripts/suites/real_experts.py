"""Train the experts of a suite over real pretrained weights: LoRA adapters, stored in float16.

`python scripts/suites/real_experts.py --weights FOLDER --out FOLDER SUITE [TASK ...]` trains the
tasks that OUT/SUITE lacks. Once it has all of them, their accuracies are measured from the files.
"""

import argparse
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from suite_training import Weights, stage_generator, train
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

from fusion_bench_featcal.data.embeddings import Pooling, class_logits
from fusion_bench_featcal.data.text_formats import read_row
from fusion_bench_featcal.data.text_samples import IGNORED, Sample, TextEncoder, pad_samples
from fusion_bench_featcal.suites import image, text

SEED = 0
TASK_ARITHMETIC_SCALE = 0.3
TEST_BATCH = 40
BATCHES_SORTED_TOGETHER = 8
ADAPTER, HEAD = "adapter_model.safetensors", "head.safetensors"
SCALE = 2  # alpha of the adapters, divided by their rank

Rows = Sequence[Any]
Scores = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every number of one suite's training recipe.

    Attributes:
        rank: Rank of the adapters. Their alpha is twice the rank.
        rows: Largest number of training items per task, drawn from the train split.
        test_rows: Largest number of test items per task.
        epochs: Passes over the training items, more if that is less than `min_steps`.
        min_steps: Smallest number of steps for tasks with few items.
        batch_size: Items per step.
        learning_rate: Largest learning rate of AdamW, without weight decay.
        warmup: Steps in which the learning rate rises. Then it falls to 0 linearly.
        temperature: Divisor of cosines between embeddings and the head.
    """

    rank: int
    rows: int = 1000
    test_rows: int = 1000
    epochs: int
    min_steps: int = 0
    batch_size: int = 32
    learning_rate: float
    warmup: int = 10
    temperature: float = 0.05


class Suite:
    """A pretrained model, its tasks, and their loss."""

    TASKS: tuple[str, ...]
    RECIPE: Recipe
    BASE: str  # published name of the weights
    LINEAR: str  # pattern of the adapted modules, in the names of any release
    HAS_STORED_HEADS = False

    def __init__(self, weights: Path) -> None:
        """Open the folder of the pretrained weights."""
        self.weights = weights

    def model(self) -> Any:
        """Return the pretrained model."""
        return AutoModel.from_pretrained(self.weights).eval()

    def dataset(self, task: str, split: str) -> Any:
        """Return a split of a task."""
        raise NotImplementedError

    def encoded(self, row: Any) -> Any:
        """Return a row of a dataset, ready for batches."""
        raise NotImplementedError

    def length(self, row: Any) -> int:
        """Return an encoded row's number of tokens, if rows differ in it."""
        return 1

    def head(self, model: Any, task: str, rows: Rows) -> Tensor | None:
        """Return a task's frozen head by the pretrained model `[classes, width]`, if it has one."""
        return None

    def logits(self, model: Any, rows: Rows, head: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `[targets, classes]`, targets, and the row of each target."""
        raise NotImplementedError


class Encoder(Suite):
    """An encoder: cosines between embeddings and a frozen head, divided by the temperature."""

    def embeddings(self, model: Any, rows: Rows) -> Tensor:
        """Return embeddings of norm 1, `[rows, width]`."""
        raise NotImplementedError

    def logits(self, model: Any, rows: Rows, head: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits `[rows, classes]`, labels, and row numbers."""
        assert head is not None
        logits = class_logits(self.embeddings(model, rows), head, self.RECIPE.temperature)
        labels = torch.tensor([label for _, label in rows])
        return logits, labels, torch.arange(len(rows))


class MiniLM(Encoder):
    """Sentence embeddings against those of the class names."""

    TASKS = text.TA6
    RECIPE = Recipe(rank=8, epochs=2, learning_rate=3e-3)
    BASE = "sentence-transformers/all-MiniLM-L6-v2"
    LINEAR = r".*encoder\.layer\.\d+\..*(query|key|value|dense)"

    def __init__(self, weights: Path) -> None:
        """Load the tokenizer."""
        super().__init__(weights)
        self.encoder = TextEncoder(AutoTokenizer.from_pretrained(weights), "classification", 256)

    def model(self) -> Any:
        """Return the encoder without its pooler, which embeddings do not use."""
        return AutoModel.from_pretrained(self.weights, add_pooling_layer=False).eval()

    def dataset(self, task: str, split: str) -> Any:
        """Return texts with labels."""
        return text.load_text_split(task, split, "classes")

    def encoded(self, row: Any) -> tuple[Sample, int]:
        """Return a text in token ids, and its label."""
        return self.encoder.sample(read_row({"text": row["text"]}, row["text"])), row["label"]

    def length(self, row: Any) -> int:
        """Return a text's number of tokens."""
        return len(row[0].ids)

    def head(self, model: Any, task: str, rows: Rows) -> Tensor:
        """Return the embeddings of the class names."""
        names = self.dataset(task, "test").features["label"].names
        classes = [self.encoded({"text": name, "label": n}) for n, name in enumerate(names)]
        return self.embeddings(model, classes)

    def embeddings(self, model: Any, rows: Rows) -> Tensor:
        """Return normalised means over tokens."""
        batch = pad_samples([sample for sample, _ in rows], self.encoder)
        return F.normalize(Pooling("mean").features(model, batch), dim=-1)


class Dinov2(Encoder):
    """Class tokens against the class means of the pretrained model."""

    TASKS = ("mini_mnist", "mini_fashion_mnist", "mini_notmnist", "mini_latin")
    RECIPE = Recipe(rank=8, epochs=3, min_steps=90, learning_rate=1e-3)
    BASE = "facebook/dinov2-small"
    HAS_STORED_HEADS = True
    LINEAR = r".*encoder\.layer\.\d+\..*\.(query|key|value|dense|[qkvo]_proj|fc1|fc2)"

    def __init__(self, weights: Path) -> None:
        """Load the image processor."""
        super().__init__(weights)
        self.processor = AutoImageProcessor.from_pretrained(weights, use_fast=False)

    def dataset(self, task: str, split: str) -> Any:
        """Return pictures with labels."""
        return image.load_split(task, split)

    def encoded(self, row: Any) -> tuple[Any, int]:
        """Return a picture and its label."""
        return row["image"], row["label"]

    def head(self, model: Any, task: str, rows: Rows) -> Tensor:
        """Return the normalised means of the training pictures' embeddings by class."""
        groups = [rows[i : i + TEST_BATCH] for i in range(0, len(rows), TEST_BATCH)]
        embeddings = torch.cat([self.embeddings(model, group) for group in groups])
        labels = torch.tensor([label for _, label in rows])
        means = [embeddings[labels == c].mean(0) for c in range(int(labels.max()) + 1)]
        return F.normalize(torch.stack(means), dim=-1)

    def embeddings(self, model: Any, rows: Rows) -> Tensor:
        """Return normalised class tokens."""
        pixels = self.processor([picture for picture, _ in rows], return_tensors="pt")
        return F.normalize(Pooling("cls").features(model, pixels), dim=-1)


class SmolLM2(Suite):
    """Answers to prompts: label words and the end token."""

    TASKS = ("snips_intent", "banking77", "clinc_home", "clinc_auto")
    RECIPE = Recipe(
        rank=4, rows=640, test_rows=240, epochs=3, batch_size=16, learning_rate=2e-3, warmup=5
    )
    BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
    LINEAR = r".*model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"

    def __init__(self, weights: Path) -> None:
        """Load the tokenizer."""
        super().__init__(weights)
        self.encoder = TextEncoder(AutoTokenizer.from_pretrained(weights), "causal")

    def model(self) -> Any:
        """Return the language model."""
        return AutoModelForCausalLM.from_pretrained(self.weights).eval()

    def dataset(self, task: str, split: str) -> Any:
        """Return prompts with targets."""
        return text.load_text_split(task, split, "words")

    def encoded(self, row: Any) -> Sample:
        """Return a prompt with its target in token ids."""
        return self.encoder.sample(read_row(row, row["prompt"]))

    def length(self, row: Any) -> int:
        """Return a row's number of tokens."""
        return len(row.ids)

    def logits(self, model: Any, rows: Rows, head: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits of the target tokens `[targets, vocabulary]`, tokens, and row numbers."""
        batch = pad_samples(rows, self.encoder)
        labels = batch.pop("labels")[:, 1:]
        is_target = labels != IGNORED
        hidden = model.model(**batch).last_hidden_state[:, :-1]
        # Only positions that predict a target go through the large head.
        return model.lm_head(hidden[is_target]), labels[is_target], is_target.nonzero()[:, 0]


SUITES: dict[str, type[Suite]] = {"minilm": MiniLM, "dinov2-small": Dinov2, "smollm2": SmolLM2}


def train_expert(suite: Suite, task: str, folder: Path) -> None:
    """Train one task's adapter and save it, with its head unless class names define that."""
    recipe, model, rows = suite.RECIPE, suite.model(), drawn_rows(suite, task, "train")
    with torch.no_grad():
        head = suite.head(model, task, rows)
    torch.manual_seed(SEED)
    config = peft.LoraConfig(
        r=recipe.rank, lora_alpha=SCALE * recipe.rank, target_modules=suite.LINEAR
    )
    adapted = peft.get_peft_model(model, config)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, recipe.learning_rate, weight_decay=0.0)
    steps = batches(suite, rows, task)
    training_batches = iter(steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1, (step + 1) / recipe.warmup) * (1 - step / len(steps))
    )

    def loss_and_accuracy() -> tuple[Tensor, float]:
        logits, targets, _ = suite.logits(model, next(training_batches), head)
        accuracy = (logits.argmax(-1) == targets).float().mean().item()
        return F.cross_entropy(logits, targets), accuracy

    print(f"{task}: {len(steps)} steps", flush=True)
    train(optimiser, schedule, len(steps), math.inf, loss_and_accuracy, print)
    save_adapter(adapted, suite, folder)
    if head is not None and suite.HAS_STORED_HEADS:
        save_file({"head": head}, folder / HEAD)


def drawn_rows(suite: Suite, task: str, split: str) -> Rows:
    """Return a random part of a split as large as the recipe says: the same in each call."""
    dataset = suite.dataset(task, split)
    count = suite.RECIPE.rows if split == "train" else suite.RECIPE.test_rows
    order = torch.randperm(len(dataset), generator=stage_generator(SEED, f"{task} {split}"))
    return [suite.encoded(dataset[i]) for i in order[:count].tolist()]


def batches(suite: Suite, rows: Rows, task: str) -> list[Rows]:
    """Return the batches of all epochs in random order, each of rows with similar lengths."""
    size, generator = suite.RECIPE.batch_size, stage_generator(SEED, task)
    epochs = max(suite.RECIPE.epochs, -(-suite.RECIPE.min_steps * size // len(rows)))
    result = []
    for _ in range(epochs):
        order = torch.randperm(len(rows), generator=generator).tolist()
        parts = []
        for start in range(0, len(order), size * BATCHES_SORTED_TOGETHER):
            group = order[start : start + size * BATCHES_SORTED_TOGETHER]
            group.sort(key=lambda i: suite.length(rows[i]))
            parts += [group[i : i + size] for i in range(0, len(group), size)]
        shuffled = torch.randperm(len(parts), generator=generator).tolist()
        result += [[rows[i] for i in parts[part]] for part in shuffled]
    return result


def save_adapter(adapted: Any, suite: Suite, folder: Path) -> None:
    """Write a LoRA adapter in PEFT's format, its tensors in float16."""
    folder.mkdir(parents=True)
    tensors = peft.get_peft_model_state_dict(adapted)
    half = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(half, folder / ADAPTER, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": suite.BASE,
        "r": suite.RECIPE.rank,
        "lora_alpha": SCALE * suite.RECIPE.rank,
        "target_modules": suite.LINEAR,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", config)


def changes(folder: Path) -> Weights:
    """Read a saved adapter: name of a weight -> its change in float32."""
    factors = load_file(folder / ADAPTER)
    result = {}
    for name in factors:
        if name.endswith(".lora_A.weight"):
            down, up = factors[name].float(), factors[name.replace("lora_A", "lora_B")].float()
            weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            result[weight] = SCALE * (up @ down)
    return result


@torch.no_grad()
def measure(suite: Suite, folder: Path) -> dict[str, Any]:
    """Measure base, saved experts and task arithmetic on the test split.

    Returns:
        `accuracies` and `losses` (mean over targets, in nats), each of them row -> task -> value.
    """
    model = suite.model()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    experts = {task: changes(folder / task) for task in suite.TASKS}
    names = experts[suite.TASKS[0]]
    merged = {n: TASK_ARITHMETIC_SCALE * sum(e[n] for e in experts.values()) for n in names}
    results: dict[str, dict[str, Scores]] = {
        kind: {row: {} for row in ("base", "experts", "task_arithmetic")}
        for kind in ("accuracies", "losses")
    }
    for task in suite.TASKS:
        model.load_state_dict(base)
        head = suite.head(model, task, drawn_rows(suite, task, "train"))
        rows = drawn_rows(suite, task, "test")
        for row, added in zip(results["losses"], ({}, experts[task], merged), strict=True):
            model.load_state_dict(base | {name: base[name] + added[name] for name in added})
            values = score(suite, model, rows, head)
            print(f"{task}: {row}, accuracy {values[0]:.3f}, loss {values[1]:.3f}", flush=True)
            for kind, value in zip(results.values(), values, strict=True):
                kind[row][task] = value
    for kind in results.values():
        for scores in kind.values():
            scores["average"] = fmean(scores.values())
    return results


def score(suite: Suite, model: Any, rows: Rows, head: Tensor | None) -> tuple[float, float]:
    """Return the share of rows with all targets right, and the mean loss per target."""
    rows = sorted(rows, key=suite.length)
    right, loss, targets = 0, 0.0, 0
    for start in range(0, len(rows), TEST_BATCH):
        batch = rows[start : start + TEST_BATCH]
        logits, due, number = suite.logits(model, batch, head)
        loss += F.cross_entropy(logits, due, reduction="sum").item()
        targets += len(due)
        wrong = number[logits.argmax(-1) != due].unique()
        right += len(batch) - len(wrong)
    return right / len(rows), loss / targets


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> None:
    """Train and measure by the arguments of a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", metavar="DIR", required=True, help="fetched weights")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the suites")
    parser.add_argument("suite", choices=tuple(SUITES))
    parser.add_argument("task", nargs="*", help="by default all of the suite")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    suite = SUITES[options.suite](Path(options.weights, options.suite))
    out = Path(options.out, options.suite)
    for task in options.task or suite.TASKS:
        if not (out / task).exists():
            train_expert(suite, task, out / task)
    if all((out / task).exists() for task in suite.TASKS):
        modules = {"torch": torch, "transformers": transformers, "peft": peft}
        versions = {name: module.__version__ for name, module in modules.items()}
        record = {"seed": SEED, "recipe": asdict(suite.RECIPE), **measure(suite, out)}
        record["versions"] = {"python": platform.python_version(), **versions}
        write_json(out / "MEASURED.json", record)


if __name__ == "__main__":
    main()
