"""Training the small T5 and the small Llama: a joint base, weakened, then one expert a task."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_bench_featcal.suites.text import find_task, load_rows
from fusion_bench_featcal.text_samples import IGNORED, Sample, TextEncoder, pad_samples

# rows of this many batches are put in order of length before they are cut into batches
BATCHES_SORTED_TOGETHER = 16

Log = Callable[[str], None]
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
        finetuning: Each expert's phase; the embedding is frozen in it.
        label_noise: Noise on the label words' embedding rows between the phases, in standard
            deviations of those rows' entries.
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


RECIPES = {
    "flan-t5-mini": Recipe(Phase(1600, 48, 2e-3, 0.05), Phase(200, 32, 4e-4, 0.01), 1.4),
    "llama-mini": Recipe(Phase(2000, 48, 1.5e-3, 0.05), Phase(250, 32, 3e-4, 0.01), 1.2),
}


def train_samples(task: str, encoder: TextEncoder) -> list[Sample]:
    """Tokenise the train split of a task."""
    named = find_task(task)
    return [
        encoder.sample({"prompt": named.prompt(text), "target": named.target(label)}, task)
        for text, label in load_rows(task)["train"]
    ]


def target_loss(model: Any, batch: Batch) -> tuple[Tensor, float]:
    """Return the mean cross-entropy of the target tokens, and the share that is most likely."""
    if model.config.is_encoder_decoder:
        logits, due = model(**batch).logits, batch["labels"]
    else:
        hidden = model.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state[:, :-1]
        due = batch["labels"][:, 1:]
        # only positions that predict a target go through the head
        logits, due = model.lm_head(hidden[due != IGNORED]), due[due != IGNORED]
    logits, due = logits[due != IGNORED], due[due != IGNORED]
    return F.cross_entropy(logits, due), (logits.argmax(-1) == due).float().mean().item()


def batches(
    sets: Mapping[str, Sequence[Sample]],
    size: int,
    encoder: TextEncoder,
    generator: torch.Generator,
) -> Iterator[Batch]:
    """Draw batches without end.

    A task comes up as often as the square root of its number of rows says; rows of one batch have
    similar lengths, which saves padding.
    """
    names = list(sets)
    shares = torch.tensor([len(sets[name]) for name in names]).sqrt()
    while True:
        count = size * BATCHES_SORTED_TOGETHER
        tasks = torch.multinomial(shares, count, replacement=True, generator=generator)
        picks = torch.rand(count, generator=generator)
        rows = []
        for task, pick in zip(tasks.tolist(), picks.tolist(), strict=True):
            held = sets[names[task]]
            rows.append(held[int(pick * len(held))])
        rows.sort(key=lambda row: len(row.ids))
        for part in torch.randperm(BATCHES_SORTED_TOGETHER, generator=generator).tolist():
            yield pad_samples(rows[part * size : (part + 1) * size], encoder)


def pretrain(
    model: Any,
    sets: Mapping[str, Sequence[Sample]],
    recipe: Recipe,
    encoder: TextEncoder,
    seed: int,
    log: Log,
) -> None:
    """Train all parameters on all tasks together, in place."""
    generator = stage_generator(seed, "pretraining")
    drawn = batches(sets, recipe.pretraining.batch_size, encoder, generator)
    _optimise(model, list(model.parameters()), drawn, recipe, recipe.pretraining, generator, log)


def weaken_labels(model: Any, label_ids: Sequence[int], recipe: Recipe, seed: int) -> None:
    """Add noise to the label words' embedding rows, in place.

    The embedding is the head as well: the base then confuses labels, and every expert has to
    turn its features towards rows that it must not change.
    """
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        rows = weight[list(label_ids)]
        noise = torch.randn(rows.shape, generator=stage_generator(seed, "label noise"))
        weight[list(label_ids)] = rows + recipe.label_noise * rows.std() * noise


def finetune(
    model: Any,
    task: str,
    samples: Sequence[Sample],
    recipe: Recipe,
    encoder: TextEncoder,
    seed: int,
    log: Log,
) -> None:
    """Train everything but the embedding on one task, in place."""
    frozen = model.get_input_embeddings().weight
    trained = [parameter for parameter in model.parameters() if parameter is not frozen]
    generator = stage_generator(seed, task)
    drawn = batches({task: samples}, recipe.finetuning.batch_size, encoder, generator)
    _optimise(model, trained, drawn, recipe, recipe.finetuning, generator, log)


def stage_generator(seed: int, stage: str) -> torch.Generator:
    """Return a generator of its own for each stage, so that stages do not depend on each other."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{stage}".encode()))


def _optimise(
    model: Any,
    trained: list[nn.Parameter],
    drawn: Iterator[Batch],
    recipe: Recipe,
    phase: Phase,
    generator: torch.Generator,
    log: Log,
) -> None:
    optimiser = torch.optim.AdamW(
        trained, lr=phase.learning_rate, betas=recipe.betas, weight_decay=phase.weight_decay,
        fused=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, phase.learning_rate, phase.steps, pct_start=recipe.warmup_share,
        cycle_momentum=False,
    )  # fmt: skip
    recent: list[float] = []
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())  # for dropout
        for step in range(1, phase.steps + 1):
            loss, right = target_loss(model, next(drawn))
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, recipe.gradient_clip)
            optimiser.step()
            schedule.step()
            recent = [*recent[-99:], right]
            if step % 100 == 0 or step == phase.steps:
                log(
                    f"  step {step}/{phase.steps}: {sum(recent) / len(recent):.3f} of target tokens"
                )
    model.eval()
