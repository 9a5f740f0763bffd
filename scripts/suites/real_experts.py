"""Train the experts of a suite over real pretrained weights: LoRA adapters, stored in float16.

`python scripts/suites/real_experts.py --weights FOLDER --out FOLDER SUITE [TASK ...]` trains the
tasks that OUT/SUITE lacks. Once it has all of them, they are measured by the suite's task pool.
"""

import argparse
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import peft
import torch
import transformers
from omegaconf import OmegaConf
from safetensors.torch import save_file
from suite_training import loss_and_accuracy, stage_generator, train, write_json
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
)

from fusion_bench_featcal.data.embeddings import Pooling, class_logits
from fusion_bench_featcal.data.generation import logits_and_targets
from fusion_bench_featcal.data.speech import SpeechBatches, read_speech
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_formats import read_row
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import (
    CausalTextEncoder,
    ClassifierTextEncoder,
    Sample,
    Seq2SeqTextEncoder,
    pad_samples,
)
from fusion_bench_featcal.experts import InMemoryExpert
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.fusionbench.task_lists import expand_entries
from fusion_bench_featcal.models.adapters import AdapterExpert
from fusion_bench_featcal.suites import image, text
from fusion_bench_featcal.tasks import EncoderTaskPool, SpeechTaskPool, TextTaskPool

SEED = 0
TASK_ARITHMETIC_SCALE = 0.3
HEAD_BATCH = 40
BATCHES_SORTED_TOGETHER = 8
ADAPTER, HEAD = "adapter_model.safetensors", "head.safetensors"
SCALE = 2  # alpha of the adapters, divided by their rank
MODEL_POOLS = Path(__file__).resolve().parents[2] / "config" / "modelpool"

Items = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every number of one suite's training recipe.

    Attributes:
        rank: Rank of the adapters. Their alpha is twice the rank.
        rows: Largest number of training items per task, drawn from the train split.
        epochs: Passes over the training items, more if that is less than `min_steps`.
        min_steps: Smallest number of steps for tasks with few items.
        batch_size: Items per step.
        learning_rate: Largest learning rate of AdamW, without weight decay.
        warmup: Steps in which the learning rate rises. Then it falls to 0 linearly.
        temperature: Divisor of cosines between embeddings and the head.
    """

    rank: int
    rows: int = 1000
    epochs: int
    min_steps: int = 0
    batch_size: int = 32
    learning_rate: float
    warmup: int = 10
    temperature: float = 0.05


class Encoder:
    """A pretrained encoder. Logits are cosines between embeddings and a task's frozen head."""

    TASKS: tuple[str, ...]
    RECIPE: Recipe
    BASE: str  # published name of the weights
    LINEAR: str  # pattern of the adapted modules, in the names of any release
    POOL: str  # configuration of the task pool
    POOLING: Any = None  # None for language models
    load: Callable[[str], Any]  # task -> its train split

    def __init__(self, weights: Path) -> None:
        """Open the folder of the pretrained weights."""
        self.weights = weights

    def model(self) -> Any:
        """Return the pretrained model."""
        return AutoModel.from_pretrained(self.weights).eval()

    def item(self, row: Any) -> tuple[Any, Any]:
        """Return content and label of a row."""
        raise NotImplementedError

    def inputs(self, items: Items) -> Any:
        """Return a batch of the model's inputs."""
        raise NotImplementedError

    def head(self, model: Any, task: str, items: Items) -> Any:
        """Return a task's head by the pretrained model, `[classes, width]`."""
        raise NotImplementedError

    def embeddings(self, model: Any, items: Items) -> Tensor:
        """Return embeddings of norm 1, `[items, width]`."""
        return F.normalize(Pooling(self.POOLING).features(model, self.inputs(items)), dim=-1)

    def scores(self, model: Any, items: Items, head: Any) -> tuple[Tensor, float]:
        """Return loss and accuracy on a batch."""
        logits = class_logits(self.embeddings(model, items), head, self.RECIPE.temperature)
        return loss_and_accuracy(logits, torch.tensor([label for _, label in items]))

    def task_pool(self, folder: Path) -> Any:
        """Return the suite's task pool, with heads in a folder of experts."""
        config: Any = OmegaConf.load(MODEL_POOLS / f"{self.POOL}.yaml")
        template = OmegaConf.to_container(config.test_datasets)
        data = {
            task: OmegaConf.create(v) for task, v in expand_entries(template, self.TASKS).items()
        }
        if self.POOLING is None:
            return TextTaskPool(data, tokenizer=str(self.weights))
        files = {task: folder / task / HEAD for task in self.TASKS}
        heads = {task: {"file": str(file)} for task, file in files.items() if file.is_file()}
        base = str(self.weights)
        return EncoderTaskPool(data, base_model=base, heads=heads, pooling=self.POOLING)


class MiniLM(Encoder):
    """Sentence embeddings against those of the class names."""

    TASKS = text.TA6
    RECIPE = Recipe(rank=8, epochs=2, learning_rate=3e-3)
    BASE, POOL = "sentence-transformers/all-MiniLM-L6-v2", "minilm_TA6"
    LINEAR = r".*encoder\.layer\.\d+\..*(query|key|value|dense)"
    POOLING = "mean"
    load = partial(text.load_text_split, split="train", style="classes")

    def __init__(self, weights: Path) -> None:
        super().__init__(weights)
        self.encoder = ClassifierTextEncoder(AutoTokenizer.from_pretrained(weights), 256)

    def model(self) -> Any:
        """Return the encoder without its pooler, which embeddings do not use."""
        return AutoModel.from_pretrained(self.weights, add_pooling_layer=False).eval()

    def item(self, row: Any) -> tuple[Sample, int]:
        """Return a text in token ids, and its label."""
        return self.encoder.sample(read_row({"text": row["text"]}, row["text"])), row["label"]

    def inputs(self, items: Items) -> Any:
        """Return a batch of texts."""
        return pad_samples([sample for sample, _ in items], self.encoder)

    def head(self, model: Any, task: str, items: Items) -> Tensor:
        """Return the embeddings of the class names."""
        names = self.load(task).features["label"].names
        return self.embeddings(model, [self.item({"text": n, "label": None}) for n in names])


class MPNet(MiniLM):
    """The same with a wider encoder. Its adapters have as many parameters as MiniLM's."""

    RECIPE = Recipe(rank=2, epochs=2, learning_rate=2e-3)
    BASE, POOL = "sentence-transformers/all-mpnet-base-v2", "mpnet_TA6"
    LINEAR = r".*encoder\.layer\.\d+\..*(attn\.[qkvo]|dense)"


class Dinov2(Encoder):
    """Class tokens against the class means of the pretrained model."""

    TASKS = ("mini_mnist", "mini_fashion_mnist", "mini_notmnist", "mini_latin")
    RECIPE = Recipe(rank=8, epochs=3, min_steps=90, learning_rate=1e-3)
    BASE, POOL = "facebook/dinov2-small", "dinov2_small_TA4"
    LINEAR = r".*encoder\.layer\.\d+\..*\.(query|key|value|dense|[qkvo]_proj|fc1|fc2)"
    POOLING = "cls"
    load = partial(image.load_split, split="train")

    def __init__(self, weights: Path) -> None:
        super().__init__(weights)
        self.processor = AutoImageProcessor.from_pretrained(weights, use_fast=False)

    def item(self, row: Any) -> tuple[Any, int]:
        """Return a picture and its label."""
        return row["image"], row["label"]

    def inputs(self, items: Items) -> Any:
        """Return a batch of pictures."""
        return self.processor([picture for picture, _ in items], return_tensors="pt")

    def head(self, model: Any, task: str, items: Items) -> Tensor:
        """Return the normalised means of the training pictures' embeddings by class."""
        groups = [items[i : i + HEAD_BATCH] for i in range(0, len(items), HEAD_BATCH)]
        embeddings = torch.cat([self.embeddings(model, group) for group in groups])
        labels = torch.tensor([label for _, label in items])
        means = [embeddings[labels == c].mean(0) for c in range(int(labels.max()) + 1)]
        return F.normalize(torch.stack(means), dim=-1)


class SmolLM2(Encoder):
    """Answers to prompts: label words and the end token. The head is the model's own."""

    TASKS = ("snips_intent", "banking77", "clinc_home", "clinc_auto")
    RECIPE = Recipe(rank=4, rows=640, epochs=3, batch_size=16, learning_rate=2e-3, warmup=5)
    BASE, POOL = "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2_TA4"
    LINEAR = r".*model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
    load = partial(text.load_text_split, split="train", style="words")

    def __init__(self, weights: Path) -> None:
        super().__init__(weights)
        self.encoder = CausalTextEncoder(AutoTokenizer.from_pretrained(weights))

    def model(self) -> Any:
        """Return the language model."""
        return AutoModelForCausalLM.from_pretrained(self.weights).eval()

    def item(self, row: Any) -> tuple[Sample, None]:
        """Return a prompt with its target in token ids."""
        return self.encoder.sample(read_row(row, row["prompt"])), None

    def head(self, model: Any, task: str, items: Items) -> Any:
        """Return the model's head."""
        return model.lm_head

    def scores(self, model: Any, items: Items, head: Any) -> tuple[Tensor, float]:
        """Return loss and accuracy on a batch's target tokens."""
        batch = pad_samples([sample for sample, _ in items], self.encoder)
        labels = batch.pop("labels")[:, 1:]
        is_target = labels != NO_TARGET
        hidden = model.model(**batch).last_hidden_state[:, :-1]
        # Only positions that predict a target go through the large head.
        return loss_and_accuracy(head(hidden[is_target]), labels[is_target])


class Whisper(Encoder):
    """Transcripts of sounds of at most 5 seconds. The head is the model's own."""

    TASKS = ("caribbean", "fast", "noisy", "welsh")
    RECIPE = Recipe(rank=2, rows=300, epochs=2, batch_size=8, learning_rate=2e-3)
    BASE, POOL = "openai/whisper-base", "whisper_TA4"
    LINEAR = r".*model\.(en|de)coder\.layers\.\d+\..*([qkv]_proj|out_proj|fc1|fc2)"

    def __init__(self, weights: Path) -> None:
        super().__init__(weights)
        encoder = Seq2SeqTextEncoder(AutoTokenizer.from_pretrained(weights))
        extractor = AutoFeatureExtractor.from_pretrained(weights)
        start = self.model().config.decoder_start_token_id
        self.batches = SpeechBatches((), extractor, encoder, start)

    def model(self) -> Any:
        """Return the speech model."""
        return AutoModelForSpeechSeq2Seq.from_pretrained(self.weights).eval()

    def load(self, task: str) -> Any:
        """Return the train split of a task."""
        table = self.weights / "speech" / task / "train.jsonl"
        rows = TextRows(load_texts(str(table)), task)
        return [read_speech(rows, number, table.parent) for number in range(len(rows))]

    def item(self, row: Any) -> tuple[Any, None]:
        """Return a row, whose sound is read in each epoch."""
        return row, None

    def head(self, model: Any, task: str, items: Items) -> None:
        """Return nothing: the model has a head."""

    def scores(self, model: Any, items: Items, head: Any) -> tuple[Tensor, float]:
        """Return loss and accuracy on a batch's words."""
        batch = self.batches.collate([row for row, _ in items])
        logits, targets = logits_and_targets(model, batch)
        targets[:, : len(self.batches.prefix)] = NO_TARGET  # the first tokens are no words
        is_target = targets != NO_TARGET
        return loss_and_accuracy(logits[is_target], targets[is_target])

    def task_pool(self, folder: Path) -> Any:
        """Return the suite's task pool."""
        data = {task: str(self.weights / "speech" / task / "test.jsonl") for task in self.TASKS}
        return SpeechTaskPool(data, processor=str(self.weights))


SUITES: dict[str, type[Encoder]] = {
    "minilm": MiniLM,
    "mpnet": MPNet,
    "dinov2-small": Dinov2,
    "smollm2": SmolLM2,
    "whisper-5s": Whisper,
}


def train_expert(suite: Encoder, task: str, folder: Path) -> None:
    """Train one task's adapter and save it, with its head unless names or the model define it."""
    recipe, model, dataset = suite.RECIPE, suite.model(), suite.load(task)
    order = torch.randperm(len(dataset), generator=stage_generator(SEED, f"{task} train"))
    items = [suite.item(dataset[i]) for i in order[: recipe.rows].tolist()]
    with torch.no_grad():
        head = suite.head(model, task, items)
    torch.manual_seed(SEED)
    config = peft.LoraConfig(
        r=recipe.rank, lora_alpha=SCALE * recipe.rank, target_modules=suite.LINEAR
    )
    adapted = peft.get_peft_model(model, config)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, recipe.learning_rate, weight_decay=0.0)
    steps = batches(suite, items, task)
    training_batches = iter(steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1, (step + 1) / recipe.warmup) * (1 - step / len(steps))
    )
    print(f"{task}: {len(steps)} steps", flush=True)

    def next_scores() -> tuple[Tensor, float]:
        return suite.scores(model, next(training_batches), head)

    train(optimiser, schedule, len(steps), math.inf, next_scores, print)
    save_adapter(adapted, suite, folder)
    if isinstance(suite, Dinov2):
        save_file({"head": head}, folder / HEAD)


def batches(suite: Encoder, items: Items, task: str) -> list[Items]:
    """Return the batches of all epochs in random order, each of items with similar lengths."""
    size, generator = suite.RECIPE.batch_size, stage_generator(SEED, task)
    epochs = max(suite.RECIPE.epochs, -(-suite.RECIPE.min_steps * size // len(items)))
    result = []
    for _ in range(epochs):
        order = torch.randperm(len(items), generator=generator).tolist()
        parts = []
        for start in range(0, len(order), size * BATCHES_SORTED_TOGETHER):
            group = order[start : start + size * BATCHES_SORTED_TOGETHER]
            group.sort(key=lambda i: len(getattr(items[i][0], "ids", "")))
            parts += [group[i : i + size] for i in range(0, len(group), size)]
        shuffled = torch.randperm(len(parts), generator=generator).tolist()
        result += [[items[i] for i in parts[part]] for part in shuffled]
    return result


def save_adapter(adapted: Any, suite: Encoder, folder: Path) -> None:
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


def measure(suite: Encoder, folder: Path) -> dict[str, Any]:
    """Measure base, saved experts and task arithmetic by the suite's task pool.

    Returns:
        `accuracies` and `losses`, each of them row -> task -> value.
    """
    model, pool = suite.model(), suite.task_pool(folder)
    base = InMemoryExpert(suite.model())
    experts = {task: AdapterExpert(base, suite.model(), folder / task) for task in suite.TASKS}
    kinds: dict[str, dict[str, dict[str, float]]] = {"accuracies": {}, "losses": {}}
    pool.setup()
    data = dict(pool.test_dataloaders)

    def score(row: str, tasks: Sequence[str], weights: dict[str, Tensor]) -> None:
        model.load_state_dict(weights, strict=False)
        pool.test_dataloaders = {task: data[task] for task in tasks}
        scores = pool.evaluate(model)
        print(f"{row}: accuracy {scores['average']['accuracy']:.3f}", flush=True)
        for rows, key in zip(kinds.values(), ("accuracy", "loss"), strict=True):
            rows.setdefault(row, {}).update({task: scores[task][key] for task in tasks})

    start = {name: base.tensor(name) for name, _ in model.named_parameters()}
    merged = {name: tensor.clone() for name, tensor in start.items()}
    score("base", suite.TASKS, start)
    for task, expert in experts.items():
        weights = {name: expert.tensor(name) for name in start}
        score("experts", [task], weights)
        for name, tensor in weights.items():
            merged[name] += TASK_ARITHMETIC_SCALE * (tensor - start[name])
    score("task_arithmetic", suite.TASKS, merged)
    for rows in kinds.values():
        for scores in rows.values():
            scores["average"] = fmean(scores.values())
    return kinds


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
