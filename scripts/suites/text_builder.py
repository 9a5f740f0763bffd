"""The small language models: a joint base, weakened, then one expert per task."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from suite_training import Builder, Weights, loss_and_accuracy, stage_generator, train
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from fusion_bench_featcal.data.generation import answer_texts
from fusion_bench_featcal.data.text_formats import read_row
from fusion_bench_featcal.data.text_samples import (
    CausalTextEncoder,
    Sample,
    Seq2SeqTextEncoder,
    TextEncoder,
    pad_samples,
)
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.suites import text
from fusion_bench_featcal.suites.text import load_text_split

# rows of this many batches are put in order of length before they are cut into batches
BATCHES_SORTED_TOGETHER = 16
TEST_BATCH = 128

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Phase:
    """Length and optimiser of one phase."""

    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float


@dataclass(frozen=True)
class Recipe:
    """Every number of one suite's training recipe.

    Attributes:
        pretraining: The joint phase.
        finetuning: Each expert's phase, in which the embedding is frozen.
        label_noise: Noise on the label words' embedding rows between the phases, in standard
            deviations of these rows' entries.
        warmup_share: Share of a phase in which the learning rate rises.
        betas: AdamW's.
        gradient_clip: Largest norm of a gradient.
    """

    pretraining: Phase
    finetuning: Phase
    label_noise: float
    warmup_share: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    gradient_clip: float = 1.0


class TextBuilder(Builder):
    """Trains and measures a small language model. Experts keep the base's embedding."""

    TASKS = text.TA6
    RECIPES: ClassVar = {
        "flan-t5-mini": Recipe(Phase(1600, 48, 2e-3, 0.05), Phase(200, 32, 4e-4, 0.01), 1.4),
        "llama-mini": Recipe(Phase(2000, 48, 1.5e-3, 0.05), Phase(250, 32, 3e-4, 0.01), 1.2),
    }
    SPELLED_OUT: ClassVar = ("tie_word_embeddings",)

    def __init__(self, *args: Any) -> None:
        """Load the tokenizer."""
        super().__init__(*args)
        encoder_class = Seq2SeqTextEncoder if self.suite == "flan-t5-mini" else CausalTextEncoder
        self.encoder = encoder_class(AutoTokenizer.from_pretrained(self.folder))

    def rows(self, task: str, split: str) -> Any:
        """Return a task's prompts and targets."""
        return load_text_split(task, split)

    def pretrain(self, model: Any) -> None:
        """Train all parameters on all tasks together, then weaken the labels.

        The embedding is the head as well. With noise on the label words' rows the base confuses
        labels, and every expert has to turn its features towards rows that it must not change.
        """
        parameters = list(model.parameters())
        self._train(model, parameters, self.tasks, "pretraining", self.recipe.pretraining)
        weight = model.get_input_embeddings().weight
        ids = self.label_ids()
        with torch.no_grad():
            rows = weight[ids]
            noise = torch.randn(rows.shape, generator=stage_generator(self.seed, "label noise"))
            weight[ids] = rows + self.recipe.label_noise * rows.std() * noise

    def label_ids(self) -> list[int]:
        """Return the token of each label word, in the words' order."""
        targets = [row["target"] for task in self.tasks for row in self.rows(task, "train")]
        words = sorted({word for target in targets for word in target.split()})
        tokens = self.encoder.tokenizer(words, add_special_tokens=False)["input_ids"]
        return [ids[0] for ids in tokens]

    def finetune(self, model: Any, task: str) -> None:
        """Train everything but the embedding on one task."""
        frozen = model.get_input_embeddings().weight
        parameters = [parameter for parameter in model.parameters() if parameter is not frozen]
        self._train(model, parameters, [task], task, self.recipe.finetuning)

    def _train(
        self, model: Any, parameters: list[nn.Parameter], tasks: Sequence[str], stage: str,
        phase: Phase,
    ) -> None:  # fmt: skip
        recipe, generator = self.recipe, stage_generator(self.seed, stage)
        optimiser = torch.optim.AdamW(
            parameters, lr=phase.learning_rate, betas=recipe.betas,
            weight_decay=phase.weight_decay, fused=True,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, phase.learning_rate, phase.steps, pct_start=recipe.warmup_share,
            cycle_momentum=False,
        )  # fmt: skip
        rows: dict[str, Any] = {task: self.rows(task, "train") for task in tasks}
        sets = {
            task: [self.encoder.sample(read_row(row, task)) for row in rows[task]] for task in tasks
        }
        training_batches = batches(sets, phase.batch_size, self.encoder, generator)

        def next_scores() -> tuple[Tensor, float]:
            return self.scores(model, next(training_batches))

        model.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())  # for dropout
            steps, clip = phase.steps, recipe.gradient_clip
            train(optimiser, schedule, steps, clip, next_scores, self.log)
        model.eval()

    def scores(self, model: Any, batch: Batch) -> tuple[Tensor, float]:
        """Return the mean cross-entropy of target tokens, and the share that is most likely."""
        labels = batch["labels"]
        if model.config.is_encoder_decoder:
            logits = model(**batch).logits
            return loss_and_accuracy(logits[labels != NO_TARGET], labels[labels != NO_TARGET])
        hidden = model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        return target_scores(model.lm_head, hidden, labels)

    def accuracy(self, model: Any, task: str) -> float:
        """Return the share (0..1) of the task's test prompts that are answered exactly."""
        rows: list[Any] = list(self.rows(task, "test"))
        prompts = [self.encoder.prompt(read_row(row, task), reserved=0).ids for row in rows]
        targets = [row["target"] for row in rows]
        tokens = self.encoder.tokenizer(targets, add_special_tokens=False)["input_ids"]
        most = max(map(len, tokens)) + 1
        answers = answer_texts(model, self.encoder, prompts, batch_size=TEST_BATCH, most=most)
        pairs = zip(answers, targets, strict=True)
        return sum(answer.strip() == target.strip() for answer, target in pairs) / len(rows)


class MixtureBuilder(TextBuilder):
    """Trains and measures a small mixture. As on the hub, its files have a tensor per slot."""

    RECIPES: ClassVar = {"qwen3moe-mini": TextBuilder.RECIPES["llama-mini"]}
    SPELLED_OUT: ClassVar = (*TextBuilder.SPELLED_OUT, "num_experts")
    STORED_IN = torch.bfloat16

    def stored(self, model: Any) -> Weights:
        """Return the tensors that the library writes, which splits the slots."""
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return load_file(Path(folder) / "model.safetensors")

    def load(self, model: Any, weights: Weights) -> None:
        """Load tensors under the names of files into a model of the library, which joins slots."""
        joined = type(model).from_pretrained(None, config=model.config, state_dict=weights)
        model.load_state_dict(joined.state_dict())

    def scores(self, model: Any, batch: Batch) -> tuple[Tensor, float]:
        """Return the scores, with the loss of unequally used slots."""
        config, mask = model.config, batch["attention_mask"]
        output = model.model(batch["input_ids"], mask, output_router_logits=True)
        loss, right = target_scores(model.lm_head, output.last_hidden_state, batch["labels"])
        slots = config.num_experts, config.num_experts_per_tok
        unbalance = load_balancing_loss_func(output.router_logits, *slots, mask)
        return loss + config.router_aux_loss_coef * unbalance, right


def target_scores(head: nn.Module, hidden: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Return a decoder's mean cross-entropy of target tokens, and the share that is most likely."""
    due = labels[:, 1:]
    # only positions that predict a target go through the head
    return loss_and_accuracy(head(hidden[:, :-1][due != NO_TARGET]), due[due != NO_TARGET])


def batches(
    sets: Mapping[str, Sequence[Sample]],
    size: int,
    encoder: TextEncoder,
    generator: torch.Generator,
) -> Iterator[Batch]:
    """Draw batches without end.

    A task's frequency is proportional to the square root of its number of rows. Rows of one batch
    have similar lengths, which saves padding.
    """
    names = list(sets)
    shares = torch.tensor([len(sets[name]) for name in names]).sqrt()
    while True:
        count = size * BATCHES_SORTED_TOGETHER
        tasks = torch.multinomial(shares, count, replacement=True, generator=generator)
        picks = torch.rand(count, generator=generator)
        rows = []
        for task, pick in zip(tasks.tolist(), picks.tolist(), strict=True):
            task_set = sets[names[task]]
            rows.append(task_set[int(pick * len(task_set))])
        rows.sort(key=lambda row: len(row.ids))
        for part in torch.randperm(BATCHES_SORTED_TOGETHER, generator=generator).tolist():
            yield pad_samples(rows[part * size : (part + 1) * size], encoder)
