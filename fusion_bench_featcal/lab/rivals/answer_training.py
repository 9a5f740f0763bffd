"""Training of a merged language model on answers: those of its experts, or its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_bench_featcal.core.linear import at_least_float32
from fusion_bench_featcal.data.generation import SAMPLING, generated_answers, logits_and_targets
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_samples import Sample, TextEncoder, pad_samples
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.processors import generates_text, is_of_speech
from fusion_bench_featcal.lab.rivals.gradient_training import GradientTraining
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.settings.fields import setting
from fusion_bench_featcal.streams.inputs import to_device


@dataclass(frozen=True)
class AnsweredBatch:
    """Prompts with an expert's answers.

    Attributes:
        inputs: The model's inputs, with the answers as `labels`.
        samples: Number of prompts.
    """

    inputs: Mapping[str, Tensor]
    samples: int

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean cross-entropy of the answers' tokens, 0-dim."""
        logits, labels = logits_and_targets(model, self.inputs)
        return F.cross_entropy(at_least_float32(logits).flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that the trained model answers anew in every update.

    Attributes:
        prompts: The prompts.
        encoder: Their encoder.
        expert: The model that the answers are compared with.
        most: Maximum number of tokens of an answer.
    """

    prompts: Sequence[Sample]
    encoder: TextEncoder
    expert: nn.Module
    most: int

    @property
    def samples(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean reverse KL divergence at the tokens of new answers, 0-dim.

        The whole distributions are compared, not the sampled tokens alone. As usual, no gradient
        flows through the sampling.
        """
        ids = [prompt.ids for prompt in self.prompts]
        answers = generated_answers(model, ids, self.encoder, self.most, SAMPLING)
        pairs = zip(self.prompts, answers, strict=True)
        answered = [self.encoder.answered(prompt, answer, "an answer") for prompt, answer in pairs]
        batch = to_device(pad_samples(answered, self.encoder), device_of(model))
        with torch.no_grad():
            expert_logits, _ = logits_and_targets(self.expert, batch)
        logits, labels = logits_and_targets(model, batch)
        counted = labels != NO_TARGET
        expert_log_probs, log_probs = (
            at_least_float32(values[counted]).log_softmax(-1) for values in (expert_logits, logits)
        )
        return F.kl_div(expert_log_probs, log_probs, log_target=True, reduction="batchmean")


class AnswerTraining(GradientTraining, without=("calibration_targets", "calibration_corruption")):
    """A training of language models and encoder-decoders on answers to the samples' prompts."""

    learning_rate: float = setting(
        3e-4,
        "Adam's step size in the first update; it falls linearly to 0.",
        gt=0,
    )

    def check(self, inputs: MethodInputs) -> None:
        """Refuse models that generate no text, or text of audio data."""
        if not generates_text(inputs.modelpool) or is_of_speech(inputs.modelpool):
            raise CalibrationError(
                f"{self.name} trains only models that answer texts with texts: leave it out"
            )

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """The settings that the method shares with a calibration. Labels are not read."""
        return super().calibration_settings.replace(calibration_targets="generated")


class SeqKD(AnswerTraining, option="featcal_baselines/seqkd", source="arXiv 1606.07947"):
    """Sequence-level distillation: cross-entropy on the experts' answers.

    Each expert answers its task's prompts once, by greedy search. All parameters are trained, with
    the same weight for each task. It needs several times the model's memory.
    """

    def training_batches(
        self, student: nn.Module, task: str, samples: TextBatches, inputs: MethodInputs
    ) -> list[AnsweredBatch]:
        """Let a task's expert answer its prompts."""
        batches = [to_device(batch, inputs.fabric.device) for batch in samples.checked(student)]
        return [AnsweredBatch(batch, len(batch["input_ids"])) for batch in batches]


class MOPD(AnswerTraining, option="featcal_baselines/mopd", source="arXiv 2606.30406"):
    """Multi-teacher on-policy distillation: the model's own answers, compared with the expert's.

    In every update the model answers a batch of each task's prompts, sampled at temperature 1. The
    loss is the reverse KL divergence, from the model to the task's expert, at the tokens of these
    answers. All parameters are trained, with the same weight for each task. All experts are in
    memory, beside several times the model's size.
    """

    def train(self, *args: Any, **options: Any) -> dict[str, list[tuple[int, float]]]:
        """Train with sampled answers that depend on the seed alone."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return super().train(*args, **options)

    def training_batches(
        self, student: nn.Module, task: str, samples: TextBatches, inputs: MethodInputs
    ) -> list[PromptBatch]:
        """Return a task's prompts with its expert."""
        expert = self.load_expert(student, task, inputs)
        prompts, size = samples.prompts, samples.batch_size
        return [
            PromptBatch(prompts[n : n + size], samples.encoder, expert, self.generated_tokens)
            for n in range(0, len(prompts), size)
        ]
